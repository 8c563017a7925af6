"""Token ids, rotation tables and copies of a step: in Triton's interpreter here, on a GPU where there is one."""

from __future__ import annotations

import pytest
import torch

from mini_engine.rope import Llama3, RopeConfig, inverse_frequencies

pytest.importorskip("triton")
# On a GPU machine Triton compiles the kernels, and a compiled kernel accepts no tensors on the CPU.
INTERPRETED = pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter runs on machines without a GPU")
DEVICES = [pytest.param("cpu", marks=INTERPRETED), pytest.param("cuda", marks=pytest.mark.gpu)]
SIZES = [1, 7, 256, 300]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("num_tokens", SIZES)
def test_a_token_is_the_last_one_of_its_source_or_is_given(device: str, num_tokens: int) -> None:
    from mini_engine.kernels.step_start import feed_tokens

    generator = torch.Generator().manual_seed(num_tokens)
    ids = torch.randint(150_000, (num_tokens,), generator=generator)
    source = torch.randint(-1, 5, (num_tokens,), generator=generator)
    last = torch.randint(150_000, (5,), generator=generator)
    want = [int(last[s]) if s >= 0 else int(i) for s, i in zip(source.tolist(), ids.tolist(), strict=True)]
    assert feed_tokens(ids.to(device), source.to(device), last.to(device)).tolist() == want


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("num_tokens", SIZES)
@pytest.mark.parametrize(
    "config", [RopeConfig(1e6, 128), RopeConfig(1e4, 64, Llama3(8.0, 1.0, 4.0, 8192))], ids=["plain", "scaled"]
)
def test_tables_are_those_of_float64(device: str, num_tokens: int, config: RopeConfig) -> None:
    from mini_engine.kernels.step_start import rope_tables

    positions = torch.randint(131_072, (num_tokens,), generator=torch.Generator().manual_seed(num_tokens))
    frequencies = inverse_frequencies(config)
    angles = (positions[:, None] * frequencies).double()  # the product is rounded to float32, as in `rope.rope_tables`
    cos, sin = rope_tables(positions.to(device), frequencies.to(device))
    torch.testing.assert_close(cos.cpu().double(), angles.cos(), atol=1e-6, rtol=0)
    torch.testing.assert_close(sin.cpu().double(), angles.sin(), atol=1e-6, rtol=0)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.uint8, torch.int32, torch.int64])
@pytest.mark.parametrize("size", [0, 1, 511, 5000])
def test_a_copy_to_the_device_and_back_changes_nothing(device: str, dtype: torch.dtype, size: int) -> None:
    from mini_engine.kernels.pinned_copy import copy_small

    def on_host() -> torch.Tensor:
        return torch.zeros(size + 1, dtype=dtype, pin_memory=device == "cuda")

    there = torch.zeros(size + 1, dtype=dtype, device=device)
    source, back = on_host(), on_host()
    source += torch.arange(size + 1) % 100 + 1
    copy_small(there[:size], source[:size])
    copy_small(back[:size], there[:size])
    if device == "cuda":
        torch.cuda.synchronize()
    assert torch.equal(back[:size], source[:size]) and back[size] == 0


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("count", [1, 7, 600])
def test_tokens_are_kept_in_their_rows_and_on_the_host(device: str, count: int) -> None:
    from mini_engine.kernels.pinned_copy import keep_tokens

    generator = torch.Generator().manual_seed(count)
    rows, tokens = torch.randperm(700, generator=generator)[:count], torch.randint(150_000, (count,))
    last, want = torch.full((700,), -1, device=device), torch.full((700,), -1)
    want[rows] = tokens
    host = torch.zeros(count + 1, dtype=torch.long, pin_memory=device == "cuda")
    keep_tokens(tokens.to(device), rows.to(device), last, host[:count])
    if device == "cuda":
        torch.cuda.synchronize()
    assert torch.equal(last.cpu(), want)
    assert torch.equal(host[:count], tokens) and host[count] == 0
