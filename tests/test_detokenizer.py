"""Streaming text: never half a character or stop string, all of it in the end, and bounded work per token."""

from __future__ import annotations

from copy import copy
from itertools import count
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models
from transformers.convert_slow_tokenizer import bytes_to_unicode

from mini_engine import detokenizer as module
from mini_engine.detokenizer import MAX_PENDING, Detokenizer, context_of, decode_after, scan_stop, special_ids
from mini_engine.loading.checkpoint import load_tokenizer, open_checkpoint


@pytest.fixture(scope="module")
def embedded():
    return load_tokenizer(open_checkpoint("smollm2-135m-instruct"))


@pytest.fixture(scope="module")
def backend(embedded) -> Tokenizer:
    return embedded.backend_tokenizer


@pytest.fixture(scope="module")
def halves(backend) -> list[int]:
    """The tokens of the embedded tokenizer that hold a part of a character."""
    return [i for i in range(backend.get_vocab_size()) if "\ufffd" in backend.decode([i])]


def words(decoder, *tokens: str, special: tuple[str, ...] = ()) -> Tokenizer:
    """A tokenizer of a few words."""
    tokenizer = Tokenizer(models.WordLevel({token: i for i, token in enumerate(tokens)}, unk_token=tokens[0]))
    tokenizer.decoder = decoder
    tokenizer.add_special_tokens([*special])
    return tokenizer


def every_byte() -> Tokenizer:
    """A tokenizer whose token ids are bytes."""
    tokenizer = Tokenizer(models.BPE(vocab={name: byte for byte, name in bytes_to_unicode().items()}, merges=[]))
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def pieces_of(tokenizer: Tokenizer, token_ids: list[int], prompt: tuple[int, ...] = (), **options: Any) -> list[str]:
    """The text that each token shows, and finally the text that had been held back."""
    detokenizer = Detokenizer(tokenizer, prompt, hidden=special_ids(tokenizer), **options)
    pieces = []
    for token in token_ids:
        pieces.append(detokenizer.push(token))
        if detokenizer.stopped:
            break
    else:
        pieces.append(detokenizer.finish())
    assert "".join(pieces) == detokenizer.text
    return pieces


# --- all of the text -------------------------------------------------------------------------------------------------


@settings(max_examples=300)
@given(data=st.data())
def test_pieces_add_up_to_the_text_of_any_tokens(backend, halves, data):
    """Special tokens, parts of characters that never end, and everything else, in any order."""
    special = sorted(special_ids(backend))
    kinds = [st.sampled_from(halves), st.sampled_from(special), st.integers(0, backend.get_vocab_size() - 1)]
    runs = data.draw(st.lists(st.one_of([st.lists(kind, max_size=12) for kind in kinds]), max_size=6))
    token_ids = [token for run in runs for token in run]
    assert "".join(pieces_of(backend, token_ids)) == backend.decode(token_ids)


@settings(max_examples=300)
@given(st.lists(st.sampled_from([b"\x80", b"\xff", b"\xe4\xbd", b"\xf0\x9f", b"\xf0\x9f\x98\x80", b"\xc3\xa9", b"a"])))
def test_pieces_add_up_to_the_text_of_any_bytes(written):
    """Bytes that end no character remove none of the characters around them, however many bytes there are."""
    text = b"".join(written)
    assert "".join(pieces_of(every_byte(), list(text))) == text.decode(errors="replace")


@given(text=st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\ufffd"), max_size=30))
def test_valid_text_comes_without_a_replacement_character(backend, text):
    token_ids = backend.encode(text, add_special_tokens=False).ids
    assume(backend.decode(token_ids) == text)  # it has no token for a few rare bytes
    pieces = pieces_of(backend, token_ids)
    assert "".join(pieces) == text
    assert not any("\ufffd" in piece for piece in pieces)


def test_a_character_of_several_tokens_comes_whole(backend):
    token_ids = backend.encode("🦩", add_special_tokens=False).ids
    assert len(token_ids) > 1
    assert pieces_of(backend, token_ids) == [""] * (len(token_ids) - 1) + ["🦩", ""]


@pytest.mark.parametrize(
    "decoder",
    [
        decoders.Metaspace(),
        decoders.Sequence([decoders.Replace("▁", " "), decoders.Fuse(), decoders.Strip(" ", 1, 0)]),
    ],
    ids=["Metaspace", "Llama 2"],
)
@pytest.mark.parametrize("between", [[], [1], [1, 1], [1] * 20, [4], [4] * 20])
def test_a_word_keeps_its_space_whatever_comes_before_it(decoder, between):
    """Special tokens and tokens without text do not make it the first word of a text, which has no space."""
    tokenizer = words(decoder, "<unk>", "<tool>", "▁Hello", "▁world", "", special=("<unk>", "<tool>"))
    for token_ids in ([2, *between, 3], [*between, 2, 3], [2, 3, *between]):
        text = "".join(pieces_of(tokenizer, token_ids))
        assert text == tokenizer.decode(token_ids) and text.strip() == "Hello world"


def test_text_that_was_shown_is_not_taken_back():
    """Llama 2's decoder replaces a whole run of bytes if one of them is wrong, after its characters were shown."""
    bytes_of = [f"<0x{byte:02X}>" for byte in "你".encode() + b"\x80"]
    decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    tokenizer = words(decoder, "<unk>", *bytes_of, "x", special=("<unk>",))
    assert tokenizer.decode([1, 2, 3, 4, 5]) == "\ufffd" * 4 + "x"
    assert pieces_of(tokenizer, [1, 2, 3, 4, 5]) == ["", "", "你", "", "\ufffdx", ""]


@pytest.mark.parametrize(
    "decoder",
    [
        decoders.Metaspace(),
        decoders.Sequence([decoders.Replace("▁", " "), decoders.Fuse(), decoders.Strip(" ", 1, 0)]),
    ],
    ids=["Metaspace", "Llama 2"],
)
def test_an_output_that_begins_a_word_begins_with_its_space(decoder):
    """As in transformers' decoded sequence, where the output follows the prompt. And a word that goes on has none."""
    tokenizer = words(decoder, "<s>", "▁The", "▁sky", "▁is", "land", special=("<s>",))
    for prompt, output, text in [([0, 1, 2], [3], " is"), ([0, 1, 3], [4, 3], "land is"), ([0], [1, 2], "The sky")]:
        assert tokenizer.decode(prompt + output) == tokenizer.decode(prompt) + text
        assert "".join(pieces_of(tokenizer, output, tuple(prompt))) == text
        assert decode_after(tokenizer, context_of(tokenizer, prompt), output) == text


@settings(max_examples=100)
@given(st.lists(st.sampled_from(["é", "a", "🦩", " b"]), max_size=4), st.integers(0, 3), st.data())
def test_a_prompt_may_end_in_half_a_character(written, cut, data):
    """Its rest is not part of the output's text."""
    tokenizer, prompt = every_byte(), "".join(["a", *written]).encode()
    prompt, output = (
        list(prompt[: max(1, len(prompt) - cut)]),
        data.draw(st.lists(st.sampled_from(list("aé".encode())))),
    )
    text = "".join(pieces_of(tokenizer, output, tuple(prompt)))
    assert (
        text == bytes(output).decode(errors="replace") == decode_after(tokenizer, context_of(tokenizer, prompt), output)
    )


def test_special_tokens_are_shown_on_request(embedded, backend):
    token_ids = embedded.encode("a<|im_end|>b")
    for hidden, text in ((special_ids(backend), "ab"), (frozenset(), "a<|im_end|>b")):
        detokenizer = Detokenizer(backend, hidden=hidden)
        assert "".join([*map(detokenizer.push, token_ids), detokenizer.finish()]) == text
        assert decode_after(backend, [], token_ids, skip_special_tokens=bool(hidden)) == text


# --- bounded work ----------------------------------------------------------------------------------------------------


def test_what_never_becomes_text_is_not_decoded_again_for_ever(embedded, backend):
    """Runs of special tokens, and of bytes that never become a character, cost no more than text, and are shown."""
    byte, replacement = embedded.convert_tokens_to_ids("Ģ"), embedded.encode("\ufffd", add_special_tokens=False)
    for run in ([embedded.eos_token_id], [byte], replacement, [byte, embedded.eos_token_id]):
        detokenizer, unseen = Detokenizer(backend, hidden=special_ids(backend)), 0
        for token in run * 200:
            unseen = 0 if detokenizer.push(token) else unseen + 1
            assert len(detokenizer._pending) < MAX_PENDING
            assert unseen < 2 * MAX_PENDING or run == [embedded.eos_token_id]
        detokenizer.finish()
        assert detokenizer.text == backend.decode(run * 200) and detokenizer.num_tokens == 200 * len(run)


def test_a_token_counts_exactly_if_its_text_is_kept(monkeypatch):
    """Ctrl-C at each call of the library in turn, before and after it has worked: the token can be pushed again."""
    when, calls, after = -1, count(), False

    class Interrupted:
        def __init__(self, stream: Any) -> None:
            self._stream = stream

        def __copy__(self) -> Interrupted:
            return Interrupted(copy(self._stream))

        def step(self, *arguments: Any) -> str | None:
            is_now = next(calls) == when
            if is_now and not after:
                raise KeyboardInterrupt
            text = self._stream.step(*arguments)
            if is_now:
                raise KeyboardInterrupt
            return text

    original = module.DecodeStream
    monkeypatch.setattr(module, "DecodeStream", lambda **options: Interrupted(original(**options)))
    tokenizer, tokens = every_byte(), [*"é".encode(), *b"\x80" * 70, *"😀 END".encode()]
    for after in (False, True):  # noqa: B007
        for when in range(1000):  # noqa: B007
            calls, interrupts = count(), 0
            detokenizer = Detokenizer(tokenizer, stop=("END",))
            while detokenizer.num_tokens < len(tokens) and not detokenizer.stopped:
                try:
                    detokenizer.push(tokens[detokenizer.num_tokens])
                except KeyboardInterrupt:
                    interrupts += 1
            assert detokenizer.stopped and detokenizer.text == "é" + "\ufffd" * 70 + "😀 "
            if not interrupts:
                break
        assert when > len(tokens) - 5


# --- stop strings ----------------------------------------------------------------------------------------------------


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


def test_a_stop_string_that_straddles_tokens_is_never_shown(backend):
    token_ids = backend.encode("one two END three", add_special_tokens=False).ids
    pieces = pieces_of(backend, token_ids, stop=("two END",))
    assert "".join(pieces) == "one " and len(pieces) < len(token_ids)


def test_a_stop_string_is_shown_on_request(backend):
    token_ids = backend.encode("one two END three", add_special_tokens=False).ids
    assert "".join(pieces_of(backend, token_ids, stop=("two END",), include_stop=True)) == "one two END"
    assert "".join(pieces_of(every_byte(), [*b"xabcd"], stop=("bcd", "abc"), include_stop=True)) == "xabc"


def test_what_only_looked_like_a_stop_string_comes_at_the_end(backend):
    token_ids = backend.encode("one two", add_special_tokens=False).ids
    *pieces, last = pieces_of(backend, token_ids, stop=("two END",))
    assert "".join(pieces) == "one " and last == "two"


def test_a_stop_string_may_be_found_in_what_was_held_back():
    """It is known only at the end that a byte is not part of a character."""
    assert "".join(pieces_of(every_byte(), [*b"ab\xc3"], stop=("b\ufffd",))) == "a"
