"""A notebook's experiment runs on the reader's GPU once; without a GPU the recorded result is used."""

from pathlib import Path

import pytest

from book import experiment, results
from book.results import Result, Row
from mini_engine.roofline import Machine

RUN = """
import json, sys
from pathlib import Path
{first}
out = Path(sys.argv[sys.argv.index("--out") + 1]) / "experiments/01_first/results"
out.mkdir(parents=True)
recorded = json.loads((Path(__file__).parent / "results/nvidia-x.json").read_text())
(out / "nvidia-mine.json").write_text(json.dumps(recorded | {{"device": "NVIDIA mine"}}))
"""


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "chapters").mkdir()
    monkeypatch.chdir(tmp_path)
    row = Row("latency", 1.0, "s", None, "none: an example")
    for device in ("NVIDIA X", "CPU Y"):
        results.write(Result("01_first", device, "2026-01-01", {"torch": "2"}, {}, [row]))
    return tmp_path


def has_gpu(monkeypatch: pytest.MonkeyPatch, answer: bool) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: answer)


def test_the_better_of_two_measurements_is_chosen_rate_by_rate():
    first, second = Machine("a machine", "float32", 10.0, 7.0), Machine("a machine", "float32", 8.0, 9.0)
    assert experiment.faster(first, second) == Machine("a machine", "float32", 10.0, 9.0)


def test_rounds_are_bounded_by_the_best_rates_and_have_a_median(monkeypatch):
    rates = iter([5.0, 10.0, 8.0])
    times = iter([3.0, 2.0, 4.0])
    monkeypatch.setattr(experiment, "measure_machine", lambda *_: Machine("a machine", "float32", next(rates), 1.0))
    machine, [row] = experiment.in_rounds(
        lambda machine: [Row("step", next(times), "s", 1 / machine.bandwidth, "bytes / bandwidth")], None, None, 3
    )
    assert machine.bandwidth == 10.0
    assert (row.value, row.spread, row.bound) == (3.0, (2.0, 4.0), 0.1)


def test_without_a_gpu_it_is_the_recorded_one(root, monkeypatch):
    has_gpu(monkeypatch, False)
    assert experiment.on_gpu("01_first").device == "NVIDIA X"
    assert not (root / ".cache").exists()


def test_with_a_gpu_it_runs_once(root, monkeypatch):
    has_gpu(monkeypatch, True)
    run_py = root / "experiments" / "01_first" / "run.py"
    run_py.write_text(RUN.format(first='assert sys.argv[sys.argv.index("--device") + 1] == "cuda"'))
    assert experiment.on_gpu("01_first").device == "NVIDIA mine"
    run_py.unlink()
    assert experiment.on_gpu("01_first").device == "NVIDIA mine"


def test_where_it_fails_the_reader_is_told_why(root, monkeypatch, capsys):
    has_gpu(monkeypatch, True)
    (root / "experiments" / "01_first" / "run.py").write_text(RUN.format(first='sys.exit("CUDA out of memory")'))
    assert experiment.on_gpu("01_first").device == "NVIDIA X"
    assert "did not run on this GPU (CUDA out of memory)" in capsys.readouterr().out


def test_what_cannot_be_measured_or_written_is_refused_before_the_run(tmp_path, monkeypatch, capsys):
    has_gpu(monkeypatch, False)
    (tmp_path / "file").touch()
    for options, why in (["--device", "cuda"], "invalid choice"), (["--out", f"{tmp_path}/file"], "cannot write to"):
        with pytest.raises(SystemExit):
            experiment.command_line("Measure.", str).parse_args(options)
        assert why in capsys.readouterr().err
    out = tmp_path / "new" / "folder"
    assert experiment.command_line("Measure.", str).parse_args(["--out", str(out)]).out == out and not any(
        out.iterdir()
    )


def test_predictions_are_printed_instead_of_a_run(capsys):
    parser = experiment.command_line("Measure.", lambda: experiment.predicted({"a step": "2 ms", "a run": "3 s"}))
    with pytest.raises(SystemExit) as exit_:
        parser.parse_args(["--predict"])
    assert exit_.value.code == 0
    assert capsys.readouterr().out == "| a step | 2 ms |\n| a run | 3 s |\n"
