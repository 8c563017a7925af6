"""Right and wrong answers to the homework of chapter 02, with the check that must be the first to find each mistake."""

import math
from functools import reduce
from itertools import chain, pairwise

import torch

from book.grading import right, solution, wrong
from mini_engine.attention.state import AttentionState, merge_all

reference = solution("02_online_softmax")


# softmax_with_lse ---------------------------------------------------------------------------------------------------


@right("softmax_with_lse")
def lse_first(scores):
    """Computes the LSE first, and the weights as exp(score - lse)."""
    scores = scores.double() if scores.dtype == torch.float64 else scores.float()
    floor = torch.finfo(scores.dtype).min
    largest = scores.max(dim=-1).values.clamp(min=floor)
    lse = largest + (scores - largest[..., None]).exp().sum(-1).log()
    return (scores - lse.clamp(min=floor)[..., None]).exp(), lse


@right("softmax_with_lse")
def row_by_row(scores):
    scores = scores.to(torch.promote_types(scores.dtype, torch.float32))
    weights, lses = torch.zeros_like(scores), []
    for i, row in enumerate(scores.reshape(-1, scores.shape[-1])):
        visible = row > -math.inf
        lses.append(torch.tensor(-math.inf, dtype=row.dtype))
        if visible.any():
            top = row.max()
            exps = torch.where(visible, (row - top).exp(), torch.zeros_like(row))
            weights.view(-1, scores.shape[-1])[i] = exps / exps.sum()
            lses[-1] = top + exps.sum().log()
    return weights, torch.stack(lses).view(scores.shape[:-1])


def softmax(scores, dtype=None, largest=None, safe=True):
    """Compute the reference with one change."""
    scores = scores.to(dtype or torch.promote_types(scores.dtype, torch.float32))
    largest = scores.amax(-1, keepdim=True) if largest is None else largest
    largest = largest.masked_fill(largest == -math.inf, 0.0) if safe else largest
    exps = (scores - largest).exp()
    total = exps.sum(-1, keepdim=True)
    return exps / (total.masked_fill(total == 0, 1.0) if safe else total), (largest + total.log()).squeeze(-1)


@wrong("softmax_with_lse", fails="test_two_scores")
def binary_logarithm(scores):
    weights, lse = reference.softmax_with_lse(scores)
    return weights, lse / math.log(2)


@wrong("softmax_with_lse", fails="test_two_scores")
def sum_without_its_logarithm(scores):
    weights, lse = reference.softmax_with_lse(scores)
    return weights, lse.exp()


@wrong("softmax_with_lse", fails="test_two_scores")
def lse_keeps_its_axis(scores):
    weights, lse = reference.softmax_with_lse(scores)
    return weights, lse[..., None]


@wrong("softmax_with_lse", fails="test_lse_holds_the_maximum")
def without_the_maximum_in_the_lse(scores):
    weights, lse = reference.softmax_with_lse(scores)
    return weights, lse - scores.amax(-1)


@wrong("softmax_with_lse", fails="test_large_scores")
def as_the_formula_says(scores):
    exps = scores.float().exp()
    return exps / exps.sum(-1, keepdim=True), exps.sum(-1).log()


@wrong("softmax_with_lse", fails="test_each_row_has_its_own_maximum")
def one_maximum_for_all(scores):
    return softmax(scores, largest=scores.max())


@wrong("softmax_with_lse", fails="test_hidden_scores")
def hidden_counts_as_zero(scores):
    return softmax(scores.masked_fill(scores == -math.inf, 0.0))


@wrong("softmax_with_lse", fails="test_a_row_without_visible_keys")
def nan_in_an_empty_row(scores):
    return softmax(scores, safe=False)


@wrong("softmax_with_lse", fails="test_a_row_without_visible_keys")
def lowest_number_for_infinity(scores):
    """A large negative number in place of -inf: an empty row spreads its weight evenly over masked keys."""
    scores = scores.to(torch.promote_types(scores.dtype, torch.float32))
    return softmax(scores.clamp(min=-1e30))


@wrong("softmax_with_lse", fails="test_scores_are_unchanged")
def infinity_replaced_in_place(scores):
    """Changes only masked scores, so a test without any does not notice."""
    result = reference.softmax_with_lse(scores)
    scores[scores == -math.inf] = torch.finfo(scores.dtype).min
    return result


@wrong("softmax_with_lse", fails="test_scores_are_unchanged")
def shifted_in_place(scores):
    result = reference.softmax_with_lse(scores)
    scores -= scores.amax(-1, keepdim=True)
    return result


@wrong("softmax_with_lse", fails="test_half_precision_is_computed_in_float32")
def in_half_precision(scores):
    return softmax(scores, dtype=scores.dtype)


@wrong("softmax_with_lse", fails="test_half_precision_is_computed_in_float32")
def cast_at_the_end(scores):
    weights, lse = softmax(scores, dtype=scores.dtype)
    return (weights, lse) if scores.dtype == torch.float64 else (weights.float(), lse.float())


@wrong("softmax_with_lse", fails="test_half_precision_is_computed_in_float32")
def always_float64(scores):
    """Right, but wider than asked for."""
    return softmax(scores, dtype=torch.float64)


@wrong("softmax_with_lse", fails="test_softmax_of_float64")
def always_float32(scores):
    weights, lse = softmax(scores, dtype=torch.float32)
    return weights.to(torch.promote_types(scores.dtype, torch.float32)), lse.to(weights.dtype).to(
        torch.promote_types(scores.dtype, torch.float32)
    )


@wrong("softmax_with_lse", fails="test_the_pieces_are_your_own")
def from_the_library(scores):
    scores = scores.to(torch.promote_types(scores.dtype, torch.float32))
    return torch.softmax(scores, -1).nan_to_num(0.0), torch.logsumexp(scores, -1)


# online_attention ---------------------------------------------------------------------------------------------------


@right("online_attention")
def one_key_at_a_time(q, tiles, *, scale):
    """Scalars only, with a normalized output after every key."""
    dtype = torch.promote_types(q.dtype, torch.float32)
    out, lse = torch.zeros_like(q, dtype=dtype), torch.full((len(q),), -math.inf, dtype=dtype)
    for k, v, mask in tiles:
        for j in range(len(k)):
            for i in range(len(q)):
                if mask[i, j]:
                    score = (q[i].to(dtype) @ k[j].to(dtype)) * scale
                    grown = torch.logaddexp(lse[i], score)
                    out[i] = out[i] * (lse[i] - grown).exp() + v[j].to(dtype) * (score - grown).exp()
                    lse[i] = grown
    return out, lse


@right("online_attention")
def states_that_merge(q, tiles, *, scale):
    """Computes a state for each tile and merges it, with the chapter's other functions."""
    dtype = torch.promote_types(q.dtype, torch.float32)
    n, dim = q.shape
    state = AttentionState(torch.zeros(n, 1, dim, dtype=dtype), torch.full((n, 1), -math.inf, dtype=dtype))
    for k, v, mask in tiles:
        scores = torch.where(mask, q.to(dtype) @ k.to(dtype).T * scale, -math.inf)
        weights, lse = reference.softmax_with_lse(scores)
        state = reference.merge_states(state, AttentionState((weights @ v.to(dtype))[:, None], lse[:, None]))
    return state.out[:, 0], state.lse[:, 0]


def online(q, tiles, *, scale, **change):
    """Compute the reference with one change."""
    dtype = change.get("dtype", torch.promote_types(q.dtype, torch.float32))
    q = q.to(dtype)
    out, total = torch.zeros_like(q), q.new_zeros(len(q))
    largest = q.new_full((len(q),), change.get("first_maximum", -math.inf))
    for k, v, mask in tiles:
        mask = mask if change.get("mask", True) else torch.ones_like(mask)
        scores = (q @ k.to(dtype).T * scale).masked_fill(~mask, change.get("masked_score", -math.inf))
        top = (q @ k.to(dtype).T * scale if change.get("hidden_maximum") else scores).amax(-1)
        if change.get("one_maximum"):
            top = scores.max().expand(len(q))
        new = top if change.get("may_fall") else torch.maximum(largest, top)
        if change.get("no_maximum"):
            new = torch.zeros_like(new)
        shift = new if change.get("nan") else new.masked_fill(new == -math.inf, 0.0)
        exps = (scores - shift[:, None]).exp()
        rescale = (largest - shift).exp()
        if change.get("no_maximum"):
            rescale = torch.ones_like(rescale)
        if change.get("forgets_tiles"):
            rescale = torch.zeros_like(rescale)
        if change.get("backwards"):
            rescale = torch.where(largest == -math.inf, 0.0, (shift - largest).exp())
        total = total * (torch.ones_like(rescale) if change.get("keeps_sum") else rescale) + exps.sum(-1)
        out = out * (torch.ones_like(rescale) if change.get("keeps_out") else rescale)[:, None] + exps @ v.to(dtype)
        largest = new
    safe = total if change.get("divides_by_zero") else total.masked_fill(total == 0, 1.0)
    return out / safe[:, None], largest + total.log()


@wrong("online_attention", fails="test_one_key")
def scale_forgotten(q, tiles, *, scale):
    return online(q, tiles, scale=1.0)


@wrong("online_attention", fails="test_one_key")
def true_means_hidden(q, tiles, *, scale):
    return online(q, [(k, v, ~mask) for k, v, mask in tiles], scale=scale)


@wrong("online_attention", fails="test_one_key")
def scale_of_its_own(q, tiles, *, scale):
    return online(q, tiles, scale=q.shape[-1] ** -0.5)


@wrong("online_attention", fails="test_one_tile")
def not_divided(q, tiles, *, scale):
    out, lse = reference.online_attention(q, tiles, scale=scale)
    tiles = list(tiles)
    if tiles and len(tiles[0][0]) > 1:
        return out * lse.exp()[:, None], lse
    return out, lse


@wrong("online_attention", fails="test_the_maximum_comes_first")
def only_the_last_tile(q, tiles, *, scale):
    return online(q, tiles, scale=scale, forgets_tiles=True)


@wrong("online_attention", fails="test_the_maximum_comes_first")
def mean_of_the_tiles(q, tiles, *, scale):
    """Averages the tiles' outputs, whatever share of the sum each one holds."""
    results = [reference.online_attention(q, [tile], scale=scale) for tile in tiles]
    outs, lses = (torch.stack(x) for x in zip(*results, strict=True))
    return outs.mean(0), torch.logsumexp(lses, 0)


@wrong("online_attention", fails="test_the_maximum_rises")
def sum_is_not_rescaled(q, tiles, *, scale):
    return online(q, tiles, scale=scale, keeps_sum=True)


@wrong("online_attention", fails="test_the_maximum_rises")
def output_is_not_rescaled(q, tiles, *, scale):
    return online(q, tiles, scale=scale, keeps_out=True)


@wrong("online_attention", fails="test_the_maximum_rises")
def rescaled_the_other_way(q, tiles, *, scale):
    return online(q, tiles, scale=scale, backwards=True)


@wrong("online_attention", fails="test_the_maximum_never_falls")
def maximum_of_the_newest_tile(q, tiles, *, scale):
    return online(q, tiles, scale=scale, may_fall=True)


@wrong("online_attention", fails="test_the_maximum_never_falls")
def without_a_maximum(q, tiles, *, scale):
    """exp(100) overflows float32."""
    return online(q, tiles, scale=scale, no_maximum=True)


@wrong("online_attention", fails="test_scores_below_zero")
def maximum_from_zero(q, tiles, *, scale):
    return online(q, tiles, scale=scale, first_maximum=0.0)


@wrong("online_attention", fails="test_queries_are_independent")
def one_maximum_for_all_queries(q, tiles, *, scale):
    return online(q, tiles, scale=scale, one_maximum=True)


@wrong("online_attention", fails="test_masked_keys")
def mask_ignored(q, tiles, *, scale):
    return online(q, tiles, scale=scale, mask=False)


@wrong("online_attention", fails="test_the_first_tile_is_masked")
def nan_before_the_first_key(q, tiles, *, scale):
    return online(q, tiles, scale=scale, nan=True)


@wrong("online_attention", fails="test_a_query_without_visible_keys")
def zero_by_zero(q, tiles, *, scale):
    return online(q, tiles, scale=scale, divides_by_zero=True)


@wrong("online_attention", fails="test_one_pass")
def two_passes(q, tiles, *, scale):
    """The maximum first, then the sums: the right result with twice the traffic."""
    dtype = torch.promote_types(q.dtype, torch.float32)
    q = q.to(dtype)
    largest = q.new_full((len(q),), -math.inf)
    for k, _, mask in tiles:
        scores = (q @ k.to(dtype).T * scale).masked_fill(~mask, -math.inf)
        largest = torch.maximum(largest, scores.amax(-1))
    shift = largest.masked_fill(largest == -math.inf, 0.0)
    out, total = torch.zeros_like(q), q.new_zeros(len(q))
    for k, v, mask in tiles:
        exps = ((q @ k.to(dtype).T * scale).masked_fill(~mask, -math.inf) - shift[:, None]).exp()
        out, total = out + exps @ v.to(dtype), total + exps.sum(-1)
    return out / total.masked_fill(total == 0, 1.0)[:, None], largest + total.log()


@wrong("online_attention", fails="test_tiles_are_valid_until_the_next")
def kept_in_a_list(q, tiles, *, scale):
    return reference.online_attention(q, list(tiles), scale=scale)


@wrong("online_attention", fails="test_memory_does_not_grow")
def copied_and_joined(q, tiles, *, scale):
    """One pass over the iterator, which copies everything for one large computation."""
    copies = [tuple(x.clone() for x in tile) for tile in tiles]
    if not copies:
        return reference.online_attention(q, [], scale=scale)
    k, v, mask = (torch.cat([copy[i] for copy in copies], dim=i // 2) for i in range(3))
    return reference.online_attention(q, [(k, v, mask)], scale=scale)


@wrong("online_attention", fails="test_memory_does_not_grow")
def copied_tiles(q, tiles, *, scale):
    tiles = [tuple(x.clone() for x in tile) for tile in tiles]
    return reference.online_attention(q, tiles, scale=scale)


@wrong("online_attention", fails="test_memory_does_not_grow")
def a_state_of_every_tile(q, tiles, *, scale):
    """Merges the states at the end, so each tile leaves a state behind."""
    states = []
    for tile in tiles:
        out, lse = reference.online_attention(q, [tile], scale=scale)
        states.append(AttentionState(out[:, None], lse[:, None]))
    if not states:
        return reference.online_attention(q, [], scale=scale)
    state = reduce(reference.merge_states, states)
    return state.out[:, 0], state.lse[:, 0]


@wrong("online_attention", fails="test_memory_does_not_grow")
def scores_of_every_tile(q, tiles, *, scale):
    """Keeps the scores of all keys for an LSE at the end; the output is accumulated as it should be."""
    dtype, scores = torch.promote_types(q.dtype, torch.float32), []

    def recorded():
        for k, v, mask in tiles:
            scores.append((q.to(dtype) @ k.to(dtype).T * scale).masked_fill(~mask, -math.inf))
            yield k, v, mask

    out, lse = reference.online_attention(q, recorded(), scale=scale)
    return out, torch.cat(scores, 1).logsumexp(1) if scores else lse


@wrong("online_attention", fails="test_bfloat16_tiles")
def online_in_bfloat16(q, tiles, *, scale):
    out, lse = online(q, tiles, scale=scale, dtype=q.dtype)
    return (out, lse) if q.dtype == torch.float64 else (out.float(), lse.float())


@wrong("online_attention", fails="test_float64_tiles")
def online_in_float32(q, tiles, *, scale):
    out, lse = online(q, tiles, scale=scale, dtype=torch.float32)
    dtype = torch.promote_types(q.dtype, torch.float32)
    return out.to(dtype), lse.to(dtype)


@wrong("online_attention", fails="test_a_tile_that_is_masked_for_all")
def stops_at_a_masked_tile(q, tiles, *, scale):
    """Tries to skip a tile without visible keys, and ends the loop instead."""
    seen = []
    for tile in tiles:
        if not tile[2].any():
            break
        seen.append(tile)
    return reference.online_attention(q, seen, scale=scale)


@wrong("online_attention", fails="test_visible_scores_far_below_zero")
def a_large_negative_score(q, tiles, *, scale):
    """Hides masked keys by -1e30, and repairs queries without visible keys at the end."""
    tiles = list(tiles)
    out, lse = online(q, tiles, scale=scale, masked_score=-1e30)
    visible = torch.zeros(len(q), dtype=torch.bool)
    for _, _, mask in tiles:
        visible |= mask.any(-1)
    return out * visible[:, None], lse.masked_fill(~visible, -math.inf)


@wrong("online_attention", fails="test_visible_scores_far_below_zero")
def maximum_of_hidden_scores_too(q, tiles, *, scale):
    return online(q, tiles, scale=scale, hidden_maximum=True)


@wrong("online_attention", fails="test_bfloat16_tiles")
def online_in_float64(q, tiles, *, scale):
    """Right, but wider than asked for."""
    return online(q, tiles, scale=scale, dtype=torch.float64)


@wrong("online_attention", fails="test_float64_tiles")
def float32_without_tiles(q, tiles, *, scale):
    """Takes the dtype from the first tile."""
    first = next(iterator := iter(tiles), None)
    if first is None:
        return torch.zeros(q.shape), torch.full((len(q),), -math.inf)
    return reference.online_attention(q, chain([first], iterator), scale=scale)


# merge_states -------------------------------------------------------------------------------------------------------


@right("merge_states")
def by_the_larger(a, b):
    """FlashInfer's form in base e: exponentials relative to the larger LSE, and a division."""
    top = torch.maximum(a.lse, b.lse)
    top = torch.where(top == -math.inf, torch.zeros_like(top), top)
    ea, eb = (a.lse - top).exp(), (b.lse - top).exp()
    total = ea + eb
    share = (ea / torch.where(total == 0, torch.ones_like(total), total))[..., None].to(a.out.dtype)
    other = (eb / torch.where(total == 0, torch.ones_like(total), total))[..., None].to(a.out.dtype)
    return AttentionState(a.out * share + b.out * other, top + total.log())


@right("merge_states")
def by_the_sigmoid(a, b):
    """A share depends only on the difference of the two LSEs; two empty states give a NaN to replace."""
    share = torch.sigmoid(a.lse - b.lse).nan_to_num(0.0)[..., None].to(a.out.dtype)
    return AttentionState(torch.lerp(b.out, a.out, share), torch.logaddexp(a.lse, b.lse))


def merged(a, b, wa, wb, lse):
    return AttentionState(wa[..., None] * a.out + wb[..., None] * b.out, lse)


@wrong("merge_states", fails="test_equal_shares")
def sum_of_the_outputs(a, b):
    return AttentionState(a.out + b.out, torch.logaddexp(a.lse, b.lse))


@wrong("merge_states", fails="test_equal_shares")
def larger_lse(a, b):
    return AttentionState(reference.merge_states(a, b).out, torch.maximum(a.lse, b.lse))


@wrong("merge_states", fails="test_equal_shares")
def a_tuple(a, b):
    state = reference.merge_states(a, b)
    return state.out, state.lse


@wrong("merge_states", fails="test_shares_of_the_sum")
def mean_of_the_outputs(a, b):
    return AttentionState((a.out + b.out) / 2, torch.logaddexp(a.lse, b.lse))


@wrong("merge_states", fails="test_shares_of_the_sum")
def shares_in_base_2(a, b):
    """FlashInfer's weights, for states whose LSE is a natural logarithm."""
    state = reference.merge_states(a, b)
    share = torch.sigmoid((a.lse - b.lse) * math.log(2)).nan_to_num(0.0)
    return merged(a, b, share, 1 - share, state.lse)


@wrong("merge_states", fails="test_shares_of_the_sum")
def lse_as_the_weight(a, b):
    total = a.lse + b.lse
    return merged(a, b, a.lse / total, b.lse / total, torch.logaddexp(a.lse, b.lse))


@wrong("merge_states", fails="test_rows_of_very_different_lse")
def one_maximum_for_all_rows(a, b):
    """Rescales every row relative to the largest LSE of all rows, so rows far below it underflow."""
    top = torch.maximum(a.lse.max(), b.lse.max()).clamp(min=torch.finfo(a.lse.dtype).min)
    ea, eb = (a.lse - top).exp(), (b.lse - top).exp()
    total = ea + eb
    return merged(a, b, *(e / total.masked_fill(total == 0, 1.0) for e in (ea, eb)), top + total.log())


@wrong("merge_states", fails="test_lse_near_1000")
def exponentials_of_the_lse(a, b):
    ea, eb = a.lse.exp(), b.lse.exp()
    return merged(a, b, ea / (ea + eb), eb / (ea + eb), (ea + eb).log())


@wrong("merge_states", fails="test_each_query_and_head_on_its_own")
def weights_on_the_wrong_axes(a, b):
    """Broadcasting aligns from the right: [n, Hq] becomes one weight per component."""
    lse = torch.logaddexp(a.lse, b.lse)
    return AttentionState((a.lse - lse).exp() * a.out + (b.lse - lse).exp() * b.out, lse)


@wrong("merge_states", fails="test_each_query_and_head_on_its_own")
def one_weight_for_all_heads(a, b):
    lse = torch.logaddexp(a.lse, b.lse)
    wa = (a.lse - lse).exp().mean(-1, keepdim=True)
    return merged(a, b, wa, 1 - wa, lse)


@wrong("merge_states", fails="test_an_empty_state")
def zero_for_minus_infinity(a, b):
    """There is no NaN, but exp(0) is 1: the empty state weighs as much as a key with score 0."""
    a, b = (AttentionState(x.out, x.lse.nan_to_num(neginf=0.0)) for x in (a, b))
    return reference.merge_states(a, b)


@wrong("merge_states", fails="test_two_empty_states")
def forgets_that_both_may_be_empty(a, b):
    lse = torch.logaddexp(a.lse, b.lse)
    return merged(a, b, (a.lse - lse).exp(), (b.lse - lse).exp(), lse)


@wrong("merge_states", fails="test_two_empty_states")
def clamped_lse(a, b):
    """There is no NaN, but the union of two empty states has a finite LSE."""
    state = reference.merge_states(a, b)
    return AttentionState(state.out, state.lse.clamp(min=-1e30))


@wrong("merge_states", fails="test_some_queries_are_empty")
def all_or_nothing(a, b):
    """Handles states that are empty as a whole, but not single queries without visible keys."""
    for state, other in ((a, b), (b, a)):
        if (state.lse == -math.inf).all():
            return other
    return forgets_that_both_may_be_empty.definition(a, b)


@wrong("merge_states", fails="test_states_are_unchanged")
def into_the_first(a, b):
    state = reference.merge_states(a, b)
    a.out.copy_(state.out)
    a.lse.copy_(state.lse)
    return a


@wrong("merge_states", fails="test_dtypes_of_a_state")
def returned_in_float32(a, b):
    """Right, but float64 becomes float32."""
    state = reference.merge_states(a, b)
    return AttentionState(state.out.float(), state.lse.float())


@wrong("merge_states", fails="test_dtypes_of_a_state")
def always_in_float32(a, b):
    state = reference.merge_states(
        AttentionState(a.out.float(), a.lse.float()), AttentionState(b.out.float(), b.lse.float())
    )
    return AttentionState(state.out.to(a.out.dtype), state.lse.to(a.lse.dtype))


# split_kv_decode ----------------------------------------------------------------------------------------------------


@right("split_kv_decode")
def full_shares_first(q, k, v, *, num_splits, worker):
    """ceil(m / num_splits) keys each, as long as there are any; workers without keys are not called."""
    m = len(k)
    share = max(1, -(-m // num_splits))
    states = [worker(q, k[i : i + share], v[i : i + share]) for i in range(0, m, share)]
    return merge_all(states) if states else worker(q, k, v)


@right("split_kv_decode")
def every_nth_key(q, k, v, *, num_splits, worker):
    """Keys have no order: worker i takes every num_splits-th."""
    states = [worker(q, k[i::num_splits], v[i::num_splits]) for i in range(num_splits)]
    return merge_all(states)


@right("split_kv_decode")
def by_tensor_split(q, k, v, *, num_splits, worker):
    parts = zip(k.tensor_split(num_splits), v.tensor_split(num_splits), strict=True)
    return reduce(reference.merge_states, [worker(q, *part) for part in parts])


def split(q, k, v, bounds, worker):
    return merge_all([worker(q, k[a:b], v[a:b]) for a, b in pairwise(bounds)])


@wrong("split_kv_decode", fails="test_two_workers")
def a_single_worker(q, k, v, *, num_splits, worker):
    return worker(q, k, v)


@wrong("split_kv_decode", fails="test_two_workers")
def mean_of_the_workers(q, k, v, *, num_splits, worker):
    bounds = [len(k) * i // num_splits for i in range(num_splits + 1)]
    states = [worker(q, k[a:b], v[a:b]) for a, b in pairwise(bounds)]
    out = torch.stack([state.out for state in states]).mean(0)
    return AttentionState(out, torch.stack([state.lse for state in states]).logsumexp(0))


@wrong("split_kv_decode", fails="test_two_workers")
def values_are_not_split(q, k, v, *, num_splits, worker):
    bounds = [len(k) * i // num_splits for i in range(num_splits + 1)]
    return merge_all([worker(q, k[a:b], v[: b - a]) for a, b in pairwise(bounds)])


@wrong("split_kv_decode", fails="test_uneven_splits")
def drops_the_remainder(q, k, v, *, num_splits, worker):
    share = len(k) // num_splits
    return split(q, k, v, [share * i for i in range(num_splits + 1)], worker)


@wrong("split_kv_decode", fails="test_uneven_splits")
def neighbours_share_a_key(q, k, v, *, num_splits, worker):
    """Rounds the beginning down and the end up."""
    m = len(k)
    parts = [slice(m * i // num_splits, -(-m * (i + 1) // num_splits)) for i in range(num_splits)]
    return merge_all([worker(q, k[part], v[part]) for part in parts])


@wrong("split_kv_decode", fails="test_no_share_is_too_long")
def remainder_to_the_last(q, k, v, *, num_splits, worker):
    share = len(k) // num_splits
    return split(q, k, v, [*(share * i for i in range(num_splits)), len(k)], worker)


@wrong("split_kv_decode", fails="test_no_more_workers_than_splits")
def remainder_to_one_worker_more(q, k, v, *, num_splits, worker):
    share = max(1, len(k) // num_splits)
    parts = zip(k.split(share), v.split(share), strict=True)
    return merge_all([worker(q, *part) for part in parts])


@wrong("split_kv_decode", fails="test_more_splits_than_keys")
def a_share_past_the_end(q, k, v, *, num_splits, worker):
    """What is left for the last workers is a negative number of keys."""
    m, states = len(k), []
    share = -(-m // num_splits)
    for i in range(num_splits):
        size = min(share, m - share * i)
        states.append(worker(q, k.narrow(0, share * i, size), v.narrow(0, share * i, size)))
    return merge_all(states)


@wrong("split_kv_decode", fails="test_no_keys")
def nothing_to_merge(q, k, v, *, num_splits, worker):
    m = len(k)
    share = max(1, -(-m // num_splits))
    return merge_all([worker(q, k[i : i + share], v[i : i + share]) for i in range(0, m, share)])


# merge_tree ---------------------------------------------------------------------------------------------------------


@right("merge_tree")
def padded_to_a_power_of_two(states, merge):
    """Pads with empty states, and stacks the states along a new axis."""
    out, lse = torch.stack([s.out for s in states]), torch.stack([s.lse for s in states])
    missing = 2 ** (len(states) - 1).bit_length() - len(states)
    out = torch.cat([out, out.new_zeros(missing, *out.shape[1:])])
    lse = torch.cat([lse, lse.new_full((missing, *lse.shape[1:]), -math.inf)])
    while len(out) > 1:
        pair = merge(
            AttentionState(out[0::2].flatten(0, 1), lse[0::2].flatten(0, 1)),
            AttentionState(out[1::2].flatten(0, 1), lse[1::2].flatten(0, 1)),
        )
        out, lse = pair.out.unflatten(0, (len(out) // 2, -1)), pair.lse.unflatten(0, (len(lse) // 2, -1))
    return AttentionState(out[0], lse[0])


@right("merge_tree")
def neighbours_first(states, merge):
    """Lists of states, concatenated for each call and split again."""
    states = list(states)
    n = states[0].lse.shape[0]
    while len(states) > 1:
        left, right_, rest = states[:-1:2], states[1::2], states[len(states) // 2 * 2 :]
        pair = merge(
            AttentionState(torch.cat([s.out for s in left]), torch.cat([s.lse for s in left])),
            AttentionState(torch.cat([s.out for s in right_]), torch.cat([s.lse for s in right_])),
        )
        cut = zip(pair.out.split(n), pair.lse.split(n), strict=True)
        states = [AttentionState(*part) for part in cut] + rest
    return states[0]


def levels(states, merge, odd):
    """A level at a time, a pair at a time in one call; `odd` decides what happens to the state that is left over."""
    states = list(states)
    n = states[0].lse.shape[0]
    while len(states) > 1:
        rest = states[len(states) // 2 * 2 :]
        states = states[: len(states) // 2 * 2]
        half = len(states) // 2
        pair = merge(
            AttentionState(torch.cat([s.out for s in states[:half]]), torch.cat([s.lse for s in states[:half]])),
            AttentionState(torch.cat([s.out for s in states[half:]]), torch.cat([s.lse for s in states[half:]])),
        )
        states = [AttentionState(*part) for part in zip(pair.out.split(n), pair.lse.split(n), strict=True)]
        if rest:
            states = odd(states, rest[0])
    return states[0]


@wrong("merge_tree", fails="test_one_state")
def begins_with_a_pair(states, merge):
    return reduce(merge, states[2:], merge(states[0], states[1]))


@wrong("merge_tree", fails="test_rows_stay_apart")
def rows_interleaved(states, merge):
    """Stacks the states on the second axis, so that rows of one query lie together, and cuts as if they did not."""
    n, count = states[0].lse.shape[0], len(states)
    if count < 3:
        return reduce(merge, states)
    out = torch.stack([s.out for s in states], 1).flatten(0, 1)
    lse = torch.stack([s.lse for s in states], 1).flatten(0, 1)
    return merge_all([AttentionState(*part) for part in zip(out.split(n), lse.split(n), strict=True)])


@wrong("merge_tree", fails="test_odd_numbers")
def loses_the_odd_one(states, merge):
    return levels(states, merge, lambda states, rest: states)


@wrong("merge_tree", fails="test_odd_numbers")
def counts_the_odd_one_twice(states, merge):
    """Pads with a copy of the last state instead of an empty one."""
    states = list(states)
    while len(states) & (len(states) - 1):
        states.append(states[-1])
    return levels(states, merge, lambda states, rest: states)


@wrong("merge_tree", fails="test_logarithmic_number_of_calls")
def one_after_the_other(states, merge):
    return reduce(merge, states)


@wrong("merge_tree", fails="test_logarithmic_number_of_calls")
def a_call_for_each_pair(states, merge):
    """The right levels, but a call for each pair of a level."""
    states = list(states)
    while len(states) > 1:
        rest = states[len(states) // 2 * 2 :]
        states = [merge(a, b) for a, b in zip(states[:-1:2], states[1::2], strict=True)] + rest
    return states[0]


@wrong("merge_tree", fails="test_logarithmic_number_of_calls")
def the_odd_one_at_once(states, merge):
    """Merges the state that is left over into another right away: one more call in such a level."""
    return levels(states, merge, lambda states, rest: [merge(states[0], rest), *states[1:]])


@wrong("merge_tree", fails="test_logarithmic_number_of_calls")
def without_merge(states, merge):
    return merge_all(states)


@wrong("merge_tree", fails="test_the_states_stay_as_they_are")
def into_the_first_state(states, merge):
    result = reference.merge_tree(states, merge)
    states[0].out.copy_(result.out)
    states[0].lse.copy_(result.lse)
    return states[0]
