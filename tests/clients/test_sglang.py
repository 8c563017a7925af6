"""`sglang.bench_serving` against the server: chats, streamed. CI does not install SGLang."""

from __future__ import annotations

import json
from pathlib import Path

from tests.clients.conftest import EMBEDDED_MODEL, GOOD, NUM_TOKENS, TOO_LONG, Target, run_client, write_lines


def test_sglang_counts_what_was_served(target: Target, tmp_path: Path) -> None:
    prompts, report = [GOOD[0], TOO_LONG, *GOOD[1:]], tmp_path / "out.jsonl"
    messages = [[{"role": "user", "content": prompt}] for prompt in prompts]
    rows = [{"messages": own, "max_tokens": NUM_TOKENS} for own in messages]
    data, before = write_lines(tmp_path / "prompts.jsonl", rows), target.counters()
    run_client(
        "sglang", "python", "-m", "sglang.bench_serving", "--backend", "sglang-oai-chat", "--base-url", target.address,
        "--model", EMBEDDED_MODEL, "--tokenizer", target.tokenizer, "--num-prompts", str(len(prompts)),
        "--dataset-name", "openai", "--dataset-path", data, "--max-concurrency", "2", "--warmup-requests", "0",
        "--output-file", report, "--output-details",
        HF_HUB_OFFLINE="1",
    )  # fmt: skip
    found = json.loads(report.read_text())
    assert found["completed"] == len(GOOD)
    assert found["output_lens"] == [NUM_TOKENS, 0, NUM_TOKENS, NUM_TOKENS]
    assert [bool(error) for error in found["errors"]] == [False, True, False, False]
    counted = target.counted_since(before)
    assert found["total_input_tokens"] == counted["vllm:prompt_tokens_total"]
    assert counted["vllm:generation_tokens_total"] == NUM_TOKENS * len(GOOD)
