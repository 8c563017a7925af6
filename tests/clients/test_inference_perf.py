"""inference-perf against the server: completions and chats, streamed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.clients.conftest import MAX_MODEL_LEN, NUM_TOKENS, Target, run_client

NUM_REQUESTS = 4


def summary(target: Target, folder: Path, api: str, data: dict[str, Any]) -> dict[str, Any]:
    """Run the client, and return its report."""
    config = {
        "load": {
            "type": "concurrent", "num_workers": 1,
            "stages": [{"num_requests": NUM_REQUESTS, "concurrency_level": 2}],
        },
        "api": {"type": api, "streaming": True},
        "server": {"type": "vllm", "base_url": target.address},
        "tokenizer": {"pretrained_model_name_or_path": str(target.tokenizer)},
        "data": data,
        "storage": {"local_storage": {"path": str(folder / "out")}},
    }  # fmt: skip
    file = folder / "config.yaml"
    file.write_text(json.dumps(config))  # JSON is YAML
    run_client("inference_perf", "inference-perf", "--config_file", file, HF_HUB_OFFLINE="1")
    return json.loads((folder / "out" / "summary_lifecycle_metrics.json").read_text())


def of_length(num_tokens: int) -> dict[str, Any]:
    return {"type": "fixed", "min": num_tokens, "max": num_tokens, "mean": num_tokens, "std_dev": 0}


def test_inference_perf_counts_what_was_served(target: Target, tmp_path: Path) -> None:
    before = target.counters()
    data = {"type": "random", "input_distribution": of_length(20), "output_distribution": of_length(NUM_TOKENS)}
    report = summary(target, tmp_path, "completion", data)
    assert report["successes"]["count"] == NUM_REQUESTS and report["failures"]["count"] == 0
    tokens = report["successes"]["output_tokens"]  # as the server counts them; output_len as the client does
    assert tokens["min"] == tokens["max"] == NUM_TOKENS
    counted = target.counted_since(before)
    assert counted["vllm:generation_tokens_total"] == NUM_TOKENS * NUM_REQUESTS
    prompts = report["successes"]["prompt_tokens"]
    assert prompts["total"] == counted["vllm:prompt_tokens_total"]
    assert prompts["cached"] == counted["vllm:prefix_cache_hits_total"]


def test_inference_perf_counts_refusals_as_failures(target: Target, tmp_path: Path) -> None:
    prefix = {"num_groups": 1, "num_prompts_per_group": NUM_REQUESTS, "system_prompt_len": MAX_MODEL_LEN}
    data = {"type": "shared_prefix", "shared_prefix": prefix | {"question_len": 10, "output_len": NUM_TOKENS}}
    report = summary(target, tmp_path, "chat", data)
    assert report["successes"]["count"] == 0 and report["failures"]["count"] == NUM_REQUESTS
