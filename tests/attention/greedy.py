"""A backend on a GPU under load: the engine's greedy tokens, compared with a model in float64."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch

from mini_engine.parts import default_parts
from mini_engine.sampling_params import SamplingParams
from tests.helpers import check_nothing_leaked, make_engine, serve
from tests.models.families import our_model, transformers_model, whole

TINY = {
    "llama": {"hidden_size": 192, "num_attention_heads": 3, "num_key_value_heads": 1, "head_dim": 64},
    "qwen3": {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 128},
    "gemma2": {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 256, "sliding_window": 20},
    "deepseek_v2": {"kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}
    | {"hidden_size": 128, "first_k_dense_replace": 3},
    "gpt2": {"n_embd": 128, "n_head": 2},
}


def check_greedy(
    device: torch.device, family: str, *, most_lost: float | None = None, fewer_best: float = 0.1, **options: Any
) -> None:
    """Serve requests with few pages and equal prompts: they are preempted, share pages and end at different times.

    Args:
        device: a GPU.
        family: a key of TINY.
        most_lost: see `check_near_greedy`.
        fewer_best: see `check_near_greedy`.
        options: the engine's options.
    """
    theirs = transformers_model(family, seed=2, dtype=torch.bfloat16, **TINY[family])
    model = our_model(theirs, parts=default_parts(device)).to(device)
    generator = torch.Generator().manual_seed(1)
    stem = torch.randint(3, 61, (40,), generator=generator).tolist()
    params = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
    arrivals: dict[int, list[Any]] = {}
    for i in range(12):
        own = torch.randint(3, 61, (1 + 3 * i,), generator=generator).tolist()
        arrivals.setdefault(i // 3, []).append((str(i), [*stem, *own] if i % 2 else own, params))
    engine = make_engine(
        model, parts=default_parts(device), num_pages=24, page_size=16, max_batch_size=8, enable_prefix_caching=True,
        max_num_batched_tokens=64, **options,
    )  # fmt: skip
    outputs = serve(engine, arrivals)
    check_nothing_leaked(engine)
    prompts = {name: prompt for several in arrivals.values() for name, prompt, _ in several}
    check_near_greedy(theirs, prompts, outputs, most_lost=most_lost, fewer_best=fewer_best)


def check_near_greedy(
    theirs: Any,
    prompts: Mapping[str, list[int]],
    outputs: Mapping[str, list[int]],
    *,
    most_lost: float | None = None,
    fewer_best: float = 0.1,
) -> None:
    """Check that each token is the best one of the model in float64, or as close to the best as bfloat16 can tell.

    Two logits that are each off by an error can change places if they are less than twice the error apart. The error
    is measured with the model in bfloat16 on the host.

    Args:
        theirs: transformers' model in bfloat16.
        prompts: the prompt of each request.
        outputs: tokens of each request.
        most_lost: how far the logit of a token may be below the best one, over the range of the logits; None for twice
            the largest error.
        fewer_best: how much smaller the share of best tokens may be than with the model in bfloat16 on the host.
    """
    plain, exact = our_model(theirs), our_model(copy.deepcopy(theirs).double())
    lost, errors, best = [], [], []
    for name, tokens in outputs.items():
        ids, sampled = [[*prompts[name], *tokens]], slice(len(prompts[name]) - 1, -1)
        want, rounded = (whole(model, ids)[0][sampled].double() for model in (exact, plain))
        chosen = want.gather(1, torch.tensor(tokens)[:, None])[:, 0]
        spread = want.amax(1) - want.amin(1)
        lost.append((want.amax(1) - chosen) / spread)
        errors.append((want - rounded).abs().amax(1) / spread)
        best.append(want.argmax(1) == rounded.argmax(1))
    below, most = torch.cat(lost), most_lost or 2 * float(torch.cat(errors).max())
    assert below.max() < most, f"a token is {below.max():.3f} of the range below the best one, with {most:.3f} allowed"
    share, on_host = (float(torch.cat(own).double().mean()) for own in ([x == 0 for x in lost], best))
    assert share > on_host - fewer_best, f"{share:.0%} of the tokens are the best; on the host, {on_host:.0%} are"
