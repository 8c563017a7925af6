"""The `sparse` backend: decodes that attend to selected pages, in plain PyTorch. Explained in chapter 15."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from jaxtyping import Float
from torch import Tensor

from mini_engine.attention.backend import AttentionParts
from mini_engine.attention.page_selection import PageSelection, SummarizedCache
from mini_engine.attention.spec import AttentionSpec
from mini_engine.attention.torch import TorchBackend
from mini_engine.batch import StepBatch


class SparseBackend(TorchBackend):
    """The reference, with page selection in the decodes of the layers that have a budget.

    A token of a prompt attends to all keys, and a token of an output to selected pages. So a token of an output must
    always be computed as a decode, also when a preempted request is computed again, and requests share only the pages
    of prompts: see `Scheduler.outputs_apart`. Guesses are decodes of one query each, so each selects its own pages.

    Args:
        specs: one for each layer of the model, in order.
        cache: the KV cache, with summaries, in layout NHD.
        parts: the engine's replaceable parts.

    Attributes:
        selection: selects the pages of decodes, and attends to them.
    """

    bypasses: ClassVar[frozenset[str]] = TorchBackend.bypasses | {"masked_attention"}  # in decodes
    takes_single_queries: ClassVar[bool] = True
    outputs_apart: ClassVar[bool] = True

    def __init__(self, specs: Sequence[AttentionSpec], cache: SummarizedCache, parts: AttentionParts) -> None:
        super().__init__(specs, cache, parts)
        self.selection = PageSelection(specs, cache)

    def plan(self, batch: StepBatch) -> None:
        super().plan(batch)
        self.selection.plan(batch)
        self._num_decodes = batch.num_decodes

    def run(self, layer: int, q: Float[Tensor, "T Hq D"]) -> Float[Tensor, "T Hq Dv"]:
        spec, count = self.specs[layer], self._num_decodes
        if spec.key_budget is None:
            return super().run(layer, q)
        self.selection.summarize(layer)
        out = q.new_empty(q.shape)
        if count:
            out[:count] = self.selection.attend(layer, q[:count])
        for sequence in self._sequences[count:]:
            out[sequence.tokens] = self._attend(spec, sequence, q[sequence.tokens])
        return out
