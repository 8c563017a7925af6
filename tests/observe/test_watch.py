"""The live view shows the owner of each page, and the watched engine answers like the engine itself."""

import io

import pytest
from rich.console import Console
from rich.text import Text

from mini_engine.llm import LLM
from mini_engine.observe.trace import Token, Trace, TraceStep, Work, tokens_per_second
from mini_engine.observe.watch import COLORS, Watch, watched_engine
from mini_engine.sampling_params import SamplingParams


def drawn(watch: Watch, width: int = 80, height: int = 30) -> str:
    console = Console(width=width, height=height, file=io.StringIO())
    with console.capture() as capture:
        console.print(watch.view(width, height))
    return capture.get()


def test_it_shows_owners_queues_and_preemptions_of_the_last_step(run):
    whole = run.trace
    trace = Trace()
    trace.num_pages, trace.page_size = whole.num_pages, whole.page_size
    watch = Watch(trace)
    assert "appear here" in drawn(watch)
    preempted = 0
    for step, queue in zip(whole.steps, whole.queues(), strict=True):
        trace.steps.append(step)
        text = drawn(watch)
        owners = {page: name for name, pages in step.pages.items() for page in pages}
        labels = [name if len(name) <= 2 else "4" for name in (owners.get(p, "··") for p in range(whole.num_pages))]
        grid = text.splitlines()[1].strip("│ ").split()
        assert grid == labels
        preempted += len(step.preempted)
        left = len(set(step.pages) - set(step.ended))
        assert f"{left} running  ·  {len(queue)} waiting  ·  {preempted} preempted" in text
        assert text.count("waiting") == 1 + len(queue)


def test_it_shows_shared_pages_and_hits():
    trace = Trace()
    trace.num_pages, trace.page_size = 4, 4
    batch = [Work("A", "decode", 1, 8), Work("B", "chunk", 2, 6)]
    pages = {"A": [0, 1], "B": [0, 2]}
    step = TraceStep(0.0, 0.1, batch, pages, {"A": 7, "B": 6}, ["B"], [], {}, [], {})
    trace.steps = [step]
    assert step.hits == {"B": 4} and step.num_pages_in_use == 3
    text = drawn(Watch(trace))
    assert text.splitlines()[1].strip("│ ").split() == ["×2", "A", "B", "··"]
    assert "4 tokens shared" in text and "begins with 4 tokens" in text and "4 tokens shared" in trace.summary()


def test_colors_columns_and_news_of_a_run_by_hand():
    """A runs and shares a page with B; B was preempted and admitted again; C has ended."""
    trace = Trace()
    trace.num_pages, trace.page_size = 8, 4
    first = TraceStep(
        0.0, 1.0, [Work("A", "prefill", 7, 7), Work("B", "prefill", 6, 6), Work("C", "prefill", 4, 4)],
        {"A": [0, 1], "B": [3, 4], "C": [5]}, {"A": 7, "B": 6, "C": 4}, ["A", "B", "C"], [], {},
        [Token("A", 1, "one"), Token("C", 2, "bye")], {"C": "stop"},
    )  # fmt: skip
    second = TraceStep(
        1.0, 1.0, [Work("A", "decode", 1, 8)], {"A": [0, 1]}, {}, [], ["B"], {}, [Token("A", 1, " two")], {}
    )
    third = TraceStep(
        2.0, 2.0, [Work("A", "decode", 1, 9), Work("B", "chunk", 2, 6)], {"A": [0, 1, 6], "B": [0, 2]}, {}, ["B"], [],
        {}, [Token("A", 1, " three")], {},
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
    assert COLORS[0] in styles["×2"] and COLORS[0] in styles[" A"] and COLORS[1] in styles[" B"]
    new = [grid.plain[span.start : span.end] for span in grid.spans if "underline" in str(span.style)]
    assert new == [" B", " A"]  # pages 2 and 6
    console = Console(width=80, file=io.StringIO())
    with console.capture() as capture:
        console.print(watch.requests(80))
    rows = [line.split() for line in capture.get().splitlines()[1:]]
    assert rows == [
        ["A", "decode", "9", "3", "one", "two", "three"], ["B", "chunk", "of", "2", "6", "2", "1"],
    ]  # fmt: skip
    assert tokens_per_second(trace.steps) == 4 / 4


def test_requests_that_have_ended_are_shown_once_more_and_those_that_left_are_not():
    trace = Trace()
    trace.num_pages, trace.page_size = 4, 4
    first = TraceStep(
        0.0, 1.0, [], {"A": [0], "B": [1]}, {"A": 1, "B": 1, "C": 1}, ["A"], [], {}, [Token("A", 1, "x")], {"A": "stop"}
    )
    last = TraceStep(1.0, 1.0, [], {}, {}, [], [], {"B": "abort", "C": "error"}, [], {})
    watch = Watch(trace)
    for step, shown, counts in (
        (first, ["A", "B", "C"], "1 running  ·  1 waiting"),
        (last, [], "0 running  ·  0 waiting"),
    ):
        trace.steps.append(step)
        text = drawn(watch)
        assert [line.split()[0] for line in text.splitlines() if line.split()[:1] in (["A"], ["B"], ["C"])] == shown
        assert counts in text and "has ended: its pages are free again" in text


def test_no_text_controls_the_terminal():
    trace = Trace()
    trace.num_pages, trace.page_size = 4, 4
    token = Token("\x1b", 1, "\x1b]0;title\x07 text\x9b2J")
    trace.steps = [
        TraceStep(0.0, 1.0, [Work("\x1b", "prefill", 1, 1)], {"\x1b": [0]}, {"\x1b": 1}, [], [], {}, [token], {})
    ]
    text = drawn(Watch(trace))
    assert not {"\x1b", "\x07", "\x9b"} & set(text)
    assert r"\x1b]0;title\x07 text\x9b2J" in text


@pytest.mark.parametrize("width", [40, 80, 160])
@pytest.mark.parametrize("num_pages", [1, 100, 2000])
def test_it_fits_the_terminal(run, width, num_pages):
    whole = run.trace
    trace = Trace()
    trace.num_pages, trace.page_size, trace.steps = max(num_pages, whole.num_pages), 2, whole.steps
    text = drawn(Watch(trace), width, 200)
    assert max(map(len, text.splitlines())) <= width
    cells = "".join(line for line in text.splitlines() if line.startswith("│"))
    in_use = whole.steps[-1].num_pages_in_use
    assert cells.count("·") in (trace.num_pages - in_use, 2 * (trace.num_pages - in_use))


@pytest.mark.parametrize("width", [4, 7, 40, 80])
@pytest.mark.parametrize("height", [6, 12, 24])
@pytest.mark.parametrize("num_pages", [20, 300, 6000])
def test_the_pages_take_half_of_the_terminal(run, width, height, num_pages):
    whole = run.trace
    trace = Trace()
    trace.num_pages, trace.page_size, trace.steps = max(num_pages, whole.num_pages), 2, whole.steps
    watch = Watch(trace)
    watch.view(width, height)
    console = Console(width=width, height=height, file=io.StringIO())
    lines = console.render_lines(watch.pages(width, height // 2), pad=False)
    if width >= 40:  # in narrower ones the number of pages that are left out takes several lines
        assert len(lines) <= height // 2 + 3  # with the frame, and what is left out


@pytest.fixture(scope="module")
def llm():
    return LLM(dtype="float32", device="cpu", num_pages=8, enable_prefix_caching=False)


def test_a_watched_engine_answers_like_the_engine_itself(llm):
    questions = ("What is the capital of France?", "Say hello.")
    prompts = [llm.chat_prompt([{"role": "user", "content": question}]) for question in questions]
    params = SamplingParams(temperature=0.0, max_tokens=9, stop=" is")
    engine, watch = watched_engine(llm, [40, 40], {"num_pages": 4, "enable_prefix_caching": True})
    outputs = engine.generate(prompts, params)
    assert [output.text for output in outputs] == [output.text for output in llm.generate(prompts, params)]
    assert (watch.trace.num_pages, watch.trace.page_size) == (4, 16)
    assert "of 4 in use, 16 tokens each" in drawn(watch)


def test_the_pool_has_room_for_all_requests(llm):
    engine, _ = watched_engine(llm, [16, 17, 10**9], {})
    longest = llm.config.max_model_len // 16
    assert engine.engine.page_table.num_pages == (1 + 1) + (2 + 1) + (longest + 1)
    assert watched_engine(llm, [16], {"page_size": 4})[0].engine.page_table.num_pages == 4 + 1
