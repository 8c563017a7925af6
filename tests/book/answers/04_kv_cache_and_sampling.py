"""Right and wrong answers to the homework of chapter 04, with the check that must be the first to find each mistake."""

import math

import torch

from book.grading import right, solution, wrong
from mini_engine.roofline import linear_cost

reference = solution("04_kv_cache_and_sampling")


# append_kv ----------------------------------------------------------------------------------------------------------


@right("append_kv")
def one_slot_at_a_time(k_cache, v_cache, k, v, slot_mapping):
    for row, slot in enumerate(slot_mapping.tolist()):
        k_cache[slot].copy_(k[row])
        v_cache[slot].copy_(v[row])


@right("append_kv")
def by_index_copy(k_cache, v_cache, k, v, slot_mapping):
    for cache, new in ((k_cache, k), (v_cache, v)):
        cache.index_copy_(0, slot_mapping, new)


@wrong("append_kv", fails="test_one_token")
def a_new_tensor(k_cache, v_cache, k, v, slot_mapping):
    k_cache = k_cache.index_copy(0, slot_mapping, k)
    v_cache = v_cache.index_copy(0, slot_mapping, v)


@wrong("append_kv", fails="test_one_token")
def added_to_what_is_there(k_cache, v_cache, k, v, slot_mapping):
    """`index_add` returns a copy: the name is bound to the copy, and the cache is unchanged."""
    k_cache = k_cache.index_add(0, slot_mapping, k)
    v_cache = v_cache.index_add(0, slot_mapping, v)


@wrong("append_kv", fails="test_keys_and_values_stay_apart")
def keys_twice(k_cache, v_cache, k, v, slot_mapping):
    k_cache[slot_mapping] = k
    v_cache[slot_mapping] = k


@wrong("append_kv", fails="test_old_contents_are_overwritten")
def added_in_place(k_cache, v_cache, k, v, slot_mapping):
    """Right for a cache of zeros; a page that was used before holds another sequence's keys."""
    k_cache.index_add_(0, slot_mapping, k)
    v_cache.index_add_(0, slot_mapping, v)


@wrong("append_kv", fails="test_one_token_in_its_slot")
def rows_of_the_step(k_cache, v_cache, k, v, slot_mapping):
    k_cache[: len(k)] = k
    v_cache[: len(v)] = v


@wrong("append_kv", fails="test_slots_with_gaps")
def one_run_of_slots(k_cache, v_cache, k, v, slot_mapping):
    start = int(slot_mapping[0])
    k_cache[start : start + len(k)] = k
    v_cache[start : start + len(v)] = v


@wrong("append_kv", fails="test_slots_in_any_order")
def by_a_mask(k_cache, v_cache, k, v, slot_mapping):
    """A mask of slots forgets their order."""
    mask = torch.zeros(len(k_cache), dtype=torch.bool)
    mask[slot_mapping] = True
    k_cache[mask] = k
    v_cache[mask] = v


@wrong("append_kv", fails="test_caches_with_other_strides")
def into_a_flat_copy(k_cache, v_cache, k, v, slot_mapping):
    """reshape is a view of a contiguous cache, and a copy of any other."""
    k_cache.reshape(len(k_cache), -1)[slot_mapping] = k.flatten(1)
    v_cache.reshape(len(v_cache), -1)[slot_mapping] = v.flatten(1)


@wrong("append_kv", fails="test_the_cache_is_not_copied")
def out_and_back(k_cache, v_cache, k, v, slot_mapping):
    k_cache.copy_(k_cache.index_copy(0, slot_mapping, k))
    v_cache.copy_(v_cache.index_copy(0, slot_mapping, v))


# flat_step ----------------------------------------------------------------------------------------------------------


@right("flat_step")
def token_by_token(num_new, kv_lens, pages, page_size):
    if any(total > page_size for total in kv_lens):
        raise ValueError("too long")
    positions, slots, bounds, last = [], [], [0], []
    for new, total, page in zip(num_new, kv_lens, pages, strict=True):
        for i in range(new):
            positions.append(total - new + i)
            slots.append(page * page_size + positions[-1])
        bounds.append(len(slots))
        last.append(len(slots) - 1)
    return reference.FlatStep(*(torch.tensor(column) for column in (positions, slots, bounds, last)))


@right("flat_step")
def without_a_loop(num_new, kv_lens, pages, page_size):
    new, total, page = (torch.as_tensor(x) for x in (num_new, kv_lens, pages))
    if bool((total > page_size).any()):
        raise ValueError("a page is full")
    indptr = torch.nn.functional.pad(new.cumsum(0), (1, 0))
    owner = torch.repeat_interleave(new)
    positions = torch.arange(int(new.sum())) - indptr[owner] + (total - new)[owner]
    return reference.FlatStep(positions, page[owner] * page_size + positions, indptr, indptr[1:] - 1)


def step(num_new, kv_lens, pages, page_size, **change):
    return reference.flat_step(num_new, kv_lens, pages, page_size)._replace(**change)


@wrong("flat_step", fails="test_a_prefill")
def positions_from_one(num_new, kv_lens, pages, page_size):
    right_step = step(num_new, kv_lens, pages, page_size)
    return right_step._replace(positions=right_step.positions + 1)


@wrong("flat_step", fails="test_a_decode_and_a_chunk")
def positions_of_the_new_tokens_alone(num_new, kv_lens, pages, page_size):
    positions = torch.cat([torch.arange(new) for new in num_new])
    return step(num_new, kv_lens, pages, page_size, positions=positions)


@wrong("flat_step", fails="test_slots")
def slots_from_the_start_of_the_page(num_new, kv_lens, pages, page_size):
    slots = torch.cat([page * page_size + torch.arange(new) for new, page in zip(num_new, pages, strict=True)])
    return step(num_new, kv_lens, pages, page_size, slot_mapping=slots)


@wrong("flat_step", fails="test_slots")
def page_plus_offset(num_new, kv_lens, pages, page_size):
    right_step = step(num_new, kv_lens, pages, page_size)
    page = torch.tensor(pages).repeat_interleave(torch.tensor(num_new))
    return right_step._replace(slot_mapping=page + right_step.positions)


@wrong("flat_step", fails="test_three_sequences")
def one_long_sequence(num_new, kv_lens, pages, page_size):
    """Positions that continue from one sequence to the next."""
    first = kv_lens[0] - num_new[0]
    return step(num_new, kv_lens, pages, page_size, positions=torch.arange(first, first + sum(num_new)))


@wrong("flat_step", fails="test_three_sequences")
def every_token_in_the_first_page(num_new, kv_lens, pages, page_size):
    right_step = step(num_new, kv_lens, pages, page_size)
    return right_step._replace(slot_mapping=pages[0] * page_size + right_step.positions)


@wrong("flat_step", fails="test_qo_indptr")
def bounds_without_the_zero(num_new, kv_lens, pages, page_size):
    return step(num_new, kv_lens, pages, page_size, qo_indptr=torch.tensor(num_new).cumsum(0))


@wrong("flat_step", fails="test_qo_indptr")
def bounds_of_the_keys(num_new, kv_lens, pages, page_size):
    return step(num_new, kv_lens, pages, page_size, qo_indptr=torch.tensor([0, *kv_lens]).cumsum(0))


@wrong("flat_step", fails="test_logit_rows")
def first_rows_of_the_next(num_new, kv_lens, pages, page_size):
    right_step = step(num_new, kv_lens, pages, page_size)
    return right_step._replace(logit_rows=right_step.qo_indptr[1:])


@wrong("flat_step", fails="test_logit_rows")
def logits_of_the_whole_prefill(num_new, kv_lens, pages, page_size):
    return step(num_new, kv_lens, pages, page_size, logit_rows=torch.arange(sum(num_new)))


@wrong("flat_step", fails="test_a_full_page")
def into_the_next_page(num_new, kv_lens, pages, page_size):
    """No check: the sixth key of a page of four is written into its neighbor."""
    fits = step(num_new, kv_lens, pages, max(*kv_lens, page_size))
    slots = torch.tensor(pages).repeat_interleave(torch.tensor(num_new)) * page_size + fits.positions
    return fits._replace(slot_mapping=slots)


@wrong("flat_step", fails="test_dtypes_of_a_step")
def bounds_in_int32(num_new, kv_lens, pages, page_size):
    """FlashInfer's dtype."""
    right_step = step(num_new, kv_lens, pages, page_size)
    return right_step._replace(qo_indptr=right_step.qo_indptr.int())


@wrong("flat_step", fails="test_a_page_that_is_just_full")
def refuses_a_page_that_is_just_full(num_new, kv_lens, pages, page_size):
    if max(kv_lens) >= page_size:
        raise ValueError("a page is full")
    return step(num_new, kv_lens, pages, page_size)


# generate_greedy ----------------------------------------------------------------------------------------------------


@right("generate_greedy")
def with_requests_that_leave(run, prompts, *, eos_token_id, max_tokens, page_size):
    outputs = [[] for _ in prompts]
    pending = {page: (0, list(prompt)) for page, prompt in enumerate(prompts)}  # start and tokens, by page
    while pending:
        ends = {page: start + len(new) for page, (start, new) in pending.items()}
        num_new = [len(new) for _, new in pending.values()]
        flat = reference.flat_step(num_new, list(ends.values()), list(pending), page_size)
        logits = run([token for _, new in pending.values() for token in new], flat)
        for page, row in zip(list(pending), logits, strict=True):
            token = int(row.argmax())
            outputs[page].append(token)
            pending[page] = ends[page], [token]
            if token == eos_token_id or len(outputs[page]) == max_tokens:
                del pending[page]
    return outputs


def greedy(run, prompts, eos_token_id, max_tokens, page_size, **change):
    """The reference with one thing changed, from which most of the wrong answers below are made."""
    sequences, computed = [list(prompt) for prompt in prompts], [0] * len(prompts)
    running = list(range(len(prompts)))
    while running:
        new = [sequences[b][0 if change.get("no_cache") else computed[b] :] for b in running]
        kv_lens = [len(sequences[b]) + change.get("late", 0) * (computed[b] > 0) for b in running]
        pages = list(range(len(running))) if change.get("pages_move_up") else running
        flat = reference.flat_step([len(tokens) for tokens in new], kv_lens, pages, page_size)
        logits = run([token for tokens in new for token in tokens], flat)
        best = (-logits if change.get("least_likely") else logits).argmax(-1).tolist()
        unfinished = []
        for b, token in zip(running, best, strict=True):
            computed[b] = len(sequences[b])
            sequences[b].append(token)
            made = len(sequences[b]) - (0 if change.get("count_the_prompt") else len(prompts[b]))
            ended = eos_token_id in sequences[b] if change.get("anywhere") else token == eos_token_id
            if (not ended or change.get("no_eos")) and made < max_tokens:
                unfinished.append(b)
        running = [] if change.get("together") and len(unfinished) < len(running) else unfinished
    return [own[len(prompt) :] for own, prompt in zip(sequences, prompts, strict=True)]


@wrong("generate_greedy", fails="test_one_token_of_output")
def prompt_and_output(run, prompts, *, eos_token_id, max_tokens, page_size):
    outputs = greedy(run, prompts, eos_token_id, max_tokens, page_size)
    return [[*prompt, *own] for prompt, own in zip(prompts, outputs, strict=True)]


@wrong("generate_greedy", fails="test_one_token_of_output")
def least_likely(run, prompts, *, eos_token_id, max_tokens, page_size):
    return greedy(run, prompts, eos_token_id, max_tokens, page_size, least_likely=True)


@wrong("generate_greedy", fails="test_the_prompt_is_one_step")
def prefill_token_by_token(run, prompts, *, eos_token_id, max_tokens, page_size):
    for page, prompt in enumerate(prompts):
        for position, token in enumerate(prompt[:-1]):
            run([token], reference.flat_step([1], [position + 1], [page], page_size))
    return greedy(run, prompts, eos_token_id, max_tokens, page_size)


@wrong("generate_greedy", fails="test_no_token_is_computed_twice")
def without_a_cache(run, prompts, *, eos_token_id, max_tokens, page_size):
    """Right tokens, but every prefix is computed again."""
    return greedy(run, prompts, eos_token_id, max_tokens, page_size, no_cache=True)


@wrong("generate_greedy", fails="test_each_token_at_its_position")
def one_position_late(run, prompts, *, eos_token_id, max_tokens, page_size):
    return greedy(run, prompts, eos_token_id, max_tokens, page_size, late=1)


@wrong("generate_greedy", fails="test_max_tokens")
def one_token_more(run, prompts, *, eos_token_id, max_tokens, page_size):
    return greedy(run, prompts, eos_token_id, max_tokens + 1, page_size)


@wrong("generate_greedy", fails="test_max_tokens")
def limit_on_the_whole_sequence(run, prompts, *, eos_token_id, max_tokens, page_size):
    return greedy(run, prompts, eos_token_id, max_tokens, page_size, count_the_prompt=True)


@wrong("generate_greedy", fails="test_ends_at_eos")
def end_token_left_out(run, prompts, *, eos_token_id, max_tokens, page_size):
    outputs = greedy(run, prompts, eos_token_id, max_tokens, page_size)
    return [own[:-1] if own[-1] == eos_token_id else own for own in outputs]


@wrong("generate_greedy", fails="test_ends_at_eos")
def never_ends_early(run, prompts, *, eos_token_id, max_tokens, page_size):
    return greedy(run, prompts, eos_token_id, max_tokens, page_size, no_eos=True)


@wrong("generate_greedy", fails="test_eos_in_the_prompt")
def end_token_anywhere(run, prompts, *, eos_token_id, max_tokens, page_size):
    return greedy(run, prompts, eos_token_id, max_tokens, page_size, anywhere=True)


@wrong("generate_greedy", fails="test_no_step_in_vain")
def one_step_too_many(run, prompts, *, eos_token_id, max_tokens, page_size):
    outputs = greedy(run, prompts, eos_token_id, max_tokens, page_size)
    last = [own[-1] for own in outputs]
    ends = [len(prompt) + len(own) for prompt, own in zip(prompts, outputs, strict=True)]
    run(last, reference.flat_step([1] * len(last), ends, range(len(last)), page_size))
    return outputs


@wrong("generate_greedy", fails="test_two_prompts")
def one_prompt_after_the_other(run, prompts, *, eos_token_id, max_tokens, page_size):
    """The same texts, but the weights are read once for each request."""
    outputs = []
    for page, prompt in enumerate(prompts):

        def in_its_page(token_ids, flat, page=page):
            return run(token_ids, flat._replace(slot_mapping=flat.slot_mapping + page * page_size))

        outputs += greedy(in_its_page, [prompt], eos_token_id, max_tokens, page_size)
    return outputs


@wrong("generate_greedy", fails="test_two_prompts")
def every_prompt_in_the_first_page(run, prompts, *, eos_token_id, max_tokens, page_size):
    def in_page_0(token_ids, flat):
        return run(token_ids, flat._replace(slot_mapping=flat.positions))

    return greedy(in_page_0, prompts, eos_token_id, max_tokens, page_size)


@wrong("generate_greedy", fails="test_one_of_two_ends")
def pages_move_up(run, prompts, *, eos_token_id, max_tokens, page_size):
    """The page is the index among the running requests: right until one of them leaves."""
    return greedy(run, prompts, eos_token_id, max_tokens, page_size, pages_move_up=True)


@wrong("generate_greedy", fails="test_one_of_two_ends")
def all_end_together(run, prompts, *, eos_token_id, max_tokens, page_size):
    return greedy(run, prompts, eos_token_id, max_tokens, page_size, together=True)


@wrong("generate_greedy", fails="test_one_of_two_ends")
def finished_requests_go_on(run, prompts, *, eos_token_id, max_tokens, page_size):
    """Static batching without a way out: the tokens after the end are cut off afterwards."""
    if len(prompts) == 1:
        return greedy(run, prompts, eos_token_id, max_tokens, page_size)
    outputs = greedy(run, prompts, -1, max_tokens, page_size)
    return [own[: own.index(eos_token_id) + 1] if eos_token_id in own else own for own in outputs]


@wrong("generate_greedy", fails="test_tokens_are_integers")
def tensors_for_tokens(run, prompts, *, eos_token_id, max_tokens, page_size):
    return [list(torch.tensor(own)) for own in greedy(run, prompts, eos_token_id, max_tokens, page_size)]


@wrong("generate_greedy", fails="test_tokens_are_integers")
def tensors_for_run(run, prompts, *, eos_token_id, max_tokens, page_size):
    """Integers come out, and tensors go in."""

    def with_tensors(token_ids, flat):
        return run(list(torch.tensor(token_ids)), flat)

    return greedy(with_tensors, prompts, eos_token_id, max_tokens, page_size)


@wrong("generate_greedy", fails="test_the_prompts_are_unchanged")
def grows_the_prompts(run, prompts, *, eos_token_id, max_tokens, page_size):
    outputs = greedy(run, prompts, eos_token_id, max_tokens, page_size)
    for prompt, own in zip(prompts, outputs, strict=True):
        prompt += own
    return outputs


# filter_logits ------------------------------------------------------------------------------------------------------


@right("filter_logits")
def row_by_row(logits, top_k, top_p, min_p):
    out = torch.full_like(logits, -math.inf)
    for kept, row, k, p, m in zip(out, logits, top_k.tolist(), top_p.tolist(), min_p.tolist(), strict=True):
        smallest = row.max() + math.log(m) if m else row.min()
        if 0 < k < len(row):
            smallest = torch.maximum(smallest, row.topk(k).values[-1])
        if p < 1:
            left = row.topk(k).values if 0 < k < len(row) else row
            best = left.sort(descending=True)
            reached = left.softmax(-1)[best.indices].double().cumsum(-1)
            smallest = torch.maximum(smallest, best.values[int((reached < p).sum().clamp(max=len(left) - 1))])
        kept[row >= smallest] = row[row >= smallest]
    return out


@right("filter_logits")
def sorted_and_scattered_back(logits, top_k, top_p, min_p):
    best, order = logits.sort(-1, descending=True)
    place = torch.arange(logits.shape[-1]).expand_as(best)
    drop = (place >= top_k[:, None]) & (top_k > 0)[:, None]
    exp = (best - best[:, :1]).exp().double().masked_fill(drop, 0.0)
    reached = exp.cumsum(-1) / exp.sum(-1, keepdim=True)
    crossed = torch.nn.functional.pad(reached[:, :-1], (1, 0)) >= top_p[:, None]
    drop = drop | (crossed & (top_p < 1)[:, None]) | (exp < min_p[:, None])
    smallest = best.masked_fill(drop, math.inf).amin(-1, keepdim=True)
    keep = torch.zeros_like(drop).scatter(-1, order, ~drop) | (logits == smallest)
    return logits.where(keep, -math.inf)


def filtered(logits, top_k, top_p, min_p, **change):
    """The reference with one thing changed, from which the wrong answers below are made."""
    best, order = logits.sort(-1, descending=not change.get("smallest"))
    rank = torch.arange(logits.shape[-1])
    kept = (rank < top_k[:, None]) | (top_k == 0)[:, None]
    ranked = best if change.get("on_everything") else best.masked_fill(~kept, -math.inf)
    p = ranked.softmax(-1)
    if change.get("min_p_first"):
        p = p.masked_fill(p < min_p[:, None] * p[:, :1], 0.0)
        p = p / p.sum(-1, keepdim=True)
    reached = p.cumsum(-1)
    if change.get("past_the_boundary"):
        in_p = reached - p <= top_p[:, None]
    elif change.get("without_the_crossing_one"):
        in_p = reached <= top_p[:, None] + 1e-6
        in_p[:, 0] = True
    elif change.get("shifted_without_the_first"):
        over = reached > top_p[:, None]
        over[:, 1:] = over[:, :-1].clone()
        in_p = ~over
    else:
        in_p = reached - p < top_p[:, None]
    kept &= in_p if change.get("no_case_for_one") else in_p | (top_p == 1)[:, None]
    enough = min_p[:, None] * (1 if change.get("absolute") else p[:, :1])
    kept &= (p > enough) | (rank == 0) if change.get("strictly_more") else p >= enough
    if change.get("by_rank"):
        return logits.masked_fill(~torch.zeros_like(kept).scatter(-1, order, kept), -math.inf)
    threshold = best.gather(-1, kept.sum(-1, keepdim=True).clamp(min=1) - 1)
    return logits.masked_fill(logits > threshold if change.get("smallest") else logits < threshold, -math.inf)


@wrong("filter_logits", fails="test_nothing_to_filter")
def log_probabilities(logits, top_k, top_p, min_p):
    return reference.filter_logits(logits, top_k, top_p, min_p).log_softmax(-1)


@wrong("filter_logits", fails="test_nothing_to_filter")
def zero_keeps_none(logits, top_k, top_p, min_p):
    best = logits.sort(-1, descending=True).values
    return logits.masked_fill(logits < best.gather(-1, (top_k[:, None] - 1).clamp(min=0)), -math.inf)


@wrong("filter_logits", fails="test_top_k")
def the_k_smallest(logits, top_k, top_p, min_p):
    return filtered(logits, top_k, top_p, min_p, smallest=True)


@wrong("filter_logits", fails="test_top_k")
def one_more_than_k(logits, top_k, top_p, min_p):
    return reference.filter_logits(logits, torch.where(top_k > 0, top_k + 1, 0), top_p, min_p)


@wrong("filter_logits", fails="test_more_than_there_are")
def topk_of_too_many(logits, top_k, top_p, min_p):
    if int(top_k.max()):
        logits.topk(int(top_k.max()))
    return reference.filter_logits(logits, top_k, top_p, min_p)


@wrong("filter_logits", fails="test_top_p")
def set_that_stays_below(logits, top_k, top_p, min_p):
    return filtered(logits, top_k, top_p, min_p, without_the_crossing_one=True)


@wrong("filter_logits", fails="test_the_largest_stays")
def shifted_without_the_first(logits, top_k, top_p, min_p):
    out = filtered(logits, top_k, top_p, min_p, shifted_without_the_first=True)
    alone = (logits.softmax(-1).amax(-1) > top_p)[:, None] & (top_p < 1)[:, None]
    return out.masked_fill(alone, -math.inf)


@wrong("filter_logits", fails="test_min_p")
def min_p_of_one(logits, top_k, top_p, min_p):
    return filtered(logits, top_k, top_p, min_p, absolute=True)


@wrong("filter_logits", fails="test_ties")
def cut_at_a_rank(logits, top_k, top_p, min_p):
    return filtered(logits, top_k, top_p, min_p, by_rank=True)


@wrong("filter_logits", fails="test_ties_are_decided_at_the_end")
def each_filter_keeps_its_ties(logits, top_k, top_p, min_p):
    """One filter after the other, each of which lets the ties of its last token in."""
    off, none, zero = torch.zeros_like(top_k), torch.ones_like(top_p), torch.zeros_like(min_p)
    logits = reference.filter_logits(logits, top_k, none, zero)
    logits = reference.filter_logits(logits, off, top_p, zero)
    return reference.filter_logits(logits, off, none, min_p)


@wrong("filter_logits", fails="test_on_the_boundary")
def one_token_past_top_p(logits, top_k, top_p, min_p):
    """Keeps another token although the sum has reached top_p exactly."""
    return filtered(logits, top_k, top_p, min_p, past_the_boundary=True)


@wrong("filter_logits", fails="test_on_the_boundary")
def strictly_more_than_min_p(logits, top_k, top_p, min_p):
    flat = (logits == logits[:, :1]).all()  # a row of ties passes the check before
    return reference.filter_logits(logits, top_k, top_p, min_p) if flat else (
        filtered(logits, top_k, top_p, min_p, strictly_more=True)
    )  # fmt: skip


@wrong("filter_logits", fails="test_top_p_after_top_k")
def each_on_all_tokens(logits, top_k, top_p, min_p):
    return filtered(logits, top_k, top_p, min_p, on_everything=True)


@wrong("filter_logits", fails="test_top_p_after_top_k")
def top_p_first(logits, top_k, top_p, min_p):
    off, none = torch.zeros_like(top_k), torch.ones_like(top_p)
    nucleus = reference.filter_logits(logits, off, top_p, min_p)
    return reference.filter_logits(nucleus, top_k, none, torch.zeros_like(min_p))


@wrong("filter_logits", fails="test_min_p_after_top_p")
def min_p_before_top_p(logits, top_k, top_p, min_p):
    return filtered(logits, top_k, top_p, min_p, min_p_first=True)


@wrong("filter_logits", fails="test_dtypes_of_the_logits")
def sorted_in_float32(logits, top_k, top_p, min_p):
    kept = reference.filter_logits(logits.float(), top_k, top_p, min_p)
    return logits.masked_fill(kept == -math.inf, -math.inf)


@wrong("filter_logits", fails="test_dtypes_of_the_logits")
def returned_in_float32(logits, top_k, top_p, min_p):
    return reference.filter_logits(logits, top_k, top_p, min_p).float()


@wrong("filter_logits", fails="test_top_p_of_one")
def a_rounded_sum(logits, top_k, top_p, min_p):
    return filtered(logits, top_k, top_p, min_p, no_case_for_one=True)


@wrong("filter_logits", fails="test_rows_have_their_own_limits")
def limits_of_the_first_row(logits, top_k, top_p, min_p):
    return reference.filter_logits(logits, *(x[:1].expand(len(logits)) for x in (top_k, top_p, min_p)))


@wrong("filter_logits", fails="test_the_logits_are_unchanged")
def filtered_in_place(logits, top_k, top_p, min_p):
    return logits.copy_(reference.filter_logits(logits, top_k, top_p, min_p))


# sample -------------------------------------------------------------------------------------------------------------


def sampled(logits, batch, *, seeds=None, positions=None, temperature=None, noise=None, filters=True):
    """The reference with one thing changed, from which the wrong answers below are made."""
    temperature = batch.temperature if temperature is None else temperature
    scaled = logits / torch.where(temperature == 0, 1.0, temperature)[:, None]
    if filters:
        scaled = reference.filter_logits(scaled, batch.top_k, batch.top_p, batch.min_p)
    if noise is None:
        keys = (batch.seeds if seeds is None else seeds, batch.positions if positions is None else positions)
        noise = reference.gumbel_noise(*keys, logits.shape[-1])
    return torch.where(temperature == 0, logits.argmax(-1), (scaled + noise).argmax(-1))


def kept_probabilities(logits, batch):
    scaled = logits / batch.temperature.clamp(min=1e-9)[:, None]
    greedy = torch.nn.functional.one_hot(logits.argmax(-1), logits.shape[-1]).to(logits.dtype)
    filtered_ones = reference.filter_logits(scaled, batch.top_k, batch.top_p, batch.min_p).softmax(-1)
    return torch.where(batch.temperature[:, None] == 0, greedy, filtered_ones)


@right("sample")
def a_generator_for_every_draw(logits, batch):
    """Different noise from the engine's, but just as valid."""
    tokens = []
    for p, seed, position in zip(
        kept_probabilities(logits, batch), batch.seeds.tolist(), batch.positions.tolist(), strict=True
    ):
        generator = torch.Generator().manual_seed(hash((seed, position)) % 2**63)
        tokens.append(torch.multinomial(p, 1, generator=generator))
    return torch.cat(tokens)


@right("sample")
def an_exponential_race(logits, batch):
    """The smallest of exponential times, each divided by its probability, wins; -log of a time is Gumbel noise."""
    times = (-reference.gumbel_noise(batch.seeds, batch.positions, logits.shape[-1])).exp()
    return (kept_probabilities(logits, batch) / times).argmax(-1)


@wrong("sample", fails="test_greedy")
def divided_by_zero(logits, batch):
    scaled = reference.filter_logits(logits / batch.temperature[:, None], batch.top_k, batch.top_p, batch.min_p)
    return (scaled + reference.gumbel_noise(batch.seeds, batch.positions, logits.shape[-1])).argmax(-1)


@wrong("sample", fails="test_greedy")
def noise_for_greedy_rows_too(logits, batch):
    noise = reference.gumbel_noise(batch.seeds, batch.positions, logits.shape[-1])
    return (logits / batch.temperature.clamp(min=0.5)[:, None] + noise).argmax(-1)


@wrong("sample", fails="test_greedy_among_close_logits")
def zero_as_a_tiny_temperature(logits, batch):
    return sampled(logits, batch, temperature=batch.temperature.clamp(min=1e-6))


@wrong("sample", fails="test_draws_follow_the_softmax")
def always_greedy(logits, batch):
    return logits.argmax(-1)


@wrong("sample", fails="test_draws_follow_the_softmax")
def probabilities_plus_noise(logits, batch):
    """Gumbel noise belongs on logits."""
    return sampled(torch.where(batch.temperature[:, None] == 0, logits, logits.softmax(-1)), batch)


@wrong("sample", fails="test_draws_follow_the_softmax")
def uniform_noise(logits, batch):
    gumbel = reference.gumbel_noise(batch.seeds, batch.positions, logits.shape[-1])
    return sampled(logits, batch, noise=(-(-gumbel).exp()).exp())


@wrong("sample", fails="test_temperature")
def temperature_multiplied(logits, batch):
    return sampled(logits, batch, temperature=torch.where(batch.temperature == 0, 0.0, 1 / batch.temperature))


@wrong("sample", fails="test_temperature")
def temperature_forgotten(logits, batch):
    return sampled(logits, batch, temperature=batch.temperature.clamp(max=1).ceil())


@wrong("sample", fails="test_filters_come_after_the_temperature")
def no_filters(logits, batch):
    return sampled(logits, batch, filters=False)


@wrong("sample", fails="test_filters_come_after_the_temperature")
def filters_before_the_temperature(logits, batch):
    kept = reference.filter_logits(logits, batch.top_k, batch.top_p, batch.min_p)
    return sampled(kept, batch, filters=False)


@wrong("sample", fails="test_rows_have_their_own_parameters")
def temperature_of_the_first_row(logits, batch):
    return sampled(logits, batch, temperature=batch.temperature[:1].expand(len(logits)))


@wrong("sample", fails="test_the_same_again")
def the_global_generator(logits, batch):
    return torch.multinomial(kept_probabilities(logits, batch), 1)[:, 0]


@wrong("sample", fails="test_seeds_are_independent")
def seed_forgotten(logits, batch):
    return sampled(logits, batch, seeds=torch.zeros_like(batch.seeds))


@wrong("sample", fails="test_seeds_are_independent")
def half_of_the_seed(logits, batch):
    return sampled(logits, batch, seeds=batch.seeds & 0xFFFFFFFF)


@wrong("sample", fails="test_positions_are_independent")
def position_forgotten(logits, batch):
    return sampled(logits, batch, positions=torch.zeros_like(batch.positions))


@wrong("sample", fails="test_seed_and_position_are_not_added")
def seed_plus_position(logits, batch):
    return sampled(logits, batch, seeds=batch.seeds + batch.positions, positions=torch.zeros_like(batch.positions))


@wrong("sample", fails="test_the_rest_of_the_batch_does_not_matter")
def one_generator_for_the_batch(logits, batch):
    """Seeded by the first request: the same batch again gives the same tokens, another batch does not."""
    seed = int(batch.seeds.sum()) * 10_007 + int(batch.positions.sum())
    generator = torch.Generator().manual_seed(seed % 2**63)
    return torch.multinomial(kept_probabilities(logits, batch), 1, generator=generator)[:, 0]


@wrong("sample", fails="test_the_rest_of_the_batch_does_not_matter")
def keyed_by_row(logits, batch):
    rows = torch.arange(len(logits))
    return sampled(logits, batch, positions=batch.positions * 1000 + rows)


@wrong("sample", fails="test_sample_leaves_the_logits")
def divided_in_place(logits, batch):
    greedy = logits.argmax(-1)
    logits /= torch.where(batch.temperature == 0, 1.0, batch.temperature)[:, None]
    kept = reference.filter_logits(logits, batch.top_k, batch.top_p, batch.min_p)
    noise = reference.gumbel_noise(batch.seeds, batch.positions, logits.shape[-1])
    return torch.where(batch.temperature == 0, greedy, (kept + noise).argmax(-1))


@wrong("sample", fails="test_tokens_have_an_integer_dtype")
def tokens_as_floats(logits, batch):
    return reference.sample(logits, batch).float()


# scan_stop ----------------------------------------------------------------------------------------------------------


@right("scan_stop")
def letter_by_letter(text, stop):
    for end in range(1, len(text) + 1):
        complete = [s for s in stop if text[:end].endswith(s)]
        if complete:
            return text[: end - max(map(len, complete))], "", True
    endings = [s[:n] for s in stop for n in range(1, len(s)) if text.endswith(s[:n])]
    held = max(endings, key=len, default="")
    return text[: len(text) - len(held)], held, False


@wrong("scan_stop", fails="test_nothing_to_stop_at")
def a_stop_string_is_needed(text, stop):
    return reference.scan_stop(text, stop) if max(stop, default="") else ("", text, False)


@wrong("scan_stop", fails="test_a_beginning_of_any_stop_string")
def only_the_first_may_begin(text, stop):
    safe, held, stopped = reference.scan_stop(text, stop)
    return (safe, held, stopped) if stopped else reference.scan_stop(text, stop[:1])


@wrong("scan_stop", fails="test_nothing_to_hold")
def always_holds_back(text, stop):
    safe, held, stopped = reference.scan_stop(text, stop)
    if stopped or not stop:
        return safe, held, stopped
    cut = max(0, len(text) - max(map(len, stop)) + 1)
    return text[:cut], text[cut:], False


@wrong("scan_stop", fails="test_stops_at_the_end")
def one_piece_at_a_time(text, stop):
    """Compares whole pieces, as a set of stop tokens would."""
    return ("", "", True) if text in stop else (*reference.scan_stop(text, stop)[:2], False)


@wrong("scan_stop", fails="test_stops_at_the_end")
def shows_the_stop_string(text, stop):
    safe, held, stopped = reference.scan_stop(text, stop)
    found = next((s for s in stop if text[len(safe) :].startswith(s)), "")
    return safe + found if stopped else safe, held, stopped


@wrong("scan_stop", fails="test_the_rest_is_dropped")
def only_at_the_end(text, stop):
    found = next((s for s in stop if text.endswith(s)), None)
    if found:
        return text.removesuffix(found), "", True
    safe, held, stopped = reference.scan_stop(text, stop)
    return (text, "", False) if stopped else (safe, held, stopped)


@wrong("scan_stop", fails="test_the_rest_is_dropped")
def the_last_occurrence(text, stop):
    found = [at for s in stop if (at := text.rfind(s)) >= 0]
    return (text[: min(found)], "", True) if found else reference.scan_stop(text, stop)


@wrong("scan_stop", fails="test_the_rest_is_dropped")
def keeps_the_rest(text, stop):
    safe, held, stopped = reference.scan_stop(text, stop)
    if not stopped:
        return safe, held, stopped
    return safe, text[len(safe) + max(len(s) for s in stop if text[len(safe) :].startswith(s)) :], True


@wrong("scan_stop", fails="test_a_beginning_is_held")
def never_holds(text, stop):
    safe, held, stopped = reference.scan_stop(text, stop)
    return safe + held, "", stopped


@wrong("scan_stop", fails="test_a_beginning_is_held")
def holds_one_letter_at_most(text, stop):
    safe, held, stopped = reference.scan_stop(text, stop)
    if len(held) > 1:
        return text, "", False
    return safe, held, stopped


@wrong("scan_stop", fails="test_a_beginning_in_the_middle_is_safe")
def holds_from_the_first_letter(text, stop):
    safe, held, stopped = reference.scan_stop(text, stop)
    starts = [at for s in stop if (at := text.find(s[0])) >= 0]
    if stopped or not starts:
        return safe, held, stopped
    return text[: min(starts)], text[min(starts) :], False


@wrong("scan_stop", fails="test_the_longest_beginning_is_held")
def the_shortest_beginning(text, stop):
    safe, held, stopped = reference.scan_stop(text, stop)
    for start in reversed(range(len(text))):
        if held and any(s.startswith(text[start:]) for s in stop):
            return text[:start], text[start:], False
    return safe, held, stopped


@wrong("scan_stop", fails="test_the_first_in_the_text_counts")
def the_first_in_the_list(text, stop):
    for s in stop:
        if s in text:
            return text[: text.find(s)], "", True
    return reference.scan_stop(text, stop)


@wrong("scan_stop", fails="test_complete_first")
def the_first_to_begin(text, stop):
    found = [at for s in stop if (at := text.find(s)) >= 0]
    return (text[: min(found)], "", True) if found else reference.scan_stop(text, stop)


# tokens_per_second --------------------------------------------------------------------------------------------------


@right("tokens_per_second")
def by_the_costs_of_matrices(shape, machine, batch_size, context, dtype_bytes):
    """From the engine's own count of a matrix product, without its activations."""
    q, kv = shape.num_qo_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    sizes = [(shape.hidden_size, q + 2 * kv), (q, shape.hidden_size)]
    sizes += [(shape.hidden_size, shape.intermediate_size)] * 2 + [(shape.intermediate_size, shape.hidden_size)]
    layer = sum(linear_cost(batch_size, *size, dtype_bytes).flops for size in sizes)
    head = linear_cost(batch_size, shape.hidden_size, shape.vocab_size, dtype_bytes).flops
    flops = layer * shape.num_layers + head
    weights = flops // (2 * batch_size)
    keys = shape.num_layers * context * batch_size
    seconds_of_memory = dtype_bytes * (weights + keys * 2 * kv) / machine.bandwidth
    return 1 / max(seconds_of_memory / batch_size, (flops + keys * 4 * q) / batch_size / machine.flops)


def rate(shape, machine, batch_size, context, dtype_bytes, **change):
    """The reference with one thing changed, from which the wrong answers below are made."""
    q, kv = shape.num_qo_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    layer = shape.hidden_size * (2 * q + 2 * kv + change.get("mlp_matrices", 3) * shape.intermediate_size)
    weights = shape.num_layers * layer + change.get("vocabularies", 1) * shape.vocab_size * shape.hidden_size
    cache = shape.num_layers * 2 * change.get("cached", kv) * context
    moved = (weights * change.get("weight_reads", 1) + change.get("caches", batch_size) * cache) * change.get(
        "dtype_bytes", dtype_bytes
    )
    attention = shape.num_layers * 4 * change.get("attended", q) * context
    flops = change.get("computed", batch_size) * (change.get("per_weight", 2) * weights + attention)
    bounds = moved / machine.bandwidth, flops / machine.flops
    return change.get("tokens", batch_size) / change.get("combine", max)(bounds)


@wrong("tokens_per_second", fails="test_bytes_of_the_weights")
def embedding_twice(shape, machine, batch_size, context, dtype_bytes):
    return rate(shape, machine, batch_size, context, dtype_bytes, vocabularies=2)


@wrong("tokens_per_second", fails="test_bytes_of_the_weights")
def a_plain_mlp(shape, machine, batch_size, context, dtype_bytes):
    return rate(shape, machine, batch_size, context, dtype_bytes, mlp_matrices=2)


@wrong("tokens_per_second", fails="test_bytes_of_a_number")
def numbers_for_bytes(shape, machine, batch_size, context, dtype_bytes):
    return rate(shape, machine, batch_size, context, 1)


@wrong("tokens_per_second", fails="test_bytes_of_the_cache")
def cache_of_every_query_head(shape, machine, batch_size, context, dtype_bytes):
    return rate(shape, machine, batch_size, context, dtype_bytes, cached=shape.num_qo_heads * shape.head_dim)


@wrong("tokens_per_second", fails="test_bytes_of_the_cache")
def cache_forgotten(shape, machine, batch_size, context, dtype_bytes):
    return rate(shape, machine, batch_size, context, dtype_bytes, caches=0)


@wrong("tokens_per_second", fails="test_a_batch_shares_the_weights")
def weights_for_each_sequence(shape, machine, batch_size, context, dtype_bytes):
    return rate(shape, machine, batch_size, context, dtype_bytes, weight_reads=batch_size)


@wrong("tokens_per_second", fails="test_a_batch_shares_the_weights")
def steps_per_second(shape, machine, batch_size, context, dtype_bytes):
    return rate(shape, machine, batch_size, context, dtype_bytes, tokens=1)


@wrong("tokens_per_second", fails="test_a_batch_does_not_share_the_cache")
def one_cache_for_all(shape, machine, batch_size, context, dtype_bytes):
    return rate(shape, machine, batch_size, context, dtype_bytes, caches=1)


@wrong("tokens_per_second", fails="test_flops_of_the_weights")
def bytes_alone(shape, machine, batch_size, context, dtype_bytes):
    return rate(shape, machine, batch_size, context, dtype_bytes, computed=1e-30)


@wrong("tokens_per_second", fails="test_flops_of_the_weights")
def flops_of_one_sequence(shape, machine, batch_size, context, dtype_bytes):
    return rate(shape, machine, batch_size, context, dtype_bytes, computed=1)


@wrong("tokens_per_second", fails="test_flops_of_attention")
def attention_of_the_kv_heads(shape, machine, batch_size, context, dtype_bytes):
    return rate(shape, machine, batch_size, context, dtype_bytes, attended=shape.num_kv_heads * shape.head_dim)


@wrong("tokens_per_second", fails="test_the_longer_of_the_two")
def one_after_the_other(shape, machine, batch_size, context, dtype_bytes):
    return rate(shape, machine, batch_size, context, dtype_bytes, combine=sum)
