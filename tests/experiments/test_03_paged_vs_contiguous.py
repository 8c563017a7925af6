"""The experiment counts every slot of the pool, and attends to the same keys wherever they lie."""

from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from book import figures, results
from book.grading.chapter import load_module
from mini_engine.roofline import Machine

EXPERIMENT = "03_paged_vs_contiguous"
run = load_module(f"experiment_{EXPERIMENT}", Path(__file__).parents[2] / "experiments" / EXPERIMENT / "run.py")

LENGTHS = run.request_lengths(60, seed=1)


def test_the_request_lengths_are_long_tailed_and_the_same_every_time():
    assert run.request_lengths(60, seed=1) == LENGTHS != run.request_lengths(60, seed=2)
    prompts = sorted(prompt for prompt, _ in run.request_lengths(2000))
    assert prompts[1000] < sum(prompts) / 2000 < prompts[1900] / 2
    assert all(p >= 1 and o >= 1 and p + o <= run.MAX_LEN for p, o in run.request_lengths(2000))


def test_the_formulas_of_the_prediction_are_those_of_lengths_that_are_not_cut_off(monkeypatch):
    for name in ("PROMPTS", "OUTPUTS"):
        monkeypatch.setattr(run, name, replace(getattr(run, name), longest=10**9))
    lengths = run.request_lengths(200_000)
    for lengths_of, formula in zip(zip(*lengths, strict=True), (run.PROMPTS, run.OUTPUTS), strict=True):
        assert sum(lengths_of) / len(lengths) == pytest.approx(formula.mean, rel=0.02)
    keys = run.PROMPTS.mean + run.OUTPUTS.mean_square / run.OUTPUTS.mean / 2
    assert run.mean_size(lengths) == pytest.approx(keys, rel=0.02)


@pytest.mark.parametrize("name", run.allocations(LENGTHS))
def test_every_slot_is_counted_and_given_back(name):
    pool = 4 * run.MAX_LEN
    table = run.allocations(LENGTHS, pool)[name]()
    usage = run.serve(table, LENGTHS)
    assert usage.keys + usage.empty + usage.free == pytest.approx(pool)
    assert min(usage.keys, usage.empty, usage.free) >= 0
    assert table.num_free_pages * table.page_size == pool
    if name.startswith("reservations"):
        assert usage.recomputed == 0
        assert usage.at_once <= 4 or name != "reservations of the maximum"
    else:  # a request wastes less than one page
        assert usage.empty < usage.at_once * table.page_size


def test_reservations_never_overlap_and_take_the_first_gap_that_fits():
    table = run.Reservations(10, [4, 4, 2, 3, 2])

    def fits() -> bool:
        return table.admit(1, 1, budget=9, free_pages=table.num_free_pages, free_rows=table.num_free_rows) > 0

    rows = [table.allocate() for _ in range(3)]
    assert [table.spans[row] for row in rows] == [(0, 4), (4, 8), (8, 10)]
    assert not fits()
    table.release(rows[1])
    assert table.num_free_pages == 4 and fits()
    assert table.spans[table.allocate()] == (4, 7)
    assert not fits()  # one slot is free, and the next reservation needs two
    table.release(rows[0])
    assert fits() and table.spans[table.allocate()] == (0, 2)
    ordered = sorted(table.spans.values())
    assert all(end <= first for (_, end), (first, _) in pairwise(ordered))


def test_the_mean_size_of_a_request_by_hand():
    # 3 keys, then 4; and 5 keys: three steps in all.
    assert run.mean_size([(3, 2), (5, 1)]) == (3 + 4 + 5) / 3


TINY = replace(run.CPU, batch_size=2, kv_len=64, num_layers=2, page_sizes={"torch": (1, 16)})


def test_scattered_pages_give_the_attention_of_one_page():
    q = torch.randn(2, TINY.num_qo_heads, TINY.head_dim, generator=torch.Generator().manual_seed(3))
    whole, _ = run.decode_step(TINY, "torch", TINY.kv_len, False, "cpu")
    for page_size in (1, 16):
        scattered, batch = run.decode_step(TINY, "torch", page_size, True, "cpu")
        assert batch.kv_page_indices.tolist() != sorted(batch.kv_page_indices.tolist())
        for layer in range(TINY.num_layers):
            torch.testing.assert_close(scattered.run(layer, q), whole.run(layer, q), rtol=0, atol=1e-6)


def test_attention_is_timed_beside_the_bytes_it_reads():
    machine = Machine("a machine", "float32", bandwidth=1e9, flops=1e9)
    rows = run.attention_rows(TINY, torch.device("cpu"), machine, runs=1)
    timed = [row for row in rows if row.figure == "attention of a layer"]
    assert [row.case["pages"] for row in timed] == [
        "one a sequence",
        "of 1, in order",
        "of 1, scattered",
        "of 16, scattered",
    ]
    assert {row.bound for row in timed} == {2 * 64 * 2 * 3 * 64 * 4 / 1e9}


def test_what_is_recorded_can_be_drawn():
    recorded = results.load(EXPERIMENT)
    assert recorded
    for result in recorded:
        assert figures.to_svg(run.draw_memory(result)) != figures.to_svg(run.draw_indirection(result))
