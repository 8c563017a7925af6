"""Sampling from graphs: the same tokens and logits as without, and padding changes no request."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor

from mini_engine.decode_graphs import TokensAndLogits
from mini_engine.sample_graphs import SampleGraphs

ROWS, HIDDEN, VOCAB = 9, 6, 11


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("seed", range(5))
@torch.inference_mode()
def test_rows_of_any_number(device: str, seed: int) -> None:
    """The function counts its calls for each row, as a sampler counts tokens: captures and padding may not count."""
    rng, weight = random.Random(seed), torch.randn(HIDDEN, VOCAB, dtype=torch.float64, device=device)
    counts = torch.zeros(ROWS + 1, dtype=torch.int64, device=device)

    def sample(hidden: Tensor, rows: Tensor, positions: Tensor) -> TokensAndLogits:
        counts.index_add_(0, rows, torch.ones_like(rows))
        logits = hidden @ weight + positions[:, None] % 7 * torch.arange(VOCAB, device=device)
        return logits.argmax(-1) + 100 * rows + 1000 * counts[rows], logits

    graphs = SampleGraphs((1, 2, 4, 8), sample, padding_row=ROWS, device=torch.device(device))
    assert graphs.size_for(9) is None
    expected = [0] * ROWS
    for _ in range(12):
        num_rows, num_tokens = rng.randint(1, 8), rng.randint(8, 20)
        rows = rng.sample(range(ROWS), num_rows)
        chosen, positions = sorted(rng.sample(range(num_tokens), num_rows)), rng.sample(range(50), num_rows)
        hidden = torch.randn(num_tokens, HIDDEN, dtype=torch.float64, device=device)
        index, own, at = (torch.tensor(values, device=device) for values in (chosen, rows, positions))
        size = graphs.size_for(num_rows)
        assert size is not None and num_rows <= size < 2 * num_rows
        tokens, logits = graphs.run(size, hidden, index, own, at)
        for row in rows:
            expected[row] += 1
        assert counts[:ROWS].tolist() == expected
        want = hidden[index] @ weight + at[:, None] % 7 * torch.arange(VOCAB, device=device)
        torch.testing.assert_close(logits, want)
        best = want.argmax(-1).tolist()
        assert tokens.tolist() == [b + 100 * r + 1000 * expected[r] for b, r in zip(best, rows, strict=True)]
