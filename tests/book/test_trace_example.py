"""The run of the trace player shows what its page promises."""

import pytest

from book import trace_example
from mini_engine.errors import RequestError
from mini_engine.llm import LLM


def test_the_example_has_preemptions_and_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    shorter = [(at, name, question, min(limit, 16)) for at, name, question, limit in trace_example.EXAMPLE]
    monkeypatch.setattr(trace_example, "EXAMPLE", shorter)
    llm = LLM(
        dtype="float32", device="cpu", num_pages=36, page_size=8, max_num_batched_tokens=64, enable_prefix_caching=False
    )
    trace = trace_example.record_example(llm)
    assert any(step.preempted for step in trace.steps)
    assert any(work.kind == "chunk" for step in trace.steps for work in step.batch)
    assert sorted(name for step in trace.steps for name in step.ended) == [name for _, name, _, _ in shorter]


def test_a_pool_too_small_for_one_of_its_requests_is_named() -> None:
    llm = LLM(dtype="float32", device="cpu", num_pages=2, page_size=8)
    with pytest.raises(RequestError, match="request A of the example needs more pages: raise --num-pages"):
        trace_example.record_example(llm)
