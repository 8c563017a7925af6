"""The cost of a run: time to first token, tokens/s, bytes read per token, and the share of the machine's bandwidth."""

import time

from rich.table import Table

from mini_engine.models.base import CausalLM
from mini_engine.outputs import Piece, StepReport
from mini_engine.roofline import Machine


class Metrics:
    """The cost of a run, added up over the pieces of `stream_batch`.

    A decode step reads every weight once for the whole batch, and the keys and values of each request.

    Args:
        model: the model that runs.

    Attributes:
        first_token_seconds: time from the start to the first token of each request.
    """

    def __init__(self, model: CausalLM) -> None:
        self._weight_bytes = weight_bytes_per_step(model)
        self._start = time.perf_counter()
        self._last_step: StepReport | None = None
        self._decode_tokens = self._decode_steps = self._kv_bytes = 0
        self._finished = self._output_tokens = self._prompt_tokens = 0
        self._decode_seconds = 0.0
        self.first_token_seconds: dict[int, float] = {}

    def add(self, piece: Piece) -> None:
        """Count one piece; the pieces of one step arrive one after the other."""
        if piece.output:
            self._finished += 1
            self._prompt_tokens += len(piece.output.prompt_token_ids)
        self._output_tokens += piece.num_tokens
        if piece.num_tokens:
            self.first_token_seconds.setdefault(piece.index, time.perf_counter() - self._start)
        step = piece.step
        if step is None or step is self._last_step:
            return
        self._last_step = step
        if step.is_decode:
            self._decode_steps += step.num_tokens > 0
            self._decode_tokens += step.num_tokens
            self._decode_seconds += step.seconds
            self._kv_bytes += step.kv_bytes

    def progress(self, num_requests: int) -> str:
        """Return one line that says how far the run is."""
        rate = f", {self.decode_rate:.0f} tokens/s" if self._decode_tokens else ""
        return f"{self._finished} of {num_requests} requests done, {self._output_tokens} tokens{rate}"

    @property
    def decode_rate(self) -> float:
        """Tokens per second in decode steps, over all requests."""
        return self._decode_tokens / self._decode_seconds if self._decode_seconds else 0.0

    def table(self, machine: Machine) -> Table:
        """Return a table of the run, with the bandwidth of the machine for comparison."""
        table = Table(title="What it cost", title_justify="left", show_header=False, title_style="bold")
        table.add_column("quantity")
        table.add_column("value", justify="right")
        first = sorted(self.first_token_seconds.values())
        if first:
            table.add_row("time to first token (median request)", f"{first[len(first) // 2] * 1e3:.0f} ms")
        table.add_row("prompt tokens", f"{self._prompt_tokens}")
        table.add_row("output tokens", f"{self._output_tokens}")
        if self._decode_tokens:
            weights = self._weight_bytes * self._decode_steps
            rate = (weights + self._kv_bytes) / self._decode_seconds
            table.add_row("decode, all requests together", f"{self.decode_rate:.1f} tokens/s")
            table.add_row("weights read per token", f"{weights / self._decode_tokens / 1e6:.1f} MB")
            table.add_row("keys and values read per token", f"{self._kv_bytes / self._decode_tokens / 1e6:.2f} MB")
            table.add_row("bytes read per second", f"{rate / 1e9:.1f} GB/s")
            table.add_row(f"measured bandwidth of {machine.name}", f"{machine.bandwidth / 1e9:.1f} GB/s")
            table.add_row("share of the bandwidth used", f"{rate / machine.bandwidth:.0%}")
        return table


def num_parameters(model: CausalLM) -> int:
    """Count the model's parameters; tied weights count once."""
    return sum(weight.numel() for weight in model.parameters())


def weight_bytes_per_step(model: CausalLM) -> int:
    """Count the bytes of weights that one decode step reads: all but the embeddings, of which it reads a row per token.

    Embeddings that are tied to the LM head are read in full, as the LM head.
    """
    weights = list(model.parameters())
    unread = [] if model.lm_head is model.embed_tokens else [model.embed_tokens]
    return sum(w.numel() * w.element_size() for w in weights) - sum(w.numel() * w.element_size() for w in unread)
