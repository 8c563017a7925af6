"""Values of a wrong type get a typed error from the engine itself.

The other tests check every call against its annotations, and would stop these before the engine sees them: so the cases
run in a process without that check.
"""

import subprocess
import sys
from pathlib import Path

SCRIPT = """
import numpy as np
import torch

from mini_engine.errors import ConfigError, RequestError
from mini_engine.sampling_params import SamplingParams
from tests.test_engine import DOUBLES, GREEDY, make_engine


def refused(error, message, function, *args, **options):
    try:
        function(*args, **options)
    except error as refusal:
        assert message in str(refusal), f"{message!r} not in {refusal}"
    else:
        raise AssertionError(f"accepted: {options or args}")


for name, value in [
    ("temperature", "hot"), ("temperature", None), ("top_p", "x"), ("min_p", [0]), ("repetition_penalty", True),
    ("top_k", 1.5), ("max_tokens", "9"), ("stop", None), ("stop", [5]), ("stop_token_ids", 5), ("seed", 0.5),
]:
    refused(RequestError, f"{name} is {value!r}", SamplingParams, **{name: value})

# Integers may be too large for a float, and too long to print.
for name in ("temperature", "top_p", "min_p", "repetition_penalty"):
    for value in (10**400, -(10**400), 10**5000):
        refused(RequestError, f"{name} is an integer of more than 40 digits", SamplingParams, **{name: value})
    assert type(getattr(SamplingParams(**{name: 1}), name)) is float

pool = {"num_pages": 8, "page_size": 4, "max_batch_size": 2}
for name, value in [
    ("num_pages", 8.0), ("page_size", "4"), ("page_size", True), ("max_batch_size", 2.5), ("max_model_len", 9.5),
    ("max_num_batched_tokens", 7.5), ("sliding_window", "8"),
]:
    refused(ConfigError, f"{name} is {value!r}", make_engine, DOUBLES["llama"], **pool | {name: value})
refused(ConfigError, "choose one of", make_engine, DOUBLES["llama"], **pool | {"attn_backend": ["torch"]})

engine = make_engine(DOUBLES["llama"], **pool)
want = engine.generate([[5, 9]], GREEDY)[0].token_ids
several = engine.generate([[5, 9], None, 7, [1.5], ["w1"], np.array([5, 9]), torch.tensor([5, 9])], GREEDY)
for output in several[1:5]:
    assert "neither valid text nor a list of token ids" in str(output.error)
assert [output.token_ids for output in (several[0], *several[5:])] == [want] * 3
assert engine.generate(np.array([5, 9]), GREEDY)[0].token_ids == want
refused(RequestError, "the request's name is 7", engine.add_request, 7, [5, 9], GREEDY)
assert not engine.has_unfinished
"""


def test_wrong_types_are_refused_by_name() -> None:
    command = [sys.executable, "-c", SCRIPT]
    run = subprocess.run(command, cwd=Path(__file__).parents[1], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
