"""Index arithmetic for arrays that hold groups of different sizes end to end, without a loop over the groups."""

import numpy as np
from jaxtyping import Int


def members(counts: Int[np.ndarray, " groups"]) -> tuple[Int[np.ndarray, " n"], Int[np.ndarray, " n"]]:
    """Return the group of each member, and its index in the group, for groups of these sizes."""
    groups = np.repeat(np.arange(len(counts)), counts)
    return groups, np.arange(len(groups)) - np.repeat(counts.cumsum() - counts, counts)
