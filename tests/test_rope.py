"""RoPE against transformers' own (half-split: Llama; interleaved: GPT-J), and the properties that define it."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import LlamaConfig
from transformers.models.gptj import modeling_gptj
from transformers.models.llama import modeling_llama

from mini_engine.rope import Linear, Llama3, RopeConfig, apply_rope, inverse_frequencies, rope_tables

LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
SCALINGS = pytest.mark.parametrize(
    ("scaling", "parameters"),
    [
        (None, {"rope_type": "default"}),
        (Linear(4.0), {"rope_type": "linear", "factor": 4.0}),
        (Llama3(8.0, 1.0, 4.0, 8192), {"rope_type": "llama3", **LLAMA3}),
    ],
)


@SCALINGS
@pytest.mark.parametrize(("theta", "head_dim"), [(10_000.0, 64), (500_000.0, 128), (100_000.0, 6)])
def test_half_split_equals_transformers(scaling, parameters: dict, theta: float, head_dim: int) -> None:
    heads = 2
    config = LlamaConfig(
        hidden_size=heads * head_dim,
        num_attention_heads=heads,
        head_dim=head_dim,
        rope_parameters={"rope_theta": theta, **parameters},
        max_position_embeddings=131_072,
    )
    generator = torch.Generator().manual_seed(0)
    positions = torch.tensor([0, 1, 5000, 3, 131_071])
    q, k = (torch.randn(5, heads, head_dim, generator=generator) for _ in range(2))
    cos, sin = modeling_llama.LlamaRotaryEmbedding(config)(q, positions[None])
    expected = modeling_llama.apply_rotary_pos_emb(q[None], k[None], cos, sin, unsqueeze_dim=2)

    inv_freq = inverse_frequencies(RopeConfig(theta, head_dim, scaling))
    tables = rope_tables(positions, inv_freq)
    assert inv_freq.dtype == tables[0].dtype == torch.float32
    # At position 131,071 one unit in the last place of a frequency is 0.01 radian.
    for ours, theirs in zip((apply_rope(q, *tables), apply_rope(k, *tables)), expected, strict=True):
        torch.testing.assert_close(ours[:4], theirs[0, :4], atol=1e-5, rtol=0)
        torch.testing.assert_close(ours[4], theirs[0, 4], atol=0.05, rtol=0)


def test_unscaled_frequencies_are_those_of_transformers_to_the_bit() -> None:
    config = LlamaConfig(hidden_size=576, num_attention_heads=9, rope_parameters={"rope_theta": 1e5})
    expected = modeling_llama.LlamaRotaryEmbedding(config).inv_freq
    assert torch.equal(inverse_frequencies(RopeConfig(1e5, 64)), expected)


def test_interleaved_equals_gptj() -> None:
    x, positions = torch.randn(4, 3, 8), torch.tensor([0, 2, 9, 4])
    table = modeling_gptj.create_sinusoidal_positions(16, 8)[positions][None]
    sin, cos = table.chunk(2, dim=-1)
    expected = modeling_gptj.apply_rotary_pos_emb(x[None], sin, cos)[0]
    tables = rope_tables(positions, inverse_frequencies(RopeConfig(10_000.0, 8)))
    torch.testing.assert_close(apply_rope(x, *tables, interleaved=True), expected, atol=1e-6, rtol=0)


def test_by_hand() -> None:
    quarter_turn = torch.tensor([0.0]), torch.tensor([1.0])
    tables = [torch.stack([table.repeat(2)]) for table in quarter_turn]
    x = torch.tensor([1.0, 2.0, 3.0, 4.0]).view(1, 1, 4)
    assert apply_rope(x, *tables).flatten().tolist() == [-3.0, -4.0, 1.0, 2.0]
    assert apply_rope(x, *tables, interleaved=True).flatten().tolist() == [-2.0, 1.0, -4.0, 3.0]


INTERLEAVED = pytest.mark.parametrize("interleaved", [False, True])


@INTERLEAVED
@given(query=st.integers(0, 500), key=st.integers(0, 500), shift=st.integers(0, 500), seed=st.integers(0, 2**16))
def test_scores_depend_on_the_distance_only(interleaved: bool, query: int, key: int, shift: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    q, k = (torch.randn(1, 1, 8, generator=generator, dtype=torch.float64) for _ in range(2))
    inv_freq = inverse_frequencies(RopeConfig(10_000.0, 8)).double()

    def score(query_position: int, key_position: int) -> float:
        turned = [
            apply_rope(x, *rope_tables(torch.tensor([position]), inv_freq), interleaved=interleaved)
            for x, position in ((q, query_position), (k, key_position))
        ]
        return float((turned[0] * turned[1]).sum())

    assert score(query, key) == pytest.approx(score(query + shift, key + shift), abs=1e-9)


@INTERLEAVED
@given(position=st.integers(0, 10_000), seed=st.integers(0, 2**16))
def test_norms_stay_and_position_zero_changes_nothing(interleaved: bool, position: int, seed: int) -> None:
    x = torch.randn(2, 3, 8, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    inv_freq = inverse_frequencies(RopeConfig(10_000.0, 8)).double()
    turned = apply_rope(x, *rope_tables(torch.tensor([0, position]), inv_freq), interleaved=interleaved)
    torch.testing.assert_close(turned.norm(dim=-1), x.norm(dim=-1))
    assert torch.equal(turned[0], x[0])


def test_the_two_conventions_differ_by_a_permutation() -> None:
    x = torch.randn(3, 2, 8)
    tables = rope_tables(torch.arange(3), inverse_frequencies(RopeConfig(100.0, 8)))
    pairs = torch.arange(8).view(2, 4).T.flatten()  # half-split's (i, i + 4) side by side
    assert torch.equal(apply_rope(x, *tables)[..., pairs], apply_rope(x[..., pairs], *tables, interleaved=True))


@INTERLEAVED
def test_bfloat16_is_rounded_once(interleaved: bool) -> None:
    x = torch.randn(5, 2, 16).bfloat16()
    tables = rope_tables(torch.arange(1000, 1005), inverse_frequencies(RopeConfig(10_000.0, 16)))
    turned = apply_rope(x, *tables, interleaved=interleaved)
    assert turned.dtype == torch.bfloat16
    assert torch.equal(turned, apply_rope(x.float(), *tables, interleaved=interleaved).bfloat16())


def test_llama3_keeps_fast_pairs_and_stretches_slow_ones() -> None:
    plain = inverse_frequencies(RopeConfig(500_000.0, 128))
    scaled = inverse_frequencies(RopeConfig(500_000.0, 128, Llama3(8.0, 1.0, 4.0, 8192)))
    turns = 8192 * plain / (2 * torch.pi)
    assert torch.equal(scaled[turns > 4.01], plain[turns > 4.01])
    torch.testing.assert_close(scaled[turns < 0.99], plain[turns < 0.99] / 8)
    between = (turns > 1.01) & (turns < 3.99)
    assert between.any()
    assert ((scaled < plain) & (scaled > plain / 8))[between].all()
