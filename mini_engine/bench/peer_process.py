"""Engines that need their own process: vLLM and SGLang, in the environment that runs this benchmark."""

import importlib.util
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any

from mini_engine.bench.peer_child import ENGINES
from mini_engine.bench.workloads import BenchRequest
from mini_engine.errors import ConfigError, PeerError

# The child reads a local folder, so neither engine needs to download or report anything.
OFFLINE = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1"}
PARAMS = ("temperature", "max_tokens", "top_k", "top_p")
LOG_LINES = 8  # of the child's log, shown in an error
SECONDS_TO_END = 60  # for a child to stop its own processes


@dataclass(frozen=True)
class PeerOptions:
    """Options of an engine in its own process. For None the engine has its own default.

    Attributes:
        model: the folder of the checkpoint.
        dtype: dtype of weights and cache, such as "bfloat16".
        max_num_seqs: requests that run at once.
        max_model_len: longest prompt and output together.
        enable_prefix_caching: keep a prefix cache.
        cache_tokens: capacity of the KV cache, in tokens.
        cache_bytes: bytes of these tokens.
        memory_share: share of the device's memory that the engine may use.
        quantization: round the weights while they are loaded: "fp8", or, in our engine, "int8" or "int4".
        kv_cache_dtype: dtype of keys and values in the cache, if not the weights': "fp8".
        batch_invariant: whether logits must not depend on the other requests of a step; only ours and vLLM.
        speculative_config: see `EngineConfig`, whose names are vLLM's; only ours and vLLM.
        config: YAML file of our engine's options; the other engines do not read it.
        random_weights: whether the engine draws the weights, because the folder has none; only vLLM and SGLang.
    """

    model: str
    dtype: str | None = None
    max_num_seqs: int | None = None
    max_model_len: int | None = None
    enable_prefix_caching: bool | None = None
    cache_tokens: int | None = None
    cache_bytes: int | None = None
    memory_share: float | None = None
    quantization: str | None = None
    kv_cache_dtype: str | None = None
    batch_invariant: bool | None = None
    speculative_config: dict[str, Any] | None = None
    config: str | None = None
    random_weights: bool | None = None


class PeerProcess:
    """An engine in its own process, which `close` ends.

    Args:
        name: name of the engine, accepted by `check_installed`.
        options: see `PeerOptions`.

    Attributes:
        ready_seconds: time from the start of the process until the engine was ready.
        seconds: time that the engine took for the last call, measured in its own process.

    Raises:
        PeerError: if the engine cannot be loaded.
    """

    def __init__(self, name: str, options: PeerOptions) -> None:
        self._name, self.seconds, start = name, 0.0, time.perf_counter()
        self._log = tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115 (`close` closes it)
        self._child = subprocess.Popen(
            [sys.executable, "-m", "mini_engine.bench.peer_child", name],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            env=OFFLINE | os.environ,
            start_new_session=True,  # so that `close` can end the engine's own processes too
        )
        try:
            self._ask(asdict(options))
            self.ready_seconds = time.perf_counter() - start
        except BaseException:
            self.close()
            raise

    def __call__(self, requests: Sequence[BenchRequest]) -> list[list[int]]:
        """Serve requests without their seeds, because another engine's sampler draws other noise.

        Raises:
            PeerError: if the engine fails.
        """
        params = [{name: getattr(own, name) for name in PARAMS} for _, own in requests]
        served = self._ask({"prompts": [prompt for prompt, _ in requests], "params": params})
        self.seconds = served["seconds"]
        return served["outputs"]

    def close(self) -> None:
        """End the process and those that it started."""
        assert self._child.stdin and self._child.stdout
        with suppress(BrokenPipeError):
            self._child.stdin.close()  # it ends when its input ends
        self._child.stdout.close()
        with suppress(subprocess.TimeoutExpired):
            self._child.wait(SECONDS_TO_END)
        with suppress(ProcessLookupError):
            os.killpg(self._child.pid, signal.SIGKILL)
        self._child.wait()
        self._log.close()

    def _ask(self, question: dict[str, Any]) -> dict[str, Any]:
        assert self._child.stdin and self._child.stdout
        with suppress(BrokenPipeError):  # the child has ended, so there is no answer to read either
            print(json.dumps(question), file=self._child.stdin, flush=True)
        # Its end does not close the pipe while a process that it forked still holds the other end.
        while not select.select([self._child.stdout], [], [], 1)[0] and self._child.poll() is None:
            pass
        if select.select([self._child.stdout], [], [], 0)[0] and (line := self._child.stdout.readline()):
            return json.loads(line)
        self._log.seek(0)
        last = "\n".join(self._log.read().splitlines()[-LOG_LINES:])
        raise PeerError(f"the peer {self._name} exited before it answered; leave it out, or fix this:\n{last}")


def check_installed(name: str) -> None:
    """Raise ConfigError if `name` is in `ENGINES` and the engine is not installed here."""
    if name in ENGINES and importlib.util.find_spec(name) is None:
        raise ConfigError(
            f"the peer {name} is not installed in this Python environment ({sys.executable}): install {name} there, or "
            f"leave out --peer {name}"
        )
