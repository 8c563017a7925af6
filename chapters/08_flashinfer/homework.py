"""Homework of chapter 08: the arrays that FlashInfer reads, a plan that gives all
thread blocks similar amounts of work, and the attention that executes the plan.

One exercise is a part of the engine. Once its checks pass, `mini-engine generate
--homework` runs a real model with your `plan_work` on the `split_kv` backend.

The docstring of each function says what the function must do. Replace its line
`raise NotImplementedError`. Import what you need, and add helper functions of your own
as you like. Then:

    # grade your work
    pytest chapters/08_flashinfer

    # the next of three hints for the exercise NAME
    pytest chapters/08_flashinfer --hint NAME
"""

from collections.abc import Callable

import numpy as np
import torch
from jaxtyping import Float, Int, Int32, Int64
from torch import Tensor

from mini_engine.attention.split_kv import WorkPlan
from mini_engine.attention.state import AttentionState


def csr_from_table(
    table: Int32[np.ndarray, "B W"], kv_lens: Int[np.ndarray, " B"], page_size: int
) -> tuple[
    Int32[np.ndarray, " indptr"], Int32[np.ndarray, " P"], Int32[np.ndarray, " B"]
]:
    """Turn a dense page table into the CSR arrays that FlashInfer takes.

    FlashAttention's functions take a dense table. Row b of the table lists the pages of
    sequence b in order of position. Its first `ceil(kv_lens[b] / page_size)` entries
    are valid; those after them are stale and may hold any number. Use no Python loop
    over sequences or pages.

    Args:
        table: pages of each sequence.
        kv_lens: keys of each sequence. A sequence without keys has no page.
        page_size: keys that fit in one page.

    Returns:
        Three arrays of dtype int32:
        indptr [B+1]: first entry of each sequence in `indices`, and last the number of
            all entries.
        indices [P]: the pages of all sequences, one sequence after the other.
        last_page_len [B]: keys in the last page of each sequence, 1 to page_size; 0 for
            a sequence without keys.

    Example: pages of 4. The first sequence has 10 keys in three pages, the second 4 in
    one.

        >>> table = np.array([[2, 0, 3], [1, 9, 9]], dtype=np.int32)
        >>> arrays = csr_from_table(table, np.array([10, 4]), page_size=4)
        >>> [array.tolist() for array in arrays]
        [[0, 3, 4], [2, 0, 3, 1], [2, 4]]
    """
    raise NotImplementedError


def table_from_csr(
    indptr: Int32[np.ndarray, " indptr"],
    indices: Int32[np.ndarray, " P"],
    last_page_len: Int32[np.ndarray, " B"],
    page_size: int,
) -> tuple[Int32[np.ndarray, "B W"], Int32[np.ndarray, " B"]]:
    """Turn CSR arrays back into a dense page table and lengths.

    Use no Python loop over sequences or pages.

    Args:
        indptr: as `csr_from_table` returns it; so are the other arrays.
        indices: pages.
        last_page_len: keys in last pages.
        page_size: keys that fit in one page.

    Returns:
        The table, padded with 0, with as many columns as the longest sequence has
        pages, and the number of keys of each sequence; both are int32.

    Example:

        >>> lists = [0, 3, 4], [2, 0, 3, 1], [2, 4]
        >>> arrays = (np.array(numbers, dtype=np.int32) for numbers in lists)
        >>> table, kv_lens = table_from_csr(*arrays, page_size=4)
        >>> table.tolist(), kv_lens.tolist()
        ([[2, 0, 3], [1, 0, 0]], [10, 4])
    """
    raise NotImplementedError


def append_positions(
    qo_indptr: Int32[np.ndarray, " indptr"],
    kv_lens: Int32[np.ndarray, " B"],
    kv_indptr: Int32[np.ndarray, " indptr"],
    kv_indices: Int32[np.ndarray, " P"],
    page_size: int,
) -> tuple[
    Int32[np.ndarray, " T"],
    Int32[np.ndarray, " T"],
    Int64[np.ndarray, " T"],
    Int32[np.ndarray, " B"],
]:
    """Find the slots of a step's new keys, and the length of each last page after it.

    New tokens follow the keys that their sequence has already. The scheduler has taken
    pages for them: `kv_indices` lists exactly the pages that each sequence needs after
    the step. Use no Python loop over sequences or tokens.

    Args:
        qo_indptr: [B+1] first new token of each sequence, and last the number T of all
            new tokens. Every sequence has at least one.
        kv_lens: [B] keys of each sequence before the step, 0 or more.
        kv_indptr: [B+1] first page of each sequence in `kv_indices`, and last the
            number of all pages.
        kv_indices: [P] pages of all sequences.
        page_size: keys that fit in one page.

    Returns:
        batch_indices [T], int32: the sequence of each new token.
        positions [T], int32: its position in the sequence.
        slot_mapping [T], int64: page * page_size + offset in the page. A large pool has
            more slots than int32 holds.
        last_page_len [B], int32: keys in the last page of each sequence after the step.

    Example: pages of 4. The first sequence has 3 keys in page 2 and gets two more, the
    second of which begins page 5. The second sequence has no keys yet and gets one.

        >>> lists = [0, 2, 3], [3, 0], [0, 2, 3], [2, 5, 1]
        >>> arrays = (np.array(numbers, dtype=np.int32) for numbers in lists)
        >>> found = append_positions(*arrays, page_size=4)
        >>> [array.tolist() for array in found]
        [[0, 0, 1], [3, 4, 0], [11, 20, 4], [1, 1]]
    """
    raise NotImplementedError


def smallest_chunk(
    num_keys: Int[np.ndarray, " tiles"], num_workers: int, least: int = 1
) -> int:
    """Find the smallest chunk size with which there are no more chunks than workers.

    The keys of each tile are cut into chunks of that size; the last chunk of a tile may
    be shorter. No chunk belongs to two tiles. A tile may have millions of keys: do not
    try all sizes.

    Args:
        num_keys: keys of each tile, 1 or more.
        num_workers: the largest number of chunks. If there are more tiles than that,
            every size makes too many chunks: return the number of keys of the longest
            tile, so every tile is one chunk.
        least: smallest size that may be returned, also where it is larger than every
            tile.

    Example: chunks of 40 keys make 3 + 1 chunks, and so do chunks of 34; chunks of 33
    make 4 + 1.

        >>> smallest_chunk(np.array([100, 20]), num_workers=4)
        34
    """
    raise NotImplementedError


def plan_work(
    qo_indptr: Int[np.ndarray, " indptr"],
    kv_lens: Int[np.ndarray, " B"],
    num_workers: int,
    *,
    tile_len: int,
    least_keys: int = 1,
    window: int | None = None,
) -> WorkPlan:
    """Split a step into work items of bounded size, about as many as there are workers.

    The new tokens of each sequence, its queries, are cut into tiles of `tile_len`; the
    last tile of a sequence may be shorter. A tile needs every key that one of its
    queries sees, and no other. These keys are cut into chunks, whose size is the one
    that `smallest_chunk` finds for all tiles of the step together; the last chunk of a
    tile may be shorter. A tile and a chunk of its keys are a work item.

    So the largest item has at most twice the mean load of a worker, plus one key, if
    there are at least two workers for each tile and `least_keys` allows such small
    chunks. Use no Python loop over sequences, tiles or items: a step is planned while
    the GPU waits. `qo_indptr` and `kv_lens` belong to the caller: leave them as they
    are.

    Args:
        qo_indptr: [B+1] first query of each sequence, and last the number of all
            queries. Every sequence has at least one.
        kv_lens: [B] keys of each sequence, those of the queries included: its last
            query is at position kv_lens - 1.
        num_workers: how many items run at the same time.
        tile_len: most queries of a tile.
        least_keys: smallest chunk size.
        window: how many keys a query sees, its own included, or None: all keys up to
            its own.

    Returns:
        A WorkPlan: `chunk_size`, and arrays of any integer dtype.
        sequences, first_tokens, end_tokens, first_keys, end_keys [N]: for each item its
            sequence, its queries as a range of the step's tokens, and its keys as a
            range of positions. Items are ordered by tile, and within a tile by key.
        item_indptr [tiles + 1]: first item of each tile, and N.

    Example: a decode with 100 keys, and a prompt of 3 tokens. With tiles of 2 queries
    the prompt has two tiles, which need 2 and 3 keys.

        >>> qo_indptr, kv_lens = np.array([0, 1, 4]), np.array([100, 3])
        >>> plan = plan_work(qo_indptr, kv_lens, num_workers=6, tile_len=2)
        >>> plan.chunk_size, plan.item_indptr.tolist()
        (25, [0, 4, 5, 6])
        >>> plan.sequences.tolist()
        [0, 0, 0, 0, 1, 1]
        >>> plan.first_tokens.tolist(), plan.end_tokens.tolist()
        ([0, 0, 0, 0, 1, 3], [1, 1, 1, 1, 3, 4])
        >>> plan.first_keys.tolist(), plan.end_keys.tolist()
        ([0, 25, 50, 75, 0, 0], [25, 50, 75, 100, 2, 3])
    """
    raise NotImplementedError


def split_kv_decode(
    q: Float[Tensor, "B Hq D"],
    k_pages: Float[Tensor, "pages page_size Hk D"],
    v_pages: Float[Tensor, "pages page_size Hk D"],
    kv_indptr: Int32[np.ndarray, " indptr"],
    kv_indices: Int32[np.ndarray, " P"],
    plan: WorkPlan,
    worker: Callable[[Tensor, Tensor, Tensor], AttentionState],
) -> AttentionState:
    """Execute a plan of decodes over a paged cache, and merge each query's states.

    Each tile of the plan is one query, row `first_tokens` of `q`. The tiles may come in
    any order. Each item stands for one thread block: gather its keys and values, and no
    others, and call `worker` with them once. (You call `worker` in a loop; on a GPU the
    thread blocks run at the same time.) A range of keys may begin and end inside a
    page.

    Args:
        q: one query for each sequence.
        k_pages: keys of one layer, in NHD.
        v_pages: its values.
        kv_indptr: [B+1] first page of each sequence in `kv_indices`, and last the
            number of all pages.
        kv_indices: pages of all sequences. Where no item has a key in a page, the entry
            may be any number, because the page may have been evicted.
        plan: the work items, see `plan_work`. Every query has one tile.
        worker: returns the attention state of q [1, Hq, D] over k and v [m, Hk, D].

    Returns:
        The states of all queries over the keys of their items: out [B, Hq, D] and lse
        [B, Hq], in the dtypes that the workers return. You may call `merge_states` of
        chapter 02.

    Example: five keys, whose scores are all 0, so the output is the mean of the values.

        >>> from mini_engine.attention.state import attention_state
        >>> def worker(q, k, v):
        ...     return attention_state(q, k, v, scale=1.0)
        >>> q, k = torch.zeros(1, 1, 1), torch.zeros(3, 2, 1, 1)
        >>> v = torch.tensor([[5.0, 99.0], [3.0, 4.0], [1.0, 2.0]]).view(3, 2, 1, 1)
        >>> plan = plan_work(np.array([0, 1]), np.array([5]), num_workers=2, tile_len=1)
        >>> pages = (np.array(p, dtype=np.int32) for p in ([0, 3], [2, 1, 0]))
        >>> round(split_kv_decode(q, k, v, *pages, plan, worker).out.item(), 4)
        3.0
    """
    raise NotImplementedError


def cut_evenly(
    num_keys: Int[np.ndarray, " tiles"], num_workers: int
) -> tuple[
    Int[np.ndarray, " N"],
    Int[np.ndarray, " N"],
    Int[np.ndarray, " N"],
    Int[np.ndarray, " N"],
]:
    """Challenge: give every worker the same number of keys, to within one.

    `plan_work` gives a worker one item, so a worker that gets the end of a tile has
    less to do. Here a worker may have several items, of one tile or of many. Return at
    most tiles + W - 1 items for W workers, because every additional item is another
    partial state to merge. If there are fewer keys than workers, some workers have no
    item. There may be many millions of keys: use no Python loop over keys.

    Args:
        num_keys: keys of each tile, 1 or more.
        num_workers: W, 1 or more.

    Returns:
        workers, tiles, first_keys, end_keys, of any integer dtype: item i is the keys
        first_keys[i] to end_keys[i] - 1 of tile tiles[i], computed by worker
        workers[i]. The items may come in any order. Each key of each tile is in exactly
        one item, and no item is empty.

    Example: 12 keys and 3 workers, 4 keys each. One cut falls between the tiles, so
    there are only 3 items.

        >>> workers, tiles, first_keys, end_keys = cut_evenly(np.array([8, 4]), 3)
        >>> sorted(zip(tiles.tolist(), first_keys.tolist(), end_keys.tolist()))
        [(0, 0, 4), (0, 4, 8), (1, 0, 4)]
    """
    raise NotImplementedError
