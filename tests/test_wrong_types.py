"""Values of a wrong type get a typed error from the engine itself.

The other tests check every call against its annotations, and would stop these before the engine sees them: so the cases
run in a process without that check.
"""

import subprocess
import sys
from pathlib import Path

SCRIPT = """
import dataclasses

import numpy as np
import torch
from transformers import AutoTokenizer

from mini_engine.chat_template import render_chat
from mini_engine.chunks import ChunkedLLM
from mini_engine.errors import ConfigError, RequestError
from mini_engine.loading import hub
from mini_engine.parts import Parts
from mini_engine.sampling_params import SamplingParams
from mini_engine.speculative.config import SpeculativeConfig
from tests.helpers import GREEDY, check_nothing_leaked, double_model, make_engine, make_text_engine


def refused(error, message, function, *args, **options):
    try:
        function(*args, **options)
    except error as refusal:
        assert message in str(refusal), f"{message!r} not in {refusal}"
    else:
        raise AssertionError(f"accepted: {options or args}")


for name, value in [
    ("temperature", "hot"), ("temperature", None), ("top_p", "x"), ("min_p", [0]), ("repetition_penalty", True),
    ("top_k", 1.5), ("max_tokens", "9"), ("stop", [5]), ("stop_token_ids", 5), ("seed", 0.5), ("n", None),
    ("top_k", True), ("top_k", np.float64(2)), ("top_p", torch.ones(1)), ("seed", np.bool_(True)), ("ignore_eos", 1),
    ("logit_bias", [1]), ("allowed_token_ids", 5), ("bad_words", [5]), ("logprobs", "1"), ("min_tokens", None),
]:
    refused(RequestError, name, SamplingParams, **{name: value})
for bias in ({1.5: 1.0}, {1: "x"}, {"1": 1.0}):
    refused(RequestError, "logit_bias", SamplingParams, logit_bias=bias)

# Numbers of NumPy and PyTorch are numbers; a wrong type is told apart from a wrong range.
plain = SamplingParams(
    top_k=5, temperature=0.5, seed=7, stop_token_ids=[3], logit_bias={3: 2.0}, max_tokens=9, allowed_token_ids=[1, 2]
)
assert plain == SamplingParams(
    top_k=np.int64(5), temperature=torch.tensor(0.5), seed=torch.tensor(7), stop_token_ids=np.array([3]),
    logit_bias={np.int32(3): np.float64(2)}, max_tokens=np.uint8(9), allowed_token_ids=torch.tensor([1, 2]),
)
assert {type(value) for value in (plain.top_k, plain.temperature, plain.stop_token_ids[0])} == {int, float}
refused(RequestError, "whole number", SamplingParams, top_k=1.5)
refused(RequestError, "0 or -1", SamplingParams, top_k=np.int64(-2))

for message, options in [
    ("choose from", {"method": ["ngram"]}),
    ("prompt_lookup_min is '2'", {"method": "ngram", "prompt_lookup_min": "2"}),
    ("suffix_min_length is True", {"method": "suffix", "suffix_min_length": True}),
    ("suffix_decoding_max_tree_depth is 2.0", {"method": "suffix", "suffix_decoding_max_tree_depth": 2.0}),
    ("suffix_decoding_max_spec_factor is '1'", {"method": "suffix", "suffix_decoding_max_spec_factor": "1"}),
]:
    refused(ConfigError, message, SpeculativeConfig.of, options)

# Integers may be too large for a float, and too long to print.
for name in ("temperature", "top_p", "min_p", "repetition_penalty"):
    for value in (10**400, -(10**400), 10**5000):
        refused(RequestError, f"{name} is an integer of more than 40 digits", SamplingParams, **{name: value})
    assert type(getattr(SamplingParams(**{name: 1}), name)) is float

pool = {"num_pages": 8, "page_size": 4, "max_batch_size": 2}
model = double_model("llama")
for name, value in [
    ("num_pages", 8.0), ("page_size", "4"), ("page_size", True), ("max_batch_size", 2.5), ("max_model_len", 9.5),
    ("max_num_batched_tokens", 7.5), ("sliding_window", "8"),
]:
    refused(ConfigError, f"{name} is {value!r}", make_engine, model, **pool | {name: value})
refused(ConfigError, "choose one of", make_engine, model, **pool | {"attn_backend": ["torch"]})
refused(ConfigError, "parts is a dict; give a mini_engine.Parts", make_engine, model, parts={"sample": 5}, **pool)
for field in dataclasses.fields(Parts):
    for value in (5, None, [len]):
        refused(ConfigError, f"the part {field.name}", Parts, **{field.name: value})
refused(ConfigError, "the part page_table", Parts, page_table=dict)

llm = make_text_engine(model, **pool)
want = llm.generate([5, 9], GREEDY)[0].token_ids

# One prompt.
for prompt in ([5, 9], (5, 9), range(5, 10, 4), np.array([5, 9]), torch.tensor([5, 9]), [np.int64(5), np.uint8(9)]):
    (output,) = llm.generate(prompt, GREEDY)
    assert output.token_ids == want and output.prompt_token_ids == [5, 9], prompt
# Several.
for prompts in (torch.tensor([[5, 9], [5, 9]]), np.array([[5, 9], [5, 9]]), [torch.tensor([5, 9]), np.array([5, 9])]):
    assert [output.token_ids for output in llm.generate(prompts, GREEDY)] == [want] * 2
# Neither.
for prompts in (None, 5, 1.5, iter([5]), (token for token in [5]), {5}, b"ab", bytearray(b"ab"),
                memoryview(b"ab"), torch.tensor(5), np.array(5), object()):
    refused(RequestError, "give text, token ids, or a list of prompts", llm.generate, prompts, GREEDY)
    refused(RequestError, "give text, token ids, or a list of prompts", llm.stream_batch, prompts, GREEDY)
for prompts in ({}, {"a": 1}, {0: 5}, [{"prompt": None}], [{"prompt": "w5", "multi_modal_data": {}}]):
    refused(RequestError, "prompt", llm.generate, prompts, GREEDY)
# A prompt that is none, beside one that is.
for prompt in (None, 7.5, iter([5]), {5}, b"ab", bytearray(b"ab"), torch.tensor(5), [1.5], ["w1"], [None],
               [True, False], [5, True], [[5]], torch.tensor([1.5]), np.array([True])):
    good, bad = llm.generate([[5, 9], prompt], GREEDY, on_error="return")
    assert good.token_ids == want and bad.finish_reason == "error" and not bad.token_ids, prompt
    assert "text" in str(bad.error) and "list of token ids" in str(bad.error), bad.error
    refused(RequestError, "list of token ids", lambda: list(llm.stream(prompt, GREEDY)))
    refused(RequestError, "list of token ids", llm.tokens_of, prompt)
refused(RequestError, "list of token ids", llm.generate, [True, False], GREEDY)

for params in ({"temperature": 0}, 5, "greedy", [GREEDY, None], [{}], {GREEDY}):
    refused(RequestError, "give SamplingParams", llm.generate, [[5], [9]], params)
engine = llm.engine
refused(RequestError, "the request's name is 7", engine.add_request, 7, [5, 9], GREEDY)
refused(RequestError, "params is a dict", engine.add_request, "a", [5, 9], {"temperature": 0})
for prompt in (None, 5, iter([5]), {5}, np.array([5])):
    refused(RequestError, "give a list of token ids", engine.add_request, "a", prompt, GREEDY)
refused(RequestError, "integers from 0 to 60", engine.add_request, "a", [True], GREEDY)
for name in (None, 5, [], {}):
    engine.abort(name)
assert not engine.has_unfinished
check_nothing_leaked(engine)

chunked = ChunkedLLM(make_text_engine(model, **pool, attn_backend="cascade"))
for name in (7, None, ["a"], {}):
    refused(RequestError, "there is no chunk", chunked.register_chunk, [5], "b", after=name or 0)
    refused(RequestError, "there is no chunk", chunked.memory.unregister, name)
    refused(RequestError, "there is no chunk", chunked.memory.is_exact, [name])
refused(RequestError, "the name of a chunk is 7", chunked.register_chunk, [5], 7)
for chunk in (None, 5, b"ab", [1.5]):
    refused(RequestError, "list of token ids", chunked.register_chunk, chunk)
for chunks in (None, 5, "a", {"a"}, iter("a")):
    refused(RequestError, "give a list of names of chunks", chunked.generate, chunks, [5])
for chunks in ([5], [None], [{"a"}]):
    refused(RequestError, "give a list of names of chunks", chunked.generate, chunks, [5])
refused(RequestError, "there is no chunk", chunked.generate, [[7]], [5])
for value in (1.5, "4", True):
    refused(ConfigError, f"max_chunk_pages is {value!r}", ChunkedLLM, chunked.llm, max_chunk_pages=value)
check_nothing_leaked(chunked.llm.engine)

tokenizer = AutoTokenizer.from_pretrained(hub.embedded_folder())
user = {"role": "user", "content": "x"}
for messages in (
    None, 5, "text", b"text", {}, user, [], ["text"], [None], [{}], [{"content": "x"}], [[user]], iter([user]),
):
    refused(RequestError, "message", render_chat, tokenizer, messages, None)
    refused(RequestError, "pass", render_chat, tokenizer, messages, None)
for template in (5, ["x"], {"x": "y"}, b"x"):
    refused(RequestError, "change them or the template", render_chat, tokenizer, [user], template)
assert render_chat(tokenizer, (user,), None) == render_chat(tokenizer, [user], None)
"""


def test_wrong_types_are_refused_by_name() -> None:
    command = [sys.executable, "-c", SCRIPT]
    run = subprocess.run(command, cwd=Path(__file__).parents[1], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
