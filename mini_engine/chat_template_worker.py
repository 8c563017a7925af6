"""Render one chat template under limits: a JSON request on standard input, a JSON answer on standard output.

`chat_template.render_chat` runs this file in a separate process for each conversation. To start fast, it imports Jinja
but nothing from the engine.
"""

import json
import resource
import sys
from datetime import datetime
from typing import Any

import jinja2
import jinja2.ext
from jinja2.nodes import Scope
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

CPU_SECONDS = 2
MEMORY_BYTES = 512 * 2**20  # of address space, including the interpreter's own
OUTPUT_CHARS = 4 * 2**20  # about a million tokens


class Generation(jinja2.ext.Extension):
    """The tag `{% generation %}`, which marks assistant text for training and renders its contents unchanged."""

    tags = {"generation"}  # noqa: RUF012  (declared this way by Jinja)

    def parse(self, parser: Parser) -> Scope:
        line = next(parser.stream).lineno
        return Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)


class Namespace(jinja2.utils.Namespace):
    """Jinja's namespace without names that begin with an underscore, which Python itself uses; as in transformers."""

    def __init__(self, /, *args: Any, **attributes: Any) -> None:
        super().__init__()
        for name, value in dict(*args, **attributes).items():
            self[name] = value

    def __setitem__(self, name: str, value: Any) -> None:
        if str(name).startswith("_"):
            raise jinja2.exceptions.SecurityError(f"a namespace cannot hold {name!r}; leave out the underscore")
        super().__setitem__(name, value)


def raise_exception(message: str) -> None:
    """Refuse the conversation, from within a template."""
    raise jinja2.TemplateError(message)


def tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Write JSON as it is; Jinja's own filter escapes HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def render(template: str, variables: dict[str, Any]) -> str:
    """Render a template in the environment that transformers gives to chat templates."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = tojson
    environment.globals |= {
        "raise_exception": raise_exception,
        "strftime_now": lambda pattern: datetime.now().strftime(pattern),
        "namespace": Namespace,
    }
    return environment.from_string(template).render(variables)


def set_limits() -> None:
    """Limit this process. At the memory limit Python raises MemoryError; at the time limit the kernel kills it."""
    limits = {resource.RLIMIT_CPU: CPU_SECONDS, resource.RLIMIT_AS: MEMORY_BYTES, resource.RLIMIT_CORE: 0}
    for kind, limit in limits.items():
        hard = resource.getrlimit(kind)[1]
        limit = limit if hard == resource.RLIM_INFINITY else min(limit, hard)  # a hard limit cannot be raised
        resource.setrlimit(kind, (limit, limit))


def main() -> None:
    """Write {"text": ...} or {"error": ...}, or exit with an error when memory runs out."""
    set_limits()
    try:
        text = render(**json.load(sys.stdin.buffer))
        answer = {"text": text}
        if not 0 < len(text) <= OUTPUT_CHARS:
            answer = {"error": f"it wrote {len(text)} characters; it must write 1 to {OUTPUT_CHARS}"}
    except MemoryError:
        raise
    except Exception as error:  # a template may raise anything
        answer = {"error": " ".join(f"{type(error).__name__}: {error}".split())[:500]}
    json.dump(answer, sys.stdout)


if __name__ == "__main__":
    main()
