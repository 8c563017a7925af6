"""Guess with a small model: it generates a few tokens one by one, and the large model checks them in one step.

The draft model has an executor, a KV cache and a page table of its own. A row of its table is the same request as that
row of the engine's. Its cache follows: a request's known tokens are computed when guesses are asked for, those after
the last guess that was right again, and an earlier request's pages are returned when its row has another one.

It samples with the request's own parameters and seed. The noise of a position is the same in both models (see
`sampling.py`), so where their probabilities are alike they mostly choose the same token, at any temperature. If TV is
the total variation distance of the probabilities, a guess is right with a probability of at least (1 - TV) / (1 + TV)
(Daliri et al. 2024, "Coupling without communication and drafter-invariant speculative decoding"). A rejection sampler
gets to 1 - TV, but needs the probabilities of every guess, and its output depends on the draft model.
"""

from dataclasses import replace
from typing import ClassVar

import numpy as np
from jaxtyping import Int32, Int64

from mini_engine.kv_cache.page_table import PageTable
from mini_engine.request import Running
from mini_engine.sampling_params import Admission
from mini_engine.step_input import NO_COPIES, Executor, StepInput, admission_of


class DraftModelDrafter:
    """Generates guesses with a model.

    Args:
        executor: computes the model's steps; it has a row for each row of the engine.
        page_table: the pages of the model's cache.
        num_tokens: most guesses for each request.
        max_model_len: longest text that the model takes.
        max_num_batched_tokens: most tokens in one of its steps.
    """

    scout: ClassVar[None] = None

    def __init__(
        self,
        executor: Executor,
        page_table: PageTable,
        num_tokens: int,
        max_model_len: int,
        max_num_batched_tokens: int,
    ) -> None:
        self._executor, self._page_table, self._num_tokens = executor, page_table, num_tokens
        self._max_model_len, self._max_tokens = max_model_len, max_num_batched_tokens
        # For each row: its request, known tokens when guesses were last asked for, and tokens with keys in the cache.
        self._admission, self._num_known, self._num_computed = np.zeros((3, page_table.max_rows), dtype=np.int64)
        self._guesses = np.zeros((page_table.max_rows, num_tokens), dtype=np.int32)

    def propose(
        self, running: Running, rows: Int64[np.ndarray, " B"], most: Int64[np.ndarray, " B"]
    ) -> tuple[Int32[np.ndarray, "B K"], Int64[np.ndarray, " B"]]:
        """See `Drafter`. A request without room in the model's cache, or too long for it, gets no guesses."""
        self._release(np.flatnonzero((self._admission > 0) & (self._admission != running.admission)))
        known = running.num_known[rows]
        counts = np.clip(self._max_model_len - known, 0, most)  # the last guess is not computed
        missing, _ = self._page_table.missing(rows, np.where(counts > 0, known + counts - 1, 0))
        counts[missing.cumsum() > self._page_table.num_free_pages] = 0
        has = counts > 0
        self._page_table.take(rows[has], missing[has])
        self._forget_wrong_guesses(running, rows[has])
        self._compute_known(running, rows[has])
        for i in range(1, self._num_tokens):
            own = rows[counts > i]
            if len(own):
                states = self._states(running, own[running.branches[own] > 0], i)
                self._guesses[own, i] = self._step(own, np.ones_like(own), self._guesses[own, i - 1], admitted=states)
        return self._guesses[rows, : counts.max(initial=0)], counts

    def forget(self) -> None:
        """Return the pages of all requests: rows belong to other requests from now on."""
        self._release(np.flatnonzero(self._admission))
        self._executor.reset()

    def _release(self, rows: Int64[np.ndarray, " n"]) -> None:
        for row in rows.tolist():
            self._page_table.truncate(row, 0)
        self._admission[rows] = self._num_known[rows] = self._num_computed[rows] = 0

    def _forget_wrong_guesses(self, running: Running, rows: Int64[np.ndarray, " n"]) -> None:
        """Keep the keys of those guesses that have become known tokens."""
        before, known = self._num_known[rows], running.num_known[rows]
        index = before[:, None] + np.arange(self._num_tokens)
        tokens = running.tokens[rows[:, None], np.minimum(index, running.tokens.shape[1] - 1)]
        right = (tokens == self._guesses[rows]) & (index < known[:, None])
        num_right = np.logical_and.accumulate(right, axis=1).sum(axis=1)
        # The last known token is computed in any case, because the first guess is sampled from its logits.
        self._num_computed[rows] = np.minimum(np.minimum(self._num_computed[rows], before + num_right), known - 1)
        self._num_known[rows] = known

    def _compute_known(self, running: Running, rows: Int64[np.ndarray, " n"]) -> None:
        """Compute the known tokens whose keys are missing, in steps of limited size, and sample the first guesses."""
        is_new = self._admission[rows] == 0
        self._admission[rows] = running.admission[rows]
        admitted = self._states(running, rows[is_new | (running.branches[rows] > 0)], 0)
        while len(rows):
            left = running.num_known[rows] - self._num_computed[rows]
            num_new = np.clip(self._max_tokens - (left.cumsum() - left), 0, left)
            # Rows whose last guesses were right decode a few tokens; a token is sampled after each of them.
            decodes = (self._num_computed[rows] > 0) & (num_new == left)
            order = np.argsort(np.where(num_new == 1, 0, np.where(decodes, 1, 2)), kind="stable")  # prompts last
            order = order[num_new[order] > 0]
            own, num_new, decodes = rows[order], num_new[order], decodes[order]
            computed, token_rows = self._num_computed[own], own.repeat(num_new)
            ends = computed + num_new == running.num_known[own]
            num_logits, num_decodes = np.where(decodes, num_new, ends), int(np.count_nonzero(decodes | (num_new == 1)))
            positions = np.arange(len(token_rows)) + (computed + num_new - num_new.cumsum()).repeat(num_new)
            token_ids = running.tokens[token_rows, positions]
            self._guesses[own[ends], 0] = self._step(own, num_new, token_ids, num_logits, num_decodes, admitted)
            rows, admitted = rows[self._num_computed[rows] < running.num_known[rows]], []

    def _states(self, running: Running, rows: Int64[np.ndarray, " n"], num_guesses: int) -> list[Admission]:
        """Return what the sampler needs to know of some rows, if so many guesses were in the output.

        Penalties are right only if no wrong guess has been counted. Grammars are left to the target.
        """
        states = []
        for row, request in zip(rows.tolist(), running.requests_of(rows), strict=True):
            own = admission_of(request, running)
            output = np.concatenate([own.output_token_ids, self._guesses[row, :num_guesses]])
            states.append(replace(own, output_token_ids=output.astype(np.int32), is_masked=False))
        return states

    def _step(
        self,
        rows: Int64[np.ndarray, " B"],
        num_new: Int64[np.ndarray, " B"],
        token_ids: Int32[np.ndarray, " T"],
        num_logits: Int64[np.ndarray, " B"] | None = None,
        num_decodes: int | None = None,
        admitted: list[Admission] | None = None,
    ) -> Int64[np.ndarray, " R"]:
        """Compute some tokens of each row, by default one, and return the last sampled token of those that sample."""
        self._num_computed[rows] += num_new
        num_computed = self._num_computed[rows]
        page_counts = -(-num_computed // self._page_table.page_size)
        step = StepInput(
            rows=rows,
            num_new=num_new,
            num_logits=np.ones_like(rows) if num_logits is None else num_logits,
            num_decodes=len(rows) if num_decodes is None else num_decodes,
            kv_lens=num_computed,
            num_computed=num_computed,
            token_ids=token_ids,
            token_source=None,
            pages=self._page_table.pages_of(rows, page_counts).copy(),
            page_positions=None,
            admitted=tuple(admitted or ()),
            copies=NO_COPIES,
            levels=(),
        )
        sampled = self._executor.collect(self._executor.launch(step))
        return sampled.tokens[np.arange(len(sampled.counts)), sampled.counts - 1]
