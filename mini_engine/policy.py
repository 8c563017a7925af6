"""The scheduler's decisions: which requests are ready, their numbers of tokens, admission, and preemption.

Explained in chapter 07, and `ready` in chapter 16.
"""

from collections import OrderedDict

import numpy as np
from jaxtyping import Bool, Int

from mini_engine.kv_cache.page_table import PageTable
from mini_engine.request import Request, Running


def ready(
    num_scheduled: Int[np.ndarray, " B"],
    num_known: Int[np.ndarray, " B"],
    max_len: Int[np.ndarray, " B"],
    waits: Int[np.ndarray, " B"],
) -> Bool[np.ndarray, " B"]:
    """Decide which running requests have a token that the next step can compute.

    A request whose last token is being sampled has none. If a grammar reads a request's tokens, the host has to know
    all of them before it can say which may follow.

    Args:
        num_scheduled: [B] tokens of each request that exist once all launched steps are done.
        num_known: [B] those whose ids the host knows.
        max_len: [B] most tokens of each request.
        waits: [B] 1 for a request with a grammar, otherwise 0.
    """
    return (num_scheduled < max_len) & ((waits == 0) | (num_scheduled == num_known))


def share_budget(pending: Int[np.ndarray, " B"], budget: int) -> Int[np.ndarray, " B"]:
    """Divide one step's tokens among the running requests: decodes first, then prompts, oldest first.

    Every decode gets its token, so no output stalls behind another request's prompt. The rest of the budget goes to
    prompts, the last of which may get only a part (chunked prefill, stall-free batching: Agrawal et al. 2024,
    "Sarathi-Serve", sections 4.1 and 4.2).

    Args:
        pending: [B] tokens of each request that are not computed yet, at least 1, oldest request first; 1 is a decode.
        budget: most tokens of the step, at least one for each request.

    Returns:
        [B] tokens of each request that the step computes; 0 for a prompt that has to wait.
    """
    decodes = pending == 1
    prompts = np.where(decodes, 0, pending)
    left = budget - int(decodes.sum())
    # Tokens of the rest that go to earlier prompts.
    taken = np.cumsum(prompts) - prompts
    return np.where(decodes, 1, np.clip(left - taken, 0, prompts))


def admit(num_tokens: int, num_pages: int, *, budget: int, free_pages: int, free_rows: int) -> int:
    """Decide whether the oldest waiting request is admitted, and with how many tokens.

    Args:
        num_tokens: tokens that the request has to compute, at least 1.
        num_pages: free pages that it needs.
        budget: tokens that the step has left.
        free_pages: free pages above the watermark.
        free_rows: free rows of the page table.

    Returns:
        Tokens of the request that the step computes: all of them or a first chunk, or 0 if the request has to wait.
    """
    if free_rows < 1 or num_pages > free_pages:
        return 0
    return max(0, min(num_tokens, budget))


def preempt(running: Running, waiting: "OrderedDict[Request, None]", page_table: PageTable) -> Request:
    """Preempt the newest running request, which then waits without its pages.

    This is preemption by recomputation (Kwon et al. 2023, section 4.5): the request keeps its tokens, including those
    of its output, and at its next admission all of them are computed like a prompt.

    Args:
        running: the running requests.
        waiting: the waiting requests, the next one first; by default, they arrived later than those that run.
        page_table: the pages of all rows.

    Returns:
        The request.
    """
    row = int(running.order[-1])
    request = running.leave(row)
    page_table.release(row)
    waiting[request] = None
    waiting.move_to_end(request, last=False)
    return request
