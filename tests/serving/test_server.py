"""The server as its clients see it: OpenAI's client, and raw HTTP where the client hides what was sent."""

from __future__ import annotations

import asyncio
import http.client
import json
import re
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import openai
import pydantic
import pytest

from mini_engine import LLM, SamplingParams
from mini_engine.serving.options import ServerOptions
from tests.helpers import in_a_thread
from tests.serving.conftest import MODEL, Served, held, served_by_processes, serving

QUESTION = [{"role": "user", "content": "Name a color."}]
GREEDY = SamplingParams(temperature=0.0, max_tokens=8)


def post(served: Served, path: str, body: Any, **headers: str) -> tuple[int, dict[str, str], bytes]:
    """Send a request and return status, headers and body as they came."""
    connection = http.client.HTTPConnection("127.0.0.1", served.port, timeout=600)
    text = body if isinstance(body, str | bytes) else json.dumps(body)
    connection.request("POST", path, text, {"Content-Type": "application/json"} | headers)
    answer = connection.getresponse()
    try:
        return answer.status, dict(answer.getheaders()), answer.read()
    finally:
        connection.close()


def get(served: Served, path: str, method: str = "GET") -> tuple[int, dict[str, str], bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", served.port, timeout=600)
    connection.request(method, path)
    answer = connection.getresponse()
    try:
        return answer.status, dict(answer.getheaders()), answer.read()
    finally:
        connection.close()


def events(body: bytes) -> list[str]:
    """The events of a stream; each is one line of ASCII after `data: `, and ends with an empty line."""
    assert body.isascii() and b"\r" not in body and body.endswith(b"\n\n")
    lines = body.decode().removesuffix("\n\n").split("\n\n")
    assert all(line.startswith("data: ") and "\n" not in line for line in lines)
    return [line.removeprefix("data: ") for line in lines]


def until(condition: Callable[[], bool], seconds: float = 300.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.02)


def is_idle(served: Served) -> bool:
    core = served.engine.engine
    return not core.has_unfinished and core.page_table.num_free_pages == core.page_table.num_pages


# --- answers ---------------------------------------------------------------------------------------------------------


def test_a_chat_is_answered_as_offline(served: Served, llm: LLM) -> None:
    [want] = llm.chat(QUESTION, GREEDY)
    answer = served.openai().chat.completions.create(model=MODEL, messages=QUESTION, temperature=0, max_tokens=8)
    [choice] = answer.choices
    assert choice.message.content == want.text and choice.message.role == "assistant"
    assert choice.finish_reason == want.finish_reason == "length" and answer.object == "chat.completion"
    assert answer.usage is not None and answer.usage.completion_tokens == len(want.token_ids)
    assert answer.usage.prompt_tokens == len(want.prompt_token_ids)


def test_content_may_be_a_list_of_parts(served: Served, llm: LLM) -> None:
    parts = [{"type": "text", "text": "Name a "}, {"type": "text", "text": "color."}]
    messages: Any = [{"role": "user", "content": parts}]
    answer = served.openai().chat.completions.create(
        model=MODEL, messages=messages, temperature=0, max_completion_tokens=8
    )
    assert answer.choices[0].message.content == llm.chat(QUESTION, GREEDY)[0].text


def test_a_stream_has_the_same_text_in_pieces(served: Served, llm: LLM) -> None:
    [want] = llm.chat(QUESTION, GREEDY)
    chunks = list(
        served.openai().chat.completions.create(
            model=MODEL, messages=QUESTION, temperature=0, max_tokens=8, stream=True,
            stream_options={"include_usage": True},
        )
    )  # fmt: skip
    *texts, last, counts = chunks
    assert "".join(chunk.choices[0].delta.content or "" for chunk in texts) == want.text
    assert texts[0].choices[0].delta.role == "assistant" and last.choices[0].finish_reason == "length"
    assert all(chunk.choices[0].finish_reason is None for chunk in texts)
    assert {chunk.id for chunk in chunks} == {chunks[0].id} and len(texts) > 4
    assert not counts.choices and counts.usage is not None and counts.usage.completion_tokens == 8


def test_several_outputs_of_several_prompts(served: Served, llm: LLM) -> None:
    prompts = ["Once upon a time", "The sky"]
    params = SamplingParams(temperature=1.0, seed=5, n=2, max_tokens=6)
    want = [own.text for output in llm.generate(prompts, params) for own in output.outputs]
    options: Any = {"model": MODEL, "prompt": prompts, "temperature": 1.0, "seed": 5, "n": 2, "max_tokens": 6}
    answer = served.openai().completions.create(**options)
    assert [choice.text for choice in answer.choices] == want
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    texts, ends = [""] * 4, [""] * 4
    for chunk in served.openai().completions.create(**options, stream=True):
        [choice] = chunk.choices
        texts[choice.index] += choice.text
        ends[choice.index] += choice.finish_reason or ""
    assert texts == want and ends == ["length"] * 4


def test_tokens_as_a_prompt_and_stop_strings(served: Served, llm: LLM) -> None:
    tokens = llm.tokens_of("One, two, three,")
    [want] = llm.generate([tokens], SamplingParams(temperature=0.0, max_tokens=12, stop=[" six"]))
    answer = served.openai().completions.create(model=MODEL, prompt=tokens, temperature=0, max_tokens=12, stop=" six")
    assert answer.choices[0].text == want.text and answer.choices[0].finish_reason == want.finish_reason


def test_log_probabilities(served: Served, llm: LLM) -> None:
    [want] = llm.generate(["The sky is"], SamplingParams(temperature=0.0, max_tokens=3, logprobs=2, prompt_logprobs=2))
    own = want.outputs[0]
    assert own.logprobs is not None
    values = [of[token].logprob for of, token in zip(own.logprobs, own.token_ids, strict=True)]
    options: Any = {"model": MODEL, "prompt": "The sky is", "temperature": 0, "max_tokens": 3, "logprobs": 2}
    found = served.openai().completions.create(**options).choices[0].logprobs
    assert found is not None and found.token_logprobs == pytest.approx(values, abs=1e-4)
    assert "".join(found.tokens or []) == own.text and [len(top) for top in found.top_logprobs or []] == [2, 2, 2]
    streamed = [chunk.choices[0].logprobs for chunk in served.openai().completions.create(**options, stream=True)]
    pieces = [piece for piece in streamed if piece is not None]
    assert [x for piece in pieces for x in piece.token_logprobs or []] == pytest.approx(values, abs=1e-4)
    assert [x for piece in pieces for x in piece.text_offset or []] == found.text_offset
    echoed = served.openai().completions.create(**options, echo=True).choices[0]
    assert echoed.text == "The sky is" + own.text and echoed.logprobs is not None
    assert "".join(echoed.logprobs.tokens or []) == echoed.text
    assert (echoed.logprobs.token_logprobs or [0])[0] is None
    chat = served.openai().chat.completions.create(
        model=MODEL, messages=QUESTION, temperature=0, max_tokens=2, logprobs=True, top_logprobs=3
    )
    content = chat.choices[0].logprobs and chat.choices[0].logprobs.content
    assert content and [len(token.top_logprobs) for token in content] == [3, 3]


def test_many_clients_at_once(served: Served, llm: LLM) -> None:
    prompts = [f"Number {i} is" for i in range(12)]
    want = [output.text for output in llm.generate(prompts, GREEDY)]

    async def ask() -> list[str]:
        async with openai.AsyncOpenAI(base_url=f"{served.address}/v1", api_key="none", max_retries=0) as client:
            answers = [client.completions.create(model=MODEL, prompt=p, temperature=0, max_tokens=8) for p in prompts]
            return [answer.choices[0].text for answer in await asyncio.gather(*answers)]

    assert in_a_thread(asyncio.run, ask()) == want
    until(lambda: is_idle(served))


# --- the form of a stream --------------------------------------------------------------------------------------------


def test_events_are_lines_of_ascii_and_end_with_done(served: Served) -> None:
    body = {"messages": QUESTION, "stream": True, "max_tokens": 4, "temperature": 0}
    body["stream_options"] = {"include_usage": True, "continuous_usage_stats": True}
    status, headers, answer = post(served, "/v1/chat/completions", body)
    assert status == 200 and headers["content-type"].startswith("text/event-stream")
    *sent, done = events(answer)
    assert done == "[DONE]"
    chunks = [json.loads(line) for line in sent]
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
    assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert chunks[-2]["choices"][0] == {"index": 0, "delta": {}, "finish_reason": "length", "logprobs": None}
    assert chunks[-1]["choices"] == [] and chunks[-1]["usage"]["completion_tokens"] == 4
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert counts == sorted(counts) and counts[0] == 0
    # Load generators count a chunk with empty text as a token.
    assert all(chunk["choices"][0]["delta"].get("content") for chunk in chunks[1:-2])


def test_text_beyond_ascii_is_escaped(served: Served) -> None:
    body = {"prompt": "é\u2028", "echo": True, "max_tokens": 1, "stream": True}
    sent = events(post(served, "/v1/completions", body)[2])
    assert json.loads(sent[0])["choices"][0]["text"] == "é\u2028"


# --- refusals --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "status", "param"),
    [
        ({"temperature": -1}, 400, None),
        ({"temperature": "hot"}, 400, "temperature"),
        ({"n": 0}, 400, None),
        ({"n": 1000}, 400, "n"),
        ({"max_tokens": 0}, 400, None),
        ({"max_tokens": 1.5}, 400, "max_tokens"),
        ({"messages": []}, 400, None),
        ({"messages": [{"content": "no role"}]}, 400, None),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, 400, None),
        ({"messages": "text"}, 400, "messages"),
        ({"frobnicate": 1}, 400, "frobnicate"),
        ({"stop": ["a"] * 100}, 400, "stop"),
        ({"logit_bias": {"x": 1}}, 400, None),
        ({"top_logprobs": 2}, 400, None),
        ({"stream_options": {"include_usage": True}}, 400, None),
        ({"model": "another"}, 404, "model"),
        ({"messages": [{"role": "user", "content": "word " * 2000}]}, 400, None),
    ],
)
def test_a_bad_request_is_refused_in_a_sentence(
    served: Served, change: dict[str, Any], status: int, param: str | None
) -> None:
    got, _, body = post(served, "/v1/chat/completions", {"model": MODEL, "messages": QUESTION} | change)
    error = json.loads(body)["error"]
    assert (got, error["param"]) == (status, param) and error["message"] and error["type"] == "invalid_request_error"
    assert param is None or param in error["message"] or param == "model"


def test_bodies_that_are_no_requests(served: Served) -> None:
    for body in ("{", "[]", '"text"', "null", b"\xff\xfe"):
        status, _, answer = post(served, "/v1/completions", body)
        assert status == 400 and json.loads(answer)["error"]["message"]


def test_unknown_paths_and_methods(served: Served) -> None:
    assert get(served, "/v1/nothing")[0] == 404 and get(served, "/v1/completions")[0] == 405
    assert json.loads(get(served, "/v1/nothing")[2])["error"]["message"]


def test_limits_keys_and_names(new_server: Callable[..., Any]) -> None:
    options = ServerOptions(api_key="secret", max_body_bytes=500, served_model_name="a/b")
    with new_server(options) as served:
        long = {"prompt": "x" * 1000}
        assert post(served, "/v1/completions", long)[0] == 401
        assert post(served, "/v1/completions", long, Authorization="Bearer secret")[0] == 413
        chunked = post_in_chunks(served, json.dumps(long).encode(), "secret")
        assert b"413" in chunked.split(b"\r\n")[0]
        with pytest.raises(openai.AuthenticationError):
            served.openai().models.list()
        client = served.openai(api_key="secret")
        assert client.models.retrieve("a/b").id == "a/b" and [own.id for own in client.models.list()] == ["a/b"]
        assert get(served, "/health")[0] == 200


def post_in_chunks(served: Served, body: bytes, key: str) -> bytes:
    """Send a body whose length is not announced."""
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {key}\r\nTransfer-Encoding: chunked\r\n"
    with socket.create_connection(("127.0.0.1", served.port), timeout=600) as connection:
        connection.sendall(head.encode() + b"Content-Type: application/json\r\nConnection: close\r\n\r\n")
        connection.sendall(f"{len(body):x}\r\n".encode() + body + b"\r\n0\r\n\r\n")
        return connection.recv(1000)


def test_a_full_queue_says_when_to_come_back(new_server: Callable[..., Any]) -> None:
    with new_server(ServerOptions(max_queued_requests=1), max_batch_size=1) as served:
        long = {"prompt": "Once", "max_tokens": 400, "ignore_eos": True, "stream": True}
        with held(served):
            streams = [open_stream(served, long) for _ in range(2)]
            until(lambda: served.client.num_outputs == 2)
            status, headers, body = post(served, "/v1/completions", {"prompt": "x"})
        assert status == 429 and 0 < int(headers["retry-after"]) < 120
        assert json.loads(body)["error"]["type"] == "rate_limit_error"
        for stream in streams:
            stream.close()
        until(lambda: is_idle(served))
        assert post(served, "/v1/completions", {"prompt": "x", "max_tokens": 1})[0] == 200


# --- clients that leave, engines that fail, servers that end -------------------------------------------------------


def open_stream(served: Served, body: dict[str, Any]) -> socket.socket:
    """Send a request, and do not read the answer."""
    text = json.dumps(body).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(text)}"
    connection = socket.create_connection(("127.0.0.1", served.port), timeout=600)
    connection.sendall(head.encode() + b"\r\n\r\n" + text)
    return connection


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_frees_its_pages(served: Served, stream: bool) -> None:
    body = {"prompt": "Once", "max_tokens": 400, "ignore_eos": True, "stream": stream, "n": 2}
    with held(served):
        connection = open_stream(served, body)
        until(lambda: len(served.engine.engine.scheduler.running) == 2)
        connection.close()
    until(lambda: is_idle(served) and served.client.num_outputs == 0)


def test_a_failing_engine_is_an_error_and_no_silence(new_server: Callable[..., Any]) -> None:
    with new_server() as served:

        def fail() -> None:
            raise RuntimeError("broken")

        step, served.engine.engine.step = served.engine.engine.step, fail
        status, _, body = post(served, "/v1/completions", {"prompt": "x", "stream": True})
        assert status == 500 and "broken" in json.loads(body)["error"]["message"]
        served.engine.engine.step = step
        assert post(served, "/v1/completions", {"prompt": "x", "max_tokens": 1})[0] == 200


def test_an_error_within_a_stream_ends_the_connection(new_server: Callable[..., Any]) -> None:
    with new_server() as served:
        body: Any = {"model": MODEL, "prompt": "Once", "max_tokens": 300, "stream": True}
        stream = served.openai().completions.create(**body, extra_body={"ignore_eos": True})
        next(iter(stream))

        def fail() -> None:
            raise RuntimeError("broken")

        served.engine.engine.step = fail
        with pytest.raises(openai.APIError, match="broken"):
            for _ in stream:
                pass


def test_sigterm_finishes_what_runs() -> None:
    with served_by_processes() as (process, address):
        client = openai.OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0)
        stream = client.completions.create(model=MODEL, prompt="Once", max_tokens=40, stream=True, temperature=0)
        chunks = [next(iter(stream))]
        process.send_signal(signal.SIGTERM)
        chunks += list(stream)
        assert chunks[-1].choices[0].finish_reason in ("length", "stop")
        with pytest.raises(openai.APIConnectionError):
            client.completions.create(model=MODEL, prompt="x", max_tokens=1)
        assert process.wait(60) == 0


def test_requests_that_wait_are_refused_at_the_end(new_server: Callable[..., Any]) -> None:
    with new_server(max_batch_size=1) as served:
        answers = list[Any]()
        waiting = threading.Thread(target=lambda: answers.append(post(served, "/v1/completions", {"prompt": "x"})))
        with held(served):
            first = open_stream(served, {"prompt": "Once", "max_tokens": 100, "ignore_eos": True})
            until(lambda: len(served.engine.engine.scheduler.running) == 1)
            waiting.start()
            until(lambda: served.client.num_outputs == 2)
            served.client.drain()
        waiting.join(300)
        assert answers[0][0] == 503 and post(served, "/v1/completions", {"prompt": "x"})[0] == 503
        assert b"200 OK" in first.recv(100)
        first.close()


def test_what_is_sent_just_before_the_end_is_refused_after_it(new_server: Callable[..., Any]) -> None:
    with new_server() as served:
        served.client.drain()
        served.client.is_draining = False  # as a request has seen it that the signal interrupts
        status, _, body = post(served, "/v1/completions", {"prompt": "x"})
        assert status == 503 and "shutting down" in json.loads(body)["error"]["message"]


# --- other endpoints -------------------------------------------------------------------------------------------------


def test_tokenize_and_back(served: Served, llm: LLM) -> None:
    _, _, body = post(served, "/tokenize", {"prompt": "hello wörld"})
    tokens = json.loads(body)["tokens"]
    assert tokens == llm.tokens_of("hello wörld") and json.loads(body)["count"] == len(tokens)
    assert json.loads(post(served, "/detokenize", {"tokens": tokens})[2]) == {"prompt": "hello wörld"}
    assert json.loads(post(served, "/tokenize", {"messages": QUESTION})[2])["tokens"] == llm.chat_prompt(QUESTION)
    assert post(served, "/tokenize", {})[0] == 400 and post(served, "/detokenize", {"tokens": [10**9]})[0] == 400


def test_metrics_have_vllms_names(served: Served) -> None:
    post(served, "/v1/completions", {"prompt": "x", "max_tokens": 3, "ignore_eos": True})
    until(lambda: is_idle(served))
    status, headers, body = get(served, "/metrics")
    assert status == 200 and headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
    text = body.decode()
    for name in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc"):
        assert f'vllm:{name}{{model_name="{MODEL}"}} 0.0' in text
    for name in ("time_to_first_token_seconds", "inter_token_latency_seconds", "e2e_request_latency_seconds"):
        assert re.search(rf'vllm:{name}_count{{model_name="{MODEL}"}} [1-9]', text)
    counted = re.search(r"vllm:generation_tokens_total\{.*\} (\d+)", text)
    assert counted and int(counted[1]) == served.engine.engine.metrics.output_tokens
    assert get(served, "/metrics", "HEAD")[0] == 200


def values(served: Served) -> dict[str, float]:
    """The values of `/metrics` by name."""
    lines = get(served, "/metrics")[2].decode().splitlines()
    parts = [re.fullmatch(r"vllm:(\w+)\{[^}]*\} (\S+)", line) for line in lines]
    return {part[1]: float(part[2]) for part in parts if part}


@pytest.mark.parametrize("stream", [False, True])
def test_tokens_are_timed_whether_streamed_or_not(new_server: Callable[..., Any], stream: bool) -> None:
    with new_server() as served:
        body = {"prompt": [5] * 7, "max_tokens": 6, "ignore_eos": True, "n": 2, "stream": stream}
        assert post(served, "/v1/completions", body)[0] == 200
        found = values(served)
        assert found["time_to_first_token_seconds_count"] == found["request_time_per_output_token_seconds_count"] == 2
        assert found["inter_token_latency_seconds_count"] == 2 * 5 and found["generation_tokens_total"] == 2 * 6
        assert found["request_prompt_tokens_sum"] == found["prompt_tokens_total"] == 2 * 7
        assert found["request_generation_tokens_sum"] == 2 * 6 and found["request_generation_tokens_count"] == 2
        first, between, whole = (
            found[f"{name}_seconds_sum"]
            for name in ("time_to_first_token", "inter_token_latency", "e2e_request_latency")
        )
        assert 0 < first < first + between == pytest.approx(whole)
        assert found["request_time_per_output_token_seconds_sum"] == pytest.approx(between / 5)


def test_all_counts_exist_from_the_start(new_server: Callable[..., Any]) -> None:
    with new_server() as served:
        before = get(served, "/metrics")[2].decode()
        assert post(served, "/v1/completions", {"prompt": "x", "max_tokens": 2})[0] == 200
        after = get(served, "/metrics")[2].decode()
        names = [[line.rpartition(" ")[0] for line in text.splitlines()] for text in (before, after)]
        assert names[0] == names[1]


def test_a_preemption_does_not_count_a_prompt_again(new_server: Callable[..., Any]) -> None:
    with new_server(num_pages=8, page_size=16, max_model_len=128) as served:
        body = {"prompt": [[5] * 20, [6] * 20], "max_tokens": 80, "ignore_eos": True}
        assert post(served, "/v1/completions", body)[0] == 200
        found = values(served)
        assert found["num_preemptions_total"] > 0
        assert (found["prompt_tokens_total"], found["generation_tokens_total"]) == (2 * 20, 2 * 80)


@pytest.mark.parametrize("stream", [False, True])
def test_cached_tokens_are_told(new_server: Callable[..., Any], stream: bool) -> None:
    def cached(prompt: list[list[int]]) -> int:
        before = served.engine.engine.metrics.shared_tokens
        body: dict[str, Any] = {"prompt": prompt, "max_tokens": 2, "ignore_eos": True}
        body |= {"stream": True, "stream_options": {"include_usage": True}} if stream else {}
        status, _, answer = post(served, "/v1/completions", body)
        assert status == 200
        details = json.loads(events(answer)[-2] if stream else answer)["usage"]["prompt_tokens_details"]
        assert details["cached_tokens"] == served.engine.engine.metrics.shared_tokens - before
        return details["cached_tokens"]

    with new_server(enable_prefix_caching=True, page_size=16) as served:
        assert cached([[5] * 40]) == 0
        assert cached([[5] * 40, [7] * 10]) == 32  # two full pages
        assert cached([[5] * 20 + [6], [5] * 33]) == 16 + 32


# --- structured output -----------------------------------------------------------------------------------------------


class Person(pydantic.BaseModel):
    """What a client of OpenAI's wants to parse."""

    name: str = pydantic.Field(max_length=12)
    age: int = pydantic.Field(ge=0, le=150)


def test_openais_parse_gets_an_object(served: Served) -> None:
    messages: Any = [{"role": "user", "content": "A person, please."}]
    answer = served.openai().chat.completions.parse(
        model=MODEL, messages=messages, response_format=Person, max_tokens=80, temperature=0
    )
    assert isinstance(answer.choices[0].message.parsed, Person) and answer.choices[0].finish_reason == "stop"


def test_structured_output_in_streams_and_completions(served: Served) -> None:
    body = {"prompt": "A color:", "structured_outputs": {"choice": ["red", "green"]}, "stream": True, "n": 2, "seed": 1}
    *sent, done = events(post(served, "/v1/completions", body)[2])
    assert done == "[DONE]"
    texts = ["", ""]
    for line in sent:
        choice = json.loads(line)["choices"][0]
        texts[choice["index"]] += choice["text"]
    assert all(text in ("red", "green") for text in texts)
    chat = {"messages": QUESTION, "response_format": {"type": "json_object"}, "max_tokens": 60, "temperature": 0}
    answer = json.loads(post(served, "/v1/chat/completions", chat)[2])["choices"][0]
    assert answer["finish_reason"] == "length" or isinstance(json.loads(answer["message"]["content"]), dict)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"structured_outputs": {"regex": "a(?=b)"}}, "look-around"),
        ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "one of"),
        ({"structured_outputs": {"guided": "a"}}, "structured_outputs"),
        ({"response_format": {"type": "json_schema"}}, "json_schema"),
        ({"response_format": {"type": "xml"}}, "response_format"),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": {"not": {}}}}}, "not"),
    ],
)
def test_structured_output_that_is_not_supported(served: Served, change: dict[str, Any], named: str) -> None:
    status, _, body = post(served, "/v1/chat/completions", {"messages": QUESTION} | change)
    assert status == 400 and named in json.loads(body)["error"]["message"]


# --- tools and reasoning ---------------------------------------------------------------------------------------------

TEMPLATE = """{% if tools %}Tools: {{ tools | tojson }} Call them in <tool_call></tool_call>, and think in <think>.
{% endif %}{% for message in messages %}{{ message.role }}: {{ message.content }}
{% for call in message.tool_calls or [] %}{{ call.function.name }} {{ call.function.arguments.place }}
{% endfor %}{% endfor %}assistant: """
WEATHER: Any = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather at a place.",
        "parameters": {
            "type": "object",
            "properties": {"place": {"type": "string", "maxLength": 8}, "days": {"type": "integer", "maximum": 9}},
            "required": ["place", "days"],
            "additionalProperties": False,
        },
    },
}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"place": "Bern", "days": 2}}\n</tool_call>'


@pytest.fixture(scope="module")
def with_tools(llm: LLM, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A server whose chat template knows tools and reasoning. Outputs are made to have them by their grammar."""
    file = tmp_path_factory.mktemp("template") / "chat.jinja"
    file.write_text(TEMPLATE)
    with serving(llm.with_options(), ServerOptions(chat_template=file)) as running:
        yield running


def test_a_call_of_a_tool(with_tools: Served) -> None:
    text = f"<think>\nhm\n</think>\n\nI look.\n{CALL}\n{CALL}"
    options: Any = {"model": MODEL, "messages": QUESTION, "tools": [WEATHER], "max_tokens": 120}
    options["extra_body"] = {"structured_outputs": {"choice": [text]}}
    choice = with_tools.openai().chat.completions.create(**options).choices[0]
    assert choice.finish_reason == "tool_calls" and choice.message.content == "I look."
    assert choice.message.model_extra == {"reasoning_content": "hm"}
    assert choice.message.tool_calls and len(choice.message.tool_calls) == 2
    [first, second] = [call for call in choice.message.tool_calls if call.type == "function"]
    assert first.id != second.id and first.function.name == "weather"
    assert json.loads(first.function.arguments) == {"place": "Bern", "days": 2}
    with with_tools.openai().chat.completions.stream(**options) as stream:
        stream.until_done()
        streamed = stream.get_final_completion().choices[0]
    assert streamed.finish_reason == "tool_calls" and streamed.message.content == "I look."
    calls: Any = streamed.message.tool_calls
    assert [(call.function.name, json.loads(call.function.arguments)) for call in calls] == [
        ("weather", {"place": "Bern", "days": 2})
    ] * 2


def test_tool_deltas_have_an_index_and_name_a_call_once(with_tools: Served) -> None:
    body = {"messages": QUESTION, "tools": [WEATHER], "stream": True, "max_tokens": 120}
    body["structured_outputs"] = {"choice": [CALL + CALL]}
    *sent, _ = events(post(with_tools, "/v1/chat/completions", body)[2])
    deltas = [json.loads(line)["choices"][0]["delta"] for line in sent]
    calls = [call for delta in deltas for call in delta.get("tool_calls", [])]
    assert [call["index"] for call in calls] == [0, 0, 1, 1]
    assert ["id" in call for call in calls] == [True, False, True, False]
    assert ["name" in call["function"] for call in calls] == [True, False, True, False]


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "weather"}}])
def test_a_call_that_is_forced(served: Served, choice: Any) -> None:
    """A grammar holds the output to the tools' schemas, so this works with any chat template."""
    answer = served.openai().chat.completions.create(
        model=MODEL, messages=QUESTION, tools=[WEATHER], tool_choice=choice, parallel_tool_calls=False, max_tokens=120,
        temperature=0,
    )  # fmt: skip
    assert answer.choices[0].finish_reason == "tool_calls" and answer.choices[0].message.content is None
    [call] = answer.choices[0].message.tool_calls or []
    assert call.type == "function" and call.function.name == "weather"
    arguments = json.loads(call.function.arguments)
    assert set(arguments) == {"place", "days"} and arguments["days"] <= 9


def test_earlier_calls_are_in_the_prompt(with_tools: Served) -> None:
    call = {"id": "1", "type": "function", "function": {"name": "weather", "arguments": '{"place": "Bern"}'}}
    messages = [*QUESTION, {"role": "assistant", "content": None, "tool_calls": [call]}]
    messages.append({"role": "tool", "tool_call_id": "1", "content": "rain"})
    status, _, body = post(with_tools, "/v1/chat/completions", {"messages": messages, "max_tokens": 1})
    assert status == 200, body
    tokens = json.loads(post(with_tools, "/tokenize", {"messages": messages})[2])["tokens"]
    assert "weather Bern" in json.loads(post(with_tools, "/detokenize", {"tokens": tokens})[2])["prompt"]


@pytest.mark.parametrize(
    "change",
    [
        {"tools": [WEATHER]},  # the template of this model has no tools
        {"tool_choice": "required"},
        {"tools": [{"type": "function", "function": {"name": "two words"}}]},
        {"tools": [WEATHER], "tool_choice": {"type": "function", "function": {"name": "other"}}},
        {"tools": [WEATHER], "tool_choice": "required", "structured_outputs": {"regex": "a"}},
        {"messages": [*QUESTION, {"role": "assistant", "tool_calls": [{"function": {"arguments": "{"}}]}]},
    ],
)
def test_tools_that_cannot_be_used(served: Served, change: dict[str, Any]) -> None:
    status, _, body = post(served, "/v1/chat/completions", {"messages": QUESTION} | change)
    assert status == 400 and json.loads(body)["error"]["message"]
