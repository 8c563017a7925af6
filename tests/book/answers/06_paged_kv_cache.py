"""Right and wrong answers to chapter 06, with the check that has to find each mistake first."""

import numpy as np
import torch
from torch.nn.attention.flex_attention import BlockMask

from book.grading import right, solution, wrong
from mini_engine.kv_cache import page_table

reference = solution("06_paged_kv_cache")


# slots --------------------------------------------------------------------------------------------------------------


@right("slots")
def token_by_token(table, rows, positions, page_size):
    found = []
    for row, position in zip(rows.tolist(), positions.tolist(), strict=True):
        index, offset = divmod(position, page_size)
        found.append(int(table[row, index]) * page_size + offset)
    return torch.tensor(found)


@right("slots")
def all_slots_of_each_row(table, rows, positions, page_size):
    """Every slot of every sequence, then a choice of them."""
    grid = table.long()[:, :, None] * page_size + torch.arange(page_size)
    return grid.flatten(1)[rows, positions]


@wrong("slots", fails="test_the_first_token")
def page_plus_offset(table, rows, positions, page_size):
    return table[rows, positions // page_size].long() + positions % page_size


@wrong("slots", fails="test_the_first_token")
def slots_in_int32(table, rows, positions, page_size):
    return table[rows, positions // page_size] * page_size + (positions % page_size).int()


@wrong("slots", fails="test_slots_of_a_large_pool")
def multiplied_in_int32(table, rows, positions, page_size):
    return (table[rows, positions // page_size] * page_size).long() + positions % page_size


@wrong("slots", fails="test_one_page")
def first_slot_of_the_page(table, rows, positions, page_size):
    return table[rows, positions // page_size].long() * page_size


@wrong("slots", fails="test_the_second_page")
def position_for_offset(table, rows, positions, page_size):
    return table[rows, positions // page_size].long() * page_size + positions


@wrong("slots", fails="test_scattered_pages")
def on_from_the_first_page(table, rows, positions, page_size):
    return table[rows, 0].long() * page_size + positions


@wrong("slots", fails="test_two_sequences")
def table_of_the_first_row(table, rows, positions, page_size):
    return table[0, positions // page_size].long() * page_size + positions % page_size


# PageTable ----------------------------------------------------------------------------------------------------------


@right("PageTable")
class WithSlices(page_table.PageTable):
    """The oldest free page first, many at a time; heads moved out of the way for assign."""

    def allocate(self):
        if not self.free_rows:
            raise IndexError("every row is taken")
        return self.free_rows.pop(0)

    def reserve(self, row, num_tokens):
        have = int(self.counts[row])
        need = max(have, -(-num_tokens // self.page_size))
        new, rest = self.free_pages[: need - have], self.free_pages[need - have :]
        if len(new) < need - have:
            return False
        self.free_pages[:] = rest
        self.table[row, have:need] = new
        self.refcounts[new] += 1
        self.counts[row] = need
        return True

    def erase(self, row):
        pages = self.pages(row).copy()
        np.subtract.at(self.refcounts, pages, 1)
        self.free_pages += [int(page) for page in pages if not self.refcounts[page]]
        self.counts[row] = 0
        self.free_rows.insert(0, row)

    def assign(self, rows, positions, k, v, k_cache, v_cache):
        where = self.slots(rows[:, None].expand_as(positions), positions).flatten()
        k_cache[0].transpose(0, 1)[where] = k.transpose(1, 2).flatten(0, 1)
        v_cache[0].transpose(0, 1)[where] = v.transpose(1, 2).flatten(0, 1)


@right("PageTable")
class SequenceBySequence(reference.PageTable):
    """assign as a loop."""

    def assign(self, rows, positions, k, v, k_cache, v_cache):
        for b, row in enumerate(rows.tolist()):
            where = self.slots(torch.full_like(positions[b], row), positions[b])
            k_cache[0, :, where] = k[b]
            v_cache[0, :, where] = v[b]


@wrong("PageTable", fails="test_rows")
class RowsTwice(reference.PageTable):
    """Looks at the free row, and does not take it."""

    def allocate(self):
        return self.free_rows[-1]


@wrong("PageTable", fails="test_one_page_for_one_token")
class NobodyOwnsIt(reference.PageTable):
    """The page is in the table, and its owner is not counted."""

    def reserve(self, row, num_tokens):
        done = super().reserve(row, num_tokens)
        self.refcounts[self.pages(row)] = 0
        return done


@wrong("PageTable", fails="test_one_page_for_one_token")
class StaysOnTheFreeList(reference.PageTable):
    def reserve(self, row, num_tokens):
        before = list(self.free_pages)
        done = super().reserve(row, num_tokens)
        self.free_pages[:] = before
        return done


@wrong("PageTable", fails="test_pages_are_rounded_up")
class OnePageMore(reference.PageTable):
    """n // P + 1: right unless the last page is full."""

    def pages_for(self, num_tokens):
        return num_tokens // self.page_size + 1


@wrong("PageTable", fails="test_pages_are_rounded_up")
class RoundedDown(reference.PageTable):
    def pages_for(self, num_tokens):
        return max(num_tokens // self.page_size, min(num_tokens, 1))


@wrong("PageTable", fails="test_growing")
class NewTokensOnly(reference.PageTable):
    """Takes num_tokens for the tokens to come, on top of those that are there."""

    def reserve(self, row, num_tokens):
        return super().reserve(row, num_tokens + int(self.counts[row]) * self.page_size)


@wrong("PageTable", fails="test_growing")
class NewPagesFirst(reference.PageTable):
    """The keys that are there end up at other positions."""

    def reserve(self, row, num_tokens):
        before = int(self.counts[row])
        done = super().reserve(row, num_tokens)
        self.table[row, : self.counts[row]] = np.roll(self.pages(row), -before)
        return done


@wrong("PageTable", fails="test_less_than_it_has")
class ShrinksARow(reference.PageTable):
    def reserve(self, row, num_tokens):
        while self.counts[row] > self.pages_for(num_tokens):
            self.counts[row] -= 1
            self.refcounts[self.table[row, self.counts[row]]] = 0
            self.free_pages.append(int(self.table[row, self.counts[row]]))
        return super().reserve(row, num_tokens)


@wrong("PageTable", fails="test_the_whole_pool")
class KeepsOneBack(reference.PageTable):
    """`>=` where `>` belongs: the last page is never used."""

    def reserve(self, row, num_tokens):
        missing = self.pages_for(num_tokens) - int(self.counts[row])
        return not (missing > 0 and missing >= len(self.free_pages)) and super().reserve(row, num_tokens)


@wrong("PageTable", fails="test_too_few_pages")
class TakesWhatThereIs(reference.PageTable):
    def reserve(self, row, num_tokens):
        while self.counts[row] < self.pages_for(num_tokens):
            if not self.free_pages:
                return False
            super().reserve(row, (int(self.counts[row]) + 1) * self.page_size)
        return True


@wrong("PageTable", fails="test_erase")
class RowIsLost(reference.PageTable):
    """The pages return, the row does not: after max_sequences requests the engine stands still."""

    def erase(self, row):
        super().erase(row)
        self.free_rows.remove(row)


@wrong("PageTable", fails="test_erase")
class PagesLeak(reference.PageTable):
    def erase(self, row):
        self.counts[row] = 0
        self.free_rows.append(row)


@wrong("PageTable", fails="test_erase")
class OwnersStay(reference.PageTable):
    """On the free list, and still counted as owned."""

    def erase(self, row):
        pages = self.pages(row).copy()
        super().erase(row)
        self.refcounts[pages] += 1


@wrong("PageTable", fails="test_a_row_is_used_again")
class CountsStay(reference.PageTable):
    """The next sequence of the row begins with pages that are not its own."""

    def erase(self, row):
        count = int(self.counts[row])
        super().erase(row)
        self.counts[row] = count


@wrong("PageTable", fails="test_shared_pages")
class FreesSharedPages(reference.PageTable):
    def erase(self, row):
        self.free_pages += self.pages(row).tolist()
        self.refcounts[self.pages(row)] = 0
        self.counts[row] = 0
        self.free_rows.append(row)


@wrong("PageTable", fails="test_shared_pages")
class NeverFreesSharedPages(reference.PageTable):
    """Frees pages that have one owner, and forgets to count down the others."""

    def erase(self, row):
        for page in self.pages(row).tolist():
            if self.refcounts[page] == 1:
                self.refcounts[page] = 0
                self.free_pages.append(page)
        self.counts[row] = 0
        self.free_rows.append(row)


@wrong("PageTable", fails="test_assign_one_token")
class AssignsACopy(reference.PageTable):
    def assign(self, rows, positions, k, v, k_cache, v_cache):
        super().assign(rows, positions, k, v, k_cache.clone(), v_cache.clone())


@wrong("PageTable", fails="test_assign_one_token")
class KeysTwice(reference.PageTable):
    def assign(self, rows, positions, k, v, k_cache, v_cache):
        super().assign(rows, positions, k, k, k_cache, v_cache)


@wrong("PageTable", fails="test_assign_across_pages")
class AssignsFromTheFirstPageOn(reference.PageTable):
    def assign(self, rows, positions, k, v, k_cache, v_cache):
        for b, row in enumerate(rows.tolist()):
            where = int(self.table[row, 0]) * self.page_size + positions[b]
            where = where % k_cache.shape[2]
            k_cache[0, :, where], v_cache[0, :, where] = k[b], v[b]


@wrong("PageTable", fails="test_assign_heads")
class HeadsAndTokensMixed(reference.PageTable):
    """Reshapes where it has to transpose: right for one head."""

    def assign(self, rows, positions, k, v, k_cache, v_cache):
        where = self.slots(rows[:, None].expand_as(positions), positions).flatten()
        heads = k_cache.shape[1]
        k_cache[0][:, where] = k.reshape(heads, len(where), -1)
        v_cache[0][:, where] = v.reshape(heads, len(where), -1)


@wrong("PageTable", fails="test_assign_to_any_rows")
class AssignsToTheFirstRows(reference.PageTable):
    """Right until the first request has ended: from then on, the batch's row b is seldom the table's."""

    def assign(self, rows, positions, k, v, k_cache, v_cache):
        super().assign(torch.arange(len(rows)), positions, k, v, k_cache, v_cache)


# physical_blocks ----------------------------------------------------------------------------------------------------


@right("physical_blocks")
def by_gather(blocks, table, width):
    batch, heads, queries, n = blocks.shape
    flat = blocks.reshape(batch, -1).long()
    pages = table.gather(1, flat).reshape(batch, heads, queries, n).to(torch.int32)
    return torch.nn.functional.pad(pages, (0, width - n))


@right("physical_blocks")
def list_by_list(blocks, table, width):
    out = torch.zeros(*blocks.shape[:3], width, dtype=torch.int32)
    for b, h, q in np.ndindex(*blocks.shape[:3]):
        out[b, h, q, : blocks.shape[-1]] = table[b][blocks[b, h, q].long()]
    return out


@wrong("physical_blocks", fails="test_one_list")
def still_logical(blocks, table, width):
    return torch.nn.functional.pad(blocks, (0, width - blocks.shape[-1])).to(torch.int32)


@wrong("physical_blocks", fails="test_one_list")
def backwards(blocks, table, width):
    """From page to block: the inverse table."""
    inverse = torch.zeros(len(table), max(width, int(table.max()) + 1), dtype=table.dtype)
    inverse.scatter_(1, table.long(), torch.arange(table.shape[1], dtype=table.dtype).expand_as(table))
    return reference.physical_blocks(blocks, inverse, width)


@wrong("physical_blocks", fails="test_one_list")
def in_int64(blocks, table, width):
    return reference.physical_blocks(blocks, table, width).long()


@wrong("physical_blocks", fails="test_one_list")
def sorted_pages(blocks, table, width):
    """As if the kernel wanted its blocks in the order of the pool."""
    n = blocks.shape[-1]
    turned = reference.physical_blocks(blocks, table, width)
    return torch.cat([turned[..., :n].sort(-1).values, turned[..., n:]], dim=-1)


@wrong("physical_blocks", fails="test_some_blocks")
def the_first_pages(blocks, table, width):
    n = blocks.shape[-1]
    return reference.physical_blocks(torch.arange(n).expand_as(blocks), table, width)


@wrong("physical_blocks", fails="test_the_width")
def as_long_as_the_list(blocks, table, width):
    return reference.physical_blocks(blocks, table, blocks.shape[-1])


@wrong("physical_blocks", fails="test_the_width")
def filled_up_with_minus_one(blocks, table, width):
    """-1 is no block: a kernel that looks ahead reads outside of the pool."""
    turned = reference.physical_blocks(blocks, table, width)
    turned[..., blocks.shape[-1] :] = -1
    return turned


@wrong("physical_blocks", fails="test_two_tables")
def one_table_for_all(blocks, table, width):
    return reference.physical_blocks(blocks, table[:1].expand_as(table), width)


@wrong("physical_blocks", fails="test_heads_and_query_blocks")
def the_first_head_for_all(blocks, table, width):
    turned = reference.physical_blocks(blocks, table, width)
    return turned[:, :1, :1].expand_as(turned).contiguous()


@wrong("physical_blocks", fails="test_blocks_are_unchanged")
def in_place(blocks, table, width):
    blocks.copy_(reference.physical_blocks(blocks, table, blocks.shape[-1]))
    return torch.nn.functional.pad(blocks, (0, width - blocks.shape[-1]))


# physical_mask ------------------------------------------------------------------------------------------------------


@right("physical_mask")
def by_where(mask_mod, first_keys, page_size):
    def over_slots(b, h, q_idx, kv_idx):
        start = first_keys[b, torch.div(kv_idx, page_size, rounding_mode="floor")]
        position = start + torch.remainder(kv_idx, page_size)
        return torch.where(start < 0, False, mask_mod(b, h, q_idx, position))

    return over_slots


@right("physical_mask")
def slot_by_slot(mask_mod, first_keys, page_size):
    """The positions of all slots beforehand."""
    positions = (first_keys[:, :, None] + torch.arange(page_size)).flatten(1)
    own = (first_keys >= 0).repeat_interleave(page_size, dim=1)
    return lambda b, h, q_idx, kv_idx: own[b, kv_idx].logical_and(mask_mod(b, h, q_idx, positions[b, kv_idx]))


def over(mask_mod, first_keys, page_size, **change):
    """The reference with one thing changed: what the wrong answers below are made of."""

    def over_slots(b, h, q_idx, kv_idx):
        row = b * 0 if change.get("first_row") else b
        start = first_keys[row, kv_idx // page_size]
        position = start + kv_idx % page_size
        if change.get("blocks"):
            position = start * page_size + kv_idx % page_size
        if change.get("no_offset"):
            position = start
        if change.get("slots"):
            position = kv_idx
        own = start >= 0
        if change.get("by_position"):
            own = position >= 0
        if change.get("drops_zero"):
            own = start > 0
        if change.get("nothing_hidden"):
            own = kv_idx >= 0
        seen = own if change.get("own_pages_only") else mask_mod(row, h, q_idx, position) & own
        return seen if not change.get("any_head") else own & mask_mod(row, h * 0, q_idx, position)

    return over_slots


@wrong("physical_mask", fails="test_one_page_in_place")
def drops_the_first_page(mask_mod, first_keys, page_size):
    """`start > 0`: 0 is taken for "nothing there"."""
    return over(mask_mod, first_keys, page_size, drops_zero=True)


@wrong("physical_mask", fails="test_one_page_in_place")
def without_the_offset(mask_mod, first_keys, page_size):
    return over(mask_mod, first_keys, page_size, no_offset=True)


@wrong("physical_mask", fails="test_one_page_in_place")
def own_pages_in_full(mask_mod, first_keys, page_size):
    """Causality is lost."""
    return over(mask_mod, first_keys, page_size, own_pages_only=True)


@wrong("physical_mask", fails="test_it_can_be_traced")
def the_value_of_the_mask(mask_mod, first_keys, page_size):
    return first_keys >= 0


@wrong("physical_mask", fails="test_it_can_be_traced")
def with_an_and(mask_mod, first_keys, page_size):
    def over_slots(b, h, q_idx, kv_idx):
        start = first_keys[b, kv_idx // page_size]
        return start >= 0 and mask_mod(b, h, q_idx, start + kv_idx % page_size)

    return over_slots


@wrong("physical_mask", fails="test_swapped_pages")
def slots_for_positions(mask_mod, first_keys, page_size):
    return over(mask_mod, first_keys, page_size, slots=True)


@wrong("physical_mask", fails="test_swapped_pages")
def starts_are_numbers_of_blocks(mask_mod, first_keys, page_size):
    return over(mask_mod, first_keys, page_size, blocks=True)


@wrong("physical_mask", fails="test_pages_of_others")
def hides_nothing(mask_mod, first_keys, page_size):
    return over(mask_mod, first_keys, page_size, nothing_hidden=True)


@wrong("physical_mask", fails="test_pages_of_others")
def hides_by_the_position(mask_mod, first_keys, page_size):
    """-1 + 1 is position 0: only the first slot of another's page is hidden."""
    return over(mask_mod, first_keys, page_size, by_position=True)


@wrong("physical_mask", fails="test_two_rows")
def pages_of_the_first_row(mask_mod, first_keys, page_size):
    return over(mask_mod, first_keys, page_size, first_row=True)


@wrong("physical_mask", fails="test_masks_of_all_kinds")
def the_mask_of_the_first_head(mask_mod, first_keys, page_size):
    return over(mask_mod, first_keys, page_size, any_head=True)


@wrong("physical_mask", fails="test_starts_that_are_no_multiples")
def starts_rounded_to_pages(mask_mod, first_keys, page_size):
    rounded = torch.where(first_keys < 0, first_keys, first_keys // page_size * page_size)
    return over(mask_mod, rounded, page_size)


# convert_block_mask -------------------------------------------------------------------------------------------------


@right("convert_block_mask")
def by_hand(mask, table, counts, num_pages, page_size):
    """Lists in loops, and the inverse table as well."""
    if page_size != mask.BLOCK_SIZE[1]:
        raise ValueError("blocks are not pages")
    starts = torch.full((len(table), num_pages), -1)
    for b, count in enumerate(counts.tolist()):
        for index in range(count):
            starts[b, int(table[b, index])] = index * page_size

    def turned(numbers, blocks):
        out = torch.zeros(*numbers.shape, num_pages, dtype=torch.int32)
        for b, h, q in np.ndindex(*numbers.shape):
            for i in range(int(numbers[b, h, q])):
                out[b, h, q, i] = table[b, int(blocks[b, h, q, i])]
        return out

    full_lists = {}
    if mask.full_kv_num_blocks is not None:
        full_lists = {
            "full_kv_num_blocks": mask.full_kv_num_blocks,
            "full_kv_indices": turned(mask.full_kv_num_blocks, mask.full_kv_indices),
        }
    return BlockMask.from_kv_blocks(
        mask.kv_num_blocks,
        turned(mask.kv_num_blocks, mask.kv_indices),
        **full_lists,
        BLOCK_SIZE=mask.BLOCK_SIZE,
        mask_mod=slot_by_slot(mask.mask_mod, starts, page_size),
        seq_lengths=(mask.seq_lengths[0], num_pages * page_size),
    )


def converted(mask, table, counts, num_pages, page_size, **change):
    """The reference with one thing changed: what the wrong answers below are made of."""
    if page_size != mask.BLOCK_SIZE[1] and not change.get("any_size"):
        raise ValueError("blocks are not pages")
    column = torch.arange(table.shape[1])
    own = column < (table.shape[1] if change.get("every_entry") else counts[:, None])
    starts = torch.where(own, column * page_size, -1).expand_as(table)
    first_keys = reference.first_keys(table, starts, num_pages)
    full_counts, full = mask.full_kv_num_blocks, mask.full_kv_indices
    if full is None and change.get("always_full"):
        full_counts, full = torch.zeros_like(mask.kv_num_blocks), torch.zeros_like(mask.kv_indices)
    if change.get("no_full"):
        full_counts, full = None, None
    if full is not None and not change.get("full_stay"):
        full = reference.physical_blocks(full, table, num_pages)
    elif full is not None:
        full = torch.nn.functional.pad(full, (0, num_pages - full.shape[-1]))
    counts_of_partial = mask.kv_num_blocks
    if change.get("whole_pool"):
        counts_of_partial = torch.full_like(counts_of_partial, num_pages)
    mask_mod = mask.mask_mod
    if not change.get("logical_mod"):
        mask_mod = reference.physical_mask(mask_mod, first_keys, page_size)
    num_slots = mask.seq_lengths[1] if change.get("logical_length") else num_pages * page_size
    return BlockMask.from_kv_blocks(
        counts_of_partial,
        reference.physical_blocks(mask.kv_indices, table, num_pages),
        full_counts,
        full,
        BLOCK_SIZE=mask.BLOCK_SIZE,
        mask_mod=mask_mod,
        seq_lengths=(mask.seq_lengths[0], num_slots),
    )


@wrong("convert_block_mask", fails="test_the_lengths")
def lengths_of_the_sequence(*args):
    return converted(*args, logical_length=True)


@wrong("convert_block_mask", fails="test_partial_blocks")
def every_block_of_the_pool(*args):
    """Right results, and every query visits everybody's pages."""
    return converted(*args, whole_pool=True)


@wrong("convert_block_mask", fails="test_full_blocks")
def full_blocks_stay_logical(*args):
    return converted(*args, full_stay=True)


@wrong("convert_block_mask", fails="test_full_blocks")
def full_blocks_are_dropped(*args):
    return converted(*args, no_full=True)


@wrong("convert_block_mask", fails="test_the_mask_mod")
def mask_mod_over_positions(*args):
    return converted(*args, logical_mod=True)


@wrong("convert_block_mask", fails="test_the_mask_mod")
def left_over_entries_count(*args):
    """Takes the values in the table for the truth, not the counts: a page that stands there twice moves."""
    return converted(*args, every_entry=True)


@wrong("convert_block_mask", fails="test_blocks_are_pages")
def blocks_of_any_size(*args):
    return converted(*args, any_size=True)


@wrong("convert_block_mask", fails="test_no_full_blocks")
def always_two_lists(*args):
    return converted(*args, always_full=True)


# compact ------------------------------------------------------------------------------------------------------------


@right("compact")
def page_by_page(table):
    used = sorted({page for row in range(len(table.counts)) for page in table.pages(row).tolist()})
    gaps = [page for page in range(len(used)) if page not in used]
    pairs = []
    for old in reversed(used):
        if old < len(used):
            break
        new = gaps.pop()
        pairs.append((old, new))
        for row in range(len(table.counts)):
            pages = table.pages(row)
            pages[pages == old] = new
        table.refcounts[new], table.refcounts[old] = table.refcounts[old], 0
    table.free_pages = list(range(len(used), table.num_pages))
    return pairs


def compacted(table, **change):
    """The reference with one thing changed: what the wrong answers below are made of."""
    n = int((table.refcounts > 0).sum())
    old = n + np.flatnonzero(table.refcounts[n:])
    new = np.flatnonzero(table.refcounts[:n] == 0)
    if change.get("renumber"):
        old = np.flatnonzero(table.refcounts)
        new = np.arange(n)
    moved = np.arange(table.num_pages)
    moved[old] = new
    pairs = []
    for row in range(len(table.counts)):
        pages = table.pages(row)
        pairs += [(int(p), int(moved[p])) for p in pages if moved[p] != p]
        if not change.get("tables_stay"):
            pages[:] = moved[pages]
        if change.get("sorted_rows"):
            pages.sort()
    counts = np.ones_like(old) if change.get("one_owner") else table.refcounts[old].copy()
    if not change.get("counts_stay"):
        table.refcounts[old] = 0
        table.refcounts[new] = counts
    if not change.get("free_stay"):
        table.free_pages[:] = range(n, table.num_pages)
    if change.get("per_row"):
        return pairs
    pairs = [(a, b) for a, b in zip(old.tolist(), new.tolist(), strict=True) if a != b]
    return [(b, a) for a, b in pairs] if change.get("swapped") else pairs


@wrong("compact", fails="test_nothing_to_move")
def free_list_in_gaps(table):
    """Keeps the free list as it is and adds nothing: fine while nothing moves, if only its order were all."""
    compacted(table, free_stay=True)
    table.free_pages.extend(range(table.num_pages))
    return []


@wrong("compact", fails="test_one_gap")
def the_free_list_stays(table):
    return compacted(table, free_stay=True)


@wrong("compact", fails="test_one_gap")
def rows_are_not_told(table):
    return compacted(table, tables_stay=True)


@wrong("compact", fails="test_one_gap")
def new_and_old_swapped(table):
    return compacted(table, swapped=True)


@wrong("compact", fails="test_one_gap")
def owners_do_not_move(table):
    return compacted(table, counts_stay=True)


@wrong("compact", fails="test_order_of_positions")
def rows_sorted_by_page(table):
    return compacted(table, sorted_rows=True)


@wrong("compact", fails="test_as_few_as_possible")
def everyone_moves_up(table):
    return compacted(table, renumber=True)


@wrong("compact", fails="test_shared_pages_move_once")
def one_copy_for_each_owner(table):
    return compacted(table, per_row=True)


@wrong("compact", fails="test_shared_pages_move_once")
def one_owner_for_each_page(table):
    return compacted(table, one_owner=True)
