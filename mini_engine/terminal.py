"""Safe output: no text can control the terminal, and every character can be printed in its encoding."""

import io
import sys

from rich.console import Console
from rich.segment import Segment, Segments
from rich.text import Text

from mini_engine.errors import RequestError

# C0 and C1 controls except newline and tab; bidirectional embeddings, overrides and isolates, which reorder the text on
# screen; and surrogates, which cannot be encoded.
_UNSAFE = (
    *(set(range(0x20)) - {0x09, 0x0A}),
    *range(0x7F, 0xA0),
    *range(0x202A, 0x202F),
    *range(0x2066, 0x206A),
    *range(0xD800, 0xE000),
)
_ESCAPES = {code: ascii(chr(code))[1:-1] for code in _UNSAFE}


def printable(text: str) -> str:
    r"""Return the text with every character that could control a terminal written as an escape such as `\x1b`.

    An escape sequence has no effect without its first character. Characters are converted independently, so streamed
    text can be converted piece by piece.
    """
    return text.translate(_ESCAPES)


def show(console: Console, text: str, style: str = "", end: str = "\n") -> None:
    """Print untrusted text without markup, added line breaks or control characters."""
    # As a segment, because a Text would turn tabs into spaces.
    segment = Segment(printable(text) + end, console.get_style(style) if style else None)
    console.print(Segments([segment]), soft_wrap=True)


def make_console(stderr: bool = False) -> Console:
    """Return a console on standard output or standard error that can print any character.

    Call it when the program starts: it makes the stream write "?" for characters that its encoding cannot represent.
    """
    stream = sys.stderr if stderr else sys.stdout
    if isinstance(stream, io.TextIOWrapper):  # not if it is closed, or a notebook's stream, which is UTF-8
        stream.reconfigure(errors="replace")
    return Console(stderr=stderr)


def print_error(error: Exception | str) -> None:
    """Print a message on standard error."""
    message = Text.assemble(("error: ", "bold red"), printable(str(error)))
    make_console(stderr=True).print(message, soft_wrap=True)


def read_line(console: Console, prompt: str) -> str:
    """Read a line of standard input, without the spaces around it.

    Returns:
        The line; empty at the end of the input.

    Raises:
        RequestError: if the input cannot be read.
    """
    console.print(prompt, end="")
    try:
        return console.input().strip()
    except EOFError:
        return ""
    except (OSError, RuntimeError, ValueError) as error:  # a folder, no standard input, bytes that are not text
        console.print()
        raise RequestError(f"cannot read standard input: {error}; type or pipe UTF-8 text") from error
