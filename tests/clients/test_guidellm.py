"""GuideLLM against the server: chats with content in parts, streamed, with token counts in every chunk."""

from __future__ import annotations

import json
from pathlib import Path

from tests.clients.conftest import GOOD, NUM_TOKENS, TOO_LONG, Target, run_client, write_lines


def test_guidellm_counts_what_was_served(target: Target, tmp_path: Path) -> None:
    prompts = [GOOD[0], TOO_LONG, *GOOD[1:]]
    rows = [{"prompt": prompt, "output_tokens_count": NUM_TOKENS} for prompt in prompts]
    data, report, before = write_lines(tmp_path / "prompts.jsonl", rows), tmp_path / "report.json", target.counters()
    run_client(
        "guidellm", "guidellm", "run", "--backend", f"kind=openai_http,target={target.address}",
        "--profile", "kind=concurrent,streams=2", "--constraint", f"kind=max_requests,count={len(prompts)}",
        "--data", f"kind=json_file,path={data}", "--output", f"kind=json,path={report}", "--disable-console",
        HF_HUB_OFFLINE="1",
    )  # fmt: skip
    [benchmark] = json.loads(report.read_text())["benchmarks"]
    totals, requests = benchmark["metrics"]["request_totals"], benchmark["requests"]
    assert (totals["successful"], totals["errored"], totals["incomplete"]) == (len(GOOD), 1, 0)
    assert "400" in requests["errored"][0]["info"]["error"]
    assert [own["output_metrics"]["total_tokens"] for own in requests["successful"]] == [NUM_TOKENS] * len(GOOD)
    counted = target.counted_since(before)
    inputs = [own["input_metrics"] for own in requests["successful"]]
    assert sum(own["total_tokens"] for own in inputs) == counted["vllm:prompt_tokens_total"]
    assert sum(own["cached_tokens"] or 0 for own in inputs) == counted["vllm:prefix_cache_hits_total"]
    assert counted["vllm:generation_tokens_total"] == NUM_TOKENS * len(GOOD)
