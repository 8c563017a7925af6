"""A backend for layer groups: an ordinary backend for each group, which sees only the pages of its own layers.

The groups share the tensors of the KV cache (`kv_cache/layer_groups.py`). A step is the same for all of them except for
its pages, so each backend plans its own `StepBatch` and knows nothing of the others. Explained in chapter 15.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from jaxtyping import Float
from torch import Tensor

from mini_engine.attention.backend import (
    BACKENDS,
    AttentionBackend,
    AttentionParts,
    KVCache,
    check_layers,
    create_backend,
)
from mini_engine.attention.mla import UpProjections
from mini_engine.attention.spec import AttentionSpec
from mini_engine.batch import StepBatch
from mini_engine.kv_cache.layer_groups import LayerGroup


class GroupedBackend(AttentionBackend):
    """Attention of a model whose layers are in groups.

    A step has levels only for the first group: layers with a window read few of the first pages, which requests share.

    Args:
        specs: one for each layer of the model.
        cache: the KV cache; tensor i stores layer i of each group.
        parts: the engine's replaceable parts.
        groups: the groups.
        backends: the backend of each group, which numbers the group's layers from 0.
    """

    def __init__(
        self,
        specs: Sequence[AttentionSpec],
        cache: KVCache,
        parts: AttentionParts,
        groups: Sequence[LayerGroup],
        backends: Sequence[AttentionBackend],
    ) -> None:
        super().__init__(specs, cache, parts)
        self._backends, first = backends, backends[0]
        self._places = {
            layer: (backend, index)
            for group, backend in zip(groups, backends, strict=True)
            for index, layer in enumerate(group.layers)
        }
        self.planner, self.bypasses = first.planner, first.bypasses  # type: ignore[misc]
        self.captures, self.outputs_apart = first.captures, first.outputs_apart  # type: ignore[misc]
        self.takes_single_queries = first.takes_single_queries  # type: ignore[misc]

    def plan(self, batch: StepBatch) -> None:
        for backend, of_group in zip(self._backends, (batch, *batch.other_groups), strict=True):
            backend.plan(of_group)

    def append(self, layer: int, k: Float[Tensor, "T Hk D"], v: Float[Tensor, "T Hk Dv"]) -> None:
        backend, index = self._places[layer]
        backend.append(index, k, v)

    def run(self, layer: int, q: Float[Tensor, "T Hq D"]) -> Float[Tensor, "T Hq Dv"]:
        backend, index = self._places[layer]
        return backend.run(index, q)

    def run_into(self, layer: int, q: Float[Tensor, "T Hq D"], out: Float[Tensor, "T Hq Dv"]) -> None:
        backend, index = self._places[layer]
        backend.run_into(index, q, out)


def create_grouped_backend(
    name: str,
    specs: Sequence[AttentionSpec],
    groups: Sequence[LayerGroup],
    cache: KVCache,
    parts: AttentionParts,
    sinks: Mapping[int, Float[Tensor, " Hq"]],
    up_projections: Mapping[int, UpProjections],
) -> AttentionBackend:
    """Build a backend for groups of layers, or `create_backend`'s if there is only one group.

    Args:
        name: a key of BACKENDS.
        specs: one for each layer of the model.
        groups: the groups.
        cache: the KV cache; tensor i stores layer i of each group.
        parts: the engine's replaceable parts.
        sinks: as for `create_backend`.
        up_projections: as for `create_backend`; layers in several groups have none.

    Raises:
        ConfigError: as for `create_backend`.
    """
    if len(groups) == 1:
        return create_backend(name, specs, cache, parts, sinks, up_projections)
    check_layers(name, specs, cache, sinks, up_projections)
    backends = []
    for group in groups:
        own = [replace(specs[layer], layer=index) for index, layer in enumerate(group.layers)]
        backend = BACKENDS[name].on(cache.device.type).create(own, cache, parts)
        backend.sinks = {index: sinks[layer] for index, layer in enumerate(group.layers) if layer in sinks}
        backends.append(backend)
    return GroupedBackend(specs, cache, parts, groups, backends)
