"""The live view shows the owner of each page, and the watched engine answers as the unwatched one does."""

import io
import sys

import pytest
from rich.console import Console
from rich.text import Text

from mini_engine.cli import main
from mini_engine.outputs import EngineOutput
from mini_engine.trace import EXAMPLE, Trace, TraceStep, Work
from mini_engine.watch import COLOURS, Watch
from tests.test_trace import NUM_PAGES, run  # noqa: F401 (a fixture)


def drawn(watch: Watch, width: int = 80, height: int = 30) -> str:
    console = Console(width=width, height=height, file=io.StringIO())
    with console.capture() as capture:
        console.print(watch.view(width, height))
    return capture.get()


def test_it_shows_owners_queues_and_preemptions_of_the_last_step(run):  # noqa: F811
    whole, _ = run
    trace = Trace()
    trace.num_pages, trace.page_size = whole.num_pages, whole.page_size
    watch = Watch(trace)
    assert "appear here" in drawn(watch)
    preempted = 0
    for step in whole.steps:
        trace.steps.append(step)
        text = drawn(watch)
        owners = {page: name for name, pages in step.pages.items() for page in pages}
        labels = [name if len(name) <= 2 else "4" for name in (owners.get(p, "··") for p in range(NUM_PAGES))]
        grid = text.splitlines()[1].strip("│ ").split()
        assert grid == labels
        preempted += len(step.preempted)
        left = len(step.pages) - len(step.ended)
        assert f"{left} running  ·  {len(step.waiting)} waiting  ·  {preempted} preempted" in text
        assert text.count("waiting") == 1 + len(step.waiting)


def test_it_shows_shared_pages_and_hits():
    trace = Trace()
    trace.num_pages, trace.page_size = 4, 4
    batch = [Work("A", "decode", 1, 8), Work("B", "chunk", 2, 6)]
    pages = {"A": [0, 1], "B": [0, 2]}
    step = TraceStep(0.0, 0.1, batch, pages, [], {"A": 7, "B": 6}, ["B"], [], [], [])
    trace.steps = [step]
    assert step.hits == {"B": 4} and step.num_pages_in_use == 3
    text = drawn(Watch(trace))
    assert text.splitlines()[1].strip("│ ").split() == ["×2", "A", "B", "··"]
    assert "4 tokens shared" in text and "begins with 4 tokens" in text and "4 tokens shared" in trace.summary()


def test_colours_columns_and_news_of_a_run_by_hand():
    """A ran and shares with B; B was preempted and came back; C has ended."""
    trace = Trace()
    trace.num_pages, trace.page_size = 8, 4
    first = TraceStep(
        0.0, 1.0, [Work("A", "prefill", 7, 7), Work("B", "prefill", 6, 6), Work("C", "prefill", 4, 4)],
        {"A": [0, 1], "B": [3, 4], "C": [5]}, [], {"A": 7, "B": 6, "C": 4}, ["A", "B", "C"], [], [],
        [EngineOutput("A", "one", 1, None), EngineOutput("C", "bye", 2, "stop")],
    )  # fmt: skip
    second = TraceStep(
        1.0, 1.0, [Work("A", "decode", 1, 8)], {"A": [0, 1]}, ["B"], {}, [], ["B"], [],
        [EngineOutput("A", " two", 1, None)],
    )  # fmt: skip
    third = TraceStep(
        2.0, 2.0, [Work("A", "decode", 1, 9), Work("B", "chunk", 2, 6)], {"A": [0, 1, 6], "B": [0, 2]}, [], {}, ["B"],
        [], [], [EngineOutput("A", " three", 1, None)],
    )  # fmt: skip
    trace.steps = [first, second]
    watch = Watch(trace)
    text = drawn(watch)
    assert "was preempted" in text and "2 of 8 in use" in text
    waiting = next(line for line in text.splitlines() if " waiting " in line and line.split()[0] == "B").split()
    assert waiting == ["B", "waiting", "1"]  # nothing cached, no pages, one preemption

    trace.steps.append(third)
    watch.view(80, 30)
    grid = watch.pages(80, 8).renderable
    assert isinstance(grid, Text)
    styles = {grid.plain[span.start : span.end]: str(span.style) for span in grid.spans}
    assert COLOURS[0] in styles["×2"] and COLOURS[0] in styles[" A"] and COLOURS[1] in styles[" B"]
    new = [grid.plain[span.start : span.end] for span in grid.spans if "underline" in str(span.style)]
    assert new == [" B", " A"]  # pages 2 and 6
    console = Console(width=80, file=io.StringIO())
    with console.capture() as capture:
        console.print(watch.requests(80, 9))
    rows = [line.split() for line in capture.get().splitlines()[1:]]
    assert rows == [
        ["A", "decode", "9", "3", "one", "two", "three"], ["B", "chunk", "of", "2", "6", "2", "1"],
        ["C", "done", "4", "bye"],
    ]  # fmt: skip
    assert watch.tokens_per_second() == 4 / 4


@pytest.mark.parametrize("width", [40, 80, 160])
@pytest.mark.parametrize("num_pages", [1, 100, 2000])
def test_it_fits_the_terminal(run, width, num_pages):  # noqa: F811
    whole, _ = run
    trace = Trace()
    trace.num_pages, trace.page_size, trace.steps = max(num_pages, NUM_PAGES), 2, whole.steps
    text = drawn(Watch(trace), width, 80)
    assert max(map(len, text.splitlines())) <= width
    cells = "".join(line for line in text.splitlines() if line.startswith("│"))
    in_use = whole.steps[-1].num_pages_in_use
    assert cells.count("·") in (trace.num_pages - in_use, 2 * (trace.num_pages - in_use))


@pytest.mark.parametrize("width", [4, 6, 7, 40, 80])
@pytest.mark.parametrize("height", [12, 24])
@pytest.mark.parametrize("num_pages", [20, 300, 6000])
def test_it_is_no_higher_than_the_terminal(run, width, height, num_pages):  # noqa: F811
    whole, _ = run
    trace = Trace()
    trace.num_pages, trace.page_size, trace.steps = max(num_pages, NUM_PAGES), 2, whole.steps
    console = Console(width=width, height=height, file=io.StringIO())
    with_table, without = (
        len(console.render_lines(Watch(trace).view(width, height, with_requests=shown), pad=False))
        for shown in (True, False)
    )
    if width >= 40:  # narrower ones break the lines of the status
        assert with_table <= height and without <= height


@pytest.fixture
def command(monkeypatch, capsys):
    def run_(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["mini-engine", *arguments])
        with pytest.raises(SystemExit) as exit_:
            main()
        captured = capsys.readouterr()
        return exit_.value.code or 0, captured.out, captured.err

    return run_


def test_generate_answers_under_watch_as_without(command):
    ask = ("generate", "What is the capital of France?", "Say hello.", "-n", "9", "--dtype", "float32")
    _, plain, _ = command(*ask)
    code, watched, _ = command(*ask, "--watch", "--num-pages", "4")
    assert code == 0
    answers = watched[watched.index("What is the capital") : watched.index("Say hello.")]
    assert "The capital of France is Paris." in answers and answers in plain
    assert "of 4 pages in use" in watched


def test_chat_under_watch_remembers_and_leaves_the_conversation(command, monkeypatch):
    lines = iter(["My name is Ada.", "What is my name?", ""])
    monkeypatch.setattr("rich.console.Console.input", lambda self, prompt: next(lines))
    code, out, _ = command("chat", "--watch", "--max-tokens", "24", "--temperature", "0", "--dtype", "float32")
    assert code == 0
    assert "you What is my name?" in out and "Ada" in out.rsplit("model", 1)[1]


def test_trace_writes_a_run_with_preemptions(command, tmp_path):
    code, out, _ = command("trace", "--out", str(tmp_path / "run.json"))
    assert code == 0 and "preemptions" in out
    trace = Trace.load(tmp_path / "run.json")
    assert any(step.preempted for step in trace.steps)
    assert sorted(name for step in trace.steps for name in step.ended) == [name for _, name, _, _ in EXAMPLE]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["trace", "--out", "no/such/folder/run.json"], "no folder"),
        (["trace", "--out", "run.json", "--num-pages", "3"], "there are 3"),
        (["trace", "--out", "run.json", "--page-size", "0"], "page_size is 0"),
        (["trace", "--out", "run.json", "--max-num-batched-tokens", "0"], "max_num_batched_tokens is 0"),
        (["generate", "hi", "--num-pages", "9"], "add --watch"),
        (["generate", "hi", "--watch", "--num-pages", "2"], "more pages"),
    ],
)
def test_mistakes_are_one_sentence_and_exit_code_2(command, arguments, message):
    code, _, err = command(*arguments)
    assert code == 2 and message in " ".join(err.split()) and "Traceback" not in err
