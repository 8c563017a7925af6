"""What the server sends: OpenAI's objects, whole or as chunks of a stream."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from mini_engine.logprobs import Logprob
from mini_engine.outputs import Piece, RequestOutput

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


@dataclass
class Answer:
    """The object that answers one request, as a whole or in chunks.

    Attributes:
        is_chat: whether it answers a chat; otherwise a completion.
        model: the served model's name.
        num_top: number of the likeliest tokens with log probabilities; None: no log probabilities.
        with_usage: whether every chunk has token counts.
        identifier: the answer's id, the same in all chunks.
        created: seconds since 1970.
        num_prompt: tokens of the prompts whose number is known.
        num_output: tokens of the outputs so far.
    """

    is_chat: bool
    model: str
    num_top: int | None
    with_usage: bool = False
    identifier: str = ""
    created: int = field(default_factory=lambda: int(time.time()))
    num_prompt: int = 0
    num_output: int = 0
    _offsets: dict[int, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.identifier = self.identifier or f"{'chatcmpl' if self.is_chat else 'cmpl'}-{uuid.uuid4().hex}"

    def whole(self, outputs: Sequence[RequestOutput], echoes: Sequence[str] | None = None) -> Json:
        """Return the answer with all outputs.

        Args:
            outputs: one for each prompt.
            echoes: the text of each prompt, to be put before its outputs.
        """
        choices = list[Json]()
        for i, output in enumerate(outputs):
            for completion in output.outputs:
                choice: Json = {"index": len(choices), "finish_reason": completion.finish_reason, "logprobs": None}
                found = completion.logprobs
                if self.is_chat:
                    choice["message"] = {"role": "assistant", "content": completion.text, "refusal": None}
                    if found is not None:
                        choice["logprobs"] = chat_logprobs(found, self.num_top or 0)
                else:
                    choice["text"] = (echoes[i] if echoes else "") + completion.text
                    if found is not None:
                        before = (output.prompt_logprobs or []) if echoes else []
                        others = sum(len(_own(of).decoded_token or "") for of in before if of is not None)
                        first = echoes[i][: len(echoes[i]) - others] if echoes else ""
                        choice["logprobs"] = completion_logprobs([*before, *found], self.num_top or 0, 0, first)
                choices.append(choice)
                self.num_output += len(completion.token_ids)
        self.num_prompt = sum(len(output.prompt_token_ids) for output in outputs)
        return self._object(choices) | {"usage": usage(self.num_prompt, self.num_output)}

    def first(self, index: int) -> Json:
        """Return the first chunk of an output of a chat: the role."""
        return self._chunk([{"index": index, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}])

    def text(self, index: int, text: str) -> Json:
        """Return a chunk of a completion with a text that is not an output's."""
        return self._chunk([{"index": index, "text": text, "logprobs": None, "finish_reason": None}])

    def pieces(self, index: int, piece: Piece) -> list[Json]:
        """Return the chunks for new text of an output: one for the text if there is any, and one for its end.

        Args:
            index: the number of the choice.
            piece: what is new.
        """
        self.num_output += piece.num_tokens
        chunks = []
        if piece.text or piece.logprobs:
            choice: Json = {"index": index, "finish_reason": None, "logprobs": None}
            choice |= {"delta": {"content": piece.text}} if self.is_chat else {"text": piece.text}
            if piece.logprobs is not None:
                choice["logprobs"] = self._logprobs(index, piece.logprobs)
            chunks.append(self._chunk([choice]))
        if piece.finish_reason is not None:
            end: Json = {"delta": {}} if self.is_chat else {"text": ""}
            choice = {"index": index, "finish_reason": piece.finish_reason, "logprobs": None} | end
            chunks.append(self._chunk([choice]))
        return chunks

    def counts(self) -> Json:
        """Return the last chunk, which has token counts and no choices."""
        return self._object([], is_chunk=True) | {"usage": usage(self.num_prompt, self.num_output)}

    def _logprobs(self, index: int, tokens: Sequence[OfToken]) -> Json:
        if self.is_chat:
            return chat_logprobs(tokens, self.num_top or 0)
        found = completion_logprobs(tokens, self.num_top or 0, self._offsets.get(index, 0))
        self._offsets[index] = self._offsets.get(index, 0) + sum(map(len, found["tokens"]))
        return found

    def _chunk(self, choices: list[Json]) -> Json:
        chunk = self._object(choices, is_chunk=True)
        return chunk | {"usage": usage(self.num_prompt, self.num_output)} if self.with_usage else chunk

    def _object(self, choices: list[Json], is_chunk: bool = False) -> Json:
        name = "text_completion" if not self.is_chat else "chat.completion.chunk" if is_chunk else "chat.completion"
        return {
            "id": self.identifier, "object": name, "created": self.created, "model": self.model, "choices": choices,
        }  # fmt: skip
