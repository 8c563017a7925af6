"""The device's side of a step: executors compute what a `StepInput` describes, and know nothing of requests.

`launch` prepares a step and starts it, and reads nothing back from the device; `collect` waits for its tokens. Sampled
tokens stay on the device in `last_token`, one per row of the page table. So the host can prepare and launch the next
step while the device still computes this one. Explained in chapter 07.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from jaxtyping import Float, Int, Int64
from torch import Tensor

from mini_engine.attention.backend import AttentionBackend
from mini_engine.attention.levels import Level
from mini_engine.batch import PrefixLevel, StepBatch, StepBuffers, upload_levels
from mini_engine.config import ResolvedConfig
from mini_engine.decode_graphs import MAX_GROUPS, DecodeArrays, DecodeGraphs, TokensAndLogits
from mini_engine.kv_cache.paged import PagedKVCache
from mini_engine.logprobs import LogprobArrays, LogprobRows
from mini_engine.models.base import LanguageModel
from mini_engine.models.transform import bind_layers
from mini_engine.piecewise_graphs import PiecewiseGraphs
from mini_engine.sample_graphs import SampleGraphs
from mini_engine.sampler import Logprobs, Sampler, logprobs_of
from mini_engine.speculative.branches import MOST_BRANCHES, Branches
from mini_engine.step_graphs import StepGraphs
from mini_engine.step_input import GroupPages, SampledTokens, StepInput
from mini_engine.transfer import keep_tokens, to_device

if TYPE_CHECKING:
    from mini_engine.kernels.persistent_decode import PersistentDecode
    from mini_engine.parts import Parts


LOGPROB_ROWS = 256  # tokens of prompts whose logits exist at once


@dataclass(eq=False)
class Ticket:
    """A step that has been launched but not collected.

    Attributes:
        tokens: [L] the sampled tokens on the host, valid after `done`.
        counts: [R] number of tokens that each row samples.
        done: event recorded after the step on a GPU; None on a CPU, where the step has already ended.
        logprobs: for each of the step's `logprobs`, its log probabilities on the host, in parts, valid after `done`.
    """

    tokens: Int[Tensor, " L"]
    counts: Int64[np.ndarray, " R"]
    done: torch.cuda.Event | None
    logprobs: list[list[Logprobs]]


class LocalExecutor:
    """Runs the model over the paged KV cache of one device, one step at a time.

    Args:
        model: the model.
        backend: its attention.
        cache: its KV cache.
        config: the engine's options, with every default resolved.
        graph_sizes: numbers of requests for which decode steps are captured as CUDA graphs, ascending.
        persistent: computes captured steps of a few requests instead of the model; None if the model does.
        piece_sizes: numbers of tokens for which the pieces of other steps are captured, ascending.
        num_layer_groups: groups of layers that have page tables of their own.
        parts: the engine's replaceable parts.
    """

    def __init__(
        self,
        model: LanguageModel,
        backend: AttentionBackend,
        cache: PagedKVCache,
        config: ResolvedConfig,
        *,
        graph_sizes: Sequence[int],
        persistent: "PersistentDecode | None",
        piece_sizes: Sequence[int] = (),
        num_layer_groups: int = 1,
        parts: "Parts",
    ) -> None:
        self.model, self.backend, self.cache = model, backend, cache
        bind = partial(bind_layers, model, batch_invariant=config.batch_invariant)
        self._compute = bind(backend)
        self._persistent, self._device = persistent, model.device
        most_branches = MOST_BRANCHES if config.speculative_config else 0
        self._sampler = Sampler(
            config.max_batch_size, model.config.vocab_size, self._device, parts.sample, most_branches
        )
        self._last_token = torch.zeros(config.max_batch_size, dtype=torch.long, device=self._device)
        self._graphs = DecodeGraphs(
            graph_sizes,
            self._decode,
            self._plan_decode,
            page_size=cache.page_size,
            pages_per_row=-(-config.max_model_len // config.page_size),
            padding_page=cache.num_pages - 1,
            padding_row=self._sampler.padding_row,
            num_buffers=config.pipeline_depth + 1,
            device=self._device,
            pad=parts.pad_decodes,
            num_layer_groups=num_layer_groups,
        )
        memory: dict[str, Any] = {
            "padding_slot": (cache.num_pages - 1) * cache.page_size, "dtype": model.dtype, "device": self._device,
        }  # fmt: skip
        self._pieces = PiecewiseGraphs(piece_sizes, bind, backend, **memory)
        most = cache.num_pages * cache.page_size if backend.captures_steps else 0  # tokens whose keys the pool holds
        self._steps = StepGraphs([size for size in piece_sizes if size <= most], bind, backend, **memory)
        self._samples = SampleGraphs(
            graph_sizes, self._sample_rows, padding_row=self._sampler.padding_row, device=self._device
        )
        # The buffers take turns, because the copies of earlier steps may not have ended when the host writes a step.
        self._buffers = [
            [StepBuffers(self._device) for _ in range(num_layer_groups)] for _ in range(config.pipeline_depth + 1)
        ]
        self._num_launched = 0
        # Kept from step to step while they are the same.
        self._host_rows, self._rows = b"", self._last_token[:0]
        self._host_levels: tuple[Level, ...] = ()
        self._levels: tuple[PrefixLevel, ...] = ()

    @torch.inference_mode()
    def launch(self, step: StepInput) -> Ticket:
        """Start a step; it reads nothing back from the device."""
        self.cache.copy_pages(step.copies.tolist())
        self._sampler.keep(step.kept)
        self._sampler.enter(step.admitted)
        if step.branches is not None:
            self._sampler.branch(step.branches)
        if step.masks is not None:
            self._sampler.allow(**to_device(step.masks._asdict(), self._device))
        owners, size = self._rows_of(step.logit_owners), self._graph_size(step)
        rows = owners if step.branches is None else self._branched(step.logit_owners, step.branches)
        graph = self._graphs.get(size, tuple(level.padded_groups for level in self._upload(step))) if size else None
        batch = self._build(step, size)
        if graph:
            tokens, logits = self._graphs.run(graph, batch, rows)
            tokens, hidden = tokens[: rows.shape[0]], logits  # not hidden states, which only prompts need
        else:
            hidden = self._forward(batch)
            tokens, logits = self._sample(hidden, batch, rows) if len(rows) else (self._last_token[:0], hidden)
        logprobs = [self._logprobs(wanted, tokens, logits, hidden) for wanted in step.logprobs]
        return self._keep(tokens, owners, step.num_logits[step.num_logits > 0], logprobs)

    def collect(self, ticket: Ticket) -> SampledTokens:
        """Wait for a step and return the tokens that it sampled, and their log probabilities."""
        if ticket.done is not None:
            ticket.done.synchronize()
        tokens, counts = ticket.tokens.numpy(), ticket.counts
        logprobs = tuple([LogprobArrays.joined(parts) for parts in ticket.logprobs])
        if len(tokens) == len(counts):
            return SampledTokens(tokens[:, None], counts, logprobs)
        several = np.zeros((len(counts), int(counts.max())), dtype=np.int64)
        several[np.arange(several.shape[1]) < counts[:, None]] = tokens
        return SampledTokens(several, counts, logprobs)

    @torch.inference_mode()
    def hidden_states(self, step: StepInput) -> Float[Tensor, "T hidden"]:
        """Compute a step that samples nothing, and return the final hidden state of each of its tokens."""
        return self._forward(self._build(step, None))

    @torch.inference_mode()  # as in a step: backends keep memory of their own, which steps write as well
    def capture(self) -> None:
        """Compile the sampler and capture all CUDA graphs now, rather than when a step first needs them."""
        if self._device.type == "cuda":
            self._sampler.warm_up(self.model.dtype)
        for size in reversed(self._graphs.sizes):  # smaller graphs fit into the memory of the largest
            self._graphs.get(size)
        for graphs in (self._pieces, self._steps):
            for size in reversed(graphs.sizes):
                graphs.get(size)
        if self._pieces.sizes:
            hidden = self._pieces.get(self._pieces.sizes[0]).hidden
            for size in reversed(self._samples.sizes):
                self._samples.get(size, hidden)

    def reset(self) -> None:
        """Wait for the device to finish, then forget the requests of earlier steps."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        for of_groups in (*self._buffers, *self._graphs.buffers):
            for buffers in of_groups:
                buffers.forget()

    def _graph_size(self, step: StepInput) -> int | None:
        """Return the size of the graph that can run a step; None if there is none.

        Every request decodes. No graph runs a step with queries that are rotated for chunks, or with a level
        of many groups.
        """
        can_run = step.is_decode and all(
            level.query_offsets is None and level.padded_groups <= MAX_GROUPS for level in self._upload(step)
        )
        return self._graphs.size_for(len(step.token_ids)) if can_run else None

    def _rows_of(self, rows: Int64[np.ndarray, " L"]) -> Int[Tensor, " L"]:
        """Return rows on the device; the same tensor while they are the same rows."""
        if self._host_rows != rows.tobytes():
            # From pinned memory: a copy from other memory waits for the steps before it.
            self._rows, self._host_rows = to_device({"rows": rows}, self._device)["rows"], rows.tobytes()
        return self._rows

    def _branched(self, owners: Int64[np.ndarray, " L"], branches: Branches) -> Int[Tensor, " L"]:
        """Return the sampler's row of each row of logits, where some are those of branches."""
        rows = owners.copy()
        rows[branches.places] = self._sampler.first_branch + np.arange(len(branches.places))
        return to_device({"rows": rows}, self._device)["rows"]

    def _upload(self, step: StepInput) -> tuple[PrefixLevel, ...]:
        """Return the levels of a step on the device; the same object while they are unchanged."""
        if step.levels is not self._host_levels:
            self._levels = upload_levels(step.levels, self._device) if step.levels else ()
            self._host_levels = step.levels
        return self._levels

    def _build(self, step: StepInput, graph_size: int | None) -> StepBatch:
        if graph_size is not None or self.backend.takes_single_queries:
            step = step.with_single_queries(self.cache.page_size)
        self._num_launched += 1
        buffers = self._graphs.buffers if graph_size else self._buffers
        first, *others = buffers[self._num_launched % len(buffers)]
        batch = self._build_group(step, step, graph_size, self._upload(step), first)
        if others:  # layers with windows have no levels
            groups = zip(step.other_groups, others, strict=True)
            batch.other_groups = tuple(self._build_group(step, own, graph_size, (), into) for own, into in groups)
        return batch

    def _build_group(
        self,
        step: StepInput,
        own: StepInput | GroupPages,
        graph_size: int | None,
        levels: tuple[PrefixLevel, ...],
        into: StepBuffers,
    ) -> StepBatch:
        """Build a step with the pages of one group of layers."""
        num_requests = len(step.rows)
        arrays: DecodeArrays = {
            "token_ids": step.token_ids,
            "kv_lens": own.kv_lens,
            "pages": own.pages,
            "token_source": step.token_source,
            "page_positions": own.page_positions,
        }
        if graph_size and graph_size > num_requests:
            arrays = self._graphs.pad(arrays, graph_size)
        all_sample = np.count_nonzero(step.num_logits == 1) == num_requests
        singles = self.backend.takes_single_queries and not graph_size  # padding decodes, too
        return StepBatch.build(
            **arrays,
            num_new=step.num_new if len(step.token_ids) > num_requests else None,
            page_size=self.cache.page_size,
            num_logits=None if all_sample else step.num_logits,
            num_decodes=step.num_decodes if singles else None,
            levels=levels,
            page_capacity=self._graphs.page_capacity(graph_size) if graph_size else None,
            into=into,
        )

    def _forward(self, batch: StepBatch) -> Float[Tensor, "T hidden"]:
        token_ids = batch.feed(self._last_token)
        arrays = token_ids, batch.positions, batch.slot_mapping
        if (size := self._steps.size_for(batch.num_tokens)) and self.backend.can_capture(batch, size):
            self._steps.plan(size, batch)
            return self._steps.run(size, *arrays)
        self.backend.plan(batch)
        if size := self._pieces.size_for(batch.num_tokens):
            return self._pieces.run(size, *arrays)
        return self._compute(token_ids, batch.positions)

    def _plan_decode(self, batch: StepBatch) -> None:
        """Prepare a step that a CUDA graph replays."""
        if not (self._persistent and batch.num_tokens <= self._persistent.max_tokens):
            self.backend.plan(batch)

    def _decode(self, batch: StepBatch, rows: Int[Tensor, " n"]) -> TokensAndLogits:
        """Compute a decode step of one token for each request on the device, as a CUDA graph records it."""
        if self._persistent and batch.num_tokens <= self._persistent.max_tokens:
            logits = self._persistent(batch, self._last_token)
        else:
            logits = self.model.compute_logits(self._compute(batch.feed(self._last_token), batch.positions))
        return self._sampler.sample(logits, rows, batch.sampled_positions), logits

    def _sample(self, hidden: Tensor, batch: StepBatch, rows: Int[Tensor, " R"]) -> TokensAndLogits:
        """Sample one token for each row."""
        if size := self._samples.size_for(rows.shape[0]):
            return self._samples.run(size, hidden, batch.logit_rows, rows, batch.sampled_positions)
        if batch.logit_rows.shape[0] < batch.num_tokens:
            hidden = hidden[batch.logit_rows]
        return self._sample_rows(hidden, rows, batch.sampled_positions)

    def _sample_rows(self, hidden: Tensor, rows: Int[Tensor, " R"], positions: Int[Tensor, " R"]) -> TokensAndLogits:
        logits = self.model.compute_logits(hidden)
        return self._sampler.sample(logits, rows, positions), logits

    def _logprobs(
        self, wanted: LogprobRows, tokens: Int[Tensor, " n"], logits: Tensor, hidden: Tensor
    ) -> list[Logprobs]:
        """Compute log probabilities, a part at a time, and start copying them to the host."""
        moved = to_device({"index": wanted.index, "token_ids": wanted.token_ids}, self._device)
        of_tokens = moved["token_ids"] if wanted.is_prompt else tokens[moved["index"]]
        source, parts = hidden if wanted.is_prompt else logits, list[Logprobs]()
        for index, token_ids in zip(moved["index"].split(LOGPROB_ROWS), of_tokens.split(LOGPROB_ROWS), strict=True):
            rows = self.model.compute_logits(source[index]) if wanted.is_prompt else source[index]
            parts.append(logprobs_of(rows, token_ids, wanted.num_top).on_host())
        return parts

    def _keep(
        self,
        tokens: Int[Tensor, " L"],
        rows: Int[Tensor, " L"],
        counts: Int64[np.ndarray, " R"],
        logprobs: list[list[Logprobs]],
    ) -> Ticket:
        """Write sampled tokens to `last_token`, and start copying them to the host."""
        on_gpu = tokens.is_cuda
        host = torch.empty(tokens.shape, dtype=tokens.dtype, pin_memory=True) if on_gpu else tokens
        if tokens.shape[0]:
            keep_tokens(tokens, rows, self._last_token, host)
        if not on_gpu:
            return Ticket(host, counts, None, logprobs)
        done = torch.cuda.Event()
        done.record()
        return Ticket(host, counts, done, logprobs)
