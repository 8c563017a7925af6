"""Index arithmetic of arrays that hold groups of different sizes one after the other, without a loop over them."""

import numpy as np
from jaxtyping import Int


def members(counts: Int[np.ndarray, " groups"]) -> tuple[Int[np.ndarray, " n"], Int[np.ndarray, " n"]]:
    """Number the members of groups of these sizes: the group of each member, and its index in the group."""
    groups = np.repeat(np.arange(len(counts)), counts)
    return groups, np.arange(len(groups)) - np.repeat(counts.cumsum() - counts, counts)
