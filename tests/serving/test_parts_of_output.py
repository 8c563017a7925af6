"""Reasoning, text and tool calls of an output, in whichever pieces it arrives."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mini_engine.errors import RequestError
from mini_engine.serving.parts_of_output import OutputParser, tool_format, with_parsed_arguments

CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": "x<y"}}\n</tool_call>'
ADD = ("add", {"a": 1, "b": "x<y"})
LLAMA = '{"name": "add", "parameters": {"a": 1, "b": "x<y"}}'
CASES: list[tuple[dict[str, Any], str, list[Any]]] = [
    ({}, "plain <think> text", [("content", "plain <think> text")]),
    ({"reasons": True}, "<think>\nwhy\n</think>\n\nbecause", [("reasoning", "why"), ("content", "because")]),
    ({"reasons": True}, "no reason", [("content", "no reason")]),
    ({"reasons": True}, "<thin", [("content", "<thin")]),
    ({"thinks": True}, "why\n</think>\nbecause", [("reasoning", "why"), ("content", "because")]),
    ({"thinks": True}, "why, and no end </thi", [("reasoning", "why, and no end </thi")]),
    ({"tools": "hermes"}, CALL, [ADD]),
    ({"tools": "hermes"}, f"I add.\n{CALL}\n{CALL}", [("content", "I add."), ADD, ADD]),
    ({"tools": "hermes"}, "a < b, <tool", [("content", "a < b, <tool")]),
    ({"tools": "hermes"}, "<tool_call>no json</tool_call>", [("content", "<tool_call>no json</tool_call>")]),
    ({"tools": "hermes"}, '<tool_call>\n{"name": "cut', [("content", '<tool_call>\n{"name": "cut')]),
    ({"tools": "hermes", "reasons": True}, f"<think>hm</think>{CALL}", [("reasoning", "hm"), ADD]),
    ({"tools": "llama3_json"}, LLAMA, [ADD]),
    ({"tools": "llama3_json"}, f"<|python_tag|>{LLAMA}", [ADD]),
    ({"tools": "llama3_json"}, f"It is {LLAMA}", [("content", f"It is {LLAMA}")]),
    ({"tools": "llama3_json"}, '{"no": "call"}', [("content", '{"no": "call"}')]),
]


def parsed(options: dict[str, Any], pieces: list[str]) -> list[Any]:
    """The parts, where neighbors of the same kind are joined."""
    parser, found = OutputParser(**options), list[Any]()
    for part in [part for piece in pieces for part in parser.push(piece)] + list(parser.finish()):
        if part.call is not None:
            found.append((part.call.name, json.loads(part.call.arguments)))
        elif found and found[-1][0] == part.kind:
            found[-1] = part.kind, found[-1][1] + part.text
        else:
            assert part.text
            found.append((part.kind, part.text))
    assert parser.num_calls == sum(isinstance(one[1], dict) for one in found)
    return found


@pytest.mark.parametrize(("options", "text", "want"), CASES)
def test_the_parts_of_a_text(options: dict[str, Any], text: str, want: list[Any]) -> None:
    assert parsed(options, [text]) == want
    assert parsed(options, list(text)) == want


@settings(max_examples=500, deadline=None)
@given(case=st.sampled_from(CASES), data=st.data())
def test_pieces_do_not_matter(case: tuple[dict[str, Any], str, list[Any]], data: st.DataObject) -> None:
    options, text, want = case
    cuts = sorted({0, len(text), *data.draw(st.lists(st.integers(0, len(text))))})
    assert parsed(options, [text[a:b] for a, b in pairwise(cuts)]) == want


@given(text=st.text("<>/thinkolca_\n{}"), tools=st.sampled_from([None, "hermes", "llama3_json"]), reasons=st.booleans())
def test_no_text_is_lost(text: str, tools: Any, reasons: bool) -> None:
    """Only marks, and line breaks around them, are left out."""
    shown = "".join(text for _, text in parsed({"tools": tools, "reasons": reasons}, list(text)))
    if "<think>" not in text and "</" not in text and "<tool_call>" not in text:
        assert shown.strip("\n") == text.strip("\n") if not reasons else shown.strip() == text.strip()


def test_forms_of_templates() -> None:
    assert tool_format(None) is None and tool_format("{{ messages }}") is None
    assert tool_format("{% if tools %}<tool_call>{% endif %}") == "hermes"
    assert tool_format('{% if tools %}{"name": name, "parameters": p}{% endif %}') == "llama3_json"


def test_arguments_become_objects() -> None:
    message = {"role": "assistant", "tool_calls": [{"id": "1", "function": {"name": "f", "arguments": '{"a": 1}'}}]}
    assert with_parsed_arguments(message)["tool_calls"][0]["function"]["arguments"] == {"a": 1}
    assert with_parsed_arguments({"role": "user"}) == {"role": "user"}
    for wrong in ([{"function": {"name": "f", "arguments": "{"}}], [{"function": {}}], [1]):
        with pytest.raises(RequestError):
            with_parsed_arguments({"tool_calls": wrong})
