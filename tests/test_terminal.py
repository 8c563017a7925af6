"""Nothing printed controls the terminal, and no character ends the program."""

import io
import sys
import unicodedata
from contextlib import redirect_stderr, redirect_stdout

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from mini_engine.terminal import make_console, printable, show

BIDI = {"LRE", "RLE", "LRO", "RLO", "PDF", "LRI", "RLI", "FSI", "PDI"}
CONTROLS = st.characters(categories=["Cc", "Cs"]) | st.sampled_from("\u202a\u202b\u202c\u202d\u202e\u2066\u2069")
TEXTS = st.text(st.characters() | CONTROLS)


def controls(character: str) -> bool:
    """Whether a terminal may obey the character instead of showing it, by Unicode's own tables."""
    return character not in "\n\t" and (
        unicodedata.category(character) in ("Cc", "Cs") or unicodedata.bidirectional(character) in BIDI
    )


@given(TEXTS)
def test_no_control_survives(text):
    assert not any(map(controls, printable(text)))


def test_every_character_is_kept_or_escaped():
    everything = "".join(map(chr, range(sys.maxunicode + 1)))
    escaped = (c.encode("unicode_escape").decode() if controls(c) else c for c in everything)
    assert printable(everything) == "".join(escaped)


@given(TEXTS, TEXTS)
def test_text_may_come_in_pieces(first, second):
    assert printable(first) + printable(second) == printable(first + second)


@given(TEXTS, TEXTS)
def test_what_is_shown_in_pieces_is_the_text_itself(first, second):
    """With its tabs, which rich would turn into spaces."""
    for text in (first, second, "all:\n\tgcc a.c\n"):
        file = io.StringIO()
        for piece in (text[:5], text[5:]):
            show(Console(file=file, width=20), piece, end="")
        assert file.getvalue() == printable(text)


def test_a_title_and_a_cleared_screen_are_shown_and_not_obeyed():
    assert printable("a\x1b]0;PWNED\x1b\\\x1b[2J\x9b2J\tb\n") == "a\\x1b]0;PWNED\\x1b\\\\x1b[2J\\x9b2J\tb\n"
    assert printable("évil\u202egnp.exe \udcff") == "évil\\u202egnp.exe \\udcff"


@pytest.fixture(params=["cp1252", "latin-1", "ascii", "utf-8"])
def stream(request):
    """A standard output of that encoding which, as Python's own, refuses what it cannot write."""
    return strict(request.param)


def strict(encoding: str) -> io.TextIOWrapper:
    return io.TextIOWrapper(io.BytesIO(), encoding=encoding, errors="strict", write_through=True)


def shown(stream: io.TextIOWrapper) -> str:
    return stream.buffer.getvalue().decode(stream.encoding)


def test_characters_outside_the_encoding_are_replaced(stream):
    with redirect_stdout(stream):
        make_console().print("été 你好 \udcff", highlight=False)
    assert shown(stream) == "été 你好 \udcff\n".encode(stream.encoding, "replace").decode(stream.encoding)


def test_a_plain_console_fails_there():
    """Without `make_console` the test above fails."""
    with redirect_stdout(strict("cp1252")), pytest.raises(UnicodeEncodeError):
        Console().print("你好")


def test_the_spinner_of_the_command_line_is_ascii(stream, monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")  # for rich, the stream is a terminal
    monkeypatch.setenv("TERM", "xterm")
    with redirect_stdout(stream), make_console().status("loading", spinner="line"):
        pass
    text = shown(stream).replace("\x1b[?25", "")  # shows and hides the cursor
    assert "loading" in text and "?" not in text


def test_standard_error_is_another_stream():
    out, err = strict("ascii"), strict("ascii")
    with redirect_stdout(out), redirect_stderr(err):
        make_console(stderr=True).print("é")
    assert (shown(out), shown(err), out.errors) == ("", "?\n", "strict")


def test_a_closed_standard_output_is_no_error():
    with redirect_stdout(None):
        make_console()
