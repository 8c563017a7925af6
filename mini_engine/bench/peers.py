"""The engines that a benchmark compares: ours, and transformers in two ways. All serve the same lists of requests."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from mini_engine.bench.workloads import BenchRequest
from mini_engine.engine import LLMEngine
from mini_engine.loading.checkpoint import open_checkpoint

if TYPE_CHECKING:
    from transformers import PreTrainedModel

BLOCK = 256  # tokens per block of transformers' paged cache: the default; the option's name depends on the version

# Serves all requests and returns the output tokens of each, as many as were requested.
Serve = Callable[[Sequence[BenchRequest]], list[list[int]]]


def serve_mini_engine(engine: LLMEngine, requests: Sequence[BenchRequest]) -> list[list[int]]:
    """Serve with our engine: continuous batching over a paged cache.

    Raises:
        RequestError: if a request cannot be served.
    """
    added = [engine.add_request(str(i), prompt, params) for i, (prompt, params) in enumerate(requests)]
    while engine.has_unfinished:
        engine.step()
    for request in added:
        if request.error:
            raise request.error
    return [request.output_token_ids for request in added]


@torch.inference_mode()
def serve_padded(
    model: "PreTrainedModel", max_num_batched_tokens: int, requests: Sequence[BenchRequest]
) -> list[list[int]]:
    """Serve with `transformers.generate`: prompts padded to the longest, one batch until the longest output ends."""
    longest = max(len(prompt) for prompt, _ in requests)
    padded = [[0] * (longest - len(prompt)) + prompt for prompt, _ in requests]
    mask = [[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt, _ in requests]
    out: torch.Tensor = model.generate(  # type: ignore[operator]
        torch.tensor(padded, device=model.device),
        attention_mask=torch.tensor(mask, device=model.device),
        max_new_tokens=max(request.num_outputs for request in requests),
        **_generation(model, requests),
    )
    rows = out[:, longest:].tolist()
    return [row[: params.max_tokens] for row, (_, params) in zip(rows, requests, strict=True)]


def serve_continuous(
    model: "PreTrainedModel", max_num_batched_tokens: int, requests: Sequence[BenchRequest]
) -> list[list[int]]:
    """Serve with transformers' continuous batching: `generate_batch`, but with a `max_new_tokens` for each request.

    Its cache holds all requests at once. Common prefixes are not shared, not even in the workload that has them.
    """
    from transformers import ContinuousBatchingConfig, GenerationConfig

    blocks = [-(-(len(own.prompt) + own.num_outputs) // BLOCK) + 1 for own in requests]
    config = ContinuousBatchingConfig(
        num_blocks=sum(blocks), max_batch_tokens=max_num_batched_tokens, allow_block_sharing=False
    )
    generation = _generation(model, requests)
    finished: dict[str, list[int]] = {}
    with model.continuous_batching_context_manager(  # type: ignore[operator]
        generation_config=GenerationConfig(**generation), continuous_batching_config=config
    ) as manager:
        for index, (prompt, params) in enumerate(requests):
            options = {"max_new_tokens": params.max_tokens, "eos_token_id": generation["eos_token_id"]}
            manager.add_request(prompt, request_id=str(index), **options)
        while len(finished) < len(requests):
            result = manager.get_result(timeout=1)
            if result is not None and result.is_finished():
                finished[result.request_id] = result.generated_tokens
            elif result is None and not manager.is_running():
                raise RuntimeError("transformers' continuous batching ended before its requests did")
    return [finished[str(index)] for index in range(len(requests))]


# How each peer serves requests with transformers' model. The number limits the tokens of a step, as in our engine.
PEERS: dict[str, Callable[["PreTrainedModel", int, Sequence[BenchRequest]], list[list[int]]]] = {
    "transformers": serve_padded,
    "transformers-continuous": serve_continuous,
}


def load_transformers(model: str, dtype: torch.dtype, device: torch.device) -> "PreTrainedModel":
    """Load the same weights into transformers' own model."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(open_checkpoint(model).path, dtype=dtype, device_map=device).eval()


def _generation(model: "PreTrainedModel", requests: Sequence[BenchRequest]) -> dict[str, Any]:
    """transformers' options for how the requests sample. The end token is one that does not exist."""
    params, sampling = requests[0].params, dict[str, Any](do_sample=False)
    if params.temperature:
        names = "temperature", "top_k", "top_p"
        sampling = {"do_sample": True} | {name: getattr(params, name) for name in names}
    return {"eos_token_id": model.config.vocab_size, "pad_token_id": 0, **sampling}
