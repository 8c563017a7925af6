"""What the server sends: OpenAI's objects, whole or as chunks of a stream."""

from __future__ import annotations

import json
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

from mini_engine.logprobs import Logprob
from mini_engine.outputs import CompletionOutput, Piece, RequestOutput
from mini_engine.request import FinishReason
from mini_engine.serving.parts_of_output import Parser, ToolCall

Json = dict[str, Any]
DONE = b"data: [DONE]\n\n"
PING = b": ping\n\n"  # a comment keeps a connection open; clients ignore it


def event(value: Json) -> bytes:
    """Return a server-sent event: one line of JSON in ASCII, because some clients split at any line separator."""
    return b"data: " + json.dumps(value, separators=(",", ":")).encode() + b"\n\n"


def error_body(message: str, kind: str, code: str | None = None, param: str | None = None) -> Json:
    """Return OpenAI's error object."""
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def usage(num_prompt: int, num_output: int) -> Json:
    """Return token counts."""
    total = num_prompt + num_output
    return {"prompt_tokens": num_prompt, "completion_tokens": num_output, "total_tokens": total}


OfToken = Mapping[int, Logprob]  # the token's own log probability, then those of the likeliest tokens


def completion_logprobs(tokens: Sequence[OfToken | None], num_top: int, offset: int, first: str = "") -> Json:
    """Return the log probabilities of tokens as a completion has them.

    Args:
        tokens: one entry for each token; None for the first token of a prompt.
        num_top: how many of the likeliest are returned.
        offset: characters of the text before the first token.
        first: the text of the first token of a prompt.
    """
    found: Json = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
    for of in tokens:
        own = None if of is None else _own(of)
        text = first if own is None else own.decoded_token or ""
        found["tokens"].append(text)
        found["token_logprobs"].append(own and own.logprob)
        likeliest = None if of is None else _likeliest(of, num_top)
        found["top_logprobs"].append(likeliest and {x.decoded_token or "": x.logprob for x in likeliest})
        found["text_offset"].append(offset)
        offset += len(text)
    return found


def chat_logprobs(tokens: Sequence[OfToken], num_top: int) -> Json:
    """Return the log probabilities of tokens as a chat has them."""

    def entry(own: Logprob) -> Json:
        text = own.decoded_token or ""
        return {"token": text, "logprob": own.logprob, "bytes": list(text.encode())}

    content = [entry(_own(of)) | {"top_logprobs": [entry(other) for other in _likeliest(of, num_top)]} for of in tokens]
    return {"content": content, "refusal": None}


def _own(of: OfToken) -> Logprob:
    return next(iter(of.values()))


def _likeliest(of: OfToken, num_top: int) -> list[Logprob]:
    return sorted(of.values(), key=lambda own: own.rank)[:num_top]


class Answer(ABC):
    """The object that answers one request, as a whole or in chunks.

    Args:
        model: the served model's name.
        num_top: number of the likeliest tokens with log probabilities; None: no log probabilities.

    Attributes:
        with_usage: whether every chunk has token counts.
        num_prompt: tokens of the prompts.
        num_output: tokens of the outputs so far.
        num_cached: tokens of the prompts that the cache had, of those that have ended.
    """

    prefix: ClassVar[str]  # of its id
    whole_name: ClassVar[str]  # what kind of object it is
    chunk_name: ClassVar[str]

    def __init__(self, model: str, num_top: int | None) -> None:
        self._names = {"id": f"{self.prefix}-{uuid.uuid4().hex}", "created": int(time.time()), "model": model}
        self._num_top = num_top or 0
        self.with_usage, self.num_prompt, self.num_output, self.num_cached = False, 0, 0, 0

    @abstractmethod
    def choice(self, output: RequestOutput, completion: CompletionOutput, prompt: int) -> Json:
        """Return an output as a whole, without its index.

        Args:
            output: the outputs of a prompt.
            completion: one of them.
            prompt: the number of the prompt.
        """

    @abstractmethod
    def begin(self, index: int, prompt: int) -> Json | None:
        """Return what an output begins with in a stream, before its first token."""

    @abstractmethod
    def changes(self, index: int, piece: Piece) -> list[Json]:
        """Return what a piece adds to an output in a stream: one item for each chunk, the end of the output last."""

    def whole(self, outputs: Sequence[RequestOutput]) -> Json:
        """Return the answer with the outputs of all prompts."""
        choices = list[Json]()
        for prompt, output in enumerate(outputs):
            for completion in output.outputs:
                choices.append({"index": len(choices)} | self.choice(output, completion, prompt))
                self.num_output += len(completion.token_ids)
        self.num_prompt = sum(len(output.prompt_token_ids) for output in outputs)
        self.num_cached = sum(output.num_cached_tokens or 0 for output in outputs)
        return self._object(self.whole_name, choices) | {"usage": self._final_usage()}

    def first_chunks(self, num_choices: int, n: int) -> list[Json]:
        """Return the chunks that come before the first token, for `n` outputs of each prompt."""
        begun = [(index, self.begin(index, index // n)) for index in range(num_choices)]
        return [self._chunk(index, changes) for index, changes in begun if changes is not None]

    def chunks(self, index: int, piece: Piece) -> list[Json]:
        """Return the chunks for new text of an output."""
        self.num_output += piece.num_tokens
        if piece.output is not None:
            self.num_cached += piece.output.num_cached_tokens or 0
        return [self._chunk(index, changes) for changes in self.changes(index, piece)]

    def counts(self) -> Json:
        """Return the last chunk, which has token counts and no choices."""
        return self._object(self.chunk_name, []) | {"usage": self._final_usage()}

    def _final_usage(self) -> Json:
        details = {"prompt_tokens_details": {"cached_tokens": self.num_cached}}
        return usage(self.num_prompt, self.num_output) | details

    def _chunk(self, index: int, changes: Json) -> Json:
        choice = {"index": index, "logprobs": None, "finish_reason": None} | changes
        chunk = self._object(self.chunk_name, [choice])
        return chunk | {"usage": usage(self.num_prompt, self.num_output)} if self.with_usage else chunk

    def _object(self, name: str, choices: list[Json]) -> Json:
        return self._names | {"object": name, "choices": choices}


class CompletionAnswer(Answer):
    """The answer to a completion.

    Args:
        model: see `Answer`.
        num_top: see `Answer`.
        echoes: the text of each prompt, to be put before its outputs; None: it is not.
    """

    prefix, whole_name, chunk_name = "cmpl", "text_completion", "text_completion"

    def __init__(self, model: str, num_top: int | None, echoes: Sequence[str] | None) -> None:
        super().__init__(model, num_top)
        self._echoes = echoes
        self._offsets: dict[int, int] = {}  # characters of each output's tokens so far

    def choice(self, output: RequestOutput, completion: CompletionOutput, prompt: int) -> Json:
        echo, before = "", list[OfToken | None]()
        if self._echoes is not None:
            echo, before = self._echoes[prompt], [*(output.prompt_logprobs or [])]
        choice: Json = {"text": echo + completion.text, "finish_reason": completion.finish_reason, "logprobs": None}
        if completion.logprobs is not None:
            others = sum(len(_own(of).decoded_token or "") for of in before if of is not None)
            first = echo[: len(echo) - others]
            choice["logprobs"] = completion_logprobs([*before, *completion.logprobs], self._num_top, 0, first)
        return choice

    def begin(self, index: int, prompt: int) -> Json | None:
        return None if self._echoes is None else {"text": self._echoes[prompt]}

    def changes(self, index: int, piece: Piece) -> list[Json]:
        changes = list[Json]()
        if piece.text or piece.logprobs:
            changes.append({"text": piece.text})
        if piece.logprobs:
            offset = self._offsets.get(index, 0)
            found = completion_logprobs(piece.logprobs, self._num_top, offset)
            self._offsets[index] = offset + sum(map(len, found["tokens"]))
            changes[0]["logprobs"] = found
        if piece.finish_reason is not None:
            changes.append({"text": "", "finish_reason": piece.finish_reason})
        return changes


class ChatAnswer(Answer):
    """The answer to a chat.

    Args:
        model: see `Answer`.
        num_top: see `Answer`.
        new_parser: returns a parser for an output, which tells text, reasoning and tool calls apart.
    """

    prefix, whole_name, chunk_name = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def __init__(self, model: str, num_top: int | None, new_parser: Callable[[], Parser]) -> None:
        super().__init__(model, num_top)
        self._new_parser = new_parser
        self._parsers: dict[int, Parser] = {}

    def choice(self, output: RequestOutput, completion: CompletionOutput, prompt: int) -> Json:
        parser = self._new_parser()
        parts = [*parser.push(completion.text), *parser.finish()]
        texts = {kind: "".join(part.text for part in parts if part.kind == kind) for kind in ("content", "reasoning")}
        calls = [_call(part.call) for part in parts if part.call is not None]
        message: Json = {"role": "assistant", "content": texts["content"] or (None if calls else ""), "refusal": None}
        message |= {"reasoning_content": texts["reasoning"]} if texts["reasoning"] else {}
        message |= {"tool_calls": calls} if calls else {}
        logprobs = None if completion.logprobs is None else chat_logprobs(completion.logprobs, self._num_top)
        reason = _reason(completion.finish_reason, parser)
        return {"message": message, "finish_reason": reason, "logprobs": logprobs}

    def begin(self, index: int, prompt: int) -> Json:
        return {"delta": {"role": "assistant", "content": ""}}

    def changes(self, index: int, piece: Piece) -> list[Json]:
        parser = self._parsers.get(index) or self._parsers.setdefault(index, self._new_parser())
        changes, first = list[Json](), parser.num_calls
        parts = [*parser.push(piece.text), *(parser.finish() if piece.finish_reason is not None else ())]
        for part in parts:
            if part.call is None:
                name = "content" if part.kind == "content" else "reasoning_content"
                changes.append({"delta": {name: part.text}})
            else:  # the name and the id once, and the arguments apart
                named = {"index": first} | _call(replace(part.call, arguments=""))
                rest = {"index": first, "function": {"arguments": part.call.arguments}}
                changes += [{"delta": {"tool_calls": [own]}} for own in (named, rest)]
                first += 1
        if piece.logprobs:
            changes = changes or [{"delta": {"content": ""}}]
            changes[0]["logprobs"] = chat_logprobs(piece.logprobs, self._num_top)
        if piece.finish_reason is not None:
            changes.append({"delta": {}, "finish_reason": _reason(piece.finish_reason, parser)})
        return changes


def _call(call: ToolCall) -> Json:
    function = {"name": call.name, "arguments": call.arguments}
    return {"id": call.identifier, "type": "function", "function": function}


def _reason(reason: FinishReason, parser: Parser) -> str:
    return "tool_calls" if reason == "stop" and parser.num_calls else reason
