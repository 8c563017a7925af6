"""Running experiments: what every run.py does around its measurements, and how a notebook shows one on a GPU."""

import argparse
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import torch

from book import results
from book.paths import repository_root
from mini_engine.roofline import Machine, measure_machine


def command_line(doc: str, predictions: Callable[[], str]) -> argparse.ArgumentParser:
    """The options of every run.py: `--device`, `--out` for a folder to write below instead of the repository, and
    `--predict`, which prints what the README predicts and exits.

    Args:
        doc: the module's docstring; its first line becomes the help.
        predictions: derives the numbers of the README's Prediction from the assumed rates.
    """
    devices = ["cuda", "cpu"] if torch.cuda.is_available() else ["cpu"]
    parser = argparse.ArgumentParser(description=doc.splitlines()[0])
    parser.add_argument("--device", choices=devices, default=devices[0])
    parser.add_argument("--out", type=_writable, help="write below this folder instead of the repository")
    parser.add_argument("--predict", action=_Print, text=predictions, help="print what the README predicts, and stop")
    return parser


class _Print(argparse.Action):
    """Print a text, which is made only then, and exit."""

    def __init__(self, option_strings: Sequence[str], dest: str, text: Callable[[], str], help: str) -> None:
        super().__init__(option_strings, dest, nargs=0, help=help)
        self._text = text

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        print(self._text())
        parser.exit()


def predicted(values: Mapping[str, str]) -> str:
    """Return predicted quantities, each with its value, as the rows of a Markdown table."""
    return "\n".join(f"| {what} | {value} |" for what, value in values.items())


def _writable(folder: str) -> Path:
    """A folder that can be written, so that no result is lost after minutes of measuring. It is created if missing."""
    try:
        Path(folder).mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return Path(folder)
    except OSError as error:
        raise argparse.ArgumentTypeError(
            f"cannot write to {folder!r} ({error.strerror}): give another folder"
        ) from error


def record(result: results.Result, out: Path | None, in_readme: Collection[str] | None = None) -> None:
    """Print a result and write it; in the repository, also fill the table of the experiment's README.

    Args:
        result: what was found.
        out: a folder to write below; None for the repository.
        in_readme: the figures that the README's table shows; None: those of all devices.
    """
    print(result)
    print(results.write(result, out))
    if out is None:
        results.fill_readme(result.experiment, in_readme)
        print("`python -m book values` writes what was recorded into the prose.")


def faster(a: Machine, b: Machine) -> Machine:
    """Return the better of two measurements of one machine, rate by rate.

    A shared machine is not equally fast at all times, and a bound is the best that was seen.
    """
    return replace(a, bandwidth=max(a.bandwidth, b.bandwidth), flops=max(a.flops, b.flops))


def in_rounds(
    rows_of: Callable[[Machine], list[results.Row]], device: torch.device, dtype: torch.dtype, rounds: int
) -> tuple[Machine, list[results.Row]]:
    """Measure an experiment's rows in rounds, and the machine's rates before each of them.

    Args:
        rows_of: measures one round, with bounds from the given rates.
        device: the machine.
        dtype: dtype of the products.
        rounds: number of rounds.

    Returns:
        The best rates, and `results.median_rows` of the rounds.
    """
    machine, measured = measure_machine(device, dtype), []
    for i in range(rounds):
        if i > 0:
            machine = faster(machine, measure_machine(device, dtype))
        measured.append(rows_of(machine))
    return machine, results.median_rows(measured)


def seconds_in_turns(runs: Sequence[Callable[[], object]], rounds: int) -> list[list[float]]:
    """Time functions in turns, after a warm-up, so a machine whose speed drifts favors none: all times of each."""
    for run in runs:
        run()
    seconds: list[list[float]] = [[] for _ in runs]
    for _ in range(rounds):
        for own, run in zip(seconds, runs, strict=True):
            start = time.perf_counter()
            run()
            own.append(time.perf_counter() - start)
    return seconds


def rate_row(
    figure: str,
    num_tokens: int,
    seconds: Sequence[float],
    bound: float | None,
    source: str,
    case: Mapping[str, results.Setting],
) -> results.Row:
    """Tokens/s: the median of several times, with the slowest and the fastest."""
    spread = num_tokens / max(seconds), num_tokens / min(seconds)
    return results.Row(figure, num_tokens / statistics.median(seconds), "tokens/s", bound, source, case, spread)


def graph_of(calls: Sequence[Callable[[], object]]) -> Callable[[], None]:
    """Capture all calls in one CUDA graph, and return its replay: a slow host takes longer to launch small kernels than
    the device takes to run them.
    """
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        calls[0]()  # libraries allocate and choose their kernels on a first call, which cannot be captured
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    return graph.replay


def on_gpu(experiment: str) -> results.Result:
    """An experiment's result on a GPU: this machine's if it has one, otherwise the recorded one.

    The experiment runs at the first call, for a minute or so, and its result is kept in `.cache/on_gpu`.

    Args:
        experiment: its folder's name.
    """
    recorded = results.recorded(experiment, "NVIDIA")
    if not torch.cuda.is_available():
        return recorded
    root = repository_root()
    kept = root / ".cache" / "on_gpu"
    if not results.load(experiment, kept):
        run_py = root / "experiments" / experiment / "run.py"
        command = [sys.executable, str(run_py), "--device", "cuda", "--out", str(kept)]
        run = subprocess.run(command, capture_output=True, text=True, check=False)
        if run.returncode:  # a smaller GPU, out of memory
            why = run.stderr.strip().splitlines()[-1:] or [f"exit code {run.returncode}"]
            print(f"{experiment} did not run on this GPU ({why[0]}). The result shown was recorded on another GPU.")
            return recorded
    return results.load(experiment, kept)[0]
