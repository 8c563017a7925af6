"""Start an engine in a new process, generate one token, and print when each stage of the start ended.

    python experiments/10_cuda_graphs_and_overlap/start.py CHECKPOINT DEVICE DTYPE BACKEND

The output is one JSON object: stage to the reading of `time.monotonic()` at its end.
"""

import json
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch

from mini_engine.config import EngineConfig
from mini_engine.engine import LLMEngine
from mini_engine.loading.checkpoint import load_model, open_checkpoint
from mini_engine.parts import default_parts
from mini_engine.sampling_params import SamplingParams

PROMPT, MAX_BATCH_SIZE, MAX_MODEL_LEN = 128, 256, 2048


def main(folder: str, device_name: str, dtype: str, attn_backend: str) -> None:
    ends = {"imports": time.monotonic()}
    device = torch.device(device_name)
    if device.type == "cuda":
        torch.zeros(1, device=device)
    ends["device"] = time.monotonic()
    model = load_model(open_checkpoint(folder), default_parts(device), getattr(torch, dtype), device)
    if device.type == "cuda":
        torch.cuda.synchronize()
    ends["weights"] = time.monotonic()
    config = EngineConfig(
        attn_backend=attn_backend, max_batch_size=MAX_BATCH_SIZE,
        max_model_len=min(MAX_MODEL_LEN, model.config.max_position_embeddings), warm_up=True,
    )  # fmt: skip
    engine = LLMEngine(model, config)
    ends["engine, warm-up and graphs"] = time.monotonic()
    engine.add_request("first", [1] * PROMPT, SamplingParams(max_tokens=1, ignore_eos=True))
    while engine.has_unfinished:
        engine.step()
    ends["first token"] = time.monotonic()
    print(json.dumps(ends))


if __name__ == "__main__":
    main(*sys.argv[1:])
