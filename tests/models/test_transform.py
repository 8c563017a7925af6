"""Weights are transformed once, after loading, and a model's identity is that of its checkpoint."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from mini_engine import ops
from mini_engine.attention.backend import create_backend
from mini_engine.attention.torch import TorchBackend
from mini_engine.chunks import ChunkMemory
from mini_engine.kv_cache.paged import PagedKVCache
from mini_engine.models.base import LanguageModel
from mini_engine.models.llama import LlamaLayer, PreNormLayer, decoder_layer
from mini_engine.models.transform import bind_layers, has_fused_layers, identity_of, prepare_weights
from mini_engine.parts import Parts
from tests.helpers import make_engine
from tests.models.families import FAMILIES, ListAttend, our_model, transformers_model

TOKENS = [5, 9, 33, 4, 60]


class StubFusedLayer:
    """In place of the kernels: the layer as its parts compute it."""

    def __init__(self, model: LanguageModel) -> None:
        self.num_calls = 0

    def __call__(self, layer: PreNormLayer, *args: object) -> torch.Tensor:
        self.num_calls += 1
        assert (layer.input_norm == 1).all() and (layer.mlp_norm == 1).all()
        return decoder_layer(layer, *args)


@pytest.fixture
def on_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the rules choose as they do on a GPU with FlashInfer, where the layer of `StubFusedLayer` runs."""
    monkeypatch.setattr(ops, "has_layer_kernels", lambda device: True)
    monkeypatch.setattr(ops, "layer_parts", lambda device: {"rms_norm": Parts().rms_norm})
    monkeypatch.setattr(ops, "FUSED_LAYER", f"{__name__}:StubFusedLayer")
    monkeypatch.setattr(ops, "load", lambda path: StubFusedLayer)
    monkeypatch.setattr(TorchBackend, "takes_stored_keys", True)


def bfloat16_model(family: str = "llama", parts: Parts | None = None) -> LanguageModel:
    return our_model(transformers_model(family, seed=2, dtype=torch.bfloat16), parts=parts)


def backend_of(model: LanguageModel, kv_dtype: torch.dtype | None = None, name: str = "torch") -> TorchBackend:
    specs = [replace(spec, kv_dtype=kv_dtype) for spec in model.attention_specs]
    cache = PagedKVCache(specs, 4, 16, model.dtype, "cpu")
    return create_backend(name, specs, cache, Parts(), up_projections=model.up_projections)


@pytest.mark.usefixtures("on_gpu")
@pytest.mark.parametrize("family", ["llama", "qwen3", "qwen3_moe"])
def test_the_fused_layer_runs_where_it_computes_the_same(family: str) -> None:
    model, exact = bfloat16_model(family), bfloat16_model(family)
    forward = bind_layers(model, backend_of(model))
    stub = forward.keywords["compute"]
    assert isinstance(stub, StubFusedLayer)
    naive = ListAttend(model.attention_specs)
    naive.step = [(0, 0, len(TOKENS))]
    ids, positions = torch.tensor(TOKENS), torch.arange(len(TOKENS))
    with torch.inference_mode():
        got = forward(ids, positions, attend=naive)
        assert stub.num_calls == len(model.layers)
        naive = ListAttend(model.attention_specs)
        naive.step = [(0, 0, len(TOKENS))]
        want = exact(ids, positions, naive)
    torch.testing.assert_close(got.float(), want.float(), atol=0.1, rtol=0.1)  # each weight is rounded again


@pytest.mark.usefixtures("on_gpu")
@pytest.mark.parametrize("family", FAMILIES)
def test_no_other_layer_is_fused_or_folded(family: str) -> None:
    parts = {name: replace(Parts(), **{name: lambda *args: args[0]}) for name in ("decoder_layer", "rms_norm")}
    others = [our_model(transformers_model(family, seed=2)), *(bfloat16_model(family, own) for own in parts.values())]
    others += [] if family in ("llama", "qwen3", "qwen3_moe") else [bfloat16_model(family)]
    if family not in ("gpt2", "deepseek_v2"):  # the first has biases anyway, the second has none
        others.append(our_model(transformers_model(family, dtype=torch.bfloat16, attention_bias=True)))
    for model in others:
        before = {name: weight.clone() for name, weight in model.state_dict().items()}
        assert "compute" not in bind_layers(model, backend_of(model)).keywords and not has_fused_layers(model)
        assert all(torch.equal(weight, before[name]) for name, weight in model.state_dict().items())


@pytest.mark.usefixtures("on_gpu")
def test_a_layer_of_a_class_of_its_own_is_not_fused() -> None:
    model = bfloat16_model()
    model.layers[1].__class__ = type("OtherLayer", (LlamaLayer,), {})
    assert "compute" not in bind_layers(model, backend_of(model)).keywords


@pytest.mark.usefixtures("on_gpu")
def test_a_backend_that_cannot_take_stored_keys_gets_them_from_the_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    """The weights are folded all the same, and engines with different backends share the model."""
    model = bfloat16_model()
    for kv_dtype in (None, torch.float8_e4m3fn):
        assert "compute" in bind_layers(model, backend_of(model, kv_dtype)).keywords
    monkeypatch.setattr(TorchBackend, "takes_stored_keys", False)
    assert "compute" not in bind_layers(model, backend_of(model)).keywords


@pytest.mark.usefixtures("on_gpu")
def test_the_identity_is_that_of_the_checkpoint() -> None:
    theirs = transformers_model("llama", seed=2, dtype=torch.bfloat16)
    model = our_model(theirs)
    want = identity_of(model)
    for _ in range(2):  # the second call does nothing
        prepare_weights(model)
        assert model.identity == want != identity_of(model)
    model.load_weights(theirs.state_dict())
    prepare_weights(model)
    assert model.identity == want


def test_a_chunk_belongs_to_the_checkpoint_whatever_became_of_its_weights(tmp_path: Path) -> None:
    """A step folds the norms, as if on a GPU. A chunk that was saved after it loads before the first step."""

    def folding(layer: LlamaLayer, *args: object) -> torch.Tensor:
        layer.fold_norms()
        return decoder_layer(layer, *args)

    for is_first in (True, False):
        model = our_model(transformers_model("llama", seed=2), parts=replace(Parts(), decoder_layer=folding))
        memory = ChunkMemory(make_engine(model, attn_backend="cascade", num_pages=8))
        if is_first:
            memory.register(TOKENS, "a")
            memory.save("a", tmp_path / "chunk.safetensors")
        else:
            memory.load(tmp_path / "chunk.safetensors")


PROCESS = """
import sys
from mini_engine import LLM
from mini_engine.chunks import ChunkMemory
from mini_engine.models.transform import has_fused_layers

folder, file, action = sys.argv[1:]
llm = LLM(folder, dtype="bfloat16", device="cuda", attn_backend="cascade", num_pages=64, page_size=16)
assert has_fused_layers(llm.model)
memory = ChunkMemory(llm.engine)
if action == "save":
    memory.register(list(range(5, 25)), "a")
    memory.save("a", file)
else:
    memory.load(file)
"""


@pytest.mark.gpu
def test_a_chunk_that_a_gpu_saved_loads_in_a_fresh_process(tmp_path: Path) -> None:
    pytest.importorskip("flashinfer")
    theirs = transformers_model("llama", seed=2, dtype=torch.bfloat16, head_dim=64, hidden_size=64)
    theirs.save_pretrained(tmp_path / "model")
    for action in ("save", "load"):
        arguments = [str(tmp_path / "model"), str(tmp_path / "chunk.safetensors"), action]
        subprocess.run([sys.executable, "-c", PROCESS, *arguments], check=True)
