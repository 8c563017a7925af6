"""The attention of DeepSeek's models: multi-head latent attention (MLA), around `attend`.

The cache stores what `kv_a_proj_with_mqa` computes of a token, a latent and one rotated key, and not the keys and
values of the heads. Which of the two forms of the attention is computed is up to the backend (`attention.mla`).
"""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor, nn

from mini_engine.attention.mla import UpProjections
from mini_engine.attention.spec import Attend, AttentionSpec
from mini_engine.models.config import ModelConfig
from mini_engine.models.layers import LAYERS, ModelParts
from mini_engine.models.weights import Destination, Linear, empty_weight, projection

NORM_EPS = 1e-6  # of the norms inside the attention, whatever the configuration's `rms_norm_eps`


class LatentAttention(nn.Module):
    """Projects to queries, a latent and a rotated key, attends, and projects back.

    With `q_lora_rank`, the queries come from a latent of their own. The matrix that expands latents is stored as it is
    in a quantized model, too, because the absorbed form multiplies by its two halves separately.
    """

    def __init__(self, config: ModelConfig, spec: AttentionSpec, parts: ModelParts) -> None:
        super().__init__()
        assert spec.mla is not None, "this architecture has latents"
        self.spec, self.sizes, self.parts = spec, spec.mla, parts
        hidden, heads, formats = config.hidden_size, spec.num_qo_heads, config.formats
        prefix = f"{LAYERS}.{spec.layer}.self_attn."
        rank, q_rank, q_rows = self.sizes.kv_lora_rank, config.q_lora_rank, heads * spec.head_dim
        latent = {"kv_a_proj_with_mqa": rank + self.sizes.qk_rope_head_dim}
        queries = {"q_proj": q_rows} if q_rank is None else {"q_a_proj": q_rank}
        self.down = projection(formats, prefix, hidden, queries | latent)
        self.q_norm = None if q_rank is None else empty_weight(q_rank)
        self.q_up = None if q_rank is None else projection(formats, prefix, q_rank, {"q_b_proj": q_rows})
        self.latent_norm = empty_weight(rank)
        self.kv_up = Linear(rank, {"kv_b_proj": heads * (self.sizes.qk_nope_head_dim + self.sizes.v_head_dim)})
        self.o = projection(formats, prefix, heads * self.sizes.v_head_dim, {"o_proj": hidden})

    @property
    def up_projections(self) -> UpProjections:
        """The matrices that compute keys and values from latents."""
        return UpProjections.of(self.kv_up.weight, self.sizes)

    def forward(
        self, x: Float[Tensor, "T hidden"], cos: Float[Tensor, "T half"], sin: Float[Tensor, "T half"], attend: Attend
    ) -> Float[Tensor, "T hidden"]:
        sizes, norm = self.sizes, self.parts.rms_norm
        projected = self.down(x)
        rank, rope_dim = sizes.kv_lora_rank, sizes.qk_rope_head_dim
        q, latent, k_rope = projected.split((projected.shape[1] - rank - rope_dim, rank, rope_dim), dim=1)
        if self.q_up is not None:
            q = self.q_up(norm(q, self.q_norm, NORM_EPS))
        q = q.view(len(q), self.spec.num_qo_heads, self.spec.head_dim)
        q_nope, q_rope = q.split((sizes.qk_nope_head_dim, rope_dim), dim=2)
        # One call rotates the queries of all heads and the key that they share.
        rotated = self.parts.apply_rope(torch.cat((q_rope, k_rope[:, None]), dim=1), cos, sin, interleaved=True)
        q_rope, k_rope = rotated.split((self.spec.num_qo_heads, 1), dim=1)
        latent = norm(latent, self.latent_norm, NORM_EPS)[:, None]
        return self.o(attend(self.spec.layer, torch.cat((q_nope, q_rope), dim=2), latent, k_rope).flatten(1))

    def destinations(self) -> dict[str, Destination]:
        found = self.down.destinations() | self.kv_up.destinations() | self.o.destinations()
        found["kv_a_layernorm.weight"] = self.latent_norm
        if self.q_up is not None and self.q_norm is not None:
            found |= {"q_a_layernorm.weight": self.q_norm} | self.q_up.destinations()
        return found
