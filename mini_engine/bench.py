"""Tokens/s of the engine beside its bound, and beside a peer: same machine, same weights, same prompts, one run."""

import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from rich.console import Console
from rich.table import Table

from mini_engine.errors import ConfigError
from mini_engine.llm import LLM
from mini_engine.models.config import ModelConfig
from mini_engine.roofline import Machine, ModelShape, measure_machine, model_step_cost
from mini_engine.sampling_params import SamplingParams

if TYPE_CHECKING:
    from transformers import PreTrainedModel

PEERS = ("transformers",)


@dataclass(frozen=True)
class Measurement:
    """Output tokens per second of one batch size in one dtype: ours, the bound's, and the peer's if one ran."""

    dtype: str
    batch_size: int
    ours: float
    bound: float
    peer: float | None


def run_bench(
    console: Console,
    *,
    model: str,
    attn_backend: str,
    device: str,
    peer: str | None,
    batch_sizes: Sequence[int],
    dtypes: Sequence[str],
    prompt_tokens: int,
    max_tokens: int,
    rounds: int,
) -> list[Measurement]:
    """Measure and print a table.

    Ours and the peer's runs alternate, so that a machine whose speed drifts favours neither; the median counts.

    Raises:
        ConfigError: for an unknown peer, or sizes below 1.
    """
    if peer is not None and peer not in PEERS:
        raise ConfigError(f"unknown peer {peer!r}; choose one of: {', '.join(PEERS)}")
    if min([*batch_sizes, prompt_tokens, max_tokens, rounds]) < 1:
        raise ConfigError("batch sizes, prompt tokens, max tokens and rounds must be 1 or more")
    results = []
    machine_name = ""
    for dtype in dtypes:
        llm = LLM(model, dtype=dtype, device=device, attn_backend=attn_backend, max_batch_size=max(batch_sizes))
        machine = measure_machine(llm.model.device, llm.model.dtype)
        machine_name = machine.name
        theirs = load_transformers(model, llm.model.dtype, llm.model.device) if peer else None
        for batch_size in batch_sizes:
            prompts = random_prompts(batch_size, prompt_tokens, llm.model.config.vocab_size)
            longest = max(map(len, prompts)) + max_tokens
            if longest > llm.max_model_len:
                raise ConfigError(
                    f"a prompt and its output come to {longest} tokens, and {model} takes {llm.max_model_len}: "
                    "choose fewer prompt tokens, or fewer tokens to generate"
                )
            params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
            runs = [_our_run(llm, prompts, params)]
            if theirs is not None:
                runs.append(_their_run(theirs, prompts, max_tokens))
            with console.status(f"{dtype}, batch {batch_size}"):
                seconds = alternate(runs, rounds)
            tokens = batch_size * max_tokens
            bound = bound_seconds(llm.model.config, machine, prompts, max_tokens, llm.model.dtype.itemsize)
            peer_rate = tokens / seconds[1] if peer else None
            results.append(Measurement(dtype, batch_size, tokens / seconds[0], tokens / bound, peer_rate))
    console.print(_table(results, peer, f"{model}, about {prompt_tokens} tokens in, {max_tokens} out, {machine_name}"))
    return results


def random_prompts(batch_size: int, average: int, vocab_size: int) -> list[list[int]]:
    """Prompts of random tokens; with more than one, their lengths vary between half and one and a half of the average.

    The same for every engine and every run.
    """
    rng = random.Random(0)
    lengths = [
        average if batch_size == 1 else rng.randint(average // 2 + 1, average * 3 // 2) for _ in range(batch_size)
    ]
    return [[rng.randrange(100, vocab_size) for _ in range(length)] for length in lengths]


def alternate(
    runs: Sequence[Callable[[], object]], rounds: int, warm_ups: Sequence[Callable[[], object]] | None = None
) -> list[float]:
    """Median seconds of each run: one warm-up of each, then `rounds` rounds in which they take turns.

    Args:
        runs: what is timed.
        rounds: how often.
        warm_ups: what each does before, untimed; default itself.
    """
    for warm_up in warm_ups or runs:
        warm_up()
    seconds: list[list[float]] = [[] for _ in runs]
    for _ in range(rounds):
        for own, run in zip(seconds, runs, strict=True):
            start = time.perf_counter()
            run()
            own.append(time.perf_counter() - start)
    return [statistics.median(own) for own in seconds]


def bound_seconds(
    config: ModelConfig, machine: Machine, prompts: Sequence[Sequence[int]], max_tokens: int, dtype_bytes: int
) -> float:
    """The least time for the whole batch: its prefill and each decode step at the machine's measured rates.

    Sequences count with their average length, which leaves bytes and decode FLOPs as they are.
    """
    shape = model_shape(config)
    average = round(statistics.mean(len(prompt) for prompt in prompts))
    prefill = model_step_cost(shape, average, average, dtype_bytes, len(prompts)).seconds(machine)
    decodes = (
        model_step_cost(shape, 1, average + step, dtype_bytes, len(prompts)).seconds(machine)
        for step in range(1, max_tokens)
    )
    return prefill + sum(decodes)


def model_shape(config: ModelConfig) -> ModelShape:
    """The sizes that decide what a step costs."""
    return ModelShape(
        hidden_size=config.hidden_size,
        num_layers=config.num_hidden_layers,
        num_qo_heads=config.num_attention_heads,
        num_kv_heads=config.num_key_value_heads,
        head_dim=config.head_dim,
        intermediate_size=config.intermediate_size,
        vocab_size=config.vocab_size,
    )


def _our_run(llm: LLM, prompts: list[list[int]], params: SamplingParams) -> Callable[[], None]:
    def run() -> None:
        outputs = llm.generate(prompts, params)
        assert all(len(output.token_ids) == params.max_tokens for output in outputs)

    return run


def load_transformers(model: str, dtype: torch.dtype, device: torch.device) -> "PreTrainedModel":
    """The same weights in transformers' own model."""
    from transformers import AutoModelForCausalLM

    from mini_engine.loading.checkpoint import open_checkpoint

    return AutoModelForCausalLM.from_pretrained(open_checkpoint(model).path, dtype=dtype, device_map=device).eval()


def _their_run(theirs: "PreTrainedModel", prompts: list[list[int]], max_tokens: int) -> Callable[[], None]:
    longest = max(len(prompt) for prompt in prompts)
    padded = torch.tensor([[0] * (longest - len(p)) + p for p in prompts], device=theirs.device)
    mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in prompts], device=theirs.device)

    def run() -> None:
        with torch.inference_mode():
            out: torch.Tensor = theirs.generate(  # type: ignore[operator]
                padded, attention_mask=mask, do_sample=False, max_new_tokens=max_tokens, min_new_tokens=max_tokens,
                pad_token_id=0,
            )  # fmt: skip
        assert out.shape[1] == longest + max_tokens

    return run


def _table(results: Sequence[Measurement], peer: str | None, title: str) -> Table:
    table = Table(title=title, title_justify="left")
    for column in ("dtype", "batch", "tokens/s", "bound", "of the bound"):
        table.add_column(column, justify="right")
    if peer:
        table.add_column(peer, justify="right")
        table.add_column("ratio", justify="right")
    for r in results:
        row = [r.dtype, str(r.batch_size), f"{r.ours:.1f}", f"{r.bound:.1f}", f"{r.ours / r.bound:.0%}"]
        if r.peer is not None:
            row += [f"{r.peer:.1f}", f"{r.ours / r.peer:.2f}x"]
        table.add_row(*row)
    return table
