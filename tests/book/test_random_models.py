"""The shapes have as many parameters as the published models."""

import pytest
import torch
from transformers import Qwen3Config

from book.random_models import GEMMA2_2B, QWEN3_0_6B, QWEN3_30B_A3B, random_model, random_transformers_model
from mini_engine.models.config import ModelConfig
from mini_engine.models.registry import build_model
from mini_engine.parts import Parts


@pytest.mark.parametrize(
    ("config", "parameters"),
    [(QWEN3_0_6B, 596_049_920), (GEMMA2_2B, 2_614_341_888), (QWEN3_30B_A3B, 30_532_122_624)],
)
def test_parameters_are_as_many_as_published(config, parameters):
    meta = torch.device("meta")
    theirs = random_transformers_model(config, torch.bfloat16, meta)
    assert sum(parameter.numel() for parameter in theirs.parameters()) == parameters
    ours = build_model(ModelConfig.from_hf(config.to_dict()), Parts(), torch.bfloat16, meta)
    assert sum(parameter.numel() for parameter in ours.parameters()) == parameters


def test_weights_are_random():
    config = Qwen3Config(**QWEN3_0_6B.to_dict() | {"hidden_size": 64, "intermediate_size": 48, "vocab_size": 100})
    for parameter in random_model(config, torch.float32, torch.device("cpu")).parameters():
        assert 0.01 < parameter.std() < 0.03
