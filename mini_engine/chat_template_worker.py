"""Render chat templates that nobody has vouched for: a JSON request and an answer per line.

`chat_template.render_chat` runs this file as a process of its own, which serves all conversations. A template can loop
forever or allocate gigabytes, and no check inside Python can interrupt an operation in C, so the kernel ends a process
that exceeds its processor time, and refuses memory beyond its limit.
"""

import json
import resource
import signal
import sys
from typing import Any

import psutil
from transformers.utils.chat_template_utils import render_jinja_template

CPU_SECONDS = 2  # for each conversation
MEMORY_BYTES = 512 * 2**20  # above what the process has when it starts
OUTPUT_CHARS = 4 * 2**20  # about a million tokens


def render(request: dict[str, Any]) -> tuple[str, str]:
    """Return the text and "", or "" and the problem."""
    try:
        text = render_jinja_template(**request)[0][0]
        return text, "" if text else "it wrote nothing"
    except Exception as error:  # a template may raise anything
        return "", " ".join(f"{type(error).__name__}: {error}".split())[:500]


def main() -> None:
    """Answer each request with what `render` returns, in JSON."""
    limit, hard = psutil.Process().memory_info().vms + MEMORY_BYTES, resource.getrlimit(resource.RLIMIT_AS)[1]
    resource.setrlimit(resource.RLIMIT_AS, (limit if hard == resource.RLIM_INFINITY else min(limit, hard), hard))
    for line in sys.stdin:
        signal.setitimer(signal.ITIMER_PROF, CPU_SECONDS)  # then SIGPROF ends the process
        text, problem = render(json.loads(line))
        signal.setitimer(signal.ITIMER_PROF, 0)
        if len(text) > OUTPUT_CHARS:
            text, problem = "", f"it wrote {len(text)} characters; it may write {OUTPUT_CHARS}"
        print(json.dumps([text, problem]), flush=True)


if __name__ == "__main__":
    main()
