"""Measure what guesses gain: tokens per second with and without speculative decoding, on text that repeats and not.

    python experiments/17_speculation/run.py [--device cpu|cuda] [--out DIR] [--only text peer draft]
    python experiments/17_speculation/run.py --predict

`text` runs the embedded SmolLM2-135M-Instruct in bfloat16. On a GPU there are two more parts. `peer` serves the same
text with vLLM, which has to be installed in this Python environment. `draft` runs a model of Qwen3-8B's shape with a
draft model of Qwen3-0.6B's shape, both with random weights, and draws at random which guesses are right. The result
goes to experiments/17_speculation/results/<device>.json, below DIR where one is given. Parts that are not measured
again keep their rows.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from book import results
from book.embedded import write_embedded
from book.experiment import command_line, predicted, rate_row, record
from book.prose import chunks, text
from book.random_models import QWEN3_0_6B, QWEN3_8B, checkpoint
from mini_engine import LLM, SamplingParams
from mini_engine.bench.peer_process import PeerOptions, PeerProcess, check_installed
from mini_engine.bench.workloads import BenchRequest
from mini_engine.engine import LLMEngine
from mini_engine.llm import TextEngine
from mini_engine.speculative.drafter import Drafter
from mini_engine.speculative.speculation import Speculation

EXPERIMENT, MODEL = "17_speculation", "smollm2-135m-instruct"
PARTS = {"cpu": ["text"], "cuda": ["text", "peer", "draft"]}
MOST_GUESSES, LENGTH, FIRST, MAX_TOKENS = 6, 160, 8, 128
ROUNDS = {"cpu": 5, "cuda": 11}  # a round of a GPU is short, and its host is disturbed
DRAFT_ROUNDS = 3
NGRAM = {"method": "ngram", "num_speculative_tokens": MOST_GUESSES}
SUFFIX = {"method": "suffix", "num_speculative_tokens": MOST_GUESSES}
# Each with the one without guesses whose tokens it should have.
METHODS: dict[str, dict[str, tuple[str, dict[str, object]]]] = {
    "cpu": {
        "none": ("none", {}),
        "ngram": ("none", {"speculative_config": NGRAM}),
        "suffix": ("none", {"speculative_config": SUFFIX}),
    }
}
METHODS["cuda"] = METHODS["cpu"] | {
    "none, batch-invariant": ("none, batch-invariant", {"batch_invariant": True}),
    "ngram, batch-invariant": ("none, batch-invariant", {"batch_invariant": True, "speculative_config": NGRAM}),
}
PEER_METHODS: dict[str, dict[str, object] | None] = {"none": None, "ngram": NGRAM}
COPY, FREE = "copy", "free"
BATCHES = {"cpu": (1, 8), "cuda": (1, 8, 64, 256)}
BOUND = "a step with guesses takes no less time than one without: the rate without, times the tokens of a step"
SHARE_RIGHT, DRAFTED = 0.8, (1, 2, 4)  # of the part `draft`: guesses that are drawn to be right, guesses of a step
PREDICTED = "expected tokens of a step, over the measured times of the large model's step and of the guesses"


@dataclass(frozen=True)
class Served:
    """What an engine did with a workload: tokens of each request, steps, guesses, and right ones."""

    token_ids: list[list[int]]
    steps: int
    guesses: int
    right: int


# --- text ------------------------------------------------------------------------------------------------------------


def prompts(llm: LLM, workload: str, num_requests: int) -> list[list[int]]:
    """Pieces of a text, each followed, in `copy`, by its own beginning, so that the model goes on with a copy."""
    assert llm.tokenizer is not None
    encode = llm.tokenizer.encode
    pieces = chunks(encode(text("evaluation")), LENGTH).tolist()
    between = encode("\n\nThe same text again:\n\n")
    made = []
    for i in range(num_requests):
        piece = pieces[i % len(pieces)]
        made.append(piece + between + piece[:FIRST] if workload == COPY else piece)
    return made


def params_of(workload: str) -> SamplingParams:
    """Greedy where the text is copied; with temperature 1 where it is free, so that it does not repeat itself."""
    temperature = 0.0 if workload == COPY else 1.0
    return SamplingParams(temperature=temperature, seed=0, max_tokens=MAX_TOKENS, ignore_eos=True)


def serve(engine: TextEngine, given: Sequence[list[int]], params: SamplingParams) -> Served:
    """Serve some requests at once."""
    metrics = engine.engine.metrics
    before = metrics.steps, metrics.num_draft_tokens, metrics.num_accepted_tokens
    outputs = engine.generate([{"prompt_token_ids": prompt} for prompt in given], params)
    after = metrics.steps, metrics.num_draft_tokens, metrics.num_accepted_tokens
    steps, guesses, right = (b - a for a, b in zip(before, after, strict=True))
    return Served([list(output.outputs[0].token_ids) for output in outputs], steps, guesses, right)


def engines_of(llm: LLM, device: str) -> dict[str, TextEngine]:
    """An engine for each method, all with the same few pages, because they share a GPU."""
    most = max(BATCHES[device])
    same = {"enable_prefix_caching": False, "max_num_seqs": most, "max_model_len": 2 * (LENGTH + MAX_TOKENS)}
    same |= {"num_pages": most * (LENGTH + MAX_TOKENS) // 8} if device == "cuda" else {}
    return {name: llm.with_options(**same, **options) for name, (_, options) in METHODS[device].items()}


def rows_of(
    engines: Mapping[str, TextEngine], given: Sequence[list[int]], workload: str, device: str
) -> list[results.Row]:
    """Serve a workload with each method, in turns."""
    params, tokens = params_of(workload), len(given) * MAX_TOKENS
    seconds: dict[str, list[float]] = {name: [] for name in engines}
    served: dict[str, Served] = {}
    for turn in range(ROUNDS[device] + 1):  # the first one warms up, and lets the engine learn what a step costs
        for name, engine in engines.items():
            start = time.perf_counter()
            served[name] = serve(engine, given, params)
            if turn:
                seconds[name].append(time.perf_counter() - start)
    rows = []
    for name, own in served.items():
        case: dict[str, results.Setting] = {
            "part": "text", "workload": workload, "requests": len(given), "method": name,
        }  # fmt: skip
        per_step, without = tokens / own.steps, METHODS[device][name][0]
        bound = tokens / min(seconds[without]) * served[without].steps / own.steps
        rows.append(rate_row("tokens per second", tokens, seconds[name], bound, BOUND, case))
        why = "every guess right"
        rows.append(results.Row("tokens of a step", per_step, "tokens", len(given) * (MOST_GUESSES + 1), why, case))
        if name != without:
            why = "a property of the text and the model"
            rows.append(results.Row("right guesses", own.right, "tokens", None, f"{why}; of {own.guesses}", case))
            equal = sum(a == b for a, b in zip(own.token_ids, served[without].token_ids, strict=True))
            why = "every request, if the bits of a logit did not depend on the number of tokens in a step"
            rows.append(results.Row("equal outputs", equal, "requests", len(given), why, case))
    return rows


def text_rows(device: str) -> Iterator[list[results.Row]]:
    llm = LLM(MODEL, dtype="bfloat16", device=device, enable_prefix_caching=False, num_pages=64)
    engines = engines_of(llm, device)
    for workload in (COPY, FREE):
        for num_requests in BATCHES[device]:
            yield rows_of(engines, prompts(llm, workload, num_requests), workload, device)


# --- vLLM ------------------------------------------------------------------------------------------------------------


def peer_rows(device: str, methods: Sequence[str]) -> Iterator[list[results.Row]]:
    """Serve the same text with vLLM."""
    check_installed("vllm")
    llm = LLM(MODEL, dtype="bfloat16", device="cpu", warm_up=False)
    with tempfile.TemporaryDirectory() as folder:
        write_embedded(llm, Path(folder))
        for name in methods:
            most = max(BATCHES[device])
            options = PeerOptions(
                folder, "bfloat16", max_num_seqs=most, max_model_len=2 * (LENGTH + MAX_TOKENS),
                enable_prefix_caching=False, speculative_config=PEER_METHODS[name],
            )  # fmt: skip
            with closing(PeerProcess("vllm", options)) as peer:
                for workload in (COPY, FREE):
                    for num_requests in BATCHES[device]:
                        given = [BenchRequest(own, params_of(workload)) for own in prompts(llm, workload, num_requests)]
                        seconds = []
                        for turn in range(ROUNDS[device] + 1):
                            peer(given)
                            if turn:
                                seconds.append(peer.seconds)
                        case: dict[str, results.Setting] = {
                            "part": "vLLM", "workload": workload, "requests": num_requests, "method": name,
                        }  # fmt: skip
                        spread = tuple(num_requests * MAX_TOKENS / limit(seconds) for limit in (max, min))
                        value = num_requests * MAX_TOKENS / statistics.median(seconds)
                        why = "beside the rows of our engine"
                        yield [results.Row("tokens per second", value, "tokens/s", None, why, case, spread)]


# --- a draft model ---------------------------------------------------------------------------------------------------


class SyntheticSpeculation(Speculation):
    """Checks a fixed number of guesses in each step, and draws at random which of them are right.

    Random weights have no acceptance of their own. Right guesses take the place of the sampled tokens, so that the
    draft model's cache stays as it would with them.
    """

    def __init__(self, drafter: Drafter, num_tokens: int, share: float) -> None:
        super().__init__(drafter, num_tokens, 1)
        self._share, self._random = share, np.random.default_rng(0)

    def guess(self, running, rows, most, num_tokens):  # type: ignore[no-untyped-def]
        return self.drafter.propose(running, rows, np.minimum(most, self._num_tokens))

    def asks(self, running, rows) -> bool:  # type: ignore[no-untyped-def]
        return True

    def check(self, running, rows, sampled, num_guesses):  # type: ignore[no-untyped-def]
        guesses = running.guesses(rows, sampled.shape[1] - 1)
        is_right = self._random.random(guesses.shape) < self._share
        is_right &= np.arange(guesses.shape[1]) < num_guesses[:, None]
        right = np.logical_and.accumulate(is_right, axis=1).sum(axis=1)
        for row, count in enumerate(right):
            sampled[row, :count] = guesses[row, :count]
        return right


class NoDrafter:
    """Guesses without a model, to measure the large model's steps alone."""

    def propose(self, running, rows, most):  # type: ignore[no-untyped-def]
        return np.zeros((len(rows), most.max(initial=0)), dtype=np.int32), most

    def forget(self) -> None: ...


def seconds_of(engine: LLMEngine, num_tokens: int = 200) -> tuple[float, float]:
    """Generate for one request, and return the seconds of a step, and of a token."""
    params = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)
    engine.add_request("one", list(range(100, 228)), params)
    for _ in range(8):
        engine.step()
    start, steps, before = time.perf_counter(), 0, engine.metrics.output_tokens
    while engine.has_unfinished:
        engine.step()
        steps += 1
    seconds = time.perf_counter() - start
    return seconds / steps, seconds / (engine.metrics.output_tokens - before)


def draft_row(count: int, of_token: Sequence[float], bound: float | None, why: str) -> results.Row:
    """The rate of one number of guesses, from the seconds of a token in each round."""
    rates = sorted(1 / seconds for seconds in of_token)
    case: dict[str, results.Setting] = {"part": "draft", "guesses": count}
    spread = rates[0], rates[-1]
    return results.Row("tokens per second", statistics.median(rates), "tokens/s", bound, why, case, spread)


def draft_rows(device: str) -> Iterator[list[results.Row]]:
    """Guess with a model of another size, and compare with what the times of its parts predict."""
    rows, where = list[results.Row](), torch.device(device)
    same = {"max_num_seqs": 8, "max_model_len": 2048, "num_pages": 1024, "enable_prefix_caching": False}
    small, large = (
        checkpoint(name, shape, torch.bfloat16, where) for name, shape in (("0.6B", QWEN3_0_6B), ("8B", QWEN3_8B))
    )
    with small as (draft, _), large as (target, _):
        drafting, _ = seconds_of(LLM(str(draft), pipeline_depth=0, **same).engine)
        llm = LLM(str(target), **same)
        rows.append(draft_row(0, [seconds_of(llm.engine)[1] for _ in range(DRAFT_ROUNDS)], None, "see experiment 13"))
        for count in DRAFTED:
            config = {"method": "draft_model", "model": str(draft), "num_speculative_tokens": count}
            engine = llm.with_options(speculative_config=config).engine
            assert engine.core.speculation is not None
            drafter = engine.core.speculation.drafter
            engine.core.speculation = SyntheticSpeculation(NoDrafter(), count, SHARE_RIGHT)
            checking, _ = seconds_of(engine, 400)
            engine.core.speculation = SyntheticSpeculation(drafter, count, SHARE_RIGHT)
            of_token = [seconds_of(engine, 400)[1] for _ in range(DRAFT_ROUNDS)]
            expected = sum(SHARE_RIGHT**i for i in range(count + 1)) / (checking + count * drafting)
            rows.append(draft_row(count, of_token, expected, PREDICTED))
            del engine, drafter
    yield rows


# --- prediction ------------------------------------------------------------------------------------------------------

RIGHT, OF_TOKEN = 0.9, 0.15  # of the guesses in a copy; of a step's time, each further token on a CPU


def predictions() -> str:
    """Derive the README's predictions from the share of right guesses and the cost of a token."""
    tokens = sum(RIGHT**i for i in range(MOST_GUESSES + 1))
    cost = 1 + OF_TOKEN * MOST_GUESSES
    return predicted({
        f"{MOST_GUESSES} guesses, {RIGHT:.0%} of them right": f"{tokens:.2f} tokens a step",
        f"a step of {MOST_GUESSES + 1} tokens": f"{cost:.2f} times one of a single token",
        "gain": f"{tokens / cost:.2f}",
    })  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> None:
    options = command_line(__doc__, predictions)
    options.add_argument("--only", nargs="+", choices=PARTS["cuda"], help="measure these parts only")
    options.add_argument("--methods", nargs="+", choices=list(PEER_METHODS), default=list(PEER_METHODS), help="of vLLM")
    chosen = options.parse_args(arguments)
    parameters: dict[str, results.Setting] = {
        "model": MODEL, "dtype": "bfloat16", "rounds": ROUNDS[chosen.device], "prompt": LENGTH, "output": MAX_TOKENS,
        "most guesses": MOST_GUESSES,
    }  # fmt: skip
    measure = {"text": text_rows, "peer": partial(peer_rows, methods=chosen.methods), "draft": draft_rows}
    for part in chosen.only or PARTS[chosen.device]:
        rows = list[results.Row]()
        for more in measure[part](chosen.device):
            rows += more  # recorded at once, so that an interrupted run keeps what it has measured
            result = results.new_result(EXPERIMENT, rows, parameters, chosen.device)
            record(results.with_recorded(result, chosen.out, section="part"), chosen.out)


if __name__ == "__main__":
    main()
