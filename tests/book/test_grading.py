"""The grading machinery, on a chapter of four tiny exercises without tensors."""

import json
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import torch
from rich.console import Console, RenderableType

from book.grading import load_chapter, solution
from book.grading.chapter import ROOT, Chapter, Exercise, find_chapter
from book.grading.grade import Grading
from book.grading.outcome import Outcome
from book.grading.parts import (
    PARTS,
    Part,
    _on_layers,
    changed_since,
    engine_diagram,
    finished_part_names,
    finished_parts,
)
from book.grading.plugin import pytest_configure
from book.grading.progress import Progress
from book.grading.report import engine_panel, failures, gradescope, hint, progress_table, speed_line, summary
from book.grading.worker import Limits
from mini_engine.parts import STAGES, Parts
from tests.helpers import GREEDY, alone
from tests.models.families import our_model, transformers_model

SOLUTION = '''\
"""Homework of a small chapter."""


def double(x: int) -> int:
    """Twice x."""
    return x + x


def quadruple(x: int) -> int:
    """Four times x, by `double`."""
    return double(double(x))


class Counter:
    """Counts from a start."""

    def __init__(self, start: int) -> None:
        """Remembers the start."""
        self.value = start

    def add(self, x: int) -> int:
        """Adds x; returns the sum."""
        self.value += x
        return self.value


def last(items: list[int]) -> int:
    """The last item."""
    return items[-1]
'''

GRADER = """\
from book.grading import Exercise, Homework, assert_equal, check

HINTS = ("first hint", "second hint", "third hint")
EXERCISES = [
    Exercise("double", points=1, minutes=5, difficulty=1, hints=HINTS, part="apply_rope"),
    Exercise("quadruple", points=2, minutes=5, difficulty=2, hints=HINTS, part="rms_norm"),
    Exercise("Counter", points=4, minutes=5, difficulty=2, hints=HINTS),
    Exercise("last", points=8, minutes=5, difficulty=3, hints=HINTS, challenge=True),
]


@check("double", mistake="you add two", seconds=0.5)
def test_three(hw: Homework) -> None:
    assert_equal(hw.double(3), 6)


@check("double", mistake="you square", seconds=0.5)
def test_two_and_one(hw: Homework) -> None:
    assert hw.double(2) == 4
    assert hw.double(1) == 2, "one doubled is two"


@check("quadruple", mistake="you double once", seconds=0.5)
def test_quadruple(hw: Homework) -> None:
    assert_equal(hw.quadruple(3), 12)


@check("Counter", mistake="you forget the start", seconds=0.5)
def test_counter(hw: Homework) -> None:
    assert_equal(hw.Counter(1).add(2), 3)


@check("last", mistake="you copy the list", seconds=0.5, costs=0.3)
def test_no_slice(hw: Homework) -> None:
    class Items(list):
        slices = 0

        def __getitem__(self, index):
            self.slices += isinstance(index, slice)
            return super().__getitem__(index)

    items = Items([1, 2])
    hw.last(items)
    assert items.slices == 0, "a slice was taken"


@check("last", mistake="you take the first", seconds=0.5)
def test_last(hw: Homework) -> None:
    assert_equal(hw.last([1, 2]), 2)
"""

RIGHT_DOUBLE = "def double(x):\n    return 2 * x\n"
RIGHT_LAST = "def last(items):\n    return items[len(items) - 1]\n"
LIMITS = Limits(load=2.0, elapsed_factor=1000.0, stop=60.0)  # elapsed time depends on the machine
WAITS = Limits(load=1000.0, elapsed_factor=0.5, stop=60.0)  # for answers that wait: they may take 0.25 seconds

Write = Callable[[str], Chapter]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """Writes a homework.py into the chapter and loads the chapter."""
    folder = tmp_path / "chapters" / "01_small"
    folder.mkdir(parents=True)
    (tmp_path / "solutions").mkdir()
    (tmp_path / "solutions" / "01_small.py").write_text(SOLUTION)
    (folder / "test_homework.py").write_text(GRADER)

    def write(homework: str) -> Chapter:
        (folder / "homework.py").write_text(homework)
        return load_chapter(folder)

    return write


def graded(chapter: Chapter, file: Path | None = None) -> Grading:
    with Grading(chapter, file or chapter.homework, LIMITS) as grading:
        return grading.run_all()


def outcome_of(chapter: Chapter, exercise: str, limits: Limits = LIMITS) -> Outcome:
    """The outcome of the first check of one exercise."""
    with Grading(chapter, chapter.homework, limits) as grading:
        return grading.run(chapter.checks_of(chapter.exercise(exercise))[0])


def statuses(grading: Grading) -> dict[str, str]:
    failed = {result.exercise.name: result.failure for result in grading.results}
    return {name: failure[1].status if failure else "passed" for name, failure in failed.items()}


def message(grading: Grading, exercise: str) -> str:
    failure = next(result.failure for result in grading.results if result.exercise.name == exercise)
    assert failure is not None
    return failure[1].message


def printed(renderable: RenderableType) -> str:
    console = Console(width=200)
    with console.capture() as capture:
        console.print(renderable)
    return capture.get()


def test_the_solution_earns_all_points(write: Write) -> None:
    chapter = write("")
    grading = graded(chapter, chapter.solution)
    assert grading.points == chapter.points == 15
    assert failures(grading) == []


def test_a_loop_and_a_crash_cost_their_own_exercises(write: Write) -> None:
    """The four exercises loop, abort, exit the process, and are right: the right one is still graded."""
    grading = graded(
        write(
            "import os\n\n\n"
            "def double(x):\n    while True:\n        pass\n\n\n"
            "def quadruple(x):\n    print('before the end')\n    os.abort()\n\n\n"
            "class Counter:\n    def __init__(self, start):\n        os._exit(3)\n\n\n" + RIGHT_LAST
        )
    )
    assert statuses(grading) == {
        "double": "timeout",
        "quadruple": "crashed",
        "Counter": "crashed",
        "last": "passed",
    }
    assert grading.points == 8
    assert " in line " in message(grading, "double")
    assert "SIGABRT in line 11." in message(grading, "quadruple")
    assert "exit code 3" in message(grading, "Counter")
    aborted = grading.results[1].failure
    assert aborted is not None and aborted[1].output == "before the end"
    *_, call, line = aborted[1].detail.splitlines()
    assert call.startswith("test_homework.py:") and call.endswith("assert_equal(hw.quadruple(3), 12)")
    assert line == "homework.py:11  os.abort()"


def test_memory_outside_of_a_tensor_is_named(write: Write) -> None:
    grading = graded(write("import ctypes\n\n\ndef double(x):\n    return ctypes.string_at(0)\n\n\n" + RIGHT_LAST))
    assert statuses(grading)["double"] == "crashed"
    assert "SIGSEGV in line 5. Perhaps" in message(grading, "double")


def test_waiting_costs_nothing_unless_it_never_ends(write: Write) -> None:
    chapter = write(
        "import time\n\n\n"
        "def quadruple(x):\n    time.sleep(0.6)\n    return 4 * x\n\n\n"
        "class Counter:\n    def __init__(self, start):\n        time.sleep(3600)\n"
    )
    assert outcome_of(chapter, "quadruple").passed, "0.6 seconds elapsed, and the limit is 0.5 of CPU time"
    outcome = outcome_of(chapter, "Counter", WAITS)
    assert outcome.status == "timeout" and "in line 11, " in outcome.message


def test_a_right_answer_that_is_too_slow_is_told_the_demand(write: Write) -> None:
    """Only the demand on `last` has a list of another type. It is graded after the check of the result."""
    slow = "def last(items):\n    while type(items) is not list:\n        pass\n    return items[-1]\n"
    grading = graded(write(slow))
    failure = grading.results[3].failure
    assert failure is not None and failure[1].status == "timeout"
    assert failure[0].name == "test_no_slice" and "stopped" in failure[1].verdict


def test_an_answer_that_ignores_the_signal_is_ended_all_the_same(write: Write) -> None:
    """Both when it computes and when it waits."""
    ignore = "import signal, time\n\nsignal.signal(signal.SIGPROF, signal.SIG_IGN)\n\n\n"
    loops = ignore + "def double(x):\n    while True:\n        pass\n\n\n" + RIGHT_LAST
    grading = graded(write(loops))
    assert statuses(grading)["double"] == "timeout" and statuses(grading)["last"] == "passed"
    sleeps = write(ignore + "def double(x):\n    time.sleep(3600)\n")
    assert outcome_of(sleeps, "double", replace(WAITS, stop=0.1)).status == "timeout"


def test_exceptions_are_explained(write: Write) -> None:
    grading = graded(
        write(
            "import sys\n\n\n"
            "def double(x):\n    sys.exit('no')\n\n\n"
            "def quadruple(x):\n    print('x is', x)\n    return x / 0\n\n\n"
            "class Counter:\n    def __init__(self, start):\n        self.memory = bytearray(2**40)\n\n\n"
            "def last(items):\n    pass\n"
        )
    )
    assert statuses(grading) == {"double": "raised", "quadruple": "raised", "Counter": "raised", "last": "failed"}
    assert "sys.exit()" in message(grading, "double")
    assert "ZeroDivisionError" in message(grading, "quadruple") and "line 10" in message(grading, "quadruple")
    assert "memory" in message(grading, "Counter")
    assert "`return`" in message(grading, "last")
    panels = "".join(printed(panel) for panel in failures(grading))
    assert "x is 3" in panels and "return x / 0" in panels
    assert "This check looks for a mistake: you double once" in panels, "an exception may have another cause"
    assert "you take the first" not in panels, "a missing return says it all"


def test_what_ends_a_process_costs_its_own_exercise(write: Write) -> None:
    """KeyboardInterrupt and the outcomes of pytest are not `Exception`s."""
    grading = graded(
        write(
            "import pytest\n\n\n"
            "def double(x):\n    raise KeyboardInterrupt\n\n\n"
            "def quadruple(x):\n    pytest.skip()\n\n\n"
            "def Counter(start):\n    input()\n\n\n"
            "def last(items):\n    raise ValueError('too short')\n"
        )
    )
    assert set(statuses(grading).values()) == {"raised"}
    assert "raised KeyboardInterrupt" in message(grading, "double")
    assert "raised Skipped" in message(grading, "quadruple")
    assert "keyboard in line 13" in message(grading, "Counter")
    assert "line 17" in message(grading, "last") and "valid" in message(grading, "last")


def test_a_missing_return_is_named_where_the_check_cannot_go_on(write: Write) -> None:
    grading = graded(write("def Counter(start):\n    pass\n"))
    assert "`return`" in message(grading, "Counter")


def test_a_setting_of_torch_does_not_leak_into_another_exercise(write: Write) -> None:
    change = "torch.set_default_dtype(torch.float64)\n"
    chapter = write(
        f"import torch\n\n{change}\n\n"
        f"def double(x):\n    {change}    torch.set_grad_enabled(False)\n    return 2 * x\n\n\n"
        "def last(items):\n    assert torch.is_grad_enabled() and torch.zeros(1).dtype == torch.float32\n"
        "    return items[len(items) - 1]\n"
    )
    grader = chapter.folder / "test_homework.py"
    grader.write_text("import torch\n" + grader.read_text())  # once, for all exercises
    grading = graded(load_chapter(chapter.folder))
    assert statuses(grading)["double"] == statuses(grading)["last"] == "passed"


def test_what_an_answer_patches_stays_in_its_process(write: Write) -> None:
    """Functions of modules, attributes of classes, the environment, and the current folder."""
    grading = graded(
        write(
            "import fractions, math, os, sys\n\n\n"
            "def double(x):\n    math.sqrt = fractions.Fraction.limit_denominator = None\n"
            "    os.environ['PATCHED'] = '1'\n    os.chdir('/')\n    sys.path.clear()\n    return 2 * x\n\n\n"
            "def last(items):\n    assert math.sqrt(4) == 2 and fractions.Fraction(1).limit_denominator() == 1\n"
            "    assert 'PATCHED' not in os.environ and os.getcwd() != '/' and sys.path\n"
            "    return items[len(items) - 1]\n"
        )
    )
    assert statuses(grading)["double"] == statuses(grading)["last"] == "passed"


def test_long_texts_are_cut_and_controls_are_escaped(write: Write) -> None:
    """A message of an exception and what is printed, on their way to a terminal and to a database of grades."""
    controls = "\\x1b]0;title\\x07\\x00\\ud800"
    chapter = write(
        f"def double(x):\n    print('\\x1b[2J')\n    raise ValueError('{controls}' + 'x' * 10**7)\n\n\n"
        "def quadruple(x):\n    class Strange(Exception):\n        def __str__(self):\n            raise KeyError\n\n"
        "    raise Strange\n\n\n"
        f"raise_ = type('\\x1b[2J', (Exception,), {{}})\n\n\ndef Counter(start):\n    raise raise_\n"
    )
    grading = graded(chapter)
    assert set(statuses(grading).values()) == {"raised", "unreadable"}
    assert len(message(grading, "double")) < 3000 and message(grading, "double").startswith("Your answer raised Value")
    assert "raised KeyError" in message(grading, "quadruple")
    shown = "".join([*map(printed, failures(grading)), printed(summary(grading))])
    texts = [shown, *(test["output"] for test in gradescope([grading], 1.0)["tests"])]
    assert not any(mark in text for text in texts for mark in "\x1b\x07\x00\ud800")


def test_printing_is_limited_while_it_happens(write: Write) -> None:
    chapter = write(f"def double(x):\n    while True:\n        print('x' * 10**7)\n\n\n{RIGHT_LAST}")
    grading = graded(chapter)
    assert statuses(grading)["double"] == "raised" and statuses(grading)["last"] == "passed"
    assert "printed" in message(grading, "double")


def test_shared_memory_is_limited(write: Write) -> None:
    grading = graded(write("import mmap\n\n\ndef double(x):\n    return mmap.mmap(-1, 2**33)\n"))
    assert statuses(grading)["double"] == "raised" and "memory" in message(grading, "double")


@pytest.mark.parametrize("fork", ["os.fork()", "os.fork() or os.setsid()"])
def test_an_answer_that_returns_twice_is_graded_once(write: Write, fork: str) -> None:
    grading = graded(write(f"import os\n\n\ndef double(x):\n    {fork}\n    return 2 * x\n\n\n{RIGHT_LAST}"))
    assert statuses(grading)["double"] == statuses(grading)["last"] == "passed"


@pytest.mark.parametrize("harm", ["os.write(file, b'{}\\n')", "os.write(file, b'\\xff' * 99)", "os.close(file)"])
def test_an_answer_that_writes_everywhere_is_told_so(write: Write, harm: str) -> None:
    loop = (
        f"    for file in range(3, 99):\n        try:\n            {harm}\n        except OSError:\n            pass\n"
    )
    grading = graded(write(f"import os\n\n\ndef double(x):\n{loop}    return 2 * x\n\n\n{RIGHT_LAST}"))
    assert statuses(grading)["double"] == "crashed" and statuses(grading)["last"] == "passed"


def test_an_answer_that_ends_the_server_or_itself_costs_its_own_exercise(write: Write) -> None:
    """With SIGKILL, and with a signal that has no name."""
    grading = graded(
        write(
            "import os\n\n\ndef double(x):\n    os.kill(os.getppid(), 9)\n    return 2 * x\n\n\n"
            f"def quadruple(x):\n    os.kill(os.getpid(), 40)\n\n\n{RIGHT_LAST}"
        )
    )
    assert statuses(grading)["quadruple"] == "crashed" and "signal 40" in message(grading, "quadruple")
    assert statuses(grading)["last"] == "passed" and statuses(grading)["double"] in ("passed", "crashed")


def test_what_an_answer_has_started_ends_with_it(write: Write, tmp_path: Path) -> None:
    """In a session of its own, and with a parent that has ended."""
    file = tmp_path / "pid"
    chapter = write(
        "import os, subprocess\n\n\ndef double(x):\n    if not os.fork():\n"
        "        child = subprocess.Popen(['sleep', '3600'], start_new_session=True)\n"
        f"        open({str(file)!r}, 'w').write(str(child.pid))\n        os._exit(0)\n"
        "    os.wait()\n    return 2 * x\n"
    )
    assert statuses(graded(chapter))["double"] == "passed"
    assert not psutil.pid_exists(int(file.read_text()))


def test_the_first_failing_check_names_the_mistake(write: Write) -> None:
    grading = graded(write("def double(x):\n    return x * x if x == 2 else 2 * x if x == 3 else 7\n"))
    failure = grading.results[0].failure
    assert failure is not None
    assert (failure[0].name, failure[1].message) == ("test_two_and_one", "One doubled is two.")
    table = printed(summary(grading))
    assert "test_two_and_one: you square" in table and "0 of 15 points" in table


def test_a_narrow_table_keeps_the_names_of_checks(write: Write) -> None:
    name = "test_queries_and_keys_have_their_own_bounds"
    chapter = write("def double(x):\n    return x * x if x == 2 else 7\n")
    grader = chapter.folder / "test_homework.py"
    grader.write_text(grader.read_text().replace("test_three", name))
    console = Console(width=60)
    with console.capture() as capture:
        console.print(summary(graded(load_chapter(chapter.folder))))
    assert name in re.sub(r"[\s│]", "", capture.get())


def test_an_unwritten_exercise_is_not_a_mistake(write: Write) -> None:
    grading = graded(write("def double(x):\n    raise NotImplementedError\n\n\n" + RIGHT_LAST))
    assert statuses(grading)["double"] == "unwritten"
    assert "not written yet" in printed(summary(grading))
    assert "does not define quadruple" in message(grading, "quadruple")


def test_one_mistake_costs_once(write: Write) -> None:
    """`quadruple` calls a wrong `double`, and a helper that the reader has written."""
    grading = graded(
        write(
            "def double(x):\n    return x + 2\n\n\n"
            "def _twice(function, x):\n    return function(function(x))\n\n\n"
            "def quadruple(x):\n    return _twice(double, x)\n"
        )
    )
    assert statuses(grading)["double"] == "failed"
    assert statuses(grading)["quadruple"] == "passed"


def test_other_exercises_are_replaced_before_the_file_runs(write: Write) -> None:
    homework = "class Counter:\n    pass\n\n\nclass Mine(Counter):\n    pass\n\n\nlast = max\n\n\n"
    homework += "def double(x):\n    return Mine(x).add(x) + last([9, 0])\n"
    assert statuses(graded(write(homework)))["double"] == "passed"


@pytest.mark.parametrize(
    ("homework", "words"),
    [
        ("def double(x:\n    return x\n", "syntax error in line 1"),
        ("x = '\0'\n", "null bytes"),
        ("import no_such_module\n", "line 1: ModuleNotFoundError"),
        ("%matplotlib inline\n", "notebook command"),
        ("raise KeyboardInterrupt\n", "line 1: KeyboardInterrupt"),
        ("raise SystemExit\n", "sys.exit()"),
        ("import os\nos.abort()\n", "SIGABRT in line 2"),
        ("while True: pass\n", "in line 1"),
    ],
)
def test_a_file_that_cannot_be_read_costs_all_points_and_says_why(write: Write, homework: str, words: str) -> None:
    grading = graded(write(homework))
    assert grading.points == 0
    assert all(words in message(grading, name) for name in statuses(grading)), message(grading, "double")
    assert len(failures(grading)) == 1, "once is enough"


def test_a_missing_file_is_named(write: Write) -> None:
    chapter = write("")
    chapter.homework.unlink()
    assert "python -m book stubs 01" in message(graded(chapter), "double")
    chapter.homework.mkdir()
    assert "cannot be read" in message(graded(chapter), "double")


SLICING_LAST = "def last(items):\n    return items[:][-1]\n"


def test_a_right_answer_that_misses_a_demand_keeps_most_points(write: Write, tmp_path: Path) -> None:
    """The demand costs 0.3 of 8 points, and is checked last although it stands first in the file."""
    chapter = write(SLICING_LAST)
    grading = graded(chapter)
    assert [check.name for check in chapter.checks_of(chapter.exercise("last"))] == ["test_last", "test_no_slice"]
    assert message(grading, "last") == "A slice was taken."
    assert grading.points == 5.6 and not grading.results[-1].passed
    table = printed(summary(grading))
    assert "5.6 / 8" in table and "right, but test_no_slice: you copy the list" in table
    progress = Progress(tmp_path)
    progress.record(chapter.slug, grading.source or "", grading.results)
    table = printed(progress_table([chapter], progress))
    assert "5.6 of 15 points" in table and "right, but misses a requirement" in table
    test = gradescope([grading], 1.0)["tests"][-1]
    assert (test["score"], test["status"]) == (5.6, "failed") and test["output"].startswith("Right, but test_no_slice")


def test_a_wrong_answer_that_misses_a_demand_gets_nothing(write: Write) -> None:
    grading = graded(write("def last(items):\n    return items[:][0]\n"))
    failure = grading.results[-1].failure
    assert grading.points == 0 and failure is not None and failure[0].name == "test_last"


def test_a_demand_alone_earns_nothing(write: Write) -> None:
    """A run of selected checks may leave out the checks of the result, so the points are not known yet."""
    chapter = write(SLICING_LAST)
    with Grading(chapter, chapter.homework, LIMITS) as grading:
        grading.run(chapter.checks_of(chapter.exercise("last"))[-1])
    assert not grading.results[-1].complete and grading.points == 0
    assert "– / 8" in printed(summary(grading))


def test_gradescope_gets_the_points_of_each_exercise(write: Write) -> None:
    results = gradescope([graded(write(RIGHT_LAST + "\n\ndef double(x):\n    import os\n\n    os.abort()\n"))], 1.0)
    results = json.loads(json.dumps(results))
    tests = {test["name"]: test for test in results["tests"]}
    assert results["score"] == sum(test["score"] for test in tests.values()) == 8
    assert {name: test["max_score"] for name, test in tests.items()} == {
        "double": 1,
        "quadruple": 2,
        "Counter": 4,
        "last": 8,
    }
    assert {test["status"] for name, test in tests.items() if name != "last"} == {"failed"}
    assert tests["last"]["status"] == "passed" and tests["last"]["visibility"] == "visible"
    assert "SIGABRT" in tests["double"]["output"]


def test_progress_keeps_what_was_graded(write: Write, tmp_path: Path) -> None:
    chapter, progress = write(RIGHT_DOUBLE), Progress(tmp_path)
    with Grading(chapter, chapter.homework, LIMITS) as grading:
        for check in chapter.checks_of(chapter.exercise("double")):
            grading.run(check)
        grading.run(chapter.checks_of(chapter.exercise("last"))[0])
        progress.record(chapter.slug, grading.source or "", grading.results)
    grades = progress.grades(chapter.slug)
    assert {name: grade.points for name, grade in grades.items()} == {"double": 1, "last": 0}
    table = printed(progress_table([chapter], progress))
    assert "1 of 15 points" in table and "changed since" not in table
    chapter.homework.write_text(RIGHT_DOUBLE + "# a second thought\n")
    assert "changed since" in printed(progress_table([chapter], progress))


GRADE = '{"passed": true, "points": 1, "part": null, "hash": "", "date": ""}'


@pytest.mark.parametrize("damaged", ['{"01_small": {"dou', "[]", "[" * 100_000, "\0"])
def test_a_damaged_file_of_progress_is_kept_and_named(write: Write, tmp_path: Path, damaged: str) -> None:
    chapter, progress = write(RIGHT_DOUBLE), Progress(tmp_path)
    progress.next_hint(chapter.slug, chapter.exercises[0])
    for name in ("grades", "hints", "predictions", "speed"):
        (tmp_path / ".progress" / f"{name}.json").write_text(damaged)
        with pytest.warns(UserWarning, match="damaged"):
            assert progress._read(f"{name}.json") == {}
        assert (tmp_path / ".progress" / f"{name}.damaged").read_text() == damaged
    assert "0 of 15 points" in printed(progress_table([chapter], progress))
    assert progress.next_hint(chapter.slug, chapter.exercises[0]) == 1


@pytest.mark.parametrize(
    "entry",
    [
        '["double"]',
        '{"double": {"passed": true}}',
        *(
            f'{{"double": {GRADE.replace(a, b)}}}'
            for a, b in [("1", '"1"'), ("1", "NaN"), ("1", "9" * 400), ('""}', "1}")]
        ),
    ],
)
def test_entries_that_are_no_grades_are_skipped(write: Write, tmp_path: Path, entry: str) -> None:
    chapter, progress = write(RIGHT_DOUBLE), Progress(tmp_path)
    (tmp_path / ".progress").mkdir()
    (tmp_path / ".progress" / "grades.json").write_text(f'{{"01_small": {entry}}}')
    (tmp_path / ".progress" / "hints.json").write_text('{"01_small": {"double": -7, "last": [3]}}')
    assert progress.grades(chapter.slug) == progress.hints_used(chapter.slug) == {}
    assert "0 of 15 points" in printed(progress_table([chapter], progress))


@pytest.mark.parametrize("encoding", ["utf-8-sig", "latin-1"])
def test_the_encoding_of_an_editor_is_no_obstacle(write: Write, tmp_path: Path, encoding: str) -> None:
    parts = [replace(part, chapter="01_small") for part in PARTS if part.name == "apply_rope"]
    chapter = write("")
    chapter.homework.write_text(RIGHT_DOUBLE + "# déjà vu\n", encoding=encoding)
    grading = graded(chapter)
    assert grading.points == 1
    Progress(tmp_path).record(chapter.slug, grading.source or "", grading.results)
    assert finished_parts(tmp_path, parts)["apply_rope"](21) == 42


def test_hints_come_one_at_a_time(write: Write, tmp_path: Path) -> None:
    chapter, progress = write(""), Progress(tmp_path)
    exercise = chapter.exercises[0]
    shown = [printed(hint(exercise, progress.next_hint(chapter.slug, exercise))) for _ in range(4)]
    words = ["first hint", "second hint", "third hint"]
    assert [[word in text for word in words] for text in shown] == [
        [True, False, False],
        [True, True, False],
        [True, True, True],
        [True, True, True],
    ]
    assert progress.hints_used(chapter.slug) == {"double": 3}


def test_a_part_is_finished_while_its_file_stays_as_graded(write: Write, tmp_path: Path) -> None:
    parts = [replace(part, chapter="01_small") for part in PARTS if part.name == "apply_rope"]
    chapter, progress = write(RIGHT_DOUBLE), Progress(tmp_path)
    assert finished_parts(tmp_path, parts) == {}
    grading = graded(chapter)
    progress.record(chapter.slug, grading.source or "", grading.results)
    assert finished_part_names(tmp_path, parts) == ["apply_rope"]
    assert changed_since(tmp_path, parts) == {}
    assert finished_parts(tmp_path, parts)["apply_rope"](21) == 42
    chapter.homework.write_text(RIGHT_DOUBLE + "# a second thought\n")
    assert finished_part_names(tmp_path, parts) == []
    assert list(changed_since(tmp_path, parts)) == ["01_small"]


@pytest.mark.parametrize(("double", "calls"), [("2 * x", [5, 10]), ("x + 2", [])])
def test_a_part_calls_the_readers_other_exercises_that_pass(
    write: Write, tmp_path: Path, double: str, calls: list[int]
) -> None:
    source = f"""
calls = []

def double(x):
    calls.append(x)
    return {double}

def quadruple(x):
    return double(double(x))
"""
    parts = [replace(part, chapter="01_small") for part in PARTS if part.name == "rms_norm"]
    chapter = write(source)
    grading = graded(chapter)
    Progress(tmp_path).record(chapter.slug, grading.source or "", grading.results)
    quadruple = finished_parts(tmp_path, parts)["rms_norm"]
    assert quadruple(5) == 20
    assert quadruple.__globals__["calls"] == calls


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_the_exercise_of_a_layer_runs_in_the_engine(family: str) -> None:
    """The reference answer of chapter 03 takes the weights of a layer; the engine's part takes the layer itself."""
    answers = solution("03_language_model")
    own = _on_layers(answers.decoder_layer, answers.LayerWeights)
    models = [
        our_model(transformers_model(family, seed=2, dtype=torch.float64), parts=parts)
        for parts in (Parts(), replace(Parts(), decoder_layer=own))
    ]
    first, second = (alone(model, [5, 9, 33], GREEDY) for model in models)
    assert first == second


def test_the_diagram_lights_the_finished_parts() -> None:
    dark, lit = engine_diagram([]), engine_diagram(["sample", "rms_norm"])
    assert lit.count("done") == 2 and '<li class="done">RMSNorm</li>' in lit and "done" not in dark
    assert all(f"<li>{part.title}</li>" in dark for part in PARTS)
    panel = printed(engine_panel(["sample"]))
    assert panel.count("yours") == 2 and panel.count("●") == 1 and panel.count("○") == len(PARTS) - 1
    assert {part.stage for part in PARTS} == set(STAGES)


@pytest.mark.parametrize("part", PARTS, ids=lambda part: part.name)
def test_parts_live_where_they_say(part: Part) -> None:
    name = getattr(Parts(), part.name).__name__
    source = (ROOT / part.module).read_text(encoding="utf-8")
    assert f"\ndef {name}(" in source or f"\nclass {name}:" in source
    assert part.title and part.stage in STAGES and part.chapter == find_chapter(part.chapter).name


def test_the_readers_speed_stands_beside_the_references(tmp_path: Path) -> None:
    progress = Progress(tmp_path)
    progress.record_speed(20.0, 25.0)
    line = str(speed_line(progress.speed(), current=True))
    assert "You reach 80%" in line and "old" not in line
    assert "old" in str(speed_line(progress.speed(), current=False))
    for nothing in ({}, {"reader": 1.0, "reference": 0.0}, {"reader": 10**400, "reference": 1}):
        assert "--homework" in str(speed_line(nothing, current=True))


def test_exercises_are_checked_when_they_are_declared() -> None:
    with pytest.raises(ValueError, match="three hints"):
        Exercise("double", points=1, minutes=1, difficulty=1, hints=("one",))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="difficulty"):
        Exercise("double", points=1, minutes=1, difficulty=4, hints=("a", "b", "c"))


def test_a_grader_must_fit_its_solution(write: Write) -> None:
    chapter = write("")
    grader = chapter.folder / "test_homework.py"
    grader.write_text(GRADER.replace('@check("last"', '@check("first"'))
    with pytest.raises(ValueError, match="last has no check"):
        load_chapter(chapter.folder)
    grader.write_text(GRADER.replace("double", "treble"))
    with pytest.raises(ValueError, match="does not define the exercise treble"):
        load_chapter(chapter.folder)


def test_a_demand_costs_less_than_half_of_the_points(write: Write) -> None:
    chapter = write("")
    grader = chapter.folder / "test_homework.py"
    grader.write_text(GRADER.replace("costs=0.3", "costs=0.75"))
    with pytest.raises(ValueError, match="test_no_slice: a check costs all points"):
        load_chapter(chapter.folder)
    grader.write_text(GRADER.replace('"you take the first"', '"you take the first", costs=0.2'))
    with pytest.raises(ValueError, match="last has no check of its result"):
        load_chapter(chapter.folder)


def test_chapters_are_found_by_number_or_slug(write: Write, tmp_path: Path) -> None:
    folder = write("").folder
    assert all(find_chapter(name, tmp_path) == folder for name in ("1", "01", "01_small"))
    with pytest.raises(LookupError, match="01_small"):
        find_chapter("2", tmp_path)


def run_pytest(root: Path, *arguments: str, **more: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pytest", "-p", "book.grading.plugin", "--import-mode=importlib", *arguments]
    no_plugins = {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTHONPATH": str(ROOT), "PATH": "", "COLUMNS": "120"}
    return subprocess.run(command, cwd=root, env=no_plugins | more, capture_output=True, text=True, timeout=120)


def test_pytest_grades_the_homework_and_shows_the_sum(write: Write, tmp_path: Path) -> None:
    write(RIGHT_LAST + "\n\n" + RIGHT_DOUBLE.replace("2 * x", "x + 2"))
    run = run_pytest(tmp_path, "chapters", "--gradescope", "out/results.json")
    assert run.returncode == 1
    assert "8 of 15 points" in run.stdout and "test_three: you add two" in run.stdout
    assert "Likely mistake: you add two" in run.stdout and "--hint double" in run.stdout
    assert json.loads((tmp_path / "out" / "results.json").read_text())["score"] == 8
    assert Progress(tmp_path).grades("01_small")["last"].points == 8


def test_pytest_grades_solutions_and_other_files_without_recording(write: Write, tmp_path: Path) -> None:
    write("")
    (tmp_path / "handed_in.py").write_text(RIGHT_DOUBLE)
    solutions = run_pytest(tmp_path, "chapters", "--solutions")
    assert solutions.returncode == 0 and "15 of 15 points" in solutions.stdout
    other = run_pytest(tmp_path, "chapters", "--submission", "handed_in.py", "-k", "double")
    assert other.returncode == 0 and "1 of 15 points" in other.stdout
    assert not (tmp_path / ".progress").exists()


def test_progress_that_cannot_be_kept_costs_no_grade(write: Write, tmp_path: Path) -> None:
    write(RIGHT_DOUBLE)
    (tmp_path / ".progress").write_text("a file where the folder belongs")
    run = run_pytest(tmp_path, "chapters")
    assert "1 of 15 points" in run.stdout and "Your progress is not kept" in run.stdout
    asked = run_pytest(tmp_path, "chapters", "--hint", "Counter")
    assert "Your progress is not kept" in asked.stderr and "Traceback" not in asked.stdout + asked.stderr


@pytest.mark.parametrize(
    ("option", "path"), [("--gradescope", "."), ("--gradescope", "file/results.json"), ("--submission", ".")]
)
def test_files_are_checked_before_the_work(tmp_path: Path, option: str, path: str) -> None:
    (tmp_path / "file").touch()
    config = SimpleNamespace(stash={}, getoption={option: tmp_path / path}.get)
    with pytest.raises(pytest.UsageError, match=option):
        pytest_configure(config)


def test_no_terminal_is_too_narrow_or_too_plain(write: Write, tmp_path: Path) -> None:
    write(RIGHT_DOUBLE)
    run = run_pytest(tmp_path, "chapters", COLUMNS="40", PYTHONIOENCODING="ascii")
    assert "1 of 15 points" in run.stdout and "mistake" in run.stdout  # in the last column's head
    assert "UnicodeEncodeError" not in run.stdout + run.stderr


def test_pytest_shows_hints_and_grades_nothing(write: Write, tmp_path: Path) -> None:
    write("raise SystemExit\n")
    run = run_pytest(tmp_path, "chapters", "--hint", "Counter")
    assert run.returncode == 0 and "first hint" in run.stdout and "second hint" not in run.stdout
    assert "points" not in run.stdout and not (tmp_path / ".progress" / "grades.json").exists()
    unknown = run_pytest(tmp_path, "chapters", "--hint", "Conter")
    assert unknown.returncode != 0 and "double, quadruple, Counter, last" in unknown.stderr
