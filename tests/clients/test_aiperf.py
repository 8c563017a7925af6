"""AIPerf against the server: chats, and the metrics that it reads from `/metrics` meanwhile."""

from __future__ import annotations

import json
from pathlib import Path

from tests.clients.conftest import EMBEDDED_MODEL, GOOD, NUM_TOKENS, TOO_LONG, Target, run_client, write_lines


def test_aiperf_counts_what_was_served(target: Target, tmp_path: Path) -> None:
    prompts, out = [GOOD[0], TOO_LONG, *GOOD[1:]], tmp_path / "out"
    data = write_lines(tmp_path / "in.jsonl", [{"text": own, "output_length": NUM_TOKENS} for own in prompts])
    before = target.counters()
    run_client(
        "aiperf", "aiperf", "profile", "--model", EMBEDDED_MODEL, "--url", target.address,
        "--endpoint-type", "chat", "--streaming", "--tokenizer", target.tokenizer, "--use-server-token-count",
        "--input-file", data, "--custom-dataset-type", "single_turn", "--extra-inputs", "ignore_eos:true",
        "--request-count", str(len(prompts)), "--concurrency", "2", "--output-artifact-dir", out, "--ui", "none",
    )  # fmt: skip
    report = json.loads((out / "profile_export_aiperf.json").read_text())
    num_tokens = NUM_TOKENS * len(GOOD)
    assert (report["request_count"]["avg"], report["error_request_count"]["avg"]) == (len(GOOD), 1)
    assert [(own["error_details"]["code"], own["count"]) for own in report["error_summary"]] == [(400, 1)]
    assert report["total_output_tokens"]["avg"] == report["total_usage_completion_tokens"]["avg"] == num_tokens
    assert report["output_sequence_length"]["min"] == report["output_sequence_length"]["max"] == NUM_TOKENS

    counted = target.counted_since(before)
    assert report["total_usage_prompt_cache_read_tokens"]["avg"] == counted["vllm:prefix_cache_hits_total"] > 0
    metrics = json.loads((out / "server_metrics_export.json").read_text())["metrics"]
    [totals] = [own["stats"]["total"] for own in metrics["vllm:generation_tokens"]["series"]]
    assert totals == num_tokens == counted["vllm:generation_tokens_total"]
    [totals] = [own["stats"]["total"] for own in metrics["vllm:prompt_tokens"]["series"]]
    assert totals == report["total_usage_prompt_tokens"]["avg"] == counted["vllm:prompt_tokens_total"]
    for name, count in (
        ("time_to_first_token_seconds", len(GOOD)),
        ("inter_token_latency_seconds", num_tokens - len(GOOD)),
        ("e2e_request_latency_seconds", len(GOOD)),
    ):
        [stats] = [own["stats"] for own in metrics[f"vllm:{name}"]["series"]]
        assert stats["count"] == count == counted[f"vllm:{name}_count"], name
