"""Right and wrong answers to the homework of chapter 08, with the check that must be the first to find each mistake."""

from dataclasses import replace
from functools import reduce
from itertools import pairwise

import numpy as np
import torch

from book.grading import right, solution, wrong
from mini_engine.attention.split_kv import WorkPlan
from mini_engine.attention.state import AttentionState, merge_all, merge_states

reference = solution("08_flashinfer")


# csr_from_table -----------------------------------------------------------------------------------------------------


@right("csr_from_table")
def by_entries(table, kv_lens, page_size):
    """Every entry's row and column, from the counts."""
    counts = (kv_lens + page_size - 1) // page_size
    indptr = np.zeros(len(kv_lens) + 1, dtype=np.int32)
    np.cumsum(counts, out=indptr[1:])
    rows = np.repeat(np.arange(len(counts)), counts)
    columns = np.arange(indptr[-1]) - indptr[rows]
    rest = kv_lens % page_size
    last = np.where((rest == 0) & (kv_lens > 0), page_size, rest)
    return indptr, table[rows, columns], last.astype(np.int32)


def csr(table, kv_lens, page_size, **change):
    """The reference with one thing changed."""
    counts = kv_lens // page_size + 1 if change.get("a_page_too_many") else -(-kv_lens // page_size)
    if change.get("until_zero"):
        counts = (table != 0).sum(axis=1)
    lengths = kv_lens if change.get("in_keys") else counts
    indptr = np.concatenate(([0], lengths.cumsum()))
    if change.get("without_zero"):
        indptr = indptr[1:]
    last = kv_lens - np.maximum(counts - 1, 0) * page_size
    if change.get("remainder"):
        last = kv_lens % page_size
    if change.get("wraps"):
        last = (kv_lens - 1) % page_size + 1
    indices = table[np.arange(table.shape[1]) < counts[:, None]]
    if change.get("columns_first"):
        used = np.arange(table.shape[1]) < counts[:, None]
        indices = table.T[used.T]
    return indptr.astype(np.int64 if change.get("int64") else np.int32), indices, last.astype(np.int32)


@wrong("csr_from_table", fails="test_one_page")
def indptr_without_its_zero(*args):
    return csr(*args, without_zero=True)


@wrong("csr_from_table", fails="test_csr_in_int32")
def indptr_in_int64(*args):
    return csr(*args, int64=True)


@wrong("csr_from_table", fails="test_one_page")
def indptr_in_keys(*args):
    return csr(*args, in_keys=True)


@wrong("csr_from_table", fails="test_a_full_last_page")
def an_empty_page_behind_full_ones(*args):
    return csr(*args, a_page_too_many=True)


@wrong("csr_from_table", fails="test_a_full_last_page")
def full_pages_count_as_empty(*args):
    return csr(*args, remainder=True)


@wrong("csr_from_table", fails="test_three_sequences")
def column_after_column(*args):
    return csr(*args, columns_first=True)


@wrong("csr_from_table", fails="test_one_page")
def zeros_are_padding(table, kv_lens, page_size):
    """Counts the entries that are not 0: stale entries count, and page 0 does not."""
    return csr(table, kv_lens, page_size, until_zero=True)


@wrong("csr_from_table", fails="test_a_sequence_without_keys")
def no_keys_fill_a_page(*args):
    return csr(*args, wraps=True)


@wrong("csr_from_table", fails="test_csr_without_a_loop")
def row_by_row(table, kv_lens, page_size):
    indptr, indices, last = [0], [], []
    for row, n in zip(table, kv_lens.tolist(), strict=True):
        count = -(-n // page_size)
        indices += row[:count].tolist()
        indptr.append(len(indices))
        last.append(n - max(count - 1, 0) * page_size)
    return tuple(np.array(x, dtype=np.int32) for x in (indptr, indices, last))


# table_from_csr -----------------------------------------------------------------------------------------------------


@right("table_from_csr")
def by_columns(indptr, indices, last_page_len, page_size):
    """Looks up every entry of the table, and blanks those after a row's last page."""
    counts = indptr[1:] - indptr[:-1]
    columns = np.arange(counts.max())
    entries = np.minimum(indptr[:-1, None] + columns, len(indices) - 1)
    table = np.where(columns < counts[:, None], indices[entries], 0).astype(np.int32)
    kv_lens = np.where(counts > 0, (counts - 1) * page_size, 0) + last_page_len
    return table, kv_lens.astype(np.int32)


def to_table(indptr, indices, last_page_len, page_size, **change):
    """The reference with one thing changed."""
    counts = np.diff(indptr)
    width = counts.max() + (1 if change.get("wide") else 0)
    table = np.full((len(counts), width), -1 if change.get("minus_one") else 0, dtype=np.int32)
    rows = counts[::-1] if change.get("reversed") else counts
    table[np.arange(width) < rows[:, None]] = indices
    before = counts if change.get("full") else counts - 1
    before = before if change.get("negative") else np.maximum(before, 0)
    return table, (before * page_size + last_page_len).astype(np.int32)


@wrong("table_from_csr", fails="test_back_to_one_row")
def the_last_page_is_full_too(*args):
    return to_table(*args, full=True)


@wrong("table_from_csr", fails="test_back_to_one_row")
def a_column_too_many(*args):
    return to_table(*args, wide=True)


@wrong("table_from_csr", fails="test_back_to_rows")
def padded_with_minus_one(*args):
    return to_table(*args, minus_one=True)


@wrong("table_from_csr", fails="test_back_to_rows")
def rows_of_other_sequences(indptr, indices, last_page_len, page_size):
    counts = np.diff(indptr)
    table, kv_lens = to_table(indptr, indices, last_page_len, page_size)
    return table[np.argsort(counts, kind="stable")], kv_lens


@wrong("table_from_csr", fails="test_back_to_an_empty_row")
def minus_a_page(*args):
    return to_table(*args, negative=True)


@wrong("table_from_csr", fails="test_table_without_a_loop")
def a_row_at_a_time(indptr, indices, last_page_len, page_size):
    table, kv_lens = to_table(indptr, indices, last_page_len, page_size)
    for b, (first, end) in enumerate(pairwise(indptr.tolist())):
        table[b, : end - first] = indices[first:end]
    return table, kv_lens


# append_positions ---------------------------------------------------------------------------------------------------


@right("append_positions")
def from_the_lengths_after(qo_indptr, kv_lens, kv_indptr, kv_indices, page_size):
    """As FlashInfer does it: the new tokens are the last of the sequence."""
    num_new = qo_indptr[1:] - qo_indptr[:-1]
    after = kv_lens + num_new
    tokens = np.arange(qo_indptr[-1], dtype=np.int32)
    batch_indices = (np.searchsorted(qo_indptr, tokens, side="right") - 1).astype(np.int32)
    positions = after[batch_indices] - (qo_indptr[1:][batch_indices] - tokens)
    page, offset = np.divmod(positions, page_size)
    slots = kv_indices[kv_indptr[:-1][batch_indices] + page] * np.int64(page_size) + offset
    last = after - page_size * (np.diff(kv_indptr) - 1)
    return batch_indices, positions, slots, last.astype(np.int32)


def appended(qo_indptr, kv_lens, kv_indptr, kv_indices, page_size, **change):
    """The reference with one thing changed."""
    num_new = np.diff(qo_indptr)
    batch_indices = np.repeat(np.arange(len(num_new), dtype=np.int32), num_new)
    positions = np.arange(qo_indptr[-1], dtype=np.int32) - qo_indptr[batch_indices] + kv_lens[batch_indices]
    if change.get("all_at_the_end"):
        positions = (kv_lens + num_new - 1)[batch_indices]
    if change.get("from_zero"):
        positions = positions - kv_lens[batch_indices]
    if change.get("off_by_one"):
        positions = positions + 1
    if change.get("over_the_step"):
        positions = np.arange(qo_indptr[-1], dtype=np.int32) + kv_lens[batch_indices]
    first_page = 0 if change.get("first_sequence") else kv_indptr[batch_indices]
    pages = kv_indices[np.minimum(first_page + positions // page_size, len(kv_indices) - 1)]
    if change.get("last_page"):
        pages = kv_indices[kv_indptr[batch_indices + 1] - 1]
    if not change.get("in_int32"):
        pages = pages.astype(np.int64)
    slots = (pages * np.int32(page_size) + positions % page_size).astype(np.int64)
    last = (kv_lens + num_new - 1) % page_size + 1
    if change.get("before"):
        last = (kv_lens - 1) % page_size + 1
    if change.get("before_plus_new"):
        last = (kv_lens - 1) % page_size + 1 + num_new
    if change.get("remainder"):
        last = (kv_lens + num_new) % page_size
    return batch_indices, positions, slots, last.astype(np.int32)


@wrong("append_positions", fails="test_one_decode")
def last_page_len_before_the_append(*args):
    """The bug of the chapter."""
    return appended(*args, before=True)


@wrong("append_positions", fails="test_one_decode")
def positions_after_the_new_key(*args):
    return appended(*args, off_by_one=True)


@wrong("append_positions", fails="test_one_decode")
def a_full_page_counts_as_empty(*args):
    return appended(*args, remainder=True)


@wrong("append_positions", fails="test_one_decode")
def positions_among_the_new_tokens(*args):
    return appended(*args, from_zero=True)


@wrong("append_positions", fails="test_a_decode_on_a_new_page")
def last_page_len_beyond_the_page(*args):
    return appended(*args, before_plus_new=True)


@wrong("append_positions", fails="test_a_prompt")
def all_new_tokens_in_the_last_page(*args):
    return appended(*args, last_page=True)


@wrong("append_positions", fails="test_a_prompt")
def all_new_tokens_at_one_position(*args):
    return appended(*args, all_at_the_end=True)


@wrong("append_positions", fails="test_a_mixed_step")
def counted_over_the_whole_step(*args):
    return appended(*args, over_the_step=True)


@wrong("append_positions", fails="test_a_mixed_step")
def pages_of_the_first_sequence(*args):
    return appended(*args, first_sequence=True)


@wrong("append_positions", fails="test_a_large_pool")
def slots_multiplied_in_int32(*args):
    return appended(*args, in_int32=True)


@wrong("append_positions", fails="test_append_without_a_loop")
def token_by_token(qo_indptr, kv_lens, kv_indptr, kv_indices, page_size):
    batch_indices, positions, slots = [], [], []
    for b, n in enumerate(kv_lens.tolist()):
        for i in range(qo_indptr[b + 1] - qo_indptr[b]):
            batch_indices.append(b)
            positions.append(n + i)
            slots.append(int(kv_indices[kv_indptr[b] + (n + i) // page_size]) * page_size + (n + i) % page_size)
    last = (kv_lens + np.diff(qo_indptr) - 1) % page_size + 1
    return np.array(batch_indices, np.int32), np.array(positions, np.int32), np.array(slots), last


# smallest_chunk -----------------------------------------------------------------------------------------------------


@right("smallest_chunk")
def with_bisect(num_keys, num_workers, least=1):
    from bisect import bisect_left

    sizes = range(least, max(least, int(num_keys.max())))
    return sizes.start + bisect_left(sizes, True, key=lambda c: int(np.ceil(num_keys / c).sum()) <= num_workers)


@right("smallest_chunk")
def by_halving_steps(num_keys, num_workers, least=1):
    """From the largest size down, in steps of powers of two, as long as the size fits."""
    size = max(least, int(num_keys.max()))
    step = 1 << size.bit_length()
    while step:
        smaller = size - step
        if smaller >= least and sum(-(-n // smaller) for n in num_keys.tolist()) <= num_workers:
            size = smaller
        else:
            step //= 2
    return size


@wrong("smallest_chunk", fails="test_one_tile")
def one_too_large(num_keys, num_workers, least=1):
    return reference.smallest_chunk(num_keys, num_workers, least) + 1


@wrong("smallest_chunk", fails="test_one_tile")
def one_too_small(num_keys, num_workers, least=1):
    return max(least, int(num_keys.sum()) // num_workers)


@wrong("smallest_chunk", fails="test_several_tiles")
def the_mean_rounded_up(num_keys, num_workers, least=1):
    """Forgets that every tile rounds up."""
    return max(least, -(-int(num_keys.sum()) // num_workers))


@wrong("smallest_chunk", fails="test_one_tile")
def chunks_rounded_down(num_keys, num_workers, least=1):
    sizes = range(least, max(least, int(num_keys.max())) + 1)
    return next((c for c in sizes if np.maximum(num_keys // c, 1).sum() <= num_workers), sizes[-1])


@wrong("smallest_chunk", fails="test_more_tiles_than_workers")
def the_mean_when_nothing_fits(num_keys, num_workers, least=1):
    if len(num_keys) > num_workers:
        return max(least, int(num_keys.sum()) // num_workers)
    return reference.smallest_chunk(num_keys, num_workers, least)


@wrong("smallest_chunk", fails="test_least")
def least_is_ignored(num_keys, num_workers, least=1):
    return reference.smallest_chunk(num_keys, num_workers)


@wrong("smallest_chunk", fails="test_least")
def never_above_the_longest(num_keys, num_workers, least=1):
    return min(reference.smallest_chunk(num_keys, num_workers, least), int(num_keys.max()))


@wrong("smallest_chunk", fails="test_many_keys")
def size_after_size(num_keys, num_workers, least=1):
    for size in range(least, max(least, int(num_keys.max()))):
        if (-(-num_keys // size)).sum() <= num_workers:
            return size
    return max(least, int(num_keys.max()))


@wrong("smallest_chunk", fails="test_many_keys")
def from_the_mean_upwards(num_keys, num_workers, least=1):
    if len(num_keys) > num_workers:
        return reference.smallest_chunk(num_keys, num_workers, least)
    size = max(least, -(-int(num_keys.sum()) // num_workers))
    while (-(-num_keys // size)).sum() > num_workers:
        size += 1
    return size


@wrong("smallest_chunk", fails="test_one_tile")
def a_float(*args):
    return float(reference.smallest_chunk(*args))


@wrong("smallest_chunk", fails="test_many_keys")
def doubled_until_it_fits(num_keys, num_workers, least=1):
    """Exact for small tiles: below 4,096 keys it tries the sizes between as well."""
    if num_keys.max() <= 4096:
        return reference.smallest_chunk(num_keys, num_workers, least)
    size = least
    while (-(-num_keys // size)).sum() > num_workers and size < num_keys.max():
        size *= 2
    return size


# plan_work ----------------------------------------------------------------------------------------------------------


@right("plan_work")
def from_ends_to_firsts(qo_indptr, kv_lens, num_workers, *, tile_len, least_keys=1, window=None):
    """Numbers the pieces by a cumulative sum of ones, and finds groups by searchsorted."""

    def pieces(counts):
        indptr = np.concatenate(([0], np.cumsum(counts)))
        numbers = np.arange(indptr[-1])
        groups = np.searchsorted(indptr, numbers, side="right") - 1
        return indptr, groups, numbers - indptr[groups]

    num_new = np.diff(qo_indptr)
    _, of_tile, index = pieces((num_new + tile_len - 1) // tile_len)
    first = index * tile_len  # counted among the new tokens of the sequence
    end = np.minimum(first + tile_len, num_new[of_tile])
    before = (kv_lens - num_new)[of_tile]
    end_keys = before + end
    first_keys = np.clip(before + first - (window or 10**9) + 1, 0, None)
    size = reference.smallest_chunk(end_keys - first_keys, num_workers, least_keys)
    item_indptr, of_item, index = pieces(np.ceil((end_keys - first_keys) / size).astype(int))
    low = first_keys[of_item] + index * size
    return WorkPlan(
        chunk_size=size,
        sequences=of_tile[of_item],
        first_tokens=(qo_indptr[of_tile] + first)[of_item],
        end_tokens=(qo_indptr[of_tile] + end)[of_item],
        first_keys=low,
        end_keys=np.minimum(low + size, end_keys[of_item]),
        item_indptr=item_indptr,
    )


def planned(qo_indptr, kv_lens, num_workers, *, tile_len, least_keys=1, window=None, **change):
    """The reference with one thing changed."""
    counts = np.diff(qo_indptr) // tile_len if change.get("tiles_down") else -(-np.diff(qo_indptr) // tile_len)
    counts = np.maximum(counts, 1)
    sequences = np.repeat(np.arange(len(counts)), counts)
    index = np.arange(len(sequences)) - np.repeat(counts.cumsum() - counts, counts)
    first_tokens = qo_indptr[sequences] + index * tile_len
    end_tokens = np.minimum(first_tokens + tile_len, qo_indptr[sequences + 1])
    if change.get("tiles_overhang"):
        end_tokens = first_tokens + tile_len
    shift = kv_lens[sequences] - qo_indptr[sequences + 1]
    if change.get("from_position_0"):
        shift = -qo_indptr[sequences]
        shift = np.where(np.diff(qo_indptr)[sequences] == 1, kv_lens[sequences] - qo_indptr[sequences + 1], shift)
    end_keys = shift + end_tokens
    if change.get("not_causal"):
        end_keys = kv_lens[sequences]
    if change.get("without_the_own_key"):
        end_keys = end_keys - (np.diff(qo_indptr)[sequences] > 1)
    first_keys = np.zeros_like(end_keys)
    if window is not None and not change.get("no_window"):
        oldest = (end_tokens - 1 if change.get("window_of_the_last") else first_tokens) + shift
        first_keys = np.maximum(oldest + (0 if change.get("window_left") else 1) - window, 0)
    num_keys = end_keys - first_keys
    size = reference.smallest_chunk(num_keys, num_workers, 1 if change.get("any_size") else least_keys)
    if change.get("mean"):
        size = max(least_keys, -(-int(num_keys.sum()) // num_workers))
    if change.get("never_split"):
        size = int(num_keys.max())
    sizes = np.full_like(num_keys, size)
    if change.get("own_sizes"):
        sizes = np.maximum(least_keys, -(-num_keys // max(1, num_workers // len(num_keys))))
    items = np.maximum(-(-num_keys // sizes), 1)
    tiles = np.repeat(np.arange(len(items)), items)
    index = np.arange(len(tiles)) - np.repeat(items.cumsum() - items, items)
    low = first_keys[tiles] + index * sizes[tiles]
    high = low + sizes[tiles] if change.get("chunks_overhang") else np.minimum(low + sizes[tiles], end_keys[tiles])
    item_indptr = np.concatenate(([0], items.cumsum()))
    if change.get("counts_for_indptr"):
        item_indptr = items
    return WorkPlan(size, sequences[tiles], first_tokens[tiles], end_tokens[tiles], low, high, item_indptr)


@wrong("plan_work", fails="test_one_item")
def item_counts_for_item_indptr(*args, **options):
    return planned(*args, **options, counts_for_indptr=True)


@wrong("plan_work", fails="test_one_item")
def tiles_hang_over(*args, **options):
    return planned(*args, **options, tiles_overhang=True)


@wrong("plan_work", fails="test_one_sequence_is_split")
def nothing_is_split(*args, **options):
    """One block for each request."""
    return planned(*args, **options, never_split=True)


@wrong("plan_work", fails="test_the_last_chunk_is_shorter")
def chunks_hang_over(*args, **options):
    return planned(*args, **options, chunks_overhang=True)


@wrong("plan_work", fails="test_only_the_long_one_is_split")
def the_mean_load_as_chunk_size(*args, **options):
    return planned(*args, **options, mean=True)


@wrong("plan_work", fails="test_only_the_long_one_is_split")
def every_tile_in_as_many_chunks(*args, **options):
    return planned(*args, **options, own_sizes=True)


@wrong("plan_work", fails="test_tiles_of_queries")
def the_rest_of_the_queries_is_lost(*args, **options):
    return planned(*args, **options, tiles_down=True)


@wrong("plan_work", fails="test_causal_tiles")
def every_tile_needs_all_keys(*args, **options):
    return planned(*args, **options, not_causal=True)


@wrong("plan_work", fails="test_causal_tiles")
def the_own_key_is_left_out(*args, **options):
    return planned(*args, **options, without_the_own_key=True)


@wrong("plan_work", fails="test_keys_before_the_step")
def prompts_begin_at_0(*args, **options):
    return planned(*args, **options, from_position_0=True)


@wrong("plan_work", fails="test_least_keys")
def chunks_of_any_size(*args, **options):
    return planned(*args, **options, any_size=True)


@wrong("plan_work", fails="test_a_window")
def the_window_is_ignored(*args, **options):
    return planned(*args, **options, no_window=True)


@wrong("plan_work", fails="test_a_window")
def the_window_of_the_last_query(*args, **options):
    return planned(*args, **options, window_of_the_last=True)


@wrong("plan_work", fails="test_a_window")
def a_window_without_the_own_key(*args, **options):
    """FlashInfer's window_left, for a number of keys that counts the query's own."""
    return planned(*args, **options, window_left=True)


@wrong("plan_work", fails="test_chunks_in_a_window")
def chunks_at_multiples_of_their_size(*args, **options):
    """Cuts every tile at multiples of the chunk size, as if its keys began at 0."""
    plan = reference.plan_work(*args, **options)
    size, items, item_indptr = plan.chunk_size, [], [0]
    for first, end in pairwise(plan.item_indptr.tolist()):
        low, high = int(plan.first_keys[first]), int(plan.end_keys[end - 1])
        cuts = [low, *range(low // size * size + size, high, size), high]
        tile = plan.sequences[first], plan.first_tokens[first], plan.end_tokens[first]
        items += [(*tile, *keys) for keys in pairwise(cuts)]
        item_indptr.append(len(items))
    return WorkPlan(size, *np.array(items).T, np.array(item_indptr))


@wrong("plan_work", fails="test_one_item")
def kv_lens_before_the_step(qo_indptr, kv_lens, num_workers, **options):
    """Right, but subtracts in place."""
    plan = reference.plan_work(qo_indptr, kv_lens, num_workers, **options)
    kv_lens -= np.diff(qo_indptr)
    return plan


@wrong("plan_work", fails="test_only_the_long_one_is_split")
def qo_indptr_becomes_counts(qo_indptr, kv_lens, num_workers, **options):
    plan = reference.plan_work(qo_indptr, kv_lens, num_workers, **options)
    qo_indptr[1:] -= qo_indptr[:-1].copy()
    return plan


@wrong("plan_work", fails="test_one_item")
def tensors(*args, **options):
    plan = vars(reference.plan_work(*args, **options))
    return WorkPlan(**{name: x if name == "chunk_size" else torch.from_numpy(x) for name, x in plan.items()})


@wrong("plan_work", fails="test_plan_without_a_loop")
def tile_by_tile(qo_indptr, kv_lens, num_workers, *, tile_len, least_keys=1, window=None):
    tiles = []
    for b, n in enumerate(kv_lens.tolist()):
        for first in range(int(qo_indptr[b]), int(qo_indptr[b + 1]), tile_len):
            end = min(first + tile_len, int(qo_indptr[b + 1]))
            position = n - int(qo_indptr[b + 1])
            tiles.append(
                (b, first, end, 0 if window is None else max(0, position + first + 1 - window), position + end)
            )
    size = reference.smallest_chunk(np.array([t[4] - t[3] for t in tiles]), num_workers, least_keys)
    items, indptr = [], [0]
    for b, first, end, low, high in tiles:
        items += [(b, first, end, key, min(key + size, high)) for key in range(low, high, size)]
        indptr.append(len(items))
    return WorkPlan(size, *np.array(items).T, np.array(indptr))


@wrong("plan_work", fails="test_plan_without_a_loop")
def a_comprehension_over_tiles(qo_indptr, kv_lens, num_workers, **options):
    """Counts the items of each tile in Python."""
    plan = reference.plan_work(qo_indptr, kv_lens, num_workers, **options)
    starts, ends = plan.item_indptr[:-1], plan.item_indptr[1:] - 1
    num_keys = plan.end_keys[ends] - plan.first_keys[starts]
    items_of = [-(-int(n) // plan.chunk_size) for n in num_keys]
    return replace(plan, item_indptr=np.concatenate(([0], np.cumsum(items_of))))


# split_kv_decode ----------------------------------------------------------------------------------------------------


@right("split_kv_decode")
def with_stacked_states(q, k_pages, v_pages, kv_indptr, kv_indices, plan, worker):
    """Slots in a flat cache, all items first, and each tile merged in one pass."""
    page_size = k_pages.shape[1]
    k_cache, v_cache = k_pages.flatten(0, 1), v_pages.flatten(0, 1)
    states = []
    for b, token, first, end in zip(
        plan.sequences.tolist(),
        plan.first_tokens.tolist(),
        plan.first_keys.tolist(),
        plan.end_keys.tolist(),
        strict=True,
    ):
        own = kv_indices[kv_indptr[b] : kv_indptr[b + 1]].astype(np.int64)
        slots = torch.from_numpy((own[:, None] * page_size + np.arange(page_size)).reshape(-1)[first:end])
        states.append(worker(q[token][None], k_cache[slots], v_cache[slots]))
    out, lse = torch.zeros_like(q, dtype=states[0].out.dtype), states[0].lse.new_zeros(q.shape[:2])
    for first, end in pairwise(plan.item_indptr.tolist()):
        merged = merge_all(states[first:end])
        out[plan.first_tokens[first]], lse[plan.first_tokens[first]] = merged.out[0], merged.lse[0]
    return AttentionState(out, lse)


def without_the_maximum(a, b):
    """Weights two states by exp(LSE), which overflows."""
    x, y = a.lse.exp()[..., None], b.lse.exp()[..., None]
    return AttentionState((a.out * x + b.out * y) / (x + y), (x + y).log()[..., 0])


def decoded(q, k_pages, v_pages, kv_indptr, kv_indices, plan, worker, **change):
    """The reference with one thing changed."""
    page_size, states = k_pages.shape[1], {}
    for tile, (first, end) in enumerate(pairwise(plan.item_indptr.tolist())):
        partial = []
        for item in range(first, end):
            sequence, token = plan.sequences[item], plan.first_tokens[item]
            low, high = plan.first_keys[item], plan.end_keys[item]
            if change.get("whole_pages"):
                low, high = low // page_size * page_size, -(-high // page_size) * page_size
            if change.get("pages_of_first_key"):
                high = min(high, low // page_size * page_size + page_size)
            if change.get("all_keys"):
                low, high = 0, plan.end_keys[end - 1]
            positions = np.arange(low, high)
            entries = (
                positions // page_size if change.get("first_sequence") else kv_indptr[sequence] + positions // page_size
            )
            pages = torch.from_numpy(kv_indices[entries]).long()
            offsets = positions % page_size
            if change.get("from_offset_0"):
                offsets = np.arange(len(positions)) % page_size
            state = worker(q[token : token + 1], k_pages[pages, offsets], v_pages[pages, offsets])
            partial.append(state)
        merged = reduce(merge_states, partial)
        if change.get("no_maximum"):
            merged = reduce(without_the_maximum, partial)
        if change.get("mean"):
            merged = AttentionState(torch.stack([s.out for s in partial]).mean(0), merged.lse)
        if change.get("weights_without_lse"):
            lses = torch.stack([s.lse.exp() for s in partial])
            merged = AttentionState(merged.out, lses.sum(0))
        if change.get("last_item"):
            merged = partial[-1]
        states[tile if change.get("tile_for_row") else int(plan.first_tokens[first])] = merged
    in_order = [states[row] for row in range(len(q))]
    return AttentionState(torch.cat([s.out for s in in_order]), torch.cat([s.lse for s in in_order]))


@wrong("split_kv_decode", fails="test_one_item_each")
def whole_pages_are_read(*args):
    """Slots after the last key hold something else."""
    return decoded(*args, whole_pages=True)


@wrong("split_kv_decode", fails="test_one_item_each")
def only_the_first_page(*args):
    return decoded(*args, pages_of_first_key=True)


@wrong("split_kv_decode", fails="test_one_item_each")
def sums_without_the_logarithm(*args):
    return decoded(*args, weights_without_lse=True)


@wrong("split_kv_decode", fails="test_two_sequences_of_pages")
def every_sequence_in_the_first_ones_pages(*args):
    return decoded(*args, first_sequence=True)


@wrong("split_kv_decode", fails="test_items_are_merged")
def the_mean_of_the_outputs(*args):
    return decoded(*args, mean=True)


@wrong("split_kv_decode", fails="test_items_are_merged")
def the_last_item_wins(*args):
    return decoded(*args, last_item=True)


@wrong("split_kv_decode", fails="test_ranges_inside_pages")
def ranges_begin_with_a_page(*args):
    return decoded(*args, from_offset_0=True)


@wrong("split_kv_decode", fails="test_a_worker_gets_its_own_keys")
def one_call_for_all_keys(q, k_pages, v_pages, kv_indptr, kv_indices, plan, worker):
    """The right numbers, and no split: the longest sequence still decides when all are done."""
    whole = WorkPlan(
        plan.chunk_size,
        plan.sequences[plan.item_indptr[:-1]],
        plan.first_tokens[plan.item_indptr[:-1]],
        plan.end_tokens[plan.item_indptr[:-1]],
        plan.first_keys[plan.item_indptr[:-1]],
        plan.end_keys[plan.item_indptr[1:] - 1],
        np.arange(len(plan.item_indptr)),
    )
    return reference.split_kv_decode(q, k_pages, v_pages, kv_indptr, kv_indices, whole, worker)


@wrong("split_kv_decode", fails="test_pages_of_other_keys")
def all_own_pages_first(q, k_pages, v_pages, kv_indptr, kv_indices, plan, worker):
    """Gathers the whole sequence for each item, and takes the item's keys from the copy."""
    states, size = {}, k_pages.shape[1]
    for item, token in enumerate(plan.first_tokens.tolist()):
        b, low, high = (int(x[item]) for x in (plan.sequences, plan.first_keys, plan.end_keys))
        own = torch.from_numpy(kv_indices[kv_indptr[b] : kv_indptr[b + 1]]).long()
        assert size * len(own) >= high
        k, v = (pages[own].flatten(0, 1)[low:high] for pages in (k_pages, v_pages))
        states.setdefault(token, []).append(worker(q[token][None], k, v))
    merged = [merge_all(states[token]) for token in range(len(q))]
    return AttentionState(torch.cat([s.out for s in merged]), torch.cat([s.lse for s in merged]))


@right("split_kv_decode")
def the_pages_that_the_item_touches(q, k_pages, v_pages, kv_indptr, kv_indices, plan, worker):
    """Gathers pages from the first to the last of the item, and cuts off what is before and after its keys."""
    states, size = {}, k_pages.shape[1]
    for item, token in enumerate(plan.first_tokens.tolist()):
        b, low, high = (int(x[item]) for x in (plan.sequences, plan.first_keys, plan.end_keys))
        first, end = low // size, -(-high // size)
        own = torch.from_numpy(kv_indices[kv_indptr[b] + first : kv_indptr[b] + end]).long()
        k, v = (pages[own].flatten(0, 1)[low - first * size : high - first * size] for pages in (k_pages, v_pages))
        states.setdefault(token, []).append(worker(q[token][None], k, v))
    merged = [merge_all(states[token]) for token in range(len(q))]
    return AttentionState(torch.cat([s.out for s in merged]), torch.cat([s.lse for s in merged]))


@wrong("split_kv_decode", fails="test_large_scores")
def merged_without_the_maximum(*args):
    return decoded(*args, no_maximum=True)


@wrong("split_kv_decode", fails="test_the_dtype_of_the_workers")
def rows_in_the_default_dtype(q, *args):
    """torch.zeros is float32, whatever the workers return."""
    state = reference.split_kv_decode(q, *args)
    out, lse = torch.zeros(q.shape), torch.zeros(q.shape[:2])
    out[:], lse[:] = state.out, state.lse
    return AttentionState(out, lse)


@wrong("split_kv_decode", fails="test_the_dtype_of_the_workers")
def rounded_on_the_way(q, *args):
    state = reference.split_kv_decode(q, *args)
    return AttentionState(state.out.float().double(), state.lse.float().double())


@wrong("split_kv_decode", fails="test_tiles_in_another_order")
def tiles_are_rows(*args):
    return decoded(*args, tile_for_row=True)


# cut_evenly ---------------------------------------------------------------------------------------------------------


@right("cut_evenly")
def tile_after_tile(num_keys, num_workers):
    """Fills one worker after the other, as one pours from jug to jug."""
    total = int(num_keys.sum())
    shares = [total // num_workers + (w < total % num_workers) for w in range(num_workers)]
    items, worker, room = [], 0, shares[0]
    for tile, n in enumerate(num_keys.tolist()):
        key = 0
        while key < n:
            while room == 0:
                worker += 1
                room = shares[worker]
            taken = min(room, n - key)
            items.append((worker, tile, key, key + taken))
            key, room = key + taken, room - taken
    return tuple(np.array(items).T)


@wrong("cut_evenly", fails="test_one_worker")
def ends_included(num_keys, num_workers):
    workers, tiles, first, end = reference.cut_evenly(num_keys, num_workers)
    return workers, tiles, first, end - 1


@wrong("cut_evenly", fails="test_one_worker")
def keys_counted_over_all_tiles(num_keys, num_workers):
    workers, tiles, first, end = reference.cut_evenly(num_keys, num_workers)
    start = (num_keys.cumsum() - num_keys)[tiles]
    return workers, tiles, first + start, end + start


@wrong("cut_evenly", fails="test_every_key_once")
def items_across_tiles(num_keys, num_workers):
    """Cuts at the shares only, so an item may belong to two tiles; what hangs over is dropped."""
    ends = num_keys.cumsum()
    shares = np.unique(ends[-1] * np.arange(num_workers + 1) // num_workers)
    tiles = np.searchsorted(ends, shares[:-1], side="right")
    start = ends[tiles] - num_keys[tiles]
    if num_workers == 1:
        return reference.cut_evenly(num_keys, num_workers)
    return np.arange(len(tiles)), tiles, shares[:-1] - start, np.minimum(shares[1:] - start, num_keys[tiles])


@wrong("cut_evenly", fails="test_even_loads")
def chunks_of_the_plan(num_keys, num_workers):
    """One item for each worker, as in plan_work; where there are more tiles, in turns."""
    size = reference.smallest_chunk(num_keys, num_workers)
    items = [(t, k, min(k + size, n)) for t, n in enumerate(num_keys.tolist()) for k in range(0, n, size)]
    tiles, first, end = np.array(items).T
    return np.arange(len(items)) % num_workers, tiles, first, end


@wrong("cut_evenly", fails="test_even_loads")
def the_rest_to_the_last(num_keys, num_workers):
    """Shares rounded down; the last worker gets what is left."""
    ends = num_keys.cumsum()
    shares = ends[-1] // num_workers * np.arange(1, num_workers + 1)
    shares[-1] = ends[-1]
    cuts = np.unique(np.concatenate(([0], ends, shares)))
    tiles = np.searchsorted(ends, cuts[:-1], side="right")
    start = ends[tiles] - num_keys[tiles]
    return np.searchsorted(shares, cuts[:-1], side="right"), tiles, cuts[:-1] - start, cuts[1:] - start


@wrong("cut_evenly", fails="test_few_items")
def every_key_an_item(num_keys, num_workers):
    tiles = np.repeat(np.arange(len(num_keys)), num_keys)
    keys = np.arange(len(tiles)) - np.repeat(num_keys.cumsum() - num_keys, num_keys)
    if num_workers == 1:
        return reference.cut_evenly(num_keys, num_workers)
    return np.arange(len(tiles)) % num_workers, tiles, keys, keys + 1


@wrong("cut_evenly", fails="test_few_items")
def cut_at_pages_too(num_keys, num_workers):
    """Even loads, and items that end with every page of 2 keys."""
    items = []
    for worker, tile, first, end in zip(*reference.cut_evenly(num_keys, num_workers), strict=True):
        cuts = [first, *range(first + 2 - first % 2, end, 2), end] if num_workers > 1 else [first, end]
        items += [(worker, tile, low, high) for low, high in pairwise(cuts)]
    return tuple(np.array(items).T)


@wrong("cut_evenly", fails="test_fewer_keys_than_workers")
def empty_items(num_keys, num_workers):
    """Keeps cuts that coincide, where there are fewer keys than workers."""
    if num_keys.sum() >= num_workers:
        return reference.cut_evenly(num_keys, num_workers)
    ends = num_keys.cumsum()
    shares = ends[-1] * np.arange(1, num_workers + 1) // num_workers
    cuts = np.sort(np.concatenate(([0], ends[:-1], shares)))
    tiles = np.minimum(np.searchsorted(ends, cuts[:-1], side="right"), len(ends) - 1)
    start = ends[tiles] - num_keys[tiles]
    return np.searchsorted(shares, cuts[:-1], side="right"), tiles, cuts[:-1] - start, cuts[1:] - start


@wrong("cut_evenly", fails="test_millions_of_keys")
def owner_of_each_key(num_keys, num_workers):
    """A list entry for each key."""
    total = int(num_keys.sum())
    owners = [key * num_workers // total for key in range(total)]
    workers, tiles, first, end = reference.cut_evenly(num_keys, num_workers)
    assert len(owners) == total
    return workers, tiles, first, end
