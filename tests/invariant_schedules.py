"""Serve random requests by batch-invariant engines on random schedules: `python -m tests.invariant_schedules NUMBER`.

On a GPU: `python -m tests.invariant_schedules NUMBER START cuda`.

Tiny models of each family in several dtypes, with matrices and activations on which PyTorch's own operators depend
on the batch. Chunked prompts, shared prefixes, guesses, both pipeline depths, one thread and two, and pools so small
that requests are preempted. Each request must get the tokens that it gets alone, with the same bits of the logits.
"""

from __future__ import annotations

import logging
import random
import sys
from collections import Counter
from contextlib import suppress
from dataclasses import replace
from functools import cache, lru_cache
from typing import Any

import torch

from mini_engine.engine import LLMEngine
from mini_engine.parts import default_parts
from mini_engine.request import Request
from mini_engine.sampling import SamplingBatch, sample
from mini_engine.sampling_params import SamplingParams
from tests.helpers import Arrival, check_nothing_leaked, let_all_guesses_pay, make_engine
from tests.models.families import our_model, transformers_model

DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32, "float64": torch.float64}
# 1,544 columns are enough for bfloat16's sums to differ, and no multiple of a vector, which silu and gelu depend on.
WIDE = {"num_hidden_layers": 2, "intermediate_size": 1544}
SHAPES: dict[str, dict[str, Any]] = {
    "llama": WIDE,
    "qwen3": WIDE,
    "qwen3_moe": WIDE | {"moe_intermediate_size": 1544, "mlp_only_layers": []},
    "gemma2": WIDE | {"layer_types": ["sliding_attention", "full_attention"]},
    "gpt2": {"n_layer": 2, "n_inner": 1544},
}
SCHEDULES = 8  # of the same requests, which are computed alone only once
LONGEST = {"cpu": 40, "cuda": 600}  # tokens of a prompt and its output: on a GPU, attention has splits of 256 keys
# On a GPU, heads that its kernels support, and a product of 3,072 columns with few rows, which cuBLAS splits (split-K).
LARGE = {
    "vocab_size": 64,
    "num_hidden_layers": 2,
    "hidden_size": 512,
    "intermediate_size": 3072,
    "max_position_embeddings": 1024,
}
ON_GPU: dict[str, dict[str, Any]] = {
    "llama": LARGE | {"num_attention_heads": 8, "num_key_value_heads": 2},
    "qwen3": LARGE | {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 128},
    "gpt2": {"n_layer": 2, "n_embd": 512, "n_head": 8, "n_inner": 3072, "n_positions": 1024, "vocab_size": 64},
}
Position = tuple[int, int]  # a request's seed, and the position of a token


class Logits:
    """A sampler that keeps the bits of the logits from which each token was sampled."""

    def __init__(self) -> None:
        self.seen: dict[Position, list[bytes]] = {}

    def __call__(self, logits: torch.Tensor, batch: SamplingBatch) -> torch.Tensor:
        for row, *place in zip(logits, batch.seeds.tolist(), batch.positions.tolist(), strict=True):
            self.seen.setdefault((place[0], place[1]), []).append(row.numpy().tobytes())
        return sample(logits, batch)


def build(family: str, dtype: str, device: str = "cpu", **options: Any) -> tuple[LLMEngine, Logits]:
    """An engine on a model of the family, and the logits that it will sample from.

    On a GPU, the engine has its own sampler, so these logits stay empty: log probabilities of all tokens tell as much.
    """
    logits, parts = Logits(), default_parts(torch.device(device))
    parts = replace(parts, sample=logits) if device == "cpu" else parts
    return make_engine(model_of(family, dtype, device), parts, attn_backend="auto", **options), logits


@cache
def model_of(family: str, dtype: str, device: str = "cpu") -> Any:
    theirs = transformers_model(family, seed=2, dtype=DTYPES[dtype], **(SHAPES if device == "cpu" else ON_GPU)[family])
    return our_model(theirs, parts=default_parts(torch.device(device))).to(device)


@cache
def roomy(family: str, dtype: str, device: str, batch_invariant: bool) -> tuple[LLMEngine, Logits]:
    """An engine for requests alone: whole prompts, and no pressure on its pages."""
    pages = LONGEST[device] // 16 + 2
    return build(family, dtype, device, num_pages=pages, page_size=16, batch_invariant=batch_invariant)


def run(engine: LLMEngine, arrivals: list[tuple[int, Arrival]]) -> dict[str, Request]:
    """Serve requests that arrive before the given steps."""
    requests, step = dict[str, Request](), 0
    while engine.has_unfinished or any(at >= step for at, _ in arrivals):
        for at, (name, prompt, params) in arrivals:
            if at == step:
                requests[name] = engine.add_request(name, prompt, params)
        for request in engine.step().finished:
            if request.error:
                raise request.error
        step += 1
    check_nothing_leaked(engine)
    return requests


def random_requests(rng: random.Random, longest: int) -> list[Arrival]:
    """Requests, some of which begin like others or repeat themselves, which makes guesses right."""
    made: list[Arrival] = []
    for i in range(rng.randint(2, 6)):
        stem = list(rng.choice(made)[1]) if made and rng.random() < 0.5 else []
        prompt = stem[: rng.randint(0, len(stem))]
        prompt += [rng.randrange(3, 8 if rng.random() < 0.5 else 61) for _ in range(rng.randint(1, longest - 10))]
        prompt = prompt[: longest - 10]
        params = SamplingParams(
            temperature=rng.choice([0.0, 0.0, 1.0]), seed=i, ignore_eos=True, logprobs=-1,
            top_p=rng.choice([1.0, 0.9]), prompt_logprobs=rng.choice([None, -1]),
            frequency_penalty=rng.choice([0.0, 0.0, 0.01, 0.5]),
            max_tokens=rng.randint(1, min(longest - len(prompt), 90)),
        )  # fmt: skip
        made.append((f"request {i}", prompt, params))
    return made


def random_options(rng: random.Random, device: str) -> dict[str, Any]:
    longest, most = LONGEST[device], rng.randint(2, 6)
    page_size = rng.choice([1, 4, 16] if device == "cpu" else [16, 32])
    pages = -(-longest // page_size)
    options = {
        "page_size": page_size, "num_pages": pages + rng.randint(0, most * pages // 3),
        "max_batch_size": most, "max_num_batched_tokens": most + rng.choice([0, 3, 10, 100, 1000]),
        "enable_prefix_caching": rng.random() < 0.7, "pipeline_depth": rng.randint(0, 1),
    }  # fmt: skip
    if device == "cuda":
        options["enforce_eager"] = rng.random() < 0.8
    if rng.random() < 0.4:
        guesses = {"method": "ngram", "num_speculative_tokens": rng.randint(1, 6), "prompt_lookup_min": 1}
        options["speculative_config"] = guesses
    return options


@lru_cache(maxsize=3)  # the dtypes of a CPU's schedules take turns
def requests_alone(
    seed: int, dtype: str, device: str, batch_invariant: bool
) -> tuple[str, list[tuple[Arrival, Request, dict[Position, list[bytes]]]]]:
    """A family, and random requests with what each gets alone and the bits of its logits."""
    rng = random.Random(seed)
    family = rng.choice(sorted(SHAPES if device == "cpu" else ON_GPU))
    engine, logits = roomy(family, dtype, device, batch_invariant)
    served = []
    for arrival in random_requests(rng, LONGEST[device]):
        logits.seen = {}
        [request] = run(engine, [(0, arrival)]).values()
        served.append((arrival, request, logits.seen))
    return family, served


def differences(
    seed: int, dtype: str, device: str = "cpu", *, batch_invariant: bool = True, seen: Counter[str] | None = None
) -> list[str]:
    """Serve random requests together and each alone, and describe what differs."""
    rng = random.Random(seed)
    torch.set_num_threads(2 if seed // SCHEDULES % 4 == 0 else 1)  # the same as alone: bits depend on it
    family, alone = requests_alone(seed // SCHEDULES, dtype, device, batch_invariant)
    options = random_options(rng, device)
    engine, logits = build(family, dtype, device, batch_invariant=batch_invariant, **options)
    let_all_guesses_pay(engine)
    together = run(engine, [(rng.randint(0, 6), arrival) for arrival, _, _ in alone])
    if seen is not None:
        seen["preemptions"] += engine.metrics.preemptions
        seen["shared tokens"] += engine.metrics.shared_tokens
        seen["guesses"] += engine.metrics.num_draft_tokens
    found = []
    for (name, _, _), want, own_logits in alone:
        got, where = together[name], f"schedule {seed}, {family} in {dtype}, {name}: "
        if got.token_ids != want.token_ids:
            found.append(where + f"tokens {got.token_ids} instead of {want.token_ids}")
        for position, (ids, values, _) in want.logprobs.items():
            other = got.logprobs.get(position)
            if other is None or other[1].tobytes() != values.tobytes() or other[0].tolist() != ids.tolist():
                found.append(where + f"log probabilities at {position}")
        for place, (bits, *_) in own_logits.items():
            # A wrong guess has logits at the same positions; otherwise a position that is computed again has its bits.
            others = set(logits.seen.get(place, []))
            if bits not in others or (len(others) > 1 and "speculative_config" not in options):
                found.append(where + f"logits at {place[1]}")
    return found


def main(number: int, start: int = 0, device: str = "cpu") -> None:
    """Print the numbers of schedules, preemptions, shared tokens, guesses, and differences without the option.

    An interrupt prints what has been served until then.
    """
    logging.disable(logging.WARNING)
    seen, without, done = Counter[str](), 0, 0
    with suppress(KeyboardInterrupt):
        for seed in range(start, start + number):
            for dtype in ("bfloat16", "float32", "float64") if device == "cpu" else ("bfloat16",):
                if dtype != "float64" or seed % 4 == 0:
                    found = differences(seed, dtype, device, seen=seen)
                    if found:
                        sys.exit("\n".join(found[:10]))
            if seed < start + 2 and device == "cpu":  # on a GPU, the option holds for the whole process
                without += len(differences(seed, "float64", batch_invariant=False))
            done += 1
    print(done, seen["preemptions"], seen["shared tokens"], seen["guesses"], without)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:3]), *sys.argv[3:])
