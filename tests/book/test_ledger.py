"""The ledger keeps every entry, and compares only what can be compared."""

from pathlib import Path

import pytest

from book import ledger
from book.results import Result, Row


def run(rate: float, device: str = "GPU X") -> tuple[Result, Row]:
    row = Row("throughput", rate, "tokens/s", 1000.0, "all at once", {"engine": "ours", "dtype": "bfloat16"})
    return Result("05_x", device, "2026-01-31", {"torch": "2.13.0"}, {"requests": 256}, (row,)), row


def test_entries_are_kept_and_compared_on_their_own_device(tmp_path: Path) -> None:
    (tmp_path / "docs").mkdir()
    assert ledger.markdown(tmp_path) == "Nothing is recorded yet."
    for rate, device, change in ((100, "GPU X", "pages"), (50, "CPU Y", "pages"), (250, "GPU X", "graphs")):
        ledger.add(*run(float(rate), device), change, tmp_path)
    assert [entry.change for entry in ledger.load(tmp_path)] == ["pages", "pages", "graphs"]
    text = ledger.markdown(tmp_path)
    assert text.count("\n### ") == 2 and text.index("GPU X") < text.index("CPU Y")
    assert "2.50x" in text and text.count("x |") == 1 and "25%" in text and "torch 2.13.0" in text


def test_a_device_has_one_heading(tmp_path: Path) -> None:
    (tmp_path / "docs").mkdir()
    for device, dtype in (("GPU X", "bfloat16"), ("CPU Y", "float32"), ("GPU X", "float32")):
        row = Row("throughput", 100.0, "tokens/s", 1000.0, "all at once", {"engine": "ours", "dtype": dtype})
        ledger.add(Result("05_x", device, "2026-01-31", {"torch": "2.13.0"}, {}, (row,)), row, "pages", tmp_path)
    text = ledger.markdown(tmp_path)
    assert text.count("## GPU X") == text.count("## CPU Y") == 1
    assert text.index("throughput, bfloat16") < text.index("throughput, float32") < text.index("## CPU Y")


def test_the_fastest_engine_of_a_change_gains_over_the_fastest_before(tmp_path: Path) -> None:
    (tmp_path / "docs").mkdir()
    for change, rates in (("pages", {"a": 100.0, "b": 200.0}), ("graphs", {"a": 150.0}), ("kernels", {"a": 500.0})):
        for engine, rate in rates.items():
            row = Row("throughput", rate, "tokens/s", 1000.0, "all at once", {"engine": engine, "dtype": "bfloat16"})
            ledger.add(Result("05_x", "GPU X", "2026-01-31", {"torch": "2.13.0"}, {}, (row,)), row, change, tmp_path)
    lines = [line for line in ledger.markdown(tmp_path).splitlines() if line.startswith("| 2026")]
    assert [line.rstrip(" |").rpartition("| ")[2] for line in lines] == ["10%", "20%", "0.75x", "2.50x"]


def test_a_shorter_time_is_a_gain(tmp_path: Path) -> None:
    (tmp_path / "docs").mkdir()
    for change, seconds in (("pages", 2.0), ("graphs", 0.5)):
        row = Row("time", seconds, "s", 0.1, "all at once", {"engine": "ours", "dtype": "bfloat16"})
        ledger.add(Result("07_x", "GPU X", "2026-01-31", {"torch": "2.13.0"}, {}, (row,)), row, change, tmp_path)
    assert "4.00x" in ledger.markdown(tmp_path)


def test_an_entry_says_what_changed(tmp_path: Path) -> None:
    (tmp_path / "docs").mkdir()
    with pytest.raises(ValueError, match="changed"):
        ledger.add(*run(1.0), " ", tmp_path)
