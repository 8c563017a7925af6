"""Models of published shapes with random weights: speed does not depend on a weight's value."""

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import (
    AutoModelForCausalLM,
    DeepseekV2Config,
    Gemma2Config,
    LlamaConfig,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3MoeConfig,
)

from mini_engine.loading.checkpoint import open_checkpoint
from mini_engine.models.base import CausalLM
from mini_engine.models.config import ModelConfig
from mini_engine.models.registry import build_model
from mini_engine.parts import default_parts

LLAMA_3_ROPE = {
    "rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}  # fmt: skip
QWEN3_0_6B = Qwen3Config(
    vocab_size=151_936,
    hidden_size=1024,
    intermediate_size=3072,
    num_hidden_layers=28,
    num_attention_heads=16,
    num_key_value_heads=8,
    head_dim=128,
    max_position_embeddings=40_960,
    tie_word_embeddings=True,
    rope_parameters={"rope_type": "default", "rope_theta": 1e6},
    architectures=["Qwen3ForCausalLM"],
)
QWEN3_8B = Qwen3Config(
    vocab_size=151_936,
    hidden_size=4096,
    intermediate_size=12_288,
    num_hidden_layers=36,
    num_attention_heads=32,
    num_key_value_heads=8,
    head_dim=128,
    max_position_embeddings=40_960,
    tie_word_embeddings=False,
    rope_parameters={"rope_type": "default", "rope_theta": 1e6},
    architectures=["Qwen3ForCausalLM"],
)
QWEN3_30B_A3B = Qwen3MoeConfig(  # type: ignore[call-arg]  # not all values are fields
    vocab_size=151_936,
    hidden_size=2048,
    intermediate_size=6144,
    num_hidden_layers=48,
    num_attention_heads=32,
    num_key_value_heads=4,
    head_dim=128,
    num_experts=128,
    num_experts_per_tok=8,
    moe_intermediate_size=768,
    norm_topk_prob=True,
    max_position_embeddings=40_960,
    tie_word_embeddings=False,
    rope_parameters={"rope_type": "default", "rope_theta": 1e6},
    architectures=["Qwen3MoeForCausalLM"],
)
DEEPSEEK_V2_LITE = DeepseekV2Config(
    vocab_size=102_400,
    hidden_size=2048,
    intermediate_size=10_944,
    moe_intermediate_size=1408,
    num_hidden_layers=27,
    num_attention_heads=16,
    num_key_value_heads=16,
    first_k_dense_replace=1,
    n_routed_experts=64,
    n_shared_experts=2,
    num_experts_per_tok=6,
    q_lora_rank=None,
    kv_lora_rank=512,
    qk_nope_head_dim=128,
    qk_rope_head_dim=64,
    v_head_dim=128,
    max_position_embeddings=163_840,
    rope_parameters={
        "rope_type": "yarn", "rope_theta": 1e4, "factor": 40.0, "mscale": 0.707, "mscale_all_dim": 0.707,
        "beta_fast": 32.0, "beta_slow": 1.0, "original_max_position_embeddings": 4096,
    },
    architectures=["DeepseekV2ForCausalLM"],
)  # fmt: skip
LLAMA_3_2_1B = LlamaConfig(
    vocab_size=128_256,
    hidden_size=2048,
    intermediate_size=8192,
    num_hidden_layers=16,
    num_attention_heads=32,
    num_key_value_heads=8,
    head_dim=64,
    max_position_embeddings=131_072,
    tie_word_embeddings=True,
    rope_parameters=LLAMA_3_ROPE | {"factor": 32.0},
    architectures=["LlamaForCausalLM"],
)
LLAMA_3_1_8B = LlamaConfig(
    vocab_size=128_256,
    hidden_size=4096,
    intermediate_size=14_336,
    num_hidden_layers=32,
    num_attention_heads=32,
    num_key_value_heads=8,
    head_dim=128,
    max_position_embeddings=131_072,
    rope_parameters=LLAMA_3_ROPE,
    architectures=["LlamaForCausalLM"],
)
GEMMA2_2B = Gemma2Config(
    vocab_size=256_000,
    hidden_size=2304,
    intermediate_size=9216,
    num_hidden_layers=26,
    num_attention_heads=8,
    num_key_value_heads=4,
    head_dim=256,
    query_pre_attn_scalar=256,
    sliding_window=4096,
    max_position_embeddings=8192,
    architectures=["Gemma2ForCausalLM"],
)
# An engine turns tokens into text. The text of random weights means nothing, so every token is the same word.
NO_WORDS = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(WordLevel({"?": 0}, unk_token="?")), unk_token="?")


def random_model(config: PretrainedConfig, dtype: torch.dtype, device: torch.device) -> CausalLM:
    """Our model of this shape.

    Args:
        config: the shape, as transformers configures it.
        dtype: of the weights.
        device: of the weights.
    """
    model = build_model(ModelConfig.from_hf(config.to_dict()), default_parts(device), dtype, device)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.02)
    return model


def random_transformers_model(config: PretrainedConfig, dtype: torch.dtype, device: torch.device) -> PreTrainedModel:
    """transformers' model of this shape; its weights differ from ours."""
    with device:
        return AutoModelForCausalLM.from_config(config, dtype=dtype).eval()


def write_checkpoint(config: PretrainedConfig, dtype: torch.dtype, device: torch.device, folder: Path) -> ModelConfig:
    """Write a checkpoint in transformers' format: random weights of a shape, and a tokenizer that is never used.

    Args:
        config: the shape, as transformers configures it.
        dtype: of the weights.
        device: where the weights are drawn.
        folder: an empty folder.

    Returns:
        The shape, as the engine reads it.
    """
    model = random_transformers_model(config, dtype, device)
    model.save_pretrained(folder)
    NO_WORDS.save_pretrained(folder)
    return ModelConfig.from_hf(model.config.to_dict())


@contextmanager
def checkpoint(
    name: str, config: PretrainedConfig, dtype: torch.dtype, device: torch.device, kept: Path | None = None
) -> Iterator[tuple[Path, ModelConfig]]:
    """Write a checkpoint as `write_checkpoint` does.

    Args:
        name: of the folder.
        config: the shape, as transformers configures it.
        dtype: of the weights.
        device: where the weights are drawn.
        kept: where the folder stays, and is found the next time; None: it is temporary.

    Yields:
        The folder, and the shape, as the engine reads it.
    """
    with tempfile.TemporaryDirectory() as temporary:
        folder = (kept or Path(temporary)) / name
        if not folder.exists():
            folder.parent.mkdir(parents=True, exist_ok=True)
            unfinished = Path(tempfile.mkdtemp(dir=folder.parent))
            write_checkpoint(config, dtype, device, unfinished)
            with suppress(OSError):  # another process has been faster
                unfinished.rename(folder)
        yield folder, open_checkpoint(folder).config
