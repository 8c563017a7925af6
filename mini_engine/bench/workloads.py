"""The requests that a benchmark serves, and the least time that serving them takes."""

import random
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from mini_engine.errors import ConfigError
from mini_engine.models.config import ModelConfig
from mini_engine.roofline import Machine, ModelShape, attention_cost, model_step_cost
from mini_engine.sampling_params import SamplingParams

LARGEST_TOKEN = 10_000  # in the vocabulary of every measured model


class BenchRequest(NamedTuple):
    """One request of a workload: its prompt, and its sampling parameters."""

    prompt: list[int]
    params: SamplingParams

    @property
    def num_outputs(self) -> int:
        """Tokens of the output."""
        assert self.params.max_tokens is not None, "every request of a benchmark has a length"
        return self.params.max_tokens


@dataclass(frozen=True)
class Workload:
    """Requests of random tokens that all arrive at the start.

    Attributes:
        num_requests: number of requests.
        prompt: fewest and most tokens of a prompt.
        output: fewest and most tokens of an output; end tokens are ignored.
        temperature: temperature of all requests; 0 is greedy.
        shared: tokens that every prompt begins with, in addition to its own.
        top_k: see `SamplingParams`.
        top_p: see `SamplingParams`.
        at_once: requests that may run at once; None: all.
    """

    num_requests: int
    prompt: tuple[int, int]
    output: tuple[int, int]
    temperature: float = 0.0
    shared: int = 0
    top_k: int = 0
    top_p: float = 1.0
    at_once: int | None = None

    @property
    def longest(self) -> int:
        """Most tokens of a prompt and its output together."""
        return self.shared + self.prompt[1] + self.output[1]

    def requests(self, vocab_size: int) -> list[BenchRequest]:
        """Return the requests, the same for every engine and every run."""
        rng = random.Random(0)
        last = min(LARGEST_TOKEN, vocab_size - 1)
        prefix = [rng.randint(0, last) for _ in range(self.shared)]
        prompts = [[rng.randint(0, last) for _ in range(rng.randint(*self.prompt))] for _ in range(self.num_requests)]
        return [
            BenchRequest(
                prefix + prompt,
                SamplingParams(
                    temperature=self.temperature,
                    top_k=self.top_k,
                    top_p=self.top_p,
                    max_tokens=rng.randint(*self.output),
                    ignore_eos=True,
                    seed=index,
                ),
            )
            for index, prompt in enumerate(prompts)
        ]


CPU = Workload(32, (16, 128), (16, 96))
# nano-vllm's benchmark: 133,966 tokens of output.
GPU = Workload(256, (100, 1024), (100, 1024), temperature=0.6)
LATENCY = Workload(1, (128, 128), (512, 512))
SHARED_PREFIX = Workload(64, (64, 64), (128, 128), shared=4096)
LONG_CONTEXT = Workload(8, (32_768, 32_768), (256, 256))
# Four times as many requests as run at once: most steps have prompts beside decodes.
STREAM = Workload(1024, (100, 1024), (64, 512), temperature=0.6, at_once=256)
LONG_OUTPUT = Workload(64, (1024, 1024), (1024, 1024), temperature=0.6)


def with_filters(workload: Workload) -> Workload:
    """Return a workload that samples as Qwen3's own defaults do."""
    return replace(workload, temperature=0.6, top_k=20, top_p=0.95)


# The named workloads on each kind of device. On a CPU they are small enough to take seconds.
NAMED: dict[str, dict[str, Workload]] = {
    "throughput": {"cuda": GPU, "cpu": CPU},
    "throughput-top-p": {"cuda": with_filters(GPU), "cpu": with_filters(CPU)},
    "stream": {"cuda": STREAM, "cpu": Workload(64, (16, 64), (8, 32), at_once=16)},
    "long-output": {"cuda": LONG_OUTPUT, "cpu": Workload(8, (64, 64), (64, 64))},
    "latency": {"cuda": LATENCY, "cpu": Workload(1, (128, 128), (64, 64))},
    "latency-top-p": {"cuda": with_filters(LATENCY), "cpu": with_filters(Workload(1, (128, 128), (64, 64)))},
    "shared-prefix": {"cuda": SHARED_PREFIX, "cpu": Workload(8, (16, 16), (32, 32), shared=512)},
    "long-context": {"cuda": LONG_CONTEXT, "cpu": Workload(2, (2048, 2048), (16, 16))},
}


def batch_of(size: int, prompt_tokens: int, max_tokens: int) -> Workload:
    """Return a workload of outputs of equal length.

    Args:
        size: number of requests.
        prompt_tokens: tokens of a prompt. With several requests this is the average, and lengths vary from half to one
            and a half times that.
        max_tokens: tokens of each output.
    """
    lengths = (prompt_tokens, prompt_tokens) if size == 1 else (prompt_tokens // 2 + 1, max(1, prompt_tokens * 3 // 2))
    return Workload(size, lengths, (max_tokens, max_tokens))


def with_other_tokens(requests: Sequence[BenchRequest], shift: int) -> list[BenchRequest]:
    """Return requests with the same lengths and the same sharing of prefixes, but other tokens.

    A prefix cache that has seen the given requests has seen none of the new ones.

    Args:
        requests: a workload.
        shift: how far the token ids rotate, in the range from 0 to the largest id that occurs.
    """
    size = 1 + max(max(prompt) for prompt, _ in requests)
    return [BenchRequest([(token + shift) % size for token in prompt], params) for prompt, params in requests]


def num_outputs(requests: Sequence[BenchRequest]) -> int:
    """Count the output tokens of all requests."""
    return sum(request.num_outputs for request in requests)


def least_seconds(
    config: ModelConfig,
    machine: Machine,
    requests: Sequence[BenchRequest],
    dtype_bytes: int,
    shared: int = 0,
    *,
    weight_bytes: float | None = None,
    kv_bytes: float | None = None,
) -> float:
    """Return a lower bound on the time of a workload, from the measured rates of the machine.

    All prompts are computed at once. Then each token of the longest output takes one step, for the requests that have
    not ended. Prompts count with their average length.

    Args:
        config: the model.
        machine: its rates.
        requests: the workload.
        dtype_bytes: bytes of a number.
        shared: tokens that all prompts begin with: they are computed once, and each step reads their keys once, except
            in layers with a window, where they count as outside of it.
        weight_bytes: bytes of a number of the weights; default `dtype_bytes`.
        kv_bytes: bytes of a number of the KV cache; default `dtype_bytes`.
    """
    shape = replace(model_shape(config), weight_bytes=weight_bytes, kv_bytes=kv_bytes)
    heads = shape.num_qo_heads, shape.num_kv_heads, shape.head_dim

    def step(num_tokens: int, kv_len: int, running: int) -> float:
        over_shared = attention_cost(running * num_tokens, shared, *heads, dtype_bytes, causal=False, kv_bytes=kv_bytes)
        own = model_step_cost(shape, num_tokens, kv_len, dtype_bytes, running)
        return (own + over_shared * (shape.num_layers - shape.windowed_layers)).seconds(machine)

    prompt = round(statistics.mean(len(request.prompt) for request in requests)) - shared
    seconds = step(prompt, prompt, len(requests))
    if shared:
        seconds += model_step_cost(shape, shared, shared, dtype_bytes).seconds(machine)
    for done in range(1, max(request.num_outputs for request in requests)):
        running = sum(request.num_outputs > done for request in requests)
        seconds += step(1, prompt + done, running)
    return seconds


def model_shape(config: ModelConfig) -> ModelShape:
    """Return the sizes that determine the cost of a step.

    Raises:
        ConfigError: for layers with latents, of which a token stores other bytes than keys and values.
    """
    if config.mla is not None:
        raise ConfigError("the benchmark's bounds do not cover latent attention (MLA): choose another model")
    moe = config.moe
    return ModelShape(
        hidden_size=config.hidden_size,
        num_layers=config.num_hidden_layers,
        num_qo_heads=config.num_attention_heads,
        num_kv_heads=config.num_key_value_heads,
        head_dim=config.head_dim,
        intermediate_size=config.intermediate_size,
        vocab_size=config.vocab_size,
        gated=config.architecture != "GPT2LMHeadModel",
        window=config.sliding_window,
        windowed_layers=config.layer_types.count("sliding_attention"),
        num_experts=moe.num_experts if moe else 0,
        experts_per_token=moe.num_experts_per_tok if moe else 0,
        expert_size=moe.moe_intermediate_size if moe else 0,
        sparse_layers=len(moe.sparse_layers) if moe else 0,
    )
