"""Right and wrong answers to the homework of chapter 10. They test its grader."""

from functools import reduce
from itertools import pairwise

import numpy as np
import torch

from book.grading import right, solution, wrong
from mini_engine.attention import levels as engine_levels
from mini_engine.attention.naive import masked_attention
from mini_engine.attention.state import AttentionState, attention_state, merge_all, merge_states
from mini_engine.errors import ChunkError
from mini_engine.rope import RopeConfig, apply_rope, inverse_frequencies, rope_tables

reference = solution("10_chunk_memory")
Level = reference.Level

# rotate_again -------------------------------------------------------------------------------------------------------


@right("rotate_again")
def as_complex_numbers(x, offsets, rope):
    """A pair is a complex number, and a rotation a product."""
    dtype = torch.promote_types(x.dtype, torch.float32)
    a, b = x.to(dtype).chunk(2, dim=-1)
    angles = offsets[:, None].to(dtype) * inverse_frequencies(rope).to(dtype)
    turned = torch.complex(a, b) * torch.polar(torch.ones_like(angles), angles)[:, None]
    return torch.cat([turned.real, turned.imag], dim=-1).to(x.dtype)


@right("rotate_again")
def out_of_place_tables(x, offsets, rope):
    dtype = torch.promote_types(x.dtype, torch.float32)
    cos, sin = (t[:, None].repeat(1, 1, 2) for t in rope_tables(offsets, inverse_frequencies(rope).to(dtype)))
    a, b = x.to(dtype).chunk(2, dim=-1)
    return (x * cos + torch.cat([-b, a], dim=-1) * sin).to(x.dtype)


def rotated(x, offsets, rope, *, sign=1, dtype=torch.float32, interleaved=False):
    """The reference with one thing changed."""
    frequencies = inverse_frequencies(rope).to(torch.promote_types(x.dtype, dtype))
    return apply_rope(x, *rope_tables(sign * offsets, frequencies), interleaved=interleaved)


@wrong("rotate_again", fails="test_from_position_0")
def backwards(x, offsets, rope):
    return rotated(x, offsets, rope, sign=-1)


@wrong("rotate_again", fails="test_from_position_0")
def twice(x, offsets, rope):
    return rotated(x, offsets, rope, sign=2)


@wrong("rotate_again", fails="test_from_position_0")
def neighboring_pairs(x, offsets, rope):
    return rotated(x, offsets, rope, interleaved=True)


@wrong("rotate_again", fails="test_from_position_0")
def in_place(x, offsets, rope):
    """The next request finds keys that have moved."""
    return x.copy_(rotated(x, offsets, rope))


@wrong("rotate_again", fails="test_towards_the_front")
def by_the_distance(x, offsets, rope):
    return rotated(x, offsets.abs(), rope)


@wrong("rotate_again", fails="test_an_offset_for_each_row")
def the_first_offset_for_all(x, offsets, rope):
    return rotated(x, offsets[:1].expand(len(x)), rope)


@wrong("rotate_again", fails="test_a_stretched_rope")
def without_scaling(x, offsets, rope):
    return rotated(x, offsets, RopeConfig(rope.theta, rope.head_dim))


@wrong("rotate_again", fails="test_in_float64")
def always_in_float32(x, offsets, rope):
    return rotated(x.float(), offsets, rope).to(x.dtype)


@wrong("rotate_again", fails="test_in_bfloat16")
def angles_in_the_dtype_of_x(x, offsets, rope):
    return rotated(x, offsets, rope, dtype=x.dtype)


@wrong("rotate_again", fails="test_in_bfloat16")
def products_in_the_dtype_of_x(x, offsets, rope):
    frequencies = inverse_frequencies(rope).to(torch.promote_types(x.dtype, torch.float32))
    cos, sin = (table.to(x.dtype)[:, None] for table in rope_tables(offsets, frequencies))
    a, b = x.chunk(2, dim=-1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)


@wrong("rotate_again", fails="test_in_bfloat16")
def promoted(x, offsets, rope):
    return rotated(x.to(torch.promote_types(x.dtype, torch.float32)), offsets, rope)


# place_chunks -------------------------------------------------------------------------------------------------------


@right("place_chunks")
def with_numpy(chunks):
    lens, befores = ([len(chunk[i]) for chunk in chunks] for i in (0, 1))
    starts = np.append(0, np.cumsum(lens))[:-1].astype(int)
    tokens = [t for chunk in chunks for t in chunk.token_ids]
    exact = [list(chunk.before) == tokens[:start] for chunk, start in zip(chunks, starts, strict=True)]
    return starts.tolist(), (np.array(befores, dtype=int) - starts).tolist(), exact


@wrong("place_chunks", fails="test_two_chunks_on_their_own")
def offsets_of_keys(chunks):
    """The distance that keys would have to move, which has the opposite sign."""
    positions, offsets, exact = reference.place_chunks(chunks)
    return positions, [-offset for offset in offsets], exact


@wrong("place_chunks", fails="test_a_chain")
def all_computed_on_their_own(chunks):
    positions, _, exact = reference.place_chunks(chunks)
    return positions, [-p for p in positions], exact


@wrong("place_chunks", fails="test_one_chunk")
def never_exact(chunks):
    positions, offsets, _ = reference.place_chunks(chunks)
    return positions, offsets, [False] * len(chunks)


@wrong("place_chunks", fails="test_one_chunk")
def tuples_compared_with_a_list(chunks):
    positions, offsets, _ = reference.place_chunks(chunks)
    tokens, exact = [], []
    for chunk in chunks:
        exact.append(chunk.before == tokens)
        tokens += chunk.token_ids
    return positions, offsets, exact


@wrong("place_chunks", fails="test_other_tokens_in_front")
def exact_where_nothing_moves(chunks):
    positions, offsets, _ = reference.place_chunks(chunks)
    return positions, offsets, [offset == 0 for offset in offsets]


@wrong("place_chunks", fails="test_other_tokens_in_front")
def exact_until_one_is_not(chunks):
    positions, offsets, exact = reference.place_chunks(chunks)
    return positions, offsets, np.logical_and.accumulate(exact).tolist() if chunks else []


@wrong("place_chunks", fails="test_two_chunks_on_their_own")
def positions_where_computed(chunks):
    _, offsets, exact = reference.place_chunks(chunks)
    return [len(chunk.before) for chunk in chunks], offsets, exact


@wrong("place_chunks", fails="test_two_chunks_on_their_own")
def positions_of_the_ends(chunks):
    positions, offsets, exact = reference.place_chunks(chunks)
    return (
        [p + len(c.token_ids) * (i > 0) for i, (p, c) in enumerate(zip(positions, chunks, strict=True))],
        offsets,
        exact,
    )


@wrong("place_chunks", fails="test_a_chain")
def exact_where_nothing_is_before(chunks):
    positions, offsets, _ = reference.place_chunks(chunks)
    return positions, offsets, [i == 0 and not chunk.before for i, chunk in enumerate(chunks)]


# attend_to_chunks ---------------------------------------------------------------------------------------------------


@right("attend_to_chunks")
def one_softmax_over_moved_keys(q, chunks, query_offsets, own, *, rope, scale):
    """Moves a copy of the keys, and attends once."""
    moved = [
        reference.rotate_again(k, torch.full((len(k),), -offset, device=k.device), rope)
        for (k, _), offset in zip(chunks, query_offsets, strict=True)
    ]
    keys, values = torch.cat([*moved, own[0]]), torch.cat([*(v for _, v in chunks), own[1]])
    n, m = len(q), len(keys)
    return attention_state(q, keys, values, scale=scale, mask=torch.ones(n, m, dtype=bool, device=q.device).tril(m - n))


@right("attend_to_chunks")
def own_keys_first(q, chunks, query_offsets, own, *, rope, scale):
    n, m = len(q), len(own[0])
    mask = torch.arange(m, device=q.device) <= torch.arange(m - n, m, device=q.device)[:, None]
    states = [attention_state(q, *own, scale=scale, mask=mask)]
    for pair, offset in zip(reversed(chunks), reversed(query_offsets), strict=True):
        offsets = torch.tensor([offset] * n, device=q.device)
        states.append(attention_state(reference.rotate_again(q, offsets, rope), *pair, scale=scale))
    return merge_all(states)


def over_chunks(q, chunks, query_offsets, own, *, rope, scale, change=lambda offset: offset, last=True, shift=None,
                merge=merge_states, sees_all=False, factor=1.0, own_offset=0):  # fmt: skip
    """The reference with one thing changed."""
    n, m = len(q), len(own[0])

    def moved(offset):
        return reference.rotate_again(q, torch.full((n,), offset), rope)

    states = []
    for (k, v), offset in zip(chunks, query_offsets, strict=True):
        mask = None if sees_all is False else torch.ones(n, len(k), dtype=torch.bool).tril(sees_all)
        states.append(attention_state(moved(change(offset)), k, v, scale=scale * factor, mask=mask))
    mask = torch.ones(n, m, dtype=torch.bool).tril(m - n if shift is None else shift) if last else None
    states.append(attention_state(moved(own_offset), *own, scale=scale, mask=mask))
    return reduce(merge, states)


@wrong("attend_to_chunks", fails="test_a_chunk_that_has_moved")
def without_rotation(*args, rope, scale):
    return over_chunks(*args, rope=rope, scale=scale, change=lambda offset: 0)


@wrong("attend_to_chunks", fails="test_a_chunk_that_has_moved")
def in_the_other_direction(*args, rope, scale):
    return over_chunks(*args, rope=rope, scale=scale, change=lambda offset: -offset)


@wrong("attend_to_chunks", fails="test_own_keys_alone")
def without_a_mask(*args, rope, scale):
    return over_chunks(*args, rope=rope, scale=scale, last=False)


@wrong("attend_to_chunks", fails="test_own_keys_alone")
def mask_from_the_first_key(*args, rope, scale):
    return over_chunks(*args, rope=rope, scale=scale, shift=0)


@wrong("attend_to_chunks", fails="test_a_chunk_in_place")
def states_added(*args, rope, scale):
    def add(a, b):
        return AttentionState(a.out + b.out, torch.logaddexp(a.lse, b.lse))

    return over_chunks(*args, rope=rope, scale=scale, merge=add)


@wrong("attend_to_chunks", fails="test_large_scores")
def merged_without_the_maximum(*args, rope, scale):
    def merge(a, b):
        x, y = a.lse.exp()[..., None], b.lse.exp()[..., None]
        return AttentionState((a.out * x + b.out * y) / (x + y), (x + y).log()[..., 0])

    return over_chunks(*args, rope=rope, scale=scale, merge=merge)


@wrong("attend_to_chunks", fails="test_a_chunk_in_place")
def unscaled_chunks(*args, rope, scale):
    return over_chunks(*args, rope=rope, scale=scale, factor=1 / scale)


@wrong("attend_to_chunks", fails="test_a_chunk_in_place")
def causal_in_every_level(*args, rope, scale):
    return over_chunks(*args, rope=rope, scale=scale, sees_all=0)


@wrong("attend_to_chunks", fails="test_chunks_with_different_offsets")
def the_first_offset(q, chunks, query_offsets, own, *, rope, scale):
    offsets = list(query_offsets[:1]) * len(chunks)
    return over_chunks(q, chunks, offsets, own, rope=rope, scale=scale)


@wrong("attend_to_chunks", fails="test_chunks_with_different_offsets")
def offsets_added_up(q, chunks, query_offsets, own, *, rope, scale):
    """Rotates the queries once more for each chunk, from where the last rotation left them."""
    return over_chunks(q, chunks, np.cumsum(query_offsets).tolist(), own, rope=rope, scale=scale)


@wrong("attend_to_chunks", fails="test_a_chunk_that_has_moved")
def own_keys_with_the_last_offset(q, chunks, query_offsets, own, *, rope, scale):
    """The variable of the rotated queries is used for the own keys, too."""
    last = query_offsets[-1] if query_offsets else 0
    return over_chunks(q, chunks, query_offsets, own, rope=rope, scale=scale, own_offset=last)


@wrong("attend_to_chunks", fails="test_a_chunk_that_has_moved")
def keys_in_place(q, chunks, query_offsets, own, *, rope, scale):
    """Right for one request, and the next one finds keys that have moved."""
    for (k, _), offset in zip(chunks, query_offsets, strict=True):
        k.copy_(reference.rotate_again(k, torch.full((len(k),), -offset), rope))
    return over_chunks(q, chunks, [0] * len(chunks), own, rope=rope, scale=scale)


@wrong("attend_to_chunks", fails="test_a_chunk_that_has_moved")
def queries_in_place(q, chunks, query_offsets, own, *, rope, scale):
    state = over_chunks(q, chunks, query_offsets, own, rope=rope, scale=scale)
    for offset in query_offsets[-1:]:
        q.copy_(reference.rotate_again(q, torch.full((len(q),), offset), rope))
    return state


@wrong("attend_to_chunks", fails="test_own_keys_alone")
def only_the_output(*args, rope, scale):
    return over_chunks(*args, rope=rope, scale=scale).out


# chunk_levels -------------------------------------------------------------------------------------------------------


@right("chunk_levels")
def the_engines(contexts, num_new, page_size):
    order, levels = engine_levels.chunk_levels(contexts, num_new, page_size)
    return order, [Level(*level) for level in levels]


@right("chunk_levels")
def by_the_last_page_in_lists(contexts, num_new, page_size):
    """Another order of chunks and of requests, and requests without a chunk stay groups of their own."""
    lists = [sorted(context, key=lambda chunk: -int(chunk.pinned.pages[-1])) for context in contexts]
    order = sorted(
        range(len(lists)), key=lambda b: (num_new[b] > 1, len(lists[b]), [int(c.pinned.pages[-1]) for c in lists[b]])
    )
    levels = []
    for i in range(max(map(len, lists))):
        qo, indptr, pages, last, offsets, before = [0], [0], [], [], [], None
        for b in order:
            chunk = lists[b][i] if i < len(lists[b]) else None
            if chunk and chunk.pinned is before:
                qo[-1] += int(num_new[b])
            else:
                own = chunk.pinned.pages.tolist() if chunk else []
                pages += own
                qo.append(qo[-1] + int(num_new[b]))
                indptr.append(len(pages))
                last.append(len(chunk.token_ids) - (len(own) - 1) * page_size if chunk else 0)
            before = chunk.pinned if chunk else None
            offsets += [chunk.query_offset if chunk else 77] * int(num_new[b])
        levels.append(Level(*map(np.array, (qo, indptr, np.array(pages, dtype=np.int32), last, offsets))))
    return np.array(order), levels


def levels_of(contexts, num_new, page_size, *, by=lambda chunk: int(chunk.pinned.pages[0]), prompts_last=True,
              sort=True, same=lambda a, b: a.pinned is b.pinned, last=lambda n, size: (n - 1) % size + 1,
              group_offset=False, depth=max):  # fmt: skip
    """The reference with one thing changed."""
    lists = [sorted(context, key=by) if by else list(context) for context in contexts]
    keys = [
        (prompts_last and new > 1, [int(c.pinned.pages[0]) for c in own])
        for own, new in zip(lists, num_new, strict=True)
    ]
    order = sorted(range(len(lists)), key=lambda b: keys[b]) if sort else list(range(len(lists)))
    if not sort and prompts_last:
        order.sort(key=lambda b: num_new[b] > 1)
    levels = []
    first = np.append(0, num_new[order].cumsum())
    for i in range(depth(map(len, lists))):
        chunks = [lists[b][i] if i < len(lists[b]) else None for b in order]
        joins = [b > 0 and bool(c and p and same(c, p)) for b, (p, c) in enumerate(pairwise([None, *chunks]))]
        starts = [b for b, joined in enumerate(joins) if not joined]
        groups = [chunks[b] for b in starts]
        offsets, current = [], 0
        for chunk, joined in zip(chunks, joins, strict=True):
            if not (group_offset and joined):
                current = chunk.query_offset if chunk else 0
            offsets.append(current)
        levels.append(
            Level(
                first[[*starts, len(order)]],
                np.append(0, np.cumsum([len(c.pinned.pages) if c else 0 for c in groups])),
                np.concatenate([c.pinned.pages if c else np.zeros(0, np.int32) for c in groups]),
                np.array([last(len(c.token_ids), page_size) if c else 0 for c in groups]),
                np.repeat(offsets, num_new[order]),
            )
        )
    return np.array(order), levels


@wrong("chunk_levels", fails="test_another_order_of_the_same_chunks")
def in_the_order_of_positions(contexts, num_new, page_size):
    return levels_of(contexts, num_new, page_size, by=None)


@wrong("chunk_levels", fails="test_sharers_are_one_group")
def requests_in_their_order(contexts, num_new, page_size):
    return levels_of(contexts, num_new, page_size, sort=False)


@wrong("chunk_levels", fails="test_sharers_are_one_group")
def a_group_for_each_request(contexts, num_new, page_size):
    return levels_of(contexts, num_new, page_size, same=lambda a, b: False)


@wrong("chunk_levels", fails="test_decodes_first")
def prompts_among_decodes(contexts, num_new, page_size):
    return levels_of(contexts, num_new, page_size, prompts_last=False)


@wrong("chunk_levels", fails="test_one_request")
def remainder_0(contexts, num_new, page_size):
    """A full last page has 0 keys."""
    return levels_of(contexts, num_new, page_size, last=lambda n, size: n % size)


@wrong("chunk_levels", fails="test_a_last_page_in_part")
def last_pages_in_full(contexts, num_new, page_size):
    return levels_of(contexts, num_new, page_size, last=lambda n, size: size)


@wrong("chunk_levels", fails="test_sharers_at_different_offsets")
def the_groups_offset(contexts, num_new, page_size):
    return levels_of(contexts, num_new, page_size, group_offset=True)


@wrong("chunk_levels", fails="test_sharers_at_different_offsets")
def only_equal_offsets_share(contexts, num_new, page_size):
    def same(a, b):
        return a.pinned is b.pinned and a.query_offset == b.query_offset

    return levels_of(contexts, num_new, page_size, same=same)


@wrong("chunk_levels", fails="test_requests_without_chunks")
def as_many_levels_as_the_shortest(contexts, num_new, page_size):
    return levels_of(contexts, num_new, page_size, depth=min)


@wrong("chunk_levels", fails="test_several_new_tokens_each")
def offsets_of_requests(contexts, num_new, page_size):
    order, levels = levels_of(contexts, num_new, page_size)
    first = np.append(0, num_new[order].cumsum())[:-1]
    return order, [level._replace(query_offsets=level.query_offsets[first]) for level in levels]


@wrong("chunk_levels", fails="test_several_new_tokens_each")
def groups_of_requests(contexts, num_new, page_size):
    """qo_indptr counts requests."""
    order, levels = levels_of(contexts, num_new, page_size)
    first = np.append(0, num_new[order].cumsum())
    return order, [level._replace(qo_indptr=np.searchsorted(first, level.qo_indptr)) for level in levels]


@wrong("chunk_levels", fails="test_one_request")
def a_level_too_many(contexts, num_new, page_size):
    order, levels = levels_of(contexts, num_new, page_size)
    return order, [*levels, *levels[:1]]


@wrong("chunk_levels", fails="test_a_chunk_twice_in_a_request")
def a_set_of_chunks(contexts, num_new, page_size):
    once = [tuple({id(chunk.pinned): chunk for chunk in context}.values()) for context in contexts]
    return levels_of(once, num_new, page_size)


@wrong("chunk_levels", fails="test_dtypes_of_the_levels")
def pages_in_64_bits(contexts, num_new, page_size):
    order, levels = reference.chunk_levels(contexts, num_new, page_size)
    return order, [level._replace(kv_page_indices=level.kv_page_indices.astype(np.int64)) for level in levels]


@wrong("chunk_levels", fails="test_requests_without_chunks")
def no_groups_without_chunks(contexts, num_new, page_size):
    order, levels = reference.chunk_levels(contexts, num_new, page_size)
    found = []
    for level in levels:
        keep = np.append(level.kv_last_page_len > 0, True)
        found.append(
            level._replace(
                qo_indptr=level.qo_indptr[keep],
                kv_page_indptr=level.kv_page_indptr[keep],
                kv_last_page_len=level.kv_last_page_len[keep[:-1]],
            )
        )
    return order, found


# ChunkStore ---------------------------------------------------------------------------------------------------------


@right("ChunkStore")
class TimesAndRequests:
    """A time of last use for each chunk, and the running requests in a list."""

    def __init__(self, max_pages):
        self.max_pages, self.pages, self.time, self.running = max_pages, {}, {}, []

    @property
    def names(self):
        return sorted(self.pages, key=lambda name: self.time[name])

    @property
    def num_pages(self):
        return sum(self.pages.values())

    def use(self, name):
        self.time[name] = max(self.time.values(), default=0) + 1

    def add(self, name, num_pages, keep=()):
        if name in self.pages:
            self.use(name)
            return []
        in_use = {other for names in self.running for other in names}
        evicted, needed = [], num_pages - (self.max_pages - self.num_pages)
        for other in self.names:
            if needed > 0 and other not in in_use and other not in keep:
                evicted.append(other)
                needed -= self.pages[other]
        if needed > 0:
            raise ChunkError(name)
        self.pages = {other: pages for other, pages in self.pages.items() if other not in evicted} | {name: num_pages}
        self.use(name)
        return evicted

    def begin(self, names):
        if unknown := set(names) - set(self.pages):
            raise KeyError(unknown.pop())
        for name in names:
            self.use(name)
        self.running.append(sorted(names))

    def end(self, names):
        self.running.remove(sorted(names))


@wrong("ChunkStore", fails="test_a_request_uses_its_chunks")
class FirstInFirstOut(reference.ChunkStore):
    def begin(self, names):
        order = list(self._pages)
        super().begin(names)
        for name in order:
            self._pages.move_to_end(name)


@wrong("ChunkStore", fails="test_a_random_life_of_chunks")
class InTheOrderOfFirstUse(reference.ChunkStore):
    """A request that has a chunk twice uses it where it comes first."""

    def begin(self, names):
        super().begin(names)
        for name in dict.fromkeys(names):
            self._pages.move_to_end(name)


@wrong("ChunkStore", fails="test_the_oldest_goes")
class NewestFirst(reference.ChunkStore):
    """Takes the most recently used one."""

    def add(self, name, num_pages, keep=()):
        if name in self._pages:
            return super().add(name, num_pages, keep)
        before = list(self._pages)
        for other in reversed(before):
            self._pages.move_to_end(other)
        evicted = super().add(name, num_pages, keep)
        for other in before:
            if other in self._pages:
                self._pages.move_to_end(other)
        self._pages.move_to_end(name)
        return evicted


@wrong("ChunkStore", fails="test_two_requests_over_a_chunk")
class MarkedInUse(TimesAndRequests.definition):
    """A set of the chunks in use."""

    def begin(self, names):
        super().begin(names)
        self.running = [sorted({name for own in self.running for name in own})]

    def end(self, names):
        self.running = [[name for own in self.running for name in own if name not in names]]


@wrong("ChunkStore", fails="test_chunks_in_use_stay")
class InUseOrNot(reference.ChunkStore):
    def begin(self, names):
        super().begin(names)
        super().end(names)

    def end(self, names):
        pass


@wrong("ChunkStore", fails="test_chunks_to_keep")
class KeepsNothing(reference.ChunkStore):
    def add(self, name, num_pages, keep=()):
        return super().add(name, num_pages)


@wrong("ChunkStore", fails="test_a_refusal_changes_nothing")
class EvictsBeforeItKnows(reference.ChunkStore):
    def add(self, name, num_pages, keep=()):
        evicted = []
        for other in list(self._pages) if name not in self._pages else []:
            if self.num_pages + num_pages <= self._max_pages:
                break
            if not self._uses[other] and other not in keep:
                evicted.append(other)
                del self._pages[other]
        super().add(name, num_pages, keep)
        return evicted


@wrong("ChunkStore", fails="test_a_refusal_changes_nothing")
class CountsBeforeItChecks(reference.ChunkStore):
    def begin(self, names):
        for name in names:
            self._pages.move_to_end(name)
            self._uses[name] += 1


@wrong("ChunkStore", fails="test_the_oldest_goes")
class EvictsAll(reference.ChunkStore):
    """Evicts everything that may be evicted once there is no room."""

    def add(self, name, num_pages, keep=()):
        if name in self._pages or self.num_pages + num_pages <= self._max_pages:
            return super().add(name, num_pages, keep)
        evicted = [other for other in self._pages if not self._uses[other] and other not in keep]
        for other in evicted:
            del self._pages[other]
        super().add(name, num_pages, keep)
        return evicted


@wrong("ChunkStore", fails="test_a_chunk_is_added_again")
class AddsAgain(reference.ChunkStore):
    """Makes room for a chunk that is there already."""

    def add(self, name, num_pages, keep=()):
        evicted, free = [], self._max_pages - self.num_pages
        for other in list(self._pages):
            if free < num_pages and other != name and not self._uses[other] and other not in keep:
                evicted.append(other)
                free += self._pages.pop(other)
        if free < num_pages:
            raise ChunkError(name)
        self._pages[name] = num_pages
        return evicted


# recompute ----------------------------------------------------------------------------------------------------------


@right("recompute")
def with_a_table_of_new_rows(model, token_ids, keys, values, chosen):
    """Joins old and new rows without writing to a clone."""
    n, out = len(token_ids), ([], [])
    is_new = torch.zeros(n, dtype=torch.bool)
    is_new[chosen] = True
    row = torch.zeros(n, dtype=torch.long)
    row[chosen] = torch.arange(len(chosen))

    def attend(layer, q, k, v):
        for joined, new, old in zip(out, (k, v), (keys[layer], values[layer]), strict=True):
            rows = new[row] if len(new) else old
            joined.append(torch.where(is_new[:, None, None], rows, old))
        mask = torch.arange(n) <= chosen[:, None]
        return masked_attention(q, out[0][-1], out[1][-1], scale=model.attention_specs[layer].scale, mask=mask)

    with torch.inference_mode():
        model(token_ids[chosen], chosen, attend)
    return out


def again(model, token_ids, keys, values, chosen, *, mask=None, positions=None, store=True, in_place=False,
          sees_stored=True, which=(True, True)):  # fmt: skip
    """The reference with one thing changed."""
    n = len(token_ids)
    old_k, old_v = [k.clone() for k in keys], [v.clone() for v in values]
    new_k, new_v = (list(keys), list(values)) if in_place else ([k.clone() for k in keys], [v.clone() for v in values])
    visible = torch.arange(n) <= chosen[:, None] if mask is None else mask

    def attend(layer, q, k, v):
        scale = model.attention_specs[layer].scale
        for new, rows, stored in zip((new_k, new_v), (k, v), which, strict=True):
            if stored:
                new[layer][chosen] = rows
        if not sees_stored:
            causal = torch.ones(len(chosen), len(chosen), dtype=torch.bool).tril()
            return masked_attention(q, k, v, scale=scale, mask=causal)
        seen = (new_k, new_v) if store else (old_k, old_v)
        return masked_attention(q, seen[0][layer], seen[1][layer], scale=scale, mask=visible)

    with torch.inference_mode():
        model(token_ids[chosen], chosen if positions is None else positions, attend)
    return new_k, new_v


@wrong("recompute", fails="test_all_are_chosen")
def sees_all_tokens(model, token_ids, keys, values, chosen):
    mask = torch.ones(len(chosen), len(token_ids), dtype=torch.bool)
    return again(model, token_ids, keys, values, chosen, mask=mask)


@wrong("recompute", fails="test_all_are_chosen")
def not_itself(model, token_ids, keys, values, chosen):
    mask = torch.arange(len(token_ids)) < chosen[:, None]
    return again(model, token_ids, keys, values, chosen, mask=mask)


@wrong("recompute", fails="test_all_behind_the_first_chunk")
def positions_from_0(model, token_ids, keys, values, chosen):
    return again(model, token_ids, keys, values, chosen, positions=torch.arange(len(chosen)))


@wrong("recompute", fails="test_all_are_chosen")
def sees_the_old_keys(model, token_ids, keys, values, chosen):
    return again(model, token_ids, keys, values, chosen, store=False)


@wrong("recompute", fails="test_all_behind_the_first_chunk")
def sees_the_chosen_alone(model, token_ids, keys, values, chosen):
    return again(model, token_ids, keys, values, chosen, sees_stored=False)


@wrong("recompute", fails="test_all_are_chosen")
def overwrites_the_stored(model, token_ids, keys, values, chosen):
    return again(model, token_ids, keys, values, chosen, in_place=True)


@wrong("recompute", fails="test_all_are_chosen")
def keys_alone(model, token_ids, keys, values, chosen):
    return again(model, token_ids, keys, values, chosen, which=(True, False))


@wrong("recompute", fails="test_the_last_token")
def everything_behind_the_first_chosen(model, token_ids, keys, values, chosen):
    """Computes all tokens again, and keeps the chosen rows: right only where all of them are chosen."""
    everything = torch.arange(len(token_ids))
    new = again(model, token_ids, keys, values, everything)
    out = [k.clone() for k in keys], [v.clone() for v in values]
    for mine, theirs in zip(out, new, strict=True):
        for layer, rows in enumerate(theirs):
            mine[layer][chosen] = rows[chosen]
    return out


@wrong("recompute", fails="test_the_chosen_run_together_and_alone")
def all_tokens_run(model, token_ids, keys, values, chosen):
    """The keys of the tokens that are not chosen are computed, and dropped."""
    new_k, new_v, everything = [k.clone() for k in keys], [v.clone() for v in values], torch.arange(len(token_ids))

    def attend(layer, q, k, v):
        new_k[layer][chosen], new_v[layer][chosen] = k[chosen], v[chosen]
        mask, scale = everything <= everything[:, None], model.attention_specs[layer].scale
        return masked_attention(q, new_k[layer], new_v[layer], scale=scale, mask=mask)

    with torch.inference_mode():
        model(token_ids, everything, attend)
    return new_k, new_v


@wrong("recompute", fails="test_the_chosen_run_together_and_alone")
def one_call_for_each_token(model, token_ids, keys, values, chosen):
    for token in chosen:
        keys, values = again(model, token_ids, keys, values, token[None])
    return [k.clone() for k in keys], [v.clone() for v in values]
