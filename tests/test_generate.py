"""The generate loop on tiny models of every family: tokens equal transformers', whatever else is in the batch."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from book.static_batching import generate_steps
from mini_engine.detokenizer import Detokenizer
from mini_engine.kv_cache.page_table import PageTable
from mini_engine.models.base import CausalLM
from mini_engine.parts import Parts
from mini_engine.sampling_params import SamplingParams
from mini_engine.sequence import Sequence
from tests.models.families import FAMILIES, our_model, their_logits, transformers_model


class NoText(Detokenizer):
    """For models without a tokenizer."""

    def __init__(self) -> None:
        self.text, self.stopped = "", False

    def push(self, token_id: int) -> str:
        return f"{token_id} "

    def finish(self) -> str:
        return ""


def sequence(prompt: list[int], params: SamplingParams, seed: int = 0, max_model_len: int = 128) -> Sequence:
    return Sequence(prompt, params, seed=seed, eos_token_ids=(2,), max_model_len=max_model_len, detokenizer=NoText())


def run(model: CausalLM, sequences: list[Sequence], parts: Parts | None = None) -> list[list[int]]:
    for _ in generate_steps(model, sequences, "torch", parts or Parts()):
        pass
    return [s.output_token_ids for s in sequences]


PROMPTS = [[5, 9, 33], [7], [1, 60, 22, 18, 4, 4, 31, 8, 50], [12, 13]]


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_tokens_equal_transformers(family):
    theirs = transformers_model(family, seed=3)
    params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    got = run(our_model(theirs), [sequence(prompt, params) for prompt in PROMPTS])
    for prompt, output in zip(PROMPTS, got, strict=True):
        assert len(output) == 12
        logits = their_logits(theirs, prompt + output)[len(prompt) - 1 : -1]
        best = logits.topk(2).values
        for step, token in enumerate(output):  # equal, but where transformers itself is undecided
            assert token == logits[step].argmax() or best[step, 0] - best[step, 1] < 1e-4


@pytest.fixture(scope="module")
def double() -> CausalLM:
    return our_model(transformers_model("qwen3", seed=1, dtype=torch.float64))


@settings(deadline=None, max_examples=25)
@given(st.data())
def test_neighbours_change_nothing(double, data):
    """Sampled, in float64: the same tokens alone, in any company, in any order, one of them ending early."""
    params = [
        SamplingParams(
            temperature=data.draw(st.sampled_from([0.0, 1.0])), top_p=0.9, max_tokens=data.draw(st.integers(1, 8)),
            repetition_penalty=data.draw(st.sampled_from([1.0, 1.2])),
        )
        for _ in PROMPTS
    ]  # fmt: skip
    order = data.draw(st.permutations(range(len(PROMPTS))))[: data.draw(st.integers(1, len(PROMPTS)))]
    together = run(double, [sequence(PROMPTS[i], params[i], seed=i) for i in order])
    for i, tokens in zip(order, together, strict=True):
        assert run(double, [sequence(PROMPTS[i], params[i], seed=i)]) == [tokens]


def test_tokens_are_those_of_naive_attention(double):
    """With a penalty, which remembers what was written."""
    from tests.test_engine import alone

    params = SamplingParams(temperature=0.0, max_tokens=9, repetition_penalty=1.3, ignore_eos=True)
    for prompt in PROMPTS:
        assert run(double, [sequence(prompt, params)]) == [alone(double, prompt, params)]


def test_ends_at_eos_stop_tokens_and_limits(double):
    greedy = SamplingParams(temperature=0.0, max_tokens=10, ignore_eos=True)
    (free,) = run(double, [sequence(PROMPTS[0], greedy)])
    third = free[2]
    stops_at = free.index(third) + 1
    stopped = sequence(PROMPTS[0], replace(greedy, stop_token_ids=[third]))
    assert run(double, [stopped]) == [free[:stops_at]]
    assert stopped.finish_reason == "stop"
    limited = sequence(PROMPTS[0], greedy, max_model_len=7)
    assert run(double, [limited]) == [free[:4]]
    assert limited.finish_reason == "length"


def counting_parts() -> tuple[Parts, dict[str, int]]:
    """Parts that do what the default ones do, and how often each was called; methods of a class count as the class."""
    calls = {name: 0 for name in Parts.__dataclass_fields__}

    def counted(name, function):
        def call(*args, **kwargs):
            calls[name] += 1
            return function(*args, **kwargs)

        return call

    class CountedPageTable(PageTable):
        allocate = counted("page_table", PageTable.allocate)

    functions = {name: counted(name, getattr(Parts(), name)) for name in calls if name != "page_table"}
    return Parts(page_table=CountedPageTable, **functions), calls


def test_the_loop_runs_on_the_parts_it_is_given():
    parts, calls = counting_parts()
    params = SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True)
    llama, gpt2 = transformers_model("llama"), transformers_model("gpt2")
    for theirs in (llama, gpt2):
        counted_out = run(our_model(theirs, parts=parts), [sequence(PROMPTS[0], params)], parts)
        assert counted_out == run(our_model(theirs), [sequence(PROMPTS[0], params)])
    used = {"masked_attention", "apply_rope", "rms_norm", "gated_mlp", "gpt2_weights", "append_kv", "sample"}
    assert used <= {name for name, count in calls.items() if count}
