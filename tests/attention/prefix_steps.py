"""Steps whose requests share prefixes, for the tests of cascade attention."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch
from hypothesis import strategies as st

from mini_engine.attention.levels import LevelCosts, plan_levels
from mini_engine.batch import PrefixLevel, StepBatch, upload_levels


@dataclass
class Step:
    """The requests of a step, whose pages form a random prefix tree, scattered over the pool."""

    page_size: int
    num_pages: int
    pages: list[list[int]]
    num_computed: list[int]
    num_new: list[int]

    @property
    def limits(self) -> list[int]:
        return [computed // self.page_size for computed in self.num_computed]

    def plan(self, costs: LevelCosts) -> tuple[list[int], tuple[PrefixLevel, ...]]:
        width = max(self.limits)
        if width == 0:
            return list(range(len(self.pages))), ()
        table = np.full((len(self.pages), width), -1, dtype=np.int32)  # stale after a request's pages
        for row, pages in zip(table, self.pages, strict=True):
            row[: len(pages)] = pages[:width]
        limits, num_new = np.array(self.limits), np.array(self.num_new)
        order, levels = plan_levels(table, limits, num_new, self.page_size, costs)
        return order.tolist(), upload_levels(levels, torch.device("cpu"))

    def batch(self, order: list[int], levels: tuple[PrefixLevel, ...], device: str = "cpu") -> StepBatch:
        new, computed = [self.num_new[b] for b in order], [self.num_computed[b] for b in order]
        levels = tuple(replace(level, kv_page_indices=level.kv_page_indices.to(device)) for level in levels)
        return StepBatch.build(
            token_ids=[0] * sum(new),
            num_new=new,
            kv_lens=[n + done for n, done in zip(new, computed, strict=True)],
            pages=[page for b in order for page in self.pages[b]],
            page_size=self.page_size,
            levels=levels,
            device=device,
        )


@st.composite
def steps(draw: st.DrawFn, most: int = 8, decodes_only: bool = False) -> Step:
    """Requests that begin with some pages of an earlier request; some of these pages are written in the same step."""
    page_size = draw(st.integers(1, 4))
    tails = st.integers(0, 3 * page_size)
    made: list[tuple[list[int], int, int]] = []
    num_pages = 0
    for _ in range(draw(st.integers(1, most))):
        shared: list[int] = []
        if made and draw(st.booleans()):
            pages, computed, new = draw(st.sampled_from(made))
            shared = pages[: draw(st.integers(0, (computed + new) // page_size))]
        computed = len(shared) * page_size + draw(tails)
        new = 1 if decodes_only or draw(st.booleans()) else draw(st.integers(1, 5))
        count = -(-(computed + new) // page_size) - len(shared)
        made.append((shared + list(range(num_pages, num_pages + count)), computed, new))
        num_pages += count
    placed = draw(st.permutations(range(num_pages + 2)))
    made.sort(key=lambda request: request[2] > 1)
    return Step(
        page_size,
        num_pages + 2,
        [[placed[page] for page in pages] for pages, _, _ in made],
        [computed for _, computed, _ in made],
        [new for _, _, new in made],
    )


def prefixed(num_requests: int, shared: int, own: int) -> Step:
    """Decodes that share a prefix of this many pages."""
    pages = [[*range(shared), *range(shared + b * own, shared + (b + 1) * own)] for b in range(num_requests)]
    total = (shared + own) * 16
    return Step(16, shared + num_requests * own, pages, [total - 1] * num_requests, [1] * num_requests)


def in_pages(cost: float) -> LevelCosts:
    """Costs counted in pages read: a level costs this many, and computing and merging cost nothing."""
    return LevelCosts(reread_seconds=1.0, compute_seconds=0.0, level_seconds=cost, merge_seconds=0.0)
