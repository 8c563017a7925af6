"""Structured output: what llguidance is asked, and grammars in the engine."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerBase

from mini_engine import LLM, SamplingParams
from mini_engine.errors import RequestError
from mini_engine.loading.checkpoint import load_tokenizer, open_checkpoint
from mini_engine.sampler import pack_bits
from mini_engine.structured import GrammarCompiler, StructuredOutputsParams, close_objects
from tests.helpers import EOS, check_nothing_leaked, double_model, let_all_guesses_pay, make_engine

MODEL, VOCAB, END = "smollm2-135m-instruct", 49_152, 2
PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 12}, "age": {"type": "integer", "maximum": 150}},
    "required": ["name", "age"],
}


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerBase:
    return load_tokenizer(open_checkpoint(MODEL))


@pytest.fixture(scope="module")
def compiler(tokenizer: PreTrainedTokenizerBase) -> GrammarCompiler:
    return GrammarCompiler(tokenizer, VOCAB + 128, [END])  # logits may be wider than the vocabulary


def takes(compiler: GrammarCompiler, tokenizer: PreTrainedTokenizerBase, text: str, **kind: Any) -> bool:
    """Whether each token of the text is allowed when it comes, and an end token after the last."""
    grammar = compiler.compile(StructuredOutputsParams(**kind))
    for token in tokenizer.encode(text, add_special_tokens=False):
        if not is_allowed(grammar.mask(), token):
            return False
        grammar.accept([token])
    return is_allowed(grammar.mask(), END)


def is_allowed(mask: np.ndarray, token: int) -> bool:
    return bool((int(mask[token // 32]) >> (token % 32)) & 1)


@pytest.mark.parametrize(
    ("kind", "right", "wrong"),
    [
        ({"choice": ["yes", "no", "não"]}, ["yes", "no", "não"], ["maybe", "ye", "yesno", ""]),
        ({"regex": r"[a-z]{3}-\d+"}, ["abc-1", "xyz-123456"], ["ab-1", "abc-", "abc-1 "]),
        ({"json_object": True}, ['{"a": [1, {"b": null}]}', "{}"], ["[1]", '"x"', "{", "{} "]),
        ({"json": PERSON}, ['{"name": "Jo", "age": 7}'], ['{"age": 7}', '{"name": 1, "age": 7}', '{"name":"Jo"}']),
        ({"json": json.dumps(PERSON)}, ['{"name":"Jo","age":150}'], ['{"name":"Jo","age":151}']),
        ({"json": PERSON}, ['{\n  "name": "Jo",\n  "age": 7\n}'], ["{" + " " * 60 + '"name":"Jo","age":7}']),
        ({"json": {"type": "string"}}, ['"caf\\u00e9"', '"café"', '"a\\nb"'], ['"a\nb"', "a"]),
        ({"grammar": 'start: "a" ("," "a")*'}, ["a", "a,a,a"], ["a,", "b"]),
    ],
)
def test_what_a_grammar_takes(
    compiler: GrammarCompiler,
    tokenizer: PreTrainedTokenizerBase,
    kind: dict[str, Any],
    right: list[str],
    wrong: list[str],
) -> None:
    assert all(takes(compiler, tokenizer, text, **kind) for text in right)
    assert not any(takes(compiler, tokenizer, text, **kind) for text in wrong)


def test_strict_mode_closes_objects(compiler: GrammarCompiler, tokenizer: PreTrainedTokenizerBase) -> None:
    more, strict = '{"name":"Jo","age":7,"x":1}', close_objects({"$defs": {"p": PERSON}, "$ref": "#/$defs/p"})
    assert takes(compiler, tokenizer, more, json=PERSON)
    assert not takes(compiler, tokenizer, more, json=strict)
    assert takes(compiler, tokenizer, '{"name":"Jo","age":7}', json=strict)


@pytest.mark.parametrize(
    ("kind", "named"),
    [
        ({"json": {"type": "array", "uniqueItems": True}}, "uniqueItems"),
        ({"json": {"type": "string", "format": "nonsense"}}, "nonsense"),
        ({"json": {"not": {"type": "null"}}}, "not"),
        ({"json": {"const": 2**53 + 1}}, str(2**53 + 1)),
        ({"json": {"minimum": -(2**60)}}, str(-(2**60))),
        ({"json": {"enum": ["a", "<|im_start|>"]}}, "<|im_start|>"),
        ({"choice": ["<|im_end|>"]}, "<|im_end|>"),
        ({"regex": "a(?=b)"}, "look-around"),
        ({"regex": "("}, "regex"),
        ({"grammar": 'foo: "x"'}, "start"),
        ({"json": "{"}, "JSON"),
        ({"regex": "a" * 70_000}, "65536"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(compiler: GrammarCompiler, kind: dict[str, Any], named: str) -> None:
    with pytest.raises(RequestError, match=named.replace("|", r"\|")):
        compiler.compile(StructuredOutputsParams(**kind))


@pytest.mark.parametrize(
    "kind", [{}, {"regex": "a", "choice": ["b"]}, {"choice": []}, {"choice": "ab"}, {"choice": ["a", ""]}]
)
def test_parameters_are_one_kind_of_the_right_type(kind: dict[str, Any]) -> None:
    with pytest.raises(RequestError):
        StructuredOutputsParams(**kind)


def test_a_token_that_is_not_allowed_leaves_the_grammar_usable(compiler: GrammarCompiler) -> None:
    grammar = compiler.compile(StructuredOutputsParams(choice=["yes"]))
    before = grammar.mask()
    with pytest.raises(RequestError):
        grammar.accept([100])
    assert grammar.num_accepted == 0 and np.array_equal(grammar.mask(), before)
    assert not is_allowed(before, VOCAB) and len(before) == (VOCAB + 128) // 32


def test_copies_are_independent(compiler: GrammarCompiler, tokenizer: PreTrainedTokenizerBase) -> None:
    grammar = compiler.compile(StructuredOutputsParams(choice=["yes", "no"]))
    other, (token,) = grammar.copy(), tokenizer.encode("yes")
    grammar.accept([token])
    assert is_allowed(other.mask(), token) and not is_allowed(grammar.mask(), token)


# --- in the engine ---------------------------------------------------------------------------------------------------


class Steps:
    """A grammar over small numbers: a token is at most 9 above the one before it, modulo 61, or the end."""

    def __init__(self, first: int) -> None:
        self.num_accepted, self.last, self.read = 0, first, list[int]()

    def allowed(self) -> list[int]:
        return sorted({EOS, *((self.last + step) % 61 for step in range(1, 10))})

    def accept(self, token_ids: Sequence[int]) -> None:
        for token in token_ids:
            assert token in self.allowed()
            self.last = token
        self.num_accepted += len(token_ids)
        self.read += token_ids

    def mask(self) -> np.ndarray:
        return pack_bits(self.allowed(), 61)

    def copy(self) -> Steps:
        return Steps(self.last)


def constrained(model: Any, prompts: list[list[int]], grammars: list[bool], **options: Any) -> list[list[int]]:
    """Serve requests together, some of them with a grammar; their outputs."""
    engine = make_engine(model, **options)
    if options.get("speculative_config"):
        let_all_guesses_pay(engine)
    params, requests = SamplingParams(temperature=1.0, max_tokens=10), []
    for i, (prompt, has_grammar) in enumerate(zip(prompts, grammars, strict=True)):
        grammar = Steps(i) if has_grammar else None
        requests.append(engine.add_request(f"{i}", prompt, replace(params, seed=i), grammar=grammar))
    while engine.has_unfinished:
        engine.step()
    check_nothing_leaked(engine)
    for request in requests:
        assert request.error is None
        if isinstance(request.grammar, Steps):
            assert request.output_token_ids[: request.grammar.num_accepted] == request.grammar.read
            follow = Steps(int(request.request_id))
            follow.accept([token for token in request.output_token_ids if token != EOS])
    return [request.output_token_ids for request in requests]


@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_grammars_do_not_depend_on_the_schedule(data: st.DataObject) -> None:
    model, count = double_model("llama"), data.draw(st.integers(1, 4))
    prompts = [data.draw(st.lists(st.integers(3, 60), min_size=1, max_size=20)) for _ in range(count)]
    grammars = [data.draw(st.booleans()) for _ in range(count)]
    want = [
        constrained(model, [[1]] * i + [prompt], [False] * i + [has], max_batch_size=1)[-1]
        for i, (prompt, has) in enumerate(zip(prompts, grammars, strict=True))
    ]
    speculative = data.draw(st.sampled_from([None, {"method": "ngram", "num_speculative_tokens": 2}]))
    got = constrained(
        model, prompts, grammars, page_size=4, num_pages=data.draw(st.integers(9, 30)), max_batch_size=3,
        max_num_batched_tokens=data.draw(st.integers(3, 40)), pipeline_depth=data.draw(st.integers(0, 1)),
        enable_prefix_caching=data.draw(st.booleans()), max_model_len=32, speculative_config=speculative,
    )  # fmt: skip
    assert got == want


def test_others_do_not_wait_for_a_grammar() -> None:
    """With a pipeline, a request with a grammar gets a token in every second step, and the others in every step."""
    engine = make_engine(double_model("llama"), pipeline_depth=1)
    params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    slow, fast = (
        engine.add_request(name, [5, 6], params, grammar=grammar) for name, grammar in (("s", Steps(5)), ("f", None))
    )
    while fast.finish_reason is None:
        engine.step()
    assert 5 <= len(engine.tokens_of(slow, 2)) <= 7
    engine.abort("s")


def test_a_failing_grammar_ends_its_request_alone() -> None:
    class Failing(Steps):
        def mask(self) -> np.ndarray:
            if self.num_accepted == 2:
                raise RequestError("the grammar failed")
            return super().mask()

    engine = make_engine(double_model("llama"))
    params = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
    failing = engine.add_request("failing", [5, 6], params, grammar=Failing(5))
    other = engine.add_request("other", [5, 6], params)
    while engine.has_unfinished:
        engine.step()
    assert failing.finish_reason == "error" and "the grammar failed" in str(failing.error)
    assert len(other.output_token_ids) == 6 and other.finish_reason == "length"


def test_structured_outputs_of_a_model() -> None:
    llm = LLM(MODEL, dtype="float32", device="cpu", max_batch_size=4, max_model_len=256)
    kinds: list[dict[str, Any]] = [
        {"json": close_objects(PERSON)},
        {"choice": ["red", "green"]},
        {"regex": r"[A-Z][a-z]+ \d{4}"},
    ]
    params = [
        SamplingParams(temperature=1.0, seed=3, n=2, max_tokens=60, structured_outputs=StructuredOutputsParams(**kind))
        for kind in kinds
    ]
    people, colors, dates = llm.generate(["A person in JSON:", "A color:", "A month and a year:"], params)
    for own in people.outputs:
        found = json.loads(own.text)
        assert set(found) >= {"name", "age"} and found["age"] <= 150 and own.finish_reason == "stop"
    assert all(own.text in ("red", "green") for own in colors.outputs)
    assert all(own.text[-4:].isdigit() for own in dates.outputs)
    with pytest.raises(RequestError, match="uniqueItems"):
        llm.generate("x", SamplingParams(structured_outputs=StructuredOutputsParams(json={"uniqueItems": True})))


def test_guesses_of_structured_outputs() -> None:
    """JSON that repeats its keys: fewer steps, and the same tokens."""
    strings = {name: {"type": "string", "maxLength": 12} for name in ("name", "city")}
    person = {"type": "object", "properties": strings, "required": list(strings)}
    schema = {"type": "array", "minItems": 4, "maxItems": 4, "items": person}
    structured = StructuredOutputsParams(json=close_objects(schema))
    params = SamplingParams(temperature=0.0, max_tokens=60, structured_outputs=structured)
    plain = LLM(MODEL, dtype="float32", device="cpu", max_batch_size=1, max_model_len=128, batch_invariant=True)
    guessing = plain.with_options(speculative_config={"method": "ngram"}, batch_invariant=True)
    let_all_guesses_pay(guessing.engine)
    (want,), (got,) = (own.generate(["Three people in JSON:"], params)[0].outputs for own in (plain, guessing))
    assert got.token_ids == want.token_ids and guessing.engine.metrics.num_accepted_tokens > 5
