"""The experiment on page selection: its predictions, its ways to rank pages, and its rows on a CPU."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from book import results
from book.grading.chapter import load_module
from mini_engine.attention.naive import attention_scores
from mini_engine.attention.page_selection import DecodePages, select_pages

EXPERIMENT = "18_page_selection"
run = load_module(f"experiment_{EXPERIMENT}", Path(__file__).parents[2] / "experiments" / EXPERIMENT / "run.py")


def test_the_predictions_by_hand() -> None:
    printed = run.predictions()
    queries = 8 * 2 * 16 * 128 * 2
    dense = 8 * 65_536 * 2 * 8 * 128 * 2 + queries
    assert f"| a layer, all keys | {dense / 1e9:.2f} GB, {dense / 4.44e6:.0f} µs |" in printed
    selected = 8 * (4096 + 65_536 // 16) * 2 * 8 * 128 * 2 + queries
    assert f"{selected / 1e6:.0f} MB, {selected / 4.44e6:.1f} µs, {dense / selected:.1f} times fewer" in printed
    steps = [run.step_bytes(run.SETTINGS["cuda"], budget) for budget in (None, 4096)]
    assert steps[0] - steps[1] == pytest.approx(26 * (dense - selected), rel=1e-2)


def test_every_way_selects_the_first_page_and_the_last() -> None:
    generator = torch.Generator().manual_seed(0)
    keys = torch.randn(9, 4, 2, 16, generator=generator)
    q, lens = torch.randn(2, 6, 16, generator=generator), torch.tensor([36, 17])
    pages = DecodePages(torch.arange(9).int(), torch.zeros_like(lens), lens, 4, 9)
    weights = run.page_weights(q, keys, pages, 0.3)
    for b, length in enumerate(lens.tolist()):
        scores = attention_scores(q[b : b + 1], keys.flatten(0, 1)[:length], scale=0.3)[:, :, 0].softmax(-1)
        want = torch.nn.functional.pad(scores, (0, 36 - length)).unflatten(-1, (9, 4)).sum(-1)
        torch.testing.assert_close(weights[b], want)
    held = {}
    for way in run.WAYS:
        selected = select_pages(run.ranks(way, q, keys, (keys.amin(1), keys.amax(1)), pages, 0.3), 4)
        assert all({0, last} <= set(own.tolist()) for b, last in enumerate((8, 4)) for own in selected[b])
        held[way] = weights.sum(2).gather(-1, selected).sum(-1)
    assert all(bool((held[run.BEST] >= own - 1e-6).all()) for own in held.values())


def test_rows_of_every_section(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small = replace(run.SETTINGS["cpu"], text_tokens=200, queries=4, needles=1, needle_tokens=150, budgets=(48, 256))
    monkeypatch.setitem(run.SETTINGS, "cpu", small)
    run.main(["--device", "cpu", "--out", str(tmp_path)])
    [result] = results.load(EXPERIMENT, tmp_path)
    for way in run.WAYS:
        few, all_pages = (
            result.find("attention of the selected pages", way=way, budget=budget).value for budget in (48, 256)
        )
        assert few < all_pages == pytest.approx(100)
        assert result.find("right answers", way=way, budget=256).value == 1
    assert result.find("decode: a layer", way="selected pages").bound
    assert result.find("decode: tokens per second", way="sparse").value > 0
