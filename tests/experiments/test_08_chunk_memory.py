"""All timed ways compute the same result, and the modes differ as their names say."""

from __future__ import annotations

import statistics
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from book import results
from book.grading.chapter import load_module
from tests.models.families import our_model, transformers_model

EXPERIMENT = "08_chunk_memory"
run = load_module(f"experiment_{EXPERIMENT}", Path(__file__).parents[2] / "experiments" / EXPERIMENT / "run.py")
SETTING = replace(
    run.SETTINGS["cpu"], dtype=torch.float64, documents=(24,), question=3, pieces=3, repetitions=2, context=24,
    chunks=(2, 6), continuation=8, passages=1,
)  # fmt: skip
BEGINNING = [3, 1, 4, 1]


@pytest.fixture(scope="module")
def model():
    return our_model(transformers_model("llama", seed=2, dtype=torch.float64))


@pytest.fixture(scope="module")
def scores(model):
    memory = run.make_memory(model, 64, num_copies=3)
    tokens = torch.randint(61, (3, 32), generator=torch.Generator().manual_seed(1)).tolist()
    found = [run.score_modes(memory, run.Passage(own[:24], own[24:]), SETTING, BEGINNING) for own in tokens]
    assert memory.num_pages == 0, "every mode unregisters its chunks"
    return found


def test_pieces_are_the_text(model):
    memory = run.make_memory(model, 24, num_copies=2)
    text = list(range(3, 26))
    for count in (1, 4, 5):
        for chained in (False, True):
            names = run.register_pieces(memory, text, count, chained)
            with run.registered(memory, names) as context:
                assert [token for chunk in context for token in chunk.token_ids] == text and len(context) == count
                assert memory.is_exact(names) == (chained or count == 1)
            assert memory.num_pages == 0


def test_only_exact_chunks_equal_full_recompute(scores):
    for of_passage in scores:
        for mode, own in of_passage.items():
            plain = of_passage[run.Mode(run.PLAIN_BEGUN if mode.begun else run.PLAIN)]
            same = abs(own.nll - plain.nll) < 1e-9
            assert same == (mode.name in (run.PLAIN, run.PLAIN_BEGUN, run.EXACT))
            assert not same or torch.equal(own.most_likely, plain.most_likely)
        assert {mode.chunks for mode in of_passage} == {0, 2, 6}


def test_a_chunk_registered_after_the_beginning_is_exact_there(model):
    """One chunk is all there is after the beginning, so it loses nothing; computed alone, it does."""
    memory = run.make_memory(model, 64, num_copies=3)
    tokens = torch.randint(61, (32,), generator=torch.Generator().manual_seed(4)).tolist()
    setting = replace(SETTING, chunks=(1,))
    found = run.score_modes(memory, run.Passage(tokens[:24], tokens[24:]), setting, BEGINNING)
    plain = found[run.Mode(run.PLAIN_BEGUN)].nll
    assert found[run.Mode(run.AFTER_BEGINNING, 1)].nll == pytest.approx(plain, abs=1e-9)
    assert found[run.Mode(run.COMPOSED_BEGUN, 1)].nll != pytest.approx(plain, abs=1e-6)
    assert found[run.Mode(run.COMPOSED, 1)].nll == pytest.approx(found[run.Mode(run.PLAIN)].nll, abs=1e-9)


def test_rows_compare_each_mode_with_full_recompute_of_the_same_prompt(scores):
    rows = run.quality_rows(scores)
    find = results.new_result(EXPERIMENT, rows, {}, "cpu").find
    assert find("same most likely token", mode=run.EXACT).value == 1
    for name, plain, dropped in (
        (run.COMPOSED, run.PLAIN, run.DROPPED),
        (run.AFTER_BEGINNING, run.PLAIN_BEGUN, run.DROPPED_BEGUN),
    ):
        losses = [s[run.Mode(name, 6)].nll - s[run.Mode(plain)].nll for s in scores]
        worth = [s[run.Mode(dropped)].nll - s[run.Mode(plain)].nll for s in scores]
        row = find(run.ABOVE, mode=name, chunks=6)
        assert row.value == pytest.approx(statistics.mean(losses)) and row.spread[0] < row.value < row.spread[1]
        assert find(run.LOST, mode=name, chunks=6).value == pytest.approx(sum(losses) / sum(worth))
        assert find(run.LOST, mode=dropped).value == 1


def test_the_interval_of_a_mean_is_that_of_its_standard_error():
    values = torch.randn(400, generator=torch.Generator().manual_seed(0), dtype=torch.float64).tolist()
    value, (low, high) = run.mean(values)
    error = statistics.stdev(values) / 20
    assert value == pytest.approx(statistics.mean(values))
    assert (low - value, high - value) == pytest.approx((-1.96 * error, 1.96 * error), rel=0.1)
    half, ends = run.ratio(values, [2 * v for v in values])
    assert [half, *ends] == pytest.approx([0.5] * 3)


def test_prose_has_no_code_and_passages_do_not_overlap_a_chapters_end():
    words: dict[str, int] = {}
    texts = run.passages(lambda text: [words.setdefault(word, len(words)) for word in text.split()], SETTING)
    assert len(texts) >= 7
    assert all(len(own.context) == 24 and len(own.continuation) == 8 for own in texts)
    assert not {"```", "```python", "def", "==", "np"} & words.keys()
    more = run.passages(str.split, replace(SETTING, passages=3))
    assert len(more) == 3 * len(texts)
    long = run.passages(str.split, replace(SETTING, passages=99, context=400, continuation=200))
    assert 0 < len(long) < 99 * len(texts)  # no two passages begin within half a passage


def test_the_readme_predicts_what_run_derives():
    readme = (Path(run.__file__).parent / "README.md").read_text(encoding="utf-8")
    rows = readme.partition("| quantity | predicted |")[2].partition("\n\n")[0].splitlines()[2:]
    assert rows == run.predictions().splitlines()


def test_no_recorded_time_beats_its_bound():
    recorded = results.load(EXPERIMENT)
    assert recorded
    for result in recorded:
        assert all(row.share_of_bound <= 1 for row in result.rows if row.share_of_bound is not None)


def test_computing_all_tokens_again_is_full_recompute(model):
    """After the first chunk; and recomputing no tokens gives the result of composed chunks in the engine."""
    memory = run.make_memory(model, 64, num_copies=3)
    tokens = torch.randint(61, (32,), generator=torch.Generator().manual_seed(3)).tolist()
    passage = run.Passage(tokens[:24], tokens[24:])
    modes = run.score_modes(memory, passage, SETTING, BEGINNING)
    again = run.score_again(model, passage, 6, counts=(1, 4))
    assert again["all", 0] == pytest.approx(modes[run.Mode(run.PLAIN)].nll, abs=1e-6)
    assert again["none", 0] == pytest.approx(modes[run.Mode(run.COMPOSED, 6)].nll, abs=1e-6)
    assert again["first", 4] == again["last", 4] == pytest.approx(again["all", 0], abs=1e-6)  # chunks of 4 tokens
    assert again["first", 1] != pytest.approx(again["none", 0], abs=1e-6)
