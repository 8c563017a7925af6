"""Right and wrong answers to the homework of chapter 09. They test its grader."""

from functools import reduce
from itertools import pairwise

import numpy as np
import torch

from book.grading import right, solution, wrong
from mini_engine.attention import levels as engine_levels
from mini_engine.attention.state import AttentionState, attention_state, merge_all, merge_states

reference = solution("09_cascade_and_prefix_cache")
Level, Edge, Tree = reference.Level, reference.Edge, reference.Tree


def joined_states(states):
    return AttentionState(torch.cat([s.out for s in states]), torch.cat([s.lse for s in states]))


def without_the_maximum(a, b):
    """Weights two states by exp(LSE), which overflows."""
    x, y = a.lse.exp()[..., None], b.lse.exp()[..., None]
    total = (x + y).clamp(min=1e-300)  # both may be without keys
    return AttentionState((a.out * x + b.out * y) / total, total.log()[..., 0])


# two_level_attention ------------------------------------------------------------------------------------------------


@right("two_level_attention")
def one_read_of_everything(q, read_pages, shared_pages, own_indptr, own_pages, own_lens, *, scale):
    """Reads all pages in one call, and merges request by request."""
    k, v = read_pages(np.concatenate([shared_pages, own_pages]))
    size = len(k) // (len(shared_pages) + len(own_pages))
    end = len(shared_pages) * size
    states = []
    for b, query in enumerate(q):
        own = slice(end + int(own_indptr[b]) * size, end + int(own_indptr[b]) * size + int(own_lens[b]))
        parts = [attention_state(query[None], k[s], v[s], scale=scale) for s in (own, slice(end))]
        states.append(merge_all(parts))
    return joined_states(states)


@right("two_level_attention")
def with_a_mask(q, read_pages, shared_pages, own_indptr, own_pages, own_lens, *, scale):
    """All requests' own keys as one set of keys, of which each query sees its own."""
    shared = attention_state(q, *read_pages(shared_pages), scale=scale)
    k, v = read_pages(own_pages)
    size = len(k) // max(1, len(own_pages))
    index = torch.arange(len(k))
    first = torch.from_numpy(own_indptr[:-1].astype(np.int64))[:, None] * size
    mask = (index >= first) & (index < first + torch.from_numpy(own_lens.astype(np.int64))[:, None])
    seen = mask.any(dim=0)
    own = attention_state(q, k[seen], v[seen], scale=scale, mask=mask[:, seen])
    return merge_states(own, shared)


def two_levels(
    q, read, shared, indptr, own, lens, *, scale, merge=merge_states, cut=True, each=False, factor=1.0, offset=0
):
    """The reference with one thing changed."""
    states = []
    for b, (first, end) in enumerate(pairwise(indptr.tolist())):
        k, v = read(own[first:end])
        if cut:
            k, v = k[: max(0, lens[b] + offset)], v[: max(0, lens[b] + offset)]
        states.append(attention_state(q[b : b + 1], k, v, scale=scale))
    if each:
        over = joined_states([attention_state(x[None], *read(shared), scale=scale * factor) for x in q])
    else:
        over = attention_state(q, *read(shared), scale=scale * factor)
    return merge(over, joined_states(states))


@wrong("two_level_attention", fails="test_each_page_is_read_once")
def the_prefix_for_each_request(*args, scale):
    return two_levels(*args, scale=scale, each=True)


@wrong("two_level_attention", fails="test_both_levels")
def states_added(*args, scale):
    return two_levels(
        *args, scale=scale, merge=lambda a, b: AttentionState(a.out + b.out, torch.logaddexp(a.lse, b.lse))
    )


@wrong("two_level_attention", fails="test_shared_pages_alone")
def states_averaged(*args, scale):
    return two_levels(
        *args, scale=scale, merge=lambda a, b: AttentionState((a.out + b.out) / 2, torch.logaddexp(a.lse, b.lse))
    )


@wrong("two_level_attention", fails="test_large_scores_in_both_levels")
def merged_without_the_maximum(*args, scale):
    return two_levels(*args, scale=scale, merge=without_the_maximum)


@wrong("two_level_attention", fails="test_a_page_in_part")
def last_page_in_full(*args, scale):
    return two_levels(*args, scale=scale, cut=False)


@wrong("two_level_attention", fails="test_own_pages_alone")
def one_key_short(*args, scale):
    """Forgets the key of the query itself."""
    return two_levels(*args, scale=scale, offset=-1)


@wrong("two_level_attention", fails="test_shared_pages_alone")
def unscaled_prefix(*args, scale):
    return two_levels(*args, scale=scale, factor=1 / scale)


@wrong("two_level_attention", fails="test_shared_pages_alone")
def only_the_output(*args, scale):
    return two_levels(*args, scale=scale).out


@wrong("two_level_attention", fails="test_shared_pages_alone")
def base_2(*args, scale):
    """The logarithm that FlashInfer returns."""
    state = two_levels(*args, scale=scale)
    return AttentionState(state.out, state.lse / np.log(2))


# shared_prefixes ----------------------------------------------------------------------------------------------------


@right("shared_prefixes")
def by_python_sorting(pages, limits):
    known = [tuple(row[:limit].tolist()) for row, limit in zip(pages, limits, strict=True)]
    order = sorted(range(len(known)), key=lambda b: known[b])
    counts = [0]
    for one, other in pairwise(order):
        equal = [a == b for a, b in zip(known[one], known[other], strict=False)]
        counts.append(equal.index(False) if False in equal else len(equal))
    return np.array(order), np.array(counts)


@right("shared_prefixes")
def backwards(pages, limits):
    """The dictionary order from Z to A: each count moves to the other of its two neighbors."""
    order, prefixes = reference.shared_prefixes(pages, limits)
    return order[::-1], np.append(0, prefixes[:0:-1])


def counted(pages, limits, order, *, limited=True, up_to_a_difference=True):
    pages, limits = pages[order], limits[order]
    equal = pages[1:] == pages[:-1]
    if up_to_a_difference:
        equal = np.logical_and.accumulate(equal, axis=1)
    counts = equal.sum(axis=1)
    return np.append(0, np.minimum(counts, np.minimum(limits[1:], limits[:-1])) if limited else counts)


@wrong("shared_prefixes", fails="test_stale_entries")
def limits_forgotten(pages, limits):
    order = np.lexsort(pages.T[::-1])
    return order, counted(pages, limits, order, limited=False)


@wrong("shared_prefixes", fails="test_a_low_limit_between")
def stale_entries_are_sorted_too(pages, limits):
    order = np.lexsort(pages.T[::-1])
    return order, counted(pages, limits, order)


@wrong("shared_prefixes", fails="test_behind_a_difference")
def any_equal_page(pages, limits):
    order = reference.shared_prefixes(pages, limits)[0]
    return order, counted(pages, limits, order, up_to_a_difference=False)


@wrong("shared_prefixes", fails="test_sharers_that_are_apart")
def in_the_given_order(pages, limits):
    order = np.arange(len(pages))
    return order, counted(pages, limits, order)


@wrong("shared_prefixes", fails="test_deeper_sharers")
def sorted_by_the_first_page(pages, limits):
    order = np.argsort(pages[:, 0], kind="stable")
    return order, counted(pages, limits, order)


@wrong("shared_prefixes", fails="test_sharers_that_are_apart")
def the_last_page_decides(pages, limits):
    """np.lexsort without the reversal."""
    order = np.lexsort(np.where(np.arange(pages.shape[1]) < limits[:, None], pages, -1).T)
    return order, counted(pages, limits, order)


@wrong("shared_prefixes", fails="test_two_neighbors")
def one_less_than_the_neighbors_share(pages, limits):
    order, counts = reference.shared_prefixes(pages, limits)
    return order, np.maximum(counts - 1, 0)


@wrong("shared_prefixes", fails="test_two_neighbors")
def counts_of_the_neighbor_behind(pages, limits):
    order, counts = reference.shared_prefixes(pages, limits)
    return order, np.append(counts[1:], 0)


@wrong("shared_prefixes", fails="test_two_neighbors")
def counts_in_the_given_order(pages, limits):
    """Sorts, counts, and puts the counts back."""
    order, counts = reference.shared_prefixes(pages, limits)
    return order, counts[np.argsort(order)]


@wrong("shared_prefixes", fails="test_two_neighbors")
def page_0_is_no_page(pages, limits):
    order = reference.shared_prefixes(pages, limits)[0]
    return order, counted(np.where(pages == 0, -1 - np.arange(len(pages))[:, None], pages), limits, order)


@wrong("shared_prefixes", fails="test_stale_entries")
def pages_are_overwritten(pages, limits):
    pages[np.arange(pages.shape[1]) >= limits[:, None]] = -1
    return reference.shared_prefixes(pages, limits)


# find_levels --------------------------------------------------------------------------------------------------------


@right("find_levels")
def the_engines(prefixes, saving, cost):
    """Where an outer level was dropped, the engine leaves the depth of requests that are alone as it was."""
    return _with_depths([joined for joined, _ in engine_levels.find_levels(prefixes, saving, cost)], prefixes)


def _groups(joined):
    ends = [*np.flatnonzero(~joined).tolist(), len(joined)]
    return [(first, end) for first, end in pairwise(ends) if end - first > 1]


def _with_depths(all_joined, prefixes):
    levels, depth = [], np.zeros_like(prefixes)
    for joined in all_joined:
        depth = depth.copy()
        for first, end in _groups(joined):
            depth[first:end] = prefixes[first + 1 : end].min()
        levels.append(Level(joined.copy(), depth))
    return levels


def _saved(all_joined, prefixes, saving, cost):
    total, before = 0.0, np.zeros(len(prefixes))
    for joined, depth in _with_depths(all_joined, prefixes):
        total += float(saving @ (joined * (depth - before))) - cost
        before = depth
    return total


@right("find_levels")
def by_thresholds(prefixes, saving, cost):
    """Tests for each number of pages whether it pays off, and drops levels one by one as long as that saves more."""
    found, depth, outside = [], np.zeros_like(prefixes), np.arange(len(prefixes)) > 0
    while True:
        more = (prefixes - depth) * outside
        pays = [n for n in sorted(set(more.tolist()) - {0}) if n * saving[more >= n].sum() >= max(cost, 1e-300)]
        if not pays:
            break
        found.append(more >= pays[0])
        outside, depth = _with_depths(found, prefixes)[-1]
    while True:
        total = _saved(found, prefixes, saving, cost)
        fewer = [found[:i] + found[i + 1 :] for i in reversed(range(len(found)))]
        better = [kept for kept in fewer if _saved(kept, prefixes, saving, cost) > total + 1e-12]
        if not better:
            return _with_depths(found, prefixes)
        found = better[0]


def levels_with(
    prefixes,
    saving,
    cost,
    *,
    most=99,
    fixpoint=True,
    redundant=False,
    depth_of=np.min,
    counts=False,
    alone="outside",
):
    """The reference with one thing changed."""
    saves = np.ones(len(prefixes)) if counts else saving
    found, depth = [], np.zeros_like(prefixes)
    while len(found) < most:
        more = prefixes - depth
        joined = more > 0
        while fixpoint:
            pays = joined & (more * float(saves @ joined) >= cost)
            if pays.sum() == joined.sum():
                break
            joined = pays
        if not float(saves @ joined) > 0:
            break
        reached = np.zeros_like(depth) if alone == "zero" else depth.copy()
        for first, end in _groups(joined):
            reached[first:end] = depth_of(prefixes[first + 1 : end])
        if not fixpoint and float(saves @ (joined * (reached - depth))) < cost:
            break
        found.append(Level(joined, reached))
        depth = reached
    return found if redundant or not found else _pruned(found, saves, cost)


def _pruned(found, saves, cost):
    return reference._without_redundant(found, saves, cost)


@wrong("find_levels", fails="test_a_level_inside_another")
def one_level_at_most(prefixes, saving, cost):
    return levels_with(prefixes, saving, cost, most=1)


@wrong("find_levels", fails="test_an_outer_level_that_is_redundant")
def redundant_levels_stay(prefixes, saving, cost):
    return levels_with(prefixes, saving, cost, redundant=True)


@wrong("find_levels", fails="test_few_pages_do_not_join")
def all_who_share_join(prefixes, saving, cost):
    return levels_with(prefixes, saving, cost, fixpoint=False)


@wrong("find_levels", fails="test_a_level_that_does_not_pay")
def the_cost_is_ignored(prefixes, saving, cost):
    return reference.find_levels(prefixes, saving, 0.0)


@wrong("find_levels", fails="test_some_save_nothing")
def every_request_counts_as_one(prefixes, saving, cost):
    return levels_with(prefixes, saving, cost, counts=True)


@wrong("find_levels", fails="test_a_level_inside_another")
def the_most_that_any_two_share(prefixes, saving, cost):
    return levels_with(prefixes, saving, cost, depth_of=np.max, most=1)


@wrong("find_levels", fails="test_one_group")
def the_first_request_of_a_group_is_left_out(prefixes, saving, cost):
    return [
        Level(level.joined, np.where(level.joined, level.depth, 0))
        for level in reference.find_levels(prefixes, saving, cost)
    ]


@wrong("find_levels", fails="test_a_level_inside_another")
def alone_means_no_pages(prefixes, saving, cost):
    return levels_with(prefixes, saving, cost, alone="zero", redundant=True, most=2)


@wrong("find_levels", fails="test_a_level_inside_another")
def innermost_first(prefixes, saving, cost):
    return reference.find_levels(prefixes, saving, cost)[::-1]


@wrong("find_levels", fails="test_two_groups_in_a_level")
def a_cost_for_each_group(prefixes, saving, cost):
    levels = reference.find_levels(prefixes, saving, cost)
    return [level for level in levels if min(saving[a:b].sum() for a, b in _groups(level.joined)) * 3 > cost]


@wrong("find_levels", fails="test_nothing_is_shared")
def none_for_no_levels(prefixes, saving, cost):
    return reference.find_levels(prefixes, saving, cost) or None


@wrong("find_levels", fails="test_one_group")
def the_first_joins_too(prefixes, saving, cost):
    return [
        Level(level.joined | np.append(level.joined[1:], False), level.depth)
        for level in reference.find_levels(prefixes, saving, cost)
    ]


# RadixTree ----------------------------------------------------------------------------------------------------------


@right("RadixTree")
class Recursive(Tree):
    """Walks by recursion, page by page, and evicts whole tails of edges at once."""

    def split(self, edge, num_pages):
        size, parent = self.table.page_size, edge.parent
        front = Edge(edge.tokens[: num_pages * size].copy(), edge.pages[:num_pages].copy(), parent)
        front.last_use = edge.last_use
        parent.children[front.tokens[:size].tobytes()] = front
        edge.parent, edge.tokens, edge.pages = front, edge.tokens[num_pages * size :], edge.pages[num_pages:]
        front.children = {edge.tokens[:size].tobytes(): edge}
        return front

    def follow(self, edge, text):
        size = self.table.page_size
        child = edge.children.get(text[:size].tobytes()) if len(text) >= size else None
        if child is None:
            return edge, text
        for i in range(len(child.pages)):
            here = slice(i * size, (i + 1) * size)
            if len(text[here]) < size or not np.array_equal(text[here], child.tokens[here]):
                return self.split(child, i), text[i * size :]
        return self.follow(child, text[len(child.tokens) :])

    def match(self, token_ids):
        edge, _ = self.follow(self.root, token_ids)
        self.use(edge)
        pages = []
        while edge.parent is not None:
            pages = [*edge.pages.tolist(), *pages]
            edge = edge.parent
        return np.array(pages, dtype=np.int32)

    def insert(self, token_ids, pages):
        size = self.table.page_size
        edge, rest = self.follow(self.root, token_ids)
        num_new, num_full = len(rest) // size, len(token_ids) // size
        if num_new:
            new = np.array(pages[num_full - num_new : num_full])
            leaf = Edge(np.array(rest[: num_new * size]), new, edge)
            edge.children[leaf.tokens[:size].tobytes()] = leaf
            self.table.retain(new)
            edge = leaf
        self.use(edge)

    def evict(self, num_pages):
        size, freed = self.table.page_size, 0
        while freed < num_pages:
            leaves = [e for e in self.edges() if not e.children and self.table.refcounts[e.pages[-1]] == 1]
            if not leaves:
                return freed
            leaf = sorted(leaves, key=lambda e: e.last_use)[0]
            keep = len(leaf.pages)
            while keep and freed < num_pages and self.table.refcounts[leaf.pages[keep - 1]] == 1:
                keep, freed = keep - 1, freed + 1
            gone = leaf.pages[keep:].copy()
            if keep == 0:
                leaf.parent.children.pop(leaf.tokens[:size].tobytes())
            leaf.pages, leaf.tokens = leaf.pages[:keep], leaf.tokens[: keep * size]
            self.table.drop(gone)
        return freed


Base = reference.RadixTree


@wrong("RadixTree", fails="test_split")
class TokensCutAtPages(Base):
    def split(self, edge, num_pages):
        front = super().split(edge, num_pages)
        tokens = np.concatenate([front.tokens, edge.tokens])
        front.tokens, edge.tokens = tokens[:num_pages], tokens[num_pages:]
        return front


@wrong("RadixTree", fails="test_split")
class FrontHasNoParent(Base):
    def split(self, edge, num_pages):
        front = super().split(edge, num_pages)
        front.parent = None
        return front


@wrong("RadixTree", fails="test_split")
class ChildrenMoveToTheFront(Base):
    def split(self, edge, num_pages):
        front = super().split(edge, num_pages)
        front.children |= edge.children
        edge.children = {}
        return front


@wrong("RadixTree", fails="test_split")
class TheFrontIsNew(Base):
    """The time of its last use is 0."""

    def split(self, edge, num_pages):
        front = super().split(edge, num_pages)
        front.last_use = 0
        return front


@wrong("RadixTree", fails="test_the_tree_owns_its_pages")
class NotAnOwner(Base):
    def insert(self, token_ids, pages):
        before = {page for edge in self.edges() for page in edge.pages.tolist()}
        super().insert(token_ids, pages)
        new = [page for edge in self.edges() for page in edge.pages.tolist() if page not in before]
        self.table.drop(np.array(new, dtype=np.int32))


@wrong("RadixTree", fails="test_a_text_is_found")
class PagesInPart(Base):
    """Rounds the length of a text up."""

    def insert(self, token_ids, pages):
        rest = -len(token_ids) % self.table.page_size
        super().insert(np.append(token_ids, np.zeros(rest, dtype=np.int32)), pages)

    def match(self, token_ids):
        rest = -len(token_ids) % self.table.page_size
        return super().match(np.append(token_ids, np.zeros(rest, dtype=np.int32)))


@wrong("RadixTree", fails="test_the_first_pages_stay")
class OwnsAllPagesOfARequest(Base):
    def insert(self, token_ids, pages):
        num_full = len(token_ids) // self.table.page_size
        found = self.match(token_ids)
        super().insert(token_ids, pages)
        doubles = pages[: len(found)][found != pages[: len(found)]]
        self.table.retain(doubles[:num_full])


@wrong("RadixTree", fails="test_the_callers_arrays_change")
class ViewsOfTheCallersArrays(Base):
    def insert(self, token_ids, pages):
        before = self.edges()
        super().insert(token_ids, pages)
        for edge in self.edges():
            if edge not in before:
                first = len(pages[: len(token_ids) // self.table.page_size]) - len(edge.pages)
                edge.pages = pages[first : first + len(edge.pages)]


@wrong("RadixTree", fails="test_a_match_uses_what_it_finds")
class AMatchUsesTheWholeEdge(Base):
    """Looks, and does not split."""

    def match(self, token_ids):
        size, edge, found = self.table.page_size, self.root, []
        start, num_full = 0, len(token_ids) // self.table.page_size
        while start < num_full:
            child = edge.children.get(token_ids[start * size : (start + 1) * size].tobytes())
            if child is None:
                break
            count = 0
            while (
                count < len(child.pages)
                and start + count < num_full
                and np.array_equal(
                    child.tokens[count * size : (count + 1) * size],
                    token_ids[(start + count) * size : (start + count + 1) * size],
                )
            ):
                count += 1
            found += child.pages[:count].tolist()
            edge, start = child, start + count
            if count < len(child.pages):
                break
        self.use(edge)
        return np.array(found, dtype=np.int32)


@wrong("RadixTree", fails="test_an_empty_tree")
class AListOfPages(Base):
    def match(self, token_ids):
        return super().match(token_ids).tolist()


@wrong("RadixTree", fails="test_evict_from_the_end")
class WholeEdgesLeave(Base):
    def evict(self, num_pages):
        freed = 0
        while freed < num_pages:
            ends = [e for e in self.edges() if not e.children and self.table.refcounts[e.pages[-1]] == 1]
            if not ends:
                break
            freed += super().evict(len(min(ends, key=lambda e: e.last_use).pages))
        return freed


@wrong("RadixTree", fails="test_evict_from_the_end")
class StaleAfterAnEviction(Base):
    """The pages return to the pool, and are still found."""

    def evict(self, num_pages):
        in_use = [page for edge in self.edges() for page in edge.pages.tolist() if self.table.refcounts[page] == 1]
        gone = np.array(in_use[::-1][:num_pages], dtype=np.int32)
        self.table.drop(gone)
        return len(gone)


@wrong("RadixTree", fails="test_pages_in_use_stay")
class PagesInUseLeave(Base):
    """Drops them: they are free when their requests leave."""

    def evict(self, num_pages):
        owners = self.table.refcounts.copy()
        in_tree = [page for edge in self.edges() for page in edge.pages.tolist()]
        extra = owners[in_tree] - 1
        self.table.refcounts[in_tree] = 1
        freed = super().evict(num_pages)
        left = {page for edge in self.edges() for page in edge.pages.tolist()}
        for page, more in zip(in_tree, extra.tolist(), strict=True):
            self.table.refcounts[page] += more
        return freed - 0 * len(left)


@wrong("RadixTree", fails="test_pages_in_use_stay")
class OnlyTheFirstPageIsAsked(Base):
    """Takes an edge to be in use if its first page is."""

    def evict(self, num_pages):
        owners, hidden = self.table.refcounts, {}
        for edge in self.edges():
            if owners[edge.pages[0]] > 1:
                hidden[int(edge.pages[-1])] = int(owners[edge.pages[-1]])
        for page in hidden:
            owners[page] += 1
        freed = super().evict(num_pages)
        for page, count in hidden.items():
            owners[page] = count
        return freed


@wrong("RadixTree", fails="test_the_least_recently_used_goes_first")
class TheOldestGoesFirst(Base):
    """First in, first out."""

    def match(self, token_ids):
        before = {edge: edge.last_use for edge in self.edges()}
        found = super().match(token_ids)
        splits = {edge: edge.last_use for edge in self.edges() if edge not in before}
        if not splits:
            for edge, last_use in before.items():
                edge.last_use = last_use
        return found


@wrong("RadixTree", fails="test_the_least_recently_used_goes_first")
class AnInsertUsesNothing(Base):
    """A new edge has never been used: it goes before edges that are older."""

    def insert(self, token_ids, pages):
        before = {edge: edge.last_use for edge in self.edges()}
        super().insert(token_ids, pages)
        for edge in self.edges():
            if edge not in before and not edge.children:
                edge.last_use = 0


@wrong("RadixTree", fails="test_an_insert_uses_what_is_there")
class AKnownTextIsNotUsed(Base):
    def insert(self, token_ids, pages):
        before = {edge: edge.last_use for edge in self.edges()}
        super().insert(token_ids, pages)
        if len(self.edges()) == len(before):
            for edge, last_use in before.items():
                edge.last_use = last_use


@wrong("RadixTree", fails="test_evict_up_to_the_root")
class LeavesInRounds(Base):
    """Looks at the parents when all leaves are gone."""

    rounds = 99

    def evict(self, num_pages):
        size, refcounts, freed = self.table.page_size, self.table.refcounts, 0
        for _ in range(self.rounds):
            for leaf in sorted((edge for edge in self.edges() if not edge.children), key=lambda edge: edge.last_use):
                while freed < num_pages and len(leaf.pages) and refcounts[leaf.pages[-1]] == 1:
                    self.table.drop(leaf.pages[-1:])
                    freed += 1
                    if len(leaf.pages) == 1:
                        del leaf.parent.children[leaf.tokens[:size].tobytes()]
                    leaf.pages, leaf.tokens = leaf.pages[:-1], leaf.tokens[:-size]
        return freed


@wrong("RadixTree", fails="test_evict_up_to_the_root")
class NeverTheParents(LeavesInRounds.definition):
    rounds = 1


@wrong("RadixTree", fails="test_evict_from_the_end")
class CountsWhatWasAsked(Base):
    def evict(self, num_pages):
        super().evict(num_pages)
        return num_pages


# cascade_attention --------------------------------------------------------------------------------------------------


@right("cascade_attention")
def request_by_request(q, read_pages, pages, kv_lens, levels, *, page_size, scale):
    """Reads every group's pages once, keeps the keys, and attends with one query at a time."""
    seen = [[] for _ in q]
    before = np.zeros(len(q), dtype=int)
    for joined, depth in levels:
        kept = None
        for b in range(len(q)):
            if not joined[b]:
                kept = read_pages(pages[b][before[b] : depth[b]])
            seen[b].append(kept)
        before = np.asarray(depth)
    for b, own in enumerate(pages):
        count = int(kv_lens[b]) - int(before[b]) * page_size
        seen[b].append(tuple(x[:count] for x in read_pages(own[before[b] :])))
    return joined_states(
        [
            reduce(merge_states, [attention_state(q[b : b + 1], k, v, scale=scale) for k, v in parts])
            for b, parts in enumerate(seen)
        ]
    )


def tree_attention(
    q, read, pages, kv_lens, levels, *, page_size, scale, from_zero=False, cut=True, whole=False, each=False, most=99,
    merge=merge_states
):  # fmt: skip
    """The reference with one thing changed."""
    last = Level(np.zeros(len(q), dtype=bool), np.array([len(own) for own in pages]))
    before, states = np.zeros(len(q), dtype=np.int64), []
    for level in [*levels[:most], last]:
        groups = []
        joined = np.zeros(len(q), dtype=bool) if each else level.joined
        for first, end in pairwise([*np.flatnonzero(~joined).tolist(), len(q)]):
            k, v = read(pages[first][0 if from_zero else before[first] : level.depth[first]])
            if level is last and cut:
                count = int(kv_lens[first]) - (0 if whole else int(before[first]) * page_size)
                k, v = k[:count], v[:count]
            groups.append(attention_state(q[first:end], k, v, scale=scale))
        states.append(joined_states(groups))
        before = level.depth
    return reduce(merge, states)


@wrong("cascade_attention", fails="test_every_page_is_read_once")
def flat(q, read_pages, pages, kv_lens, levels, *, page_size, scale):
    return tree_attention(q, read_pages, pages, kv_lens, [], page_size=page_size, scale=scale)


@wrong("cascade_attention", fails="test_every_page_is_read_once")
def each_alone_in_each_level(*args, page_size, scale):
    return tree_attention(*args, page_size=page_size, scale=scale, each=True)


@wrong("cascade_attention", fails="test_one_level")
def every_level_from_the_first_page(*args, page_size, scale):
    return tree_attention(*args, page_size=page_size, scale=scale, from_zero=True)


@wrong("cascade_attention", fails="test_large_scores_in_a_level")
def levels_merged_without_the_maximum(*args, page_size, scale):
    return tree_attention(*args, page_size=page_size, scale=scale, merge=without_the_maximum)


@wrong("cascade_attention", fails="test_no_levels")
def last_pages_in_full(*args, page_size, scale):
    return tree_attention(*args, page_size=page_size, scale=scale, cut=False)


@wrong("cascade_attention", fails="test_a_last_page_in_part")
def kv_lens_count_own_keys(*args, page_size, scale):
    return tree_attention(*args, page_size=page_size, scale=scale, whole=True)


@wrong("cascade_attention", fails="test_two_groups")
def one_group_for_all(q, read_pages, pages, kv_lens, levels, *, page_size, scale):
    """All requests see the pages of the first group."""
    merged = [Level(np.arange(len(q)) > 0, level.depth) for level in levels]
    return tree_attention(q, read_pages, pages, kv_lens, merged, page_size=page_size, scale=scale)


@wrong("cascade_attention", fails="test_every_page_is_read_once")
def the_outermost_level_alone(*args, page_size, scale):
    return tree_attention(*args, page_size=page_size, scale=scale, most=1)
