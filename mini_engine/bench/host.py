"""Host time per engine step: scheduling, page bookkeeping, building the batch, launching and collecting.

Model, attention and sampler are stubs that compute nothing, decode steps replay a graph without kernels, and nothing is
detokenized. What remains of `LLMEngine.step` is the work that a GPU would have to wait for. The requests decode
steadily from about 384 to 600 tokens of context over pages of 16 tokens.
"""

import statistics
import time
from functools import cache
from typing import Any
from unittest import mock

import torch
from jaxtyping import Float, Int
from rich.console import Console
from torch import Tensor

from mini_engine.attention.backend import BACKENDS, AttentionBackend, BackendInfo
from mini_engine.attention.spec import Attend, AttentionSpec
from mini_engine.batch import StepBatch
from mini_engine.config import EngineConfig
from mini_engine.decode_graphs import TokensAndLogits
from mini_engine.engine import LLMEngine
from mini_engine.executor import LocalExecutor
from mini_engine.models.base import LanguageModel
from mini_engine.models.config import ModelLimits
from mini_engine.sampling_params import SamplingParams

ROWS = (1, 32, 256)
Row = dict[str, Any]  # a row of a table, or one JSON object
BOUNDS_US = {1: 60, 256: 200}  # most host time of a step, by number of rows
PROMPT_TOKENS, SHARED_TOKENS, PAGE_SIZE = 384, 256, 16
WARM_UP_STEPS, TIMED_STEPS = 16, 200
# The settings of each figure: pipeline depth 1, as on a GPU, and at most one other setting.
CASES: dict[str, dict[str, Any]] = {
    "host_us": {},
    "depth_0_us": {"pipeline_depth": 0},
    "queue_of_10000_us": {"num_waiting": 10_000},
    "prefix_sharing_us": {"prefix_sharing": True},
}


class StubModel(LanguageModel):
    """A language model that computes nothing."""

    config = ModelLimits(vocab_size=max(ROWS), max_position_embeddings=4096)
    attention_specs = (AttentionSpec(0, num_qo_heads=1, num_kv_heads=1, head_dim=1, scale=1.0),)

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


def host_rows(console: Console) -> list[Row]:
    """Measure the microseconds of host work per step at several numbers of running requests, in each of `CASES`."""
    measured: list[Row] = []
    for count in ROWS:
        with console.status(f"{count} rows", spinner="line"):
            times = {name: round(step_us(make_engine(count, **case)), 1) for name, case in CASES.items()}
        measured.append({"rows": count, **times, "bound_us": BOUNDS_US.get(count)})
    return measured


def make_engine(rows: int, *, pipeline_depth: int = 1, num_waiting: int = 0, prefix_sharing: bool = False) -> LLMEngine:
    """Return an engine with requests that are about to decode.

    Args:
        rows: number of running requests.
        pipeline_depth: as in `EngineConfig`.
        num_waiting: number of requests that are always waiting.
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
            enable_prefix_caching=prefix_sharing,
            pipeline_depth=pipeline_depth,
            cuda_graph_batch_sizes=(rows,),
        )
        with mock.patch.object(LocalExecutor, "_decode", _replay_nothing):
            engine = LLMEngine(StubModel(), config)
    finally:
        del BACKENDS["null"]  # nothing else uses it
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


def _replay_nothing(executor: LocalExecutor, batch: StepBatch, rows: Tensor) -> TokensAndLogits:
    """Return a token for each request without computing anything: its number in the batch."""
    return torch.arange(batch.num_sequences), _no_logits(batch.num_sequences)


@cache
def _no_logits(num_rows: int) -> Tensor:
    return torch.zeros(num_rows, 0)
