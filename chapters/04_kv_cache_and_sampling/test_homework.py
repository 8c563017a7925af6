"""Grader of chapter 04. Its oracles are loops over tokens, and statistics of many draws."""

import itertools
import math
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

from book.contiguous import ContiguousKVCache
from book.grading import Exercise, Homework, assert_close, assert_equal, assert_raises, assert_values, check
from book.memory import measure_memory
from mini_engine import LLM, Parts
from mini_engine.attention.backend import create_backend
from mini_engine.batch import StepBatch
from mini_engine.roofline import Machine, ModelShape
from mini_engine.sampling import SamplingBatch
from mini_engine.sampling_params import SamplingParams

EXERCISES = [
    Exercise(
        "append_kv",
        points=1,
        minutes=5,
        difficulty=1,
        part="append_kv",
        hints=(
            "Each row of k has a row of k_cache to go to. Which kind of indexing takes a list of rows?",
            "A tensor of row numbers on the left of an assignment writes those rows, in any order, and leaves the "
            "others alone. Assigning to the name k_cache instead would only rebind the name.",
            "k_cache[slot_mapping] = k, and the same for v. k_cache.index_copy_(0, slot_mapping, k) also works.",
        ),
    ),
    Exercise(
        "flat_step",
        points=3,
        minutes=15,
        difficulty=2,
        hints=(
            "Do it by hand for one sequence with 5 stored keys and 2 new tokens: what are their positions? Then lay "
            "several sequences end to end.",
            "The new tokens of a sequence have the positions kv_len - num_new to kv_len - 1. qo_indptr begins with 0 "
            "and accumulates num_new. A slot is page * page_size plus the position.",
            "positions = torch.cat([torch.arange(end - new, end) for new, end in zip(num_new, kv_lens)]); "
            "repeat_interleave gives each token its page; logit_rows = qo_indptr[1:] - 1. Check max(kv_lens) first.",
        ),
    ),
    Exercise(
        "generate_greedy",
        points=5,
        minutes=30,
        difficulty=2,
        hints=(
            "Write down the steps for two prompts of 3 and 2 tokens that generate 1 and 3 tokens: which tokens does "
            "each step compute, at which positions, in which pages? There are three steps.",
            "Keep for each prompt its sequence so far and how many of its tokens are computed; a step computes the "
            "others. Keep the list of unfinished requests: their numbers are also their pages. Only generated tokens "
            "can end a request: a chat prompt is full of end tokens.",
            "while running: new = [sequences[b][computed[b]:] for b in running]; step = flat_step(lengths of new, "
            "[len(sequences[b]) for b in running], running, page_size); append one token of "
            "run(...).argmax(-1).tolist() to each sequence, and keep b in running only if it has not finished.",
        ),
    ),
    Exercise(
        "filter_logits",
        points=4,
        minutes=40,
        difficulty=3,
        hints=(
            "Sort each row. Each of the three filters then keeps a beginning of it, and all three together keep the "
            "shortest of these beginnings.",
            "A token is kept by top_p if the tokens before it do not add up to top_p yet: cumsum minus the token's own "
            "probability. Mask what top_k dropped before that softmax. Find the smallest logit kept, and compare the "
            "unsorted row with it: that keeps ties, and needs no way back from the sorted order.",
            "best = logits.sort(-1, descending=True).values; kept = (rank < top_k) | (top_k == 0); p = softmax of "
            "best with -inf where not kept; kept &= (p.cumsum(-1) - p < top_p) | (top_p == 1); kept &= p >= min_p * "
            "p[:, :1]; the threshold is best at kept.sum(-1) - 1. The limits need [:, None].",
        ),
    ),
    Exercise(
        "sample",
        points=4,
        minutes=20,
        difficulty=2,
        part="sample",
        hints=(
            "Compute the greedy tokens and the drawn tokens for the whole batch, and choose between them row by row at "
            "the end. The one thing to avoid is dividing by a temperature of 0.",
            "gumbel_noise(batch.seeds, batch.positions, V) is the only randomness that you need. The largest of "
            "logits + noise is a draw from the softmax; a token at -inf never wins.",
            "scaled = logits / torch.where(batch.temperature == 0, 1, batch.temperature)[:, None]; kept = "
            "filter_logits(scaled, batch.top_k, batch.top_p, batch.min_p); torch.where(batch.temperature == 0, "
            "logits.argmax(-1), (kept + noise).argmax(-1)).",
        ),
    ),
    Exercise(
        "scan_stop",
        points=4,
        minutes=25,
        difficulty=2,
        part="scan_stop",
        hints=(
            "There are three cases: a stop string is complete; the text ends with the beginning of one; neither.",
            "For each index of the text, from the left: is the rest of the text the beginning of a stop string? The "
            "first such index is where holding starts. Complete stop strings go first, and what counts is their end.",
            "found = [(text.find(s) + len(s), text.find(s)) for s in stop if s in text]; if found, cut at "
            "min(found)[1]. If not, split at the first start with any(s.startswith(text[start:]) for s in stop).",
        ),
    ),
    Exercise(
        "tokens_per_second",
        points=4,
        minutes=20,
        difficulty=2,
        challenge=True,
        hints=(
            "Count the numbers in the matrices of one layer, then in the whole model, then in the keys and values of "
            "one token. What does a second sequence add to each?",
            "q and o: hidden_size * num_qo_heads * head_dim each. k and v: hidden_size * num_kv_heads * head_dim "
            "each. gate, up and down: hidden_size * intermediate_size each. Bytes: weights once, cache per sequence; "
            "FLOPs: everything per sequence.",
            "moved = (weights + batch_size * cache) * dtype_bytes; flops = batch_size * (2 * weights + num_layers * "
            "4 * num_qo_heads * head_dim * context); batch_size / max(moved / machine.bandwidth, flops / "
            "machine.flops).",
        ),
    ),
]


# append_kv ----------------------------------------------------------------------------------------------------------


def caches(slots: int, heads: int = 2, head_dim: int = 4) -> tuple[Tensor, Tensor]:
    return torch.randn(slots, heads, head_dim), torch.randn(slots, heads, head_dim)


def interleaved(slots: int, heads: int = 2, head_dim: int = 4) -> tuple[Tensor, Tensor]:
    """Caches that are views of one tensor: heads first, and keys and values side by side."""
    both = torch.randn(heads, slots, 2, head_dim)
    return both[:, :, 0].transpose(0, 1), both[:, :, 1].transpose(0, 1)


def assert_appended(
    hw: Homework, slots: int, slot_mapping: Sequence[int], make: Callable[..., tuple[Tensor, Tensor]] = caches
) -> None:
    k_cache, v_cache = make(slots)
    k, v = caches(len(slot_mapping))
    want_k, want_v = k_cache.clone(), v_cache.clone()
    for row, slot in enumerate(slot_mapping):
        want_k[slot], want_v[slot] = k[row].clone(), v[row].clone()
    hw.append_kv(k_cache, v_cache, k, v, torch.tensor(slot_mapping, dtype=torch.long))
    assert_close(k_cache, want_k, atol=0, name="k_cache")
    assert_close(v_cache, want_v, atol=0, name="v_cache")


@check("append_kv", mistake="write into the tensors that you are given: a new tensor is lost when the function returns")
def test_one_token(hw: Homework) -> None:
    k_cache, v_cache = torch.zeros(1, 1, 2), torch.zeros(1, 1, 2)
    k, v = torch.ones(1, 1, 2), torch.ones(1, 1, 2)
    hw.append_kv(k_cache, v_cache, k, v, torch.tensor([0]))
    assert_close(k_cache, k, name="k_cache")
    assert_close(v_cache, v, name="v_cache")


@check("append_kv", mistake="a slot that was used before is overwritten: nothing is added to its old contents")
def test_old_contents_are_overwritten(hw: Homework) -> None:
    k_cache, v_cache = torch.full((1, 1, 2), 9.0), torch.full((1, 1, 2), 9.0)
    k = torch.ones(1, 1, 2)
    hw.append_kv(k_cache, v_cache, k, k, torch.tensor([0]))
    assert_close(k_cache, k, name="k_cache")
    assert_close(v_cache, k, name="v_cache")


@check("append_kv", mistake="keys go into k_cache, values into v_cache")
def test_keys_and_values_stay_apart(hw: Homework) -> None:
    assert_appended(hw, 1, [0])


@check("append_kv", mistake="a token goes to its slot, not to its row in the step; other slots are unchanged")
def test_one_token_in_its_slot(hw: Homework) -> None:
    assert_appended(hw, 5, [3])


@check(
    "append_kv",
    mistake="the slots of a step have gaps between sequences: use every entry of slot_mapping, not only the first",
)
def test_slots_with_gaps(hw: Homework) -> None:
    assert_appended(hw, 8, [1, 2, 6])


@check("append_kv", mistake="slots come in the order of the tokens, not in increasing order")
def test_slots_in_any_order(hw: Homework) -> None:
    assert_appended(hw, 6, [4, 0, 5, 2])


@check("append_kv", mistake="the cache that you get is a view of pages: what you write must reach the pages")
def test_the_pages_change(hw: Homework) -> None:
    k_pages, v_pages = torch.zeros(3, 4, 2, 4), torch.zeros(3, 4, 2, 4)
    k, v = caches(2)
    hw.append_kv(k_pages.flatten(0, 1), v_pages.flatten(0, 1), k, v, torch.tensor([9, 2]))
    assert_close(k_pages[2, 1], k[0], name="the key in page 2, offset 1")
    assert_close(v_pages[0, 2], v[1], name="the value in page 0, offset 2")


@check(
    "append_kv", mistake="a cache may have any strides: a reshape of it can be a copy, and what you write there is lost"
)
def test_caches_with_other_strides(hw: Homework) -> None:
    assert_appended(hw, 6, [4, 0, 5], interleaved)


@check("append_kv", mistake="you copy the whole cache to change a few rows of it", costs=0.2)
def test_the_cache_is_not_copied(hw: Homework) -> None:
    k_cache, v_cache = caches(4096)
    k, v = caches(2)
    slot_mapping = torch.tensor([7, 4000])
    largest = measure_memory(lambda: hw.append_kv(k_cache, v_cache, k, v, slot_mapping)).largest
    assert largest <= 1024, f"some operation makes a tensor of {largest:,} bytes to store {k.nbytes}"


@check("append_kv", mistake="it fails for a combination of slots that the earlier checks did not try")
def test_random_slots(hw: Homework) -> None:
    for count in (0, 1, 3, 10, 17):
        assert_appended(hw, 17, torch.randperm(17)[:count].tolist())


# flat_step ----------------------------------------------------------------------------------------------------------


def assert_step(
    hw: Homework,
    num_new: list[int],
    kv_lens: list[int],
    pages: list[int],
    page_size: int,
    fields: Sequence[str] = ("positions", "slot_mapping", "qo_indptr", "logit_rows"),
) -> None:
    want: dict[str, list[int]] = {"positions": [], "slot_mapping": [], "qo_indptr": [0], "logit_rows": []}
    row = 0
    for new, total, page in zip(num_new, kv_lens, pages, strict=True):
        for position in range(total - new, total):
            want["positions"].append(position)
            want["slot_mapping"].append(page * page_size + position)
            row += 1
        want["qo_indptr"].append(row)
        want["logit_rows"].append(row - 1)
    got = hw.flat_step(num_new, kv_lens, pages, page_size)
    assert got is not None, "flat_step returns None. Is a `return` missing?"
    assert isinstance(got, tuple) and len(got) == 4, f"flat_step returns a {type(got).__name__}, not a FlatStep"
    for name, array in zip(want, got, strict=True):
        if name in fields:
            assert_values(array, torch.tensor(want[name]), atol=0, name=name)


@check(
    "flat_step",
    mistake="the tokens of a new prompt have the positions 0, 1, 2 and so on",
)
def test_a_prefill(hw: Homework) -> None:
    assert_step(hw, [3], [3], [0], 4, ["positions"])


@check(
    "flat_step", mistake="the new tokens are the last of the keys: the token of a decode with 6 keys is at position 5"
)
def test_a_decode_and_a_chunk(hw: Homework) -> None:
    assert_step(hw, [1], [6], [0], 8, ["positions"])
    assert_step(hw, [2], [7], [0], 8, ["positions"])


@check("flat_step", mistake="a page may be full: raise ValueError only if a sequence has more keys than slots")
def test_a_page_that_is_just_full(hw: Homework) -> None:
    assert_step(hw, [4], [4], [0], 4, ["positions"])


@check(
    "flat_step", mistake="a slot is page * page_size + offset, and the offset continues after the keys stored before"
)
def test_slots(hw: Homework) -> None:
    assert_step(hw, [3], [3], [2], 4, ["slot_mapping"])
    assert_step(hw, [2], [4], [5], 4, ["slot_mapping"])


@check("flat_step", mistake="positions restart with each sequence, and each token goes to the page of its own sequence")
def test_three_sequences(hw: Homework) -> None:
    assert_step(hw, [1, 3, 4], [6, 7, 4], [2, 0, 3], 8, ["positions", "slot_mapping"])


@check("flat_step", mistake="qo_indptr begins with 0, ends with the number of tokens, and has B + 1 entries")
def test_qo_indptr(hw: Homework) -> None:
    assert_step(hw, [1, 3, 4], [6, 7, 4], [2, 0, 3], 8, ["qo_indptr"])


@check("flat_step", mistake="only the last token of each sequence needs logits: row qo_indptr[b + 1] - 1 of the batch")
def test_logit_rows(hw: Homework) -> None:
    assert_step(hw, [1, 3, 4], [6, 7, 4], [2, 0, 3], 8, ["logit_rows"])


@check("flat_step", mistake="raise ValueError if a sequence has more keys than its page has slots, and only then")
def test_a_full_page(hw: Homework) -> None:
    assert_step(hw, [1, 4], [4, 4], [1, 0], 4)
    assert_raises(ValueError, hw.flat_step, [1, 1], [2, 5], [0, 1], 4)


@check("flat_step", mistake="all four arrays are int64, the dtype that torch.tensor gives Python integers", costs=0.2)
def test_dtypes_of_a_step(hw: Homework) -> None:
    step = hw.flat_step([1, 3], [6, 7], [2, 0], 8)
    assert_equal([array.dtype for array in step], [torch.int64] * 4, name="the dtypes of the four arrays")


@check("flat_step", mistake="it fails for a combination of sequences that the earlier checks did not try")
def test_random_steps(hw: Homework) -> None:
    for batch_size in (1, 2, 5, 9):
        kv_lens = torch.randint(1, 17, (batch_size,)).tolist()
        num_new = [int(torch.randint(1, total + 1, ())) for total in kv_lens]
        assert_step(hw, num_new, kv_lens, torch.randperm(20)[:batch_size].tolist(), 16)


# generate_greedy ----------------------------------------------------------------------------------------------------

VOCAB, PAGE = 50, 64


class FakeModel:
    """A model whose next token depends on every token in the sequence's page, in order. It records its steps."""

    def __init__(self) -> None:
        self.steps: list[dict[int, tuple[int, list[int]]]] = []  # by page: the first position and the tokens
        self.pages: dict[int, list[int]] = {}
        self.types: set[str] = set()  # of the tokens

    def __call__(self, token_ids: list[int], step: Any) -> Tensor:
        assert len(self.steps) < 100, "run was called 100 times: the loop does not end"
        self.types |= {type(token).__name__ for token in token_ids}
        token_ids = [int(token) for token in token_ids]
        bounds, positions = step.qo_indptr.tolist(), step.positions.tolist()
        assert bounds[-1] == len(token_ids), f"{len(token_ids)} tokens, but the step describes {bounds[-1]}"
        computed, logits = {}, []
        for first, end in itertools.pairwise(bounds):
            page, start = int(step.slot_mapping[first]) // PAGE, positions[first]
            computed[page] = start, token_ids[first:end]
            stored = self.pages.setdefault(page, [])
            stored[start:] = token_ids[first:end]
            logits.append(torch.eye(VOCAB)[next_token(stored)] * 3.0 - 5.0)
        self.steps.append(computed)
        return torch.stack(logits)


def next_token(tokens: Sequence[int]) -> int:
    state = 7
    for token in tokens:
        state = (state * 31 + token + 1) % 1009
    return state % VOCAB


def expected_tokens(prompt: Sequence[int], count: int, eos: int | None = None) -> list[int]:
    tokens = list(prompt)
    while len(tokens) < len(prompt) + count and (len(tokens) == len(prompt) or tokens[-1] != eos):
        tokens.append(next_token(tokens))
    return tokens[len(prompt) :]


NEVER = VOCAB  # no token has this id


def run_greedy(
    hw: Homework, prompts: list[list[int]], eos: int = NEVER, max_tokens: int = 8
) -> tuple[list[list[int]], FakeModel]:
    model, own = FakeModel(), [list(prompt) for prompt in prompts]
    output = hw.generate_greedy(model, own, eos_token_id=eos, max_tokens=max_tokens, page_size=PAGE)
    assert output is not None, "generate_greedy returns None. Is a `return` missing?"
    return output, model


def steps_of(prompts: list[list[int]], outputs: list[list[int]]) -> list[dict[int, tuple[int, list[int]]]]:
    """The steps of a static batch: the prompts, then the newest token of each request that has not finished."""
    steps = [{b: (0, list(prompt)) for b, prompt in enumerate(prompts)}]
    for i in range(max(map(len, outputs)) - 1):
        newest = {b: (len(prompts[b]) + i, [own[i]]) for b, own in enumerate(outputs) if len(own) > i + 1}
        steps.append(newest)
    return steps


ONE, TWO = [[3, 1, 4]], [[3, 1, 4], [9, 2]]


@check("generate_greedy", mistake="the output is the token with the largest logit, without the prompt")
def test_one_token_of_output(hw: Homework) -> None:
    output, _ = run_greedy(hw, ONE, max_tokens=1)
    assert_equal(output[0][:1], expected_tokens(ONE[0], 1))


@check("generate_greedy", mistake="the prefill is one step, and computes the whole prompt")
def test_the_prompt_is_one_step(hw: Homework) -> None:
    _, model = run_greedy(hw, ONE, max_tokens=1)
    assert_equal(model.steps[0], {0: (0, [3, 1, 4])}, name="the first step")


@check("generate_greedy", mistake="compute each token once: after the prompt, a step computes only the newest token")
def test_no_token_is_computed_twice(hw: Homework) -> None:
    _, model = run_greedy(hw, ONE)
    assert_equal([len(step[0][1]) for step in model.steps[1:3]], [1, 1], name="the number of tokens in later steps")


@check("generate_greedy", mistake="the first generated token has the position len(prompt), and the next follows it")
def test_each_token_at_its_position(hw: Homework) -> None:
    _, model = run_greedy(hw, ONE)
    assert_equal([step[0][0] for step in model.steps[1:3]], [3, 4], name="the positions of later steps")


@check("generate_greedy", mistake="max_tokens counts the generated tokens: stop at exactly that many")
def test_max_tokens(hw: Homework) -> None:
    for prompt in ([3, 1, 4], [9], list(range(12))):
        for max_tokens in (1, 2, 5):
            output, _ = run_greedy(hw, [list(prompt)], max_tokens=max_tokens)
            assert_equal(output, [expected_tokens(prompt, max_tokens)])


@check("generate_greedy", mistake="the end token ends the output and is its last token")
def test_ends_at_eos(hw: Homework) -> None:
    expected = expected_tokens(ONE[0], 4)
    assert len(set(expected)) == 4
    output, _ = run_greedy(hw, ONE, eos=expected[-1], max_tokens=30)
    assert_equal(output, [expected])
    output, _ = run_greedy(hw, ONE, eos=expected[0], max_tokens=30)
    assert_equal(output, [expected[:1]])


@check("generate_greedy", mistake="an end token inside the prompt ends nothing: every turn of a chat has one")
def test_eos_in_the_prompt(hw: Homework) -> None:
    for eos in (1, 4):
        output, _ = run_greedy(hw, ONE, eos=eos, max_tokens=3)
        assert_equal(output, [expected_tokens(ONE[0], 3, eos)])


@check("generate_greedy", mistake="the last token needs no step: nothing reads the logits that would follow it")
def test_no_step_in_vain(hw: Homework) -> None:
    output, model = run_greedy(hw, ONE, max_tokens=4)
    assert_equal(len(model.steps), 4, name="the number of steps for 4 tokens")
    output, model = run_greedy(hw, ONE, eos=output[0][1], max_tokens=30)
    assert_equal(len(model.steps), 2, name="the number of steps for 2 tokens, the second one an end token")


@check("generate_greedy", mistake="all prompts are computed in the same steps, prompt b in page b")
def test_two_prompts(hw: Homework) -> None:
    output, model = run_greedy(hw, TWO, max_tokens=3)
    assert_equal(model.steps[0], {0: (0, [3, 1, 4]), 1: (0, [9, 2])}, name="the first step")
    assert_equal(output, [expected_tokens(prompt, 3) for prompt in TWO])
    assert_equal(model.steps, steps_of(TWO, output), name="the steps")


@check("generate_greedy", mistake="a request that ends leaves the batch, and the others go on, each in its own page")
def test_one_of_two_ends(hw: Homework) -> None:
    for first_to_end in (0, 1):
        eos = expected_tokens(TWO[first_to_end], 2)[1]
        expected = [expected_tokens(prompt, 6, eos) for prompt in TWO]
        assert [len(own) < 6 for own in expected] == [first_to_end == 0, first_to_end == 1]
        output, model = run_greedy(hw, TWO, eos=eos, max_tokens=6)
        assert_equal(output, expected)
        assert_equal(model.steps, steps_of(TWO, expected), name="the steps")


@check("generate_greedy", mistake="pass and return plain Python integers: .tolist() or int() makes them", costs=0.2)
def test_tokens_are_integers(hw: Homework) -> None:
    output, model = run_greedy(hw, TWO, max_tokens=2)
    kinds = {type(token).__name__ for own in output for token in own}
    assert_equal(model.types, {"int"}, name="the types of the tokens that run gets")
    assert_equal(kinds, {"int"}, name="the types of the generated tokens")


@check("generate_greedy", mistake="you modified the caller's prompts: work on lists of your own")
def test_the_prompts_are_unchanged(hw: Homework) -> None:
    prompts = [list(prompt) for prompt in TWO]
    hw.generate_greedy(FakeModel(), prompts, eos_token_id=NEVER, max_tokens=3, page_size=PAGE)
    assert_equal(prompts, TWO, name="the prompts after the call")


@check(
    "generate_greedy", mistake="it fails for a combination of prompts and limits that the earlier checks did not try"
)
def test_random_prompts(hw: Homework) -> None:
    for _ in range(20):
        lengths = torch.randint(1, 6, (int(torch.randint(1, 5, ())),)).tolist()
        prompts = [torch.randint(0, VOCAB, (length,)).tolist() for length in lengths]
        eos, max_tokens = int(torch.randint(0, VOCAB, ())), int(torch.randint(1, 20, ()))
        expected = [expected_tokens(prompt, max_tokens, eos) for prompt in prompts]
        output, model = run_greedy(hw, prompts, eos, max_tokens)
        assert_equal(output, expected)
        assert_equal(model.steps, steps_of(prompts, expected), name="the steps")


TEXTS = ["The capital of France is", "One, two, three,"]


@cache
def embedded_model() -> tuple[LLM, list[str]]:
    """The embedded model, and how it continues TEXTS in the engine."""
    llm = LLM("smollm2-135m-instruct", dtype="float32", device="cpu", attn_backend="torch", num_pages=2)
    outputs = llm.generate(TEXTS, SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True))
    return llm, [output.text for output in outputs]


@check("generate_greedy", mistake="the embedded model in your loop does not write what the engine writes", seconds=60)
def test_the_embedded_model_in_this_loop(hw: Homework) -> None:
    llm, expected = embedded_model()
    prompts = [llm.tokenizer.encode(text) for text in TEXTS]
    page_size = max(map(len, prompts)) + 8
    specs = llm.model.attention_specs
    cache = ContiguousKVCache(specs, len(prompts), page_size, torch.float32)
    backend = create_backend("torch", specs, cache, Parts())

    @torch.inference_mode()
    def run(token_ids: list[int], step: Any) -> Tensor:
        batch = StepBatch.build(
            token_ids=[int(token) for token in token_ids],
            num_new=step.qo_indptr.diff().tolist(),
            kv_lens=(step.positions[step.logit_rows] + 1).tolist(),
            pages=(step.slot_mapping[step.logit_rows] // page_size).tolist(),
            page_size=page_size,
        )
        backend.plan(batch)
        return llm.model.compute_logits(llm.model(batch.token_ids, batch.positions, backend)[batch.logit_rows])

    output = hw.generate_greedy(run, prompts, eos_token_id=NEVER, max_tokens=8, page_size=page_size)
    assert_equal([llm.tokenizer.decode(own) for own in output], expected, name="the texts")


# filter_logits ------------------------------------------------------------------------------------------------------


def kept_in_floats(row: list[float], top_k: int, top_p: float, min_p: float) -> list[bool]:
    """The specification of filter_logits, one token at a time: for each token of one row, whether it stays."""
    order = sorted(range(len(row)), key=lambda token: -row[token])
    order = order[:top_k] if top_k else order
    largest = max(row)
    total = math.fsum(math.exp(row[token] - largest) for token in order)
    smallest, reached = math.inf, 0.0
    for token in order:
        probability = math.exp(row[token] - largest) / total
        if (top_p < 1 and reached >= top_p) or probability < min_p / total:
            break
        smallest, reached = row[token], reached + probability
    return [logit >= smallest for logit in row]


def assert_filtered(
    hw: Homework, logits: Tensor, top_k: list[int], top_p: list[float], min_p: list[float], mistake: str | None = None
) -> None:
    cases = zip(logits.tolist(), top_k, top_p, min_p, strict=True)
    keep = torch.tensor([kept_in_floats(*case) for case in cases])
    expected = logits.masked_fill(~keep, -math.inf)
    got = hw.filter_logits(logits.clone(), torch.tensor(top_k), torch.tensor(top_p), torch.tensor(min_p))
    assert_values(got, expected, atol=1e-6, mistake=mistake)


def logits_of(*probabilities: float) -> Tensor:
    return torch.tensor([probabilities]).log()


@check("filter_logits", mistake="top_k 0, top_p 1 and min_p 0 keep every token, and kept logits are unchanged")
def test_nothing_to_filter(hw: Homework) -> None:
    assert_filtered(hw, logits_of(0.1, 0.4, 0.2, 0.3), [0], [1.0], [0.0])
    assert_filtered(hw, torch.randn(1, 50) * 3, [0], [1.0], [0.0])


@check("filter_logits", mistake="keep the k largest logits, wherever they are in the row")
def test_top_k(hw: Homework) -> None:
    for k in (1, 2, 3):
        assert_filtered(hw, logits_of(0.1, 0.4, 0.2, 0.3), [k], [1.0], [0.0])


@check("filter_logits", mistake="a k larger than the vocabulary keeps every token")
def test_more_than_there_are(hw: Homework) -> None:
    assert_filtered(hw, logits_of(0.1, 0.4, 0.2, 0.3), [9], [1.0], [0.0])


@check("filter_logits", mistake="the set must reach top_p: the token that crosses top_p still belongs to it")
def test_top_p(hw: Homework) -> None:
    for top_p in (0.5, 0.75, 0.95):
        assert_filtered(hw, logits_of(0.1, 0.4, 0.2, 0.3), [0], [top_p], [0.0])


@check("filter_logits", mistake="the largest is always kept, even if it alone is more than top_p")
def test_the_largest_stays(hw: Homework) -> None:
    assert_filtered(hw, logits_of(0.05, 0.9, 0.05), [0], [0.3], [0.0])


@check("filter_logits", mistake="min_p is a share of the largest probability, not a probability itself")
def test_min_p(hw: Homework) -> None:
    for min_p in (0.3, 0.6, 1.0):
        assert_filtered(hw, logits_of(0.1, 0.4, 0.2, 0.3), [0], [1.0], [min_p])


@check("filter_logits", mistake="ties are kept: compare with the smallest logit kept, not with a rank")
def test_ties(hw: Homework) -> None:
    logits = logits_of(0.2, 0.4, 0.2, 0.2)
    assert_filtered(hw, logits, [2], [1.0], [0.0])
    assert_filtered(hw, logits, [0], [0.5], [0.0])
    assert_filtered(hw, torch.zeros(1, 5), [1], [1.0], [0.0])


@check("filter_logits", mistake="top_p sees only what top_k has kept, renormalized to a sum of 1")
def test_top_p_after_top_k(hw: Homework) -> None:
    assert_filtered(hw, logits_of(0.3, 0.25, 0.2, 0.15, 0.1), [3], [0.7], [0.0])
    assert_filtered(hw, logits_of(0.4, 0.35, 0.05, 0.15, 0.05), [2], [0.5], [0.0])


@check(
    "filter_logits", mistake="ties are decided once, after all three filters: each filter alone keeps no extra tokens"
)
def test_ties_are_decided_at_the_end(hw: Homework) -> None:
    logits = logits_of(0.4, 0.2, 0.2, 0.2)
    kept = torch.tensor([[True, False, False, False]])
    got = hw.filter_logits(logits.clone(), torch.tensor([2]), torch.tensor([0.6]), torch.tensor([0.0]))
    assert_values(got, logits.masked_fill(~kept, -math.inf), atol=1e-6)


@check("filter_logits", mistake="a sum equal to top_p has reached it; a probability equal to min_p * largest is kept")
def test_on_the_boundary(hw: Homework) -> None:
    logits = logits_of(0.5, 0.25, 0.125, 0.125)
    assert logits.softmax(-1).tolist() == [[0.5, 0.25, 0.125, 0.125]], "these probabilities are exact in float32"
    for top_p, min_p, num_kept in ((0.5, 0.0, 1), (0.75, 0.0, 2), (1.0, 1.0, 1), (1.0, 0.5, 2), (1.0, 0.25, 4)):
        got = hw.filter_logits(logits.clone(), torch.tensor([0]), torch.tensor([top_p]), torch.tensor([min_p]))
        expected = logits.masked_fill(torch.arange(4) >= num_kept, -math.inf)
        assert_values(got, expected, atol=1e-6, name=f"with top_p {top_p} and min_p {min_p}, your result")


@check("filter_logits", mistake="top_p = 1 keeps every token, even the last one, which a rounded sum would drop")
def test_top_p_of_one(hw: Homework) -> None:
    logits = torch.cat([torch.zeros(1, 4), torch.full((1, 30_000), -25.0)], -1)
    assert_filtered(hw, logits, [0], [1.0], [0.0])


@check("filter_logits", mistake="each row has a top_k, a top_p and a min_p of its own")
def test_rows_have_their_own_limits(hw: Homework) -> None:
    logits = logits_of(0.1, 0.4, 0.2, 0.3).expand(5, -1)
    assert_filtered(hw, logits, [0, 2, 0, 0, 3], [1.0, 1.0, 0.5, 1.0, 0.4], [0.0, 0.0, 0.0, 0.6, 0.0])


@check("filter_logits", mistake="you modified the logits that you were given: the caller may still need them")
def test_the_logits_are_unchanged(hw: Homework) -> None:
    logits = logits_of(0.1, 0.4, 0.2, 0.3)
    before = logits.clone()
    hw.filter_logits(logits, torch.tensor([2]), torch.tensor([0.5]), torch.tensor([0.1]))
    assert_close(logits, before, atol=0, name="logits")


@check("filter_logits", mistake="top_p comes before min_p: it sees the tokens that min_p is about to drop")
def test_min_p_after_top_p(hw: Homework) -> None:
    assert_filtered(hw, logits_of(0.4, 0.3, 0.2, 0.1), [0], [0.5], [0.6])  # of 0.4 and 0.3 alone, 0.4 is 57%


@check(
    "filter_logits",
    mistake="compute in the dtype of `logits` and return it: in float32, close float64 logits become ties",
    costs=0.2,
)
def test_dtypes_of_the_logits(hw: Homework) -> None:
    for dtype, step in ((torch.float64, 1e-12), (torch.float32, 1e-5)):
        logits = (1 + step * torch.randperm(20).double()).to(dtype)[None]
        got = hw.filter_logits(logits.clone(), torch.tensor([3]), torch.tensor([1.0]), torch.tensor([0.0]))
        num_kept = int(got.isfinite().sum())
        assert num_kept == 3, f"top_k = 3 keeps {num_kept} of 20 {dtype} logits, which all differ"
        assert_close(got, logits.masked_fill(logits < logits.topk(3).values[:, -1:], -math.inf), atol=0)


@check("filter_logits", mistake="it fails for a combination of the three filters that the earlier checks did not try")
def test_random_filters(hw: Homework) -> None:
    def pick(*values: float) -> list[Any]:
        return [values[int(i)] for i in torch.randint(0, len(values), (6,))]

    for _ in range(20):
        logits = torch.randn(6, 30) * 3
        assert_filtered(hw, logits, pick(0, 0, 1, 4, 20), pick(1.0, 1.0, 0.9, 0.35), pick(0.0, 0.0, 0.03, 0.4))


# sample -------------------------------------------------------------------------------------------------------------


def draw(
    hw: Homework, logits: Tensor, params: SamplingParams, seeds: Sequence[int], positions: Sequence[int]
) -> Tensor:
    """Tokens of one row of logits under many seeds and positions."""
    times = len(seeds)
    got = hw.sample(logits.expand(times, -1).clone(), SamplingBatch.build([params] * times, seeds, positions))
    assert_close(got, got.new_zeros(times) if isinstance(got, Tensor) else torch.zeros(times).long(), atol=math.inf)
    return got


def assert_follows(probabilities: Tensor, tokens: Tensor, mistake: str | None = None) -> None:
    """Pearson's chi-squared test, at a level that a right sampler misses once in ten million tries."""
    counts = torch.bincount(tokens.long(), minlength=len(probabilities)).double()
    expected = probabilities.double() * len(tokens)
    possible = probabilities > 0
    shares = ", ".join(f"{count / len(tokens):.3f}" for count in counts)
    wanted = ", ".join(f"{p:.3f}" for p in probabilities)
    message = f"in {len(tokens):,} draws the tokens have the shares {shares}; their probabilities are {wanted}"
    assert counts[~possible].sum() == 0, message
    freedom = int(possible.sum()) - 1
    statistic = float(((counts - expected)[possible] ** 2 / expected[possible]).sum())
    assert statistic < freedom + 6 * math.sqrt(2 * freedom) + 20, message


DRAWS = 4000
FIVE = torch.tensor([[0.4, 0.05, 0.3, 0.1, 0.15]]).log() + 2.0


@check("sample", mistake="a temperature of 0 takes the token with the largest logit")
def test_greedy(hw: Homework) -> None:
    logits = torch.randn(6, 20)
    got = hw.sample(logits.clone(), SamplingBatch.build([SamplingParams(temperature=0.0)] * 6, range(6), range(6)))
    assert_values(got, logits.argmax(-1))


@check("sample", mistake="temperature 0 is the argmax itself, not a small temperature with noise")
def test_greedy_among_close_logits(hw: Homework) -> None:
    logits = 1.0 + 1e-6 * torch.stack([torch.randperm(20) for _ in range(40)])
    got = hw.sample(logits.clone(), SamplingBatch.build([SamplingParams(temperature=0.0)] * 40, range(40), range(40)))
    assert_values(got, logits.argmax(-1))


@check("sample", mistake="at a temperature of 1, tokens are drawn from the softmax of the logits")
def test_draws_follow_the_softmax(hw: Homework) -> None:
    assert_follows(FIVE[0].softmax(-1), draw(hw, FIVE, SamplingParams(), range(DRAWS), range(3, DRAWS + 3)))


@check("sample", mistake="divide the logits by the temperature: below 1, likely tokens become likelier")
def test_temperature(hw: Homework) -> None:
    for temperature in (0.5, 2.0):
        tokens = draw(hw, FIVE, SamplingParams(temperature=temperature), range(DRAWS), range(3, DRAWS + 3))
        assert_follows((FIVE[0] / temperature).softmax(-1), tokens)


@check("sample", mistake="apply the filters after the temperature; a token that they drop is never drawn")
def test_filters_come_after_the_temperature(hw: Homework) -> None:
    for params in (SamplingParams(top_k=2), SamplingParams(top_p=0.6), SamplingParams(min_p=0.5)):
        kept = FIVE.masked_fill(torch.tensor([[False, True, False, True, True]]), -math.inf)
        assert_follows(kept[0].softmax(-1), draw(hw, FIVE, params, range(DRAWS), range(3, DRAWS + 3)))
    # At a temperature of 0.5 the likeliest token has more than half of the probability, before that it has not.
    params = SamplingParams(temperature=0.5, top_p=0.55)
    assert_values(draw(hw, FIVE, params, range(50), range(50)), torch.zeros(50).long())


@check("sample", mistake="each row has its own parameters; a greedy row next to a sampled one is still greedy")
def test_rows_have_their_own_parameters(hw: Homework) -> None:
    logits = FIVE.expand(300, -1).clone()
    params = [SamplingParams(temperature=0.0), SamplingParams(), SamplingParams(top_k=1)] * 100
    tokens = hw.sample(logits, SamplingBatch.build(params, range(300), range(300)))
    assert_values(tokens[0::3], torch.zeros(100).long(), name="the tokens of greedy rows")
    assert_values(tokens[2::3], torch.zeros(100).long(), name="the tokens of rows with top_k = 1")
    assert len(set(tokens[1::3].tolist())) > 2, "sampled rows next to greedy ones all take the same token"


@check("sample", mistake="the same row gives the same token in every call: do not use a generator that advances")
def test_the_same_again(hw: Homework) -> None:
    first = draw(hw, FIVE, SamplingParams(), range(200), range(200))
    torch.manual_seed(123)
    again = draw(hw, FIVE, SamplingParams(), range(200), range(200))
    assert_values(again, first, name="the second call")


@check("sample", mistake="different seeds draw independently: use the seed, and all of its 64 bits")
def test_seeds_are_independent(hw: Homework) -> None:
    probabilities = FIVE[0].softmax(-1)
    assert_follows(probabilities, draw(hw, FIVE, SamplingParams(), range(DRAWS), [9] * DRAWS))
    high = [(seed - 100) * 2**32 for seed in range(200)]
    assert len(set(draw(hw, FIVE, SamplingParams(), high, [9] * 200).tolist())) > 2, (
        "seeds that differ only above their lowest 32 bits all draw the same token"
    )


@check("sample", mistake="each position draws independently: noise from the seed alone repeats itself")
def test_positions_are_independent(hw: Homework) -> None:
    tokens = draw(hw, FIVE, SamplingParams(), [9] * DRAWS, range(DRAWS))
    assert_follows(FIVE[0].softmax(-1), tokens)


@check("sample", mistake="do not add seed and position: seed 5 at position 7 would repeat seed 7 at position 5")
def test_seed_and_position_are_not_added(hw: Homework) -> None:
    pairs = [(seed, position) for seed in range(20) for position in range(seed)]
    one = draw(hw, FIVE, SamplingParams(), [s for s, _ in pairs], [p for _, p in pairs])
    other = draw(hw, FIVE, SamplingParams(), [p for _, p in pairs], [s for s, _ in pairs])
    share = (one == other).double().mean()
    assert share < 0.6, f"swapping seed and position leaves {share:.0%} of the tokens the same; by chance it is 29%"
    shifted = draw(hw, FIVE, SamplingParams(), [s + 1 for s, _ in pairs], [p - 1 for _, p in pairs])
    share = (one == shifted).double().mean()
    assert share < 0.6, f"seed + 1 at position - 1 repeats {share:.0%} of the tokens; by chance it is 29%"


@check("sample", mistake="a row draws the same token alone and in a batch: its index must not affect its noise")
def test_the_rest_of_the_batch_does_not_matter(hw: Homework) -> None:
    rows = 40
    logits = torch.randn(rows, 12)
    kinds = (SamplingParams(), SamplingParams(temperature=0.7, top_k=5), SamplingParams(top_p=0.8))
    params = [kinds[row % 3] for row in range(rows)]
    seeds, positions = list(range(50, 50 + rows)), [row % 7 for row in range(rows)]
    together = hw.sample(logits.clone(), SamplingBatch.build(params, seeds, positions))
    order = torch.randperm(rows).tolist()
    shuffled = hw.sample(
        logits[order],
        SamplingBatch.build([params[i] for i in order], [seeds[i] for i in order], [positions[i] for i in order]),
    )
    assert_values(shuffled, together[order], name="the batch in another order")
    for i in range(rows):
        alone = hw.sample(
            logits[i : i + 1].clone(), SamplingBatch.build(params[i : i + 1], seeds[i : i + 1], positions[i : i + 1])
        )
        assert_values(alone, together[i : i + 1], name=f"row {i} alone")


@check("sample", mistake="you modified the logits that you were given: `/=` writes into them")
def test_sample_leaves_the_logits(hw: Homework) -> None:
    logits = FIVE.expand(3, -1).clone()
    before = logits.clone()
    params = [SamplingParams(temperature=0.5), SamplingParams(top_k=2), SamplingParams(temperature=0.0)]
    hw.sample(logits, SamplingBatch.build(params, range(3), range(3)))
    assert_equal(logits, before, name="logits")


@check("sample", mistake="a token is an integer: argmax gives one", costs=0.2)
def test_tokens_have_an_integer_dtype(hw: Homework) -> None:
    tokens = draw(hw, FIVE, SamplingParams(), range(4), range(4))
    assert not tokens.is_floating_point(), f"the tokens have dtype {tokens.dtype}".replace("torch.", "")


# scan_stop ----------------------------------------------------------------------------------------------------------


def earliest(text: str, stop: Sequence[str]) -> int | None:
    """Where the text is cut, letter by letter: the first end of a stop string decides, the longest one ending there."""
    for end in range(1, len(text) + 1):
        starts = [end - len(s) for s in stop if text[:end].endswith(s)]
        if starts:
            return min(starts)
    return None


def assert_scan(hw: Homework, text: str, stop: Sequence[str], expected: tuple[str, str, bool]) -> None:
    got = hw.scan_stop(text, stop)
    assert isinstance(got, tuple) and len(got) == 3, (
        f"scan_stop returns {got!r}; it should return (safe, held, stopped)"
    )
    assert_equal(got, expected, name=f"scan_stop({text!r}, {list(stop)})")


@check("scan_stop", mistake="without a stop string everything is safe")
def test_nothing_to_stop_at(hw: Homework) -> None:
    assert_scan(hw, "one two", [], ("one two", "", False))


@check(
    "scan_stop", mistake="hold only an ending that is the beginning of a stop string, not a fixed number of characters"
)
def test_nothing_to_hold(hw: Homework) -> None:
    assert_scan(hw, "one two", ["END"], ("one two", "", False))
    assert_scan(hw, "", ["END"], ("", "", False))


@check("scan_stop", mistake="a stop string ends the text: safe is the text before it, without the stop string")
def test_stops_at_the_end(hw: Homework) -> None:
    assert_scan(hw, "one END", ["END"], ("one ", "", True))
    assert_scan(hw, "END", ["END"], ("", "", True))


@check("scan_stop", mistake="drop what follows the stop string: one token may contain more than its end")
def test_the_rest_is_dropped(hw: Homework) -> None:
    assert_scan(hw, "one END two", ["END"], ("one ", "", True))
    assert_scan(hw, "a.b.c", ["."], ("a", "", True))


@check("scan_stop", mistake="hold an ending that may become a stop string: shown text cannot be recalled")
def test_a_beginning_is_held(hw: Homework) -> None:
    assert_scan(hw, "one E", ["END"], ("one ", "E", False))
    assert_scan(hw, "one EN", ["END"], ("one ", "EN", False))


@check("scan_stop", mistake="any of the stop strings may begin here, not only the first of them")
def test_a_beginning_of_any_stop_string(hw: Homework) -> None:
    assert_scan(hw, "one E", ["STOP", "END"], ("one ", "E", False))
    assert_scan(hw, "one S", ["STOP", "END"], ("one ", "S", False))


@check("scan_stop", mistake="only the ending can still become a stop string: a beginning inside the text is safe")
def test_a_beginning_in_the_middle_is_safe(hw: Homework) -> None:
    assert_scan(hw, "ENTER", ["END"], ("ENTER", "", False))
    assert_scan(hw, "one E two", ["END"], ("one E two", "", False))


@check("scan_stop", mistake="hold the longest such ending: a stop string may contain its own beginning")
def test_the_longest_beginning_is_held(hw: Homework) -> None:
    assert_scan(hw, "xaa", ["aab"], ("x", "aa", False))
    assert_scan(hw, "aaa", ["aab"], ("a", "aa", False))
    assert_scan(hw, "-E\n", ["\n\n", "E\nX"], ("-", "E\n", False))


@check("scan_stop", mistake="of several stop strings, the first in the text counts, not the first in the list")
def test_the_first_in_the_text_counts(hw: Homework) -> None:
    assert_scan(hw, "one STOP two END", ["END", "STOP"], ("one ", "", True))
    assert_scan(hw, "one STOP two E", ["END", "STOP"], ("one ", "", True))


@check(
    "scan_stop", mistake="the stop string that is complete first ends the text; of two that end together, the longer"
)
def test_complete_first(hw: Homework) -> None:
    assert_scan(hw, "abcd", ["abcd", "bc"], ("a", "", True))
    assert_scan(hw, "abc", ["bc", "abc"], ("", "", True))


@check("scan_stop", mistake="the same text, cut into different pieces, is shown differently")
def test_however_the_text_is_cut(hw: Homework) -> None:
    def letters(count: int) -> str:
        return "".join("abc"[int(i)] for i in torch.randint(0, 3, (count,)))

    for _ in range(150):
        text = letters(12)
        stop = [letters(int(torch.randint(1, 5, ()))) for _ in range(int(torch.randint(1, 4, ())))]
        shown, held, stopped, rest = "", "", False, text
        while rest and not stopped:
            cut = int(torch.randint(1, 5, ()))
            got = hw.scan_stop(held + rest[:cut], stop)
            assert isinstance(got, tuple) and len(got) == 3, f"scan_stop returns {got!r} for {held + rest[:cut]!r}"
            safe, held, stopped = got
            shown, rest = shown + safe, rest[cut:]
        end = earliest(text, stop)
        told = f"with the stop strings {stop}, the text {text!r} in pieces shows {shown + held!r}"
        assert stopped == (end is not None), f"{told} and {'stops' if stopped else 'does not stop'}"
        assert shown + held == text[:end], f"{told}; it should show {text[:end]!r}"


# tokens_per_second --------------------------------------------------------------------------------------------------

SHAPE = ModelShape(
    hidden_size=6, num_layers=3, num_qo_heads=4, num_kv_heads=2, head_dim=5, intermediate_size=7, vocab_size=11
)
SLOW_MEMORY = Machine("slow memory", "float32", bandwidth=1000.0, flops=1e18)
SLOW_ARITHMETIC = Machine("slow arithmetic", "float32", bandwidth=1e18, flops=1000.0)


def count_numbers(shape: ModelShape) -> tuple[int, int]:
    """Numbers in the matrices, one matrix at a time, and numbers in the cache for one token."""
    q, kv = shape.num_qo_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    h, i = shape.hidden_size, shape.intermediate_size
    matrices = [(q, h), (kv, h), (kv, h), (h, q), (i, h), (i, h), (h, i)] * shape.num_layers + [(shape.vocab_size, h)]
    return sum(rows * columns for rows, columns in matrices), shape.num_layers * 2 * kv


def seconds_of_bytes(shape: ModelShape, machine: Machine, batch_size: int, context: int, dtype_bytes: int) -> float:
    weights, cache = count_numbers(shape)
    return (weights + batch_size * context * cache) * dtype_bytes / machine.bandwidth


def seconds_of_flops(shape: ModelShape, machine: Machine, batch_size: int, context: int) -> float:
    pairs = shape.num_layers * shape.num_qo_heads * context
    return batch_size * (2 * count_numbers(shape)[0] + 4 * shape.head_dim * pairs) / machine.flops


def assert_rate(
    hw: Homework, machine: Machine, batch_size: int, context: int, dtype_bytes: int, expected: float
) -> None:
    got = hw.tokens_per_second(SHAPE, machine, batch_size, context, dtype_bytes)
    assert_close(got, expected, atol=0, rtol=1e-9, name="tokens per second")


@check(
    "tokens_per_second", mistake="the weights: q, k, v, o, gate, up and down in each layer, and one vocabulary matrix"
)
def test_bytes_of_the_weights(hw: Homework) -> None:
    assert_rate(hw, SLOW_MEMORY, 1, 0, 1, 1 / seconds_of_bytes(SHAPE, SLOW_MEMORY, 1, 0, 1))


@check("tokens_per_second", mistake="every number of the weights and the cache has dtype_bytes bytes")
def test_bytes_of_a_number(hw: Homework) -> None:
    assert_rate(hw, SLOW_MEMORY, 1, 0, 4, 1 / seconds_of_bytes(SHAPE, SLOW_MEMORY, 1, 0, 4))


@check(
    "tokens_per_second",
    mistake="the cache has a key and a value of num_kv_heads heads in every layer for each token of context",
)
def test_bytes_of_the_cache(hw: Homework) -> None:
    assert_rate(hw, SLOW_MEMORY, 1, 100, 2, 1 / seconds_of_bytes(SHAPE, SLOW_MEMORY, 1, 100, 2))


@check("tokens_per_second", mistake="a step generates one token for each sequence, and reads the weights once for all")
def test_a_batch_shares_the_weights(hw: Homework) -> None:
    assert_rate(hw, SLOW_MEMORY, 8, 0, 2, 8 / seconds_of_bytes(SHAPE, SLOW_MEMORY, 8, 0, 2))


@check("tokens_per_second", mistake="sequences share no keys: each reads its own")
def test_a_batch_does_not_share_the_cache(hw: Homework) -> None:
    assert_rate(hw, SLOW_MEMORY, 8, 100, 2, 8 / seconds_of_bytes(SHAPE, SLOW_MEMORY, 8, 100, 2))


@check("tokens_per_second", mistake="for each sequence, every number of the matrices costs 2 FLOPs")
def test_flops_of_the_weights(hw: Homework) -> None:
    assert_rate(hw, SLOW_ARITHMETIC, 1, 0, 2, 1 / seconds_of_flops(SHAPE, SLOW_ARITHMETIC, 1, 0))
    assert_rate(hw, SLOW_ARITHMETIC, 8, 0, 2, 8 / seconds_of_flops(SHAPE, SLOW_ARITHMETIC, 8, 0))


@check("tokens_per_second", mistake="attention costs 4 * head_dim FLOPs for each query head, key and layer")
def test_flops_of_attention(hw: Homework) -> None:
    assert_rate(hw, SLOW_ARITHMETIC, 2, 100, 2, 2 / seconds_of_flops(SHAPE, SLOW_ARITHMETIC, 2, 100))


@check(
    "tokens_per_second",
    mistake="memory and arithmetic work at the same time: take the longer of the two times, not the sum",
)
def test_the_longer_of_the_two(hw: Homework) -> None:
    balanced = Machine("both slow", "float32", bandwidth=1000.0, flops=2000.0)
    for batch_size in (1, 2, 64):
        bytes_, flops = (
            seconds_of_bytes(SHAPE, balanced, batch_size, 10, 2),
            seconds_of_flops(SHAPE, balanced, batch_size, 10),
        )
        assert_rate(hw, balanced, batch_size, 10, 2, batch_size / max(bytes_, flops))
