"""Grader of chapter 07. Its oracles hand out tokens and pages one at a time, and a cache that keeps stamps for keys."""

import random
from collections import Counter, deque
from collections.abc import Sequence as ListLike
from dataclasses import dataclass, field, replace

import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast

from book.grading import Exercise, Homework, assert_equal, check
from mini_engine.detokenizer import Detokenizer
from mini_engine.engine import LLMEngine
from mini_engine.kv_cache.page_table import PageTable
from mini_engine.models.base import CausalLM
from mini_engine.models.config import ModelConfig
from mini_engine.models.registry import build_model
from mini_engine.parts import Parts
from mini_engine.sampling_params import SamplingParams
from mini_engine.scheduler import Scheduler
from mini_engine.sequence import Sequence

EXERCISES = [
    Exercise(
        "fuse",
        points=3,
        minutes=20,
        difficulty=1,
        part="fuse",
        hints=(
            "Who is served before anybody else? Count how many tokens of the budget that takes, before you look at the "
            "first prompt.",
            "left = budget minus the number of ones. Then walk through the list once: a one gets 1 and costs nothing "
            "more, a prompt gets what it can use of `left`, and `left` shrinks by that.",
            "left = budget - sum(n == 1 for n in pending); for n in pending: share = 1 if n == 1 else min(n, left); "
            "if n > 1: left -= share; collect the shares.",
        ),
    ),
    Exercise(
        "admit",
        points=3,
        minutes=20,
        difficulty=1,
        part="admit",
        hints=(
            "Three things run out: rows, pages, tokens. Go through the requests in order with what is left of each.",
            "Pages must suffice for the whole request, tokens for one: a prompt may be cut. What a long prompt "
            "does not find, nobody behind it finds either. The first that does not fit ends the loop.",
            "for tokens, pages in zip(...): if count == free_rows or pages > free_pages or budget < 1: break; then "
            "count += 1; free_pages -= pages; budget -= tokens.",
        ),
    ),
    Exercise(
        "preempt",
        points=3,
        minutes=20,
        difficulty=2,
        part="preempt",
        hints=(
            "Four arguments change, and one attribute of the sequence. Which one says that its keys are in the cache?",
            "The newest is the last of `running`. `page_table.erase` counts down the owners of its pages and frees the "
            "row. Its tokens were sent to a user: they stay. It is older than everybody who waits.",
            "newest = running.pop(); page_table.erase(rows.pop(newest)); newest.num_computed = 0; "
            "waiting.appendleft(newest); return newest.",
        ),
    ),
    Exercise(
        "share_prefix",
        points=3,
        minutes=20,
        difficulty=2,
        part="share_prefix",
        hints=(
            "Draw two rows of a table that point to the same pages. What else must be true of such a page?",
            "How many pages hold num_tokens tokens, the last perhaps in part? So many entries go into the new row, its "
            "count says how many, and each of these pages has one owner more than before.",
            "shared = table.pages(donor)[: table.pages_for(num_tokens)]; table.table[row, : len(shared)] = shared; "
            "table.counts[row] = len(shared); table.refcounts[shared] += 1.",
        ),
    ),
    Exercise(
        "copy_on_write",
        points=5,
        minutes=30,
        difficulty=2,
        part="copy_on_write",
        hints=(
            "Which pages of the row do the tokens first to end - 1 fall into? Token end is not written. Of these, only "
            "the ones with more than one owner matter.",
            "First collect the indices of such pages, then compare their number with the free pages, and only then "
            "take any. For each: a page off the free list gets one owner and a place in the row, the old page is "
            "released.",
            "written = range(first // page_size, (end - 1) // page_size + 1); shared = those with "
            "refcounts[table.table[row, i]] > 1; if len(shared) > table.num_free_pages: return None; for i in shared: "
            "old = int(table.table[row, i]); new = table.free_pages.pop(); set the entry and refcounts[new] = 1; "
            "table.release(old).",
        ),
    ),
    Exercise(
        "evict_pages",
        points=4,
        minutes=25,
        difficulty=2,
        part="evict_pages",
        hints=(
            "Pages of 4, a window of 4, the next query at position 7: what is the oldest key that it sees, and which "
            "page holds the last key that it does not?",
            "The keys of the row begin at first_position, and the oldest key that is still seen is at next_query - "
            "window + 1. Of the keys in between only whole pages can go. Then the others move to the front of the row.",
            "n = max(0, next_query - window + 1 - first_position) // page_size; release the first n of "
            "table.pages(row).tolist(); write the others to table.table[row, :len(others)], set counts[row], return n.",
        ),
    ),
    Exercise(
        "reorder_beams",
        points=4,
        minutes=25,
        difficulty=3,
        challenge=True,
        hints=(
            "Two beams swap their texts: parents = [1, 0]. What must you have kept of row 0 before you write to it?",
            "Copy the pages of all rows first: `table.pages` is a view. Then count: each row gains its parent's pages "
            "and loses its own. In which order does no page drop to 0 that is still needed?",
            "before = [table.pages(row).copy() for row in rows]; for each parent: table.refcounts[before[parent]] += "
            "1; then table.release each page of each row in `before`; then write before[parents[i]] to rows[i], and "
            "its count.",
        ),
    ),
]


# What the checks share ----------------------------------------------------------------------------------------------


class NoText(Detokenizer):
    """Nobody reads the text of these requests."""

    def __init__(self) -> None:
        self.text, self.stopped = "", False

    def push(self, token_id: int) -> str:
        return ""

    def finish(self) -> str:
        return ""


def make_sequence(prompt: ListLike[int], max_tokens: int = 8) -> Sequence:
    params = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
    return Sequence(list(prompt), params, seed=0, eos_token_ids=(), max_model_len=9999, detokenizer=NoText())


def table_of(rows: ListLike[ListLike[int]], num_pages: int, page_size: int = 4, extra_rows: int = 1) -> PageTable:
    """A table in which row b owns the pages rows[b]; pages in several rows are shared. Behind them is old rubbish."""
    table = PageTable(num_pages, page_size, len(rows) + extra_rows)
    table.table[:] = num_pages - 1
    owners = Counter(page for pages in rows for page in pages)
    for pages in rows:
        row = table.allocate()
        table.table[row, : len(pages)] = pages
        table.counts[row] = len(pages)
    for page, count in owners.items():
        table.refcounts[page] = count
    table.free_pages = [page for page in reversed(range(num_pages)) if page not in owners]
    return table


def contents(table: PageTable, num_rows: int) -> list[list[int]]:
    return [table.pages(row).tolist() for row in range(num_rows)]


def assert_books(table: PageTable, rows: ListLike[int], when: str = "") -> None:
    """Every page is free once, or owned by as many rows as its refcount says."""
    owners = Counter(page for row in rows for page in table.pages(row).tolist())
    for page in range(table.num_pages):
        assert table.refcounts[page] == owners[page], (
            f"{when}page {page} is in {owners[page]} rows, and its refcount is {table.refcounts[page]}"
        )
    free = Counter(table.free_pages)
    for page in range(table.num_pages):
        expected = 0 if owners[page] else 1
        assert free[page] == expected, (
            f"{when}page {page} is in {owners[page]} rows, and {free[page]} times on the free list"
        )


@dataclass
class Run:
    """What came of some requests.

    Attributes:
        outputs: tokens of each request.
        first_step: step in which each got its first token.
        steps: how many there were.
        preemptions: how often a sequence lost its pages.
        shared: tokens that were not computed, since another row's pages had them.
        copied: pages copied.
        most_pages: most pages that any sequence held.
    """

    outputs: list[list[int]]
    first_step: dict[int, int] = field(default_factory=dict)
    steps: int = 0
    preemptions: int = 0
    shared: int = 0
    copied: int = 0
    most_pages: int = 0


Request = tuple[int, list[int], int]  # the step before which it arrives, its prompt, its number of tokens


def token_after(stamps: ListLike[int]) -> int:
    """A model made of arithmetic: its next token depends on all that it attends to, in order."""
    state = 7
    for stamp in stamps:
        state = (state * 31 + stamp + 1) % 1_000_003
    return state % 50


def stamps_of(tokens: ListLike[int]) -> list[int]:
    """What stands for the keys: the one of a token is a function of that token and all before it."""
    state, stamps = 1, []
    for token in tokens:
        state = (state * 131 + token + 1) % 1_000_003
        stamps.append(state)
    return stamps


def alone(prompt: ListLike[int], num_tokens: int, window: int | None) -> list[int]:
    """The tokens of a request that shares the machine with nobody."""
    tokens = list(prompt)
    for _ in range(num_tokens):
        stamps = stamps_of(tokens)
        tokens.append(token_after(stamps if window is None else stamps[-window:]))
    return tokens[len(prompt) :]


def serve(
    requests: ListLike[Request],
    parts: Parts,
    *,
    num_pages: int,
    page_size: int,
    max_batch_size: int,
    budget: int,
    window: int | None = None,
    prefix_sharing: bool = False,
) -> Run:
    """Serve requests with the engine's scheduler, a cache that keeps stamps, and a model made of arithmetic.

    Everything that a sequence attends to is compared with what it wrote there, and the books of pages are checked
    after every step.
    """
    table = PageTable(num_pages, page_size, max_batch_size)
    scheduler = Scheduler(
        table,
        max_batch_size=max_batch_size,
        max_num_batched_tokens=budget,
        window=window,
        prefix_sharing=prefix_sharing,
        parts=parts,
    )
    memory = [0] * (num_pages * page_size)
    sequences = [make_sequence(prompt, num_tokens) for _, prompt, num_tokens in requests]
    number = {sequence: i for i, sequence in enumerate(sequences)}
    run = Run([[] for _ in requests])
    limit = max(at for at, *_ in requests) + sum(2 * s.max_len for s in sequences) + 10

    def slot(sequence: Sequence, position: int) -> int:
        index = position - scheduler.evicted[sequence]
        pages = table.pages(scheduler.rows[sequence])
        assert 0 <= index // page_size < len(pages), (
            f"step {run.steps}: request {number[sequence]} has no page for its token at position {position}"
        )
        return int(pages[index // page_size]) * page_size + index % page_size

    while True:
        for sequence, (at, *_) in zip(sequences, requests, strict=True):
            if at == run.steps:
                scheduler.add(sequence)
        unfinished = [s for s, (at, *_) in zip(sequences, requests, strict=True) if at <= run.steps]
        unfinished = [s for s in unfinished if s.finish_reason is None]
        if not unfinished and all(at <= run.steps for at, *_ in requests):
            break
        assert run.steps < limit, f"after {run.steps} steps {len(unfinished)} requests have not ended: nobody gets on"
        decoding = [s for s in scheduler.running if len(s.token_ids) - s.num_computed == 1]
        schedule = scheduler.schedule()
        step = f"step {run.steps}: "
        work = dict(zip(schedule.sequences, schedule.num_new, strict=True))
        assert sum(work.values()) <= budget, f"{step}{sum(work.values())} tokens, and the budget is {budget}"
        for sequence in decoding:
            assert sequence in work or sequence in schedule.preempted, (
                f"{step}request {number[sequence]} was decoding, and got no token"
            )
        if unfinished:
            oldest = min(unfinished, key=lambda s: (requests[number[s]][0], number[s]))
            assert oldest in work, f"{step}request {number[oldest]} is the oldest of all, and got no token"
        run.preemptions += len(schedule.preempted)
        run.shared += sum(s.num_computed for s in schedule.admitted)
        run.copied += len(schedule.copies)
        for old, new in schedule.copies:
            memory[new * page_size : (new + 1) * page_size] = memory[old * page_size : (old + 1) * page_size]
        for sequence, num_new in work.items():
            end = sequence.num_computed + num_new
            stamps = stamps_of(sequence.token_ids)
            for position in range(sequence.num_computed, end):
                memory[slot(sequence, position)] = stamps[position]
            sequence.num_computed = end
            run.most_pages = max(run.most_pages, len(table.pages(scheduler.rows[sequence])))
        for sequence, num_new in work.items():
            # Every query of the step must see its keys; the first sees furthest back.
            first = 0 if window is None else max(0, sequence.num_computed - num_new - window + 1)
            stamps = stamps_of(sequence.token_ids)
            for position in range(first, sequence.num_computed):
                assert memory[slot(sequence, position)] == stamps[position], (
                    f"{step}request {number[sequence]} attends to position {position}, and the key there is not its own"
                )
        for sequence in work:
            if sequence.num_computed == len(sequence.token_ids):
                first = 0 if window is None else max(0, sequence.num_computed - window)
                seen = [memory[slot(sequence, p)] for p in range(first, sequence.num_computed)]
                sequence.append(token_after(seen))
                run.first_step.setdefault(number[sequence], run.steps)
                if sequence.finish_reason:
                    scheduler.finish(sequence)
        assert_books(table, list(scheduler.rows.values()), step)
        run.steps += 1
    assert table.num_free_pages == num_pages, f"{num_pages - table.num_free_pages} pages are gone when all have ended"
    for i, (sequence, (_, prompt, num_tokens)) in enumerate(zip(sequences, requests, strict=True)):
        run.outputs[i] = sequence.output_token_ids
        assert_equal(run.outputs[i], alone(prompt, num_tokens, window), name=f"the output of request {i}")
    return run


def random_requests(rng: random.Random, most_tokens: int, num_requests: int = 6, common: int = 0) -> list[Request]:
    """Requests whose prompts may begin alike; the longest of them grows to `most_tokens`."""
    beginning = [rng.randrange(50) for _ in range(common)]
    requests = []
    for _ in range(num_requests):
        num_tokens = rng.randint(1, max(1, most_tokens // 2))
        prompt = [rng.randrange(50) for _ in range(rng.randint(1, most_tokens - num_tokens))]
        prompt = (beginning[: rng.randint(0, common)] + prompt)[: most_tokens - num_tokens]
        requests.append((rng.randint(0, 8), prompt, num_tokens))
    return sorted(requests, key=lambda request: request[0])


def serve_at_random(parts: Parts, *, window: int | None = None, prefix_sharing: bool = False, rounds: int = 25) -> Run:
    """Many small workloads over pools of all kinds; adds up what happened."""
    total = Run([])
    for seed in range(rounds):
        rng = random.Random(seed)
        page_size, batch = rng.choice([1, 2, 3, 4]), rng.randint(2, 4)
        num_pages = rng.randint(5, 10)
        run = serve(
            random_requests(rng, min(24, num_pages * page_size), common=9 if prefix_sharing else 0),
            parts,
            num_pages=num_pages,
            page_size=page_size,
            max_batch_size=batch,
            budget=batch + rng.randint(0, 8),
            window=window,
            prefix_sharing=prefix_sharing,
        )
        total.preemptions += run.preemptions
        total.shared += run.shared
        total.copied += run.copied
        total.steps += run.steps
    return total


# A model with random weights, and a tokenizer that it does not need.
WORDS = PreTrainedTokenizerFast(
    tokenizer_object=Tokenizer(WordLevel({f"w{i}": i for i in range(40)}, unk_token="w0")), unk_token="w0"
)


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
    num_pages: int,
    page_size: int = 4,
    budget: int = 16,
    sliding_window: int | None = None,
    prefix_sharing: bool = False,
) -> LLMEngine:
    """A real model writes what it writes for one request at a time in a pool that is never short of anything."""
    model = tiny_model()
    params = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)

    def engine(parts: Parts, num_pages: int, page_size: int, budget: int, prefix_sharing: bool) -> LLMEngine:
        return LLMEngine(
            model,
            WORDS,
            (),
            num_pages=num_pages,
            page_size=page_size,
            max_batch_size=4,
            max_num_batched_tokens=budget,
            sliding_window=sliding_window,
            prefix_sharing=prefix_sharing,
            parts=parts,
        )

    reference = engine(Parts(), 1, 256, 256, False)
    want = [reference.generate(prompt, params)[0].token_ids for prompt in prompts]
    tested = engine(parts, num_pages, page_size, budget, prefix_sharing)
    got = [output.token_ids for output in tested.generate(list(prompts), params)]
    for i in range(len(prompts)):
        assert_equal(got[i], want[i], name=f"what the model writes for request {i}")
    assert_books(tested.page_table, [], "after the last request ")
    return tested


def prompts_of(*lengths: int, common: int = 0) -> list[list[int]]:
    rng = random.Random(sum(lengths))
    beginning = [rng.randrange(40) for _ in range(common)]
    return [beginning + [rng.randrange(40) for _ in range(length)] for length in lengths]


# fuse ---------------------------------------------------------------------------------------------------------------


def assert_shares(hw: Homework, pending: list[int], budget: int, expected: list[int]) -> None:
    assert_equal(hw.fuse(list(pending), budget), expected, name=f"fuse({pending}, budget={budget})")


@check("fuse", mistake="a sequence with one pending token decodes: it gets that token, and never more")
def test_decodes_get_a_token_each(hw: Homework) -> None:
    assert_shares(hw, [1], 8, [1])
    assert_shares(hw, [1, 1, 1], 3, [1, 1, 1])


@check("fuse", mistake="a prompt that fits into the budget is computed whole")
def test_a_prompt_alone(hw: Homework) -> None:
    assert_shares(hw, [5], 8, [5])
    assert_shares(hw, [8], 8, [8])


@check("fuse", mistake="a prompt longer than the budget gets the budget: a chunk, not nothing and not all of it")
def test_a_prompt_is_cut(hw: Homework) -> None:
    assert_shares(hw, [20], 8, [8])


@check("fuse", mistake="prompts and decodes share the step, and the tokens of the decodes count against the budget")
def test_a_mixed_step(hw: Homework) -> None:
    assert_shares(hw, [1, 1, 20], 8, [1, 1, 6])
    assert_shares(hw, [1, 3], 8, [1, 3])


@check("fuse", mistake="a decode gets its token wherever it stands: put it aside before an older prompt takes all")
def test_a_decode_behind_a_prompt(hw: Homework) -> None:
    assert_shares(hw, [20, 1, 1], 8, [6, 1, 1])
    assert_shares(hw, [1, 20, 1], 8, [1, 6, 1])


@check("fuse", mistake="the older prompt takes all that it can use before the next gets a token")
def test_prompts_in_order_of_age(hw: Homework) -> None:
    assert_shares(hw, [5, 7], 10, [5, 5])
    assert_shares(hw, [9, 3], 10, [9, 1])
    assert_shares(hw, [5, 1, 7, 1], 8, [5, 1, 1, 1])


@check("fuse", mistake="a prompt for which nothing is left gets 0, not one token, and nobody gets a negative number")
def test_nothing_left(hw: Homework) -> None:
    assert_shares(hw, [5, 7, 4], 10, [5, 5, 0])
    assert_shares(hw, [1, 9, 1], 3, [1, 1, 1])
    assert_shares(hw, [4, 9, 9], 4, [4, 0, 0])
    assert_shares(hw, [], 4, [])


@check("fuse", mistake="some mixture goes wrong that the checks before did not try")
def test_random_mixtures(hw: Homework) -> None:
    rng = random.Random(1)
    for _ in range(300):
        pending = [rng.choice([1, 1, rng.randint(2, 30)]) for _ in range(rng.randint(1, 8))]
        budget = len(pending) + rng.randint(0, 40)
        # One token at a time: to the first decode that has none, else to the first prompt that can use one.
        want = [0] * len(pending)
        order = sorted(range(len(pending)), key=lambda i: pending[i] > 1)
        for _ in range(budget):
            i = next((i for i in order if want[i] < pending[i]), None)
            if i is not None:
                want[i] += 1
        assert_shares(hw, pending, budget, want)


@check("fuse", mistake="under the engine's scheduler, with requests that come and go, a step goes wrong")
def test_fuse_in_the_scheduler(hw: Homework) -> None:
    serve_at_random(replace(Parts(), fuse=hw.fuse))


@check("fuse", mistake="a model writes other tokens with your steps than alone")
def test_fuse_with_a_model(hw: Homework) -> None:
    parts = replace(Parts(), fuse=hw.fuse)
    engine = assert_tokens_of_a_model(parts, prompts_of(21, 3, 9, 5, 30), num_pages=40, budget=8)
    assert engine.metrics.steps > 20, "too few steps"


# admit --------------------------------------------------------------------------------------------------------------


def assert_admits(hw: Homework, tokens: list[int], pages: list[int], left: tuple[int, int, int], expected: int) -> None:
    """`left` is the budget, the free pages and the free rows."""
    budget, free_pages, free_rows = left
    got = hw.admit(list(tokens), list(pages), budget=budget, free_pages=free_pages, free_rows=free_rows)
    assert_equal(
        got, expected, name=f"admit({tokens}, {pages}, {budget=}, {free_pages=}, {free_rows=})".replace("'", "")
    )


@check("admit", mistake="with room for everybody everybody comes in; return how many, not which")
def test_room_for_all(hw: Homework) -> None:
    assert_admits(hw, [3, 4], [1, 1], (100, 100, 100), 2)
    assert_admits(hw, [], [], (100, 100, 100), 0)


@check("admit", mistake="each request takes a row")
def test_rows_run_out(hw: Homework) -> None:
    assert_admits(hw, [3, 4, 5], [1, 1, 1], (100, 100, 2), 2)
    assert_admits(hw, [3], [1], (100, 100, 0), 0)


@check("admit", mistake="a request comes in with all its pages or not at all, and may take the very last")
def test_pages_run_out(hw: Homework) -> None:
    assert_admits(hw, [9], [3], (100, 2, 4), 0)
    assert_admits(hw, [9], [3], (100, 3, 4), 1)
    assert_admits(hw, [9], [3], (100, -1, 4), 0)


@check("admit", mistake="a page that one request takes is gone for the next: the pages add up")
def test_pages_add_up(hw: Homework) -> None:
    assert_admits(hw, [9, 9], [3, 3], (100, 5, 4), 1)
    assert_admits(hw, [9, 9, 2], [3, 3, 1], (100, 6, 4), 2)


@check("admit", mistake="a prompt longer than the budget comes in all the same: it begins with a chunk")
def test_a_long_prompt_comes_in(hw: Homework) -> None:
    assert_admits(hw, [20], [5], (8, 10, 4), 1)
    assert_admits(hw, [5, 20], [2, 5], (8, 10, 4), 2)


@check("admit", mistake="who finds no token of the budget left stays outside, and so do all behind")
def test_tokens_run_out(hw: Homework) -> None:
    assert_admits(hw, [3], [1], (0, 10, 4), 0)
    assert_admits(hw, [8, 3], [2, 1], (8, 10, 4), 1)
    assert_admits(hw, [4, 4, 3], [1, 1, 1], (8, 10, 4), 2)


@check("admit", mistake="nobody is overtaken: if the first does not fit, a smaller one behind it has to wait as well")
def test_nobody_is_overtaken(hw: Homework) -> None:
    assert_admits(hw, [9, 2], [4, 1], (100, 3, 4), 0)
    assert_admits(hw, [2, 9, 2], [1, 4, 1], (100, 4, 4), 1)


@check("admit", mistake="some queue goes wrong that the checks before did not try")
def test_random_queues(hw: Homework) -> None:
    rng = random.Random(2)
    for _ in range(300):
        n = rng.randint(1, 7)
        tokens, pages = ([rng.randint(1, most) for _ in range(n)] for most in (12, 5))
        budget, free_pages, free_rows = rng.randint(0, 40), rng.randint(-2, 16), rng.randint(0, 7)

        def possible(
            k: int,
            tokens: list[int] = tokens,
            pages: list[int] = pages,
            limits: tuple[int, int, int] = (budget, free_pages, free_rows),
        ) -> bool:
            # The last of k needs a token after all that the others want.
            return sum(tokens[: k - 1]) < limits[0] and sum(pages[:k]) <= limits[1] and k <= limits[2]

        want = max([0, *(k for k in range(1, n + 1) if possible(k))])
        assert_admits(hw, tokens, pages, (budget, free_pages, free_rows), want)


@check("admit", mistake="under the engine's scheduler, with requests that come and go, a step goes wrong")
def test_admit_in_the_scheduler(hw: Homework) -> None:
    serve_at_random(replace(Parts(), admit=hw.admit))


@check("admit", mistake="a model writes other tokens with your admissions than alone")
def test_admit_with_a_model(hw: Homework) -> None:
    assert_tokens_of_a_model(replace(Parts(), admit=hw.admit), prompts_of(21, 3, 9, 5, 30), num_pages=14, budget=8)


# preempt ------------------------------------------------------------------------------------------------------------


@dataclass
class Station:
    """Three sequences that run, one that waits, and a pool that is full."""

    running: list[Sequence]
    waiting: deque[Sequence]
    rows: dict[Sequence, int]
    table: PageTable

    @classmethod
    def full(cls, pages: ListLike[ListLike[int]] = ((0, 4), (3, 1, 6), (5, 2))) -> "Station":
        running = [make_sequence(range(4 * len(own) - 2)) for own in pages]
        for sequence in running:
            sequence.num_computed = len(sequence.token_ids)
            sequence.append(41)
            sequence.append(42)
            sequence.num_computed += 1
        table = table_of(pages, num_pages=7)
        return cls(running, deque([make_sequence([9, 9])]), {s: row for row, s in enumerate(running)}, table)

    def preempt(self, hw: Homework) -> Sequence:
        return hw.preempt(self.running, self.waiting, self.rows, self.table)


@check("preempt", mistake="the newest gives way, the last of `running`: return it, and take it off that list")
def test_the_newest_goes(hw: Homework) -> None:
    station = Station.full()
    old, middle, new = station.running
    got = station.preempt(hw)
    assert got is not None, "preempt returns None: is a `return` missing?"
    assert got is new, "the sequence returned is not the one that came last"
    assert station.running == [old, middle], "`running` should lose its last sequence and no other"


@check("preempt", mistake="its pages go back to the pool and its row to the free rows; `rows` forgets it")
def test_its_pages_are_free(hw: Homework) -> None:
    station = Station.full()
    old, middle, _ = station.running
    free_rows = len(station.table.free_rows)
    station.preempt(hw)
    assert_equal(sorted(station.table.free_pages), [2, 5], name="the free pages")
    assert_equal(len(station.table.free_rows), free_rows + 1, name="the number of free rows")
    assert station.rows == {old: 0, middle: 1}, "`rows` should hold the two that still run, in the rows that they had"
    assert_equal(contents(station.table, 2), [[0, 4], [3, 1, 6]], name="the pages of the others")


@check("preempt", mistake="what was computed is lost with the pages: num_computed is 0, or it attends to nothing")
def test_nothing_of_it_is_computed(hw: Homework) -> None:
    station = Station.full()
    old, middle, new = station.running
    station.preempt(hw)
    assert_equal(new.num_computed, 0, name="num_computed")
    assert_equal([old.num_computed, middle.num_computed], [7, 11], name="num_computed of the others")


@check("preempt", mistake="its output was sent to the user: token_ids keeps every token")
def test_it_keeps_its_tokens(hw: Homework) -> None:
    station = Station.full()
    new = station.running[-1]
    before = list(new.token_ids)
    station.preempt(hw)
    assert_equal(new.token_ids, before, name="token_ids")
    assert_equal(new.num_prompt_tokens, len(before) - 2, name="num_prompt_tokens")
    assert new.finish_reason is None, "it has not ended"


@check("preempt", mistake="everybody who waits came later: it waits in front of them")
def test_it_waits_first(hw: Homework) -> None:
    station = Station.full()
    new, waiting = station.running[-1], station.waiting[0]
    station.preempt(hw)
    assert list(station.waiting) == [new, waiting], "`waiting` should hold it first, then the one that waited before"


@check("preempt", mistake="a page that another row owns, too, is not free: count its owners down with page_table.erase")
def test_shared_pages_stay(hw: Homework) -> None:
    station = Station.full([(0, 4), (3, 1, 6), (0, 4, 2)])
    station.preempt(hw)
    assert_equal(sorted(station.table.free_pages), [2, 5], name="the free pages")
    assert_books(station.table, [0, 1])


@check("preempt", mistake="preempting several in a row mixes up their order or loses pages")
def test_one_after_the_other(hw: Homework) -> None:
    rng = random.Random(3)
    for _ in range(30):
        pages, order = list(range(7)), rng.sample(range(7), 7)
        cuts = sorted(rng.sample(pages[1:], 2))
        station = Station.full([order[: cuts[0]], order[cuts[0] : cuts[1]], order[cuts[1] :]])
        everyone = [*station.running, *station.waiting]
        for _ in range(3):
            station.preempt(hw)
            assert station.running + list(station.waiting) == everyone, "the order by age is lost"
            assert_books(station.table, list(station.rows.values()))


@check("preempt", mistake="under the engine's scheduler, in pools that are too small, something goes wrong")
def test_preempt_in_the_scheduler(hw: Homework) -> None:
    run = serve_at_random(replace(Parts(), preempt=hw.preempt), rounds=40)
    assert run.preemptions > 20, "the pools were large enough for all"
    serve_at_random(replace(Parts(), preempt=hw.preempt), prefix_sharing=True)


@check("preempt", mistake="a model writes other tokens after a preemption than alone")
def test_preempt_with_a_model(hw: Homework) -> None:
    engine = assert_tokens_of_a_model(replace(Parts(), preempt=hw.preempt), prompts_of(9, 6, 11, 8), num_pages=9)
    assert engine.metrics.preemptions >= 3, "the pool was large enough for all"


# share_prefix -------------------------------------------------------------------------------------------------------


def assert_shared(
    hw: Homework, rows: list[list[int]], donor: int, num_tokens: int, expected: list[int], num_pages: int = 9
) -> PageTable:
    """Share from `donor` into a new row, which should then have the pages `expected`."""
    table = table_of(rows, num_pages)
    free = list(table.free_pages)
    new = table.allocate()
    hw.share_prefix(table, new, donor, num_tokens)
    assert_equal(contents(table, len(rows) + 1), [*rows, expected], name="the pages of all rows, the new one last")
    assert_equal(table.free_pages, free, name="the free pages")
    return table


@check("share_prefix", mistake="the new row points to the donor's very page; it takes none from the free list")
def test_one_page(hw: Homework) -> None:
    assert_shared(hw, [[5]], donor=0, num_tokens=4, expected=[5])


@check("share_prefix", mistake="the page has one owner more: without that it is freed while somebody still reads it")
def test_one_owner_more(hw: Homework) -> None:
    table = assert_shared(hw, [[5]], donor=0, num_tokens=4, expected=[5])
    assert_equal(int(table.refcounts[5]), 2, name="the refcount")


@check("share_prefix", mistake="only the pages that hold the first num_tokens tokens are shared, in the same order")
def test_no_more_than_the_prefix(hw: Homework) -> None:
    table = assert_shared(hw, [[5, 2, 7, 0]], donor=0, num_tokens=8, expected=[5, 2])
    assert_equal(table.refcounts.tolist(), [1, 0, 2, 0, 0, 2, 0, 1, 0], name="the refcounts")


@check("share_prefix", mistake="a page that the prefix fills in part is shared, too")
def test_a_page_in_part(hw: Homework) -> None:
    assert_shared(hw, [[5, 2, 7]], donor=0, num_tokens=1, expected=[5])
    assert_shared(hw, [[5, 2, 7]], donor=0, num_tokens=5, expected=[5, 2])
    assert_shared(hw, [[5, 2, 7]], donor=0, num_tokens=11, expected=[5, 2, 7])


@check("share_prefix", mistake="a page may have many owners: count one more, do not set the count to two")
def test_three_owners(hw: Homework) -> None:
    rows = [[5, 2], [5, 2, 1], [3]]
    table = assert_shared(hw, rows, donor=1, num_tokens=10, expected=[5, 2, 1])
    assert_equal(table.refcounts.tolist(), [0, 2, 3, 1, 0, 3, 0, 0, 0], name="the refcounts")


@check("share_prefix", mistake="when one of the two ends, the other still has its pages")
def test_the_donor_ends_first(hw: Homework) -> None:
    table = assert_shared(hw, [[5, 2, 7]], donor=0, num_tokens=8, expected=[5, 2])
    table.erase(0)
    assert_equal(table.pages(1).tolist(), [5, 2], name="the pages of the row whose donor has ended")
    assert_books(table, [1])
    table.erase(1)
    assert_books(table, [])


@check("share_prefix", mistake="some history of shared rows goes wrong that the checks before did not try")
def test_random_sharing(hw: Homework) -> None:
    rng = random.Random(4)
    for _ in range(40):
        table, lengths = PageTable(30, 3, 6), dict[int, int]()
        for _ in range(25):
            if lengths and rng.random() < 0.3:
                row = rng.choice(list(lengths))
                del lengths[row]
                table.erase(row)
            elif table.free_rows:
                row, length = table.allocate(), rng.randint(1, 14)
                donor = rng.choice(list(lengths)) if lengths and rng.random() < 0.7 else None
                if donor is None and table.reserve(row, length):
                    lengths[row] = length
                elif donor is not None:
                    lengths[row] = rng.randint(1, lengths[donor])
                    want = table.pages(donor).tolist()[: -(-lengths[row] // 3)]
                    hw.share_prefix(table, row, donor, lengths[row])
                    assert_equal(table.pages(row).tolist(), want, name="the pages of the row")
                else:
                    table.erase(row)
            assert_books(table, list(lengths))


def sharing(hw: Homework) -> Parts:
    return replace(Parts(), share_prefix=hw.share_prefix, copy_on_write=hw.copy_on_write)


@check("share_prefix", mistake="under the engine's scheduler, with requests that begin alike, something goes wrong")
def test_share_prefix_in_the_scheduler(hw: Homework) -> None:
    run = serve_at_random(sharing(hw), prefix_sharing=True)
    assert run.shared > 50, "nothing was shared"


@check("share_prefix", mistake="a model writes other tokens from shared pages than from its own")
def test_share_prefix_with_a_model(hw: Homework) -> None:
    engine = assert_tokens_of_a_model(
        sharing(hw), prompts_of(3, 5, 2, 7, common=10), num_pages=30, budget=64, prefix_sharing=True
    )
    assert engine.metrics.shared_tokens >= 20, "nothing was shared"


# copy_on_write ------------------------------------------------------------------------------------------------------


def assert_copied(
    hw: Homework,
    rows: list[list[int]],
    row: int,
    span: tuple[int, int],
    copied: list[int],
    num_pages: int = 9,
) -> PageTable:
    """Row `row` writes tokens span[0] to span[1] - 1; of its pages those with the indices `copied` must be replaced."""
    table = table_of(rows, num_pages)
    free = set(table.free_pages)
    pairs = hw.copy_on_write(table, row, *span)
    call = f"copy_on_write(row {row} with pages {rows[row]}, first={span[0]}, end={span[1]})"
    assert isinstance(pairs, list), f"{call} returns {pairs!r}; it should return a list of {len(copied)} pairs"
    assert_equal([old for old, _ in pairs], [rows[row][index] for index in copied], name=f"the pages copied by {call}")
    assert {new for _, new in pairs} <= free, f"{call} copies to a page that was not free: {pairs}"
    want = [list(pages) for pages in rows]
    for index, (_, new) in zip(copied, pairs, strict=True):
        want[row][index] = new
    assert_equal(contents(table, len(rows)), want, name="the pages of all rows afterwards")
    return table


@check("copy_on_write", mistake="a page with one owner is written in place: there is nothing to copy, and that is []")
def test_own_pages(hw: Homework) -> None:
    table = assert_copied(hw, [[3, 1]], 0, (4, 6), [])
    assert_books(table, [0])


@check(
    "copy_on_write",
    mistake="a shared page that is written gives way to a free one, in this row only; the pair is (old, new)",
)
def test_a_shared_page(hw: Homework) -> None:
    assert_copied(hw, [[3], [3]], 1, (2, 3), [0])


@check("copy_on_write", mistake="the shared page has one owner fewer, the new page has one and has left the free list")
def test_owners_are_counted(hw: Homework) -> None:
    table = assert_copied(hw, [[3], [3]], 1, (2, 3), [0])
    assert_books(table, [0, 1])


@check("copy_on_write", mistake="shared pages in front of the tokens that are written are only read: they stay shared")
def test_pages_before_stay(hw: Homework) -> None:
    table = assert_copied(hw, [[3, 1, 2], [3, 1, 2]], 0, (9, 10), [2])
    assert_books(table, [0, 1])


@check("copy_on_write", mistake="token `end` is not written: if it begins a page, that page is left alone")
def test_end_is_not_written(hw: Homework) -> None:
    assert_copied(hw, [[3, 1, 2], [3, 1, 2]], 1, (5, 8), [1])
    assert_copied(hw, [[3, 1, 2], [3, 1, 2]], 1, (5, 9), [1, 2])
    assert_copied(hw, [[3, 1, 2], [3, 1, 2]], 1, (4, 8), [1])


@check("copy_on_write", mistake="of the pages that are written only the shared ones are copied")
def test_shared_and_own_pages(hw: Homework) -> None:
    table = assert_copied(hw, [[3, 1], [3, 1, 2, 0]], 1, (5, 15), [1])
    assert_books(table, [0, 1])


@check("copy_on_write", mistake="of three owners one leaves: two are left, and they still share")
def test_three_owners_part(hw: Homework) -> None:
    table = assert_copied(hw, [[3], [3], [3]], 0, (1, 2), [0])
    assert_equal(int(table.refcounts[3]), 2, name="owners of the old page")
    assert len(hw.copy_on_write(table, 1, 1, 2)) == 1, "the second owner still shares its page, and copies it"
    assert hw.copy_on_write(table, 2, 1, 2) == [], "the last owner has the page for itself, and copies nothing"
    assert_books(table, [0, 1, 2])


@check("copy_on_write", mistake="with too few free pages return None and change nothing: count before you take")
def test_too_few_pages(hw: Homework) -> None:
    rows = [[0, 1, 2], [0, 1, 2]]
    table = table_of(rows, num_pages=4)
    assert hw.copy_on_write(table, 1, 2, 9) is None, "three pages to copy and one free page: it should return None"
    assert_equal(contents(table, 2), rows, name="the pages of both rows, after a copy that was not possible")
    assert_equal(table.free_pages, [3], name="the free pages, after a copy that was not possible")
    assert_books(table, [0, 1])
    assert hw.copy_on_write(table, 1, 8, 9) == [(2, 3)], "one page to copy and one free page: that is enough"
    full = table_of([[0, 1, 2, 3]], num_pages=4)
    assert hw.copy_on_write(full, 0, 0, 16) == [], "nothing is shared: no free page is needed"


@check("copy_on_write", mistake="after many shares and writes somebody reads what somebody else wrote")
def test_nobody_reads_what_others_wrote(hw: Homework) -> None:
    rng = random.Random(5)
    for _ in range(30):
        table, texts, memory = PageTable(24, 3, 5), dict[int, list[int]](), [0] * 72
        for _ in range(40):
            free_row = bool(table.free_rows)
            donors = [row for row, text in texts.items() if text]
            if donors and free_row and rng.random() < 0.4:  # begin with the pages of another
                donor = rng.choice(donors)
                row, length = table.allocate(), rng.randint(1, len(texts[donor]))
                pages = table.pages(donor)[: -(-length // 3)].copy()
                table.table[row, : len(pages)], table.counts[row] = pages, len(pages)
                table.refcounts[pages] += 1
                texts[row] = texts[donor][:length]
            elif free_row and rng.random() < 0.5:
                texts[table.allocate()] = []
            elif texts and rng.random() < 0.2:
                row = rng.choice(list(texts))
                del texts[row]
                table.erase(row)
            elif texts:  # write a few tokens
                row = rng.choice(list(texts))
                first, end = len(texts[row]), len(texts[row]) + rng.randint(1, 5)
                if end > 20 or not table.reserve(row, end):
                    continue
                pairs = hw.copy_on_write(table, row, first, end)
                if pairs is None:
                    table.erase(row)
                    del texts[row]
                    continue
                for old, new in pairs:
                    memory[new * 3 : new * 3 + 3] = memory[old * 3 : old * 3 + 3]
                for position in range(first, end):
                    texts[row].append(rng.randrange(1000))
                    memory[int(table.table[row, position // 3]) * 3 + position % 3] = texts[row][-1]
            for row, text in texts.items():
                read = [memory[int(table.table[row, p // 3]) * 3 + p % 3] for p in range(len(text))]
                assert read == text, f"row {row} wrote {text} and reads {read}"
            assert_books(table, list(texts))


@check("copy_on_write", mistake="under the engine's scheduler, with requests that begin alike, something goes wrong")
def test_copy_on_write_in_the_scheduler(hw: Homework) -> None:
    run = serve_at_random(sharing(hw), prefix_sharing=True, rounds=40)
    assert run.copied > 10, "nothing was copied"


@check("copy_on_write", mistake="a model writes other tokens from shared pages than from its own")
def test_copy_on_write_with_a_model(hw: Homework) -> None:
    prompts = prompts_of(3, 3, 2, common=10)
    engine = assert_tokens_of_a_model(
        sharing(hw), [*prompts, prompts[0][:11], prompts[0]], num_pages=12, budget=64, prefix_sharing=True
    )
    assert engine.metrics.shared_tokens >= 10, "nothing was shared"


# evict_pages --------------------------------------------------------------------------------------------------------


def assert_evicted(
    hw: Homework, pages: list[int], first_position: int, next_query: int, window: int, expected: int
) -> PageTable:
    """A row with pages of 4 tokens gives up `expected` of them."""
    table = table_of([pages], num_pages=9)
    got = hw.evict_pages(table, 0, first_position, next_query, window)
    call = f"evict_pages(pages of 4 from position {first_position}, {next_query=}, {window=})"
    assert_equal(got, expected, name=f"the result of {call}")
    return table


@check("evict_pages", mistake="a key that the window still holds must stay, and its page with it")
def test_nothing_to_give_up(hw: Homework) -> None:
    table = assert_evicted(hw, [6, 2], 0, 6, 100, 0)
    assert_equal(table.pages(0).tolist(), [6, 2], name="the pages of the row")
    assert_evicted(hw, [6, 2], 0, 6, 4, 0)  # positions 3 to 6 are seen, and 3 is in the first page
    assert_evicted(hw, [6], 0, 0, 1, 0)


@check("evict_pages", mistake="the query at q sees q - window + 1 to q: the page that ends just before that goes")
def test_the_first_page_goes(hw: Homework) -> None:
    assert_evicted(hw, [6, 2], 0, 7, 4, 1)  # positions 4 to 7 are seen
    assert_evicted(hw, [6, 2], 0, 4, 1, 1)  # position 4 alone is seen, and its page is not written yet


@check("evict_pages", mistake="the oldest pages go; those that stay move to the front of the row, in order")
def test_the_others_move_up(hw: Homework) -> None:
    table = assert_evicted(hw, [6, 2, 5, 0], 0, 13, 6, 2)
    assert_equal(table.pages(0).tolist(), [5, 0], name="the pages of the row")


@check("evict_pages", mistake="the pages given up have an owner fewer, and are free if that was the last one")
def test_the_pages_are_free(hw: Homework) -> None:
    table = assert_evicted(hw, [6, 2, 5, 0], 0, 13, 6, 2)
    assert_books(table, [0])


@check("evict_pages", mistake="the row begins at first_position once pages were given up: count from there")
def test_the_row_begins_later(hw: Homework) -> None:
    assert_evicted(hw, [5, 0], 8, 13, 6, 0)
    table = assert_evicted(hw, [5, 0, 1], 8, 17, 6, 1)
    assert_equal(table.pages(0).tolist(), [0, 1], name="the pages of the row")
    assert_evicted(hw, [5, 0, 1], 8, 9, 6, 0)  # the window begins before the row does


@check("evict_pages", mistake="a page that another row owns, too, stays with that row: release it, do not free it")
def test_a_shared_page_stays(hw: Homework) -> None:
    table = table_of([[6, 2, 5], [6, 2]], num_pages=9)
    assert_equal(hw.evict_pages(table, 0, 0, 9, 2), 2, name="the pages given up")
    assert_equal(contents(table, 2), [[5], [6, 2]], name="the pages of both rows")
    assert_books(table, [0, 1])


@check("evict_pages", mistake="some row goes wrong that the checks before did not try")
def test_random_rows(hw: Homework) -> None:
    rng = random.Random(6)
    for _ in range(300):
        page_size, count = rng.randint(1, 5), rng.randint(1, 8)
        pages, first = rng.sample(range(20), count), rng.randint(0, 5) * page_size
        window, query = rng.randint(1, 25), first + rng.randint(0, count * page_size)
        table = table_of([pages], 20, page_size)
        # Page by page, key by key: seen by the next query, or by one that comes later?
        hidden = [all(query - key >= window for key in range(start, start + page_size)) for start in
                  range(first, first + count * page_size, page_size)]  # fmt: skip
        want = next((i for i, gone in enumerate(hidden) if not gone), count)
        got = hw.evict_pages(table, 0, first, query, window)
        assert_equal(got, want, name=f"the result for {page_size=}, {first=}, {query=}, {window=}")
        assert_equal(table.pages(0).tolist(), pages[want:], name="the pages of the row")
        assert_books(table, [0])


@check("evict_pages", mistake="under the engine's scheduler, a key is missing, or a page too many is held")
def test_evict_pages_in_the_scheduler(hw: Homework) -> None:
    parts = replace(Parts(), evict_pages=hw.evict_pages)
    for window in (1, 3, 7):
        serve_at_random(parts, window=window, rounds=12)
    run = serve([(0, [1, 2, 3], 80)], parts, num_pages=21, page_size=4, max_batch_size=1, budget=4, window=8)
    assert run.most_pages <= 3, f"a window of 8 keys fills 3 pages of 4 at most, and {run.most_pages} were held"


@check("evict_pages", mistake="a model writes other tokens than with all its pages")
def test_evict_pages_with_a_model(hw: Homework) -> None:
    parts = replace(Parts(), evict_pages=hw.evict_pages)
    assert_tokens_of_a_model(parts, prompts_of(14, 5, 9), num_tokens=20, num_pages=60, budget=8, sliding_window=6)


# reorder_beams ------------------------------------------------------------------------------------------------------


class NothingFreedTooEarly(PageTable):
    """A table that says which pages were put on the free list."""

    freed: list[int]

    def release(self, page: int) -> None:
        super().release(page)
        if self.refcounts[page] == 0:
            self.freed.append(page)


def assert_beams(hw: Homework, rows: list[list[int]], beams: list[int], parents: list[int]) -> None:
    """Beams are rows of the table; the other rows are not touched."""
    table = table_of(rows, num_pages=12)
    table.__class__ = NothingFreedTooEarly
    assert isinstance(table, NothingFreedTooEarly)
    table.freed = []
    free_rows = list(table.free_rows)
    want = [list(pages) for pages in rows]
    for beam, parent in zip(beams, parents, strict=True):
        want[beam] = list(rows[beams[parent]])
    hw.reorder_beams(table, list(beams), list(parents))
    assert_equal(contents(table, len(rows)), want, name=f"the pages of all rows, with {parents=}")
    assert_books(table, range(len(rows)))
    assert_equal(table.free_rows, free_rows, name="the free rows")
    needed = {page for pages in want for page in pages} & set(table.freed)
    assert not needed, f"the pages {sorted(needed)} were on the free list for a while, and are still needed"


@check(
    "reorder_beams",
    mistake="a beam that continues itself keeps its pages: add the new owners before any page is released",
)
def test_nothing_changes(hw: Homework) -> None:
    assert_beams(hw, [[3, 1], [4, 0]], [0, 1], [0, 1])


@check("reorder_beams", mistake="the beam that is given up gives its pages back; those of its new parent are shared")
def test_one_goes_on_twice(hw: Homework) -> None:
    assert_beams(hw, [[3, 1], [4, 0]], [0, 1], [0, 0])
    assert_beams(hw, [[3, 1], [4, 0]], [0, 1], [1, 1])


@check("reorder_beams", mistake="all rows change at once: keep what they held before you write to the first")
def test_two_swap(hw: Homework) -> None:
    assert_beams(hw, [[3, 1], [4, 0]], [0, 1], [1, 0])
    assert_beams(hw, [[3], [4], [5]], [0, 1, 2], [2, 0, 1])


@check("reorder_beams", mistake="a row takes over the number of its parent's pages, too")
def test_beams_of_different_lengths(hw: Homework) -> None:
    assert_beams(hw, [[3], [4, 0, 7]], [0, 1], [1, 1])
    assert_beams(hw, [[3], [4, 0, 7]], [0, 1], [0, 0])


@check("reorder_beams", mistake="pages that beams share already lose one owner for each beam that leaves, not all")
def test_beams_that_share(hw: Homework) -> None:
    assert_beams(hw, [[3, 1], [3, 4], [3, 5]], [0, 1, 2], [0, 0, 2])
    assert_beams(hw, [[3, 1], [3, 4], [3, 5]], [0, 1, 2], [2, 2, 2])


@check(
    "reorder_beams", mistake="`parents` counts in `rows`; other rows of the table are not beams and keep what they have"
)
def test_rows_that_are_no_beams(hw: Homework) -> None:
    assert_beams(hw, [[3, 1], [3, 4], [3, 5], [6]], [2, 1], [0, 0])
    assert_beams(hw, [[9], [3, 4], [3, 5], [6]], [3, 1], [1, 0])


@check("reorder_beams", mistake="some search goes wrong that the checks before did not try")
def test_random_beams(hw: Homework) -> None:
    rng = random.Random(7)
    for _ in range(200):
        common, own = rng.sample(range(6), 2), rng.sample(range(6, 12), 6)
        rows = [common[: rng.randint(0, 2)] + [own.pop() for _ in range(rng.randint(0, 1))] for _ in range(5)]
        beams = rng.sample(range(5), rng.randint(1, 4))
        assert_beams(hw, rows, beams, [rng.randrange(len(beams)) for _ in beams])


@check("reorder_beams", mistake="after many steps of a beam search a beam reads what another wrote")
def test_a_beam_search(hw: Homework) -> None:
    rng = random.Random(8)
    for _ in range(20):
        table, memory = PageTable(40, 3, 4), [0] * 120
        rows = [table.allocate() for _ in range(4)]
        texts: list[list[int]] = [[] for _ in rows]
        for _ in range(20):
            for row, text in zip(rows, texts, strict=True):
                assert table.reserve(row, len(text) + 1), "the pool has run dry"
                for old, new in hw.copy_on_write(table, row, len(text), len(text) + 1):
                    memory[new * 3 : new * 3 + 3] = memory[old * 3 : old * 3 + 3]
                text.append(rng.randrange(1000))
                end = len(text) - 1
                memory[int(table.table[row, end // 3]) * 3 + end % 3] = text[-1]
            parents = [rng.randrange(4) for _ in rows]
            hw.reorder_beams(table, rows, parents)
            texts = [list(texts[parent]) for parent in parents]
            for row, text in zip(rows, texts, strict=True):
                read = [memory[int(table.table[row, p // 3]) * 3 + p % 3] for p in range(len(text))]
                assert read == text, f"a beam of {text} reads {read}"
            assert_books(table, rows)
