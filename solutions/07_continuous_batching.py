"""Homework of chapter 07: the scheduler's decisions, its loop, and shared pages.

Seven of these functions are parts of the engine. Once their checks pass, the command
`mini-engine generate --homework` runs a real model on them. None of them touches a
tensor: they make decisions and keep track of pages. `make_scheduler` and `compute` are
given, so that you can try your functions on a scheduler without a model.
"""

from collections import OrderedDict
from collections.abc import Sequence as ListLike
from typing import Any

import numpy as np
from jaxtyping import Int, Int32

from mini_engine.kv_cache.page_table import PageTable
from mini_engine.kv_cache.prefix_sharing import ROOT, Children
from mini_engine.parts import Parts
from mini_engine.request import Request, Running
from mini_engine.sampling_params import SamplingParams
from mini_engine.scheduler import Schedule, Scheduler


def make_scheduler(
    prompts: ListLike[ListLike[int]],
    *,
    num_pages: int,
    page_size: int = 4,
    budget: int = 8,
    max_tokens: int = 8,
    **options: Any,
) -> Scheduler:
    """Make a scheduler with one waiting request per prompt, named "0", "1" and so on.

    Args:
        prompts: token ids of each request, the oldest request first.
        num_pages: pages in the pool.
        page_size: tokens per page.
        budget: the token budget of a step.
        max_tokens: tokens of each output.
        options: further options of the `Scheduler`.
    """
    defaults: dict[str, Any] = {"parts": Parts(), "max_model_len": 99}
    defaults |= {"window": None, "prefix_sharing": False}
    table = PageTable(num_pages, page_size, min(8, budget))
    scheduler = Scheduler(table, max_num_batched_tokens=budget, **(defaults | options))
    params = SamplingParams(max_tokens=max_tokens)
    for number, prompt in enumerate(prompts):
        max_len = len(prompt) + max_tokens
        request = Request(str(number), list(prompt), params, 0, max_len, (), number)
        scheduler.add(request)
    return scheduler


def compute(scheduler: Scheduler, step: Schedule, collect: bool = True) -> None:
    """Count a step as computed, as the engine would; every sampled token is a 7.

    Args:
        scheduler: the scheduler.
        step: the step.
        collect: whether the host reads the sampled tokens at once. Otherwise they stay
            on the device.
    """
    running, rows = scheduler.running, step.rows
    running.num_computed[rows] += step.num_new
    samples = rows[running.num_computed[rows] == running.num_scheduled[rows]]
    running.num_scheduled[samples] += 1
    if collect:
        running.append(samples, np.full(len(samples), 7))


def share_budget(pending: Int[np.ndarray, " B"], budget: int) -> Int[np.ndarray, " B"]:
    """Divide the tokens of one step among the running requests.

    `pending[b]` is the number of tokens of request b that are not computed yet. A
    request with one pending token decodes. Any other request is still computing its
    prompt, or, after a preemption, its prompt and earlier output. What must hold:
        - Every decode gets its token, wherever it is in the array, so no output stalls
          behind a prompt.
        - The rest of the budget goes to the prompts in the order of the array: a prompt
          gets tokens only after all prompts before it are complete. So at most one
          prompt is split, and gets a chunk.
        - No token of the budget is left while a request could use it.

    A step may have hundreds of requests, so the engine's version has no loop over them;
    the grader accepts a loop. The array belongs to the caller: do not change it.

    Args:
        pending: [B] at least 1 each, the oldest request first; B may be 0.
        budget: the token budget of the step; at least B.

    Returns:
        [B] integers: tokens of each request that the step computes; 0 for a prompt that
        has to wait.

    Example: two decodes take one token each. Of the other six, the older prompt gets
    five and the newer one gets one.

        >>> share_budget(np.array([5, 1, 7, 1]), budget=8)
        array([5, 1, 1, 1])
    """
    decodes = pending == 1
    prompts = np.where(decodes, 0, pending)
    # Set the decodes' tokens aside first: a long prompt before them could take the
    # whole budget.
    left = budget - int(decodes.sum())
    taken = np.cumsum(prompts) - prompts  # tokens that all earlier prompts need
    return np.where(decodes, 1, np.clip(left - taken, 0, prompts))


def admit(
    num_tokens: int,
    num_pages: int,
    *,
    budget: int,
    free_pages: int,
    free_rows: int,
) -> int:
    """Decide how many tokens of the oldest waiting request the step computes.

    The request needs a row of the page table, all its pages, and at least one token of
    the budget. A prompt that is longer than the budget is admitted all the same, and
    starts with a chunk.

    Args:
        num_tokens: tokens that the request has to compute, at least 1.
        num_pages: free pages that it needs; 0 if it shares them all.
        budget: tokens that the step has left; may be 0.
        free_pages: pages that may be taken. The scheduler has subtracted its watermark,
            one page for each request that was running before the step, so the number
            may be negative; then no request is admitted, not even one that needs no
            page.
        free_rows: rows of the page table that are free.

    Returns:
        Tokens of the request that the step computes; 0 if the request has to wait.

    Example: nine tokens fill three pages of four slots. Five tokens of the budget are
    left.

        >>> admit(9, 3, budget=5, free_pages=6, free_rows=8)
        5
        >>> admit(9, 3, budget=5, free_pages=2, free_rows=8)
        0
    """
    has_room = free_rows >= 1 and num_pages <= free_pages
    return max(0, min(num_tokens, budget)) if has_room else 0


def preempt(
    running: Running,
    waiting: OrderedDict[Request, None],
    page_table: PageTable,
) -> Request:
    """Preempt the newest running request, which then waits without its pages.

    The scheduler calls this function when an older request needs a page and none is
    free. Change all three arguments in place. Afterwards
        - the request has left its row (`Running.leave` describes what happens to its
          tokens);
        - the row and its pages are back in the page table, but a page that another row
          shares is still in use;
        - the request waits before all others, because they arrived later;
        - the request has all its tokens. Its output has already been sent to a user, so
          it must not change. When the request is admitted again, all its tokens are
          computed as if they were its prompt.

    Args:
        running: the running requests; at least one. `running.order` has their rows, the
            oldest request first.
        waiting: the queue of requests without pages, the next one first. The requests
            are the keys; all values are None.
        page_table: the pages of all rows.

    Returns:
        The request that was preempted.

    Example: two requests run. The newer one is preempted after the first token of its
    output.

        >>> prompts = [[5, 6, 7], [1, 2, 3, 4, 5]]
        >>> scheduler = make_scheduler(prompts, num_pages=5, max_tokens=2)
        >>> compute(scheduler, scheduler.schedule())
        >>> running, waiting = scheduler.running, scheduler.waiting
        >>> table = scheduler.page_table
        >>> running.order.tolist(), list(waiting), table.num_free_pages
        ([0, 1], [], 2)
        >>> request = preempt(running, waiting, table)
        >>> request.request_id, request.token_ids
        ('1', [1, 2, 3, 4, 5, 7])
        >>> running.order.tolist(), list(waiting) == [request], table.num_free_pages
        ([0], True, 4)
    """
    row = int(running.order[-1])
    request = running.leave(row)
    page_table.release(row)  # decrements refcounts: a shared page stays in use
    waiting[request] = None
    waiting.move_to_end(request, last=False)
    return request


def schedule(scheduler: Scheduler) -> Schedule | None:
    """Choose the tokens of the next step and take their pages: the scheduling loop.

    This function is the heart of the chapter. What must hold:
        - Running requests come first. Those that have tokens to compute
          (`scheduler.pending`) share the whole budget as `scheduler.parts.share_budget`
          divides it. A request that gets no token is not in the step.
        - Every token of the step has a page (`scheduler.reserve`). If the pool has too
          few pages, the newest running request is preempted (`scheduler.preempt`), then
          the next newest, until there are enough. No more requests are preempted than
          necessary. After each preemption the remaining requests share the whole budget
          again.
        - A preempted request is computed again from its tokens, so the host must know
          all of them. While sampled tokens are still on the device
          (`scheduler.running.has_tokens_in_flight`), preempt nothing and return None.
          The engine then collects those tokens, which may end requests, and calls the
          function again.
        - Waiting requests are admitted (`scheduler.admit`) with the part of the budget
          that the running requests leave, but not in a step that preempted a request,
          because the pool is too small already.
        - In the step, requests with one new token come first, then those with more.
          Each group is in order of age. `StepBatch` needs this order.

    The docstrings of `Scheduler.pending`, `reserve`, `preempt` and `admit` and of
    `Schedule` say what they take and return. `admit` appends the pages that have to be
    copied to a list that you pass; the list belongs in the schedule. It gives each
    request that it admits a row, which `scheduler.running.row_of` finds.

    Args:
        scheduler: the queues, the page table, the budget and the other parts.

    Returns:
        The step, without requests if nothing can be computed; None if tokens have to be
        collected first.

    Example: the budget is 6. Request 0 has 3 tokens, and request 1 starts with a chunk.
    In the next step request 0 decodes.

        >>> prompts = [[5, 6, 7], [1, 2, 3, 4, 5, 6, 7, 8, 9]]
        >>> scheduler = make_scheduler(prompts, num_pages=12, budget=6)
        >>> step = schedule(scheduler)
        >>> [request.request_id for request in step.admitted]
        ['0', '1']
        >>> step.rows.tolist(), step.num_new.tolist()
        ([0, 1], [3, 3])
        >>> compute(scheduler, step)
        >>> step = schedule(scheduler)
        >>> step.rows.tolist(), step.num_new.tolist(), step.num_tokens
        ([0, 1], [1, 5], 6)
    """
    preempted: list[Request] = []
    copies: list[tuple[int, int]] = []
    while True:
        rows, pending = scheduler.pending()  # both change with each preemption
        num_new = scheduler.parts.share_budget(pending, scheduler.budget)
        rows, num_new = rows[num_new > 0], num_new[num_new > 0]
        if scheduler.reserve(rows, num_new):
            break
        if scheduler.running.has_tokens_in_flight:
            return None
        preempted.append(scheduler.preempt())
    admitted: list[Request] = []
    num_shared = 0
    if not preempted:
        left = scheduler.budget - int(num_new.sum())
        admitted, shares, num_shared = scheduler.admit(left, copies)
        # Admitted requests are the newest, so their rows are the last ones.
        num_before = len(scheduler.running) - len(admitted)
        rows = np.append(rows, scheduler.running.order[num_before:])
        # Appending an empty list would turn the integers into floats.
        num_new = np.append(num_new, shares).astype(np.int64)
    # Stable, so that each group stays in order of age.
    order = np.argsort(num_new > 1, kind="stable")
    rows, num_new, num_tokens = rows[order], num_new[order], int(num_new.sum())
    return Schedule(rows, num_new, num_tokens, admitted, preempted, num_shared, copies)


def match_prefix(
    children: Children,
    token_ids: Int32[np.ndarray, " n"],
    page_size: int,
) -> list[int]:
    """Find the pages that hold the beginning of a prompt.

    The full pages of all requests form a tree. The keys and values in a page depend on
    the page's own tokens and on all tokens before them. So a page is identified by its
    parent, which is the page before it, and by its own tokens:
    `children[parent][tokens]`, where `tokens` are the bytes of the page's token ids, as
    `token_ids[start:end].tobytes()` returns them. The first page of each request is a
    child of `ROOT`. A page that no other page follows may have no entry in `children`,
    and in an empty tree `ROOT` has no entry either.

    Only full pages are in the tree, but the prompt may end inside a page. Read each
    token of the prompt at most once, and look up each page once: thousands of pages may
    have the same parent.

    Args:
        children: for each page, and for `ROOT`, the pages that follow it.
        token_ids: [n] int32, the prompt.
        page_size: tokens per page.

    Returns:
        The pages of the longest chain that starts at `ROOT` and holds the first tokens
        of the prompt, in order of position.

    Example: pages of 2 tokens. Page 4 holds [5, 6], and the pages 9 and 1 follow it.

        >>> pairs = ([5, 6], [7, 8], [5, 5])
        >>> a, b, c = (np.array(pair, dtype=np.int32).tobytes() for pair in pairs)
        >>> children = {ROOT: {a: 4}, 4: {b: 9, c: 1}}
        >>> prompt = np.array([5, 6, 5, 5, 5], dtype=np.int32)
        >>> match_prefix(children, prompt, page_size=2)
        [4, 1]
        >>> match_prefix(children, prompt[2:], page_size=2)
        []
    """
    pages: list[int] = []
    parent = ROOT
    for end in range(page_size, len(token_ids) + 1, page_size):
        tokens = token_ids[end - page_size : end].tobytes()
        page = children.get(parent, {}).get(tokens)
        if page is None:
            break
        pages.append(page)
        parent = page
    return pages


def copy_on_write(
    table: PageTable,
    row: int,
    first: int,
    end: int,
) -> list[tuple[int, int]]:
    """Replace the shared pages of a row to which the row is about to write.

    The row is about to write the tokens with indices first, first + 1, ..., end - 1,
    counted from the start of its first page. Replace every page that it writes to and
    that has another owner by a free page, in this row only (`table.replace`). Pages
    that it owns alone stay, and so do shared pages that it only reads. The rows of the
    other owners do not change.

    Args:
        table: the page table, with a free page for each page that has to be replaced.
            `table.pages(row)` are the row's pages, and `table.refcounts[page]` is a
            page's number of owners.
        row: the row that writes. It has pages for `end` tokens.
        first: index of the first token written.
        end: index of the last token written, plus 1; more than `first`.

    Returns:
        Pairs (old page, new page) in order of position. The engine copies the contents
        of each old page before the step writes.

    Example: two rows own one page. The first row that writes gets a copy, and then the
    other row owns the old page alone.

        >>> table = PageTable(num_pages=4, page_size=4, max_rows=2)
        >>> a, b = table.allocate(), table.allocate()
        >>> table.take(np.array([a]), np.array([1]))
        >>> table.share(b, table.pages(a))
        >>> copy_on_write(table, b, first=3, end=4)
        [(0, 1)]
        >>> copy_on_write(table, a, first=3, end=4)
        []
        >>> table.pages(a).tolist(), table.pages(b).tolist(), table.refcounts.tolist()
        ([0], [1], [1, 1, 0, 0])
    """
    written = range(first // table.page_size, (end - 1) // table.page_size + 1)
    shared = table.refcounts[table.pages(row)] > 1
    # `replace` decrements the refcount, so the last of several writers keeps the page.
    return [table.replace(row, index) for index in written if shared[index]]


def pages_to_evict(
    num_computed: Int[np.ndarray, " B"],
    num_evicted: Int[np.ndarray, " B"],
    window: int,
    page_size: int,
) -> Int[np.ndarray, " B"]:
    """Count the pages at the front of each request that no query will see again.

    Every layer has a sliding window: a query at position q sees the keys at q - window
    + 1 to q. Positions only grow, so a key that the next query cannot see is never seen
    again. A page stays as long as one of its keys is visible. The arrays belong to the
    caller: do not change them.

    Args:
        num_computed: [B] tokens of each request that are computed, which is also the
            position of its next query.
        num_evicted: [B] tokens of each request whose pages were returned before, which
            is also the position of the first key in its first page. A multiple of
            `page_size`, and at most `num_computed`.
        window: keys that a query sees, including its own.
        page_size: tokens per page.

    Returns:
        [B] integers: pages that each request can return, 0 if none.

    Example: pages of 4. The query at position 10 sees the last five positions, 6 to 10.
    The page with positions 0 to 3 is no longer needed, but the page with positions 4 to
    7 is. A second request returned its first page earlier.

        >>> num_computed, num_evicted = np.array([10, 10]), np.array([0, 4])
        >>> pages_to_evict(num_computed, num_evicted, window=5, page_size=4)
        array([1, 0])
    """
    oldest_visible = num_computed - window + 1
    # A window that is not full yet hides nothing, hence the maximum.
    hidden = np.maximum(oldest_visible - num_evicted, 0)
    return hidden // page_size


def reorder_beams(
    table: PageTable,
    rows: ListLike[int],
    parents: ListLike[int],
) -> None:
    """Reorder the rows of a page table for beam search (the challenge).

    Beam search extends several outputs, the beams, at once. After every token it keeps
    the best continuations, whichever beam they come from, so one beam may be continued
    twice and another dropped. Afterwards the row `rows[i]` holds the output that
    `rows[parents[i]]` held before. All rows change at the same moment, and two beams
    may even swap. No key is copied: a row gets the pages of its parent, and
    `copy_on_write` separates them later.

    Use only the methods of the table. For a moment a row may own a page twice, which
    chapter 06 excluded: `share` and `drop_front` allow that, as long as no single call
    appends or removes a page twice. A page whose last owner has returned it to the pool
    can no longer be shared, even if the next line of your code needs it. No row is
    free, so you cannot allocate a spare one, but each row has room for the pages of two
    beams. Rows that are not beams may share pages with beams, and keep them.

    Args:
        table: the page table.
        rows: the row of each beam; their numbers of pages may differ.
        parents: for each beam the index in `rows` of the beam that it continues.

    Example: the first beam is continued twice, in its own row and in the second row,
    whose old page becomes free.

        >>> table = PageTable(num_pages=6, page_size=4, max_rows=2)
        >>> a, b = table.allocate(), table.allocate()
        >>> table.take(np.array([a, b]), np.array([2, 1]))
        >>> reorder_beams(table, rows=[a, b], parents=[0, 0])
        >>> table.pages(a).tolist(), table.pages(b).tolist()
        ([0, 1], [0, 1])
        >>> table.refcounts.tolist()
        [2, 2, 0, 0, 0, 0]
    """
    # Views of the old pages, which stay valid because `share` appends after them.
    before = [table.pages(row) for row in rows]
    for row, parent in zip(rows, parents, strict=True):
        table.share(row, before[parent])
    # Only now, so that no page is without an owner in between.
    for row, pages in zip(rows, before, strict=True):
        table.drop_front(row, len(pages))
