"""Streaming text: never half a character, never half a stop string, and in the end all of it."""

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import bytes_to_unicode

from mini_engine.detokenizer import Detokenizer, scan_stop
from mini_engine.loading.checkpoint import load_tokenizer, open_checkpoint
from mini_engine.sampling_params import SamplingParams
from mini_engine.sequence import Sequence


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


@pytest.mark.parametrize("stray", [b"\x80", b"\xff\xff", b"\xf0\x9f", b"\x80\x80\x80\x80\x80"])
@pytest.mark.parametrize("then", ["😀", "€a", "é 😀"])
def test_stray_bytes_take_no_character_with_them(stray, then):
    names = bytes_to_unicode()
    byte_level = Tokenizer(models.BPE(vocab={name: byte for byte, name in names.items()}, merges=[]))
    byte_level.decoder = decoders.ByteLevel()
    every_byte = PreTrainedTokenizerFast(tokenizer_object=byte_level)
    written = stray + then.encode()
    token_ids = list(written)
    detokenizer = Detokenizer(every_byte, ())
    pieces = [detokenizer.push(token) for token in token_ids] + [detokenizer.finish()]
    assert "".join(pieces) == detokenizer.text == every_byte.decode(token_ids) == written.decode(errors="replace")


def test_a_word_after_a_special_token_keeps_its_space():
    words = {"<unk>": 0, "<tool>": 1, "▁Hello": 2, "▁world": 3}
    spaced = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    spaced.decoder = decoders.Metaspace()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=spaced, unk_token="<unk>", additional_special_tokens=["<tool>"]
    )
    for token_ids in ([2, 3], [2, 1, 3], [2, 1, 1, 3], [1, 2, 3], [2, 0, 3]):
        detokenizer = Detokenizer(tokenizer, ())
        pieces = [detokenizer.push(token) for token in token_ids] + [detokenizer.finish()]
        assert "".join(pieces) == detokenizer.text == "Hello world"


@pytest.mark.parametrize("end", ["stop", "length"])
def test_what_is_held_back_comes_with_the_last_token(tokenizer, end):
    token_ids = tokenizer.encode("one two", add_special_tokens=False)
    limit = len(token_ids) if end == "length" else 9
    sequence = Sequence(
        [5], SamplingParams(max_tokens=limit), seed=0, eos_token_ids=(2,), max_model_len=99,
        detokenizer=Detokenizer(tokenizer, ("two END",)),
    )  # fmt: skip
    pieces = [sequence.append(token) for token in (token_ids if end == "length" else [*token_ids, 2])]
    assert "".join(pieces) == sequence.text == "one two"
    assert sequence.finish_reason == end
