"""The engine's ledger: how much each change gained on each workload. Experiments append entries, and none is edited."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from itertools import groupby
from pathlib import Path

from book.display import Table
from book.paths import repository_root
from book.results import Result, Row, Setting
from book.units import quantity

QWEN3 = "Qwen3-0.6B"  # the model of the first entries of a GPU, which do not name it


@dataclass(frozen=True)
class Entry:
    """One recorded run: what had changed in the engine, the device, and the measured value with its bound."""

    change: str
    device: str
    date: str
    versions: Mapping[str, str]
    parameters: Mapping[str, Setting]
    row: Row

    @property
    def case(self) -> Mapping[str, Setting]:
        """The run's parameters and the row's case."""
        return {**self.parameters, **self.row.case}

    @property
    def kind(self) -> tuple[str, str]:
        """The device, and the workload, figure, dtype and model. Only entries of the same kind are compared."""
        workload, model = (
            self.case.get("workload", "throughput"),
            str(self.case.get("model", QWEN3)).removesuffix("'s shape"),
        )
        return self.device, f"`{workload}`: {self.row.figure}, {self.case['dtype']}, {model}"

    @property
    def engine(self) -> str:
        """The attention backend, or whatever else distinguishes the engine from the other engines of the run."""
        return str(self.case["engine"]).removeprefix("mini_engine, ")


def add(result: Result, row: Row, change: str, root: Path | None = None) -> None:
    """Append a row of a result to docs/ledger.json.

    Args:
        result: the result of the run.
        row: the row of the result.
        change: what is new in the engine, in a few words.
        root: root of the repository; default this one.

    Raises:
        ValueError: if `change` is empty.
    """
    if not change.strip():
        raise ValueError("an entry of the ledger needs a few words about what changed in the engine")
    entry = Entry(change, result.device, result.date, result.versions, result.parameters, row)
    lines = [json.dumps(asdict(e)) for e in [*load(root), entry]]
    _file(root).parent.mkdir(parents=True, exist_ok=True)
    _file(root).write_text("[\n" + ",\n".join(lines) + "\n]\n", encoding="utf-8")


def load(root: Path | None = None) -> list[Entry]:
    """Return all entries, oldest first."""
    file = _file(root)
    if not file.exists():
        return []
    return [Entry(**{**e, "row": Row(**e["row"])}) for e in json.loads(file.read_text(encoding="utf-8"))]


def markdown(root: Path | None = None) -> str:
    """Return a table for each kind of entry: what changed, the value, its share of the bound, and the gain."""
    devices: dict[str, dict[str, list[Entry]]] = {}
    for entry in load(root):
        device, what = entry.kind
        devices.setdefault(device, {}).setdefault(what, []).append(entry)
    parts = [f"## {device}\n\n{_series(kinds)}" for device, kinds in devices.items()]
    return "\n\n".join(parts) or "Nothing is recorded yet."


def _series(kinds: Mapping[str, list[Entry]]) -> str:
    """Return the tables of one device. The fastest engine of each change has a gain over the fastest engine before."""
    parts = []
    for what, entries in kinds.items():
        rows, before = [], None
        for _, group in groupby(entries, key=lambda entry: entry.change):
            together = list(group)
            best = max((entry.row for entry in together), key=lambda row: _gain(together[0].row, row))
            for entry in together:
                gain = f"{_gain(before, best):.2f}x" if before is not None and entry.row is best else ""
                share = "" if entry.row.share_of_bound is None else f"{entry.row.share_of_bound:.0%}"
                measured = quantity(entry.row.value, entry.row.unit)
                rows.append([entry.date, entry.change, entry.engine, measured, share, gain])
            before = best if before is None or _gain(before, best) > 1 else before
        versions = ", ".join(f"{name} {version}" for name, version in entries[-1].versions.items())
        header = ["date", "what changed", "engine", "measured", "of the bound", "gain"]
        table = Table(header, rows, f"Versions of the last line: {versions}.")
        parts.append(f"### {what}\n\n{table.markdown()}")
    return "\n\n".join(parts)


def _gain(before: Row, after: Row) -> float:
    """Return the factor of an improvement: a larger value, or for a time or a size a smaller one."""
    return before.value / after.value if after.unit in ("s", "B") else after.value / before.value


def _file(root: Path | None) -> Path:
    return (root or repository_root()) / "docs" / "ledger.json"
