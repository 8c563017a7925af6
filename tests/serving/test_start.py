"""The engine's process: how it starts, what it sends, and how it ends."""

from __future__ import annotations

import asyncio
import gc
import multiprocessing
import pickle
import threading
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace

import pytest

from mini_engine.detokenizer import Detokenizer
from mini_engine.errors import ConfigError, MiniEngineError, RequestError
from mini_engine.llm import TextEngine
from mini_engine.logprobs import Logprob
from mini_engine.outputs import CompletionOutput, RequestOutput
from mini_engine.sampling_params import SamplingParams
from mini_engine.serving.engine_client import EngineClient, Sender
from mini_engine.serving.engine_loop import Outbox, as_sent
from mini_engine.serving.options import ServerOptions
from mini_engine.serving.start import start_process, start_thread
from tests.helpers import GREEDY, double_model, in_a_thread, make_text_engine

LONG = SamplingParams(temperature=0.0, max_tokens=100, ignore_eos=True)


def load_small() -> TextEngine:
    return make_text_engine(double_model("llama"), num_pages=32)


def load_nothing() -> TextEngine:
    raise ConfigError("no such model")


def num_steps(engine: TextEngine) -> int:
    return engine.engine.metrics.steps


def num_frozen(engine: TextEngine) -> int:
    return gc.get_freeze_count()


async def tokens_of(client: EngineClient, prompt: list[int], params: SamplingParams) -> list[int]:
    async for pieces in client.stream([prompt], params, each_step=True):
        if pieces and (output := pieces[-1].output) is not None:
            return output.outputs[0].token_ids
    raise AssertionError("no output")


def test_a_process_serves_as_the_engine_here_and_ends_with_its_client() -> None:
    [want] = load_small().generate([{"prompt_token_ids": [3, 4, 5]}], GREEDY)
    [ends] = start_process(load_small, ServerOptions(api_server_count=1))
    client = ends.client()

    async def run() -> None:
        client.start()
        assert await tokens_of(client, [3, 4, 5], GREEDY) == want.outputs[0].token_ids
        assert await client.read(num_steps) > 0
        assert await client.read(num_frozen) > 10_000, "the garbage collector visits all that was imported"
        await client.close()
        assert not client.is_alive

    in_a_thread(asyncio.run, run())
    for process in multiprocessing.active_children():
        process.join(30)
    assert not multiprocessing.active_children()


def test_an_error_while_loading_reaches_the_caller() -> None:
    with pytest.raises(ConfigError, match="no such model"):
        start_process(load_nothing, ServerOptions())


def test_a_process_that_dies_ends_all_streams_with_an_error() -> None:
    [ends] = start_process(load_small, ServerOptions(api_server_count=1))
    client = ends.client()

    async def run() -> None:
        client.start()
        stream = client.stream([[3, 4, 5]], LONG, each_step=True)
        await anext(stream)
        [process] = multiprocessing.active_children()
        process.kill()
        with pytest.raises(MiniEngineError, match="has ended"):
            async for _ in stream:
                pass
        assert not client.is_alive and client.num_outputs == 0
        with pytest.raises(MiniEngineError):
            await client.read(num_steps)
        await client.close()

    in_a_thread(asyncio.run, run())


def test_what_was_sent_before_the_end_arrives() -> None:
    receiver, sender = multiprocessing.Pipe(duplex=False)
    sending = Sender(sender)
    for number in range(1000):
        sending.send([number] * 100)
    found = [receiver.recv() for _ in range(1000)]
    sending.close()
    assert found == [[number] * 100 for number in range(1000)]
    with pytest.raises(EOFError):
        receiver.recv()
    sending.send("too late")


def test_an_outbox_keeps_what_its_reader_does_not_take() -> None:
    receiver, sender = multiprocessing.Pipe(duplex=False)
    outbox, values = Outbox(sender), [bytes([number]) * 1000 for number in range(200)]  # more than a pipe holds
    for value in values:
        outbox.send(value)
    assert outbox.flush()
    with open(receiver.fileno(), "rb", closefd=False) as pipe:
        found = [pickle.load(pipe) for _ in range(10)]
        assert outbox.flush()
        closing = threading.Thread(target=outbox.close)  # waits for the reader
        closing.start()
        found += [pickle.load(pipe) for _ in range(190)]
        closing.join()
        assert found == values
        with pytest.raises(EOFError):
            pickle.load(pipe)
    outbox.send("too late")
    assert not outbox.flush()


def test_an_outbox_without_a_reader_keeps_nothing() -> None:
    receiver, sender = multiprocessing.Pipe(duplex=False)
    outbox = Outbox(sender)
    receiver.close()
    outbox.send("lost")
    assert not outbox.flush()
    outbox.close()


Logprobs = Sequence[Mapping[int, Logprob] | None] | None


def check_logprobs(found: Logprobs, want: Logprobs) -> None:
    """Check that they are those of the same tokens, and equal to those of batches that round otherwise."""
    flat = [[(token, own) for of in several or () if of for token, own in of.items()] for several in (found, want)]
    words, numbers = ([[pick(*own) for own in one] for one in flat] for pick in (
        lambda token, own: (token, own.rank, own.decoded_token), lambda token, own: own.logprob,
    ))  # fmt: skip
    assert words[0] == words[1] and numbers[0] == pytest.approx(numbers[1], abs=1e-4)


WORDY = replace(LONG, logprobs=2, prompt_logprobs=1)
STOPPED = replace(LONG, n=2, seed=3, temperature=1.0, stop=["w1", "w4"])


@pytest.mark.parametrize("params", [GREEDY, LONG, WORDY, STOPPED], ids=["ended", "long", "logprobs", "stopped"])
@pytest.mark.parametrize("each_step", [False, True])
def test_text_is_the_same_on_the_other_side_of_the_pipe(params: SamplingParams, each_step: bool) -> None:
    prompts = [[3, 4, 5], [6] * 20, [7, 3]]
    want = load_small().generate([{"prompt_token_ids": prompt} for prompt in prompts], params)
    engine = load_small()
    client = start_thread(engine, ServerOptions())
    outputs, texts, counts = dict[int, RequestOutput](), dict[tuple[int, int], str](), Counter[tuple[int, int]]()

    async def run() -> None:
        client.start()
        async for pieces in client.stream(prompts, params, each_step=each_step):
            for piece in pieces:
                key = piece.index, piece.completion
                texts[key] = texts.get(key, "") + piece.text
                counts[key] += piece.num_tokens
                if piece.output is not None:
                    outputs[piece.index] = piece.output
        await client.close()

    in_a_thread(asyncio.run, run())
    assert sorted(outputs) == [0, 1, 2]
    if params.stop:
        assert all(own.finish_reason == "stop" for output in want for own in output.outputs)
    for index, output in outputs.items():
        assert output.prompt == output.prompt_token_ids == prompts[index]
        check_logprobs(output.prompt_logprobs, want[index].prompt_logprobs)
        for own, wanted in zip(output.outputs, want[index].outputs, strict=True):
            assert replace(own, logprobs=None) == replace(wanted, logprobs=None)
            check_logprobs(own.logprobs, wanted.logprobs)
            assert texts[index, own.index] == own.text
            assert counts[index, own.index] == len(own.token_ids)
    assert not engine.engine.requests and client.num_outputs == 0


def test_an_output_that_cannot_be_decoded_ends_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, prompts = load_small(), [[3, 4, 5], [6] * 20]
    broken, want = load_small().generate([{"prompt_token_ids": prompt} for prompt in prompts], LONG)
    wrong = next(token for token in broken.token_ids if token not in want.token_ids)
    client, push = start_thread(engine, ServerOptions()), Detokenizer.push

    def fails(self: Detokenizer, token_id: int, *, is_shown: bool = True) -> str:
        if token_id == wrong:
            raise ValueError("half a word")
        return push(self, token_id, is_shown=is_shown)

    monkeypatch.setattr(Detokenizer, "push", fails)

    async def outputs_of(prompt: list[int]) -> list[CompletionOutput]:
        found = [piece async for pieces in client.stream([prompt], LONG, each_step=True) for piece in pieces]
        assert found[-1].output is not None
        return found[-1].output.outputs

    async def run() -> None:
        client.start()
        error, outputs = await asyncio.gather(*map(outputs_of, prompts), return_exceptions=True)
        assert isinstance(error, RequestError) and "half a word" in str(error)
        assert outputs == want.outputs
        await client.close()

    in_a_thread(asyncio.run, run())
    assert not engine.engine.requests


@pytest.mark.parametrize("prompt", [[], [3, 2**40], [-1], [10**6], [3] * 10_000], ids=lambda own: f"{own}"[:12])
def test_a_prompt_that_cannot_be_served_is_refused_at_once(prompt: list[int]) -> None:
    engine = load_small()
    client = start_thread(engine, ServerOptions())

    async def run() -> None:
        client.start()
        with pytest.raises(RequestError):
            await anext(client.stream([[3, 4], prompt], GREEDY, each_step=True))
        assert client.num_outputs == 0 and not client._texts
        await client.close()

    in_a_thread(asyncio.run, run())
    assert engine.engine.metrics.steps == 0


def all_of(error: type[MiniEngineError]) -> list[type[MiniEngineError]]:
    return [error, *(own for sub in error.__subclasses__() for own in all_of(sub))]


@pytest.mark.parametrize("error", all_of(MiniEngineError), ids=lambda own: own.__name__)
def test_every_error_can_be_sent(error: type[MiniEngineError]) -> None:
    sent = as_sent(error("what was wrong"))
    received = pickle.loads(pickle.dumps(sent))
    assert type(received) is error and str(received) == "what was wrong" and vars(received) == vars(sent)


def test_other_errors_are_sent_by_name() -> None:
    assert str(as_sent(KeyError("x"))) == "KeyError: 'x'"
