"""The HTTP interface: OpenAI's endpoints over an engine that runs in a process of its own.

An answer begins once its first token is there, because most clients take an error within a stream for success. A client
that leaves ends its request, which frees its pages in the next step.
"""

from __future__ import annotations

import asyncio
import hmac
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import aclosing, asynccontextmanager
from pathlib import Path
from typing import Any

from fastapi import FastAPI, HTTPException
from fastapi import Request as HTTPRequest
from fastapi.concurrency import run_in_threadpool
from fastapi.exceptions import RequestValidationError
from fastapi.responses import HTMLResponse, JSONResponse, Response, StreamingResponse
from starlette.exceptions import HTTPException as StarletteHTTPException

from mini_engine.errors import ConfigError, MiniEngineError, RequestError
from mini_engine.outputs import Piece, RequestOutput
from mini_engine.sampling_params import SamplingParams
from mini_engine.serving.admission import QueueFullError
from mini_engine.serving.answers import (
    DONE,
    PING,
    Answer,
    ChatAnswer,
    CompletionAnswer,
    Json,
    error_body,
    event,
)
from mini_engine.serving.chat_page import read_page
from mini_engine.serving.engine_client import EngineClient
from mini_engine.serving.engine_loop import ShuttingDownError
from mini_engine.serving.live import snapshots
from mini_engine.serving.metrics import CONTENT_TYPE, Metrics, Watch, engine_counts
from mini_engine.serving.options import ServerOptions
from mini_engine.serving.parts_of_output import THINK, ForcedCalls, OutputParser, Parser, tool_format
from mini_engine.serving.protocol import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    Request,
    TokenizeRequest,
)
from mini_engine.text_front import TextFront

OPEN_PATHS = ("/", "/health")  # need no API key; the page asks for it
LEFT = Response(status_code=499)  # to a client that has left


class ClientError(Exception):
    """An error that is answered with a status of its own."""

    def __init__(self, status: int, message: str, code: str | None = None, param: str | None = None) -> None:
        super().__init__(message)
        self.status, self.code, self.param = status, code, param


def create_app(engine: EngineClient, model: str, options: ServerOptions) -> FastAPI:
    """Build the application.

    Args:
        engine: the engine, whose client is not started yet.
        model: the served model's name.
        options: the server's options.
    """
    api = Api(engine, model, options)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        engine.start()
        yield
        await engine.close()

    app = FastAPI(title="mini-engine", lifespan=lifespan, docs_url=None, redoc_url=None)
    app.add_api_route("/", api.page, methods=["GET", "HEAD"])
    app.add_api_route("/events", api.events, methods=["GET"])
    app.add_api_route("/health", api.health, methods=["GET"])
    app.add_api_route("/metrics", api.metrics_text, methods=["GET", "HEAD"])
    app.add_api_route("/v1/models", api.models, methods=["GET"])
    app.add_api_route("/v1/models/{name:path}", api.one_model, methods=["GET"])
    app.add_api_route("/v1/completions", api.completions, methods=["POST"])
    app.add_api_route("/v1/chat/completions", api.chat, methods=["POST"])
    app.add_api_route("/tokenize", api.tokenize, methods=["POST"])
    app.add_api_route("/detokenize", api.detokenize, methods=["POST"])
    app.add_exception_handler(RequestValidationError, _invalid)
    app.add_exception_handler(StarletteHTTPException, _http_error)
    app.add_exception_handler(ClientError, _client_error)
    app.add_exception_handler(MiniEngineError, _engine_error)
    app.add_middleware(_BodyLimit, most=options.max_body_bytes)
    if options.api_key is not None:
        app.add_middleware(_ApiKey, key=options.api_key)
    return app


class Api:
    """The endpoints.

    Args:
        engine: the engine.
        model: the served model's name.
        options: the server's options.
    """

    def __init__(self, engine: EngineClient, model: str, options: ServerOptions) -> None:
        self._engine, self._front, self._model = engine, engine.front, model
        self._metrics, self._card = Metrics(model), _card(model, engine.front)
        self._template = _read(options.chat_template)
        template = self._template or _template_of(engine.front)
        self._tools, self._reasons = tool_format(template), template is not None and THINK in template
        self._page = read_page()

    async def page(self) -> Response:
        """Return the page on which to chat and to watch the engine."""
        return HTMLResponse(self._page.html, headers=self._page.headers)

    async def events(self) -> Response:
        """Stream snapshots of the engine, which the page draws."""

        async def live() -> AsyncGenerator[bytes, None]:
            async with aclosing(snapshots(self._engine)) as several:
                async for snapshot in several:
                    yield PING if snapshot is None else event(snapshot)

        return _event_stream(live())

    async def health(self) -> Json:
        """Answer 200 while the engine runs."""
        if not self._engine.is_alive:
            raise ClientError(503, "the engine has stopped")
        return {}

    async def metrics_text(self) -> Response:
        return Response(self._metrics.text(await self._engine.read(engine_counts)), media_type=CONTENT_TYPE)

    async def models(self) -> Json:
        return {"object": "list", "data": [self._card]}

    async def one_model(self, name: str) -> Json:
        self._check_model(name)
        return self._card

    async def tokenize(self, body: TokenizeRequest) -> Json:
        """Return the tokens of a text, or of a conversation."""
        self._check_model(body.model)
        if (body.prompt is None) == (body.messages is None):
            raise RequestError("give either prompt or messages")
        if body.prompt is None:
            chat = ChatRequest(messages=body.messages or [], add_generation_prompt=body.add_generation_prompt)
            tokens = await self._chat_tokens(chat)
        else:
            tokens = await run_in_threadpool(self._front.tokens_of, body.prompt, body.add_special_tokens)
        return {"count": len(tokens), "max_model_len": self._front.max_model_len, "tokens": tokens}

    async def detokenize(self, body: DetokenizeRequest) -> Json:
        """Return the text of tokens."""
        self._check_model(body.model)
        tokenizer = self._front.get_tokenizer()
        if tokenizer is None:
            raise RequestError("the model has no tokenizer")
        if wrong := [token for token in body.tokens if token >= len(tokenizer)]:
            raise RequestError(f"tokens has {wrong[0]}, and the tokenizer has {len(tokenizer)} tokens")
        return {"prompt": tokenizer.decode(body.tokens)}

    async def completions(self, body: CompletionRequest, http: HTTPRequest) -> Response:
        """Continue one text or several."""
        self._check_model(body.model)
        params, prompts = body.params(self._front.default_params), body.prompts()
        if not prompts:
            raise RequestError("prompt is an empty list; give at least one text")
        of = self._front.tokens_of
        tokens = [await run_in_threadpool(of, own) if isinstance(own, str) else of(own) for own in prompts]
        echoes = [own if isinstance(own, str) else self._decode(own) for own in prompts] if body.echo else None
        answer = CompletionAnswer(self._model, body.logprobs, echoes)
        return await self._answer(body, http, answer, tokens, params)

    async def chat(self, body: ChatRequest, http: HTTPRequest) -> Response:
        """Answer a conversation."""
        self._check_model(body.model)
        params = body.params(self._front.default_params)
        tokens = await self._chat_tokens(body)
        new_parser = self._parser_of(body, tokens)
        return await self._answer(body, http, ChatAnswer(self._model, params.logprobs, new_parser), [tokens], params)

    # --- details -------------------------------------------------------------------------------------------------

    async def _chat_tokens(self, body: ChatRequest) -> list[int]:
        if body.offers_tools and not body.is_forced and self._tools is None:
            raise ClientError(400, "the chat template of this model has no tools; leave them out", param="tools")
        messages, options = body.conversation(), body.template_options() | {"chat_template": self._template}
        return await run_in_threadpool(lambda: self._front.chat_prompt(messages, **options))

    def _parser_of(self, body: ChatRequest, tokens: list[int]) -> Callable[[], Parser]:
        if body.is_forced:
            return lambda: ForcedCalls(body.forced_name)
        tools = self._tools if body.offers_tools else None
        thinks = self._reasons and self._decode(tokens[-8:]).rstrip().endswith(THINK)
        return lambda: OutputParser(tools, self._reasons, thinks)

    def _decode(self, tokens: list[int]) -> str:
        tokenizer = self._front.get_tokenizer()
        return "" if tokenizer is None else str(tokenizer.decode(tokens))

    def _check_model(self, name: str | None) -> None:
        if name is not None and name != self._model:
            message = f"the model {name[:200]!r} is not served here; use {self._model!r}"
            raise ClientError(404, message, "model_not_found", "model")

    async def _answer(
        self,
        body: Request,
        http: HTTPRequest,
        answer: Answer,
        tokens: list[list[int]],
        params: SamplingParams,
    ) -> Response:
        """Serve all prompts of a request, as a stream or as a whole."""
        pieces = self._pieces(body, tokens, params)
        if not body.stream:
            async with aclosing(pieces):
                outputs = await _unless_left(http, _outputs(pieces, len(tokens)))
            return LEFT if outputs is None else JSONResponse(answer.whole(outputs))
        first = await _unless_left(http, _first(pieces))
        if first is None:
            await pieces.aclose()
            return LEFT
        answer.num_prompt = sum(map(len, tokens))
        options = body.stream_options
        answer.with_usage = options is not None and options.continuous_usage_stats
        last = [lambda: event(answer.counts())] if options is not None and options.include_usage else []
        return _event_stream(_events(answer, first, pieces, params.n * len(tokens), params.n, last))

    async def _pieces(
        self, body: Request, tokens: list[list[int]], params: SamplingParams
    ) -> AsyncGenerator[list[Piece], None]:
        """Yield the pieces of several prompts as they come, and time them."""
        watches: list[Watch] = [self._metrics.watch(len(own)) for own in tokens]
        served = self._engine.stream(
            tokens, params, each_step=bool(body.stream), priority=body.priority or 0, tenant=body.user or ""
        )
        async with aclosing(served) as several:
            async for pieces in several:
                for piece in pieces:
                    watches[piece.index].add(piece)
                yield pieces


def _read(file: Path | None) -> str | None:
    try:
        return None if file is None else file.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot read the chat template {file}: {error}; give a Jinja file") from error


def _template_of(front: TextFront) -> str | None:
    tokenizer = front.get_tokenizer()
    template = None if tokenizer is None else tokenizer.chat_template
    return template if isinstance(template, str) else None


def _card(model: str, front: TextFront) -> Json:
    names = {"id": model, "object": "model", "created": 0, "owned_by": "mini-engine"}
    return names | {"root": model, "parent": None, "max_model_len": front.max_model_len}


async def _first(several: AsyncGenerator[list[Piece], None]) -> list[Piece]:
    while not (pieces := await anext(several)):
        pass  # nothing has come for a long time; the answer begins with the first token
    return pieces


async def _outputs(several: AsyncIterator[list[Piece]], count: int) -> list[RequestOutput]:
    outputs: dict[int, RequestOutput] = {}
    async for pieces in several:
        outputs.update({piece.index: piece.output for piece in pieces if piece.output is not None})
    return [outputs[number] for number in range(count)]


async def _unless_left(http: HTTPRequest, work: Awaitable[Any]) -> Any:
    """Return what the work returns, or None if the client leaves first, which ends the work."""

    async def left() -> None:
        while (await http.receive())["type"] != "http.disconnect":
            pass

    working, watching = asyncio.ensure_future(work), asyncio.create_task(left())
    try:
        await asyncio.wait({working, watching}, return_when=asyncio.FIRST_COMPLETED)
        return await working if working.done() else None
    finally:
        for task in (working, watching):
            task.cancel()
        await asyncio.gather(working, watching, return_exceptions=True)


async def _events(
    answer: Answer,
    pieces: list[Piece],
    rest: AsyncGenerator[list[Piece], None],
    num_choices: int,
    n: int,
    last: list[Callable[[], bytes]],
) -> AsyncGenerator[bytes, None]:
    """Yield a stream's events: what each choice begins with, then the pieces as they come, then the last ones.

    An error becomes the last event, and the connection ends as broken.
    """
    async with aclosing(rest):
        events = b"".join(map(event, answer.first_chunks(num_choices, n)))
        try:
            while True:
                for piece in pieces:
                    for chunk in answer.chunks(piece.index * n + piece.completion, piece):
                        events += event(chunk)
                if events or not pieces:
                    yield events or PING
                events, pieces = b"", await anext(rest)
        except StopAsyncIteration:
            pass
        except MiniEngineError as error:
            status, body = _as_error(error)
            yield event(body | {"status": status})
            raise  # without the last chunk of the transfer, so that clients that ignore errors notice
    for make in last:
        yield make()
    yield DONE


def _event_stream(events: AsyncGenerator[bytes, None]) -> Response:
    headers = {"Cache-Control": "no-cache"}
    return StreamingResponse(events, media_type="text/event-stream", headers=headers)


# --- errors ----------------------------------------------------------------------------------------------------------


def _as_error(error: MiniEngineError) -> tuple[int, Json]:
    if isinstance(error, QueueFullError):
        return 429, error_body(str(error), "rate_limit_error", "queue_full")
    if isinstance(error, ShuttingDownError):
        return 503, error_body(str(error), "service_unavailable", "shutting_down")
    if isinstance(error, RequestError):
        return 400, error_body(str(error), "invalid_request_error")
    return 500, error_body(str(error), "server_error")


async def _engine_error(http: HTTPRequest, error: Exception) -> Response:
    assert isinstance(error, MiniEngineError)
    status, body = _as_error(error)
    # Clients wait so long before they try again.
    seconds = error.retry_after if isinstance(error, QueueFullError) else 1
    return JSONResponse(body, status, headers={"Retry-After": f"{seconds}"} if status in (429, 503) else None)


async def _client_error(http: HTTPRequest, error: Exception) -> Response:
    assert isinstance(error, ClientError)
    kind = "invalid_request_error" if error.status < 500 else "server_error"
    return JSONResponse(error_body(str(error), kind, error.code, error.param), error.status)


async def _http_error(http: HTTPRequest, error: Exception) -> Response:
    assert isinstance(error, StarletteHTTPException)
    message = f"{http.method} {http.url.path}: {error.detail}"
    return JSONResponse(error_body(message, "invalid_request_error"), error.status_code, headers=error.headers)


async def _invalid(http: HTTPRequest, error: Exception) -> Response:
    """Name the first field that is wrong."""
    assert isinstance(error, RequestValidationError)
    first = error.errors()[0]
    # A value of several types has an error for each of them, whose places end in the types' names.
    param = first["loc"][1] if len(first["loc"]) > 1 and first["type"] != "json_invalid" else None
    message = f"{param}: {first['msg']}" if param else f"the body is not a request in JSON: {first['msg']}"
    if first["type"] == "extra_forbidden":
        message = f"the field {param!r} is not supported here; leave it out"
    return JSONResponse(error_body(message, "invalid_request_error", first["type"], param), 400)


# --- middleware ------------------------------------------------------------------------------------------------------

Scope = dict[str, Any]
Receive = Callable[[], Awaitable[Any]]
Send = Callable[[Any], Awaitable[None]]


class _ApiKey:
    """Refuses requests without the key, except to `OPEN_PATHS`."""

    def __init__(self, app: Any, key: str) -> None:
        self._app, self._wanted = app, f"Bearer {key}".encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] not in OPEN_PATHS:
            given = dict(scope["headers"]).get(b"authorization", b"")
            if not hmac.compare_digest(given, self._wanted):
                body = error_body("the API key is missing or wrong", "invalid_request_error", "invalid_api_key")
                await JSONResponse(body, 401)(scope, receive, send)
                return
        await self._app(scope, receive, send)


class _BodyLimit:
    """Refuses bodies that are too long, before they are in memory."""

    def __init__(self, app: Any, most: int) -> None:
        self._app, self._most = app, most

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        left = self._most

        async def counted() -> Any:
            nonlocal left
            message = await receive()
            left -= len(message.get("body", b""))
            if left < 0:
                raise HTTPException(413, f"the body has more than {self._most} bytes; send less")
            return message

        length = dict(scope["headers"]).get(b"content-length", b"0")
        if length.isdigit() and int(length) > self._most:
            body = error_body(f"the body has more than {self._most} bytes; send less", "invalid_request_error")
            return await JSONResponse(body, 413)(scope, receive, send)
        await self._app(scope, counted, send)
