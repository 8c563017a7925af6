"""The `sparse` backend on a GPU: `PagedBackend`, with page selection in the decodes of the layers that have a budget.

Everything that depends on the keys (bounds, selection, attention) is computed on the device, and in shapes that depend
only on the number of decodes and the longest request that the engine allows. So CUDA graphs record it, and the host
reads nothing back. Layers without a budget, and prompts, run on FlashInfer. Explained in chapter 15.
"""

from collections.abc import Sequence
from typing import Any, ClassVar

from jaxtyping import Float
from torch import Tensor

from mini_engine.attention.backend import AttentionParts
from mini_engine.attention.page_selection import PageSelection, SummarizedCache
from mini_engine.attention.paged import PagedBackend
from mini_engine.attention.spec import AttentionSpec
from mini_engine.batch import StepBatch


class SparsePagedBackend(PagedBackend):
    """See the module, and `SparseBackend` for the tokens that select pages.

    Args:
        specs: one for each layer of the model, in order.
        cache: the KV cache, with summaries, on a GPU.
        parts: the engine's replaceable parts.
        options: those of `PagedBackend`, without levels.

    Attributes:
        selection: selects the pages of decodes, and attends to them.
    """

    captures_prompts: ClassVar[bool] = False
    outputs_apart: ClassVar[bool] = True

    def __init__(
        self, specs: Sequence[AttentionSpec], cache: SummarizedCache, parts: AttentionParts, **options: Any
    ) -> None:
        super().__init__(specs, cache, parts, **options)
        self.selection = PageSelection(specs, cache)

    def plan(self, batch: StepBatch) -> None:
        super().plan(batch)
        self.selection.plan(batch)
        self._num_decodes = batch.num_decodes

    def run(self, layer: int, q: Float[Tensor, "T Hq D"]) -> Float[Tensor, "T Hq D"]:
        if self.specs[layer].key_budget is None:
            return super().run(layer, q)
        self.selection.summarize(layer)  # here and not in `append`: a fused kernel may have stored the keys
        count, out = self._num_decodes, q.new_empty(q.shape)
        if count == len(q):
            return self.selection.attend(layer, q)
        if count:
            out[:count] = self.selection.attend(layer, q[:count])
        _, prompts = self._planned[self._kinds[layer]][-1]  # after the decodes
        prompts.run(q[count:], self.cache.layers[layer], out=out[count:])
        return out

    def run_into(self, layer: int, q: Float[Tensor, "T Hq D"], out: Float[Tensor, "T Hq D"]) -> None:
        if self.specs[layer].key_budget is None:
            super().run_into(layer, q, out)
        else:
            out.copy_(self.run(layer, q))
