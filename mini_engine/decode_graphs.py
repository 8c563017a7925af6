"""CUDA graphs of decode steps: one call launches all kernels of a step.

A decode step of a small model takes the GPU less time than the host needs to launch its several hundred kernels one by
one. A CUDA graph records them once. A replay runs the same kernels with the same arguments, so it reads its inputs at
the same addresses and for the same number of requests. Hence there is a graph for each of a few sizes, and a step is
padded to the next size. A row of padding computes one token over one key, on a page that belongs to no request.

On a CPU nothing is captured, and a replay calls the function again: the same padding, to be tested anywhere. Explained
in chapter 12.
"""

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor

from mini_engine.batch import PrefixLevel, StepBatch
from mini_engine.config import EngineConfig
from mini_engine.errors import ConfigError
from mini_engine.sampling import SamplingBatch, sampling_columns
from mini_engine.sampling_params import SamplingParams

MAX_GROUPS = 8  # of a level: a graph is captured for each number of groups, and a large one has few queries in each
Step = Callable[[StepBatch, SamplingBatch, Tensor], Tensor]  # batch, sampling, rows of the sampled tokens -> tokens
DecodeArrays = dict[str, Any]  # arguments of `StepBatch.build`: arrays, or None


def pad_decodes(arrays: DecodeArrays, size: int, page: int) -> DecodeArrays:
    """Pad a step of one token for each request to a number of requests, with rows of padding after them.

    A row of padding computes token 0, which the host gives, over one key in a page that belongs to no request. All rows
    of padding share the page and write the same slot.

    Args:
        arrays: of B requests: `token_ids` [B], `kv_lens` [B], `pages` [P], and `token_source` [B] and `page_positions`
            [P], each of which may be None.
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
    """The numbers of requests for which decode steps are captured: those of the options, or the default ones.

    Args:
        config: the options.
        device: where steps are computed.
        captures: whether the kernels of the attention backend can be captured.

    Raises:
        ConfigError: if the options ask for graphs of kernels that cannot be captured.
    """
    sizes, on_gpu = config.cuda_graph_batch_sizes, device.type == "cuda"
    if sizes and on_gpu and not captures:
        raise ConfigError(
            f"the kernels of the {config.attn_backend} backend cannot be captured as a CUDA graph; leave "
            "cuda_graph_batch_sizes out, or use attn_backend='flashinfer'"
        )
    if sizes is None and on_gpu and captures:
        most = config.max_batch_size
        return sorted({size for size in (1, 2, 4, *range(8, most, 8)) if size < most} | {most})
    return sizes or ()


@dataclass
class DecodeGraph:
    """A captured step. Its inputs are tensors that every replay reads.

    Attributes:
        tokens: [6, n] input: `StepBatch.device_tokens`.
        sampling: input: what the sampler needs to know of each request.
        rows: [n] input: row of each request, whose last token is written.
        replay: launches the step and returns its tokens, which the next replay overwrites.
        loaded: what `sampling` and `rows` were filled from.
    """

    tokens: Int[Tensor, "6 n"]
    sampling: SamplingBatch
    rows: Int[Tensor, " n"]
    replay: Callable[[], Int[Tensor, " n"]]
    loaded: SamplingBatch | None = None

    def load(self, sampling: SamplingBatch, rows: Int[Tensor, " R"], padding_row: int) -> None:
        """Copy the inputs of a step's requests into the graph, unless they are the same as in the previous step."""
        if self.loaded is sampling:
            return
        self.sampling.temperature[: len(rows)] = sampling.temperature
        self.sampling.seeds[: len(rows)] = sampling.seeds
        self.rows[: len(rows)] = rows
        self.rows[len(rows) :] = padding_row
        self.loaded = sampling


class DecodeGraphs:
    """The graphs of the sizes that the engine was given, captured when they are first needed.

    Args:
        sizes: numbers of requests, ascending.
        step: computes a decode step on the device, without a synchronization.
        plan: prepares a step on the host, such as `AttentionBackend.plan`.
        page_size: tokens per page.
        pages_per_row: the most pages that one request can have.
        padding_page: the page of the padding.
        padding_row: the row of `last_token` that gets the tokens of the padding.
        device: where the step is computed.
        pad: pads a step to a size, as `pad_decodes` does.
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
        device: torch.device,
        pad: Callable[[DecodeArrays, int, int], DecodeArrays] = pad_decodes,
    ) -> None:
        self.sizes, self._step, self._plan, self._device = sizes, step, plan, device
        self._page_size, self._pages_per_row = page_size, pages_per_row
        self._padding_page, self._padding_row, self._pad = padding_page, padding_row, pad
        self._graphs: dict[tuple[int, tuple[int, ...]], DecodeGraph] = {}
        self._pool = torch.cuda.graph_pool_handle() if device.type == "cuda" else None  # they run one after the other

    def size_for(self, num_requests: int) -> int | None:
        """The smallest size that holds a step; None if none does."""
        index = bisect_left(self.sizes, num_requests)
        return self.sizes[index] if index < len(self.sizes) else None

    def page_capacity(self, size: int) -> int:
        """The most pages that a step of a size can have."""
        return size * self._pages_per_row

    def pad(self, arrays: DecodeArrays, size: int) -> DecodeArrays:
        """The arguments of `StepBatch.build` for a decode step, padded to a size."""
        return self._pad(arrays, size, self._padding_page)

    def get(self, size: int, groups: tuple[int, ...] = ()) -> DecodeGraph:
        """The graph of a size, captured now if it has not been. The engine's state stays as it is.

        Args:
            size: requests of its steps.
            groups: groups of each of their levels.
        """
        if (size, groups) not in self._graphs:
            self._graphs[size, groups] = self._capture(size, groups)
        return self._graphs[size, groups]

    def run(self, size: int, batch: StepBatch, sampling: SamplingBatch, rows: Int[Tensor, " R"]) -> Int[Tensor, " n"]:
        """Launch a step that has been padded to a size.

        Args:
            size: requests of the batch.
            batch: the step, with padding after its requests.
            sampling: what the sampler needs to know about the requests, without the padding.
            rows: [R] their rows.

        Returns:
            The tokens of all requests, those of the padding last; the next step overwrites them.
        """
        graph = self.get(size, tuple(level.padded_groups for level in batch.levels))
        self._plan(batch)
        graph.load(sampling, rows, self._padding_row)
        assert batch.device_tokens is not None
        graph.tokens.copy_(batch.device_tokens)
        return graph.replay()

    def _capture(self, size: int, groups: tuple[int, ...]) -> DecodeGraph:
        """Capture a step of padding alone: replays of it write nothing that a request reads."""
        nothing = np.zeros(0, dtype=np.int64)
        names = "token_ids", "kv_lens", "pages", "token_source"  # a step whose requests have lost pages has no levels
        batch = StepBatch.build(
            **self.pad(dict.fromkeys(names, nothing) | {"page_positions": None}, size),
            num_new=None,
            page_size=self._page_size,
            levels=tuple(_empty_level(count, size, self._device) for count in groups),
            page_capacity=self.page_capacity(size),
            device=self._device,
        )
        sampling = replace(
            SamplingBatch.build(
                sampling_columns([SamplingParams()] * size), [0] * size, [0] * size, device=self._device
            ),
            positions=batch.sampled_positions,
            all_greedy=False,
        )
        rows = torch.full((size,), self._padding_row, device=self._device)
        self._plan(batch)
        assert batch.device_tokens is not None
        return DecodeGraph(batch.device_tokens, sampling, rows, self._record(lambda: self._step(batch, sampling, rows)))

    def _record(self, run: Callable[[], Tensor]) -> Callable[[], Tensor]:
        if self._device.type != "cuda":
            return run
        stream = torch.cuda.Stream(self._device)
        stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(stream):  # kernels are compiled and libraries choose theirs before the capture
            run()
        torch.cuda.current_stream(self._device).wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            tokens = run()

        def replay() -> Tensor:
            graph.replay()
            return tokens

        return replay


def _empty_level(groups: int, size: int, device: torch.device) -> PrefixLevel:
    """A level whose first group has all requests, and no group has pages."""
    zeros = torch.zeros(groups, dtype=torch.int32)
    return PrefixLevel(
        kv_last_page_len=zeros[1:],
        kv_page_indices=torch.zeros(0, dtype=torch.int32, device=device),
        qo_indptr=torch.full((groups,), size, dtype=torch.int32).index_fill_(0, torch.tensor([0]), 0),
        kv_page_indptr=zeros,
    )
