"""Piecewise CUDA graphs: a step that computes prompts is launched in a few calls instead of kernel by kernel.

A decode step is one graph (`decode_graphs.py`), because its attention launches the same kernels for any lengths. The
attention of prompts does not: the lengths decide which kernels it launches, and how many thread blocks. All else in the
model depends on the number of tokens alone. So the model is cut at each call of attention, and the pieces between the
calls are graphs, for each of a few numbers of tokens. A step is padded to the next of these. Its attention is launched
between the pieces, over its own tokens without the padding.

The pieces are recorded in one run of the model, whose calls of attention end the recording of a graph and begin that of
the next. On a CPU nothing is captured, and the model runs on the padded step, so the padding can be tested anywhere.
Explained in chapter 12.
"""

from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from mini_engine.attention.backend import AttentionBackend
from mini_engine.batch import StepBatch
from mini_engine.config import ResolvedConfig
from mini_engine.decode_graphs import smallest_size
from mini_engine.transfer import borrow, capturing

# Numbers of tokens. In larger steps the launches weigh little beside the device's work, at least on a fast host.
SIZES = (*range(64, 512, 64), *range(512, 1024, 128), *range(1024, 2049, 256))
Forward = Callable[[Tensor, Tensor], Tensor]  # takes token ids and positions, and returns hidden states
Shape = tuple[int, int]  # query heads, and the size of a head of values
Attended = Callable[..., Tensor]  # takes a layer, its queries, and an entry unless the model has stored it


def piece_sizes(config: ResolvedConfig, device: torch.device) -> Sequence[int]:
    """Return the numbers of tokens for which the pieces of a step are captured: none where decode steps are not."""
    if not config.cuda_graph_batch_sizes or device.type != "cuda":
        return ()
    return SIZES[: bisect_left(SIZES, config.max_num_batched_tokens) + 1]


class Cut(AttentionBackend):
    """Takes the place of a backend in a model, and passes each call of attention to a function.

    Args:
        backend: the backend, which plans the steps.

    Attributes:
        attend: the function.
    """

    attend: Attended

    def __init__(self, backend: AttentionBackend) -> None:
        super().__init__(backend.specs, backend.cache, backend.parts)
        self._backend = backend
        self.takes_stored_keys = backend.takes_stored_keys  # type: ignore[misc]
        self.waits_for_keys = backend.waits_for_keys

    def plan(self, batch: StepBatch) -> None:
        self._backend.plan(batch)

    def append(self, layer: int, k: Float[Tensor, "T Hk D"], v: Float[Tensor, "T Hk Dv"]) -> None:
        self._backend.append(layer, k, v)

    def run(self, layer: int, q: Float[Tensor, "T Hq D"]) -> Float[Tensor, "T Hq Dv"]:
        return self.attend(layer, q)

    def __call__(
        self, layer: int, q: Float[Tensor, "T Hq D"], *entry: Float[Tensor, "T _ _"]
    ) -> Float[Tensor, "T Hq Dv"]:
        return self.attend(layer, q, *entry)


@dataclass(frozen=True)
class Piece:
    """A graph, and the call of attention after it.

    Attributes:
        graph: computes `inputs`.
        layer: the layer that attends.
        inputs: the padded queries, and the entry unless the graph has stored it.
    """

    graph: torch.cuda.CUDAGraph
    layer: int
    inputs: tuple[Tensor, ...]


@dataclass(frozen=True)
class Pieces:
    """A model cut into pieces.

    Attributes:
        before: all pieces but the last.
        last: the last graph.
        hidden: the final hidden states, which it computes; the next step overwrites them.
    """

    before: list[Piece]
    last: torch.cuda.CUDAGraph
    hidden: Float[Tensor, "n hidden"]


class PiecewiseGraphs:
    """A model's `forward` for each of a few numbers of tokens, captured when it is first needed.

    Args:
        sizes: numbers of tokens, ascending.
        bind: returns the model's `forward` over a backend.
        backend: the attention.
        padding_slot: a slot of the cache that belongs to no request, for the keys and values of the padding.
        dtype: the model's.
        device: the model's.

    Attributes:
        sizes: the sizes.
    """

    def __init__(
        self,
        sizes: Sequence[int],
        bind: Callable[[AttentionBackend], Forward],
        backend: AttentionBackend,
        *,
        padding_slot: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.sizes, self._backend, self._padding_slot, self._device = sizes, backend, padding_slot, device
        largest = max(sizes, default=0)
        self._token_ids, self._positions = (torch.zeros(largest, dtype=torch.int64, device=device) for _ in range(2))
        self._slots = torch.full((largest,), padding_slot, dtype=torch.int64, device=device)
        # Of each shape one, in which the attention of all layers takes turns. Zeros, so that the padding stays finite.
        self._shapes = [(spec.num_qo_heads, spec.value_dim) for spec in backend.specs]
        self._outs = {shape: torch.zeros(largest, *shape, dtype=dtype, device=device) for shape in set(self._shapes)}
        self._cut = Cut(backend)
        self._forward = bind(self._cut)
        self._captured: dict[int, Pieces] = {}
        self._pool = torch.cuda.graph_pool_handle() if device.type == "cuda" else None  # shared, as in `DecodeGraphs`

    def size_for(self, num_tokens: int) -> int | None:
        """Return the smallest size that holds a step; None if there is none."""
        return smallest_size(self.sizes, num_tokens)

    def run(
        self,
        size: int,
        token_ids: Int[Tensor, " T"],
        positions: Int[Tensor, " T"],
        slot_mapping: Int[Tensor, " T"],
    ) -> Float[Tensor, "T hidden"]:
        """Compute the hidden states of a step that the backend has planned.

        Args:
            size: tokens with padding, one of `sizes`.
            token_ids: the tokens.
            positions: the position of each in its sequence.
            slot_mapping: the slot of each token's key and value.

        Returns:
            The hidden states, which the next step overwrites.
        """
        num_tokens = len(token_ids)
        pieces = self.get(size) if self._device.type == "cuda" else None  # before the arrays: a capture overwrites them
        self._token_ids[:num_tokens], self._positions[:num_tokens] = token_ids, positions
        self._slots[:num_tokens], self._slots[num_tokens:size] = slot_mapping, self._padding_slot
        outs = {shape: out[:num_tokens] for shape, out in self._outs.items()}
        if pieces is None:

            def attend(layer: int, *inputs: Tensor) -> Tensor:
                self._attend(num_tokens, outs, layer, *inputs)
                return self._out(layer)[:size]

            return self._run_model(size, attend)[:num_tokens]
        for piece in pieces.before:
            piece.graph.replay()
            self._attend(num_tokens, outs, piece.layer, *piece.inputs)
        pieces.last.replay()
        return pieces.hidden[:num_tokens]

    def get(self, size: int) -> Pieces:
        """Return the pieces of a size. They are captured at the first call, on a GPU."""
        if size not in self._captured:
            self._captured[size] = self._capture(size)
        return self._captured[size]

    def _attend(self, num_tokens: int, outs: Mapping[Shape, Tensor], layer: int, q: Tensor, *entry: Tensor) -> None:
        """Compute the attention of a step's tokens, without the padding, where the next piece reads it."""
        if entry:
            self._backend.append(layer, *(tensor[:num_tokens] for tensor in entry))
        self._backend.run_into(layer, q[:num_tokens], outs[self._shapes[layer]])

    def _out(self, layer: int) -> Float[Tensor, "n Hq Dv"]:
        return self._outs[self._shapes[layer]]

    def _run_model(self, size: int, attend: Attended) -> Float[Tensor, "n hidden"]:
        self._cut.attend, self._cut.slot_mapping = attend, self._slots[:size]
        return self._forward(self._token_ids[:size], self._positions[:size])

    def _capture(self, size: int) -> Pieces:
        """Record the pieces of a step of padding only. Nothing attends, so no plan is needed."""
        self._slots[:size] = self._padding_slot
        pieces, graph = list[Piece](), torch.cuda.CUDAGraph()

        def cut(layer: int, *inputs: Tensor) -> Tensor:
            nonlocal graph
            graph.capture_end()
            pieces.append(Piece(graph, layer, tuple(map(borrow, inputs))))  # later pieces may use their memory
            graph = torch.cuda.CUDAGraph()
            graph.capture_begin(self._pool)
            return self._out(layer)[:size]

        stream, current = torch.cuda.Stream(self._device), torch.cuda.current_stream(self._device)
        stream.wait_stream(current)
        with torch.cuda.stream(stream), capturing():
            self._run_model(size, lambda layer, *_: self._out(layer)[:size])  # see `DecodeGraphs`
            torch.cuda.synchronize(self._device)
            graph.capture_begin(self._pool)
            try:
                hidden = borrow(self._run_model(size, cut))
            finally:
                graph.capture_end()
        current.wait_stream(stream)
        return Pieces(pieces, graph, hidden)
