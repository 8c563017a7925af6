"""Right and wrong answers to the homework of chapter 07. They test its grader."""

from dataclasses import replace

import numpy as np

from book.grading import right, solution, wrong
from mini_engine.kv_cache.prefix_sharing import ROOT
from mini_engine.scheduler import Schedule

reference = solution("07_continuous_batching")


# share_budget -------------------------------------------------------------------------------------------------------


@right("share_budget")
def token_by_token(pending, budget):
    """Allocate one token at a time: to the first decode that has none, then to the first prompt that can use it."""
    shares = np.zeros_like(pending)
    for i in sorted(range(len(pending)), key=lambda i: pending[i] > 1):
        while budget and shares[i] < pending[i]:
            shares[i] += 1
            budget -= 1
    return shares


@right("share_budget")
def by_differences_of_sums(pending, budget):
    decodes = pending == 1
    upto = np.minimum(np.cumsum(np.where(decodes, 0, pending)), budget - decodes.sum())
    return np.diff(upto, prepend=0) + decodes


@right("share_budget")
def in_a_loop(pending, budget):
    left, shares = budget - int(np.count_nonzero(pending == 1)), []
    for n in pending.tolist():
        shares.append(1 if n == 1 else min(n, left))
        left -= shares[-1] if n > 1 else 0
    return np.array(shares, dtype=np.int32)


@wrong("share_budget", fails="test_decodes_get_a_token_each")
def a_list(pending, budget):
    return reference.share_budget(pending, budget).tolist()


@wrong("share_budget", fails="test_decodes_get_a_token_each")
def decodes_are_forgotten(pending, budget):
    return np.where(pending == 1, 0, reference.share_budget(pending, budget))


@wrong("share_budget", fails="test_decodes_get_a_token_each")
def an_equal_part_for_each(pending, budget):
    return np.full(len(pending), budget // max(1, len(pending)))


@wrong("share_budget", fails="test_decodes_get_a_token_each")
def pending_is_used_up(pending, budget):
    shares = reference.share_budget(pending, budget)
    pending -= shares
    return shares


@wrong("share_budget", fails="test_a_prompt_is_cut")
def whole_prompts_only(pending, budget):
    shares, left = pending.copy(), budget - int((pending == 1).sum())
    for i, n in enumerate(pending.tolist()):
        shares[i] = n if n == 1 or n <= left else 0
        left -= int(shares[i]) if n > 1 else 0
    return shares


@wrong("share_budget", fails="test_a_prompt_is_cut")
def never_cut(pending, budget):
    return pending.copy()


@wrong("share_budget", fails="test_a_mixed_step")
def prefill_or_decode(pending, budget):
    """Compute prompts or decodes in a step, never both."""
    if pending.max(initial=1) == 1:
        return pending.copy()
    prompts = np.where(pending > 1, pending, 0)
    return np.clip(budget - (np.cumsum(prompts) - prompts), 0, prompts)


@wrong("share_budget", fails="test_a_mixed_step")
def decode_or_prefill(pending, budget):
    return (pending == 1).astype(int) if (pending == 1).any() else reference.share_budget(pending, budget)


@wrong("share_budget", fails="test_a_mixed_step")
def decodes_for_free(pending, budget):
    return np.where(pending == 1, 1, reference.share_budget(np.where(pending == 1, 0, pending), budget))


@wrong("share_budget", fails="test_a_decode_behind_a_prompt")
def in_order_of_age_alone(pending, budget):
    return np.clip(budget - (np.cumsum(pending) - pending), 0, pending)


@wrong("share_budget", fails="test_a_decode_behind_a_prompt")
def decodes_in_front(pending, budget):
    """Return the right numbers in the wrong order."""
    shares = reference.share_budget(pending, budget)
    return shares[np.argsort(pending > 1, kind="stable")]


@wrong("share_budget", fails="test_prompts_in_order_of_age")
def short_prompts_first(pending, budget):
    order, shares = np.argsort(pending, kind="stable"), pending.copy()
    shares[order] = reference.share_budget(pending[order], budget)
    return shares


@wrong("share_budget", fails="test_prompts_in_order_of_age")
def a_prompt_that_fits_overtakes(pending, budget):
    """Reserve a token for every later prompt that would fit."""
    shares = reference.share_budget(pending, budget)
    cut = np.flatnonzero((shares > 1) & (shares < pending))
    for i in cut[:1].tolist():
        for j in range(i + 1, len(pending)):
            if 1 < pending[j] < shares[i]:
                shares[i] -= pending[j]
                shares[j] = pending[j]
    return shares


@wrong("share_budget", fails="test_prompts_in_order_of_age")
def an_equal_chunk_for_each_prompt(pending, budget):
    prompts = pending > 1
    left = budget - int((~prompts).sum())
    return np.where(prompts, np.minimum(pending, left // max(1, int(prompts.sum()))), 1)


@wrong("share_budget", fails="test_prompts_in_order_of_age")
def the_budget_for_each_prompt(pending, budget):
    return np.where(pending == 1, 1, np.minimum(pending, budget - int((pending == 1).sum())))


@wrong("share_budget", fails="test_prompts_in_order_of_age")
def the_prompt_itself_counts_as_taken(pending, budget):
    """Use cumsum without subtracting the prompt's own tokens."""
    prompts = np.where(pending == 1, 0, pending)
    left = budget - int((pending == 1).sum())
    first = np.cumsum(prompts > 0) == 1
    return np.where(
        pending == 1, 1, np.where(first, np.minimum(prompts, left), np.clip(left - prompts.cumsum(), 0, prompts))
    )


@wrong("share_budget", fails="test_nothing_left")
def at_least_one_for_each(pending, budget):
    return np.maximum(1, reference.share_budget(pending, budget))


@wrong("share_budget", fails="test_nothing_left")
def negative_shares(pending, budget):
    prompts = np.where(pending == 1, 0, pending)
    left = budget - int((pending == 1).sum())
    return np.where(pending == 1, 1, np.minimum(left - (np.cumsum(prompts) - prompts), prompts))


@wrong("share_budget", fails="test_no_requests")
def not_for_an_empty_array(pending, budget):
    assert pending.max() > 0
    return reference.share_budget(pending, budget)


# admit --------------------------------------------------------------------------------------------------------------


@right("admit")
def refusals_first(num_tokens, num_pages, *, budget, free_pages, free_rows):
    if budget <= 0 or free_rows <= 0:
        return 0
    if free_pages < num_pages:
        return 0
    return budget if num_tokens > budget else num_tokens


@wrong("admit", fails="test_room_for_all_of_it")
def yes_or_no(num_tokens, num_pages, *, budget, free_pages, free_rows):
    return budget > 0 and free_rows > 0 and num_pages <= free_pages


@wrong("admit", fails="test_room_for_all_of_it")
def all_that_is_left(num_tokens, num_pages, *, budget, free_pages, free_rows):
    return budget if free_rows > 0 and num_pages <= free_pages else 0


@wrong("admit", fails="test_no_row_is_free")
def rows_forgotten(num_tokens, num_pages, *, budget, free_pages, free_rows):
    return reference.admit(num_tokens, num_pages, budget=budget, free_pages=free_pages, free_rows=1)


@wrong("admit", fails="test_room_for_all_of_it")
def the_last_page_is_never_given(num_tokens, num_pages, *, budget, free_pages, free_rows):
    return reference.admit(num_tokens, num_pages + 1, budget=budget, free_pages=free_pages, free_rows=free_rows)


@wrong("admit", fails="test_pages_run_out")
def any_page_will_do(num_tokens, num_pages, *, budget, free_pages, free_rows):
    """Start with one page, in the hope of more later."""
    return reference.admit(num_tokens, min(1, num_pages), budget=budget, free_pages=free_pages, free_rows=free_rows)


@wrong("admit", fails="test_no_page_is_needed")
def a_page_must_be_free(num_tokens, num_pages, *, budget, free_pages, free_rows):
    shares = reference.admit(num_tokens, num_pages, budget=budget, free_pages=free_pages, free_rows=free_rows)
    return shares if free_pages > 0 else 0


@wrong("admit", fails="test_a_long_prompt_begins_with_a_chunk")
def whole_prompts(num_tokens, num_pages, *, budget, free_pages, free_rows):
    if num_tokens > budget:
        return 0
    return reference.admit(num_tokens, num_pages, budget=budget, free_pages=free_pages, free_rows=free_rows)


@wrong("admit", fails="test_a_long_prompt_begins_with_a_chunk")
def no_budget(num_tokens, num_pages, *, budget, free_pages, free_rows):
    return reference.admit(num_tokens, num_pages, budget=10**9, free_pages=free_pages, free_rows=free_rows)


@wrong("admit", fails="test_no_token_is_left")
def always_a_token(num_tokens, num_pages, *, budget, free_pages, free_rows):
    return reference.admit(num_tokens, num_pages, budget=max(1, budget), free_pages=free_pages, free_rows=free_rows)


# preempt ------------------------------------------------------------------------------------------------------------


@right("preempt")
def the_queue_is_made_anew(running, waiting, page_table):
    request = running.requests[running.order[-1]]
    row = running.row_of(request)
    later = list(waiting)
    waiting.clear()
    waiting.update(dict.fromkeys([request, *later]))
    page_table.release(row)
    return running.leave(row)


def preempted(running, waiting, page_table, row, *, first=True):
    """The reference for another row, or another end of the queue."""
    request = running.leave(int(row))
    page_table.release(int(row))
    waiting[request] = None
    if first:
        waiting.move_to_end(request, last=False)
    return request


@wrong("preempt", fails="test_the_newest_goes")
def the_oldest(running, waiting, page_table):
    return preempted(running, waiting, page_table, running.order[0])


@wrong("preempt", fails="test_the_newest_goes")
def the_highest_row(running, waiting, page_table):
    """Mistake a row's number for its age."""
    return preempted(running, waiting, page_table, running.order.max())


@wrong("preempt", fails="test_the_newest_goes")
def the_one_with_most_pages(running, waiting, page_table):
    return preempted(running, waiting, page_table, max(running.order, key=lambda row: page_table.counts[row]))


@wrong("preempt", fails="test_the_newest_goes")
def it_still_runs(running, waiting, page_table):
    request = running.requests[running.order[-1]]
    page_table.release(int(running.order[-1]))
    waiting[request] = None
    waiting.move_to_end(request, last=False)
    return request


@wrong("preempt", fails="test_the_newest_goes")
def nothing_returned(running, waiting, page_table):
    preempted(running, waiting, page_table, running.order[-1])


@wrong("preempt", fails="test_its_pages_are_free")
def pages_kept(running, waiting, page_table):
    request = running.leave(int(running.order[-1]))
    waiting[request] = None
    waiting.move_to_end(request, last=False)
    return request


@wrong("preempt", fails="test_its_pages_are_free")
def row_kept(running, waiting, page_table):
    row = int(running.order[-1])
    request = running.leave(row)
    page_table.truncate(row, 0)
    waiting[request] = None
    waiting.move_to_end(request, last=False)
    return request


@wrong("preempt", fails="test_shared_pages_stay")
def shared_pages_freed(running, waiting, page_table):
    """Set the refcounts to 1, so that the pages really become free."""
    page_table.refcounts[page_table.pages(int(running.order[-1]))] = 1
    return preempted(running, waiting, page_table, running.order[-1])


@wrong("preempt", fails="test_it_keeps_its_tokens")
def starts_over(running, waiting, page_table):
    request = preempted(running, waiting, page_table, running.order[-1])
    request.token_ids = list(request.prompt_token_ids)
    return request


@wrong("preempt", fails="test_it_keeps_its_tokens")
def output_becomes_prompt(running, waiting, page_table):
    request = preempted(running, waiting, page_table, running.order[-1])
    request.prompt_token_ids = request.token_ids
    return request


@wrong("preempt", fails="test_it_keeps_its_tokens")
def the_last_token_is_not_computed_yet(running, waiting, page_table):
    request = preempted(running, waiting, page_table, running.order[-1])
    request.token_ids.pop()
    return request


@wrong("preempt", fails="test_it_waits_first")
def a_new_queue(running, waiting, page_table):
    """Bind a new queue to the name: the caller's queue is unchanged."""
    row = int(running.order[-1])
    request = running.leave(row)
    page_table.release(row)
    waiting = {request: None, **waiting}
    return next(iter(waiting))


@wrong("preempt", fails="test_it_waits_first")
def it_waits_last(running, waiting, page_table):
    return preempted(running, waiting, page_table, running.order[-1], first=False)


# schedule -----------------------------------------------------------------------------------------------------------


@right("schedule")
def with_lists(scheduler):
    """Do the same with plain lists, one pair per request."""
    preempted, copies = [], []

    def shares():
        rows, pending = scheduler.pending()
        given = scheduler.parts.share_budget(pending, scheduler.budget)
        return [pair for pair in zip(rows.tolist(), given.tolist(), strict=True) if pair[1]]

    def arrays(work):
        return tuple(np.array([pair[i] for pair in work], dtype=np.int64) for i in (0, 1))

    work = shares()
    while not scheduler.reserve(*arrays(work)):
        if scheduler.running.has_tokens_in_flight:
            return None
        preempted += [scheduler.preempt()]
        work = shares()
    admitted, num_shared = [], 0
    if not preempted:
        left = scheduler.budget - sum(n for _, n in work)
        admitted, num_new, num_shared = scheduler.admit(left, copies)
        work += [(scheduler.running.row_of(q), n) for q, n in zip(admitted, num_new, strict=True)]
    work = [pair for pair in work if pair[1] == 1] + [pair for pair in work if pair[1] > 1]
    return Schedule(*arrays(work), sum(n for _, n in work), admitted, preempted, num_shared, copies)


@right("schedule")
def by_recursion(scheduler):
    def fit(preempted):
        rows, pending = scheduler.pending()
        num_new = scheduler.parts.share_budget(pending, scheduler.budget)
        chosen = num_new > 0
        if scheduler.reserve(rows[chosen], num_new[chosen]):
            return rows[chosen], num_new[chosen], preempted
        if scheduler.running.has_tokens_in_flight:
            return None
        return fit([*preempted, scheduler.preempt()])

    found = fit([])
    if found is None:
        return None
    rows, num_new, preempted = found
    copies = []
    left = scheduler.budget - int(num_new.sum())
    admitted, shares, shared = ([], [], 0) if preempted else scheduler.admit(left, copies)
    new_rows = [scheduler.running.row_of(request) for request in admitted]
    rows, num_new = np.array([*rows, *new_rows], dtype=int), np.array([*num_new, *shares], dtype=int)
    first = np.concatenate([np.flatnonzero(num_new == 1), np.flatnonzero(num_new != 1)])
    return Schedule(rows[first], num_new[first], int(num_new.sum()), admitted, preempted, shared, copies)


def scheduled(
    scheduler,
    *,
    pending=None,
    keep_zeros=False,
    reserve=True,
    in_flight=True,
    again=True,
    admit_after=False,
    admit_first=False,
    budget_left=True,
    sort="stable",
    rounds=10**9,
    share_budget=None,
    preempt=None,
):
    """The reference with one thing changed, from which most of the wrong answers below are made."""
    share_budget = share_budget or scheduler.parts.share_budget
    preempt = preempt or scheduler.preempt
    preempted, copies = [], []
    early = scheduler.admit(scheduler.budget, copies) if admit_first else None
    divided = None
    while True:
        rows, waiting = (pending or type(scheduler).pending)(scheduler)
        if divided is None or again:
            divided = dict(zip(rows.tolist(), share_budget(waiting, scheduler.budget).tolist(), strict=True))
        num_new = np.array([divided[row] for row in rows.tolist()], dtype=np.int64)
        if not keep_zeros:
            rows, num_new = rows[num_new > 0], num_new[num_new > 0]
        if not reserve or scheduler.reserve(rows, num_new):
            break
        if in_flight and scheduler.running.has_tokens_in_flight:
            return None
        if len(preempted) == rounds:
            return None
        preempted.append(preempt())
    admitted, num_shared = [], 0
    if early:
        admitted, _, num_shared = early
    elif not preempted or admit_after:
        left = scheduler.budget - (int(num_new.sum()) if budget_left else 0)
        admitted, shares, num_shared = scheduler.admit(left, copies)
        rows = np.append(rows, scheduler.running.order[len(scheduler.running) - len(admitted) :])
        num_new = np.append(num_new, shares).astype(np.int64)
    if sort == "stable":
        order = np.argsort(num_new > 1, kind="stable")
    elif sort == "unstable":
        order = np.argsort(num_new > 1)  # which is stable for up to 16 requests
    elif sort == "by number":
        order = np.argsort(num_new, kind="stable")
    else:
        order = np.arange(len(rows))
    return Schedule(rows[order], num_new[order], int(num_new.sum()), admitted, preempted, num_shared, copies)


@wrong("schedule", fails="test_two_decodes")
def pages_are_not_reserved(scheduler):
    return scheduled(scheduler, reserve=False)


@wrong("schedule", fails="test_two_decodes")
def the_number_of_tokens_is_forgotten(scheduler):
    step = scheduled(scheduler)
    return step and replace(step, num_tokens=0)


@wrong("schedule", fails="test_waiting_requests_are_admitted")
def no_request_is_admitted(scheduler):
    rows, pending = scheduler.pending()
    num_new = scheduler.parts.share_budget(pending, scheduler.budget)
    scheduler.reserve(rows, num_new)
    return Schedule(rows, num_new, int(num_new.sum()))


@wrong("schedule", fails="test_waiting_requests_are_admitted")
def admitted_requests_start_in_the_next_step(scheduler):
    step = scheduled(scheduler)
    if step is None:
        return None
    old = np.array([scheduler.running.requests[row] not in step.admitted for row in step.rows.tolist()], dtype=bool)
    return replace(step, rows=step.rows[old], num_new=step.num_new[old], num_tokens=int(step.num_new[old].sum()))


@wrong("schedule", fails="test_nothing_to_do")
def none_for_nothing(scheduler):
    step = scheduled(scheduler)
    return step if step and len(step.rows) else None


@wrong("schedule", fails="test_two_decodes")
def arrays_of_floats(scheduler):
    """Append an empty list, which turns the integers into floats."""
    step = scheduled(scheduler)
    return step and replace(step, num_new=np.append(step.num_new, []))


@wrong("schedule", fails="test_newcomers_get_what_is_left")
def a_budget_of_their_own(scheduler):
    return scheduled(scheduler, budget_left=False)


@wrong("schedule", fails="test_a_prompt_that_has_to_wait")
def shares_of_zero(scheduler):
    return scheduled(scheduler, keep_zeros=True)


@wrong("schedule", fails="test_a_prompt_that_has_to_wait")
def by_age_alone(scheduler):
    return scheduled(scheduler, sort="no")


@wrong("schedule", fails="test_decodes_come_first")
def by_number_of_tokens(scheduler):
    return scheduled(scheduler, sort="by number")


@wrong("schedule", fails="test_many_requests_in_order_of_age")
def not_sorted_stably(scheduler):
    return scheduled(scheduler, sort="unstable")


@wrong("schedule", fails="test_decodes_come_first")
def admitted_requests_last(scheduler):
    """Sort before admitting."""
    step = scheduled(scheduler)
    if step is None:
        return None
    new = np.array([scheduler.running.requests[row] in step.admitted for row in step.rows.tolist()], dtype=bool)
    order = np.argsort(new, kind="stable")
    return replace(step, rows=step.rows[order], num_new=step.num_new[order])


@wrong("schedule", fails="test_another_policy")
def a_policy_of_its_own(scheduler):
    return scheduled(scheduler, share_budget=reference.share_budget)


@wrong("schedule", fails="test_preempted_pages_stay_cached")
def the_part_instead_of_the_method(scheduler):
    """Frees the pages before the prefix tree has them."""

    def preempt():
        return scheduler.parts.preempt(scheduler.running, scheduler.waiting, scheduler.page_table)

    return scheduled(scheduler, preempt=preempt)


@right("schedule")
def the_budget_is_divided_among_prompts_only(scheduler):
    """Decodes alone always have room, so nothing has to be divided then, as in the engine."""

    def share_budget(pending, budget):
        return scheduler.parts.share_budget(pending, budget) if (pending > 1).any() else pending

    return scheduled(scheduler, share_budget=share_budget)


@wrong("schedule", fails="test_the_last_token_is_on_its_way")
def every_running_request(scheduler):
    def pending(scheduler):
        rows = scheduler.running.order
        return rows, scheduler.running.num_scheduled[rows] - scheduler.running.num_computed[rows]

    return scheduled(scheduler, pending=pending)


@wrong("schedule", fails="test_two_decodes")
def only_tokens_that_the_host_knows(scheduler):
    def pending(scheduler):
        rows = scheduler.running.order
        count = scheduler.running.num_known[rows] - scheduler.running.num_computed[rows] - 1
        return rows[count > 0], count[count > 0]

    return scheduled(scheduler, pending=pending)


@wrong("schedule", fails="test_the_newest_gives_its_pages")
def none_when_pages_are_short(scheduler):
    return scheduled(scheduler, rounds=0)


@wrong("schedule", fails="test_as_many_as_necessary")
def all_but_the_oldest(scheduler):
    """Preempt all requests but the oldest."""
    if scheduled_fits(scheduler):
        return scheduled(scheduler)
    if scheduler.running.has_tokens_in_flight:
        return None
    gone = []
    while len(scheduler.running) > 1:
        gone.append(scheduler.preempt())
    step = scheduled(scheduler, admit_after=True)
    return replace(step, preempted=gone)


def scheduled_fits(scheduler):
    rows, pending = scheduler.pending()
    num_new = scheduler.parts.share_budget(pending, scheduler.budget)
    start = scheduler.running.num_computed[rows] - scheduler.running.num_evicted[rows]
    return scheduler.page_table.missing(rows, start + num_new)[1] <= scheduler.page_table.num_free_pages


@wrong("schedule", fails="test_as_many_as_necessary")
def one_preemption_is_enough(scheduler):
    return scheduled(scheduler, rounds=1)


@wrong("schedule", fails="test_as_many_as_necessary")
def preempted_oldest_first(scheduler):
    step = scheduled(scheduler)
    return step and replace(step, preempted=step.preempted[::-1])


@wrong("schedule", fails="test_the_budget_is_divided_anew")
def divided_once(scheduler):
    return scheduled(scheduler, again=False)


@wrong("schedule", fails="test_no_admission_after_a_preemption")
def admits_after_a_preemption(scheduler):
    """Admit after a preemption, so the preempted request may return at once."""
    return scheduled(scheduler, admit_after=True)


@wrong("schedule", fails="test_tokens_on_the_device")
def preempts_whatever_is_on_the_device(scheduler):
    return scheduled(scheduler, in_flight=False)


@wrong("schedule", fails="test_the_last_token_is_on_its_way")
def waits_for_every_token(scheduler):
    return None if scheduler.running.has_tokens_in_flight else scheduled(scheduler)


@wrong("schedule", fails="test_newcomers_get_what_is_left")
def newcomers_first(scheduler):
    """Admit with the whole budget, and then divide it among all."""
    return scheduled(scheduler, admit_first=True)


@wrong("schedule", fails="test_copies_and_shared_tokens")
def copies_forgotten(scheduler):
    step = scheduled(scheduler)
    return step and replace(step, copies=[])


@wrong("schedule", fails="test_copies_and_shared_tokens")
def shared_tokens_forgotten(scheduler):
    step = scheduled(scheduler)
    return step and replace(step, num_shared=0)


# match_prefix -------------------------------------------------------------------------------------------------------


@right("match_prefix")
def by_recursion_from_a_parent(children, token_ids, page_size, parent=ROOT):
    page = children.get(parent, {}).get(token_ids[:page_size].tobytes()) if len(token_ids) >= page_size else None
    if page is None:
        return []
    return [page, *by_recursion_from_a_parent.definition(children, token_ids[page_size:], page_size, page)]


@right("match_prefix")
def until_a_key_is_missing(children, token_ids, page_size):
    rows = token_ids[: len(token_ids) // page_size * page_size].reshape(-1, page_size)
    pages = [ROOT]
    try:
        for row in rows:
            pages.append(children[pages[-1]][row.tobytes()])
    except KeyError:
        pass
    return pages[1:]


def chunks(token_ids, page_size):
    return [token_ids[start : start + page_size] for start in range(0, len(token_ids) - page_size + 1, page_size)]


@wrong("match_prefix", fails="test_one_page")
def only_the_last_page(children, token_ids, page_size):
    return reference.match_prefix(children, token_ids, page_size)[-1:] or None


@wrong("match_prefix", fails="test_one_page")
def tokens_as_a_tuple(children, token_ids, page_size):
    pages = []
    for chunk in chunks(token_ids, page_size):
        page = children.get(pages[-1] if pages else ROOT, {}).get(tuple(chunk.tolist()))
        if page is None:
            break
        pages.append(page)
    return pages


@wrong("match_prefix", fails="test_page_0")
def page_0_is_no_page(children, token_ids, page_size):
    pages, parent = [], ROOT
    for chunk in chunks(token_ids, page_size):
        parent = children.get(parent, {}).get(chunk.tobytes())
        if not parent:
            break
        pages.append(parent)
    return pages


@wrong("match_prefix", fails="test_a_chain")
def always_under_the_root(children, token_ids, page_size):
    found = [children.get(ROOT, {}).get(chunk.tobytes()) for chunk in chunks(token_ids, page_size)]
    return found[: found.index(None)] if None in found else found


@wrong("match_prefix", fails="test_a_chain")
def any_page_with_these_tokens(children, token_ids, page_size):
    """Ignore the tokens before a page, on which its keys depend."""
    everywhere = {}
    for siblings in children.values():
        for key, page in siblings.items():
            everywhere.setdefault(key, page)
    pages = []
    for chunk in chunks(token_ids, page_size):
        if chunk.tobytes() not in everywhere:
            break
        pages.append(everywhere[chunk.tobytes()])
    return pages


@wrong("match_prefix", fails="test_the_first_difference_ends_it")
def what_comes_after_a_difference(children, token_ids, page_size):
    pages, parent = [], ROOT
    for chunk in chunks(token_ids, page_size):
        siblings = children.get(parent, {})
        page = siblings.get(chunk.tobytes())
        parent = page if page is not None else next(iter(siblings.values()), ROOT)
        if page is not None:
            pages.append(page)
    return pages


@wrong("match_prefix", fails="test_only_full_pages")
def the_last_page_in_part(children, token_ids, page_size):
    pages, parent = [], ROOT
    for start in range(0, len(token_ids), page_size):
        key = token_ids[start : start + page_size].tobytes()
        page = next((p for other, p in children.get(parent, {}).items() if other.startswith(key)), None)
        if page is None:
            break
        pages.append(page)
        parent = page
    return pages


@wrong("match_prefix", fails="test_one_page")
def the_last_page_is_left_out(children, token_ids, page_size):
    return reference.match_prefix(children, token_ids[:-1], page_size)


@wrong("match_prefix", fails="test_missing_entries")
def every_page_has_an_entry(children, token_ids, page_size):
    pages, parent = [], ROOT
    for chunk in chunks(token_ids, page_size):
        page = children[parent].get(chunk.tobytes())
        if page is None:
            break
        pages.append(page)
        parent = page
    return pages


@wrong("match_prefix", fails="test_tokens_are_read_once")
def the_whole_prompt_for_each_page(children, token_ids, page_size):
    pages, parent, size = [], ROOT, 4 * page_size
    for start in range(0, len(token_ids) // page_size * size, size):
        page = children.get(parent, {}).get(token_ids.tobytes()[start : start + size])
        if page is None:
            break
        pages.append(page)
        parent = page
    return pages


@right("match_prefix")
def the_prompt_once(children, token_ids, page_size):
    pages, parent, size, text = [], ROOT, 4 * page_size, token_ids.tobytes()
    for start in range(0, len(token_ids) // page_size * size, size):
        page = children.get(parent, {}).get(text[start : start + size])
        if page is None:
            break
        pages.append(page)
        parent = page
    return pages


@wrong("match_prefix", fails="test_the_number_of_lookups")
def compares_with_every_sibling(children, token_ids, page_size):
    pages, parent = [], ROOT
    for chunk in chunks(token_ids, page_size):
        page = next((p for key, p in children.get(parent, {}).items() if key == chunk.tobytes()), None)
        if page is None:
            break
        pages.append(page)
        parent = page
    return pages


# copy_on_write ------------------------------------------------------------------------------------------------------


@right("copy_on_write")
def token_by_token_it_writes(table, row, first, end):
    copies = []
    for position in range(first, end):
        index = position // table.page_size
        if table.refcounts[table.table[row, index]] > 1:
            copies.append(table.replace(row, index))
    return copies


@right("copy_on_write")
def by_arrays(table, row, first, end):
    indices = np.arange(first // table.page_size, -(-end // table.page_size))
    shared = indices[table.refcounts[table.pages(row)[indices]] >= 2]
    return list(map(table.replace, [row] * len(shared), shared.tolist()))


def copied(table, row, indices, *, only_shared=True):
    """The reference over other pages, from which the wrong answers below are made."""
    pages = table.pages(row).tolist()
    return [table.replace(row, i) for i in indices if not only_shared or table.refcounts[pages[i]] > 1]


def written(table, first, end):
    return range(first // table.page_size, (end - 1) // table.page_size + 1)


@wrong("copy_on_write", fails="test_own_pages")
def always_copies(table, row, first, end):
    return copied(table, row, written(table, first, end), only_shared=False)


@wrong("copy_on_write", fails="test_own_pages")
def none_for_nothing_to_copy(table, row, first, end):
    return copied(table, row, written(table, first, end)) or None


@wrong("copy_on_write", fails="test_a_shared_page")
def never_copies(table, row, first, end):
    return []


@wrong("copy_on_write", fails="test_a_shared_page")
def pairs_turned_round(table, row, first, end):
    return [(new, old) for old, new in copied(table, row, written(table, first, end))]


@wrong("copy_on_write", fails="test_a_shared_page")
def a_new_page_for_all_its_owners(table, row, first, end):
    copies = copied(table, row, written(table, first, end))
    for old, new in copies:
        table.table[table.table == old] = new
    return copies


@wrong("copy_on_write", fails="test_owners_are_counted")
def the_row_is_changed_by_hand(table, row, first, end):
    """Take a page, exchange the two entries, and forget the refcounts."""
    copies = []
    for index in written(table, first, end):
        old = int(table.table[row, index])
        if table.refcounts[old] > 1:
            table.take(np.array([row]), np.array([1]))
            last = int(table.counts[row]) - 1
            new = int(table.table[row, last])
            table.table[row, index] = new
            table.counts[row] = last
            copies.append((old, new))
    return copies


@wrong("copy_on_write", fails="test_pages_before_stay")
def the_whole_row(table, row, first, end):
    return copied(table, row, range(table.pages_for(end)))


@wrong("copy_on_write", fails="test_end_is_not_written")
def end_included(table, row, first, end):
    return copied(table, row, range(first // table.page_size, min(end // table.page_size + 1, int(table.counts[row]))))


@wrong("copy_on_write", fails="test_a_write_over_several_pages")
def only_the_page_of_the_first_token(table, row, first, end):
    return copied(table, row, [first // table.page_size])


@wrong("copy_on_write", fails="test_three_owners_part")
def owned_by_exactly_two(table, row, first, end):
    pages = table.pages(row).tolist()
    return [table.replace(row, i) for i in written(table, first, end) if table.refcounts[pages[i]] == 2]


# pages_to_evict -----------------------------------------------------------------------------------------------------


@right("pages_to_evict")
def while_the_first_is_hidden(num_computed, num_evicted, window, page_size):
    """One page at a time, as long as the last key of the first page has left the window."""
    counts = np.zeros(len(num_computed), dtype=np.int64)
    while (gone := num_computed - (num_evicted + (counts + 1) * page_size - 1) >= window).any():
        counts += gone
    return counts


@right("pages_to_evict")
def by_page_numbers(num_computed, num_evicted, window, page_size):
    first_needed = np.maximum(num_computed - window + 1, 0) // page_size
    return np.clip(first_needed - num_evicted // page_size, 0, None)


def hidden(num_computed, num_evicted, window):
    return np.maximum(num_computed - window + 1 - num_evicted, 0)


@wrong("pages_to_evict", fails="test_nothing_is_hidden")
def negative_pages(num_computed, num_evicted, window, page_size):
    return (num_computed - window + 1 - num_evicted) // page_size


@wrong("pages_to_evict", fails="test_nothing_is_hidden")
def fractions_of_pages(num_computed, num_evicted, window, page_size):
    return hidden(num_computed, num_evicted, window) / page_size


@wrong("pages_to_evict", fails="test_a_page_in_part_stays")
def pages_in_part(num_computed, num_evicted, window, page_size):
    return -(-hidden(num_computed, num_evicted, window) // page_size)


@wrong("pages_to_evict", fails="test_a_page_in_part_stays")
def one_key_too_early(num_computed, num_evicted, window, page_size):
    return hidden(num_computed, num_evicted, window - 1) // page_size


@wrong("pages_to_evict", fails="test_the_first_page_goes")
def one_key_too_late(num_computed, num_evicted, window, page_size):
    return hidden(num_computed, num_evicted, window + 1) // page_size


@wrong("pages_to_evict", fails="test_a_page_in_part_stays")
def keys_for_pages(num_computed, num_evicted, window, page_size):
    return hidden(num_computed, num_evicted, window)


@wrong("pages_to_evict", fails="test_several_pages")
def at_most_one(num_computed, num_evicted, window, page_size):
    return np.minimum(hidden(num_computed, num_evicted, window) // page_size, 1)


@wrong("pages_to_evict", fails="test_the_row_begins_later")
def as_if_the_row_began_at_0(num_computed, num_evicted, window, page_size):
    return hidden(num_computed, 0, window) // page_size


@wrong("pages_to_evict", fails="test_several_requests")
def the_same_for_all(num_computed, num_evicted, window, page_size):
    return np.full_like(num_computed, hidden(num_computed, num_evicted, window).min(initial=10**9) // page_size)


@wrong("pages_to_evict", fails="test_nothing_is_hidden")
def a_list_of_counts(num_computed, num_evicted, window, page_size):
    return (hidden(num_computed, num_evicted, window) // page_size).tolist()


# reorder_beams ------------------------------------------------------------------------------------------------------


@right("reorder_beams")
def changed_beams_only(table, rows, parents):
    """Beams that continue themselves are left alone; the others first gain pages, and then lose the old ones."""
    pages = {row: table.pages(row).tolist() for row in rows}
    moves = [(row, rows[parent]) for row, parent in zip(rows, parents, strict=True) if row != rows[parent]]
    for row, source in moves:
        table.share(row, np.array(pages[source], dtype=np.int32))
    for row, _ in moves:
        table.drop_front(row, len(pages[row]))


def shared(table, rows, parents):
    """Give each row its parent's pages after its own, and return the pages that the rows had."""
    before = [table.pages(row).copy() for row in rows]
    for row, parent in zip(rows, parents, strict=True):
        table.share(row, before[parent])
    return before


@wrong("reorder_beams", fails="test_nothing_changes")
def owners_only_added(table, rows, parents):
    shared(table, rows, parents)


@wrong("reorder_beams", fails="test_nothing_changes")
def owners_only_taken(table, rows, parents):
    before = [table.pages(row).copy() for row in rows]
    for row, parent in zip(rows, parents, strict=True):
        table.truncate(row, 0)
        table.table[row, : len(before[parent])] = before[parent]
        table.counts[row] = len(before[parent])


@wrong("reorder_beams", fails="test_nothing_changes")
def returned_first(table, rows, parents):
    before = [table.pages(row).copy() for row in rows]
    for row in rows:
        table.truncate(row, 0)
    for row, parent in zip(rows, parents, strict=True):
        table.share(row, before[parent])


@wrong("reorder_beams", fails="test_nothing_changes")
def rows_released(table, rows, parents):
    """Release each row and allocate another one."""
    before = [table.pages(row).copy() for row in rows]
    for row, parent in zip(rows, parents, strict=True):
        table.share(row, before[parent])
    for row, pages in zip(rows, before, strict=True):
        table.drop_front(row, len(pages))
        table.release(row)


@wrong("reorder_beams", fails="test_nothing_changes")
def the_own_pages_stay_in_front(table, rows, parents):
    before = shared(table, rows, parents)
    for row, parent in zip(rows, parents, strict=True):
        table.truncate(row, len(before[parent]) - 1)


@wrong("reorder_beams", fails="test_one_is_continued_twice")
def the_new_pages_are_returned(table, rows, parents):
    before = shared(table, rows, parents)
    for row, pages in zip(rows, before, strict=True):
        table.truncate(row, len(pages))


@wrong("reorder_beams", fails="test_two_swap")
def one_row_after_the_other(table, rows, parents):
    for row, parent in zip(rows, parents, strict=True):
        count = len(table.pages(row))
        table.share(row, table.pages(rows[parent]).copy())
        table.drop_front(row, count)


@wrong("reorder_beams", fails="test_beams_of_different_lengths")
def as_many_as_the_parent_had(table, rows, parents):
    before = shared(table, rows, parents)
    for row, parent in zip(rows, parents, strict=True):
        table.drop_front(row, len(before[parent]))


@wrong("reorder_beams", fails="test_beams_that_share")
def owners_set_by_hand(table, rows, parents):
    """Set refcounts by hand, which is right only if beams share all pages or none."""
    before = [table.pages(row).tolist() for row in rows]
    reference.reorder_beams(table, rows, parents)
    for parent in set(parents):
        for page in before[parent]:
            table.refcounts[page] = list(parents).count(parent)


@right("reorder_beams")
def owned_by_no_row_meanwhile(table, rows, parents):
    """Keep the old pages in use without a row, so that the rows can be emptied first."""
    before = [table.pages(row).copy() for row in rows]
    for row, pages in zip(rows, before, strict=True):
        table.retain(pages)
        table.truncate(row, 0)
    for row, parent in zip(rows, parents, strict=True):
        table.share(row, before[parent])
    for pages in before:
        table.drop(pages)


@wrong("reorder_beams", fails="test_beams_through_the_methods")
def through_the_fields(table, rows, parents):
    before = [table.pages(row).copy() for row in rows]
    for row, parent in zip(rows, parents, strict=True):
        table.refcounts[before[parent]] += 1
        table.table[row, : len(before[parent])] = before[parent]
        table.counts[row] = len(before[parent])
    for pages in before:
        table.drop(pages)


@wrong("reorder_beams", fails="test_rows_that_are_no_beams")
def parents_are_rows(table, rows, parents):
    of_row = dict(zip(rows, parents, strict=True))
    everyone = [row for row in range(len(table.counts)) if len(table.pages(row))]
    reference.reorder_beams(table, everyone, [everyone.index(of_row.get(row, row)) for row in everyone])
