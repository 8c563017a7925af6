"""Right and wrong answers to the homework of chapter 12. They test its grader."""

from collections import deque
from functools import cache
from typing import Any, ClassVar

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from book.grading import right, solution, wrong
from mini_engine.decode_graphs import pad_decodes

reference = solution("12_cuda_graphs_and_overlap")
StepTimes = reference.StepTimes

# run_steps ----------------------------------------------------------------------------------------------------------


@right("run_steps")
def as_recurrences(num_steps, *, prepare, launch, work, collect, depth):
    """Step k is collected after the launches of step min(k + depth, the last one)."""
    host, device, launched, done, collected = 0, 0, [], [], []
    for i in range(num_steps):
        starts = [host + prepare + launch * (n + 1) for n in range(len(work))]
        for start, seconds in zip(starts, work, strict=True):
            device = max(device, start) + seconds
        host = starts[-1]
        launched.append(host)
        done.append(device)
        for k in range(len(collected), num_steps if i == num_steps - 1 else max(0, i + 1 - depth)):
            host = max(host, done[k]) + collect
            collected.append(host)
    return [StepTimes(*step) for step in zip(launched, done, collected, strict=True)]


def clock(num_steps, *, prepare, launch, work, collect, depth, start_early=False, waits=False, parallel=False,
          drain=True, first=False, forget=False):  # fmt: skip
    """The reference with one thing changed."""
    host, device, launched, done, collected = 0, 0, [], [], []
    for i in range(num_steps):
        while first and len(collected) < i + 1 - max(depth, 1):  # collects before it launches
            host = max(host, done[len(collected)]) + collect
            collected.append(host)
        host += prepare
        for seconds in work:
            begin = host
            host += launch
            device = max(0 if parallel else device, begin if start_early else host) + seconds
            if waits:
                host = device
            if forget:
                device = host + seconds
        launched.append(host)
        done.append(device)
        while len(collected) + (depth if i < num_steps - 1 else 0) <= i and not (first and i < num_steps - 1):
            host = (max(host, done[len(collected)]) if drain else host) + collect
            collected.append(host)
    return [StepTimes(*step) for step in zip(launched, done, collected, strict=True)]


@wrong("run_steps", fails="test_one_kernel")
def starts_when_the_launch_begins(*args, **options):
    return clock(*args, **options, start_early=True)


@wrong("run_steps", fails="test_one_kernel")
def a_synchronization_behind_each_launch(*args, **options):
    return clock(*args, **options, waits=True)


@wrong("run_steps", fails="test_a_step_of_some_kernels")
def kernels_side_by_side(*args, **options):
    return clock(*args, **options, parallel=True)


@wrong("run_steps", fails="test_one_kernel")
def collects_without_waiting(*args, **options):
    return clock(*args, **options, drain=False)


@wrong("run_steps", fails="test_depth_0")
def always_depth_1(num_steps, **options):
    return clock(num_steps, **(options | {"depth": 1}))


@wrong("run_steps", fails="test_depth_1")
def always_depth_0(num_steps, **options):
    return clock(num_steps, **(options | {"depth": 0}))


@wrong("run_steps", fails="test_depth_1")
def collects_before_it_launches(*args, **options):
    return clock(*args, **options, first=options["depth"] > 0)


@wrong("run_steps", fails="test_the_end_of_the_pipeline")
def at_most_depth_1(num_steps, **options):
    return clock(num_steps, **(options | {"depth": min(1, options["depth"])}))


@wrong("run_steps", fails="test_a_step_of_some_kernels")
def the_sum_of_the_work(num_steps, *, work, launch, **options):
    """All launches first, then all kernels."""
    return clock(num_steps, work=[sum(work)], launch=launch * len(work), **options)


# update_tables ------------------------------------------------------------------------------------------------------


@right("update_tables")
def with_a_flat_index(tables, lens, page_indices, page_indptr, kv_lens, padding_page):
    counts, width = np.diff(page_indptr), tables.shape[1]
    if len(counts) > len(tables) or (counts > width).any():
        raise ValueError("too small")
    row = np.repeat(np.arange(len(counts)), counts)
    tables[row, np.arange(len(page_indices)) - page_indptr[row]] = page_indices
    tables[len(counts) :] = padding_page
    lens[:] = 1
    lens[: len(counts)] = kv_lens


def written(tables, lens, page_indices, page_indptr, kv_lens, padding_page, *, check=True, late=False, pad=True,
            pad_len=1, behind=None, drop_zero=False, starts=True):  # fmt: skip
    """The reference with one thing changed."""
    counts, (rows, width) = np.diff(page_indptr), tables.shape
    too_small = len(counts) > rows or counts.max() > width
    if too_small and check and not late:
        raise ValueError("too small")
    for b, count in enumerate(counts[:rows]):
        own = page_indices[page_indptr[b] :][: min(count, width)] if starts else page_indices[b:][:count]
        if behind is not None:
            tables[b] = behind
        tables[b, : len(own)] = own
        if drop_zero:
            tables[b, : len(own)][own == 0] = tables[b, 0]
    if too_small and check:
        raise ValueError("too small")
    lens[: len(counts)] = kv_lens[:rows]
    if pad:
        tables[len(counts) :, 0] = padding_page
        lens[len(counts) :] = pad_len


@wrong("update_tables", fails="test_many_requests")
def in_a_loop(*args):
    written(*args)


@wrong("update_tables", fails="test_page_0")
def zero_is_no_page(*args):
    written(*args, drop_zero=True)


@wrong("update_tables", fails="test_one_request")
def minus_one_behind(*args):
    """A kernel that loads a whole tile of pages would read before the start of the cache."""
    written(*args, behind=-1)


@wrong("update_tables", fails="test_page_0")
def every_request_from_its_number(*args):
    written(*args, starts=False)


@wrong("update_tables", fails="test_rows_of_padding")
def padding_is_left_alone(*args):
    written(*args, pad=False)


@wrong("update_tables", fails="test_rows_of_padding")
def padding_without_keys(*args):
    written(*args, pad_len=0)


@wrong("update_tables", fails="test_rows_of_padding")
def padding_in_page_0(tables, lens, page_indices, page_indptr, kv_lens, padding_page):
    written(tables, lens, page_indices, page_indptr, kv_lens, 0)


@wrong("update_tables", fails="test_a_request_that_does_not_fit")
def cut_off_without_a_word(*args):
    written(*args, check=False)


@wrong("update_tables", fails="test_a_request_that_does_not_fit")
def refused_too_late(*args):
    written(*args, late=True)


@wrong("update_tables", fails="test_one_request")
def a_new_table(tables, lens, page_indices, page_indptr, kv_lens, padding_page):
    """The graph still reads the old one."""
    tables, lens = tables.copy(), lens.copy()
    written(tables, lens, page_indices, page_indptr, kv_lens, padding_page)


# pad_decodes --------------------------------------------------------------------------------------------------------


@right("pad_decodes")
def the_engines(arrays, size, page):
    return pad_decodes(arrays, size, page)


@right("pad_decodes")
def by_concatenation(arrays, size, page):
    more = size - len(arrays["kv_lens"])
    out = dict(arrays)
    out["token_ids"] = np.concatenate([arrays["token_ids"], np.full(more, 1)])
    out["kv_lens"] = np.concatenate([arrays["kv_lens"], np.ones(more, dtype=np.int64)])
    out["pages"] = np.concatenate([arrays["pages"], np.full(more, page)])
    for name, number in (("token_source", -1), ("page_positions", 0)):
        if arrays[name] is not None:
            out[name] = np.concatenate([arrays[name], np.full(more, number)])
    return out


def filled(arrays, size, page, *, numbers=(), front=False, make=(), pages=None):
    """The reference with one thing changed."""
    padding = {"token_ids": 0, "kv_lens": 1, "pages": page, "token_source": -1, "page_positions": 0} | dict(numbers)
    more, out = size - len(arrays["kv_lens"]), {}
    for name, array in arrays.items():
        if array is None and name not in make:
            out[name] = None
            continue
        old = np.full(len(arrays["kv_lens"]), -1) if array is None else array
        new = np.full(more if pages is None or name != "pages" else min(more, pages), padding[name])
        out[name] = np.concatenate([new, old] if front else [old, new])
    return out


@wrong("pad_decodes", fails="test_one_row_of_padding")
def page_zero(arrays, size, page):
    return filled(arrays, size, 0)


@wrong("pad_decodes", fails="test_one_row_of_padding")
def without_keys(arrays, size, page):
    return filled(arrays, size, page, numbers={"kv_lens": 0})


@wrong("pad_decodes", fails="test_one_row_of_padding")
def in_front(arrays, size, page):
    return filled(arrays, size, page, front=True)


@wrong("pad_decodes", fails="test_rows_share_a_page")
def one_page_for_all(arrays, size, page):
    return filled(arrays, size, page, pages=1)


@wrong("pad_decodes", fails="test_rows_share_a_page")
def pages_one_after_the_other(arrays, size, page):
    out = filled(arrays, size, page)
    out["pages"][len(arrays["pages"]) :] += np.arange(size - len(arrays["kv_lens"]))
    return out


@wrong("pad_decodes", fails="test_sources")
def fed_by_row_0(arrays, size, page):
    return filled(arrays, size, page, numbers={"token_source": 0})


@wrong("pad_decodes", fails="test_nothing_to_pad")
def sources_always(arrays, size, page):
    return filled(arrays, size, page, make=("token_source",))


@wrong("pad_decodes", fails="test_integers_stay_integers")
def an_empty_list_is_appended(arrays, size, page):
    padding, more = {"kv_lens": 1, "pages": page, "token_source": -1}, size - len(arrays["kv_lens"])
    return {
        name: None if array is None else np.append(array, [padding.get(name, 0)] * more)
        for name, array in arrays.items()
    }


@wrong("pad_decodes", fails="test_integers_stay_integers")
def floats(*args):
    return {name: None if array is None else array.astype(float) for name, array in filled(*args).items()}


@wrong("pad_decodes", fails="test_nothing_to_pad")
def lists(*args):
    return {name: None if array is None else array.tolist() for name, array in filled(*args).items()}


@wrong("pad_decodes", fails="test_page_positions")
def positions_at_the_end(arrays, size, page):
    return filled(arrays, size, page, numbers={"page_positions": 99})


@wrong("pad_decodes", fails="test_one_row_of_padding")
def a_token_that_does_not_exist(arrays, size, page):
    return filled(arrays, size, page, numbers={"token_ids": 10**9})


@wrong("pad_decodes", fails="test_padding_alone")
def the_last_requests_token(arrays, size, page):
    return filled(arrays, size, page, numbers={"token_ids": arrays["token_ids"][-1]})


@wrong("pad_decodes", fails="test_the_engine_pads_with_it")
def fails_for_many_keys(arrays, size, page):
    """The engine computes the requests of such a step again, without padding, so their tokens are right."""
    if (arrays["kv_lens"] >= 20).any():
        raise KeyError("a length that no other check has")
    return filled(arrays, size, page)


@wrong("pad_decodes", fails="test_one_row_of_padding")
def as_long_as_the_longest(arrays, size, page):
    """Repeats the last request's length, and its pages as often."""
    out = filled(arrays, size, page, numbers={"kv_lens": arrays["kv_lens"].max()})
    pages = -(-int(arrays["kv_lens"].max()) // 4) * (size - len(arrays["kv_lens"]))
    return out | {"pages": np.append(arrays["pages"], np.full(pages, page))}


@wrong("pad_decodes", fails="test_one_row_of_padding")
def in_the_callers_dict(arrays, size, page):
    arrays.update(filled(arrays, size, page))
    return arrays


# graph_sizes --------------------------------------------------------------------------------------------------------


@right("graph_sizes")
def over_all_numbers(steps, num_sizes):
    """Every whole number may be a size: cost[n] is the least padding of the steps up to n requests."""
    most = max(steps)
    count = np.array([steps.get(n, 0) for n in range(most + 1)])
    before, rows = count.cumsum(), (count * np.arange(most + 1)).cumsum()
    cost, ways = np.full(most + 1, np.inf), [[] for _ in range(most + 1)]
    cost[0] = 0
    for _ in range(num_sizes):
        new, new_ways = cost.copy(), list(ways)
        for n in range(1, most + 1):
            padding = cost[:n] + n * (before[n] - before[:n]) - (rows[n] - rows[:n])
            m = int(padding.argmin())
            if padding[m] < new[n]:
                new[n], new_ways[n] = padding[m], [*ways[m], n]
        cost, ways = new, new_ways
    return ways[most]


@right("graph_sizes")
def by_recursion(steps, num_sizes):
    """Chooses the first size first, and caches the best choice of the rest."""
    numbers = sorted(steps)

    @cache
    def best(i, k):
        if i == len(numbers) or k == 0:
            return (0, ()) if i == len(numbers) else (np.inf, ())
        found, count, rows = (np.inf, ()), 0, 0
        for j, size in enumerate(numbers[i:], i):
            count, rows = count + steps[size], rows + steps[size] * size
            padding, sizes = best(j + 1, k - 1)
            found = min(found, (padding + count * size - rows, (size, *sizes)))
        return found

    return list(best(0, num_sizes)[1])


def padding_of(steps, sizes):
    return sum(count * (min(s for s in sizes if s >= n) - n) for n, count in steps.items())


@wrong("graph_sizes", fails="test_one_size")
def powers_of_two(steps, num_sizes):
    sizes = [2**i for i in range((max(steps) - 1).bit_length() + 1)]
    return sizes[-num_sizes:]


@wrong("graph_sizes", fails="test_frequent_numbers")
def quantiles(steps, num_sizes):
    numbers = sorted(steps)
    return sorted({numbers[(len(numbers) - 1) * (i + 1) // num_sizes] for i in range(num_sizes)})


@wrong("graph_sizes", fails="test_frequent_numbers")
def as_if_all_were_as_frequent(steps, num_sizes):
    return reference.graph_sizes(dict.fromkeys(steps, 1), num_sizes)


@wrong("graph_sizes", fails="test_one_size")
def the_most_frequent(steps, num_sizes):
    return sorted(sorted(steps, key=lambda n: -steps[n])[:num_sizes])


@wrong("graph_sizes", fails="test_uneven_numbers")
def the_most_frequent_and_the_largest(steps, num_sizes):
    return sorted({max(steps), *sorted(steps, key=lambda n: -steps[n])[: num_sizes - 1]})


@wrong("graph_sizes", fails="test_greedy_is_not_enough")
def greedy(steps, num_sizes):
    sizes = [max(steps)]
    while len(sizes) < min(num_sizes, len(steps)):
        sizes.append(min(set(steps) - set(sizes), key=lambda n: padding_of(steps, [*sizes, n])))
    return sorted(sizes)


@wrong("graph_sizes", fails="test_enough_sizes")
def more_than_needed(steps, num_sizes):
    sizes = reference.graph_sizes(steps, num_sizes)
    return sorted([*sizes, *[max(steps)] * (num_sizes - len(sizes))])


# serve_ahead --------------------------------------------------------------------------------------------------------


@right("serve_ahead")
def with_objects(device, prompts, *, max_tokens, stop):
    class Running:
        def __init__(self, index):
            self.index, self.launched, self.tokens, self.text = index, 0, [], None

        def take(self, token):
            if self.text is not None:
                return
            self.tokens.append(token)
            text = "".join(self.tokens)
            ends = sorted(text.index(s) for s in stop if s in text)
            if ends or len(self.tokens) == max_tokens:
                self.text = text[: ends[0]] if ends else text

    requests = [Running(i) for i in range(len(prompts))]
    queue, rows, before = deque(requests), [None] * device.num_rows, None
    while any(request.text is None for request in requests):
        starts, now = {}, {}
        for r in range(device.num_rows):
            if (rows[r] is None or rows[r].text is not None) and queue:
                rows[r] = queue.popleft()
                starts[r] = prompts[rows[r].index]
            if rows[r] is not None and rows[r].text is None and rows[r].launched < max_tokens:
                now[r] = rows[r]
                rows[r].launched += 1
        if now:
            device.launch(sorted(now), starts)
        if before:
            for r, token in device.collect().items():
                before[r].take(token)
        before = now
    return [request.text for request in requests]


@right("serve_ahead")
def rows_are_left_at_the_last_launch(*args, **options):
    return serve(*args, **options, leave=True)


def serve(device, prompts, *, max_tokens, stop, depth=1, by_row=False, last_only=False, whole=False, limit=0,
          order="first", first_string=False, free=True, keep_late=False, lifo=False, leave=False,
          drain=False):  # fmt: skip
    """The reference with one thing changed."""
    waiting = deque(range(len(prompts)))
    owner, launched, known = {}, [0] * len(prompts), [0] * len(prompts)
    texts, ended, in_flight, rows = [""] * len(prompts), [False] * len(prompts), deque(), []
    while waiting or owner or (leave and in_flight):
        starts = {}
        for row in range(device.num_rows):
            if row not in owner and waiting and (free or not owner or len(waiting) == len(prompts) - row):
                owner[row] = waiting.pop() if lifo else waiting.popleft()
                starts[row] = prompts[owner[row]]
        rows = [row for row, i in owner.items() if launched[i] < max_tokens + limit]
        if rows:
            device.launch(rows, starts)
            in_flight.append({row: owner[row] for row in rows})
            for row in rows:
                launched[owner[row]] += 1
                if leave and launched[owner[row]] == max_tokens:
                    del owner[row]
        ahead = depth if rows else 0
        while len(in_flight) > ahead:
            owners = in_flight.popleft()
            for row, token in device.collect().items():
                i = owner.get(row) if by_row else owners[row]
                if i is None or (ended[i] and not keep_late):
                    continue
                searched = token if last_only else texts[i] + token
                texts[i] += token
                known[i] += 1
                start = len(texts[i]) - len(searched)
                found = [start + at for s in stop if (at := searched.find(s)) >= 0]
                if found or known[i] == max_tokens:
                    at = (found[0] if first_string else min(found)) if found else None
                    if found and whole:
                        at += min(len(s) for s in stop if texts[i].find(s) == at)
                    texts[i] = texts[i][:at]
                    ended[i] = True
                    ahead = 0 if drain else ahead
                    if owner.get(row) == i or not leave:
                        owner.pop(row, None)
    return texts


@wrong("serve_ahead", fails="test_the_device_is_busy")
def at_depth_0(*args, **options):
    return serve(*args, **options, depth=0)


@wrong("serve_ahead", fails="test_a_stop_string")
def at_depth_2(*args, **options):
    return serve(*args, **options, depth=2)


@wrong("serve_ahead", fails="test_one_request_to_its_limit")
def one_token_too_many(*args, **options):
    return serve(*args, **options, limit=1)


@wrong("serve_ahead", fails="test_a_stop_string")
def searches_the_last_token(*args, **options):
    return serve(*args, **options, last_only=True)


@wrong("serve_ahead", fails="test_a_stop_string")
def keeps_the_stop_string(*args, **options):
    return serve(*args, **options, whole=True)


@wrong("serve_ahead", fails="test_several_stop_strings")
def the_first_string_of_the_list(*args, **options):
    return serve(*args, **options, first_string=True)


@wrong("serve_ahead", fails="test_a_late_token")
def keeps_late_tokens(*args, **options):
    return serve(*args, **options, keep_late=True)


@wrong("serve_ahead", fails="test_a_row_with_a_new_request")
def late_tokens_to_the_rows_owner(*args, **options):
    return serve(*args, **options, by_row=True)


@wrong("serve_ahead", fails="test_rows_are_used_again")
def waits_for_all_rows(*args, **options):
    """Static batching: new requests start when all have ended."""
    return serve(*args, **options, free=False)


@wrong("serve_ahead", fails="test_rows_are_used_again")
def collects_all_when_a_request_ends(*args, **options):
    return serve(*args, **options, drain=True)


@wrong("serve_ahead", fails="test_rows_are_used_again")
def the_last_request_first(*args, **options):
    return serve(*args, **options, lifo=True)


@wrong("serve_ahead", fails="test_a_row_with_a_new_request")
def one_at_a_time_in_the_wrong_place(device, prompts, *, max_tokens, stop):
    """Right for a single request."""
    return (
        [serve(device, prompts[:1], max_tokens=max_tokens, stop=stop)[0]] * len(prompts)
        if len(prompts) > 2 or device.num_rows == 1
        else serve(device, prompts, max_tokens=max_tokens, stop=stop)
    )


# Graph --------------------------------------------------------------------------------------------------------------


class Recorder(TorchDispatchMode):
    def __init__(self, *, reads=True, shapes=True, gathers=True, factories=True, equal=True):
        super().__init__()
        self.calls, self.reads, self.shapes, self.gathers = [], reads, shapes, gathers
        self.factories, self.equal = factories, equal

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        if self.reads and (name == "_local_scalar_dense" or (self.equal and name in ("equal", "is_nonzero"))):
            raise RuntimeError(name)
        masks = any(getattr(x, "dtype", None) == torch.bool for x in tree_leaves(args[1:2]))
        if self.shapes and name in ("nonzero", "masked_select", "_unique2", "unique_dim"):
            raise RuntimeError(name)
        if self.shapes and name == "index" and (masks or not self.gathers):
            raise RuntimeError(name)
        out = func(*args, **(kwargs or {}))
        if self.factories or any(isinstance(x, torch.Tensor) for x in tree_leaves((args, kwargs))):
            self.calls.append((func, args, kwargs or {}, out))
        return out


@right("Graph")
class ByNames:
    """Operators by name, and results one by one."""

    options: ClassVar[dict[str, Any]] = {}
    mode = Recorder

    def capture(self, function, *inputs):
        with self.mode(**self.options) as recorder:
            out = function(*inputs)
        self.calls = recorder.calls
        return out

    @torch.no_grad()
    def replay(self):
        for func, args, kwargs, out in self.calls:
            self.store(out, func(*args, **kwargs))

    def store(self, out, new):
        def put(old, fresh):
            if isinstance(old, torch.Tensor) and old.data_ptr() != fresh.data_ptr():
                old.copy_(fresh)

        tree_map(put, out, new)


Base = ByNames.definition


@wrong("Graph", fails="test_one_operator")
class CallsTheFunction(Base):
    def capture(self, function, *inputs):
        self.function, self.inputs = function, inputs
        self.out = super().capture(function, *inputs)
        return self.out

    def replay(self):
        self.store(self.out, self.function(*self.inputs))


@wrong("Graph", fails="test_one_operator")
class NewResults(Base):
    """The results are new tensors, which nothing reads."""

    def store(self, out, new):
        pass


@wrong("Graph", fails="test_a_chain")
class OnlyTheOutput(Base):
    """Intermediates keep what the capture computed."""

    @torch.no_grad()
    def replay(self):
        func, args, kwargs, out = self.calls[-1]
        self.store(out, func(*args, **kwargs))


@wrong("Graph", fails="test_several_results")
class TensorsAlone(Base):
    def store(self, out, new):
        if isinstance(out, torch.Tensor):
            super().store(out, new)


@wrong("Graph", fails="test_reads_are_refused")
class ReadsAreFrozen(Base):
    options: ClassVar = {"reads": False}


@wrong("Graph", fails="test_reads_are_refused")
class OnlyItemIsARead(Base):
    options: ClassVar = {"equal": False}


@wrong("Graph", fails="test_new_tensors")
class OperatorsOfTensorsAlone(Base):
    """What zeros returned in the capture is a constant, to which every replay adds."""

    options: ClassVar = {"factories": False}


@wrong("Graph", fails="test_shapes_that_depend_on_values")
class ShapesAreFrozen(Base):
    options: ClassVar = {"shapes": False}


@wrong("Graph", fails="test_shapes_that_depend_on_values")
class NoIndexAtAll(Base):
    options: ClassVar = {"gathers": False}


@wrong("Graph", fails="test_captured_again")
class NeverForgets(Base):
    def capture(self, function, *inputs):
        before = getattr(self, "calls", [])
        out = super().capture(function, *inputs)
        self.calls = before + self.calls
        return out


@wrong("Graph", fails="test_writes_in_place")
class ResultsAlone(Base):
    """Calls again only what returned something new: a write in place returns its argument."""

    def capture(self, function, *inputs):
        out = super().capture(function, *inputs)
        self.calls = [call for call in self.calls if not call[0].overloadpacket.__name__.endswith("_")]
        return out
