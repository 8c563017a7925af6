"""The defaults that depend on the model and the machine."""

import logging
import pkgutil
from collections.abc import Callable, Sequence
from dataclasses import fields, replace

import torch

from mini_engine.attention.backend import BACKENDS, PlannedCache, choose_backend
from mini_engine.attention.spec import AttentionSpec
from mini_engine.config import EngineConfig, ResolvedConfig
from mini_engine.decode_graphs import graph_sizes
from mini_engine.errors import ConfigError
from mini_engine.kernels.nvcc import has_nvcc
from mini_engine.kernels.persistent_decode import PersistentDecode
from mini_engine.kv_cache.layer_groups import LayerGroup, layer_groups, one_group, stored_specs
from mini_engine.kv_cache.paged import default_num_pages, free_memory, page_bytes
from mini_engine.models.base import LanguageModel
from mini_engine.waiting import DEFAULT_OVERTAKES

logger = logging.getLogger(__name__)
# By type of device. An H100's matrix products are compute-bound from about 300 tokens on (990 TFLOP/s over 3.35 TB/s).
# 16,384 tokens make the fixed costs of a step small beside them; more would delay the requests that decode meanwhile.
BATCH_SIZES, STEP_TOKENS = {"cuda": 256, "cpu": 32}, {"cuda": 16_384, "cpu": 2048}
# A server's clients read along, and all wait for the longest step. On a GPU, larger steps are launched kernel by kernel
# (`piecewise_graphs.py`), and shorter ones serve fewer requests (experiment 21).
SERVED_STEP_TOKENS = 2048


def served_step_tokens(config: EngineConfig) -> int:
    """Return the default of `max_num_batched_tokens` for an engine whose clients read along."""
    return max(SERVED_STEP_TOKENS, config.max_batch_size or 0)


def resolve(config: EngineConfig, model: LanguageModel) -> ResolvedConfig:
    """Replace the defaults that depend on the model and the machine, and log the choice of the attention backend.

    On a GPU, the default number of pages leaves room for nothing but the weights. `measured_pages` does better.

    Raises:
        ConfigError: for options that this model or this machine does not allow.
    """
    device, longest = model.device, model.config.max_position_embeddings
    on_gpu, specs = device.type == "cuda", specs_of(config, model)
    loaded = {"dtype": str(model.dtype).removeprefix("torch."), "device": device.type}
    for name, value in loaded.items():  # `LLM` has loaded the model with these options; other callers may not have
        if (wanted := getattr(config, name)) not in ("auto", value):
            raise ConfigError(
                f"the model is loaded in {loaded['dtype']} on {loaded['device']}; the engine cannot run it with "
                f"{name}={wanted!r}: leave it out, or load the model again"
            )
    if config.quantization and not getattr(model.config, "formats", None):
        raise ConfigError(
            f"the model is loaded without quantization; the engine cannot run it with quantization="
            f"{config.quantization!r}: leave it out, or load the model again"
        )
    if config.sparse_attention_config and all(spec.key_budget is None for spec in specs):
        raise ConfigError(
            f"sparse_attention_config changes none of the {len(specs)} layers: those with a window attend to all keys "
            "in it, and the first num_dense_layers attend to all keys; leave it out, or lower num_dense_layers"
        )
    length = longest if config.max_model_len is None else config.max_model_len
    if not 2 <= length <= longest:
        raise ConfigError(f"max_model_len is {length}; this model takes 2 to {longest} tokens")
    # A step must be able to decode every request.
    step_tokens, requests = config.max_num_batched_tokens, config.max_batch_size
    batch_size = requests or min(BATCH_SIZES[device.type], step_tokens or STEP_TOKENS[device.type])
    step_tokens = step_tokens or max(STEP_TOKENS[device.type], batch_size)
    name, why = config.attn_backend, ""
    if config.batch_invariant:
        if on_gpu and getattr(model.config, "formats", None):
            raise ConfigError("batch_invariant needs weights that are not quantized on a GPU: leave one of them out")
        if on_gpu and config.persistent_decode:
            raise ConfigError("the persistent kernel is not batch-invariant: leave out persistent_decode")
        if name not in ("auto", "batch_invariant"):
            raise ConfigError(f"batch_invariant has an attention backend of its own: leave out attn_backend={name!r}")
        name = "batch_invariant"
    if name == "auto":
        name, why = choose_backend(specs, config.page_size, config.kv_layout, model.dtype, device)
    page_size = config.page_size or BACKENDS[name].on(device.type).page_size
    groups = groups_of(config, model)
    _check_bookkeeping(batch_size, length, page_size, config.num_pages, len(groups))
    num_pages = config.num_pages
    if num_pages is None:
        most, stored = batch_size * -(-length // page_size), stored_specs(specs, groups)
        num_pages = default_num_pages(stored, page_size, model.dtype, device, most, config.gpu_memory_utilization)
    captures = pkgutil.resolve_name(BACKENDS[name].on(device.type).path).captures
    sizes = graph_sizes(replace(config, attn_backend=name, max_batch_size=batch_size), device, captures)
    persistent = config.persistent_decode
    if persistent is None:
        cache = PlannedCache(page_size, config.kv_layout, model.dtype, device)
        persistent = 1 in sizes and not config.batch_invariant and _may_persist(model, specs, cache)
    resolved = {
        "attn_backend": name,
        "max_batch_size": batch_size,
        "max_model_len": length,
        "num_pages": num_pages,
        "page_size": page_size,
        "max_num_batched_tokens": step_tokens,
        "sliding_window": None if config.sliding_window is None else min(config.sliding_window, length),
        "pipeline_depth": int(on_gpu) if config.pipeline_depth is None else config.pipeline_depth,
        "warm_up": on_gpu if config.warm_up is None else config.warm_up,
        "cuda_graph_batch_sizes": sizes,
        "persistent_decode": persistent,
        "max_overtakes": config.max_overtakes,
    }
    if config.max_overtakes is None:
        resolved["max_overtakes"] = DEFAULT_OVERTAKES[config.scheduling_policy]
    if why:
        _show_logs()
        logger.log(
            logging.INFO if on_gpu else logging.DEBUG,
            "attention backend %s (%s); pages of %d tokens, up to %d requests and %d tokens in a step%s",
            name, why, page_size, batch_size, step_tokens, ", persistent decode kernel" if persistent else "",
        )  # fmt: skip
    return ResolvedConfig(**{field.name: getattr(config, field.name) for field in fields(EngineConfig)} | resolved)


def measured_pages(
    config: ResolvedConfig, models: Sequence[LanguageModel], run_longest: Callable[[ResolvedConfig], None]
) -> int:
    """Return the number of pages that fit on the GPU beside the weights and all that a step needs.

    Args:
        config: the options; `num_pages` is the most that can be used.
        models: the model, on a GPU, and a draft model, whose cache has as many pages.
        run_longest: given the options with few pages and no CUDA graphs, whose memory is small, runs a step of
            `max_num_batched_tokens` tokens and `max_batch_size` requests, and frees what it has allocated.

    Raises:
        ConfigError: if there is no room for a single page.
    """
    device = models[0].device
    main, *drafts = models
    of_page = page_bytes(stored_specs(specs_of(config, main), groups_of(config, main)), config.page_size, main.dtype)
    of_page += sum(page_bytes(specs_of(config, draft), config.page_size, draft.dtype) for draft in drafts)
    few = -(-config.max_num_batched_tokens // config.page_size) + config.max_batch_size  # pages of the longest step
    trial = replace(config, num_pages=min(few, config.num_pages), cuda_graph_batch_sizes=(), persistent_decode=False)
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    run_longest(trial)
    free, total = torch.cuda.mem_get_info(device)
    outside = total - free - torch.cuda.memory_reserved(device)  # CUDA's context, loaded kernels, other programs
    step = torch.cuda.max_memory_reserved(device) - (trial.num_pages + 1) * of_page  # a page holds the padding
    room = int(config.gpu_memory_utilization * total) - outside - step - of_page
    if room < of_page:
        raise ConfigError(
            f"weights and a step of {config.max_num_batched_tokens} tokens leave no room for the KV cache; lower "
            "max_num_batched_tokens or max_batch_size, or raise gpu_memory_utilization"
        )
    return min(config.num_pages, room // of_page)


def specs_of(config: EngineConfig, model: LanguageModel) -> tuple[AttentionSpec, ...]:
    """Return the model's layers with the options applied: sliding window, dtype of the cache, and budget of keys."""
    specs, window = model.attention_specs, config.sliding_window
    if config.kv_cache_dtype == "fp8_e4m3":
        scales = model.kv_scales
        specs = tuple(replace(s, kv_dtype=torch.float8_e4m3fn, kv_scales=scales.get(s.layer)) for s in specs)
    if window is not None:
        specs = tuple(replace(spec, window=min(window, spec.window or window)) for spec in specs)
    if sparse := config.sparse_attention_config:
        dense = [spec.layer < sparse.num_dense_layers or spec.window is not None for spec in specs]
        budgets = (None if is_dense else sparse.budget for is_dense in dense)
        specs = tuple(replace(spec, key_budget=budget) for spec, budget in zip(specs, budgets, strict=True))
    return specs


def groups_of(config: EngineConfig, model: LanguageModel) -> tuple[LayerGroup, ...]:
    """Return the groups of the model's layers that have page tables of their own."""
    specs = specs_of(config, model)
    if config.disable_hybrid_kv_cache_manager:
        return one_group(specs)
    return layer_groups(specs, config.max_model_len or model.config.max_position_embeddings)


def pick_device(name: str) -> torch.device:
    """Return the device of that name. Raises ConfigError if this machine does not have it."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if name == "cuda" and not torch.cuda.is_available():
        raise ConfigError("device is 'cuda' but PyTorch sees no GPU here; use device='cpu'")
    return torch.device(name)


def pick_dtype(name: str, device: torch.device, checkpoint_dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of that name; "auto" is the checkpoint's where the device computes in it natively."""
    if name != "auto":
        return getattr(torch, name)
    slow = device.type == "cpu" and checkpoint_dtype != torch.float32 and not torch.cpu._is_avx512_bf16_supported()
    return torch.float32 if slow else checkpoint_dtype


def _check_bookkeeping(batch_size: int, length: int, page_size: int, num_pages: int | None, num_groups: int) -> None:
    """Raise ConfigError if the host cannot hold the tokens and pages of each request, and three numbers per page."""
    needed = 4 * batch_size * (length + num_groups * -(-length // page_size)) + 16 * num_groups * (num_pages or 0)
    if needed > free_memory(torch.device("cpu")):
        raise ConfigError(
            f"max_batch_size={batch_size} and num_pages={num_pages} need {needed} bytes of bookkeeping, more than this "
            "machine has free; lower them"
        )


def _may_persist(model: LanguageModel, specs: Sequence[AttentionSpec], cache: PlannedCache) -> bool:
    """Return whether the persistent kernel can take the place of the model, none of whose parts has been replaced."""
    return (
        PersistentDecode.accepts(model, specs, cache)
        and has_nvcc()
        and all(getattr(part, "__module__", "").startswith("mini_engine.") for part in vars(model.parts).values())
    )


def _show_logs() -> None:
    """Write the engine's log to standard error if the program has configured no logging, as vLLM does."""
    if not logger.hasHandlers():
        logging.getLogger("mini_engine").addHandler(logging.StreamHandler())
        logging.getLogger("mini_engine").setLevel(logging.INFO)
