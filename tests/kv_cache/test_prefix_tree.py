"""The prefix tree against a dictionary of prefixes: what it finds, which pages it evicts, and who owns them."""

from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from mini_engine.kv_cache.page_table import PageTable
from mini_engine.kv_cache.prefix_tree import Place, PrefixTree

NUM_PAGES, PAGE_SIZE, ROWS = 10, 2, 4
PROMPT = st.lists(st.integers(0, 1), max_size=2 * NUM_PAGES)  # two tokens only, so that many prompts begin alike


def tokens_of(values) -> np.ndarray:
    return np.array(values, dtype=np.int32)


class PrefixMachine(RuleBasedStateMachine):
    """Requests arrive, share what the tree finds, compute the rest in chunks, and leave; cached pages are evicted.

    The model is a dictionary: the page of each prefix of whole pages in the tree. Beside it, `memory` has the prefix
    that each page was computed from.
    """

    def __init__(self) -> None:
        super().__init__()
        self.table = PageTable(NUM_PAGES, PAGE_SIZE, ROWS)
        self.tree = PrefixTree(self.table)
        self.page_of: dict[tuple[int, ...], int] = {}
        self.memory: dict[int, tuple[int, ...]] = {}
        self.prompts: dict[int, list[int]] = {}
        self.num_computed: dict[int, int] = {}
        self.places: dict[int, Place | None] = {}

    def prefixes(self, prompt: list[int]) -> list[tuple[int, ...]]:
        """The prefixes of whole pages, shortest first."""
        return [tuple(prompt[:end]) for end in range(PAGE_SIZE, len(prompt) + 1, PAGE_SIZE)]

    def draw_row(self, data: st.DataObject) -> int:
        return data.draw(st.sampled_from(sorted(self.prompts)))

    @precondition(lambda self: self.table.num_free_rows)
    @rule(prompt=PROMPT, shares=st.booleans())
    def arrive(self, prompt: list[int], shares: bool) -> None:
        """A request that does not share computes pages that the tree may already have."""
        row = self.table.allocate()
        self.prompts[row], self.places[row], self.num_computed[row] = prompt, None, 0
        if shares:
            pages = self.tree.match(tokens_of(prompt))
            self.table.share(row, pages)
            self.num_computed[row] = len(pages) * PAGE_SIZE

    @precondition(lambda self: self.prompts)
    @rule(data=st.data(), chunk=st.integers(1, 5), inserts=st.booleans())
    def compute(self, data: st.DataObject, chunk: int, inserts: bool) -> None:
        """Compute a chunk of a prompt in pages that are taken for it, evicting cached pages if necessary."""
        row = self.draw_row(data)
        end = min(len(self.prompts[row]), self.num_computed[row] + chunk)
        missing, num_missing = self.table.missing(np.array([row]), np.array([end]))
        self.evict(max(0, num_missing - self.table.num_free_pages))
        if num_missing > self.table.num_free_pages:
            return
        self.table.take(np.array([row]), missing)
        pages = self.table.pages(row).tolist()
        for index in range(self.num_computed[row] // PAGE_SIZE, len(pages)):
            self.memory[pages[index]] = tuple(self.prompts[row][: min(end, (index + 1) * PAGE_SIZE)])
        self.num_computed[row] = end
        if inserts:
            prompt = self.prompts[row][:end]
            self.places[row] = self.tree.insert(tokens_of(prompt), self.table.pages(row), self.places[row])
            self.insert_into_model(prompt, pages)

    def insert_into_model(self, prompt: list[int], pages: list[int]) -> None:
        for prefix, page in zip(self.prefixes(prompt), pages, strict=False):
            self.page_of.setdefault(prefix, page)

    @precondition(lambda self: self.prompts)
    @rule(data=st.data(), inserts=st.booleans())
    def leave(self, data: st.DataObject, inserts: bool) -> None:
        row = self.draw_row(data)
        prompt, pages = self.prompts.pop(row)[: self.num_computed[row]], self.table.pages(row).tolist()
        if inserts:
            self.tree.insert(tokens_of(prompt), self.table.pages(row))
            self.insert_into_model(prompt, pages)
        self.table.release(row)

    @rule(num_pages=st.integers(0, NUM_PAGES + 1))
    def evict(self, num_pages: int) -> None:
        """Cached pages become free, the end of a text first; a page that a request owns leaves only if necessary."""
        refcounts, num_free = self.table.refcounts.copy(), self.table.num_free_pages
        cached = {prefix for prefix, page in self.page_of.items() if refcounts[page] == 1}
        at_an_end = {
            prefix for prefix in cached if all(p in cached for p in self.page_of if p[: len(prefix)] == prefix)
        }
        num_freed = self.tree.evict(num_pages)
        assert num_freed == min(num_pages, len(cached)) == self.table.num_free_pages - num_free
        left = set(self.tree.pages.tolist())
        evicted = {prefix for prefix, page in self.page_of.items() if page not in left}
        assert all(p in evicted for prefix in evicted for p in self.page_of if p[: len(prefix)] == prefix)
        if num_pages <= len(at_an_end):
            assert evicted <= cached
        for prefix in evicted:
            del self.page_of[prefix]

    @rule(prompt=PROMPT)
    def match(self, prompt: list[int]) -> None:
        expected = []
        for prefix in self.prefixes(prompt):
            if prefix not in self.page_of:
                break
            expected.append(self.page_of[prefix])
            assert self.memory[expected[-1]] == prefix
        assert self.tree.match(tokens_of(prompt)).tolist() == expected

    @precondition(lambda self: self.page_of)
    @rule(data=st.data(), more=PROMPT)
    def match_a_continuation(self, data: st.DataObject, more: list[int]) -> None:
        self.match([*data.draw(st.sampled_from(sorted(self.page_of))), *more])

    @invariant()
    def pages_are_accounted_for(self) -> None:
        table, in_tree = self.table, sorted(self.page_of.values())
        assert self.tree.pages.tolist() == in_tree
        owners = np.bincount([page for row in self.prompts for page in table.pages(row)], minlength=NUM_PAGES)
        owners[in_tree] += 1
        assert table.refcounts.tolist() == owners.tolist()
        assert table.num_free_pages == np.count_nonzero(owners == 0)
        assert self.tree.num_evictable == sum(table.refcounts[page] == 1 for page in in_tree)

    @invariant()
    def rows_have_what_they_computed(self) -> None:
        for row, prompt in self.prompts.items():
            for index, page in enumerate(self.table.pages(row).tolist()):
                end = min(self.num_computed[row], (index + 1) * PAGE_SIZE)
                assert self.memory[page] == tuple(prompt[:end])

    def teardown(self) -> None:
        """Whatever happened, all pages return to the pool."""
        for row in self.prompts:
            self.table.release(row)
        self.tree.evict(NUM_PAGES)
        assert self.table.num_free_pages == NUM_PAGES and len(self.tree.pages) == 0


TestPrefixTree = PrefixMachine.TestCase
TestPrefixTree.settings = settings(max_examples=150, stateful_step_count=30, deadline=None)


def fill(table: PageTable, tree: PrefixTree, prompt: list[int]) -> list[int]:
    """Compute a prompt in pages of its own, insert it, and leave."""
    row = table.allocate()
    table.share(row, tree.match(tokens_of(prompt)))
    table.take(np.array([row]), table.missing(np.array([row]), np.array([len(prompt)]))[0])
    tree.insert(tokens_of(prompt), table.pages(row))
    pages = table.pages(row).tolist()
    table.release(row)
    return pages


@given(st.data())
def test_pages_are_evicted_in_the_order_of_their_last_use(data):
    """The oracle has a time for each prefix, and evicts the oldest one that no other prefix continues."""
    table = PageTable(200, 1, 1)
    tree = PrefixTree(table)
    last_use: dict[tuple[int, ...], int] = {}
    prompts = st.lists(st.integers(0, 1), min_size=1, max_size=6)
    for time in range(data.draw(st.integers(1, 12))):
        prompt = data.draw(prompts)
        if data.draw(st.booleans()):
            fill(table, tree, prompt)
            last_use |= {tuple(prompt[: i + 1]): time for i in range(len(prompt))}
        else:
            num_found = len(tree.match(tokens_of(prompt)))
            last_use |= {tuple(prompt[: i + 1]): time for i in range(num_found)}
        for _ in range(data.draw(st.integers(0, 3))):
            ends = [p for p in last_use if not any(len(q) > len(p) and q[: len(p)] == p for q in last_use)]
            if ends:
                del last_use[min(ends, key=lambda prefix: last_use[prefix])]
            tree.evict(1)
        assert len(tree.pages) == len(last_use)
    for prefix in last_use:
        assert len(tree.match(tokens_of(prefix))) == len(prefix)


def test_a_page_in_use_is_not_evicted_and_counts_as_used():
    table = PageTable(6, 2, 3)
    tree = PrefixTree(table)
    fill(table, tree, [1, 1, 2, 2])
    row = table.allocate()
    table.share(row, tree.match(tokens_of([1, 1])))
    fill(table, tree, [3, 3])
    assert tree.num_evictable == 2
    assert tree.evict(1) == 1  # the end of the first text: it has not been used since
    assert tree.match(tokens_of([1, 1, 2, 2])).tolist() == table.pages(row).tolist()
    assert tree.evict(5) == 1 and tree.evict(1) == 0
    table.release(row)
    assert len(tree.match(tokens_of([1, 1]))) == 1 and tree.evict(1) == 1


def test_cached_pages_in_front_of_pages_in_use_can_be_evicted():
    """A request computes pages that the tree has already, and continues after them: it owns only the last one."""
    table = PageTable(8, 2, 2)
    tree = PrefixTree(table)
    fill(table, tree, [1, 1, 2, 2])
    row = table.allocate()
    table.take(np.array([row]), np.array([3]))
    tree.insert(tokens_of([1, 1, 2, 2, 3, 3]), table.pages(row))
    assert len(tree.pages) == 3 and tree.num_evictable == 2
    assert tree.evict(1) == 1
    assert len(tree.match(tokens_of([1, 1, 2, 2, 3, 3]))) == 1
    assert table.refcounts[table.pages(row)].tolist() == [1, 1, 1]


class CountedTokens(np.ndarray):
    """Tokens that count how many of them are read by slices."""

    num_read = 0

    def __getitem__(self, key):
        result = super().__getitem__(key)
        CountedTokens.num_read += np.size(result)
        return result


@pytest.mark.parametrize("num_tokens", [64, 4096])
def test_the_work_does_not_grow_with_the_other_requests_or_the_chunks(num_tokens):
    """Each token is read a few times: it is looked up, compared with one in the tree, and stored."""
    table = PageTable(2 * num_tokens, 4, 40)
    tree = PrefixTree(table)
    prompt = np.arange(num_tokens, dtype=np.int32).view(CountedTokens)
    for _ in range(30):
        CountedTokens.num_read = 0
        pages = tree.match(prompt)
        assert CountedTokens.num_read <= 4 * num_tokens
        row = table.allocate()
        table.share(row, pages)
        table.take(np.array([row]), table.missing(np.array([row]), np.array([num_tokens]))[0])
        CountedTokens.num_read = 0
        tree.insert(prompt, table.pages(row))
        assert CountedTokens.num_read <= 4 * num_tokens
    other = (prompt + num_tokens).view(CountedTokens)
    row = table.allocate()
    table.take(np.array([row]), np.array([num_tokens // 4]))
    place, num_read = None, 0
    for end in range(8, num_tokens + 1, 8):
        chunk = other[:end]
        CountedTokens.num_read = 0
        place = tree.insert(chunk, table.pages(row), place)
        num_read += CountedTokens.num_read
    assert num_read <= 4 * num_tokens
    assert tree.match(other).tolist() == table.pages(row).tolist()


def test_an_insertion_goes_on_where_the_edge_was_extended_and_split_meanwhile():
    table = PageTable(400, 4, 2)
    tree = PrefixTree(table)
    text = np.arange(400, dtype=np.int32).view(CountedTokens)
    first, second = table.allocate(), table.allocate()
    table.take(np.array([first, second]), np.array([100, 100]))
    place = tree.insert(text[:200], table.pages(first))
    tree.insert(text, table.pages(second))
    tree.match(text[:300])
    chunk = text[:208]
    CountedTokens.num_read = 0
    assert tree.insert(chunk, table.pages(first), place)[1] == 52
    assert CountedTokens.num_read < 50
    assert tree.match(text).tolist() == table.pages(first).tolist()[:50] + table.pages(second).tolist()[50:]


def test_an_insertion_starts_over_if_its_beginning_was_evicted_meanwhile():
    """The beginning was in the tree with pages of another request; now the request's own pages take their place."""
    table = PageTable(20, 2, 2)
    tree = PrefixTree(table)
    text = tokens_of([1, 1, 2, 2, 3, 3, 4, 4])
    fill(table, tree, [1, 1, 2, 2])
    row = table.allocate()
    table.take(np.array([row]), np.array([4]))
    place = tree.insert(text[:4], table.pages(row))
    assert tree.evict(1) == 1
    fill(table, tree, [1, 1, 5, 5])  # something else where the place was
    place = tree.insert(text[:6], table.pages(row), place)
    assert tree.match(text).tolist()[1:] == table.pages(row).tolist()[1:3]
    tree.evict(20)
    tree.insert(text, table.pages(row), place)
    assert tree.match(text).tolist()[1:] == table.pages(row).tolist()[1:]


def test_a_text_inserted_in_chunks_is_one_edge():
    """A match then compares it at once, however it was computed."""
    lookups = []

    def counted(children, token_ids, page_size):
        lookups.append(token_ids)
        page = children[-1].get(token_ids.tobytes())
        return [] if page is None else [page]

    table, random = PageTable(300, 4, 1), Random(1)
    tree = PrefixTree(table, counted)
    prompt = tokens_of([random.randrange(50) for _ in range(1000)])
    row = table.allocate()
    table.take(np.array([row]), np.array([250]))
    place = None
    for end in range(0, 1001, 50):
        place = tree.insert(prompt[:end], table.pages(row), place)
    lookups.clear()
    assert len(tree.match(prompt)) == 250 and len(lookups) == 1
