"""Streaming text: never half a character, never half a stop string, and in the end all of it."""

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from mini_engine.detokenizer import Detokenizer, scan_stop
from mini_engine.models.weights import load_tokenizer, open_checkpoint


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer(open_checkpoint("smollm2-135m-instruct"))


@settings(deadline=None)
@given(text=st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\ufffd"), max_size=30))
def test_pieces_add_up_to_the_text(tokenizer, text):
    detokenizer = Detokenizer(tokenizer, ())
    token_ids = tokenizer.encode(text, add_special_tokens=False)
    assume(tokenizer.decode(token_ids, skip_special_tokens=True) == text)  # it has no token for a few rare bytes
    pieces = [detokenizer.push(token) for token in token_ids] + [detokenizer.finish()]
    assert "".join(pieces) == text == detokenizer.text
    assert not any("\ufffd" in piece for piece in pieces)


def test_a_character_of_several_tokens_comes_whole(tokenizer):
    token_ids = tokenizer.encode("🦩", add_special_tokens=False)
    assert len(token_ids) > 1
    detokenizer = Detokenizer(tokenizer, ())
    assert [detokenizer.push(token) for token in token_ids] == [""] * (len(token_ids) - 1) + ["🦩"]


@given(st.text("abc", max_size=12), st.lists(st.text("abc", min_size=1, max_size=4), max_size=3), st.data())
def test_stop_strings_are_found_however_the_text_is_cut(text, stop, data):
    first = min(((at + len(s), at) for s in stop if (at := text.find(s)) >= 0), default=(0, None))[1]
    held, shown, stopped = "", "", False
    rest = text
    while rest and not stopped:
        cut = data.draw(st.integers(1, len(rest)))
        safe, held, stopped = scan_stop(held + rest[:cut], stop)
        shown, rest = shown + safe, rest[cut:]
        assert text.startswith(shown)
        assert first is None or len(shown) <= first
    assert stopped == (first is not None)
    assert shown + held == (text if first is None else text[:first])
    assert first is None or len(shown) == first


def test_the_stop_string_that_is_complete_first_counts():
    assert scan_stop("abcd", ["abcd", "bc"]) == ("a", "", True)  # as if the letters came one by one
    assert scan_stop("abc", ["bc", "abc"]) == ("", "", True)


def test_a_stop_string_that_straddles_tokens_is_never_shown(tokenizer):
    token_ids = tokenizer.encode("one two END three", add_special_tokens=False)
    detokenizer = Detokenizer(tokenizer, ("two END",))
    shown = []
    for token in token_ids:
        shown.append(detokenizer.push(token))
        if detokenizer.stopped:
            break
    assert "".join(shown) == detokenizer.text == "one "


def test_what_only_looked_like_a_stop_string_comes_at_the_end(tokenizer):
    detokenizer = Detokenizer(tokenizer, ("two END",))
    pieces = [detokenizer.push(t) for t in tokenizer.encode("one two", add_special_tokens=False)]
    assert "".join(pieces) == "one "
    assert detokenizer.finish() == "two"
    assert detokenizer.text == "one two"
