"""A mixture of experts on a GPU, in four or five launches: `models.moe.mix_experts` is the reference.

1. `_logits` multiplies tokens by the router's matrix, and computes the factor 1 / rms of each token's norm.
2. `_route` chooses the experts. A block of tokens is a matrix [tokens, experts] of what is chosen, and a cumulative sum
   down its columns gives each pair (token, expert) its place among the pairs sorted by expert. With more tokens than a
   block has, `_place` does so once all blocks have been counted. For a few tokens, all ranks are counted at once, and
   an expert is chosen if its rank is less than k. For more, that is more work than k maxima, one after the other.
3. `_gate_up_tiles` gathers tokens, multiplies them by gate and up, and applies SwiGLU. A tile has pairs of one expert,
   and the number of tiles is read on the device, so the launches depend on the number of tokens only and a CUDA graph
   can record them (the alignment of MegaBlocks, Gale et al. 2023, as in vLLM's fused MoE).
4. `_down_tiles` multiplies by down, and by the weight of the pair.
5. `_add_slots` adds the k results of each token, in their order, so the sum has the same bits each time.

The weight is the left matrix of each product, because Hopper's tensor cores multiply 64 rows or more of it by as few as
8 tokens. Up to MOST_TOKENS tokens seldom share an expert. Then tiles would be nearly empty, and matrix times vector
takes their place, as in `gemv.py`: one program multiplies rows of one expert for one pair, and the last launch adds the
k experts while it multiplies. The router is multiplied in the same way. Experts that several such tokens share are read
several times, mostly from the L2 cache.

Explained in chapter 15.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, no_type_check

import torch
import triton
import triton.language as tl
from jaxtyping import Float, Float32, Int32
from torch import Tensor

from mini_engine.kernels.gemv import let_next_start_and_wait, load_rows, load_token
from mini_engine.models.config import MoEConfig
from mini_engine.models.linear import linear
from mini_engine.models.moe import MoE, Multiply

MOST_TOKENS = 4  # multiplied as vectors
ROUTED = 4096  # elements of a block's matrix [tokens, experts]
COMPARED = 16_384  # pairs of experts of a block that are compared at a time
ROUTER_ROWS = 1  # rows of the router that a program holds
ELEMENTS = 8192  # weights of gate and up that a program holds in the registers of 4 warps
DOWN_ROWS = 2  # rows of down of each expert that a program holds
TILE_TOKENS = 16, 128  # fewest and most pairs of a tile
SUMMED = 1024  # columns that a program of `_add_slots` adds


@dataclass(frozen=True)
class TileShape:
    """The sizes of a program of the tensor cores: rows and columns of the weight at a time, warps, and buffers.

    In float32, a program has half of the columns.
    """

    rows: int
    columns: int
    num_warps: int
    num_stages: int


# By the most pairs of a tile, for `_gate_up_tiles`, which has as many rows of up as of the gate, and for `_down_tiles`.
# Two programs of 4 warps fit into an SM, so one of them reads while the other starts or ends.
SHAPES = {16: TileShape(64, 64, 4, 6), 32: TileShape(64, 64, 4, 5), 64: TileShape(64, 64, 4, 4)}
SHAPES |= {128: TileShape(128, 64, 8, 4)}
DOWN_SHAPES = {16: TileShape(64, 128, 4, 5), 32: TileShape(64, 128, 4, 4), 64: TileShape(128, 64, 4, 4)}
DOWN_SHAPES |= {128: TileShape(256, 64, 8, 4)}


def mix_experts(
    x: Float[Tensor, "T hidden"],
    logits: Float[Tensor, "T E"],
    gate_up: Float[Tensor, "E I2 hidden"],
    down: Float[Tensor, "E hidden I"],
    moe: MoEConfig,
    activation: Callable[[Tensor], Tensor],
    multiply: Multiply = linear,
) -> Float[Tensor, "T hidden"]:
    """Compute `models.moe.mix_experts`, whose arguments these are, for SiLU and any dtype but float64.

    `activation` and `multiply` have their own code here.
    """
    return _mix(x, logits, None, gate_up, down, moe, None, pdl=False)


def add_experts(x: Float[Tensor, "T hidden"], mlp: MoE, eps: float, *, pdl: bool = False) -> Float[Tensor, "T hidden"]:
    """Add the experts of normalized tokens to the residual stream, in place.

    The router's logits stay in float32. The norm has no weights: they must have been folded
    (`PreNormLayer.fold_norms`).

    Args:
        x: contiguous, not normalized; overwritten.
        mlp: the mixture of experts, with SiLU.
        eps: epsilon of the norm.
        pdl: launch each kernel before the previous one has ended; needs a GPU of compute capability 9.0 or higher.
    """
    logits, factors = router_logits(x, mlp.router.weight, eps, pdl=pdl)
    return _mix(x, logits, factors, mlp.gate_up, mlp.down, mlp.moe, x, pdl=pdl)


def router_logits(
    x: Float[Tensor, "T hidden"], weight: Float[Tensor, "E hidden"], eps: float, *, pdl: bool = False
) -> tuple[Float32[Tensor, "T E"], Float32[Tensor, " T"]]:
    """Compute `norm(x) @ weight.T`, where `norm` is RMSNorm without weights, and the norm's factor of each token."""
    (num_tokens, hidden), num_experts = x.shape, len(weight)
    logits = x.new_empty(num_tokens, num_experts, dtype=torch.float32)
    factors = x.new_empty(num_tokens, dtype=torch.float32)
    if 0 < num_tokens <= MOST_TOKENS:
        _logits_vectors[(triton.cdiv(num_experts, ROUTER_ROWS),)](
            x, weight, eps, logits, factors, num_tokens, num_experts, HIDDEN=hidden,
            TOKENS=triton.next_power_of_2(num_tokens), ROWS=ROUTER_ROWS, **_launch(pdl),
        )  # fmt: skip
        return logits, factors
    few = num_tokens <= 512  # one wave of programs, each of which keeps all it reads in flight
    tokens, experts, columns = (16, 16, 512) if few else (64, max(16, triton.next_power_of_2(num_experts)), 64)
    experts = min(experts, 128)
    if num_tokens:
        _logits[(triton.cdiv(num_tokens, tokens), triton.cdiv(num_experts, experts))](
            x, weight, eps, logits, factors, num_tokens, num_experts, HIDDEN=hidden, TOKENS=tokens, EXPERTS=experts,
            COLUMNS=min(columns, max(16, triton.next_power_of_2(hidden))), num_stages=4, **_launch(pdl),
        )  # fmt: skip
    return logits, factors


@dataclass(frozen=True)
class Pairs:
    """The pairs (token, expert) of a step. Token t and its s-th expert are pair t k + s.

    Attributes:
        weights: by pair.
        experts: by pair.
        order: the pairs sorted by expert, those of an expert by token.
        tiles: for each tile its expert, and the first and the last place in `order` plus one; only the first
            `num_tiles` have values.
        num_tiles: on the device.
        tile_tokens: the most pairs of a tile.
    """

    weights: Float32[Tensor, "T k"]
    experts: Int32[Tensor, "T k"]
    order: Int32[Tensor, " P"]
    tiles: Int32[Tensor, "3 tiles"]
    num_tiles: Int32[Tensor, "1"]
    tile_tokens: int


def pair(logits: Float[Tensor, "T E"], moe: MoEConfig, tile_tokens: int, *, pdl: bool = False) -> Pairs:
    """Choose experts as `models.moe.route` does, and sort the pairs into tiles, without synchronizing.

    Args:
        logits: contiguous. NaN counts as the smallest number.
        moe: how many experts to choose, and how to scale their weights.
        tile_tokens: the most pairs of a tile.
        pdl: see `add_experts`.
    """
    (num_tokens, num_experts), k = logits.shape, moe.num_experts_per_tok
    num_pairs = num_tokens * k
    # Each of the experts that have pairs has a tile that is not full.
    most_tiles = min(num_pairs, (num_pairs + min(num_pairs, num_experts) * (tile_tokens - 1)) // tile_tokens)
    padded = triton.next_power_of_2(num_experts)
    block = min(max(1, ROUTED // padded), triton.next_power_of_2(max(num_tokens, 1)))
    num_blocks = triton.cdiv(num_tokens, block)
    integers = partial(logits.new_empty, dtype=torch.int32)
    pairs = Pairs(
        weights=logits.new_empty((num_tokens, k), dtype=torch.float32),
        experts=integers((num_tokens, k)),
        order=integers((num_pairs,)),
        tiles=integers((3, most_tiles)),
        num_tiles=integers((1,)),
        tile_tokens=tile_tokens,
    )
    if not num_tokens:
        return pairs
    many = num_blocks > 1
    counts = integers((num_blocks, num_experts)) if many else pairs.order  # not written otherwise, as `slots`
    slots = logits.new_empty((num_tokens, num_experts), dtype=torch.int8) if many else pairs.order
    places = pairs.order, pairs.tiles, pairs.num_tiles, num_tokens, num_experts, most_tiles
    sizes = {"K": k, "BLOCK": block, "EXPERTS": padded, "TILE_TOKENS": tile_tokens, **_launch(pdl)}
    others = min(padded, max(1, COMPARED // (block * padded))) if block <= MOST_TOKENS else None
    _route[(num_blocks,)](
        logits, moe.routed_scaling_factor, pairs.weights, pairs.experts, counts, slots, *places,
        NORMALIZE=moe.norm_topk_prob, MANY=many, OTHERS=others, **sizes,
    )  # fmt: skip
    if many:
        _place[(num_blocks,)](counts, slots, *places, num_blocks, **sizes)
    return pairs


def tile_size(num_pairs: int, num_experts: int) -> int:
    """Return the pairs of a tile: about twice as many as an expert has on average, so most experts have one tile."""
    fewest, most = TILE_TOKENS
    return min(most, max(fewest, triton.next_power_of_2(triton.cdiv(2 * num_pairs, num_experts))))


def _mix(
    x: Float[Tensor, "T hidden"],
    logits: Float[Tensor, "T E"],
    factors: Float32[Tensor, " T"] | None,
    gate_up: Float[Tensor, "E I2 hidden"],
    down: Float[Tensor, "E hidden I"],
    moe: MoEConfig,
    residual: Float[Tensor, "T hidden"] | None,
    *,
    pdl: bool,
) -> Float[Tensor, "T hidden"]:
    """Mix the experts of tokens, multiplied by `factors` if given, and add them to `residual`, in place, if given."""
    (num_tokens, hidden), k, size = x.shape, moe.num_experts_per_tok, moe.moe_intermediate_size
    out = torch.empty_like(x) if residual is None else residual
    if not num_tokens:
        return out
    pairs = pair(logits.contiguous(), moe, tile_size(num_tokens * k, moe.num_experts), pdl=pdl)
    inner = x.new_empty(num_tokens * k, size)
    scales = pairs.weights if factors is None else factors  # a pointer that is not read without factors
    common = {"K": k, "HIDDEN": hidden, "SIZE": size, "HAS_FACTORS": factors is not None}
    ends: dict[str, Any] = {"ADD": residual is not None} | _launch(pdl)
    x = x.contiguous()
    if num_tokens <= MOST_TOKENS:
        rows = max(1, ELEMENTS // triton.next_power_of_2(hidden) // 2)
        _gate_up_vectors[(triton.cdiv(size, rows), num_tokens * k)](
            x, scales, pairs.experts, gate_up, inner, ROWS=rows, **common, **_launch(pdl)
        )
        _down_vectors[(triton.cdiv(hidden, DOWN_ROWS), num_tokens)](
            inner, pairs.experts, pairs.weights, down, out, K=k, HIDDEN=hidden, SIZE=size, ROWS=DOWN_ROWS, **ends
        )
        return out
    shape, down_shape = SHAPES[pairs.tile_tokens], DOWN_SHAPES[pairs.tile_tokens]
    tiles, most_tiles = (pairs.order, pairs.tiles, pairs.num_tiles), pairs.tiles.shape[1]
    _gate_up_tiles[(triton.cdiv(size, shape.rows), most_tiles)](
        x, scales, *tiles, gate_up, inner, most_tiles, TOKENS=pairs.tile_tokens, **common,
        **_program(shape, hidden, x.dtype, pdl),
    )  # fmt: skip
    of_pairs = x.new_empty(num_tokens * k, hidden)
    _down_tiles[(triton.cdiv(hidden, down_shape.rows), most_tiles)](
        inner, pairs.weights, *tiles, down, of_pairs, most_tiles, HIDDEN=hidden, SIZE=size, TOKENS=pairs.tile_tokens,
        **_program(down_shape, size, x.dtype, pdl),
    )  # fmt: skip
    _add_slots[(num_tokens, triton.cdiv(hidden, SUMMED))](of_pairs, out, K=k, HIDDEN=hidden, COLUMNS=SUMMED, **ends)
    return out


def _launch(pdl: bool) -> dict[str, Any]:
    return {"PDL": True, "launch_pdl": True} if pdl else {"PDL": False}


def _program(shape: TileShape, num_columns: int, dtype: torch.dtype, pdl: bool) -> dict[str, Any]:
    columns = min(shape.columns * 2 // dtype.itemsize, max(16, triton.next_power_of_2(num_columns)))
    options = {"num_warps": shape.num_warps, "num_stages": shape.num_stages}
    return {"ROWS": shape.rows, "COLUMNS": columns, **options, **_launch(pdl)}


@no_type_check
@triton.jit(do_not_specialize=["num_tokens"])
def _logits(
    x, weight, eps, logits, factors, num_tokens, num_experts, HIDDEN: tl.constexpr, TOKENS: tl.constexpr,
    EXPERTS: tl.constexpr, COLUMNS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    expert = tl.program_id(1) * EXPERTS + tl.arange(0, EXPERTS)
    is_token, is_expert = (token < num_tokens)[:, None], (expert < num_experts)[None, :]
    from_token = x + token.to(tl.int64)[:, None] * HIDDEN
    product, squares = tl.zeros((TOKENS, EXPERTS), tl.float32), tl.zeros((TOKENS,), tl.float32)
    let_next_start_and_wait(PDL)
    for first in range(0, HIDDEN, COLUMNS):
        column = first + tl.arange(0, COLUMNS)
        values = tl.load(from_token + column[None, :], mask=is_token & (column < HIDDEN)[None, :], other=0.0)
        rows = tl.load(
            weight + expert[None, :] * HIDDEN + column[:, None], mask=is_expert & (column < HIDDEN)[:, None], other=0.0
        )
        product = tl.dot(values, rows, product, input_precision="ieee")
        wide = values.to(tl.float32)
        squares += tl.sum(wide * wide, 1)
    factor = tl.rsqrt(squares / HIDDEN + eps)
    to_token = logits + token.to(tl.int64)[:, None] * num_experts
    tl.store(to_token + expert[None, :], product * factor[:, None], mask=is_token & is_expert)
    tl.store(factors + token, factor, mask=(token < num_tokens) & (tl.program_id(1) == 0))


@no_type_check
@triton.jit(do_not_specialize=["num_tokens"])
def _logits_vectors(
    x, weight, eps, logits, factors, num_tokens, num_experts, HIDDEN: tl.constexpr, TOKENS: tl.constexpr,
    ROWS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    exists = row < num_experts
    loaded = load_rows(weight, row, exists, HIDDEN)
    let_next_start_and_wait(PDL)
    for token in tl.static_range(TOKENS):
        if token < num_tokens:
            values = load_token(x, token, HIDDEN)
            factor = tl.rsqrt(tl.sum(values * values, 0) / HIDDEN + eps)
            product = tl.sum(loaded.to(tl.float32) * values[None, :], 1) * factor
            tl.store(logits + token * num_experts + row, product, mask=exists)
            if tl.program_id(0) == 0:
                tl.store(factors + token, factor)


@no_type_check
@triton.jit(do_not_specialize=["num_tokens", "most_tiles"])
def _route(
    logits, scale, weights, experts, counts, slots, order, tiles, num_tiles, num_tokens, num_experts, most_tiles,
    NORMALIZE: tl.constexpr, MANY: tl.constexpr, K: tl.constexpr, BLOCK: tl.constexpr, EXPERTS: tl.constexpr,
    OTHERS: tl.constexpr, TILE_TOKENS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    expert = tl.arange(0, EXPERTS)
    is_token, is_expert = (token < num_tokens)[:, None], (expert < num_experts)[None, :]
    let_next_start_and_wait(PDL)
    at = token[:, None] * num_experts + expert[None, :]
    own = load_scores(logits, token, expert, num_tokens, num_experts)
    exponentials = tl.exp(own - tl.max(own, 1)[:, None])
    if OTHERS is not None:
        rank = tl.zeros((BLOCK, EXPERTS), tl.int32)  # how many experts are better; of equal ones, the first
        for first in range(0, EXPERTS, OTHERS):
            other = first + tl.arange(0, OTHERS)
            theirs = load_scores(logits, token, other, num_tokens, num_experts)[:, None, :]
            is_earlier = other[None, None, :] < expert[None, :, None]
            is_better = (theirs > own[:, :, None]) | ((theirs == own[:, :, None]) & is_earlier)
            rank += tl.sum(is_better.to(tl.int32), 2)
        slot = tl.where((rank < K) & is_expert, rank, -1)
    else:
        slot = tl.full((BLOCK, EXPERTS), -1, tl.int32)
        for i in tl.static_range(K):
            is_best = own == tl.max(own, 1)[:, None]
            best = tl.min(tl.where(is_best, expert[None, :], EXPERTS), 1)  # of equal ones, the first
            slot = tl.where(expert[None, :] == best[:, None], i, slot)
            own = tl.where(expert[None, :] == best[:, None], float("-inf"), own)
    tl.store(experts + token[:, None] * K + slot, expert[None, :], mask=(slot >= 0) & is_token)
    is_chosen = (slot >= 0) & is_token
    total = tl.sum(tl.where(slot >= 0, exponentials, 0.0) if NORMALIZE else exponentials, 1)
    tl.store(weights + token[:, None] * K + slot, exponentials / total[:, None] * scale, mask=is_chosen)
    of_expert = tl.sum(is_chosen.to(tl.int32), 0)
    if MANY:
        tl.store(counts + tl.program_id(0) * num_experts + expert, of_expert, mask=expert < num_experts)
        tl.store(slots + at, slot.to(tl.int8), mask=is_token & is_expert)
    else:
        write_places(
            token, expert, slot, is_chosen, tl.zeros_like(of_expert), of_expert, order, tiles, num_tiles, most_tiles,
            num_tokens, K, TILE_TOKENS,
        )  # fmt: skip


@no_type_check
@triton.jit
def load_scores(logits, token, expert, num_tokens, num_experts):
    """Load logits of tokens and experts [tokens, experts]; NaN is the smallest number, and -inf is no expert."""
    at = token[:, None] * num_experts + expert[None, :]
    is_expert = (expert < num_experts)[None, :]
    found = tl.load(logits + at, mask=(token < num_tokens)[:, None] & is_expert, other=0.0).to(tl.float32)
    return tl.where(is_expert, tl.where(found > -3e38, found, -3e38), float("-inf"))


@no_type_check
@triton.jit(do_not_specialize=["num_tokens", "most_tiles", "num_blocks"])
def _place(
    counts, slots, order, tiles, num_tiles, num_tokens, num_experts, most_tiles, num_blocks, K: tl.constexpr,
    BLOCK: tl.constexpr, EXPERTS: tl.constexpr, TILE_TOKENS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    expert, other = tl.arange(0, EXPERTS), tl.arange(0, BLOCK)
    is_token, is_expert = (token < num_tokens)[:, None], (expert < num_experts)[None, :]
    let_next_start_and_wait(PDL)
    before, total = tl.zeros((EXPERTS,), tl.int32), tl.zeros((EXPERTS,), tl.int32)
    for first in range(0, num_blocks, BLOCK):
        block = (first + other)[:, None]
        of_block = tl.load(
            counts + block * num_experts + expert[None, :], mask=(block < num_blocks) & is_expert, other=0
        )
        total += tl.sum(of_block, 0)
        before += tl.sum(tl.where(block < tl.program_id(0), of_block, 0), 0)
    at = token[:, None] * num_experts + expert[None, :]
    slot = tl.load(slots + at, mask=is_token & is_expert, other=-1).to(tl.int32)
    write_places(
        token, expert, slot, slot >= 0, before, total, order, tiles, num_tiles, most_tiles, num_tokens, K, TILE_TOKENS
    )


@no_type_check
@triton.jit
def write_places(
    token, expert, slot, is_chosen, before, total, order, tiles, num_tiles, most_tiles, num_tokens, K: tl.constexpr,
    TILE_TOKENS: tl.constexpr,
):  # fmt: skip
    """Write a block's pairs to their places in `order`; the first program also writes the tiles.

    Args:
        token: tokens of the block.
        expert: all experts, padded to a power of two.
        slot: which of its token's experts each pair [token, expert] is.
        is_chosen: which pairs exist.
        before: pairs of each expert in earlier blocks.
        total: pairs of each expert in all blocks.
    """
    chosen = is_chosen.to(tl.int32)
    ends = tl.cumsum(total, 0)
    place = (ends - total + before)[None, :] + tl.cumsum(chosen, 0) - chosen
    tl.store(order + place, token[:, None] * K + slot, mask=is_chosen)
    if tl.program_id(0) == 0:
        of_expert = (total + TILE_TOKENS - 1) // TILE_TOKENS
        tile = tl.cumsum(of_expert, 0) - of_expert
        tl.store(num_tiles, tl.sum(of_expert, 0))
        for i in range(0, (num_tokens + TILE_TOKENS - 1) // TILE_TOKENS):  # a token has an expert at most once
            exists = i < of_expert
            tl.store(tiles + tile + i, expert, mask=exists)
            tl.store(tiles + most_tiles + tile + i, ends - total + i * TILE_TOKENS, mask=exists)
            tl.store(tiles + 2 * most_tiles + tile + i, ends, mask=exists)


@no_type_check
@triton.jit(do_not_specialize=["most_tiles"])
def _gate_up_tiles(
    x, factors, order, tiles, num_tiles, gate_up, inner, most_tiles, K: tl.constexpr, HIDDEN: tl.constexpr,
    SIZE: tl.constexpr, HAS_FACTORS: tl.constexpr, TOKENS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    let_next_start_and_wait(PDL)
    tile = tl.program_id(1)
    if tile < tl.load(num_tiles):
        expert, pair, exists = load_tile(order, tiles, tile, most_tiles, TOKENS)
        row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
        of_gate = gate_up + (expert * 2 * SIZE + row)[:, None] * HIDDEN
        token = x + (pair // K)[None, :] * HIDDEN
        gate, up = tl.zeros((ROWS, TOKENS), tl.float32), tl.zeros((ROWS, TOKENS), tl.float32)
        for first in range(0, HIDDEN, COLUMNS):
            column = first + tl.arange(0, COLUMNS)
            is_weight = (row < SIZE)[:, None] & (column < HIDDEN)[None, :]
            values = tl.load(token + column[:, None], mask=exists[None, :] & (column < HIDDEN)[:, None], other=0.0)
            of_rows = tl.load(of_gate + column[None, :], mask=is_weight, other=0.0)
            gate = tl.dot(of_rows, values, gate, input_precision="ieee")
            of_rows = tl.load(of_gate + SIZE * HIDDEN + column[None, :], mask=is_weight, other=0.0)
            up = tl.dot(of_rows, values, up, input_precision="ieee")
        if HAS_FACTORS:
            factor = tl.load(factors + pair // K, mask=exists, other=0.0)[None, :]
            gate, up = gate * factor, up * factor
        result = gate / (1 + tl.exp(-gate)) * up
        to = inner + pair[None, :] * SIZE + row[:, None]
        tl.store(to, result.to(inner.dtype.element_ty), mask=exists[None, :] & (row < SIZE)[:, None])


@no_type_check
@triton.jit(do_not_specialize=["most_tiles"])
def _down_tiles(
    inner, weights, order, tiles, num_tiles, down, out, most_tiles, HIDDEN: tl.constexpr, SIZE: tl.constexpr,
    TOKENS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    let_next_start_and_wait(PDL)
    tile = tl.program_id(1)
    if tile < tl.load(num_tiles):
        expert, pair, exists = load_tile(order, tiles, tile, most_tiles, TOKENS)
        row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
        of_down, token = down + (expert * HIDDEN + row)[:, None] * SIZE, inner + pair[None, :] * SIZE
        product = tl.zeros((ROWS, TOKENS), tl.float32)
        for first in range(0, SIZE, COLUMNS):
            column = first + tl.arange(0, COLUMNS)
            is_weight = (row < HIDDEN)[:, None] & (column < SIZE)[None, :]
            values = tl.load(token + column[:, None], mask=exists[None, :] & (column < SIZE)[:, None], other=0.0)
            of_rows = tl.load(of_down + column[None, :], mask=is_weight, other=0.0)
            product = tl.dot(of_rows, values, product, input_precision="ieee")
        result = product * tl.load(weights + pair, mask=exists, other=0.0)[None, :]
        to = out + pair[None, :] * HIDDEN + row[:, None]
        tl.store(to, result.to(out.dtype.element_ty), mask=exists[None, :] & (row < HIDDEN)[:, None])


@no_type_check
@triton.jit
def load_tile(order, tiles, tile, most_tiles, TOKENS: tl.constexpr):
    """Load a tile's expert, its pairs, padded with pair 0, and which of them exist."""
    expert = tl.load(tiles + tile).to(tl.int64)
    place = tl.load(tiles + most_tiles + tile) + tl.arange(0, TOKENS)
    exists = place < tl.load(tiles + 2 * most_tiles + tile)
    return expert, tl.load(order + place, mask=exists, other=0).to(tl.int64), exists


@no_type_check
@triton.jit
def _add_slots(
    of_pairs, out, K: tl.constexpr, HIDDEN: tl.constexpr, COLUMNS: tl.constexpr, ADD: tl.constexpr, PDL: tl.constexpr
):
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    let_next_start_and_wait(PDL)
    total = tl.zeros((COLUMNS,), tl.float32)
    for slot in tl.static_range(K):
        of_pair = of_pairs + (token * K + slot) * HIDDEN
        total += tl.load(of_pair + column, mask=column < HIDDEN, other=0.0).to(tl.float32)
    to = out + token * HIDDEN + column
    if ADD:
        total += tl.load(to, mask=column < HIDDEN, other=0.0).to(tl.float32)
    tl.store(to, total.to(out.dtype.element_ty), mask=column < HIDDEN)


@no_type_check
@triton.jit
def _gate_up_vectors(
    x, factors, experts, gate_up, inner, K: tl.constexpr, HIDDEN: tl.constexpr, SIZE: tl.constexpr,
    HAS_FACTORS: tl.constexpr, ROWS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    pair = tl.program_id(1)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, triton.next_power_of_2(HIDDEN))
    is_weight = (row < SIZE)[:, None] & (column < HIDDEN)[None, :]
    let_next_start_and_wait(PDL)
    expert = tl.load(experts + pair).to(tl.int64)
    at = gate_up + (expert * 2 * SIZE + row)[:, None] * HIDDEN + column[None, :]
    of_gate = tl.load(at, mask=is_weight, other=0.0)
    of_up = tl.load(at + SIZE * HIDDEN, mask=is_weight, other=0.0)
    values = tl.load(x + pair // K * HIDDEN + column, mask=column < HIDDEN, other=0.0).to(tl.float32)[None, :]
    gate, up = tl.sum(of_gate.to(tl.float32) * values, 1), tl.sum(of_up.to(tl.float32) * values, 1)
    if HAS_FACTORS:
        factor = tl.load(factors + pair // K)
        gate, up = gate * factor, up * factor
    result = gate / (1 + tl.exp(-gate)) * up
    tl.store(inner + pair * SIZE + row, result.to(inner.dtype.element_ty), mask=row < SIZE)


@no_type_check
@triton.jit
def _down_vectors(
    inner, experts, weights, down, out, K: tl.constexpr, HIDDEN: tl.constexpr, SIZE: tl.constexpr, ROWS: tl.constexpr,
    ADD: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One program computes rows of a token: the sum over its experts is part of the product."""
    token = tl.program_id(1)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    slot = tl.arange(0, triton.next_power_of_2(K))
    column = tl.arange(0, triton.next_power_of_2(SIZE))
    let_next_start_and_wait(PDL)
    pair = token * K + slot
    expert = tl.load(experts + pair, mask=slot < K, other=0).to(tl.int64)
    at = (expert[None, :] * HIDDEN + row[:, None])[:, :, None] * SIZE + column[None, None, :]
    exists = ((slot < K)[None, :] & (row < HIDDEN)[:, None])[:, :, None] & (column < SIZE)[None, None, :]
    of_down = tl.load(down + at, mask=exists, other=0.0).to(tl.float32)
    values = tl.load(
        inner + pair[:, None] * SIZE + column[None, :], mask=(slot < K)[:, None] & (column < SIZE)[None, :], other=0.0
    )
    values = values.to(tl.float32) * tl.load(weights + pair, mask=slot < K, other=0.0)[:, None]
    total = tl.sum(tl.sum(of_down * values[None, :, :], 1), 1)
    to = out + token * HIDDEN + row
    if ADD:
        total += tl.load(to, mask=row < HIDDEN, other=0.0).to(tl.float32)
    tl.store(to, total.to(out.dtype.element_ty), mask=row < HIDDEN)
