"""Homework of chapter 07: who computes, who comes in, who gives way, and who shares pages with whom.

Six of these functions are parts of the engine. Once their checks are green, `mini-engine generate --homework` runs a
real model on them. None of them touches a tensor: they decide, and keep the books of pages.

Each function tells what it must do. Write it in place of `raise NotImplementedError`; import what you need, and add
helper functions of your own as you like. Then:

    pytest chapters/07_continuous_batching                   # grade your work
    pytest chapters/07_continuous_batching --hint NAME       # the next of three hints for the exercise NAME
"""

from collections import deque
from collections.abc import Sequence as ListLike

from mini_engine.kv_cache.page_table import PageTable
from mini_engine.sequence import Sequence


def fuse(pending: ListLike[int], budget: int) -> list[int]:
    """Share out the tokens of one step among the running sequences: decodes and prompts in one batch.

    `pending` says how many tokens of each sequence are not computed yet. A sequence with one such token is decoding,
    any other is in its prompt (or, after a preemption, in its prompt and its old output). The rules:
        1. Every decode gets its token, wherever it stands in the list. No answer waits for somebody else's prompt.
        2. What is left of the budget goes to the prompts in the order of the list, as much as each can use.
        3. So at most one prompt gets only a part, a chunk, and those behind it get nothing in this step.

    Args:
        pending: at least 1 each, the oldest sequence first; there may be none.
        budget: most tokens of the step; at least len(pending).

    Returns:
        How many tokens the step computes of each sequence, in the order of `pending`.

    Example: two decodes take a token each; of the other six, the older prompt gets five, and the younger one.

        >>> fuse([5, 1, 7, 1], budget=8)
        [5, 1, 1, 1]
    """
    raise NotImplementedError


def admit(num_tokens: ListLike[int], num_pages: ListLike[int], *, budget: int, free_pages: int, free_rows: int) -> int:
    """Decide how many of the waiting requests come in.

    A request comes in if it finds, after all before it have taken theirs:
        1. a row of the page table;
        2. all the pages that it needs;
        3. at least one token of the step's budget. Its prompt may be longer than that: it begins with a chunk, takes
           the whole rest of the budget, and nobody behind it comes in.
    They come in strictly in order. The first that does not fit ends it, even if a smaller one behind it would fit:
    a large request that is overtaken again and again would wait forever.

    Args:
        num_tokens: tokens that each request has to compute, at least 1 each, oldest first.
        num_pages: pages that each needs, at least 1 each.
        budget: tokens of the step that the running sequences leave.
        free_pages: pages that may be given away; the scheduler holds some back, so it may be negative.
        free_rows: rows that may be given away.

    Returns:
        How many requests come in, from the front.

    Example: the second begins with the one token that is left; the third finds none.

        >>> admit([4, 9, 2], [1, 3, 1], budget=5, free_pages=6, free_rows=8)
        2
        >>> admit([4, 9, 2], [1, 7, 1], budget=99, free_pages=6, free_rows=8)
        1
    """
    raise NotImplementedError


def preempt(
    running: list[Sequence], waiting: deque[Sequence], rows: dict[Sequence, int], page_table: PageTable
) -> Sequence:
    """Take the pages of the newest running sequence, and let it wait until there is room for it again.

    The scheduler calls this when an older sequence needs a page and none is free. Change all four arguments in place.
    Afterwards the sequence
        1. no longer runs, and has no row;
        2. owns no page: those that nobody else owns are free;
        3. has nothing computed (`num_computed`), since its keys and values are gone;
        4. still has all its tokens (`token_ids`), those of its output too: they were sent to a user already. When it
           comes back, all of them are computed like a prompt;
        5. is the first to come back: whoever waits arrived later than it.

    Args:
        running: sequences with pages, oldest first; at least one.
        waiting: sequences without pages, oldest first.
        rows: the row of the page table of each running sequence.
        page_table: the pages.

    Returns:
        The sequence that was preempted.

    Example: the pool has 3 pages of 4 tokens, and two sequences hold all of them.

        >>> from mini_engine.sampling_params import SamplingParams
        >>> def make(tokens):
        ...     return Sequence(
        ...         tokens, SamplingParams(), seed=0, eos_token_ids=(), max_model_len=99, detokenizer=None
        ...     )
        >>> old, new = make([5, 6, 7]), make([1, 2, 3, 4, 5])
        >>> table = PageTable(num_pages=3, page_size=4, max_sequences=2)
        >>> running, waiting, rows = [old, new], deque(), {old: table.allocate(), new: table.allocate()}
        >>> all(table.reserve(rows[s], len(s.token_ids)) for s in running), table.num_free_pages
        (True, 0)
        >>> preempt(running, waiting, rows, table) is new
        True
        >>> running == [old], list(waiting) == [new], rows == {old: 0}, table.num_free_pages
        (True, True, True, 2)
    """
    raise NotImplementedError


def share_prefix(table: PageTable, row: int, donor: int, num_tokens: int) -> None:
    """Let a row without pages begin with the pages that hold the first tokens of another row.

    Both rows own these pages from now on, and neither knows who was first. If the last token is in the middle of a
    page, that page is shared too: `copy_on_write` will part them when one of them writes. Pages of the donor behind
    it are its own affair. Nothing is taken from the free list, and the donor's row stays as it is.

    The state of the table is public. You need of it:
        table.pages(row): a view of the row's pages, in order of position
        table.table[row, i], table.counts[row]: the row's page number i; how many pages it has
        table.refcounts[page]: how many rows own a page
        table.pages_for(num_tokens): the pages that so many tokens fill, the last perhaps in part

    Args:
        table: the page table.
        row: a row from `allocate`, still without pages.
        donor: the row whose first tokens are the same.
        num_tokens: how many are, 1 or more; the donor has pages for them.

    Example: 6 tokens are 2 pages of 4, the second one half.

        >>> table = PageTable(num_pages=6, page_size=4, max_sequences=2)
        >>> donor, row = table.allocate(), table.allocate()
        >>> table.reserve(donor, 10)
        True
        >>> share_prefix(table, row, donor, num_tokens=6)
        >>> table.pages(donor).tolist(), table.pages(row).tolist(), table.refcounts[:4].tolist()
        ([0, 1, 2], [0, 1], [2, 2, 1, 0])
    """
    raise NotImplementedError


def copy_on_write(table: PageTable, row: int, first: int, end: int) -> list[tuple[int, int]] | None:
    """Before a row writes tokens, give it pages of its own where it shares them.

    The row is about to write the tokens with indices first, first + 1, ..., end - 1. Index i is in its page number
    i // page_size. Every page that it will write to and that has another owner is replaced in its row by a free page:
    the shared page has one owner fewer, the new one has one. Pages that it owns alone stay, and so do shared pages
    that it will only read. The other owners notice nothing.

    You need of the table, beside what `share_prefix` needed:
        table.free_pages: a list of the pages without an owner; pop from its end
        table.release(page): one owner of the page fewer, and back on the free list without any

    Args:
        table: the page table.
        row: the row that writes. It has pages for `end` tokens.
        first: index of the first token written.
        end: index behind the last one; more than first.

    Returns:
        Pairs (old page, new page) in order of position; the engine copies their contents before the step writes. An
        empty list if there is nothing to copy. None if fewer pages are free than it takes; then nothing has changed.

    Example: a page with two owners. The first who writes gets a copy; then the second owns the old page alone.

        >>> table = PageTable(num_pages=4, page_size=4, max_sequences=2)
        >>> a, b = table.allocate(), table.allocate()
        >>> table.reserve(a, 3)
        True
        >>> table.table[b, 0], table.counts[b], table.refcounts[0] = 0, 1, 2
        >>> copy_on_write(table, b, first=3, end=4), copy_on_write(table, a, first=3, end=4)
        ([(0, 1)], [])
        >>> table.pages(a).tolist(), table.pages(b).tolist(), table.refcounts[:2].tolist()
        ([0], [1], [1, 1])
    """
    raise NotImplementedError


def evict_pages(table: PageTable, row: int, first_position: int, next_query: int, window: int) -> int:
    """Give up the pages of a row that no query will ever see again.

    Every layer has a sliding window: a query at position q sees the keys at q - window + 1 to q. Queries only move
    on, so what the next query cannot see is lost to all. Pages go from the front of the row, and only whole ones:
    a page stays as long as one of its keys is still seen. Those that stay move up in the row, in order, so that the
    row begins with them. A page that has another owner stays with that owner.

    Args:
        table: the page table; you need `pages`, `table`, `counts`, `page_size` and `release`.
        row: the row of the sequence.
        first_position: position of the first key in the row's first page; above 0 if pages were given up before.
        next_query: position of the next token that will be computed, at least first_position.
        window: keys that a query may see, its own included.

    Returns:
        How many pages were given up.

    Example: pages of 4 hold positions 0 to 9. The query at position 10 sees the last 5 positions, 6 to 10: the page
    with positions 4 to 7 is still needed, the one before it is not.

        >>> table = PageTable(num_pages=6, page_size=4, max_sequences=1)
        >>> row = table.allocate()
        >>> table.reserve(row, 10), table.pages(row).tolist()
        (True, [0, 1, 2])
        >>> evict_pages(table, row, first_position=0, next_query=10, window=5)
        1
        >>> table.pages(row).tolist(), table.num_free_pages
        ([1, 2], 4)
        >>> evict_pages(table, row, first_position=4, next_query=10, window=5)
        0
    """
    raise NotImplementedError


def reorder_beams(table: PageTable, rows: ListLike[int], parents: ListLike[int]) -> None:
    """Challenge: the page table of beam search.

    Beam search writes several texts at once, the beams, and after every token keeps the best continuations, whichever
    beam they come from: one beam goes on twice, another is given up. Afterwards the row rows[i] holds the text that
    rows[parents[i]] held before. All rows change at the same moment, so a row may be the parent of others and get a
    parent of its own. No key is copied: the row gets its parent's pages, and `copy_on_write` parts them later.

    Every page ends with as many owners as there are rows that hold it, and is on the free list if that is none. A page
    that is still needed is never on the free list in between. Rows that are not beams may share pages with them, and
    keep them. No row is freed.

    Args:
        table: the page table; `refcounts`, `release`, `pages`, `table` and `counts` are what you need.
        rows: the row of each beam; their numbers of pages may differ.
        parents: for each beam the index in `rows` of the beam that it continues.

    Example: the first beam goes on twice, in its own row and in that of the second, whose last page is free then.

        >>> table = PageTable(num_pages=6, page_size=4, max_sequences=2)
        >>> a, b = table.allocate(), table.allocate()
        >>> table.reserve(a, 8), table.reserve(b, 4)
        (True, True)
        >>> reorder_beams(table, rows=[a, b], parents=[0, 0])
        >>> table.pages(a).tolist(), table.pages(b).tolist(), table.refcounts[:3].tolist()
        ([0, 1], [0, 1], [2, 2, 0])
    """
    raise NotImplementedError
