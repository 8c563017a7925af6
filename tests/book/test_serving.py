"""The bytes of a number are those of the weights that the engine loads."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
import torch
from transformers import LlamaConfig

from book.random_models import checkpoint
from book.serving import weight_bytes
from mini_engine.bench.workloads import model_shape
from mini_engine.loading.checkpoint import load_model, open_checkpoint
from mini_engine.models.weights import Projection
from mini_engine.parts import Parts

if TYPE_CHECKING:
    from pathlib import Path

SHAPE = LlamaConfig(
    vocab_size=96, hidden_size=64, intermediate_size=160, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, head_dim=16, tie_word_embeddings=False, architectures=["LlamaForCausalLM"],
)  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("method", [None, "fp8", "int8", "int4"])
def test_bytes_are_those_of_the_loaded_model(method: str | None, dtype: torch.dtype, tmp_path: Path) -> None:
    with checkpoint("a model", SHAPE, dtype, torch.device("cpu")) as (folder, config):
        model = load_model(open_checkpoint(folder), Parts(), dtype, quantization=method)
    stored = [own for own in model.modules() if isinstance(own, Projection)]
    numbers = sum(own.in_features * sum(own.rows.values()) for own in stored)
    assert numbers == 96 * 64 + 2 * (128 * 64 + 64 * 64 + 320 * 64 + 64 * 160)
    size = sum(own.num_bytes for own in stored)
    assert weight_bytes(model_shape(config), method, dtype.itemsize) == pytest.approx(size / numbers)
    assert weight_bytes(replace(model_shape(config), num_layers=0), "fp8", dtype.itemsize) == dtype.itemsize  # the head
