"""`SparseAttentionConfig`: the options of sparse attention."""

from dataclasses import dataclass, fields
from typing import Any

from mini_engine.errors import ConfigError

METHODS = ("quest",)


@dataclass(frozen=True)
class SparseAttentionConfig:
    """Which keys the decodes of a request attend to. Prompts attend to all keys.

    Attributes:
        method: "quest": the pages whose keys may have the highest scores, selected for each query and KV head (see
            `attention.page_selection`).
        budget: most keys that a query attends to in each KV head, in whole pages. Attention over fewer keys is exact.
        num_dense_layers: the first layers, which attend to all keys. Their weights are spread over more keys than those
            of later layers (Tang et al. 2024). Layers with a sliding window attend to their whole window.
    """

    method: str
    budget: int
    num_dense_layers: int = 2

    def __post_init__(self) -> None:
        if self.method not in [*METHODS]:  # a list compares what cannot be hashed, too
            raise ConfigError(f"sparse_attention_config has the method {self.method!r}; choose from: quest")
        for name, least in {"budget": 1, "num_dense_layers": 0}.items():
            value = getattr(self, name)
            if type(value) is not int or not least <= value < 2**63:
                raise ConfigError(
                    f"sparse_attention_config: {name} is {str(value)[:40]}; give a whole number of at least {least}"
                )

    @classmethod
    def of(cls, options: Any) -> "SparseAttentionConfig":
        """Build from a mapping.

        Raises:
            ConfigError: for unknown names and impossible values.
        """
        names = [own.name for own in fields(cls)]
        if not isinstance(options, dict) or not {"method", "budget"} <= set(options):
            raise ConfigError(
                f"sparse_attention_config is {str(options)[:80]!r}; give a dictionary like "
                '{"method": "quest", "budget": 4096}'
            )
        if unknown := set(options) - set(names):
            raise ConfigError(
                f"sparse_attention_config has no {sorted(map(str, unknown))[0]!r}; it has {', '.join(names)}"
            )
        return cls(**options)
