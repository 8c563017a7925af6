"""Host time per engine step: scheduling, page bookkeeping, building the batch, launching and collecting.

The model is a stub that computes nothing, attention and sampler likewise, and nothing is detokenized, so what remains
of `LLMEngine.step` is the work that a GPU would have to wait for. The requests decode steadily from about 384 to 600
tokens of context over pages of 16 tokens.
"""

import json
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float, Int
from rich.console import Console
from rich.table import Table
from torch import Tensor

from mini_engine.attention.backend import BACKENDS, AttentionBackend, BackendInfo
from mini_engine.attention.spec import Attend, AttentionSpec
from mini_engine.batch import StepBatch
from mini_engine.config import EngineConfig
from mini_engine.engine import LLMEngine
from mini_engine.models.base import LanguageModel
from mini_engine.models.config import ModelLimits
from mini_engine.parts import Parts
from mini_engine.sampling import SamplingBatch
from mini_engine.sampling_params import SamplingParams

ROWS = (1, 32, 256)
BOUNDS_US = {1: 60, 256: 300}  # rows to the most host time of a step
PROMPT_TOKENS, SHARED_TOKENS, PAGE_SIZE = 384, 256, 16
WARM_UP_STEPS, TIMED_STEPS = 16, 200
QUEUE = 10_000  # waiting requests


class StubModel(LanguageModel):
    """A language model that computes nothing."""

    config = ModelLimits(vocab_size=16, max_position_embeddings=4096)
    attention_specs = (AttentionSpec(0, 0, num_qo_heads=1, num_kv_heads=1, head_dim=1, scale=1.0),)

    def __init__(self) -> None:
        super().__init__()
        self._zero = torch.nn.Parameter(torch.zeros(1, 1), requires_grad=False)

    def forward(
        self, token_ids: Int[Tensor, " T"], positions: Int[Tensor, " T"], attend: Attend
    ) -> Float[Tensor, "T 1"]:
        return self._zero.expand(len(token_ids), 1)

    def compute_logits(self, hidden: Float[Tensor, "R 1"]) -> Float[Tensor, "R 1"]:
        return hidden


class NullBackend(AttentionBackend):
    """An attention backend that plans and computes nothing."""

    bypasses = frozenset()

    def plan(self, batch: StepBatch) -> None:
        pass

    def append(self, layer: int, k: Tensor, v: Tensor) -> None:
        pass

    def run(self, layer: int, q: Tensor) -> Tensor:
        return q


@dataclass(frozen=True)
class HostTime:
    """Microseconds of host work per step.

    Attributes:
        rows: running requests.
        host_us: with a pipeline depth of 1, as on a GPU.
        depth_0: with a pipeline depth of 0.
        queue: with depth 1 while 10,000 requests wait.
        prefix_sharing: with depth 1, prefix sharing on, and prompts with 256 tokens in common.
    """

    rows: int
    host_us: float
    depth_0: float
    queue: float
    prefix_sharing: float

    @property
    def bound_us(self) -> int | None:
        """The most that `host_us` may be; None if no bound is set for this number of rows."""
        return BOUNDS_US.get(self.rows)


def run_host(console: Console, *, rows: Sequence[int] = ROWS, as_json: bool = False) -> list[HostTime]:
    """Measure the host time per step and print a table, or one JSON object per number of rows."""
    times = []
    for count in rows:
        with console.status(f"{count} rows"):
            times.append(host_time(count))
    if as_json:
        for own in times:
            fields = {name: round(value, 1) for name, value in vars(own).items() if name != "rows"}
            console.out(json.dumps({"rows": own.rows, **fields, "bound_us": own.bound_us}), highlight=False)
    else:
        console.print(_table(times))
    return times


def host_time(rows: int) -> HostTime:
    """Measure the host time per step at one number of running requests."""
    return HostTime(
        rows,
        host_us=step_us(make_engine(rows)),
        depth_0=step_us(make_engine(rows, pipeline_depth=0)),
        queue=step_us(make_engine(rows, num_waiting=QUEUE)),
        prefix_sharing=step_us(make_engine(rows, prefix_sharing=True)),
    )


def make_engine(rows: int, *, pipeline_depth: int = 1, num_waiting: int = 0, prefix_sharing: bool = False) -> LLMEngine:
    """Return an engine with requests that are about to decode.

    Args:
        rows: requests that run.
        pipeline_depth: as in `EngineConfig`.
        num_waiting: requests that wait all the time.
        prefix_sharing: as in `EngineConfig`.
    """
    num_steps = WARM_UP_STEPS + TIMED_STEPS + 2
    longest = PROMPT_TOKENS + PAGE_SIZE + num_steps
    BACKENDS["null"] = BackendInfo(f"{__name__}:{NullBackend.__name__}")
    try:
        config = EngineConfig(
            attn_backend="null",
            max_batch_size=rows,
            max_model_len=longest,
            num_pages=rows * -(-longest // PAGE_SIZE),
            page_size=PAGE_SIZE,
            max_num_batched_tokens=rows * longest,
            prefix_sharing=prefix_sharing,
            pipeline_depth=pipeline_depth,
        )
        engine = LLMEngine(StubModel(), config, parts=replace(Parts(), sample=_sample))
    finally:
        del BACKENDS["null"]  # it is of no use to anyone else
    params = SamplingParams(temperature=0.0, max_tokens=longest, ignore_eos=True)
    for row in range(rows):
        own = [row % 16] * (PROMPT_TOKENS - SHARED_TOKENS + row % PAGE_SIZE)  # rows need new pages at different steps
        engine.add_request(str(row), [1] * SHARED_TOKENS + own, params)
    engine.step()
    for index in range(num_waiting):
        engine.add_request(f"waiting {index}", [1] * PAGE_SIZE, params)
    return engine


def step_us(engine: LLMEngine, num_steps: int = TIMED_STEPS) -> float:
    """Return the median microseconds of a step: CPU time of this thread, so that other programs do not count."""
    for _ in range(WARM_UP_STEPS):
        engine.step()
    times = []
    for _ in range(num_steps):
        start = time.thread_time()
        engine.step()
        times.append(time.thread_time() - start)
    return statistics.median(times) * 1e6


def _sample(logits: Float[Tensor, "R V"], batch: SamplingBatch) -> Int[Tensor, " R"]:
    return torch.zeros(len(logits), dtype=torch.long)


def _table(times: Sequence[HostTime]) -> Table:
    table = Table(title="Host time per step in µs, without model, kernels and text", title_justify="left")
    for column in ("rows", "depth", "waiting requests", "prefix sharing", "µs per step", "bound"):
        table.add_column(column, justify="right")
    for own in times:
        bound = "" if own.bound_us is None else str(own.bound_us)
        for depth, waiting, sharing, us in (
            ("1", "0", "off", own.host_us),
            ("0", "0", "off", own.depth_0),
            ("1", f"{QUEUE:,}", "off", own.queue),
            ("1", "0", "on", own.prefix_sharing),
        ):
            table.add_row(str(own.rows), depth, waiting, sharing, f"{us:.0f}", bound)
        table.add_section()
    return table
