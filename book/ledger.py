"""The engine's ledger: what each change gained on one workload. Experiments add entries; no entry is edited."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
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
    def kind(self) -> tuple[str, str]:
        """Entries of one kind can be compared: the same device, workload, figure, engine and dtype."""
        case = {**self.parameters, **self.row.case}
        workload, engine, dtype = case.get("workload", "throughput"), case["engine"], case["dtype"]
        return self.device, f"`{workload}`: {self.row.figure} of {engine}, {dtype}"


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
    """A table for each kind of entry: what changed, the figure, its share of the bound, and the gain over the last."""
    devices: dict[str, dict[str, list[Entry]]] = {}
    for entry in load(root):
        device, what = entry.kind
        devices.setdefault(device, {}).setdefault(what, []).append(entry)
    parts = [f"## {device}\n\n{_series(kinds)}" for device, kinds in devices.items()]
    return "\n\n".join(parts) or "Nothing is recorded yet."


def _series(kinds: Mapping[str, list[Entry]]) -> str:
    """The tables of one device."""
    parts = []
    for what, entries in kinds.items():
        rows, before = [], None
        for entry in entries:
            gain = "" if before is None else f"{_gain(before, entry.row):.2f}x"
            share = "" if entry.row.share_of_bound is None else f"{entry.row.share_of_bound:.0%}"
            rows.append([entry.date, entry.change, quantity(entry.row.value, entry.row.unit), share, gain])
            before = entry.row
        versions = ", ".join(f"{name} {version}" for name, version in entries[-1].versions.items())
        header = ["date", "what changed", "measured", "of the bound", "gain"]
        table = Table(header, rows, f"Versions of the last line: {versions}.")
        parts.append(f"### {what}\n\n{table.markdown()}")
    return "\n\n".join(parts)


def _gain(before: Row, after: Row) -> float:
    """The factor by which a figure improved: a rate by growing, a time or a size by shrinking."""
    return before.value / after.value if after.unit in ("s", "B") else after.value / before.value


def _file(root: Path | None) -> Path:
    return (root or repository_root()) / "docs" / "ledger.json"
