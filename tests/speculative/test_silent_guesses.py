"""Guesses that no step computes tell whether it pays to compute some: on a device whose steps have fixed times."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest

from mini_engine.engine import LLMEngine
from mini_engine.request import Running
from mini_engine.sampling_params import SamplingParams
from mini_engine.speculative.speculation import SilentGuesses, Speculation
from mini_engine.speculative.suffix import SuffixDrafter
from mini_engine.step_input import SampledTokens, StepInput
from tests.helpers import double_model, make_engine

ALONE, PIPELINED = 2.7e-3, 0.73e-3  # seconds of a step whose tokens the host waits for, and of a pipelined one
LENGTH, MAX_TOKENS = 40, 80
TEXT = random.Random(0).choices(range(3, 61), k=LENGTH)


class Device:
    """An executor that continues prompts with a copy of TEXT, in which some tokens are others, or with any tokens.

    Attributes:
        changed: share of the tokens that are others; 1: all.
        now: seconds.
        alone: steps that were collected before the next one was launched.
    """

    def __init__(self, random_seed: int = 1) -> None:
        self.changed, self.now, self.alone, self._launched = 0.0, 0.0, 0, 0
        self._random = random.Random(random_seed)

    def launch(self, step: StepInput) -> tuple[int, StepInput]:
        self._launched += 1
        return self._launched, step

    def collect(self, ticket: tuple[int, StepInput]) -> SampledTokens:
        number, step = ticket
        is_alone = number == self._launched
        self.alone += is_alone
        self.now += ALONE if is_alone else PIPELINED
        samples = step.num_logits > 0
        counts, ends = step.num_logits[samples], step.num_computed[samples]
        tokens = np.zeros((len(counts), counts.max(initial=1)), dtype=np.int64)
        for own, count, end in zip(tokens, counts.tolist(), ends.tolist(), strict=True):
            own[:count] = [self._token(position) for position in range(end - count + 1, end + 1)]
        return SampledTokens(tokens, counts)

    def _token(self, position: int) -> int:
        return self._random.randrange(3, 61) if self._random.random() < self.changed else TEXT[position % LENGTH]

    def reset(self) -> None:
        pass


def engine_on(device: Device, method: str | None, rows: int) -> LLMEngine:
    config = None if method is None else {"method": method, "num_speculative_tokens": 6}
    engine = make_engine(
        double_model("llama"), speculative_config=config, pipeline_depth=1, max_batch_size=rows, page_size=8,
        num_pages=20 * rows, max_num_batched_tokens=1000,
    )  # fmt: skip
    engine.core._executor = device
    if engine.core.speculation is not None:
        engine.core.speculation._clock = lambda: device.now
    return engine


def seconds(engine: LLMEngine, device: Device, rows: int) -> float:
    """Serve a prompt of TEXT for each row, and return the time of the device."""
    start = device.now
    for row in range(rows):
        engine.add_request(f"{row}", TEXT, SamplingParams(max_tokens=MAX_TOKENS, ignore_eos=True))
    while engine.has_unfinished:
        engine.step()
    return device.now - start


@pytest.mark.parametrize("rows", [1, 8])
@pytest.mark.parametrize("method", ["ngram", "suffix"])
def test_a_first_copy_is_found_after_a_few_steps_and_free_text_keeps_its_pipeline(method: str, rows: int) -> None:
    device, plain = Device(), Device()
    engine, without = engine_on(device, method, rows), engine_on(plain, None, rows)
    none = seconds(without, plain, rows)
    assert seconds(engine, device, rows) < 0.9 * none, "the first copy"
    assert seconds(engine, device, rows) < 0.75 * none
    device.changed = 1.0
    assert seconds(engine, device, rows) < 1.25 * none, "it has to be found out that nothing repeats"
    alone = device.alone
    for _ in range(4):
        assert seconds(engine, device, rows) < 1.05 * none
    assert device.alone - alone <= 8, "the last step of each request, and few others"
    device.changed = 0.0
    assert min(seconds(engine, device, rows) for _ in range(3)) < 0.75 * none, "and copies are found again"


@pytest.mark.parametrize("guess", [1, 7], ids=["wrong", "right"])
def test_silent_guesses_are_made_ever_more_rarely_while_no_step_has_any(guess: int) -> None:
    """The drafter is asked at first, and then after 16, 32, and 64 steps, plus 8 to compare."""

    class Guesses:
        def __init__(self) -> None:
            self.scout, self.asked_at = self, list[int]()

        def propose(self, running: Running, rows: np.ndarray, most: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
            self.asked_at.append(int(running.num_known[0]))  # one more in each step
            return np.full((len(rows), 4), guess, dtype=np.int32), np.full(len(rows), 4)

        def forget(self) -> None:
            pass

    drafter, running = Guesses(), Running(1, 600)
    speculation = Speculation(drafter, 4, 1, True)
    running.order, running.tokens[:] = np.arange(1), 7
    running.num_known[:], running.num_prompt[:], running.max_len[:] = 9, 5, 600
    for _ in range(300):
        speculation.begin_step()
        speculation.observe(running)
        running.num_known += 1
    assert np.diff(drafter.asked_at).tolist() == [8 + 16, 8 + 32, 8 + 64, 8 + 64, 8 + 64]


def test_a_free_text_has_no_automaton() -> None:
    """Prompt lookup finds nothing in it, or guesses wrong, so the automaton has not read it."""
    device = Device()
    engine = engine_on(device, "suffix", 4)
    speculation = engine.core.speculation
    assert speculation is not None and isinstance(speculation.drafter, SuffixDrafter)
    device.changed = 1.0
    for _ in range(3):
        seconds(engine, device, 4)
    speculation.drafter.forget()
    seconds(engine, device, 4)
    assert not speculation.drafter._automata
    device.changed = 0.0
    for _ in range(3):
        seconds(engine, device, 4)
    assert speculation.drafter._automata, "a copy has one"


def test_silent_guesses_count_as_far_as_tokens_are_known() -> None:
    running, rows = Running(4, 12), np.arange(4)
    running.admission[rows], running.num_known[rows] = [1, 2, 3, 9], [8, 5, 6, 9]
    running.tokens[:, :9] = 7
    guesses = np.array([[7, 7, 7], [7, 7, 7], [7, 1, 7], [7, 7, 7]], dtype=np.int32)
    silent = SilentGuesses(rows, np.array([1, 2, 3, 4]), np.full(4, 4), guesses, np.array([3, 3, 2, 3]))
    found, counts, right = silent.compared(running)
    assert found.tolist() == [0, 1, 2] and counts.tolist() == [3, 1, 2] and right.tolist() == [3, 1, 1]


def test_no_silent_guesses_where_guesses_could_not_pay() -> None:
    class Drafter:
        @property
        def scout(self) -> Any:
            return self

        def propose(self, *arguments: Any) -> Any:
            raise AssertionError("asked")

        def forget(self) -> None:
            pass

    speculation, running = Speculation(Drafter(), 4, 2, True), Running(2, 30)
    running.order = np.arange(2)
    running.num_known[:], running.num_prompt[:], running.max_len[:] = 9, 5, 30
    speculation._could_pay = False
    for _ in range(100):
        speculation.begin_step()
        speculation.observe(running)
    speculation._could_pay = True
    with pytest.raises(AssertionError, match="asked"):
        for _ in range(100):
            speculation.begin_step()
            speculation.observe(running)
