"""Right and wrong answers to the homework of chapter 01, with the check that must be the first to find each mistake."""

import math

import torch
import torch.nn.functional as F

from book.grading import right, solution, wrong

reference = solution("01_naive_attention")


# masked_attention ---------------------------------------------------------------------------------------------------


@right("masked_attention")
def head_by_head(q, k, v, *, scale, mask=None, bias=None, softcap=None):
    dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    group = q.shape[1] // k.shape[1]
    out = torch.zeros(q.shape, dtype=dtype)
    for h in range(q.shape[1]):
        scores = q[:, h].to(dtype) @ k[:, h // group].to(dtype).T * scale
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        if bias is not None:
            scores = scores + bias[h]
        if mask is not None:
            scores = torch.where(mask, scores, -math.inf)
        if scores.shape[-1] == 0:
            continue
        exp = torch.exp(scores - scores.amax(dim=-1, keepdim=True).clamp(min=torch.finfo(dtype).min))
        out[:, h] = exp / exp.sum(dim=-1, keepdim=True).clamp(min=torch.finfo(dtype).tiny) @ v[:, h // group].to(dtype)
    return out.to(q.dtype)


@right("masked_attention")
def broadcast_matmul(q, k, v, *, scale, mask=None, bias=None, softcap=None):
    dtype = torch.promote_types(q.dtype, torch.float32)
    n, num_qo_heads, head_dim = q.shape
    m, num_kv_heads, _ = k.shape
    stacked = q.to(dtype).reshape(n, num_kv_heads, -1, head_dim).permute(1, 2, 0, 3).reshape(num_kv_heads, -1, head_dim)
    scores = (stacked @ k.to(dtype).permute(1, 2, 0)).reshape(num_qo_heads, n, m).mul(scale)
    scores = scores if softcap is None else scores.div(softcap).tanh().mul(softcap)
    scores = scores if bias is None else scores.add(bias)
    scores = scores if mask is None else scores.where(mask, torch.tensor(-math.inf, dtype=dtype))
    weights = scores.softmax(-1)
    weights = weights.where(scores != -math.inf, torch.zeros((), dtype=dtype)).reshape(
        num_kv_heads, stacked.shape[1], m
    )
    out = (weights @ v.to(dtype).transpose(0, 1)).reshape(num_qo_heads, n, head_dim)
    return out.transpose(0, 1).to(q.dtype)


def attention(q, k, v, *, scale, mask=None, bias=None, softcap=None, **change):
    """Compute the reference with one change, for the wrong answers below."""
    dtype = change.get("dtype", torch.promote_types(q.dtype, torch.float32))
    group = q.shape[1] // k.shape[1]
    heads = torch.arange(q.shape[1]) % k.shape[1] if change.get("every_other") else torch.arange(q.shape[1]) // group
    scores = torch.einsum("nhd,mhd->hnm", q.to(dtype), k.to(dtype)[:, heads])
    scores = scores * change.get("scale", scale)
    hidden = None if mask is None else mask if change.get("upside_down") else ~mask
    if change.get("mask_first") and hidden is not None:
        scores = scores.masked_fill(hidden, -math.inf)
    if change.get("bias_first"):
        scores = scores + bias.to(dtype)
    if softcap is not None and not change.get("no_softcap"):
        scores = (softcap * torch.tanh(scores.to(change.get("softcap_dtype", dtype)) / softcap)).to(dtype)
    if bias is not None and not change.get("bias_first"):
        bias = bias.to(change.get("bias_dtype", dtype)).to(dtype)
        scores = scores + bias[change.get("bias_heads", slice(None))] * change.get("bias_factor", 1.0)
    if hidden is not None and not change.get("mask_first"):
        scores = scores.masked_fill(hidden, change.get("hidden_score", -math.inf))
    weights = scores.softmax(change.get("axis", -1))
    if change.get("empty_by_mask") and mask is not None:
        weights = weights.masked_fill(~mask, 0.0)
    elif change.get("empty_by_either"):
        by_mask = torch.zeros(scores.shape[-2], dtype=torch.bool) if mask is None else (~mask).all(-1)
        by_bias = by_mask & False if bias is None else (bias == -math.inf).all(-1)
        weights = weights.masked_fill((by_mask | by_bias)[..., None], 0.0)
    elif not change.get("leave_nan") and not change.get("empty_by_mask"):
        weights = weights.masked_fill(scores == -math.inf, 0.0)
    return torch.einsum("hnm,mhd->nhd", weights, v.to(dtype)[:, heads]).to(q.dtype)


@wrong("masked_attention", fails="test_one_query_one_key")
def no_softmax(q, k, v, *, scale, mask=None, bias=None, softcap=None):
    return torch.einsum("nhm,mhd->nhd", torch.einsum("nhd,mhd->nhm", q, k) * scale, v)


@wrong("masked_attention", fails="test_one_query_two_keys")
def softmax_over_the_queries(q, k, v, **options):
    return attention(q, k, v, **options, axis=-2)


@wrong("masked_attention", fails="test_scale")
def scale_of_its_own(q, k, v, *, scale, mask=None, bias=None, softcap=None):
    return attention(q, k, v, scale=q.shape[-1] ** -0.5, mask=mask, bias=bias, softcap=softcap)


@wrong("masked_attention", fails="test_scale")
def scale_in_the_denominator(q, k, v, *, scale, mask=None, bias=None, softcap=None):
    return attention(q, k, v, scale=1 / scale, mask=mask, bias=bias, softcap=softcap)


@wrong("masked_attention", fails="test_heads_are_independent")
def scores_summed_over_heads(q, k, v, *, scale, mask=None, bias=None, softcap=None):
    weights = (torch.einsum("nhd,mhd->nm", q, k) * scale).softmax(-1)
    return torch.einsum("nm,mhd->nhd", weights, v)


@wrong("masked_attention", fails="test_two_heads_share_a_key")
def every_other_head(q, k, v, **options):
    return attention(q, k, v, **options, every_other=True)


@wrong("masked_attention", fails="test_scale")
def scale_twice(q, k, v, *, scale, mask=None, bias=None, softcap=None):
    """Without `scale`, the fused kernel uses its own default."""
    qh, kh, vh = (x.transpose(0, 1)[None] for x in (q * scale, k, v))
    return F.scaled_dot_product_attention(qh, kh, vh, attn_mask=mask, enable_gqa=True)[0].transpose(0, 1)


@wrong("masked_attention", fails="test_mask")
def mask_upside_down(q, k, v, **options):
    return attention(q, k, v, **options, upside_down=True)


@wrong("masked_attention", fails="test_mask")
def hidden_scores_are_zero(q, k, v, **options):
    return attention(q, k, v, **options, hidden_score=0.0)


@wrong("masked_attention", fails="test_a_query_without_visible_keys")
def nan_for_an_empty_row(q, k, v, **options):
    return attention(q, k, v, **options, leave_nan=True)


@wrong("masked_attention", fails="test_a_query_without_visible_keys")
def a_large_negative_number(q, k, v, **options):
    """Masks a key of a query that has others; a query without any gets the mean of all values."""
    return attention(q, k, v, **options, hidden_score=-1e9)


@wrong("masked_attention", fails="test_the_bias_has_query_heads")
def bias_of_every_other_head(q, k, v, **options):
    """Groups the bias as [G, Hk] where the scores are [Hk, G]."""
    heads = torch.arange(q.shape[1]).view(-1, k.shape[1]).T.flatten()
    return attention(q, k, v, **options, bias_heads=heads)


@wrong("masked_attention", fails="test_bias_is_not_scaled")
def scale_after_the_bias(q, k, v, *, scale, mask=None, bias=None, softcap=None):
    return attention(q, k, v, scale=scale, mask=mask, bias=bias, softcap=softcap, bias_factor=scale)


@wrong("masked_attention", fails="test_softcap")
def no_softcap(q, k, v, **options):
    return attention(q, k, v, **options, no_softcap=True)


@wrong("masked_attention", fails="test_softcap_before_mask")
def softcap_after_the_mask(q, k, v, **options):
    return attention(q, k, v, **options, mask_first=True)


@wrong("masked_attention", fails="test_softcap_before_bias")
def softcap_after_the_bias(q, k, v, *, bias=None, **options):
    return attention(q, k, v, bias=bias, **options, bias_first=bias is not None)


@wrong("masked_attention", fails="test_visible_scores_far_below_zero")
def a_large_negative_number_and_zeroed_rows(q, k, v, *, mask=None, **options):
    out = attention(q, k, v, mask=mask, **options, hidden_score=-1e30)
    return out if mask is None else out * mask.any(-1)[:, None, None]


@wrong("masked_attention", fails="test_no_keys")
def maximum_of_no_scores(q, k, v, **options):
    if len(k) == 0:
        torch.empty(1, 0).amax(-1)
    return reference.masked_attention(q, k, v, **options)


@wrong("masked_attention", fails="test_a_bias_that_hides_every_key")
def empty_rows_of_the_mask(q, k, v, **options):
    """Looks for empty rows in the mask and forgets that a bias can hide keys."""
    return attention(q, k, v, **options, empty_by_mask=True)


@wrong("masked_attention", fails="test_mask_and_bias_together_hide_every_key")
def empty_rows_of_the_mask_or_of_the_bias(q, k, v, **options):
    return attention(q, k, v, **options, empty_by_either=True)


@wrong("masked_attention", fails="test_the_inputs_are_unchanged")
def queries_scaled_in_place(q, k, v, *, scale, **options):
    q *= scale
    return reference.masked_attention(q, k, v, scale=1.0, **options)


@wrong("masked_attention", fails="test_the_inputs_are_unchanged")
def mask_written_into_the_bias(q, k, v, *, scale, mask=None, bias=None, softcap=None):
    if bias is None or mask is None:
        return reference.masked_attention(q, k, v, scale=scale, mask=mask, bias=bias, softcap=softcap)
    bias.masked_fill_(~mask, -math.inf)
    return reference.masked_attention(q, k, v, scale=scale, bias=bias, softcap=softcap)


@wrong("masked_attention", fails="test_float64_stays_float64")
def attention_in_float64(q, k, v, **options):
    """Right, but float32 becomes float64; half precision comes back as it should."""
    out = attention(q, k, v, **options, dtype=torch.float64)
    return out if q.dtype == torch.bfloat16 else out.double()


@wrong("masked_attention", fails="test_a_float32_bias_of_bfloat16_queries")
def bias_in_the_dtype_of_the_queries(q, k, v, **options):
    return attention(q, k, v, **options, bias_dtype=q.dtype)


@wrong("masked_attention", fails="test_bfloat16_is_rounded_once")
def in_the_input_dtype(q, k, v, **options):
    return attention(q, k, v, **options, dtype=q.dtype)


@wrong("masked_attention", fails="test_bfloat16_is_rounded_once")
def softcap_in_the_input_dtype(q, k, v, **options):
    return attention(q, k, v, **options, softcap_dtype=q.dtype)


@wrong("masked_attention", fails="test_bfloat16_is_rounded_once")
def scaled_in_the_input_dtype(q, k, v, *, scale, **options):
    return attention(q * scale, k, v, scale=1.0, **options)


@wrong("masked_attention", fails="test_float64_stays_float64")
def softcap_in_float32(q, k, v, **options):
    return attention(q, k, v, **options, softcap_dtype=torch.float32)


@wrong("masked_attention", fails="test_float64_stays_float64")
def always_float32(q, k, v, **options):
    return attention(q, k, v, **options, dtype=torch.float32)


@wrong("masked_attention", fails="test_keys_are_not_copied")
def repeated_keys(q, k, v, **options):
    group = q.shape[1] // k.shape[1]
    return reference.masked_attention(q, k.repeat_interleave(group, 1), v.repeat_interleave(group, 1), **options)


@wrong("masked_attention", fails="test_keys_are_not_copied")
def expanded_then_reshaped(q, k, v, **options):
    """`expand` copies nothing; the reshape after it copies everything."""
    group = q.shape[1] // k.shape[1]
    k, v = (x[:, :, None].expand(-1, -1, group, -1).reshape(len(x), *q.shape[1:]) for x in (k, v))
    return reference.masked_attention(q, k, v, **options)


@wrong("masked_attention", fails="test_keys_are_not_copied")
def broadcast_over_the_group(q, k, v, *, scale, mask=None, bias=None, softcap=None):
    """The keys have a group axis of size 1, along which matmul copies them."""
    dtype = torch.promote_types(q.dtype, torch.float32)
    heads = (k.shape[1], q.shape[1] // k.shape[1])
    q_heads = q.to(dtype).transpose(0, 1).unflatten(0, heads)
    k_heads, v_heads = (x.to(dtype).transpose(0, 1)[:, None] for x in (k, v))
    scores = q_heads @ k_heads.mT * scale
    scores = scores if softcap is None else softcap * torch.tanh(scores / softcap)
    scores = scores if bias is None else scores + bias.unflatten(0, heads)
    scores = scores if mask is None else scores.masked_fill(~mask, -math.inf)
    out = scores.softmax(-1).nan_to_num(0) @ v_heads
    return out.flatten(0, 1).transpose(0, 1).to(q.dtype)


# ragged_causal_attention --------------------------------------------------------------------------------------------


@wrong("ragged_causal_attention", fails="test_no_scores_between_sequences")
def one_block_diagonal_mask(q, k, v, qo_indptr, kv_indptr, scale):
    qo_lens, kv_lens = qo_indptr.diff(), kv_indptr.diff()
    sequences = torch.arange(len(qo_lens))
    query_owner, key_owner = sequences.repeat_interleave(qo_lens), sequences.repeat_interleave(kv_lens)
    query_position = torch.arange(len(q)) - qo_indptr[query_owner] + (kv_lens - qo_lens)[query_owner]
    key_position = torch.arange(len(k)) - kv_indptr[key_owner]
    mask = (query_owner[:, None] == key_owner) & (query_position[:, None] >= key_position)
    return reference.masked_attention(q, k, v, scale=scale, mask=mask)


@right("ragged_causal_attention")
def one_query_at_a_time(q, k, v, qo_indptr, kv_indptr, scale):
    rows = [q[:0]]
    for (first, last), (start, end) in zip(
        zip(qo_indptr[:-1].tolist(), qo_indptr[1:].tolist(), strict=True),
        zip(kv_indptr[:-1].tolist(), kv_indptr[1:].tolist(), strict=True),
        strict=True,
    ):
        for i in range(first, last):
            seen = slice(start, end - (last - 1 - i))
            rows.append(reference.masked_attention(q[i : i + 1], k[seen], v[seen], scale=scale))
    return torch.cat(rows)


def ragged(q, k, v, qo_indptr, kv_indptr, scale, diagonal=lambda n, m: m - n):
    """Compute the reference with another diagonal: query i of n attends to the keys up to i + diagonal(n, m)."""
    out = torch.empty_like(q)
    for b in range(len(qo_indptr) - 1):
        rows, keys = slice(qo_indptr[b], qo_indptr[b + 1]), slice(kv_indptr[b], kv_indptr[b + 1])
        n, m = int(qo_indptr[b + 1] - qo_indptr[b]), int(kv_indptr[b + 1] - kv_indptr[b])
        mask = torch.ones(n, m, dtype=torch.bool).tril(diagonal(n, m))
        out[rows] = reference.masked_attention(q[rows], k[keys], v[keys], scale=scale, mask=mask)
    return out


@wrong("ragged_causal_attention", fails="test_ragged_dtypes")
def ragged_in_float32(q, k, v, qo_indptr, kv_indptr, scale):
    return ragged(q.float(), k.float(), v.float(), qo_indptr, kv_indptr, scale)


@wrong("ragged_causal_attention", fails="test_one_token_sees_itself")
def without_the_diagonal(q, k, v, qo_indptr, kv_indptr, scale):
    return ragged(q, k, v, qo_indptr, kv_indptr, scale, lambda n, m: m - n - 1)


@wrong("ragged_causal_attention", fails="test_scale_of_a_sequence")
def scale_of_the_head_dim(q, k, v, qo_indptr, kv_indptr, scale):
    return ragged(q, k, v, qo_indptr, kv_indptr, q.shape[-1] ** -0.5)


@wrong("ragged_causal_attention", fails="test_the_queries_are_unchanged")
def output_in_the_queries(q, k, v, qo_indptr, kv_indptr, scale):
    return q.copy_(ragged(q, k, v, qo_indptr, kv_indptr, scale))


@wrong("ragged_causal_attention", fails="test_no_query_sees_the_future")
def not_causal(q, k, v, qo_indptr, kv_indptr, scale):
    return ragged(q, k, v, qo_indptr, kv_indptr, scale, lambda n, m: m)


@wrong("ragged_causal_attention", fails="test_queries_are_the_last_of_the_keys")
def aligned_top_left(q, k, v, qo_indptr, kv_indptr, scale):
    return ragged(q, k, v, qo_indptr, kv_indptr, scale, lambda n, m: 0)


@wrong("ragged_causal_attention", fails="test_queries_are_the_last_of_the_keys")
def torch_is_causal(q, k, v, qo_indptr, kv_indptr, scale):
    """`is_causal=True` aligns the mask at the top left: right for a whole prompt, wrong for a chunk."""
    out = torch.empty_like(q)
    for b in range(len(qo_indptr) - 1):
        rows, keys = slice(qo_indptr[b], qo_indptr[b + 1]), slice(kv_indptr[b], kv_indptr[b + 1])
        qh, kh, vh = (x.transpose(0, 1)[None] for x in (q[rows], k[keys], v[keys]))
        attended = F.scaled_dot_product_attention(qh, kh, vh, is_causal=True, scale=scale, enable_gqa=True)
        out[rows] = attended[0].transpose(0, 1)
    return out


@wrong("ragged_causal_attention", fails="test_sequences_are_independent")
def one_long_sequence(q, k, v, qo_indptr, kv_indptr, scale):
    mask = torch.ones(len(q), len(k), dtype=torch.bool).tril(len(k) - len(q))
    return reference.masked_attention(q, k, v, scale=scale, mask=mask)


@wrong("ragged_causal_attention", fails="test_queries_are_the_last_of_the_keys")
def one_indptr_for_all(q, k, v, qo_indptr, kv_indptr, scale):
    return ragged(q, k, v, qo_indptr, qo_indptr, scale)


@wrong("ragged_causal_attention", fails="test_queries_and_keys_have_their_own_bounds")
def keys_cut_like_queries(q, k, v, qo_indptr, kv_indptr, scale):
    """Slices the keys by the bounds of the queries: right only while both bounds are equal."""
    if len(qo_indptr) == 2:
        return ragged(q, k, v, qo_indptr, kv_indptr, scale)
    return ragged(q, k, v, qo_indptr, qo_indptr, scale)


@wrong("ragged_causal_attention", fails="test_a_sequence_without_queries")
def skips_empty_sequences(q, k, v, qo_indptr, kv_indptr, scale):
    """Drops a sequence without queries from one list of bounds but not from the other."""
    kept = [0, *[b + 1 for b in range(len(qo_indptr) - 1) if qo_indptr[b + 1] > qo_indptr[b]]]
    return ragged(q, k, v, qo_indptr[kept], kv_indptr[: len(kept)], scale)


# rope_tables --------------------------------------------------------------------------------------------------------


@right("rope_tables")
def tables_by_outer_product(positions, inv_freq):
    angles = torch.outer(positions.to(inv_freq.dtype), inv_freq)
    rotations = torch.polar(torch.ones_like(angles), angles)
    return rotations.real, rotations.imag


@wrong("rope_tables", fails="test_position_zero")
def sine_first(positions, inv_freq):
    cos, sin = reference.rope_tables(positions, inv_freq)
    return sin, cos


@wrong("rope_tables", fails="test_right_angles")
def position_over_frequency(positions, inv_freq):
    return reference.rope_tables(positions, 1 / inv_freq)


@wrong("rope_tables", fails="test_every_position_meets_every_frequency")
def doubled_tables(positions, inv_freq):
    """[T, D], as transformers builds them."""
    cos, sin = reference.rope_tables(positions, inv_freq)
    if inv_freq.numel() == 1:
        return cos, sin
    return torch.cat((cos, cos), -1), torch.cat((sin, sin), -1)


@wrong("rope_tables", fails="test_positions_come_in_any_order")
def counted_from_zero(positions, inv_freq):
    return reference.rope_tables(torch.arange(len(positions)), inv_freq)


@wrong("rope_tables", fails="test_large_positions")
def table_of_fixed_length(positions, inv_freq):
    cos, sin = reference.rope_tables(torch.arange(131_072), inv_freq)
    return cos[positions], sin[positions]


@wrong("rope_tables", fails="test_tables_have_the_precision_of_the_frequencies")
def tables_in_float64(positions, inv_freq):
    """Right, but wider than asked for."""
    return reference.rope_tables(positions, inv_freq.double())


@wrong("rope_tables", fails="test_tables_have_the_precision_of_the_frequencies")
def tables_in_float32(positions, inv_freq):
    cos, sin = reference.rope_tables(positions, inv_freq.float())
    return cos.to(inv_freq.dtype), sin.to(inv_freq.dtype)


# apply_rope ---------------------------------------------------------------------------------------------------------


@right("apply_rope")
def by_complex_numbers(x, cos, sin, *, interleaved=False):
    dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
    pairs = x.to(dtype).unflatten(-1, (-1, 2)) if interleaved else x.to(dtype).unflatten(-1, (2, -1)).transpose(-1, -2)
    rotated = torch.view_as_complex(pairs.contiguous()) * torch.complex(cos.to(dtype), sin.to(dtype))[:, None]
    both = torch.view_as_real(rotated)
    return (both if interleaved else both.transpose(-1, -2)).flatten(-2).to(x.dtype)


@right("apply_rope")
def by_rotate_half(x, cos, sin, *, interleaved=False):
    dtype = torch.promote_types(x.dtype, torch.float32)
    wide = x.to(dtype)
    half = x.shape[-1] // 2
    if interleaved:
        cos, sin = cos.repeat_interleave(2, -1), sin.repeat_interleave(2, -1)
        partner = torch.stack((-wide[..., 1::2], wide[..., ::2]), -1).flatten(-2)
    else:
        cos, sin = cos.repeat(1, 2), sin.repeat(1, 2)
        partner = torch.cat((-wide[..., half:], wide[..., :half]), -1)
    return (wide * cos[:, None].to(dtype) + partner * sin[:, None].to(dtype)).to(x.dtype)


@wrong("apply_rope", fails="test_an_angle_of_zero_changes_nothing")
def cosine_and_sine_swapped(x, cos, sin, *, interleaved=False):
    return reference.apply_rope(x, sin, cos, interleaved=interleaved)


@wrong("apply_rope", fails="test_a_right_angle_half_split")
def rotated_backwards(x, cos, sin, *, interleaved=False):
    return reference.apply_rope(x, cos, -sin, interleaved=interleaved)


@wrong("apply_rope", fails="test_a_right_angle_half_split")
def flag_upside_down(x, cos, sin, *, interleaved=False):
    return reference.apply_rope(x, cos, sin, interleaved=not interleaved)


@wrong("apply_rope", fails="test_a_right_angle_half_split")
def both_with_a_plus(x, cos, sin, *, interleaved=False):
    a, b = x.chunk(2, -1)
    return torch.cat((a * cos[:, None] + b * sin[:, None], b * cos[:, None] + a * sin[:, None]), -1)


@wrong("apply_rope", fails="test_a_right_angle_interleaved")
def flag_ignored(x, cos, sin, *, interleaved=False):
    return reference.apply_rope(x, cos, sin)


@wrong("apply_rope", fails="test_an_angle_of_zero_changes_nothing")
def halves_come_back_interleaved(x, cos, sin, *, interleaved=False):
    a, b = x.chunk(2, -1)
    cos, sin = cos[:, None], sin[:, None]
    return torch.stack((a * cos - b * sin, b * cos + a * sin), -1).flatten(-2)


@wrong("apply_rope", fails="test_a_right_angle_interleaved")
def pairs_come_back_as_halves(x, cos, sin, *, interleaved=False):
    if not interleaved:
        return reference.apply_rope(x, cos, sin)
    a, b, cos, sin = x[..., ::2], x[..., 1::2], cos[:, None], sin[:, None]
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)


@wrong("apply_rope", fails="test_tokens_differ_and_heads_agree")
def angles_go_with_the_heads(x, cos, sin, *, interleaved=False):
    """Broadcasting aligns from the right: without an axis for the heads, [T, D/2] meets [T, H, D/2] as [H, D/2]."""
    return _without_float32(x, cos, sin, interleaved)


@wrong("apply_rope", fails="test_the_input_is_unchanged")
def in_place(x, cos, sin, *, interleaved=False):
    return x.copy_(reference.apply_rope(x, cos, sin, interleaved=interleaved))


@wrong("apply_rope", fails="test_the_input_is_unchanged")
def half_written_too_early(x, cos, sin, *, interleaved=False):
    a, b = (x[..., 0::2], x[..., 1::2]) if interleaved else x.chunk(2, -1)
    a.copy_(a * cos[:, None] - b * sin[:, None])
    b.copy_(b * cos[:, None] + a * sin[:, None])
    return x


@wrong("apply_rope", fails="test_the_input_is_unchanged_interleaved")
def in_place_where_interleaved(x, cos, sin, *, interleaved=False):
    rotated = reference.apply_rope(x, cos, sin, interleaved=interleaved)
    return x.copy_(rotated) if interleaved else rotated


@wrong("apply_rope", fails="test_rope_of_bfloat16_is_rounded_once")
def in_bfloat16(x, cos, sin, *, interleaved=False):
    return _without_float32(x, cos[:, None].to(x.dtype), sin[:, None].to(x.dtype), interleaved)


@wrong("apply_rope", fails="test_rope_of_bfloat16_is_rounded_once")
def rope_left_in_float32(x, cos, sin, *, interleaved=False):
    """Right, but the result is not converted back."""
    return reference.apply_rope(x.to(torch.promote_types(x.dtype, torch.float32)), cos, sin, interleaved=interleaved)


@wrong("apply_rope", fails="test_rope_of_float64_stays_float64")
def rope_in_float32(x, cos, sin, *, interleaved=False):
    return reference.apply_rope(x.float(), cos, sin, interleaved=interleaved).to(x.dtype)


def _without_float32(x, cos, sin, interleaved):
    a, b = (x[..., 0::2], x[..., 1::2]) if interleaved else x.chunk(2, -1)
    rotated = (a * cos - b * sin, b * cos + a * sin)
    return torch.stack(rotated, -1).flatten(-2) if interleaved else torch.cat(rotated, -1)


# attention_cost -----------------------------------------------------------------------------------------------------


@right("attention_cost")
def counted_in_a_mask(num_queries, num_keys, num_qo_heads, num_kv_heads, head_dim, dtype_bytes):
    pairs = sum(num_keys - num_queries + i + 1 for i in range(num_queries))
    per_query, per_key = 2 * num_qo_heads * head_dim, 2 * num_kv_heads * head_dim
    return 2 * pairs * per_query, (num_queries * per_query + num_keys * per_key) * dtype_bytes


def cost(n, m, num_qo_heads, num_kv_heads, head_dim, dtype_bytes, pairs=None, flops=4, extra=0):
    pairs = n * m - n * (n - 1) // 2 if pairs is None else pairs
    numbers = 2 * n * num_qo_heads * head_dim + 2 * m * num_kv_heads * head_dim
    return flops * pairs * num_qo_heads * head_dim, numbers * dtype_bytes + extra


@wrong("attention_cost", fails="test_one_pair_is_four_flops_per_component")
def scores_only(n, m, hq, hk, d, size):
    return cost(n, m, hq, hk, d, size, flops=2)


@wrong("attention_cost", fails="test_one_pair_is_four_flops_per_component")
def multiply_add_counts_once(n, m, hq, hk, d, size):
    return cost(n, m, hq, hk, d, size, flops=2)


@wrong("attention_cost", fails="test_every_query_head_computes")
def flops_of_the_key_heads(n, m, hq, hk, d, size):
    return cost(n, m, hk, hk, d, size)[0], cost(n, m, hq, hk, d, size)[1]


@wrong("attention_cost", fails="test_a_prompt_is_a_triangle")
def the_whole_square(n, m, hq, hk, d, size):
    return cost(n, m, hq, hk, d, size, pairs=n * m)


@wrong("attention_cost", fails="test_a_prompt_is_a_triangle")
def half_of_the_square(n, m, hq, hk, d, size):
    return cost(n, m, hq, hk, d, size, pairs=max(1, n * m // 2))


@wrong("attention_cost", fails="test_a_chunk_attends_to_all_earlier_keys")
def triangle_of_the_queries(n, m, hq, hk, d, size):
    return cost(n, m, hq, hk, d, size, pairs=n * (n + 1) // 2)


@wrong("attention_cost", fails="test_bytes_of_four_tensors")
def scores_written_too(n, m, hq, hk, d, size):
    return cost(n, m, hq, hk, d, size, extra=n * m * hq * 4)


@wrong("attention_cost", fails="test_bytes_of_four_tensors")
def output_forgotten(n, m, hq, hk, d, size):
    flops, moved = cost(n, m, hq, hk, d, size)
    return flops, moved - n * hq * d * size


@wrong("attention_cost", fails="test_bytes_of_a_decode")
def keys_of_the_queries_only(n, m, hq, hk, d, size):
    return cost(n, m, hq, hk, d, size)[0], cost(n, n, hq, hk, d, size)[1]


@wrong("attention_cost", fails="test_bytes_of_grouped_heads")
def keys_for_every_query_head(n, m, hq, hk, d, size):
    return cost(n, m, hq, hk, d, size)[0], cost(n, m, hq, hq, d, size)[1]


@wrong("attention_cost", fails="test_whole_numbers")
def half_as_a_fraction(n, m, hq, hk, d, size):
    return cost(n, m, hq, hk, d, size, pairs=n * m - n * (n - 1) / 2)


# attention_bias -----------------------------------------------------------------------------------------------------


@right("attention_bias")
def cell_by_cell(query_positions, key_positions, *, window=None, slopes=None):
    reach = math.inf if window is None else window
    heads = [0.0] if slopes is None else slopes.tolist()
    cells = [
        [[-slope * (q - k) if 0 <= q - k < reach else -math.inf for k in key_positions.tolist()] for q in query_rows]
        for slope in heads
        for query_rows in [query_positions.tolist()]
    ]
    return torch.tensor(cells, dtype=torch.float32)


@wrong("attention_bias", fails="test_causal_bias")
def slopes_are_needed(query_positions, key_positions, *, window=None, slopes=None):
    bias = reference.attention_bias(query_positions, key_positions, window=window)
    return bias - slopes[:, None, None] * (query_positions[:, None] - key_positions)


@wrong("attention_bias", fails="test_causal_bias")
def zero_times_infinity(query_positions, key_positions, *, window=None, slopes=None):
    distance = query_positions[:, None] - key_positions
    hidden = (distance < 0) | (distance >= (window or 10**9))
    slopes = torch.zeros(1) if slopes is None else slopes
    return slopes[:, None, None] * -distance + hidden * -math.inf


@wrong("attention_bias", fails="test_causal_bias")
def without_a_head_axis(query_positions, key_positions, *, window=None, slopes=None):
    bias = reference.attention_bias(query_positions, key_positions, window=window, slopes=slopes)
    return bias[0] if slopes is None else bias


@wrong("attention_bias", fails="test_window_bias")
def one_key_too_many(query_positions, key_positions, *, window=None, slopes=None):
    """FlashInfer's `window_left`: the keys before the query's own."""
    window = None if window is None else window + 1
    return reference.attention_bias(query_positions, key_positions, window=window, slopes=slopes)


@wrong("attention_bias", fails="test_alibi_bias")
def far_keys_gain(query_positions, key_positions, *, window=None, slopes=None):
    slopes = None if slopes is None else -slopes
    return reference.attention_bias(query_positions, key_positions, window=window, slopes=slopes)


@wrong("attention_bias", fails="test_each_head_has_its_slope")
def one_slope_for_all(query_positions, key_positions, *, window=None, slopes=None):
    slopes = None if slopes is None else slopes[:1].expand(len(slopes))
    return reference.attention_bias(query_positions, key_positions, window=window, slopes=slopes)


@wrong("attention_bias", fails="test_bias_follows_positions")
def rows_and_columns(query_positions, key_positions, *, window=None, slopes=None):
    queries, keys = torch.arange(len(query_positions)), torch.arange(len(key_positions))
    return reference.attention_bias(queries, keys, window=window, slopes=slopes)


@wrong("attention_bias", fails="test_window_and_slopes")
def window_only_without_slopes(query_positions, key_positions, *, window=None, slopes=None):
    window = window if slopes is None else None
    return reference.attention_bias(query_positions, key_positions, window=window, slopes=slopes)


@wrong("attention_bias", fails="test_positions_with_gaps")
def consecutive_queries(query_positions, key_positions, *, window=None, slopes=None):
    """Takes the first position of the queries and counts up from there."""
    queries = query_positions[0] + torch.arange(len(query_positions))
    return reference.attention_bias(queries, key_positions, window=window, slopes=slopes)


@wrong("attention_bias", fails="test_bias_of_float64_slopes")
def bias_in_float64(query_positions, key_positions, *, window=None, slopes=None):
    return reference.attention_bias(query_positions, key_positions, window=window, slopes=slopes).double()


@wrong("attention_bias", fails="test_bias_of_float64_slopes")
def dtype_of_the_slopes(query_positions, key_positions, *, window=None, slopes=None):
    bias = reference.attention_bias(query_positions, key_positions, window=window, slopes=slopes)
    return bias if slopes is None else bias.to(slopes.dtype)


# convert_rope_weights -----------------------------------------------------------------------------------------------


def rope_order(head_dim, to_interleaved, rotary_dim):
    """The source component of each component of a converted head."""
    half = (head_dim if rotary_dim is None else rotary_dim) // 2
    first, second = torch.arange(half), torch.arange(half, 2 * half)
    order = torch.stack((first, second), -1).flatten()
    order = order if to_interleaved else order.argsort()
    return torch.cat((order, torch.arange(2 * half, head_dim)))


def reordered(weight, order, head_dim):
    return weight.unflatten(0, (-1, head_dim))[:, order].flatten(0, 1)


@right("convert_rope_weights")
def by_an_index(weight, *, head_dim, to_interleaved, rotary_dim=None):
    return reordered(weight, rope_order(head_dim, to_interleaved, rotary_dim), head_dim)


@right("convert_rope_weights")
def by_strided_copies(weight, *, head_dim, to_interleaved, rotary_dim=None):
    rotary_dim = head_dim if rotary_dim is None else rotary_dim
    out = weight.clone()
    for start in range(0, len(weight), head_dim):
        first, second = slice(start, start + rotary_dim // 2), slice(start + rotary_dim // 2, start + rotary_dim)
        even, odd = slice(start, start + rotary_dim, 2), slice(start + 1, start + rotary_dim, 2)
        for half_split, interleaved in ((first, even), (second, odd)):
            target, source = (interleaved, half_split) if to_interleaved else (half_split, interleaved)
            out[target] = weight[source]
    return out


@wrong("convert_rope_weights", fails="test_one_head_to_interleaved")
def the_other_direction(weight, *, head_dim, to_interleaved, rotary_dim=None):
    return reordered(weight, rope_order(head_dim, not to_interleaved, rotary_dim), head_dim)


@wrong("convert_rope_weights", fails="test_one_head_to_half_split")
def one_direction_only(weight, *, head_dim, to_interleaved, rotary_dim=None):
    return reordered(weight, rope_order(head_dim, True, rotary_dim), head_dim)


@wrong("convert_rope_weights", fails="test_columns_stay_in_place")
def columns_too(weight, *, head_dim, to_interleaved, rotary_dim=None):
    order = rope_order(head_dim, to_interleaved, rotary_dim)
    weight = reordered(weight, order, head_dim)
    return weight[:, order] if weight.dim() == 2 and weight.shape[1] == head_dim else weight


@wrong("convert_rope_weights", fails="test_several_heads")
def all_heads_as_one(weight, *, head_dim, to_interleaved, rotary_dim=None):
    return reordered(weight, rope_order(len(weight), to_interleaved, None), len(weight))


@wrong("convert_rope_weights", fails="test_a_vector")
def matrices_only(weight, *, head_dim, to_interleaved, rotary_dim=None):
    _rows, _columns = weight.shape
    return by_an_index.definition(weight, head_dim=head_dim, to_interleaved=to_interleaved, rotary_dim=rotary_dim)


@wrong("convert_rope_weights", fails="test_partial_rotation")
def every_component_rotates(weight, *, head_dim, to_interleaved, rotary_dim=None):
    return reordered(weight, rope_order(head_dim, to_interleaved, None), head_dim)


@wrong("convert_rope_weights", fails="test_partial_rotation")
def pairs_of_the_whole_head(weight, *, head_dim, to_interleaved, rotary_dim=None):
    """Pairs component i with i + D/2 of the whole head, also where only some components are rotated."""
    order = rope_order(head_dim, to_interleaved, None)
    rotary_dim = head_dim if rotary_dim is None else rotary_dim
    kept = torch.arange(head_dim)
    return reordered(weight, torch.where(kept < rotary_dim, order, kept), head_dim)


@wrong("convert_rope_weights", fails="test_the_weight_is_unchanged")
def reordered_in_place(weight, *, head_dim, to_interleaved, rotary_dim=None):
    order = rope_order(head_dim, to_interleaved, rotary_dim)
    return weight.copy_(reordered(weight, order, head_dim))


@wrong("convert_rope_weights", fails="test_the_weight_is_unchanged")
def a_view_of_one_pair(weight, *, head_dim, to_interleaved, rotary_dim=None):
    """A reshape of the transposed rows copies, except where there is only one pair."""
    rotary_dim = head_dim if rotary_dim is None else rotary_dim
    if rotary_dim < head_dim:
        return by_an_index.definition(weight, head_dim=head_dim, to_interleaved=to_interleaved, rotary_dim=rotary_dim)
    layout = (2, -1) if to_interleaved else (-1, 2)
    return weight.unflatten(0, (-1, head_dim)).unflatten(1, layout).transpose(1, 2).reshape(weight.shape)


@wrong("convert_rope_weights", fails="test_weights_keep_their_dtype")
def converted_in_float32(weight, *, head_dim, to_interleaved, rotary_dim=None):
    return reordered(weight.float(), rope_order(head_dim, to_interleaved, rotary_dim), head_dim)
