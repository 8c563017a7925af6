"""Static batching on tiny models of every family: a request's tokens do not depend on the rest of its batch."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from book.static_batching import Step, generate_steps, make_requests
from mini_engine.models.base import CausalLM
from mini_engine.parts import Parts
from mini_engine.request import Request
from mini_engine.sampling_params import SamplingParams
from tests.helpers import EOS, Arrival, alone, counting_parts, double_model, requests
from tests.models.families import FAMILIES, our_model, their_logits, transformers_model

PROMPTS = [[5, 9, 33], [7], [1, 60, 22, 18, 4, 4, 31, 8, 50], [12, 13]]
GREEDY = SamplingParams(temperature=0.0, max_tokens=10, ignore_eos=True)


def make(
    prompts: Sequence[list[int]], params: SamplingParams | Sequence[SamplingParams], max_model_len: int = 128
) -> list[Request]:
    of_each = [params] * len(prompts) if isinstance(params, SamplingParams) else params
    return make_requests(prompts, of_each, eos_token_ids=(EOS,), max_model_len=max_model_len)


def run(model: CausalLM, made: list[Request], parts: Parts | None = None, backend: str = "torch") -> list[list[int]]:
    for _ in generate_steps(model, made, backend, parts or Parts()):
        pass
    return [request.output_token_ids for request in made]


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_tokens_equal_transformers(family):
    theirs = transformers_model(family, seed=3)
    got = run(our_model(theirs), make(PROMPTS, GREEDY))
    for prompt, output in zip(PROMPTS, got, strict=True):
        assert len(output) == GREEDY.max_tokens
        logits = their_logits(theirs, prompt + output)[len(prompt) - 1 : -1]
        best = logits.topk(2).values
        for step, token in enumerate(output):  # equal, except where transformers' two best logits nearly are
            assert token == logits[step].argmax() or best[step, 0] - best[step, 1] < 1e-4


@settings(max_examples=25)
@given(requests(most=5, longest=12), st.sampled_from(["torch", "torch_padded"]))
def test_a_request_gets_the_tokens_that_it_gets_alone(made: list[Arrival], backend: str):
    """Greedy and sampled, with penalties and end tokens, in float64: as by naive attention without a batch."""
    model = double_model("qwen3")
    batch = make([prompt for _, prompt, _ in made], [params for _, _, params in made])
    outputs = run(model, batch, backend=backend)
    for (_, prompt, params), output in zip(made, outputs, strict=True):
        assert output == alone(model, prompt, params, guess=output)


def test_a_request_ends_at_eos_at_its_stop_tokens_and_at_both_limits():
    model = double_model("qwen3")
    (free,) = run(model, make(PROMPTS[:1], GREEDY))
    at_stop_token, at_max_tokens = make(
        PROMPTS[:1] * 2, [replace(GREEDY, stop_token_ids=[free[2]]), replace(GREEDY, max_tokens=5)]
    )
    until_stop = free[: free.index(free[2]) + 1]
    assert run(model, [at_stop_token, at_max_tokens]) == [until_stop, free[:5]]
    assert (at_stop_token.finish_reason, at_max_tokens.finish_reason) == ("stop", "length")

    (at_eos,) = make_requests(
        PROMPTS[:1], [replace(GREEDY, ignore_eos=False)], eos_token_ids=(free[2],), max_model_len=128
    )
    assert run(model, [at_eos]) == [until_stop]
    assert at_eos.finish_reason == "stop"

    (at_model_len,) = make(PROMPTS[:1], GREEDY, max_model_len=len(PROMPTS[0]) + 4)
    assert run(model, [at_model_len]) == [free[:4]]
    assert at_model_len.finish_reason == "length"


def test_an_end_token_in_the_prompt_ends_nothing():
    model = double_model("qwen3")
    prompt = [5, EOS]
    params = replace(GREEDY, ignore_eos=False, max_tokens=3)
    assert run(model, make([prompt], params)) == [alone(model, prompt, params)]


@given(st.lists(st.integers(1, 6), min_size=1, max_size=4))
@settings(max_examples=15)
def test_each_step_says_what_it_computed(limits):
    model = double_model("llama")
    made = make(PROMPTS[: len(limits)], [replace(GREEDY, max_tokens=limit) for limit in limits])
    steps: list[Step] = list(generate_steps(model, made, "torch", Parts()))
    assert len(steps) == max(limits)
    outputs = defaultdict(list)
    for i, step in enumerate(steps):
        running = [request for request, limit in zip(made, limits, strict=True) if limit > i]
        assert {request for request, _ in step.new_tokens} == set(running)
        for request, token in step.new_tokens:
            outputs[request].append(token)
        assert step.num_tokens == sum(len(r.prompt_token_ids) if i == 0 else 1 for r in running)
        assert step.is_decode == (step.num_tokens == len(running))
        keys = sum(len(r.prompt_token_ids) + i for r in running)
        sizes = (2 * spec.num_kv_heads * spec.head_dim * model.dtype.itemsize for spec in model.attention_specs)
        assert step.kv_bytes == keys * sum(sizes)
    assert [outputs[request] for request in made] == [request.output_token_ids for request in made]


def test_requests_have_their_index_as_seed_unless_they_name_one():
    own = SamplingParams(seed=77)
    assert [request.seed for request in make(PROMPTS[:3], [SamplingParams(), own, SamplingParams()])] == [0, 77, 2]


def test_the_loop_runs_on_the_parts_it_is_given():
    parts, calls = counting_parts()
    params = replace(GREEDY, max_tokens=3)
    num_layers = 0
    for family in ("llama", "gpt2"):
        theirs = transformers_model(family)
        model = our_model(theirs, parts=parts)
        num_layers += len(model.attention_specs)
        assert run(model, make(PROMPTS[:1], params), parts) == run(our_model(theirs), make(PROMPTS[:1], params))
    assert calls["sample"] == 2 * 3  # one for each step of each model
    assert calls["append_kv"] == calls["masked_attention"] == 3 * num_layers
    assert calls["rms_norm"] and calls["apply_rope"] and calls["gated_mlp"] and calls["gpt2_weights"]
