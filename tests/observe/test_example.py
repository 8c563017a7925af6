"""The recorded example says what it needs."""

import pytest

from mini_engine.errors import RequestError
from mini_engine.llm import LLM
from mini_engine.observe import example
from mini_engine.observe.trace import Trace


def test_a_pool_too_small_for_one_of_its_requests_is_named() -> None:
    llm = LLM(dtype="float32", device="cpu", num_pages=2, page_size=8)
    with pytest.raises(RequestError, match="num-pages"):
        example.serve_example(llm, Trace(llm.tokenizer))
