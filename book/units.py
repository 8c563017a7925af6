"""Numbers and units as the book prints them."""

import math

# Units that take an SI prefix. Everything else (tokens/s, pages, ×) is printed as it is.
_PREFIXED = {"s", "B", "B/s", "FLOP", "FLOP/s"}
_PREFIXES = (
    (1e15, "P"),
    (1e12, "T"),
    (1e9, "G"),
    (1e6, "M"),
    (1e3, "k"),
    (1.0, ""),
    (1e-3, "m"),
    (1e-6, "µ"),
    (1e-9, "n"),
)


def number(value: float, digits: int = 3) -> str:
    """`value` with `digits` significant digits; whole numbers below a billion in full: 2,048 · 12.6 · 3.1e-05."""
    if not math.isfinite(value):
        return {math.inf: "∞", -math.inf: "−∞"}.get(value, "NaN")
    if value == round(value) and abs(value) < 1e9:
        return f"{round(value):,}"
    if not 1e-3 <= abs(value) < 1e9:
        return f"{value:.{digits - 1}e}"
    if abs(value) >= 10**digits:
        return f"{round(value):,}"
    rounded = float(f"{value:.{digits}g}")  # 9.999 becomes 10.0 and needs one decimal less
    return f"{rounded:,.{max(0, digits - 1 - math.floor(math.log10(abs(rounded))))}f}"


def quantity(value: float, unit: str, digits: int = 3) -> str:
    """`value` with its unit, seconds, bytes and FLOPs with an SI prefix: 1.25 ms · 4.3 GB/s · 31.5 tokens/s."""
    if unit not in _PREFIXED or value == 0 or not math.isfinite(value):
        return f"{number(value, digits)} {unit}"
    scale, prefix = next((p for p in _PREFIXES if abs(value) >= p[0]), _PREFIXES[-1])
    return f"{number(value / scale, digits)} {prefix}{unit}"
