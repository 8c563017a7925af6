"""Leave out of a drawing what a browser does not draw: mermaid and matplotlib write much that has no effect."""

from __future__ import annotations

import re
from html import unescape

from bs4 import Tag

ANIMATION = re.compile(r"@keyframes[^{]*\{[^{}]*\{[^{}]*\}\s*\}")
RULE = re.compile(r"([^{}]+)\{[^{}]*\}")
DEFINITIONS = ["marker", "filter", "lineargradient"]
WITH_SPACES = ["text", "tspan", "style", "foreignobject"]
REFERENCE = re.compile(r"url\(#([\w-]+)\)")
NAME = re.compile(r"\b(f[0-9a-f]{8}-)(\w+)")  # what book.figures makes of matplotlib's ids
SHIFT = re.compile(r"translate\([^)]*\)")
DIGITS = re.compile(r"(\.\d\d)\d+")
POINT = re.compile(r"([ML])(\S+?) ([^\sL-z]+)")


def slim(svg: Tag) -> None:
    """Shorten what is in a drawing; it looks the same."""
    used = set(REFERENCE.findall(str(svg)))
    for definition in svg.find_all(DEFINITIONS):
        if definition.get("id") not in used:
            definition.decompose()
    for style in svg.find_all("style"):
        style.string = RULE.sub(lambda rule: rule[0] if _matches(svg, rule[1]) else "", ANIMATION.sub("", style.string))
    for space in svg.find_all(string=re.compile(r"^\s+$")):
        if space.find_parent(WITH_SPACES) is None:
            space.extract()
    numbers: dict[str, int] = {}
    for element in svg.find_all(True):
        attributes = {name: _shortened(name, value, numbers) for name, value in element.attrs.items()}
        element.attrs = {name.removeprefix("xlink:"): value for name, value in attributes.items() if value}
    for group in reversed(svg.find_all(["g", "defs"])):
        if not group.contents:
            group.decompose()
        elif group.name == "g" and not group.attrs:
            group.unwrap()


def _matches(svg: Tag, selector: str) -> bool:
    return svg.parent is not None and svg.parent.select_one(unescape(selector)) is not None


def _shortened(name: str, value: str | list[str], numbers: dict[str, int]) -> str | list[str] | None:
    """The value of an attribute, or None if it has no effect; `numbers` gives each long id of matplotlib its number."""
    if name.startswith(("data-", "xmlns")):
        return None
    if isinstance(value, list):  # classes
        return value
    if name in ("id", "clip-path", "xlink:href"):
        return NAME.sub(lambda found: f"{found[1]}{numbers.setdefault(found[2], len(numbers))}", value)
    if name == "style":
        return re.sub(r"\s*([:;])\s*", r"\1", value).strip(";")
    if name == "transform":
        # A scale of an image needs its digits.
        return None if value.startswith("rotate(-0 ") else SHIFT.sub(lambda shift: DIGITS.sub(r"\1", shift[0]), value)
    if name in ("d", "points"):
        path = re.sub(r"\s*([A-Za-z])\s*", r"\1", " ".join(DIGITS.sub(r"\1", value).split()))
        return _with_straight_lines(path) if set(re.findall("[A-Za-z]", path)) <= set("MLz") else path
    return value


def _with_straight_lines(path: str) -> str:
    """The path of a polygon with H and V for the lines that are horizontal or vertical."""
    last_x = last_y = ""

    def line(point: re.Match[str]) -> str:
        nonlocal last_x, last_y
        command, x, y = point.groups()
        short = f"H{x}" if y == last_y else f"V{y}" if x == last_x else point[0]
        last_x, last_y = x, y
        return short if command == "L" else point[0]

    return POINT.sub(line, path)
