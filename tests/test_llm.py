"""`LLM` with the embedded model: real text, equal to transformers'; requests that fail leave the others alone."""

import pytest
import torch

from mini_engine import LLM, SamplingParams
from mini_engine.errors import ConfigError, ModelLoadError, RequestError
from mini_engine.models.weights import open_checkpoint

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
    return LLM(dtype="float32", max_batch_size=8)


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


@pytest.mark.gpu
def test_bfloat16_on_the_gpu_agrees_with_float32_on_the_cpu(llm, prompts):
    """Same text for as long as the two roundings allow: the first tokens of each answer, and the logits."""
    gpu = LLM(dtype="bfloat16", device="cuda")
    short = SamplingParams(temperature=0.0, max_tokens=32)
    pairs = zip(llm.generate(prompts, short), gpu.generate(prompts, short), strict=True)
    agreements = [
        next((i for i, (a, b) in enumerate(zip(x.token_ids, y.token_ids, strict=False)) if a != b), len(x.token_ids))
        for x, y in pairs
    ]
    print("tokens until the first difference:", agreements)
    assert sum(agreements) / len(agreements) >= 8
