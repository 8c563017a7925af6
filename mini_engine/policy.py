"""The scheduler's decisions: who computes how much, who comes in, and who gives way.

Explained in chapter 07.
"""

from collections import deque
from collections.abc import Sequence as ListLike

from mini_engine.kv_cache.page_table import PageTable
from mini_engine.sequence import Sequence


def fuse(pending: ListLike[int], budget: int) -> list[int]:
    """Share out one step's tokens among the running sequences, decodes and prompts in one batch.

    Every decode gets its token first: no answer ever waits for somebody's prompt. What is left of the budget goes to
    prompts, the oldest first, the last of them in part (Agrawal et al. 2024, "Sarathi-Serve", section 4.1).

    Args:
        pending: tokens of each sequence that are not computed yet, at least 1, oldest sequence first; 1 is a decode.
        budget: most tokens of the step, at least one for each sequence.

    Returns:
        How many tokens the step computes of each sequence; 0 for a prompt that has to wait.
    """
    left = budget - sum(n == 1 for n in pending)
    num_new = []
    for n in pending:
        chunk = min(n, left) if n > 1 else 0
        left -= chunk
        num_new.append(chunk or int(n == 1))
    return num_new


def admit(num_tokens: ListLike[int], num_pages: ListLike[int], *, budget: int, free_pages: int, free_rows: int) -> int:
    """Decide how many of the waiting come in. Strictly in order: nobody is overtaken by a smaller request.

    Args:
        num_tokens: tokens that each has to compute, oldest first.
        num_pages: free pages that each needs.
        budget: tokens that the step has left. A prompt may be longer: it then comes in with a first chunk.
        free_pages: pages that may be given away.
        free_rows: sequences that may still run.

    Returns:
        How many, from the front. Each has at least one token of the budget, all its pages, and a row.
    """
    admitted = 0
    for tokens, pages in zip(num_tokens[:free_rows], num_pages, strict=False):
        if budget < 1 or pages > free_pages:
            break
        budget -= tokens
        free_pages -= pages
        admitted += 1
    return admitted


def preempt(
    running: list[Sequence], waiting: deque[Sequence], rows: dict[Sequence, int], page_table: PageTable
) -> Sequence:
    """Send the newest running sequence back to wait, without its pages (Kwon et al. 2023, section 4.5, recomputation).

    It keeps its tokens, those of its output too: when it returns they are its prompt, and it goes on where it was.

    Args:
        running: sequences with pages, oldest first.
        waiting: sequences without; all of them came later.
        rows: row of the page table of each running sequence.
        page_table: where the pages go back to.

    Returns:
        The sequence.
    """
    newest = running.pop()
    page_table.erase(rows.pop(newest))
    newest.num_computed = 0
    waiting.appendleft(newest)
    return newest
