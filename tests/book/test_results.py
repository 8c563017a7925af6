"""Recorded results: written once, checked when read, shown with their origin and their bound."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from book import results
from book.results import ENGINE_BYTES, ENGINE_SPEED, ENGINE_THROUGHPUT, Result, Row

REPOSITORY = Path(__file__).parents[2]
LATENCY = Row("latency", 2.5e-3, "s", 1e-3, "bytes / bandwidth", {"batch": 8, "dtype": "bf16"})
SPEED = Row(ENGINE_SPEED, 30.0, "tokens/s", 60.0, "bandwidth / bytes", {"chapter": 2})
COUNT = Row("tests | run", 3, "tests", None, "a count has no bound")


def result(
    experiment: str = "01_first", device: str = "GPU X", rows: tuple[Row, ...] = (LATENCY, SPEED, COUNT)
) -> Result:
    return Result(experiment, device, "2026-01-31", {"torch": "2.13.0"}, {"heads": 8}, rows)


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "chapters" / "01_first").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "chapters" / "01_first")
    return tmp_path


def test_written_results_are_read_back_equal(root: Path) -> None:
    file = results.write(result())
    assert file == root / "experiments" / "01_first" / "results" / "gpu-x.json"
    assert results.load("01_first") == [result()]


def test_a_device_replaces_its_own_results_only(root: Path) -> None:
    results.write(result(device="GPU X"))
    results.write(result(device="CPU (2 threads)"))
    newer = result(rows=(COUNT,))
    results.write(newer)
    assert results.load("01_first") == [result(device="CPU (2 threads)"), newer]


def test_recorded_finds_by_device_and_says_what_there_is(root: Path) -> None:
    results.write(result(device="GPU X"))
    assert results.recorded("01_first") == result()
    results.write(result(device="CPU Y"))
    assert results.recorded("01_first", "gpu").device == "GPU X"
    with pytest.raises(KeyError, match="GPU X"):
        results.recorded("01_first")
    with pytest.raises(KeyError, match="none"):
        results.recorded("02_other")


def test_the_median_of_rounds_has_the_smallest_and_the_largest_value_unless_it_is_a_count() -> None:
    rounds = [
        [Row("TTFT", time, "s", None, "none", {"load": 1}), Row("memory", 8, "B", 4, "the output")]
        for time in (3.0, 1.0, 8.0)
    ]
    time, count = results.median_rows(rounds)
    assert (time.value, time.spread, time.case) == (3.0, (1.0, 8.0), {"load": 1})
    assert count == rounds[0][1]


def test_the_bound_of_rounds_is_the_last_one_when_the_machine_has_been_measured_most_often() -> None:
    rounds = [[Row("step", 3.0, "s", bound, "bytes / bandwidth")] for bound in (2.0, 1.5, 1.2)]
    [row] = results.median_rows(rounds)
    assert (row.value, row.bound, row.spread) == (3.0, 1.2, None)


@pytest.mark.parametrize("folder", sorted(path.parent.name for path in (REPOSITORY / "experiments").glob("*/results")))
def test_every_measured_time_and_speed_has_a_spread(folder: str) -> None:
    for recorded in results.load(folder, REPOSITORY):
        measured = [row for row in recorded.rows if row.unit in ("s", "tokens/s") and "predicted" not in row.figure]
        # A launch is timed by a profiler, which repeats it. An engine starts once, and a variant is compiled once. A
        # part of a layer is a mean over all blocks and layers of a step.
        without = {row.figure for row in measured if row.spread is None} - {
            "host time of a launch",
            "part of a layer",
            "start until ready",
            "time until the first result",
        }
        assert not without, recorded.device


def test_share_of_the_bound_is_that_of_the_time_or_of_the_rate() -> None:
    assert LATENCY.share_of_bound == pytest.approx(0.4)  # a time cannot go below its bound
    assert SPEED.share_of_bound == pytest.approx(0.5)  # a rate cannot go above it
    assert COUNT.share_of_bound is None


@pytest.mark.parametrize(
    "fields",
    [
        {"figure": " "},
        {"unit": ""},
        {"value": float("nan")},
        {"bound": 0.0},
        {"bound": float("inf")},
        {"bound_from": " "},
        {"bound": None, "bound_from": ""},
    ],
)
def test_a_row_without_unit_or_bound_or_reason_is_refused(fields: dict[str, Any]) -> None:
    good: dict[str, Any] = {
        "figure": "latency",
        "value": 1.0,
        "unit": "s",
        "bound": 0.5,
        "bound_from": "bytes / bandwidth",
    }
    Row(**good)
    with pytest.raises(ValueError):
        Row(**(good | fields))


@pytest.mark.parametrize(
    ("field", "value"), [("date", "31 January"), ("device", ""), ("versions", {}), ("rows", []), ("extra", 1)]
)
def test_a_broken_file_is_named(root: Path, field: str, value: object) -> None:
    file = results.write(result())
    file.write_text(json.dumps(json.loads(file.read_text(encoding="utf-8")) | {field: value}), encoding="utf-8")
    with pytest.raises(ValueError, match=r"01_first/results/gpu-x\.json"):
        results.load("01_first")


def test_find_takes_exactly_one_row() -> None:
    other = Row("latency", 3e-3, "s", 1e-3, "bytes / bandwidth", {"batch": 16, "dtype": "bf16"})
    found = result(rows=(LATENCY, other))
    assert found.find("latency", batch=16) is other
    with pytest.raises(KeyError, match="rows"):
        found.find("latency", dtype="bf16")


def test_shown_results_carry_provenance_and_bound() -> None:
    for text in (repr(result()), result()._repr_html_(), result().table().markdown()):
        assert "Recorded on GPU X, 2026-01-31; torch 2.13.0." in text
        assert "2.50 ms" in text and "1 ms" in text and "40%" in text and "bytes / bandwidth" in text
    assert "tests \\| run" in result().table().markdown()  # a bar must not end the cell


def test_results_page_lists_experiments_and_devices(root: Path) -> None:
    results.write(result("02_second"))
    results.write(result("01_first"))
    (root / "experiments" / "02_second" / "README.md").write_text("# Two passes\n\nWhy?\n", encoding="utf-8")
    page = results.results_page_markdown(root)
    assert page.index("## [01_first]") < page.index("## [Two passes](experiments/02_second/README.md)")
    assert page.count(f"<summary>GPU X: {len(result().rows)} figures</summary>") == 2 and "With heads 8." in page
    assert "No result is recorded yet." not in page
    assert "No result is recorded yet." in results.results_page_markdown(root / "chapters")


def test_so_far_grows_with_the_chapters_and_types_no_number(root: Path) -> None:
    (root / "docs").mkdir()
    entry = '[[chapter]]\nnumber = {0}\nadds = "part {0}"\nexperiment = "0{0}_x"\n'
    (root / "docs" / "engine_so_far.toml").write_text(entry.format(2) + entry.format(1), encoding="utf-8")
    assert results.so_far(2).rows == [["01", "part 1", "–"], ["02", "part 2", "–"]]
    assert results.so_far(2).caption == "Nothing measured yet."
    rows = (
        SPEED,
        Row(ENGINE_BYTES, 2.7e8, "B", 2.7e8, "the weights, once", {"chapter": 2}),
        Row(ENGINE_THROUGHPUT, 90.0, "tokens/s", 400.0, "the weights, once a step", {"chapter": 2}),
    )
    results.write(result("02_x", rows=rows))
    assert results.so_far(1).rows == [["01", "part 1", "–"]]
    assert results.so_far(2).rows == [["01", "part 1", "–", "–", "–"], ["02", "part 2", "270 MB", "30", "90"]]
    results.write(result("02_x", device="CPU Y", rows=rows[:2]))
    devices = ["CPU Y: one request", "CPU Y: 32 requests", "GPU X: one request", "GPU X: 32 requests"]
    assert results.so_far(2).head[3:] == devices
    assert results.so_far(2).rows[1] == ["02", "part 2", "270 MB", "30", "–", "30", "90"]
    in_float32 = [replace(row, case={"chapter": 1, "dtype": "float32"}) for row in rows]
    in_bfloat16 = [replace(row, case={"chapter": 2, "dtype": "bfloat16"}) for row in rows]
    results.write(result("01_x", device="CPU Y", rows=tuple(in_float32)))
    (root / "experiments/02_x/results/cpu-y.json").unlink()
    results.write(result("02_x", rows=tuple(in_bfloat16)))
    assert "dtype" not in results.so_far(1).caption
    assert results.so_far(2).caption.endswith("The dtype is float32 in chapter 01, and bfloat16 in chapter 02.")
    assert results.so_far(2).rows[1] == ["02", "part 2", "270 MB", "–", "–", "30", "90"]  # the GPU's bytes
    results.write(result("02_x", device="CPU Y", rows=(SPEED, SPEED)))
    with pytest.raises(ValueError, match="rows"):
        results.so_far(2)


def test_a_readme_gets_its_numbers_from_the_results(root: Path) -> None:
    results.write(result())
    readme = root / "experiments" / "01_first" / "README.md"
    readme.write_text(f"# First\n\n{results.RESULTS}\nold\n{results.END_OF_RESULTS}\n\nReading.\n", encoding="utf-8")
    for _ in range(2):  # doing it again changes nothing
        results.fill_readme("01_first", {"latency"}, root)
        text = readme.read_text(encoding="utf-8")
        assert "2.50 ms" in text and "Recorded on GPU X" in text and "old" not in text and "tests" not in text
        assert text.startswith("# First") and text.endswith("Reading.\n")
    results.write(result(device="CPU Y", rows=(SPEED,)))  # another device has other figures
    results.fill_readme("01_first", root=root)
    text = readme.read_text(encoding="utf-8")
    assert all(part in text for part in ("2.50 ms", "tests", "Recorded on GPU X", "Recorded on CPU Y"))
    readme.write_text("# First\n", encoding="utf-8")
    with pytest.raises(ValueError, match="marks"):
        results.fill_readme("01_first", root=root)


def test_new_result_is_of_this_machine() -> None:
    made = results.new_result("01_first", [LATENCY], {"heads": 8}, device="cpu")
    assert made.device and "torch" in made.versions and made.rows == (LATENCY,)


@pytest.mark.parametrize("same_versions", [True, False])
def test_sections_that_are_not_measured_again_are_kept_with_their_day(tmp_path: Path, same_versions: bool) -> None:
    def recorded(date: str, *rows: Row, torch: str = "2.11") -> results.Result:
        return results.Result("99_sections", "a GPU", date, {"torch": torch}, {}, rows)

    def row(figure: str, value: float, **case: results.Setting) -> Row:
        return Row(figure, value, "s", None, "no bound", case)

    first = recorded("2026-01-01", row("step", 3.0, keys=1), row("step", 4.0, keys=2), row("tile", 5.0, size=16))
    results.write(first, tmp_path)
    version = "2.11" if same_versions else "2.12"
    today = results.with_recorded(recorded("2026-01-02", row("step", 1.0, keys=1), torch=version), tmp_path)
    # The step of 2 keys was measured with code of another day, and was not measured again.
    kept = [row("tile", 5.0, size=16, recorded="2026-01-01")] if same_versions else []
    assert [*today.rows] == [*kept, row("step", 1.0, keys=1)]
    results.write(today, tmp_path)
    later = results.with_recorded(recorded("2026-01-02", row("step", 2.0, keys=2), torch=version), tmp_path)
    assert [*later.rows] == [*kept, row("step", 1.0, keys=1), row("step", 2.0, keys=2)]
    results.write(later, tmp_path)
    last = results.with_recorded(recorded("2026-01-03", row("step", 9.0, keys=1), torch=version), tmp_path)
    assert [*last.rows] == [*kept, row("step", 9.0, keys=1)]


def test_a_section_of_an_earlier_day_is_replaced_alone(tmp_path: Path) -> None:
    def recorded(date: str, *cases: tuple[str, int]) -> results.Result:
        rows = tuple(Row("step", 1.0, "s", None, "no bound", {"model": model, "keys": keys}) for model, keys in cases)
        return results.Result("99_sections", "a GPU", date, {"torch": "2.11"}, {}, rows)

    results.write(recorded("2026-01-01", ("a", 1), ("a", 2), ("b", 1)), tmp_path)
    today = results.with_recorded(recorded("2026-01-02", ("a", 1)), tmp_path, section="model")
    assert [dict(row.case) for row in today.rows] == [
        {"model": "b", "keys": 1, "recorded": "2026-01-01"},
        {"model": "a", "keys": 1},
    ]
