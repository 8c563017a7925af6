"""A peer of a benchmark in its own process: `python -m mini_engine.bench.peer_child NAME`.

A *peer* is another engine that the benchmark measures. Standard input has one JSON object per line: the options, then
an object for each list of requests. The answers are lines on standard output: that the engine is ready, then the
generated tokens and the seconds that it took, without the time to read the requests. The engine's own output goes to
standard error. `PeerProcess` is the other end.
"""

import json
import os
import sys
import time
from collections.abc import Callable
from typing import Any

# Takes prompts and the sampling parameters of each, and returns the outputs.
Generate = Callable[[list[list[int]], list[dict[str, Any]]], list[list[int]]]


def load_vllm(options: dict[str, Any]) -> Generate:
    """vLLM with its own defaults, except for what the comparison fixes."""
    from vllm import LLM, SamplingParams  # type: ignore[import-not-found]

    llm = LLM(
        model=options["model"],
        dtype=options["dtype"],
        max_model_len=options["max_model_len"],
        enable_prefix_caching=options["prefix_sharing"],
        gpu_memory_utilization=options["memory_share"],
        kv_cache_memory_bytes=options["cache_bytes"],
        generation_config="vllm",  # no sampling parameters of the checkpoint
        skip_tokenizer_init=True,
    )

    def generate(prompts: list[list[int]], params: list[dict[str, Any]]) -> list[list[int]]:
        sampling = [SamplingParams(**own, ignore_eos=True, detokenize=False) for own in params]
        outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], sampling, use_tqdm=False)
        return [list(output.outputs[0].token_ids) for output in outputs]

    return generate


def load_sglang(options: dict[str, Any]) -> Generate:
    """SGLang with its own defaults, except for what the comparison fixes."""
    from sglang.srt.entrypoints.engine import Engine  # type: ignore[import-not-found]

    engine = Engine(
        model_path=options["model"],
        dtype=options["dtype"],
        context_length=options["max_model_len"] + 8,  # SGLang reserves a few tokens of every request
        disable_radix_cache=not options["prefix_sharing"],
        max_total_tokens=options["cache_tokens"],
        sampling_defaults="openai",  # no sampling parameters of the checkpoint
        skip_tokenizer_init=True,
    )

    def generate(prompts: list[list[int]], params: list[dict[str, Any]]) -> list[list[int]]:
        sampling = [
            {"temperature": own["temperature"], "max_new_tokens": own["max_tokens"], "ignore_eos": True}
            for own in params
        ]
        return [answer["output_ids"] for answer in engine.generate(input_ids=prompts, sampling_params=sampling)]

    return generate


LOADERS: dict[str, Callable[[dict[str, Any]], Generate]] = {"vllm": load_vllm, "sglang": load_sglang}


def main(name: str) -> None:
    """Load the engine, and serve every list of requests until standard input ends."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def answer(**values: Any) -> None:
        print(json.dumps(values), file=answers, flush=True)

    generate = LOADERS[name](json.loads(sys.stdin.readline()))
    answer(ready=True)
    for line in sys.stdin:
        requests = json.loads(line)
        start = time.perf_counter()
        outputs = generate(requests["prompts"], requests["params"])
        answer(seconds=time.perf_counter() - start, outputs=outputs)


if __name__ == "__main__":  # the engines' own processes import this module
    main(sys.argv[1])
