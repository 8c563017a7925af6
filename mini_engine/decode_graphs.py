"""CUDA graphs of decode steps: one call launches all kernels of a step.

The GPU computes a decode step of a small model in less time than the host needs to launch its several hundred kernels
one by one. A CUDA graph records the kernels once. A replay runs them with the same arguments, so it reads its inputs at
the same addresses and for the same number of requests. So there is a graph for each of a few sizes, and a step is
padded to the next size. A padding row computes one token over one key, in a page that belongs to no request.

On a CPU nothing is captured, and a replay calls the function again, so the padding can be tested anywhere. Explained in
chapter 12.
"""

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from mini_engine.batch import PrefixLevel, StepBatch, StepBuffers, step_memory
from mini_engine.config import EngineConfig
from mini_engine.errors import ConfigError
from mini_engine.transfer import borrow, capturing

MAX_GRAPH_SIZE = 2**16  # requests; memory for a step of the largest graph is allocated at once
MAX_GROUPS = 8  # per level: each number of groups needs its own graph, and many groups have few queries each
TokensAndLogits = tuple[Int[Tensor, " n"], Float[Tensor, "n V"]]  # sampled tokens, and their rows of logits
Step = Callable[[StepBatch, Tensor], TokensAndLogits]  # takes the step and its rows of the page table
DecodeArrays = dict[str, Any]  # arguments of `StepBatch.build`: arrays, or None


def pad_decodes(arrays: DecodeArrays, size: int, page: int) -> DecodeArrays:
    """Pad a step of one token per request to a number of requests, with padding rows at the end.

    A padding row computes token 0 over one key in a page that belongs to no request. All padding rows share this page
    and write the same slot.

    Args:
        arrays: the arrays of B requests: `token_ids` [B], `kv_lens` [B], `pages` [P], and `token_source` [B] and
            `page_positions` [P], each of which may be None.
        size: requests of the result, at least B.
        page: the page of the padding.

    Returns:
        The arrays with `size - B` more entries each; None stays None.
    """
    padding = {"token_ids": 0, "kv_lens": 1, "pages": page, "token_source": -1, "page_positions": 0}
    more = size - len(arrays["kv_lens"])
    return {
        name: None if array is None else np.append(array, np.full(more, padding[name]))
        for name, array in arrays.items()
    }


def graph_sizes(config: EngineConfig, device: torch.device, captures: bool) -> Sequence[int]:
    """Return the numbers of requests for which decode steps are captured, from the options or by default.

    Args:
        config: the options, with a `max_batch_size`.
        device: device that computes the steps.
        captures: whether the kernels of the attention backend can be captured.

    Raises:
        ConfigError: if the options ask for graphs of kernels that cannot be captured, or for a graph that is too large.
    """
    sizes, most, on_gpu = config.cuda_graph_batch_sizes, config.max_batch_size, device.type == "cuda"
    if sizes and sizes[-1] > MAX_GRAPH_SIZE:
        raise ConfigError(
            f"cuda_graph_batch_sizes has {sizes[-1]}; give numbers of requests up to {MAX_GRAPH_SIZE}, such as "
            f"max_batch_size ({most}): a step is never larger than that"
        )
    if sizes and on_gpu and not captures:
        raise ConfigError(
            f"the kernels of the {config.attn_backend} backend cannot be captured as a CUDA graph; leave "
            "cuda_graph_batch_sizes out, or use attn_backend='flashinfer'"
        )
    if sizes is None and most and on_gpu and captures and not config.enforce_eager:
        return sorted({size for size in (1, 2, 4, *range(8, most, 8)) if size < most} | {most})
    return sizes or ()


@dataclass
class DecodeGraph:
    """A captured step. Besides its `StepBatch`, every replay reads the tensors below.

    Attributes:
        rows: input: the row of the page table of each request, from which the sampler reads its parameters.
        padding_row: the row of the padding.
        replay: launches the step and returns its tokens and logits, which the next replay of any graph overwrites.
        loaded: the tensor from which `rows` was filled.
    """

    rows: Int[Tensor, " n"]
    padding_row: int
    replay: Callable[[], TokensAndLogits]
    loaded: Int[Tensor, " R"] | None = None

    def load(self, rows: Int[Tensor, " R"]) -> None:
        """Copy the rows into the graph, unless the previous step had the same ones."""
        if self.loaded is not rows:
            self.rows[: len(rows)] = rows
            self.rows[len(rows) :] = self.padding_row
            self.loaded = rows


class DecodeGraphs:
    """The graphs for the engine's sizes, each captured when it is first needed.

    Args:
        sizes: numbers of requests, ascending.
        step: computes a decode step on the device, without synchronizing.
        plan: prepares a step on the host, such as `AttentionBackend.plan`.
        page_size: tokens per page.
        pages_per_row: the most pages that one request can have.
        padding_page: the page of the padding.
        padding_row: a row of the sampler that belongs to no request.
        num_buffers: number of steps whose arrays the host keeps, because their copies may not have ended.
        device: device that computes the steps.
        pad: pads a step to a size, as `pad_decodes` does.
        num_layer_groups: groups of layers that have page tables of their own.

    Attributes:
        sizes: the sizes.
        buffers: buffers that take turns, one for each group of layers; every step must be built into one of them. All
            graphs read the same memory.
    """

    def __init__(
        self,
        sizes: Sequence[int],
        step: Step,
        plan: Callable[[StepBatch], None],
        *,
        page_size: int,
        pages_per_row: int,
        padding_page: int,
        padding_row: int,
        num_buffers: int,
        device: torch.device,
        pad: Callable[[DecodeArrays, int, int], DecodeArrays] = pad_decodes,
        num_layer_groups: int = 1,
    ) -> None:
        self.sizes, self._step, self._plan, self._device = sizes, step, plan, device
        self._page_size, self._pages_per_row = page_size, pages_per_row
        self._padding_page, self._padding_row, self._pad = padding_page, padding_row, pad
        self._graphs: dict[tuple[int, tuple[int, ...]], DecodeGraph] = {}
        largest, on_gpu = max(sizes, default=0), device.type == "cuda"
        capacity = self.page_capacity(largest)
        self._memory = [step_memory(largest, capacity, device) for _ in range(num_layer_groups)]
        # A CPU computes a step while it is launched.
        self.buffers = [self._new_buffers() for _ in range(num_buffers if on_gpu else 1)]
        # Shared, although the graphs are replayed in any order: replays do not overlap, no graph reads what another one
        # has left in the pool, and the tokens and logits of a step are used before the next replay
        # (`LocalExecutor.launch`).
        self._pool = torch.cuda.graph_pool_handle() if device.type == "cuda" else None

    def size_for(self, num_requests: int) -> int | None:
        """Return the smallest size that holds a step; None if there is none."""
        return smallest_size(self.sizes, num_requests)

    def page_capacity(self, size: int) -> int:
        """Return the most pages that a step of this size can have."""
        return size * self._pages_per_row

    def pad(self, arrays: DecodeArrays, size: int) -> DecodeArrays:
        """Return the arguments of `StepBatch.build` for a decode step, padded to a size."""
        return self._pad(arrays, size, self._padding_page)

    def get(self, size: int, groups: tuple[int, ...] = ()) -> DecodeGraph:
        """Return the graph of a size. It is captured at the first call, which overwrites the arrays of the last step.

        Args:
            size: number of requests.
            groups: number of groups of each level, padded.
        """
        if (size, groups) not in self._graphs:
            self._graphs[size, groups] = self._capture(size, groups)
        return self._graphs[size, groups]

    def run(self, graph: DecodeGraph, batch: StepBatch, rows: Int[Tensor, " R"]) -> TokensAndLogits:
        """Launch a step that has been padded to a graph's size.

        Args:
            graph: the graph of this size, returned by `get` before the step was built.
            batch: the step, with padding after its requests, in one of `buffers`.
            rows: the requests' rows of the page table, without the padding.

        Returns:
            The tokens and logits of all requests, followed by those of the padding; the next step overwrites them.
        """
        self._plan(batch)
        graph.load(rows)
        return graph.replay()

    def _capture(self, size: int, groups: tuple[int, ...]) -> DecodeGraph:
        """Capture a step that consists of padding only, so running it writes nothing that a request reads."""
        nothing = np.zeros(0, dtype=np.int64)
        names = "token_ids", "kv_lens", "pages", "token_source"  # a step whose requests have lost pages has no levels
        batch, *others = [
            StepBatch.build(
                **self.pad(dict.fromkeys(names, nothing) | {"page_positions": None}, size),
                num_new=None,
                page_size=self._page_size,
                page_capacity=self.page_capacity(size),
                into=buffers,
            )
            for buffers in self._new_buffers()  # copies from the other buffers may not have ended
        ]
        batch.levels = tuple(_empty_level(count, size, self._device) for count in groups)
        batch.other_groups = tuple(others)
        for own in self.buffers:
            for buffers in own:
                buffers.forget()
        rows = torch.full((size,), self._padding_row, device=self._device)
        self._plan(batch)
        replay = record(lambda: self._step(batch, rows), self._pool, self._device)
        return DecodeGraph(rows, self._padding_row, replay)

    def _new_buffers(self) -> list[StepBuffers]:
        return [StepBuffers(self._device, memory) for memory in self._memory]


def smallest_size(sizes: Sequence[int], count: int) -> int | None:
    """Return the smallest of ascending sizes that is at least a count; None if there is none."""
    index = bisect_left(sizes, count)
    return sizes[index] if index < len(sizes) else None


def record(run: Callable[[], TokensAndLogits], pool: Any, device: torch.device) -> Callable[[], TokensAndLogits]:
    """Capture a function that launches kernels on a GPU, and return its replay; on a CPU, return the function.

    Args:
        run: the function.
        pool: memory that several graphs share.
        device: where it runs.
    """
    if device.type != "cuda":
        return run
    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):  # compiles kernels, and lets libraries choose theirs, before the capture
        run()
    torch.cuda.current_stream(device).wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with capturing(), torch.cuda.graph(graph, pool=pool):
        tokens, logits = run()
    logits = borrow(logits)  # the next graph may be captured into the memory of these

    def replay() -> TokensAndLogits:
        graph.replay()
        return tokens, logits

    return replay


def _empty_level(groups: int, size: int, device: torch.device) -> PrefixLevel:
    """Return a level without pages, whose first group has all requests."""
    zeros = torch.zeros(groups, dtype=torch.int32)
    return PrefixLevel(
        kv_last_page_len=zeros[1:],
        kv_page_indices=torch.zeros(0, dtype=torch.int32, device=device),
        qo_indptr=torch.full((groups,), size, dtype=torch.int32).index_fill_(0, torch.tensor([0]), 0),
        kv_page_indptr=zeros,
    )
