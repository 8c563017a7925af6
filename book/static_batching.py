"""Static batching: one step computes the prompts, every later step one token for each request that still runs.

Chapter 04's generate loop. Part II replaces it with continuous batching.
"""

import time
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

import torch

from book.contiguous import ContiguousKVCache
from mini_engine.attention.backend import create_backend
from mini_engine.batch import StepBatch
from mini_engine.models.base import CausalLM
from mini_engine.parts import Parts
from mini_engine.request import Request, end_tokens
from mini_engine.sampler import Sampler
from mini_engine.sampling_params import Admission, SamplingParams


@dataclass(frozen=True)
class Step:
    """One step of `generate_steps`.

    Attributes:
        new_tokens: each request of the step, with its new token.
        seconds: how long the step took.
        num_tokens: tokens computed, those of prompts included.
        is_decode: every request had one new token.
        kv_bytes: bytes of keys and values that attention read.
    """

    new_tokens: list[tuple[Request, int]]
    seconds: float
    num_tokens: int
    is_decode: bool
    kv_bytes: int


def make_requests(
    prompts: Sequence[Sequence[int]],
    params: Sequence[SamplingParams],
    *,
    eos_token_ids: Collection[int] = (),
    max_model_len: int,
) -> list[Request]:
    """One request for each prompt, with the seed of its parameters or else its index."""
    return [
        Request(
            str(index),
            list(prompt),
            own,
            seed=index if own.seed is None else own.seed,
            max_len=min(len(prompt) + (own.max_tokens or max_model_len), max_model_len),
            end_token_ids=end_tokens(own, eos_token_ids),
            arrival=index,
        )
        for index, (prompt, own) in enumerate(zip(prompts, params, strict=True))
    ]


@torch.inference_mode()
def generate_steps(model: CausalLM, requests: Sequence[Request], attn_backend: str, parts: Parts) -> Iterator[Step]:
    """Run requests to their ends, all in one batch, and yield each step when it is done.

    The batch shrinks as requests end, and no request joins before all have ended. Every request holds one page, as long
    as the longest may become, from the first step to the last.

    Args:
        model: the model.
        requests: new requests, none computed yet; their tokens grow in place.
        attn_backend: name of the attention backend.
        parts: the engine's replaceable parts.
    """
    page_size = -(-max(request.max_len for request in requests) // 128) * 128  # whole blocks, for any backend
    cache = ContiguousKVCache(model.attention_specs, len(requests), page_size, model.dtype, model.device)
    backend = create_backend(attn_backend, model.attention_specs, cache, parts, model.sinks, model.up_projections)
    pages = {request: cache.allocate() for request in requests}
    computed = dict.fromkeys(requests, 0)
    rows = {request: row for row, request in enumerate(requests)}
    sampler = Sampler(len(requests), model.config.vocab_size, model.device, parts.sample)
    sampler.enter(
        [Admission(rows[r], r.params, r.seed, r.prompt_token_ids, end_token_ids=r.end_token_ids) for r in requests]
    )

    running = sorted(requests, key=lambda r: len(r.token_ids) > 1)  # a prompt of one token is a decode
    while running:
        start = time.perf_counter()
        batch = StepBatch.build(
            token_ids=[token for r in running for token in r.token_ids[computed[r] :]],
            num_new=[len(r.token_ids) - computed[r] for r in running],
            kv_lens=[len(r.token_ids) for r in running],
            pages=[pages[r] for r in running],
            page_size=page_size,
            device=model.device,
        )
        backend.plan(batch)
        hidden = model(batch.token_ids, batch.positions, backend)
        logits = model.compute_logits(hidden[batch.logit_rows])
        sampling_rows = torch.tensor([rows[r] for r in running], device=model.device)
        samples = sampler.sample(logits, sampling_rows, batch.sampled_positions).tolist()

        for request, token in zip(running, samples, strict=True):
            computed[request] = len(request.token_ids)
            request.token_ids.append(token)
            request.finish_reason = request.end_of(request.token_ids)
        yield Step(
            list(zip(running, samples, strict=True)),
            seconds=time.perf_counter() - start,
            num_tokens=batch.num_tokens,
            is_decode=batch.num_decodes == len(running),
            kv_bytes=int(batch.kv_lens.sum()) * cache.bytes_per_token,
        )
        for request in running:
            if request.finish_reason:
                cache.free(pages.pop(request))
        running = [r for r in running if not r.finish_reason]
