"""A mixture of experts: its router, its experts and its checkpoints. test_logits.py compares it with transformers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional as F

from mini_engine.errors import ConfigError, ModelLoadError
from mini_engine.loading.checkpoint import load_model, open_checkpoint
from mini_engine.models.batch_invariant import batch_invariant, linear_in_blocks
from mini_engine.models.config import ModelConfig, MoEConfig
from mini_engine.models.llama import LlamaLayer
from mini_engine.models.moe import MoE, MoELayer, grouped_linear, mix_experts, route
from mini_engine.parts import Parts
from tests.models.families import our_model, transformers_config, transformers_model, whole

HIDDEN, SIZE = 12, 10


def config(num_experts: int = 6, k: int = 2, normalize: bool = True, scale: float = 1.0) -> MoEConfig:
    return MoEConfig(num_experts, k, SIZE, normalize, scale, frozenset())


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def matrices(num_experts: int) -> tuple[Tensor, Tensor]:
    return random(num_experts, 2 * SIZE, HIDDEN, seed=1), random(num_experts, HIDDEN, SIZE, seed=2)


def one_by_one(x: Tensor, logits: Tensor, gate_up: Tensor, down: Tensor, moe: MoEConfig) -> Tensor:
    """The definition: for each token the weighted sum of the MLPs of its experts."""
    out = torch.zeros_like(x)
    for token in range(len(x)):
        probabilities = logits[token].softmax(0)
        chosen = probabilities.topk(moe.num_experts_per_tok)
        total = chosen.values.sum() if moe.norm_topk_prob else 1
        for probability, expert in zip(*chosen, strict=True):
            gate, up = (gate_up[expert] @ x[token]).chunk(2)
            mlp = down[expert] @ (F.silu(gate) * up)
            out[token] += moe.routed_scaling_factor * probability / total * mlp
    return out


SIZES = st.integers(1, 9).flatmap(lambda n: st.tuples(st.just(n), st.integers(1, n)))


@settings(max_examples=60)
@given(SIZES, st.integers(0, 20), st.booleans(), st.sampled_from([1.0, 2.5]), st.integers(0, 99))
def test_the_experts_are_mixed_as_defined(sizes, num_tokens, normalize, scale, seed):
    moe = config(*sizes, normalize, scale)
    x, logits = random(num_tokens, HIDDEN, seed=seed), random(num_tokens, sizes[0], seed=seed + 1)
    got = mix_experts(x, logits, *matrices(sizes[0]), moe, F.silu)
    torch.testing.assert_close(got, one_by_one(x, logits, *matrices(sizes[0]), moe), rtol=0, atol=1e-10)


@settings(max_examples=60)
@given(st.permutations(range(14)), st.integers(0, 99))
def test_permuted_tokens_have_permuted_outputs(order, seed):
    x, logits, moe = random(14, HIDDEN, seed=seed), random(14, 6, seed=seed + 1), config()
    together = mix_experts(x, logits, *matrices(6), moe, F.silu)
    permuted = mix_experts(x[order], logits[order], *matrices(6), moe, F.silu)
    torch.testing.assert_close(permuted, together[order], rtol=0, atol=1e-12)


def test_all_tokens_may_have_the_same_expert() -> None:
    x, logits, (gate_up, down) = random(9, HIDDEN), torch.zeros(9, 6, dtype=torch.float64), matrices(6)
    logits[:, 4] = 1
    gate, up = F.linear(x, gate_up[4]).chunk(2, dim=1)
    want = F.linear(F.silu(gate) * up, down[4])
    torch.testing.assert_close(mix_experts(x, logits, gate_up, down, config(k=1), F.silu), want, rtol=0, atol=1e-10)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_of_equal_logits_the_first_experts_are_chosen(dtype: torch.dtype) -> None:
    logits = torch.tensor([[0, 2, 1, 2, 1, 1], [0, 0, 0, 0, 0, 0]], dtype=dtype)
    weights, experts = route(logits, config(k=3))
    assert experts.tolist() == [[1, 3, 2], [0, 1, 2]]
    assert weights.dtype == torch.promote_types(dtype, torch.float32)
    torch.testing.assert_close(weights.sum(1), torch.ones(2, dtype=weights.dtype))


def test_the_outputs_have_the_dtype_of_the_tokens() -> None:
    x, logits, stored = random(5, HIDDEN), random(5, 6, seed=3), matrices(6)
    want = mix_experts(x, logits, *stored, config(), F.silu)
    narrow = [own.bfloat16() for own in (x, logits, *stored)]
    got = mix_experts(*narrow, config(), F.silu)
    assert got.dtype == torch.bfloat16
    assert (got.double() - want).norm() < 0.02 * want.norm()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_blocks_make_each_token_independent_of_the_others(dtype: torch.dtype) -> None:
    x, logits, *stored = (own.to(dtype) for own in (random(40, HIDDEN), random(40, 6, seed=3), *matrices(6)))
    together = mix_experts(x, logits, *stored, config(), F.silu, linear_in_blocks)
    for i in range(40):
        alone = mix_experts(x[i : i + 1], logits[i : i + 1], *stored, config(), F.silu, linear_in_blocks)
        torch.testing.assert_close(alone[0], together[i], rtol=0, atol=1e-5 if dtype == torch.float32 else 1e-2)
        assert torch.equal(
            grouped_linear(x[i : i + 1], stored[0][:1], torch.tensor([1]), linear_in_blocks)[0],
            grouped_linear(x, stored[0][:1], torch.tensor([40]), linear_in_blocks)[i],
        )


# --- models ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "sparse"),
    [
        ({"mlp_only_layers": []}, [0, 1, 2]),
        ({"mlp_only_layers": [0, 2]}, [1]),
        ({"mlp_only_layers": [], "decoder_sparse_step": 2}, [1]),
        ({"mlp_only_layers": [2], "decoder_sparse_step": 3}, []),
    ],
)
def test_layers_are_sparse_as_the_configuration_says(changes: dict[str, Any], sparse: list[int]) -> None:
    model = our_model(transformers_model("qwen3_moe", **changes))
    kinds = [isinstance(layer, MoELayer) for layer in model.layers]
    assert [index for index, is_sparse in enumerate(kinds) if is_sparse] == sparse
    assert all(is_sparse or isinstance(layer, LlamaLayer) for layer, is_sparse in zip(model.layers, kinds, strict=True))


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"num_experts": 0}, "num_experts = 0: it must be a whole number"),
        ({"num_experts_per_tok": 9}, "num_experts_per_tok = 9: a token cannot have more than all 8"),
        ({"norm_topk_prob": "yes"}, "norm_topk_prob = 'yes': it must be true or false"),
        ({"decoder_sparse_step": 0}, "decoder_sparse_step = 0"),
        ({"mlp_only_layers": "all"}, "mlp_only_layers = 'all': it must be a list of layers"),
        ({"moe_intermediate_size": None}, "moe_intermediate_size = None"),
    ],
)
def test_impossible_experts_are_refused(changes: dict[str, Any], problem: str) -> None:
    hf = transformers_config("qwen3_moe").to_dict() | {"num_experts": 8}
    with pytest.raises(ModelLoadError, match=problem.replace("(", r"\(")):
        ModelConfig.from_hf(hf | changes)


def test_published_and_stacked_checkpoints_are_the_same_model() -> None:
    """The published files have a tensor for each matrix of each expert; transformers 5 stacks them in memory."""
    theirs = transformers_model("qwen3_moe")
    stacked = theirs.state_dict()
    single = {name: tensor for name, tensor in stacked.items() if ".experts." not in name}
    for name in stacked.keys() - single.keys():
        prefix, kind = name.rsplit(".", 1)
        for expert, matrix in enumerate(stacked[name]):
            names = ("gate_proj", "up_proj") if kind == "gate_up_proj" else ("down_proj",)
            for own, part in zip(names, matrix.chunk(len(names)), strict=True):
                single[f"{prefix}.{expert}.{own}.weight"] = part
    assert len(single) > len(stacked)
    (ours,), (other,) = (whole(our_model(theirs, tensors), [[5, 9, 33, 4]]) for tensors in (stacked, single))
    assert torch.equal(ours, other)
    missing = dict(single)
    del missing["model.layers.2.mlp.experts.5.up_proj.weight"]
    with pytest.raises(ModelLoadError, match=r"no tensor 'model.layers.2.mlp.experts.5.up_proj.weight'"):
        our_model(theirs, missing)


def test_a_folder_that_transformers_has_saved_is_read(tmp_path) -> None:
    theirs = transformers_model("qwen3_moe")
    theirs.save_pretrained(tmp_path)
    model = load_model(open_checkpoint(tmp_path), Parts(), torch.float32)
    assert torch.equal(*(whole(own, [[5, 9, 33, 4]])[0] for own in (model, our_model(theirs))))
    with pytest.raises(ModelLoadError, match="mixture of experts, whose weights this engine does not quantize"):
        load_model(open_checkpoint(tmp_path), Parts(), torch.float32, quantization="int8")


def test_batch_invariance_of_a_gpu_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = our_model(transformers_model("qwen3_moe"))
    monkeypatch.setattr(type(model), "device", torch.device("cuda"))
    with pytest.raises(ConfigError, match="does not compute mixtures of experts"):
        batch_invariant(model)


def test_each_matrix_of_a_checkpoint_is_copied_into_the_stacked_weights() -> None:
    block = our_model(transformers_model("qwen3_moe")).layers[0].mlp
    assert isinstance(block, MoE)
    up, size = block.destinations()["experts.3.up_proj.weight"], block.moe.moe_intermediate_size
    assert isinstance(up, Tensor) and up.data_ptr() == block.gate_up[3, size].data_ptr()
