"""All ways compute one function, every figure has its bound, and cases that would not fit are counted but not run."""

from dataclasses import replace
from itertools import islice
from pathlib import Path

import pytest
import torch

from book import results
from book.grading.chapter import load_module
from mini_engine.attention.state import AttentionState
from mini_engine.roofline import Machine

FOLDER = Path(__file__).parents[2] / "experiments" / "02_chunked_attention"
run = load_module("experiment_02_chunked_attention", FOLDER / "run.py")
figures = load_module("experiment_02_figures", FOLDER / "figures.py")

MACHINE = Machine("a machine", "float32", bandwidth=1e9, flops=1e9)
PROMPT, DECODE = run.Case("prompt", 24, 24), run.Case("decode", 1, 40)
SMALL = replace(
    run.CPU,
    num_qo_heads=4,
    num_kv_heads=2,
    head_dim=8,
    chunk_size=8,
    timed=(PROMPT, DECODE),
    counted=(run.Case("prompt", 500, 500),),
    swept=(PROMPT,),
    pool_size=10_000,
)


@pytest.mark.parametrize("case", [PROMPT, DECODE])
def test_all_ways_compute_one_function(case) -> None:
    torch.manual_seed(0)
    q, k, v = next(run.operands(SMALL, case, torch.randn(SMALL.pool_size)))
    assert q.shape == (case.queries, 4, 8)
    assert k.shape == v.shape == (case.keys, 2, 8)
    ways = run.whole(SMALL) | run.chunks(SMALL, *run.chunk_sizes(case))
    assert len(ways) == 4
    expected = ways.pop(run.NAIVE)(q, k, v)
    for way in ways.values():
        found = way(q, k, v)
        torch.testing.assert_close(found.out if isinstance(found, AttentionState) else found, expected)


def test_operands_rotate_through_the_pool_and_never_overlap() -> None:
    pool = torch.arange(SMALL.pool_size, dtype=torch.float32)
    numbers = sum(shape[0] * shape[1] * shape[2] for shape in run.shapes(SMALL, PROMPT))
    places = SMALL.pool_size // numbers
    seen = [x for qkv in islice(run.operands(SMALL, PROMPT, pool), places + 1) for x in qkv]
    assert torch.cat([x.flatten() for x in seen[: 3 * places]]).tolist() == list(range(places * numbers))
    assert torch.equal(seen[-3], seen[0])


def test_the_count_on_shapes_alone_is_the_count_of_a_real_run() -> None:
    q, k, v = next(run.operands(SMALL, PROMPT, torch.randn(SMALL.pool_size)))
    naive, chunks = run.whole(SMALL)[run.NAIVE], run.chunks(SMALL, 8)[8]
    for way in (naive, chunks):
        assert run.counted_peak(SMALL, PROMPT, way) == run.measured_peak(lambda way=way: way(q, k, v), q.device)
    # What the README predicts: 13 bytes for each score, and 12 for each score of a chunk.
    assert (run.NAIVE_ALIVE, run.TILE_ALIVE) == (13, 12)
    assert run.counted_peak(SMALL, PROMPT, naive) == pytest.approx(13 * 4 * 24 * 24, rel=0.1)
    long = run.Case("piece", 256, 4096)
    assert run.counted_peak(SMALL, long, run.chunks(SMALL, 512)[512]) == pytest.approx(12 * 4 * 256 * 512, rel=0.1)


def test_the_prediction_of_the_readme() -> None:
    assert (run.NAIVE_BYTES, run.TILE_BYTES) == (38, 56)
    # A tile whose scores, 12 bytes each, just fill the cache.
    case = run.Case("piece", 256, 1)
    assert 12 * 9 * 256 * run.keys_in_cache(run.CPU, case, run.TILE_ALIVE) == pytest.approx(run.CACHE)
    rows = dict(line.strip("| ").split(" | ") for line in run.predictions().splitlines())
    assert rows["both"] == "naive 290 ms, tiles 363 ms: 1.25 times as long"
    assert rows["calls of its 512 tiles"] == "8.60 ms, 16.8 µs for each: 3.2 times the bound"
    assert rows["blocks that use all of it"] == "44, 6 splits"


def test_each_case_has_the_time_and_memory_of_each_way_beside_a_bound() -> None:
    rows = run.all_rows(SMALL, torch.device("cpu"), MACHINE)
    result = results.new_result("02_chunked_attention", rows, {}, "cpu")
    for work, figure, way in ((w, f, y) for w in ("prompt", "decode") for f in ("time", "memory") for y in run.WAYS):
        row = result.find(f"{work}: {figure}", way=way, keys=24 if work == "prompt" else 40)
        assert row.bound
    assert {row.case["way"] for row in rows if row.case["keys"] == 500} == {"naive", "chunks"}
    swept = [row.case.get("chunk") for row in rows if row.figure == "prompt: time by chunk size"]
    assert swept == [None, None, 16, 24]


def test_naive_attention_that_would_not_fit_is_counted_and_does_not_run() -> None:
    pool = torch.randn(SMALL.pool_size)

    def must_not_run(q, k, v):
        assert q.device.type == "meta"
        return q @ q.transpose(-1, -2)

    setting = replace(SMALL, most_memory=1)
    rows = run.rows_of(setting, PROMPT, {run.NAIVE: must_not_run}, pool, MACHINE)
    assert [row.figure for row in rows] == ["prompt: memory"]


def test_turns_end_with_the_budget_but_every_call_has_one() -> None:
    made = []
    times = run.fastest({"a": lambda: made.append(1)}, torch.device("cpu"), turns=4)
    assert len(made) == 4
    assert 0 <= times["a"] < 1
    run.fastest({"a": lambda: made.append(1)}, torch.device("cpu"), turns=4, budget=0.0)
    assert len(made) == 5


def test_recorded_results_have_every_case_and_can_be_drawn() -> None:
    recorded = results.load("02_chunked_attention")
    assert recorded
    for result in recorded:
        assert all(row.bound for row in result.rows if ":" in row.figure)
        for work in ("prompt", "piece", "decode"):
            for quantity in ("memory", "time"):
                ax = figures.growth_figure(result, work, quantity)
                assert [line.get_label() for line in ax.get_lines()] == [*run.WAYS, figures.BOUND[quantity]]
        assert len(figures.chunk_size_figure(result).get_lines()) == 4
