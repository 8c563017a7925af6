"""Homework of chapter 12: a clock for launches, the arrays that a captured step reads,
sizes for its graphs, a loop that runs ahead of its results, and a graph of your own.

`pad_decodes` is a part of the engine: once its checks pass, `mini-engine generate
--homework` uses it to pad decode steps. `StepTimes` and `Device` are given.
"""

from collections import deque
from collections.abc import Callable, Mapping
from collections.abc import Sequence as ListLike
from typing import Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Int32
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class StepTimes(NamedTuple):
    """The times at which the phases of one step ended, in microseconds.

    Attributes:
        launched: the host has launched all of its work.
        done: the device has finished it.
        collected: the host has read its tokens.
    """

    launched: float
    done: float
    collected: float


def run_steps(
    num_steps: int,
    *,
    prepare: float,
    launch: float,
    work: ListLike[float],
    collect: float,
    depth: int,
) -> list[StepTimes]:
    """Simulate the clocks of host and device over identical steps.

    The host does one thing at a time, and so does the device. For each step the host
    prepares, then makes its launches one after the other. The work of a launch starts
    on the device once the launch is complete and all earlier work is finished; the host
    does not wait for it. After the launches of a step the host collects the oldest
    steps, in order, until at most `depth` launched steps are not collected. After the
    last step it collects all that are left. To collect a step, the host waits until the
    step is done, and then works for `collect`.

    Args:
        num_steps: number of steps.
        prepare: host time before the launches of a step, in microseconds.
        launch: host time of each launch.
        work: device time of what each launch of a step starts: one kernel, or all
            kernels of a graph.
        collect: host time after the wait.
        depth: the pipeline depth.

    Returns:
        The times of each step. The clock starts at 0.

    Example: two kernels of 3 and 4, whose launches take 2 each, at depth 0.

        >>> steps = run_steps(2, prepare=5, launch=2, work=[3, 4], collect=1, depth=0)
        >>> steps[0]
        StepTimes(launched=9, done=14, collected=15)
        >>> steps[1]
        StepTimes(launched=24, done=29, collected=30)
    """
    host: float = 0
    device: float = 0
    launched: list[float] = []
    done: list[float] = []
    collected: list[float] = []
    for step in range(num_steps):
        host += prepare
        for seconds in work:
            host += launch
            device = max(device, host) + seconds
        launched.append(host)
        done.append(device)
        while len(collected) + (depth if step < num_steps - 1 else 0) <= step:
            host = max(host, done[len(collected)]) + collect
            collected.append(host)
    return [StepTimes(*times) for times in zip(launched, done, collected, strict=True)]


def update_tables(
    tables: Int32[np.ndarray, "R W"],
    lens: Int32[np.ndarray, " R"],
    page_indices: Int32[np.ndarray, " P"],
    page_indptr: Int32[np.ndarray, " B+1"],
    kv_lens: Int32[np.ndarray, " B"],
    padding_page: int,
) -> None:
    """Write a step's pages into the dense table that a captured kernel reads.

    The kernel of a graph reads `tables` and `lens` at fixed addresses, and takes R
    requests in every replay. In row b it reads only the pages of the first `lens[b]`
    keys. What must hold:
        - Both arrays are changed in place. They still hold an earlier step's numbers.
        - Row b has the pages of request b, in order. Page 0 is a page like any other.
        - Rows after the requests are padding: they have one key, in `padding_page`.
        - An entry that the kernel does not read may be any page: what was there before,
          a page of this step, or 0, but not -1.
        - No loop over requests or pages.

    Args:
        tables: page table of the graph.
        lens: number of keys of each row.
        page_indices: pages of all requests, in order.
        page_indptr: first entry of each request in `page_indices`, and P.
        kv_lens: number of keys of each request, at least 1; the request has exactly as
            many pages as they need.
        padding_page: a page that no request has.

    Raises:
        ValueError: if there are more requests than rows, or a request has more pages
            than a row has columns. Then nothing has changed.

    Example: requests with pages 4, 0 and 2, in a table for three requests.

        >>> tables, lens = np.full((3, 2), 7, np.int32), np.full(3, 9, np.int32)
        >>> indices, indptr = np.int32([4, 0, 2]), np.int32([0, 2, 3])
        >>> update_tables(tables, lens, indices, indptr, np.int32([20, 16]), 5)
        >>> tables.tolist(), lens.tolist()
        ([[4, 0], [2, 7], [5, 7]], [20, 16, 1])
    """
    counts = np.diff(page_indptr)
    num_requests, (num_rows, width) = len(counts), tables.shape
    if num_requests > num_rows or counts.max(initial=0) > width:
        raise ValueError(
            f"a table of {num_rows} rows and {width} columns is too small for "
            f"{num_requests} requests of up to {counts.max(initial=0)} pages"
        )
    # numpy fills the True entries row by row, which is the order of page_indices.
    tables[:num_requests][np.arange(width) < counts[:, None]] = page_indices
    lens[:num_requests] = kv_lens
    tables[num_requests:, 0], lens[num_requests:] = padding_page, 1


def pad_decodes(arrays: dict[str, Any], size: int, page: int) -> dict[str, Any]:
    """Pad a step in which every request decodes one token.

    A graph computes a fixed number of requests, so a step with fewer gets rows of
    padding after them. `arrays` are the arguments of `StepBatch.build`:

        token_ids       [B]  the token of each request, if the host knows it
        kv_lens         [B]  number of keys of each request, this step's key included
        pages           [P]  pages of all requests, in order, as many as the keys need
        token_source    [B]  row whose last sampled token is the request's input, or -1
                             if the input is in `token_ids`; None if all of them are
        page_positions  [P]  position of the first key of each page, or None

    What must hold:
        - A row of padding computes a token that every vocabulary has, such as 0, over
          as few keys as possible, and touches no page and no row of a request.
        - B may be 0: the engine captures a step of padding alone.
        - Each array begins with the requests' own entries, unchanged. Where
          `token_source` or `page_positions` is None, it stays None.
        - Arrays of integers stay arrays of integers, even if nothing is appended.
        - The arguments belong to the caller: do not change them.

    Args:
        arrays: see above.
        size: requests of the result, at least B.
        page: a page that no request has.

    Returns:
        The arguments of the larger step.

    Example: a request of 5 keys in pages of 4, padded to a step of 2.

        >>> arrays = dict(token_ids=np.array([8]), kv_lens=np.array([5]))
        >>> arrays |= dict(pages=np.array([3, 6]), token_source=None)
        >>> padded = pad_decodes(arrays | {"page_positions": None}, size=2, page=9)
        >>> padded["kv_lens"].tolist(), padded["pages"].tolist()
        ([5, 1], [3, 6, 9])
    """
    # One key is the least that a softmax is defined over.
    padding = dict(
        token_ids=0, kv_lens=1, pages=page, token_source=-1, page_positions=0
    )
    more = size - len(arrays["kv_lens"])
    return {
        # not [padding[name]] * more: NumPy makes floats of an empty list
        name: None if array is None else np.append(array, np.full(more, padding[name]))
        for name, array in arrays.items()
    }


def graph_sizes(steps: Mapping[int, int], num_sizes: int) -> list[int]:
    """Choose the sizes of the graphs of decode steps.

    A step of n requests runs in the graph of the smallest size that is at least n. Its
    padding is the difference. For 512 different numbers of requests and 16 sizes the
    choice should take a second or two.

    Args:
        steps: the number of steps with each number of requests; both are at least 1.
        num_sizes: the most graphs that may be captured, at least 1.

    Returns:
        Sizes, ascending, such that every step fits in one of them and the padding of
        all steps together is as small as `num_sizes` graphs allow.

    Example: three different numbers of requests, with two sizes and with enough.

        >>> graph_sizes({1: 20, 7: 1, 8: 9}, num_sizes=2)
        [1, 8]
        >>> graph_sizes({1: 20, 7: 1, 8: 9}, num_sizes=5)
        [1, 7, 8]
    """
    # A size between two numbers of requests that occur would only pad more.
    numbers = np.array(sorted(steps))
    count = np.array([steps[n] for n in numbers.tolist()])
    steps_before = np.append(0, count.cumsum())
    rows_before = np.append(0, (count * numbers).cumsum())

    # padding[i, j]: of the steps numbers[i:j], if they run in the graph of the last.
    in_between = steps_before[None, 1:] - steps_before[:-1, None]
    rows = rows_before[None, 1:] - rows_before[:-1, None]
    padding = np.where(in_between > 0, numbers * in_between - rows, np.inf)

    n = len(numbers)
    least = np.append(0.0, np.full(n, np.inf))  # of the first j numbers, with no size
    choices = []
    for _ in range(min(num_sizes, n)):
        ways = least[:-1, None] + padding  # the last size holds numbers[i:j]
        choices.append(ways.argmin(axis=0))
        least = np.append(np.inf, ways.min(axis=0))
    sizes, end = [], n
    for first in reversed(choices):
        sizes.append(int(numbers[end - 1]))
        end = int(first[end - 1])
    return sizes[::-1]


class Device:
    """A device that computes one token of some requests in each step.

    It has some rows, and feeds the last token of a row into the row's next step. The
    host never passes it a token. Tokens are pieces of text.

    Args:
        num_rows: requests that it can hold at a time.
        model: maps a prompt to the tokens that the model writes after it; after the
            last of them, further tokens are "?".

    Attributes:
        num_rows: see above.
        launches: rows of each step.
        idle: how often the device ran out of work before the next launch.
    """

    def __init__(self, num_rows: int, model: Callable[[str], ListLike[str]]) -> None:
        self.num_rows, self._model = num_rows, model
        self.launches: list[list[int]] = []
        self.idle = 0
        self._rows: dict[int, tuple[ListLike[str], int]] = {}
        self._in_flight: deque[dict[int, str]] = deque()

    def launch(self, rows: ListLike[int], starts: Mapping[int, str]) -> None:
        """Start a step, and return at once.

        Args:
            rows: rows that compute a token, at least one.
            starts: prompts of rows that begin a new request in this step.
        """
        assert rows and len(set(rows)) == len(rows), f"a step of the rows {rows}"
        assert set(starts) <= set(rows) <= set(range(self.num_rows)), "no such row"
        self.idle += bool(self.launches) and not self._in_flight
        self._rows |= {row: (self._model(prompt), 0) for row, prompt in starts.items()}
        tokens = {}
        for row in rows:
            output, position = self._rows[row]
            tokens[row] = output[position] if position < len(output) else "?"
            self._rows[row] = output, position + 1
        self.launches.append(list(rows))
        self._in_flight.append(tokens)

    def collect(self) -> dict[int, str]:
        """Wait for the oldest step not yet collected, and return its tokens by row."""
        assert self._in_flight, "no step is in flight"
        return self._in_flight.popleft()


def serve_ahead(
    device: Device, prompts: ListLike[str], *, max_tokens: int, stop: ListLike[str]
) -> list[str]:
    """Serve requests at pipeline depth 1, with the same outputs as at depth 0.

    A request ends when its text contains a stop string, or at `max_tokens` tokens. What
    must hold:
        - A request's output is its text up to the first place where any stop string
          begins or, if it contains none, the text of its `max_tokens` tokens. A stop
          string may begin in one token and end in a later one.
        - Each step is launched before the previous one is collected, if any row has a
          token to compute. If none has, the step in flight is collected first.
        - `max_tokens` is known in advance: no token beyond it is computed. At most one
          token of each request is computed after a stop string.
        - Requests start in order, as soon as a row is free. When a request has ended by
          a stop string, the first launch after that token was collected gives its row
          to the next request, although the device may still be computing a token of the
          old one. A request that reaches `max_tokens` may leave its row at its last
          launch, or when its last token is collected.

    Args:
        device: where the steps run. It has computed nothing yet.
        prompts: one for each request.
        max_tokens: at least 1.
        stop: stop strings, none of them empty.

    Returns:
        The output of each request.

    Example: the request stops at "lo", which begins in one token and ends in the next.

        >>> device = Device(1, lambda prompt: ["hel", "l", "o", " you", "!"])
        >>> serve_ahead(device, ["say"], max_tokens=5, stop=["lo"])
        ['hel']
        >>> len(device.launches)  # the last one is wasted
        4
    """
    waiting = deque(range(len(prompts)))
    owner: dict[int, int] = {}  # request of each row
    launched, known = [0] * len(prompts), [0] * len(prompts)
    texts, ended = [""] * len(prompts), [False] * len(prompts)
    in_flight: deque[dict[int, int]] = deque()  # the owners when a step was launched
    while waiting or owner:
        starts = {}
        for row in range(device.num_rows):
            if row not in owner and waiting:
                owner[row] = waiting.popleft()
                starts[row] = prompts[owner[row]]
        rows = [row for row, i in owner.items() if launched[i] < max_tokens]
        if rows:
            device.launch(rows, starts)
            in_flight.append({row: owner[row] for row in rows})
            for row in rows:
                launched[owner[row]] += 1
        while len(in_flight) > (1 if rows else 0):
            owners = in_flight.popleft()
            for row, token in device.collect().items():
                i = owners[row]
                if ended[i]:
                    continue  # computed past the end; the row may have another request
                texts[i] += token
                known[i] += 1
                found = [at for string in stop if (at := texts[i].find(string)) >= 0]
                if found or known[i] == max_tokens:
                    texts[i] = texts[i][: min(found, default=None)]
                    ended[i] = True
                    del owner[row]
    return texts


class Graph:
    """Challenge: capture a function of tensors, and replay it over the same memory.

    `capture` runs the function once and records the operators that it calls on tensors,
    with their arguments. `replay` calls these operators again, in order, and not the
    function. A capture in CUDA only records; this one also executes the operators, so
    its results are valid before the first replay. As in a CUDA graph,
        - an operator reads its arguments and writes its results at the same addresses
          as in the capture, whether they are inputs, constants of the function,
          intermediates, or outputs;
        - Python's numbers, branches and loops stay as they were in the capture;
        - operators that write in place do so in every replay.

    On a CPU, `torch.utils._python_dispatch.TorchDispatchMode` sees every operator.

    Example:

        >>> def step(x):
        ...     return x * 2 + 1
        >>> graph, x = Graph(), torch.tensor([1.0, 2.0])
        >>> y = graph.capture(step, x)
        >>> _ = x.copy_(torch.tensor([5.0, 6.0]))
        >>> graph.replay()
        >>> y
        tensor([11., 13.])
    """

    def __init__(self) -> None:
        """Create an empty graph."""
        self._calls: list[_Call] = []

    def capture(self, function: Callable[..., Any], *inputs: Tensor) -> Any:
        """Run and record a function.

        Args:
            function: calls operators on CPU tensors; returns tensors, or lists or
                tuples of tensors.
            inputs: its arguments.

        Returns:
            The function's results, which every replay overwrites.

        Raises:
            RuntimeError: if the host reads a value of a tensor (`x.item()`, `int(x)`,
                `if x > 0`, `torch.equal`), or if the shape of a result depends on
                values (`nonzero`, `masked_select`, `x[mask]`).
        """
        with _Recorder() as recorder:
            outputs = function(*inputs)
        self._calls = recorder.calls
        return outputs

    def replay(self) -> None:
        """Call the recorded operators again, on the inputs' current contents."""
        with torch.no_grad():
            for operator, args, options, results in self._calls:
                again = tree_leaves(operator(*args, **options))
                for old, new in zip(results, again, strict=True):
                    # A view or a write in place is where it was already.
                    if isinstance(old, Tensor) and old.data_ptr() != new.data_ptr():
                        old.copy_(new)


class _Call(NamedTuple):
    operator: Callable[..., Any]
    args: tuple[Any, ...]
    options: dict[str, Any]
    results: list[Any]  # kept, so their memory is not reused


class _Recorder(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.calls: list[_Call] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if torch.Tag.data_dependent_output in func.tags:
            raise RuntimeError(f"{func} reads a value on the host")
        if torch.Tag.dynamic_output_shape in func.tags and not _is_gather(func, args):
            raise RuntimeError(f"the shape of what {func} returns depends on values")
        results = func(*args, **(kwargs or {}))
        self.calls.append(_Call(func, args, kwargs or {}, tree_leaves(results)))
        return results


def _is_gather(func: Any, args: Any) -> bool:
    """Whether the operator is an index by numbers, whose shape is that of the index."""
    return func is torch.ops.aten.index.Tensor and not any(
        index is not None and index.dtype in (torch.bool, torch.uint8)
        for index in args[1]
    )
