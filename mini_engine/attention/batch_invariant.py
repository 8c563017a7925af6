"""Attention whose bits depend on a query's own sequence alone, in plain PyTorch on a CPU.

How a kernel divides its work, and therefore the order of its sums, depends on the numbers of queries and of keys. A
query must have the same bits in a prompt, in a chunk of one, and as a decode. So the shape of every call is made a
function of the query's position. Explained in chapter 04.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn import functional as F

from mini_engine.attention.naive import alibi_bias
from mini_engine.attention.spec import AttentionSpec
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
    """A sequence of a step, and the tiles that its queries are in."""

    tiles: list[QueryTile]


class BatchInvariantBackend(TorchBackend):
    """The reference in tiles of queries: positions 0 to 7 of a sequence are a tile, positions 8 to 15 the next one.

    A tile is computed whole, over the keys from position 0 to its end, whichever of its queries the step has. The other
    queries are zeros, and so are keys that do not exist yet or have been evicted. A masked key has the weight 0, which
    changes no sum. A query is therefore always in the same row of a call of the same shape. A decode computes a tile
    for one query, and a prompt takes one call for every TILE tokens.
    """

    def _plan_sequences(self, batch: StepBatch, sequences: range) -> list[SequencePlan]:
        return [
            TiledSequence(**vars(sequence), tiles=self._tiles(sequence))
            for sequence in super()._plan_sequences(batch, sequences)
        ]

    def _tiles(self, sequence: SequencePlan) -> list[QueryTile]:
        first, last = sequence.query_positions[[0, -1]].tolist()
        positions = torch.arange(first // TILE * TILE, (last // TILE + 1) * TILE)
        exists = torch.zeros(int(positions[-1]) + 1, dtype=torch.bool).index_fill_(0, sequence.key_positions, True)
        key_positions = torch.arange(len(exists))
        nothing = torch.zeros((), dtype=torch.long)  # no mask depends on row or head
        tiles = []
        for own in positions.split(TILE):
            keys = slice(int(own[-1]) + 1)
            masks = {
                window: mask_mod(nothing, nothing, own[:, None], key_positions[keys]) & exists[keys]
                for window, mask_mod in self._mask_mods.items()
            }
            tiles.append(QueryTile(own, masks))
        return tiles

    def _attend(
        self, spec: AttentionSpec, sequence: SequencePlan, q: Float[Tensor, "n Hq D"]
    ) -> Float[Tensor, "n Hq D"]:
        assert isinstance(sequence, TiledSequence)
        before = int(sequence.query_positions[0]) % TILE
        tiles, after = sequence.tiles, -(before + len(q)) % TILE
        num_keys = int(tiles[-1].positions[-1]) + 1
        k, v = (_placed(x, sequence, num_keys) for x in self._gather(spec, sequence, q.dtype))
        queries = F.pad(q, (0, 0, 0, 0, before, after)).split(TILE)
        out = torch.cat([self._attend_tile(spec, tile, own, k, v) for tile, own in zip(tiles, queries, strict=True)])
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
        options = {"scale": spec.scale, "mask": mask, "bias": bias, "softcap": spec.softcap}
        return self.parts.masked_attention(q, k[:num_keys], v[:num_keys], **options)


def _placed(x: Float[Tensor, "m Hk D"], sequence: SequencePlan, num_keys: int) -> Float[Tensor, "keys Hk D"]:
    """Put the keys or values of a sequence at their positions, and zeros at the others."""
    if len(x) == sequence.query_positions[-1] + 1:  # nothing has been evicted
        return F.pad(x, (0, 0, 0, 0, 0, num_keys - len(x)))
    return x.new_zeros(num_keys, *x.shape[1:]).index_copy_(0, sequence.key_positions, x)
