"""The page at `/`: chat with the model, and watch the KV cache, the batch and the queue of the engine.

The style and the script are put into the HTML, so that the page is one file. The Content-Security-Policy allows these
two by their hashes, and requests to this server; it allows nothing else, whatever text a model generates.
"""

from __future__ import annotations

import hashlib
from base64 import b64encode
from dataclasses import dataclass
from pathlib import Path

FOLDER = Path(__file__).with_name("page")


@dataclass(frozen=True)
class Page:
    """A page, ready to be sent.

    Attributes:
        html: the page with its style and its script.
        headers: the headers that it is sent with.
    """

    html: str
    headers: dict[str, str]


def read_page() -> Page:
    """Read the files of the page."""
    html, style, script = (
        (FOLDER / name).read_text(encoding="utf-8") for name in ("index.html", "page.css", "page.js")
    )
    policy = {
        "default-src": "'none'",
        "style-src": _hash_of(style),
        "script-src": _hash_of(script),
        "connect-src": "'self'",
        "img-src": "data:",  # the empty icon
        "base-uri": "'none'",
        "form-action": "'none'",
        "frame-ancestors": "'none'",
    }
    headers = {
        "Content-Security-Policy": "; ".join(f"{name} {value}" for name, value in policy.items()),
        "Cache-Control": "no-cache",
        "Referrer-Policy": "no-referrer",
        "X-Content-Type-Options": "nosniff",
    }
    return Page(html.replace("/* page.css */", style).replace("/* page.js */", script), headers)


def _hash_of(text: str) -> str:
    return f"'sha256-{b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
