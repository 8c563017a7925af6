"""Grader of chapter 12. Its oracles are hand traces, an event simulation, brute force, and the functions uncaptured."""

import copy
import itertools
import random
from collections.abc import Callable, Mapping
from collections.abc import Sequence as ListLike
from dataclasses import replace
from functools import cache
from importlib.util import find_spec
from typing import Any

import numpy as np
import torch
from torch import Tensor

from book.grading import Exercise, Homework, assert_close, assert_equal, assert_raises, check, require
from mini_engine.batch import StepBatch
from mini_engine.config import EngineConfig
from mini_engine.engine import LLMEngine
from mini_engine.models.base import CausalLM
from mini_engine.models.config import ModelConfig
from mini_engine.models.registry import build_model
from mini_engine.parts import Parts
from mini_engine.sampling_params import SamplingParams

EXERCISES = [
    Exercise(
        "run_steps",
        points=3,
        minutes=20,
        difficulty=2,
        hints=(
            "Keep two clocks: when the host is free, and when the device is free. Which of the two does a launch move, "
            "and which does a kernel move?",
            "A launch moves the host's clock. What it starts begins at the later of both clocks and moves the "
            "device's. Collecting step k moves the host to the later of its own clock and the end of step k.",
            "for seconds in work: host += launch; device = max(device, host) + seconds. Then, while more than depth "
            "steps are not collected: host = max(host, done[k]) + collect. After the last step the limit is 0.",
        ),
    ),
    Exercise(
        "update_tables",
        points=3,
        minutes=15,
        difficulty=2,
        hints=(
            "CSR lists the pages in the order of rows. In which order does numpy assign to the True entries of a mask?",
            "Compare the column numbers with each request's number of pages: the result is a mask of the entries to "
            "write. Check the sizes before you write anything, and write the rows of the padding last.",
            "tables[:B][np.arange(W) < np.diff(page_indptr)[:, None]] = page_indices; lens[:B] = kv_lens; "
            "tables[B:, 0] = padding_page; lens[B:] = 1.",
        ),
    ),
    Exercise(
        "pad_decodes",
        points=3,
        minutes=15,
        difficulty=1,
        part="pad_decodes",
        hints=(
            "What is the shortest request that a step can have? Which of the five arrays have an entry for each "
            "request, and which for each page?",
            "A row of padding has one key, hence one page. So all five arrays grow by the same number.",
            "For each array that is not None: np.append(array, np.full(size - B, number, array.dtype)), with the "
            "numbers 0, 1, page, -1 and 0.",
        ),
    ),
    Exercise(
        "graph_sizes",
        points=5,
        minutes=40,
        difficulty=2,
        hints=(
            "Which sizes can be part of a best choice? If you knew the second-largest size, what would be left to "
            "choose?",
            "Only numbers of requests that occur. Let least[k][j] be the least padding of the j smallest numbers with "
            "k sizes, the last of which is the j-th number. That size serves the numbers after the i-th, for some i.",
            "least[k][j] = min over i < j of least[k - 1][i] + the padding of numbers[i:j] in the size numbers[j - 1]. "
            "Keep the best i of each (k, j), and walk back from j = n.",
        ),
    ),
    Exercise(
        "serve_ahead",
        points=6,
        minutes=60,
        difficulty=3,
        hints=(
            "When a step is collected, a row may belong to a different request than when the step was launched. What "
            "must you remember with each launch?",
            "Keep the owner of each row, and with each step in flight a copy of the owners at its launch. Count the "
            "launched tokens and the known ones of each request: they differ by up to one.",
            "In a loop: fill free rows; launch the rows whose request has fewer than max_tokens launched tokens; "
            "collect until one step is in flight, or none if nothing was launched. Drop the tokens of requests that "
            "have ended, and search the whole text for stop strings.",
        ),
    ),
    Exercise(
        "Graph",
        points=5,
        minutes=60,
        difficulty=3,
        challenge=True,
        hints=(
            "A TorchDispatchMode gets the operator, its arguments and a chance to call it. What must be kept of a call "
            "so that it can be repeated over the same memory?",
            "Record (func, args, kwargs, results). In replay, call func with the recorded args and copy what it "
            "returns into the recorded results, unless that is the same memory: a view, or a write in place.",
            "func.tags has torch.Tag.data_dependent_output for reads of a value and torch.Tag.dynamic_output_shape "
            "for shapes that depend on values; aten.index.Tensor has the second tag too, but depends on values only "
            "if an index is a mask.",
        ),
    ),
]

ON_GPU = torch.cuda.is_available() and find_spec("flashinfer") is not None
COMPILING = 300.0  # CPU seconds that FlashInfer may need to compile its kernels


# run_steps ----------------------------------------------------------------------------------------------------------


def simulate(
    num_steps: int, prepare: float, launch: float, work: ListLike[float], collect: float, depth: int
) -> list[tuple[float, float, float]]:
    """The oracle: two lists of events, each worked off in order, where an event may wait for one of the other list."""
    # Host: (seconds, event of the device to wait for). Device: (seconds, event of the host to wait for).
    host: list[tuple[float, int | None]] = []
    device: list[tuple[float, int]] = []
    last_launch, last_kernel, collects = [], [], []
    for step in range(num_steps):
        host.append((prepare, None))
        for seconds in work:
            host.append((launch, None))
            device.append((seconds, len(host) - 1))
        last_launch.append(len(host) - 1)
        last_kernel.append(len(device) - 1)
        for k in range(num_steps):
            due = step if step == num_steps - 1 else step - depth
            if k <= due and k >= len(collects):
                host.append((collect, last_kernel[k]))
                collects.append(len(host) - 1)
    host_ends: dict[int, float] = {}
    device_ends: dict[int, float] = {}
    while len(host_ends) < len(host) or len(device_ends) < len(device):
        if (i := len(host_ends)) < len(host) and (host[i][1] is None or host[i][1] in device_ends):
            wait = host[i][1]
            start = max(host_ends.get(i - 1, 0.0), 0.0 if wait is None else device_ends[wait])
            host_ends[i] = start + host[i][0]
        if (j := len(device_ends)) < len(device) and device[j][1] in host_ends:
            device_ends[j] = max(device_ends.get(j - 1, 0.0), host_ends[device[j][1]]) + device[j][0]
    ends = zip(last_launch, last_kernel, collects, strict=True)
    return [(host_ends[i], device_ends[j], host_ends[k]) for i, j, k in ends]


def clocked(hw: Homework, num_steps: int, **options: Any) -> None:
    got = hw.run_steps(num_steps, **options)
    expected = simulate(num_steps, **options)
    assert_equal(len(got), num_steps, name="the number of steps")
    for step, (mine, right) in enumerate(zip(got, expected, strict=True)):
        for name, a, b in zip(("launched", "done", "collected"), mine, right, strict=True):
            assert abs(a - b) < 1e-6, f"step {step}: {name} at {a}, expected {b}"


@check("run_steps", mistake="a kernel starts when its launch is complete, not when the launch begins")
def test_one_kernel(hw: Homework) -> None:
    clocked(hw, 1, prepare=5.0, launch=2.0, work=[3.0], collect=1.0, depth=0)


@check(
    "run_steps",
    mistake="the host launches without waiting for earlier kernels, and the device runs one kernel at a time",
)
def test_a_step_of_some_kernels(hw: Homework) -> None:
    clocked(hw, 1, prepare=5.0, launch=2.0, work=[3.0, 4.0, 1.0], collect=1.0, depth=0)
    clocked(hw, 1, prepare=0.0, launch=2.0, work=[9.0, 1.0, 1.0], collect=1.0, depth=0)


@check("run_steps", mistake="if launches are slower than kernels, the device waits for each launch")
def test_a_launch_bound_step(hw: Homework) -> None:
    clocked(hw, 1, prepare=5.0, launch=6.0, work=[1.0, 1.0, 4.0], collect=1.0, depth=0)


@check("run_steps", mistake="at depth 0, collect a step before you prepare the next one")
def test_depth_0(hw: Homework) -> None:
    clocked(hw, 4, prepare=5.0, launch=2.0, work=[3.0, 4.0], collect=1.0, depth=0)


@check("run_steps", mistake="at depth 1, prepare and launch a step first, then collect the one before it")
def test_depth_1(hw: Homework) -> None:
    clocked(hw, 2, prepare=5.0, launch=2.0, work=[30.0], collect=1.0, depth=1)
    clocked(hw, 5, prepare=5.0, launch=2.0, work=[30.0], collect=1.0, depth=1)
    clocked(hw, 5, prepare=50.0, launch=2.0, work=[30.0], collect=1.0, depth=1)


@check("run_steps", mistake="collect the last steps too, each once, whatever the depth")
def test_the_end_of_the_pipeline(hw: Homework) -> None:
    clocked(hw, 1, prepare=5.0, launch=2.0, work=[30.0], collect=1.0, depth=1)
    clocked(hw, 3, prepare=5.0, launch=2.0, work=[30.0], collect=1.0, depth=2)
    clocked(hw, 2, prepare=5.0, launch=2.0, work=[30.0], collect=1.0, depth=5)


@check("run_steps", mistake="for random steps and depths the times differ from an event simulation")
def test_random_steps(hw: Homework) -> None:
    for seed in range(60):
        rng = random.Random(seed)
        work = [float(rng.randrange(1, 20)) for _ in range(rng.randrange(1, 6))]
        times = {name: float(rng.randrange(0, 30)) for name in ("prepare", "launch", "collect")}
        clocked(hw, rng.randrange(1, 8), work=work, depth=rng.randrange(0, 3), **times)


# update_tables ------------------------------------------------------------------------------------------------------

Pages = ListLike[ListLike[int]]


def updated(
    hw: Homework, requests: Pages, *, num_rows: int, width: int, page: int = 99, page_size: int = 16, full: bool = False
) -> tuple[np.ndarray, np.ndarray]:
    """Write requests into a table of stale pages, and check what a kernel would read of it."""
    tables, lens = np.full((num_rows, width), 77, np.int32), np.full(num_rows, 5, np.int32)
    kept = tables, lens
    indices = np.array([p for own in requests for p in own], dtype=np.int32)
    indptr = np.cumsum([0, *map(len, requests)]).astype(np.int32)
    kv_lens = np.array([len(own) * page_size - (0 if full else 3) for own in requests], dtype=np.int32)
    given = indices.copy(), indptr.copy(), kv_lens.copy()
    hw.update_tables(tables, lens, indices, indptr, kv_lens, page)
    require(all(map(np.array_equal, given, (indices, indptr, kv_lens))), "you changed the step's own arrays")
    assert tables is kept[0] and tables.shape == (num_rows, width)
    assert_equal(lens.tolist(), [*kv_lens.tolist(), *[1] * (num_rows - len(requests))], name="the lengths")
    for b, own in enumerate([*requests, *[[page]] * (num_rows - len(requests))]):
        assert_equal(tables[b, : len(own)].tolist(), list(own), name=f"what the kernel reads of row {b}")
    is_page = np.isin(tables, [77, 0, page, *indices])
    require(
        is_page.all(),
        f"an entry after the pages of a row is {tables[~is_page][:1]}: neither what was there nor a page of the step",
    )
    return tables, lens


@check("update_tables", mistake="it fails for a single request in a table of one row: write its pages and its length")
def test_one_request(hw: Homework) -> None:
    updated(hw, [[4, 2, 9]], num_rows=1, width=3)
    updated(hw, [[4]], num_rows=1, width=3)


@check("update_tables", mistake="page 0 is a page like any other: do not drop it, and do not count by page numbers")
def test_page_0(hw: Homework) -> None:
    updated(hw, [[0, 3], [5, 0, 2], [0]], num_rows=3, width=4)


@check("update_tables", mistake="each request has its own number of pages, which begin where page_indptr says")
def test_requests_of_several_lengths(hw: Homework) -> None:
    updated(hw, [[4, 2, 9], [1], [8, 7]], num_rows=3, width=5)
    updated(hw, [[4, 2, 9], [1], [8, 7]], num_rows=3, width=3, full=True)


@check(
    "update_tables", mistake="rows after the requests must have one key, in the padding page, whatever was there before"
)
def test_rows_of_padding(hw: Homework) -> None:
    updated(hw, [[4, 2, 9], [1]], num_rows=4, width=5)
    updated(hw, [[4]], num_rows=8, width=1, page=33)


@check(
    "update_tables",
    mistake="raise a ValueError if the requests do not fit, before you write anything: a kernel checks no bounds",
)
def test_a_request_that_does_not_fit(hw: Homework) -> None:
    for requests, num_rows, width in (([[1], [4, 2, 9]], 4, 2), ([[1], [2], [3]], 2, 4)):
        tables, lens = np.full((num_rows, width), 77, np.int32), np.full(num_rows, 5, np.int32)
        indices = np.array([p for own in requests for p in own], dtype=np.int32)
        indptr = np.cumsum([0, *map(len, requests)]).astype(np.int32)
        kv_lens = np.diff(indptr) * 16
        assert_raises(ValueError, hw.update_tables, tables, lens, indices, indptr, kv_lens, 99)
        assert (tables == 77).all() and (lens == 5).all(), "something was written before the error"


@check("update_tables", mistake="over a series of random steps in one table, a kernel reads wrong pages or lengths")
def test_random_tables(hw: Homework) -> None:
    rng = np.random.default_rng(0)
    tables, lens = np.zeros((9, 6), np.int32), np.zeros(9, np.int32)
    for _ in range(40):
        requests = [rng.integers(0, 50, rng.integers(1, 7)).tolist() for _ in range(rng.integers(1, 10))]
        indices = np.array([p for own in requests for p in own], dtype=np.int32)
        indptr = np.cumsum([0, *map(len, requests)]).astype(np.int32)
        kv_lens = (np.diff(indptr) * 16 - rng.integers(0, 16, len(requests))).astype(np.int32)
        hw.update_tables(tables, lens, indices, indptr, kv_lens, 50)
        assert_equal(lens.tolist(), [*kv_lens.tolist(), *[1] * (9 - len(requests))], name="the lengths")
        read = [tables[b, : -(-n // 16)].tolist() for b, n in enumerate(lens)]
        assert_equal(read, [*requests, *[[50]] * (9 - len(requests))], name="the pages that the kernel reads")
        assert ((tables >= 0) & (tables <= 50)).all(), "an entry is not a page"


@check(
    "update_tables",
    mistake="this runs on the host in every step: write the table without a loop over requests",
    costs=0.2,
    seconds=20,
)
def test_many_requests(hw: Homework) -> None:
    """A loop over requests runs at least 4,096 lines of Python, and the reference about ten."""
    tables, lens = np.zeros((4096, 64), np.int32), np.zeros(4096, np.int32)
    indices, indptr = np.arange(4096 * 64, dtype=np.int32), np.arange(0, 4097 * 64, 64).astype(np.int32)
    calls = traced_lines(lambda: hw.update_tables(tables, lens, indices, indptr, np.full(4096, 1024, np.int32), 9))
    assert calls < 1000, f"{calls:,} lines of Python ran for 4,096 requests"


def traced_lines(function: Callable[[], Any]) -> int:
    """Lines of Python that a call runs."""
    import sys

    count = 0

    def trace(frame: Any, event: str, argument: Any) -> Any:
        nonlocal count
        count += event == "line"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        function()
    finally:
        sys.settrace(before)
    return count


@check("update_tables", mistake="TensorRT-LLM's kernel gets wrong results from your table", seconds=COMPILING)
def test_the_kernel_reads_the_table(hw: Homework) -> None:
    """XQA in bfloat16 on a Hopper GPU, with page 0 and rows of padding, in a table that an earlier step has filled."""
    if not ON_GPU or torch.cuda.get_device_capability()[0] != 9:
        return
    from flashinfer.decode import trtllm_batch_decode_with_kv_cache

    torch.manual_seed(0)
    k, v = (torch.randn(20, 16, 8, 128, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    q = torch.randn(4, 16, 128, device="cuda", dtype=torch.bfloat16)
    tables, lens = np.full((4, 5), 18, np.int32), np.full(4, 70, np.int32)
    requests, kv_lens = [[0, 4, 7], [3]], np.array([41, 16], np.int32)
    indices, indptr = np.array([0, 4, 7, 3], np.int32), np.array([0, 3, 4], np.int32)
    hw.update_tables(tables, lens, indices, indptr, kv_lens, 19)
    out = trtllm_batch_decode_with_kv_cache(
        q, (k, v), torch.zeros(128 * 2**20, dtype=torch.uint8, device="cuda"), torch.from_numpy(tables).cuda(),
        torch.from_numpy(lens).cuda(), 80, bmm1_scale=128**-0.5, bmm2_scale=1.0, kv_layout="NHD", backend="xqa",
    )  # fmt: skip
    for b, (own, n) in enumerate(zip(requests, kv_lens.tolist(), strict=True)):
        keys, values = (x[own].flatten(0, 1)[:n].float().repeat_interleave(2, dim=1) for x in (k, v))
        weights = (torch.einsum("hd,mhd->hm", q[b].float(), keys) * 128**-0.5).softmax(-1)
        expected = torch.einsum("hm,mhd->hd", weights, values)
        assert_close(out[b].float(), expected, atol=3e-2, rtol=3e-2, name=f"attention of request {b}")


# pad_decodes --------------------------------------------------------------------------------------------------------


def decode_arrays(
    kv_lens: ListLike[int], *, sources: bool = False, positions: bool = False, size: int = 4
) -> dict[str, Any]:
    count, pages = len(kv_lens), [-(-n // size) for n in kv_lens]
    total = sum(pages)
    return {
        "token_ids": np.arange(10, 10 + count),
        "kv_lens": np.array(kv_lens, dtype=np.int64),
        "pages": np.arange(total)[::-1].copy(),
        "token_source": np.arange(count) + 3 if sources else None,
        "page_positions": np.concatenate([np.arange(n) * size for n in pages]) if positions else None,
    }


def padded(hw: Homework, arrays: dict[str, Any], size: int, page: int = 40) -> StepBatch:
    """Pad, build the step, and check it against the step without padding."""
    given = copy.deepcopy(arrays)
    got = hw.pad_decodes(arrays, size, page)
    for name, array in given.items():
        same = (array is None and arrays[name] is None) or np.array_equal(array, arrays[name])
        require(same, f"you changed {name}, which belongs to the caller")
    assert_equal(sorted(got), sorted(arrays), name="the names of the arrays")
    count = len(arrays["kv_lens"])
    for name, array in arrays.items():
        if array is None:
            assert got[name] is None, f"{name} was None, and is an array now"
            continue
        assert got[name] is not None, f"{name} was an array, and is None now"
        kind = type(got[name]).__name__
        require(isinstance(got[name], np.ndarray), f"{name} was a NumPy array, and is a {kind} now")
        assert np.array_equal(got[name][: len(array)], array), f"{name} does not begin with the requests' own entries"
    for name in ("token_ids", "kv_lens"):
        assert_equal(len(got[name]), size, name=f"the length of {name}")
    assert_equal(got["kv_lens"][count:].tolist(), [1] * (size - count), name="keys of the rows of padding")
    assert_equal(got["pages"][len(arrays["pages"]) :].tolist(), [page] * (size - count), name="pages of the padding")
    made_up = sorted({*got["token_ids"][count:].tolist()} - {*range(50)})
    require(not made_up, f"a row of padding computes the token {made_up[:1]}, which a small vocabulary does not have")
    batch = StepBatch.build(**got, num_new=None, page_size=4)
    assert (batch.slot_mapping[count:] == page * 4).all(), (
        "a row of padding does not write its key to the first slot of the given page"
    )
    return batch


@check("pad_decodes", mistake="a step that already has the size must stay as it is")
def test_nothing_to_pad(hw: Homework) -> None:
    padded(hw, decode_arrays([5, 9]), 2)


@check("pad_decodes", mistake="a row of padding must have one key, in the given page")
def test_one_row_of_padding(hw: Homework) -> None:
    padded(hw, decode_arrays([5]), 2)


@check("pad_decodes", mistake="all rows of padding share one page, and `pages` has an entry for each of them")
def test_rows_share_a_page(hw: Homework) -> None:
    padded(hw, decode_arrays([5, 9, 1]), 8)


@check(
    "pad_decodes", mistake="a row of padding has the source -1, because it reads no row's last token; None stays None"
)
def test_sources(hw: Homework) -> None:
    batch = padded(hw, decode_arrays([5, 9], sources=True), 4)
    assert_equal(batch.token_source.tolist(), [3, 4, -1, -1], name="token_source")
    assert_equal(batch.feed(torch.arange(100, 110))[:2].tolist(), [103, 104], name="the tokens that requests are fed")


@check(
    "pad_decodes", mistake="`page_positions` has an entry for each page, so append a zero for each page of the padding"
)
def test_page_positions(hw: Homework) -> None:
    batch = padded(hw, decode_arrays([5, 9], positions=True), 4)
    assert_equal(batch.positions.tolist(), [4, 8, 0, 0], name="the positions")


@check("pad_decodes", mistake="a step may be all padding: B is 0 when the engine captures a graph")
def test_padding_alone(hw: Homework) -> None:
    padded(hw, decode_arrays([]), 4)
    padded(hw, decode_arrays([], sources=True), 1)


@check(
    "pad_decodes",
    mistake="NumPy makes floats of an empty list: append np.full(count, number), an array of integers for any count",
    costs=0.2,
)
def test_integers_stay_integers(hw: Homework) -> None:
    for size in (2, 4):
        got = hw.pad_decodes(decode_arrays([5, 9], sources=True, positions=True), size, 40)
        for name, array in got.items():
            whole = np.issubdtype(array.dtype, np.integer)
            assert whole, f"{name} of 2 requests, padded to {size}, is an array of {array.dtype}"


@check("pad_decodes", mistake="for random steps, padding changes the requests' own part of the step")
def test_random_padding(hw: Homework) -> None:
    for seed in range(30):
        rng = random.Random(seed)
        kv_lens = [rng.randrange(1, 20) for _ in range(rng.randrange(1, 6))]
        arrays = decode_arrays(kv_lens, sources=rng.random() < 0.5, positions=rng.random() < 0.5)
        size, page = len(kv_lens) + rng.randrange(4), rng.randrange(41, 60)
        batch, plain = padded(hw, arrays, size, page), StepBatch.build(**arrays, num_new=None, page_size=4)
        count = len(kv_lens)
        for name in ("token_ids", "positions", "slot_mapping", "token_source", "kv_lens", "kv_last_page_len"):
            assert torch.equal(getattr(batch, name)[:count], getattr(plain, name)), f"{name} of the requests"


@cache
def tiny_model(device: str = "cpu") -> CausalLM:
    """Two layers of random weights: in float64 on a CPU, in bfloat16 on a GPU."""
    shape = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 50, "hidden_size": 64}
    shape |= {"intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1}
    head_dim, dtype = (8, torch.float64) if device == "cpu" else (64, torch.bfloat16)
    shape |= {"head_dim": head_dim, "max_position_embeddings": 64, "rms_norm_eps": 1e-6, "rope_theta": 1e4}
    config = ModelConfig.from_hf(shape | {"hidden_act": "silu", "tie_word_embeddings": True})
    model = build_model(config, Parts(), dtype, device)
    generator = torch.Generator(device).manual_seed(0)
    for weight in model.parameters():
        torch.nn.init.normal_(weight, std=0.3, generator=generator)
    return model


def served(parts: Parts, device: str = "cpu", **options: Any) -> list[list[int]]:
    """The tokens of five requests of different lengths."""
    options = {"num_pages": 40, "page_size": 16 if device == "cuda" else 4, "max_batch_size": 5} | options
    engine = LLMEngine(tiny_model(device), EngineConfig.of(options), parts=parts)
    requests = []
    for i in range(5):
        params = SamplingParams(temperature=0.0, max_tokens=3 + 4 * i, ignore_eos=True)
        requests.append(engine.add_request(str(i), [(7 * i + j) % 50 for j in range(2 + 3 * i)], params))
    while engine.has_unfinished:
        engine.step()
    failed = engine.metrics.failed_steps
    require(not failed, f"{failed} steps of the engine raised an error; the warnings of its log name it")
    return [list(request.output_token_ids) for request in requests]


@check("pad_decodes", mistake="with your padding the engine generates different tokens: padding must not change any")
def test_the_engine_pads_with_it(hw: Homework) -> None:
    expected, parts = served(Parts()), replace(Parts(), pad_decodes=hw.pad_decodes)
    for sizes in ((5,), (2, 8), (3,)):
        for depth in (0, 1):
            got = served(parts, cuda_graph_batch_sizes=sizes, pipeline_depth=depth)
            assert_equal(got, expected, name=f"tokens with graphs of {sizes} requests at depth {depth}")


@check("pad_decodes", mistake="captured on a GPU, your padding changes tokens", seconds=COMPILING)
def test_captured_on_a_gpu(hw: Homework) -> None:
    """The same sizes with the reference's padding and yours: the same kernels over the same rows."""
    if not ON_GPU:
        return
    options = {"attn_backend": "flashinfer", "cuda_graph_batch_sizes": (2, 8)}
    got = served(replace(Parts(), pad_decodes=hw.pad_decodes), "cuda", **options)
    assert_equal(got, served(Parts(), "cuda", **options), name="tokens on the GPU")


# graph_sizes --------------------------------------------------------------------------------------------------------


def padding_of(steps: Mapping[int, int], sizes: ListLike[int]) -> int:
    return sum(count * (min(size for size in sizes if size >= n) - n) for n, count in steps.items())


def chosen(hw: Homework, steps: dict[int, int], num_sizes: int, least: int | None = None) -> None:
    """Check a choice against the best of all, or against a given least padding."""
    given = dict(steps)
    sizes = list(hw.graph_sizes(steps, num_sizes))
    assert steps == given, "you changed `steps`"
    assert sizes == sorted(set(sizes)), f"sizes must ascend, without duplicates: {sizes}"
    assert 1 <= len(sizes) <= num_sizes, f"{len(sizes)} sizes, where at most {num_sizes} are allowed"
    assert max(sizes) >= max(steps), f"a step of {max(steps)} requests does not fit in any of {sizes}"
    if least is None:
        ways = itertools.combinations(sorted(steps), min(num_sizes, len(steps)))
        least = min(padding_of(steps, way) for way in ways if max(way) >= max(steps))
    got = padding_of(steps, sizes)
    assert got == least, f"with the sizes {sizes}, all steps together have {got} rows of padding; {least} are enough"


@check("graph_sizes", mistake="a single size must be the largest number of requests that occurs")
def test_one_size(hw: Homework) -> None:
    chosen(hw, {4: 1}, 1)
    chosen(hw, {1: 50, 3: 2, 9: 1}, 1)


@check("graph_sizes", mistake="with enough sizes nothing is padded; return no more sizes than that needs")
def test_enough_sizes(hw: Homework) -> None:
    chosen(hw, {1: 50, 3: 2, 9: 1}, 3)
    chosen(hw, {1: 50, 3: 2, 9: 1}, 8)


@check("graph_sizes", mistake="weight the padding of each number of requests by how often that number occurs")
def test_frequent_numbers(hw: Homework) -> None:
    chosen(hw, {1: 50, 2: 1, 8: 9}, 2)
    chosen(hw, {1: 1, 2: 50, 8: 9}, 2)
    chosen(hw, {1: 1, 7: 100, 8: 1}, 2)


@check("graph_sizes", mistake="the best sizes are neither powers of two nor evenly spaced")
def test_uneven_numbers(hw: Homework) -> None:
    chosen(hw, {3: 10, 5: 10, 6: 10, 33: 10, 35: 10, 100: 10}, 3)


@check("graph_sizes", mistake="adding one size at a time, always where it gains most, does not find the best choice")
def test_greedy_is_not_enough(hw: Homework) -> None:
    chosen(hw, {1: 10, 5: 13, 9: 10, 12: 1}, 3)
    for seed in range(20):
        rng = random.Random(seed)
        chosen(hw, {n: rng.randrange(1, 40) for n in rng.sample(range(1, 40), 8)}, 3)


@check("graph_sizes", mistake="for random numbers of steps, other sizes pad less")
def test_random_steps_of_sizes(hw: Homework) -> None:
    for seed in range(60):
        rng = random.Random(seed)
        steps = {n: rng.randrange(1, 100) for n in rng.sample(range(1, 60), rng.randrange(1, 9))}
        chosen(hw, steps, rng.randrange(1, 9))


@check(
    "graph_sizes",
    mistake="512 numbers of requests take too long: try no combinations, and do not add up the same padding repeatedly",
    costs=0.3,
    seconds=8,
)
def test_many_numbers(hw: Homework) -> None:
    chosen(hw, {n: 1 for n in range(1, 513)}, 16, least=16 * sum(range(32)))


# serve_ahead --------------------------------------------------------------------------------------------------------


def tokens_of(prompt: str) -> list[str]:
    """Pseudorandom pieces of text that depend on the prompt only."""
    rng = random.Random(prompt)
    return [rng.choice(["a", "b", "ab", "ba", " ", "c", "bc"]) for _ in range(40)]


def alone(tokens: ListLike[str], max_tokens: int, stop: ListLike[str]) -> tuple[str, int, bool]:
    """The oracle: a request at depth 0. Its output, its number of tokens, and whether a stop string ended it."""
    text = ""
    for count, token in enumerate(tokens[:max_tokens], 1):
        text += token
        found = [text.index(string) for string in stop if string in text]
        if found:
            return text[: min(found)], count, True
    return text, max_tokens, False


def served_ahead(
    hw: Homework,
    prompts: ListLike[str],
    num_rows: int,
    max_tokens: int,
    stop: ListLike[str] = (),
    model: Callable[[str], ListLike[str]] = tokens_of,
) -> Any:
    device = hw.Device(num_rows, model)
    got = hw.serve_ahead(device, list(prompts), max_tokens=max_tokens, stop=list(stop))
    expected = [alone(model(prompt), max_tokens, stop) for prompt in prompts]
    for i, (mine, (right, _, _)) in enumerate(zip(got, expected, strict=True)):
        assert mine == right, f"request {i} of {len(prompts)}, in {num_rows} rows: {mine!r}, alone {right!r}"
    computed, needed = sum(map(len, device.launches)), sum(count for _, count, _ in expected)
    late = sum(stopped and count < max_tokens for _, count, stopped in expected)
    assert computed >= needed, "fewer tokens were computed than the outputs have"
    require(
        computed <= needed + late,
        f"{computed} tokens computed; {needed} are needed, and {late} may be late, one for each stop string",
    )
    return device


@check(
    "serve_ahead", mistake="without stop strings, a request gets max_tokens tokens, and no further one may be computed"
)
def test_one_request_to_its_limit(hw: Homework) -> None:
    served_ahead(hw, ["x"], 1, 1)
    served_ahead(hw, ["x"], 1, 6)


@check("serve_ahead", mistake="launch a step before you collect the previous one, or the device idles")
def test_the_device_is_busy(hw: Homework) -> None:
    device = served_ahead(hw, ["x", "y"], 2, 8)
    assert_equal(device.idle, 0, name="how often the device had nothing to do")


@check("serve_ahead", mistake="a stop string may be spread over several tokens, and must not be part of the output")
def test_a_stop_string(hw: Homework) -> None:
    def spread(prompt: str) -> list[str]:
        return ["one ", "two E", "N", "D three", " END"]

    served_ahead(hw, ["x"], 1, 5, ["END"], spread)
    served_ahead(hw, ["x"], 1, 4, ["END"], spread)
    served_ahead(hw, ["x"], 1, 5, ["one"], spread)


@check("serve_ahead", mistake="of several stop strings, the one that begins first cuts the text")
def test_several_stop_strings(hw: Homework) -> None:
    def two(prompt: str) -> list[str]:
        return ["abc", "def", "ghi"]

    served_ahead(hw, ["x"], 1, 3, ["ef", "d"], two)
    served_ahead(hw, ["x"], 1, 3, ["d", "ef", "cde"], two)
    served_ahead(hw, ["x"], 1, 3, ["z", "h"], two)


@check("serve_ahead", mistake="drop the token computed after a stop string, even if it would change the output")
def test_a_late_token(hw: Homework) -> None:
    def late(prompt: str) -> list[str]:
        return ["a", "b!", "c", "d"] if prompt == "x" else ["1", "2", "3", "4"]

    device = served_ahead(hw, ["x", "y"], 2, 4, ["!"], late)
    assert_equal(sum(map(len, device.launches)), 7, name="tokens computed, one of them after the stop string")


@check("serve_ahead", mistake="a late token of an ended request was given to the next request of its row")
def test_a_row_with_a_new_request(hw: Homework) -> None:
    def ends(prompt: str) -> list[str]:
        return {"x": ["a", "!", "LATE", "?"], "y": ["1", "2", "3", "4"], "z": ["5", "!", "LATE", "?"]}[prompt]

    served_ahead(hw, ["x", "y"], 1, 4, ["!"], ends)
    served_ahead(hw, ["x", "z", "y", "x", "z"], 2, 4, ["!"], ends)


@check(
    "serve_ahead",
    mistake="start requests in order, in the first launch after the end of the row's old request was collected",
)
def test_rows_are_used_again(hw: Homework) -> None:
    started: list[str] = []

    def recorded(prompt: str) -> list[str]:
        started.append(prompt)
        return ["a"] * int(prompt[0]) + ["!"] + ["?"] * 9

    prompts = ["3a", "1b", "1c", "2d", "1e"]
    device = hw.Device(2, recorded)
    hw.serve_ahead(device, prompts, max_tokens=8, stop=["!"])
    assert_equal(started, prompts, name="the order in which requests start")
    launch_first = "launch the next step before you collect the one in flight, also where a request has just ended"
    assert_equal(device.idle, 0, name="how often the device ran out of work", mistake=launch_first)
    # Row 0: a has 4 tokens and a late one, d 3 and 1. Row 1: b, c and e 2 and 1 each.
    assert_equal(len(device.launches), 9, name="the number of steps")


@check(
    "serve_ahead", mistake="for random requests and stop strings, an output differs from what the request gets alone"
)
def test_random_requests(hw: Homework) -> None:
    for seed in range(150):
        rng = random.Random(seed)
        prompts = [f"{seed} {i}" for i in range(rng.randrange(1, 9))]
        stop = rng.sample(["bb", "cab", "a a", "c c", "bcb", "aba"], rng.randrange(4))
        served_ahead(hw, prompts, rng.randrange(1, 5), rng.randrange(1, 16), stop)


# Graph --------------------------------------------------------------------------------------------------------------


def captured(
    hw: Homework, function: Callable[..., Any], *inputs: ListLike[Tensor], equal: bool = True, replays: int = 3
) -> None:
    """Capture over the first inputs, then replay over each of the others and compare with a plain call."""
    fixed, graph, calls = [x.clone() for x in inputs[0]], hw.Graph(), 0

    def counted(*args: Tensor) -> Any:
        nonlocal calls
        calls += 1
        return function(*args)

    outputs = graph.capture(counted, *fixed)
    assert_close(outputs, function(*[x.clone() for x in inputs[0]]), atol=1e-9, name="what capture returns")
    for own in inputs[1:]:
        for x, new in zip(fixed, own, strict=True):
            x.copy_(new)
        graph.replay()
        assert_close(outputs, function(*[x.clone() for x in own]), atol=1e-9, name="the output after a replay")
    assert_equal(calls, 1, name="how often your graph called the function")


def numbers(*shapes: tuple[int, ...], seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(*shape, generator=generator, dtype=torch.float64) for shape in shapes]


@check(
    "Graph",
    mistake="replay must call the operator on what its inputs contain now, and write the result to the same output",
)
def test_one_operator(hw: Homework) -> None:
    captured(hw, lambda x: x * 2, *(numbers((3,), seed=seed) for seed in range(3)))


@check(
    "Graph", mistake="in a replay, an operator must read the new results of earlier operators, not those of the capture"
)
def test_a_chain(hw: Homework) -> None:
    captured(hw, lambda x: (x * 2 + 1).tanh() @ x, *(numbers((4, 4), seed=seed) for seed in range(3)))


@check("Graph", mistake="a view shares the memory of its base, so its result must not be copied")
def test_views(hw: Homework) -> None:
    captured(hw, lambda x: x.t()[1:].reshape(-1)[::2] + x[0, 0], *(numbers((4, 4), seed=seed) for seed in range(3)))


@check("Graph", mistake="copy every result of an operator that has several, such as max over a dimension")
def test_several_results(hw: Homework) -> None:
    def largest(x: Tensor) -> Tensor:
        values, indices = x.max(dim=1)
        return values + indices

    captured(hw, largest, *(numbers((4, 4), seed=seed) for seed in range(3)))


@check("Graph", mistake="an operator that writes in place in the capture must do so in every replay")
def test_writes_in_place(hw: Homework) -> None:
    cache, graph = torch.zeros(5), hw.Graph()
    slot, value = torch.tensor([1]), torch.tensor([3.0])

    def append(slot: Tensor, value: Tensor) -> Tensor:
        cache.index_copy_(0, slot, value)
        return cache.sum()

    total = graph.capture(append, slot, value)
    for at in (4, 0):
        slot.fill_(at)
        value.fill_(10.0 + at)
        graph.replay()
    assert_equal(cache.tolist(), [10.0, 3.0, 0.0, 0.0, 14.0], name="the cache")
    assert_equal(float(total), 27.0, name="its sum")


@check(
    "Graph", mistake="call operators without inputs again too, such as zeros, or every replay adds to the old result"
)
def test_new_tensors(hw: Homework) -> None:
    def add_to_zeros(x: Tensor) -> Tensor:
        return torch.zeros(3, dtype=torch.float64).add_(x)

    captured(hw, add_to_zeros, *(numbers((3,), seed=seed) for seed in range(3)))


@check("Graph", mistake="the output and every intermediate must stay at the addresses that they had in the capture")
def test_addresses(hw: Homework) -> None:
    graph, x = hw.Graph(), torch.ones(1000)
    y = graph.capture(lambda x: (x + 1) * 2, x)
    address = y.data_ptr()
    garbage = [torch.full((1000,), 7.0) for _ in range(50)]  # reuses any memory that was freed
    x.fill_(2.0)
    graph.replay()
    assert y.data_ptr() == address and bool((y == 6).all()), "the output is not where it was, or not right"
    assert all(bool((other == 7).all()) for other in garbage), "a replay wrote to memory that belongs to other tensors"


@check("Graph", mistake="Python's branches and numbers must stay as in the capture: do not call the function again")
def test_branches_are_frozen(hw: Homework) -> None:
    graph, x, factor = hw.Graph(), torch.ones(2), [3.0]
    y = graph.capture(lambda x: x * factor[0] if factor[0] > 0 else x - 1, x)
    factor[0] = -1.0
    x.fill_(5.0)
    graph.replay()
    assert_equal(y.tolist(), [15.0, 15.0], name="the output")


@check("Graph", mistake="refuse to read a value on the host: a graph would silently freeze it")
def test_reads_are_refused(hw: Homework) -> None:
    x = torch.tensor([1.0, -2.0])
    for function in (lambda x: x * x[0].item(), lambda x: x if x[0] > 0 else -x, lambda x: x[: int(x[0])]):
        assert_raises(RuntimeError, hw.Graph().capture, function, x)
    equal = "torch.equal compares on the host: not all reads are `item`"
    assert_raises(RuntimeError, hw.Graph().capture, lambda x: x if torch.equal(x, x) else -x, x, mistake=equal)


@check("Graph", mistake="refuse results whose shape depends on values, but not an index by numbers")
def test_shapes_that_depend_on_values(hw: Homework) -> None:
    x = torch.tensor([1.0, -2.0, 3.0])
    for function in (lambda x: x.nonzero(), lambda x: x[x > 0], lambda x: torch.masked_select(x, x > 0)):
        assert_raises(RuntimeError, hw.Graph().capture, function, x)
    index = torch.tensor([2, 0])
    captured(hw, lambda x: x[index] + torch.where(x > 0, x, 0.0)[:2], numbers((3,)), numbers((3,), seed=1))


@check("Graph", mistake="a second capture must replace what the first one recorded")
def test_captured_again(hw: Homework) -> None:
    graph, x, count = hw.Graph(), torch.ones(2), torch.zeros(1)
    graph.capture(lambda x: count.add_(1), x)
    y = graph.capture(lambda x: x + 1, x)
    graph.replay()
    assert count.item() == 1 and y.tolist() == [2.0, 2.0], "the replay did more than the last capture recorded"


@check("Graph", mistake="replayed, a decode step of a model with its cache at fixed addresses gives wrong logits")
def test_a_decode_step(hw: Homework) -> None:
    """The model's own layers over a cache of fixed size, whose length is a tensor; the oracle is a plain call."""
    model = tiny_model()
    spec = model.attention_specs[0]

    def make_step(caches: list[list[Tensor]]) -> Callable[[Tensor, Tensor], Tensor]:
        def step(token: Tensor, position: Tensor) -> Tensor:
            def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
                keys, values = caches[layer]
                keys.index_copy_(0, position, k)
                values.index_copy_(0, position, v)
                scores = torch.einsum("nhd,mkd->hm", q, keys) * spec.scale
                weights = scores.masked_fill(torch.arange(len(keys)) > position, -torch.inf).softmax(-1)
                return torch.einsum("hm,mkd->hd", weights, values)[None]

            return model.compute_logits(model(token, position, attend))

        return step

    caches = [[[torch.zeros(12, 1, 8, dtype=torch.float64) for _ in "kv"] for _ in range(2)] for _ in range(2)]
    mine, plain = map(make_step, caches)
    token, position, graph = torch.tensor([3]), torch.tensor([0]), hw.Graph()
    with torch.no_grad():
        logits = graph.capture(mine, token, position)
        expected = plain(token, position)
        for at in range(1, 12):
            token.copy_(expected.argmax(-1))
            position.fill_(at)
            graph.replay()
            expected = plain(token, position)
            assert_close(logits, expected, atol=1e-9, name=f"the logits of position {at}")
