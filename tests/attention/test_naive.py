"""masked_attention against loops in float64 and torch SDPA; masks and ALiBi against their definitions."""

import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers.models.bloom.modeling_bloom import build_alibi_tensor

from mini_engine.attention.naive import alibi_bias, alibi_slopes, attention_mask, masked_attention, sdpa_attention

IMPLEMENTATIONS = pytest.mark.parametrize("attention", [masked_attention, sdpa_attention])


def attention_by_loops(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float,
    mask: Tensor | None = None,
    bias: Tensor | None = None,
    softcap: float | None = None,
) -> Tensor:
    """The definition, one number at a time, in Python floats (float64)."""
    group = q.shape[1] // k.shape[1]
    out = torch.zeros(q.shape, dtype=torch.float64)
    for i in range(q.shape[0]):
        for h in range(q.shape[1]):
            weights = {}
            for j in range(k.shape[0]):
                if mask is not None and not mask[i, j]:
                    continue
                score = scale * sum(float(a) * float(b) for a, b in zip(q[i, h], k[j, h // group], strict=True))
                if softcap is not None:
                    score = softcap * math.tanh(score / softcap)
                if bias is not None:
                    score += float(bias[h, i, j])
                weights[j] = math.exp(score)
            for j, weight in weights.items():
                out[i, h] += weight / sum(weights.values()) * v[j, h // group].double()
    return out


def random_qkv(
    n: int, m: int, num_kv_heads: int, group: int, head_dim: int, seed: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shapes = (n, num_kv_heads * group, head_dim), (m, num_kv_heads, head_dim), (m, num_kv_heads, head_dim)
    q, k, v = (torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes)
    return q, k, v


@IMPLEMENTATIONS
@given(
    n=st.integers(1, 5),
    m=st.integers(1, 6),
    num_kv_heads=st.integers(1, 3),
    group=st.integers(1, 3),
    head_dim=st.sampled_from([1, 4]),
    options=st.sets(st.sampled_from(["mask", "bias", "softcap"])),
    seed=st.integers(0, 2**16),
)
@settings(max_examples=60, deadline=None)
def test_equals_the_definition_in_loops(
    attention, n: int, m: int, num_kv_heads: int, group: int, head_dim: int, options: set[str], seed: int
) -> None:
    q, k, v = random_qkv(n, m, num_kv_heads, group, head_dim, seed, torch.float64)
    generator = torch.Generator().manual_seed(seed + 1)
    mask = torch.rand(n, m, generator=generator) < 0.6 if "mask" in options else None
    bias = torch.randn(q.shape[1], n, m, generator=generator, dtype=torch.float64) if "bias" in options else None
    softcap = 1.5 if "softcap" in options else None
    got = attention(q, k, v, scale=0.7, mask=mask, bias=bias, softcap=softcap)
    torch.testing.assert_close(got, attention_by_loops(q, k, v, 0.7, mask, bias, softcap), atol=1e-12, rtol=1e-12)


@IMPLEMENTATIONS
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)])
@pytest.mark.parametrize(("n", "m"), [(1, 40), (40, 40), (7, 40)])
def test_equals_torch_sdpa_in_float64(attention, n: int, m: int, dtype: torch.dtype, tolerance: float) -> None:
    q, k, v = random_qkv(n, m, 2, 3, 64, 0, dtype)
    mask = attention_mask(torch.arange(m - n, m), torch.arange(m))
    qh, kh, vh = (x.double().transpose(0, 1) for x in (q, k.repeat_interleave(3, 1), v.repeat_interleave(3, 1)))
    expected = F.scaled_dot_product_attention(qh, kh, vh, attn_mask=mask, scale=0.125).transpose(0, 1)
    got = attention(q, k, v, scale=0.125, mask=mask)
    assert got.dtype == dtype
    torch.testing.assert_close(got.double(), expected, atol=tolerance, rtol=0)


@IMPLEMENTATIONS
@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("with_bias", [False, True])
def test_a_query_that_sees_nothing_gets_zero(attention, n: int, with_bias: bool) -> None:
    q, k, v = random_qkv(n, 5, 2, 2, 8, 0, torch.float32)
    mask = torch.ones(n, 5, dtype=torch.bool)
    mask[0] = False
    bias = torch.ones(4, n, 5) if with_bias else None
    got = attention(q, k, v, scale=1.0, mask=mask, bias=bias)
    assert torch.equal(got[0], torch.zeros(4, 8))
    assert (got[1:] != 0).all()


@IMPLEMENTATIONS
def test_no_keys_give_zeros_and_no_queries_give_nothing(attention) -> None:
    q, k, v = random_qkv(2, 3, 1, 2, 8, 0, torch.float32)
    assert torch.equal(attention(q, k[:0], v[:0], scale=1.0), torch.zeros(2, 2, 8))
    assert attention(q[:0], k, v, scale=1.0).shape == (0, 2, 8)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-5), (torch.bfloat16, 2e-2)]
)
@pytest.mark.parametrize("n", [1, 7, 40])
@pytest.mark.parametrize("with_bias", [False, True])
def test_on_a_gpu_both_equal_the_definition(n: int, with_bias: bool, dtype: torch.dtype, tolerance: float) -> None:
    q, k, v = (x.cuda() for x in random_qkv(n, 40, 2, 3, 64, 0, dtype))
    mask = attention_mask(torch.arange(40 - n, 40), torch.arange(40), window=9).cuda()
    mask[0] = False
    slopes = alibi_slopes(6)
    bias = alibi_bias(slopes, torch.arange(40 - n, 40), torch.arange(40)).cuda() if with_bias else None
    wide = None if bias is None else bias.double()
    exact = masked_attention(q.double(), k.double(), v.double(), scale=0.125, mask=mask, bias=wide)
    for attention in (masked_attention, sdpa_attention):
        got = attention(q, k, v, scale=0.125, mask=mask, bias=bias)
        torch.testing.assert_close(got.double(), exact, atol=tolerance, rtol=0)


def test_large_scores_do_not_overflow() -> None:
    q = torch.full((1, 1, 1), 1000.0)
    k = torch.tensor([1.0, 2.0]).view(2, 1, 1)
    v = torch.tensor([3.0, 5.0]).view(2, 1, 1)
    assert masked_attention(q, k, v, scale=1.0).item() == 5.0


def test_a_slice_of_fused_projections_needs_no_copy() -> None:
    fused = torch.randn(4, (4 + 2 + 2) * 8)
    q, k, v = (x.unflatten(1, (-1, 8)) for x in fused.split([32, 16, 16], dim=1))
    contiguous = [x.contiguous() for x in (q, k, v)]
    for attention in (masked_attention, sdpa_attention):
        torch.testing.assert_close(attention(q, k, v, scale=0.3), attention(*contiguous, scale=0.3))
        torch.testing.assert_close(attention(q[-1:], k, v, scale=0.3), attention(*contiguous, scale=0.3)[-1:])


@given(
    length=st.integers(1, 12),
    first=st.integers(0, 11),
    window=st.one_of(st.none(), st.integers(1, 14)),
)
def test_mask_is_its_definition(length: int, first: int, window: int | None) -> None:
    queries, keys = torch.arange(min(first, length - 1), length), torch.arange(length)
    mask = attention_mask(queries, keys, window)
    for i, query in enumerate(queries.tolist()):
        visible = [key for key in range(length) if key <= query and (window is None or query - key < window)]
        assert mask[i].nonzero().flatten().tolist() == visible


def test_window_counts_the_query_itself_as_transformers_does() -> None:
    positions = torch.arange(4)
    assert torch.equal(attention_mask(positions, positions, window=1), torch.eye(4, dtype=torch.bool))


def test_mask_follows_positions_not_places() -> None:
    queries, keys = torch.arange(6), torch.arange(6)
    order = torch.tensor([3, 0, 5, 1, 4, 2])
    assert torch.equal(attention_mask(queries, keys[order], 3), attention_mask(queries, keys, 3)[:, order])


@pytest.mark.parametrize("num_heads", [1, 2, 6, 8, 12, 16])
def test_alibi_equals_bloom(num_heads: int) -> None:
    length = 7
    # Bloom's bias depends only on the key; ours is 0 at the query itself. Softmax cancels the difference.
    bloom = build_alibi_tensor(torch.ones(1, length, dtype=torch.int64), num_heads, torch.float32)
    positions = torch.arange(length)
    ours = alibi_bias(alibi_slopes(num_heads), positions, positions)
    shifted = bloom - bloom.transpose(1, 2)
    torch.testing.assert_close(ours, shifted, atol=1e-5, rtol=1e-5)
    assert (ours.diagonal(dim1=1, dim2=2) == 0).all()


def test_alibi_slopes_of_eight_heads_are_those_of_the_paper() -> None:
    assert alibi_slopes(8).tolist() == [2.0**-i for i in range(1, 9)]
