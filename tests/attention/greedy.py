"""A backend on a GPU under load: the engine's greedy tokens beside those of a model in float64."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch

from mini_engine.models.base import CausalLM
from mini_engine.parts import default_parts
from mini_engine.sampling_params import SamplingParams
from tests.helpers import check_nothing_leaked, make_engine, serve
from tests.models.families import our_model, transformers_model, whole

TINY = {
    "llama": {"hidden_size": 192, "num_attention_heads": 3, "num_key_value_heads": 1, "head_dim": 64},
    "qwen3": {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 128},
    "gemma2": {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 256, "sliding_window": 20},
    "gpt2": {"n_embd": 128, "n_head": 2},
}


def check_greedy(
    device: torch.device, family: str, *, most_lost: float = 0.05, least_best: float = 0.9, **options: Any
) -> None:
    """Serve requests with few pages and equal prompts: they are preempted, share pages and end at different times.

    In bfloat16 close logits flip: each token is the best of the float64 model, or close to it, and most are the best.

    Args:
        device: a GPU.
        family: of TINY.
        most_lost: how far the logit of a token may be below the best one, over the range of the logits.
        least_best: share of the tokens that must be the best.
        options: of the engine.
    """
    theirs = transformers_model(family, seed=2, dtype=torch.bfloat16, **TINY[family])
    oracle = our_model(copy.deepcopy(theirs).double())
    model = our_model(theirs, parts=default_parts(device)).to(device)
    generator = torch.Generator().manual_seed(1)
    stem = torch.randint(3, 61, (40,), generator=generator).tolist()
    params = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
    arrivals: dict[int, list[Any]] = {}
    for i in range(12):
        own = torch.randint(3, 61, (1 + 3 * i,), generator=generator).tolist()
        arrivals.setdefault(i // 3, []).append((str(i), [*stem, *own] if i % 2 else own, params))
    engine = make_engine(
        model, parts=default_parts(device), num_pages=24, page_size=16, max_batch_size=8, prefix_sharing=True,
        max_num_batched_tokens=64, **options,
    )  # fmt: skip
    outputs = serve(engine, arrivals)
    check_nothing_leaked(engine)
    prompts = {name: prompt for several in arrivals.values() for name, prompt, _ in several}
    check_near_greedy(oracle, prompts, outputs, most_lost, least_best)


def check_near_greedy(
    oracle: CausalLM,
    prompts: Mapping[str, list[int]],
    outputs: Mapping[str, list[int]],
    most_lost: float,
    least_best: float,
) -> None:
    """Check that each token of the outputs is the oracle's best after those before it, or close to it.

    Args:
        oracle: a model in float64.
        prompts: of each request.
        outputs: tokens of each request.
        most_lost: how far the logit of a token may be below the best one, over the range of the logits.
        least_best: share of the tokens that must be the best.
    """
    best, total = 0, 0
    for name, tokens in outputs.items():
        logits = whole(oracle, [[*prompts[name], *tokens]])[0][len(prompts[name]) - 1 : -1]
        chosen = logits.gather(1, torch.tensor(tokens)[:, None])[:, 0]
        lost = (logits.amax(1) - chosen) / (logits.amax(1) - logits.amin(1))
        assert lost.max() < most_lost, f"request {name}"
        best, total = best + int((lost == 0).sum()), total + len(tokens)
    assert best >= least_best * total, f"{best} of {total}"
