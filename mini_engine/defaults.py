"""The defaults that depend on the model and the machine."""

from dataclasses import replace

import torch

from mini_engine.attention.spec import AttentionSpec
from mini_engine.config import EngineConfig
from mini_engine.errors import ConfigError
from mini_engine.kv_cache.paged import default_num_pages, free_memory
from mini_engine.models.base import LanguageModel


def resolve(config: EngineConfig, model: LanguageModel) -> EngineConfig:
    """Replace the defaults that depend on the model and the machine.

    Raises:
        ConfigError: for options that this model or this machine does not allow.
    """
    longest = model.config.max_position_embeddings
    length = longest if config.max_model_len is None else config.max_model_len
    if not 2 <= length <= longest:
        raise ConfigError(f"max_model_len is {length}; this model takes 2 to {longest} tokens")
    # Each row has its tokens and its pages, and each page has three numbers.
    pages_per_row = -(-length // config.page_size)
    bookkeeping = 4 * config.max_batch_size * (length + pages_per_row) + 16 * (config.num_pages or 0)
    if bookkeeping > free_memory(torch.device("cpu")):
        raise ConfigError(
            f"max_batch_size={config.max_batch_size} and num_pages={config.num_pages} need {bookkeeping} bytes of "
            "bookkeeping, more than this machine has free; lower them"
        )
    num_pages, depth = config.num_pages, config.pipeline_depth
    if num_pages is None:
        most = config.max_batch_size * pages_per_row
        num_pages = default_num_pages(specs_of(config, model), config.page_size, model.dtype, model.device, most)
    return replace(
        config,
        max_model_len=length,
        num_pages=num_pages,
        sliding_window=None if config.sliding_window is None else min(config.sliding_window, length),
        pipeline_depth=int(model.device.type == "cuda") if depth is None else depth,
    )


def specs_of(config: EngineConfig, model: LanguageModel) -> tuple[AttentionSpec, ...]:
    """Return the model's layers with the options applied: the sliding window, and the dtype of the cache."""
    specs, window = model.attention_specs, config.sliding_window
    if config.kv_cache_dtype == "fp8_e4m3":
        specs = tuple(replace(spec, kv_dtype=torch.float8_e4m3fn) for spec in specs)
    if window is not None:
        specs = tuple(replace(spec, window=min(window, spec.window or window)) for spec in specs)
    return specs
