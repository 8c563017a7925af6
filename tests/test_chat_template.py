"""Legitimate templates render as transformers renders them; hostile ones end, in a RequestError."""

import os
import sys

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


BOTH = pytest.mark.parametrize("is_trusted", [True, False])
PARTS = {"role": "user", "content": [{"type": "text", "text": "so"}, {"type": "text", "text": "what"}]}
CALL = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f", "arguments": {"x": 1}}}]}
# What Qwen3's template does with its options, and OpenAI's forms of content.
OPTIONS = """{%- for message in messages %}{{ message.role }}:
{%- if message.content is string %}{{ message.content }}
{%- elif message.content is defined %}{% for part in message.content %}{{ part.text }};{% endfor %}{% endif %}
{%- for call in message.tool_calls or [] %}{{ call.function|tojson }}{% endfor %}
{%- endfor %}
{%- for tool in tools or [] %}{{ tool|tojson }}{% endfor %}
{%- if add_generation_prompt %}model:
{%- if enable_thinking is defined and not enable_thinking %}<think></think>{% endif %}
{%- endif %} {{ date_string }}"""


def lookup(city: str) -> str:
    """Look up the weather.

    Args:
        city: Name of the city.
    """
    return city


def expected(tokenizer, messages, template=None, **options):
    options = {"add_generation_prompt": True} | options
    return tokenizer.apply_chat_template(messages, chat_template=template, tokenize=False, **options)


@BOTH
@pytest.mark.parametrize(
    "template", [None, CHATML, LLAMA_3, GEMMA, MODERN], ids=["own", "chatml", "l3", "gemma", "new"]
)
@pytest.mark.parametrize("messages", [[USER], [USER, ANSWER, USER], [SYSTEM, USER, ANSWER, USER], [USER, THOUGHT]])
def test_texts_are_those_of_transformers(tokenizer, template, messages, is_trusted):
    if template == GEMMA and messages[0] is SYSTEM:
        with pytest.raises(RequestError, match="System role not supported"):
            render_chat(tokenizer, messages, template, is_trusted=is_trusted)
    else:
        text = render_chat(tokenizer, messages, template, is_trusted=is_trusted)
        assert text == expected(tokenizer, messages, template)


@BOTH
@pytest.mark.parametrize("messages", [[USER], [PARTS], [USER, CALL, USER], [SYSTEM, PARTS, CALL]])
@pytest.mark.parametrize("tools", [None, [lookup], [{"type": "function", "function": {"name": "g"}}]])
@pytest.mark.parametrize("variables", [{}, {"enable_thinking": False, "date_string": "26 Nov"}])
def test_options_reach_the_template_as_in_transformers(tokenizer, messages, tools, variables, is_trusted):
    for add in (True, False):
        text = render_chat(
            tokenizer, messages, OPTIONS, tools=tools, add_generation_prompt=add, chat_template_kwargs=variables,
            is_trusted=is_trusted,
        )  # fmt: skip
        assert text == expected(tokenizer, messages, OPTIONS, tools=tools, add_generation_prompt=add, **variables)


@BOTH
def test_the_last_message_may_go_on(tokenizer, is_trusted):
    messages = [USER, {"role": "assistant", "content": "The answer is"}]
    how = {"add_generation_prompt": False, "continue_final_message": True}
    text = render_chat(tokenizer, messages, CHATML, is_trusted=is_trusted, **how)
    assert text == expected(tokenizer, messages, CHATML, **how) and text.endswith("The answer is")
    with pytest.raises(RequestError, match="add_generation_prompt"):
        render_chat(tokenizer, messages, CHATML, continue_final_message=True)
    with pytest.raises(RequestError, match="rejects"):
        render_chat(tokenizer, [USER, CALL], CHATML, is_trusted=is_trusted, **how)


@BOTH
@settings(max_examples=30)
@given(st.lists(st.fixed_dictionaries({"role": st.sampled_from(["user", "assistant"]), "content": TEXT}), min_size=1))
def test_any_content_reaches_the_template_unchanged(tokenizer, is_trusted, messages):
    assert render_chat(tokenizer, messages, CHATML, is_trusted=is_trusted) == expected(tokenizer, messages, CHATML)


@BOTH
def test_a_long_conversation_fits(tokenizer, is_trusted):
    messages = [{"role": "user", "content": "语" * (OUTPUT_CHARS // 4)}] * 3
    assert render_chat(tokenizer, messages, CHATML, is_trusted=is_trusted) == expected(tokenizer, messages, CHATML)


def test_one_process_serves_all_conversations(tokenizer):
    """Also after one that ended it; and what it answers to one that was interrupted is not taken for the next."""
    worker = module._worker(os.getpid())
    render_chat(tokenizer, [USER], None, is_trusted=False)
    process = worker._process
    render_chat(tokenizer, [USER, ANSWER, USER], None, is_trusted=False)
    assert worker._process is process
    with pytest.raises(RequestError, match="stopped"):
        render_chat(tokenizer, [USER], "{{ 9 ** (9 ** 9) }}", is_trusted=False)
    assert render_chat(tokenizer, [USER], None, is_trusted=False) == expected(tokenizer, [USER])
    assert worker._process is not process and module._worker(0) is not worker


def test_an_interrupt_ends_the_worker(tokenizer, monkeypatch):
    worker = module._worker(os.getpid())
    render_chat(tokenizer, [USER], None, is_trusted=False)
    stdout = worker._process.stdout

    class Interrupted:
        def readline(self):
            raise KeyboardInterrupt

    worker._process.stdout = Interrupted()
    with pytest.raises(KeyboardInterrupt):
        render_chat(tokenizer, [USER], "of another conversation", is_trusted=False)
    stdout.close()
    assert render_chat(tokenizer, [USER], None, is_trusted=False) == expected(tokenizer, [USER])


STOPPED = "was stopped|MemoryError"
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
        ("{{ '' }}", "wrote nothing"),
        ("{% if false %}x{% endif %}", "wrote nothing"),
        ("{{ messages|map('unknown')|list }}", "TemplateRuntimeError|TemplateAssertionError"),
    ],
)
@BOTH
def test_failures_are_named(tokenizer, template, message, is_trusted):
    with pytest.raises(RequestError, match=message):
        render_chat(tokenizer, [USER], template, is_trusted=is_trusted)


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
        render_chat(tokenizer, [USER], template, is_trusted=False)


def test_output_is_bounded(tokenizer):
    with pytest.raises(RequestError, match="may write"):
        render_chat(
            tokenizer, [USER], "{% for a in range(99999) %}{{ 'hello world ' * 50 }}{% endfor %}", is_trusted=False
        )


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
        render_chat(tokenizer, [USER], template, is_trusted=False)


def test_a_worker_that_cannot_start_is_a_typed_error(tokenizer, monkeypatch, tmp_path):
    monkeypatch.setattr(module, "_worker", lambda pid: module._Worker())
    monkeypatch.setattr(sys, "executable", str(tmp_path / "nothing"))
    with pytest.raises(RequestError, match="FileNotFoundError"):
        render_chat(tokenizer, [USER], None, is_trusted=False)


@pytest.mark.parametrize(
    ("own", "message"), [(None, "no chat template"), ("", "no chat template"), ({"rag": CHATML}, "no default")]
)
def test_without_a_template_the_error_says_so(tokenizer, monkeypatch, own, message):
    monkeypatch.setattr(tokenizer, "chat_template", own)
    with pytest.raises(RequestError, match=message):
        render_chat(tokenizer, [USER], None)
    assert render_chat(tokenizer, [USER], CHATML).startswith("<|im_start|>user")
