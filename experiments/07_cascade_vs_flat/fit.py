"""Fit the coefficients of the engine's `CascadeCosts` to the recorded kernel times, and check what the planner decides.

    python experiments/07_cascade_vs_flat/fit.py [RESULTS]

RESULTS is a file that run.py has written, by default results/nvidia-h200.json; no GPU is needed. From that file the
two tables go to the experiment's README, too.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path

import numpy as np
import torch
from jaxtyping import Float, Int64

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from book import results
from book.display import Table
from book.units import quantity
from mini_engine.attention.levels import H200_COSTS, CascadeCosts, LevelCosts, find_levels
from mini_engine.attention.spec import AttentionSpec

HERE = Path(__file__).resolve().parent
RECORDED = HERE / "results" / "nvidia-h200.json"
MARKS = "<!-- fit -->", "<!-- end of fit -->"
UNITS = {"reread_bandwidth": "B/s", "flops": "FLOP/s", "bandwidth": "B/s", "level_seconds": "s"}


@dataclass(frozen=True)
class Kind:
    """The kind of layer that was measured."""

    spec: AttentionSpec
    page_size: int
    dtype: torch.dtype

    @classmethod
    def of(cls, result: results.Result) -> Kind:
        """Read the kind of layer from a result's parameters."""
        q_heads, kv_heads, head_dim = (int(size) for size in str(result.parameters["heads"]).split(" / "))
        spec = AttentionSpec(0, q_heads, kv_heads, head_dim, head_dim**-0.5)
        return cls(spec, int(result.parameters["page size"]), getattr(torch, str(result.parameters["dtype"])))

    def costs(self, costs: CascadeCosts) -> LevelCosts:
        """Apply coefficients to the layer, as the engine does."""
        return LevelCosts.of(costs, self.spec, self.page_size, self.dtype)

    @property
    def amounts(self) -> LevelCosts:
        """What the coefficients divide: bytes and FLOPs of a page, and bytes of a token's merge."""
        return self.costs(CascadeCosts(reread_bandwidth=1.0, flops=1.0, bandwidth=1.0, level_seconds=0.0))


@dataclass(frozen=True)
class Times:
    """Seconds of a layer in each of N cases.

    Attributes:
        requests: requests of each case, with one query each.
        shared: pages that they share.
        own: pages of each request.
        flat: seconds of the flat kernel.
        cascade: seconds with the shared pages in a level.
    """

    requests: Int64[np.ndarray, " N"]
    shared: Int64[np.ndarray, " N"]
    own: Int64[np.ndarray, " N"]
    flat: Float[np.ndarray, " N"]
    cascade: Float[np.ndarray, " N"]

    @classmethod
    def of(cls, result: results.Result, page_size: int) -> Times:
        """Read the times of both ways, case by case."""
        rows = [row for row in result.rows if row.figure == "attention of a layer"]
        times = {way: {_case(row): row.value for row in rows if row.case["way"] == way} for way in ("flat", "cascade")}
        cases = np.array(list(times["flat"]))
        seconds = [np.array([times[way][tuple(case)] for case in cases.tolist()]) for way in ("flat", "cascade")]
        return cls(cases[:, 0], cases[:, 1] // page_size, -(-cases[:, 2] // page_size), *seconds)

    @property
    def saved(self) -> Float[np.ndarray, " N"]:
        return self.flat - self.cascade

    @property
    def avoided(self) -> Int64[np.ndarray, " N"]:
        """Pages that a level saves reading again: all reads but the first."""
        return (self.requests - 1) * self.shared

    def without(self, case: int) -> Times:
        """The times without one case."""
        return Times(*(np.delete(getattr(self, field.name), case) for field in fields(self)))


def _case(row: results.Row) -> tuple[int, ...]:
    return tuple(int(row.case[key]) for key in ("requests", "shared", "own"))


def measured_bandwidth(result: results.Result, kind: Kind) -> float:
    """The bandwidth of the machine, from which run.py derived each row's bound: bytes over seconds."""
    row = next(row for row in result.rows if row.figure == "attention of a layer")
    requests, shared, own = _case(row)
    assert row.bound is not None
    return (shared + requests * own) / kind.page_size * kind.amounts.reread_seconds / row.bound


# --- the fit ---------------------------------------------------------------------------------------------------------


def least_squares(
    terms: Sequence[Float[np.ndarray, " N"]], values: Float[np.ndarray, " N"], scale: Float[np.ndarray, " N"]
) -> tuple[Float[np.ndarray, " k"], float]:
    """Find the non-negative coefficients of a sum of terms with the least squared error relative to `scale`.

    There are few terms, so all subsets of them are tried.

    Returns:
        The coefficients, and the sum of the squared errors.
    """
    matrix, target = np.stack(terms, axis=1) / scale[:, None], values / scale
    best, least = np.zeros(len(terms)), float(target @ target)
    for size in range(1, len(terms) + 1):
        for chosen in map(list, itertools.combinations(range(len(terms)), size)):
            found = np.zeros(len(terms))
            found[chosen] = np.linalg.lstsq(matrix[:, chosen], target, rcond=None)[0]
            error = float(((matrix @ found - target) ** 2).sum())
            if found.min() >= 0 and error < least:
                best, least = found, error
    return best, least


def fit_compute(times: Times, page_seconds: float) -> float:
    """Fit the seconds of one query's attention to one page to the times of cascade.

    A level takes the longer of reading its pages once and computing all queries' attention to them. So it is
    bandwidth-bound below some number of requests and compute-bound from there on. Each number is tried.

    Args:
        times: of all cases.
        page_seconds: time to read a page from HBM.

    Raises:
        ValueError: if no case is compute-bound.
    """
    fits = []
    for least in np.unique(times.requests):
        bound = times.requests >= least
        terms = [np.ones(len(bound)), times.requests * times.own, bound * times.requests * times.shared]
        values = times.cascade - ~bound * times.shared * page_seconds
        found, error = least_squares([term.astype(float) for term in terms], values, times.cascade)
        fits.append((error, found[-1]))
    compute = min(fits)[1]
    # A measured time is a few percent off, so a level must take clearly longer than its bytes.
    if compute * times.requests.max() < 1.1 * page_seconds:
        raise ValueError("no case is compute-bound, so these times do not identify flops; measure more requests")
    return float(compute)


def fit(times: Times, amounts: LevelCosts, bandwidth: float) -> CascadeCosts:
    """Fit the coefficients to measured times.

    Args:
        times: of all cases.
        amounts: see `Kind.amounts`.
        bandwidth: measured bandwidth of HBM, taken as it is.

    Raises:
        ValueError: if the times do not identify a coefficient.
    """
    compute = fit_compute(times, amounts.reread_seconds / bandwidth)
    # What the planner predicts: saved = avoided * (reread - compute) - level - requests * merge.
    values = times.saved + times.avoided * compute + times.requests * amounts.merge_seconds / bandwidth
    terms = [times.avoided.astype(float), -np.ones(len(values))]
    (reread, level), _ = least_squares(terms, values, times.flat)
    if reread == 0:
        raise ValueError("cascade saves no time, so these times do not identify reread_bandwidth")
    return CascadeCosts(amounts.reread_seconds / reread, amounts.compute_seconds / compute, bandwidth, float(level))


# --- what the planner makes of it ------------------------------------------------------------------------------------


def predicted(times: Times, costs: LevelCosts) -> Float[np.ndarray, " N"]:
    """Seconds that the engine's cost model expects a level to save in each case."""
    per_page = float(costs.saving(np.ones(1, dtype=np.int64))[0])
    return times.avoided * per_page - np.array([costs.cost(n) for n in times.requests.tolist()])


def decisions(times: Times, costs: LevelCosts) -> list[str]:
    """What the engine's planner decides in each case."""
    decided = []
    for requests, shared in zip(times.requests.tolist(), times.shared.tolist(), strict=True):
        prefixes = np.append(0, np.full(requests - 1, shared))
        levels = find_levels(prefixes, costs.saving(np.ones(requests, dtype=np.int64)), costs.cost(requests))
        decided.append("cascade" if levels else "flat")
    return decided


def coefficients_table(times: Times, amounts: LevelCosts, fitted: CascadeCosts) -> Table:
    """The fitted coefficients beside the engine's, and their range when any one case is left out."""
    others = [fit(times.without(i), amounts, fitted.bandwidth) for i in range(len(times.flat))]
    rows = []
    for name, unit in UNITS.items():
        values = [getattr(other, name) for other in others]
        spread = " to ".join(quantity(end, unit) for end in (min(values), max(values)))
        how = ["the machine's, as measured", "–"] if name == "bandwidth" else ["fitted", spread]
        value, default = (quantity(getattr(costs, name), unit) for costs in (fitted, H200_COSTS))
        rows.append([f"`{name}`", value, *how, default])
    return Table(["coefficient", "value", "from", "without any one case", "the engine's default"], rows)


def cases_table(times: Times, kind: Kind, fitted: CascadeCosts) -> Table:
    """Measured and predicted saving of each case, and whether the planner would choose the faster way."""
    models = [kind.costs(costs) for costs in (fitted, H200_COSTS)]
    savings = [predicted(times, model) * 1e6 for model in models]
    faster = ["cascade" if saved > 0 else "flat" for saved in times.saved]
    decided = [decisions(times, model) for model in models]
    rows = []
    for i, requests in enumerate(times.requests.tolist()):
        case = [requests, *(pages[i] * kind.page_size for pages in (times.shared, times.own))]
        verdicts = [d[i] if d[i] == faster[i] else f"{d[i]} (wrong)" for d in decided]
        saved = [times.saved[i] * 1e6, *(saving[i] for saving in savings)]
        rows.append([*(f"{n:,}" for n in case), *(f"{us:,.1f}" for us in saved), faster[i], *verdicts])
    right = [sum(a == b for a, b in zip(d, faster, strict=True)) for d in decided]
    head = ["requests", "shared", "own", "saved, µs", "fit, µs", "defaults, µs", "faster", "fit", "defaults"]
    caption = (
        f"The planner is right in {right[0]} of {len(rows)} cases with the fitted coefficients, and in {right[1]} with "
        "the engine's defaults."
    )
    return Table(head, rows, caption)


def tables(result: results.Result) -> list[Table]:
    """Fit the coefficients to a result, and return both tables."""
    kind = Kind.of(result)
    times = Times.of(result, kind.page_size)
    fitted = fit(times, kind.amounts, measured_bandwidth(result, kind))
    return [coefficients_table(times, kind.amounts, fitted), cases_table(times, kind, fitted)]


def main(arguments: Sequence[str] | None = None) -> None:
    options = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    options.add_argument("results", nargs="?", type=Path, default=RECORDED, help="a file that run.py has written")
    file = options.parse_args(arguments).results.resolve()
    found = tables(results.read(file))
    print(*found, sep="\n\n")
    if file == RECORDED:
        results.fill(HERE / "README.md", MARKS, [table.markdown() for table in found])


if __name__ == "__main__":
    main()
