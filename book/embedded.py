"""The embedded model as a checkpoint that other engines read."""

from pathlib import Path

import torch
from transformers import LlamaConfig

from book.random_models import NO_WORDS, random_transformers_model
from mini_engine import LLM


def write_embedded(llm: LLM, folder: Path) -> None:
    """Write the weights of the embedded SmolLM2 in transformers' format, with a tokenizer that is never used.

    Args:
        llm: the embedded model on a CPU, where its norms are not folded into its matrices.
        folder: an empty folder.
    """
    config = llm.model.config
    assert config.rope is not None
    shape = LlamaConfig(
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_hidden_layers=config.num_hidden_layers,
        num_attention_heads=config.num_attention_heads,
        num_key_value_heads=config.num_key_value_heads,
        max_position_embeddings=config.max_position_embeddings,
        rms_norm_eps=config.norm_eps,
        tie_word_embeddings=config.tie_word_embeddings,
        rope_parameters={"rope_type": "default", "rope_theta": config.rope.theta},
        eos_token_id=list(config.eos_token_ids),
        architectures=["LlamaForCausalLM"],
    )
    model = random_transformers_model(shape, llm.model.dtype, torch.device("cpu"))
    weights = {name: own for name, own in llm.model.destinations().items() if isinstance(own, torch.Tensor)}
    missing, unknown = model.load_state_dict(weights, strict=False)
    assert not unknown and set(missing) <= {"lm_head.weight"}, (missing, unknown)  # tied
    model.save_pretrained(folder)
    NO_WORDS.save_pretrained(folder)
