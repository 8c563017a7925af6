"""An engine of a benchmark in its own process: `python -m mini_engine.bench.peer_child NAME`.

A *peer* is another engine that the benchmark measures; ours is measured in the same way where each engine has the
device to itself. Standard input has one JSON object per line: the options, then
an object for each list of requests. The answers are lines on standard output: that the engine is ready, then the
generated tokens and the seconds that it took, without the time to read the requests. The engine's own output goes to
standard error. `PeerProcess` is the other end.
"""

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

# Takes prompts and the sampling parameters of each, and returns the outputs.
Generate = Callable[[list[list[int]], list[dict[str, Any]]], list[list[int]]]


def load_mini_engine(options: dict[str, Any]) -> Generate:
    """Our engine, with its own defaults, or the options of a file."""
    from mini_engine.bench.peers import serve_mini_engine
    from mini_engine.bench.workloads import BenchRequest
    from mini_engine.config import read_options
    from mini_engine.llm import LLM
    from mini_engine.sampling_params import SamplingParams

    names = [
        "dtype", "max_num_seqs", "max_model_len", "enable_prefix_caching", "quantization", "kv_cache_dtype",
        "batch_invariant", "speculative_config",
    ]  # fmt: skip
    of_file = {} if options["config"] is None else read_options(Path(options["config"]))
    of_file.pop("model", None)
    llm = LLM(options["model"], **of_file | _given({name: options[name] for name in names}))

    def generate(prompts: list[list[int]], params: list[dict[str, Any]]) -> list[list[int]]:
        requests = [
            BenchRequest(prompt, SamplingParams(**own, ignore_eos=True))
            for prompt, own in zip(prompts, params, strict=True)
        ]
        return serve_mini_engine(llm.engine, requests)

    return generate


def load_vllm(options: dict[str, Any]) -> Generate:
    """vLLM with its own defaults, except for what the comparison fixes."""
    if options["batch_invariant"]:
        os.environ["VLLM_BATCH_INVARIANT"] = "1"
    from vllm import LLM, SamplingParams  # type: ignore[import-not-found]

    names = [
        "model", "dtype", "quantization", "kv_cache_dtype", "max_num_seqs", "max_model_len", "enable_prefix_caching",
        "speculative_config",
    ]  # fmt: skip
    llm = LLM(
        **_given(
            {name: options[name] for name in names}
            | {"gpu_memory_utilization": options["memory_share"], "kv_cache_memory_bytes": options["cache_bytes"]}
            | {"load_format": "dummy" if options["random_weights"] else None}
        ),
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

    longest, caches = options["max_model_len"], options["enable_prefix_caching"]
    engine = Engine(
        model_path=options["model"],
        **_given(
            {
                "dtype": options["dtype"],
                "max_running_requests": options["max_num_seqs"],
                "context_length": longest and longest + 8,  # SGLang reserves a few tokens of every request
                "disable_radix_cache": None if caches is None else not caches,
                "max_total_tokens": options["cache_tokens"],
                "quantization": options["quantization"],
                "load_format": "dummy" if options["random_weights"] else None,
                "kv_cache_dtype": "fp8_e4m3" if options["kv_cache_dtype"] == "fp8" else options["kv_cache_dtype"],
            }
        ),
        sampling_defaults="openai",  # no sampling parameters of the checkpoint
        skip_tokenizer_init=True,
    )

    def generate(prompts: list[list[int]], params: list[dict[str, Any]]) -> list[list[int]]:
        sampling = [
            {"temperature": own["temperature"], "top_p": own["top_p"], "top_k": own["top_k"] or -1}
            | {"max_new_tokens": own["max_tokens"], "ignore_eos": True}
            for own in params
        ]
        return [answer["output_ids"] for answer in engine.generate(input_ids=prompts, sampling_params=sampling)]

    return generate


def _given(options: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in options.items() if value is not None}


LOADERS: dict[str, Callable[[dict[str, Any]], Generate]] = {"vllm": load_vllm, "sglang": load_sglang}
ENGINES = {"mini_engine": load_mini_engine} | LOADERS


def main(name: str) -> None:
    """Load the engine, and serve every list of requests until standard input ends."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def answer(**values: Any) -> None:
        print(json.dumps(values), file=answers, flush=True)

    generate = ENGINES[name](json.loads(sys.stdin.readline()))
    answer(ready=True)
    for line in sys.stdin:
        requests = json.loads(line)
        start = time.perf_counter()
        outputs = generate(requests["prompts"], requests["params"])
        answer(seconds=time.perf_counter() - start, outputs=outputs)


if __name__ == "__main__":  # the engines' own processes import this module
    main(sys.argv[1])
