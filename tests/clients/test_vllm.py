"""`vllm bench serve` against the server: its two interfaces of OpenAI. CI does not install vLLM."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.clients.conftest import EMBEDDED_MODEL, GOOD, NUM_TOKENS, TOO_LONG, Target, run_client, write_lines


@pytest.mark.parametrize(("backend", "path"), [("openai", "/v1/completions"), ("openai-chat", "/v1/chat/completions")])
def test_vllm_counts_what_was_served(target: Target, tmp_path: Path, backend: str, path: str) -> None:
    prompts = [GOOD[0], TOO_LONG, *GOOD[1:]]
    rows = [{"prompt": prompt, "output_tokens": NUM_TOKENS} for prompt in prompts]
    data, before = write_lines(tmp_path / "prompts.jsonl", rows), target.counters()
    run_client(
        "vllm", "vllm", "bench", "serve", "--backend", backend, "--base-url", target.address, "--endpoint", path,
        "--model", EMBEDDED_MODEL, "--tokenizer", target.tokenizer, "--ignore-eos", "--num-prompts", str(len(prompts)),
        "--dataset-name", "custom", "--dataset-path", data, "--custom-output-len", "-1", "--skip-chat-template",
        "--disable-shuffle", "--save-result", "--save-detailed", "--result-dir", tmp_path, "--result-filename", "out",
        HF_HUB_OFFLINE="1",
    )  # fmt: skip
    report = json.loads((tmp_path / "out").read_text())
    assert (report["completed"], report["failed"]) == (len(GOOD), 1)
    assert report["output_lens"] == [NUM_TOKENS, 0, NUM_TOKENS, NUM_TOKENS]
    assert "Bad Request" in report["errors"][1]
    counted = target.counted_since(before)
    assert report["total_input_tokens"] == counted["vllm:prompt_tokens_total"]
    assert counted["vllm:generation_tokens_total"] == NUM_TOKENS * len(GOOD)
