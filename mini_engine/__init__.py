"""LLM inference from the inside: an inference engine that is meant to be read. Start with `LLM`."""

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mini_engine.chunks import ChunkedLLM
    from mini_engine.config import EngineConfig
    from mini_engine.inference import Inference
    from mini_engine.llm import LLM
    from mini_engine.outputs import RequestOutput
    from mini_engine.parts import Parts
    from mini_engine.sampling_params import SamplingParams

__all__ = ["LLM", "ChunkedLLM", "EngineConfig", "Inference", "Parts", "RequestOutput", "SamplingParams"]
_HOME = {
    "LLM": "llm",
    "ChunkedLLM": "chunks",
    "EngineConfig": "config",
    "RequestOutput": "outputs",
    "Inference": "inference",
    "Parts": "parts",
    "SamplingParams": "sampling_params",
}


def __getattr__(name: str) -> object:
    """Import names on demand, so that importing one module of the engine does not load all of it."""
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)
