"""The engine's process: how it starts, what it sends, and how it ends."""

from __future__ import annotations

import asyncio
import multiprocessing
import pickle
from collections import deque
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mini_engine.errors import ConfigError, MiniEngineError
from mini_engine.llm import TextEngine
from mini_engine.outputs import Piece
from mini_engine.sampling_params import SamplingParams
from mini_engine.serving.engine_client import EngineClient, joined
from mini_engine.serving.engine_loop import Sender, as_sent
from mini_engine.serving.options import ServerOptions
from mini_engine.serving.start import start_process
from tests.helpers import GREEDY, double_model, in_a_thread, make_text_engine

LONG = SamplingParams(temperature=0.0, max_tokens=100, ignore_eos=True)


def load_small() -> TextEngine:
    return make_text_engine(double_model("llama"), num_pages=32)


def load_nothing() -> TextEngine:
    raise ConfigError("no such model")


def num_steps(engine: TextEngine) -> int:
    return engine.engine.metrics.steps


async def tokens_of(client: EngineClient, prompt: list[int], params: SamplingParams) -> list[int]:
    async for pieces in client.stream([prompt], params, each_step=True):
        if (output := pieces[-1][1].output) is not None:
            return output.outputs[0].token_ids
    raise AssertionError("no output")


def test_a_process_serves_as_the_engine_here_and_ends_with_its_client() -> None:
    [want] = load_small().generate([{"prompt_token_ids": [3, 4, 5]}], GREEDY)
    client = start_process(load_small, ServerOptions())

    async def run() -> None:
        client.start()
        assert await tokens_of(client, [3, 4, 5], GREEDY) == want.outputs[0].token_ids
        assert await client.read(num_steps) > 0
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
    client = start_process(load_small, ServerOptions())

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


PIECES = st.lists(st.tuples(st.integers(0, 1), st.integers(0, 1), st.text(max_size=2)), max_size=12)


@given(PIECES)
def test_joined_pieces_have_the_same_text_and_tokens(made: list[tuple[int, int, str]]) -> None:
    pieces = [(index, Piece(7, text, 1, None, None, number)) for index, number, text in made]
    texts, counts = dict[tuple[int, int], str](), dict[tuple[int, int], int]()
    for index, piece in pieces:
        key = index, piece.completion
        texts[key], counts[key] = texts.get(key, "") + piece.text, counts.get(key, 0) + 1
    found = joined(pieces)
    assert {(index, piece.completion): piece.text for index, piece in found} == texts
    assert {(index, piece.completion): piece.num_tokens for index, piece in found} == counts


def test_a_piece_is_sent_without_its_step() -> None:
    engine, inbox = load_small(), deque[Piece]()
    engine.submit([3, 4, 5], GREEDY, inbox)
    while not inbox:
        engine.step()
    piece = inbox[0]
    assert piece.step is not None and pickle.loads(pickle.dumps(piece)) == replace(piece, step=None)


def all_of(error: type[MiniEngineError]) -> list[type[MiniEngineError]]:
    return [error, *(own for sub in error.__subclasses__() for own in all_of(sub))]


@pytest.mark.parametrize("error", all_of(MiniEngineError), ids=lambda own: own.__name__)
def test_every_error_can_be_sent(error: type[MiniEngineError]) -> None:
    sent = as_sent(error("what was wrong"))
    received = pickle.loads(pickle.dumps(sent))
    assert type(received) is error and str(received) == "what was wrong" and vars(received) == vars(sent)


def test_other_errors_are_sent_by_name() -> None:
    assert str(as_sent(KeyError("x"))) == "KeyError: 'x'"
