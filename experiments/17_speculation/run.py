"""Measure what guesses gain: tokens per second with and without speculative decoding, on text that repeats and not.

    python experiments/17_speculation/run.py [--device cpu|cuda] [--out DIR]
    python experiments/17_speculation/run.py --predict

The model is the embedded SmolLM2-135M-Instruct in bfloat16. The result goes to
experiments/17_speculation/results/<device>.json, below DIR where one is given.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from book import results
from book.experiment import command_line, predicted, rate_row, record
from book.prose import chunks, text
from mini_engine import LLM, SamplingParams
from mini_engine.llm import TextEngine

EXPERIMENT, MODEL = "17_speculation", "smollm2-135m-instruct"
MOST_GUESSES, ROUNDS, LENGTH, FIRST, MAX_TOKENS = 6, 5, 160, 8, 128
METHODS: dict[str, dict[str, object] | None] = {
    "none": None,
    "ngram": {"method": "ngram", "num_speculative_tokens": MOST_GUESSES},
    "suffix": {"method": "suffix", "num_speculative_tokens": MOST_GUESSES},
}
COPY, FREE = "copy", "free"
BATCHES = {"cpu": (1, 8), "cuda": (1, 8, 64)}
BOUND = "a step with guesses takes no less time than one without: the rate without, times the tokens of a step"


@dataclass(frozen=True)
class Served:
    """What an engine did with a workload: tokens of each request, steps of decodes, guesses, and right ones."""

    token_ids: list[list[int]]
    steps: int
    guesses: int
    right: int


def prompts(llm: LLM, workload: str, num_requests: int) -> list[dict[str, list[int]]]:
    """Pieces of a text, each followed, in `copy`, by its own beginning, so that the model goes on with a copy."""
    assert llm.tokenizer is not None
    encode = llm.tokenizer.encode
    pieces = chunks(encode(text("evaluation")), LENGTH).tolist()
    between = encode("\n\nThe same text again:\n\n")
    made = []
    for i in range(num_requests):
        piece = pieces[i % len(pieces)]
        made.append({"prompt_token_ids": piece + between + piece[:FIRST] if workload == COPY else piece})
    return made


def serve(engine: TextEngine, given: Sequence[dict[str, list[int]]], params: SamplingParams) -> Served:
    """Serve some requests at once."""
    metrics = engine.engine.metrics
    before = metrics.steps, metrics.num_draft_tokens, metrics.num_accepted_tokens
    outputs = engine.generate(list(given), params)
    after = metrics.steps, metrics.num_draft_tokens, metrics.num_accepted_tokens
    steps, guesses, right = (b - a for a, b in zip(before, after, strict=True))
    return Served([list(output.outputs[0].token_ids) for output in outputs], steps, guesses, right)


def rows_of(llm: LLM, workload: str, num_requests: int) -> list[results.Row]:
    """Serve a workload with each method, in turns."""
    # Greedy where the text is copied; with temperature 1 where it is free, so that it does not repeat itself.
    params = SamplingParams(
        temperature=0.0 if workload == COPY else 1.0, seed=0, max_tokens=MAX_TOKENS, ignore_eos=True
    )
    given = prompts(llm, workload, num_requests)
    engines = {
        name: llm.with_options(speculative_config=options, enable_prefix_caching=False)
        for name, options in METHODS.items()
    }
    seconds: dict[str, list[float]] = {name: [] for name in engines}
    served: dict[str, Served] = {}
    for turn in range(ROUNDS + 1):  # the first one warms up, and lets the engine learn what a step costs
        for name, engine in engines.items():
            start = time.perf_counter()
            served[name] = serve(engine, given, params)
            if turn:
                seconds[name].append(time.perf_counter() - start)
    rows = []
    tokens = num_requests * MAX_TOKENS
    for name, own in served.items():
        case: dict[str, results.Setting] = {"workload": workload, "requests": num_requests, "method": name}
        per_step = tokens / own.steps
        bound = tokens / min(seconds["none"]) * served["none"].steps / own.steps
        rows.append(rate_row("tokens per second", tokens, seconds[name], bound, BOUND, case))
        why = "every guess right"
        rows.append(results.Row("tokens of a step", per_step, "tokens", num_requests * (MOST_GUESSES + 1), why, case))
        if name != "none":
            why = "a property of the text and the model"
            rows.append(results.Row("right guesses", own.right, "tokens", None, f"{why}; of {own.guesses}", case))
            equal = sum(a == b for a, b in zip(own.token_ids, served["none"].token_ids, strict=True))
            why = "every request, if the bits of a logit did not depend on the number of tokens in a step"
            rows.append(results.Row("equal outputs", equal, "requests", num_requests, why, case))
    return rows


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
    chosen = command_line(__doc__, predictions).parse_args(arguments)
    llm = LLM(MODEL, dtype="bfloat16", device=chosen.device, enable_prefix_caching=False)
    parameters: dict[str, results.Setting] = {
        "model": MODEL, "dtype": "bfloat16", "rounds": ROUNDS, "prompt": LENGTH, "output": MAX_TOKENS,
        "most guesses": MOST_GUESSES,
    }  # fmt: skip
    rows: list[results.Row] = []
    for workload in (COPY, FREE):
        for num_requests in BATCHES[chosen.device]:
            rows += rows_of(llm, workload, num_requests)
            for row in rows[-10:]:
                print(row.cells()[:5], flush=True)
    record(results.new_result(EXPERIMENT, rows, parameters, chosen.device), chosen.out)


if __name__ == "__main__":
    main()
