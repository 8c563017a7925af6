"""Right and wrong answers to the homework of chapter 07. They test its grader."""

from collections import Counter

import numpy as np

from book.grading import right, solution, wrong

reference = solution("07_continuous_batching")


# fuse ---------------------------------------------------------------------------------------------------------------


@right("fuse")
def token_by_token(pending, budget):
    """Hands out one token at a time: to the first decode without one, then to the first prompt with a use for it."""
    shares = [0] * len(pending)
    for i in sorted(range(len(pending)), key=lambda i: pending[i] > 1):
        while budget and shares[i] < pending[i]:
            shares[i] += 1
            budget -= 1
    return shares


@right("fuse")
def by_cumulative_sums(pending, budget):
    wants = np.array(pending, dtype=int)
    decodes = wants == 1
    upto = np.minimum(np.cumsum(np.where(decodes, 0, wants)), budget - decodes.sum())
    return (np.diff(upto, prepend=0) + decodes).tolist()


@wrong("fuse", fails="test_decodes_get_a_token_each")
def decodes_are_forgotten(pending, budget):
    return [0 if n == 1 else share for n, share in zip(pending, reference.fuse(pending, budget), strict=True)]


@wrong("fuse", fails="test_decodes_get_a_token_each")
def all_that_is_left_for_everybody(pending, budget):
    return [budget // len(pending)] * len(pending)


@wrong("fuse", fails="test_a_prompt_is_cut")
def whole_prompts_only(pending, budget):
    left, shares = budget - sum(n == 1 for n in pending), []
    for n in pending:
        shares.append(n if n == 1 or n <= left else 0)
        left -= shares[-1] if n > 1 else 0
    return shares


@wrong("fuse", fails="test_a_prompt_is_cut")
def never_cut(pending, budget):
    return list(pending)


@wrong("fuse", fails="test_a_mixed_step")
def prefill_or_decode(pending, budget):
    """A step is one or the other."""
    if max(pending, default=1) == 1:
        return list(pending)
    shares = []
    for n in pending:
        shares.append(min(n, budget) if n > 1 else 0)
        budget -= shares[-1]
    return shares


@wrong("fuse", fails="test_a_mixed_step")
def decode_or_prefill(pending, budget):
    return [int(n == 1) for n in pending] if 1 in pending else reference.fuse(pending, budget)


@wrong("fuse", fails="test_a_mixed_step")
def decodes_for_free(pending, budget):
    shares = []
    for n in pending:
        shares.append(1 if n == 1 else min(n, budget))
        budget -= shares[-1] if n > 1 else 0
    return shares


@wrong("fuse", fails="test_a_decode_behind_a_prompt")
def in_order_of_age_alone(pending, budget):
    shares = []
    for n in pending:
        shares.append(min(n, budget))
        budget -= shares[-1]
    return shares


@wrong("fuse", fails="test_a_decode_behind_a_prompt")
def decodes_in_front(pending, budget):
    """The right numbers in the wrong places."""
    return sorted(reference.fuse(pending, budget), key=lambda n: n > 1)


@wrong("fuse", fails="test_prompts_in_order_of_age")
def short_prompts_first(pending, budget):
    order = sorted(range(len(pending)), key=lambda i: pending[i])
    shares = dict(zip(order, reference.fuse([pending[i] for i in order], budget), strict=True))
    return [shares[i] for i in range(len(pending))]


@wrong("fuse", fails="test_prompts_in_order_of_age")
def an_equal_chunk_for_each_prompt(pending, budget):
    left, prompts = budget - sum(n == 1 for n in pending), sum(n > 1 for n in pending)
    return [1 if n == 1 else min(n, left // prompts) for n in pending]


@wrong("fuse", fails="test_prompts_in_order_of_age")
def the_budget_for_each_prompt(pending, budget):
    left = budget - sum(n == 1 for n in pending)
    return [1 if n == 1 else min(n, left) for n in pending]


@wrong("fuse", fails="test_nothing_left")
def at_least_one_for_everybody(pending, budget):
    return [max(1, share) for share in reference.fuse(pending, budget)]


# admit --------------------------------------------------------------------------------------------------------------


@right("admit")
def one_more_as_long_as_it_fits(num_tokens, num_pages, *, budget, free_pages, free_rows):
    n = 0
    while (
        n < min(len(num_tokens), free_rows)
        and sum(num_pages[: n + 1]) <= free_pages
        and sum(num_tokens[:n]) <= budget - 1
    ):
        n += 1
    return n


@right("admit")
def by_recursion(num_tokens, num_pages, *, budget, free_pages, free_rows):
    if not num_tokens or budget <= 0 or free_rows <= 0 or num_pages[0] > free_pages:
        return 0
    left = {"budget": budget - num_tokens[0], "free_pages": free_pages - num_pages[0], "free_rows": free_rows - 1}
    return 1 + by_recursion.definition(num_tokens[1:], num_pages[1:], **left)


def admitted(num_tokens, num_pages, budget, free_pages, free_rows, *, whole=False, keep_pages=False, skip=False):
    """The reference with one thing changed: what the wrong answers below are made of."""
    count = 0
    for tokens, pages in zip(num_tokens, num_pages, strict=True):
        if count >= free_rows or budget < (tokens if whole else 1):
            break
        if pages > free_pages:
            if skip:
                continue
            break
        count += 1
        budget -= tokens
        free_pages -= 0 if keep_pages else pages
    return count


@wrong("admit", fails="test_room_for_all")
def which_not_how_many(num_tokens, num_pages, *, budget, free_pages, free_rows):
    return list(range(admitted(num_tokens, num_pages, budget, free_pages, free_rows)))


@wrong("admit", fails="test_room_for_all")
def one_at_a_time(num_tokens, num_pages, *, budget, free_pages, free_rows):
    return min(1, admitted(num_tokens, num_pages, budget, free_pages, free_rows))


@wrong("admit", fails="test_rows_run_out")
def rows_forgotten(num_tokens, num_pages, *, budget, free_pages, free_rows):
    return admitted(num_tokens, num_pages, budget, free_pages, 10**9)


@wrong("admit", fails="test_pages_run_out")
def the_last_page_is_never_given(num_tokens, num_pages, *, budget, free_pages, free_rows):
    return admitted(num_tokens, num_pages, budget, free_pages - 1, free_rows)


@wrong("admit", fails="test_pages_run_out")
def any_page_will_do(num_tokens, num_pages, *, budget, free_pages, free_rows):
    """Let it begin, it will find the others later."""
    return admitted(num_tokens, [1] * len(num_pages), budget, free_pages, free_rows)


@wrong("admit", fails="test_pages_add_up")
def each_sees_all_pages(num_tokens, num_pages, *, budget, free_pages, free_rows):
    return admitted(num_tokens, num_pages, budget, free_pages, free_rows, keep_pages=True)


@wrong("admit", fails="test_a_long_prompt_comes_in")
def whole_prompts(num_tokens, num_pages, *, budget, free_pages, free_rows):
    return admitted(num_tokens, num_pages, budget, free_pages, free_rows, whole=True)


@wrong("admit", fails="test_tokens_run_out")
def no_budget(num_tokens, num_pages, *, budget, free_pages, free_rows):
    return admitted(num_tokens, num_pages, 10**9, free_pages, free_rows)


@wrong("admit", fails="test_tokens_run_out")
def the_budget_may_be_nothing(num_tokens, num_pages, *, budget, free_pages, free_rows):
    return admitted(num_tokens, num_pages, budget + 1, free_pages, free_rows)


@wrong("admit", fails="test_nobody_is_overtaken")
def whoever_fits(num_tokens, num_pages, *, budget, free_pages, free_rows):
    return admitted(num_tokens, num_pages, budget, free_pages, free_rows, skip=True)


@wrong("admit", fails="test_nobody_is_overtaken")
def as_many_as_possible(num_tokens, num_pages, *, budget, free_pages, free_rows):
    return admitted(num_tokens, sorted(num_pages), budget, free_pages, free_rows)


# preempt ------------------------------------------------------------------------------------------------------------


@right("preempt")
def page_by_page(running, waiting, rows, page_table):
    sequence = running[-1]
    del running[-1]
    row = rows[sequence]
    del rows[sequence]
    for page in page_table.pages(row).tolist():
        page_table.release(page)
    page_table.counts[row] = 0
    page_table.free_rows.append(row)
    waiting.insert(0, sequence)
    sequence.num_computed = 0
    return sequence


def preempted(running, waiting, rows, page_table, *, which=-1, recompute=True, first=True):
    """The reference with one thing changed: what the wrong answers below are made of."""
    sequence = running.pop(which)
    page_table.erase(rows.pop(sequence))
    if recompute:
        sequence.num_computed = 0
    if first:
        waiting.appendleft(sequence)
    else:
        waiting.append(sequence)
    return sequence


@wrong("preempt", fails="test_the_newest_goes")
def the_oldest(running, waiting, rows, page_table):
    return preempted(running, waiting, rows, page_table, which=0)


@wrong("preempt", fails="test_the_newest_goes")
def the_one_with_most_pages(running, waiting, rows, page_table):
    most = max(range(len(running)), key=lambda i: page_table.counts[rows[running[i]]])
    return preempted(running, waiting, rows, page_table, which=most)


@wrong("preempt", fails="test_the_newest_goes")
def it_still_runs(running, waiting, rows, page_table):
    sequence = preempted(running, waiting, rows, page_table)
    running.append(sequence)
    return sequence


@wrong("preempt", fails="test_its_pages_are_free")
def pages_kept(running, waiting, rows, page_table):
    sequence = running.pop()
    rows.pop(sequence)
    sequence.num_computed = 0
    waiting.appendleft(sequence)
    return sequence


@wrong("preempt", fails="test_its_pages_are_free")
def row_remembered(running, waiting, rows, page_table):
    remembered = dict(rows)
    sequence = preempted(running, waiting, rows, page_table)
    rows.update(remembered)
    return sequence


@wrong("preempt", fails="test_nothing_of_it_is_computed")
def forgets_num_computed(running, waiting, rows, page_table):
    return preempted(running, waiting, rows, page_table, recompute=False)


@wrong("preempt", fails="test_nothing_of_it_is_computed")
def prompt_still_computed(running, waiting, rows, page_table):
    sequence = preempted(running, waiting, rows, page_table)
    sequence.num_computed = sequence.num_prompt_tokens
    return sequence


@wrong("preempt", fails="test_it_keeps_its_tokens")
def starts_over(running, waiting, rows, page_table):
    sequence = preempted(running, waiting, rows, page_table)
    del sequence.token_ids[sequence.num_prompt_tokens :]
    return sequence


@wrong("preempt", fails="test_it_keeps_its_tokens")
def output_becomes_prompt(running, waiting, rows, page_table):
    sequence = preempted(running, waiting, rows, page_table)
    sequence.num_prompt_tokens = len(sequence.token_ids)
    return sequence


@wrong("preempt", fails="test_it_waits_first")
def it_waits_last(running, waiting, rows, page_table):
    return preempted(running, waiting, rows, page_table, first=False)


@wrong("preempt", fails="test_shared_pages_stay")
def pages_freed_by_hand(running, waiting, rows, page_table):
    sequence = running.pop()
    row = rows.pop(sequence)
    pages = page_table.pages(row).tolist()
    page_table.free_pages += pages
    page_table.refcounts[pages] = 0
    page_table.counts[row] = 0
    page_table.free_rows.append(row)
    sequence.num_computed = 0
    waiting.appendleft(sequence)
    return sequence


# share_prefix -------------------------------------------------------------------------------------------------------


@right("share_prefix")
def one_page_after_the_other(table, row, donor, num_tokens):
    for index in range(table.pages_for(num_tokens)):
        page = int(table.table[donor, index])
        table.table[row, index] = page
        table.refcounts[page] += 1
        table.counts[row] += 1


def shared(table, row, donor, count, owners=1):
    """The reference with other numbers: what the wrong answers below are made of."""
    pages = table.pages(donor)[:count]
    table.table[row, : len(pages)] = pages
    table.counts[row] = len(pages)
    table.refcounts[pages] += owners


@wrong("share_prefix", fails="test_one_page")
def pages_of_its_own(table, row, donor, num_tokens):
    table.reserve(row, num_tokens)


@wrong("share_prefix", fails="test_one_page")
def count_forgotten(table, row, donor, num_tokens):
    shared(table, row, donor, table.pages_for(num_tokens))
    table.counts[row] = 0


@wrong("share_prefix", fails="test_one_owner_more")
def owners_forgotten(table, row, donor, num_tokens):
    shared(table, row, donor, table.pages_for(num_tokens), owners=0)


@wrong("share_prefix", fails="test_no_more_than_the_prefix")
def all_pages_of_the_donor(table, row, donor, num_tokens):
    shared(table, row, donor, None)


@wrong("share_prefix", fails="test_no_more_than_the_prefix")
def owners_of_all_its_pages(table, row, donor, num_tokens):
    shared(table, row, donor, table.pages_for(num_tokens), owners=0)
    table.refcounts[table.pages(donor)] += 1


@wrong("share_prefix", fails="test_no_more_than_the_prefix")
def the_last_pages(table, row, donor, num_tokens):
    pages = table.pages(donor)[-table.pages_for(num_tokens) :]
    table.table[row, : len(pages)] = pages
    table.counts[row] = len(pages)
    table.refcounts[pages] += 1


@wrong("share_prefix", fails="test_a_page_in_part")
def whole_pages_only(table, row, donor, num_tokens):
    shared(table, row, donor, num_tokens // table.page_size)


@wrong("share_prefix", fails="test_no_more_than_the_prefix")
def one_page_too_many(table, row, donor, num_tokens):
    shared(table, row, donor, num_tokens // table.page_size + 1)


@wrong("share_prefix", fails="test_three_owners")
def two_owners(table, row, donor, num_tokens):
    shared(table, row, donor, table.pages_for(num_tokens))
    table.refcounts[table.pages(row)] = 2


# copy_on_write ------------------------------------------------------------------------------------------------------


@right("copy_on_write")
def token_by_token_it_writes(table, row, first, end):
    """Which pages are written is asked of each token; the copies are undone if they cannot all be made."""
    before, copies = table.pages(row).copy(), list[tuple[int, int]]()
    for position in range(first, end):
        index = position // table.page_size
        old = int(table.table[row, index])
        if table.refcounts[old] == 1:
            continue
        if not table.free_pages:
            table.table[row, : len(before)] = before
            for shared_page, own_page in reversed(copies):
                table.refcounts[shared_page] += 1
                table.release(own_page)
            return None
        new = table.free_pages.pop()
        table.refcounts[old] -= 1
        table.refcounts[new] = 1
        table.table[row, index] = new
        copies.append((old, new))
    return copies


@right("copy_on_write")
def all_at_once(table, row, first, end):
    indices = np.arange(first // table.page_size, -(-end // table.page_size))
    indices = indices[table.refcounts[table.table[row, indices]] > 1]
    old = table.table[row, indices].copy()
    if len(old) > len(table.free_pages):
        return None
    new = [table.free_pages.pop() for _ in old]
    table.table[row, indices] = new
    table.refcounts[old] -= 1
    table.refcounts[new] = 1
    return list(zip(old.tolist(), new, strict=True))


def copied(table, row, indices, *, only_shared=True, count_first=True, release=True, own=True):
    """The reference over other pages, or with one step left out: what the wrong answers below are made of."""
    chosen = [i for i in indices if not only_shared or table.refcounts[table.table[row, i]] > 1]
    if count_first and len(chosen) > len(table.free_pages):
        return None
    copies = []
    for index in chosen:
        if not table.free_pages:
            return None
        old, new = int(table.table[row, index]), table.free_pages.pop()
        table.table[row, index] = new
        if own:
            table.refcounts[new] = 1
        if release:
            table.release(old)
        copies.append((old, new))
    return copies


def written(table, first, end):
    return range(first // table.page_size, (end - 1) // table.page_size + 1)


@wrong("copy_on_write", fails="test_own_pages")
def always_copies(table, row, first, end):
    return copied(table, row, written(table, first, end), only_shared=False)


@wrong("copy_on_write", fails="test_own_pages")
def none_for_nothing(table, row, first, end):
    return copied(table, row, written(table, first, end)) or None


@wrong("copy_on_write", fails="test_a_shared_page")
def never_copies(table, row, first, end):
    return []


@wrong("copy_on_write", fails="test_a_shared_page")
def pairs_turned_round(table, row, first, end):
    copies = copied(table, row, written(table, first, end))
    return copies and [(new, old) for old, new in copies]


@wrong("copy_on_write", fails="test_a_shared_page")
def a_new_page_for_all_its_owners(table, row, first, end):
    copies = copied(table, row, written(table, first, end))
    for old, new in copies or []:
        table.table[table.table == old] = new
    return copies


@wrong("copy_on_write", fails="test_owners_are_counted")
def old_page_not_released(table, row, first, end):
    return copied(table, row, written(table, first, end), release=False)


@wrong("copy_on_write", fails="test_owners_are_counted")
def new_page_without_an_owner(table, row, first, end):
    return copied(table, row, written(table, first, end), own=False)


@wrong("copy_on_write", fails="test_pages_before_stay")
def the_whole_row(table, row, first, end):
    return copied(table, row, range(table.pages_for(end)))


@wrong("copy_on_write", fails="test_end_is_not_written")
def end_included(table, row, first, end):
    return copied(table, row, range(first // table.page_size, min(end // table.page_size + 1, table.counts[row])))


@wrong("copy_on_write", fails="test_end_is_not_written")
def only_the_page_of_the_first_token(table, row, first, end):
    return copied(table, row, [first // table.page_size])


@wrong("copy_on_write", fails="test_three_owners_part")
def the_last_of_three_leaves(table, row, first, end):
    """Frees the old page, whoever else owns it."""
    copies = copied(table, row, written(table, first, end), release=False)
    for old, _ in copies or []:
        table.refcounts[old] = 1
    return copies


@wrong("copy_on_write", fails="test_too_few_pages")
def takes_before_it_counts(table, row, first, end):
    return copied(table, row, written(table, first, end), count_first=False)


@wrong("copy_on_write", fails="test_too_few_pages")
def counts_pages_that_are_not_copied(table, row, first, end):
    if len(written(table, first, end)) > len(table.free_pages):
        needs = any(table.refcounts[table.table[row, i]] > 1 for i in written(table, first, end))
        if needs or table.num_free_pages == 0:
            return None
    return copied(table, row, written(table, first, end))


# evict_pages --------------------------------------------------------------------------------------------------------


@right("evict_pages")
def while_the_first_is_hidden(table, row, first_position, next_query, window):
    """One page at a time, as long as the last key of the first page is behind the window."""
    given_up = 0
    while table.counts[row] and next_query - (first_position + table.page_size - 1) >= window:
        table.release(int(table.table[row, 0]))
        table.counts[row] -= 1
        table.table[row, : table.counts[row]] = table.table[row, 1 : table.counts[row] + 1].copy()
        first_position += table.page_size
        given_up += 1
    return given_up


def evicted(table, row, num_pages, *, front=True, move=True, release=True):
    """The reference with another number of pages, or one step left out: what the wrong answers below are made of."""
    pages = table.pages(row).tolist()
    num_pages = min(max(0, int(num_pages)), len(pages))
    first = 0 if front else len(pages) - num_pages
    gone, kept = pages[first : first + num_pages], pages[:first] + pages[first + num_pages :]
    if release:
        for page in gone:
            table.release(page)
    if move:
        table.table[row, : len(kept)] = kept
    table.counts[row] = len(pages) - num_pages
    return num_pages


def hidden(first_position, next_query, window):
    return next_query - window + 1 - first_position


@wrong("evict_pages", fails="test_nothing_to_give_up")
def negative_hidden(table, row, first_position, next_query, window):
    """Forgets that nothing may be hidden: a negative number of pages."""
    gone = hidden(first_position, next_query, window) // table.page_size
    return evicted(table, row, gone) and gone if gone >= 0 else gone


@wrong("evict_pages", fails="test_nothing_to_give_up")
def pages_in_part(table, row, first_position, next_query, window):
    return evicted(table, row, -(-hidden(first_position, next_query, window) // table.page_size))


@wrong("evict_pages", fails="test_nothing_to_give_up")
def one_key_too_early(table, row, first_position, next_query, window):
    return evicted(table, row, (hidden(first_position, next_query, window) + 1) // table.page_size)


@wrong("evict_pages", fails="test_the_first_page_goes")
def one_key_too_late(table, row, first_position, next_query, window):
    return evicted(table, row, (hidden(first_position, next_query, window) - 1) // table.page_size)


@wrong("evict_pages", fails="test_the_first_page_goes")
def keys_for_pages(table, row, first_position, next_query, window):
    num_pages = evicted(table, row, hidden(first_position, next_query, window) // table.page_size)
    return num_pages * table.page_size


@wrong("evict_pages", fails="test_the_others_move_up")
def only_the_count(table, row, first_position, next_query, window):
    return evicted(table, row, hidden(first_position, next_query, window) // table.page_size, move=False)


@wrong("evict_pages", fails="test_the_others_move_up")
def the_newest_pages(table, row, first_position, next_query, window):
    num_pages = max(0, hidden(first_position, next_query, window)) // table.page_size
    return evicted(table, row, num_pages, front=False) if num_pages else 0


@wrong("evict_pages", fails="test_the_pages_are_free")
def never_released(table, row, first_position, next_query, window):
    return evicted(table, row, hidden(first_position, next_query, window) // table.page_size, release=False)


@wrong("evict_pages", fails="test_the_row_begins_later")
def as_if_the_row_began_at_0(table, row, first_position, next_query, window):
    return evicted(table, row, hidden(0, next_query, window) // table.page_size)


@wrong("evict_pages", fails="test_a_shared_page_stays")
def freed_by_hand(table, row, first_position, next_query, window):
    pages = table.pages(row).tolist()
    num_pages = evicted(table, row, hidden(first_position, next_query, window) // table.page_size, release=False)
    table.free_pages += pages[:num_pages]
    table.refcounts[pages[:num_pages]] = 0
    return num_pages


# reorder_beams ------------------------------------------------------------------------------------------------------


@right("reorder_beams")
def by_the_difference(table, rows, parents):
    """Counts what each page gains and loses in all, and touches only those that change."""
    before = [table.pages(row).tolist() for row in rows]
    change = Counter(page for parent in parents for page in before[parent])
    change.subtract(page for pages in before for page in pages)
    for row, parent in zip(rows, parents, strict=True):
        table.table[row, : len(before[parent])] = before[parent]
        table.counts[row] = len(before[parent])
    for page, by in change.items():
        if by > 0:
            table.refcounts[page] += by
        for _ in range(-by):
            table.release(page)


def reordered(table, rows, parents, *, count=True, release=True, counts=True):
    """The reference with one step left out: what the wrong answers below are made of."""
    before = [table.pages(row).copy() for row in rows]
    if count:
        for parent in parents:
            table.refcounts[before[parent]] += 1
    if release:
        for pages in before:
            for page in pages.tolist():
                table.release(page)
    for row, parent in zip(rows, parents, strict=True):
        table.table[row, : len(before[parent])] = before[parent]
        if counts:
            table.counts[row] = len(before[parent])


@wrong("reorder_beams", fails="test_nothing_changes")
def owners_only_added(table, rows, parents):
    reordered(table, rows, parents, release=False)


@wrong("reorder_beams", fails="test_nothing_changes")
def owners_only_taken(table, rows, parents):
    reordered(table, rows, parents, count=False)


@wrong("reorder_beams", fails="test_nothing_changes")
def rows_erased(table, rows, parents):
    """Erases each row and shares into it: the row is on the free list, and the pages were."""
    before = [table.pages(row).copy() for row in rows]
    for parent in parents:
        table.refcounts[before[parent]] += 1
    for row in rows:
        table.erase(row)
    for row, parent in zip(rows, parents, strict=True):
        table.table[row, : len(before[parent])] = before[parent]
        table.counts[row] = len(before[parent])


@wrong("reorder_beams", fails="test_nothing_changes")
def released_first(table, rows, parents):
    before = [table.pages(row).copy() for row in rows]
    for pages in before:
        for page in pages.tolist():
            table.release(page)
    for row, parent in zip(rows, parents, strict=True):
        for page in before[parent].tolist():
            if table.refcounts[page] == 0:
                table.free_pages.remove(page)
            table.refcounts[page] += 1
        table.table[row, : len(before[parent])] = before[parent]
        table.counts[row] = len(before[parent])


@wrong("reorder_beams", fails="test_two_swap")
def one_row_after_the_other(table, rows, parents):
    for row, parent in zip(rows, parents, strict=True):
        source = rows[parent]
        if row == source:
            continue
        pages = table.pages(source).copy()
        table.refcounts[pages] += 1
        for page in table.pages(row).tolist():
            table.release(page)
        table.table[row, : len(pages)] = pages
        table.counts[row] = len(pages)


@wrong("reorder_beams", fails="test_beams_of_different_lengths")
def counts_forgotten(table, rows, parents):
    reordered(table, rows, parents, counts=False)


@wrong("reorder_beams", fails="test_beams_that_share")
def owners_set_to_the_number_of_beams(table, rows, parents):
    """Right as long as beams share all or nothing."""
    before = [table.pages(row).tolist() for row in rows]
    reordered(table, rows, parents)
    for parent in set(parents):
        for page in before[parent]:
            table.refcounts[page] = parents.count(parent)


@wrong("reorder_beams", fails="test_rows_that_are_no_beams")
def parents_are_rows(table, rows, parents):
    everyone = range(len(table.counts))
    of_row = dict(zip(rows, parents, strict=True))
    reordered(table, list(everyone), [of_row.get(row, row) for row in everyone])
