"""CUDA graphs of steps that compute prompts, with their attention: a step is a single launch.

`piecewise_graphs.py` launches attention by itself, because the lengths of prompts decide how many thread blocks most of
its kernels have. Some kernels always have the same number, and read from memory what each block computes. If a model's
attention consists of such kernels, one graph records a step of a number of tokens, and a replay computes any step that
fits: as many prompts and decodes as the plan has room for, of any lengths.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from mini_engine.batch import StepBatch
from mini_engine.piecewise_graphs import Pieces, PiecewiseGraphs, Shape
from mini_engine.transfer import borrow, capturing


class StepGraphs(PiecewiseGraphs):
    """Graphs of whole steps, for each of a few numbers of tokens. A graph is a model in one piece."""

    def plan(self, size: int, batch: StepBatch) -> None:
        """Prepare a step that the backend can capture (`can_capture`), before `run`."""
        if self._device.type == "cuda":
            self.get(size)  # a capture overwrites the plan
        self._backend.plan_captured(batch, self._slots[:size])

    def _attend(self, num_tokens: int, outs: Mapping[Shape, Tensor], layer: int, q: Tensor, *entry: Tensor) -> None:
        """Compute the attention of a step with its padding; the plan says which tokens have any."""
        if entry:
            self._backend.append(layer, *entry)
        self._backend.run_into(layer, q, self._out(layer)[: len(q)])

    def _capture(self, size: int) -> Pieces:
        """Record a step of a single prompt, which has the slot of the padding and its page."""
        page_size = self._backend.cache.page_size
        self._slots[:size] = self._padding_slot
        batch = StepBatch.build(
            token_ids=[0] * size, num_new=[size], kv_lens=[size], page_size=page_size,
            pages=[self._padding_slot // page_size] * -(-size // page_size), num_decodes=0, device=self._device,
        )  # fmt: skip
        self._backend.plan_captured(batch, self._slots[:size])

        def attend(layer: int, *inputs: Tensor) -> Tensor:
            self._attend(size, {}, layer, *inputs)
            return self._out(layer)[:size]

        stream, current = torch.cuda.Stream(self._device), torch.cuda.current_stream(self._device)
        stream.wait_stream(current)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(stream):
            self._run_model(size, attend)  # see `DecodeGraphs`
        current.wait_stream(stream)
        with capturing(), torch.cuda.graph(graph, pool=self._pool):
            hidden = borrow(self._run_model(size, attend))
        return Pieces([], graph, hidden)
