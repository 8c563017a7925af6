"""Text in, text out on tiny models: stop strings, failures, interrupts, several streams and several threads."""

from __future__ import annotations

import gc
import sys
import threading
import time
import weakref
from collections import Counter, defaultdict, deque
from collections.abc import Generator, Iterable
from dataclasses import replace
from functools import cache
from itertools import chain, islice, product
from types import FrameType
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.decoders import DecodeStream
from tokenizers.models import BPE
from transformers import ByT5Tokenizer, PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import bytes_to_unicode

from mini_engine import detokenizer, text_request
from mini_engine import llm as llm_module
from mini_engine.detokenizer import REPLACEMENT, Detokenizer, special_ids
from mini_engine.engine import LLMEngine
from mini_engine.errors import ConfigError, RequestError
from mini_engine.executor import LocalExecutor
from mini_engine.llm import TextEngine
from mini_engine.observe.trace import Trace
from mini_engine.observe.watch import Watch
from mini_engine.outputs import CompletionOutput, Piece, RequestOutput
from mini_engine.parts import Parts
from mini_engine.request import Running
from mini_engine.sampling_params import SamplingParams
from mini_engine.scheduler import Scheduler
from mini_engine.text_request import TextRequest
from tests.helpers import EOS, GREEDY, alone, check_nothing_leaked, double_model, make_engine, serve

PROMPTS = [[5, 9, 33], [7], [1, 60, 22, 18, 4, 4, 31, 8, 50], [12, 13]]
SAMPLED = SamplingParams(temperature=1.0, max_tokens=12)
DEPTHS = pytest.mark.parametrize("depth", [0, 1])


def letters() -> PreTrainedTokenizerFast:
    """Sixty-one tokens: letters, parts of characters, whole ones and bytes that belong to none."""
    parts = [b"\xc3", b"\xa9", b"a\xc3", b"\xa9b", b"\xf0\x9f", b"\x98\x80", b"\xf0\x9f\x98", b"\x80", b"\xff", b"ab"]
    parts += ["é".encode(), "😀".encode(), b" ", b"\n"]
    names = bytes_to_unicode()
    tokens = ["<unk>", "<pad>", "<eos>", *("".join(names[byte] for byte in part) for part in parts)]
    tokens += [names[byte] for byte in range(ord("0"), ord("0") + 61 - len(tokens))]
    tokenizer = Tokenizer(BPE({token: i for i, token in enumerate(tokens)}, [], unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>", pad_token="<pad>", eos_token="<eos>")


LETTERS = letters()


def front_end(tokenizer: PreTrainedTokenizerFast = LETTERS, **options: Any) -> TextEngine:
    options = {"num_pages": 24, "page_size": 4, "max_batch_size": 3} | options
    return TextEngine(make_engine(double_model("qwen3"), **options), tokenizer, SamplingParams())


@cache
def free(prompt: tuple[int, ...], seed: int | None, temperature: float) -> list[int]:
    """The tokens of a request alone; requests that end earlier get the first of them."""
    params = SamplingParams(temperature=temperature, seed=seed, max_tokens=20, ignore_eos=True)
    return alone(double_model("qwen3"), list(prompt), params)


def expected(prompt: list[int], params: SamplingParams) -> tuple[list[int], str, str]:
    """Tokens, text and finish reason of a request alone, token by token."""
    tokens = free(tuple(prompt), params.seed, params.temperature)[: params.max_tokens]
    backend = LETTERS.backend_tokenizer
    detokenizer = Detokenizer(backend, prompt, hidden=special_ids(backend), stop=params.stop)
    ends = {*params.stop_token_ids, *(() if params.ignore_eos else (EOS,))}
    for count, token in enumerate(tokens, 1):
        if token not in ends:
            detokenizer.push(token)
        if token in ends or detokenizer.stopped:
            tokens = tokens[:count]
            break
    if not detokenizer.stopped:
        detokenizer.finish()
    return tokens, detokenizer.text, "stop" if detokenizer.stopped or tokens[-1] in ends else "length"


def result(output: RequestOutput) -> tuple[list[int], str, str]:
    if output.error:
        raise output.error
    return output.token_ids, output.text, output.finish_reason


def collect(pieces: Iterable[Piece]) -> dict[int, RequestOutput]:
    """The outputs of a stream, whose pieces must add up to them."""
    texts: dict[int, str] = defaultdict(str)
    counts: Counter[int] = Counter()
    outputs = {}
    for piece in pieces:
        assert piece.index not in outputs, "a piece after the last one"
        texts[piece.index] += piece.text
        counts[piece.index] += piece.num_tokens
        if piece.output:
            outputs[piece.index] = piece.output
            assert texts[piece.index] == piece.output.text and counts[piece.index] == len(piece.output.token_ids)
    return outputs


def check_idle(llm: TextEngine) -> None:
    """Nothing runs, and nothing of a finished request is kept."""
    llm.engine.step()
    assert not llm.engine.has_unfinished and not llm._texts
    check_nothing_leaked(llm.engine)


def limit_steps(llm: TextEngine, most: int = 3000) -> None:
    """Turn a loop without end into a failure."""
    step, steps = llm.engine.step, iter(range(most))

    def limited() -> Any:
        assert next(steps, None) is not None, "stuck"
        return step()

    llm.engine.step = limited  # type: ignore[method-assign]


@st.composite
def wishes(draw: st.DrawFn) -> SamplingParams:
    """Random parameters, including stop strings that occur often."""
    return SamplingParams(
        temperature=1.0, seed=draw(st.integers(0, 5)), max_tokens=draw(st.integers(1, 12)),
        ignore_eos=draw(st.booleans()), stop_token_ids=draw(st.lists(st.integers(0, 60), max_size=6)),
        stop=draw(st.lists(st.sampled_from(["é", "A", "B", "CD", "\ufffd", "ab", "H\ufffd", "not there"]), max_size=4)),
    )  # fmt: skip


# --- the text --------------------------------------------------------------------------------------------------------


@settings(max_examples=30)
@given(st.data(), st.integers(0, 1), st.booleans())
def test_text_is_the_same_read_at_the_end_or_step_by_step(data, depth, tight):
    """And the same as alone: tokens, text and reason; with stop strings, half characters and end tokens."""
    prompts = data.draw(st.lists(st.sampled_from(PROMPTS), min_size=1, max_size=4))
    params = [data.draw(wishes()) for _ in prompts]
    llm = front_end(pipeline_depth=depth, **{"num_pages": 6, "max_num_batched_tokens": 5} if tight else {})
    want = [expected(prompt, own) for prompt, own in zip(prompts, params, strict=True)]
    assert [result(output) for output in llm.generate(prompts, params)] == want
    streamed = collect(llm.stream_batch(prompts, params))
    assert [result(streamed[i]) for i in range(len(prompts))] == want
    check_idle(llm)


def test_the_tiny_model_writes_what_these_tests_are_about():
    """Otherwise they could not fail: half characters, characters of several tokens, stop strings across tokens."""
    texts = [LETTERS.decode(free(tuple(prompt), seed, 1.0)) for prompt in PROMPTS for seed in range(6)]
    assert any("\ufffd" in text for text in texts) and any("é" in text or "😀" in text for text in texts)


@DEPTHS
@pytest.mark.parametrize("streamed", [False, True])
def test_a_stop_string_ends_the_request_and_drops_the_late_token(depth, streamed):
    params = replace(SAMPLED, max_tokens=20, seed=0, ignore_eos=True)
    tokens, text, _ = expected(PROMPTS[0], params)
    stop = "0IV"  # three tokens
    llm = front_end(pipeline_depth=depth)
    stopping = replace(params, stop=stop)
    outputs = collect(llm.stream_batch([PROMPTS[0]], stopping)) if streamed else llm.generate([PROMPTS[0]], stopping)
    end = next(n for n in range(len(tokens)) if stop in LETTERS.decode(tokens[:n]))
    completion = CompletionOutput(0, text[: text.index(stop)], tokens[:end], "stop")
    assert outputs[0] == RequestOutput(PROMPTS[0], PROMPTS[0], [completion])
    # At a depth of 1, the step after it was launched before the host read the text.
    assert llm.engine.metrics.computed_tokens == len(PROMPTS[0]) + end - 1 + depth
    assert not llm.engine.has_unfinished
    check_nothing_leaked(llm.engine)


@pytest.mark.parametrize("streamed", [False, True])
def test_a_stop_string_within_the_fewest_tokens_does_not_end_the_output(streamed):
    """As in vLLM: neither a stop string nor a stop token counts before `min_tokens` are there."""
    llm, prompt = front_end(), PROMPTS[0]
    params = replace(GREEDY, max_tokens=12, ignore_eos=True)
    tokens = alone(double_model("qwen3"), prompt, params)
    for i, token in enumerate(tokens):
        if token > 12:  # a whole character
            own = replace(params, stop=[LETTERS.decode([token])], min_tokens=i + 1)
            outputs = collect(llm.stream_batch([prompt], own)) if streamed else llm.generate([prompt], own)
            end = tokens.index(token, i + 1) + 1 if token in tokens[i + 1 :] else None
            assert outputs[0].token_ids == tokens[:end]
    check_idle(llm)


@pytest.mark.parametrize("streamed", [False, True])
def test_without_detokenization_an_output_has_no_text(streamed):
    llm, params = front_end(), replace(SAMPLED, seed=1, detokenize=False)
    outputs = collect(llm.stream_batch(PROMPTS, params)) if streamed else llm.generate(PROMPTS, params)
    assert [outputs[i].text for i in range(4)] == [""] * 4
    whole = llm.generate(PROMPTS, replace(params, detokenize=True))
    assert [outputs[i].token_ids for i in range(4)] == [output.token_ids for output in whole]


def test_stop_strings_are_found_by_the_part():
    asked = []

    def at_the_second_piece(text, stop):
        asked.append((text, stop))
        return text, "", len(asked) == 2

    engine = make_engine(double_model("qwen3"), replace(Parts(), scan_stop=at_the_second_piece), num_pages=24)
    params = replace(SAMPLED, seed=0, ignore_eos=True, stop="never")
    (output,) = TextEngine(engine, LETTERS, SamplingParams()).generate([PROMPTS[0]], params)
    assert output.finish_reason == "stop" and output.text == "".join(text for text, _ in asked)
    assert len(asked) == 2 and {stop for _, stop in asked} == {("never",)}


@DEPTHS
def test_a_stop_string_in_the_last_token_is_the_reason(depth):
    params = replace(SAMPLED, max_tokens=9, seed=0, ignore_eos=True)
    tokens, text, _ = expected(PROMPTS[0], params)
    stop = text[-1]
    assert stop not in text[:-1]
    output = front_end(pipeline_depth=depth).generate(PROMPTS[0], replace(params, stop=stop))[0]
    assert result(output) == (tokens, text[:-1], "stop")


def test_one_prompt_or_several():
    llm = front_end()
    assert llm.generate([]) == [] and list(llm.stream_batch([])) == []
    one = llm.generate([5, 9, 33], GREEDY)
    assert one == llm.generate([[5, 9, 33]], GREEDY) and one[0].prompt == [5, 9, 33]
    text = "".join(llm.stream("AB é", GREEDY))
    assert text == llm.generate("AB é", GREEDY)[0].text and llm.tokens_of("AB é") == LETTERS.encode("AB é")
    check_idle(llm)


def test_prompts_may_be_those_of_vllm():
    """Dictionaries, `sampling_params=`, `prompt_token_ids=`, `use_tqdm=`, and what an output holds."""
    llm = front_end()
    want = llm.generate([[5, 9, 33], "AB"], GREEDY)
    assert llm.generate([{"prompt_token_ids": [5, 9, 33]}, {"prompt": "AB"}], sampling_params=GREEDY) == want
    assert llm.generate({"prompt": "AB"}, GREEDY, use_tqdm=True) == want[1:]
    assert llm.generate(prompt_token_ids=[[5, 9, 33]], sampling_params=GREEDY) == want[:1]
    assert "".join(llm.stream({"prompt": "AB"}, sampling_params=GREEDY)) == want[1].outputs[0].text
    (completion,) = want[0].outputs
    assert want[0].prompt_token_ids == [5, 9, 33] and want[0].finished and completion.index == 0
    assert (want[0].token_ids, want[0].text, want[0].finish_reason) == (
        completion.token_ids, completion.text, completion.finish_reason
    )  # fmt: skip
    assert llm.get_tokenizer() is LETTERS
    for prompt in ({}, {"prompt": "A", "prompt_token_ids": [5]}, {"multi_modal_data": 1}, {"prompt": 5}):
        with pytest.raises(RequestError, match="prompt"):
            llm.generate([prompt], GREEDY)
    check_idle(llm)


@DEPTHS
@pytest.mark.parametrize("stop", [(), ("A", "é")])
def test_n_outputs_are_those_of_n_requests_with_seeds_of_their_own(depth, stop):
    llm = front_end(pipeline_depth=depth, enable_prefix_caching=True)
    params = replace(SAMPLED, n=3, seed=2, stop=stop)
    want = [[expected(prompt, replace(SAMPLED, seed=2 + i, stop=stop)) for i in range(3)] for prompt in PROMPTS]
    outputs = llm.generate(PROMPTS, params)
    assert [[(o.token_ids, o.text, o.finish_reason) for o in output.outputs] for output in outputs] == want
    assert [[o.index for o in output.outputs] for output in outputs] == [[0, 1, 2]] * 4
    texts: dict[tuple[int, int], str] = defaultdict(str)
    for piece in llm.stream_batch(PROMPTS, params):
        texts[piece.index, piece.completion] += piece.text
        if piece.output:
            assert piece.output == outputs[piece.index]
    assert texts == {(i, j): text for i, own in enumerate(want) for j, (_, text, _) in enumerate(own)}
    with pytest.raises(RequestError, match="stream_batch"):
        list(llm.stream(PROMPTS[0], params))
    largest = 2**63 - 1
    assert len(llm.generate(PROMPTS[0], replace(params, seed=largest))[0].outputs) == 3
    check_idle(llm)


def test_n_outputs_compute_the_prompt_once():
    llm, prompt = front_end(enable_prefix_caching=True, page_size=2, max_batch_size=4), list(range(3, 20))
    llm.generate(prompt, replace(GREEDY, n=4, max_tokens=1))
    assert llm.engine.metrics.computed_tokens <= len(prompt) + 3 * 2
    llm = front_end()
    pieces = llm.stream_batch([PROMPTS[0]], replace(SAMPLED, n=3))
    next(pieces)
    pieces.close()
    check_idle(llm)


def test_without_a_limit_an_output_ends_with_the_longest_sequence():
    llm = front_end(num_pages=40)
    params = SamplingParams(temperature=0.0, max_tokens=None, stop=None, ignore_eos=True)
    output = llm.generate([5, 9], params)[0]
    assert len(output.token_ids) == llm.engine.config.max_model_len - 2 and output.finish_reason == "length"
    with pytest.raises(RequestError, match="takes 128"):
        llm.generate([5] * 128, params)


def seed_with_pad(prompt: list[int]) -> int:
    """A seed with which the tiny model writes the special token "<pad>", but not first."""
    for seed in range(200):
        tokens = expected(prompt, replace(SAMPLED, seed=seed))[0]
        if LETTERS.pad_token_id in tokens[1:] and LETTERS.pad_token_id != tokens[0]:
            return seed
    raise AssertionError


@pytest.mark.parametrize("streamed", [False, True])
def test_special_tokens_and_ends_are_shown_on_request(streamed):
    llm, prompt = front_end(), PROMPTS[0]
    pad, eos = LETTERS.pad_token_id, LETTERS.eos_token_id
    params = replace(SAMPLED, seed=seed_with_pad(prompt))

    def text(**options):
        own = replace(params, **options)
        outputs = collect(llm.stream_batch([prompt], own)) if streamed else llm.generate([prompt], own)
        return outputs[0].text

    tokens = expected(prompt, params)[0]
    shown = tokens[:-1] if tokens[-1] == eos else tokens
    assert text() == LETTERS.decode(shown, skip_special_tokens=True)
    assert text(skip_special_tokens=False) == LETTERS.decode(shown) != text()
    end = tokens[tokens.index(pad) - 1]
    upto = tokens[: tokens.index(end) + 1]
    assert text(stop_token_ids=[end]) == LETTERS.decode(upto[:-1], skip_special_tokens=True)
    options = {"stop_token_ids": [end], "include_stop_str_in_output": True, "skip_special_tokens": False}
    assert text(**options) == LETTERS.decode(upto)


def test_a_stop_string_that_is_a_special_token_ends_the_output():
    """The text has no special tokens, so the string itself never occurs there."""
    llm, prompt = front_end(), PROMPTS[0]
    params = replace(SAMPLED, seed=seed_with_pad(prompt))
    tokens = expected(prompt, params)[0]
    (output,) = llm.generate([prompt], replace(params, stop=["<pad>"]))
    assert output.token_ids == tokens[: tokens.index(1) + 1] and output.finish_reason == "stop"
    assert output.text == LETTERS.decode(output.token_ids, skip_special_tokens=True)


def test_params_are_one_for_each():
    llm = front_end()
    llm.default_params = replace(GREEDY, max_tokens=3)
    assert [len(output.token_ids) for output in llm.generate(PROMPTS)] == [3] * 4
    outputs = llm.generate(PROMPTS, [replace(GREEDY, max_tokens=n) for n in range(1, 5)])
    assert [len(output.token_ids) for output in outputs] == [1, 2, 3, 4]
    with pytest.raises(RequestError, match="2 prompts but 1 SamplingParams"):
        llm.generate(PROMPTS[:2], [GREEDY])
    check_idle(llm)


# --- prompts and tokenizers that fail --------------------------------------------------------------------------------


BAD = pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ("", "empty"), ([], "empty"), ([5, 61], "from 0 to 60"), ([-1], "from 0 to 60"), ([5] * 128, "takes 128"),
        ([10**30], "from 0 to 60"), ("\ud800", "cannot be tokenized"), ("A" * 200, "the prompt has 200 tokens"),
        ([5] * 95, "fill 26 pages"),
    ],
)  # fmt: skip


@BAD
def test_a_prompt_that_cannot_be_served_is_refused_before_any_work(prompt, message):
    llm = front_end()
    refused = [lambda: llm.generate([PROMPTS[0], prompt, PROMPTS[1]], GREEDY), lambda: llm.generate([prompt], GREEDY)]
    refused += [lambda: list(llm.stream(prompt, GREEDY))] + [lambda: llm.generate(prompt, GREEDY)] * bool(prompt)
    for ask in refused:
        with pytest.raises(RequestError, match=message):
            ask()
    assert llm.engine.metrics.steps == 0 and not llm.engine.has_unfinished
    check_idle(llm)


@BAD
def test_a_prompt_that_cannot_be_served_leaves_the_others_alone_if_asked_to(prompt, message):
    llm = front_end()
    good, bad, also_good = llm.generate([PROMPTS[0], prompt, PROMPTS[1]], GREEDY, on_error="return")
    assert result(good) == expected(PROMPTS[0], GREEDY)
    assert result(also_good) == expected(PROMPTS[1], GREEDY)
    assert bad.finish_reason == "error" and message in str(bad.error) and (bad.text, bad.token_ids) == ("", [])
    assert bad.prompt == prompt
    check_idle(llm)


def test_text_that_cannot_fit_is_refused_before_it_is_tokenized(monkeypatch):
    llm = front_end()
    monkeypatch.setattr(LETTERS, "encode", lambda *args, **options: pytest.fail("it was tokenized"))
    with pytest.raises(RequestError, match="has 1000000 characters, too many for 128 tokens"):
        llm.generate("A" * 10**6)
    assert llm.generate(["A" * 10**6, [5]], GREEDY, on_error="return")[1].error is None


def test_a_tokenizer_that_cannot_encode_refuses_that_prompt_alone():
    words = Tokenizer(BPE({"A": 3}, []))  # other letters are dropped by some tokenizers, and refused by this one

    def encode(text: str, **options: Any) -> list[int]:
        if "B" in text:
            raise ValueError("no token for B")
        return [3] * len(text)

    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words)
    tokenizer.encode = encode  # type: ignore[method-assign]
    good, bad = front_end(tokenizer).generate(["AA", "AB"], GREEDY, on_error="return")
    assert good.prompt_token_ids == [3, 3] and good.error is None
    assert "cannot be tokenized: no token for B" in str(bad.error)


@DEPTHS
@pytest.mark.parametrize("streamed", [False, True])
def test_a_request_whose_text_cannot_be_decoded_ends_alone(depth, streamed, monkeypatch):
    """The fifth token of one request breaks the tokenizer; the others get all their text."""
    params = replace(SAMPLED, seed=0, ignore_eos=True)
    want = [expected(prompt, params) for prompt in PROMPTS]
    broken = want[3][0][4]
    assert all((broken in tokens) == (i == 3) for i, (tokens, _, _) in enumerate(want))

    def failing(original):
        def fail(tokenizer, context, token_ids, *rest, **options):
            if broken in token_ids:
                raise ValueError("no such token")
            return original(tokenizer, context, token_ids, *rest, **options)

        return fail

    class Stream:
        def __init__(self, **options):
            self._stream = DecodeStream(**options)

        def __copy__(self):
            return self

        def step(self, tokenizer, token_id):
            if token_id == broken:
                raise ValueError
            return self._stream.step(tokenizer, token_id)

    monkeypatch.setattr(detokenizer, "DecodeStream", Stream)
    for module in (detokenizer, text_request):
        monkeypatch.setattr(module, "decode_after", failing(module.decode_after))
    llm = front_end(pipeline_depth=depth)
    outputs = llm.generate(PROMPTS, params, on_error="return")
    if streamed:
        outputs = collect(llm.stream_batch(PROMPTS, params))
    assert [result(outputs[i]) for i in range(3)] == want[:3]
    assert outputs[3].finish_reason == "error"
    assert "cannot be decoded: ValueError: no such token" in str(outputs[3].error)
    # Read step by step, the failure is found at once.
    assert outputs[3].text == (LETTERS.decode(want[3][0][:4]) if streamed else "")
    assert outputs[3].token_ids == (want[3][0][:5] if streamed else want[3][0])
    with pytest.raises(RequestError, match=r"prompt 4 of 4.*cannot be decoded"):
        llm.generate(PROMPTS, params)
    check_idle(llm)


def test_a_tokenizer_without_a_fast_backend_is_refused():
    with pytest.raises(ConfigError, match="ByT5Tokenizer, which cannot decode token by token"):
        front_end(ByT5Tokenizer())


# --- several streams -------------------------------------------------------------------------------------------------


@settings(max_examples=30)
@given(st.data(), st.integers(0, 1))
def test_streams_may_be_interleaved_closed_and_aborted(data, depth):
    """Whatever else steps the engine: other streams, `generate`, or its own `step`."""
    llm = front_end(pipeline_depth=depth, num_pages=9, enable_prefix_caching=True)
    limit_steps(llm)
    streams: list[tuple[Generator[Piece, None, None], list[list[int]], list[SamplingParams], list[Piece]]] = []
    open_streams, aborted = [], set()
    for _ in range(data.draw(st.integers(1, 25))):
        action = data.draw(st.sampled_from(["open", "next", "next", "next", "close", "abort", "step", "generate"]))
        if action == "open" and len(streams) < 4:
            prompts = data.draw(st.lists(st.sampled_from(PROMPTS), min_size=1, max_size=3))
            params = [data.draw(wishes()) for _ in prompts]
            open_streams.append(len(streams))
            streams.append((llm.stream_batch(prompts, params), prompts, params, []))
        elif action == "step":
            llm.engine.step()
        elif action == "generate":
            assert result(llm.generate(PROMPTS[1], GREEDY)[0]) == expected(PROMPTS[1], GREEDY)
        elif action == "abort" and llm.engine.requests:
            aborted.add(name := data.draw(st.sampled_from(sorted(llm.engine.requests))))
            llm.engine.abort(name)
        elif open_streams:
            chosen = data.draw(st.sampled_from(open_streams))
            pieces, _, _, got = streams[chosen]
            if action == "next":
                got += islice(pieces, 1)
            elif action == "close":
                pieces.close()
                open_streams.remove(chosen)
    for chosen in open_streams:
        pieces, prompts, params, got = streams[chosen]
        outputs = collect(chain(got, pieces))
        for i, (prompt, own) in enumerate(zip(prompts, params, strict=True)):
            tokens, text, reason = expected(prompt, own)
            if outputs[i].finish_reason == "abort":
                assert any(f"{name!r} was aborted" in str(outputs[i].error) for name in aborted)
                assert outputs[i].token_ids == tokens[: len(outputs[i].token_ids)]
            else:
                assert result(outputs[i]) == (tokens, text, reason)
    check_idle(llm)


def test_half_a_character_at_which_an_output_is_cut_off_is_no_stop_string():
    llm, prompt = front_end(), PROMPTS[0]
    params = next(
        own
        for seed in range(200)
        if REPLACEMENT in LETTERS.decode(expected(prompt, own := replace(GREEDY, temperature=1.0, seed=seed))[0][:1])
    )
    stream = llm.stream_batch([prompt], replace(params, stop=(REPLACEMENT,)))
    first = next(stream)
    (name,) = llm.engine.requests
    llm.engine.abort(name)
    output = collect(chain([first], stream))[0]
    assert output.finish_reason == "abort" and len(output.token_ids) == 1


def test_closing_a_stream_ends_its_own_requests_and_no_other():
    llm = front_end()
    kept, closed = llm.stream_batch([PROMPTS[0]], GREEDY), llm.stream_batch(PROMPTS[:2], GREEDY)
    piece = next(kept)
    (name,) = llm.engine.requests
    next(closed)
    assert len(llm.engine.requests) == 3
    closed.close()
    assert list(llm.engine.requests) == [name]
    closed.close()
    assert result(collect(chain([piece], kept))[0]) == expected(PROMPTS[0], GREEDY)
    check_idle(llm)


def test_closing_a_stream_whose_request_has_ended_spares_a_new_one_of_its_name():
    llm = front_end()
    stream = llm.stream_batch([PROMPTS[0]], GREEDY)
    next(stream)
    (name,) = llm.engine.requests
    while llm.engine.requests:
        llm.engine.step()
    llm.engine.add_request(name, PROMPTS[1], GREEDY)
    stream.close()
    assert list(llm.engine.requests) == [name]


def test_an_output_that_another_s_step_completed_is_delivered():
    """Whoever steps the engine directly gets the report, and the stream still gets its output."""
    llm = front_end()
    limit_steps(llm)
    stream = llm.stream_batch([PROMPTS[0]], GREEDY)
    first = next(stream)
    other = serve(llm.engine, {0: [("other", PROMPTS[1], GREEDY)]})
    assert other["other"] == expected(PROMPTS[1], GREEDY)[0]
    output = collect(chain([first], stream))[0]
    assert result(output) == expected(PROMPTS[0], GREEDY)


def test_a_step_visits_only_the_requests_that_got_a_token():
    """Ten thousand open requests cost a step no more lines of Python than ten."""

    def lines_per_step(num_open: int) -> float:
        llm = front_end(max_batch_size=4)
        params = replace(GREEDY, max_tokens=20)
        pieces = llm.stream_batch([[5]] * num_open, params)
        for _ in range(8):
            next(pieces)
        steps, lines = llm.engine.metrics.steps, 0

        def count(frame: FrameType, event: str, argument: Any) -> Any:
            nonlocal lines
            lines += event == "line" and "mini_engine" in frame.f_code.co_filename
            return count

        before = sys.gettrace()
        sys.settrace(count)
        try:
            for _ in range(32):
                next(pieces)
        finally:
            sys.settrace(before)
        steps = llm.engine.metrics.steps - steps
        pieces.close()
        assert not llm.engine.has_unfinished and steps == 8
        return lines / steps

    few, many = lines_per_step(10), lines_per_step(10_000)
    assert 50 < many <= 1.1 * few


# --- interrupts and threads ------------------------------------------------------------------------------------------


def test_an_interrupt_in_one_stream_loses_nothing_of_another(monkeypatch):
    """Ctrl-C at the n-th call inside a step of the front end, for one n after the other, the tokenizer included."""
    tokenizer = letters()
    params = [replace(SAMPLED, seed=1, max_tokens=9), replace(SAMPLED, seed=3, max_tokens=4, ignore_eos=True)]
    params[1] = replace(params[1], stop=["never"])
    want = [expected(prompt, own) for prompt, own in zip(PROMPTS, params, strict=False)]
    doors = [(Detokenizer, "push"), (Detokenizer, "_scan"), (TextEngine, "_deliver"), (TextRequest, "_read")]
    doors += [(TextRequest, "deliver")]
    doors += [(LLMEngine, "step"), (LLMEngine, "tokens_of"), (LLMEngine, "finish"), (LLMEngine, "_report")]
    for (owner, name), when, before in product(doors, (1, 2, 4, 7), (True, False)):
        calls, original = 0, getattr(owner, name)

        def interrupted(*args, _original=original, _before=before, _when=when, **kwargs):
            nonlocal calls
            calls += 1
            if calls == _when and _before:
                raise KeyboardInterrupt
            got, is_last = _original(*args, **kwargs), calls == _when
            if is_last:
                raise KeyboardInterrupt
            return got

        case = f"{name}, call {when}, {'before' if before else 'after'}"
        llm = front_end(tokenizer, pipeline_depth=when % 2)
        limit_steps(llm)
        beside = llm.engine.add_request("beside", PROMPTS[3], replace(GREEDY, max_tokens=5))
        long, short = (llm.stream_batch([prompt], own) for prompt, own in zip(PROMPTS, params, strict=False))
        got = [next(short)]
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, interrupted)
            try:
                output = collect(long)[0]
            except KeyboardInterrupt:
                pass
            else:
                assert result(output) == want[0] and calls < when, case
        assert result(collect(chain(got, short))[0]) == want[1], case
        while llm.engine.has_unfinished:
            llm.engine.step()
        assert beside.output_token_ids == expected(PROMPTS[3], beside.params)[0], case
        check_idle(llm)


@pytest.mark.parametrize("max_tokens", [2, 5])
def test_an_interrupt_while_a_piece_is_delivered_loses_and_repeats_nothing(max_tokens, monkeypatch):
    """Ctrl-C in the call that puts a piece of another stream into its inbox: its last piece, or one before."""

    class Inbox(deque):
        interrupts = False

        def append(self, piece):
            super().append(piece)
            if Inbox.interrupts:
                Inbox.interrupts = False
                raise KeyboardInterrupt

    llm, params = front_end(), replace(GREEDY, max_tokens=max_tokens, ignore_eos=True)
    limit_steps(llm)
    other, stream = llm.stream_batch([PROMPTS[0]], GREEDY), llm.stream_batch([PROMPTS[2]], params)
    with monkeypatch.context() as patch:
        patch.setattr("mini_engine.llm.deque", Inbox)
        got = [next(stream)]
    Inbox.interrupts = True
    with pytest.raises(KeyboardInterrupt):
        collect(other)
    assert not Inbox.interrupts
    assert result(collect(chain(got, stream))[0]) == expected(PROMPTS[2], params)
    check_idle(llm)


@DEPTHS
@pytest.mark.parametrize(
    "place", [(Scheduler, "schedule"), (LocalExecutor, "launch"), (LocalExecutor, "collect"), (Running, "append")]
)
def test_a_stream_that_the_garbage_collector_closes_in_the_middle_of_a_step_harms_nobody(depth, place, monkeypatch):
    """An abandoned stream in a reference cycle is closed whenever the garbage collector runs."""
    owner, name = place
    original, params = getattr(owner, name), replace(GREEDY, max_tokens=12, ignore_eos=True)

    for is_after in (False, True):

        def collecting(*args, _is_after=is_after, **kwargs):
            returned = original(*args, **kwargs) if _is_after else None
            gc.collect()
            return returned if _is_after else original(*args, **kwargs)

        llm = front_end(pipeline_depth=depth, num_pages=12, enable_prefix_caching=True)
        limit_steps(llm)
        kept, abandoned = (llm.stream_batch([prompt], params) for prompt in (PROMPTS[2], PROMPTS[0]))
        got = [next(kept)]
        next(abandoned)
        closed, cycle = weakref.ref(abandoned), [abandoned]
        cycle.append(cycle)
        del cycle, abandoned
        assert closed() is not None
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, collecting)
            while closed() is not None:
                got.append(next(kept))
        assert result(collect(chain(got, kept))[0]) == expected(PROMPTS[2], params)
        assert result(llm.generate(PROMPTS[1], GREEDY)[0]) == expected(PROMPTS[1], GREEDY)
        check_idle(llm)


@DEPTHS
def test_a_listener_that_fails_once_delays_outputs_and_loses_none(depth):
    """The step in which the short request ends fails while the other stream runs it."""
    failures = 0

    def fail(engine: LLMEngine, report: Any) -> None:
        nonlocal failures
        if report.finished and not failures:
            failures += 1
            raise ZeroDivisionError

    engine = make_engine(double_model("qwen3"), on_step=fail, num_pages=24, page_size=4, pipeline_depth=depth)
    llm = TextEngine(engine, LETTERS, GREEDY)
    limit_steps(llm)
    short = llm.stream_batch([PROMPTS[1]], replace(GREEDY, max_tokens=3))
    first = next(short)
    with pytest.raises(ZeroDivisionError):
        llm.generate([PROMPTS[0]], replace(GREEDY, max_tokens=20))
    output = collect(chain([first], short))[0]
    assert result(output) == expected(PROMPTS[1], replace(GREEDY, max_tokens=3))
    check_idle(llm)


@DEPTHS
def test_threads_get_their_own_outputs(depth):
    llm = front_end(pipeline_depth=depth, enable_prefix_caching=True)
    wrong: list[str] = []
    params = [replace(SAMPLED, seed=seed, stop=["A", "é"] if seed % 2 else []) for seed in range(4)]
    want = {(i, j): expected(PROMPTS[j], params[i]) for i in range(4) for j in range(4)}

    def work(i: int) -> None:
        try:
            for turn in range(2):
                streamed = turn % 2 or None
                outputs = (
                    collect(llm.stream_batch(PROMPTS, params[i])) if streamed else llm.generate(PROMPTS, params[i])
                )
                wrong.extend(f"{i} {turn} {j}" for j in range(4) if result(outputs[j]) != want[i, j])
        except Exception as error:
            wrong.append(repr(error))

    threads = [threading.Thread(target=work, args=(i,), daemon=True) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert not wrong and not any(thread.is_alive() for thread in threads)
    check_idle(llm)


class SlowLock:
    """A lock whose waiting threads take long to wake up: they only get it while the others sleep or have ended."""

    def __init__(self) -> None:
        self._lock, self.others_rest = threading.RLock(), threading.Event()

    def __enter__(self) -> None:
        while not self._lock.acquire(blocking=False):
            assert self.others_rest.wait(60)

    def __exit__(self, *error: object) -> None:
        self._lock.release()

    def sleep(self, seconds: float) -> None:
        self.others_rest.set()
        time.sleep(0.01)
        self.others_rest.clear()


@DEPTHS
def test_a_thread_that_steps_the_engine_lets_others_in(depth, monkeypatch):
    """Otherwise the request of another thread would wait until all outputs of the first are complete."""
    lock, has_begun, has_ended = SlowLock(), threading.Event(), threading.Event()
    llm = front_end(num_pages=64, pipeline_depth=depth, on_step=lambda *_: has_begun.set())
    llm._lock = lock
    monkeypatch.setattr(llm_module, "time", lock)

    def work() -> None:
        llm.generate([PROMPTS[1]], replace(GREEDY, max_tokens=120, ignore_eos=True))
        has_ended.set()
        lock.others_rest.set()

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    assert has_begun.wait(60)
    llm.generate(PROMPTS[0], replace(GREEDY, max_tokens=1))
    assert not has_ended.is_set()
    lock.others_rest.set()
    thread.join(60)
    assert has_ended.is_set()


def test_a_request_that_fails_leaves_the_view_of_the_others():
    trace = Trace(LETTERS)
    watch, engine = Watch(trace), make_engine(double_model("qwen3"), on_step=trace.record, num_pages=9, page_size=4)
    launch = engine.executor.launch

    def out_of_memory(step):
        if any(request.prompt_token_ids == [7] for request in engine.scheduler.running.requests if request):
            raise RuntimeError("CUDA out of memory")
        return launch(step)

    engine.executor.launch = out_of_memory
    reasons = {}
    for piece in TextEngine(engine, LETTERS, GREEDY).stream_batch([[7], PROMPTS[0]], GREEDY):
        watch.view(80, 24)
        if piece.output:
            reasons[piece.index] = piece.output.finish_reason
    assert reasons == {0: "error", 1: "length"}


def test_another_thread_may_close_its_stream_while_its_end_is_delivered(monkeypatch):
    llm = front_end(LETTERS)
    short = llm.stream_batch([PROMPTS[1]], replace(GREEDY, max_tokens=2, ignore_eos=True))
    next(short)
    deliver = llm._deliver

    def closed_meanwhile(request, text, report):
        if request.finish_reason and text.owner.prompt == PROMPTS[1]:
            closing = threading.Thread(target=short.close)
            closing.start()
            time.sleep(0.2)  # `close` has forgotten the stream, and waits for the engine
        deliver(request, text, report)

    monkeypatch.setattr(llm, "_deliver", closed_meanwhile)
    (output,) = llm.generate(PROMPTS[0], replace(GREEDY, max_tokens=6))
    assert output.finish_reason == "length"
