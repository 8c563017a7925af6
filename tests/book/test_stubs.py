"""homework.py, as it is generated from a solution."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from book.grading.chapter import ROOT
from book.grading.stubs import make_stub, write_stub

SOLUTION = '''\
r"""Homework of chapter 07: $\\alpha$ and $\\beta$."""

import json
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from torch import Tensor, nn

# What a mask is.
Mask = Callable[[int, int], bool]
LIMIT = 3
_START: int = 4  # the default of total
_SECRET = 5


@dataclass(frozen=True)
class Given:
    """Handed to the reader as it is."""

    value: float

    def half(self) -> float:
        return math.floor(self.value / 2)


def _helper(x: int) -> int:
    return x + _SECRET


def total(
    items: Iterable[int],
    start: int = _START,
) -> int:
    """The sum.

    >>> total([1, 2])
    7
    """
    # by hand
    return sum(_helper(item) for item in items)


def no_docstring(mask: Mask, given: "Given") -> bool:
    # never mind
    return json.loads("true")


@dataclass
class Norm(nn.Module):
    """A class to write."""

    width: int
    eps: float = 1e-6

    @property
    def weight(self) -> Tensor:
        """The weight."""
        return self._secret(1)

    @staticmethod
    def make(width: int) -> "Norm":
        """Makes one."""
        return Norm(width)

    def _secret(self, x: int) -> Tensor:
        return Tensor(x)


if __name__ == "__main__":
    print(total([]))
'''

STUB = '''\
r"""Homework of chapter 07: $\\alpha$ and $\\beta$.

The docstring of each function says what the function must do. Replace its line
`raise NotImplementedError`. Import what you need, and add helper functions of your own
as you like. Then:

    # grade your work
    pytest chapters/07_small

    # the next of three hints for the exercise NAME
    pytest chapters/07_small --hint NAME
"""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from torch import Tensor, nn

# What a mask is.
Mask = Callable[[int, int], bool]
LIMIT = 3
_START: int = 4  # the default of total


@dataclass(frozen=True)
class Given:
    """Handed to the reader as it is."""

    value: float

    def half(self) -> float:
        return math.floor(self.value / 2)


def total(
    items: Iterable[int],
    start: int = _START,
) -> int:
    """The sum.

    >>> total([1, 2])
    7
    """
    raise NotImplementedError


def no_docstring(mask: Mask, given: "Given") -> bool:
    raise NotImplementedError


@dataclass
class Norm(nn.Module):
    """A class to write."""

    width: int
    eps: float = 1e-6

    @property
    def weight(self) -> Tensor:
        """The weight."""
        raise NotImplementedError

    @staticmethod
    def make(width: int) -> "Norm":
        """Makes one."""
        raise NotImplementedError
'''

EXERCISES = ["total", "no_docstring", "Norm"]


def test_bodies_and_private_helpers_go_and_the_rest_stays() -> None:
    assert make_stub(SOLUTION, EXERCISES, "07_small") == STUB


def test_imports_shrink_to_what_is_used() -> None:
    names = ", ".join(f"function_with_a_long_name_{number}" for number in range(6))
    uses = " | ".join(f"function_with_a_long_name_{number}" for number in range(5))
    stub = make_stub(f'"""Doc."""\n\nfrom somewhere import {names}\n\nUnion = {uses}\n', [], "07_small")
    kept = "".join(f"    function_with_a_long_name_{number},\n" for number in range(5))
    assert f"from somewhere import (\n{kept})\n" in stub


def test_the_examples_of_a_docstring_keep_their_imports() -> None:
    example = '    """Half of pi.\n\n        >>> quarter_turn() == math.pi / 2\n        True\n    """\n'
    stub = make_stub(
        f'"""Doc."""\n\nimport math\nimport json\n\ndef quarter_turn():\n{example}    return math.pi / 2\n',
        ["quarter_turn"],
        "07_small",
    )
    assert "import math\n" in stub and "import json" not in stub


def test_a_solution_without_a_docstring_is_refused() -> None:
    with pytest.raises(ValueError, match="docstring"):
        make_stub("x = 1\n", [], "07_small")


@pytest.mark.skipif(not shutil.which("ruff", path=str(Path(sys.executable).parent)), reason="ruff is not installed")
@pytest.mark.parametrize("command", [["check"], ["format", "--check"]], ids=["check", "format"])
def test_a_stub_is_as_ruff_wants_it(tmp_path: Path, command: list[str]) -> None:
    file = tmp_path / "homework.py"
    file.write_text(make_stub(SOLUTION, EXERCISES, "07_small"))
    ruff = Path(sys.executable).parent / "ruff"
    run = subprocess.run(
        [ruff, *command, "--no-cache", "--config", ROOT / "pyproject.toml", file], capture_output=True, text=True
    )
    assert run.returncode == 0, run.stdout


def test_a_readers_work_is_never_lost(tmp_path: Path) -> None:
    path, backups = tmp_path / "01_small" / "homework.py", tmp_path / "old"
    path.parent.mkdir()
    assert "Wrote" in write_stub(path, "stub\n", backups, force=False)
    assert "fresh already" in write_stub(path, "stub\n", backups, force=False)
    path.write_text("hours of work\n")
    with pytest.raises(FileExistsError, match="--force"):
        write_stub(path, "stub\n", backups, force=False)
    assert path.read_text() == "hours of work\n"
    write_stub(path, "stub\n", backups, force=True)
    assert path.read_text() == "stub\n"
    assert [file.read_text() for file in backups.iterdir()] == ["hours of work\n"]
