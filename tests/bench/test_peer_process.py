"""A peer in another process: the fake package below stands in for vLLM, and shows what it was asked for."""

import io
import json
import subprocess
import sys
import time
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from mini_engine.bench.peer_process import PeerOptions, PeerProcess
from mini_engine.bench.peers import serve_mini_engine
from mini_engine.bench.run import compare
from mini_engine.bench.workloads import Workload
from mini_engine.cli_options import EngineOptions
from mini_engine.errors import ConfigError, PeerError
from mini_engine.llm import LLM
from tests.helpers import save_tiny_model

FEW = Workload(3, (3, 9), (2, 7), shared=4)
OPTIONS = PeerOptions("a folder", "float32", 4, 32, True, 128, 4096, 0.5)
# It computes with our engine, from the same folder, so its greedy tokens are ours. It prints, as vLLM does.
FAKE = """
import json
from typing import NamedTuple

from mini_engine.llm import LLM as Ours
from mini_engine.sampling_params import SamplingParams as OurParams


class SamplingParams(NamedTuple):
    temperature: float
    max_tokens: int
    top_k: int
    top_p: float
    ignore_eos: bool
    detokenize: bool


class Completion(NamedTuple):
    token_ids: tuple


class RequestOutput(NamedTuple):
    outputs: list


class LLM:
    def __init__(self, model, **options):
        print("INFO loading", model)
        with open(model + "/asked.json", "w") as file:
            json.dump(options, file)
        self._ours = Ours(model, dtype=options["dtype"], num_pages=16, page_size=16, device="cpu")

    def generate(self, prompts, sampling_params, use_tqdm):
        print("INFO generating")
        params = [
            OurParams(temperature=own.temperature, max_tokens=own.max_tokens, ignore_eos=True)
            for own in sampling_params
        ]
        served = self._ours.generate([prompt["prompt_token_ids"] for prompt in prompts], params)
        return [RequestOutput([Completion(tuple(output.token_ids))]) for output in served]
"""
BROKEN = "class SamplingParams: ...\n\n\ndef LLM(**options):\n    raise RuntimeError('no kernel image is available')\n"
FORKS = """
import os
import signal
import time


class SamplingParams:
    def __init__(self, **options): ...


class LLM:
    def __init__(self, model, **options):
        core = os.fork()
        if core == 0:
            time.sleep(600)
        with open(model + "/core", "w") as file:
            file.write(str(core))

    def generate(self, *arguments, **options):
        os.kill(os.getpid(), signal.SIGKILL)  # as when memory runs out
"""


@pytest.fixture
def installed(tmp_path, monkeypatch):
    """Put a package `vllm` first on the module path, here and in child processes."""

    def install(source: str) -> None:
        folder = tmp_path / "site"
        (folder / "vllm").mkdir(parents=True)
        (folder / "vllm" / "__init__.py").write_text(source)
        monkeypatch.syspath_prepend(folder)
        monkeypatch.setenv("PYTHONPATH", f"{folder}:{Path(__file__).parents[2]}")

    return install


@pytest.fixture
def model(tmp_path):
    folder = tmp_path / "model"
    save_tiny_model(folder, [f"w{i}" for i in range(61)])
    (folder / "tokenizer.json").unlink()
    return str(folder)


def test_a_peer_serves_our_requests_from_our_folder(installed, model):
    installed(FAKE)
    given = {"attn_backend": "torch", "device": "cpu", "dtype": "float32"}
    ours, theirs = compare(Console(file=io.StringIO()), EngineOptions(model, given), [FEW], ["vllm"], rounds=2)
    assert (ours["engine"], theirs["engine"], theirs["equal"]) == ("mini_engine", "vllm", 3)
    assert 0 < theirs["min_tokens_per_s"] <= theirs["max_tokens_per_s"]
    asked = json.loads(Path(model, "asked.json").read_text())
    assert asked["max_model_len"] == FEW.longest and asked["enable_prefix_caching"] and asked["dtype"] == "float32"
    assert asked["kv_cache_memory_bytes"] > 0 and 0 < asked["gpu_memory_utilization"] <= 1


def test_a_peer_stores_weights_and_keys_as_we_do(installed, model):
    installed(FAKE)
    given = {"attn_backend": "torch", "device": "cpu", "dtype": "float32"}
    formats = {"quantization": "fp8", "kv_cache_dtype": "fp8"}
    _, theirs = compare(Console(file=io.StringIO()), EngineOptions(model, given | formats), [FEW], ["vllm"], rounds=1)
    assert theirs["engine"] == "vllm"
    asked = json.loads(Path(model, "asked.json").read_text())
    assert formats.items() <= asked.items()


def test_our_engine_in_its_own_process_takes_formats_and_a_file_of_options(model, tmp_path):
    file = tmp_path / "engine.yaml"
    file.write_text("model: another\nattn_backend: torch\nmax_batch_size: 2\nmax_seq_len: 24\n")
    options = PeerOptions(model, "float32", quantization="int8", kv_cache_dtype="fp8", config=str(file))
    with closing(PeerProcess("mini_engine", options)) as peer:
        outputs = peer(FEW.requests(61))
        [cut_off] = peer(Workload(1, (20, 20), (8, 8)).requests(61))
    assert len(cut_off) == 4  # max_seq_len is 24
    ours = LLM(model, dtype="float32", device="cpu", attn_backend="torch", quantization="int8", kv_cache_dtype="fp8")
    assert outputs == serve_mini_engine(ours.engine, FEW.requests(61))


def test_an_option_of_the_file_is_not_given_twice(model, tmp_path):
    (file := tmp_path / "engine.yaml").write_text("max_batch_size: 2\n")
    with pytest.raises(PeerError, match="max_num_seqs is another name of max_batch_size"):
        PeerProcess("mini_engine", PeerOptions(model, max_num_seqs=4, config=str(file)))


def test_the_seconds_are_those_of_the_other_process(installed, model):
    installed(FAKE)
    with closing(PeerProcess("vllm", replace(OPTIONS, model=model))) as peer:
        outputs = peer(FEW.requests(61))
        assert [len(tokens) for tokens in outputs] == [params.max_tokens for _, params in FEW.requests(61)]
        assert peer.seconds > 0


def test_a_peer_that_fails_says_why(installed):
    installed(BROKEN)
    with pytest.raises(PeerError, match="no kernel image is available"):
        PeerProcess("vllm", OPTIONS)


def test_a_peer_that_is_killed_is_noticed_although_its_own_process_lives(installed, tmp_path):
    """vLLM and SGLang start processes, which keep the pipe of the answers open."""
    installed(FORKS)
    with closing(PeerProcess("vllm", replace(OPTIONS, model=str(tmp_path)))) as peer:
        core = int((tmp_path / "core").read_text())
        with pytest.raises(PeerError, match="exited before it answered"):
            peer(FEW.requests(61))
        assert runs(core)
    wait_for_the_end_of(core)


def test_a_peer_that_does_not_end_is_killed_with_its_processes(installed, tmp_path, monkeypatch):
    monkeypatch.setattr("mini_engine.bench.peer_process.SECONDS_TO_END", 1)
    installed(FORKS + "\nimport atexit\natexit.register(time.sleep, 600)\n")
    PeerProcess("vllm", replace(OPTIONS, model=str(tmp_path))).close()
    wait_for_the_end_of(int((tmp_path / "core").read_text()))


def runs(process: int) -> bool:
    """Whether a process has not ended; one that its parent has not waited for stays as a zombie."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def wait_for_the_end_of(process: int) -> None:
    for _ in range(100):
        if not runs(process):
            return
        time.sleep(0.1)
    pytest.fail("the process is still running")


def test_a_log_need_not_be_utf_8(installed):
    installed("import os\nos.write(2, b'half \\xe2\\x96 of a character\\n')\n" + BROKEN)
    with pytest.raises(PeerError, match="no kernel image is available"):
        PeerProcess("vllm", OPTIONS)


def test_a_peer_that_is_not_installed_is_refused_before_the_model_is_opened():
    with pytest.raises(ConfigError, match="the peer sglang is not installed"):
        compare(Console(), EngineOptions("no such model", {}), [FEW], ["sglang"])


def test_the_child_imports_nothing_before_its_engine():
    """The engines start processes that import the child's module again."""
    check = "import sys, mini_engine.bench.peer_child as child; print({'torch', 'numpy'} & sys.modules.keys())"
    done = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"
