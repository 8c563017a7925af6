"""Recorded results of experiments: what was measured, where, with which versions, and against which bound.

An experiment writes one file for each device, `experiments/NN_slug/results/<device>.json`. Notebooks and the site's
results page read these files, so no number is typed by hand.
"""

import datetime
import json
import math
import re
import statistics
import tomllib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from book.display import Table
from book.environment import device_name, versions
from book.paths import repository_root
from book.units import number, quantity

# The rows that the table "engine so far" collects from each chapter's experiment.
ENGINE_SPEED = "engine: decode speed"
ENGINE_BYTES = "engine: bytes read per token"
ENGINE_THROUGHPUT = "engine: throughput"

Setting = str | int | float | bool


@dataclass(frozen=True)
class Row:
    """One measured figure. Times are in s, sizes in B, rates in B/s, FLOP/s, tokens/s.

    `bound` is the best the machine allows, in the same unit, and `bound_from` says how it is found; where nothing
    bounds the figure, `bound` is None and `bound_from` says why. `spread` is the smallest and the largest of several
    repetitions, whose median is `value`; None for a single run and for counts.
    """

    figure: str
    value: float
    unit: str
    bound: float | None
    bound_from: str
    case: Mapping[str, Setting] = field(default_factory=dict)
    spread: tuple[float, float] | None = None

    def __post_init__(self) -> None:
        if not self.figure.strip() or not self.unit.strip():
            raise ValueError(f"a row needs the name of its figure and a unit: {self.figure!r}, {self.unit!r}")
        if not math.isfinite(self.value):
            raise ValueError(f"{self.figure}: the value must be a finite number, not {self.value}")
        if not self.bound_from.strip():
            raise ValueError(f"{self.figure}: bound_from must say where the bound comes from, or why there is none")
        if self.bound is not None and not (math.isfinite(self.bound) and self.bound > 0):
            raise ValueError(f"{self.figure}: a bound is a number above 0, or None with the reason in bound_from")

    @property
    def share_of_bound(self) -> float | None:
        """How much of what is possible was reached. Times and bytes cannot go below their bound, rates not above."""
        if self.bound is None or self.value <= 0:
            return None
        return self.bound / self.value if self.unit in ("s", "B") else self.value / self.bound

    def cells(self) -> list[str]:
        """figure, case, value, bound, share, where the bound comes from."""
        case = ", ".join(f"{key} {value}" for key, value in self.case.items())
        share = "–" if self.share_of_bound is None else f"{self.share_of_bound:.0%}"
        bound = "–" if self.bound is None else quantity(self.bound, self.unit)
        measured = quantity(self.value, self.unit)
        if self.spread is not None:
            low, high = (quantity(end, self.unit) for end in self.spread)
            measured += f" ({low} to {high})"
        return [self.figure, case, measured, bound, share, self.bound_from]


def median_rows(rounds: Sequence[Sequence[Row]]) -> list[Row]:
    """The rows of several rounds with the same figures and cases: medians, and the smallest and largest values.

    A row with the same value in all rounds is a count, and stays as it is. Bounds are the last round's, because by then
    the machine has been measured most often.
    """
    rows = []
    for same in zip(*rounds, strict=True):
        values = [row.value for row in same]
        varies = min(values) < max(values)
        spread = (min(values), max(values)) if varies else same[0].spread
        rows.append(replace(same[-1], value=statistics.median(values), spread=spread))
    return rows


@dataclass(frozen=True)
class Result:
    """What one run of one experiment on one device found."""

    experiment: str
    device: str
    date: str
    versions: Mapping[str, str]
    parameters: Mapping[str, Setting]
    rows: Sequence[Row]

    def __post_init__(self) -> None:
        if not self.device.strip() or not self.versions or not self.rows:
            raise ValueError(f"{self.experiment}: a result needs a device, versions and at least one row")
        datetime.date.fromisoformat(self.date)

    @property
    def provenance(self) -> str:
        """One line: device, date, versions."""
        return f"Recorded on {self.device}, {self.date}; {', '.join(f'{k} {v}' for k, v in self.versions.items())}."

    def find(self, figure: str, **case: Setting) -> Row:
        """The one row of `figure` whose case has these values."""
        rows = [r for r in self.rows if r.figure == figure and all(r.case.get(k) == v for k, v in case.items())]
        if len(rows) != 1:
            raise KeyError(f"{self.experiment}: {len(rows)} rows of {figure!r} with {case}, expected one")
        return rows[0]

    def table(self) -> Table:
        head = ["figure", "case", "measured", "bound", "of the bound", "where the bound comes from"]
        rows = [row.cells() for row in self.rows]
        keep = [i for i in range(len(head)) if i != 1 or any(row[1] for row in rows)]
        return Table([head[i] for i in keep], [[row[i] for i in keep] for row in rows], self.provenance)

    def _repr_html_(self) -> str:
        return self.table()._repr_html_()

    def __repr__(self) -> str:
        return repr(self.table())


def new_result(
    experiment: str, rows: Sequence[Row], parameters: Mapping[str, Setting], device: str | None = None
) -> Result:
    """A result of today on this machine. `device` is "cpu" or "cuda" (default: the GPU where there is one)."""
    today = datetime.datetime.now(datetime.UTC).date().isoformat()
    return Result(experiment, device_name(device), today, versions(), dict(parameters), tuple(rows))


def with_recorded(result: Result, root: Path | None = None, section: str | None = None) -> Result:
    """Add the rows that the same device recorded with the same versions, for what was not measured again.

    This lets an experiment run its sections one at a time. Rows of the same day are kept unless their cases were
    measured again. Rows of an earlier day are kept unless their figures were measured again, and the case of a kept row
    gets an entry "recorded" with that day.

    Args:
        result: what was measured now.
        root: where results are, if not in the repository.
        section: an entry of the cases, such as "model": figures of rows that differ in it are different figures.
    """

    def figure(row: Row) -> tuple[str, Setting | None]:
        return row.figure, row.case.get(section) if section else None

    measured = [(row.figure, row.case) for row in result.rows]
    figures = {figure(row) for row in result.rows}
    for other in load(result.experiment, root):
        if (other.device, dict(other.versions)) != (result.device, dict(result.versions)):
            continue
        kept = []
        for row in other.rows:
            day = str(row.case.get("recorded", other.date))
            if day == result.date and (row.figure, row.case) not in measured:
                kept.append(row)
            elif day != result.date and figure(row) not in figures:
                kept.append(replace(row, case={**row.case, "recorded": day}))
        return replace(result, rows=(*kept, *result.rows))
    return result


def write(result: Result, root: Path | None = None) -> Path:
    """Write `experiments/<experiment>/results/<device>.json`, replacing what this device recorded before."""
    folder = (root or repository_root()) / "experiments" / result.experiment / "results"
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / f"{re.sub(r'[^a-z0-9]+', '-', result.device.lower()).strip('-')}.json"
    file.write_text(json.dumps(asdict(result), indent=1, ensure_ascii=False, allow_nan=False) + "\n", encoding="utf-8")
    return file


RESULTS, END_OF_RESULTS = "<!-- results -->", "<!-- end of results -->"


def fill_readme(experiment: str, figures: Collection[str] | None = None, root: Path | None = None) -> None:
    """Write the recorded rows of some figures, or of all, into the experiment's README, one table for each device.

    `run.py` calls this after `write`, so no number in a README's tables is typed by hand.
    """
    base = root or repository_root()
    tables = [
        replace(result, rows=tuple(row for row in result.rows if figures is None or row.figure in figures))
        .table()
        .markdown()
        for result in load(experiment, base)
    ]
    fill(base / "experiments" / experiment / "README.md", (RESULTS, END_OF_RESULTS), tables)


def fill(readme: Path, marks: tuple[str, str], parts: Sequence[str]) -> None:
    """Replace the text between two marks of a README.

    Args:
        readme: the file.
        marks: the two lines.
        parts: Markdown.
    """
    text = readme.read_text(encoding="utf-8")
    before, _, rest = text.partition(marks[0])
    _, end, after = rest.partition(marks[1])
    if not end:
        raise ValueError(f"{readme.parent.name}/README.md: the marks {marks[0]} and {marks[1]} are missing")
    readme.write_text("\n\n".join([before + marks[0], *parts, marks[1] + after]), encoding="utf-8")


def read(file: Path) -> Result:
    """One results file, checked: every row has its unit, and its bound or the reason why it has none."""
    try:
        data = json.loads(file.read_text(encoding="utf-8"))
        return Result(**{**data, "rows": tuple(Row(**row) for row in data["rows"])})
    except (ValueError, TypeError, KeyError) as error:
        raise ValueError(f"{file.parents[1].name}/results/{file.name}: {error}") from error


def load(experiment: str, root: Path | None = None) -> list[Result]:
    """Every recorded result of an experiment, one for each device, in the order of their file names."""
    folder = (root or repository_root()) / "experiments" / experiment / "results"
    return [read(file) for file in sorted(folder.glob("*.json"))]


def recorded(experiment: str, device: str | None = None) -> Result:
    """The recorded result of `experiment` on the device whose name contains `device` (None: there is only one)."""
    results = load(experiment)
    matching = [r for r in results if device is None or device.lower() in r.device.lower()]
    if len(matching) != 1:
        names = ", ".join(r.device for r in results) or "none"
        raise KeyError(f"{experiment}: {len(matching)} results match device {device!r}; recorded: {names}")
    return matching[0]


def results_page_markdown(root: Path) -> str:
    """The site's results page: every experiment, every device, every figure beside its bound."""
    parts = [
        "# Results",
        "",
        "Every figure is shown with the best value that its machine allows and the source of that bound, or with the"
        " reason why it has none. Each experiment's page states the question, the method, and what the figures mean.",
    ]
    for folder in sorted((root / "experiments").glob("*/results")):
        experiment, readme = folder.parent.name, folder.parent / "README.md"
        results = load(experiment, root)
        if not results:
            continue
        lines = readme.read_text(encoding="utf-8").splitlines() if readme.exists() else []
        title = next((line[2:] for line in lines if line.startswith("# ")), experiment)
        parts += ["", f"## [{title}](experiments/{experiment}/README.md)"]
        for result in results:
            settings = ", ".join(f"{key} {value}" for key, value in result.parameters.items())
            parts += [
                "",
                '<details class="nb-fold" markdown="1">',
                f"<summary>{result.device}: {len(result.rows)} figures</summary>",
                "",
                *([f"With {settings}.", ""] if settings else []),
                result.table().markdown(),
                "",
                "</details>",
            ]
    if len(parts) == 3:
        parts += ["", "No result is recorded yet."]
    return "\n".join(parts) + "\n"


NONE = "–"
SPEEDS = (
    "The speeds are in tokens/s. The 32 requests have prompts of 16 to 128 tokens, outputs of 16 to 96, and the memory "
    "of eight contiguous preallocations. A dash means that there is no measurement."
)


def so_far(chapter: int) -> Table:
    """The table "engine so far" up to `chapter`: what each chapter adds, and the engine's bytes and speeds with it.

    The words come from `docs/engine_so_far.toml`, and the figures from each chapter's experiment; speeds are shown for
    every device.
    """
    root = repository_root()
    words = tomllib.loads((root / "docs" / "engine_so_far.toml").read_text(encoding="utf-8"))["chapter"]
    entries = sorted((entry for entry in words if entry["number"] <= chapter), key=lambda entry: entry["number"])
    recorded = [r for name in dict.fromkeys(entry["experiment"] for entry in entries) for r in load(name, root)]
    devices = sorted({r.device for r in recorded if any(row.figure == ENGINE_SPEED for row in r.rows)})

    def cell(entry: Mapping[str, int | str], device: str, figure: str) -> str:
        results = [r for r in recorded if (r.experiment, r.device) == (entry["experiment"], device)]
        rows = [
            row for r in results for row in r.rows if (row.figure, row.case.get("chapter")) == (figure, entry["number"])
        ]
        if len(rows) > 1:
            raise ValueError(f"{entry['experiment']}: {len(rows)} rows of {figure!r}: record one case")
        if not rows:
            return NONE
        return quantity(rows[0].value, "B") if figure == ENGINE_BYTES else number(rows[0].value)

    def size(entry: Mapping[str, int | str]) -> str:
        sizes = [cell(entry, device, ENGINE_BYTES) for device in devices]
        return next((found for found in sizes if found != NONE), NONE)

    def dtypes() -> str:
        of: dict[str, set[str]] = {}
        for row in (row for r in recorded for row in r.rows if row.figure == ENGINE_SPEED):
            of.setdefault(str(row.case.get("dtype")), set()).add(f"{row.case['chapter']:02}")
        of = {dtype: found for dtype, chapters in of.items() if (found := chapters & {row[0] for row in rows})}
        if len(of) < 2:
            return ""
        parts = (f"{dtype} in chapter{'s' * (len(own) > 1)} {', '.join(sorted(own))}" for dtype, own in of.items())
        return f" The dtype is {', and '.join(parts)}."

    header = ["chapter", "what it adds", "bytes read per token"]
    header += [f"{device}: {what}" for device in devices for what in ("one request", "32 requests")]
    rows = [
        [f"{entry['number']:02}", entry["adds"]]
        + [size(entry)]
        + [cell(entry, device, figure) for device in devices for figure in (ENGINE_SPEED, ENGINE_THROUGHPUT)]
        for entry in entries
    ]
    return Table(header, rows, SPEEDS + dtypes() if devices else "Nothing measured yet.")
