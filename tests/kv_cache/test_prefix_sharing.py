"""Prefix matches against a search over all prompts, and copies before shared pages are written."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from mini_engine.kv_cache.page_table import PageTable
from mini_engine.kv_cache.prefix_sharing import ROOT, copy_on_write, match_prefix


def tokens_of(values) -> np.ndarray:
    return np.array(values, dtype=np.int32)


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
