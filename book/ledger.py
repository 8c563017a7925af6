"""The engine's ledger: what each change gained on one workload. Experiments add entries; no entry is edited."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from itertools import groupby
from pathlib import Path

from book.display import Table
from book.paths import repository_root
from book.results import Result, Row, Setting
from book.units import quantity


@dataclass(frozen=True)
class Entry:
    """One recorded run: what had changed in the engine, where it ran, and the figure with its bound."""

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
        """Entries of one kind can be compared: the same device, workload, figure and dtype."""
        workload = self.case.get("workload", "throughput")
        return self.device, f"`{workload}`: {self.row.figure}, {self.case['dtype']}"

    @property
    def engine(self) -> str:
        """The attention backend, or what else distinguishes this engine from others of the same run."""
        return str(self.case["engine"]).removeprefix("mini_engine, ")


def add(result: Result, row: Row, change: str, root: Path | None = None) -> None:
    """Append a row of a result to docs/ledger.json.

    Args:
        result: the run.
        row: which of its rows.
        change: what is new in the engine, in a few words.
        root: of the repository.

    Raises:
        ValueError: if `change` is empty.
    """
    if not change.strip():
        raise ValueError("an entry of the ledger needs a few words on what changed in the engine")
    entry = Entry(change, result.device, result.date, result.versions, result.parameters, row)
    lines = [json.dumps(asdict(e)) for e in [*load(root), entry]]
    _file(root).parent.mkdir(parents=True, exist_ok=True)
    _file(root).write_text("[\n" + ",\n".join(lines) + "\n]\n", encoding="utf-8")


def load(root: Path | None = None) -> list[Entry]:
    """All entries, oldest first."""
    file = _file(root)
    if not file.exists():
        return []
    return [Entry(**{**e, "row": Row(**e["row"])}) for e in json.loads(file.read_text(encoding="utf-8"))]


def markdown(root: Path | None = None) -> str:
    """A table for each kind of entry: what changed, the figure, its share of the bound, and the gain."""
    devices: dict[str, dict[str, list[Entry]]] = {}
    for entry in load(root):
        device, what = entry.kind
        devices.setdefault(device, {}).setdefault(what, []).append(entry)
    parts = [f"## {device}\n\n{_series(kinds)}" for device, kinds in devices.items()]
    return "\n\n".join(parts) or "Nothing is recorded yet."


def _series(kinds: Mapping[str, list[Entry]]) -> str:
    """The tables of one device. Of each change, the fastest engine has a gain: over the fastest one before."""
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
    """The factor by which a figure improved: a rate by growing, a time or a size by shrinking."""
    return before.value / after.value if after.unit in ("s", "B") else after.value / before.value


def _file(root: Path | None) -> Path:
    return (root or repository_root()) / "docs" / "ledger.json"
