"""`LLM` with the embedded model: real text, equal to transformers'; conversations; models from folders; options."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from mini_engine import LLM, Inference, SamplingParams, chat_template
from mini_engine.config import EngineConfig
from mini_engine.errors import ConfigError, ModelLoadError, RequestError
from mini_engine.loading.checkpoint import open_checkpoint
from tests.helpers import WORDS, alone, check_nothing_leaked, save_tiny_model
from tests.models.families import transformers_model

QUESTIONS = [
    "What is the capital of France?",
    "Count from one to ten.",
    "Übersetze ins Englische: Guten Morgen! 🌞",
]
GREEDY = SamplingParams(temperature=0.0, max_tokens=12)


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM(dtype="float32", device="cpu", max_batch_size=8, num_pages=64, page_size=16)


@pytest.fixture(scope="module")
def prompts(llm) -> list[list[int]]:
    return [llm.chat_prompt([{"role": "user", "content": question}]) for question in QUESTIONS]


# --- real text -------------------------------------------------------------------------------------------------------


def test_greedy_text_equals_transformers_however_it_is_read(llm, prompts):
    """At the end, step by step, from shared prefixes in chunks at a pipeline depth of 1, or by transformers' layers."""
    from transformers import AutoModelForCausalLM

    theirs = AutoModelForCausalLM.from_pretrained(open_checkpoint("smollm2-135m-instruct").path, dtype=torch.float32)
    outputs = llm.generate(prompts, GREEDY)
    for prompt, output in zip(prompts, outputs, strict=True):
        want = theirs.generate(torch.tensor([prompt]), do_sample=False, max_new_tokens=12)[0, len(prompt) :].tolist()
        assert output.token_ids == want
        assert output.text == llm.tokenizer.decode(want, skip_special_tokens=True)
    assert "Paris" in outputs[0].text
    assert "".join(llm.stream(prompts[2], GREEDY)) == outputs[2].text
    shared = llm.with_options(max_num_batched_tokens=40, enable_prefix_caching=True, pipeline_depth=1)
    assert shared.generate(prompts, GREEDY) == outputs
    assert shared.engine.metrics.shared_tokens > 0
    check_nothing_leaked(shared.engine)
    inference = Inference(theirs, llm.tokenizer, n_pages=16, page_size=16, max_num_batched_tokens=24)
    assert inference.generate(prompts, GREEDY) == outputs


def test_a_stop_string_that_straddles_tokens_is_cut_off(llm, prompts):
    output = llm.generate(prompts[0], replace(GREEDY, stop="ance is Par"))[0]
    assert (output.text, output.finish_reason) == ("The capital of Fr", "stop")


# --- conversations ---------------------------------------------------------------------------------------------------


def test_a_conversation_is_rendered_by_the_template_and_answered(llm):
    messages = [{"role": "user", "content": QUESTIONS[0]}]
    prompt = llm.chat_prompt(messages)
    text = llm.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert llm.tokenizer.decode(prompt) == text
    short = replace(GREEDY, max_tokens=3)
    assert llm.chat(messages, short) == llm.generate(prompt, short)
    several = llm.chat([messages, messages], short)
    assert several == llm.generate([prompt, prompt], short)
    open_end = [*messages, {"role": "assistant", "content": "The capital"}]
    how = {"add_generation_prompt": False, "continue_final_message": True}
    text = llm.tokenizer.apply_chat_template(open_end, tokenize=False, **how)
    assert llm.tokenizer.decode(llm.chat_prompt(open_end, **how)) == text
    template, kwargs = "{{ tools[0].name }} {{ date }}", {"date": "today"}
    asked = llm.chat_prompt(messages, chat_template=template, tools=[{"name": "f"}], chat_template_kwargs=kwargs)
    assert llm.tokenizer.decode(asked) == "f today"


TOO_LONG = "{% for i in range(99999) %}{{ 'hello ' }}{% endfor %}"


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{{ 1 / 0 }}", "ZeroDivisionError"),
        ("{% macro m(x) %}{{ m(x) }}{% endmacro %}{{ m(1) }}", "RecursionError"),
        ("{{ '' }}", "wrote nothing"),
        ("{{ messages.nothing.here }}", "chat template"),
        (TOO_LONG, "has 599994 characters, too many for 8192 tokens"),
    ],
)
def test_a_chat_template_that_fails_is_a_refused_request(llm, monkeypatch, template, message):
    monkeypatch.setattr(llm.tokenizer, "encode", lambda *args, **options: pytest.fail("it was tokenized"))
    with pytest.raises(RequestError, match=message):
        llm.chat([{"role": "user", "content": "x"}], chat_template=template)


def test_without_a_chat_template_the_error_says_so(llm, monkeypatch):
    monkeypatch.setattr(llm.tokenizer, "chat_template", None)
    with pytest.raises(RequestError, match="no chat template"):
        llm.chat([{"role": "user", "content": "hi"}])


# --- models from folders ---------------------------------------------------------------------------------------------


@pytest.fixture(scope="module", params=["qwen3", "gpt2"])
def folder(request, tmp_path_factory):
    """A tiny model in a folder, with its tokenizer."""
    path = tmp_path_factory.mktemp(request.param)
    transformers_model(request.param, seed=2, dtype=torch.float64).save_pretrained(path)
    WORDS.save_pretrained(path)
    return path


@pytest.mark.parametrize(("attn_backend", "window"), [("torch", None), ("torch_padded", 6)])
def test_tokens_are_those_of_a_run_alone(folder, attn_backend, window):
    """From a folder to tokens, in a pool where prefixes are shared and sequences preempted."""
    tiny = LLM(
        folder, EngineConfig(dtype="float64", device="cpu", page_size=2, max_batch_size=3), attn_backend=attn_backend,
        num_pages=12, max_num_batched_tokens=8, max_seq_len=24, sliding_window=window, enable_prefix_caching=True,
    )  # fmt: skip
    prompts = [[5, 9, 33, 7, 21, 6, 40], [5, 9, 33, 7, 21, 8], [5, 9, 33, 7, 21, 6, 41, 50], [9]]
    params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
    outputs = tiny.generate(prompts, params)
    assert [o.token_ids for o in outputs] == [alone(tiny.model, prompt, params, window) for prompt in prompts]
    for prompt, output in zip(prompts, outputs, strict=True):
        decoded = WORDS.decode(prompt + output.token_ids, skip_special_tokens=True)
        assert WORDS.decode(prompt) + output.text == decoded
    assert tiny.engine.metrics.shared_tokens > 0
    assert window is not None or tiny.engine.metrics.preemptions > 0
    check_nothing_leaked(tiny.engine)


@pytest.mark.parametrize("family", ["mistral", "qwen2", "gemma3_text"])
def test_a_folder_of_each_family_gives_the_tokens_of_transformers(family, tmp_path):
    theirs = transformers_model(family, seed=2, dtype=torch.float64)
    theirs.save_pretrained(tmp_path)
    WORDS.save_pretrained(tmp_path)
    prompt, tiny = [5, 9, 33, 7, 21, 6, 40], LLM(tmp_path, dtype="float64", device="cpu", page_size=2)
    (output,) = tiny.generate(prompt, SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True))
    expected = theirs.generate(torch.tensor([prompt]), max_new_tokens=8, do_sample=False)
    assert output.token_ids == expected[0, len(prompt) :].tolist()


def test_parameters_by_default_are_those_that_the_checkpoint_recommends(folder):
    tiny = LLM(folder, device="cpu")
    assert tiny.default_params == SamplingParams()
    generation = {"do_sample": True, "temperature": 0.6, "top_k": 20, "top_p": 0.95, "eos_token_id": [7, 8]}
    path = folder / "generation_config.json"
    before = path.read_bytes()
    try:
        path.write_text(json.dumps(generation))
        tiny = LLM(folder, device="cpu")
        assert tiny.default_params == SamplingParams(temperature=0.6, top_k=20, top_p=0.95)
        assert tiny.eos_token_ids == {7, 8} and tiny.with_options(num_pages=3).default_params is tiny.default_params
        path.write_text(json.dumps({"do_sample": False}))
        tiny = LLM(folder, dtype="float64", device="cpu")
        tiny.default_params = replace(tiny.default_params, max_tokens=5)
        (output,) = tiny.generate([5, 9, 33])
        assert output.token_ids == alone(tiny.model, [5, 9, 33], SamplingParams(temperature=0.0, max_tokens=5))
    finally:
        path.write_bytes(before)


@pytest.mark.parametrize("named", ["generation_config.json", "config.json", "tokenizer"])
def test_an_output_ends_at_the_end_that_any_file_names(named, tmp_path):
    transformers_model("qwen3", seed=2, dtype=torch.float64).save_pretrained(tmp_path)
    WORDS.save_pretrained(tmp_path)
    params = SamplingParams(temperature=0.0, max_tokens=12)
    free = LLM(tmp_path, dtype="float64", device="cpu").generate([5, 9, 33], params)[0].token_ids
    end = free[3]
    for file in ("generation_config.json", "config.json"):
        content = json.loads((tmp_path / file).read_text()) | {"eos_token_id": end if file == named else 60}
        (tmp_path / file).write_text(json.dumps(content))
    if named == "tokenizer":
        settings = json.loads((tmp_path / "tokenizer_config.json").read_text())
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings | {"eos_token": f"w{end}"}))
    output = LLM(tmp_path, dtype="float64", device="cpu").generate([5, 9, 33], params)[0]
    assert output.token_ids == free[: free.index(end) + 1] and output.finish_reason == "stop"


@pytest.mark.parametrize("trusted", [True, False])
def test_the_template_of_a_stranger_is_rendered_in_another_process(trusted, tmp_path, monkeypatch):
    save_tiny_model(tmp_path, [f"w{i}" for i in range(61)])
    llm, asked = LLM(tmp_path, trust_remote_code=trusted, num_pages=8, page_size=16), []
    worker = chat_template._worker(os.getpid())
    monkeypatch.setattr(worker, "render", lambda request: asked.append(request) or ("w5 w6", ""))
    messages = [{"role": "user", "content": "w5"}, {"role": "user", "content": "w6"}]
    for engine in (llm, llm.with_options(num_pages=9)):
        assert engine.chat_prompt(messages) == [5, 6]
        assert engine.chat_prompt(messages, chat_template="w7") == [7]
    assert len(asked) == (0 if trusted else 2)


def test_another_engine_starts_from_the_options_as_they_were_given(folder):
    tiny = LLM(folder, device="cpu", page_size=16, max_batch_size=2)
    assert tiny.config.num_pages == 2 * 128 // 16
    assert tiny.with_options(page_size=32).engine.config.num_pages == 2 * 128 // 32


def test_loading_a_model_does_not_import_transformers_models():
    code = "import sys; import mini_engine.llm; "
    code += "from mini_engine.loading.checkpoint import open_checkpoint, load_tokenizer;"
    code += "load_tokenizer(open_checkpoint('smollm2-135m-instruct'));"
    code += "sys.exit(any(f'transformers.{name}' in sys.modules for name in ('modeling_utils', 'configuration_utils')))"
    assert subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).parents[1]).returncode == 0


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"attn_backend": "nothing"}, ConfigError, "choose one of"),
        ({"dtype": "int4"}, ConfigError, "choose one of: auto"),
        ({"device": "tpu"}, ConfigError, "choose one of: auto"),
        ({"pages": 5}, ConfigError, "unknown option 'pages'"),
        ({"model": "no/such-model"}, ModelLoadError, "no/such-model"),
        ({"model": "/no/such/folder"}, ModelLoadError, "/no/such/folder"),
    ],
)
def test_options_and_models_that_do_not_exist_are_refused(options, error, message):
    with pytest.raises(error, match=message):
        LLM(**options)


def test_options_that_this_model_or_machine_does_not_allow_are_refused(folder):
    for options, message in [
        ({"max_model_len": 1}, "takes 2 to 128"),
        ({"attn_backend": "flex", "page_size": 100}, "multiple of 16 on a CPU, not 100"),
        *([] if torch.cuda.is_available() else [({"device": "cuda"}, "PyTorch sees no GPU here")]),
    ]:
        with pytest.raises(ConfigError, match=message):
            LLM(folder, **options)


@pytest.mark.gpu
@pytest.mark.parametrize("attn_backend", ["torch_padded", "flex"])
def test_bfloat16_on_the_gpu_agrees_with_float32_on_the_cpu(llm, prompts, attn_backend):
    """Same text for as long as the two roundings allow: the first tokens of each answer."""
    gpu = LLM(dtype="bfloat16", device="cuda", attn_backend=attn_backend)
    short = SamplingParams(temperature=0.0, max_tokens=32)
    pairs = zip(llm.generate(prompts, short), gpu.generate(prompts, short), strict=True)
    agreements = [
        next((i for i, (a, b) in enumerate(zip(x.token_ids, y.token_ids, strict=False)) if a != b), len(x.token_ids))
        for x, y in pairs
    ]
    print("tokens until the first difference:", agreements)
    assert sum(agreements) / len(agreements) >= 8


def test_a_model_without_a_tokenizer_takes_and_gives_token_ids(tmp_path):
    save_tiny_model(tmp_path, [f"w{i}" for i in range(61)])
    params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    with_text = LLM(tmp_path, num_pages=8, page_size=16).generate([5, 6], params)
    (tmp_path / "tokenizer.json").unlink()
    llm = LLM(tmp_path, num_pages=8, page_size=16)
    output = llm.generate([5, 6], params)
    assert output[0].token_ids == with_text[0].token_ids and (output[0].text, len(with_text[0].text) > 0) == ("", True)
    refused = [
        lambda: llm.generate("w5"),
        lambda: llm.chat([{"role": "user", "content": "w5"}]),
        lambda: llm.generate([5, 6], replace(params, stop=("w7",))),
    ]
    for ask in refused:
        with pytest.raises(RequestError, match="no tokenizer"):
            ask()
    check_nothing_leaked(llm.engine)
