"""A request, and the columns in which the engine keeps its running requests.

A running request occupies one row of the page table. Everything a step needs to know about it is an entry of a column
indexed by that row, written once, at admission. So a step works on whole columns, and Python loops only over the
requests that arrive, end or are preempted. Explained in chapter 07.
"""

from collections.abc import Callable, Collection
from collections.abc import Sequence as ListLike
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
from jaxtyping import Bool, Float, Int, Int32, Int64

from mini_engine.errors import MiniEngineError, RequestError
from mini_engine.sampling_params import SamplingParams
from mini_engine.structured import TokenGrammar

FinishReason = Literal["stop", "length", "abort", "error"]
# A token and the n likeliest tokens, their log probabilities, and the rank of the token; see `logprobs.py`.
TokenLogprobs = tuple[Int[np.ndarray, " n1"], Float[np.ndarray, " n1"], int]


@dataclass(frozen=True, eq=False)
class PinnedPages:
    """Pages of the pool that belong to no request and do not change until they are unpinned.

    Attributes:
        pages: the pages, in order of position.
        owner: the chunk memory that keeps them.
    """

    pages: Int32[np.ndarray, " n"]
    owner: object = None


@dataclass(frozen=True, eq=False)
class PlacedChunk:
    """Keys that exist already, at a position before a request's own tokens (chunk memory, chapter 10).

    Attributes:
        pinned: the pages that hold the keys, from the start of the first page.
        token_ids: the tokens that the keys belong to.
        query_offset: offset that is added to a query's position before the query meets these keys: the position of the
            first key when it was computed, minus its position in this request.
    """

    pinned: PinnedPages
    token_ids: ListLike[int]
    query_offset: int


Context = tuple[PlacedChunk, ...]


@dataclass(eq=False)
class Request:
    """One request: its parameters and its tokens so far.

    While it runs, its tokens are a row of `Running.tokens`; `token_ids` is updated when it leaves its row.

    Attributes:
        request_id: name, unique among unfinished requests.
        prompt_token_ids: the prompt.
        params: its sampling parameters.
        seed: its seed, drawn at random if `params` has none.
        max_len: most tokens of prompt and output together.
        end_token_ids: tokens at which the output ends.
        arrival: its number in the order of arrival.
        prefix: a chunk at the start of the prompt whose pages can be read like the request's own; then there are no
            other chunks.
        context: chunks at the start of the prompt whose keys are in pages that are levels of their own.
        token_ids: prompt and output, as of when it last left its row.
        finish_reason: None while unfinished; "stop" at an end token or stop string, "length" at `max_len`.
        error: why it failed, if `finish_reason` is "error".
        num_cached_tokens: tokens of the prompt whose keys the cache had when it was first admitted; None before.
        grammar: says which tokens may follow the output so far; None: any.
        priority: lower is served first, if the scheduling policy is "priority".
        tenant: the name of the sender, between whom the scheduling policy "fair" divides the service.
        num_overtaken: times that another request was admitted although this one was first (see `waiting.py`).
        num_charged: tokens that its tenant's counter has counted.
        logprobs: log probabilities collected so far, by the position of the token, if its parameters ask for them.
    """

    request_id: str
    prompt_token_ids: list[int]
    params: SamplingParams
    seed: int
    max_len: int
    end_token_ids: tuple[int, ...]
    arrival: int
    prefix: PlacedChunk | None = None
    context: Context = ()
    grammar: TokenGrammar | None = None
    priority: int = 0
    tenant: str = ""
    token_ids: list[int] = field(init=False)
    num_overtaken: int = 0
    num_charged: int = 0
    finish_reason: FinishReason | None = None
    error: MiniEngineError | None = None
    num_cached_tokens: int | None = None
    logprobs: dict[int, TokenLogprobs] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        self.token_ids = list(self.prompt_token_ids)

    @property
    def chunks(self) -> Context:
        """The chunks that the prompt begins with, whose keys are not computed again."""
        return self.context if self.prefix is None else (self.prefix,)

    @property
    def cache_key(self) -> tuple:
        """What the keys in the request's own pages depend on besides its tokens: the chunks before them."""
        return tuple((chunk.pinned, chunk.query_offset) for chunk in self.context)

    @property
    def context_len(self) -> int:
        """Number of tokens at the start whose keys are in no page of the request."""
        return sum(len(chunk.token_ids) for chunk in self.context)

    @property
    def asks_for_logprobs(self) -> bool:
        """Whether its parameters ask for log probabilities of its output or its prompt."""
        return self.params.logprobs is not None or self.params.prompt_logprobs is not None

    @property
    def output_token_ids(self) -> list[int]:
        return self.token_ids[len(self.prompt_token_ids) :]

    def end_of(self, token_ids: ListLike[int]) -> FinishReason | None:
        """Return why the request ends with these tokens of prompt and output; None if it goes on."""
        if len(token_ids) > len(self.prompt_token_ids) and token_ids[-1] in self.end_token_ids:
            return "stop"
        return "length" if len(token_ids) >= self.max_len else None


class Running:
    """The running requests as columns, one entry per row of the page table.

    Three counts describe the progress of a request:

    - `num_known`: tokens whose ids the host has;
    - `num_scheduled`: tokens that exist once all launched steps are done, including those still on the device;
    - `num_computed`: tokens whose keys and values are in the cache once all launched steps are done.

    A token at a position before `num_known` is uploaded; a later one is read on the device, from the last token that
    the row sampled.

    Args:
        max_rows: rows of the page table.
        max_len: longest prompt and output together.
        num_groups: groups of layers that have page tables of their own.

    Attributes:
        order: rows in use, in line: oldest request first, unless a scheduling policy says otherwise.
        tokens: [rows, max_len] token ids of each request.
        context_len: number of tokens at the start whose keys are in the pages of chunks.
        num_evicted: [num_groups * rows] number of tokens at the start whose keys are not in the pages of a row of the
            page table: those of `context_len`, and those that have left the window. It alone has an entry for each
            group of layers, in the order of the page table's rows.
        has_evicted: whether any request has ever had such tokens.
        num_prompt: tokens of each request's prompt.
        max_len: most tokens of each request.
        waits: 1 if a token can be sampled only after the host knows all tokens before it, because a grammar reads them.
        branches: 1 if the output changes the logits in other ways than through the model, such as penalties and
            grammars. Then each guess of speculative decoding has a branch of the sampler (`Branches`).
        kept: branch of the last step that has become the state of the row's sampler; -1: none has.
        end_tokens: [n] times [rows]: end tokens of each request, padded with -1.
        admission: serial number of the admission that filled the row, to tell its request from earlier ones.
        requests: request of each row.
        num_contexts: number of rows whose request has a context.
        num_asking: number of rows whose request asks for log probabilities.
        num_waiting: number of rows that wait for their tokens.
    """

    def __init__(self, max_rows: int, max_len: int, num_groups: int = 1) -> None:
        self.order = np.zeros(0, dtype=np.int64)
        self.tokens = np.zeros((max_rows, max_len), dtype=np.int32)
        columns = np.zeros((10, max_rows), dtype=np.int64)
        self.num_known, self.num_scheduled, self.num_computed, self.admission, self.context_len = columns[:5]
        self.num_prompt, self.max_len, self.branches, self.waits, self.kept = columns[5:]
        self.kept[:] = -1
        self.num_evicted = np.zeros(num_groups * max_rows, dtype=np.int64)
        self.has_evicted = False
        self.end_tokens: list[Int64[np.ndarray, " rows"]] = []
        self.requests: list[Request | None] = [None] * max_rows
        self.num_contexts = self.num_asking = self.num_waiting = 0
        self._rows: dict[Request, int] = {}
        self._admissions = 0

    def __len__(self) -> int:
        return len(self.order)

    def enter(self, row: int, request: Request) -> None:
        """Fill a row with an admitted request; only its context is computed yet."""
        num_tokens, ends = len(request.token_ids), request.end_token_ids
        self.tokens[row, :num_tokens] = request.token_ids
        self.num_known[row] = self.num_scheduled[row] = num_tokens
        self.num_computed[row] = self.context_len[row] = request.context_len
        self.num_evicted[row :: len(self.requests)] = request.context_len
        if request.context:
            self.num_contexts += 1
            self.has_evicted = True
        self.num_asking += request.asks_for_logprobs
        self.num_prompt[row], self.max_len[row] = len(request.prompt_token_ids), request.max_len
        self.waits[row] = request.grammar is not None
        self.num_waiting += request.grammar is not None
        self.branches[row] = request.params.depends_on_output or request.grammar is not None
        self.end_tokens += [np.full_like(self.max_len, -1) for _ in range(len(ends) - len(self.end_tokens))]
        for i, of_rows in enumerate(self.end_tokens):
            of_rows[row] = ends[i] if i < len(ends) else -1
        self._admissions += 1
        self.admission[row] = self._admissions
        self.requests[row] = request
        self._rows[request] = row
        self.order = np.append(self.order, row)

    def leave(self, row: int) -> Request:
        """Empty a row. Its request keeps the tokens that the host knows; a token still on the device is dropped."""
        request = self.requests[row]
        assert request is not None, f"row {row} is empty"
        request.token_ids = self.tokens[row, : self.num_known[row]].tolist()
        self.order = self.order[self.order != row]
        self.requests[row] = None
        self.num_contexts -= bool(request.context)
        self.num_asking -= request.asks_for_logprobs
        self.num_waiting -= request.grammar is not None
        self.admission[row], self.kept[row] = 0, -1
        del self._rows[request]
        if len(self.end_tokens) == len(request.end_token_ids):  # `append` compares with every column in every step
            del self.end_tokens[max((len(other.end_token_ids) for other in self._rows), default=0) :]
        return request

    def sort(self, key: Callable[[Request], Any]) -> None:
        """Sort the order of the running requests by a key."""
        rows = sorted(zip(self.requests_of(self.order), self.order.tolist(), strict=True), key=lambda own: key(own[0]))
        self.order = np.array([row for _, row in rows], dtype=np.int64)

    def row_of(self, request: Request) -> int | None:
        """Return the row of a request; None if it is not running."""
        return self._rows.get(request)

    def requests_of(self, rows: Int[np.ndarray, " n"]) -> list[Request]:
        """Return the requests of some rows in use."""
        return [self.requests[row] for row in rows.tolist()]

    def known_tokens(self, request: Request, start: int = 0) -> list[int]:
        """Return the known tokens of a request's prompt and output from a position on, whether it runs or not."""
        row = self._rows.get(request)
        return request.token_ids[start:] if row is None else self.tokens[row, start : self.num_known[row]].tolist()

    @property
    def has_tokens_in_flight(self) -> bool:
        """Whether a token that exists on the device is not known to the host yet."""
        return bool(np.count_nonzero(self.num_scheduled[self.order] > self.num_known[self.order]))

    def count(self, rows: Int[np.ndarray, " B"], num_new: Int[np.ndarray, " B"]) -> None:
        """Count the tokens of a launched step as computed; a row whose tokens are all computed then has one more."""
        self.num_computed[rows] += num_new
        self.num_scheduled[rows] += self.num_computed[rows] >= self.num_scheduled[rows]  # more, if guesses are computed

    def append(self, rows: Int[np.ndarray, " n"], token_ids: Int[np.ndarray, " n"]) -> Int64[np.ndarray, " m"]:
        """Add one sampled token to each of some distinct rows.

        Returns:
            The rows whose requests end with these tokens: at an end token, or at `max_len`.
        """
        known = self.num_known[rows]
        self.tokens[rows, known] = token_ids
        self.num_known[rows] = known = known + 1  # from here on the tokens are kept, whatever interrupts the step
        return rows[(known >= self.max_len[rows]) | self._are_ends(rows, token_ids)]

    def guess(
        self, rows: Int[np.ndarray, " n"], token_ids: Int[np.ndarray, "n K"], counts: Int[np.ndarray, " n"]
    ) -> None:
        """Write guesses after the known tokens of some rows, for one step: the first `counts` of each."""
        self._write(rows, token_ids, counts)

    def guesses(self, rows: Int[np.ndarray, " n"], num_tokens: int) -> Int32[np.ndarray, "n K"]:
        """Return what follows the known tokens of some rows."""
        index = self.num_known[rows][:, None] + np.arange(num_tokens)
        return self.tokens[rows[:, None], np.minimum(index, self.tokens.shape[1] - 1)]

    def append_several(
        self, rows: Int[np.ndarray, " n"], token_ids: Int[np.ndarray, "n K"], counts: Int[np.ndarray, " n"]
    ) -> tuple[Int64[np.ndarray, " n"], Int64[np.ndarray, " m"]]:
        """Add sampled tokens to each of some distinct rows, up to the first end token. Keys after them do not count.

        Args:
            rows: rows all of whose tokens are known.
            token_ids: the tokens.
            counts: how many of them count, at least 1, and no more than `max_len` allows.

        Returns:
            How many tokens each row has got, and the rows whose requests end with them.
        """
        known, width = self.num_known[rows], token_ids.shape[1]
        ends = self._are_ends(rows[:, None], token_ids)
        first_end = np.where(ends.any(axis=1), ends.argmax(axis=1), width)
        counts = np.minimum(counts, first_end + 1)
        self._write(rows, token_ids, counts)
        self.num_known[rows] = known = known + counts  # from here on the tokens are kept, whatever interrupts the step
        self.num_scheduled[rows], self.num_computed[rows] = known, known - 1
        return counts, rows[(known >= self.max_len[rows]) | (first_end < counts)]

    def _write(
        self, rows: Int[np.ndarray, " n"], token_ids: Int[np.ndarray, "n K"], counts: Int[np.ndarray, " n"]
    ) -> None:
        """Write the first `counts` tokens of each row after its known ones."""
        row, index = np.nonzero(np.arange(token_ids.shape[1]) < counts[:, None])
        self.tokens[rows[row], self.num_known[rows[row]] + index] = token_ids[row, index]

    def _are_ends(
        self, rows: Int[np.ndarray, "#n *#K"], token_ids: Int[np.ndarray, "n *K"]
    ) -> Bool[np.ndarray, "n *K"]:
        ended = np.zeros(token_ids.shape, dtype=np.bool_)
        for of_rows in self.end_tokens:
            ended |= token_ids == of_rows[rows]
        return ended


def check_prompt(token_ids: ListLike[int], vocab_size: int, max_model_len: int, context_len: int = 0) -> None:
    """Raise RequestError for a prompt that the model cannot process after `context_len` tokens of chunks."""
    if not token_ids:
        raise RequestError("the prompt is empty; give at least one token")
    if context_len + len(token_ids) >= max_model_len:
        behind = f" after {context_len} tokens of chunks" if context_len else ""
        raise RequestError(
            f"the prompt has {len(token_ids)} tokens{behind}, but the model takes {max_model_len}, output included; "
            "shorten it, or raise max_model_len if the model allows more"
        )
    if set(map(type, token_ids)) != {int} or min(token_ids) < 0 or max(token_ids) >= vocab_size:
        raise RequestError(
            f"the prompt has token ids that are not integers from 0 to {vocab_size - 1}; use this model's tokenizer"
        )


def end_tokens(params: SamplingParams, eos_token_ids: Collection[int]) -> tuple[int, ...]:
    """Return the tokens at which a request ends: its own, and the model's unless it ignores them."""
    return tuple(sorted({*(params.stop_token_ids or ()), *(() if params.ignore_eos else eos_token_ids)}))
