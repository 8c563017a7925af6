"""The parts of an answer: reasoning, text, and tool calls, told apart while the text arrives.

A model writes all of them into one text, with marks between them that its chat template defines. A mark may arrive in
pieces, so a text that may be the beginning of one is held back until it is known.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, runtime_checkable

from mini_engine.errors import RequestError

ToolFormat = Literal["hermes", "llama3_json"]
THINK, END_THINK, CALL, END_CALL = "<think>", "</think>", "<tool_call>", "</tool_call>"
PYTHON_TAG = "<|python_tag|>"


@dataclass(frozen=True)
class ToolCall:
    """A call of a function.

    Attributes:
        name: the function.
        arguments: its arguments, as JSON.
        identifier: by which the function's result names the call.
    """

    name: str
    arguments: str
    identifier: str = field(default_factory=lambda: f"call_{uuid.uuid4().hex[:24]}")


@dataclass(frozen=True)
class Part:
    """A piece of an answer.

    Attributes:
        kind: "reasoning" or "content", whose text goes on, or "call".
        text: the new text of reasoning or content.
        call: the call.
    """

    kind: Literal["reasoning", "content", "call"]
    text: str = ""
    call: ToolCall | None = None


def tool_format(template: str | None) -> ToolFormat | None:
    """Return the form in which a chat template asks for tool calls; None if it knows no tools.

    Hermes' and Qwen's models write JSON between <tool_call> and </tool_call>, and Llama 3's models nothing but JSON.
    """
    if template is None or "tools" not in template:
        return None
    return "hermes" if CALL in template else "llama3_json" if '"parameters"' in template else None


@runtime_checkable
class Parser(Protocol):
    """Tells the parts of one output apart.

    Attributes:
        num_calls: tool calls so far.
    """

    num_calls: int

    def push(self, text: str) -> Iterator[Part]:
        """Yield what is known after some more text."""

    def finish(self) -> Iterator[Part]:
        """Yield the rest, after the last text."""


class ForcedCalls:
    """The parts of an output that a grammar holds to tool calls, and nothing else.

    Args:
        name: the function whose arguments the output is; None: it is a list of calls.
    """

    def __init__(self, name: str | None) -> None:
        self._name, self._text, self.num_calls = name, "", 0

    def push(self, text: str) -> Iterator[Part]:
        self._text += text
        yield from ()

    def finish(self) -> Iterator[Part]:
        """Yield the calls; text that was cut off, and therefore is no JSON, is content."""
        try:
            found = json.loads(self._text)
        except ValueError:
            yield Part("content", self._text)
            return
        calls = found if self._name is None else [{"name": self._name, "parameters": found}]
        for call in calls:
            self.num_calls += 1
            yield Part("call", call=ToolCall(call["name"], json.dumps(call["parameters"])))


class OutputParser:
    """Tells the parts of one output apart.

    Args:
        tools: the form of tool calls; None: the text has none.
        reasons: the text may begin with reasoning between <think> and </think>.
        thinks: the prompt ends with <think>, so the text begins within reasoning.
    """

    def __init__(self, tools: ToolFormat | None = None, reasons: bool = False, thinks: bool = False) -> None:
        self._tools = tools
        self._state = "reasoning" if thinks else "start" if reasons else "content"
        self._held = ""
        self._is_blank = True  # no content has been seen
        self._follows_mark = thinks  # line breaks after a mark do not belong to the text
        self.num_calls = 0

    def push(self, text: str) -> Iterator[Part]:
        """Yield what is known after some more text."""
        self._held += text
        while True:
            before = self._state, len(self._held)
            yield from self._advance()
            if (self._state, len(self._held)) == before:
                return

    def finish(self) -> Iterator[Part]:
        """Yield the rest, after the last text. A call that is not complete stays text."""
        held, self._held = self._held, ""
        if self._state == "json":
            yield from self._calls(held, held)
        elif self._state == "call":
            yield from self._content(CALL + held)
        elif self._state == "reasoning":
            yield from self._reasoning(held)
        else:
            yield from self._content(held)

    def _advance(self) -> Iterator[Part]:
        if self._follows_mark and self._state in ("reasoning", "content"):
            self._held = self._held.lstrip("\n")
            self._follows_mark = not self._held
        if self._state == "start":
            begun = self._held.lstrip()
            if begun.startswith(THINK):
                self._state, self._held, self._follows_mark = "reasoning", begun.removeprefix(THINK), True
            elif begun and not THINK.startswith(begun):
                self._state = "content"
        elif self._state == "reasoning":
            text, mark, rest = self._until(END_THINK)
            yield from self._reasoning(text.rstrip("\n") if mark else text)
            if mark:
                self._state, self._held, self._follows_mark = "content", rest, True
        elif self._state == "content" and self._tools == "hermes":
            text, mark, rest = self._until(CALL)
            yield from self._content(text.rstrip("\n") if mark else text)
            if mark:
                self._state, self._held = "call", rest
        elif self._state == "content" and self._tools == "llama3_json" and self._is_blank:
            begun = self._held.lstrip()
            if begun.startswith(("{", PYTHON_TAG)):
                self._state = "json"
            elif begun and not PYTHON_TAG.startswith(begun):
                self._is_blank = False
        elif self._state == "content":
            text, self._held = self._held, ""
            yield from self._content(text)
        elif self._state == "call" and END_CALL in self._held:
            text, _, rest = self._held.partition(END_CALL)
            self._state, self._held, self._follows_mark = "content", rest, True
            yield from self._calls(text, CALL + text + END_CALL)

    def _until(self, mark: str) -> tuple[str, str, str]:
        """Return the text before a mark, the mark if it is there, and the rest. What may begin the mark is held."""
        text, found, rest = self._held.partition(mark)
        if not found:
            # Line breaks before a mark do not belong to the text, so they are held, too.
            end = len(text.rstrip("\n"))
            for length in range(min(len(mark) - 1, len(text)), 0, -1):
                if mark.startswith(text[-length:]):
                    end = len(text[:-length].rstrip("\n"))
                    break
            text, self._held = text[:end], text[end:]
        return text, found, rest

    def _reasoning(self, text: str) -> Iterator[Part]:
        if text:
            yield Part("reasoning", text)

    def _content(self, text: str) -> Iterator[Part]:
        if text:
            self._is_blank = False
            yield Part("content", text)

    def _calls(self, text: str, otherwise: str) -> Iterator[Part]:
        """Yield the call that a text is, or the text as content if it is none."""
        try:
            found = json.loads(text.strip().removeprefix(PYTHON_TAG))
            arguments = found.get("arguments", found.get("parameters", {}))
            call = ToolCall(found["name"], arguments if isinstance(arguments, str) else json.dumps(arguments))
        except (ValueError, TypeError, KeyError, AttributeError):
            yield from self._content(otherwise)
            return
        self.num_calls += 1
        yield Part("call", call=call)


def with_parsed_arguments(message: dict[str, Any]) -> dict[str, Any]:
    """Return an assistant's message whose calls have their arguments as objects, which chat templates expect.

    Raises:
        RequestError: if a call is malformed.
    """
    calls = message.get("tool_calls")
    if not calls:
        return message
    try:
        parsed = [
            call | {"function": call["function"] | {"arguments": json.loads(call["function"]["arguments"] or "{}")}}
            for call in calls
        ]
    except (ValueError, TypeError, KeyError) as error:
        raise RequestError("a tool call of a message needs function.name, and function.arguments as JSON") from error
    return message | {"tool_calls": parsed}
