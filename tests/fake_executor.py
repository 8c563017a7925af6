"""An executor without a model: each token depends on a hash of all tokens that the request's pages hold.

A key is the number of its token, so a wrong page, a wrong position, or a lost copy shows as a wrong token.
"""

from __future__ import annotations

import numpy as np

from mini_engine.logprobs import LogprobArrays
from mini_engine.step_input import SampledTokens, StepInput

VOCAB_SIZE = 50


def next_token(token_ids: np.ndarray) -> int:
    """The token that follows some tokens: a new one, or a third of the time the last but one, so that texts repeat."""
    number = hash(np.asarray(token_ids, dtype=np.int64).tobytes())
    return int(token_ids[-2]) if number % 3 == 0 and len(token_ids) > 1 else number // 3 % VOCAB_SIZE


def logprob_of(token_ids: np.ndarray) -> float:
    """The log probability of the last of some tokens, after those before it."""
    return -float(hash(np.asarray(token_ids, dtype=np.int64).tobytes()) % 10_007)


class FakeExecutor:
    """Executes steps in order, in numpy; a ticket is the step's result, which a real device would not know yet.

    Only the log probability of the token itself is returned, and its position as the rank.
    """

    def __init__(self, num_pages: int, page_size: int, max_rows: int) -> None:
        self.page_size = page_size
        self.cache = np.full((num_pages, page_size), -1, dtype=np.int64)
        self.last_token = np.full(max_rows, -1, dtype=np.int64)
        self.num_launched = self.num_reset = 0

    def launch(self, step: StepInput) -> SampledTokens:
        self.num_launched += 1
        for old, new in step.copies:
            self.cache[new] = self.cache[old]
        token_ids = step.token_ids.astype(np.int64)
        if step.token_source is not None:
            token_ids = np.where(step.token_source >= 0, self.last_token[step.token_source], token_ids)
        # All keys of a step are written before any is read.
        ends = (-(-step.kv_lens // self.page_size)).cumsum()
        pages = np.split(step.pages, ends[:-1])
        for own, new, kv_len in zip(pages, np.split(token_ids, step.num_new.cumsum()[:-1]), step.kv_lens, strict=True):
            index = np.arange(kv_len - len(new), kv_len)
            self.cache[own[index // self.page_size], index % self.page_size] = new
        keys = [self.cache[own].reshape(-1)[:kv_len] for own, kv_len in zip(pages, step.kv_lens, strict=True)]
        assert all((own >= 0).all() for own in keys), "a key that was never written"
        # The keys before each token that is sampled: after the last one, and after each guess.
        prefixes = [
            own[: len(own) - i] for own, n in zip(keys, step.num_logits, strict=True) for i in reversed(range(n))
        ]
        sampled = np.array([next_token(own) for own in prefixes], dtype=np.int64)
        counts = step.num_logits[step.num_logits > 0]
        self.last_token[step.sampling_rows] = sampled[counts.cumsum() - 1]
        logprobs = []
        for wanted in step.logprobs:
            if wanted.is_prompt:
                # The keys up to each of the step's tokens.
                news = zip(keys, step.num_new, strict=True)
                before = [own[: len(own) - i] for own, new in news for i in reversed(range(new))]
                token_ids = wanted.token_ids
            else:
                before = prefixes
                token_ids = sampled[wanted.index]
            found = [logprob_of([*before[i], token]) for i, token in zip(wanted.index, token_ids, strict=True)]
            logprobs.append(LogprobArrays(token_ids[:, None], np.array(found)[:, None], wanted.positions))
        several = np.full((len(counts), counts.max(initial=1)), -1, dtype=np.int64)
        several[np.arange(several.shape[1]) < counts[:, None]] = sampled
        return SampledTokens(several, counts, tuple(logprobs))

    def collect(self, ticket: SampledTokens) -> SampledTokens:
        return ticket

    def reset(self) -> None:
        self.num_reset += 1
