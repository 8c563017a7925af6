"""Grader of chapter 15. Its oracles are one softmax over everything, expanded keys, and searches by definition."""

import functools
import itertools
import math

import numpy as np
import torch
from torch import Tensor

from book import prose
from book.flops import count_flops
from book.grading import Exercise, Homework, assert_close, assert_equal, check, require
from mini_engine import LLM

EXERCISES = [
    Exercise(
        "add_sinks",
        points=3,
        minutes=20,
        difficulty=2,
        hints=(
            "Write the softmax with one more term in its denominator. By which factor does it change the output?",
            "The sum of the exponentials was exp(lse). With the sink it is exp(lse) + exp(sink).",
            "exp(lse) / (exp(lse) + exp(sink)) is the sigmoid of lse - sink, which does not overflow.",
        ),
    ),
    Exercise(
        "latent_attention",
        points=6,
        minutes=40,
        difficulty=3,
        hints=(
            "Write the score as q_nope · (w_uk c) + q_rope · r. Which of the two factors around w_uk is there only "
            "once, and which once for each key?",
            "q · (W c) = (Wᵀ q) · c. And a weighted sum of W_v c_j is W_v times the weighted sum of c_j.",
            "einsum('hn,hnl->hl') moves the queries to the latents. Scores are these @ latents.T + q_rope @ rotated.T, "
            "over sqrt(N + R). Mix the latents with the weights, then apply w_uv once.",
        ),
    ),
    Exercise(
        "TwoTables",
        points=6,
        minutes=45,
        difficulty=3,
        hints=(
            "Which is the first position that the query at num_computed sees? In which page is it? Do all of this "
            "before you take any page.",
            "The first page of the windowed list is max(0, num_computed - window + 1) // page_size. Keep the index of "
            "the first page of each request, and return those between the old index and the new one.",
            "Both groups need pages up to the index ceil((num_computed + num_new) / page_size). Count what is missing "
            "in both lists, compare the sum with the free pages, and take all or none.",
        ),
    ),
    Exercise(
        "longest_hit",
        points=4,
        minutes=25,
        difficulty=2,
        hints=(
            "For a hit of n tokens, write down the keys that the query at position n sees in the windowed group. "
            "Which pages are they in?",
            "The pages from max(0, n - window + 1) // page_size on, up to n / page_size. Those before may be missing.",
            "Try the numbers of pages from the largest: all(full[:p]) and all(windowed[first:p]).",
        ),
    ),
    Exercise(
        "select_pages",
        points=5,
        minutes=35,
        difficulty=2,
        hints=(
            "In one dimension, with keys between a and b: which key has the largest product with q, if q is positive? "
            "And if it is negative?",
            "The bound is the sum over dimensions of max(q_d a_d, q_d b_d). Take the maximum per dimension, before "
            "the sum.",
            "Unflatten q into [Hk, g, D], broadcast with [P, Hk, 1, D], sum over D and over g. Set the last page's "
            "score to infinity, then topk and sort.",
        ),
    ),
    Exercise(
        "PageScorer",
        points=5,
        minutes=60,
        difficulty=3,
        challenge=True,
        hints=(
            "The sum of the bounds of select_pages scores 0.8. Which pages does it overrate? Which pages are "
            "always worth reading?",
            "A page with many different keys has a large bound that no key of it reaches. Score something between "
            "the bound and the dot product with the middle of the page.",
            "q · middle + |q| · reach / 2, where reach is half of largest - smallest. Softmax it over the pages for "
            "each head before you add heads, and prefer the first and the last page.",
        ),
    ),
]


def numbers(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


# add_sinks ----------------------------------------------------------------------------------------------------------


def assert_sinks(hw: Homework, scores: Tensor, sinks: Tensor) -> None:
    """Scores [n, H, m]."""
    values = numbers(scores.shape[2], scores.shape[1], 3, seed=7)
    weights = scores.softmax(-1).nan_to_num(0.0)
    out, lse = torch.einsum("nhm,mhd->nhd", weights, values), torch.logsumexp(scores, dim=-1)
    with_column = torch.cat((scores, sinks[None, :, None].expand(len(scores), -1, 1)), dim=-1).softmax(-1)
    want = torch.einsum("nhm,mhd->nhd", with_column[..., :-1], values)
    before = out.clone(), lse.clone(), sinks.clone()
    got = hw.add_sinks(out, lse, sinks)
    require(all(map(torch.equal, before, (out, lse, sinks))), "you changed an argument")
    assert_close(got, want, atol=1e-9, rtol=1e-9, name="the output with sinks")


@check("add_sinks", mistake="the sink is one more term in the denominator of the softmax")
def test_one_head(hw: Homework) -> None:
    assert_sinks(hw, torch.zeros(1, 1, 2, dtype=torch.float64), torch.zeros(1, dtype=torch.float64))
    assert_sinks(hw, numbers(1, 1, 5, seed=1), torch.full((1,), 2.0, dtype=torch.float64))


@check("add_sinks", mistake="each head has a sink of its own, the same for all queries")
def test_several_heads(hw: Homework) -> None:
    assert_sinks(hw, numbers(4, 3, 6, seed=2), numbers(3, seed=3))
    assert_sinks(hw, numbers(3, 3, 6, seed=4), 3 * numbers(3, seed=5))


@check("add_sinks", mistake="large scores overflow when you exponentiate them: use their differences")
def test_large_scores(hw: Homework) -> None:
    assert_sinks(hw, 10_000 + numbers(2, 2, 4, seed=6), 10_000 + numbers(2, seed=7))
    assert_sinks(hw, -10_000 + numbers(2, 2, 4, seed=8), -10_000 + numbers(2, seed=9))


@check("add_sinks", mistake="a query without keys has lse = -inf, and its output is 0, not NaN")
def test_without_keys(hw: Homework) -> None:
    scores = numbers(3, 2, 4, seed=10)
    scores[1] = -math.inf
    assert_sinks(hw, scores, numbers(2, seed=11))


# latent_attention ---------------------------------------------------------------------------------------------------

Latent = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]


def latent_inputs(keys: int, seed: int, heads: int = 3) -> Latent:
    shapes = (heads, 5 + 2), (keys, 6), (keys, 2), (heads, 5, 6), (heads, 4, 6)
    q, latents, rotated, w_uk, w_uv = (numbers(*shape, seed=seed + i) for i, shape in enumerate(shapes))
    return q, latents, rotated, w_uk, w_uv


def expanded(q: Tensor, latents: Tensor, rotated: Tensor, w_uk: Tensor, w_uv: Tensor) -> Tensor:
    """Attention over the keys and values of each head, one head at a time."""
    out = []
    for head, own in enumerate(q):
        keys = torch.cat((latents @ w_uk[head].T, rotated), dim=1)
        out.append(torch.softmax(keys @ own / math.sqrt(len(own)), dim=0) @ (latents @ w_uv[head].T))
    return torch.stack(out)


def assert_latent(hw: Homework, inputs: Latent) -> None:
    assert_close(hw.latent_attention(*inputs), expanded(*inputs), atol=1e-10, rtol=1e-10, name="the output")


@check("latent_attention", mistake="with one key, the output of head h is w_uv[h] @ latents[0]")
def test_one_key(hw: Homework) -> None:
    assert_latent(hw, latent_inputs(1, seed=20))


@check("latent_attention", mistake="the part of the key from the latent is w_uk[h] @ latents[j]; it meets q's first N")
def test_without_the_rotated_part(hw: Homework) -> None:
    q, latents, rotated, w_uk, w_uv = latent_inputs(7, seed=30)
    assert_latent(hw, (q, latents, 0 * rotated, w_uk, w_uv))


@check("latent_attention", mistake="scores are divided by the square root of N + R, and the last R of q meet `rotated`")
def test_all_parts(hw: Homework) -> None:
    assert_latent(hw, latent_inputs(7, seed=40))
    assert_latent(hw, latent_inputs(12, seed=50, heads=4))


@check("latent_attention", mistake="you expand keys or values; move the matrices to the query", costs=0.4)
def test_arithmetic(hw: Homework) -> None:
    keys, heads = 400, 3
    inputs = latent_inputs(keys, seed=60, heads=heads)
    flops = count_flops(lambda: hw.latent_attention(*inputs))
    bound = 2 * heads * (keys * (6 + 2 + 6) + 6 * (5 + 4))
    assert flops <= 1.3 * bound, (
        f"{flops} FLOPs for {keys} keys; {bound} suffice if no key and no value of a head is computed"
    )


# TwoTables ----------------------------------------------------------------------------------------------------------


class Model:
    """What must hold, from the definition: which positions each group can still read."""

    def __init__(self, hw: Homework, num_pages: int, page_size: int, window: int) -> None:
        self.tables = hw.TwoTables(num_pages, page_size, window)
        self.num_pages, self.size, self.window = num_pages, page_size, window
        self.first: dict[str, int] = {}
        self.end: dict[str, int] = {}

    def used(self) -> int:
        return sum(2 * self.end[name] - self.first[name] for name in self.end)

    def grow(self, name: str, num_computed: int, num_new: int) -> bool:
        visible = [j for j in range(num_computed + 1) if j > num_computed - self.window]
        first = visible[0] // self.size
        end = (num_computed + num_new - 1) // self.size + 1
        if name in self.end:
            self.first[name] = first
        others = self.used() - (2 * self.end[name] - first if name in self.end else 0)
        fits = others + 2 * end - first <= self.num_pages
        before = {k: list(v) for k, v in self.tables.full.items()}
        got = self.tables.grow(name, num_computed, num_new)
        what = f"grow({name!r}, {num_computed}, {num_new})"
        require(got in (True, False), f"{what} returned {got!r}; return True or False")
        assert_equal(bool(got), fits, name=f"the result of {what}")
        if fits:
            self.first[name], self.end[name] = first, end
        else:
            require(
                {k: v for k, v in self.tables.full.items() if v} == {k: v for k, v in before.items() if v},
                f"{what} took pages although there were too few",
            )
        self.check(what)
        return fits

    def release(self, name: str) -> None:
        self.tables.release(name)
        del self.end[name], self.first[name]
        self.check(f"release({name!r})")

    def check(self, what: str) -> None:
        pages: list[int] = []
        for name, end in self.end.items():
            full, windowed = list(self.tables.full[name]), list(self.tables.windowed[name])
            assert_equal(len(full), end, name=f"the number of pages in full[{name!r}] after {what}")
            assert_equal(
                len(windowed), end - self.first[name], name=f"the number of pages in windowed[{name!r}] after {what}"
            )
            pages += full + windowed
        require(len(pages) == len(set(pages)), f"a page has two owners after {what}")
        require(set(pages) <= set(range(self.num_pages)), f"a page is not in the pool after {what}")
        assert_equal(self.tables.num_free, self.num_pages - len(pages), name=f"num_free after {what}")


@check("TwoTables", mistake="a step needs pages for its tokens in both groups")
def test_a_prompt(hw: Homework) -> None:
    model = Model(hw, num_pages=20, page_size=4, window=8)
    model.grow("a", 0, 4)
    model.grow("b", 0, 5)


@check("TwoTables", mistake="a page is taken only when a token is the first one in it")
def test_decodes(hw: Homework) -> None:
    model = Model(hw, num_pages=20, page_size=4, window=99)
    model.grow("a", 0, 3)
    for place in range(3, 12):
        model.grow("a", place, 1)


@check("TwoTables", mistake="the first page that stays is the one with position num_computed - window + 1")
def test_the_window(hw: Homework) -> None:
    for window in (1, 2, 3, 4, 5):
        model = Model(hw, num_pages=30, page_size=2, window=window)
        model.grow("a", 0, 5)
        for place in range(5, 14):
            model.grow("a", place, 1)


@check("TwoTables", mistake="the pages that stay are the last ones, in their order, and the full group loses none")
def test_which_pages_stay(hw: Homework) -> None:
    model = Model(hw, num_pages=30, page_size=2, window=3)
    model.grow("a", 0, 8)
    full, windowed = list(model.tables.full["a"]), list(model.tables.windowed["a"])
    model.grow("a", 8, 1)
    assert_equal(list(model.tables.full["a"])[: len(full)], full, name="the first pages of full['a']")
    kept = windowed[3:]
    assert_equal(list(model.tables.windowed["a"])[: len(kept)], kept, name="the first pages of windowed['a']")


@check("TwoTables", mistake="pages that leave the window are returned first, so that the same step can take them")
def test_a_tight_pool(hw: Homework) -> None:
    model = Model(hw, num_pages=9, page_size=2, window=2)
    model.grow("a", 0, 8)
    require(model.grow("a", 8, 2), "the pages that left the window would have sufficed")


@check("TwoTables", mistake="if there are too few pages for both groups together, nothing is taken")
def test_too_few_pages(hw: Homework) -> None:
    model = Model(hw, num_pages=5, page_size=2, window=9)
    model.grow("a", 0, 6)
    model.grow("a", 0, 4)
    model.grow("a", 4, 1)
    model.grow("b", 0, 1)
    model.release("a")
    model.grow("b", 0, 1)


@check("TwoTables", mistake="pages are returned and taken right in every order of requests")
def test_random_requests(hw: Homework) -> None:
    rng = np.random.default_rng(3)
    for _ in range(30):
        model = Model(hw, int(rng.integers(4, 24)), int(rng.integers(1, 4)), int(rng.integers(1, 9)))
        done: dict[str, int] = {}
        for step in range(40):
            if done and rng.random() < 0.15:
                name = sorted(done)[int(rng.integers(len(done)))]
                model.release(name)
                del done[name]
            name = f"{int(rng.integers(3))}"
            new = int(rng.integers(1, 8)) if name not in done or rng.random() < 0.2 else 1
            if model.grow(name, done.get(name, 0), new):
                done[name] = done.get(name, 0) + new
            assert step >= 0


# longest_hit --------------------------------------------------------------------------------------------------------


def definition(full: list[bool], windowed: list[bool], page_size: int, window: int) -> int:
    best = 0
    for pages in range(len(full) + 1):
        n = pages * page_size
        seen = {j // page_size for j in range(n) if j > n - window}
        if all(full[p] for p in range(pages)) and all(windowed[p] for p in seen):
            best = n
    return best


def assert_hit(hw: Homework, full: str, windowed: str, page_size: int, window: int) -> None:
    cached = [[letter == "x" for letter in pages] for pages in (full, windowed)]
    got = hw.longest_hit(list(cached[0]), list(cached[1]), page_size, window)
    want = definition(*cached, page_size, window)
    assert_equal(got, want, name=f"the hit for full {full!r}, windowed {windowed!r}, {page_size=}, {window=}")


@check("longest_hit", mistake="the full group needs all pages of the hit, from the first one on")
def test_full_pages(hw: Homework) -> None:
    for full in ("xxxx", "xx.x", ".xxx", "....", ""):
        assert_hit(hw, full, "x" * len(full), 2, 4)


@check("longest_hit", mistake="the windowed group needs only the last pages of the hit; earlier ones may be missing")
def test_missing_pages_before_the_window(hw: Homework) -> None:
    assert_hit(hw, "xxxx", "..xx", 2, 4)
    assert_hit(hw, "xxxxxx", "....xx", 4, 5)


@check("longest_hit", mistake="if the last window is missing, a shorter hit may still have its own")
def test_shorter_hits(hw: Homework) -> None:
    assert_hit(hw, "xxxx", ".xx.", 2, 4)
    assert_hit(hw, "xxxxxx", "xxx...", 2, 4)
    assert_hit(hw, "xxxxxx", "xx.x.x", 2, 2)


@check("longest_hit", mistake="the query at position n sees the keys from n - window + 1 on, its own included")
def test_the_edge_of_the_window(hw: Homework) -> None:
    for size, window, windowed in itertools.product((2, 4), range(1, 10), ("...x", "..xx", ".xxx", "xxxx", "....")):
        assert_hit(hw, "xxxx", windowed, size, window)


@check("longest_hit", mistake="the hit follows from the definition for any cached pages")
def test_random_pages(hw: Homework) -> None:
    rng = np.random.default_rng(4)
    for _ in range(300):
        pages = int(rng.integers(0, 9))
        full, windowed = ("".join(rng.choice(["x", "."], pages, p=[p, 1 - p])) for p in (0.9, 0.7))
        assert_hit(hw, full, windowed, int(rng.integers(1, 5)), int(rng.integers(1, 14)))


# select_pages -------------------------------------------------------------------------------------------------------


def selected(q: Tensor, smallest: Tensor, largest: Tensor, budget: int) -> Tensor:
    """By trying both ends of each dimension, one head and one page at a time."""
    pages, kv_heads, size = smallest.shape
    group, rows = len(q) // kv_heads, []
    for kv in range(kv_heads):
        scores = []
        for page in range(pages):
            total = 0.0
            for head in range(kv * group, (kv + 1) * group):
                for d in range(size):
                    total += max(float(q[head, d] * end[page, kv, d]) for end in (smallest, largest))
            scores.append(total)
        order = sorted(range(pages - 1), key=lambda page: -scores[page])
        rows.append(sorted([*order[: min(budget, pages) - 1], pages - 1]))
    return torch.tensor(rows)


def assert_selected(hw: Homework, heads: int, kv_heads: int, pages: int, budget: int, seed: int, sign: int = 0) -> None:
    q = numbers(heads, 4, seed=seed)
    q = q.abs() * sign if sign else q
    keys = numbers(pages, 3, kv_heads, 4, seed=seed + 1)
    got = hw.select_pages(q, keys.amin(1), keys.amax(1), budget)
    assert_equal(got.tolist(), selected(q, keys.amin(1), keys.amax(1), budget).tolist(), name="the pages")


@check("select_pages", mistake="where a query is positive, the largest values count")
def test_positive_queries(hw: Homework) -> None:
    for seed in range(3):
        assert_selected(hw, 1, 1, 6, 3, 70 + seed, sign=1)


@check("select_pages", mistake="where a query is negative, the smallest values give the largest dot product")
def test_negative_queries(hw: Homework) -> None:
    for seed in range(3):
        assert_selected(hw, 1, 1, 6, 3, 80 + seed, sign=-1)


@check("select_pages", mistake="each dimension has its own best end: take the maximum before the sum")
def test_both_signs(hw: Homework) -> None:
    for seed in range(6):
        assert_selected(hw, 1, 1, 8, 4, 90 + 2 * seed)


@check("select_pages", mistake="each KV head adds the scores of its own query heads, and has its own pages")
def test_several_heads_and_pages(hw: Homework) -> None:
    for seed in range(6):
        assert_selected(hw, 6, 2, 9, 4, 110 + 2 * seed)
        assert_selected(hw, 4, 4, 9, 3, 130 + 2 * seed)


@check("select_pages", mistake="the last page is always read, even with a budget of 1, and there may be few pages")
def test_the_last_page(hw: Homework) -> None:
    for pages, budget in ((5, 1), (5, 2), (1, 4), (3, 8), (4, 4)):
        for seed in range(4):
            assert_selected(hw, 4, 2, pages, budget, 150 + 2 * seed)


# PageScorer ---------------------------------------------------------------------------------------------------------

PAGE, BUDGET, LENGTH = 16, 8, 768
STATIC, REFERENCE = 0.7266, 0.8315  # recall of the first page and the last 7, and of the reference


@functools.cache
def text_of_a_model() -> list[tuple[Tensor, Tensor]]:
    """For each layer, queries of every 16th position from 512 on, and all keys."""
    model = (llm := LLM("smollm2-135m-instruct", dtype="float32", device="cpu", max_batch_size=1)).model
    seen: list[tuple[Tensor, Tensor]] = []

    class Keep(prose.Packed):
        def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            seen.append((q[512::PAGE] * model.attention_specs[layer].scale, k))
            return super().__call__(layer, q, k, v)

    ids = torch.tensor(llm.tokenizer.encode(prose.text("calibration")))[:LENGTH]
    with torch.inference_mode():
        model(ids, torch.arange(LENGTH), Keep(model, LENGTH))
    return [(q.clone(), k.clone()) for q, k in seen[2:]]


@functools.cache
def shares_of_pages() -> list[Tensor]:
    """For each layer, the share of the attention weights in each page, [queries, KV heads, pages]."""
    out = []
    for q, k in text_of_a_model():
        scores = torch.einsum("nhgd,mhd->nhgm", q.unflatten(1, (k.shape[1], -1)), k)
        places = torch.arange(512, LENGTH, PAGE)
        scores = scores.masked_fill(torch.arange(LENGTH) > places[:, None, None, None], -math.inf)
        out.append(scores.softmax(-1).mean(2).unflatten(2, (-1, PAGE)).sum(-1))
    return out


def recall(hw: Homework) -> float:
    scorer, found = hw.PageScorer(), []
    for (q, k), shares in zip(text_of_a_model(), shares_of_pages(), strict=True):
        group = q.shape[1] // k.shape[1]
        for head in range(k.shape[1]):
            pages = k[:, head].unflatten(0, (-1, PAGE))
            summaries = scorer.summarize(pages.clone())
            require(
                isinstance(summaries, Tensor) and len(summaries) == len(pages) and summaries[0].numel() <= 128,
                "summarize returns one row of at most 2 D numbers for each page",
            )
            for i in range(len(q)):
                complete = 512 // PAGE + i  # the query begins a new page
                own = q[i, head * group : (head + 1) * group]
                scores = scorer.scores(own.clone(), summaries[:complete].clone())
                require(tuple(scores.shape) == (complete,), f"scores has the shape {list(scores.shape)}")
                require(not scores.isnan().any(), "scores has NaN")
                chosen = scores.topk(BUDGET - 1).indices
                found.append(shares[i, head, chosen].sum() + shares[i, head, complete])
    return float(torch.stack(found).mean())


def score(hw: Homework) -> float:
    return (recall(hw) - STATIC) / (REFERENCE - STATIC)


@check("PageScorer", mistake="a page is described by its own keys, and scores order pages, not keys", seconds=60)
def test_shapes(hw: Homework) -> None:
    scorer = hw.PageScorer()
    pages = numbers(5, PAGE, 8, seed=170).float()
    both, one = scorer.summarize(pages.clone()), scorer.summarize(pages[2:3].clone())
    require(both.ndim == 2 and len(both) == 5 and both.shape[1] <= 16, "a summary has at most 2 D numbers")
    require(torch.equal(both[2:3], one), "a page's summary depends on other pages")
    scores = scorer.scores(numbers(3, 8, seed=171).float(), both)
    assert_equal(list(scores.shape), [5], name="the shape of the scores")


@check("PageScorer", mistake="your pages hold less attention than the first page and the last 7", seconds=60)
def test_better_than_a_static_pattern(hw: Homework) -> None:
    got = score(hw)
    assert got > 0.2, f"your score is {got:.2f}; the first page and the last 7 score 0"


@check("PageScorer", mistake="use the extremes of the keys: select_pages scores more", costs=0.4, seconds=60)
def test_as_good_as_bounds(hw: Homework) -> None:
    got = score(hw)
    assert got >= 0.7, f"your score is {got:.2f}; the bounds of select_pages score 0.8"


@check(
    "PageScorer",
    mistake="bounds overrate pages whose keys differ; some pages are always read",
    costs=0.3,
    seconds=60,
)
def test_better_than_bounds(hw: Homework) -> None:
    got = score(hw)
    assert got >= 0.93, f"your score is {got:.2f}; the reference scores 1"
