"""StepBatch equals loops over requests and tokens, whatever the buffers held before."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from mini_engine.batch import StepBatch, StepBuffers, step_memory
from mini_engine.transfer import pack, unpack

NUM_ROWS = 9  # of the page table, for token_source
Step = dict[str, Any]  # arguments of StepBatch.build
ON_DEVICE = ("token_ids", "positions", "slot_mapping", "token_source", "logit_rows", "sampled_positions")


@st.composite
def steps(draw: st.DrawFn) -> Step:
    """The arguments of a step: decodes first, pages in any order, and each optional array present or absent."""
    page_size = draw(st.integers(1, 5))
    new = draw(st.lists(st.integers(1, draw(st.sampled_from([1, 7]))), min_size=1, max_size=6))
    new.sort(key=lambda count: count > 1)
    kv_lens = [count + draw(st.integers(0, 12)) for count in new]
    num_pages = sum(-(-length // page_size) for length in kv_lens)
    step = {
        "token_ids": draw(st.lists(st.integers(0, 99), min_size=sum(new), max_size=sum(new))),
        "num_new": new,
        "kv_lens": kv_lens,
        "pages": draw(st.permutations(range(num_pages + 3)))[:num_pages],
        "page_size": page_size,
        "num_decodes": draw(st.none() | st.integers(0, len(new))),
    }
    if draw(st.booleans()):
        step["num_logits"] = [draw(st.integers(0, count)) for count in new]
    if draw(st.booleans()):
        step["token_source"] = draw(st.lists(st.integers(-1, NUM_ROWS - 1), min_size=sum(new), max_size=sum(new)))
    if draw(st.booleans()):
        step["page_positions"] = draw(st.lists(st.integers(0, 99), min_size=num_pages, max_size=num_pages))
    if max(new) == 1 and draw(st.booleans()):
        step["num_new"] = None
    return step


def new_of(step: Step) -> list[int]:
    return step["num_new"] or [1] * len(step["kv_lens"])


def arrays_of(step: Step) -> dict[str, list[int] | None]:
    """Every array of a step, one request, one page and one token at a time."""
    page_size, first_positions = step["page_size"], step.get("page_positions")
    new = new_of(step)
    num_requests = len(new)
    num_logits = step.get("num_logits", [1] * num_requests)
    arrays: dict[str, list[int]] = {
        "positions": [], "slot_mapping": [], "logit_rows": [], "sampled_positions": [], "qo_indptr": [0],
        "kv_page_indptr": [0], "kv_last_page_len": [],
    }  # fmt: skip
    for b in range(num_requests):
        own_slots, own_positions = [], []
        while len(own_slots) < step["kv_lens"][b]:
            entry = arrays["kv_page_indptr"][-1] + len(own_slots) // page_size
            first = len(own_slots) if first_positions is None else first_positions[entry]
            keys_in_page = min(page_size, step["kv_lens"][b] - len(own_slots))
            own_slots += [step["pages"][entry] * page_size + offset for offset in range(keys_in_page)]
            own_positions += range(first, first + keys_in_page)
        first_new = step["kv_lens"][b] - new[b]
        arrays["positions"] += own_positions[first_new:]
        arrays["slot_mapping"] += own_slots[first_new:]
        arrays["kv_page_indptr"].append(entry + 1)
        arrays["kv_last_page_len"].append(keys_in_page)
        arrays["qo_indptr"].append(len(arrays["positions"]))
        for row in range(len(arrays["positions"]) - num_logits[b], len(arrays["positions"])):
            arrays["logit_rows"].append(row)
            arrays["sampled_positions"].append(arrays["positions"][row] + 1)
    return arrays | {
        "token_ids": step["token_ids"],
        "token_source": step.get("token_source", [-1] * len(step["token_ids"])),
        "kv_page_indices": list(step["pages"]),
        "host_page_indices": list(step["pages"]),
        "page_positions": first_positions,
        "kv_lens": step["kv_lens"],
        "num_logits": num_logits,
    }


def check(batch: StepBatch, step: Step) -> None:
    for name, expected in arrays_of(step).items():
        got = getattr(batch, name)
        assert (None if got is None else got.tolist()) == expected, name
    one_token = sum(count == 1 for count in new_of(step))
    assert batch.num_decodes == (one_token if step["num_decodes"] is None else step["num_decodes"])
    assert batch.num_sequences == len(step["kv_lens"])
    assert batch.num_tokens == len(step["token_ids"])
    assert batch.page_size == step["page_size"]


@given(steps())
def test_arrays_equal_loops_over_requests_and_tokens(step):
    check(StepBatch.build(**step), step)


@given(st.lists(steps(), min_size=2, max_size=6), st.integers(1, 3))
def test_a_step_is_right_whatever_its_buffers_held_before(made, num_buffers):
    """Larger and smaller steps through the same buffers, in turn: the latest step of each is intact."""
    buffers = [StepBuffers("cpu") for _ in range(num_buffers)]
    batches = []
    for i, step in enumerate(made):
        batches.append(StepBatch.build(**step, into=buffers[i % num_buffers]))
        for earlier in range(max(0, i + 1 - num_buffers), i + 1):
            check(batches[earlier], made[earlier])


@given(st.lists(steps(), min_size=2, max_size=6), st.data())
def test_steps_in_given_memory_keep_their_addresses(made, data):
    """Kernels of a CUDA graph read the arrays of every step of the same size at the same addresses."""
    most_tokens, most_pages = (max(len(step[name]) for step in made) for name in ("token_ids", "pages"))
    buffers = StepBuffers("cpu", step_memory(most_tokens, most_pages, "cpu"))
    addresses: dict[tuple[int, str], int] = {}
    for step in [*made, *data.draw(st.permutations(made))]:
        batch = StepBatch.build(**step, into=buffers)
        check(batch, step)
        for name in (*ON_DEVICE, "kv_page_indices"):
            address = getattr(batch, name).data_ptr()
            if getattr(batch, name).numel():
                assert addresses.setdefault((batch.num_tokens, name), address) == address, name
    too_large = {"token_ids": range(2 * most_tokens + most_pages + 9), "num_new": None}
    sizes = {"kv_lens": [1] * len(too_large["token_ids"]), "pages": too_large["token_ids"], "page_size": 1}
    with pytest.raises(ValueError, match="but its memory on the device has"):
        StepBatch.build(**too_large, **sizes, into=buffers)
    check(StepBatch.build(**made[0], into=buffers), made[0])


@given(steps(), steps())
def test_a_step_after_an_interrupted_one_is_right(interrupted, step):
    """The step that failed halfway had the same sizes, but its arrays were not completed."""
    buffers = StepBuffers("cpu")
    StepBatch.build(**interrupted, into=buffers)
    for array in (*buffers.tokens, *buffers.requests):
        array[:] = -7
    buffers.forget()
    for made in (step, interrupted):
        check(StepBatch.build(**made, into=buffers), made)


@given(st.lists(steps(), min_size=1, max_size=4))
def test_arrays_begin_at_multiples_of_16_bytes(made):
    buffers = StepBuffers("cpu")
    for step in made:
        batch = StepBatch.build(**step, into=buffers)
        for name in (*ON_DEVICE, "kv_page_indices", "page_positions"):
            array = getattr(batch, name)
            assert array is None or array.data_ptr() % 16 == 0, name


def chunks(draw: st.DrawFn, length: int) -> list[int]:
    """The ends of the pieces of a random partition of `length` tokens."""
    cuts = draw(st.sets(st.integers(1, length - 1))) if length > 1 else set()
    return [*sorted(cuts), length]


@given(st.data())
def test_any_partition_writes_the_same_tokens_to_the_same_slots(data):
    page_size = data.draw(st.integers(1, 5))
    lengths = data.draw(st.lists(st.integers(1, 12), min_size=1, max_size=4))
    counts = [-(-length // page_size) for length in lengths]
    pool = iter(data.draw(st.permutations(range(sum(counts) + 2))))
    pages = [[next(pool) for _ in range(count)] for count in counts]
    ends = [chunks(data.draw, length) for length in lengths]
    written: list[list[tuple[int, int, int]]] = [[] for _ in lengths]
    predicted: list[list[int]] = [[] for _ in lengths]
    while any(ends):
        running = [b for b in range(len(lengths)) if ends[b]]
        new = {b: ends[b][0] - len(written[b]) for b in running}
        running.sort(key=lambda b: new[b] > 1)
        batch = StepBatch.build(
            token_ids=[100 * b + t for b in running for t in range(len(written[b]), ends[b][0])],
            num_new=[new[b] for b in running],
            kv_lens=[ends[b][0] for b in running],
            pages=[page for b in running for page in pages[b][: -(-ends[b][0] // page_size)]],
            page_size=page_size,
            num_logits=[int(len(ends[b]) == 1) for b in running],
        )
        columns = (batch.token_ids.tolist(), batch.positions.tolist(), batch.slot_mapping.tolist())
        for i, b in enumerate(running):
            own = slice(*batch.qo_indptr[i : i + 2].tolist())
            written[b] += zip(*(column[own] for column in columns), strict=True)
            predicted[b] += batch.sampled_positions[batch.num_logits[:i].sum() :][: batch.num_logits[i]].tolist()
            ends[b].pop(0)
    for b, length in enumerate(lengths):
        slots = [page * page_size + offset for page in pages[b] for offset in range(page_size)]
        assert written[b] == [(100 * b + t, t, slots[t]) for t in range(length)]
        assert predicted[b] == [length]  # one row of logits, for the token after the prompt


def test_positions_follow_the_pages_that_are_left_after_eviction():
    # Two of three pages are left: the first holds positions 0 to 3 as a sink, and the second one is gone.
    batch = StepBatch.build(token_ids=[7], num_new=[1], kv_lens=[6], pages=[9, 4], page_size=4, page_positions=[0, 8])
    assert batch.positions.tolist() == [9]
    assert batch.sampled_positions.tolist() == [10]
    assert batch.slot_mapping.tolist() == [4 * 4 + 1]
    assert batch.page_positions is not None and batch.page_positions.tolist() == [0, 8]


@pytest.mark.parametrize(
    ("page_positions", "has_gaps"),
    [
        (None, False),
        ([0, 4, 0, 4, 8], False),
        ([8, 12, 0, 4, 8], False),
        ([0, 8, 0, 4, 8], True),
        ([0, 4, 0, 4, 12], True),
    ],
)
def test_a_gap_is_between_pages_of_one_request(page_positions, has_gaps):
    step = {"token_ids": [7, 7], "num_new": [1, 1], "kv_lens": [6, 9], "pages": range(5), "page_size": 4}
    assert StepBatch.build(**step, page_positions=page_positions).has_gaps == has_gaps


def test_drafted_tokens_need_logits_of_their_own():
    # Three drafted tokens after the last one: four distributions. The prompt is not complete and needs none.
    batch = StepBatch.build(
        token_ids=[5, 6, 7, 8, 1, 2, 3, 4, 9], num_new=[4, 5], kv_lens=[14, 5], pages=[1, 0, 2, 3], page_size=5,
        num_logits=[4, 0], num_decodes=1,
    )  # fmt: skip
    assert batch.num_decodes == 1
    assert batch.logit_rows.tolist() == [0, 1, 2, 3]
    assert batch.sampled_positions.tolist() == [11, 12, 13, 14]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_new": [], "kv_lens": []}, "at least one request"),
        ({"num_new": [1]}, "num_new has 1 entries, but kv_lens has 2"),
        ({"num_new": [0, 3]}, "at least one new token"),
        ({"kv_lens": [4, 1]}, "more new tokens than keys"),
        ({"token_ids": [1, 2]}, "2 tokens given, num_new adds up to 3"),
        ({"num_new": [1, 1]}, "3 tokens given, num_new adds up to 2"),
        ({"pages": [0]}, "1 pages given"),
        ({"num_new": [2, 1], "kv_lens": [2, 4]}, "decodes \\(requests with one new token\\) must come first"),
        ({"num_logits": [2, 1]}, "logits of more tokens"),
    ],
)
def test_contradictions_are_named(change, message):
    good = {"token_ids": [1, 2, 3], "num_new": [1, 2], "kv_lens": [4, 2], "pages": [0, 1], "page_size": 4}
    StepBatch.build(**good)
    with pytest.raises(ValueError, match=message):
        StepBatch.build(**{**good, **change})


@given(steps(), st.lists(st.integers(100, 999), min_size=NUM_ROWS, max_size=NUM_ROWS))
def test_feed_reads_the_last_tokens_of_the_rows_named(step, last_token):
    batch = StepBatch.build(**step)
    fed = batch.feed(torch.tensor(last_token)).tolist()
    sources: Sequence[int] = step.get("token_source", [-1] * len(step["token_ids"]))
    assert fed == [token if row < 0 else last_token[row] for token, row in zip(step["token_ids"], sources, strict=True)]
    check(batch, step)  # the batch itself is unchanged


@given(
    st.lists(
        st.tuples(
            st.sampled_from([np.int64, np.int32, np.float32, np.bool_]),
            st.lists(st.integers(0, 4), min_size=1, max_size=3),
        ),
        min_size=1,
        max_size=6,
    )
)
def test_one_copy_keeps_shapes_dtypes_and_values(kinds):
    """The arrays that go to a GPU in one copy, here packed and unpacked on the host."""
    rng = np.random.default_rng(0)
    arrays = {str(i): rng.integers(0, 99, shape).astype(dtype) for i, (dtype, shape) in enumerate(kinds)}
    arrays["transposed"] = np.arange(6).reshape(2, 3).T
    for name, tensor in unpack(pack(arrays, pin_memory=False), arrays).items():
        np.testing.assert_array_equal(tensor.numpy(), arrays[name])
        assert tensor.numpy().dtype == arrays[name].dtype


def test_arrays_are_packed_without_the_threads_of_torch():
    """torch copies a large array with one thread per core, and then all wait for a core that another process has."""
    called = []

    class Record(TorchDispatchMode):
        def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            called.append(op.overloadpacket)
            return op(*args, **(kwargs or {}))

    with Record():
        pack({"pages": np.arange(100_000), "ranges": np.zeros((33, 8))}, pin_memory=False)
    assert set(called) <= {torch.ops.aten.empty, torch.ops.aten.detach}  # memory, and a view of it


def test_an_interrupt_while_memory_is_allocated_leaves_buffers_that_work(monkeypatch: pytest.MonkeyPatch) -> None:
    buffers, numpy = StepBuffers("cpu"), torch.Tensor.numpy

    def interrupted(tensor: torch.Tensor) -> np.ndarray:
        monkeypatch.setattr(torch.Tensor, "numpy", numpy)
        raise KeyboardInterrupt

    monkeypatch.setattr(torch.Tensor, "numpy", interrupted)
    with pytest.raises(KeyboardInterrupt):
        buffers.resize(3, 1, 1, 2)
    assert buffers.resize(3, 1, 1, 2)
    assert len(buffers.pages) == 2 and [len(array) for array in buffers.tokens] == [3, 3, 3, 3, 1, 1]


@pytest.mark.gpu
def test_arrays_are_the_same_on_the_device():
    buffers = StepBuffers("cuda")
    small: Step = {"token_ids": [1, 2, 3], "num_new": [1, 2], "kv_lens": [4, 7], "pages": [3, 0, 2], "page_size": 4}
    large: Step = {
        "token_ids": range(100), "num_new": [1, 99], "kv_lens": [9, 99], "pages": range(28), "page_size": 4,
        "page_positions": range(0, 112, 4),
    }  # fmt: skip
    for step in (small, large, small):
        host, device = StepBatch.build(**step), StepBatch.build(**step, into=buffers)
        torch.cuda.synchronize()  # the copy runs while the host goes on
        for name in (*ON_DEVICE, "kv_page_indices", "page_positions"):
            on_host, on_device = getattr(host, name), getattr(device, name)
            if on_host is None:
                assert on_device is None
                continue
            assert on_device.is_cuda
            assert torch.equal(on_host, on_device.cpu())
            assert on_host.dtype == on_device.dtype


@pytest.mark.gpu
def test_buffers_take_turns_with_the_same_memory_on_the_device():
    """The host writes the next step while the copy of this one waits; kernels read each at the same addresses."""
    memory = step_memory(3, 6, "cuda")
    buffers = [StepBuffers("cuda", memory) for _ in range(2)]
    made: list[Step] = [
        {"token_ids": [i, 2, 3], "num_new": None, "kv_lens": [4 + i, 7, 1], "pages": range(i, i + 4 + (i > 0)),
         "page_size": 4}
        for i in range(4)
    ]  # fmt: skip
    read = []
    torch.cuda._sleep(10**8)  # the host is far ahead
    for i, step in enumerate(made):
        batch = StepBatch.build(**step, into=buffers[i % 2])
        assert batch.token_ids.data_ptr() == memory.data_ptr()
        read.append([getattr(batch, name).clone() for name in (*ON_DEVICE, "kv_page_indices")])
        if i:
            torch.cuda.synchronize()  # an engine of depth 1 collects the previous step
    for step, arrays in zip(made, read, strict=True):
        want = StepBatch.build(**step)
        for name, array in zip((*ON_DEVICE, "kv_page_indices"), arrays, strict=True):
            assert torch.equal(array.cpu(), getattr(want, name)), name
