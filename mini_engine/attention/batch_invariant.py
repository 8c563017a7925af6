"""Attention whose bits depend on a query's own sequence alone, in plain PyTorch on a CPU.

How a kernel divides its work, and therefore the order of its sums, depends on the numbers of queries and of keys. A
query must have the same bits in a prompt, in a chunk of one, and as a decode. So the shape of every call is made a
function of the query's position. Explained in chapter 14.
"""

from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn import functional as F

from mini_engine.attention.naive import alibi_bias
from mini_engine.attention.spec import AttentionSpec
from mini_engine.attention.state import attention_state
from mini_engine.attention.torch import SequencePlan, TorchBackend
from mini_engine.batch import StepBatch

TILE = 8  # queries; larger tiles make prompts faster and decodes slower


@dataclass(frozen=True)
class QueryTile:
    """The queries at TILE positions of a sequence, and the keys from position 0 to the last of these positions.

    Attributes:
        positions: [TILE] the positions.
        masks: for each window of the model's layers, the keys that each query sees.
    """

    positions: Int[Tensor, " tile"]
    masks: dict[int | None, Bool[Tensor, "tile m"]]


@dataclass(frozen=True)
class TiledSequence(SequencePlan):
    """A sequence of a step, and the tiles that its queries are in.

    Attributes:
        tiles: the tiles, in order.
        first_row: row of the first query in the first tile.
        num_keys: keys of the last tile.
        has_gaps: whether keys have been evicted.
    """

    tiles: list[QueryTile]
    first_row: int
    num_keys: int
    has_gaps: bool


class BatchInvariantBackend(TorchBackend):
    """The reference in tiles of queries: positions 0 to 7 of a sequence are a tile, positions 8 to 15 the next one.

    A tile is computed whole, over the keys from position 0 to its end, whichever of its queries the step has. The other
    queries are zeros, and so are keys that do not exist yet or have been evicted. A masked key has the weight 0, which
    changes no sum. A query is therefore always in the same row of a call of the same shape. A decode computes a tile
    for one query, and a prompt takes one call for every TILE tokens.
    """

    def _plan_sequences(self, batch: StepBatch, sequences: range) -> list[SequencePlan]:
        return [self._tiled(sequence) for sequence in super()._plan_sequences(batch, sequences)]

    def _tiled(self, sequence: SequencePlan) -> TiledSequence:
        first, last = sequence.query_positions[[0, -1]].tolist()
        num_keys = (last // TILE + 1) * TILE
        exists = torch.zeros(num_keys, dtype=torch.bool).index_fill_(0, sequence.key_positions, True)
        key_positions = torch.arange(num_keys)
        nothing = torch.zeros((), dtype=torch.long)  # no mask depends on row or head
        tiles = []
        for end in range((first // TILE + 1) * TILE, num_keys + 1, TILE):
            keys, positions = slice(end), key_positions[end - TILE : end]
            masks = {
                window: mask_mod(nothing, nothing, positions[:, None], key_positions[keys]) & exists[keys]
                for window, mask_mod in self._mask_mods.items()
            }
            tiles.append(QueryTile(positions, masks))
        has_gaps = len(sequence.key_positions) <= last
        return TiledSequence(
            **vars(sequence), tiles=tiles, first_row=first % TILE, num_keys=num_keys, has_gaps=has_gaps
        )

    def _attend(
        self, spec: AttentionSpec, sequence: SequencePlan, q: Float[Tensor, "n Hq D"]
    ) -> Float[Tensor, "n Hq D"]:
        assert isinstance(sequence, TiledSequence)
        before = sequence.first_row
        k, v = (_placed(x, sequence) for x in self._gather(spec, sequence, q.dtype))
        queries = F.pad(q, (0, 0, 0, 0, before, -(before + len(q)) % TILE)).split(TILE)
        tiles = zip(sequence.tiles, queries, strict=True)
        out = torch.cat([self._attend_tile(spec, tile, own, k, v) for tile, own in tiles])
        return out[before : before + len(q)]

    def _attend_tile(
        self,
        spec: AttentionSpec,
        tile: QueryTile,
        q: Float[Tensor, "tile Hq D"],
        k: Float[Tensor, "keys Hk D"],
        v: Float[Tensor, "keys Hk D"],
    ) -> Float[Tensor, "tile Hq D"]:
        mask, bias = tile.masks[spec.window], None
        num_keys = mask.shape[1]
        if spec.alibi_slopes is not None:
            slopes = torch.tensor(spec.alibi_slopes, dtype=torch.promote_types(q.dtype, torch.float32))
            bias = alibi_bias(slopes, tile.positions, torch.arange(num_keys))
        options: dict[str, Any] = {"scale": spec.scale, "mask": mask, "bias": bias, "softcap": spec.softcap}
        if spec.has_sinks:  # as in TorchBackend
            state = attention_state(q, k[:num_keys], v[:num_keys], **options)
            return self._merge_sinks(spec, state).out.to(q.dtype)
        return self.parts.masked_attention(q, k[:num_keys], v[:num_keys], **options)


def _placed(x: Float[Tensor, "m Hk D"], sequence: TiledSequence) -> Float[Tensor, "keys Hk D"]:
    """Put the keys or values of a sequence at their positions, and zeros at the others."""
    if not sequence.has_gaps:
        return F.pad(x, (0, 0, 0, 0, 0, sequence.num_keys - len(x)))
    return x.new_zeros(sequence.num_keys, *x.shape[1:]).index_copy_(0, sequence.key_positions, x)
