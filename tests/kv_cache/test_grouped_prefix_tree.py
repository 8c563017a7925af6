"""The prefix tree of layer groups: hits need the last window of each group, and its pages are kept for them."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from mini_engine.kv_cache.grouped_prefix_tree import GroupedPrefixTree
from mini_engine.kv_cache.page_table import PageTable
from mini_engine.kv_cache.prefix_tree import Place
from mini_engine.kv_cache.sliding_window import pages_to_evict

NUM_PAGES, PAGE_SIZE, ROWS = 24, 2, 4
PROMPT = st.lists(st.integers(0, 1), max_size=16)  # two tokens only, so that many prompts begin alike
Text = tuple[int, ...]


def tokens_of(values) -> np.ndarray:
    return np.array(values, dtype=np.int32)


class GroupedMachine(RuleBasedStateMachine):
    """Requests arrive, share what the tree finds, compute the rest in chunks, lose pages to windows, and leave.

    `memory` has the group of each page and the text that it was computed from.
    """

    @initialize(windows=st.lists(st.integers(1, 9), min_size=1, max_size=2))
    def build(self, windows: list[int]) -> None:
        self.windows = windows
        self.table = PageTable(NUM_PAGES, PAGE_SIZE, ROWS, num_groups=1 + len(windows))
        self.tree = GroupedPrefixTree(self.table, windows)
        self.memory: dict[int, tuple[int, Text]] = {}
        self.prompts: dict[int, list[int]] = {}
        self.num_computed: dict[int, int] = {}
        self.num_evicted = np.zeros(len(self.table.counts), dtype=np.int64)
        self.places: dict[int, Place | None] = {}

    def rows_of(self, row: int) -> list[int]:
        return self.table.rows_of(np.array([row])).tolist()

    def in_tree(self) -> dict[tuple[int, Text], int]:
        """The pages in the tree, by their group and text."""
        return {self.memory[page]: page for page in self.tree.pages.tolist()}

    @precondition(lambda self: self.table.num_free_rows)
    @rule(prompt=PROMPT, shares=st.booleans())
    def arrive(self, prompt: list[int], shares: bool) -> None:
        row = self.table.allocate()
        self.prompts[row], self.places[row], self.num_computed[row] = prompt, None, 0
        self.num_evicted[self.rows_of(row)] = 0
        if shares:
            pages = self.find(prompt)
            for own_row, own in zip(self.rows_of(row), pages, strict=True):
                self.table.share(own_row, own)
                self.num_evicted[own_row] = (len(pages[0]) - len(own)) * PAGE_SIZE
            self.num_computed[row] = len(pages[0]) * PAGE_SIZE

    @rule(prompt=PROMPT)
    def match(self, prompt: list[int]) -> None:
        self.find(prompt)

    def find(self, prompt: list[int]) -> list[np.ndarray]:
        """The longest prefix of which each group has all pages that the next query sees."""
        in_tree, found = self.in_tree(), self.tree.match_groups(tokens_of(prompt))
        texts = [tuple(prompt[:end]) for end in range(PAGE_SIZE, len(prompt) + 1, PAGE_SIZE)]
        best = 0
        for count in range(1, len(texts) + 1):
            query, whole = count * PAGE_SIZE, all((0, text) in in_tree for text in texts[:count])
            seen = [
                (group, text)
                for group, window in enumerate(self.windows, 1)
                for text in texts[:count]
                if len(text) - 1 > query - window
            ]
            if whole and all(key in in_tree for key in seen):
                best = count
        assert len(found[0]) == best
        for group, (own, window) in enumerate(zip(found, [None, *self.windows], strict=True)):
            of_text = [self.memory[page] for page in own.tolist()]
            assert of_text == [(group, text) for text in texts[best - len(own) : best]]
            hidden = best * PAGE_SIZE - len(own) * PAGE_SIZE - 1  # the last key before these pages
            assert hidden < 0 if window is None else hidden <= best * PAGE_SIZE - window or hidden < 0
        return found

    @precondition(lambda self: self.in_tree())
    @rule(data=st.data(), more=PROMPT)
    def match_a_continuation(self, data: st.DataObject, more: list[int]) -> None:
        _, text = data.draw(st.sampled_from(sorted(self.in_tree())))
        self.find([*text, *more])

    @precondition(lambda self: self.prompts)
    @rule(data=st.data(), chunk=st.integers(1, 5))
    def compute(self, data: st.DataObject, chunk: int) -> None:
        """Return the pages that have left the windows, compute a chunk in pages taken for it, and insert them."""
        row = data.draw(st.sampled_from(sorted(self.prompts)))
        rows, start = self.rows_of(row), self.num_computed[row]
        end = min(len(self.prompts[row]), start + chunk)
        for own, window in zip(rows[1:], self.windows, strict=True):
            [gone] = pages_to_evict(np.array([start]), self.num_evicted[[own]], window, PAGE_SIZE)
            self.table.drop_front(own, int(gone))
            self.num_evicted[own] += gone * PAGE_SIZE
        missing, num_missing = self.table.missing(np.array(rows), end - self.num_evicted[rows])
        self.evict(max(0, num_missing - self.table.num_free_pages))
        if num_missing > self.table.num_free_pages:
            return
        self.table.take(np.array(rows), missing)
        for group, own in enumerate(rows):
            first = int(self.num_evicted[own]) // PAGE_SIZE
            for index, page in enumerate(self.table.pages(own).tolist(), first):
                if index >= start // PAGE_SIZE:
                    self.memory[page] = group, tuple(self.prompts[row][: min(end, (index + 1) * PAGE_SIZE)])
        self.num_computed[row] = end
        self.insert(row, self.places[row])

    def insert(self, row: int, after: Place | None) -> None:
        rows = self.rows_of(row)
        self.places[row] = self.tree.insert_groups(
            tokens_of(self.prompts[row][: self.num_computed[row]]),
            [self.table.pages(own) for own in rows],
            (self.num_evicted[rows] // PAGE_SIZE).tolist(),
            after,
        )

    @precondition(lambda self: self.prompts)
    @rule(data=st.data(), inserts=st.booleans())
    def leave(self, data: st.DataObject, inserts: bool) -> None:
        row = data.draw(st.sampled_from(sorted(self.prompts)))
        if inserts:
            self.insert(row, None)
        for own in self.rows_of(row)[1:]:
            self.table.truncate(own, 0)
        self.table.release(row)
        del self.prompts[row]

    @rule(num_pages=st.integers(0, NUM_PAGES + 1))
    def evict(self, num_pages: int) -> None:
        """As many pages become free as are asked for, if there are as many; none that a request owns."""
        num_free, num_cached = self.table.num_free_pages, self.tree.num_evictable
        num_freed = self.tree.evict(num_pages)
        assert min(num_pages, num_cached) <= num_freed == self.table.num_free_pages - num_free
        assert num_freed <= num_cached

    @invariant()
    def pages_are_accounted_for(self) -> None:
        held = [page for row in self.prompts for own in self.rows_of(row) for page in self.table.pages(own)]
        owners, in_tree = np.bincount(held, minlength=NUM_PAGES), self.tree.pages
        owners[in_tree] += 1
        assert self.table.refcounts.tolist() == owners.tolist()
        assert self.table.num_free_pages == np.count_nonzero(owners == 0)
        assert self.tree.num_evictable == np.count_nonzero(self.table.refcounts[in_tree] == 1)
        assert len(self.in_tree()) == len(in_tree), "the tree has two pages of a group for the same text"
        texts = {text for group, text in self.in_tree() if group == 0}
        assert all(text in texts for _, text in self.in_tree()), "a page is beside none"

    @invariant()
    def rows_have_what_they_computed(self) -> None:
        for row, prompt in self.prompts.items():
            for group, own in enumerate(self.rows_of(row)):
                first = int(self.num_evicted[own]) // PAGE_SIZE
                for index, page in enumerate(self.table.pages(own).tolist(), first):
                    end = min(self.num_computed[row], (index + 1) * PAGE_SIZE)
                    assert self.memory[page] == (group, tuple(prompt[:end]))

    def teardown(self) -> None:
        """Whatever happened, all pages return to the pool."""
        for row in self.prompts:
            for own in self.rows_of(row)[1:]:
                self.table.truncate(own, 0)
            self.table.release(row)
        self.tree.evict(NUM_PAGES)
        assert self.table.num_free_pages == NUM_PAGES and len(self.tree.pages) == 0
        assert not self.table.counts.any()


TestGroupedPrefixTree = GroupedMachine.TestCase
TestGroupedPrefixTree.settings = settings(max_examples=150, stateful_step_count=30, deadline=None)


class OneAtATime:
    """Requests one after the other over a pool of two groups, the second with a window; it evicts when necessary."""

    def __init__(self, num_pages: int, page_size: int, window: int) -> None:
        self.table = PageTable(num_pages, page_size, 1, num_groups=2)
        self.tree, self.window = GroupedPrefixTree(self.table, [window]), window

    def serve(self, prompt: np.ndarray, chunk: int) -> int:
        """Compute a prompt in chunks, and return how many of its tokens were shared."""
        table, size, row = self.table, self.table.page_size, self.table.allocate()
        full, windowed = self.tree.match_groups(prompt[:-1])
        table.share(row, full)
        table.share(row + 1, windowed)
        num_computed = num_shared = len(full) * size
        num_evicted = np.array([0, (len(full) - len(windowed)) * size])
        place = None
        while num_computed < len(prompt):
            [gone] = pages_to_evict(np.array([num_computed]), num_evicted[1:], self.window, size)
            table.drop_front(row + 1, int(gone))
            num_evicted[1] += gone * size
            num_computed = min(num_computed + chunk, len(prompt))
            missing, total = table.missing(np.array([row, row + 1]), num_computed - num_evicted)
            if total > table.num_free_pages:
                self.tree.evict(total - table.num_free_pages)
            table.take(np.array([row, row + 1]), missing)
            pages = [table.pages(row), table.pages(row + 1)]
            place = self.tree.insert_groups(prompt[:num_computed], pages, (num_evicted // size).tolist(), place)
        table.truncate(row + 1, 0)
        table.release(row)
        return num_shared


@pytest.mark.parametrize("num_pages", [90, 100, 120])
def test_a_common_beginning_is_found_again_after_its_pages_left_the_windows_of_many_requests(num_pages):
    """A steady stream of prompts, with 64 tokens in common and 64 of their own, fills the pool again and again.

    The windows of all requests end up in their own tokens. If pages that left them were the first to be recycled, no
    later request could share the common beginning.
    """
    requests, rng = OneAtATime(num_pages, page_size=4, window=16), np.random.default_rng(0)
    common = np.arange(64, dtype=np.int32)
    shared = [
        requests.serve(np.append(common, rng.integers(100, 10**6, 64)).astype(np.int32), chunk=16) for _ in range(40)
    ]
    assert requests.tree.num_evicted > 5 * num_pages
    assert shared[:1] == [0] and all(num == 64 for num in shared[2:])  # the second shows where the texts part


def test_the_middle_of_a_text_goes_before_the_pages_that_its_continuation_needs():
    requests = OneAtATime(40, page_size=2, window=5)
    text = np.arange(20, dtype=np.int32)
    requests.serve(text, chunk=20)
    assert requests.tree.num_evictable == 20
    assert requests.tree.evict(8) == 8  # all but the two last of the windowed group
    full, windowed = requests.tree.match_groups(np.append(text, text))
    assert len(full) == 10 and len(windowed) == 2
    assert len(requests.tree.match_groups(text[:18])[0]) == 0  # the window before this place is gone
    assert requests.tree.evict(1) == 2  # the last page of the text, and the one beside it
    assert len(requests.tree.match_groups(text)[0]) == 0


@given(st.integers(1, 40), st.integers(1, 30), st.integers(1, 4))
def test_a_hit_is_as_long_as_the_text_whatever_the_window(length, window, page_size):
    requests = OneAtATime(100, page_size, window)
    text = np.arange(length, dtype=np.int32)
    requests.serve(text, chunk=7)
    assert requests.serve(np.append(text, np.int32(99)), chunk=7) == length // page_size * page_size


def test_the_middles_of_both_parts_of_a_text_go_first():
    requests = OneAtATime(80, page_size=2, window=5)
    text = np.arange(40, dtype=np.int32)
    requests.serve(text, chunk=40)
    assert len(requests.tree.match_groups(text[:20])[0]) == 10  # now the text has two parts
    assert requests.tree.evict(16) == 16
    for end in (20, 40):
        assert len(requests.tree.match_groups(text[:end])[0]) == end // 2
