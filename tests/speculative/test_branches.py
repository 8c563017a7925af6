"""Guesses of requests whose output changes the logits: the same tokens as one by one, and right guesses count."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mini_engine.models.base import CausalLM
from mini_engine.request import Running
from mini_engine.sampler import Sampler, pack_bits
from mini_engine.sampling_params import Admission, SamplingParams
from mini_engine.speculative.branches import MOST_BRANCHES, branches_of, possible_guesses
from mini_engine.structured import TokenGrammar
from tests.helpers import EOS, double_model, let_all_guesses_pay, make_engine, serve
from tests.speculative.test_draft_model import similar_model

NGRAM = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 1}
SUFFIX = {"method": "suffix", "num_speculative_tokens": 4, "suffix_min_length": 1}
DRAFT = {"method": "draft_model", "model": "given", "num_speculative_tokens": 3}
PROMPT = [5, 6, 7, 8, 5, 6, 7, 8, 5, 6]


class Cycle:
    """A grammar whose tokens count up, by 1 to `most`, modulo 50; it never ends."""

    def __init__(self, last: int, most: int = 1) -> None:
        self.num_accepted, self.last, self.most = 0, last, most

    def allowed(self) -> list[int]:
        return [3 + (self.last + step) % 50 for step in range(1, self.most + 1)]

    def accept(self, token_ids: Any) -> None:
        for token in token_ids:
            assert token in self.allowed()
            self.last = token - 3
        self.num_accepted += len(token_ids)

    def mask(self) -> np.ndarray:
        return pack_bits(self.allowed(), 61)

    def copy(self) -> Cycle:
        return Cycle(self.last, self.most)


def run(
    params: SamplingParams, grammar: TokenGrammar | None, config: dict | None, draft: CausalLM | None = None
) -> tuple[list[int], Any]:
    engine = make_engine(
        double_model("llama"), num_pages=100, page_size=4, pipeline_depth=0, speculative_config=config,
        draft_model=draft,
    )  # fmt: skip
    let_all_guesses_pay(engine)
    request = engine.add_request("a", PROMPT, params, grammar=grammar)
    while engine.has_unfinished:
        engine.step()
    assert request.error is None
    return request.output_token_ids, engine.metrics


GREEDY = SamplingParams(temperature=0.0, max_tokens=80, ignore_eos=True)


@pytest.mark.parametrize("config", [NGRAM, SUFFIX], ids=["ngram", "suffix"])
@pytest.mark.parametrize(
    ("params", "grammar"),
    [
        (replace(GREEDY, frequency_penalty=0.001), None),
        (replace(GREEDY, repetition_penalty=1.0001, presence_penalty=0.01), None),
        (replace(GREEDY, bad_words_token_ids=[[9, 9], [3, 4, 5]]), None),
        (GREEDY, Cycle(7)),
        (replace(GREEDY, temperature=1.0, seed=4, frequency_penalty=0.5), Cycle(7)),
        (replace(GREEDY, frequency_penalty=1.5), Cycle(7, 2)),
    ],
    ids=["frequency", "repetition and presence", "bad words", "grammar", "grammar, sampled", "grammar and penalty"],
)
def test_right_guesses_count(params: SamplingParams, grammar: Cycle | None, config: dict) -> None:
    """Small penalties leave a repetitive output repetitive, and some grammars allow one token at a time."""
    want, alone = run(params, grammar and grammar.copy(), None)
    got, metrics = run(params, grammar and grammar.copy(), config)
    assert got == want and metrics.num_accepted_tokens > 5 and metrics.steps < alone.steps


@pytest.mark.parametrize("penalty", [0.0, 0.3, 1.9])
def test_all_guesses_of_the_model_itself_are_right(penalty: float) -> None:
    """Its sampler counts what the target's counts, and no wrong guess."""
    params = replace(GREEDY, temperature=1.0, seed=2, frequency_penalty=penalty)
    want, _ = run(params, None, None)
    got, metrics = run(params, None, DRAFT, similar_model(0.0))
    assert got == want and metrics.num_accepted_tokens == metrics.num_draft_tokens > 40


PARAMS = [
    SamplingParams(temperature=0.0, max_tokens=24, frequency_penalty=0.4, ignore_eos=True),
    SamplingParams(temperature=0.7, max_tokens=20, repetition_penalty=1.3, seed=3),
    SamplingParams(temperature=0.0, max_tokens=30, presence_penalty=-0.5, ignore_eos=True, min_tokens=4),
    SamplingParams(temperature=0.0, max_tokens=25, bad_words_token_ids=[[5, 6], [7, 8, 5], [9]], ignore_eos=True),
    SamplingParams(
        temperature=0.3, max_tokens=20, seed=5, allowed_token_ids=[5, 6, 7, 8, 9, 10], frequency_penalty=1.0
    ),
    SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True, logprobs=2, presence_penalty=0.1),
    SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True),
    SamplingParams(temperature=1.0, max_tokens=15, seed=6),
]


@settings(max_examples=30, deadline=None)
@given(st.data())
def test_any_schedule_gives_the_tokens_of_one_by_one(data: st.DataObject) -> None:
    """Requests of all kinds with every drafter, in few pages and small steps, with aborts."""
    draft, outputs = None, list[dict[str, list[int]]]()
    config = data.draw(st.sampled_from([NGRAM, SUFFIX, DRAFT]))
    if config is DRAFT:
        draft = similar_model(data.draw(st.sampled_from([0.0, 0.03])))
    kinds = data.draw(st.lists(st.tuples(st.sampled_from(PARAMS), st.integers(0, 3)), min_size=1, max_size=5))
    prompts = [data.draw(st.lists(st.integers(5, 8), min_size=1, max_size=20)) for _ in kinds]
    starts = [data.draw(st.integers(0, 8)) for _ in kinds]
    aborts = data.draw(st.dictionaries(st.integers(1, 20), st.just(["0"]), max_size=1))
    options = {
        "page_size": 4, "num_pages": data.draw(st.integers(16, 40)), "max_batch_size": data.draw(st.integers(1, 4)),
        "max_num_batched_tokens": data.draw(st.integers(5, 40)), "max_model_len": 64,
        "pipeline_depth": data.draw(st.integers(0, 1)), "enable_prefix_caching": data.draw(st.booleans()),
    }  # fmt: skip
    for own, model in ((None, None), (config, draft)):
        engine = make_engine(double_model("llama"), speculative_config=own, draft_model=model, **options)
        let_all_guesses_pay(engine)
        arrivals: dict[int, list[Any]] = {}
        for i, ((params, most), prompt, start) in enumerate(zip(kinds, prompts, starts, strict=True)):
            arrivals.setdefault(start, []).append((f"{i}", prompt, params, Cycle(i, 9 * most) if most else None))
        for at, requests in arrivals.items():
            arrivals[at] = [(name, prompt, params, (), grammar) for name, prompt, params, grammar in requests]
        outputs.append(serve(engine, arrivals, aborts))
    want, got = outputs
    for name, tokens in want.items():
        if name == "0" and aborts:  # after as many steps, it has other tokens
            count = min(len(tokens), len(got[name]))
            assert got[name][:count] == tokens[:count]
        else:
            assert got[name] == tokens
    assert want.keys() == got.keys() or aborts


def entered(prompt: list[int], output: list[int], params: SamplingParams, device: str) -> Sampler:
    sampler = Sampler(2, 61, device, most_branches=MOST_BRANCHES)
    sampler.enter([Admission(1, params, 3, prompt, output)])
    return sampler


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@settings(max_examples=30, deadline=None)
@given(
    output=st.lists(st.integers(3, 9), max_size=12), guesses=st.lists(st.integers(3, 9), min_size=1, max_size=9),
    params=st.sampled_from(PARAMS),
)  # fmt: skip
def test_a_branch_is_the_state_after_its_guesses(
    device: str, output: list[int], guesses: list[int], params: SamplingParams
) -> None:
    """And sampling from it, then keeping it, is sampling from the row after as many more tokens."""
    running, num_known = Running(2, 61), len(PROMPT) + len(output)
    running.num_known[1], running.branches[1] = num_known, 1
    running.guess(np.array([1]), np.array([guesses]), np.array([len(guesses)]))
    branches = branches_of(np.array([0, 1]), np.array([1, 1 + len(guesses)]), running, {})
    assert branches is not None and branches.places.tolist() == list(range(2, 2 + len(guesses)))
    generator, own = torch.Generator().manual_seed(len(output)), torch.tensor([1], device=device)
    logits = torch.randn(1, 61, generator=generator, dtype=torch.float64 if device == "cpu" else torch.float32)
    logits = logits.to(device)
    for count in range(1, len(guesses) + 1):
        sampler = entered(PROMPT, output, params, device)
        whole = entered(PROMPT, output + guesses[:count], params, device)
        sampler.branch(branches)
        [branch] = branches.find(np.array([1]), np.array([count])).tolist()
        row, at = torch.tensor([sampler.first_branch + branch], device=device), own * 0 + num_known + count
        assert torch.equal(sampler.adjust(logits, row, at), whole.adjust(logits, own, at))
        assert sampler.sample(logits, row, at) == whole.sample(logits, own, at)
        sampler.keep(np.array([[1, branch]]))
        assert torch.equal(sampler.adjust(logits, own, at + 1), whole.adjust(logits, own, at + 1))


def test_guesses_that_a_grammar_does_not_allow_are_dropped() -> None:
    class Stub:
        def __init__(self, grammar: Cycle | None) -> None:
            self.grammar, self.end_token_ids = grammar, [EOS]

    running = Running(3, 20)
    rows, prompt = np.arange(3), [4, 4]
    running.num_prompt[rows] = running.num_known[rows] = len(prompt)
    running.waits[:] = [1, 0, 1]
    running.requests[:] = [Stub(Cycle(0)), Stub(None), Stub(Cycle(0, 49))]  # type: ignore[list-item]
    guesses = np.array([[4, 5, 7], [9, 9, 9], [5, EOS, 6]])
    counts, masks = possible_guesses(running, rows, guesses.astype(np.int32), np.array([3, 2, 3]))
    assert counts.tolist() == [2, 2, 1] and sorted(masks) == [0, 2] and len(masks[0]) == 2 and len(masks[2]) == 1
    assert masks[0][1].tolist() == pack_bits([6], 61).tolist()
