"""Quantities in prose, and the values in a record that they may state."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from book import results

UNITS = {
    **{"ns": (1e-9, "s"), "µs": (1e-6, "s"), "ms": (1e-3, "s"), "s": (1.0, "s")},
    **{"B": (1.0, "B"), "kB": (1e3, "B"), "MB": (1e6, "B"), "GB": (1e9, "B"), "TB": (1e12, "B")},
    **{"KiB": (2**10, "B"), "MiB": (2**20, "B"), "GiB": (2**30, "B")},
    **{"MB/s": (1e6, "B/s"), "GB/s": (1e9, "B/s"), "TB/s": (1e12, "B/s")},
    **{"GFLOP/s": (1e9, "FLOP/s"), "TFLOP/s": (1e12, "FLOP/s")},
    **{"tokens/s": (1.0, "tokens/s"), "%": (0.01, "%")},
}
_NUMBER = r"\d{1,3}(?:,\d{3})+(?:\.\d+)?|\d+(?:\.\d+)?"
_UNIT = "|".join(re.escape(unit) for unit in sorted(UNITS, key=len, reverse=True) if unit != "%")
# "4.1 ms", "1.4 to 2.7 s", "302, 357 and 552 tokens/s", "13%", "0.5 to 0.7%"
_QUANTITY = re.compile(
    rf"(?<![\w.,])(?P<numbers>(?:{_NUMBER})(?:(?:, | to | and | or )(?:{_NUMBER}))*) (?P<unit>{_UNIT})(?![\w/])"
    rf"|(?<![\w.,])(?P<percents>(?:{_NUMBER})(?: to (?:{_NUMBER}))?)%"
)
_NO_PROSE = re.compile(r"```.*?```|`[^`\n]*`|\$\$.*?\$\$|\$[^$\n]*\$|\]\([^)]*\)|^\|[^\n]*$", re.DOTALL | re.MULTILINE)


@dataclass(frozen=True)
class Quantity:
    """A number with its unit, as a text states it.

    Attributes:
        text: the number and the unit, such as "4.1 ms".
        value: in the base unit; a percentage is a share.
        tolerance: half of the last digit.
        unit: the base unit.
    """

    text: str
    value: float
    tolerance: float
    unit: str

    def states(self, values: Iterable[tuple[float, str]]) -> bool:
        """Whether one of the values, each with its base unit, is rounded to this quantity."""
        return any(unit == self.unit and abs(value - self.value) <= self.tolerance for value, unit in values)


def quantities(text: str) -> Iterator[Quantity]:
    """Yield the quantities of a Markdown text, without its code, formulas and tables."""
    prose = " ".join(_NO_PROSE.sub(" ", text).replace("\N{NO-BREAK SPACE}", " ").split())
    for found in _QUANTITY.finditer(prose):
        unit = found["unit"] or "%"
        scale, base = UNITS[unit]
        for number in re.findall(_NUMBER, found["numbers"] or found["percents"]):
            digits = len(number.partition(".")[2])
            text = f"{number}%" if unit == "%" else f"{number} {unit}"
            yield Quantity(text, float(number.replace(",", "")) * scale, 0.501 * 10**-digits * scale, base)


def values_of(result: results.Result) -> Iterator[tuple[float, str]]:
    """Yield what a text may state of a record, with base units.

    That is every value, bound, end of a spread and share of a bound, and the time per token where a row has tokens/s.
    """
    for row in result.rows:
        for value in (end for end in (row.value, row.bound, *(row.spread or ())) if end is not None):
            yield value, row.unit
            if row.unit == "tokens/s":
                yield 1 / value, "s"
        if row.share_of_bound is not None:
            yield row.share_of_bound, "%"
        if row.unit.startswith("of "):
            yield row.value, "%"


def digest(result: results.Result) -> str:
    """Return what changes with any recorded value."""
    rows = [(row.figure, sorted(row.case.items()), f"{row.value:.3g}") for row in result.rows]
    return hashlib.sha256(repr(sorted(rows, key=repr)).encode()).hexdigest()[:12]
