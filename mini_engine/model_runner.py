"""`ModelRunner`: launches steps on the device and collects the tokens that they sample.

`launch` prepares a step on the host and starts it; it reads nothing back. `collect` waits for the sampled tokens. In
between, the device needs nothing from the host: a sampled token reaches the next step through `last_token`, which has
an entry for each row of the page table. So the host can prepare and launch the next step while the device still
computes this one. Explained in chapter 07.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import compress
from typing import TYPE_CHECKING

import numpy as np
import torch
from jaxtyping import Bool, Int, Int64
from torch import Tensor

from mini_engine.attention.backend import AttentionBackend
from mini_engine.batch import StepBatch, StepBuffers
from mini_engine.config import EngineConfig
from mini_engine.decode_graphs import MAX_GROUPS, DecodeGraphs
from mini_engine.kv_cache.page_table import PageTable
from mini_engine.kv_cache.paged import PagedKVCache
from mini_engine.models.base import LanguageModel
from mini_engine.request import Request, Running
from mini_engine.sampling import SamplingBatch
from mini_engine.scheduler import Schedule
from mini_engine.transfer import keep_tokens, to_device

if TYPE_CHECKING:
    from mini_engine.kernels.persistent_decode import PersistentDecode
    from mini_engine.parts import Parts


@dataclass(eq=False)
class Launched:
    """A step that has been launched but not collected.

    Attributes:
        batch: the step.
        requests: [B] its requests.
        num_computed: [B] tokens of each request whose keys are in the cache after the step.
        rows: [R] rows that sample a token.
        admissions: [R] the admission that filled each of these rows; a later one means that the request has left.
        sampled_by: [R] request of each of these rows.
        tokens: [R] the sampled tokens on the host, valid after `done`.
        done: event recorded after the step on a GPU; None on a CPU, where the step has already ended.
    """

    batch: StepBatch
    requests: list[Request]
    num_computed: Int64[np.ndarray, " B"]
    rows: Int64[np.ndarray, " R"]
    admissions: Int64[np.ndarray, " R"]
    sampled_by: list[Request]
    tokens: Int[Tensor, " R"]
    done: torch.cuda.Event | None


class ModelRunner:
    """Runs the model over the paged KV cache, one step at a time.

    Args:
        model: the model.
        backend: its attention.
        cache: its KV cache.
        config: the engine's options, with every default resolved.
        graph_sizes: numbers of requests for which decode steps are captured as CUDA graphs, ascending.
        persistent: computes a captured step of one request instead of the model; None if the model does.
        parts: the engine's replaceable parts.
    """

    def __init__(
        self,
        model: LanguageModel,
        backend: AttentionBackend,
        cache: PagedKVCache,
        config: EngineConfig,
        *,
        graph_sizes: Sequence[int],
        persistent: "PersistentDecode | None",
        parts: "Parts",
    ) -> None:
        assert config.max_model_len and config.pipeline_depth is not None
        self.model, self.backend, self.cache = model, backend, cache
        self._sample, self._persistent = parts.sample, persistent
        self._device = model.device
        self._last_token = torch.zeros(config.max_batch_size, dtype=torch.long, device=self._device)
        self._graphs = DecodeGraphs(
            graph_sizes,
            self._decode,
            self._plan_decode,
            page_size=cache.page_size,
            pages_per_row=-(-config.max_model_len // config.page_size),
            padding_page=cache.num_pages - 1,
            num_buffers=config.pipeline_depth + 1,
            device=self._device,
            pad=parts.pad_decodes,
        )
        # The buffers take turns, because the copies of earlier steps may not have ended when the host writes a step.
        self._buffers = [StepBuffers(self._device) for _ in range(config.pipeline_depth + 1)]
        self._num_launched = 0
        # Kept from step to step for as long as the same requests sample.
        self._sampling: SamplingBatch | None = None
        self._sampling_rows: Tensor = self._last_token
        self._sampling_admissions = b""
        self._seen: SeenTokens | None = None

    @torch.inference_mode()
    def launch(self, schedule: Schedule, running: Running, page_table: PageTable) -> Launched:
        """Start a step and count its tokens as computed and sampled.

        Args:
            schedule: the step, with at least one request.
            running: the columns of the running requests.
            page_table: their pages.
        """
        if schedule.copies:
            self.cache.copy_pages(schedule.copies)
        rows = schedule.rows
        num_computed = running.num_computed[rows] + schedule.num_new
        # A request in the middle of its prompt has uncomputed tokens left, and samples none.
        samples = num_computed == running.num_scheduled[rows]
        num_logits = None if np.count_nonzero(samples) == len(rows) else samples
        sampling_rows = rows if num_logits is None else rows[samples]
        admissions = running.admission[sampling_rows]
        sampling = self._sampling_of(sampling_rows, admissions, running) if len(sampling_rows) else None
        size = self._graph_size(schedule, sampling, running.has_evicted) if num_logits is None else None
        graph = self._graphs.get(size, tuple(level.padded_groups for level in schedule.levels)) if size else None
        batch = self._build(schedule, num_computed, num_logits, running, page_table, size)
        if graph and sampling:
            tokens = self._graphs.run(graph, batch, sampling)[: len(rows)]
        else:
            self.backend.plan(batch)
            hidden = self.model(batch.feed(self._last_token), batch.positions, self.backend)
            tokens = self._sample_tokens(hidden, batch, sampling) if sampling else self._last_token[:0]
        host_tokens, done = self._keep(tokens)
        # Nothing can fail from here on, so count the step.
        running.num_computed[rows] = num_computed
        running.num_scheduled[sampling_rows] = (num_computed if num_logits is None else num_computed[samples]) + 1
        requests = running.requests_of(rows)
        sampled_by = requests if num_logits is None else list(compress(requests, samples.tolist()))
        return Launched(batch, requests, num_computed, sampling_rows, admissions, sampled_by, host_tokens, done)

    def collect(self, launched: Launched) -> Int64[np.ndarray, " R"]:
        """Wait for a step and return the tokens that it sampled."""
        if launched.done is not None:
            launched.done.synchronize()
        return launched.tokens.numpy()

    def capture(self) -> None:
        """Capture all CUDA graphs now, rather than when a step first needs them."""
        for size in reversed(self._graphs.sizes):  # smaller graphs fit into the memory of the largest
            self._graphs.get(size)

    def reset(self) -> None:
        """Wait for the device to finish, then forget the requests of earlier steps."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        self._sampling = self._seen = None
        if self.backend.planner is not None:
            self.backend.planner.forget()
        for buffers in (*self._buffers, *self._graphs.buffers):
            buffers.forget()

    def _graph_size(self, schedule: Schedule, sampling: SamplingBatch | None, has_evicted: bool) -> int | None:
        """Return the size of the graph that can run a step; None if there is none.

        Every request decodes one token. No graph runs a step with filters or penalties, with queries that are rotated
        for chunks, or with a level of many groups. Levels are not used for requests that have lost pages.
        """
        if schedule.num_tokens > len(schedule.rows) or (schedule.levels and has_evicted):
            return None
        if sampling is None or sampling.filters or sampling.seen is not None:
            return None
        if any(level.query_offsets is not None or level.padded_groups > MAX_GROUPS for level in schedule.levels):
            return None
        return self._graphs.size_for(len(schedule.rows))

    def _build(
        self,
        schedule: Schedule,
        num_computed: Int64[np.ndarray, " B"],
        num_logits: Bool[np.ndarray, " B"] | None,
        running: Running,
        page_table: PageTable,
        graph_size: int | None,
    ) -> StepBatch:
        rows, size, num_new = schedule.rows, page_table.page_size, None
        kv_lens, token_rows, positions, page_positions = num_computed, rows, num_computed - 1, None
        if schedule.num_tokens > len(rows):
            num_new = schedule.num_new
            token_rows = rows.repeat(num_new)
            positions = np.arange(schedule.num_tokens) + (num_computed - num_new.cumsum()).repeat(num_new)
        if running.has_evicted:
            kv_lens = num_computed - running.num_evicted[rows]
        page_counts = (kv_lens + (size - 1)) // size
        if running.has_evicted and np.count_nonzero(kv_lens < num_computed):
            index = np.arange(page_counts.sum()) - (page_counts.cumsum() - page_counts).repeat(page_counts)
            page_positions = (num_computed - kv_lens).repeat(page_counts) + index * size
        on_device = positions >= running.num_known[token_rows]  # tokens that the host does not know yet
        arrays = {
            "token_ids": running.tokens[token_rows, positions],
            "kv_lens": kv_lens,
            "pages": page_table.pages_of(rows, page_counts),
            "token_source": np.where(on_device, token_rows, -1) if np.count_nonzero(on_device) else None,
            "page_positions": page_positions,
        }
        if graph_size and graph_size > len(rows):
            arrays = self._graphs.pad(arrays, graph_size)
        self._num_launched += 1
        buffers = self._graphs.buffers if graph_size else self._buffers
        return StepBatch.build(
            **arrays,
            num_new=num_new,
            page_size=size,
            num_logits=num_logits,
            levels=schedule.levels,
            page_capacity=self._graphs.page_capacity(graph_size) if graph_size else None,
            into=buffers[self._num_launched % len(buffers)],
        )

    def _plan_decode(self, batch: StepBatch) -> None:
        """Prepare a step that a CUDA graph replays."""
        if not (self._persistent and batch.num_sequences == 1):
            self.backend.plan(batch)

    def _decode(self, batch: StepBatch, sampling: SamplingBatch) -> Int[Tensor, " n"]:
        """Compute a decode step of one token for each request on the device, as a CUDA graph records it."""
        if self._persistent and batch.num_sequences == 1:
            logits = self._persistent(batch, self._last_token)
        else:
            logits = self.model.compute_logits(self.model(batch.feed(self._last_token), batch.positions, self.backend))
        return self._sample(logits, sampling)

    def _sample_tokens(self, hidden: Tensor, batch: StepBatch, sampling: SamplingBatch) -> Int[Tensor, " R"]:
        """Sample one token for each row."""
        if batch.logit_rows.shape[0] < batch.num_tokens:
            hidden = hidden[batch.logit_rows]
        logits = self.model.compute_logits(hidden)
        sampling.positions = batch.sampled_positions
        if self._seen is not None and sampling.seen is not None:
            sampling.seen = self._seen.of(self._sampling_rows[sampling.penalized_rows])
        tokens = self._sample(logits, sampling)
        if self._seen is not None:
            self._seen.add(self._sampling_rows, tokens)
        return tokens

    def _sampling_of(
        self, rows: Int64[np.ndarray, " R"], admissions: Int64[np.ndarray, " R"], running: Running
    ) -> SamplingBatch:
        """Upload the sampler's parameters for these rows, unless the last step had the same requests."""
        if self._sampling is not None and self._sampling_admissions == admissions.tobytes():
            return self._sampling
        columns = running.sampling[rows]
        penalized = rows[columns["repetition_penalty"] != 1]
        seen = None
        if len(penalized):
            if self._seen is None:
                self._seen = SeenTokens(len(self._last_token), self.model.config.vocab_size, self._device)
            for row in penalized.tolist():
                self._seen.enter(row, int(running.admission[row]), running.tokens[row, : running.num_known[row]])
            seen = self._seen.of(self._upload(penalized))
        self._sampling = SamplingBatch.build(columns, running.seed[rows], np.zeros_like(rows), seen, self._device)
        self._sampling_rows = self._upload(rows)
        self._sampling_admissions = admissions.tobytes()
        return self._sampling

    def _upload(self, array: Int64[np.ndarray, " n"]) -> Int[Tensor, " n"]:
        """Copy an array to the device from pinned memory: a copy from other memory waits for the steps before it."""
        return to_device({"array": array}, self._device)["array"]

    def _keep(self, tokens: Int[Tensor, " R"]) -> tuple[Int[Tensor, " R"], torch.cuda.Event | None]:
        """Write sampled tokens to `last_token`, and start copying them to the host.

        Returns:
            The tokens on the host, and an event recorded after their copy; None on a CPU.
        """
        on_gpu = tokens.is_cuda
        host = torch.empty(tokens.shape, dtype=tokens.dtype, pin_memory=True) if on_gpu else tokens
        if len(tokens):
            keep_tokens(tokens, self._sampling_rows, self._last_token, host)
        if not on_gpu:
            return host, None
        done = torch.cuda.Event()
        done.record()
        return host, done


class SeenTokens:
    """The tokens of prompt and output that each row has seen, for requests with a repetition penalty.

    Args:
        max_rows: rows of the page table.
        vocab_size: tokens of the vocabulary.
        device: device of the logits.
    """

    def __init__(self, max_rows: int, vocab_size: int, device: torch.device) -> None:
        self._table = torch.zeros(max_rows, vocab_size, dtype=torch.bool, device=device)
        self._true = torch.ones((), dtype=torch.bool, device=device)  # copying one to the device would wait for it
        self._admissions = [0] * max_rows

    def enter(self, row: int, admission: int, token_ids: Int[np.ndarray, " n"]) -> None:
        """Fill a row with the tokens of the request that was admitted to it, unless that has been done."""
        if self._admissions[row] != admission:
            self._admissions[row] = admission
            self._table[row] = False
            self._table[row, to_device({"tokens": token_ids}, self._table.device)["tokens"].long()] = self._true

    def add(self, rows: Int[Tensor, " R"], token_ids: Int[Tensor, " R"]) -> None:
        """Mark one token in each of some rows."""
        self._table[rows, token_ids] = self._true

    def of(self, rows: Int[Tensor, " P"]) -> Bool[Tensor, "P V"]:
        """Return which tokens some rows have seen."""
        return self._table[rows]
