"""`Sampler`: what the rows of the page table need to sample, kept on the device from step to step.

The parameters of a request are uploaded once, when it is admitted. The tokens that its output has so far are counted on
the device right after they are sampled, so penalties are right even while the host is one step ahead. A step is the
same sequence of kernels whatever its requests ask for: a row that does not need one of them leaves it at once. So one
CUDA graph serves every mixture of parameters. Explained in chapter 04; the graphs in chapter 12.
"""

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from jaxtyping import Bool, Float, Int, Int32, Int64
from torch import Tensor

from mini_engine import ops, sampling
from mini_engine.sampling import RECORD_DTYPE, SamplingBatch, penalize, sampling_records
from mini_engine.sampling_params import MAX_BAD_WORD_LEN, MAX_BAD_WORDS, MAX_EDITS, Admission
from mini_engine.speculative.branches import Branches
from mini_engine.transfer import start_copy, to_device

# Flags of a record. A row without the first four has its logits sampled as they are.
PENALIZED, EDITED, MASKED, HAS_BAD_WORDS, FILTERED = 1, 2, 4, 8, 16
ADJUSTED = PENALIZED | EDITED | MASKED | HAS_BAD_WORDS
RECORD_WORDS = RECORD_DTYPE.itemsize // 4
ANY_TOKEN, NO_TOKEN = -2, -1
FOREVER = 2**31 - 1

# A token whose logit changes: `bias` is added, and up to the position `banned_until` the token is forbidden.
EDIT_DTYPE = np.dtype([("token", np.int32), ("bias", np.float32), ("banned_until", np.int32)])


class Sampler:
    """Samples the tokens of a step, and keeps the state of sampling for each row of the page table.

    For 256 rows and 151,936 tokens the tables take 100 MB, most of it for the counts. On a CPU, pages of a table that
    are never written take no memory.

    Args:
        max_rows: rows of the page table.
        vocab_size: tokens of the vocabulary.
        device: device of the logits.
        sample: chooses the tokens from the adjusted logits. On a GPU, kernels take the place of the default.
        most_branches: further rows, for guesses (`speculative/branches.py`).

    Attributes:
        padding_row: a row that belongs to no request, for the padding of a CUDA graph. Its tokens mean nothing.
        first_branch: the row of a step's first branch; those of the others follow.
        records: [rows, words] the numbers of each row, RECORD_DTYPE as int32.
        counts: [rows, V] how often the output of each penalized row has each token, at most 32,767 times.
        in_prompt: [rows, V / 32] bit mask: tokens that the prompt of a penalized row has.
        allowed: [rows, V / 32] bit mask: tokens that a masked row may sample.
        edits: [rows, MAX_EDITS, 3] the first `num_edits` are EDIT_DTYPE as int32. No token is there twice.
        bad_words: [rows, MAX_BAD_WORDS, MAX_BAD_WORD_LEN] the first `num_bad_words` are words of two tokens or more:
            the last token of each is last, and ANY_TOKEN fills up the front.
        recent: [rows, MAX_BAD_WORD_LEN] the token of the output at position p is at p % MAX_BAD_WORD_LEN; NO_TOKEN
            stands for tokens of the prompt.
    """

    def __init__(
        self,
        max_rows: int,
        vocab_size: int,
        device: torch.device | str = "cpu",
        sample: Callable[[Tensor, SamplingBatch], Tensor] = sampling.sample,
        most_branches: int = 0,
    ) -> None:
        self.padding_row, self.vocab_size, self._device = max_rows, vocab_size, torch.device(device)
        self._sample, self.first_branch = sample, max_rows + 1
        rows, mask_words = self.first_branch + most_branches, -(-vocab_size // 32)
        self.records = self._zeros(np.int32, rows, RECORD_WORDS)
        self.counts = self._zeros(np.int16, rows, vocab_size)
        self.in_prompt = self._zeros(np.int32, rows, mask_words)
        self.allowed = self._zeros(np.int32, rows, mask_words)
        self.edits = self._zeros(np.int32, rows, MAX_EDITS, 3)
        self.bad_words = self._zeros(np.int32, rows, MAX_BAD_WORDS, MAX_BAD_WORD_LEN)
        self.recent = self._zeros(np.int32, rows, MAX_BAD_WORD_LEN)
        self._tables = (
            self.records, self.counts, self.in_prompt, self.allowed, self.edits, self.bad_words, self.recent
        )  # fmt: skip

    def _zeros(self, dtype: type, *shape: int) -> Tensor:
        """Return a table of zeros; NumPy gets them from the system without writing them."""
        if self._device.type == "cpu":
            return torch.from_numpy(np.zeros(shape, dtype=dtype))
        return torch.zeros(shape, dtype=getattr(torch, np.dtype(dtype).name), device=self._device)

    def enter(self, admitted: Sequence[Admission]) -> None:
        """Fill the rows of admitted requests, in the order of the device's work and without waiting for it.

        Args:
            admitted: the requests, no two in the same row; their parameters have passed `check_tokens`.
        """
        if not admitted:
            return
        records = sampling_records([one.params for one in admitted], [one.seed for one in admitted])
        tables: dict[str, list[tuple[int, np.ndarray]]] = defaultdict(list)
        counted: list[tuple[int, np.ndarray]] = []
        for record, one in zip(records, admitted, strict=True):
            params, outputs = one.params, np.asarray(one.output_token_ids, dtype=np.int64)
            if record["top_k"] >= self.vocab_size:
                record["top_k"] = 0
            edits, words = _edits_of(one, self.vocab_size), [w for w in params.bad_words_token_ids if len(w) > 1]
            record["num_edits"], record["num_bad_words"] = len(edits), len(words)
            if params.repetition_penalty != 1 or params.presence_penalty or params.frequency_penalty:
                record["flags"] |= PENALIZED
                tables["in_prompt"].append((one.row, pack_bits(one.prompt_token_ids, self.vocab_size)))
                counted.append((one.row, outputs))
            if len(edits):
                record["flags"] |= EDITED
                padded = np.zeros((MAX_EDITS, 3), dtype=np.int32)
                padded[: len(edits)] = edits.view(np.int32).reshape(-1, 3)
                tables["edits"].append((one.row, padded))
            if one.is_masked:
                record["flags"] |= MASKED
            if params.allowed_token_ids is not None:
                record["flags"] |= MASKED
                tables["allowed"].append((one.row, pack_bits(params.allowed_token_ids, self.vocab_size)))
            if words:
                record["flags"] |= HAS_BAD_WORDS
                padded = np.full((MAX_BAD_WORDS, MAX_BAD_WORD_LEN), ANY_TOKEN, dtype=np.int32)
                for to, word in zip(padded, words, strict=False):
                    to[-len(word) :] = word
                tables["bad_words"].append((one.row, padded))
            if record["top_k"] > 0 or record["top_p"] < 1 or record["min_p"] > 0:
                record["flags"] |= FILTERED
            end = len(one.prompt_token_ids) + len(outputs)
            recent = np.full(MAX_BAD_WORD_LEN, NO_TOKEN, dtype=np.int32)
            last = outputs[-MAX_BAD_WORD_LEN:]
            recent[np.arange(end - len(last), end) % MAX_BAD_WORD_LEN] = last
            tables["recent"].append((one.row, recent))
            tables["records"].append((one.row, record.reshape(1).view(np.int32)))
        arrays = {f"{name} rows": np.array([row for row, _ in filled]) for name, filled in tables.items()}
        arrays |= {name: np.stack([values for _, values in filled]) for name, filled in tables.items()}
        arrays |= {"counted": np.array([row for row, _ in counted], dtype=np.int64)}
        placed = [
            np.unique(np.asarray(outputs) + row * self.vocab_size, return_counts=True) for row, outputs in counted
        ]
        if placed:
            arrays["places"] = np.concatenate([places for places, _ in placed])
            arrays["times"] = np.concatenate([times for _, times in placed]).clip(max=2**15 - 1).astype(np.int16)
        moved = to_device(arrays, self._device)
        for name in tables:
            getattr(self, name).index_copy_(0, moved[f"{name} rows"], moved[name])
        if placed:
            self.counts.index_fill_(0, moved["counted"], 0)
            self.counts.view(-1).index_copy_(0, moved["places"], moved["times"])

    def branch(self, branches: Branches) -> None:
        """Copy the rows of some requests, and count guesses as if they were in the output: one row for each branch."""
        rows = self.first_branch + np.arange(len(branches.rows))
        of, index = np.nonzero(np.arange(branches.token_ids.shape[1]) < branches.counts[:, None])
        tokens, is_recent = branches.token_ids[of, index], index >= branches.counts[of] - MAX_BAD_WORD_LEN
        places, times = np.unique(rows[of] * self.vocab_size + tokens, return_counts=True)
        arrays = {"sources": branches.rows, "rows": rows, "places": places, "times": times}
        slots = (branches.positions[of] + index) % MAX_BAD_WORD_LEN
        arrays |= {"slots": (rows[of] * MAX_BAD_WORD_LEN + slots)[is_recent], "recent": tokens[is_recent]}
        if branches.masks is not None:
            arrays |= {"masked": rows[branches.masked], "masks": branches.masks}
        moved = to_device(arrays, self._device)
        self._copy_rows(moved["sources"], moved["rows"])
        counts = self.counts.view(-1)
        more = counts[moved["places"]] + moved["times"]
        counts[moved["places"]] = more.clamp(max=2**15 - 1).to(counts.dtype)
        self.recent.view(-1)[moved["slots"]] = moved["recent"].to(self.recent.dtype)
        if branches.masks is not None:
            self.allow(moved["masked"], moved["masks"])

    def keep(self, kept: Int64[np.ndarray, "K 2"]) -> None:
        """Let branches of the last step be the state of some rows.

        Args:
            kept: rows, and the branch of each.
        """
        if len(kept):
            moved = to_device({"rows": kept[:, 0], "branches": self.first_branch + kept[:, 1]}, self._device)
            self._copy_rows(moved["branches"], moved["rows"])

    def _copy_rows(self, sources: Int[Tensor, " n"], rows: Int[Tensor, " n"]) -> None:
        for table in self._tables:
            table.index_copy_(0, rows, table.index_select(0, sources))

    def allow(self, rows: Int[Tensor, " n"], masks: Int32[Tensor, "n words"]) -> None:
        """Replace the masks of rows that were admitted as masked, for structured output.

        Args:
            rows: the rows, on the device.
            masks: bit i % 32 of word i / 32 allows token i.
        """
        self.allowed.index_copy_(0, rows, masks)

    def sample(
        self, logits: Float[Tensor, "R V"], rows: Int[Tensor, " R"], positions: Int[Tensor, " R"]
    ) -> Int[Tensor, " R"]:
        """Choose the next token of each row, and count it as part of the row's output.

        What is launched depends only on the shape of the logits, so it can be captured in a CUDA graph.

        Args:
            logits: [R, V] left unchanged.
            rows: [R] row of the page table of each request, all different; padding has `padding_row`.
            positions: [R] position of the token to sample, counted from the start of the prompt.

        Returns:
            [R] token ids. A row of NaN logits gives an arbitrary token.
        """
        adjust = self.adjust
        if kernels := ops.sampling_kernels(logits):
            if self._sample is sampling.sample:
                return kernels.sample(self, logits, rows, positions)
            adjust = partial(kernels.adjust, self)
        records = self.records[rows]
        tokens = self._sample(adjust(logits, rows, positions), self.batch(records, positions))
        self.recent[rows, positions % MAX_BAD_WORD_LEN] = tokens.int()
        is_counted = (_column(records, "flags") & PENALIZED) != 0
        counts = self.counts[rows, tokens]
        self.counts[rows, tokens] = torch.where(is_counted, counts.clamp(max=2**15 - 2) + 1, counts)
        return tokens

    def warm_up(self, dtype: torch.dtype) -> None:
        """Compile the kernels for any number of rows; only the power of two above it makes a difference.

        Args:
            dtype: dtype of the logits.
        """
        logits = torch.zeros(self.padding_row, self.vocab_size, dtype=dtype, device=self._device)
        rows = torch.full((self.padding_row,), self.padding_row, device=self._device)
        for size in sorted({self.padding_row, *(2**i for i in range(self.padding_row.bit_length()))}):
            self.sample(logits[:size], rows[:size], torch.zeros_like(rows[:size]))

    def batch(self, records: Int32[Tensor, "R words"], positions: Int[Tensor, " R"]) -> SamplingBatch:
        """Return the columns of some records."""
        names = ("temperature", "top_k", "top_p", "min_p")
        columns = {name: _column(records, name) for name in names}
        return SamplingBatch(**columns, seeds=_column(records, "seed"), positions=positions)

    def adjust(
        self, logits: Float[Tensor, "R V"], rows: Int[Tensor, " R"], positions: Int[Tensor, " R"]
    ) -> Float[Tensor, "R V"]:
        """Change the logits as each row asks: biases first, then penalties, then forbidden tokens.

        This is the reference for the kernel.

        Args:
            logits: [R, V] left unchanged.
            rows: [R] row of each.
            positions: [R] position of the token to sample.

        Returns:
            [R, V] new logits, at least float32; on a CPU, `logits` itself if no row asks for a change.
        """
        records = self.records[rows]
        flags = _column(records, "flags")
        if not logits.is_cuda and not (flags & ADJUSTED).any():
            return logits
        has = {flag: ((flags & flag) != 0)[:, None] for flag in (PENALIZED, EDITED, MASKED, HAS_BAD_WORDS)}
        wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
        edits = self.edits[rows]
        slot = torch.arange(MAX_EDITS, device=logits.device)
        is_edit = has[EDITED] & (slot < _column(records, "num_edits")[:, None])
        tokens = torch.where(is_edit, edits[..., 0], 0).long()
        biases = torch.where(is_edit, edits[..., 1].view(torch.float32), 0).to(wide.dtype)
        bans = is_edit & (positions[:, None] < edits[..., 2])
        biased = wide.scatter_add(1, tokens, biases)
        penalties = [_column(records, f"{name}_penalty") for name in ("repetition", "presence", "frequency")]
        penalized = penalize(biased, unpack_bits(self.in_prompt[rows], self.vocab_size), self.counts[rows], *penalties)
        adjusted = torch.where(has[PENALIZED], penalized, biased)

        words = self.bad_words[rows]
        steps = torch.arange(1 - MAX_BAD_WORD_LEN, 0, device=logits.device)  # the last tokens before this one
        recent = self.recent[rows].gather(1, (positions[:, None] + steps) % MAX_BAD_WORD_LEN)
        prefix = words[..., :-1]
        complete = ((prefix == recent[:, None]) | (prefix == ANY_TOKEN)).all(-1)
        slot = torch.arange(MAX_BAD_WORDS, device=logits.device)
        complete &= has[HAS_BAD_WORDS] & (slot < _column(records, "num_bad_words")[:, None])
        tokens = torch.cat([tokens, torch.where(complete, words[..., -1], 0).long()], dim=1)
        bans = torch.cat([bans, complete], dim=1).int()
        banned = torch.zeros_like(adjusted, dtype=torch.int32).scatter_add(1, tokens, bans)
        forbidden = has[MASKED] & ~unpack_bits(self.allowed[rows], self.vocab_size)
        return adjusted.masked_fill(forbidden | (banned > 0), -torch.inf)


@dataclass(frozen=True)
class Logprobs:
    """Log probabilities of the tokens at some positions.

    Attributes:
        token_ids: [R, n + 1] the token at the position, then the n likeliest, in descending order.
        logprobs: [R, n + 1] their log probabilities.
        ranks: [R] rank of the token at the position, from 1: how many tokens are at least as likely.
    """

    token_ids: Int[Tensor, "R n1"]
    logprobs: Float[Tensor, "R n1"]
    ranks: Int[Tensor, " R"]

    def on_host(self) -> "Logprobs":
        """Start copying them to the host; on a CPU they are there."""
        return Logprobs(*map(start_copy, (self.token_ids, self.logprobs, self.ranks)))


def logprobs_of(logits: Float[Tensor, "R V"], token_ids: Int[Tensor, " R"], num_top: int) -> Logprobs:
    """Return log probabilities of some tokens and of the likeliest ones, by the model's own logits.

    As in vLLM, they do not depend on temperature, penalties, or filters. For sampled tokens, `token_ids` are what
    `Sampler.sample` returned; for a prompt, the logits at each position belong to the prompt's next token.

    Args:
        logits: [R, V] logits as the model computes them.
        token_ids: [R] a token for each row.
        num_top: how many of the likeliest tokens to return; -1 returns all.
    """
    num_top = logits.shape[-1] if num_top == -1 else num_top
    ids, values, ranks = [], [], []
    for part, own_ids in zip(logits.split(64), token_ids.split(64), strict=True):  # bounds the memory of long prompts
        logprobs = part.to(torch.promote_types(part.dtype, torch.float32)).log_softmax(-1)
        own = logprobs.gather(-1, own_ids[:, None])
        top = logprobs.topk(num_top)
        ids.append(torch.cat([own_ids[:, None], top.indices], dim=-1))
        values.append(torch.cat([own, top.values], dim=-1))
        ranks.append((logprobs >= own).sum(-1))
    return Logprobs(torch.cat(ids), torch.cat(values), torch.cat(ranks))


def pack_bits(token_ids: Sequence[int] | np.ndarray, vocab_size: int) -> np.ndarray:
    """Return the bit mask of some tokens: [V / 32] int32, where bit i % 32 of word i / 32 stands for token i."""
    bits = np.zeros(-(-vocab_size // 32) * 32, dtype=bool)
    bits[np.asarray(token_ids, dtype=np.int64)] = True
    return np.packbits(bits, bitorder="little").view("<i4")


def unpack_bits(words: Int32[Tensor, "R words"], vocab_size: int) -> Bool[Tensor, "R V"]:
    """Return which tokens some bit masks contain."""
    shifts = torch.arange(32, dtype=torch.int32, device=words.device)
    return ((words[..., None] >> shifts) & 1).flatten(1)[:, :vocab_size].bool()


def _edits_of(one: Admission, vocab_size: int) -> np.ndarray:
    """Return a request's edits: [n] EDIT_DTYPE, each token once."""
    params = one.params
    until = {word[0]: FOREVER for word in params.bad_words_token_ids if len(word) == 1}
    if params.min_tokens:
        first_end = len(one.prompt_token_ids) + params.min_tokens
        until = dict.fromkeys((t for t in one.end_token_ids if t < vocab_size), first_end) | until
    biases = params.logit_bias or {}
    tokens = sorted(biases.keys() | until.keys())
    edits = np.zeros(len(tokens), dtype=EDIT_DTYPE)
    edits["token"] = tokens
    with np.errstate(over="ignore"):  # a large negative number becomes -inf
        edits["bias"] = np.minimum([biases.get(token, 0.0) for token in tokens], np.finfo(np.float32).max)
    edits["banned_until"] = [until.get(token, 0) for token in tokens]
    return edits


def _column(records: Int32[Tensor, "R words"], name: str) -> Tensor:
    """Return a field of some records, [R]: a view."""
    dtype, offset = RECORD_DTYPE.fields[name][:2]  # type: ignore[index]
    return records.view(getattr(torch, dtype.name))[:, offset // dtype.itemsize]
