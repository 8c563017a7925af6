"""Which blocks of keys a block of queries visits, from nothing but the positions at their ends.

`create_block_mask` asks the mask about every pair of a query and a key. For a causal mask or a window two comparisons
of positions say the same, so the engine builds its BlockMasks from these lists. Explained in chapter 05.
"""

from jaxtyping import Bool, Int, Int32, Int64
from torch import Tensor


def classify_blocks(
    first_query: Int[Tensor, "..."],
    last_query: Int[Tensor, "..."],
    first_key: Int[Tensor, "..."],
    last_key: Int[Tensor, "..."],
    window: int | None,
) -> tuple[Bool[Tensor, "*shape"], Bool[Tensor, "*shape"]]:
    """Compare the positions of neighbouring queries with those of neighbouring keys. Causal; the arguments broadcast.

    Args:
        first_query: position of the first query.
        last_query: position of the last query.
        first_key: position of the first key.
        last_key: position of the last key.
        window: keys that a query may see, its own included; None for all.

    Returns:
        Whether some query sees some key (the block must be visited), and whether every query sees every key (the
        block is full: nothing in it needs to be masked).
    """
    visited = first_key <= last_query
    full = last_key <= first_query
    if window is not None:
        visited = visited & (first_query - last_key < window)
        full = full & (last_query - first_key < window)
    return visited, full


def list_blocks(chosen: Bool[Tensor, "*rows n"]) -> tuple[Int32[Tensor, "*rows"], Int64[Tensor, "*rows n"]]:
    """The lists that `BlockMask.from_kv_blocks` wants.

    Args:
        chosen: [..., n] which of the n blocks of each row.

    Returns:
        How many are chosen in each row, and their numbers in order at the front of the row; the others follow.
    """
    return chosen.sum(dim=-1).int(), chosen.logical_not().byte().argsort(dim=-1, stable=True)
