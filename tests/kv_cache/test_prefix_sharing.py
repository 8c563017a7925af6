"""Prefix matches against a search over every prefix ever listed, and copies before shared pages are written."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule

from mini_engine.kv_cache.page_table import PageTable
from mini_engine.kv_cache.prefix_sharing import ROOT, PrefixIndex, copy_on_write, match_prefix

NUM_PAGES, PAGE_SIZE, ROWS = 8, 2, 4
PROMPT = st.lists(st.integers(0, 1), max_size=2 * NUM_PAGES)  # two tokens only, so that many prompts begin alike


def tokens_of(values) -> np.ndarray:
    return np.array(values, dtype=np.int32)


class PrefixMachine(RuleBasedStateMachine):
    """Requests come, share what the index finds, compute the rest, and leave; their pages are used again.

    The model is a dictionary: for each prefix of whole pages that was ever listed, the page that holds its end, and
    how often that page had been taken then.
    """

    def __init__(self) -> None:
        super().__init__()
        self.table = PageTable(NUM_PAGES, PAGE_SIZE, ROWS)
        self.index = PrefixIndex(self.table)
        self.listed: dict[tuple[int, ...], tuple[int, int]] = {}
        self.prompts: dict[int, list[int]] = {}

    def is_live(self, prefix: tuple[int, ...]) -> bool:
        page, generation = self.listed.get(prefix, (0, -1))
        return bool(self.table.refcounts[page] > 0 and self.table.generation[page] == generation)

    def expected(self, prompt: list[int]) -> list[int]:
        pages = []
        for end in range(PAGE_SIZE, len(prompt) + 1, PAGE_SIZE):
            if not self.is_live(tuple(prompt[:end])):
                break
            pages.append(self.listed[tuple(prompt[:end])][0])
        return pages

    @precondition(lambda self: self.table.num_free_rows)
    @rule(prompt=PROMPT, computed=st.integers(0, 2 * NUM_PAGES), shares=st.booleans())
    def arrive(self, prompt: list[int], computed: int, shares: bool) -> None:
        """Take what is found, compute the rest of the prompt or a chunk of it, and list all full pages."""
        row = self.table.allocate()
        pages = self.index.match(tokens_of(prompt)) if shares else self.table.pages(row)
        self.table.share(row, pages.copy())
        prompt = prompt[: max(computed, len(pages) * PAGE_SIZE)]
        missing, total = self.table.missing(np.array([row]), np.array([len(prompt)]))
        if total > self.table.num_free_pages:
            self.table.release(row)
            return
        self.table.take(np.array([row]), missing)
        self.prompts[row] = prompt
        self.list_pages(row)

    def list_pages(self, row: int) -> None:
        prompt = self.prompts[row]
        self.index.insert(tokens_of(prompt), self.table.pages(row))
        for index, page in enumerate(self.table.pages(row)[: len(prompt) // PAGE_SIZE].tolist()):
            prefix = tuple(prompt[: (index + 1) * PAGE_SIZE])
            if not self.is_live(prefix):
                self.listed[prefix] = page, int(self.table.generation[page])

    @precondition(lambda self: self.prompts)
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        row = data.draw(st.sampled_from(sorted(self.prompts)))
        self.table.release(row)
        del self.prompts[row]

    @precondition(lambda self: self.prompts)
    @rule(data=st.data())
    def list_again(self, data: st.DataObject) -> None:
        self.list_pages(data.draw(st.sampled_from(sorted(self.prompts))))

    @rule(prompt=PROMPT)
    def match(self, prompt: list[int]) -> None:
        assert self.index.match(tokens_of(prompt)).tolist() == self.expected(prompt)

    @precondition(lambda self: self.prompts)
    @rule(data=st.data(), more=PROMPT)
    def match_a_continuation(self, data: st.DataObject, more: list[int]) -> None:
        self.match(self.prompts[data.draw(st.sampled_from(sorted(self.prompts)))] + more)


TestPrefixIndex = PrefixMachine.TestCase
TestPrefixIndex.settings = settings(max_examples=100, stateful_step_count=25, deadline=None)


@given(st.lists(st.lists(st.integers(0, 1), max_size=12), max_size=5), st.lists(st.integers(0, 1), max_size=12))
def test_match_prefix_finds_the_longest_common_prefix_in_whole_pages(prompts, query):
    """Prompts in pages of their own, in a tree built by hand; the oracle compares lists."""
    children: dict[int, dict[bytes, int]] = {}
    prefix_of: dict[int, list[int]] = {ROOT: []}
    for prompt in prompts:
        parent = ROOT
        for start in range(0, len(prompt) - 2, 3):
            key = tokens_of(prompt[start : start + 3]).tobytes()
            page = children.setdefault(parent, {}).setdefault(key, len(prefix_of))
            prefix_of[page] = prompt[: start + 3]
            parent = page
    pages = match_prefix(children, tokens_of(query), 3)
    assert [prefix_of[page] for page in pages] == [query[: 3 * (i + 1)] for i in range(len(pages))]
    common = max((sum(np.cumprod([a == b for a, b in zip(p, query, strict=False)])) // 3 for p in prompts), default=0)
    assert len(pages) == common


def test_a_request_that_returns_to_its_old_pages_is_found_again():
    """The pool gives the page that was returned last: the same tokens in the same page, taken once more."""
    table = PageTable(4, 2, 2)
    index = PrefixIndex(table)
    for _ in range(3):
        row = table.allocate()
        table.take(np.array([row]), np.array([2]))
        assert index.match(tokens_of([5, 6, 7, 8])).tolist() == []
        index.insert(tokens_of([5, 6, 7, 8]), table.pages(row))
        assert index.match(tokens_of([5, 6, 7, 8])).tolist() == table.pages(row).tolist()
        table.release(row)


class CountedTokens(np.ndarray):
    """Tokens that count how many of them are read by slices."""

    num_read = 0

    def __getitem__(self, key):
        result = super().__getitem__(key)
        CountedTokens.num_read += np.size(result)
        return result


def test_matching_and_listing_read_each_token_once():
    """Not once for every other request, and not once for every page before it."""
    for num_tokens in (64, 4096):
        table = PageTable(2 * num_tokens, 4, 40)
        index = PrefixIndex(table)
        prompt = np.arange(num_tokens, dtype=np.int32).view(CountedTokens)
        for _ in range(30):
            CountedTokens.num_read = 0
            pages = index.match(prompt)
            assert CountedTokens.num_read <= num_tokens
            row = table.allocate()
            table.share(row, pages)
            table.take(np.array([row]), table.missing(np.array([row]), np.array([num_tokens]))[0])
            CountedTokens.num_read = 0
            index.insert(prompt, table.pages(row))
            assert CountedTokens.num_read <= num_tokens
        assert len(index.match(prompt)) == num_tokens // 4


@given(st.data(), st.integers(1, 4), st.integers(1, 12))
def test_copies_are_made_of_shared_pages_that_are_written_and_of_no_others(data, page_size, num_tokens):
    table = PageTable(40, page_size, 3)
    rows = [table.allocate() for _ in range(3)]
    table.take(np.array(rows[:1]), np.array([table.pages_for(num_tokens)]))
    for row in rows[1:]:
        shared = data.draw(st.integers(0, len(table.pages(rows[0]))))
        table.share(row, table.pages(rows[0])[:shared].copy())
        table.take(np.array([row]), table.missing(np.array([row]), np.array([num_tokens]))[0])
    for row in data.draw(st.permutations(rows)):
        first = data.draw(st.integers(0, num_tokens - 1))
        end = data.draw(st.integers(first + 1, num_tokens))
        before = [table.pages(r).tolist() for r in rows]
        others = {page for r in rows if r != row for page in table.pages(r).tolist()}
        written = {position // page_size for position in range(first, end)}
        shared_indices = [i for i in sorted(written) if before[row][i] in others]
        copies = copy_on_write(table, row, first, end)
        after = table.pages(row).tolist()
        assert copies == [(before[row][i], after[i]) for i in shared_indices]
        assert not {new for _, new in copies} & {page for pages in before for page in pages}
        assert all(after[i] == before[row][i] for i in range(len(after)) if i not in shared_indices)
        assert all(table.pages(r).tolist() == before[r] for r in rows if r != row)
        assert all(table.refcounts[after[i]] == 1 for i in written)
