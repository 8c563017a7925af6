"""StepBatch against a loop over tokens that anyone can check."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mini_engine.batch import StepBatch, pack, unpack


@st.composite
def steps(draw):
    """Random sequences of a step, decodes first, each with its own permuted pages."""
    page_size = draw(st.integers(1, 5))
    cached = draw(st.lists(st.integers(0, 12), min_size=1, max_size=6))
    new = sorted(draw(st.lists(st.integers(1, 7), min_size=len(cached), max_size=len(cached))), key=lambda n: n > 1)
    kv_lens = [c + n for c, n in zip(cached, new, strict=True)]
    counts = [-(-n // page_size) for n in kv_lens]
    pages = draw(st.permutations(range(sum(counts) + 3)))[: sum(counts)]
    return page_size, new, kv_lens, counts, pages


@given(steps(), st.data())
def test_arrays_equal_a_loop_over_tokens(step, data):
    page_size, new, kv_lens, counts, pages = step
    samples = data.draw(st.lists(st.booleans(), min_size=len(new), max_size=len(new)))
    token_ids = list(range(100, 100 + sum(new)))
    batch = StepBatch.build(
        token_ids=token_ids, num_new=new, kv_lens=kv_lens, pages=pages, page_size=page_size, samples=samples
    )
    positions, slots, logit_rows = [], [], []
    first_page = row = 0
    for b in range(len(new)):
        own = pages[first_page : first_page + counts[b]]
        for position in range(kv_lens[b] - new[b], kv_lens[b]):
            positions.append(position)
            slots.append(own[position // page_size] * page_size + position % page_size)
        assert batch.kv_page_indices[batch.kv_page_indptr[b] : batch.kv_page_indptr[b + 1]].tolist() == list(own)
        assert batch.kv_last_page_len[b] == kv_lens[b] - (counts[b] - 1) * page_size
        first_page += counts[b]
        row += new[b]
        assert batch.qo_indptr[b + 1] == row
        if samples[b]:
            logit_rows.append(row - 1)
    assert batch.positions.tolist() == positions
    assert batch.slot_mapping.tolist() == slots
    assert len(set(slots)) == len(slots)
    assert batch.logit_rows.tolist() == logit_rows
    assert batch.num_decodes == sum(n == 1 for n in new)
    assert batch.token_ids.tolist() == token_ids


def test_positions_follow_the_pages_that_are_left_after_eviction():
    # Two of three pages are left: the first held positions 0 to 3 and stays as a sink, the second is gone.
    batch = StepBatch.build(token_ids=[7], num_new=[1], kv_lens=[6], pages=[9, 4], page_size=4, page_positions=[0, 8])
    assert batch.positions.tolist() == [9]
    assert batch.slot_mapping.tolist() == [4 * 4 + 1]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_new": [1]}, "sequences"),
        ({"num_new": [0, 3]}, "at least one new token"),
        ({"kv_lens": [4, 1]}, "more new tokens than keys"),
        ({"token_ids": [1, 2]}, "2 tokens given"),
        ({"pages": [0]}, "1 pages given"),
        ({"num_new": [2, 1], "kv_lens": [2, 4]}, "decodes must come first"),
    ],
)
def test_contradictions_are_named(change, message):
    good = {"token_ids": [1, 2, 3], "num_new": [1, 2], "kv_lens": [4, 2], "pages": [0, 1], "page_size": 4}
    StepBatch.build(**good)
    with pytest.raises(ValueError, match=message):
        StepBatch.build(**{**good, **change})


def test_feed_takes_the_previous_samples():
    batch = StepBatch.build(
        token_ids=[0, 0, 5, 6], num_new=[1, 1, 2], kv_lens=[3, 4, 2], pages=[0, 1, 2], page_size=4,
        token_source=[1, 0, -1, -1],
    )  # fmt: skip
    assert batch.feed(torch.tensor([70, 71])).token_ids.tolist() == [71, 70, 5, 6]
    alone = StepBatch.build(token_ids=[3, 4], num_new=[2], kv_lens=[2], pages=[0], page_size=4)
    assert alone.feed(torch.tensor([70, 71])).token_ids.tolist() == [3, 4]  # no token of it was sampled just now


@given(
    st.lists(
        st.tuples(
            st.sampled_from([np.int64, np.int32, np.float32, np.bool_]),
            st.lists(st.integers(0, 4), min_size=1, max_size=3),
        ),
        min_size=1,
        max_size=6,
    )
)
def test_one_copy_keeps_shapes_dtypes_and_values(kinds):
    """What goes to a GPU in one piece; packed and unpacked here on the host."""
    rng = np.random.default_rng(0)
    arrays = {str(i): rng.integers(0, 99, shape).astype(dtype) for i, (dtype, shape) in enumerate(kinds)}
    arrays["transposed"] = np.arange(6).reshape(2, 3).T
    for name, tensor in unpack(pack(arrays, pin_memory=False), arrays).items():
        np.testing.assert_array_equal(tensor.numpy(), arrays[name])
        assert tensor.numpy().dtype == arrays[name].dtype


@pytest.mark.gpu
def test_arrays_are_the_same_on_the_device():
    args = {"token_ids": [1, 2, 3], "num_new": [1, 2], "kv_lens": [4, 7], "pages": [3, 0, 2], "page_size": 4}
    host, device = StepBatch.build(**args), StepBatch.build(**args, device="cuda")
    for name in ("token_ids", "positions", "slot_mapping", "token_source", "logit_rows", "kv_page_indices"):
        assert getattr(device, name).is_cuda
        assert torch.equal(getattr(host, name), getattr(device, name).cpu())
        assert getattr(host, name).dtype == getattr(device, name).dtype
