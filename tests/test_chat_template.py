"""Legitimate templates render as transformers renders them; hostile ones end, in a RequestError."""

import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer

from mini_engine import chat_template as module
from mini_engine.chat_template import render_chat
from mini_engine.chat_template_worker import OUTPUT_CHARS
from mini_engine.errors import RequestError
from mini_engine.loading import hub

CHATML = """{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}"""
LLAMA_3 = """{{- bos_token }}
{%- if not date_string is defined %}
    {%- if strftime_now is defined %}{%- set date_string = strftime_now("%Y") %}{%- endif %}
{%- endif %}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content']|trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system_message = "" %}
{%- endif %}
{{- "<|start_header_id|>system<|end_header_id|>\\n\\n" }}
{%- if tools is not none %}{{- "Environment: ipython\\n" }}{%- endif %}
{{- "Today Date: " + date_string + "\\n\\n" + system_message + "<|eot_id|>" }}
{%- for message in messages %}
    {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n'+ message['content'] | trim + '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}"""
GEMMA = """{{ bos_token }}
{%- if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}
{% for message in messages %}
{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}
{% endif %}
{% if (message['role'] == 'assistant') %}{% set role = 'model' %}{% else %}{% set role = message['role'] %}{% endif %}
{{ '<start_of_turn>' + role + '
' + message['content'] | trim + '<end_of_turn>
' }}{% endfor %}{% if add_generation_prompt %}{{'<start_of_turn>model
'}}{% endif %}"""
# As newer templates do: a namespace, macros, the loop controls, JSON, string methods and the marks for training.
MODERN = """{%- set ns = namespace(last=none, count=0) %}
{%- macro turn(role, text) %}{{ '<' ~ role ~ '>' }}{{ caller() if caller else text }}{% endmacro %}
{%- for message in messages[::-1] %}
    {%- if message.role == 'user' %}{%- set ns.last = loop.revindex0 %}{%- break %}{%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- if message.role == 'system' %}{%- continue %}{%- endif %}
    {%- set ns.count = ns.count + 1 %}
    {%- if message.role == 'assistant' %}
        {%- generation %}{{ turn('model', message.content.split('</think>')[-1].lstrip('\\n')) }}{% endgeneration %}
    {%- else %}{{ turn(message.role|upper, message['content']|replace('a', 'b')) }}{% endif %}
    {{- message|tojson }}{{ message.items()|list|tojson(indent=2, sort_keys=true) }}{{ dict(a=1)|tojson }}
    {{- message|tojson(true, 2) }}
{%- endfor %}
{{ ns.last }} {{ ns.count }} {{ '%s and %d' % ('x', 3) }} {{ '{}'.format(eos_token) }} {{ range(3)|join('-') }}
{%- if add_generation_prompt %}<model>{% endif %}"""
SYSTEM, USER = {"role": "system", "content": " Be brief. "}, {"role": "user", "content": "été <b> 你好 'a' \"b\"\n"}
ANSWER = {"role": "assistant", "content": "<think>so</think>\n\n42 &amp; {{ 1 }}"}
THOUGHT = {"role": "assistant", "content": "42", "reasoning": "six times seven"}
TEXT = st.text(st.characters(), max_size=20)


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(hub.embedded_folder())


def expected(tokenizer, messages, template=None):
    return tokenizer.apply_chat_template(messages, chat_template=template, tokenize=False, add_generation_prompt=True)


@pytest.mark.parametrize(
    "template", [None, CHATML, LLAMA_3, GEMMA, MODERN], ids=["own", "chatml", "l3", "gemma", "new"]
)
@pytest.mark.parametrize("messages", [[USER], [USER, ANSWER, USER], [SYSTEM, USER, ANSWER, USER], [USER, THOUGHT]])
def test_texts_are_those_of_transformers(tokenizer, template, messages):
    if template == GEMMA and messages[0] is SYSTEM:
        with pytest.raises(RequestError, match="System role not supported"):
            render_chat(tokenizer, messages, template)
    else:
        assert render_chat(tokenizer, messages, template) == expected(tokenizer, messages, template)


@settings(max_examples=10)  # each starts a process
@given(st.lists(st.fixed_dictionaries({"role": st.sampled_from(["user", "assistant"]), "content": TEXT}), min_size=1))
def test_any_content_reaches_the_template_unchanged(tokenizer, messages):
    assert render_chat(tokenizer, messages, CHATML) == expected(tokenizer, messages, CHATML)


def test_a_long_conversation_fits(tokenizer):
    messages = [{"role": "user", "content": "语" * (OUTPUT_CHARS // 4)}] * 3
    assert render_chat(tokenizer, messages, CHATML) == expected(tokenizer, messages, CHATML)


STOPPED = "was stopped|did not finish"
DOUBLE = "{% set ns = namespace(x='ab') %}{% for i in range(60) %}{% set ns.x = EXPRESSION %}{% endfor %}{{ ns.x }}"
LISTS = "{% set ns = namespace(x=[1]) %}{% for i in range(60) %}{% set ns.x = ns.x + ns.x %}{% endfor %}x"
DEEP_IF = "{% if 1 %}" * 500 + "x" + "{% endif %}" * 500
NEST = "{% for a in range(99999) %}{% for b in range(99999) %}BODY{% endfor %}{% endfor %}x"


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{{ 1 / 0 }}", "ZeroDivisionError"),
        ("{{ 2.0 ** 100000 }}", "OverflowError"),
        ("{{ messages + 1 }}", "TypeError"),
        ("{{ 'x'|int(base=99) / 'x' }}", "TypeError"),
        ("{% for %}", "TemplateSyntaxError"),
        ("{{ messages.nothing.here }}", "UndefinedError"),
        ("{{ raise_exception('roles must\x1b alternate') }}", "roles must"),
        ("{% include 'x' %}", "no loader"),
        ("{{ ''.__class__.__mro__ }}", "SecurityError"),
        ("{{ namespace(__class__=1) }}", "SecurityError"),
        ("{% set n = namespace() %}{% set n.__class__ = 1 %}", "SecurityError"),
        ("{{ messages.append(1) }}", "SecurityError"),
        ("{% macro m(x) %}{{ m(x) }}{% endmacro %}{{ m(1) }}", "RecursionError"),
        ("{{ " + "(" * 3000 + "1" + ")" * 3000 + " }}", "RecursionError|was stopped"),
        (DEEP_IF, "SyntaxError|RecursionError|was stopped"),
        ("{{ range(10**9) }}", "Range too big"),
        ("{{ '' }}", "wrote 0 characters"),
        ("{% if false %}x{% endif %}", "wrote 0 characters"),
        ("{{ messages|map('unknown')|list }}", "TemplateRuntimeError|TemplateAssertionError"),
    ],
)
def test_failures_are_named(tokenizer, template, message):
    with pytest.raises(RequestError, match=message):
        render_chat(tokenizer, [USER], template)


@pytest.mark.parametrize(
    "template",
    [
        "{{ 'a' * 10**14 }}",
        "{{ ('a' * 900000000)|length }}",
        "{{ 'a'|center(10**9) }}",
        "{{ 'a'.ljust(10**9)|length }}",
        "{{ '%1000000000d' % 1 }}",
        "{{ '{:1000000000}'.format(1) }}",
        "{{ messages|tojson(indent=10**9)|length }}",
        "{{ ('a' * 10**5).replace('a', 'b' * 10**5)|length }}",
        DOUBLE.replace("EXPRESSION", "ns.x + ns.x"),
        DOUBLE.replace("EXPRESSION", "ns.x ~ ns.x"),
        DOUBLE.replace("EXPRESSION", "[ns.x, ns.x]|join"),
        DOUBLE.replace("EXPRESSION", "'{}{}'.format(ns.x, ns.x)"),
        DOUBLE.replace("EXPRESSION", "ns.x|replace('a', 'aa')|replace('b', 'bb')"),
        LISTS,
    ],
)
def test_memory_is_bounded(tokenizer, template):
    with pytest.raises(RequestError, match=STOPPED):
        render_chat(tokenizer, [USER], template)


def test_output_is_bounded(tokenizer):
    with pytest.raises(RequestError, match="must write"):
        render_chat(tokenizer, [USER], "{% for a in range(99999) %}{{ 'hello world ' * 50 }}{% endfor %}")


@pytest.mark.parametrize(
    "template",
    [
        NEST.replace("BODY", ""),  # no output, no calls
        NEST.replace("BODY", "{% set x = 'y'|upper %}"),
        "{% macro m(n) %}{% if n %}{{ m(n - 1) }}{{ m(n - 1) }}{% endif %}{% endmacro %}{{ m(60) }}x",
        "{{ 9 ** (9 ** 9) }}",  # one operation in C, which no check between operations can stop
    ],
)
def test_time_is_bounded(tokenizer, template):
    with pytest.raises(RequestError, match=STOPPED):
        render_chat(tokenizer, [USER], template)


def test_a_worker_that_does_not_run_is_given_up(tokenizer, monkeypatch, tmp_path):
    asleep = tmp_path / "asleep.py"
    asleep.write_text("import time; time.sleep(600)")
    monkeypatch.setattr(module, "WORKER", asleep)
    monkeypatch.setattr(module, "WALL_SECONDS", 0.1)
    with pytest.raises(RequestError, match="did not finish"):
        render_chat(tokenizer, [USER], None)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "nothing"))
    with pytest.raises(RequestError, match="cannot start"):
        render_chat(tokenizer, [USER], None)


@pytest.mark.parametrize("own", [None, "", {"rag": CHATML}])
def test_without_a_template_the_error_says_so(tokenizer, monkeypatch, own):
    monkeypatch.setattr(tokenizer, "chat_template", own)
    with pytest.raises(RequestError, match="no chat template"):
        render_chat(tokenizer, [USER], None)
    assert render_chat(tokenizer, [USER], CHATML).startswith("<|im_start|>user")


WRONG = """
from transformers import AutoTokenizer
from mini_engine.chat_template import render_chat
from mini_engine.errors import RequestError
from mini_engine.loading import hub

tokenizer = AutoTokenizer.from_pretrained(hub.embedded_folder())
user = {"role": "user", "content": "x"}
for messages in (
    None, 5, "text", b"text", {}, user, [], ["text"], [None], [{}], [{"role": "user"}], [{"content": "x"}],
    [user, {"role": "user", "content": None}], [{"role": 1, "content": "x"}], [{"role": "user", "content": ["x"]}],
    [user | {"name": 5}], [user | {5: "x"}], [[user]], iter([user]),
):
    try:
        render_chat(tokenizer, messages, None)
    except RequestError as error:
        assert "pass" in str(error) and "message" in str(error), error
    else:
        raise AssertionError(f"accepted: {messages}")
for template in (5, ["x"], {"x": "y"}, b"x"):
    try:
        render_chat(tokenizer, [user], template)
    except RequestError as error:
        assert "pass the text" in str(error), error
    else:
        raise AssertionError(f"accepted: {template}")
assert render_chat(tokenizer, (user,), None) == render_chat(tokenizer, [user], None)
"""


def test_wrong_types_are_refused_by_name():
    """In a process without the check of annotations, which would refuse them first."""
    run = subprocess.run(
        [sys.executable, "-c", WRONG], cwd=Path(__file__).parents[1], capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stderr
