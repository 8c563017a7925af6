"""Measure what each chapter's engine gains, and the engine beside transformers, on the embedded model.

    python experiments/00_engine_so_far/run.py [--device cpu|cuda] [--out DIR]

The result goes to experiments/00_engine_so_far/results/<device>.json, below DIR where one is given.
"""

import argparse
import sys
from pathlib import Path

import torch
from rich.console import Console

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from book import results
from mini_engine import LLM, SamplingParams
from mini_engine.attention.naive import attention_mask, sdpa_attention
from mini_engine.batch import AttentionSpec
from mini_engine.bench import Measurement, alternate, bound_seconds, random_prompts, run_bench
from mini_engine.kv_cache.contiguous import ContiguousKVCache
from mini_engine.metrics import weight_bytes_per_step
from mini_engine.roofline import measure_machine

MODEL = "smollm2-135m-instruct"
PROMPT_TOKENS, MAX_TOKENS, ROUNDS = 64, 64, 3


def without_cache(llm: LLM, prompt: list[int]) -> list[int]:
    """Chapter 03's engine: greedy, and every token computes the whole sequence again."""
    weight = next(llm.model.parameters())

    def attend(spec: AttentionSpec, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        positions = torch.arange(len(q), device=q.device)
        return sdpa_attention(q, k, v, scale=spec.scale, mask=attention_mask(positions, positions, spec.window))

    tokens = list(prompt)
    with torch.inference_mode():
        for _ in range(MAX_TOKENS):
            token_ids = torch.tensor(tokens, device=weight.device)
            hidden = llm.model(token_ids, torch.arange(len(tokens), device=weight.device), attend)
            tokens.append(int(llm.model.compute_logits(hidden[-1:]).argmax()))
    return tokens[len(prompt) :]


def chapter_rows(device: str, dtype: str) -> list[results.Row]:
    """Tokens/s and bytes per token of chapters 03 and 04, one request, in turns."""
    llm = LLM(MODEL, dtype=dtype, device=device)
    weight = next(llm.model.parameters())
    machine = measure_machine(weight.device, weight.dtype)
    prompts = random_prompts(1, PROMPT_TOKENS, llm.model.config.vocab_size)
    params = SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS, ignore_eos=True)
    assert without_cache(llm, prompts[0]) == llm.generate(prompts, params)[0].token_ids  # the same text

    seconds = alternate([lambda: without_cache(llm, prompts[0]), lambda: llm.generate(prompts, params)], ROUNDS)
    bound = MAX_TOKENS / bound_seconds(llm.model.config, machine, prompts, MAX_TOKENS, weight.element_size())
    weights = weight_bytes_per_step(llm.model)
    cache = ContiguousKVCache(llm.model.attention_specs, 1, 1, weight.dtype)
    # A decode reads the keys and values of the tokens before it: on average the prompt and half of the output.
    keys = cache.bytes_per_token * (PROMPT_TOKENS + MAX_TOKENS // 2)
    needed = "with a cache: weights, and keys and values of all tokens, over the measured rates"
    least = "what a token needs: every weight once, and with a cache the keys and values before it"
    rows = []
    for chapter, own, size in ((3, seconds[0], weights), (4, seconds[1], weights + keys)):
        case: dict[str, results.Setting] = {"chapter": chapter, "dtype": dtype}
        rows.append(results.Row(results.ENGINE_SPEED, MAX_TOKENS / own, "tokens/s", bound, needed, case))
        rows.append(results.Row(results.ENGINE_BYTES, size, "B", size, least, case))
    return rows


def peer_rows(measurements: list[Measurement]) -> list[results.Row]:
    """The engine and transformers, side by side."""
    rows = []
    for m in measurements:
        case: dict[str, results.Setting] = {"dtype": m.dtype, "batch": m.batch_size}
        source = "prefill and decode steps at the measured rates"
        for engine, rate in (("mini_engine", m.ours), ("transformers", m.peer)):
            assert rate is not None
            rows.append(results.Row(engine, rate, "tokens/s", m.bound, source, case))
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", type=Path, help="write below this folder instead of the repository")
    arguments = parser.parse_args()
    rows = chapter_rows(arguments.device, "float32")
    measurements = run_bench(
        Console(),
        model=MODEL,
        attn_backend="torch",
        device=arguments.device,
        peer="transformers",
        batch_sizes=[1, 8],
        dtypes=["float32", "bfloat16"],
        prompt_tokens=PROMPT_TOKENS,
        max_tokens=MAX_TOKENS,
        rounds=ROUNDS,
    )
    parameters: dict[str, results.Setting] = {"model": MODEL, "prompt_tokens": PROMPT_TOKENS}
    parameters |= {"max_tokens": MAX_TOKENS, "rounds": ROUNDS}
    result = results.new_result("00_engine_so_far", rows + peer_rows(measurements), parameters, arguments.device)
    print(result)
    print(results.write(result, arguments.out))
    if arguments.out is None:
        results.fill_readme("00_engine_so_far", {results.ENGINE_SPEED, "mini_engine", "transformers"})


if __name__ == "__main__":
    main()
