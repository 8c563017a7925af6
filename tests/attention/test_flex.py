"""The flex backend: its block masks, what it keeps from step to step, and the compiled kernels."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch._dynamo.utils import counters
from torch.nn.attention.flex_attention import BlockMask

from mini_engine.attention.backend import create_backend
from mini_engine.attention.block_mask import classify_blocks
from mini_engine.attention.flex import (
    FlexBackend,
    QueryTiles,
    cut_into_tiles,
    kv_block_size,
    padded_tile_count,
    unwritten_slots,
)
from mini_engine.attention.naive import attention_mask
from mini_engine.attention.spec import AttentionSpec
from mini_engine.attention.torch import TorchBackend
from mini_engine.batch import StepBatch
from mini_engine.errors import ConfigError
from mini_engine.kv_cache.paged import PagedKVCache
from mini_engine.parts import Parts
from mini_engine.sampling_params import SamplingParams
from tests.attention.stepping import full_cache, random_qkv, random_step, run_in_steps
from tests.helpers import alone, make_engine, serve
from tests.models.families import our_model, transformers_model

SLOPES = (0.5, 0.25, 0.1, 0.05, 0.02, 0.01)
PLAIN = AttentionSpec(0, num_qo_heads=6, num_kv_heads=2, head_dim=16, scale=0.3)
WINDOW = replace(PLAIN, layer=1, window=5, softcap=4.0)
ALIBI = replace(PLAIN, layer=2, num_kv_heads=6, alibi_slopes=SLOPES)
ALL = replace(PLAIN, window=21, softcap=4.0, alibi_slopes=SLOPES)


def listed(counts: Tensor, indices: Tensor) -> Tensor:
    """[tiles, blocks], True where a tile's list names a block; a block named twice fails."""
    tiles, num_blocks = indices.shape[0], indices.shape[-1]
    named = torch.zeros(tiles, num_blocks, dtype=torch.int64)
    for tile, count in enumerate(counts.flatten().tolist()):
        for block in indices[tile, 0, 0, :count].tolist():
            named[tile, block] += 1
    assert (named <= 1).all()
    return named.bool()


def filled_tiles(tiles: QueryTiles) -> list[int]:
    """Tiles that hold a query, in order."""
    return torch.nonzero(tiles.positions[:, 0] >= 0).flatten().tolist()


@settings(deadline=None, max_examples=60)
@given(st.data())
def test_block_mask_lists_what_the_mask_shows_and_nothing_else(data: st.DataObject) -> None:
    page_size = data.draw(st.sampled_from([4, 16, 128]))
    batch, pool = random_step(data, page_size)
    window = data.draw(st.sampled_from([None, 1, 7, 40]))
    spec = replace(PLAIN, window=window)
    backend = FlexBackend([spec], PagedKVCache([spec], pool, page_size, torch.float64), Parts())
    first_prompt, end = batch.num_decodes, batch.num_sequences
    for sequences, tile_len in ((range(first_prompt), 1), (range(first_prompt, end), 32)):
        if not sequences:
            continue
        tiles = cut_into_tiles(batch, sequences, tile_len, pool)
        mask = backend.block_mask(tiles, spec.kind)
        block = mask.BLOCK_SIZE[1]
        assert block <= page_size
        assert page_size % block == 0

        # What each query sees, from the batch alone.
        visible = torch.zeros(len(tiles.positions), tile_len, pool * page_size, dtype=torch.bool)
        in_use = iter(filled_tiles(tiles))
        for b in sequences:
            entries = range(int(batch.kv_page_indptr[b]), int(batch.kv_page_indptr[b + 1]))
            slots, positions = [], []
            for index, entry in enumerate(entries):
                first = index * page_size if batch.page_positions is None else int(batch.page_positions[entry])
                slots += [int(batch.kv_page_indices[entry]) * page_size + i for i in range(page_size)]
                positions += [first + i for i in range(page_size)]
            slots, positions = slots[: batch.kv_lens[b]], positions[: batch.kv_lens[b]]
            rows = batch.positions[batch.qo_indptr[b] : batch.qo_indptr[b + 1]]
            for part in rows.split(tile_len):
                visible[next(in_use), : len(part), slots] = attention_mask(part, torch.tensor(positions), window)

        full_counts, full_indices = mask.full_kv_num_blocks, mask.full_kv_indices
        assert full_counts is not None and full_indices is not None
        partial = listed(mask.kv_num_blocks, mask.kv_indices)
        full = listed(full_counts, full_indices)
        assert not (partial & full).any()
        by_block = visible.unflatten(2, (-1, block))
        assert torch.equal(partial | full, by_block.any(dim=(1, 3)))
        filled = (tiles.positions >= 0)[:, :, None]
        assert torch.equal(full, (by_block.all(dim=3) | ~filled).all(dim=1) & filled.any(dim=1))

        # The mask_mod agrees for every query and slot, so a partial block shows no more than it should.
        grid = torch.meshgrid(*(torch.arange(n) for n in visible.shape), indexing="ij")
        assert torch.equal(mask.mask_mod(grid[0], torch.tensor(0), grid[1], grid[2]), visible)


def test_tiles_hold_every_token_once() -> None:
    batch = StepBatch.build(
        token_ids=[0] * 75, num_new=[1, 70, 4], kv_lens=[9, 70, 30], pages=range(8), page_size=16, device="cpu"
    )
    tiles = cut_into_tiles(batch, range(1, 3), 32, 8)
    assert tiles.tokens == slice(1, 75)
    assert tiles.token_of_slot[tiles.slot_of_token].tolist() == list(range(1, 75))
    in_use = filled_tiles(tiles)
    assert tiles.positions[in_use, 0].tolist() == [0, 32, 64, 26]
    assert (tiles.positions >= 0).sum(dim=1)[in_use].tolist() == [32, 32, 6, 4]
    assert (tiles.positions >= 0).sum() == 74


@given(st.integers(1, 70), st.integers(2, 4))
def test_threads_get_equal_numbers_of_filled_tiles(num_decodes: int, threads: int) -> None:
    batch = StepBatch.build(
        token_ids=[0] * num_decodes,
        num_new=[1] * num_decodes,
        kv_lens=[1] * num_decodes,
        pages=range(num_decodes),
        page_size=16,
    )
    tiles = cut_into_tiles(batch, range(num_decodes), 1, num_decodes)
    assert len(filled_tiles(tiles)) == num_decodes
    shares = [int((run >= 0).sum()) for run in tiles.positions.chunk(threads)]
    assert max(shares[:-1]) - min(shares[:-1]) <= 1
    assert shares[-1] <= max(shares[:-1])


@given(st.integers(1, 5000), st.booleans())
def test_numbers_of_tiles_are_few(count: int, on_gpu: bool) -> None:
    rounded = padded_tile_count(count, on_gpu)
    assert rounded >= count
    assert rounded < count * (2 if on_gpu else 4) or rounded == 32
    assert padded_tile_count(rounded, on_gpu) == rounded


def test_numbers_of_tiles_up_to_a_thousand_make_few_kernels() -> None:
    assert len({padded_tile_count(count, on_gpu=False) for count in range(1, 1025)}) == 4
    assert len({padded_tile_count(count, on_gpu=True) for count in range(1, 1025)}) == 11


def test_only_blocks_that_a_step_opens_are_cleared_behind_their_keys() -> None:
    batch = StepBatch.build(
        token_ids=[0] * 9, num_new=[1, 1, 7], kv_lens=[17, 6, 20], pages=[5, 2, 0, 3, 1], page_size=16, device="cpu"
    )
    slots = unwritten_slots(batch, 16)
    assert slots is not None
    assert slots.tolist() == [*range(2 * 16 + 1, 2 * 16 + 16), *range(1 * 16 + 4, 1 * 16 + 16)]
    assert unwritten_slots(replace_lens(batch, [18, 7, 16]), 16) is None


def replace_lens(batch: StepBatch, kv_lens: list[int]) -> StepBatch:
    lens = torch.tensor(kv_lens, dtype=torch.int32)
    return replace(batch, kv_lens=lens, kv_last_page_len=(lens - 1) % 16 + 1)


@given(st.integers(1, 64) | st.integers(1, 40).map(lambda n: 16 * n))
def test_a_block_divides_its_page(page_size: int) -> None:
    block = kv_block_size(page_size, on_gpu=False)
    assert page_size % block == 0
    assert block == page_size or block in (16, 32, 64)


def test_a_machine_without_a_compiler_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(ConfigError, match="found no no-such-compiler"):
        create_backend("flex", [PLAIN], PagedKVCache([PLAIN], 1, 16, torch.float32), Parts())


def test_a_mask_is_built_once_a_step_for_each_kind_of_layer() -> None:
    """Not for every layer, and only for the prompts or decodes that the step has."""
    built: list[int | None] = []

    def counted(*positions: Tensor, window: int | None) -> tuple[Tensor, Tensor]:
        built.append(window)
        return classify_blocks(*positions, window)

    parts = replace(Parts(), classify_blocks=lambda *args: counted(*args[:4], window=args[4]))
    specs = [replace(PLAIN, layer=i, window=(None, 5)[i % 2]) for i in range(3)]
    backend = FlexBackend(specs, PagedKVCache(specs, 6, 16, torch.float64), parts)

    def step(new: list[int], kv_lens: list[int]) -> list[int | None]:
        pages = range(sum(-(-n // 16) for n in kv_lens))
        backend.plan(StepBatch.build(token_ids=[0] * sum(new), num_new=new, kv_lens=kv_lens, pages=pages, page_size=16))
        for spec in specs:
            backend(spec.layer, *random_qkv(spec, sum(new), torch.float64, 0))
        in_this_step = sorted(built, key=str)
        built.clear()
        return in_this_step

    assert step([1, 9], [4, 9]) == [5, 5, None, None]
    assert step([1, 1, 1], [17, 10, 3]) == [5, None]
    assert step([20, 3], [20, 3]) == [5, None]


def block_lists(mask: BlockMask) -> Tensor:
    """[2, tiles, blocks]: whether each block is listed as partial, and as full."""
    assert mask.full_kv_num_blocks is not None and mask.full_kv_indices is not None
    partial = listed(mask.kv_num_blocks, mask.kv_indices)
    return torch.stack([partial, listed(mask.full_kv_num_blocks, mask.full_kv_indices)])


@settings(deadline=None, max_examples=60)
@given(st.data())
def test_decodes_keep_their_mask_until_a_list_changes(data: st.DataObject) -> None:
    """A kept mask equals the mask that would be built, and no mask is built that would equal the kept one."""
    page_size = data.draw(st.sampled_from([1, 3, 8, 32, 128]))
    window = data.draw(st.none() | st.integers(1, 3 * page_size))
    spec = replace(PLAIN, window=window)
    ends = st.sampled_from([page_size, 2 * page_size, 3 * page_size])  # near which a list changes
    before_end = st.integers(0, min(page_size - 1, 12))
    lengths = st.builds(int.__sub__, ends, before_end) | st.integers(1, 3 * page_size)
    lens = np.array(data.draw(st.lists(lengths, min_size=1, max_size=3)))
    pages = np.random.default_rng(data.draw(st.integers(0, 9))).permutation(24).reshape(3, 8)

    def masks(kept: FlexBackend, batch: StepBatch) -> tuple[Tensor, Tensor]:
        """The block indices, and the value of the mask at every slot."""
        kept.plan(batch)
        [(tiles, planned)] = kept._tile_plans
        [(block_mask, _)] = planned.values()
        rows, slots = torch.arange(len(tiles.positions))[:, None], torch.arange(24 * page_size)
        zero = torch.zeros((), dtype=torch.long)
        return block_lists(block_mask), block_mask.mask_mod(rows, zero, zero, slots)

    built = []
    counted = replace(Parts(), classify_blocks=lambda *args: built.append(1) or classify_blocks(*args))
    cache = PagedKVCache([spec], 24, page_size, torch.float64)
    kept = FlexBackend([spec], cache, counted)
    before = torch.zeros(0)
    for _ in range(data.draw(st.integers(1, min(3 * page_size, 16)))):
        counts = -(-lens // page_size)
        batch = StepBatch.build(
            token_ids=lens * 0, num_new=lens * 0 + 1, kv_lens=lens, page_size=page_size,
            pages=np.concatenate([row[:n] for row, n in zip(pages, counts, strict=False)]),
        )  # fmt: skip
        built.clear()
        lists, visible = masks(kept, batch)
        new_lists, new_visible = masks(FlexBackend([spec], cache, Parts()), batch)
        assert torch.equal(lists, new_lists) and torch.equal(visible, new_visible)
        # A window smaller than a block makes no block full, but the query still passes the end of a block.
        assert bool(built) != torch.equal(lists, before) or (window is not None and window < kept._kv_block)
        before, lens = lists, lens + 1


def test_each_kind_of_layer_keeps_lists_of_its_own() -> None:
    specs = [PLAIN, replace(PLAIN, layer=1, window=20)]
    cache = PagedKVCache(specs, 8, 8, torch.float64)
    kept = FlexBackend(specs, cache, Parts())

    def lists(backend: FlexBackend, batch: StepBatch) -> dict[AttentionSpec, Tensor]:
        backend.plan(batch)
        [(_, planned)] = backend._tile_plans
        return {kind: block_lists(mask) for kind, (mask, _) in planned.items()}

    for kv_len in range(1, 60):
        pages = range(-(-kv_len // 8))
        batch = StepBatch.build(token_ids=[0], num_new=[1], kv_lens=[kv_len], pages=pages, page_size=8)
        found, wanted = lists(kept, batch), lists(FlexBackend(specs, cache, Parts()), batch)
        assert all(torch.equal(found[kind], wanted[kind]) for kind in wanted), kv_len


def test_every_head_of_a_decode_has_its_own_slope() -> None:
    cache = full_cache([ALL], 4, 16, torch.float64)
    flex = FlexBackend([ALL], cache, Parts())
    for _, got, want in run_in_steps(flex, [ALL], [12], [1], [2, 0, 1], 16, torch.float64):
        torch.testing.assert_close(got, want, atol=1e-12, rtol=0)


def test_decodes_whose_pages_move_or_are_given_up_get_a_new_mask() -> None:
    built = []
    parts = replace(Parts(), classify_blocks=lambda *args: built.append(1) or classify_blocks(*args))
    flex = FlexBackend([PLAIN], PagedKVCache([PLAIN], 6, 16, torch.float64), parts)

    def masks_built(pages: list[int], kv_lens: list[int], **others: object) -> int:
        built.clear()
        one = [1] * len(kv_lens)
        flex.plan(StepBatch.build(token_ids=one, num_new=one, kv_lens=kv_lens, pages=pages, page_size=16, **others))
        return len(built)

    assert masks_built([0, 1, 2], [20, 3]) == 1
    assert masks_built([0, 1, 2], [21, 4]) == 0
    assert masks_built([0, 1, 2], [4, 21]) == 1  # the page in the middle has another owner
    assert masks_built([0, 3, 2], [5, 22]) == 1
    assert masks_built([0], [6]) == 1
    assert masks_built([0], [7], page_positions=[16]) == 1
    assert masks_built([0], [8], page_positions=[32]) == 1
    assert masks_built([0], [9]) == 1  # the same page, at the beginning of another sequence
    assert masks_built([0], [10]) == 0


# Compiled. Each new kernel takes seconds, so these tests share theirs: one size of cache, on a CPU one kind of layer.
NUM_PAGES = 24


def check_compiled(
    specs: Sequence[AttentionSpec],
    page_size: int,
    lens: list[int],
    cuts: list[int],
    dtype: torch.dtype,
    atol: float,
    device: str,
) -> None:
    """Compare with naive attention and the torch backend, on a cache full of NaN."""
    page_order = torch.randperm(NUM_PAGES, generator=torch.Generator().manual_seed(3)).tolist()
    runs = []
    for backend in (FlexBackend, TorchBackend):
        cache = full_cache(specs, NUM_PAGES, page_size, dtype, torch.nan, device)
        attention = backend(specs, cache, Parts())
        runs.append(run_in_steps(attention, specs, lens, cuts, page_order, page_size, dtype, device))
    for (_, got, want), (_, torch_got, _) in zip(*runs, strict=True):
        torch.testing.assert_close(got, want, atol=atol, rtol=0)
        torch.testing.assert_close(got, torch_got, atol=atol, rtol=0)


def count_recompilations(specs: Sequence[AttentionSpec], page_size: int, dtype: torch.dtype, device: str) -> int:
    """Kernels compiled after the first step, while sequences grow, come and go, and pages move."""
    flex = FlexBackend(specs, full_cache(specs, NUM_PAGES, page_size, dtype, 0.0, device), Parts())

    def step(new: list[int], kv_lens: list[int], seed: int) -> None:
        count = sum(-(-n // page_size) for n in kv_lens)
        pages = torch.randperm(NUM_PAGES, generator=torch.Generator().manual_seed(seed)).tolist()[:count]
        flex.plan(
            StepBatch.build(
                token_ids=[0] * sum(new), num_new=new, kv_lens=kv_lens, pages=pages, page_size=page_size, device=device
            )
        )
        for spec in specs:
            q, k, v = random_qkv(spec, sum(new), dtype, seed, device)
            flex(spec.layer, q, k, v)

    step([1, 1, 40], [9, 30, 40], seed=0)
    compiled = counters["stats"]["unique_graphs"]
    assert compiled > 0
    for seed in range(page_size + 2):
        step([1, 1], [9 + seed, 30 + seed], seed)  # past the end of a page
    step([1, 1, 2], [3, 100, 17], seed=1)  # other sequences in their place, a short chunk
    step([1, 1, 30], [60, 60, 90], seed=2)  # a chunk in the middle of a prompt
    return counters["stats"]["unique_graphs"] - compiled


def test_compiled_equals_naive_attention_and_reads_no_slot_that_was_not_written() -> None:
    check_compiled([ALL], 16, [70, 1, 45, 33], [40, 1, 20, 33], torch.float32, 1e-5, "cpu")


def test_nothing_is_compiled_again_as_sequences_grow() -> None:
    assert count_recompilations([ALL], 16, torch.float32, "cpu") == 0


def test_nothing_is_compiled_again_while_requests_come_and_go() -> None:
    """Through the whole engine: chunks, preemptions, shared prefixes, sequences that grow past the ends of pages."""
    model = our_model(transformers_model("llama", seed=2, num_hidden_layers=2))
    engine = make_engine(
        model, attn_backend="flex", num_pages=8, page_size=16, max_batch_size=4, max_num_batched_tokens=32,
        enable_prefix_caching=True,
    )  # fmt: skip
    greedy = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
    prompts = [[5, 9, 33], [7], list(range(3, 60)), [*range(3, 40), 8], [5, 9, 33, 1], [50] * 20]
    serve(engine, {0: [("warm up", [1, 2, 3], replace(greedy, max_tokens=2))]})  # a prompt and a decode
    compiled = counters["stats"]["unique_graphs"]
    assert compiled > 0
    got = serve(engine, {3 * i: [(str(i), prompt, greedy)] for i, prompt in enumerate(prompts)})
    assert engine.metrics.preemptions > 0 and engine.metrics.shared_tokens > 0
    assert counters["stats"]["unique_graphs"] == compiled
    for i, prompt in enumerate(prompts):
        assert got[str(i)] == alone(model, prompt, greedy)


@pytest.mark.gpu
@pytest.mark.parametrize(("dtype", "atol"), [(torch.float32, 1e-5), (torch.bfloat16, 3e-2)])
def test_compiled_equals_naive_attention_on_the_gpu(dtype: torch.dtype, atol: float) -> None:
    lens, cuts = [700, 1, 300, 129], [300, 1, 100, 129]
    check_compiled([PLAIN, WINDOW, ALIBI], 128, lens, cuts, dtype, atol, "cuda")


@pytest.mark.gpu
def test_nothing_is_compiled_again_on_the_gpu() -> None:
    assert count_recompilations([PLAIN, WINDOW, ALIBI], 128, torch.bfloat16, "cuda") == 0


@pytest.mark.gpu
def test_planning_and_running_never_wait_for_the_gpu() -> None:
    flex = FlexBackend([ALL], full_cache([ALL], NUM_PAGES, 128, torch.bfloat16, 0.0, "cuda"), Parts())
    batch = StepBatch.build(
        token_ids=[0] * 42, num_new=[1, 1, 40], kv_lens=[9, 130, 40], pages=[3, 5, 0, 2], page_size=128, device="cuda"
    )
    q, k, v = random_qkv(ALL, 42, torch.bfloat16, 0, "cuda")
    flex.plan(batch)
    flex(0, q, k, v)  # compiles
    torch.cuda.set_sync_debug_mode("error")
    try:
        flex.plan(batch)
        flex(0, q, k, v)
    finally:
        torch.cuda.set_sync_debug_mode("default")
