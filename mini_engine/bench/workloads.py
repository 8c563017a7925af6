"""The requests that a benchmark serves, and the least time that serving them takes."""

import random
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from mini_engine.models.config import ModelConfig
from mini_engine.roofline import Machine, ModelShape, model_step_cost
from mini_engine.sampling_params import SamplingParams

LARGEST_TOKEN = 10_000  # in every vocabulary of the models that are measured


class BenchRequest(NamedTuple):
    """One request of a workload: its prompt, and its sampling parameters."""

    prompt: list[int]
    params: SamplingParams


@dataclass(frozen=True)
class Workload:
    """Requests of random tokens that all arrive at the start.

    Attributes:
        num_requests: number of requests.
        prompt: fewest and most tokens of a prompt.
        output: fewest and most tokens of an output; end tokens are ignored.
        temperature: of all requests; 0 is greedy.
    """

    num_requests: int
    prompt: tuple[int, int]
    output: tuple[int, int]
    temperature: float = 0.0

    @property
    def longest(self) -> int:
        """Most tokens of a prompt and its output together."""
        return self.prompt[1] + self.output[1]

    def requests(self, vocab_size: int) -> list[BenchRequest]:
        """Return the requests, the same for every engine and every run."""
        rng = random.Random(0)
        last = min(LARGEST_TOKEN, vocab_size - 1)
        prompts = [[rng.randint(0, last) for _ in range(rng.randint(*self.prompt))] for _ in range(self.num_requests)]
        return [
            BenchRequest(
                prompt,
                SamplingParams(
                    temperature=self.temperature, max_tokens=rng.randint(*self.output), ignore_eos=True, seed=index
                ),
            )
            for index, prompt in enumerate(prompts)
        ]


CPU = Workload(32, (16, 128), (16, 96))
# nano-vllm's benchmark: 133,966 tokens of output.
GPU = Workload(256, (100, 1024), (100, 1024), temperature=0.6)


def batch_of(size: int, prompt_tokens: int, max_tokens: int) -> Workload:
    """Return a workload of outputs of equal length.

    Args:
        size: number of requests.
        prompt_tokens: tokens of a prompt; the average if there are several, which then vary from half of it to one and
            a half times as many.
        max_tokens: tokens of each output.
    """
    lengths = (prompt_tokens, prompt_tokens) if size == 1 else (prompt_tokens // 2 + 1, max(1, prompt_tokens * 3 // 2))
    return Workload(size, lengths, (max_tokens, max_tokens))


def num_outputs(requests: Sequence[BenchRequest]) -> int:
    """Count the output tokens of all requests."""
    return sum(params.max_tokens for _, params in requests)


def least_seconds(config: ModelConfig, machine: Machine, requests: Sequence[BenchRequest], dtype_bytes: int) -> float:
    """Return a lower bound on the time of a workload, from the measured rates of the machine.

    All prompts are computed at once, and then one step for each token of the longest output, for the requests that have
    not ended. Prompts count with their average length.
    """
    shape = model_shape(config)
    prompt = round(statistics.mean(len(request.prompt) for request in requests))
    seconds = model_step_cost(shape, prompt, prompt, dtype_bytes, len(requests)).seconds(machine)
    for step in range(1, max(request.params.max_tokens for request in requests)):
        running = sum(request.params.max_tokens > step for request in requests)
        seconds += model_step_cost(shape, 1, prompt + step, dtype_bytes, running).seconds(machine)
    return seconds


def model_shape(config: ModelConfig) -> ModelShape:
    """Return the sizes that determine the cost of a step."""
    return ModelShape(
        hidden_size=config.hidden_size,
        num_layers=config.num_hidden_layers,
        num_qo_heads=config.num_attention_heads,
        num_kv_heads=config.num_key_value_heads,
        head_dim=config.head_dim,
        intermediate_size=config.intermediate_size,
        vocab_size=config.vocab_size,
    )
