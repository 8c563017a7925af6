"""Right and wrong answers to the homework of chapter 15. They test its grader."""

import math

import torch
from torch.nn import functional as F

from book.grading import right, solution, wrong

reference = solution("15_beyond_dense")

# add_sinks ----------------------------------------------------------------------------------------------------------


@right("add_sinks")
def by_merging_two_states(out, lse, sinks):
    total = torch.logaddexp(lse, sinks.expand_as(lse))
    return out * (lse - total).exp().unsqueeze(-1)


@right("add_sinks")
def by_a_softmax_of_two(out, lse, sinks):
    pair = torch.stack((lse, sinks.expand_as(lse)), dim=-1)
    return out * pair.softmax(-1)[..., :1]


@wrong("add_sinks", fails="test_one_head")
def without_the_exponential(out, lse, sinks):
    return out * (lse / (lse + sinks))[..., None]


@wrong("add_sinks", fails="test_one_head")
def the_share_of_the_sink(out, lse, sinks):
    return out * torch.sigmoid(sinks - lse)[..., None]


@wrong("add_sinks", fails="test_several_heads")
def by_query(out, lse, sinks):
    own = sinks.repeat(len(out))[: len(out)][:, None]
    return out * torch.sigmoid(lse - own)[..., None]


@wrong("add_sinks", fails="test_several_heads")
def the_same_sink_for_all_heads(out, lse, sinks):
    return out * torch.sigmoid(lse - sinks[0])[..., None]


@wrong("add_sinks", fails="test_large_scores")
def with_exponentials(out, lse, sinks):
    return out * (lse.exp() / (lse.exp() + sinks.exp()))[..., None]


@wrong("add_sinks", fails="test_without_keys")
def by_subtracting_a_maximum(out, lse, sinks):
    largest = lse  # of the scores of the keys, it seems
    total = (lse - largest).exp() + (sinks - largest).exp()
    return out * ((lse - largest).exp() / total)[..., None]


# latent_attention ---------------------------------------------------------------------------------------------------


@right("latent_attention")
def head_by_head(q, latents, rotated, w_uk, w_uv):
    size = w_uk.shape[1]
    keys = torch.cat((latents, rotated), dim=1)
    out = []
    for own, uk, uv in zip(q, w_uk, w_uv, strict=True):
        query = torch.cat((own[:size] @ uk, own[size:]))
        weights = F.softmax(keys @ query / len(own) ** 0.5, dim=0)
        out.append(uv @ (weights @ latents))
    return torch.stack(out)


@wrong("latent_attention", fails="test_arithmetic")
def with_expanded_keys(q, latents, rotated, w_uk, w_uv):
    keys = torch.einsum("hnl,ml->hmn", w_uk, latents)
    keys = torch.cat((keys, rotated.expand(len(q), -1, -1)), dim=-1)
    weights = (torch.einsum("hd,hmd->hm", q, keys) / math.sqrt(q.shape[1])).softmax(-1)
    return torch.einsum("hl,hvl->hv", weights @ latents, w_uv)


@wrong("latent_attention", fails="test_arithmetic")
def with_expanded_values(q, latents, rotated, w_uk, w_uv):
    size = w_uk.shape[1]
    scores = torch.einsum("hn,hnl->hl", q[:, :size], w_uk) @ latents.T + q[:, size:] @ rotated.T
    values = torch.einsum("hvl,ml->hmv", w_uv, latents)
    return torch.einsum("hm,hmv->hv", (scores / math.sqrt(q.shape[1])).softmax(-1), values)


@wrong("latent_attention", fails="test_one_key")
def the_mixed_latents(q, latents, rotated, w_uk, w_uv):
    weights = (q[:, : w_uk.shape[1]] @ w_uk[0] @ latents.T).softmax(-1)
    return (weights @ latents)[:, : w_uv.shape[1]]


@wrong("latent_attention", fails="test_without_the_rotated_part")
def the_matrix_of_the_first_head(q, latents, rotated, w_uk, w_uv):
    return reference.latent_attention(q, latents, rotated, w_uk[:1].expand_as(w_uk), w_uv)


@wrong("latent_attention", fails="test_without_the_rotated_part")
def scaled_by_the_size_of_the_latents(q, latents, rotated, w_uk, w_uv):
    wrong_scale = math.sqrt(q.shape[1] / (latents.shape[1] + rotated.shape[1]))
    return reference.latent_attention(q * wrong_scale, latents, rotated, w_uk, w_uv)


@wrong("latent_attention", fails="test_all_parts")
def without_the_rotated_keys(q, latents, rotated, w_uk, w_uv):
    return reference.latent_attention(q, latents, 0 * rotated, w_uk, w_uv)


# TwoTables ----------------------------------------------------------------------------------------------------------


class Tables:
    """A correct answer with one list of pages and their first positions, and with one flaw on request."""

    bug = ""

    def __init__(self, num_pages, page_size, window):
        self.size, self.window = page_size, window
        self.free, self.full, self.windowed, self.first = set(range(num_pages)), {}, {}, {}

    @property
    def num_free(self):
        return len(self.free)

    def drop(self, request, num_computed):
        oldest = num_computed - self.window + {"early": 2, "late": 0}.get(self.bug, 1)
        while request in self.full and (self.first[request] + 1) * self.size <= oldest and self.windowed[request]:
            self.first[request] += 1
            page = self.windowed[request].pop(-1 if self.bug == "last" else 0)
            if self.bug != "lost":
                self.free.add(page)

    def grow(self, request, num_computed, num_new):
        if self.bug != "after":
            self.drop(request, num_computed)
        full, windowed = self.full.get(request, []), self.windowed.get(request, [])
        end = -(-(num_computed + num_new + (self.bug == "one more")) // self.size)
        counts = end - len(full), end - self.first.get(request, 0) - len(windowed)
        if (max(counts) if self.bug == "apart" else sum(counts)) > len(self.free):
            return False
        self.full[request], self.windowed[request] = full, windowed
        self.first.setdefault(request, 0)
        for pages, count in zip((full, windowed), counts, strict=True):
            for _ in range(min(count, len(self.free))):
                page = self.free.pop() if self.bug != "shared" else min(self.free)
                self.free.discard(page) if self.bug != "shared" or pages is full else None
                pages.append(page)
        if self.bug == "after":
            self.drop(request, num_computed)
        return True

    def release(self, request):
        self.free |= {*self.full.pop(request), *self.windowed.pop(request)}
        del self.first[request]


with_a_set = right("TwoTables")(Tables)


def flawed(bug, fails):
    return wrong("TwoTables", fails=fails)(type("Tables", (Tables,), {"bug": bug}))


drops_a_page_too_early = flawed("early", "test_the_window")
keeps_a_page_too_long = flawed("late", "test_the_window")
loses_pages = flawed("lost", "test_the_window")
drops_the_last_page = flawed("last", "test_which_pages_stay")
returns_pages_after_the_step = flawed("after", "test_a_tight_pool")
takes_room_for_one_more_token = flawed("one more", "test_a_prompt")
counts_the_groups_apart = flawed("apart", "test_too_few_pages")
shares_pages_between_groups = flawed("shared", "test_a_prompt")


# longest_hit --------------------------------------------------------------------------------------------------------


@right("longest_hit")
def from_the_left(full, windowed, page_size, window):
    best, run = 0, 0  # cached pages in a row of the windowed group, up to here
    for page, (a, b) in enumerate(zip(full, windowed, strict=True), start=1):
        if not a:
            break
        run = run + 1 if b else 0
        tokens = page * page_size
        if run * page_size >= min(window - 1, tokens):
            best = tokens
    return best


@wrong("longest_hit", fails="test_full_pages")
def any_page(full, windowed, page_size, window):
    return page_size * max((p + 1 for p in range(len(full)) if full[p] and windowed[p]), default=0)


@wrong("longest_hit", fails="test_missing_pages_before_the_window")
def all_pages_of_both(full, windowed, page_size, window):
    both = [a and b for a, b in zip(full, windowed, strict=True)]
    return page_size * [*both, False].index(False)


@wrong("longest_hit", fails="test_shorter_hits")
def all_or_nothing(full, windowed, page_size, window):
    pages = [*full, False].index(False)
    first = max(0, pages * page_size - window + 1) // page_size
    return pages * page_size if all(windowed[first:pages]) else 0


@wrong("longest_hit", fails="test_the_edge_of_the_window")
def without_the_own_key(full, windowed, page_size, window):
    return reference.longest_hit(full, windowed, page_size, window + 1)


@wrong("longest_hit", fails="test_the_edge_of_the_window")
def whole_pages_only(full, windowed, page_size, window):
    for pages in range(len(full), 0, -1):
        if all(full[:pages]) and all(windowed[max(0, pages - window // page_size) : pages]):
            return pages * page_size
    return 0


# select_pages -------------------------------------------------------------------------------------------------------


def chosen(scores, budget):
    scores = scores.clone()
    scores[:, -1] = math.inf
    return scores.argsort(dim=1, descending=True)[:, :budget].sort(dim=1).values


def bounds(q, smallest, largest):
    """[P, Hk, g] the bound of each head, by the signs of the query."""
    q = q.unflatten(0, (smallest.shape[1], -1))
    positive, negative = q.clamp(min=0), q.clamp(max=0)
    return torch.einsum("kgd,pkd->pkg", positive, largest) + torch.einsum("kgd,pkd->pkg", negative, smallest)


@right("select_pages")
def by_signs(q, smallest, largest, budget):
    return chosen(bounds(q, smallest, largest).sum(-1).T, budget)


@wrong("select_pages", fails="test_positive_queries")
def by_the_smallest_values(q, smallest, largest, budget):
    return chosen(bounds(q, smallest, smallest).sum(-1).T, budget)


@wrong("select_pages", fails="test_negative_queries")
def by_the_largest_values(q, smallest, largest, budget):
    return chosen(bounds(q, largest, largest).sum(-1).T, budget)


@wrong("select_pages", fails="test_both_signs")
def the_larger_of_two_sums(q, smallest, largest, budget):
    return chosen(torch.maximum(bounds(q, smallest, smallest), bounds(q, largest, largest)).sum(-1).T, budget)


@wrong("select_pages", fails="test_several_heads_and_pages")
def the_same_pages_for_all_heads(q, smallest, largest, budget):
    total = bounds(q, smallest, largest).sum((1, 2))
    return chosen(total.expand(smallest.shape[1], -1), budget)


@wrong("select_pages", fails="test_several_heads_and_pages")
def of_the_largest_head(q, smallest, largest, budget):
    return chosen(bounds(q, smallest, largest).amax(-1).T, budget)


@wrong("select_pages", fails="test_several_heads_and_pages")
def with_interleaved_heads(q, smallest, largest, budget):
    heads = q.unflatten(0, (-1, smallest.shape[1])).transpose(0, 1).flatten(0, 1)
    return chosen(bounds(heads, smallest, largest).sum(-1).T, budget)


@wrong("select_pages", fails="test_positive_queries")
def in_order_of_the_scores(q, smallest, largest, budget):
    scores = bounds(q, smallest, largest).sum(-1).T.clone()
    scores[:, -1] = math.inf
    return scores.topk(min(budget, len(smallest)), dim=1).indices


# PageScorer ---------------------------------------------------------------------------------------------------------


class BetweenMiddleAndBound:
    """The bound of each head, softmaxed over pages, and one more weight for the first page and the last one."""

    def summarize(self, keys):
        middle, reach = (keys.amax(1) + keys.amin(1)) / 2, (keys.amax(1) - keys.amin(1)) / 2
        return torch.cat((middle, reach), dim=1)

    def scores(self, q, summaries):
        middle, reach = summaries.chunk(2, dim=1)
        scores = (q @ middle.T + 0.55 * q.abs() @ reach.T).softmax(dim=1).mean(dim=0)
        scores[[0, -1]] += 0.5
        return scores


between_middle_and_bound = right("PageScorer")(BetweenMiddleAndBound)


class Bounds(BetweenMiddleAndBound):
    """The sum of the bounds: as select_pages chooses."""

    def scores(self, q, summaries):
        middle, reach = summaries.chunk(2, dim=1)
        return (q @ middle.T + q.abs() @ reach.T).sum(dim=0)


the_bounds = wrong("PageScorer", fails="test_better_than_bounds")(Bounds)


class Mean:
    def summarize(self, keys):
        return keys.mean(1)

    def scores(self, q, summaries):
        return (q @ summaries.T).softmax(1).mean(0)


the_mean = wrong("PageScorer", fails="test_better_than_a_static_pattern")(Mean)


@wrong("PageScorer", fails="test_better_than_a_static_pattern")
class TheLastPages(Bounds):
    def scores(self, q, summaries):
        scores = torch.arange(len(summaries)).float()
        scores[0] = math.inf
        return scores


@wrong("PageScorer", fails="test_as_good_as_bounds")
class TheFirstAndTheMean(Mean):
    def scores(self, q, summaries):
        scores = super().scores(q, summaries)
        scores[0] += 1
        scores[-3:] += 1
        return scores


@wrong("PageScorer", fails="test_shapes")
class AllKeys(Bounds):
    def summarize(self, keys):
        return keys.flatten(1)


@wrong("PageScorer", fails="test_shapes")
class ComparedWithOtherPages(Bounds):
    def summarize(self, keys):
        return super().summarize(keys) - super().summarize(keys).mean(0)
