"""Run the core on random schedules: `python -m tests.random_schedules NUMBER [suffix]`.

Random arrivals, aborts, ends, chunked prompts, shared prefixes, failed steps, and pools so small that requests are
preempted, with each policy of the waiting queue, at pipeline depths 0 and 1, and at depth 0 with guesses, right and
wrong ones. With `suffix`, all of them at depth 0 with the guesses of suffix decoding. Each request must get the tokens
and log probabilities that it gets alone, and no page may leak.
"""

from __future__ import annotations

import logging
import random
import sys
from dataclasses import dataclass
from itertools import accumulate

import numpy as np

from mini_engine.core import Core
from mini_engine.parts import Parts
from mini_engine.recovery import Recovery
from mini_engine.request import Request, Running
from mini_engine.sampling_params import SamplingParams
from mini_engine.scheduler import Scheduler
from mini_engine.speculative.drafter import Drafter
from mini_engine.speculative.speculation import Speculation
from mini_engine.speculative.suffix import SuffixDrafter
from mini_engine.step_input import SampledTokens, StepInput
from mini_engine.waiting import POLICIES
from tests.fake_executor import VOCAB_SIZE, FakeExecutor, logprob_of, next_token

MAX_ROWS = 5
PARAMS = [
    SamplingParams(temperature=0.0, logprobs=logprobs, prompt_logprobs=prompt_logprobs)
    for logprobs in (None, None, 0, 3)
    for prompt_logprobs in (None, None, 0)
]


@dataclass
class Seen:
    """What the schedules have held."""

    preemptions: int = 0
    shared_tokens: int = 0
    late_ends: int = 0
    right_guesses: int = 0
    overtakes: int = 0


class RandomDrafter:
    """Knows the next tokens, and guesses some of them wrong."""

    def __init__(self, rng: random.Random) -> None:
        self._rng, self.scout = rng, self if rng.random() < 0.5 else None

    def propose(self, running: Running, rows: np.ndarray, most: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        drafts = np.zeros((len(rows), 4), dtype=np.int32)
        for row, own in zip(rows, drafts, strict=True):
            tokens = running.tokens[row, : running.num_known[row]].tolist()
            for i in range(4):
                own[i] = next_token([*tokens, *own[:i].tolist()]) if self._rng.random() < 0.7 else 1
        return drafts, np.array([self._rng.randint(0, own) for own in most.tolist()], dtype=np.int64)

    def forget(self) -> None:
        pass


class FailingExecutor(FakeExecutor):
    """Fails at one of its launches or collects."""

    def __init__(self, *sizes: int, fails_at: int) -> None:
        super().__init__(*sizes)
        self.fails_in = fails_at

    def launch(self, step: StepInput):
        self._count()
        return super().launch(step)

    def collect(self, ticket) -> SampledTokens:
        self._count()
        return super().collect(ticket)

    def _count(self) -> None:
        self.fails_in -= 1
        if self.fails_in == 0:
            raise RuntimeError("the device reports an error")


def alone(prompt: list[int], max_len: int, end_token_ids: tuple[int, ...]) -> list[int]:
    """The tokens of a request, computed without an engine."""
    tokens = list(prompt)
    while len(tokens) < max_len:
        tokens.append(next_token(tokens))
        if tokens[-1] in end_token_ids:
            break
    return tokens


def check_logprobs(request: Request) -> None:
    """A request has the log probabilities that it asks for, each of its own token after its own tokens."""
    params, tokens, num_prompt = request.params, request.token_ids, len(request.prompt_token_ids)
    positions = [*range(1, num_prompt)] * (params.prompt_logprobs is not None)
    positions += [*range(num_prompt, len(tokens))] * (params.logprobs is not None)
    assert sorted(p for p in request.logprobs if p < len(tokens)) == positions
    for p in positions:
        token_ids, logprobs, rank = request.logprobs[p]
        assert (token_ids[0], logprobs[0], rank) == (tokens[p], logprob_of(tokens[: p + 1]), p)


def check(seed: int, depth: int, seen: Seen, drafter: Drafter | None = None) -> None:
    """Serve random requests, and compare each with itself alone."""
    rng = random.Random(seed)
    page_size, max_len = rng.choice([1, 2, 4]), rng.randint(5, 12)
    num_pages = -(-max_len // page_size) + rng.randint(0, 6)
    fails_at = rng.randint(1, 9) if rng.random() < 0.1 else 0
    executor = FailingExecutor(num_pages, page_size, MAX_ROWS, fails_at=fails_at)
    table = Parts().page_table

    def new_scheduler() -> Scheduler:
        return Scheduler(
            table(num_pages, page_size, MAX_ROWS, -(-max_len // page_size)), max_model_len=max_len,
            max_num_batched_tokens=budget, window=None, prefix_sharing=shares, policy=policy, parts=Parts(),
        )  # fmt: skip

    budget, shares = rng.randint(MAX_ROWS, 16), rng.random() < 0.7
    policy = POLICIES[rng.choice(["fcfs", *POLICIES])](rng.randint(0, 3))
    speculation = None
    if drafter:  # steps of random times, so guesses pay at random
        speculation = Speculation(
            drafter, 4, MAX_ROWS, depth > 0, clock=accumulate(iter(random.Random(seed).random, 2.0)).__next__
        )
    recovery = Recovery(Core(executor, new_scheduler, speculation=speculation), depth)
    core, requests, arrivals, aborts = recovery.core, [], [], {}
    for i in range(rng.randint(1, 5)):
        stem = list(rng.choice(requests).prompt_token_ids) if requests and rng.random() < 0.5 else []
        prompt = stem[: rng.randint(0, len(stem))]
        prompt += [rng.randrange(VOCAB_SIZE) for _ in range(rng.randint(not prompt, max(1, max_len - 2 - len(prompt))))]
        prompt = prompt[: max_len - 1]
        limit = rng.randint(len(prompt) + 1, max_len)
        ends = tuple(rng.sample(range(VOCAB_SIZE), 3))
        turn = {"priority": rng.randint(-1, 1), "tenant": rng.choice("ab")}
        requests.append(Request(f"{seed} {i}", prompt, rng.choice(PARAMS), 0, limit, ends, i, **turn))
        arrivals.append(rng.randint(0, 4))
        if rng.random() < 0.1:
            aborts[i] = rng.randint(0, 8)
    arrivals.sort()
    collected: dict[Request, int] = {}
    step = 0
    while core.requests or any(at >= step for at in arrivals):
        for request, at in zip(requests, arrivals, strict=True):
            if at == step:
                recovery.add(request)
        waiting = sorted(core.scheduler.waiting, key=policy.rank)
        for i, at in aborts.items():
            if at == step and requests[i].request_id in core.requests:
                core.end(requests[i], "abort")
        launched = recovery.step()
        seen.preemptions += len(launched.schedule.preempted)
        seen.overtakes += launched.schedule.admitted != waiting[: len(launched.schedule.admitted)]
        seen.shared_tokens += launched.schedule.num_shared
        seen.right_guesses += max(len(core.sampled) - 1, 0)
        for sampled_by, _ in core.sampled:
            for request in sampled_by:
                collected[request] = collected.get(request, 0) + 1
        core.sampled = []
        step += 1
        assert step < 2000, "stuck"
    for request in requests:
        want = alone(request.prompt_token_ids, request.max_len, request.end_token_ids)
        if request.finish_reason == "abort":
            assert request.token_ids == want[: len(request.token_ids)]
        else:
            assert request.error is None and request.token_ids == want, (request.token_ids, want)
            assert collected[request] == len(request.output_token_ids)
            seen.late_ends += depth and request.finish_reason == "stop"
            check_logprobs(request)
    pages, tree = core.scheduler.page_table, core.scheduler.prefix_tree
    if tree is not None:
        tree.evict(pages.num_pages)
    assert pages.num_free_pages == pages.num_pages and pages.num_free_rows == MAX_ROWS, "a page or a row leaks"


def main(number: int, suffix: bool) -> None:
    logging.disable(logging.WARNING)
    seen = Seen()
    for seed in range(number):
        try:
            if suffix:
                check(seed, seed % 2, seen, SuffixDrafter(longest=8, shortest=1, factor=2.0))
            else:
                check(seed, seed % 2, seen, RandomDrafter(random.Random(seed)) if seed % 3 == 2 else None)
        except BaseException:
            print(f"schedule {seed}", file=sys.stderr)
            raise
    print(number, seen.preemptions, seen.shared_tokens, seen.late_ends, seen.right_guesses, seen.overtakes)


if __name__ == "__main__":
    main(int(sys.argv[1]), suffix=sys.argv[2:] == ["suffix"])
