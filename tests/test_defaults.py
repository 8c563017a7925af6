"""What `attn_backend="auto"` chooses, and the defaults that follow from it. A GPU is simulated where none is needed."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace
from typing import Any

import pytest
import torch

from mini_engine.attention import backend as backend_module
from mini_engine.attention.backend import BACKENDS, DEEPSEEK_V2, choose_backend
from mini_engine.attention.spec import AttentionSpec
from mini_engine.bench.host import StubModel
from mini_engine.config import EngineConfig, ResolvedConfig
from mini_engine.defaults import measured_pages, resolve
from mini_engine.errors import ConfigError
from mini_engine.models.config import ModelLimits
from tests.helpers import double_model

GPU, CPU = torch.device("cuda"), torch.device("cpu")
QWEN3 = AttentionSpec(0, num_qo_heads=16, num_kv_heads=8, head_dim=128, scale=128**-0.5)
WINDOW = replace(QWEN3, layer=1, window=512)
GEMMA2 = replace(QWEN3, head_dim=256, softcap=50.0)
LATENT = replace(QWEN3, num_kv_heads=16, head_dim=192, mla=DEEPSEEK_V2)
BF16 = torch.bfloat16
GIB = 2**30


@dataclass
class Machine:
    """A simulated GPU, and what is installed beside it."""

    architecture: int = 9
    packages: tuple[str, ...] = ("flashinfer", "triton")
    has_nvcc: bool = True


@pytest.fixture
def on(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[Machine], None]]:
    def simulate(machine: Machine) -> None:
        monkeypatch.setattr(backend_module, "find_spec", lambda name: name if name in machine.packages else None)
        monkeypatch.setattr(backend_module, "has_nvcc", lambda: machine.has_nvcc)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (machine.architecture, 0))
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device=None: (60 * GIB, 80 * GIB))
        monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device=None: 0)
        monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device=None: 0)

    yield simulate


@pytest.mark.parametrize(
    ("machine", "specs", "options", "name"),
    [
        (Machine(), [QWEN3], {}, "flash_decoding+cascade"),
        (Machine(), [QWEN3, WINDOW], {}, "flash_decoding+cascade"),
        (Machine(), [replace(QWEN3, num_kv_heads=1)], {}, "cascade"),  # 16 query heads for a KV head
        (Machine(), [GEMMA2], {}, "flash_decoding+cascade"),
        (Machine(), [replace(QWEN3, kv_dtype=torch.float8_e4m3fn)], {}, "flash_decoding+cascade"),
        (Machine(), [QWEN3], {"page_size": 8}, "cascade"),
        (Machine(), [QWEN3], {"layout": "HND"}, "flash_decoding+cascade"),
        (Machine(has_nvcc=False), [QWEN3], {}, "cascade"),
        (Machine(architecture=8), [QWEN3], {}, "cascade"),
        (Machine(architecture=10), [QWEN3], {}, "cascade"),
        (Machine(packages=("triton",)), [QWEN3], {}, "flex"),
        (Machine(), [QWEN3], {"dtype": torch.float32}, "flex"),
        (Machine(), [replace(QWEN3, head_dim=96)], {}, "flex"),
        (Machine(), [LATENT], {}, "flashinfer_mla"),
        (Machine(architecture=8, has_nvcc=False), [LATENT], {}, "flashinfer_mla"),
        (Machine(packages=("triton",)), [LATENT], {}, "torch"),
        (Machine(), [LATENT], {"dtype": torch.float32}, "torch"),
        (Machine(), [LATENT], {"device": CPU}, "torch_padded"),
        (Machine(packages=()), [QWEN3], {}, "torch"),
        (Machine(), [QWEN3], {"dtype": torch.float32, "page_size": 16}, "torch"),
        (Machine(), [QWEN3], {"device": CPU}, "torch_padded"),
    ],
    ids=str,
)
def test_auto_chooses_the_first_backend_that_accepts_the_model(
    on: Callable[[Machine], None], machine: Machine, specs: list[AttentionSpec], options: dict[str, Any], name: str
) -> None:
    on(machine)
    given = {"page_size": None, "layout": "NHD", "dtype": BF16, "device": GPU} | options
    chosen, why = choose_backend(specs, **given)
    assert chosen == name and why


def test_options_that_no_backend_accepts_are_refused_with_the_reason_of_each(on: Callable[[Machine], None]) -> None:
    on(Machine(packages=()))
    with pytest.raises(ConfigError, match=r"flashinfer.*layout"):
        choose_backend([QWEN3], None, "HND", BF16, GPU)


class ModelOn(StubModel):
    """A model without weights that claims to be on a device."""

    config = ModelLimits(vocab_size=1000, max_position_embeddings=40_960)
    dtype = BF16
    device = CPU
    attention_specs = (QWEN3,) * 28

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.device = device


def resolved(device: torch.device, **options: Any) -> ResolvedConfig:
    return resolve(EngineConfig.of(options), ModelOn(device))


def test_defaults_on_a_gpu(on: Callable[[Machine], None], caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="mini_engine")
    on(Machine())
    config = resolved(GPU)
    assert (config.attn_backend, config.page_size) == ("flash_decoding+cascade", 16)
    assert (config.max_batch_size, config.max_num_batched_tokens, config.max_model_len) == (256, 16_384, 40_960)
    assert config.cuda_graph_batch_sizes[:4] == (1, 2, 4, 8) and config.cuda_graph_batch_sizes[-1] == 256
    assert config.warm_up and config.pipeline_depth == 1 and not config.persistent_decode  # not a Llama or Qwen3
    page = 28 * 16 * 2 * 8 * 128 * 2
    assert config.num_pages == (60 * GIB - 8 * GIB) // page  # nine tenths of all memory, less what is in use
    [record] = caplog.records
    assert "flash_decoding+cascade" in record.getMessage() and record.levelno == logging.INFO


def test_defaults_on_a_cpu() -> None:
    config = resolved(CPU)
    assert (config.attn_backend, config.page_size, config.max_batch_size) == ("torch_padded", 128, 32)
    assert (config.max_num_batched_tokens, config.pipeline_depth, config.cuda_graph_batch_sizes) == (2048, 0, ())
    assert not config.warm_up and not config.persistent_decode


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"max_batch_size": 20_000}, {"max_num_batched_tokens": 20_000}),
        ({"max_num_batched_tokens": 64}, {"max_batch_size": 64}),
        ({"enforce_eager": True}, {"cuda_graph_batch_sizes": (), "persistent_decode": False}),
        ({"cuda_graph_batch_sizes": [4]}, {"cuda_graph_batch_sizes": (4,)}),
        ({"attn_backend": "flex"}, {"page_size": 128, "cuda_graph_batch_sizes": ()}),
        ({"attn_backend": "cascade"}, {"page_size": 16}),
        ({"gpu_memory_utilization": 0.5}, {"num_pages": 20 * GIB // (28 * 16 * 2 * 8 * 128 * 2)}),
    ],
    ids=str,
)
def test_defaults_fit_the_options(
    on: Callable[[Machine], None], options: dict[str, Any], expected: dict[str, Any]
) -> None:
    on(Machine())
    config = resolved(GPU, **options)
    assert {name: getattr(config, name) for name in expected} == expected


def test_every_option_has_a_value_and_resolves_to_itself() -> None:
    model = double_model("llama")
    config = resolve(EngineConfig(), model)
    unset = {field.name for field in fields(config) if getattr(config, field.name) is None}
    assert unset == {"sliding_window", "seed", "quantization", "speculative_config", "sparse_attention_config"}
    assert resolve(config, model) == config


def test_pages_are_what_the_longest_step_leaves(on: Callable[[Machine], None], monkeypatch: pytest.MonkeyPatch) -> None:
    """A trial on few pages reserves 10 GiB beside them, and 2 GiB are in use outside PyTorch."""
    on(Machine())
    model, page = ModelOn(GPU), 28 * 16 * 2 * 8 * 128 * 2
    config, trials = replace(resolve(EngineConfig(), model), num_pages=10**6), []
    for name in ("empty_cache", "reset_peak_memory_stats"):
        monkeypatch.setattr(torch.cuda, name, lambda *_: None)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 18 * GIB)
    monkeypatch.setattr(torch.cuda, "max_memory_reserved", lambda device: 10 * GIB + (trials[-1].num_pages + 1) * page)
    pages = measured_pages(config, [model], trials.append)
    assert trials[0].num_pages == 16_384 // 16 + 256
    assert pages == (72 * GIB - 2 * GIB - 10 * GIB - page) // page
    with pytest.raises(ConfigError, match="gpu_memory_utilization"):
        measured_pages(replace(config, gpu_memory_utilization=0.1), [model], trials.append)


def test_every_composition_is_a_backend() -> None:
    """A name with `+cascade` has the kernels of the name before it, and levels."""
    composed = [name for name in BACKENDS if name.endswith("+cascade")]
    assert composed
    for name in composed:
        plain = BACKENDS[name.removesuffix("+cascade")]
        assert BACKENDS[name] == replace(plain, levels=True) and not plain.levels
