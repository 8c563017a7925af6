"""`LLM` with the embedded model: real text, equal to transformers'; requests that fail leave the others alone."""

import pytest
import torch

from mini_engine import LLM, SamplingParams
from mini_engine.errors import ConfigError, ModelLoadError, RequestError
from mini_engine.llm import MOST_CPU_CACHE_BYTES, default_num_pages
from mini_engine.loading.checkpoint import open_checkpoint
from tests.models.families import our_model, transformers_model
from tests.test_engine import WORDS, alone

QUESTIONS = [
    "What is the capital of France?",
    "Explain in two sentences why the sky is blue.",
    "Write a haiku about a library at night.",
    "Count from one to ten.",
    "Übersetze ins Englische: Guten Morgen! 🌞",
]
GREEDY = SamplingParams(temperature=0.0, max_tokens=64)


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM(dtype="float32", device="cpu", max_batch_size=8)


@pytest.fixture(scope="module")
def prompts(llm) -> list[list[int]]:
    return [llm.chat_prompt([{"role": "user", "content": question}]) for question in QUESTIONS]


def test_greedy_text_equals_transformers(llm, prompts):
    from transformers import AutoModelForCausalLM

    theirs = AutoModelForCausalLM.from_pretrained(open_checkpoint("smollm2-135m-instruct").path, dtype=torch.float32)
    outputs = llm.generate(prompts, GREEDY)
    for prompt, output in zip(prompts, outputs, strict=True):
        want = theirs.generate(torch.tensor([prompt]), do_sample=False, max_new_tokens=64)[0, len(prompt) :].tolist()
        assert output.token_ids == want
        assert output.text == llm.tokenizer.decode(want, skip_special_tokens=True)
    assert "Paris" in outputs[0].text


def test_streaming_gives_the_same_text(llm, prompts):
    whole = llm.generate(prompts[4], GREEDY)[0].text
    assert "".join(llm.stream(prompts[4], GREEDY)) == whole


def test_more_requests_than_fit_at_once(llm, prompts):
    short = SamplingParams(temperature=0.0, max_tokens=4)
    many = [prompts[i % 5] for i in range(11)]
    outputs = llm.generate(many, short)
    assert [o.prompt for o in outputs] == many
    assert all(outputs[i].token_ids == outputs[i % 5].token_ids for i in range(11))


def test_stop_string_that_straddles_tokens_is_cut_off(llm, prompts):
    free = llm.generate(prompts[0], GREEDY)[0]
    assert free.text.startswith("The capital of France is Paris")
    stopped = llm.generate(prompts[0], SamplingParams(temperature=0.0, max_tokens=64, stop="ance is Par"))[0]
    assert stopped.text == "The capital of Fr"
    assert stopped.finish_reason == "stop"


def test_a_request_that_fails_leaves_the_others_untouched(llm, prompts):
    short = SamplingParams(temperature=0.0, max_tokens=5)
    alone = llm.generate(prompts[0], short)[0]
    bad = [[], [10**9], [1] * 9000]
    outputs = llm.generate([bad[0], prompts[0], bad[1], bad[2]], short)
    assert outputs[1].token_ids == alone.token_ids
    assert [o.finish_reason for o in outputs] == ["error", "length", "error", "error"]
    for output, message in zip([outputs[0], outputs[2], outputs[3]], ["empty", "token ids", "shorten"], strict=True):
        assert message in str(output.error)


@pytest.mark.parametrize(("prompt", "message"), [("", "empty"), ([1] * 8192, "8192"), ([-1], "token ids")])
def test_a_single_bad_prompt_is_raised(llm, prompt, message):
    with pytest.raises(RequestError, match=message):
        llm.generate(prompt)


def test_numbers_of_prompts_and_params_must_agree(llm, prompts):
    with pytest.raises(RequestError, match="2 prompts but 1"):
        llm.generate(prompts[:2], [GREEDY])


def test_chat_templates_that_do_not_work_are_named(llm):
    for template in ("{% for %}", "{{ messages.nothing.here }}", "{{ raise_exception('no') }}"):
        with pytest.raises(RequestError, match="chat template"):
            llm.chat_prompt([{"role": "user", "content": "hi"}], chat_template=template)
    own = llm.tokenizer.chat_template
    llm.tokenizer.chat_template = None
    try:
        with pytest.raises(RequestError, match="no chat template"):
            llm.chat([{"role": "user", "content": "hi"}])
    finally:
        llm.tokenizer.chat_template = own


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"attn_backend": "nothing"}, ConfigError, "choose one of"),
        ({"dtype": "int4"}, ConfigError, "choose auto"),
        ({"device": "tpu"}, ConfigError, "choose auto"),
        ({"max_batch_size": 0}, ConfigError, "1 or more"),
        ({"max_model_len": 10**6}, ConfigError, "8192"),
        ({"model": "no/such-model"}, ModelLoadError, "no/such-model"),
        ({"model": "/no/such/folder"}, ModelLoadError, "/no/such/folder"),
    ],
)
def test_impossible_options_are_refused(options, error, message):
    with pytest.raises(error, match=message):
        LLM(**options)


@pytest.fixture(scope="module", params=["qwen3", "gpt2"])
def folder(request, tmp_path_factory):
    """A tiny model in a folder, with its tokenizer."""
    path = tmp_path_factory.mktemp(request.param)
    transformers_model(request.param, seed=2, dtype=torch.float64).save_pretrained(path)
    WORDS.save_pretrained(path)
    return path


@pytest.mark.parametrize(("attn_backend", "window"), [("torch", None), ("torch", 6), ("flex", 6)])
def test_tokens_are_those_of_a_run_alone(folder, attn_backend, window):
    """From a folder to tokens, in a pool where prefixes are shared and sequences preempted."""
    tiny = LLM(
        folder, dtype="float64", device="cpu", attn_backend=attn_backend, num_pages=12, page_size=2, max_batch_size=3,
        max_num_batched_tokens=8, max_model_len=24, sliding_window=window, prefix_sharing=True,
    )  # fmt: skip
    prompts = [[5, 9, 33, 7, 21, 6, 40], [5, 9, 33, 7, 21, 8], [5, 9, 33, 7, 21, 6, 41, 50], [9]]
    params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
    outputs = tiny.generate(prompts, params)
    assert [o.token_ids for o in outputs] == [alone(tiny.model, prompt, params, window) for prompt in prompts]
    assert tiny.engine.metrics.shared_tokens > 0
    assert window is not None or tiny.engine.metrics.preemptions > 0
    assert tiny.engine.page_table.num_free_pages == 12


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_pages": 0}, "num_pages is 0"),
        ({"num_pages": -5}, "num_pages is -5"),
        ({"page_size": 0}, "page_size is 0"),
        ({"page_size": -1}, "page_size is -1"),
        ({"sliding_window": 0}, "sliding_window is 0"),
        ({"max_model_len": 1}, "takes 2 to 128"),
        ({"max_num_batched_tokens": 0}, "max_num_batched_tokens is 0"),
        ({"attn_backend": "flex", "page_size": 100}, "multiple of 16; page_size is 100"),
    ],
)
def test_pools_and_steps_that_cannot_be_are_refused(folder, options, message):
    with pytest.raises(ConfigError, match=message):
        LLM(folder, device="cpu", **options)


def test_a_pool_too_small_for_a_request_refuses_it_alone(folder):
    tiny = LLM(folder, dtype="float64", device="cpu", num_pages=2, page_size=4)
    short = SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True)
    large, small = tiny.generate([[5] * 6, [5] * 5], short)
    assert isinstance(large.error, RequestError) and "fill 3 pages" in str(large.error)
    assert small.token_ids == alone(tiny.model, [5] * 5, short)


def test_pages_by_default_are_as_many_as_can_be_used_or_as_the_memory_holds(monkeypatch):
    model = our_model(transformers_model("llama"))
    page_bytes = 16 * 3 * 2 * 2 * 8 * 4  # tokens, layers, keys and values, heads, size, bytes

    def free(num_bytes: int) -> None:
        monkeypatch.setattr("psutil.virtual_memory", lambda: type("Memory", (), {"available": 2 * num_bytes}))

    free(10 * page_bytes + page_bytes // 2)
    assert default_num_pages(model, page_size=16, most=7) == 7
    assert default_num_pages(model, page_size=16, most=10**6) == 10
    free(page_bytes - 1)
    with pytest.raises(ConfigError, match=f"takes {page_bytes} bytes and {page_bytes - 1} are free; lower page_size"):
        default_num_pages(model, page_size=16, most=7)
    free(100 * MOST_CPU_CACHE_BYTES)
    assert default_num_pages(model, page_size=16, most=10**9) == MOST_CPU_CACHE_BYTES // page_bytes


@pytest.mark.gpu
@pytest.mark.parametrize("attn_backend", ["torch", "flex"])
def test_bfloat16_on_the_gpu_agrees_with_float32_on_the_cpu(llm, prompts, attn_backend):
    """Same text for as long as the two roundings allow: the first tokens of each answer, and the logits."""
    gpu = LLM(dtype="bfloat16", device="cuda", attn_backend=attn_backend)
    short = SamplingParams(temperature=0.0, max_tokens=32)
    pairs = zip(llm.generate(prompts, short), gpu.generate(prompts, short), strict=True)
    agreements = [
        next((i for i, (a, b) in enumerate(zip(x.token_ids, y.token_ids, strict=False)) if a != b), len(x.token_ids))
        for x, y in pairs
    ]
    print("tokens until the first difference:", agreements)
    assert sum(agreements) / len(agreements) >= 8
