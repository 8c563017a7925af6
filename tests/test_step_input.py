"""`StepInput`: the same step with single queries."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from mini_engine.attention.spec import AttentionSpec
from mini_engine.attention.torch import TorchBackend
from mini_engine.batch import StepBatch
from mini_engine.kv_cache.paged import PagedKVCache
from mini_engine.parts import Parts
from mini_engine.step_input import NO_COPIES, StepInput

SPEC = AttentionSpec(0, 2, 1, 8, 0.3)


@given(st.lists(st.tuples(st.integers(1, 5), st.integers(0, 9)), min_size=1, max_size=5), st.integers(1, 4), st.data())
def test_attention_and_logits_are_those_of_the_step(
    sequences: list[tuple[int, int]], page_size: int, data: st.DataObject
) -> None:
    """Sequences of one token over the same pages compute the same, in the same order."""
    num_new, before = (np.array(column) for column in zip(*sequences, strict=True))
    kv_lens, num_tokens = num_new + before, int(num_new.sum())
    num_pages = int((-(-kv_lens // page_size)).sum())
    num_decodes = data.draw(st.integers(0, len(num_new)))
    num_logits = np.array([data.draw(st.integers(0, n)) for n in num_new.tolist()])
    step = StepInput(
        rows=np.arange(len(num_new)), num_new=num_new, num_logits=num_logits, kv_lens=kv_lens, num_computed=kv_lens,
        token_ids=np.arange(num_tokens, dtype=np.int32), token_source=None,
        pages=np.array(data.draw(st.permutations(range(num_pages))), dtype=np.int32), page_positions=None,
        admitted=(), num_decodes=num_decodes, copies=NO_COPIES, levels=(),
    )  # fmt: skip
    outs = []
    for own in (step, step.with_single_queries(page_size)):
        batch = StepBatch.build(
            token_ids=own.token_ids, num_new=own.num_new, kv_lens=own.kv_lens, pages=own.pages, page_size=page_size,
            num_logits=own.num_logits, num_decodes=own.num_decodes,
        )  # fmt: skip
        backend = TorchBackend([SPEC], PagedKVCache([SPEC], num_pages, page_size, torch.float64), Parts())
        generator = torch.Generator().manual_seed(num_tokens)
        for stored in backend.cache.layers[0]:
            stored.normal_(generator=generator)
        q, k, v = (torch.randn(num_tokens, n, 8, dtype=torch.float64, generator=generator) for n in (2, 1, 1))
        backend.plan(batch)
        outs.append((batch, own, backend(0, q, k, v)))
    (batch, _, want), (single, own, got) = outs
    torch.testing.assert_close(got, want, rtol=0, atol=1e-12)
    for name in ("positions", "slot_mapping", "logit_rows", "sampled_positions"):
        assert getattr(single, name).tolist() == getattr(batch, name).tolist(), name
    assert (own.num_new[: own.num_decodes] == 1).all() and own.num_decodes == int(num_new[:num_decodes].sum())
    assert own.logit_owners.tolist() == step.rows.repeat(num_logits).tolist()
    assert own.num_new[own.num_decodes :].tolist() == num_new[num_decodes:].tolist()
