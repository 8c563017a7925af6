"""Right and wrong answers to the homework of chapter 05, with the check that must be the first to find each mistake."""

import torch
import torch.nn.functional as F
from torch.nn.attention.flex_attention import create_block_mask

from book.grading import right, solution, wrong
from mini_engine.attention.masks import alibi, and_masks, compose_scores, document, document_ids, or_masks, soft_cap

reference = solution("05_flexattention")


# visible ------------------------------------------------------------------------------------------------------------


@right("visible")
def a_clamped_distance(window):
    def mask_mod(b, h, q_idx, kv_idx):
        distance = q_idx - kv_idx
        return distance == (distance.clamp(min=0) if window is None else distance.clamp(0, window - 1))

    return mask_mod


@right("visible")
def composed(window):
    def causal(b, h, q_idx, kv_idx):
        return torch.ge(q_idx, kv_idx)

    if window is None:
        return causal
    return and_masks(causal, lambda b, h, q_idx, kv_idx: kv_idx > q_idx - window)


@wrong("visible", fails="test_itself_and_the_past")
def not_itself(window):
    return lambda b, h, q_idx, kv_idx: (kv_idx < q_idx) & (q_idx - kv_idx < (window or 10**9))


@wrong("visible", fails="test_itself_and_the_past")
def transposed(window):
    return lambda b, h, q_idx, kv_idx: reference.visible(window)(b, h, kv_idx, q_idx)


@wrong("visible", fails="test_itself_and_the_past")
def nothing_without_a_window(window):
    return reference.visible(window or 1)


@wrong("visible", fails="test_a_window_counts_the_query")
def keys_behind_the_query(window):
    """FlashInfer's window_left: one key more."""
    return reference.visible(window and window + 1)


@wrong("visible", fails="test_a_window_counts_the_query")
def window_forgotten(window):
    return reference.visible(None)


@wrong("visible", fails="test_a_window_hides_the_future")
def only_a_distance(window):
    if window is None:
        return reference.visible(None)
    return lambda b, h, q_idx, kv_idx: q_idx - kv_idx < window


@wrong("visible", fails="test_a_window_hides_the_future")
def on_both_sides(window):
    if window is None:
        return reference.visible(None)
    return lambda b, h, q_idx, kv_idx: (q_idx - kv_idx).abs() < window


@wrong("visible", fails="test_many_pairs_at_once")
def with_and(window):
    if window is None:
        return reference.visible(None)
    return lambda b, h, q_idx, kv_idx: kv_idx <= q_idx and q_idx - kv_idx < window


@wrong("visible", fails="test_many_pairs_at_once")
def number_by_number(window):
    def mask_mod(b, h, q_idx, kv_idx):
        distance = q_idx.item() - kv_idx.item()
        return torch.tensor(distance >= 0 and (window is None or distance < window))

    return mask_mod


@wrong("visible", fails="test_any_positions")
def looked_up(window):
    positions = torch.arange(1000)
    table = reference.visible(window)(0, 0, positions[:, None], positions)
    return lambda b, h, q_idx, kv_idx: table[q_idx, kv_idx]


@wrong("visible", fails="test_traced")
def skips_what_is_not_needed(window):
    def mask_mod(b, h, q_idx, kv_idx):
        seen = kv_idx <= q_idx
        if window is not None and (q_idx - kv_idx >= window).any():
            seen = seen & (q_idx - kv_idx < window)
        return seen

    return mask_mod


# packed_prefix_lm ---------------------------------------------------------------------------------------------------


@right("packed_prefix_lm")
def composed_of_masks(qo_indptr, prefix_lens):
    ids = document_ids(qo_indptr)
    offset = torch.arange(len(ids)) - qo_indptr[ids]
    in_prefix = offset < prefix_lens[ids]
    return and_masks(
        document(ids),
        or_masks(lambda b, h, q_idx, kv_idx: in_prefix[kv_idx], lambda b, h, q, kv: offset[q] >= offset[kv]),
    )


@right("packed_prefix_lm")
def by_the_bounds_of_each_row(qo_indptr, prefix_lens):
    """Each query sees one run of rows: from the start of its document to itself or the end of the prefix."""
    rows = torch.arange(int(qo_indptr[-1]))
    document_of = torch.searchsorted(qo_indptr, rows, right=True) - 1
    first = qo_indptr[document_of]
    last = torch.maximum(rows, first + prefix_lens[document_of] - 1)
    return lambda b, h, q_idx, kv_idx: (first[q_idx] <= kv_idx) & (kv_idx <= last[q_idx])


def prefix_mask(qo_indptr, prefix_lens, ids=None):
    """Document, causal and prefix, to be put together wrongly below."""
    ids = document_ids(qo_indptr) if ids is None else ids
    end = qo_indptr[:-1] + prefix_lens
    return (
        lambda b, h, q_idx, kv_idx: ids[q_idx] == ids[kv_idx],
        lambda b, h, q_idx, kv_idx: kv_idx <= q_idx,
        lambda b, h, q_idx, kv_idx: kv_idx < end[ids[kv_idx]],
    )


@wrong("packed_prefix_lm", fails="test_a_causal_document")
def no_causality(qo_indptr, prefix_lens):
    return prefix_mask(qo_indptr, prefix_lens)[0]


@wrong("packed_prefix_lm", fails="test_a_prefix")
def prefix_end_included(qo_indptr, prefix_lens):
    same, causal, prefix = prefix_mask(qo_indptr, prefix_lens + 1)
    return and_masks(same, or_masks(causal, prefix))


@wrong("packed_prefix_lm", fails="test_a_prefix")
def prefix_forgotten(qo_indptr, prefix_lens):
    return and_masks(*prefix_mask(qo_indptr, prefix_lens)[:2])


@wrong("packed_prefix_lm", fails="test_a_prefix")
def only_the_prefix_sees_the_prefix(qo_indptr, prefix_lens):
    """Causal, and once more causal where a prefix is asked for."""
    same, causal, prefix = prefix_mask(qo_indptr, prefix_lens)
    return and_masks(same, or_masks(causal, and_masks(prefix, lambda b, h, q_idx, kv_idx: kv_idx <= q_idx)))


@wrong("packed_prefix_lm", fails="test_two_causal_documents")
def one_long_document(qo_indptr, prefix_lens):
    _, causal, prefix = prefix_mask(qo_indptr, prefix_lens)
    return or_masks(causal, prefix)


@wrong("packed_prefix_lm", fails="test_the_prefix_of_a_later_document")
def prefixes_at_the_start_of_the_batch(qo_indptr, prefix_lens):
    same, causal, _ = prefix_mask(qo_indptr, prefix_lens)
    ids = document_ids(qo_indptr)
    return and_masks(same, or_masks(causal, lambda b, h, q_idx, kv_idx: kv_idx < prefix_lens[ids[kv_idx]]))


@wrong("packed_prefix_lm", fails="test_a_prefix_stays_in_its_document")
def parentheses(qo_indptr, prefix_lens):
    same, causal, prefix = prefix_mask(qo_indptr, prefix_lens)
    return or_masks(and_masks(same, causal), prefix)


@wrong("packed_prefix_lm", fails="test_each_its_own_prefix")
def the_last_prefix_for_all(qo_indptr, prefix_lens):
    same, causal, prefix = prefix_mask(qo_indptr, torch.minimum(prefix_lens[-1:], qo_indptr.diff()))
    return and_masks(same, or_masks(causal, prefix))


@wrong("packed_prefix_lm", fails="test_an_empty_document")
def numbered_by_new_starts(qo_indptr, prefix_lens):
    """Counts the places where a document begins: empty documents are not counted."""
    starts = torch.zeros(int(qo_indptr[-1]), dtype=torch.long)
    starts[qo_indptr[1:-1]] = 1
    same, causal, prefix = prefix_mask(qo_indptr, prefix_lens, starts.cumsum(0))
    return and_masks(same, or_masks(causal, prefix))


@wrong("packed_prefix_lm", fails="test_traced_with_tensors")
def looks_at_the_documents(qo_indptr, prefix_lens):
    same, causal, prefix = prefix_mask(qo_indptr, prefix_lens)

    def mask_mod(b, h, q_idx, kv_idx):
        if not same(b, h, q_idx, kv_idx).any():
            return same(b, h, q_idx, kv_idx)
        return same(b, h, q_idx, kv_idx) & (causal(b, h, q_idx, kv_idx) | prefix(b, h, q_idx, kv_idx))

    return mask_mod


# capped_alibi -------------------------------------------------------------------------------------------------------


@right("capped_alibi")
def composed_of_scores(slopes, cap):
    return compose_scores(soft_cap(cap), alibi(slopes))


@right("capped_alibi")
def added_from_the_other_side(slopes, cap):
    def score_mod(score, b, h, q_idx, kv_idx):
        distance = kv_idx - q_idx
        return torch.tanh(score / cap).mul(cap) + distance * slopes.index_select(0, h.flatten()).view(h.shape)

    return score_mod


@wrong("capped_alibi", fails="test_the_cap")
def a_hard_cap(slopes, cap):
    return lambda score, b, h, q_idx, kv_idx: score.clamp(-cap, cap) - slopes[h] * (q_idx - kv_idx)


@wrong("capped_alibi", fails="test_the_cap")
def between_minus_one_and_one(slopes, cap):
    return lambda score, b, h, q_idx, kv_idx: torch.tanh(score / cap) - slopes[h] * (q_idx - kv_idx)


@wrong("capped_alibi", fails="test_the_distance")
def the_far_win(slopes, cap):
    return lambda score, b, h, q_idx, kv_idx: cap * torch.tanh(score / cap) + slopes[h] * (q_idx - kv_idx)


@wrong("capped_alibi", fails="test_the_distance")
def the_position_of_the_query(slopes, cap):
    return lambda score, b, h, q_idx, kv_idx: cap * torch.tanh(score / cap) - slopes[h] * q_idx


@wrong("capped_alibi", fails="test_the_distance")
def distance_without_a_sign(slopes, cap):
    return lambda score, b, h, q_idx, kv_idx: cap * torch.tanh(score / cap) - slopes[h] * (q_idx - kv_idx).abs()


@wrong("capped_alibi", fails="test_a_slope_for_each_head")
def the_row_of_the_batch(slopes, cap):
    return lambda score, b, h, q_idx, kv_idx: cap * torch.tanh(score / cap) - slopes[b] * (q_idx - kv_idx)


@wrong("capped_alibi", fails="test_a_slope_for_each_head")
def one_slope_for_all(slopes, cap):
    return lambda score, b, h, q_idx, kv_idx: cap * torch.tanh(score / cap) - slopes.mean() * (q_idx - kv_idx)


@wrong("capped_alibi", fails="test_a_slope_for_each_head")
def all_slopes(slopes, cap):
    return lambda score, b, h, q_idx, kv_idx: cap * torch.tanh(score / cap) - slopes.squeeze() * (q_idx - kv_idx)


@wrong("capped_alibi", fails="test_the_order")
def cap_last(slopes, cap):
    return compose_scores(alibi(slopes), soft_cap(cap))


@wrong("capped_alibi", fails="test_all_scores_at_once")
def one_head_at_a_time(slopes, cap):
    return lambda score, b, h, q_idx, kv_idx: cap * torch.tanh(score / cap) - float(slopes[h]) * (q_idx - kv_idx)


@wrong("capped_alibi", fails="test_traced_scores")
def skips_a_distance_of_zero(slopes, cap):
    def score_mod(score, b, h, q_idx, kv_idx):
        capped = cap * torch.tanh(score / cap)
        return capped - slopes[h] * (q_idx - kv_idx) if (q_idx != kv_idx).any() else capped

    return score_mod


# blocks_of_mask -----------------------------------------------------------------------------------------------------


@right("blocks_of_mask")
def block_by_block(mask, block_size):
    rows, columns = (-(-n // block_size) for n in mask.shape)
    lists = torch.zeros(2, rows, columns, dtype=torch.int32)
    counts = torch.zeros(2, rows, dtype=torch.int32)
    for i in range(rows):
        for j in range(columns):
            block = mask[i * block_size :, j * block_size :][:block_size, :block_size]
            if block.any():
                which = int(block.sum() == block_size**2)
                lists[which, i, counts[which, i]] = j
                counts[which, i] += 1
    return reference.Blocks(counts[0], lists[0], counts[1], lists[1])


@right("blocks_of_mask")
def by_torch(mask, block_size):
    num_queries, num_keys = mask.shape

    def mask_mod(b, h, q_idx, kv_idx):
        return mask[q_idx, kv_idx]

    block_mask = create_block_mask(mask_mod, None, None, num_queries, num_keys, device="cpu", BLOCK_SIZE=block_size)
    names = ("kv_num_blocks", "kv_indices", "full_kv_num_blocks", "full_kv_indices")
    return reference.Blocks(*(getattr(block_mask, name)[0, 0] for name in names))


def tables(mask, block_size, fill=False):
    num_queries, num_keys = mask.shape
    mask = F.pad(mask, (0, -num_keys % block_size, 0, -num_queries % block_size), value=fill)
    pairs = mask.unflatten(0, (-1, block_size)).unflatten(-1, (-1, block_size))
    return pairs.any(3).any(1), pairs.all(3).all(1)


def partial_and_full(mask, block_size, fill=False):
    visited, full = tables(mask, block_size, fill)
    return visited & ~full, full


def lists_of(partial, full, order=None):
    order = order or (lambda chosen: (~chosen).byte().argsort(dim=-1, stable=True))
    return reference.Blocks(partial.sum(-1).int(), order(partial).int(), full.sum(-1).int(), order(full).int())


@wrong("blocks_of_mask", fails="test_blocks_in_int32")
def blocks_in_int64(mask, block_size):
    return reference.Blocks(*(tensor.long() for tensor in reference.blocks_of_mask(mask, block_size)))


@wrong("blocks_of_mask", fails="test_one_visible_pair")
def more_than_half(mask, block_size):
    """A block is visited if its pairs are visible on average."""
    visited, full = tables(mask, block_size)
    pairs = F.avg_pool2d(mask[None].float(), block_size, ceil_mode=True)[0]
    return lists_of(visited & (pairs >= 0.5) & ~full, full)


@wrong("blocks_of_mask", fails="test_one_visible_pair")
def its_first_pair(mask, block_size):
    _, full = tables(mask, block_size)
    return lists_of(mask[::block_size, ::block_size] & ~full, full)


@wrong("blocks_of_mask", fails="test_a_full_block")
def full_blocks_twice(mask, block_size):
    return lists_of(*tables(mask, block_size))


@wrong("blocks_of_mask", fails="test_a_full_block")
def full_blocks_are_partial(mask, block_size):
    visited, full = tables(mask, block_size)
    return lists_of(visited, full & False)


@wrong("blocks_of_mask", fails="test_one_hidden_pair")
def full_by_its_corners(mask, block_size):
    """Right for causal masks and windows, in which the corners decide."""
    visited, _ = tables(mask, block_size)
    rows, columns = (-(-n // block_size) * block_size for n in mask.shape)
    padded = F.pad(mask, (0, columns - mask.shape[1], 0, rows - mask.shape[0]))
    first, last = slice(None, None, block_size), slice(block_size - 1, None, block_size)
    full = padded[first, first] & padded[first, last] & padded[last, first] & padded[last, last]
    return lists_of(visited & ~full, full)


@wrong("blocks_of_mask", fails="test_one_hidden_pair")
def full_if_nearly(mask, block_size):
    """A hidden pair or two in a large block do not matter."""
    visited, full = tables(mask, block_size)
    rows, columns = (-(-n // block_size) * block_size for n in mask.shape)
    padded = F.pad(mask, (0, columns - mask.shape[1], 0, rows - mask.shape[0]))
    share = F.avg_pool2d(padded[None].float(), block_size)[0]
    full = full | (share > 0.95)
    return lists_of(visited & ~full, full)


@wrong("blocks_of_mask", fails="test_hidden_blocks")
def every_other_block(mask, block_size):
    _, full = tables(mask, block_size)
    return lists_of(~full, full)


@wrong("blocks_of_mask", fails="test_order")
def last_block_first(mask, block_size):
    visited, full = tables(mask, block_size)

    def order(chosen):
        n = chosen.shape[-1]
        return torch.where(chosen, torch.arange(n), -1).argsort(dim=-1, descending=True)

    return lists_of(visited & ~full, full, order)


@wrong("blocks_of_mask", fails="test_order")
def in_their_own_columns(mask, block_size):
    visited, full = tables(mask, block_size)
    return lists_of(visited & ~full, full, lambda chosen: torch.arange(chosen.shape[-1]) * chosen)


def unstable(chosen):
    """torch keeps the order of equal values up to 16 of them."""
    return chosen.byte().argsort(dim=-1, descending=True)


@wrong("blocks_of_mask", fails="test_order_of_many_blocks")
def an_unstable_sort(mask, block_size):
    return lists_of(*partial_and_full(mask, block_size), unstable)


@right("blocks_of_mask")
def a_stable_descending_sort(mask, block_size):
    def order(chosen):
        return chosen.byte().argsort(dim=-1, descending=True, stable=True)

    return lists_of(*partial_and_full(mask, block_size), order)


@wrong("blocks_of_mask", fails="test_more_keys_than_queries")
def by_columns(mask, block_size):
    return lists_of(*partial_and_full(mask.T, block_size))


@wrong("blocks_of_mask", fails="test_blocks_that_are_cut_off")
def padded_with_true(mask, block_size):
    return lists_of(*partial_and_full(mask, block_size, fill=True))


@wrong("blocks_of_mask", fails="test_blocks_that_are_cut_off")
def whole_blocks_only(mask, block_size):
    num_queries, num_keys = (n // block_size * block_size for n in mask.shape)
    return lists_of(*partial_and_full(mask[:num_queries, :num_keys], block_size))


@wrong("blocks_of_mask", fails="test_the_padding_of_a_list")
def minus_one_behind(mask, block_size):
    blocks = reference.blocks_of_mask(mask, block_size)
    place = torch.arange(blocks.kv_indices.shape[1])
    hide = [x.masked_fill(place >= n[:, None], -1) for n, x in (blocks[:2], blocks[2:])]
    return blocks._replace(kv_indices=hide[0], full_kv_indices=hide[1])


# classify_blocks ----------------------------------------------------------------------------------------------------


@right("classify_blocks")
def by_the_keys_of_each_end(first_query, last_query, first_key, last_key, window):
    """The keys that the block's queries see are one run; those that all of them see are another."""
    reach = 2**40 if window is None else window - 1
    some = (first_key <= last_query) & (last_key >= first_query - reach)
    all_ = (last_key <= first_query) & (first_key >= last_query - reach)
    return some, all_


@right("classify_blocks")
def with_maximum(first_query, last_query, first_key, last_key, window):
    nearest, furthest = first_query - last_key, last_query - first_key
    end = torch.full_like(furthest, 2**40) if window is None else torch.full_like(furthest, window - 1)
    # The range of distances, cut to those that are visible.
    low, high = nearest.clamp(min=0), torch.minimum(furthest, end)
    return low <= high, (low == nearest) & (high == furthest)


def ends(first_query, last_query, first_key, last_key, window, **change):
    """The reference with one thing changed, from which the wrong answers below are made."""
    past = change.get("past", lambda near, far: (far >= 0, near >= 0))
    inside = change.get("inside", lambda near, far: (near < window, far < window))
    nearest, furthest = first_query - last_key, last_query - first_key
    visited, full = past(nearest, furthest)
    if window is not None:
        near, far = inside(nearest, furthest)
        visited, full = visited & near, full & far
    return visited, full


@wrong("classify_blocks", fails="test_one_query_one_key")
def never_itself(*block):
    return ends(*block, past=lambda near, far: (far > 0, near > 0))


@wrong("classify_blocks", fails="test_one_query_one_key")
def the_other_way_round(first_query, last_query, first_key, last_key, window):
    visited, full = reference.classify_blocks(first_query, last_query, first_key, last_key, window)
    return full & (first_query != last_key), visited


@wrong("classify_blocks", fails="test_some_query_sees_some_key")
def as_far_as_the_first_query(first_query, last_query, first_key, last_key, window):
    visited, full = reference.classify_blocks(first_query, last_query, first_key, last_key, window)
    return visited & (first_key <= first_query), full


@wrong("classify_blocks", fails="test_some_query_sees_some_key")
def only_what_is_full(*block):
    return ends(*block, past=lambda near, far: (near >= 0, near >= 0))


@wrong("classify_blocks", fails="test_every_query_sees_every_key")
def full_for_the_last_query(first_query, last_query, first_key, last_key, window):
    visited, _ = reference.classify_blocks(first_query, last_query, first_key, last_key, window)
    return visited, visited & (last_key <= last_query)


@wrong("classify_blocks", fails="test_where_a_window_ends")
def one_key_more(first_query, last_query, first_key, last_key, window):
    return ends(first_query, last_query, first_key, last_key, window and window + 1)


@wrong("classify_blocks", fails="test_where_a_window_ends")
def as_far_back_as_the_last_query(first_query, last_query, first_key, last_key, window):
    visited, full = reference.classify_blocks(first_query, last_query, first_key, last_key, window)
    return (visited if window is None else visited & (last_query - last_key < window)), full


@wrong("classify_blocks", fails="test_where_a_window_ends")
def no_window(first_query, last_query, first_key, last_key, window):
    return reference.classify_blocks(first_query, last_query, first_key, last_key, None)


@wrong("classify_blocks", fails="test_full_in_a_window")
def full_without_the_window(first_query, last_query, first_key, last_key, window):
    visited, _ = reference.classify_blocks(first_query, last_query, first_key, last_key, window)
    return visited, visited & (last_key <= first_query)


@wrong("classify_blocks", fails="test_full_in_a_window_is_causal")
def full_by_the_window_alone(first_query, last_query, first_key, last_key, window):
    visited, full = reference.classify_blocks(first_query, last_query, first_key, last_key, window)
    return visited, full if window is None else visited & (last_query - first_key < window)


@wrong("classify_blocks", fails="test_a_window_narrower_than_a_block")
def by_the_corners(first_query, last_query, first_key, last_key, window):
    see = reference.visible(window)
    corners = [see(0, 0, q, k) for q in (first_query, last_query) for k in (first_key, last_key)]
    return corners[0] | corners[1] | corners[2] | corners[3], corners[0] & corners[1] & corners[2] & corners[3]


@wrong("classify_blocks", fails="test_a_table_of_blocks")
def one_block_at_a_time(first_query, last_query, first_key, last_key, window):
    end = 2**40 if window is None else window
    if last_query < first_key or first_query - last_key >= end:
        return torch.tensor(False), torch.tensor(False)
    return torch.tensor(True), torch.tensor(bool(first_query >= last_key and last_query - first_key < end))


# blocks_of_documents ------------------------------------------------------------------------------------------------


@right("blocks_of_documents")
def a_row_at_a_time(qo_indptr, block_size):
    """For each row of blocks: where the document of its first query begins, and that of its last."""
    bounds = qo_indptr.tolist()
    total = bounds[-1]
    count = -(-total // block_size)
    lists = torch.zeros(2, count, count, dtype=torch.int32)
    counts = torch.zeros(2, count, dtype=torch.int32)
    for i in range(count):
        top, bottom = i * block_size, (i + 1) * block_size - 1
        begin = max(b for b in bounds if b <= top)
        begin_last = max((b for b in bounds if b <= bottom), default=0)
        for j in range(begin // block_size, i + 1):
            left, right_end = j * block_size, (j + 1) * block_size - 1
            full = bottom < total and left >= begin_last and right_end <= top
            lists[int(full), i, counts[int(full), i]] = j
            counts[int(full), i] += 1
    return reference.Blocks(counts[0], lists[0], counts[1], lists[1])


def flat_blocks(qo_indptr, size, *, right_side=True, back="first", document_of_full="last", cut=True):
    """The reference with one thing changed, from which the wrong answers below are made."""
    total = int(qo_indptr[-1])
    first = torch.arange(0, total, size, dtype=qo_indptr.dtype)
    last = first + size - 1
    end = {"first": first, "last": last.clamp(max=total - 1)}

    def start(row):
        return qo_indptr[torch.searchsorted(qo_indptr, row, right=right_side) - 1]

    visited = (first <= last[:, None]) & (last >= start(end[back])[:, None])
    full = (last <= first[:, None]) & (first >= start(end[document_of_full])[:, None])
    if cut:
        full &= (last < total)[:, None]
    return lists_of(visited & ~full, full)


@wrong("blocks_of_documents", fails="test_blocks_of_one_document")
def no_full_blocks(qo_indptr, size):
    blocks = flat_blocks(qo_indptr, size)
    total = -(-int(qo_indptr[-1]) // size)
    seen = torch.ones(total, total, dtype=torch.bool).tril()
    return blocks if len(qo_indptr) > 2 else lists_of(seen, seen & False)


@wrong("blocks_of_documents", fails="test_blocks_of_one_document")
def full_on_the_diagonal(qo_indptr, size):
    total = -(-int(qo_indptr[-1]) // size)
    full = torch.ones(total, total, dtype=torch.bool).tril()
    return lists_of(full & False, full)


@wrong("blocks_of_documents", fails="test_documents_of_whole_blocks")
def one_causal_document(qo_indptr, size):
    return flat_blocks(qo_indptr[[0, -1]], size)


@wrong("blocks_of_documents", fails="test_a_document_begins_inside_a_block")
def the_document_of_the_last_query(qo_indptr, size):
    return flat_blocks(qo_indptr, size, back="last")


@wrong("blocks_of_documents", fails="test_full_blocks_of_one_document_only")
def full_for_the_first_query(qo_indptr, size):
    return flat_blocks(qo_indptr, size, document_of_full="first")


@wrong("blocks_of_documents", fails="test_short_documents")
def at_most_one_start_in_a_block(qo_indptr, size):
    """Puts the start of a document into a table by block: if there are several in a block, only one is left."""
    total = int(qo_indptr[-1])
    first = torch.arange(0, total, size)
    begins = torch.zeros(len(first), dtype=torch.long)
    for start in reversed(qo_indptr[:-1].tolist()):
        begins[start // size] = start
    begins = begins.cummax(0).values
    before = F.pad(begins[:-1], (1, 0))
    reach = torch.where(begins == first, begins, before)
    last = first + size - 1
    visited = (first <= last[:, None]) & (last >= reach[:, None])
    full = (last <= first[:, None]) & (first >= begins[:, None]) & (last < total)[:, None]
    return lists_of(visited & ~full, full)


@wrong("blocks_of_documents", fails="test_the_last_query_block_is_cut_off")
def a_full_last_row(qo_indptr, size):
    return flat_blocks(qo_indptr, size, cut=False, document_of_full="last")


@wrong("blocks_of_documents", fails="test_empty_documents")
def the_first_of_equal_bounds(qo_indptr, size):
    """Documents by their number: an empty one ends the search too early."""
    distinct = qo_indptr[:1].tolist()
    for bound in qo_indptr[1:].tolist():
        if bound == distinct[-1]:
            distinct[-1] = bound - 1 if bound else 0
        distinct.append(bound)
    return flat_blocks(torch.tensor(sorted(distinct), dtype=qo_indptr.dtype), size)


@wrong("blocks_of_documents", fails="test_the_order_of_many_blocks")
def documents_by_an_unstable_sort(qo_indptr, size):
    total = int(qo_indptr[-1])
    ids = torch.repeat_interleave(torch.arange(len(qo_indptr) - 1), qo_indptr.diff())
    tokens = torch.arange(total)
    mask = (ids[:, None] == ids) & (tokens[:, None] >= tokens)
    return lists_of(*partial_and_full(mask, size), unstable)


@wrong("blocks_of_documents", fails="test_no_dense_mask")
def by_the_mask(qo_indptr, size):
    ids = torch.repeat_interleave(torch.arange(len(qo_indptr) - 1), qo_indptr.diff())
    rows = torch.arange(len(ids))
    return reference.blocks_of_mask((ids[:, None] == ids) & (rows[:, None] >= rows), size)


@wrong("blocks_of_documents", fails="test_no_dense_mask")
def by_tokens_and_blocks(qo_indptr, size):
    """Every token asks every block for its document: exact, but with 128 times as many numbers as needed."""
    total = int(qo_indptr[-1])
    rows = torch.arange(total)
    start = qo_indptr[torch.searchsorted(qo_indptr, rows.to(qo_indptr.dtype), right=True) - 1]
    first = torch.arange(0, total, size)
    sees = (first <= rows[:, None]) & (first + size > start[:, None])
    every = (first + size - 1 <= rows[:, None]) & (first >= start[:, None])
    blocks = [x.split(size) for x in (sees, every)]
    visited = torch.stack([x.any(0) for x in blocks[0]])
    full = torch.stack([x.all(0) & (len(x) == size) for x in blocks[1]])
    return lists_of(visited & ~full, full)
