"""The generate loop: one step computes the prompts, every later step one token for each sequence that still runs."""

import time
from collections.abc import Collection, Iterator
from dataclasses import dataclass

import numpy as np
import torch

from mini_engine.attention.backend import attend_with, create_backend
from mini_engine.batch import StepBatch
from mini_engine.kv_cache.contiguous import ContiguousKVCache
from mini_engine.models.base import CausalLM
from mini_engine.parts import Parts
from mini_engine.sampling import SamplingBatch, sampling_columns
from mini_engine.sequence import Sequence


@dataclass(frozen=True)
class Step:
    """What one step did.

    Attributes:
        new_text: for each sequence of the step, the text that its new token let through.
        seconds: how long it took.
        num_tokens: tokens computed, those of prompts included.
        is_decode: every sequence had one new token.
        kv_bytes: bytes of keys and values that attention read.
    """

    new_text: list[tuple[Sequence, str]]
    seconds: float
    num_tokens: int
    is_decode: bool
    kv_bytes: int


@torch.inference_mode()
def generate_steps(model: CausalLM, sequences: Collection[Sequence], attn_backend: str, parts: Parts) -> Iterator[Step]:
    """Run the sequences to their ends, all in one batch, and yield each step as it is done.

    Static batching: the batch shrinks as sequences end, and nobody joins before all have. Every sequence holds one
    page, as long as the longest may become, from the first step to the last.

    Args:
        model: the model.
        sequences: new sequences, none computed yet.
        attn_backend: name of the attention backend.
        parts: the engine's replaceable parts.
    """
    weight = next(model.parameters())
    page_size = -(-max(sequence.max_len for sequence in sequences) // 128) * 128  # whole blocks, for any backend
    cache = ContiguousKVCache(model.attention_specs, len(sequences), page_size, weight.dtype, weight.device)
    backend = create_backend(attn_backend, model.attention_specs, cache, parts)
    attend = attend_with(backend)
    pages = {sequence: cache.allocate() for sequence in sequences}
    seen = _seen_tokens(sequences, model.config.vocab_size, weight.device)

    running = sorted(sequences, key=lambda s: s.num_prompt_tokens > 1)  # a prompt of one token is a decode
    while running:
        start = time.perf_counter()
        batch = StepBatch.build(
            token_ids=[token for s in running for token in s.token_ids[s.num_computed :]],
            num_new=[len(s.token_ids) - s.num_computed for s in running],
            kv_lens=[len(s.token_ids) for s in running],
            pages=[pages[s] for s in running],
            page_size=page_size,
            device=weight.device,
        )
        columns = sampling_columns([s.params for s in running])
        penalized = np.flatnonzero(columns["repetition_penalty"] != 1)
        sampling = SamplingBatch.build(
            columns,
            [s.seed for s in running],
            [len(s.token_ids) for s in running],
            torch.stack([seen[running[i]] for i in penalized]) if len(penalized) else None,
            weight.device,
        )
        backend.plan(batch)
        hidden = model(batch.token_ids, batch.positions, attend)
        logits = model.compute_logits(hidden[batch.logit_rows])
        samples = parts.sample(logits, sampling).tolist()

        new_text = []
        for sequence, token in zip(running, samples, strict=True):
            sequence.num_computed = len(sequence.token_ids)
            new_text.append((sequence, sequence.append(token)))
            if sequence in seen:
                seen[sequence][token] = True
        yield Step(
            new_text,
            seconds=time.perf_counter() - start,
            num_tokens=batch.num_tokens,
            is_decode=batch.num_decodes == len(running),
            kv_bytes=int(batch.kv_lens.sum()) * cache.bytes_per_token,
        )
        for sequence in running:
            if sequence.finish_reason:
                cache.free(pages.pop(sequence))
        running = [s for s in running if not s.finish_reason]


def _seen_tokens(
    sequences: Collection[Sequence], vocab_size: int, device: torch.device
) -> dict[Sequence, torch.Tensor]:
    """Build a [V] table of the tokens of each sequence that has a repetition penalty."""
    penalized = [s for s in sequences if s.params.repetition_penalty != 1]
    tables = {s: torch.zeros(vocab_size, dtype=torch.bool, device=device) for s in penalized}
    for sequence, table in tables.items():
        table[torch.tensor(sequence.token_ids, device=device)] = True
    return tables
