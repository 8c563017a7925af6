"""The cost of a run: latencies, tokens/s, bytes read per token, and the share of the machine's bandwidth."""

import statistics
import time
from collections import Counter

from rich.table import Table

from mini_engine.engine import LLMEngine
from mini_engine.models.base import CausalLM
from mini_engine.outputs import Piece, StepReport
from mini_engine.roofline import Machine


class Metrics:
    """The cost of a run, added up over the pieces of `stream_batch`.

    A decode step reads every weight once for the whole batch, and the keys and values of each request.

    Attributes:
        first_token_seconds: time from the start to the first token of each request.
    """

    def __init__(self) -> None:
        self._start = time.perf_counter()
        self._last_step: StepReport | None = None
        self._decode_tokens = self._decode_steps = self._kv_bytes = 0
        self._prompt_tokens = 0
        self._decode_seconds = 0.0
        self._output_tokens: Counter[int] = Counter()  # of each request
        self._last_token_seconds: dict[int, float] = {}
        self.first_token_seconds: dict[int, float] = {}

    def add(self, piece: Piece) -> None:
        """Count one piece; the pieces of a step arrive one after another."""
        if piece.output:
            self._prompt_tokens += len(piece.output.prompt_token_ids)
        if piece.num_tokens:
            self._output_tokens[piece.index] += piece.num_tokens
            self._last_token_seconds[piece.index] = time.perf_counter() - self._start
            self.first_token_seconds.setdefault(piece.index, self._last_token_seconds[piece.index])
        step = piece.step
        if step and step.is_decode and step is not self._last_step:
            self._last_step = step
            self._decode_steps += step.num_tokens > 0
            self._decode_tokens += len(step.token_ids) if step.has_guesses else step.num_tokens
            self._decode_seconds += step.seconds
            self._kv_bytes += step.kv_bytes

    def summary(self) -> str:
        """Return one line about a run of one request."""
        first = self.first_token_seconds.get(0, 0.0)
        return (
            f"{self._output_tokens.total()} tokens, {self.decode_rate:.1f} tokens/s, first after {first * 1e3:.0f} ms"
        )

    @property
    def decode_rate(self) -> float:
        """Tokens per second in decode steps, over all requests."""
        return self._decode_tokens / self._decode_seconds if self._decode_seconds else 0.0

    @property
    def output_token_seconds(self) -> dict[int, float]:
        """Time per output token: the mean time between the tokens of each request that has two or more."""
        return {
            index: (self._last_token_seconds[index] - first) / (self._output_tokens[index] - 1)
            for index, first in self.first_token_seconds.items()
            if self._output_tokens[index] > 1
        }

    def table(self, model: CausalLM, machine: Machine, engine: LLMEngine) -> Table:
        """Return a table of the run.

        Args:
            model: the model of the run.
            machine: the machine, whose bandwidth is shown for comparison.
            engine: the engine of the run, which has served nothing else.
        """
        rows: dict[str, str] = {}
        for latency, seconds in (
            ("time to first token", self.first_token_seconds),
            ("time per output token", self.output_token_seconds),
        ):
            if seconds:
                rows[f"{latency} (median request)"] = f"{statistics.median(seconds.values()) * 1e3:.1f} ms"
        rows |= {"prompt tokens": f"{self._prompt_tokens}", "output tokens": f"{self._output_tokens.total()}"}
        totals = engine.metrics
        if engine.config.enable_prefix_caching:
            rows |= {"hit rate": f"{totals.hit_rate:.0%}", "evicted pages": f"{totals.evicted_pages}"}
        if engine.config.speculative_config:
            right = f"{totals.num_accepted_tokens} of {totals.num_draft_tokens} ({totals.acceptance_rate:.0%})"
            rows["guesses that were right"] = right
        rows["preemptions"] = f"{totals.preemptions}"
        if self._decode_tokens:
            weights = weight_bytes_per_step(model) * self._decode_steps
            rate = (weights + self._kv_bytes) / self._decode_seconds
            rows |= {
                "decode, all requests together": f"{self.decode_rate:.1f} tokens/s",
                "weights read per token": f"{weights / self._decode_tokens / 1e6:.1f} MB",
                "keys and values read per token": f"{self._kv_bytes / self._decode_tokens / 1e6:.2f} MB",
                "bytes read per second": f"{rate / 1e9:.1f} GB/s",
                f"measured bandwidth of {machine.name}": f"{machine.bandwidth / 1e9:.1f} GB/s",
                "share of the bandwidth used": f"{rate / machine.bandwidth:.0%}",
            }
        table = Table("quantity", "value", title="What it cost", title_justify="left", show_header=False)
        table.columns[1].justify = "right"
        for row in rows.items():
            table.add_row(*row)
        return table


def weight_bytes_per_step(model: CausalLM) -> int:
    """Count the bytes of weights that a decode step reads: all but the embeddings, of which it reads a row per token.

    Embeddings that are tied to the LM head are read in full, as the LM head.
    """
    unread = 0 if getattr(model.lm_head, "weight", None) is model.embed_tokens else model.embed_tokens.nbytes
    return sum({id(weight): weight.nbytes for weight in model.state_dict(keep_vars=True).values()}.values()) - unread
