"""A draft model's guesses: the target's tokens, whatever it guesses, and none wrong if it is the target itself."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mini_engine import LLM
from mini_engine.errors import ConfigError
from mini_engine.models.base import CausalLM
from mini_engine.sampling_params import SamplingParams
from mini_engine.speculative.draft_model import DraftModelDrafter
from tests.helpers import double_model, let_all_guesses_pay, make_engine, save_tiny_model, serve
from tests.models.families import our_model, transformers_model

DRAFT = {"method": "draft_model", "model": "given", "num_speculative_tokens": 3}
SMALL = {"page_size": 4, "num_pages": 60, "max_batch_size": 3, "max_model_len": 64, "pipeline_depth": 0}


def similar_model(noise: float) -> CausalLM:
    """The target with noise on its weights, so that some guesses are right."""
    theirs = transformers_model("llama", seed=2, dtype=torch.float64)
    torch.manual_seed(0)
    with torch.no_grad():
        for weight in theirs.parameters():
            weight += noise * weight.std() * torch.randn_like(weight)
    return our_model(theirs)


def arrivals(temperature: float, max_tokens: int = 30):
    params = SamplingParams(temperature=temperature, seed=5, max_tokens=max_tokens, ignore_eos=True)
    return {0: [("a", [5, 9, 33], params), ("b", [7] * 20, params)], 4: [("c", [1, 2, 3, 4, 5, 6, 7, 8, 9], params)]}


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("noise", [0.0, 0.03, 1.0])
def test_the_same_tokens_in_fewer_steps(noise: float, temperature: float) -> None:
    want, steps = {}, {}
    for draft in (None, similar_model(noise)):
        engine = make_engine(
            double_model("llama"), draft_model=draft, speculative_config=DRAFT if draft else None, **SMALL
        )
        let_all_guesses_pay(engine)
        tokens = serve(engine, arrivals(temperature))
        want = want or tokens
        assert tokens == want
        steps[draft is None] = engine.metrics.steps
    if noise == 0:  # all guesses are right: four tokens a step, also at temperature 1, because the noise is shared
        assert steps[False] < 0.5 * steps[True]
        assert engine.metrics.num_accepted_tokens == engine.metrics.num_draft_tokens > 40
        assert 0 < engine.metrics.num_drafts < engine.metrics.num_draft_tokens
    assert steps[False] <= steps[True]


def drafter_of(engine) -> DraftModelDrafter:
    return engine.core.speculation.drafter


@settings(deadline=None, max_examples=10)
@given(st.data())
def test_guesses_are_what_the_draft_model_generates(data) -> None:
    """After any history: requests of any lengths, few pages, small steps, and wrong guesses of any number."""
    draft = similar_model(0.03)
    options = SMALL | {
        "max_num_batched_tokens": data.draw(st.integers(3, 40)),
        "num_pages": data.draw(st.integers(17, 40)),
    }
    engine = make_engine(double_model("llama"), draft_model=draft, speculative_config=DRAFT, **options)
    drafter, proposals = drafter_of(engine), []
    propose = drafter.propose

    def record(running, rows, most):
        guesses, counts = propose(running, rows, most)
        for row, own, count in zip(rows.tolist(), guesses.tolist(), counts.tolist(), strict=True):
            request = running.requests[row]
            proposals.append((running.tokens[row, : running.num_known[row]].tolist(), request.seed, own[:count]))
        return guesses, counts

    drafter.propose = record
    params = SamplingParams(temperature=1.0, max_tokens=data.draw(st.integers(2, 25)), ignore_eos=True)
    prompts = data.draw(st.lists(st.lists(st.integers(0, 50), min_size=1, max_size=30), min_size=1, max_size=5))
    serve(engine, {2 * i: [(str(i), prompt, params)] for i, prompt in enumerate(prompts)})
    alone = make_engine(draft, num_pages=100, page_size=4)
    for i, (known, seed, guesses) in enumerate(proposals[:: max(1, len(proposals) // 10)]):
        if guesses:
            wanted = SamplingParams(temperature=1.0, seed=seed, max_tokens=len(guesses), ignore_eos=True)
            assert serve(alone, {0: [(f"check {i}", known, wanted)]})[f"check {i}"] == guesses
    nobody = np.zeros(0, dtype=np.int64)
    propose(engine.core.scheduler.running, nobody, nobody)
    assert drafter._page_table.num_free_pages == drafter._page_table.num_pages, "pages of requests that have left"


def test_a_restart_forgets_the_rows() -> None:
    engine = make_engine(double_model("llama"), draft_model=similar_model(0.0), speculative_config=DRAFT, **SMALL)
    want = serve(make_engine(double_model("llama"), **SMALL), arrivals(1.0))
    for name, prompt, params in arrivals(1.0)[0]:
        engine.add_request(name, prompt, params)
    for _ in range(3):
        engine.step()
    engine.core.restart()
    table = drafter_of(engine)._page_table
    assert table.num_free_pages == table.num_pages
    got: dict[str, list[int]] = {"a": [], "b": []}
    requests = dict(engine.core.requests)
    while engine.has_unfinished:
        engine.step()
    for name, request in requests.items():
        got[name] = request.token_ids[len(request.prompt_token_ids) :]
    assert got == {name: want[name] for name in got}


def test_what_does_not_fit_is_refused(tmp_path) -> None:
    model = double_model("llama")
    with pytest.raises(ConfigError, match="belong together"):
        make_engine(model, speculative_config=DRAFT)
    with pytest.raises(ConfigError, match="belong together"):
        make_engine(model, draft_model=model)
    with pytest.raises(ConfigError, match="name or path"):
        make_engine(model, speculative_config={"method": "draft_model"})
    other = our_model(transformers_model("llama", seed=2, dtype=torch.float64, vocab_size=72))
    with pytest.raises(ConfigError, match="same tokenizer"):
        make_engine(model, draft_model=other, speculative_config=DRAFT)


def test_llm_loads_the_draft_model(tmp_path) -> None:
    words = [f"w{i}" for i in range(60)]
    save_tiny_model(tmp_path, words)
    params = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)
    options = {"num_pages": 40, "page_size": 16, "dtype": "float64"}
    plain = LLM(str(tmp_path), **options)
    want = plain.generate(["w1 w2 w3"], params)[0].outputs[0]
    config = {"method": "draft_model", "model": str(tmp_path), "num_speculative_tokens": 4}
    for llm in (
        LLM(str(tmp_path), **options, speculative_config=config),
        plain.with_options(speculative_config=config),
    ):
        let_all_guesses_pay(llm.engine)
        assert llm.generate(["w1 w2 w3"], params)[0].outputs[0].token_ids == want.token_ids
        assert llm.engine.metrics.steps < 10
