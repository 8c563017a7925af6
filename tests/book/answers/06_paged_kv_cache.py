"""Right and wrong answers to the homework of chapter 06, with the check that must be the first to find each mistake."""

import numpy as np
import torch
from torch.nn.attention.flex_attention import BlockMask

from book.grading import right, solution, wrong
from mini_engine.kv_cache import page_table

reference = solution("06_paged_kv_cache")


# slots --------------------------------------------------------------------------------------------------------------


@right("slots")
def by_a_flat_index(table, rows, positions, page_size):
    pages = table.flatten().index_select(0, rows * table.shape[1] + positions.div(page_size, rounding_mode="floor"))
    return pages.to(torch.int64).mul(page_size).add(positions.remainder(page_size))


@right("slots")
def all_slots_of_each_row(table, rows, positions, page_size):
    """Every slot of every sequence, then a choice of them."""
    grid = table.long()[:, :, None] * page_size + torch.arange(page_size)
    return grid.flatten(1)[rows, positions]


@wrong("slots", fails="test_the_first_token")
def page_plus_offset(table, rows, positions, page_size):
    return table[rows, positions // page_size].long() + positions % page_size


@wrong("slots", fails="test_slots_of_a_large_pool")
def slots_in_int32(table, rows, positions, page_size):
    return table[rows, positions // page_size] * page_size + (positions % page_size).int()


@wrong("slots", fails="test_slots_are_int64")
def slots_as_floats(table, rows, positions, page_size):
    return reference.slots(table, rows, positions, page_size).double()


@wrong("slots", fails="test_slots_of_a_large_pool")
def multiplied_in_int32(table, rows, positions, page_size):
    return (table[rows, positions // page_size] * page_size).long() + positions % page_size


@wrong("slots", fails="test_slots_without_a_loop")
def token_by_token(table, rows, positions, page_size):
    found = []
    for row, position in zip(rows.tolist(), positions.tolist(), strict=True):
        index, offset = divmod(position, page_size)
        found.append(int(table[row, index]) * page_size + offset)
    return torch.tensor(found)


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
class OldestPageFirst(page_table.PageTable):
    """The pool as a queue: pages are taken from the front, and the rest move up. Rows are filled through a mask."""

    def _take_from_pool(self, count):
        if self.num_free_pages < count:
            raise IndexError("the pool is empty")
        pages, rest = np.split(self._free_pages[: self.num_free_pages].copy(), [count])
        self._free_pages[: len(rest)] = rest
        self.num_free_pages = len(rest)
        self.refcounts[pages] += 1
        self.generation[pages] += 1
        return pages

    def _lose(self, pages):
        np.subtract.at(self.refcounts, pages, 1)
        free = pages[~self.refcounts[pages].astype(bool)]
        end = self.num_free_pages + free.size
        self._free_pages[self.num_free_pages : end] = free
        self.num_free_pages = end

    def take(self, rows, num_pages):
        column, have = np.arange(self.table.shape[1]), self.counts[rows][:, None]
        chosen = (column >= have) & (column < have + num_pages[:, None])
        pages = self._take_from_pool(num_pages.sum())
        part = self.table[rows]
        part[chosen] = pages
        self.table[rows] = part
        self.counts[rows] = self.counts[rows] + num_pages

    def share(self, row, pages):
        for page in pages.tolist():
            self.table[row, self.counts[row]] = page
            self.counts[row] += 1
            self.refcounts[page] += 1

    def replace(self, row, index):
        old = int(self.pages(row)[index])
        new = int(self._take_from_pool(1)[0])
        self.pages(row)[index] = new
        self._lose(np.array([old]))
        return old, new

    def truncate(self, row, num_pages):
        self._lose(self.table[row, num_pages : max(num_pages, self.counts[row])])
        self.counts[row] = min(self.counts[row], num_pages)

    def release(self, row):
        self._lose(self.pages(row).copy())
        self.counts[row] = 0
        self._free_rows.insert(0, row)


@right("PageTable")
class PageByPage(reference.PageTable):
    """Loops where only a few pages are involved."""

    def truncate(self, row, num_pages):
        while self.counts[row] > num_pages:
            self.counts[row] -= 1
            page = self.table[row, self.counts[row]]
            self.refcounts[page] -= 1
            if self.refcounts[page] == 0:
                self._free_pages[self.num_free_pages] = page
                self.num_free_pages += 1


@wrong("PageTable", fails="test_take_one_page")
class NoOwner(reference.PageTable):
    """The page is in the table, and its owner is not counted."""

    def take(self, rows, num_pages):
        super().take(rows, num_pages)
        self.refcounts[self.pages(rows[0])] = 0


@wrong("PageTable", fails="test_take_one_page")
class StaysInThePool(reference.PageTable):
    def take(self, rows, num_pages):
        free = self._free_pages.copy(), self.num_free_pages
        super().take(rows, num_pages)
        self._free_pages, self.num_free_pages = free


@wrong("PageTable", fails="test_take_several_pages")
class SamePageTwice(reference.PageTable):
    """Index and owner right, and one page for all of them."""

    def take(self, rows, num_pages):
        pages = self._pop(int(num_pages.sum()))
        owner = np.repeat(rows, num_pages)
        index = np.arange(len(pages)) - np.repeat(num_pages.cumsum() - num_pages, num_pages)
        self.table[owner, self.counts[owner] + index] = pages[:1]
        self.counts[rows] += num_pages


@wrong("PageTable", fails="test_take_several_pages")
class OneEntryForAllPages(reference.PageTable):
    """Every page of a row goes to the entry after its old pages: the last one wins."""

    def take(self, rows, num_pages):
        owner = np.repeat(rows, num_pages)
        self.table[owner, self.counts[owner]] = self._pop(int(num_pages.sum()))
        self.counts[rows] += num_pages


@wrong("PageTable", fails="test_growing")
class NewPagesFirst(reference.PageTable):
    """The keys that are already there end up at other positions."""

    def take(self, rows, num_pages):
        before = self.counts[rows].copy()
        super().take(rows, num_pages)
        for row, count in zip(rows.tolist(), before.tolist(), strict=True):
            self.table[row, : self.counts[row]] = np.roll(self.pages(row), -count)


@wrong("PageTable", fails="test_growing")
class OverwritesOldPages(reference.PageTable):
    def take(self, rows, num_pages):
        pages = self._pop(int(num_pages.sum()))
        index = np.arange(len(pages)) - np.repeat(num_pages.cumsum() - num_pages, num_pages)
        self.table[np.repeat(rows, num_pages), index] = pages
        self.counts[rows] += num_pages


@wrong("PageTable", fails="test_several_rows_at_once")
class IndicesOfTheWholeStep(reference.PageTable):
    """The index does not start over at the next row: right as long as one row takes pages."""

    def take(self, rows, num_pages):
        pages = self._pop(int(num_pages.sum()))
        owner = np.repeat(rows, num_pages)
        self.table[owner, (self.counts[owner] + np.arange(len(pages))) % self.table.shape[1]] = pages
        self.counts[rows] += num_pages


@wrong("PageTable", fails="test_several_rows_at_once")
class AsManyForEachRow(reference.PageTable):
    """A rectangle of pages: every row gets as many as the first one."""

    def take(self, rows, num_pages):
        super().take(rows, np.full_like(num_pages, num_pages[0] if len(num_pages) else 0))


@wrong("PageTable", fails="test_the_whole_pool")
class KeepsOneBack(reference.PageTable):
    """`>=` where `>` belongs: the last page is never used."""

    def take(self, rows, num_pages):
        if num_pages.sum() and num_pages.sum() >= self.num_free_pages:
            raise IndexError
        super().take(rows, num_pages)


@wrong("PageTable", fails="test_too_few_pages")
class TakesWhatThereIs(reference.PageTable):
    """Row by row until the pool is empty."""

    def take(self, rows, num_pages):
        for b in range(len(rows)):
            super().take(rows[b : b + 1], num_pages[b : b + 1])


@wrong("PageTable", fails="test_too_few_pages")
class CountsBeforeItLooks(reference.PageTable):
    def take(self, rows, num_pages):
        self.num_free_pages -= int(num_pages.sum())
        if self.num_free_pages < 0:
            raise IndexError
        self.num_free_pages += int(num_pages.sum())
        super().take(rows, num_pages)


@wrong("PageTable", fails="test_too_few_pages")
class RaisesNothing(reference.PageTable):
    """Returns False, as other allocators do."""

    def take(self, rows, num_pages):
        if num_pages.sum() > self.num_free_pages:
            return False
        return super().take(rows, num_pages)


@wrong("PageTable", fails="test_release")
class RowIsLost(reference.PageTable):
    """The pages return and the row does not: after max_rows requests the engine serves none."""

    def release(self, row):
        self.truncate(row, 0)


@wrong("PageTable", fails="test_release")
class PagesLeak(reference.PageTable):
    def release(self, row):
        self.counts[row] = 0
        self._free_rows.append(row)


@wrong("PageTable", fails="test_release")
class OwnersStay(reference.PageTable):
    """In the pool, and still counted as owned."""

    def release(self, row):
        pages = self.pages(row).copy()
        super().release(row)
        self.refcounts[pages] += 1


@wrong("PageTable", fails="test_a_row_is_used_again")
class CountsStay(reference.PageTable):
    """The next request of the row begins with pages that are not its own."""

    def release(self, row):
        count = int(self.counts[row])
        super().release(row)
        self.counts[row] = count


@wrong("PageTable", fails="test_truncate")
class KeepsTheLast(reference.PageTable):
    """Drops pages at the front, as a sliding window does."""

    def truncate(self, row, num_pages):
        self.drop_front(row, max(0, int(self.counts[row]) - num_pages))


@wrong("PageTable", fails="test_truncate")
class DropsSoMany(reference.PageTable):
    """Takes num_pages for the number of pages to drop, except for a row that is released."""

    def truncate(self, row, num_pages):
        super().truncate(row, max(0, int(self.counts[row]) - num_pages) if num_pages else 0)


@wrong("PageTable", fails="test_nothing_to_truncate")
class GrowsWhereItShouldShrink(reference.PageTable):
    """Sets the count without looking at the old one: stale entries become pages of the row."""

    def truncate(self, row, num_pages):
        super().truncate(row, num_pages)
        self.counts[row] = num_pages


@wrong("PageTable", fails="test_release")
class CountsReturnsToo(reference.PageTable):
    def truncate(self, row, num_pages):
        self.generation[self.pages(row)[num_pages:]] += 1
        super().truncate(row, num_pages)


@wrong("PageTable", fails="test_take_one_page")
class NoGeneration(reference.PageTable):
    """Prefix sharing would take a page for what it held before."""

    def take(self, rows, num_pages):
        before = self.generation.copy()
        super().take(rows, num_pages)
        self.generation[:] = before


@wrong("PageTable", fails="test_generation")
class TakenOrNot(reference.PageTable):
    """Sets the generation to one: right the first time."""

    def take(self, rows, num_pages):
        before = self.generation.copy()
        super().take(rows, num_pages)
        self.generation[:] = np.maximum(before, self.generation > before)


@wrong("PageTable", fails="test_share")
class OneOwnerEach(reference.PageTable):
    """Sets the count to two, which is right for the second owner only."""

    def share(self, row, pages):
        super().share(row, pages)
        self.refcounts[pages] = 2


@wrong("PageTable", fails="test_share")
class SharesFromTheFirstEntry(reference.PageTable):
    """Forgets the pages that the row has already."""

    def share(self, row, pages):
        self.refcounts[pages] += 1
        self.table[row, : len(pages)] = pages
        self.counts[row] = max(self.counts[row], len(pages))


@wrong("PageTable", fails="test_share")
class SharedPagesAreTaken(reference.PageTable):
    """Counts a share as a take, although the contents are unchanged."""

    def share(self, row, pages):
        super().share(row, pages)
        self.generation[pages] += 1


@wrong("PageTable", fails="test_shared_pages_stay")
class FreesSharedPages(reference.PageTable):
    def _drop(self, pages):
        self.refcounts[pages] = 1
        super()._drop(pages)


@wrong("PageTable", fails="test_shared_pages_stay")
class NeverFreesSharedPages(reference.PageTable):
    """Frees pages that have one owner, and forgets to count down the others."""

    def _drop(self, pages):
        super()._drop(pages[self.refcounts[pages] == 1])


@wrong("PageTable", fails="test_replace")
class NewPageFirst(reference.PageTable):
    def replace(self, row, index):
        old, new = super().replace(row, index)
        return new, old


@wrong("PageTable", fails="test_replace")
class ReplacementsAreNotCounted(reference.PageTable):
    """A page that replace takes from the pool keeps its old generation."""

    def replace(self, row, index):
        old, new = super().replace(row, index)
        self.generation[new] -= 1
        return old, new


@wrong("PageTable", fails="test_replace")
class OldOwnersAreForgotten(reference.PageTable):
    """The old page goes to the pool, although another row still reads it."""

    def replace(self, row, index):
        self.refcounts[self.table[row, index]] = 1
        return super().replace(row, index)


@wrong("PageTable", fails="test_replace")
class ReplacesForEveryOwner(reference.PageTable):
    """The other owners get the copy, too: they would read what this row writes."""

    def replace(self, row, index):
        old, new = super().replace(row, index)
        self.table[self.table == old] = new
        return old, new


@wrong("PageTable", fails="test_replace")
class AppendsTheCopy(reference.PageTable):
    def replace(self, row, index):
        old = int(self.table[row, index])
        super().replace(row, index)
        self.table[row, : self.counts[row]] = np.roll(self.pages(row), -1)
        return old, int(self.pages(row)[-1])


@wrong("PageTable", fails="test_replace_an_own_page")
class ReplacedPagesLeak(reference.PageTable):
    """Counts the old page down, and does not return it: right for a page with another owner."""

    def replace(self, row, index):
        new = self._pop(1)
        old = int(self.table[row, index])
        self.table[row, index] = new[0]
        self.refcounts[old] -= 1
        return old, int(new[0])


@wrong("PageTable", fails="test_replace_an_own_page")
class TakesTheOldPageBack(reference.PageTable):
    """Returns the old page first, and the pool hands it out again at once."""

    def replace(self, row, index):
        if not self.num_free_pages:
            raise IndexError("no page is free")
        old = self.table[row, [index]]
        self._drop(old)
        new = self._pop(1)
        self.table[row, index] = new[0]
        return int(old[0]), int(new[0])


@wrong("PageTable", fails="test_replace_without_a_free_page")
class DropsBeforeItTakes(reference.PageTable):
    """From a full pool it takes the page that it has just returned, so nothing is copied."""

    def replace(self, row, index):
        old = self.table[row, [index]]
        self._drop(old)
        new = self._pop(1)
        if new[0] == old[0] and self.num_free_pages:
            new = self._pop(1)
            self._drop(old)
            self.generation[old] -= 1
        self.table[row, index] = new[0]
        return int(old[0]), int(new[0])


@wrong("PageTable", fails="test_take_without_a_loop")
class RowAfterRow(reference.PageTable):
    def take(self, rows, num_pages):
        if num_pages.sum() > self.num_free_pages:
            raise IndexError
        for row, count in zip(rows.tolist(), num_pages.tolist(), strict=True):
            self.table[row, self.counts[row] : self.counts[row] + count] = self._pop(count)
            self.counts[row] += count


@wrong("PageTable", fails="test_take_without_a_loop")
class PageAfterPage(reference.PageTable):
    def take(self, rows, num_pages):
        new = self._pop(int(num_pages.sum())).tolist()
        for row, count in zip(rows, num_pages, strict=True):
            for _ in range(count):
                self.table[row, self.counts[row]] = new.pop()
                self.counts[row] += 1


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


@wrong("physical_blocks", fails="test_blocks_are_int32")
def in_int64(blocks, table, width):
    return reference.physical_blocks(blocks, table, width).long()


@wrong("physical_blocks", fails="test_one_list")
def sorted_pages(blocks, table, width):
    """As if the kernel needed its blocks in the order of the pool."""
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
    """-1 is not a block: a kernel that looks ahead reads outside the pool."""
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
    """The reference with one thing changed, from which the wrong answers below are made."""

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


@wrong("physical_mask", fails="test_the_page_that_starts_at_0")
def drops_the_first_page(mask_mod, first_keys, page_size):
    """`start > 0`: 0 is mistaken for "no page"."""
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
    """-1 + 1 is position 0: only the first slot of another sequence's page is hidden."""
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
    """Loops over lists, with the inverse table."""
    parts, rest = divmod(page_size, mask.BLOCK_SIZE[1])
    if rest or not parts:
        raise ValueError("a block does not divide a page")
    starts = torch.full((len(table), num_pages), -1)
    for b, count in enumerate(counts.tolist()):
        for index in range(count):
            starts[b, int(table[b, index])] = index * page_size

    def translated(numbers, blocks):
        out = torch.zeros(*numbers.shape, num_pages * parts, dtype=torch.int32)
        for b, h, q in np.ndindex(*numbers.shape):
            for i in range(int(numbers[b, h, q])):
                page, part = divmod(int(blocks[b, h, q, i]), parts)
                out[b, h, q, i] = int(table[b, page]) * parts + part
        return out

    full_lists = {}
    if mask.full_kv_num_blocks is not None:
        full_lists = {
            "full_kv_num_blocks": mask.full_kv_num_blocks,
            "full_kv_indices": translated(mask.full_kv_num_blocks, mask.full_kv_indices),
        }
    return BlockMask.from_kv_blocks(
        mask.kv_num_blocks,
        translated(mask.kv_num_blocks, mask.kv_indices),
        **full_lists,
        BLOCK_SIZE=mask.BLOCK_SIZE,
        mask_mod=slot_by_slot(mask.mask_mod, starts, page_size),
        seq_lengths=(mask.seq_lengths[0], num_pages * page_size),
    )


@right("convert_block_mask")
def by_arithmetic(mask, table, counts, num_pages, page_size):
    """Looks up pages, and adds the part of the page afterwards."""
    block = mask.BLOCK_SIZE[1]
    if page_size % block:
        raise ValueError
    parts = page_size // block
    starts = torch.arange(table.shape[1]).expand_as(table) * page_size
    starts = starts.masked_fill(starts >= counts[:, None] * page_size, -1)

    def translated(lists):
        pages = table.gather(1, (lists // parts).flatten(1).long()).view(lists.shape)
        blocks = (pages * parts + lists % parts).int()
        return torch.nn.functional.pad(blocks, (0, num_pages * parts - lists.shape[-1]))

    return BlockMask.from_kv_blocks(
        mask.kv_num_blocks,
        translated(mask.kv_indices),
        mask.full_kv_num_blocks,
        mask.full_kv_indices if mask.full_kv_indices is None else translated(mask.full_kv_indices),
        BLOCK_SIZE=mask.BLOCK_SIZE,
        mask_mod=by_where(mask.mask_mod, reference.first_keys(table, starts, num_pages), page_size),
        seq_lengths=(mask.seq_lengths[0], num_pages * page_size),
    )


def converted(mask, table, counts, num_pages, page_size, **change):
    """The reference with one thing changed, from which the wrong answers below are made."""
    block = mask.BLOCK_SIZE[1]
    refused = page_size != block if change.get("whole_pages") else page_size % block
    if refused and not change.get("any_size"):
        raise ValueError("a block does not divide a page")
    parts = max(1, page_size // block)
    column = torch.arange(table.shape[1])
    own = column < (table.shape[1] if change.get("every_entry") else counts[:, None])
    starts = torch.where(own, column * (1 if change.get("starts_of_one") else page_size), -1).expand_as(table)
    first_keys = reference.first_keys(table, starts, num_pages)
    entries = table[:, : int(counts.max())] if change.get("narrow") else table
    blocks = (entries[:, :, None] * parts + torch.arange(parts)).flatten(1)
    if change.get("pages_for_blocks"):
        blocks = entries.repeat_interleave(parts, dim=1)
    if change.get("apart"):
        blocks = (entries[:, :, None] + torch.arange(parts) * num_pages).flatten(1)
    width = num_pages * parts
    full_counts, full = mask.full_kv_num_blocks, mask.full_kv_indices
    if full is None and change.get("always_full"):
        full_counts, full = torch.zeros_like(mask.kv_num_blocks), torch.zeros_like(mask.kv_indices)
    if change.get("no_full"):
        full_counts, full = None, None
    if full is not None and not change.get("full_stay"):
        full = reference.physical_blocks(full, blocks, width)
    elif full is not None:
        full = torch.nn.functional.pad(full, (0, width - full.shape[-1]))
    counts_of_partial = mask.kv_num_blocks
    if change.get("whole_pool"):
        counts_of_partial = torch.full_like(counts_of_partial, width)
    mask_mod = mask.mask_mod
    if not change.get("logical_mod"):
        size = block if change.get("block_for_page") else page_size
        keys = first_keys.repeat_interleave(parts, dim=1) if change.get("block_for_page") else first_keys
        mask_mod = reference.physical_mask(mask_mod, keys, size)
    num_slots = mask.seq_lengths[1] if change.get("logical_length") else num_pages * page_size
    return BlockMask.from_kv_blocks(
        counts_of_partial,
        reference.physical_blocks(mask.kv_indices, blocks, width),
        full_counts,
        full,
        BLOCK_SIZE=change.get("block_size", mask.BLOCK_SIZE),
        mask_mod=mask_mod,
        seq_lengths=(mask.seq_lengths[0], num_slots),
    )


@wrong("convert_block_mask", fails="test_the_lengths")
def lengths_of_the_sequence(*args):
    return converted(*args, logical_length=True)


@wrong("convert_block_mask", fails="test_the_lengths")
def square_blocks(mask, table, counts, num_pages, page_size):
    return converted(mask, table, counts, num_pages, page_size, block_size=mask.BLOCK_SIZE[1])


@wrong("convert_block_mask", fails="test_partial_blocks")
def every_block_of_the_pool(*args):
    """Right results, and every query visits the pages of all sequences."""
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
def starts_are_page_indices(*args):
    return converted(*args, starts_of_one=True)


@wrong("convert_block_mask", fails="test_stale_entries")
def stale_entries_count(*args):
    """Takes the values in the table for the truth, not the counts: a page that is listed twice moves."""
    return converted(*args, every_entry=True)


@wrong("convert_block_mask", fails="test_a_wide_mask")
def only_pages_in_use(*args):
    """Narrows the table to the longest row: the padding of the lists names blocks after it."""
    return converted(*args, narrow=True)


@wrong("convert_block_mask", fails="test_parts_of_pages")
def blocks_are_whole_pages(*args):
    """Refuses every other block, as if FlexAttention's block and the page had to be equal."""
    return converted(*args, whole_pages=True)


@wrong("convert_block_mask", fails="test_parts_of_pages")
def pages_for_blocks(*args):
    """Every part of a page becomes the page's own index."""
    return converted(*args, pages_for_blocks=True)


@wrong("convert_block_mask", fails="test_parts_of_pages")
def parts_lie_apart(*args):
    """As if the first halves of all pages came before the second halves."""
    return converted(*args, apart=True)


@wrong("convert_block_mask", fails="test_parts_of_pages")
def blocks_as_large_as_pages(mask, table, counts, num_pages, page_size):
    return converted(mask, table, counts, num_pages, page_size, block_size=(mask.BLOCK_SIZE[0], page_size))


@wrong("convert_block_mask", fails="test_the_mask_mod_of_parts")
def block_size_for_page_size(*args):
    """Hands physical_mask blocks that all start where their page starts."""
    return converted(*args, block_for_page=True)


@wrong("convert_block_mask", fails="test_blocks_divide_pages")
def blocks_of_any_size(*args):
    return converted(*args, any_size=True)


@wrong("convert_block_mask", fails="test_no_full_blocks")
def always_two_lists(*args):
    return converted(*args, always_full=True)


# compact ------------------------------------------------------------------------------------------------------------


@right("compact")
def page_by_page(table):
    """Moves one page after the other, the last one first, and every owner of it at once."""
    used = np.flatnonzero(table.refcounts).tolist()
    keeper = table.allocate()
    table.share(keeper, np.array(used, dtype=np.int32))
    table.take(np.array([keeper]), np.array([table.num_free_pages]))
    gaps = [page for page in range(len(used)) if page not in used]
    pairs = []
    for old in reversed(used):
        if old < len(used):
            break
        pairs.append((old, gaps.pop()))
        for row in np.flatnonzero((table.table == old).any(axis=1)).tolist():
            pages = table.pages(row).copy()
            if row == keeper or old not in pages:
                continue
            index = pages.tolist().index(old)
            pages[index] = pairs[-1][1]
            table.truncate(row, index)
            table.share(row, pages[index:])
    table.release(keeper)
    return pairs


@right("compact")
def with_a_dictionary(table):
    """The free pages are taken before those in use are shared, and rows are emptied from the front."""
    used = np.flatnonzero(table.refcounts).astype(np.int32)
    n = len(used)
    gaps = [page for page in range(n) if page not in set(used.tolist())]
    new_of = dict(zip([p for p in used.tolist() if p >= n], gaps, strict=True))
    first = table.allocate()
    table.take(np.array([first]), np.array([table.num_free_pages]))
    table.share(first, used)
    for row in range(table.max_rows):
        pages = table.pages(row).tolist()
        if row != first and pages:
            table.drop_front(row, len(pages))
            table.share(row, np.array([new_of.get(page, page) for page in pages], dtype=np.int32))
    table.truncate(first, 0)
    table.release(first)
    return [*new_of.items()]


def compacted(table, **change):
    """The reference with one thing changed, from which the wrong answers below are made."""
    used = np.flatnonzero(table.refcounts).astype(np.int32)
    old, n = used[used >= len(used)], len(used)
    new = np.setdiff1d(np.arange(n), used)
    if change.get("renumber"):
        old, new = used, np.arange(n)
    moved = np.arange(table.num_pages, dtype=np.int32)
    moved[old] = new
    keeper = table.allocate()
    table.share(keeper, used)
    table.take(np.array([keeper]), np.array([table.num_free_pages]))
    pairs = []
    for row in np.flatnonzero(table.counts).tolist():
        pages = moved[table.pages(row)]
        if row == keeper:
            continue
        pairs += [(int(page), int(moved[page])) for page in table.pages(row) if moved[page] != page]
        if change.get("sorted_rows"):
            pages.sort()
        if not change.get("tables_stay"):
            table.truncate(row, 0)
            table.share(row, pages)
    if not change.get("keeper_stays"):
        table.release(keeper)
    if change.get("per_row"):
        return pairs
    pairs = [(a, b) for a, b in zip(old.tolist(), new.tolist(), strict=True) if a != b]
    return [(b, a) for a, b in pairs] if change.get("swapped") else pairs


@wrong("compact", fails="test_nothing_to_move")
def the_extra_row_stays(table):
    return compacted(table, keeper_stays=True)


@wrong("compact", fails="test_one_gap")
def the_extra_row_stays_after_a_move(table):
    used = np.flatnonzero(table.refcounts)
    return compacted(table, keeper_stays=True) if len(used) and used[-1] >= len(used) else []


@wrong("compact", fails="test_one_gap")
def rows_are_not_told(table):
    return compacted(table, tables_stay=True)


@wrong("compact", fails="test_one_gap")
def new_and_old_swapped(table):
    return compacted(table, swapped=True)


@wrong("compact", fails="test_one_gap")
def to_any_free_page(table):
    """replace takes whatever is free, and that need not be a gap at the front."""
    pairs = []
    n = int((table.refcounts > 0).sum())
    for row in range(table.max_rows):
        for index, page in enumerate(table.pages(row).tolist()):
            if page >= n:
                pairs.append(table.replace(row, index))
    return pairs


@wrong("compact", fails="test_order_of_positions")
def rows_sorted_by_page(table):
    return compacted(table, sorted_rows=True)


@wrong("compact", fails="test_as_few_as_possible")
def everything_moves_up(table):
    return compacted(table, renumber=True)


@wrong("compact", fails="test_shared_pages_move_once")
def one_copy_for_each_owner(table):
    return compacted(table, per_row=True)


@wrong("compact", fails="test_through_the_methods")
def through_the_fields(table):
    """What PageTable's own code could do if it had this method."""
    n = int((table.refcounts > 0).sum())
    old, new = n + np.flatnonzero(table.refcounts[n:]), np.flatnonzero(table.refcounts[:n] == 0)
    moved = np.arange(table.num_pages)
    moved[old] = new
    for row in range(table.max_rows):
        table.pages(row)[:] = moved[table.pages(row)]
    table.refcounts[new] = table.refcounts[old]
    table.refcounts[old] = 0
    table.generation[new] += 1
    table._free_pages[: table.num_free_pages] = range(n, table.num_pages)
    return list(zip(old.tolist(), new.tolist(), strict=True))
