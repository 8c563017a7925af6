"""`EngineConfig`: the same options in Python and in a file, checked in one place."""

import json
import subprocess
import sys
from dataclasses import asdict, fields
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mini_engine.attention.backend import BACKENDS
from mini_engine.config import ALIASES, CHOICES, NEUTRAL, SIZES, EngineConfig, read_options
from mini_engine.errors import ConfigError
from tests.helpers import GREEDY, double_model, make_engine, serve


@st.composite
def configs(draw: st.DrawFn) -> EngineConfig:
    """Any configuration that a file can state."""
    size, optional = st.integers(1, 4096), st.none() | st.integers(1, 2**40)
    return EngineConfig(
        dtype=draw(st.sampled_from(CHOICES["dtype"])), device=draw(st.sampled_from(CHOICES["device"])),
        attn_backend=draw(st.sampled_from(["auto", *BACKENDS])), max_batch_size=draw(size),
        max_model_len=draw(optional), num_pages=draw(optional), page_size=draw(size),
        max_num_batched_tokens=4096 + draw(size), sliding_window=draw(optional),
        enable_prefix_caching=draw(st.booleans()),
        pipeline_depth=draw(st.sampled_from([None, 0, 1])), kv_layout=draw(st.sampled_from(CHOICES["kv_layout"])),
        kv_cache_dtype=draw(st.sampled_from(CHOICES["kv_cache_dtype"])),
        warm_up=draw(st.sampled_from([None, True, False])), gpu_memory_utilization=draw(st.sampled_from([0.5, 1.0])),
        persistent_decode=draw(st.sampled_from([None, True, False])), seed=draw(st.none() | st.integers()),
        cuda_graph_batch_sizes=draw(st.none() | st.lists(st.integers(1, 512), max_size=4)),
    )  # fmt: skip


def written(folder: Path, text: str | bytes) -> Path:
    path = folder / "engine.yaml"
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return path


@given(configs())
def test_a_file_states_every_option(tmp_path_factory, config):
    path = written(tmp_path_factory.mktemp("config"), json.dumps(asdict(config)))  # YAML is a superset of JSON
    assert EngineConfig.of(read_options(path)) == config


def test_what_a_file_leaves_out_has_its_default(tmp_path):
    assert EngineConfig.of(read_options(written(tmp_path, ""))) == EngineConfig()
    path = written(tmp_path, "# few pages\nnum_pages: 18  # of 16 tokens\npage_size: 16\n")
    assert EngineConfig.of(read_options(path)) == EngineConfig(num_pages=18, page_size=16)
    assert read_options(path) == {"num_pages": 18, "page_size": 16}


@pytest.mark.parametrize(
    ("given", "same"),
    [
        ({"max_seq_len": 512}, {"max_model_len": 512}),
        ({"max_num_seqs": 8, "block_size": 32}, {"max_batch_size": 8, "page_size": 32}),
        ({"dtype": "half", "kv_cache_dtype": "fp8"}, {"dtype": "float16", "kv_cache_dtype": "fp8_e4m3"}),
        ({"dtype": "float"}, {"dtype": "float32"}),
        ({"compile_backend": "torch-cudagraph"}, {}),
        ({"compile_backend": "torch-simple"}, {"enforce_eager": True}),
        ({"tensor_parallel_size": 1, "disable_log_stats": True, "trust_remote_code": False}, {}),
        (  # a configuration of TensorRT-LLM's AutoDeploy
            {
                "attn_backend": "flashinfer", "compile_backend": "torch-cudagraph", "max_seq_len": 512,
                "max_batch_size": 4, "cuda_graph_batch_sizes": [1, 2],
            },
            {"attn_backend": "flashinfer", "max_model_len": 512, "max_batch_size": 4, "cuda_graph_batch_sizes": (1, 2)},
        ),
    ],
    ids=str,
)  # fmt: skip
def test_names_and_values_of_other_engines(tmp_path, given, same):
    assert EngineConfig.of(given) == EngineConfig(**same)
    assert EngineConfig.of(read_options(written(tmp_path, json.dumps(given)))) == EngineConfig(**same)


def test_every_alias_names_an_option():
    names = {field.name for field in fields(EngineConfig)}
    assert names.issuperset(ALIASES.values()) and not names & {*ALIASES, *NEUTRAL}


@pytest.mark.parametrize(
    "options",
    [
        {"max_seq_len": 512, "max_model_len": 256},
        {"tensor_parallel_size": 2},
        {"quantization": "awq"},
        {"compile_backend": "torch-opt"},
        {"compile_backend": ["torch-simple"]},
        {"compile_backend": "torch-simple", "cuda_graph_batch_sizes": [1]},
        {"enforce_eager": True, "cuda_graph_batch_sizes": [1]},
        {"gpu_memory_utilization": 90.0},
        {"gpu_memory_utilization": 0.0},
    ],
    ids=str,
)
def test_what_this_engine_cannot_do_is_refused_by_name(options):
    with pytest.raises(ConfigError) as refused:
        EngineConfig.of(options)
    assert any(name in str(refused.value) for name in options)


def test_a_file_may_name_the_model(tmp_path):
    assert read_options(written(tmp_path, "model: a/b\nmax_seq_len: 64")) == {"model": "a/b", "max_model_len": 64}
    with pytest.raises(ConfigError, match="model is 3; give a name"):
        read_options(written(tmp_path, "model: 3"))


WRONG = """
from dataclasses import fields

from mini_engine.config import EngineConfig
from mini_engine.errors import ConfigError

for field in fields(EngineConfig):
    for value in ("magic", -1, 2.5, [1.0], {}, 2**64, None):
        if field.name == "seed" and value in (-1, 2**64):
            continue
        if value is None and field.default is None:
            assert EngineConfig.of({field.name: None}) == EngineConfig()
            continue
        try:
            EngineConfig.of({field.name: value})
        except ConfigError as error:
            assert field.name in str(error) or "attention backend" in str(error), error
        else:
            raise AssertionError(f"{field.name} may be {value!r}")
"""


def test_every_option_is_checked():
    """In a process of its own, whose calls are not checked against their annotations."""
    subprocess.run([sys.executable, "-c", WRONG], check=True, cwd=Path(__file__).parent.parent)


@pytest.mark.parametrize("name", SIZES)
@pytest.mark.parametrize(
    "value", [0, -1, True, 2**63, 10**5000, -(10**5000)], ids=["0", "-1", "true", "2^63", "huge", "-huge"]
)
def test_sizes_are_whole_numbers_of_one_or_more(name, value):
    with pytest.raises(ConfigError, match=f"{name} is"):
        EngineConfig.of({name: value})


def test_options_must_fit_together():
    with pytest.raises(ConfigError, match="max_num_batched_tokens is 8, less than max_batch_size"):
        EngineConfig(max_num_batched_tokens=8, max_batch_size=9)
    for depth in (-1, 2, True):
        with pytest.raises(ConfigError, match="pipeline_depth"):
            EngineConfig.of({"pipeline_depth": depth})


@pytest.mark.parametrize(("given", "near"), [("page_sizes", "page_size"), ("max_num_seq", "max_num_seqs")])
def test_an_unknown_option_names_the_nearest_one(given, near):
    with pytest.raises(ConfigError, match=f"{near}[?]"):
        EngineConfig.of({given: 3})


def test_an_unknown_option_that_is_near_to_none_names_all():
    with pytest.raises(ConfigError, match="num_pages"):
        EngineConfig.of({"zzz": 3})
    with pytest.raises(ConfigError) as refused:
        EngineConfig.of({"x" * 10_000: 3})
    assert len(str(refused.value)) < 600


@pytest.mark.parametrize(
    "text",
    [
        "page_size: [",
        "page_size: 16\n\tx: 1",
        b"\xff\xfe\x00page",
        "- page_size",
        "16",
        "1: 2",
        "page_size: !!python/object:os.system 1",
        "[" * 20_000,
        "page_size: 2001-99-99",
        "num_pages: " + "9" * 5000,
    ],
    ids=lambda text: str(text)[:20],
)
def test_a_file_that_holds_no_options_is_refused(tmp_path, text):
    path = written(tmp_path, text)
    with pytest.raises(ConfigError):
        EngineConfig.of(read_options(path))


@pytest.mark.parametrize("path", ["missing.yaml", ".", "engine.yaml/x", "null\0byte"])
def test_a_path_that_is_no_file_is_refused(path):
    with pytest.raises(ConfigError, match="cannot read"):
        read_options(Path(path))


@pytest.mark.parametrize(
    "options",
    [
        {"num_pages": 10**9},
        {"num_pages": 2**62},
        {"page_size": 2**40},
        {"page_size": 2**40, "num_pages": 4},
        {"max_batch_size": 10**10, "max_num_batched_tokens": 10**10},
        {"max_model_len": 2**62},
    ],
    ids=str,
)
def test_sizes_are_checked_before_memory_is_taken(options):
    with pytest.raises(ConfigError, match=r"lower|this model takes"):
        make_engine(double_model("llama"), **options)


def test_limits_beyond_the_model_are_those_of_the_model():
    wide = make_engine(double_model("llama"), num_pages=32, sliding_window=2**62, max_num_batched_tokens=2**62)
    plain = make_engine(double_model("llama"), num_pages=32)
    arrivals = {0: [("a", [5, 6, 7], GREEDY), ("b", [8], GREEDY)]}
    assert serve(wide, arrivals) == serve(plain, arrivals)
