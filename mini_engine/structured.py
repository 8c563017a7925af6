"""Structured output: texts that follow a JSON schema, a regular expression, a grammar, or a list of choices.

After each token, a grammar says which tokens may follow, and the sampler masks the others. llguidance, which is an
extra of this package, compiles and runs the grammars. This module chooses what it is asked, and refuses what it would
get wrong: a schema that it only seems to support is worse than one that it refuses. Explained in chapter 16.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import numpy as np
from jaxtyping import Int32

from mini_engine.errors import RequestError

if TYPE_CHECKING:
    from llguidance import LLMatcher
    from transformers import PreTrainedTokenizerBase

MOST_CHARACTERS = 1 << 16  # of a schema, an expression, or all choices
LARGEST_EXACT = 2**53  # llguidance computes with larger integers in float64, and rounds them
# Between the tokens of JSON: a new line, and an indentation. Without a limit, a model may write spaces forever.
WHITESPACE = r"\n? {0,16}"
KINDS = "json", "json_object", "regex", "choice", "grammar"


@dataclass(frozen=True)
class StructuredOutputsParams:
    """What the text of an output must be, by exactly one of the attributes. Names are vLLM's.

    Attributes:
        json: JSON that follows this schema: a dictionary, or its JSON.
        json_object: any JSON object.
        regex: a text that this regular expression matches as a whole.
        choice: one of these texts.
        grammar: a text of this grammar, in Lark's notation with the start rule `start`.

    Raises:
        RequestError: for none or several of them, and for values of the wrong type.
    """

    json: str | Mapping[str, Any] | None = None
    json_object: bool = False
    regex: str | None = None
    choice: Sequence[str] | None = None
    grammar: str | None = None

    def __post_init__(self) -> None:
        given = [kind for kind in KINDS if getattr(self, kind) not in (None, False)]
        if len(given) != 1:
            kinds = ", ".join(KINDS)
            raise RequestError(f"structured output has {' and '.join(given) or 'no kind'}; give one of {kinds}")
        for kind in ("regex", "grammar"):
            if not isinstance(getattr(self, kind), str | None):
                raise RequestError(f"{kind} is a {type(getattr(self, kind)).__name__}; give a text")
        if self.choice is not None:
            is_list = isinstance(self.choice, Sequence) and not isinstance(self.choice, str)
            if not is_list or not self.choice or not all(isinstance(text, str) and text for text in self.choice):
                raise RequestError("choice must be a list of nonempty texts")

    def __hash__(self) -> int:
        return hash(repr(self))  # a schema is a dictionary, which has no hash


@runtime_checkable
class TokenGrammar(Protocol):
    """Says which tokens may follow the tokens of one output."""

    num_accepted: int

    def accept(self, token_ids: Sequence[int]) -> None:
        """Take the output's next tokens, none of which ends it.

        Raises:
            RequestError: if the grammar does not allow them.
        """

    def mask(self) -> Int32[np.ndarray, " words"]:
        """Return which tokens may follow, end tokens included: bit i % 32 of word i / 32 for token i.

        Raises:
            RequestError: if the grammar exceeds a limit.
        """

    def copy(self) -> TokenGrammar:
        """Return an independent copy, for another output."""


class GrammarCompiler:
    """Compiles grammars for one tokenizer.

    Args:
        tokenizer: the model's.
        vocab_size: width of the logits, which may be more than the tokenizer has.
        end_token_ids: tokens that end an output.

    Raises:
        RequestError: if llguidance is not installed.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, vocab_size: int, end_token_ids: Collection[int]) -> None:
        if find_spec("llguidance") is None:
            raise RequestError("structured output needs the package llguidance: pip install 'mini-engine[server]'")
        from llguidance import LLTokenizer

        backend, self._vocab_size = tokenizer.backend_tokenizer, vocab_size
        ends = [token for token in sorted(end_token_ids) if token < vocab_size]
        if not ends:
            raise RequestError("structured output needs a model with an end token")
        # Without explicit end tokens, it would guess one from the vocabulary, which may be another than the chat's.
        self._tokenizer = LLTokenizer(backend.to_str(), n_vocab=vocab_size, eos_token=ends)
        self._special = [added.content for added in backend.get_added_tokens_decoder().values() if added.special]

    def compile(self, params: StructuredOutputsParams) -> TokenGrammar:
        """Compile a grammar.

        Raises:
            RequestError: if it is too long, malformed, or uses what is not supported; the message names it.
        """
        from llguidance import LLMatcher

        texts = list(_texts(params))
        if sum(map(len, texts)) > MOST_CHARACTERS:
            raise RequestError(f"structured output is described by more than {MOST_CHARACTERS} characters; use fewer")
        # Where such a text is the only one allowed, the mask has only the special token, which the parser refuses.
        if found := [token for token in self._special if any(token in text for text in texts)]:
            raise RequestError(f"a structured output cannot contain the special token {found[0]!r}")
        grammar = _grammar(params)
        is_wrong, messages = LLMatcher.validate_grammar_with_warnings(grammar, self._tokenizer)
        if is_wrong:
            raise RequestError(f"the structured output is not supported: {'; '.join(messages)[:500]}")
        return _Grammar(LLMatcher(self._tokenizer, grammar, log_level=0), -(-self._vocab_size // 32))


class _Grammar:
    """A `TokenGrammar` of llguidance."""

    def __init__(self, matcher: LLMatcher, num_words: int, num_accepted: int = 0) -> None:
        self._matcher, self._num_words, self.num_accepted = matcher, num_words, num_accepted

    def accept(self, token_ids: Sequence[int]) -> None:
        # A wrong token would leave the matcher in an error for ever, so they are checked first.
        if self._matcher.validate_tokens(list(token_ids)) != len(token_ids):
            raise RequestError("the output does not follow its grammar")
        self._matcher.consume_tokens(list(token_ids))
        self.num_accepted += len(token_ids)

    def mask(self) -> Int32[np.ndarray, " words"]:
        from llguidance.numpy import fill_next_token_bitmask

        mask = np.zeros((1, self._num_words), dtype=np.int32)
        fill_next_token_bitmask(self._matcher, mask)
        if self._matcher.is_error():
            raise RequestError(f"the grammar of the output failed: {self._matcher.get_error()[:500]}")
        return mask[0]

    def copy(self) -> _Grammar:
        return _Grammar(self._matcher.deep_copy(), self._num_words, self.num_accepted)


def _grammar(params: StructuredOutputsParams) -> str:
    """Return llguidance's notation."""
    from llguidance import LLMatcher

    try:
        if params.regex is not None:
            return LLMatcher.grammar_from_regex(params.regex)
        if params.choice is not None:
            schemas = " | ".join(json.dumps(text) for text in params.choice)
            return f"start: {schemas}"
        if params.grammar is not None:
            return LLMatcher.grammar_from_lark(params.grammar)
        schema = {"type": "object"} if params.json_object else _schema(params.json)
        return LLMatcher.grammar_from_json_schema(
            json.dumps(schema),
            overrides={"whitespace_pattern": WHITESPACE, "json_allow_general_unicode_escapes": True},
        )
    except ValueError as error:
        raise RequestError(f"the structured output cannot be compiled: {str(error)[:500]}") from error


def _schema(given: Any) -> Any:
    """Return a JSON schema, and refuse integers that would be rounded."""
    if isinstance(given, str):
        try:
            given = json.loads(given)
        except ValueError as error:
            raise RequestError(f"the JSON schema is not JSON: {error}") from error
    if not isinstance(given, Mapping):
        raise RequestError(f"the JSON schema is a {type(given).__name__}; give an object")
    for value in _values(given):
        if isinstance(value, int | float) and not isinstance(value, bool) and abs(value) > LARGEST_EXACT:
            raise RequestError(f"the JSON schema has the number {value}; those above 2**53 would be rounded")
    return given


def close_objects(schema: Any) -> Any:
    """Return a schema in which no object has properties that it does not declare, as OpenAI's strict mode demands."""
    if isinstance(schema, list):
        return [close_objects(own) for own in schema]
    if not isinstance(schema, Mapping):
        return schema
    closed = {name: close_objects(own) for name, own in schema.items()}
    if "properties" in closed or closed.get("type") == "object":
        closed.setdefault("additionalProperties", False)
    return closed


def _values(value: Any) -> Iterator[Any]:
    """Yield the values, keys and items of a JSON value."""
    yield value
    if isinstance(value, Mapping):
        for name, own in value.items():
            yield name
            yield from _values(own)
    elif isinstance(value, list | tuple):
        for own in value:
            yield from _values(own)


def _texts(params: StructuredOutputsParams) -> Iterator[str]:
    """Yield the texts of a description."""
    schema = None if params.json is None else _schema(params.json)
    for value in (params.regex, params.grammar, list(params.choice or ()), schema):
        yield from (text for text in _values(value) if isinstance(text, str))
