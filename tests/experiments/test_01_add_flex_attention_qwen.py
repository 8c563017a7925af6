"""The experiment's attention and masks are what they say, and it measures everything at every length."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import create_mask, flex_attention

from book import figures, results
from book.grading.chapter import load_module
from mini_engine.attention import masks
from mini_engine.roofline import Machine, ModelShape

FILE = Path(__file__).parents[2] / "experiments" / "01_add_flex_attention_qwen" / "run.py"
run = load_module("experiment_01_add_flex_attention_qwen", FILE)
CPU = torch.device("cpu")
MACHINE = Machine("a machine", "float32", bandwidth=1e9, flops=1e9)
TINY = replace(
    run.CPU,
    shape=ModelShape(32, 2, 4, 2, 8, 48, 50),
    span=8,
    lengths=(16, 40),
    eager_longest=16,
    decodes=(20,),
    capacity=192,
)


@pytest.fixture(autouse=True)
def uncompiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compiling takes seconds for each shape; the results are the same."""
    monkeypatch.setattr(run, "compiled_flex_attention", flex_attention)


def dense(mask_mod: masks.MaskMod, queries: int, keys: int) -> Tensor:
    return create_mask(mask_mod, 1, 1, queries, keys, device="cpu")


@pytest.mark.parametrize("mask", run.MASKS)
def test_the_model_is_given_the_masks_of_the_engine(mask: str) -> None:
    model = run.build_model(TINY, mask == "sliding window", CPU)
    model.set_attn_implementation(run.FLEX)
    mine = {
        "causal": masks.causal,
        "sliding window": masks.sliding_window(8),
        "documents": masks.and_masks(masks.causal, masks.document(torch.arange(20) // 8)),
    }[mask]
    given = run.mask_of(model, mask, run.positions_of(mask, 20, 8, CPU))
    assert torch.equal(dense(given.mask_mod, 20, 20), dense(mine, 20, 20))


def test_a_counter_that_moves_on_does_not_move_the_mask() -> None:
    counter = torch.tensor(5)
    mask = run.block_mask(
        batch_size=1, q_length=1, kv_length=16, q_offset=counter, mask_function=masks.causal, device=CPU
    )
    counter.add_(1)
    assert dense(mask.mask_mod, 1, 16).flatten().tolist() == [True] * 6 + [False] * 10


def test_a_missing_mask_is_refused_and_would_be_wrong() -> None:
    q = torch.ones(1, 2, 3, 8)
    with pytest.raises(ValueError, match="BlockMask"):
        run.flex_forward(torch.nn.Identity(), q, q, q, None)
    with torch.inference_mode():
        assert run.without_mask_row(TINY, CPU).value > 100 * TINY.tolerance


def test_a_prefill_has_equal_logits_and_all_times() -> None:
    with torch.inference_mode():
        rows = run.prefill_rows(TINY, CPU, MACHINE, "documents")
    expected = {("eager", 16), *((name, length) for name in ("SDPA", "flex") for length in (16, 40))}
    for figure in ("attention", "mask", "prefill"):
        cases = [(row.case["attention"], row.case["tokens"]) for row in rows if row.figure == figure]
        assert len(cases) == 5 and set(cases) == expected
    assert [row.case["compared"] for row in rows if row.figure == "logits"] == ["flex, SDPA", "eager, SDPA"]


def test_different_logits_stop_the_run() -> None:
    with pytest.raises(AssertionError, match="logits"):
        run.difference_row(TINY, 2 * TINY.tolerance, mask="causal")


def test_a_decode_has_equal_logits_and_all_times() -> None:
    with torch.inference_mode():
        rows = run.decode_rows(TINY, CPU, MACHINE)
    steps = [row.case["attention"] for row in rows if row.figure == "decode step"]
    assert steps == ["eager", "SDPA", "flex", "SDPA, growing cache"]
    assert [row.figure for row in rows].count("logits") == 1


def test_bounds_count_what_a_mask_shows() -> None:
    causal, window, documents = (run.attention_bound(TINY, mask, 40).flops for mask in run.MASKS)
    per_pair = 4 * 4 * 8  # FLOPs: 4 heads of 8
    assert causal == 40 * 41 // 2 * per_pair
    assert window == (36 + 32 * 8) * per_pair
    assert documents == 5 * 36 * per_pair


@pytest.mark.parametrize("mask", run.MASKS)
def test_the_predicted_blocks_are_those_of_the_mask(mask: str) -> None:
    length, span = 1024, 256
    model = run.build_model(replace(TINY, span=span, lengths=(length,)), mask == "sliding window", CPU)
    model.set_attn_implementation(run.FLEX)
    made = run.mask_of(model, mask, run.positions_of(mask, length, span, CPU))
    full = 0 if made.full_kv_num_blocks is None else int(made.full_kv_num_blocks.sum())
    assert made.BLOCK_SIZE == (run.BLOCK, run.BLOCK)
    assert run.visible_blocks(mask, length, span) == int(made.kv_num_blocks.sum()) + full


def test_the_recorded_results_are_drawn() -> None:
    recorded = results.load(run.EXPERIMENT)
    assert recorded
    for result in recorded:
        assert run.draw_gain(result).get_lines()
        assert figures.to_svg(run.draw_gain(result))
