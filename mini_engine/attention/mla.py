"""Multi-head latent attention (MLA; DeepSeek-AI 2024, "DeepSeek-V2", section 2.1), in its two equal forms.

A token stores a latent of a few hundred numbers and one rotated key. The key of head h is W_UK[h] latent with the
rotated key appended, and its value is W_UV[h] latent. So a score is

    q_nope · (W_UK[h] latent) + q_rope · rotated  =  (W_UK[h]^T q_nope) · latent + q_rope · rotated

The left side is the un-absorbed form. It computes each head's keys and values from the latents, once for all queries.
Then a pair of query and key costs little, so this form suits prompts. The right side is the absorbed form: the matrix
moves to the query, and the latents are the keys of all heads (multi-query attention). Because the weighted sum of
values is W_UV[h] times the weighted sum of latents, the latents are also the values. This form reads only what the
cache holds, so it suits decodes, and chunks of a prompt whose earlier tokens are in the cache.

Both forms are written here as ordinary attention whose keys and values have the same size, for any function `attend`
that computes it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional as F

from mini_engine.attention.spec import MLASizes

Attention = Callable[[Tensor, Tensor, Tensor], Tensor]  # takes queries, keys and values of one sequence


@dataclass(frozen=True)
class UpProjections:
    """The matrices of one layer that compute each head's key and value from a latent; weights of the model.

    Attributes:
        weight: [H, N + V, L] W_UK of each head above its W_UV, as in the checkpoint's `kv_b_proj`; N is
            `qk_nope_head_dim`, V is `v_head_dim`, and L is `kv_lora_rank`.
        num_keys: N.
    """

    weight: Float[Tensor, "H NV L"]
    num_keys: int

    @classmethod
    def of(cls, kv_b_proj: Float[Tensor, "rows L"], sizes: MLASizes) -> UpProjections:
        """View the matrices of all heads in one of the checkpoint."""
        rows = sizes.qk_nope_head_dim + sizes.v_head_dim
        return cls(kv_b_proj.unflatten(0, (-1, rows)), sizes.qk_nope_head_dim)

    @property
    def keys(self) -> Float[Tensor, "H N L"]:
        """W_UK of each head."""
        return self.weight[:, : self.num_keys]

    @property
    def values(self) -> Float[Tensor, "H V L"]:
        """W_UV of each head."""
        return self.weight[:, self.num_keys :]

    def expand(
        self, latents: Float[Tensor, "m 1 L"], rotated: Float[Tensor, "m 1 R"]
    ) -> tuple[Float[Tensor, "m H D"], Float[Tensor, "m H V"]]:
        """Compute the keys and values of all heads, in one product."""
        expanded = F.linear(latents[:, 0], self.weight.flatten(0, 1)).unflatten(1, self.weight.shape[:2])
        keys, values = expanded[..., : self.num_keys], expanded[..., self.num_keys :]
        return torch.cat((keys, rotated.expand(-1, keys.shape[1], -1)), dim=-1), values

    def absorb(self, q: Float[Tensor, "n H D"]) -> tuple[Float[Tensor, "n H L"], Float[Tensor, "n H R"]]:
        """Return the queries over latents, and the rotated part of the queries."""
        over_latents = torch.bmm(q[..., : self.num_keys].transpose(0, 1), self.keys)
        return over_latents.transpose(0, 1), q[..., self.num_keys :]

    def values_of(self, mixed: Float[Tensor, "n H L"]) -> Float[Tensor, "n H V"]:
        """Apply W_UV to weighted sums of latents."""
        return torch.bmm(mixed.transpose(0, 1), self.values.transpose(1, 2)).transpose(0, 1)


def unabsorbed_attention(
    up: UpProjections,
    q: Float[Tensor, "n H D"],
    latents: Float[Tensor, "m 1 L"],
    rotated: Float[Tensor, "m 1 R"],
    attend: Attention,
) -> Float[Tensor, "n H V"]:
    """Compute attention over the keys and values of each head.

    Args:
        up: the layer's matrices.
        q: queries; the last R numbers of each head are rotated.
        latents: latents of the m keys.
        rotated: their rotated keys.
        attend: attention of queries, keys and values of H heads of size D. The values are padded with zeros to that
            size, which must be V or more.
    """
    keys, values = up.expand(latents, rotated)
    size = values.shape[-1]
    return attend(q, keys, F.pad(values, (0, keys.shape[-1] - size)))[..., :size]


def absorbed_attention(
    up: UpProjections,
    q: Float[Tensor, "n H D"],
    latents: Float[Tensor, "m 1 L"],
    rotated: Float[Tensor, "m 1 R"],
    attend: Attention,
) -> Float[Tensor, "n H V"]:
    """Compute attention over the latents, as they are stored; the arguments are those of `unabsorbed_attention`.

    `attend` gets H query heads and one KV head, all of size L + R. The rotated keys stay in the values, where they
    cost less than a copy without them, and their weighted sum is dropped.
    """
    keys = torch.cat((latents, rotated), dim=-1)
    return up.values_of(attend(torch.cat(up.absorb(q), dim=-1), keys, keys)[..., : latents.shape[-1]])
