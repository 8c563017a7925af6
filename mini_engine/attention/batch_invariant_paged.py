"""`PagedBackend` with kernels whose bits depend on a query's own sequence alone, for Hopper.

- Prompts run on FlashAttention-3. It splits no keys, and its tiles do not depend on the batch. FlashAttention-2 chooses
  its tile size by the mean number of queries.
- Decodes run on our own kernel with splits of a fixed size, see `kernels/flash_decoding.py`.

The two kernels add in different orders. So a token of a prompt must always be computed by the first, and a token of an
output by the second, also when a preempted request is computed again: see `Scheduler.outputs_apart`. There are no
levels, because whether requests share a prefix depends on the batch. Explained in chapter 14.
"""

from typing import ClassVar

from mini_engine.attention.flash_decoding import FlashDecodes
from mini_engine.attention.flashinfer import FlashInferPrompts, LayerKind
from mini_engine.attention.paged import PagedBackend


class SplitDecodes(FlashDecodes):
    """Our own decode kernel with splits of 256 keys."""

    split: ClassVar[int] = 16


class FA3Prompts(FlashInferPrompts):
    """FlashInfer's FlashAttention-3, whatever the lengths of the prompts."""

    def _algorithm(self, kind: LayerKind, mean_tokens: float) -> str:
        return "fa3"


class BatchInvariantPagedBackend(PagedBackend):
    """See the module. `decodes` must be SplitDecodes."""

    outputs_apart: ClassVar[bool] = True
    prompts: ClassVar[type[FlashInferPrompts]] = FA3Prompts
