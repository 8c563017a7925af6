"""FLOPs against PyTorch's own counter, bytes against the tensors of a layer that really runs."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.flop_counter import FlopCounterMode

from mini_engine.attention.naive import attention_mask, masked_attention
from mini_engine.models.config import MoEConfig
from mini_engine.models.moe import mix_experts
from mini_engine.roofline import (
    Cost,
    Machine,
    ModelShape,
    attention_cost,
    decoder_layer_costs,
    device_name,
    expert_costs,
    experts_touched,
    linear_cost,
    measure_machine,
    model_step_cost,
    norm_cost,
    short_name,
    visible_pairs,
)

SHAPE = ModelShape(
    hidden_size=32, num_layers=3, num_qo_heads=6, num_kv_heads=2, head_dim=8, intermediate_size=48, vocab_size=100
)
SPARSE = replace(SHAPE, num_experts=6, experts_per_token=2, expert_size=10, sparse_layers=2)


def counted_flops(run) -> int:
    with FlopCounterMode(display=False) as counter:
        run()
    return counter.get_total_flops()


@given(tokens=st.integers(1, 5), inputs=st.integers(1, 5), outputs=st.integers(1, 5))
def test_linear(tokens: int, inputs: int, outputs: int) -> None:
    x, weight = torch.ones(tokens, inputs), torch.ones(outputs, inputs)
    cost = linear_cost(tokens, inputs, outputs, x.itemsize)
    assert cost.flops == counted_flops(lambda: F.linear(x, weight))
    assert cost.bytes == x.nbytes + weight.nbytes + F.linear(x, weight).nbytes


@given(n=st.integers(2, 6), m=st.integers(2, 6), num_kv_heads=st.integers(1, 3), group=st.integers(1, 3))
def test_attention_without_a_mask(n: int, m: int, num_kv_heads: int, group: int) -> None:
    q, k = torch.ones(n, num_kv_heads * group, 4), torch.ones(m, num_kv_heads, 4)
    cost = attention_cost(n, m, num_kv_heads * group, num_kv_heads, 4, q.itemsize, causal=False)
    assert cost.flops == counted_flops(lambda: masked_attention(q, k, k, scale=1.0))
    assert cost.bytes == q.nbytes + k.nbytes + k.nbytes + q.nbytes


@given(m=st.integers(1, 12), n=st.integers(1, 12), window=st.one_of(st.none(), st.integers(1, 14)))
def test_visible_pairs_are_counted_in_the_mask(m: int, n: int, window: int | None) -> None:
    n = min(n, m)
    mask = attention_mask(torch.arange(m - n, m), torch.arange(m), window)
    assert visible_pairs(n, m, window=window) == mask.sum()
    assert visible_pairs(n, m, causal=False) == mask.numel()
    cost = attention_cost(n, m, 2, 1, 4, 2, window=window)
    assert cost.flops == 4 * 4 * 2 * mask.sum()
    keys_read = mask.any(dim=0).sum()
    assert cost.bytes == 2 * (2 * n * 2 * 4 + 2 * int(keys_read) * 1 * 4)


def test_materialized_attention_moves_every_score_four_times() -> None:
    fused = attention_cost(3, 5, 2, 1, 4, 2, causal=False)
    naive = attention_cost(3, 5, 2, 1, 4, 2, materialized=True)
    assert naive.flops == fused.flops
    assert naive.bytes - fused.bytes == 4 * (3 * 5 * 2) * 4


def test_bytes_of_norm_and_rope_are_those_of_their_tensors() -> None:
    x, weight, tables = torch.ones(5, 6, 8), torch.ones(48), torch.ones(2, 5, 4)
    assert norm_cost(5, 48, 4).bytes == 2 * x.nbytes + weight.nbytes
    shape = ModelShape(48, 1, 4, 2, 8, 1, 1)  # 6 heads are rotated
    assert decoder_layer_costs(shape, 5, 5, 4)["rope"] == Cost(3 * x.numel(), 2 * x.nbytes + tables.nbytes)


@pytest.mark.parametrize(("num_tokens", "kv_len", "batch_size"), [(5, 5, 1), (1, 9, 1), (1, 9, 4), (3, 9, 2)])
def test_a_layer_s_matrix_products_are_counted_as_pytorch_counts_them(
    num_tokens: int, kv_len: int, batch_size: int
) -> None:
    costs = decoder_layer_costs(SHAPE, num_tokens, kv_len, 4, batch_size)
    tokens = batch_size * num_tokens

    def layer() -> None:
        x = torch.ones(tokens, 32)
        q = F.linear(x, torch.ones(80, 32))[:, :48]
        keys = torch.ones(kv_len, 2, 8)
        for row in range(batch_size):
            queries = q[row * num_tokens : (row + 1) * num_tokens].unflatten(1, (6, 8))
            masked_attention(queries, keys, keys, scale=1.0)
        F.linear(q, torch.ones(32, 48))
        gate_up = F.linear(x, torch.ones(96, 32))
        F.linear(gate_up[:, :48], torch.ones(32, 48))

    full_attention = attention_cost(num_tokens, kv_len, 6, 2, 8, 4, causal=False) * batch_size
    products = [costs[name] for name in ("qkv_proj", "o_proj", "gate_up_proj", "down_proj")]
    assert sum(cost.flops for cost in [*products, full_attention]) == counted_flops(layer)


def test_a_decode_batch_shares_the_weights_and_not_the_keys() -> None:
    one, many = (decoder_layer_costs(SHAPE, 1, 100, 2, batch_size) for batch_size in (1, 8))
    assert many["attention"] == one["attention"] * 8
    weight_bytes = 80 * 32 * 2
    assert many["qkv_proj"].bytes - weight_bytes == 8 * (one["qkv_proj"].bytes - weight_bytes)
    assert many["qkv_proj"].flops == 8 * one["qkv_proj"].flops


def test_a_step_is_its_layers_and_both_ends() -> None:
    step = model_step_cost(SHAPE, 1, 10, 2, batch_size=2)
    layer = decoder_layer_costs(SHAPE, 1, 10, 2, batch_size=2)
    head = linear_cost(2, 32, 100, 2)
    assert step.flops == 3 * sum(cost.flops for cost in layer.values()) + norm_cost(2, 32, 2).flops + head.flops
    embedding_bytes = 2 * 2 * 32 * 2
    expected = 3 * sum(cost.bytes for cost in layer.values()) + norm_cost(2, 32, 2).bytes + head.bytes
    assert step.bytes == expected + embedding_bytes


def test_an_mlp_without_a_gate_has_one_projection_less() -> None:
    costs = decoder_layer_costs(replace(SHAPE, gated=False), 1, 10, 2)
    assert costs["gate_up_proj"] == linear_cost(1, 32, 48, 2)


def test_layers_with_a_window_read_the_keys_in_it() -> None:
    shape = replace(SHAPE, window=4, windowed_layers=2)
    some, all_of_it, none = (
        model_step_cost(own, 1, 100, 2) for own in (shape, replace(shape, windowed_layers=3), SHAPE)
    )
    assert all_of_it.bytes < some.bytes < none.bytes
    key_bytes = 2 * 2 * 8 * 2  # keys and values, KV heads, head size, bytes of a number
    assert none.bytes - some.bytes == 2 * (100 - 4) * key_bytes
    assert model_step_cost(shape, 1, 4, 2) == model_step_cost(SHAPE, 1, 4, 2)


@pytest.mark.parametrize("num_tokens", [1, 3, 20])
def test_experts_touched_are_those_of_a_simulation(num_tokens: int) -> None:
    generator = torch.Generator().manual_seed(num_tokens)
    chosen = torch.rand(4000, num_tokens, 16, generator=generator).topk(3).indices
    touched = torch.zeros(4000, 16).scatter_(1, chosen.flatten(1), 1.0).sum(1)
    assert experts_touched(16, 3, num_tokens) == pytest.approx(touched.mean().item(), abs=0.1)
    assert experts_touched(16, 3, 0) == 0 and experts_touched(16, 3, 1) == pytest.approx(3)


def test_a_sparse_layer_computes_with_the_experts_of_each_token() -> None:
    moe = MoEConfig(6, 2, 10, True, 1.0, frozenset())
    x, gate_up, down = (torch.randn(shape) for shape in [(7, 32), (6, 20, 32), (6, 32, 10)])
    # Each expert has several tokens or none: the counter does not count the product of a matrix and a single vector.
    logits = torch.zeros(7, 6)
    logits[:4, :2] = logits[4:, 2:4] = 1
    with FlopCounterMode(display=False) as counter:
        mix_experts(x, logits, gate_up, down, moe, F.silu)
    costs = expert_costs(SPARSE, 7, 4)
    assert counter.get_total_flops() == costs["gate_up_proj"].flops + costs["down_proj"].flops


def test_one_token_reads_its_experts_and_many_tokens_read_all() -> None:
    of_expert = 3 * 32 * 10 * 2
    one, many = expert_costs(SPARSE, 1, 2), expert_costs(SPARSE, 1000, 2)
    numbers = 32 + 2 * 20 + 2 * (10 + 32)
    assert one["gate_up_proj"].bytes + one["down_proj"].bytes == pytest.approx(2 * of_expert + 2 * numbers)
    assert many["gate_up_proj"].bytes + many["down_proj"].bytes == pytest.approx(6 * of_expert + 2000 * numbers)


def test_a_step_has_dense_and_sparse_layers() -> None:
    step = model_step_cost(SPARSE, 1, 10, 2, batch_size=2)
    none, every = (model_step_cost(replace(SPARSE, sparse_layers=n), 1, 10, 2, batch_size=2) for n in (0, 3))
    assert none == model_step_cost(SHAPE, 1, 10, 2, batch_size=2)
    assert step.bytes == pytest.approx(none.bytes / 3 + every.bytes * 2 / 3)


def test_the_slower_bound_decides() -> None:
    machine = Machine("a machine", "float32", bandwidth=10.0, flops=100.0)
    assert machine.ridge == 10.0
    waits, computes = Cost(flops=50, bytes=10), Cost(flops=500, bytes=10)
    assert (waits.seconds(machine), waits.is_memory_bound(machine), waits.intensity) == (1.0, True, 5.0)
    assert (computes.seconds(machine), computes.is_memory_bound(machine)) == (5.0, False)


@pytest.mark.parametrize(
    ("processor", "name"),
    [
        ("Intel(R) Xeon(R) Processor @ 2.80GHz", "Intel Xeon"),
        ("Intel(R) Core(TM) i7-8650U CPU @ 1.90GHz", "Intel Core i7-8650U"),
        ("AMD Ryzen 7 5800X 8-Core Processor", "AMD Ryzen 7 5800X 8-Core"),
        ("AMD EPYC", "AMD EPYC"),
    ],
)
def test_short_names_of_processors(processor: str, name: str) -> None:
    assert short_name(processor) == name


def test_a_measured_machine_can_exist() -> None:
    machine = measure_machine("cpu", torch.float32)
    assert machine.name == device_name("cpu")
    assert machine.dtype == "float32"
    # Wide enough for any computer of these decades: what fails here is a wrong unit.
    assert 1e8 < machine.bandwidth < 1e13
    assert 1e8 < machine.flops < 1e15
