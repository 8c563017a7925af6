"""`Inference`: a loaded model of transformers, served by the engine. Explained in chapter 07."""

from typing import Any

from torch import nn
from transformers import GenerationConfig, PreTrainedTokenizerBase

from mini_engine.config import EngineConfig
from mini_engine.engine import LLMEngine, OnStep
from mini_engine.errors import ConfigError
from mini_engine.llm import TextEngine
from mini_engine.models.hf import HFModel
from mini_engine.parts import Parts
from mini_engine.sampling_params import SamplingParams


class Inference(TextEngine):
    """Serves a loaded model of transformers by continuous batching over a paged KV cache.

    Args:
        model: any causal language model whose attention goes through transformers' attention interface: Llama, Qwen3,
            Gemma 2, GPT-2 and most others. It is not moved, converted or changed.
        tokenizer: the model's.
        max_batch_size: requests that run at once; others wait.
        max_seq_length: longest prompt and output together; default the model's limit, or the pool's if it is smaller.
        n_pages: pages of the KV cache.
        page_size: tokens per page.
        parts: the engine's replaceable parts.
        on_step: called with the engine and the report of each step.
        options: further fields of `EngineConfig`. Its defaults hold here, too.

    Attributes:
        default_params: temperature, filters and penalty of the model's own `generate`: greedy unless its generation
            config samples. Its other settings, such as `suppress_tokens`, are not applied.

    Raises:
        ConfigError: for a model that the engine cannot run, or impossible options.
    """

    def __init__(
        self,
        model: nn.Module,
        tokenizer: PreTrainedTokenizerBase,
        *,
        max_batch_size: int | None = None,
        max_seq_length: int | None = None,
        n_pages: int | None = None,
        page_size: int | None = None,
        parts: Parts | None = None,
        on_step: OnStep | None = None,
        **options: Any,
    ) -> None:
        adapted = HFModel(model)
        longest = adapted.config.max_position_embeddings
        if max_seq_length and max_seq_length > longest and adapted.limit:
            raise ConfigError(f"max_seq_length is {max_seq_length}, but {adapted.limit}")
        if n_pages and page_size:
            pool = n_pages * page_size
            if max_seq_length is None:
                max_seq_length = min(longest, pool)
            if max_seq_length > pool:
                raise ConfigError(
                    f"max_seq_length is {max_seq_length}, and {n_pages} pages of {page_size} hold {pool} tokens: one "
                    "request could outgrow the whole KV cache; lower max_seq_length or raise n_pages"
                )
        given = {"max_batch_size": max_batch_size, "max_model_len": max_seq_length}
        given |= {"num_pages": n_pages, "page_size": page_size}
        config = EngineConfig.of({name: value for name, value in given.items() if value is not None} | options)
        engine = LLMEngine(adapted, config, eos_token_ids=adapted.eos_token_ids, parts=parts, on_step=on_step)
        super().__init__(engine, tokenizer, params_of_generation(getattr(model, "generation_config", None)))


def params_of_generation(config: GenerationConfig | None) -> SamplingParams:
    """Return temperature, filters and penalty of transformers' own `generate`: greedy unless `do_sample` is set."""
    names = ["repetition_penalty"]
    given: dict[str, Any] = {"temperature": 0.0}
    if config is not None and config.do_sample:
        names += ["temperature", "top_k", "top_p", "min_p"]
        given = {"top_k": 50}  # the default of `generate`
    return SamplingParams(**given | {n: value for n in names if (value := getattr(config, n, None)) is not None})
