"""The other functions of FlashInfer that chapter 08 shows, compared with the engine's references."""

from __future__ import annotations

import math
from types import ModuleType

import pytest
import torch
from torch import Tensor

from mini_engine import rope
from mini_engine.attention.naive import alibi_bias, alibi_slopes, attention_mask, masked_attention
from mini_engine.attention.state import AttentionState, attention_state, merge_states
from mini_engine.batch import StepBatch
from mini_engine.rope import RopeConfig, inverse_frequencies, rope_tables
from mini_engine.sampling import SamplingBatch, filter_logits, sample
from mini_engine.sampling_params import SamplingParams

pytestmark = pytest.mark.gpu

QO_HEADS, KV_HEADS, HEAD_DIM = 16, 8, 128
SCALE = HEAD_DIM**-0.5
BF16 = {"atol": 2e-2, "rtol": 2e-2}


@pytest.fixture(scope="module")
def flashinfer() -> ModuleType:
    return pytest.importorskip("flashinfer")


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to("cuda", torch.bfloat16)


def random_qkv(num_queries: int, num_keys: int) -> tuple[Tensor, Tensor, Tensor]:
    q = random(num_queries, QO_HEADS, HEAD_DIM)
    return q, random(num_keys, KV_HEADS, HEAD_DIM, seed=1), random(num_keys, KV_HEADS, HEAD_DIM, seed=2)


def reference(q: Tensor, k: Tensor, v: Tensor, *, window: int | None = None, alibi: bool = False) -> Tensor:
    """Causal attention in float32; the queries belong to the last keys."""
    keys = torch.arange(len(k), device=k.device)
    queries = keys[len(k) - len(q) :]
    bias = alibi_bias(alibi_slopes(q.shape[1]).to(q.device), queries, keys) if alibi else None
    mask = attention_mask(queries, keys, window)
    return masked_attention(q.float(), k.float(), v.float(), scale=SCALE, mask=mask, bias=bias)


# --- one request ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("use_tensor_cores", [False, True])
@pytest.mark.parametrize("num_keys", [1, 17, 3000])
def test_single_decode(flashinfer: ModuleType, num_keys: int, use_tensor_cores: bool) -> None:
    q, k, v = random_qkv(1, num_keys)
    got = flashinfer.single_decode_with_kv_cache(q[0], k, v, use_tensor_cores=use_tensor_cores)
    torch.testing.assert_close(got[None].float(), reference(q, k, v), **BF16)


@pytest.mark.parametrize(("num_queries", "num_keys"), [(1, 40), (40, 40), (33, 700), (600, 600)])
def test_single_prefill(flashinfer: ModuleType, num_queries: int, num_keys: int) -> None:
    q, k, v = random_qkv(num_queries, num_keys)
    got = flashinfer.single_prefill_with_kv_cache(q, k, v, causal=True, backend="fa2")
    torch.testing.assert_close(got.float(), reference(q, k, v), **BF16)


def test_single_prefill_in_layout_hnd(flashinfer: ModuleType) -> None:
    q, k, v = random_qkv(20, 90)
    k_and_v = (x.transpose(0, 1).contiguous() for x in (k, v))
    got = flashinfer.single_prefill_with_kv_cache(q, *k_and_v, causal=True, kv_layout="HND", backend="fa2")
    torch.testing.assert_close(got.float(), reference(q, k, v), **BF16)


def test_a_window_of_flashinfer_does_not_count_the_querys_own_key(flashinfer: ModuleType) -> None:
    q, k, v = random_qkv(50, 300)
    got = flashinfer.single_prefill_with_kv_cache(q, k, v, causal=True, window_left=31, backend="fa2")
    torch.testing.assert_close(got.float(), reference(q, k, v, window=32), **BF16)


# --- positions inside attention ---------------------------------------------------------------------------------------


def rotated(x: Tensor, first_position: int) -> Tensor:
    positions = torch.arange(first_position, first_position + len(x), device=x.device)
    frequencies = inverse_frequencies(RopeConfig(10_000.0, HEAD_DIM)).to(x.device)
    return rope.apply_rope(x.float(), *rope_tables(positions, frequencies))


def test_rope_inside_attention_rotates_keys_that_were_stored_unrotated(flashinfer: ModuleType) -> None:
    q, k, v = random_qkv(24, 200)
    got = flashinfer.single_prefill_with_kv_cache(q, k, v, causal=True, pos_encoding_mode="ROPE_LLAMA", backend="fa2")
    want = reference(rotated(q, 200 - 24), rotated(k, 0), v)
    torch.testing.assert_close(got.float(), want, **BF16)
    decoded = flashinfer.single_decode_with_kv_cache(q[-1], k, v, pos_encoding_mode="ROPE_LLAMA")
    torch.testing.assert_close(decoded.float(), want[-1], **BF16)


def test_alibi(flashinfer: ModuleType) -> None:
    q, k, v = random_qkv(24, 200)
    got = flashinfer.single_prefill_with_kv_cache(q, k, v, causal=True, pos_encoding_mode="ALIBI", backend="fa2")
    want = reference(q, k, v, alibi=True)
    torch.testing.assert_close(got.float(), want, **BF16)
    decoded = flashinfer.single_decode_with_kv_cache(q[-1], k, v, pos_encoding_mode="ALIBI")
    torch.testing.assert_close(decoded.float(), want[-1], **BF16)


@pytest.mark.parametrize("num_heads", [1, 3, 8, 9, 12, 40])
def test_slopes_of_alibi_are_ours(flashinfer: ModuleType, num_heads: int) -> None:
    torch.testing.assert_close(flashinfer.utils.get_alibi_slopes(num_heads), alibi_slopes(num_heads))


# --- many requests ----------------------------------------------------------------------------------------------------

NEW, KV_LENS = [1, 1, 40, 200], [300, 17, 64, 200]


def mixed_step(page_size: int) -> tuple[StepBatch, tuple[Tensor, Tensor], list[tuple[Tensor, Tensor]], Tensor]:
    """Two decodes and two prompts: the step, its pages, the keys and values of each request, and the queries."""
    counts = [-(-n // page_size) for n in KV_LENS]
    pages = torch.randperm(sum(counts), generator=torch.Generator().manual_seed(3)).tolist()
    batch = StepBatch.build(
        token_ids=[0] * sum(NEW), num_new=NEW, kv_lens=KV_LENS, pages=pages, page_size=page_size, device="cuda"
    )
    pool = tuple(random(sum(counts), page_size, KV_HEADS, HEAD_DIM, seed=seed) for seed in (4, 5))
    own = []
    for b, length in enumerate(KV_LENS):
        entries = batch.kv_page_indices[int(batch.kv_page_indptr[b]) : int(batch.kv_page_indptr[b + 1])]
        own.append(tuple(x[entries].flatten(0, 1)[:length] for x in pool))
    return batch, pool, own, random(sum(NEW), QO_HEADS, HEAD_DIM)  # type: ignore[return-value]


def test_batch_attention_computes_decodes_and_prompts_in_one_launch(flashinfer: ModuleType) -> None:
    batch, pool, own, q = mixed_step(16)
    wrapper = flashinfer.BatchAttention(kv_layout="NHD", device="cuda")
    wrapper.plan(
        batch.qo_indptr, batch.kv_page_indptr, batch.kv_page_indices, batch.kv_lens, QO_HEADS, KV_HEADS, HEAD_DIM,
        HEAD_DIM, 16, causal=True, sm_scale=SCALE, q_data_type=torch.bfloat16, kv_data_type=torch.bfloat16,
    )  # fmt: skip
    got, _ = wrapper.run(q, pool)
    for piece, queries, (k, v) in zip(got.split(NEW), q.split(NEW), own, strict=True):
        torch.testing.assert_close(piece.float(), reference(queries, k, v), **BF16)


@pytest.mark.parametrize("backend", ["fa2", "fa3"])
def test_ragged_prefill_reads_keys_that_are_not_paged(flashinfer: ModuleType, backend: str) -> None:
    if backend == "fa3" and not flashinfer.utils.is_sm90a_supported(torch.device("cuda")):
        pytest.skip("FlashAttention-3 needs a Hopper GPU")
    _, _, own, q = mixed_step(16)
    k, v = (torch.cat(x) for x in zip(*own, strict=True))
    wrapper = flashinfer.BatchPrefillWithRaggedKVCacheWrapper(
        torch.zeros(128 * 2**20, dtype=torch.uint8, device="cuda"), "NHD", backend=backend
    )
    indptr = [torch.tensor([0, *lens]).cumsum(0).int() for lens in (NEW, KV_LENS)]
    wrapper.plan(
        *indptr, QO_HEADS, KV_HEADS, HEAD_DIM, causal=True, sm_scale=SCALE, q_data_type=torch.bfloat16,
        kv_data_type=torch.bfloat16,
    )  # fmt: skip
    for piece, queries, keys in zip(wrapper.run(q, k, v).split(NEW), q.split(NEW), own, strict=True):
        torch.testing.assert_close(piece.float(), reference(queries, *keys), **BF16)


def test_states_have_a_logarithm_to_base_2_and_merge_like_ours(flashinfer: ModuleType) -> None:
    """Attention over the first 100 keys, over the others, and merged."""
    q, k, v = random_qkv(9, 260)
    parts, states = [slice(0, 100), slice(100, 260)], []
    for keys in parts:
        out, lse = flashinfer.single_prefill_with_kv_cache(q, k[keys], v[keys], return_lse=True, backend="fa2")
        want = attention_state(q.float(), k[keys].float(), v[keys].float(), scale=SCALE)
        torch.testing.assert_close(lse * math.log(2), want.lse, **BF16)
        states.append((out, lse))
    merged, lse = flashinfer.merge_state(*states[0], *states[1])
    want = merge_states(*(AttentionState(out.float(), lse * math.log(2)) for out, lse in states))
    torch.testing.assert_close(merged.float(), want.out, **BF16)
    torch.testing.assert_close(lse * math.log(2), want.lse, **BF16)
    whole = attention_state(q.float(), k.float(), v.float(), scale=SCALE)
    torch.testing.assert_close(merged.float(), whole.out, **BF16)


# --- samplers ---------------------------------------------------------------------------------------------------------

DRAWS, VOCABULARY = 40_000, 50


def check_frequencies(tokens: Tensor, probs: Tensor) -> None:
    """Each token is drawn as often as its probability predicts, to five standard deviations; impossible ones never."""
    counts = torch.bincount(tokens.long().cpu(), minlength=VOCABULARY)
    assert len(tokens) == DRAWS and not counts[probs == 0].any()
    deviation = (DRAWS * probs * (1 - probs)).sqrt()
    assert ((counts - DRAWS * probs).abs() <= 5 * deviation + 1).all()


def filtered(logits: Tensor, *, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0) -> Tensor:
    """The probabilities that our filters leave."""
    arguments = (torch.tensor([top_k]), torch.tensor([top_p]), torch.tensor([min_p]))
    return filter_logits(logits[None], *arguments)[0].softmax(0)


@pytest.fixture
def logits() -> Tensor:
    return 2 * torch.randn(VOCABULARY, generator=torch.Generator().manual_seed(6))


@pytest.fixture
def probs(logits: Tensor) -> Tensor:
    """The same distribution in every row."""
    return logits.softmax(0).expand(DRAWS, -1).contiguous().cuda()


@pytest.fixture
def random_numbers() -> torch.Generator:
    return torch.Generator("cuda").manual_seed(7)


def test_sampling_without_filters(
    flashinfer: ModuleType, logits: Tensor, probs: Tensor, random_numbers: torch.Generator
) -> None:
    rows = logits.expand(DRAWS, -1).contiguous().cuda()
    check_frequencies(flashinfer.sampling_from_logits(rows, generator=random_numbers), filtered(logits))
    check_frequencies(flashinfer.sampling_from_probs(probs, generator=random_numbers), filtered(logits))


def test_top_k_top_p_and_min_p_keep_what_our_filters_keep(
    flashinfer: ModuleType, logits: Tensor, probs: Tensor, random_numbers: torch.Generator
) -> None:
    how = {"generator": random_numbers}
    check_frequencies(flashinfer.top_k_sampling_from_probs(probs, 5, **how), filtered(logits, top_k=5))
    check_frequencies(flashinfer.top_p_sampling_from_probs(probs, 0.8, **how), filtered(logits, top_p=0.8))
    check_frequencies(flashinfer.min_p_sampling_from_probs(probs, 0.1, **how), filtered(logits, min_p=0.1))
    both = flashinfer.top_k_top_p_sampling_from_probs(probs, 8, 0.7, filter_apply_order="top_k_first", **how)
    check_frequencies(both, filtered(logits, top_k=8, top_p=0.7))


def test_a_token_of_flashinfer_depends_on_its_row_and_ours_does_not(
    flashinfer: ModuleType, logits: Tensor, probs: Tensor
) -> None:
    """Sixty-four rows with the same distribution and the same seed."""
    numbers = {"dtype": torch.int64, "device": "cuda"}
    seeds = torch.full((64,), 7, **numbers)
    theirs = flashinfer.sampling_from_probs(probs[:64], seed=seeds, offset=torch.zeros(64, **numbers))
    batch = SamplingBatch.build([SamplingParams()] * 64, [7] * 64, [11] * 64, "cuda")
    ours = sample(logits.expand(64, -1).cuda(), batch)
    assert len(set(theirs.tolist())) > 1
    assert len(set(ours.tolist())) == 1
