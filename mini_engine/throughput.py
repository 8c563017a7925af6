"""One list of requests, served by the engine and by its peers: tokens/s of each, on the same machine, in one run."""

import random
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

import torch
from rich.console import Console
from rich.table import Table

from mini_engine.bench import alternate, load_transformers, model_shape
from mini_engine.engine import LLMEngine
from mini_engine.errors import ConfigError
from mini_engine.llm import LLM, pick_device
from mini_engine.models.config import ModelConfig
from mini_engine.roofline import Machine, measure_machine, model_step_cost
from mini_engine.sampling_params import SamplingParams

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Request = tuple[list[int], SamplingParams]
# Serves all requests and returns the tokens of each: as many as it asked for.
Serve = Callable[[Sequence[Request]], list[list[int]]]
BLOCK = 256  # tokens of a block of transformers' paged cache: its default, which versions have under different names
PAGE_SIZE = 128  # of ours: what every backend takes, on every device


@dataclass(frozen=True)
class Workload:
    """Requests of mixed lengths, all there from the start.

    Attributes:
        num_requests: how many.
        prompt: fewest and most tokens of a prompt.
        output: fewest and most tokens of an output; the end of a sequence is ignored.
        temperature: of all; 0 is greedy.
    """

    num_requests: int
    prompt: tuple[int, int]
    output: tuple[int, int]
    temperature: float

    def requests(self) -> list[Request]:
        """The same for every engine and every run."""
        rng = random.Random(0)
        prompts = [[rng.randint(0, 10_000) for _ in range(rng.randint(*self.prompt))] for _ in range(self.num_requests)]
        return [
            (
                prompt,
                SamplingParams(
                    temperature=self.temperature, max_tokens=rng.randint(*self.output), ignore_eos=True, seed=index
                ),
            )
            for index, prompt in enumerate(prompts)
        ]


CPU = Workload(32, (16, 128), (16, 96), temperature=0.0)
# nano-vllm's benchmark: 133,966 tokens of output.
GPU = Workload(256, (100, 1024), (100, 1024), temperature=0.6)


@dataclass(frozen=True)
class Throughput:
    """How one engine served a workload.

    Attributes:
        engine: its name.
        rate: output tokens per second, the median of the rounds.
        equal: requests that got the same tokens from the first engine of the run.
    """

    engine: str
    rate: float
    equal: int


def serve(engine: LLMEngine) -> Serve:
    """Ours: continuous batching over pages."""

    def run(requests: Sequence[Request]) -> list[list[int]]:
        outputs = engine.generate([prompt for prompt, _ in requests], [params for _, params in requests])
        return [output.token_ids for output in outputs]

    return run


def serve_padded(model: "PreTrainedModel") -> Serve:
    """`transformers.generate`: prompts padded to the longest, one batch until the longest output ends."""

    @torch.inference_mode()
    def run(requests: Sequence[Request]) -> list[list[int]]:
        longest = max(len(prompt) for prompt, _ in requests)
        padded = [[0] * (longest - len(prompt)) + prompt for prompt, _ in requests]
        mask = [[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt, _ in requests]
        out: torch.Tensor = model.generate(  # type: ignore[operator]
            torch.tensor(padded, device=model.device),
            attention_mask=torch.tensor(mask, device=model.device),
            max_new_tokens=max(params.max_tokens for _, params in requests),
            **_generation(model, requests),
        )
        rows = out[:, longest:].tolist()
        return [row[: params.max_tokens] for row, (_, params) in zip(rows, requests, strict=True)]

    return run


def serve_continuous(model: "PreTrainedModel", max_num_batched_tokens: int) -> Serve:
    """transformers' continuous batching: what `generate_batch` does, with a `max_new_tokens` for each request.

    Its cache holds all requests at once, and it shares no prefixes, as there are none.
    """
    from transformers import ContinuousBatchingConfig, GenerationConfig

    def run(requests: Sequence[Request]) -> list[list[int]]:
        blocks = [-(-(len(prompt) + params.max_tokens) // BLOCK) + 1 for prompt, params in requests]
        config = ContinuousBatchingConfig(
            num_blocks=sum(blocks),
            max_batch_tokens=max_num_batched_tokens,
            allow_block_sharing=False,
        )
        generation = _generation(model, requests)
        finished: dict[str, list[int]] = {}
        with model.continuous_batching_context_manager(  # type: ignore[operator]
            generation_config=GenerationConfig(**generation), continuous_batching_config=config
        ) as manager:
            for index, (prompt, params) in enumerate(requests):
                manager.add_request(
                    prompt,
                    request_id=str(index),
                    max_new_tokens=params.max_tokens,
                    eos_token_id=generation["eos_token_id"],
                )
            while len(finished) < len(requests):
                result = manager.get_result(timeout=1)
                if result is not None and result.is_finished():
                    finished[result.request_id] = result.generated_tokens
                elif result is None and not manager.is_running():
                    raise RuntimeError("transformers' continuous batching ended before its requests did")
        return [finished[str(index)] for index in range(len(requests))]

    return run


def _generation(model: "PreTrainedModel", requests: Sequence[Request]) -> dict[str, int | float | bool]:
    """transformers' words for how the requests sample. The end of a sequence is a token that there is not."""
    temperature = requests[0][1].temperature
    sampling = {"do_sample": True, "temperature": temperature, "top_k": 0} if temperature else {"do_sample": False}
    return {"eos_token_id": model.config.vocab_size, "pad_token_id": 0, **sampling}


# How each peer serves, given its model and the tokens that a step of ours may have.
PEERS: dict[str, Callable[["PreTrainedModel", int], Serve]] = {
    "transformers": lambda model, _: serve_padded(model),
    "transformers-continuous": serve_continuous,
}


def measure(engines: Mapping[str, Serve], requests: Sequence[Request], rounds: int) -> list[Throughput]:
    """Serve the requests with each engine in turns, after a warm-up: all prompts, with a sixteenth of their outputs.

    These end one after the other too: what an engine compiles for some number of running requests, it compiles then.
    """
    begun = [(prompt, replace(params, max_tokens=max(2, params.max_tokens // 16))) for prompt, params in requests]
    outputs: dict[str, list[list[int]]] = {}

    def run(name: str, own: Sequence[Request]) -> None:
        outputs[name] = engines[name](own)

    seconds = alternate(
        [partial(run, name, requests) for name in engines], rounds, [partial(run, name, begun) for name in engines]
    )
    lengths = [params.max_tokens for _, params in requests]
    first = outputs[next(iter(engines))]
    for tokens in outputs.values():
        assert [len(own) for own in tokens] == lengths
    return [
        Throughput(name, sum(lengths) / own, sum(a == b for a, b in zip(outputs[name], first, strict=True)))
        for name, own in zip(engines, seconds, strict=True)
    ]


def least_seconds(config: ModelConfig, machine: Machine, requests: Sequence[Request], dtype_bytes: int) -> float:
    """The least time for the workload: all prompts at once, then one step for each token of the longest output.

    A step computes the requests that are still running. Prompts count with their average length.
    """
    shape = model_shape(config)
    prompt = round(statistics.mean(len(prompt) for prompt, _ in requests))
    seconds = model_step_cost(shape, prompt, prompt, dtype_bytes, len(requests)).seconds(machine)
    for step in range(1, max(params.max_tokens for _, params in requests)):
        running = sum(params.max_tokens > step for _, params in requests)
        seconds += model_step_cost(shape, 1, prompt + step, dtype_bytes, running).seconds(machine)
    return seconds


def run_throughput(
    console: Console,
    *,
    model: str,
    attn_backend: str,
    device: str,
    peers: Sequence[str],
    dtypes: Sequence[str],
    rounds: int,
    workload: Workload | None = None,
) -> None:
    """Measure and print a table.

    Args:
        console: where to print.
        model: as for `LLM`.
        attn_backend: ours.
        device: as for `LLM`.
        peers: keys of PEERS.
        dtypes: one table each.
        rounds: timed runs of each engine.
        workload: default that of the device.

    Raises:
        ConfigError: for an unknown peer, or no rounds.
    """
    if unknown := [peer for peer in peers if peer not in PEERS]:
        raise ConfigError(f"unknown peer {unknown[0]!r}; choose one of: {', '.join(PEERS)}")
    if rounds < 1:
        raise ConfigError("rounds must be 1 or more")
    requests = (workload or (GPU if pick_device(device).type == "cuda" else CPU)).requests()
    # Room for all requests and no more: on a GPU the peers' caches stand beside ours.
    pages = sum(-(-(len(prompt) + params.max_tokens) // PAGE_SIZE) for prompt, params in requests)
    for dtype in dtypes:
        llm = LLM(
            model,
            dtype=dtype,
            device=device,
            attn_backend=attn_backend,
            max_batch_size=256,
            num_pages=pages,
            page_size=PAGE_SIZE,
        )
        engines = {"mini_engine": serve(llm.engine)}
        if peers:
            theirs = load_transformers(model, llm.model.dtype, llm.model.device)
            engines |= {peer: PEERS[peer](theirs, 2048) for peer in peers}
        machine = measure_machine(llm.model.device, llm.model.dtype)
        tokens = sum(params.max_tokens for _, params in requests)
        bound = tokens / least_seconds(llm.model.config, machine, requests, llm.model.dtype.itemsize)
        with console.status(f"{dtype}, {len(requests)} requests"):
            measured = measure(engines, requests, rounds)
        console.print(_table(measured, bound, len(requests), f"{model}, {dtype}, {attn_backend}, {machine.name}"))


def _table(measured: Sequence[Throughput], bound: float, num_requests: int, title: str) -> Table:
    table = Table(title=title, title_justify="left")
    table.add_column("engine", no_wrap=True)
    for column in ("tokens/s", "of the bound", "same tokens", "ratio"):
        table.add_column(column, justify="right")
    for own in measured:
        table.add_row(
            own.engine,
            f"{own.rate:.1f}",
            f"{own.rate / bound:.0%}",
            f"{own.equal} of {num_requests}",
            f"{measured[0].rate / own.rate:.2f}x",
        )
    return table
