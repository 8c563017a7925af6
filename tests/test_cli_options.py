"""Options of commands: one for each field, and the command line over the file over the command's own defaults."""

import re
import subprocess
import sys
import typing
from dataclasses import fields, replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from cyclopts import App, CycloptsError

from mini_engine import cli
from mini_engine.attention.sparse_config import SparseAttentionConfig
from mini_engine.bench.options import BenchOptions
from mini_engine.cli_options import LEFT_OUT, Bench, Engine, EngineOptions, Sampling, given
from mini_engine.config import ALIASES, EngineConfig
from mini_engine.errors import ConfigError, RequestError
from mini_engine.parts import Parts, load_parts
from mini_engine.sampling_params import SamplingParams
from mini_engine.speculative.config import SpeculativeConfig
from mini_engine.terminal import make_console

ROOT = Path(__file__).parent.parent


@pytest.fixture
def seen():
    """Runs a command line of a command that has all options; returns what it got."""
    app, got = App(), []

    @app.default
    def show(*, engine: Engine = None, sampling: Sampling = None, page: int = 3) -> None:
        """Show."""
        got.append((EngineOptions.of(engine, make_console()), given(sampling), page))

    def run(*arguments: str) -> tuple[EngineOptions, dict[str, object], int]:
        app(arguments, exit_on_error=False, result_action="return_value")
        return got.pop()

    return run


def test_options_that_are_not_given_have_no_value(seen):
    assert seen() == (EngineOptions("smollm2-135m-instruct", {}), {}, 3)


def test_fields_of_every_type_can_be_given(seen):
    engine = {
        "dtype": "float32", "device": "cpu", "attn_backend": "flex", "max_batch_size": 3, "max_model_len": 64,
        "num_pages": 7, "page_size": 16, "max_num_batched_tokens": 99, "sliding_window": 8,
        "enable_prefix_caching": True, "pipeline_depth": 1, "kv_layout": "HND", "kv_cache_dtype": "fp8_e4m3",
        "warm_up": True, "persistent_decode": True, "enforce_eager": True, "gpu_memory_utilization": 0.5,
        "cuda_graph_batch_sizes": [1, 4],
    }  # fmt: skip
    sampling = {
        "temperature": 0.5, "top_k": 4, "top_p": 0.9, "min_p": 0.1, "repetition_penalty": 1.1, "max_tokens": 5,
        "seed": 0, "stop": ["a", "b"], "stop_token_ids": [5, 6], "ignore_eos": True,
    }  # fmt: skip
    arguments = ["--page", "4"]
    for name, value in (engine | sampling).items():
        for one in value if isinstance(value, list) else [value]:
            arguments += [f"--{name.replace('_', '-')}", *([] if one is True else [str(one)])]
    assert seen("-m", "folder", *arguments) == (EngineOptions("folder", engine), sampling, 4)


def test_options_of_speculative_decoding_are_given_one_by_one(seen):
    arguments = ["--speculative-config.method", "suffix", "--speculative-config.suffix-min-length", "3"]
    made = EngineConfig.of(seen(*arguments)[0].options).speculative_config
    assert made == SpeculativeConfig("suffix", suffix_min_length=3)
    assert made.options["suffix_decoding_max_spec_factor"] == 1.0


def test_options_of_sparse_attention_are_given_one_by_one(seen):
    arguments = ["--sparse-attention-config.method", "quest", "--sparse-attention-config.budget", "64"]
    made = EngineConfig.of(seen(*arguments)[0].options).sparse_attention_config
    assert made == SparseAttentionConfig("quest", budget=64)


def test_short_names(seen):
    engine, sampling, _ = seen("-m", "x", "-b", "flex", "-n", "5", "-t", "0.5")
    assert (engine.model, engine.options) == ("x", {"attn_backend": "flex"})
    assert sampling == {"max_tokens": 5, "temperature": 0.5}


def test_the_command_line_overrides_the_file(seen, tmp_path):
    file = tmp_path / "engine.yaml"
    file.write_text("page_size: 16\nmax_seq_len: 64\nenable_prefix_caching: true\nnum_pages: 9\n")
    engine, _, _ = seen(
        "--config", str(file), "--num-pages", "7", "--no-enable-prefix-caching", "--max-model-len", "32"
    )
    assert engine.options == {"page_size": 16, "max_model_len": 32, "enable_prefix_caching": False, "num_pages": 7}


# A configuration written for TensorRT-LLM's AutoDeploy.
AUTODEPLOY = """
# config.yaml
model: nvidia/Llama-3.1-8B-Instruct-FP8
attn_backend: flashinfer_trtllm  # Use FlashInfer TRT-LLM backend
compile_backend: torch-cudagraph
cuda_graph_batch_sizes: [1, 2, 4, 8, 16, 32]
max_batch_size: 32
max_seq_len: 2048
"""


def test_a_configuration_of_autodeploy_loads(seen, tmp_path):
    file = tmp_path / "config.yaml"
    file.write_text(AUTODEPLOY)
    engine, _, _ = seen("--config", str(file))
    assert engine.model == "nvidia/Llama-3.1-8B-Instruct-FP8"
    assert EngineConfig.of(engine.options) == EngineConfig(
        attn_backend="flashinfer_trtllm",
        cuda_graph_batch_sizes=(1, 2, 4, 8, 16, 32),
        max_batch_size=32,
        max_model_len=2048,
    )
    assert seen("--config", str(file), "-m", "x")[0].model == "x"


def chosen(kind, **values):
    """What a command gets as its parameter of this type when these options are given."""
    return typing.get_args(typing.get_args(kind)[0])[0](**values)


def test_options_override_the_commands_defaults_and_those_the_models(monkeypatch):
    model = SamplingParams(temperature=0.6, top_k=20, top_p=0.95, max_tokens=7)
    configs = []

    def llm(name: str, config: EngineConfig, parts: None) -> SimpleNamespace:
        configs.append(config)
        shape = SimpleNamespace(num_parameters=0, dtype="float32", device="cpu")
        return SimpleNamespace(model=shape, config=config, default_params=model)

    monkeypatch.setattr("mini_engine.llm.LLM", llm)
    options = EngineOptions.of(chosen(Engine, page_size=16), make_console(), page_size=8, num_pages=36)
    _, params = options.load(make_console(), chosen(Sampling, top_p=0.5), temperature=0.0, top_p=0.9)
    assert configs == [EngineConfig(page_size=16, num_pages=36)]
    assert params == replace(model, temperature=0.0, top_p=0.5)
    with pytest.raises(RequestError, match="top_p"):
        options.load(make_console(), chosen(Sampling, top_p=0.0))
    assert len(configs) == 1  # refused before the model is loaded


def test_names_of_other_engines_are_options_too(seen):
    for alias, name in ALIASES.items():
        if typing.get_type_hints(EngineConfig)[name] in (int, int | None):
            assert seen(f"--{alias.replace('_', '-')}", "48")[0].options == {name: 48}


def test_an_unknown_option_names_the_nearest_one(seen):
    with pytest.raises(CycloptsError, match="--page-size"):
        seen("--pagesize", "3")


def test_options_of_the_bench_have_the_defaults_of_its_dataclass():
    app, got = App(), []

    @app.default
    def show(*, bench: Bench = None) -> None:
        got.append(BenchOptions(**given(bench)))

    for arguments in ([], ["--batch-size", "2", "--batch-size", "3", "--json", "-n", "5"]):
        app(arguments, exit_on_error=False, result_action="return_value")
    assert got == [BenchOptions(), BenchOptions(batch_size=[2, 3], json=True, max_tokens=5)]


@pytest.mark.parametrize("name", ["generate", "chat", "bench", "trace"])
def test_every_option_has_help(name):
    arguments = cli.app[name].assemble_argument_collection(parse_docstring=True)
    options = [argument for argument in arguments if not argument.children]
    left_out = {field for cls, field in LEFT_OUT if cls is EngineConfig}
    names = {option.name.removeprefix("--").split(".")[0].replace("-", "_") for option in options}
    assert {field.name for field in fields(EngineConfig)} - left_out <= names
    for option in options:
        assert re.match(r"[A-Z\"\w].*\.$", option.parameter.help or "", re.DOTALL), f"{name} {option.name}"


def test_help_imports_neither_torch_nor_transformers():
    check = (
        "import sys; from mini_engine.cli import main; sys.argv = ['mini-engine', 'generate', '--help']\n"
        "try: main()\n"
        "except SystemExit: assert not {'torch', 'transformers'} & sys.modules.keys()"
    )
    subprocess.run([sys.executable, "-c", check], check=True, capture_output=True, cwd=ROOT)


PARTS = """
from dataclasses import replace
from mini_engine.parts import Parts, load_parts

def mine(x, weight, eps):
    return x

value = replace(Parts(), rms_norm=mine)
number = 5
def function():
    return value
def broken():
    raise ZeroDivisionError("no")


def leaves():
    raise SystemExit(0)
"""


@pytest.fixture
def parts_file(tmp_path, monkeypatch):
    (tmp_path / "parts_of_a_test.py").write_text(PARTS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry])


def test_parts_are_an_object_or_a_function(parts_file):
    mine = load_parts("parts_of_a_test:value")
    assert mine.rms_norm.__name__ == "mine" and mine.sample is Parts().sample
    assert load_parts("parts_of_a_test:function") is mine
    assert load_parts("mini_engine.parts:Parts") == Parts()


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("", "MODULE:OBJECT"),
        ("parts_of_a_test", "MODULE:OBJECT"),
        (":value", "MODULE:OBJECT"),
        ("no_such_module:value", "no_such_module"),
        (".relative:value", "relative"),
        ("parts_of_a_test:missing", "missing"),
        ("parts_of_a_test:number", "int"),
        ("parts_of_a_test:broken", "ZeroDivisionError: no"),
        ("parts_of_a_test:leaves", "SystemExit: 0"),
        ("parts_of_a_test:mine", "TypeError"),
    ],
)
def test_parts_that_cannot_be_loaded_are_named(parts_file, path, message):
    with pytest.raises(ConfigError, match=message):
        load_parts(path)
