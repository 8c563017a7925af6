"""When host and device work in twenty steps of a steady decode, with two backends and at two pipeline depths.

    python experiments/05_throughput/timeline.py [--out DIR]      # records; needs a GPU
    python experiments/05_throughput/timeline.py --draw           # draws what is recorded

The model is Qwen3-0.6B's shape in bfloat16 with random weights, and 256 requests are running. The recording goes to
experiments/05_throughput/timelines/<device>.json, the drawing to timeline.svg beside this file.
"""

from __future__ import annotations

import argparse
import datetime
import json
import re
import sys
import time
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from book import figures, results
from book.random_models import QWEN3_0_6B, random_model
from mini_engine.config import EngineConfig
from mini_engine.engine import LLMEngine
from mini_engine.models.base import CausalLM
from mini_engine.sampling_params import SamplingParams

HERE = Path(__file__).resolve().parent
NUM_REQUESTS, PROMPT, STEPS, WARM_UP, PAGE_SIZE = 256, 600, 20, 30, 128
RUNS = (("flex", 0), ("flex", 1), ("flashinfer", 0), ("flashinfer", 1))
GAP = 5.0  # microseconds: kernels that follow each other more closely are one span


def record(model: CausalLM, backend: str, depth: int) -> dict[str, Any]:
    """Serve a steady decode and return the spans of the host's calls and of the device's kernels, in microseconds."""
    pages = NUM_REQUESTS * (-(-(PROMPT + WARM_UP + 2 * STEPS) // PAGE_SIZE) + 1)
    config = EngineConfig(
        attn_backend=backend, num_pages=pages, page_size=PAGE_SIZE, max_batch_size=NUM_REQUESTS,
        max_num_batched_tokens=8192, pipeline_depth=depth, enable_prefix_caching=False,
    )  # fmt: skip
    engine = LLMEngine(model, config, parts=model.parts)
    params = SamplingParams(temperature=0.6, max_tokens=2000, ignore_eos=True)
    for i in range(NUM_REQUESTS):
        engine.add_request(str(i), [1 + (i * 37 + j) % 1000 for j in range(PROMPT)], params)
    while not engine.step().is_decode:
        pass
    for _ in range(WARM_UP):
        engine.step()
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(STEPS):
        engine.step()
    torch.cuda.synchronize()
    unprofiled = (time.perf_counter() - start) / STEPS
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        for _ in range(STEPS):
            with torch.profiler.record_function("step"):
                engine.step()
        torch.cuda.synchronize()
    steps, kernels = [], []
    for event in profile.events():
        span = [event.time_range.start, event.time_range.end]
        if event.device_type == torch.autograd.DeviceType.CUDA:
            if event.name != "step":
                kernels.append(span)
        elif event.name == "step":
            steps.append(span)
    first = min(start for start, _ in steps)
    shift = [[[round(a - first, 1), round(b - first, 1)] for a, b in spans] for spans in (steps, merged(kernels))]
    return {
        "backend": backend,
        "depth": depth,
        "milliseconds_per_step": unprofiled * 1e3,
        "steps": shift[0],
        "device": shift[1],
    }


def merged(spans: list[list[float]]) -> list[list[float]]:
    """Join spans whose gap is shorter than GAP."""
    joined: list[list[float]] = []
    for start, end in sorted(spans):
        if joined and start - joined[-1][1] < GAP:
            joined[-1][1] = max(end, joined[-1][1])
        else:
            joined.append([start, end])
    return joined


def busy(run: dict[str, Any]) -> float:
    """The device's share of the time between the first step's launch and the last step's end."""
    begin, end = run["steps"][0][0], max(run["steps"][-1][1], run["device"][-1][1])
    return sum(b - a for a, b in run["device"] if b > begin) / (end - begin)


def draw(recording: dict[str, Any], to: Path) -> None:
    figure, axes = figures.new(1.6 * len(recording["runs"]), rows=len(recording["runs"]))
    for ax, run in zip(axes[:, 0], recording["runs"], strict=True):
        for lane, (name, color) in enumerate((("device", figures.PALETTE[1]), ("steps", figures.PALETTE[0]))):
            spans = [(a / 1e3, (b - a) / 1e3) for a, b in run[name]]
            style: dict[str, Any] = {"edgecolor": figures.PAPER, "linewidth": 0.5}
            if name == "device":  # thousands of spans, most of them narrower than a pixel: their density is what shows
                style = {"linewidth": 0, "rasterized": True, "snap": False}
            ax.broken_barh(spans, (lane - 0.35, 0.7), facecolor=color, **style)
        ax.set(yticks=[0, 1], yticklabels=["device", "host"], xlabel="ms", xlim=(0, run["steps"][-1][1] / 1e3))
        name = f"{run['backend']}, depth {run['depth']}"
        ax.set_title(f"{name}: {run['milliseconds_per_step']:.1f} ms a step, device busy {busy(run):.0%}")
    to.write_text(figures.to_svg(figure), encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=HERE, help="write into this folder")
    parser.add_argument("--draw", action="store_true", help="only draw what is recorded")
    arguments = parser.parse_args()
    if arguments.draw:
        (file,) = sorted((HERE / "timelines").glob("*.json"))
        draw(json.loads(file.read_text(encoding="utf-8")), HERE / "timeline.svg")
        return
    model = random_model(QWEN3_0_6B, torch.bfloat16, torch.device("cuda"))
    device = results.device_name("cuda")
    recording = {
        "device": device,
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "versions": results.versions(),
        "parameters": {"requests": NUM_REQUESTS, "prompt": PROMPT, "steps": STEPS},
        "runs": [record(model, backend, depth) for backend, depth in RUNS],
    }
    for run in recording["runs"]:
        name, milliseconds = f"{run['backend']}, depth {run['depth']}", run["milliseconds_per_step"]
        print(f"{name}: {milliseconds:.2f} ms a step, device busy {busy(run):.1%}")
    folder = arguments.out / "timelines"
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / f"{re.sub(r'[^a-z0-9]+', '-', device.lower()).strip('-')}.json"
    file.write_text(json.dumps(recording) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
