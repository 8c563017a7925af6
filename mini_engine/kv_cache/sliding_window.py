"""Sliding window: the oldest pages of a request return to the pool once no query can see them anymore.

Requests of any length then hold only a few pages (Beltagy et al. 2020; Jiang et al. 2023, "Mistral 7B", rolling buffer
cache). Explained in chapter 07.
"""

import numpy as np
from jaxtyping import Int


def pages_to_evict(
    num_computed: Int[np.ndarray, " B"], num_evicted: Int[np.ndarray, " B"], window: int, page_size: int
) -> Int[np.ndarray, " B"]:
    """Count the first pages of each request that its next query, and so every later one, cannot see.

    Args:
        num_computed: [B] position of the next token that each request computes.
        num_evicted: [B] position of the first token in the request's first page.
        window: keys that a query sees, its own included.
        page_size: tokens per page.

    Returns:
        [B] whole pages before the window.
    """
    oldest_visible = num_computed - window + 1
    return np.maximum(oldest_visible - num_evicted, 0) // page_size
