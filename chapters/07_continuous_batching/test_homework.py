"""Grader of chapter 07. Its oracles allocate tokens and pages one at a time; its cache records every key."""

import copy
import random
from collections import Counter, OrderedDict, deque
from collections.abc import Sequence as ListLike
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch

from book.grading import Exercise, Homework, assert_equal, check, require
from book.grading.assertions import CheckFailed
from book.guarded_table import GuardedPageTable
from mini_engine.config import EngineConfig
from mini_engine.engine import LLMEngine
from mini_engine.kv_cache.page_table import PageTable
from mini_engine.kv_cache.prefix_sharing import ROOT
from mini_engine.kv_cache.prefix_tree import PrefixTree
from mini_engine.models.base import CausalLM
from mini_engine.models.config import ModelConfig
from mini_engine.models.registry import build_model
from mini_engine.parts import Parts
from mini_engine.request import Request, Running
from mini_engine.sampling_params import SamplingParams
from mini_engine.scheduler import Schedule, Scheduler

EXERCISES = [
    Exercise(
        "share_budget",
        points=3,
        minutes=15,
        difficulty=2,
        part="share_budget",
        hints=(
            "Which requests are served before all others? Subtract what they take from the budget before you look at "
            "the first prompt.",
            "A prompt gets what the prompts before it leave, but at most its own length and at least 0. What the "
            "prompts before it take is a cumulative sum: np.cumsum, minus the prompt itself.",
            "decodes = pending == 1; prompts = np.where(decodes, 0, pending); left = budget - decodes.sum(); each "
            "prompt gets np.clip(left - (np.cumsum(prompts) - prompts), 0, prompts), each decode 1.",
        ),
    ),
    Exercise(
        "admit",
        points=1,
        minutes=5,
        difficulty=1,
        part="admit",
        hints=(
            "Rows, pages and tokens of the budget can run short. Which of them may be granted in part?",
            "There must be pages for all tokens of the request. One token of the budget is enough: prompts are "
            "computed in chunks.",
            "0 if free_rows < 1 or num_pages > free_pages, else min(num_tokens, budget), which must not be negative.",
        ),
    ),
    Exercise(
        "preempt",
        points=2,
        minutes=10,
        difficulty=1,
        part="preempt",
        hints=(
            "Each of the three arguments has to change. Which row belongs to the newest request? The number of a row "
            "says nothing about age.",
            "running.order[-1] is the row. running.leave(row) returns the request, and page_table.release(row) frees "
            "the row and decrements the refcounts of its pages. The request is older than all that wait.",
            "row = int(running.order[-1]); request = running.leave(row); page_table.release(row); waiting[request] = "
            "None; waiting.move_to_end(request, last=False); return request.",
        ),
    ),
    Exercise(
        "schedule",
        points=8,
        minutes=60,
        difficulty=3,
        part="schedule",
        hints=(
            "First write the step for a pool that is never too small: get the pending tokens, share the budget, "
            "reserve, admit, sort. Then consider what changes when `reserve` returns False and a request is preempted.",
            "A preemption changes the pending tokens and their shares, so the first half is a loop that ends "
            "when `reserve` succeeds. Inside the loop, check has_tokens_in_flight before you preempt. The second half "
            "admits only if nothing was preempted.",
            "while True: rows, pending = scheduler.pending(); num_new = scheduler.parts.share_budget(pending, "
            "scheduler.budget); keep the rows with num_new > 0; if scheduler.reserve(rows, num_new): break; if "
            "scheduler.running.has_tokens_in_flight: return None; preempted.append(scheduler.preempt()). Then, if "
            "nothing was preempted, scheduler.admit(scheduler.budget - num_new.sum(), copies); append the rows of "
            "admitted requests (scheduler.running.row_of) and their tokens; make both int64, since appending an "
            "empty list makes floats. Sort with np.argsort(num_new > 1, kind='stable').",
        ),
    ),
    Exercise(
        "match_prefix",
        points=3,
        minutes=10,
        difficulty=1,
        part="match_prefix",
        hints=(
            "Walk down the tree: where do you start, and what is the parent of the second page?",
            "For each full page of the prompt, look up its bytes among the children of the previous page, and stop at "
            "the first page that is missing. `children` may have no entry for a parent.",
            "parent = ROOT; for end in range(page_size, len(token_ids) + 1, page_size): page = children.get(parent, "
            "{}).get(token_ids[end - page_size : end].tobytes()); stop if it is None; append it; parent = page.",
        ),
    ),
    Exercise(
        "copy_on_write",
        points=3,
        minutes=12,
        difficulty=1,
        part="copy_on_write",
        hints=(
            "Into which pages of the row do the tokens first to end - 1 fall? Token `end` is not written. Of these "
            "pages only those with more than one owner matter.",
            "The pages that are written have the indices first // page_size to (end - 1) // page_size. table.replace "
            "takes such an index, updates the refcounts and returns the pair.",
            "for index in range(first // table.page_size, (end - 1) // table.page_size + 1): if "
            "table.refcounts[table.pages(row)[index]] > 1: collect table.replace(row, index).",
        ),
    ),
    Exercise(
        "pages_to_evict",
        points=2,
        minutes=12,
        difficulty=1,
        part="pages_to_evict",
        hints=(
            "Pages of 4, a window of 4, the next query at position 7: what is the oldest key that it sees, and which "
            "page holds the last key that it does not see?",
            "The oldest visible key is at num_computed - window + 1, and the keys of the row begin at num_evicted. Of "
            "the keys in between only whole pages can be returned.",
            "np.maximum(num_computed - window + 1 - num_evicted, 0) // page_size.",
        ),
    ),
    Exercise(
        "reorder_beams",
        points=4,
        minutes=30,
        difficulty=3,
        challenge=True,
        hints=(
            "Suppose two beams swap: parents = [1, 0]. For a moment both rows must own the pages of both beams. Which "
            "method appends pages to a row, and which removes pages from its front?",
            "First append the parent's pages to every row. Then remove the old pages from the front of each row.",
            "before = [table.pages(row).copy() for row in rows]; for each row and parent: table.share(row, "
            "before[parent]); then for each row: table.drop_front(row, the number of pages that it had before).",
        ),
    ),
]


# What the checks share ----------------------------------------------------------------------------------------------


def make_request(number: int, prompt: ListLike[int], max_tokens: int = 8, ends: tuple[int, ...] = ()) -> Request:
    params = SamplingParams(max_tokens=max_tokens)
    return Request(str(number), list(prompt), params, 0, len(prompt) + max_tokens, ends, number)


def table_of(
    rows: ListLike[ListLike[int]],
    num_pages: int,
    page_size: int = 4,
    free_rows: int = 1,
    kind: type[PageTable] = PageTable,
) -> PageTable:
    """A table in which row b owns the pages rows[b]; pages in several rows are shared. Stale entries follow them."""
    table = kind(num_pages, page_size, len(rows) + 1 + max(0, free_rows - 1))
    for _ in rows:
        table.allocate()
    everything = table.allocate()
    table.take(np.array([everything]), np.array([num_pages]))
    for row, pages in enumerate(rows):
        others = [page for page in range(num_pages) if page not in pages]
        table.share(row, np.array([*pages, *others], dtype=np.int32))
        table.truncate(row, len(pages))
    table.release(everything)
    if free_rows == 0:
        table.allocate()
    return table


def contents(table: PageTable, num_rows: int) -> list[list[int]]:
    return [table.pages(row).tolist() for row in range(num_rows)]


def assert_pages(table: PageTable, rows: ListLike[int], when: str = "", tree: PrefixTree | None = None) -> None:
    """Every page is free, or has as many owners (rows, and the prefix tree) as its refcount says."""
    owners = Counter(page for row in rows for page in table.pages(row).tolist())
    cached = set() if tree is None else set(tree.pages.tolist())
    for page in range(table.num_pages):
        in_tree = ", and in the prefix tree" if page in cached else ""
        assert table.refcounts[page] == owners[page] + (page in cached), (
            f"{when}page {page} is in {owners[page]} row{'s' * (owners[page] != 1)}{in_tree}, but its refcount is "
            f"{table.refcounts[page]}"
        )
    free = table.num_pages - len(owners.keys() | cached)
    assert table.num_free_pages == free, (
        f"{when}{free} pages have no owner, but the table counts {table.num_free_pages} free pages"
    )


def free_pages(table: PageTable) -> list[int]:
    """The pages that the table would give away, in increasing order. Asked of a copy."""
    copied = copy.deepcopy(table)
    row = copied.allocate() if copied.num_free_rows else 0
    count = int(copied.counts[row])
    copied.take(np.array([row]), np.array([copied.num_free_pages]))
    return sorted(copied.pages(row)[count:].tolist())


@dataclass
class Run:
    """What happened while some requests were served.

    Attributes:
        steps: how many steps there were.
        preemptions: how often a request lost its pages.
        shared: tokens that were not computed, since another row's pages had them.
        copied: pages copied.
        most_pages: most pages that any request held.
        drained: how often tokens were collected before the next step could be scheduled.
    """

    steps: int = 0
    preemptions: int = 0
    shared: int = 0
    copied: int = 0
    most_pages: int = 0
    drained: int = 0


Arrival = tuple[int, list[int], int]  # the step before which the request arrives, its prompt, its number of tokens
ENDS = (0, 12, 24, 36, 48)  # tokens at which an output ends


def token_after(stamps: ListLike[int]) -> int:
    """A model made of arithmetic: its next token depends on every key that it attends to, in order."""
    state = 7
    for stamp in stamps:
        state = (state * 31 + stamp + 1) % 1_000_003
    return state % 50


def stamps_of(tokens: ListLike[int]) -> list[int]:
    """Numbers in place of keys: the key of a token is a function of that token and all tokens before it."""
    state, stamps = 1, []
    for token in tokens:
        state = (state * 131 + token + 1) % 1_000_003
        stamps.append(state)
    return stamps


def alone(prompt: ListLike[int], num_tokens: int, window: int | None, ends: tuple[int, ...]) -> list[int]:
    """The output of a request that is served by itself."""
    tokens = list(prompt)
    for _ in range(num_tokens):
        stamps = stamps_of(tokens)
        tokens.append(token_after(stamps if window is None else stamps[-window:]))
        if tokens[-1] in ends:
            break
    return tokens[len(prompt) :]


@dataclass
class Server:
    """An engine around the scheduler, with a cache of stamps and a model made of arithmetic.

    Everything that a request attends to is compared with what it wrote there, and the pages are counted after every
    step. Sampled tokens reach the host when a step is collected, up to `depth` steps later.
    """

    scheduler: Scheduler
    requests: list[Request]
    depth: int
    window: int | None
    run: Run = field(default_factory=Run)

    def __post_init__(self) -> None:
        table = self.scheduler.page_table
        self.memory = [0] * (table.num_pages * table.page_size)
        self.texts = [list(request.prompt_token_ids) for request in self.requests]  # tokens on the device included
        self.in_flight: deque[tuple[np.ndarray, np.ndarray, np.ndarray]] = deque()

    @property
    def when(self) -> str:
        return f"step {self.run.steps}: "

    def step(self, unfinished: list[Request]) -> None:
        running = self.scheduler.running
        schedule = self.scheduler.schedule()
        if schedule is None:
            assert running.has_tokens_in_flight, (
                f"{self.when}no step is scheduled (None), although the host knows all sampled tokens"
            )
            self.run.drained += 1
            while self.in_flight:
                self.collect()
            unfinished = [request for request in unfinished if request.finish_reason is None]
            schedule = self.scheduler.schedule()
            assert schedule is not None, f"{self.when}no step is scheduled (None), although all tokens were collected"
        work = dict(zip(schedule.rows.tolist(), schedule.num_new.tolist(), strict=True))
        self.check(schedule, work, unfinished)
        self.copy_and_write(schedule, work)
        self.sample(work)
        while len(self.in_flight) > (self.depth if work else 0):
            self.collect()
        self.run.steps += 1

    def check(self, schedule: Schedule, work: dict[int, int], unfinished: list[Request]) -> None:
        """Budget, order and progress."""
        scheduler, running = self.scheduler, self.scheduler.running
        total = sum(work.values())
        assert total <= scheduler.budget, (
            f"{self.when}the step has {total} tokens, but the budget is {scheduler.budget}"
        )
        for row in running.order.tolist():
            is_last = running.num_scheduled[row] >= running.max_len[row]
            pending = int(running.num_scheduled[row] - running.num_computed[row])
            name = running.requests[row].request_id
            assert row not in work or work[row] <= pending, (
                f"{self.when}request {name} has {pending} tokens to compute, but computes {work[row]}"
            )
            assert pending != 1 or is_last or row in work, f"{self.when}request {name} decodes, but gets no token"
        for request in schedule.preempted:
            text = self.texts[request.arrival]
            assert request.token_ids == text, (
                f"{self.when}request {request.request_id} is preempted while its last token is on the device"
            )
        finishing = any(running.num_scheduled[row] >= running.max_len[row] for row in running.order.tolist())
        if unfinished and not finishing:
            row = running.row_of(unfinished[0])
            assert row in work, f"{self.when}request {unfinished[0].request_id} is the oldest, but gets no token"
        self.run.preemptions += len(schedule.preempted)
        self.run.shared += schedule.num_shared
        self.run.copied += len(schedule.copies)

    def slot(self, row: int, position: int) -> int:
        running, table = self.scheduler.running, self.scheduler.page_table
        index = position - int(running.num_evicted[row])
        pages = table.pages(row)
        assert 0 <= index // table.page_size < len(pages), (
            f"{self.when}request {running.requests[row].request_id} has no page for its token at position {position}"
        )
        return int(pages[index // table.page_size]) * table.page_size + index % table.page_size

    def copy_and_write(self, schedule: Schedule, work: dict[int, int]) -> None:
        running, table = self.scheduler.running, self.scheduler.page_table
        size = table.page_size
        for old, new in schedule.copies:
            self.memory[new * size : (new + 1) * size] = self.memory[old * size : (old + 1) * size]
        for row, num_new in work.items():
            stamps = stamps_of(self.texts[running.requests[row].arrival])
            start = int(running.num_computed[row])
            for position in range(start, start + num_new):
                self.memory[self.slot(row, position)] = stamps[position]
            running.num_computed[row] += num_new
            self.run.most_pages = max(self.run.most_pages, len(table.pages(row)))

    def sample(self, work: dict[int, int]) -> None:
        running, sampled = self.scheduler.running, []
        for row, num_new in work.items():
            request, end = running.requests[row], int(running.num_computed[row])
            text = self.texts[request.arrival]
            stamps, seen = stamps_of(text), []
            # Every query of the step must see its keys; the first sees furthest back.
            first = 0 if self.window is None else max(0, end - num_new - self.window + 1)
            for position in range(first, end):
                seen.append(self.memory[self.slot(row, position)])
                assert seen[-1] == stamps[position], (
                    f"{self.when}request {request.request_id} attends to position {position}, but the key there is "
                    "another request's"
                )
            if end == running.num_scheduled[row]:
                text.append(token_after(seen if self.window is None else seen[-self.window :]))
                running.num_scheduled[row] += 1
                sampled.append((row, int(running.admission[row]), text[-1]))
        rows, admissions, tokens = np.array(sampled, dtype=np.int64).reshape(-1, 3).T
        self.in_flight.append((rows, admissions, tokens))

    def collect(self) -> None:
        running = self.scheduler.running
        rows, admissions, tokens = self.in_flight.popleft()
        live = running.admission[rows] == admissions
        for request in running.requests_of(running.append(rows[live], tokens[live])):
            request.finish_reason = "length"
            self.scheduler.remove(request)


def serve(
    arrivals: ListLike[Arrival],
    parts: Parts,
    *,
    num_pages: int,
    page_size: int,
    max_batch_size: int,
    budget: int,
    window: int | None = None,
    prefix_sharing: bool = False,
    depth: int = 0,
    ends: tuple[int, ...] = (),
) -> Run:
    """Serve requests with the engine's scheduler, and compare each output with that of the request alone."""
    table = PageTable(num_pages, page_size, max_batch_size)
    scheduler = Scheduler(
        table,
        max_model_len=max(len(prompt) + num_tokens for _, prompt, num_tokens in arrivals),
        max_num_batched_tokens=budget,
        window=window,
        prefix_sharing=prefix_sharing,
        parts=parts,
    )
    requests = [make_request(i, prompt, num_tokens, ends) for i, (_, prompt, num_tokens) in enumerate(arrivals)]
    server = Server(scheduler, requests, depth, window)
    limit = max(at for at, *_ in arrivals) + sum(2 * request.max_len + 2 for request in requests) + 10
    while True:
        for request, (at, *_) in zip(requests, arrivals, strict=True):
            if at == server.run.steps:
                scheduler.add(request)
        unfinished = [
            request
            for request, (at, *_) in zip(requests, arrivals, strict=True)
            if at <= server.run.steps and request.finish_reason is None
        ]
        if not unfinished and all(at <= server.run.steps for at, *_ in arrivals):
            break
        assert server.run.steps < limit, (
            f"after {server.run.steps} steps {len(unfinished)} requests have not ended: no request makes progress"
        )
        server.step(unfinished)
        assert_pages(table, scheduler.running.order.tolist(), server.when, scheduler.prefix_tree)
    if scheduler.prefix_tree is not None:
        scheduler.prefix_tree.evict(num_pages)
    assert table.num_free_pages == num_pages, (
        f"{num_pages - table.num_free_pages} pages are lost after all requests have ended"
    )
    assert table.num_free_rows == max_batch_size, "rows of the page table are lost after all requests have ended"
    for request, (_, prompt, num_tokens) in zip(requests, arrivals, strict=True):
        want = alone(prompt, num_tokens, window, ends)
        assert_equal(request.output_token_ids, want, name=f"the output of request {request.request_id}")
    return server.run


def random_arrivals(rng: random.Random, most_tokens: int, num_requests: int = 6, common: int = 0) -> list[Arrival]:
    """Requests whose prompts may begin alike; none grows beyond `most_tokens` tokens."""
    beginning = [rng.randrange(50) for _ in range(common)]
    arrivals = []
    for _ in range(num_requests):
        num_tokens = rng.randint(1, max(1, most_tokens // 2))
        prompt = [rng.randrange(50) for _ in range(rng.randint(1, most_tokens - num_tokens))]
        prompt = (beginning[: rng.randint(0, common)] + prompt)[: most_tokens - num_tokens]
        arrivals.append((rng.randint(0, 8), prompt, num_tokens))
    return sorted(arrivals, key=lambda arrival: arrival[0])


def serve_at_random(
    parts: Parts, *, window: int | None = None, prefix_sharing: bool = False, rounds: int = 20, depth: int = 0
) -> Run:
    """Many small workloads over pools of all kinds; adds up what happened."""
    total = Run()
    for seed in range(rounds):
        rng = random.Random(seed)
        page_size, batch = rng.choice([1, 2, 3, 4]), rng.randint(2, 4)
        num_pages = rng.randint(5, 10)
        run = serve(
            random_arrivals(rng, min(24, num_pages * page_size), common=9 if prefix_sharing else 0),
            parts,
            num_pages=num_pages,
            page_size=page_size,
            max_batch_size=batch,
            budget=batch + rng.randint(0, 8),
            window=window,
            prefix_sharing=prefix_sharing,
            depth=depth,
            ends=ENDS if seed % 2 else (),
        )
        total.preemptions += run.preemptions
        total.shared += run.shared
        total.copied += run.copied
        total.steps += run.steps
        total.drained += run.drained
    return total


def tiny_model() -> CausalLM:
    """A Llama of two layers in float64: the smallest in which a wrong key changes the tokens."""
    shape = {"vocab_size": 40, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 256}
    config = ModelConfig.from_hf({"architectures": ["LlamaForCausalLM"], **shape, **heads})
    model = build_model(config, Parts(), torch.float64, "cpu")
    torch.manual_seed(5)
    with torch.no_grad():
        for weight in model.parameters():
            weight.normal_(std=0.4)
    return model


def assert_tokens_of_a_model(
    parts: Parts,
    prompts: ListLike[list[int]],
    *,
    num_tokens: int = 12,
    sliding_window: int | None = None,
    **options: Any,
) -> LLMEngine:
    """A model generates what it generates for one request at a time, in a pool that is always large enough."""
    model = tiny_model()
    params = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)

    def outputs(
        parts: Parts, prompts: ListLike[list[int]], options: dict[str, Any]
    ) -> tuple[LLMEngine, list[list[int]]]:
        defaults = {"attn_backend": "torch", "enable_prefix_caching": False, "sliding_window": sliding_window}
        config = EngineConfig.of(defaults | options)
        engine = LLMEngine(model, config, parts=parts)
        requests = [engine.add_request(str(i), prompt, params) for i, prompt in enumerate(prompts)]
        for _ in range(2000):
            if not engine.has_unfinished:
                break
            engine.step()
        assert not engine.has_unfinished, "after 2,000 steps of the engine some requests have not ended"
        for request in requests:
            if request.error:
                raise request.error
        return engine, [request.output_token_ids for request in requests]

    roomy = {"num_pages": 1, "page_size": 256, "max_batch_size": 1}
    want = [outputs(Parts(), [prompt], roomy)[1][0] for prompt in prompts]
    defaults = {"page_size": 4, "max_batch_size": 4, "max_num_batched_tokens": 16}
    engine, got = outputs(parts, prompts, defaults | options)
    for i in range(len(prompts)):
        assert_equal(got[i], want[i], name=f"the output of the model for request {i}")
    assert_pages(engine.page_table, [], "after the last request ", engine.scheduler.prefix_tree)
    return engine


def prompts_of(*lengths: int, common: int = 0) -> list[list[int]]:
    rng = random.Random(sum(lengths))
    beginning = [rng.randrange(40) for _ in range(common)]
    return [beginning + [rng.randrange(40) for _ in range(length)] for length in lengths]


# share_budget -------------------------------------------------------------------------------------------------------


def divide(pending: ListLike[int], budget: int) -> list[int]:
    """One token at a time: to the first decode that has none, else to the first prompt that can use one."""
    shares = [0] * len(pending)
    order = sorted(range(len(pending)), key=lambda i: pending[i] > 1)
    for _ in range(budget):
        i = next((i for i in order if shares[i] < pending[i]), None)
        if i is not None:
            shares[i] += 1
    return shares


def assert_shares(hw: Homework, pending: list[int], budget: int, expected: list[int], first: int | None = None) -> None:
    """Compare all shares, or the first few."""
    given = np.array(pending, dtype=np.int64)
    got = hw.share_budget(given, budget)
    call = f"share_budget(np.array({pending}), budget={budget})"
    require(got is not None, f"{call} returns None: is a `return` missing?")
    require(isinstance(got, np.ndarray), f"{call} returns a {type(got).__name__}; it should be a numpy array")
    require(np.issubdtype(got.dtype, np.integer), f"{call} returns {got.dtype} numbers; they should be integers")
    name = call if first is None else f"{call}[:{first}]"
    assert_equal(got.tolist()[:first], expected, name=name)
    assert_equal(given.tolist(), pending, name=f"`pending` after {call}", mistake="`pending` belongs to the caller")


@check("share_budget", mistake="a request with one pending token decodes: it gets that token, and never more")
def test_decodes_get_a_token_each(hw: Homework) -> None:
    assert_shares(hw, [1], 8, [1])
    assert_shares(hw, [1, 1, 1], 3, [1, 1, 1])


@check("share_budget", mistake="a prompt that fits into the budget is computed whole")
def test_a_prompt_alone(hw: Homework) -> None:
    assert_shares(hw, [5], 8, [5])
    assert_shares(hw, [8], 8, [8])


@check(
    "share_budget", mistake="a prompt longer than the budget gets the budget: a chunk, not nothing and not all of it"
)
def test_a_prompt_is_cut(hw: Homework) -> None:
    assert_shares(hw, [20], 8, [8])


@check("share_budget", mistake="prompts and decodes share the step, and the decodes' tokens count against the budget")
def test_a_mixed_step(hw: Homework) -> None:
    assert_shares(hw, [1, 1, 20], 8, [1, 1, 6])
    assert_shares(hw, [1, 3], 8, [1, 3])


@check(
    "share_budget", mistake="a decode gets its token wherever it is: set it aside before older prompts take the budget"
)
def test_a_decode_behind_a_prompt(hw: Homework) -> None:
    assert_shares(hw, [20, 1, 1], 8, [6, 1, 1])
    assert_shares(hw, [1, 20, 1], 8, [1, 6, 1])


@check("share_budget", mistake="the older prompt is completed before the next one gets a token")
def test_prompts_in_order_of_age(hw: Homework) -> None:
    assert_shares(hw, [5, 7], 10, [5, 5])
    assert_shares(hw, [9, 3], 10, [9, 1])
    assert_shares(hw, [5, 7, 4], 10, [5, 5], first=2)  # the third would fit whole, and is newer
    assert_shares(hw, [5, 1, 7, 1], 8, [5, 1, 1, 1])


@check("share_budget", mistake="a prompt for which nothing is left gets 0, not one token and not a negative number")
def test_nothing_left(hw: Homework) -> None:
    assert_shares(hw, [5, 7, 4], 10, [5, 5, 0])
    assert_shares(hw, [1, 9, 1], 3, [1, 1, 1])
    assert_shares(hw, [4, 9, 9], 4, [4, 0, 0])


@check("share_budget", mistake="without requests the result is an empty array")
def test_no_requests(hw: Homework) -> None:
    assert_shares(hw, [], 4, [])


@check("share_budget", mistake="a mixture that the earlier checks did not try goes wrong")
def test_random_mixtures(hw: Homework) -> None:
    rng = random.Random(1)
    for _ in range(300):
        pending = [rng.choice([1, 1, rng.randint(2, 30)]) for _ in range(rng.randint(1, 8))]
        budget = len(pending) + rng.randint(0, 40)
        assert_shares(hw, pending, budget, divide(pending, budget))


@check("share_budget", mistake="in the engine's scheduler, with requests that arrive and finish, a step goes wrong")
def test_share_budget_in_the_scheduler(hw: Homework) -> None:
    serve_at_random(replace(Parts(), share_budget=hw.share_budget))


@check("share_budget", mistake="with your shares a model generates other tokens than for each request alone")
def test_share_budget_with_a_model(hw: Homework) -> None:
    parts = replace(Parts(), share_budget=hw.share_budget)
    prompts = prompts_of(21, 3, 9, 5, 30)
    engine = assert_tokens_of_a_model(parts, prompts, num_pages=40, max_num_batched_tokens=8)
    assert engine.metrics.steps > 20, "too few steps"


# admit --------------------------------------------------------------------------------------------------------------


def assert_admits(hw: Homework, tokens: int, pages: int, left: tuple[int, int, int], expected: int) -> None:
    """`left` is the budget, the free pages and the free rows."""
    budget, free_pages, free_rows = left
    got = hw.admit(tokens, pages, budget=budget, free_pages=free_pages, free_rows=free_rows)
    call = f"admit({tokens}, {pages}, {budget=}, {free_pages=}, {free_rows=})"
    assert not isinstance(got, bool), f"{call} is {got}; it should be a number of tokens, {expected}"
    assert_equal(got, expected, name=call)


@check("admit", mistake="if there is room for the whole request, return its number of tokens")
def test_room_for_all_of_it(hw: Homework) -> None:
    assert_admits(hw, 3, 1, (100, 100, 100), 3)
    assert_admits(hw, 100, 25, (100, 25, 1), 100)


@check("admit", mistake="a request needs a row of the page table")
def test_no_row_is_free(hw: Homework) -> None:
    assert_admits(hw, 3, 1, (100, 100, 0), 0)


@check("admit", mistake="a request is admitted with all its pages or not at all, and it may take the last page")
def test_pages_run_out(hw: Homework) -> None:
    assert_admits(hw, 9, 3, (100, 2, 4), 0)
    assert_admits(hw, 9, 3, (100, 3, 4), 9)
    assert_admits(hw, 9, 3, (100, -1, 4), 0)


@check(
    "admit", mistake="a request that needs no page is admitted even if none is free, but not if free_pages is negative"
)
def test_no_page_is_needed(hw: Homework) -> None:
    assert_admits(hw, 2, 0, (100, 0, 4), 2)
    assert_admits(hw, 2, 0, (100, -1, 4), 0)


@check("admit", mistake="a prompt longer than the budget is admitted all the same: it starts with a chunk")
def test_a_long_prompt_begins_with_a_chunk(hw: Homework) -> None:
    assert_admits(hw, 20, 5, (8, 10, 4), 8)
    assert_admits(hw, 20, 5, (1, 10, 4), 1)


@check("admit", mistake="if no token of the budget is left, the request has to wait: 0")
def test_no_token_is_left(hw: Homework) -> None:
    assert_admits(hw, 3, 1, (0, 10, 4), 0)


@check("admit", mistake="a request that the earlier checks did not try goes wrong")
def test_random_requests(hw: Homework) -> None:
    rng = random.Random(2)
    for _ in range(300):
        tokens, pages = rng.randint(1, 12), rng.randint(0, 5)
        budget, free_pages, free_rows = rng.randint(0, 16), rng.randint(-2, 7), rng.randint(0, 2)
        # One token at a time, as long as everything is there.
        want = 0
        while pages <= free_pages and free_rows > 0 and want < budget and want < tokens:
            want += 1
        assert_admits(hw, tokens, pages, (budget, free_pages, free_rows), want)


@check("admit", mistake="in the engine's scheduler, with requests that arrive and finish, a step goes wrong")
def test_admit_in_the_scheduler(hw: Homework) -> None:
    serve_at_random(replace(Parts(), admit=hw.admit))


# preempt ------------------------------------------------------------------------------------------------------------


@dataclass
class Station:
    """Three running requests whose ages do not follow their rows, one that waits, and a pool that is full."""

    running: Running
    waiting: "OrderedDict[Request, None]"
    table: PageTable
    requests: list[Request]

    @classmethod
    def full(cls, pages: ListLike[ListLike[int]] = ((3, 1, 6), (5, 2), (0, 4)), oldest_first: str = "201") -> "Station":
        """The requests in rows 0, 1, 2 own `pages`; `oldest_first` are the rows by age."""
        table, running = table_of(pages, num_pages=7), Running(4, 99)
        requests = []
        for number, row in enumerate(map(int, oldest_first)):
            request = make_request(number, range(4 * len(pages[row]) - 2))
            running.enter(row, request)
            running.num_computed[row] = running.num_scheduled[row] = len(request.token_ids) + 2
            running.append(np.array([row]), np.array([41]))
            running.append(np.array([row]), np.array([42]))
            running.num_computed[row] -= 1  # the last token is not computed yet
            requests.append(request)
        return cls(running, OrderedDict.fromkeys([make_request(9, [9, 9])]), table, requests)

    def preempt(self, hw: Homework) -> Request:
        return hw.preempt(self.running, self.waiting, self.table)

    @property
    def rows(self) -> list[int]:
        return self.running.order.tolist()


@check("preempt", mistake="the newest request has the last row of running.order: return it, and let it leave its row")
def test_the_newest_goes(hw: Homework) -> None:
    station = Station.full()
    got = station.preempt(hw)
    require(got is not None, "preempt returns None: is a `return` missing?")
    assert got is station.requests[-1], (
        "the request returned is not the newest: rows are used again, so their numbers say nothing about age"
    )
    assert_equal(station.rows, [2, 0], name="the array running.order, which was [2, 0, 1],")
    assert station.running.row_of(got) is None, "the request still has a row in `running`"


@check("preempt", mistake="the row and its pages return to the page table: page_table.release")
def test_its_pages_are_free(hw: Homework) -> None:
    station = Station.full()
    free_rows = station.table.num_free_rows
    station.preempt(hw)
    assert_equal(free_pages(station.table), [2, 5], name="the list of free pages")
    assert_equal(station.table.num_free_rows, free_rows + 1, name="the number of free rows")
    assert_equal(contents(station.table, 3), [[3, 1, 6], [], [0, 4]], name="the list of all rows' pages")


@check("preempt", mistake="a page that another row shares is still in use: page_table.release decrements its refcount")
def test_shared_pages_stay(hw: Homework) -> None:
    station = Station.full([(3, 1, 6), (0, 4, 2), (0, 4)])
    station.preempt(hw)
    assert_pages(station.table, [0, 2])
    assert_equal(free_pages(station.table), [2, 5], name="the list of free pages")


@check("preempt", mistake="its output has been sent to the user, so token_ids keeps every token")
def test_it_keeps_its_tokens(hw: Homework) -> None:
    station = Station.full()
    request = station.requests[-1]
    prompt = list(request.prompt_token_ids)
    station.preempt(hw)
    assert_equal(request.token_ids, [*prompt, 41, 42], name="token_ids")
    assert_equal(request.output_token_ids, [41, 42], name="output_token_ids")
    assert request.finish_reason is None, "its finish_reason is set, although it has not ended"


@check("preempt", mistake="all waiting requests arrived later, so it waits before them; change `waiting` in place")
def test_it_waits_first(hw: Homework) -> None:
    station = Station.full()
    new, (later,) = station.requests[-1], station.waiting
    station.preempt(hw)
    names = [request.request_id for request in station.waiting]
    assert_equal(names, [new.request_id, later.request_id], name="the queue of waiting requests")
    assert all(value is None for value in station.waiting.values()), "the values of `waiting` should be None"


@check("preempt", mistake="several preemptions in a row change the order by age, or lose pages")
def test_one_after_the_other(hw: Homework) -> None:
    rng = random.Random(3)
    for _ in range(30):
        order, rows = rng.sample(range(7), 7), "".join(rng.sample("012", 3))
        cuts = sorted(rng.sample(range(1, 7), 2))
        station = Station.full([order[: cuts[0]], order[cuts[0] : cuts[1]], order[cuts[1] :]], rows)
        everyone = [*station.requests, *station.waiting]
        for _ in range(3):
            station.preempt(hw)
            running = station.running.requests_of(station.running.order)
            names = [request.request_id for request in [*running, *station.waiting]]
            assert_equal(names, [request.request_id for request in everyone], name="running and waiting, by age,")
            assert_pages(station.table, station.rows)


@check("preempt", mistake="in the engine's scheduler, in pools that are too small, a request or a page goes wrong")
def test_preempt_in_the_scheduler(hw: Homework) -> None:
    run = serve_at_random(replace(Parts(), preempt=hw.preempt), rounds=30)
    assert run.preemptions > 15, "the pools were large enough for all requests"
    serve_at_random(replace(Parts(), preempt=hw.preempt), prefix_sharing=True)


@check("preempt", mistake="after a preemption a model generates other tokens than for the request alone")
def test_preempt_with_a_model(hw: Homework) -> None:
    engine = assert_tokens_of_a_model(replace(Parts(), preempt=hw.preempt), prompts_of(9, 6, 11, 8), num_pages=9)
    assert engine.metrics.preemptions >= 2, "the pool was large enough for all requests"


# schedule -----------------------------------------------------------------------------------------------------------


def scheduler_with(
    running: ListLike[tuple[int, int]] = (),
    waiting: ListLike[int] = (),
    *,
    num_pages: int = 20,
    budget: int = 8,
    page_size: int = 4,
    max_rows: int = 6,
    in_flight: ListLike[int] = (),
    max_tokens: ListLike[int] | None = None,
    prefix_sharing: bool = False,
    parts: Parts | None = None,
) -> Scheduler:
    """A scheduler in the middle of its work. Requests are named by their age: "0" is the oldest.

    Args:
        running: tokens of each running request, and how many of them are computed; it has pages for those.
        waiting: tokens of each waiting request.
        num_pages: pages of the pool.
        budget: most tokens of a step.
        page_size: tokens per page.
        max_rows: rows of the page table.
        in_flight: running requests whose last token the host does not know yet.
        max_tokens: tokens of output of each running request.
        prefix_sharing: whether equal prefixes share pages.
        parts: the scheduler's parts.
    """
    table = PageTable(num_pages, page_size, max_rows)
    scheduler = Scheduler(
        table,
        max_model_len=200,
        max_num_batched_tokens=budget,
        window=None,
        prefix_sharing=prefix_sharing,
        parts=parts or Parts(),
    )
    rows = [table.allocate() for _ in range(max_rows)]
    for row in rows:
        table.release(row)  # the next request gets the row with the highest number
    for number, (num_tokens, num_computed) in enumerate(running):
        row = table.allocate()
        known = num_tokens - (number in in_flight)
        request = make_request(number, [number] * known, max_tokens[number] if max_tokens else 20)
        scheduler.running.enter(row, request)
        scheduler.running.num_scheduled[row], scheduler.running.num_computed[row] = num_tokens, num_computed
        table.take(np.array([row]), np.array([table.pages_for(num_computed)]))
    for number, num_tokens in enumerate(waiting, len(running)):
        scheduler.add(make_request(number, [number] * num_tokens))
    return scheduler


def assert_step(
    hw: Homework,
    scheduler: Scheduler,
    work: ListLike[tuple[str, int]],
    *,
    admitted: str = "",
    preempted: str = "",
) -> Schedule:
    """The next step computes so many tokens of each request named in `work`, in this order, and has pages for them."""
    running, table = scheduler.running, scheduler.page_table
    queue = [request.request_id for request in scheduler.waiting]
    in_flight = running.has_tokens_in_flight
    step = hw.schedule(scheduler)
    if step is None and in_flight:
        raise CheckFailed("schedule(scheduler) is None, although no page is missing: ask scheduler.reserve first", "")
    missing = "schedule(scheduler) is None, although no sampled token is on the device: is a `return` missing?"
    assert step is not None, missing
    require(isinstance(step, Schedule), f"schedule returns a {type(step).__name__}; it should be a Schedule")
    for name in ("rows", "num_new"):
        array = getattr(step, name)
        is_good = isinstance(array, np.ndarray) and array.ndim == 1 and np.issubdtype(array.dtype, np.integer)
        require(is_good, f"Schedule.{name} should be a one-dimensional array of integers; it is {array!r}")
    assert len(step.rows) == len(step.num_new), f"the step has {len(step.rows)} rows and {len(step.num_new)} shares"
    empty = [row for row in step.rows.tolist() if running.requests[row] is None]
    assert not empty, f"the step has row {empty[0]}, in which no request runs" if empty else ""
    got = [
        (running.requests[row].request_id, n) for row, n in zip(step.rows.tolist(), step.num_new.tolist(), strict=True)
    ]
    # What happened to the requests says more than the numbers, so it comes first.
    names = [request.request_id for request in step.preempted]
    assert_equal(names, list(preempted), name="the list Schedule.preempted, newest first,")
    names = [request.request_id for request in step.admitted]
    assert_equal(names, list(admitted), name="the list Schedule.admitted")
    assert_equal(got, list(work), name="the list of requests and their numbers of tokens")
    assert_equal(step.num_tokens, sum(n for _, n in work), name="num_tokens")
    left = [*sorted(preempted), *(name for name in queue if name not in admitted)]
    assert_equal([request.request_id for request in scheduler.waiting], left, name="the queue of waiting requests")
    for row, n in zip(step.rows.tolist(), step.num_new.tolist(), strict=True):
        held, needed = len(table.pages(row)), table.pages_for(int(running.num_computed[row]) + n)
        name = running.requests[row].request_id
        assert held >= needed, f"request {name} has {held} pages for this step and needs {needed}: reserve them"
    assert_pages(table, running.order.tolist(), tree=scheduler.prefix_tree)
    return step


@check("schedule", mistake="running requests that decode get one token each, in pages that are reserved")
def test_two_decodes(hw: Homework) -> None:
    assert_step(hw, scheduler_with([(6, 5), (9, 8)]), [("0", 1), ("1", 1)])


@check("schedule", mistake="waiting requests are admitted when there is room, and this step computes them")
def test_waiting_requests_are_admitted(hw: Homework) -> None:
    assert_step(hw, scheduler_with(waiting=[5]), [("0", 5)], admitted="0")
    assert_step(hw, scheduler_with(waiting=[2, 5]), [("0", 2), ("1", 5)], admitted="01")


@check("schedule", mistake="if there is nothing to compute, return a Schedule with empty arrays, not None")
def test_nothing_to_do(hw: Homework) -> None:
    assert_step(hw, scheduler_with(), [])


@check("schedule", mistake="admitted requests get what the running ones leave of the budget, not a budget of their own")
def test_newcomers_get_what_is_left(hw: Homework) -> None:
    assert_step(hw, scheduler_with([(6, 5)], waiting=[12]), [("0", 1), ("1", 7)], admitted="1")
    assert_step(hw, scheduler_with([(12, 4)], waiting=[3]), [("0", 8)])


@check(
    "schedule", mistake="a request whose share is 0 is not in the step: StepBatch needs at least one token per request"
)
def test_a_prompt_that_has_to_wait(hw: Homework) -> None:
    assert_step(hw, scheduler_with([(12, 0), (9, 0)]), [("0", 8)])
    assert_step(hw, scheduler_with([(12, 4), (9, 0), (6, 5)]), [("2", 1), ("0", 7)])


@check("schedule", mistake="requests with one new token come first, then the others; each group is in order of age")
def test_decodes_come_first(hw: Homework) -> None:
    assert_step(hw, scheduler_with([(8, 5), (6, 5), (7, 5), (9, 8)]), [("1", 1), ("3", 1), ("0", 3), ("2", 2)])
    # A prompt of one token, or a chunk of one, counts as a decode.
    assert_step(hw, scheduler_with([(8, 5)], waiting=[1, 9]), [("1", 1), ("0", 3), ("2", 4)], admitted="12")
    assert_step(hw, scheduler_with([(8, 5)], waiting=[9], budget=4, max_rows=4), [("1", 1), ("0", 3)], admitted="1")


@check("schedule", mistake="each group is in order of age: sort with kind='stable', because np.argsort is not stable")
def test_many_requests_in_order_of_age(hw: Homework) -> None:
    running = [(9, 8) if number % 3 else (8, 5) for number in range(40)]
    work = [(str(number), 1 if number % 3 else 3) for number in range(40)]
    scheduler = scheduler_with(running, num_pages=120, budget=80, max_rows=40)
    assert_step(hw, scheduler, sorted(work, key=lambda pair: pair[1]))


@check(
    "schedule",
    mistake="divide the budget with scheduler.parts.share_budget: the scheduler may have another policy than yours",
)
def test_another_policy(hw: Homework) -> None:
    def newest_first(pending: np.ndarray, budget: int) -> np.ndarray:
        return np.array(divide(pending.tolist()[::-1], budget)[::-1])

    parts = replace(Parts(), share_budget=newest_first)
    assert_step(hw, scheduler_with([(12, 0), (9, 0)], parts=parts), [("1", 8)])


@check(
    "schedule", mistake="a request whose last token is being sampled has nothing to compute: ask scheduler.pending()"
)
def test_the_last_token_is_on_its_way(hw: Homework) -> None:
    scheduler = scheduler_with([(6, 5), (9, 8)], in_flight=[0, 1], max_tokens=[1, 20])
    assert_step(hw, scheduler, [("1", 1)])


@check("schedule", mistake="if pages are missing, the newest running request is preempted, and is not in the step")
def test_the_newest_gives_its_pages(hw: Homework) -> None:
    # Request 0 begins a third page. The pool has 4 pages, and all are in use.
    assert_step(hw, scheduler_with([(9, 8), (6, 5)], num_pages=4), [("0", 1)], preempted="1")


@check("schedule", mistake="preempt the newest request repeatedly until the pages suffice, and no longer")
def test_as_many_as_necessary(hw: Homework) -> None:
    # Three requests need a page each. After 4 and 3 have left, two pages are free for 0 and 2, and 1 needs none.
    full = [(9, 8), (7, 6), (5, 4), (5, 4), (3, 2)]
    assert_step(hw, scheduler_with(full, num_pages=7), [("0", 1), ("1", 1), ("2", 1)], preempted="43")
    assert_step(hw, scheduler_with([(9, 8), (9, 8), (3, 2)], num_pages=5), [("0", 1)], preempted="21")


@check("schedule", mistake="the request that needs the page may itself be the newest, and then it is preempted")
def test_the_newest_itself_needs_the_page(hw: Homework) -> None:
    assert_step(hw, scheduler_with([(7, 6), (5, 4)], num_pages=3), [("0", 1)], preempted="1")


@check(
    "schedule",
    mistake="after a preemption the budget is divided again: the tokens of the preempted request are free",
)
def test_the_budget_is_divided_anew(hw: Homework) -> None:
    # Request 1 decodes, so request 0 gets 7 of 8 tokens. Those need two pages, and one is free. Without request 1 it
    # gets 8.
    assert_step(hw, scheduler_with([(20, 4), (4, 3)], num_pages=3), [("0", 8)], preempted="1")


@check("schedule", mistake="a step that preempts a request admits none: the pool is too small already")
def test_no_admission_after_a_preemption(hw: Homework) -> None:
    scheduler = scheduler_with([(9, 8), (6, 5)], waiting=[3], num_pages=4)
    admit, budgets = scheduler.admit, []

    def recorded(budget: int, copies: list[tuple[int, int]]) -> tuple[list[Request], list[int], int]:
        budgets.append(budget)
        return admit(budget, copies)

    scheduler.admit = recorded  # type: ignore[method-assign]
    assert_step(hw, scheduler, [("0", 1)], preempted="1")
    assert not any(budget > 0 for budget in budgets), (
        "after the preemption, scheduler.admit was asked to admit requests"
    )


@check(
    "schedule",
    mistake="call scheduler.preempt(), which also keeps the computed pages in the prefix tree; parts.preempt does not",
)
def test_preempted_pages_stay_cached(hw: Homework) -> None:
    scheduler = scheduler_with([(9, 8), (6, 5)], num_pages=4, prefix_sharing=True)
    first_page = scheduler.page_table.pages(int(scheduler.running.order[1])).tolist()[:1]
    assert_step(hw, scheduler, [("0", 1)], preempted="1")
    assert scheduler.prefix_tree is not None
    cached = scheduler.prefix_tree.match(np.array([1] * 5, dtype=np.int32)).tolist()
    assert_equal(cached, first_page, name="the list of the preempted request's pages in the prefix tree")


@check("schedule", mistake="while sampled tokens are on the device, preempt nothing: return None and change nothing")
def test_tokens_on_the_device(hw: Homework) -> None:
    scheduler = scheduler_with([(9, 8), (6, 5)], waiting=[3], num_pages=4, in_flight=[0])
    pages = contents(scheduler.page_table, 6)
    step = hw.schedule(scheduler)
    names = [request.request_id for request in scheduler.running.requests_of(scheduler.running.order)]
    assert_equal(names, ["0", "1"], name="the list of running requests")
    assert step is None, "pages are short and the last token of request 0 is on the device: schedule should return None"
    assert_equal(contents(scheduler.page_table, 6), pages, name="the list of all rows' pages")
    assert_equal([request.request_id for request in scheduler.waiting], ["2"], name="the queue of waiting requests")


@check("schedule", mistake="tokens on the device prevent only a preemption: with enough pages the step proceeds")
def test_tokens_on_the_device_and_enough_pages(hw: Homework) -> None:
    scheduler = scheduler_with([(9, 8), (6, 5)], waiting=[3], num_pages=9, in_flight=[0, 1])
    assert_step(hw, scheduler, [("0", 1), ("1", 1), ("2", 3)], admitted="2")


@check("schedule", mistake="running requests reserve their pages before any waiting one is admitted")
def test_running_requests_come_first(hw: Homework) -> None:
    # Two pages are free, and request 0 needs both. Before it has them there would be room for request 1.
    assert_step(hw, scheduler_with([(12, 4)], waiting=[1], num_pages=3, budget=20), [("0", 8)])


@check(
    "schedule",
    mistake="`admit` fills a list of copies and returns the number of shared tokens: both go into the Schedule",
)
def test_copies_and_shared_tokens(hw: Homework) -> None:
    scheduler = scheduler_with(prefix_sharing=True, budget=20)
    prompt = list(range(7))
    scheduler.add(make_request(0, prompt))
    first = assert_step(hw, scheduler, [("0", 7)], admitted="0")
    assert_equal(first.num_shared, 0, name="num_shared of the first step")
    row = int(first.rows[0])
    scheduler.running.num_computed[row] = scheduler.running.num_scheduled[row] = 7
    scheduler.running.num_scheduled[row] += 1
    scheduler.running.append(np.array([row]), np.array([7]))
    scheduler.add(make_request(1, prompt))
    old = scheduler.page_table.pages(row).tolist()
    second = assert_step(hw, scheduler, [("0", 1), ("1", 1)], admitted="1")
    assert_equal(second.num_shared, 6, name="num_shared of the second step")
    own = scheduler.page_table.pages(int(scheduler.running.order[1])).tolist()
    assert_equal(second.copies, [(old[1], own[1])], name="the list of pages to be copied")


def expected_step(
    running: list[tuple[int, int]], waiting: list[int], num_pages: int, budget: int, size: int, in_flight: bool
) -> tuple[list[tuple[str, int]], str, str] | None:
    """The step as requests and shares, and which requests are admitted and preempted. It counts pages itself."""
    alive = list(running)
    while True:
        shares = divide([tokens - computed for tokens, computed in alive], budget)
        used = [-(-max(c + n, c) // size) for (_, c), n in zip(alive, shares, strict=True)]
        if sum(used) <= num_pages:
            break
        if in_flight:
            return None
        alive.pop()
    preempted = "".join(str(number) for number in reversed(range(len(alive), len(running))))
    work = [(str(number), share) for number, share in enumerate(shares)]
    free, left, admitted = num_pages - sum(used), budget - sum(shares), ""
    for number, tokens in enumerate(waiting, len(running)):
        pages = -(-tokens // size)
        # One page is held back for each request that ran before.
        if preempted or left < 1 or pages > free - len(alive) or len(alive) + len(admitted) == 6:
            break
        admitted += str(number)
        work.append((str(number), min(tokens, left)))
        left, free = left - work[-1][1], free - pages
    work = [(name, share) for name, share in work if share]
    return sorted(work, key=lambda pair: pair[1] > 1), admitted, preempted


@check("schedule", mistake="a state of queues and pool that the earlier checks did not try goes wrong")
def test_random_states(hw: Homework) -> None:
    rng, met = random.Random(6), Counter[str]()
    for _ in range(300):
        size, budget = rng.randint(1, 4), rng.randint(6, 14)
        running = []
        for _ in range(rng.randint(0, 5)):
            computed = rng.randint(0, 12)
            running.append((computed + rng.choice([1, 1, 1, rng.randint(2, 20)]), computed))
        waiting = [rng.randint(1, 20) for _ in range(rng.randint(0, 3))]
        held = sum(-(-computed // size) for _, computed in running)
        alone = max([-(-(computed + budget) // size) for _, computed in running] + [-(-28 // size)])
        num_pages = max(held + rng.choice([0, 1, rng.randint(0, 12)]), alone)
        in_flight = [number for number in range(len(running)) if rng.random() < 0.15 and running[number][0] > 1]
        scheduler = scheduler_with(
            running, waiting, num_pages=num_pages, budget=budget, page_size=size, in_flight=in_flight
        )
        want = expected_step(running, waiting, num_pages, budget, size, bool(in_flight))
        if want is None:
            assert hw.schedule(scheduler) is None, "pages are short and a token is on the device: it should return None"
            assert len(scheduler.running) == len(running), "a request was preempted while a token was on the device"
            met["None"] += 1
        else:
            work, admitted, preempted = want
            assert_step(hw, scheduler, work, admitted=admitted, preempted=preempted)
            met["admitted"] += len(admitted)
            met["preempted"] += len(preempted)
    assert min(met["None"], met["admitted"], met["preempted"]) > 15


@check(
    "schedule", mistake="with requests that arrive and finish, some generate other tokens than alone, or never finish"
)
def test_schedule_serves_requests(hw: Homework) -> None:
    parts = replace(Parts(), schedule=hw.schedule)
    run = serve_at_random(parts, rounds=30)
    assert run.preemptions > 15, "the pools were large enough for all requests"


@check("schedule", mistake="at pipeline depth 1, some requests generate other tokens than alone")
def test_schedule_serves_requests_ahead_of_the_results(hw: Homework) -> None:
    parts = replace(Parts(), schedule=hw.schedule)
    run = serve_at_random(parts, rounds=30, depth=1)
    assert run.drained > 15 and run.preemptions > 5, "the pools were large enough for all requests"


@check("schedule", mistake="with windows or shared prefixes, some requests generate other tokens than alone")
def test_schedule_with_windows_and_shared_prefixes(hw: Homework) -> None:
    parts = replace(Parts(), schedule=hw.schedule)
    for window, depth in ((None, 0), (3, 1)):
        serve_at_random(parts, window=window, prefix_sharing=True, depth=depth)


@check("schedule", mistake="with your schedule a model generates other tokens than for each request alone")
def test_schedule_with_a_model(hw: Homework) -> None:
    parts = replace(Parts(), schedule=hw.schedule)
    for depth in (0, 1):
        engine = assert_tokens_of_a_model(parts, prompts_of(9, 6, 11, 8), num_pages=9, pipeline_depth=depth)
        assert engine.metrics.preemptions >= 2, "the pool was large enough for all requests"


# match_prefix -------------------------------------------------------------------------------------------------------


def tree_of(prompts: ListLike[ListLike[int]], page_size: int, first_page: int = 0) -> dict[int, dict[bytes, int]]:
    """The tree of the full pages of some prompts. Pages are numbered in the order in which they are added."""
    children: dict[int, dict[bytes, int]] = {}
    number = first_page
    for prompt in prompts:
        parent = ROOT
        for end in range(page_size, len(prompt) + 1, page_size):
            key = np.array(prompt[end - page_size : end], dtype=np.int32).tobytes()
            siblings = children.setdefault(parent, {})
            if key not in siblings:
                siblings[key] = number
                number += 1
            parent = siblings[key]
    return children


def assert_match(
    hw: Homework, prompts: ListLike[ListLike[int]], prompt: ListLike[int], expected: list[int], page_size: int = 2
) -> None:
    got = hw.match_prefix(tree_of(prompts, page_size), np.array(prompt, dtype=np.int32), page_size)
    known = f"with pages of {page_size} and the prompts {prompts} in the tree, match_prefix of {prompt}"
    require(got is not None, f"{known} is None: is a `return` missing?")
    assert_equal(list(got), expected, name=known)


@check("match_prefix", mistake="look up the tokens' bytes among the children of ROOT, and return the page in a list")
def test_one_page(hw: Homework) -> None:
    assert_match(hw, [[5, 6], [7, 8]], [7, 8], [1])
    assert_match(hw, [[5, 6]], [6, 5], [])


@check(
    "match_prefix",
    mistake="0 is a page like any other: a look-up that finds nothing returns None, so compare with None",
)
def test_page_0(hw: Homework) -> None:
    assert_match(hw, [[5, 6], [7, 8]], [5, 6], [0])


@check("match_prefix", mistake="look up the children of a page under that page, not under ROOT")
def test_a_chain(hw: Homework) -> None:
    assert_match(hw, [[5, 6, 7, 8, 9, 9]], [5, 6, 7, 8, 9, 9], [0, 1, 2])
    assert_match(hw, [[5, 6, 7, 8], [1, 2, 7, 8]], [1, 2, 7, 8], [2, 3])


@check("match_prefix", mistake="a page that no page follows has no entry in `children`, and an empty tree has no ROOT")
def test_missing_entries(hw: Homework) -> None:
    assert_match(hw, [[5, 6]], [5, 6, 7, 8], [0])
    assert_match(hw, [], [5, 6], [])


@check("match_prefix", mistake="the chain ends at the first page that differs; pages after it must not be shared")
def test_the_first_difference_ends_it(hw: Homework) -> None:
    assert_match(hw, [[5, 6, 7, 8, 9, 9]], [5, 6, 7, 7, 9, 9], [0])
    assert_match(hw, [[5, 6, 7, 8], [7, 8]], [7, 8, 7, 8], [2])
    assert_match(hw, [[5, 6, 7, 8]], [7, 8], [])


@check("match_prefix", mistake="a page that the prompt fills only in part does not match")
def test_only_full_pages(hw: Homework) -> None:
    assert_match(hw, [[5, 6, 7, 8]], [5, 6, 7], [0])
    assert_match(hw, [[5, 6, 7, 8]], [5], [])
    assert_match(hw, [[5, 6, 7, 8]], [], [])


@check("match_prefix", mistake="the prompt's last full page counts as well")
def test_the_last_full_page(hw: Homework) -> None:
    assert_match(hw, [[5, 6, 7, 8, 9, 9]], [5, 6, 7, 8], [0, 1])
    assert_match(hw, [[1, 2, 3, 4, 5, 6]], [1, 2, 3, 4, 5, 6, 7], [0, 1], page_size=3)


@check("match_prefix", mistake="a tree that the earlier checks did not try goes wrong")
def test_random_trees(hw: Homework) -> None:
    rng = random.Random(8)
    for _ in range(300):
        size = rng.randint(1, 4)
        prompts = [[rng.randint(0, 1) for _ in range(rng.randint(0, 12))] for _ in range(rng.randint(0, 5))]
        prompt = [rng.randint(0, 1) for _ in range(rng.randint(0, 12))]
        children = tree_of(prompts, size, first_page=rng.randint(0, 9))
        # Page by page from the end: which page would a prompt of so many tokens have added last?
        want = []
        for end in range(size, len(prompt) + 1, size):
            if not any(other[:end] == prompt[:end] for other in prompts):
                break
            parent = want[-1] if want else ROOT
            want += [page for key, page in children[parent].items()
                     if np.frombuffer(key, dtype=np.int32).tolist() == prompt[end - size : end]]  # fmt: skip
        got = hw.match_prefix(children, np.array(prompt, dtype=np.int32), size)
        assert_equal(list(got), want, name=f"match_prefix of {prompt}, with pages of {size} and {prompts} in the tree,")


class Siblings(dict):
    """A dictionary that counts look-ups; walking through its entries is one for each."""

    lookups = 0

    def __getitem__(self, key: Any) -> Any:
        Siblings.lookups += 1
        return super().__getitem__(key)

    def get(self, key: Any, default: Any = None) -> Any:
        Siblings.lookups += 1
        return super().get(key, default)

    def __contains__(self, key: Any) -> bool:
        Siblings.lookups += 1
        return super().__contains__(key)

    def __iter__(self) -> Any:
        Siblings.lookups += len(self)
        return super().__iter__()

    def items(self) -> Any:
        Siblings.lookups += len(self)
        return super().items()

    def keys(self) -> Any:
        Siblings.lookups += len(self)
        return super().keys()


@check(
    "match_prefix",
    mistake="look a page up by its tokens: the time must not grow with the number of other requests",
    costs=0.2,
)
def test_the_number_of_lookups(hw: Homework) -> None:
    children = tree_of([[i, i] for i in range(3000)] + [[1, 1] * 100], 2)
    counted = Siblings({parent: Siblings(siblings) for parent, siblings in children.items()})
    Siblings.lookups = 0
    got = hw.match_prefix(counted, np.array([1, 1] * 100, dtype=np.int32), 2)
    assert_equal(len(got), 100, name="the number of pages found")
    assert Siblings.lookups <= 500, f"100 pages were found with {Siblings.lookups:,} look-ups in `children`"


class Counted(np.ndarray):
    """Token ids that count the bytes into which they are converted."""

    num_bytes = 0

    def tobytes(self, *args: Any, **kwargs: Any) -> bytes:
        Counted.num_bytes += self.nbytes
        return super().tobytes(*args, **kwargs)


@check(
    "match_prefix",
    mistake="convert the tokens of one page at a time, or the prompt once: the whole prompt for each page is quadratic",
    costs=0.2,
)
def test_tokens_are_read_once(hw: Homework) -> None:
    token_ids = np.array([1, 1] * 100, dtype=np.int32)
    children = tree_of([token_ids.tolist()], 2)
    Counted.num_bytes = 0
    got = hw.match_prefix(children, token_ids.view(Counted), 2)
    assert_equal(len(got), 100, name="the number of pages found")
    assert Counted.num_bytes <= 2 * token_ids.nbytes, (
        f"a prompt of {token_ids.nbytes} bytes was converted to {Counted.num_bytes:,} bytes in all"
    )


@check("match_prefix", mistake="in the engine's scheduler, with common prefixes, a request or a page goes wrong")
def test_match_prefix_in_the_scheduler(hw: Homework) -> None:
    run = serve_at_random(replace(Parts(), match_prefix=hw.match_prefix), prefix_sharing=True)
    assert run.shared > 50, f"in 20 runs only {run.shared} tokens were shared"


@check("match_prefix", mistake="with shared pages a model writes other tokens than without")
def test_match_prefix_with_a_model(hw: Homework) -> None:
    parts = replace(Parts(), match_prefix=hw.match_prefix)
    prompts = prompts_of(3, 5, 2, 7, common=10)
    engine = assert_tokens_of_a_model(
        parts, prompts, num_pages=30, max_num_batched_tokens=64, enable_prefix_caching=True
    )
    assert engine.metrics.shared_tokens >= 20, "nothing was shared"


# copy_on_write ------------------------------------------------------------------------------------------------------


def assert_copied(
    hw: Homework, rows: list[list[int]], row: int, span: tuple[int, int], copied: list[int], num_pages: int = 9
) -> PageTable:
    """Row `row` writes tokens span[0] to span[1] - 1; of its pages those with the indices `copied` must be replaced."""
    table = table_of(rows, num_pages)
    free = free_pages(table)
    pairs = hw.copy_on_write(table, row, *span)
    call = f"copy_on_write(row {row} with pages {rows[row]}, first={span[0]}, end={span[1]})"
    assert isinstance(pairs, list), f"{call} returns {pairs!r}; it should return a list of {len(copied)} pairs"
    assert_equal([old for old, _ in pairs], [rows[row][index] for index in copied], name=f"the list copied by {call}")
    assert {new for _, new in pairs} <= set(free), f"{call} copies to a page that was not free: {pairs}"
    want = [list(pages) for pages in rows]
    for index, (_, new) in zip(copied, pairs, strict=True):
        want[row][index] = new
    assert_equal(contents(table, len(rows)), want, name=f"the list of all rows' pages after {call}")
    return table


@check("copy_on_write", mistake="a page with one owner is written in place: there is nothing to copy, so return []")
def test_own_pages(hw: Homework) -> None:
    table = assert_copied(hw, [[3, 1]], 0, (4, 6), [])
    assert_pages(table, [0])


@check(
    "copy_on_write",
    mistake="a shared page that is written is replaced by a free one, in this row only; the pair is (old, new)",
)
def test_a_shared_page(hw: Homework) -> None:
    assert_copied(hw, [[3], [3]], 1, (2, 3), [0])


@check(
    "copy_on_write",
    mistake="the shared page loses an owner, and the new page has one: table.replace updates both refcounts",
)
def test_owners_are_counted(hw: Homework) -> None:
    table = assert_copied(hw, [[3], [3]], 1, (2, 3), [0])
    assert_pages(table, [0, 1])


@check("copy_on_write", mistake="shared pages before the tokens that are written are only read, so they stay shared")
def test_pages_before_stay(hw: Homework) -> None:
    table = assert_copied(hw, [[3, 1, 2], [3, 1, 2]], 0, (9, 10), [2])
    assert_pages(table, [0, 1])


@check("copy_on_write", mistake="a write can extend over several pages: every shared one of them is replaced")
def test_a_write_over_several_pages(hw: Homework) -> None:
    assert_copied(hw, [[3, 1, 2], [3, 1, 2]], 1, (5, 11), [1, 2])


@check("copy_on_write", mistake="token `end` is not written: if it starts a page, that page is unchanged")
def test_end_is_not_written(hw: Homework) -> None:
    assert_copied(hw, [[3, 1, 2], [3, 1, 2]], 1, (5, 8), [1])
    assert_copied(hw, [[3, 1, 2], [3, 1, 2]], 1, (5, 9), [1, 2])
    assert_copied(hw, [[3, 1, 2], [3, 1, 2]], 1, (4, 8), [1])


@check("copy_on_write", mistake="of the pages that are written, only the shared ones are copied")
def test_shared_and_own_pages(hw: Homework) -> None:
    table = assert_copied(hw, [[3, 1], [3, 1, 2, 0]], 1, (5, 15), [1])
    assert_pages(table, [0, 1])


@check("copy_on_write", mistake="when one of three owners gets a copy, the other two still share the old page")
def test_three_owners_part(hw: Homework) -> None:
    table = assert_copied(hw, [[3], [3], [3]], 0, (1, 2), [0])
    assert_equal(int(table.refcounts[3]), 2, name="the number of owners of the old page")
    assert len(hw.copy_on_write(table, 1, 1, 2)) == 1, "the second owner still shares its page, and should copy it"
    assert hw.copy_on_write(table, 2, 1, 2) == [], "the last owner has the page to itself, and should copy nothing"
    assert_pages(table, [0, 1, 2])


@check("copy_on_write", mistake="take exactly as many free pages as are replaced: there may be no more")
def test_the_last_free_page(hw: Homework) -> None:
    assert_copied(hw, [[0, 1, 2], [0, 1, 2]], 1, (8, 9), [2], num_pages=4)
    assert_copied(hw, [[0, 1, 2, 3]], 0, (0, 16), [], num_pages=4)


@check("copy_on_write", mistake="after many shares and writes a row reads what another row wrote")
def test_each_row_reads_what_it_wrote(hw: Homework) -> None:
    rng = random.Random(5)
    for _ in range(30):
        table, texts, memory = PageTable(24, 3, 5), dict[int, list[int]](), [0] * 72
        for _ in range(40):
            donors = [row for row, text in texts.items() if text]
            if donors and table.num_free_rows and rng.random() < 0.4:  # begin with the pages of another
                donor = rng.choice(donors)
                row, length = table.allocate(), rng.randint(1, len(texts[donor]))
                table.share(row, table.pages(donor)[: -(-length // 3)].copy())
                texts[row] = texts[donor][:length]
            elif table.num_free_rows and rng.random() < 0.5:
                texts[table.allocate()] = []
            elif texts and rng.random() < 0.2:
                row = rng.choice(list(texts))
                del texts[row]
                table.release(row)
            elif texts:  # write a few tokens
                row = rng.choice(list(texts))
                first, end = len(texts[row]), len(texts[row]) + rng.randint(1, 5)
                missing, num_missing = table.missing(np.array([row]), np.array([end]))
                if end > 20 or num_missing + 2 > table.num_free_pages:
                    continue
                table.take(np.array([row]), missing)
                for old, new in hw.copy_on_write(table, row, first, end):
                    memory[new * 3 : new * 3 + 3] = memory[old * 3 : old * 3 + 3]
                for position in range(first, end):
                    texts[row].append(rng.randrange(1000))
                    memory[int(table.table[row, position // 3]) * 3 + position % 3] = texts[row][-1]
            for row, text in texts.items():
                read = [memory[int(table.table[row, p // 3]) * 3 + p % 3] for p in range(len(text))]
                assert read == text, f"row {row} wrote {text} but reads {read}"
            assert_pages(table, list(texts))


@check("copy_on_write", mistake="in the engine's scheduler, with common prefixes, a request or a page goes wrong")
def test_copy_on_write_in_the_scheduler(hw: Homework) -> None:
    run = serve_at_random(replace(Parts(), copy_on_write=hw.copy_on_write), prefix_sharing=True, rounds=40)
    assert run.copied > 5, f"only {run.copied} pages were copied"


@check("copy_on_write", mistake="with shared pages a model writes other tokens than without")
def test_copy_on_write_with_a_model(hw: Homework) -> None:
    prompts = prompts_of(3, 3, 2, common=10)
    engine = assert_tokens_of_a_model(
        replace(Parts(), copy_on_write=hw.copy_on_write),
        [*prompts, prompts[0][:11], prompts[0]],
        num_pages=12,
        max_num_batched_tokens=16,
        enable_prefix_caching=True,
    )
    assert engine.metrics.shared_tokens >= 10, "nothing was shared"


# pages_to_evict -----------------------------------------------------------------------------------------------------


def assert_evicted(
    hw: Homework, requests: list[tuple[int, int]], window: int, expected: list[int], size: int = 4
) -> None:
    """For each request: the tokens that are computed, and those that were evicted before."""
    computed, evicted = (np.array([pair[i] for pair in requests], dtype=np.int64) for i in (0, 1))
    before = computed.tolist(), evicted.tolist()
    got = hw.pages_to_evict(computed, evicted, window, size)
    call = f"pages_to_evict(num_computed={before[0]}, num_evicted={before[1]}, {window=}, page_size={size})"
    require(got is not None, f"{call} returns None: is a `return` missing?")
    require(isinstance(got, np.ndarray), f"{call} returns a {type(got).__name__}; it should be a numpy array")
    require(np.issubdtype(got.dtype, np.integer), f"{call} returns {got.dtype} numbers; they should be integers")
    assert_equal(got.tolist(), expected, name=call)
    assert (computed.tolist(), evicted.tolist()) == before, f"{call} changes its arguments; they belong to the caller"


@check("pages_to_evict", mistake="a window that is not full hides nothing: return 0 pages, not a negative number")
def test_nothing_is_hidden(hw: Homework) -> None:
    assert_evicted(hw, [(6, 0)], 100, [0])
    assert_evicted(hw, [(0, 0)], 1, [0])


@check("pages_to_evict", mistake="a key inside the window must stay, and its page with it")
def test_a_page_in_part_stays(hw: Homework) -> None:
    assert_evicted(hw, [(6, 0)], 4, [0])  # positions 3 to 6 are seen, and 3 is in the first page
    assert_evicted(hw, [(9, 0)], 3, [1])  # positions 7 to 9 are seen, and 7 is in the second page


@check(
    "pages_to_evict", mistake="the query at q sees q - window + 1 to q: a page that ends just before can be returned"
)
def test_the_first_page_goes(hw: Homework) -> None:
    assert_evicted(hw, [(7, 0)], 4, [1])  # positions 4 to 7 are seen
    assert_evicted(hw, [(4, 0)], 1, [1])  # position 4 alone is seen, and its page is not written yet


@check("pages_to_evict", mistake="return the number of pages (several after a long prompt), not the number of keys")
def test_several_pages(hw: Homework) -> None:
    assert_evicted(hw, [(13, 0)], 6, [2])
    assert_evicted(hw, [(40, 0)], 1, [10])


@check(
    "pages_to_evict", mistake="the row's first page starts at num_evicted: the pages before it were returned already"
)
def test_the_row_begins_later(hw: Homework) -> None:
    assert_evicted(hw, [(13, 8)], 6, [0])
    assert_evicted(hw, [(17, 8)], 6, [1])
    assert_evicted(hw, [(9, 8)], 6, [0])  # the window begins before the row does


@check("pages_to_evict", mistake="the arrays have one entry per request, and each request has its own numbers")
def test_several_requests(hw: Homework) -> None:
    assert_evicted(hw, [(13, 8), (13, 0), (2, 0), (17, 8)], 6, [0, 2, 0, 1])
    assert_evicted(hw, [], 6, [])


@check("pages_to_evict", mistake="a request that the earlier checks did not try goes wrong")
def test_random_requests_with_a_window(hw: Homework) -> None:
    rng = random.Random(6)
    for _ in range(300):
        size, window = rng.randint(1, 5), rng.randint(1, 25)
        requests, want = [], []
        for _ in range(rng.randint(1, 4)):
            evicted = rng.randint(0, 5) * size
            query = evicted + rng.randint(0, 40)
            requests.append((query, evicted))
            # Page by page, key by key: does the next query see it, or a later one?
            count = 0
            while all(query - key >= window for key in range(evicted + count * size, evicted + (count + 1) * size)):
                count += 1
            want.append(count)
        assert_evicted(hw, requests, window, want, size)


@check("pages_to_evict", mistake="in the engine's scheduler a key is missing, or a request holds too many pages")
def test_pages_to_evict_in_the_scheduler(hw: Homework) -> None:
    parts = replace(Parts(), pages_to_evict=hw.pages_to_evict)
    for window in (1, 3, 7):
        serve_at_random(parts, window=window, rounds=10)
    run = serve([(0, [1, 2, 3], 80)], parts, num_pages=21, page_size=4, max_batch_size=1, budget=4, window=8)
    assert run.most_pages <= 3, f"a window of 8 keys fills 3 pages of 4 at most, but {run.most_pages} were held"


@check("pages_to_evict", mistake="a model generates other tokens than without eviction")
def test_pages_to_evict_with_a_model(hw: Homework) -> None:
    parts = replace(Parts(), pages_to_evict=hw.pages_to_evict)
    options = {"num_pages": 60, "max_num_batched_tokens": 8, "sliding_window": 6}
    assert_tokens_of_a_model(parts, prompts_of(14, 5, 9), num_tokens=20, **options)


# reorder_beams ------------------------------------------------------------------------------------------------------


def assert_beams(
    hw: Homework, rows: list[list[int]], beams: list[int], parents: list[int], kind: type[PageTable] = PageTable
) -> None:
    """Beams are rows of the table; the other rows are not touched."""
    table = table_of(rows, num_pages=12, free_rows=0, kind=kind)
    want = [list(pages) for pages in rows]
    for beam, parent in zip(beams, parents, strict=True):
        want[beam] = list(rows[beams[parent]])
    hw.reorder_beams(table, list(beams), list(parents))
    call = f"reorder_beams(rows={beams}, parents={parents}) of the pages {rows}"
    assert_equal(contents(table, len(rows)), want, name=f"the list of all rows' pages after {call}")
    assert_pages(table, range(len(rows)), f"after {call} ")
    assert table.num_free_rows == 0, f"after {call} a row is free"
    owned = {page for pages in want for page in pages}
    assert_equal(free_pages(table), sorted(set(range(12)) - owned), name=f"the list of free pages after {call}")


@check(
    "reorder_beams",
    mistake="a beam that continues itself keeps its pages: append the new pages before you remove the old ones",
)
def test_nothing_changes(hw: Homework) -> None:
    assert_beams(hw, [[3, 1], [4, 0]], [0, 1], [0, 1])


@check(
    "reorder_beams",
    mistake="the beam that is dropped returns its pages, and its row shares the pages of its new parent",
)
def test_one_is_continued_twice(hw: Homework) -> None:
    assert_beams(hw, [[3, 1], [4, 0]], [0, 1], [0, 0])
    assert_beams(hw, [[3, 1], [4, 0]], [0, 1], [1, 1])


@check(
    "reorder_beams", mistake="all rows change at once: both must own both beams' pages before either returns its own"
)
def test_two_swap(hw: Homework) -> None:
    assert_beams(hw, [[3, 1], [4, 0]], [0, 1], [1, 0])
    assert_beams(hw, [[3], [4], [5]], [0, 1, 2], [2, 0, 1])


@check("reorder_beams", mistake="a row returns as many pages as it had, and gets as many as its parent had")
def test_beams_of_different_lengths(hw: Homework) -> None:
    assert_beams(hw, [[3], [4, 0, 7]], [0, 1], [1, 1])
    assert_beams(hw, [[3], [4, 0, 7]], [0, 1], [0, 0])
    assert_beams(hw, [[3], [4, 0, 7]], [0, 1], [1, 0])


@check("reorder_beams", mistake="a shared page loses one owner for each beam that is dropped, not all owners")
def test_beams_that_share(hw: Homework) -> None:
    assert_beams(hw, [[3, 1], [3, 4], [3, 5]], [0, 1, 2], [0, 0, 2])
    assert_beams(hw, [[3, 1], [3, 4], [3, 5]], [0, 1, 2], [2, 2, 2])


@check(
    "reorder_beams",
    mistake="`parents` are indices in `rows`; other rows of the table are not beams and stay as they are",
)
def test_rows_that_are_no_beams(hw: Homework) -> None:
    assert_beams(hw, [[3, 1], [3, 4], [3, 5], [6]], [2, 1], [0, 0])
    assert_beams(hw, [[9], [3, 4], [3, 5], [6]], [3, 1], [1, 0])


@check("reorder_beams", mistake="change the table through its methods: here its arrays are read-only")
def test_beams_through_the_methods(hw: Homework) -> None:
    assert_beams(hw, [[3, 1], [4], [3, 5]], [0, 1, 2], [1, 0, 0], kind=GuardedPageTable)


@check("reorder_beams", mistake="a random search that the earlier checks did not try goes wrong")
def test_random_beams(hw: Homework) -> None:
    rng = random.Random(7)
    for _ in range(100):
        common, own = rng.sample(range(6), 2), rng.sample(range(6, 12), 6)
        rows = [common[: rng.randint(0, 2)] + [own.pop() for _ in range(rng.randint(0, 1))] for _ in range(5)]
        beams = rng.sample(range(5), rng.randint(1, 4))
        assert_beams(hw, rows, beams, [rng.randrange(len(beams)) for _ in beams])


@check("reorder_beams", mistake="after many steps of a beam search a beam reads what another beam wrote")
def test_a_beam_search(hw: Homework) -> None:
    rng = random.Random(8)
    for _ in range(20):
        table, memory = PageTable(40, 3, 4), [0] * 120
        rows = [table.allocate() for _ in range(4)]
        texts: list[list[int]] = [[] for _ in rows]
        for _ in range(20):
            for row, text in zip(rows, texts, strict=True):
                end = len(text) + 1
                table.take(np.array([row]), table.missing(np.array([row]), np.array([end]))[0])
                for old, new in hw.copy_on_write(table, row, end - 1, end):
                    memory[new * 3 : new * 3 + 3] = memory[old * 3 : old * 3 + 3]
                text.append(rng.randrange(1000))
                memory[int(table.table[row, (end - 1) // 3]) * 3 + (end - 1) % 3] = text[-1]
            parents = [rng.randrange(4) for _ in rows]
            hw.reorder_beams(table, rows, parents)
            texts = [list(texts[parent]) for parent in parents]
            for row, text in zip(rows, texts, strict=True):
                read = [memory[int(table.table[row, p // 3]) * 3 + p % 3] for p in range(len(text))]
                assert read == text, f"a beam that wrote {text} reads {read}"
            assert_pages(table, rows)
