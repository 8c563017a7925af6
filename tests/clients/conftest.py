"""`mini-engine serve` in a process of its own, and public load generators in environments of theirs.

`make test-clients` installs the clients and runs these tests, and `make test-clients CLIENTS=vllm` runs others.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import urllib.request
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from mini_engine.loading.hub import EMBEDDED_MODEL, embedded_folder

ROOT = Path(__file__).parents[2]
MAX_MODEL_LEN = 512
NUM_TOKENS = 8  # asked of each request
GOOD = ["Name a color.", "Count to three.", "What is a page table?"]
TOO_LONG = "word " * MAX_MODEL_LEN


@dataclass(frozen=True)
class Target:
    """A running server.

    Attributes:
        address: where it listens, such as http://127.0.0.1:1234.
        tokenizer: folder with the model's tokenizer, for clients that count tokens themselves.
    """

    address: str
    tokenizer: Path

    def counters(self) -> dict[str, float]:
        """Return the counts of `/metrics`, histograms included, by name and summed over labels."""
        with urllib.request.urlopen(f"{self.address}/metrics", timeout=60) as answer:
            families = list(text_string_to_metric_families(answer.read().decode()))
        found: dict[str, float] = {}
        for sample in (sample for family in families for sample in family.samples):
            if sample.name.endswith(("_total", "_count")):
                found[sample.name] = found.get(sample.name, 0.0) + sample.value
        return found

    def counted_since(self, before: dict[str, float]) -> dict[str, float]:
        """Return by how much the counts have grown."""
        return {name: value - before.get(name, 0.0) for name, value in self.counters().items()}


@pytest.fixture(scope="session")
def target() -> Iterator[Target]:
    """Serve the embedded model for all tests."""
    folder = embedded_folder()
    options = "--port=0", "--device=cpu", "--dtype=float32", f"--max-model-len={MAX_MODEL_LEN}", "--max-batch-size=4"
    command = [sys.executable, "-m", "mini_engine", "serve", EMBEDDED_MODEL, *options]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            address = next(found[1] for line in process.stdout if (found := re.search(r"on (http:\S+)", line)))
            yield Target(address, folder)
        finally:
            process.terminate()


def run_client(client: str, program: str, *arguments: str | Path, **environment: str) -> str:
    """Run a client's own command in the client's environment, and return what it printed.

    Args:
        client: name of the environment below `.venv-clients`.
        program: command in it.
        arguments: its arguments.
        environment: further environment variables.
    """
    command = ROOT / ".venv-clients" / client / "bin" / program
    assert command.exists(), f"{client} is not installed; run `make test-clients CLIENTS={client}`"
    done = subprocess.run(
        [command, *arguments], env=os.environ | environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    assert done.returncode == 0, done.stdout[-5000:]
    return done.stdout


def write_lines(file: Path, items: Sequence[dict[str, Any]]) -> Path:
    """Write a file with one JSON object in each line."""
    file.write_text("".join(json.dumps(item) + "\n" for item in items))
    return file
