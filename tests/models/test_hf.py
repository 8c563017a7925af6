"""`Inference`: a loaded model of transformers on our engine gives transformers' own tokens, and stays as it was."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import transformers
from transformers import AttentionInterface, AttentionMaskInterface

from book.random_models import GEMMA2_2B, NO_WORDS, QWEN3_0_6B, random_transformers_model
from mini_engine import Inference, RequestOutput, SamplingParams
from mini_engine.attention.torch import ChunkedBackend
from mini_engine.engine import LLMEngine
from mini_engine.errors import ConfigError, RequestError
from mini_engine.loading.checkpoint import load_tokenizer, open_checkpoint
from mini_engine.models.hf import HFModel
from mini_engine.outputs import StepReport
from mini_engine.parts import Parts
from mini_engine.sampling import SamplingBatch, filter_logits
from tests.helpers import WORDS, check_nothing_leaked
from tests.models.families import WITHOUT_MLA, our_model, their_logits, transformers_model, whole

PROMPTS = [[5, 9, 33], [7], [1, 60, 22, 18, 4, 4, 31, 8, 50], [12, 13]]
GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
# A pool so small that requests are preempted, a budget so small that prompts are cut into chunks.
TIGHT = {"n_pages": 8, "page_size": 2, "max_batch_size": 3, "max_num_batched_tokens": 5}
EMBEDDED = "smollm2-135m-instruct"


def their_tokens(theirs: Any, prompt: list[int], max_new_tokens: int) -> tuple[list[int], torch.Tensor]:
    """The output of transformers' `generate` for one prompt, and by how much each token's logit led the next best."""
    ids = torch.tensor([prompt], device=theirs.device)
    how = {"do_sample": False, "max_new_tokens": max_new_tokens, "output_logits": True}
    output = theirs.generate(ids, attention_mask=torch.ones_like(ids), return_dict_in_generate=True, **how)
    best = torch.stack(output.logits)[:, 0].topk(2).values
    return output.sequences[0, len(prompt) :].tolist(), best[:, 0] - best[:, 1]


def agree_until(ours: list[int], want: list[int]) -> int:
    """Count the equal tokens before the first difference."""
    return next((i for i, (a, b) in enumerate(zip(ours, want, strict=True)) if a != b), len(want))


def assert_tokens_of_transformers(theirs: Any, outputs: list[RequestOutput], max_new_tokens: int = 12) -> None:
    """Equal, or different only from a token on where transformers' two best logits are nearly equal."""
    for output in outputs:
        want, gaps = their_tokens(theirs, output.prompt_token_ids, max_new_tokens)
        equal = agree_until(output.token_ids, want)
        assert equal == len(want) or gaps[equal] < 1e-4


@pytest.fixture(scope="module", params=WITHOUT_MLA)
def theirs(request) -> Any:
    return transformers_model(request.param, seed=3)


@pytest.fixture(scope="module")
def llama() -> Any:
    return transformers_model("llama", seed=3)


@pytest.mark.parametrize(
    ("family", "attn_backend"), [*((family, "torch_padded") for family in WITHOUT_MLA), ("gemma2", "flex")]
)
def test_greedy_tokens_equal_transformers(family, attn_backend):
    """tests/test_engine.py serves these models under other schedules."""
    chunks: list[int] = []

    def watch(_, report: StepReport) -> None:
        chunks.extend(report.schedule.num_new.tolist())

    theirs = transformers_model(family, seed=2, dtype=torch.float64)
    inference = Inference(theirs, WORDS, attn_backend=attn_backend, on_step=watch, **TIGHT)
    outputs = inference.generate(PROMPTS, replace(GREEDY, max_tokens=5))
    assert [(o.prompt_token_ids, o.finish_reason) for o in outputs] == [(prompt, "length") for prompt in PROMPTS]
    assert_tokens_of_transformers(theirs, outputs, max_new_tokens=5)
    assert inference.engine.metrics.preemptions > 0 and 1 < max(chunks) < max(map(len, PROMPTS))
    check_nothing_leaked(inference.engine)


@pytest.mark.parametrize("penalty", [None, 1.7])
def test_without_parameters_it_is_as_greedy_as_generate_of_transformers(penalty):
    theirs = transformers_model("llama", seed=3)
    theirs.generation_config.repetition_penalty = penalty
    inference = Inference(theirs, WORDS)
    inference.default_params = replace(inference.default_params, max_tokens=12)
    for output in inference.generate(PROMPTS):
        ids = torch.tensor([output.prompt_token_ids])
        want = theirs.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=12)[0, ids.shape[1] :]
        assert output.token_ids == want.tolist()


@pytest.mark.parametrize("changes", [{}, {"temperature": 0.7, "top_k": 20}, {"top_k": 0, "min_p": 0.05}])
def test_without_parameters_it_samples_where_generate_of_transformers_does(changes):
    """From the same tokens with the same probabilities: transformers keeps the best 50 unless it is told otherwise."""
    theirs = transformers_model("llama", seed=3)
    theirs.generation_config.update(do_sample=True, **changes)
    params = Inference(theirs, WORDS).default_params
    ids = torch.tensor([PROMPTS[2]])
    how = {"max_new_tokens": 1, "return_dict_in_generate": True, "output_scores": True, "output_logits": True}
    output = theirs.generate(ids, attention_mask=torch.ones_like(ids), **how)
    batch = SamplingBatch.build([params], [0], [ids.shape[1]])
    ours = filter_logits(output.logits[0] / params.temperature, batch.top_k, batch.top_p, batch.min_p).softmax(-1)
    torch.testing.assert_close(ours, output.scores[0].softmax(-1))
    assert params == replace(SamplingParams(), **{"top_k": 50} | changes)


VARIANTS = [
    ("qwen3", {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1}),
    ("gemma2", {"sliding_window": 1, "attn_logit_softcapping": None, "final_logit_softcapping": None}),
    ("gemma2", {"sliding_window": 64}),  # wider than what the probe sees
    ("llama", {"num_key_value_heads": 1, "head_dim": 12}),
    ("gpt2", {"scale_attn_weights": False, "scale_attn_by_inverse_layer_idx": True}),
]


@pytest.mark.parametrize("family, changes", [(family, {}) for family in WITHOUT_MLA] + VARIANTS)
def test_layers_ask_for_what_our_own_models_do(family, changes):
    theirs = transformers_model(family, **changes)
    model = HFModel(theirs)
    # A layer of transformers rotates its keys before anything here can see how.
    assert model.attention_specs == tuple(replace(spec, rope=None) for spec in our_model(theirs).attention_specs)
    assert (model.config.vocab_size, model.config.max_position_embeddings) == (61, 128)
    prompts = [[i * i % 61 for i in range(100)], [7, 8, 9]]
    for logits, tokens in zip(whole(model, prompts), prompts, strict=True):
        torch.testing.assert_close(logits, their_logits(theirs, tokens), rtol=0, atol=1e-4)


TINY = {"vocab_size": 61, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
TINY |= {"max_position_embeddings": 128, "bos_token_id": None, "eos_token_id": None, "pad_token_id": None}


def tiny(config_class: str, **changes: Any) -> Any:
    """A small random model of transformers, of any family."""
    torch.manual_seed(0)
    config = getattr(transformers, config_class)(**TINY | changes)
    return transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()


@pytest.mark.parametrize(
    "config_class, changes",
    [
        ("MistralConfig", {"num_key_value_heads": 2, "sliding_window": 3}),
        ("GPTNeoXConfig", {}),
        ("Phi3Config", {"num_key_value_heads": 2}),
        ("CohereConfig", {"num_key_value_heads": 2, "logit_scale": 0.3}),
        ("GraniteConfig", {"num_key_value_heads": 2, "logits_scaling": 3.0, "attention_multiplier": 0.2}),
        ("MixtralConfig", {"num_key_value_heads": 2, "num_local_experts": 4}),
        # These two have their window only in the mask.
        ("PhimoeConfig", {"num_key_value_heads": 2, "num_local_experts": 4, "sliding_window": 10}),
        (
            "Qwen2MoeConfig",
            {"num_key_value_heads": 2, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
            | {"shared_expert_intermediate_size": 16, "use_sliding_window": True, "sliding_window": 10}
            | {"max_window_layers": 1},
        ),
    ],
)
def test_families_that_this_book_has_never_seen(config_class, changes):
    """What they do to logits, to queries and between layers is their own code."""
    theirs = tiny(config_class, **changes)
    prompts = [list(range(1, 20)), [5], [7, 8, 9, 10]]
    for logits, tokens in zip(whole(HFModel(theirs), prompts), prompts, strict=True):
        torch.testing.assert_close(logits, their_logits(theirs, tokens), rtol=0, atol=1e-4)


def test_no_token_sees_a_later_one_or_a_neighbour(theirs):
    model = HFModel(theirs)
    first, second = whole(model, [[5, 9, 33, 7], [8, 8]]), whole(model, [[5, 9, 33, 60], [1]])
    torch.testing.assert_close(first[0][:3], second[0][:3], rtol=0, atol=1e-5)
    assert (first[0][3] - second[0][3]).abs().max() > 1e-2


def test_the_trap_attention_without_a_mask_function_is_not_causal(llama, monkeypatch):
    """Attention registered under a name without a mask function is not given a mask, without a warning."""

    def plain(module, query, key, value, mask, *, scaling, **_):
        assert mask is None
        heads = {"scale": scaling, "enable_gqa": True}
        return torch.nn.functional.scaled_dot_product_attention(query, key, value, **heads).transpose(1, 2), None

    monkeypatch.setitem(AttentionInterface._global_mapping, "trap", plain)
    trapped = transformers_model("llama", seed=3)
    trapped.set_attn_implementation("trap")
    first, second = (their_logits(trapped, [5, 9, 33, last])[0] for last in (7, 60))
    assert (first - second).abs().max() > 1e-2, "the first token saw the last"
    # The engine masks by position. It builds the model's mask only once, to check that the two agree.
    first, second = (whole(HFModel(trapped), [[5, 9, 33, last]])[0][0] for last in (7, 60))
    torch.testing.assert_close(first, second, rtol=0, atol=1e-5)
    monkeypatch.delitem(AttentionMaskInterface._global_mapping, "mini_engine_probe")
    with pytest.raises(ConfigError, match="not causal"):
        HFModel(llama)


def test_the_model_stays_as_it_was(theirs):
    def state() -> tuple:
        logits = their_logits(theirs, [5, 9, 33])
        return theirs.config._attn_implementation, theirs.config.to_dict(), logits

    modules, tensors = list(theirs.modules()), [t.data_ptr() for t in theirs.state_dict().values()]
    before = state()
    during = []
    inference = Inference(theirs, WORDS, **TIGHT, on_step=lambda *_: during.append(state()))
    inference.generate(PROMPTS, SamplingParams(temperature=0.0, max_tokens=2))
    for implementation, config, logits in [*during, state()]:
        assert (implementation, config) == before[:2]
        assert torch.equal(logits, before[2])
    assert len(during) > 2
    assert list(theirs.modules()) == modules
    assert [t.data_ptr() for t in theirs.state_dict().values()] == tensors
    # And no weight was copied.
    assert {id(p) for p in HFModel(theirs).parameters()} == {id(p) for p in theirs.parameters()}


def test_a_model_that_a_device_map_has_hooked():
    accelerate = pytest.importorskip("accelerate")
    theirs = transformers_model("qwen3", seed=3)
    want = Inference(theirs, WORDS).generate(PROMPTS, GREEDY)
    hooked = accelerate.dispatch_model(theirs, {"": "cpu"}, force_hooks=True)
    assert hooked.model._hf_hook
    assert Inference(hooked, WORDS).generate(PROMPTS, GREEDY) == want


SMALL_EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2, "num_key_value_heads": 2, "head_dim": 8}


def refused_models() -> dict[str, tuple[Any, str]]:
    return {
        "no model": (lambda: torch.nn.Linear(2, 2), "AutoModelForCausalLM"),
        "no output layer": (lambda: transformers_model("llama").model, "gives no logits"),
        "training": (lambda: transformers_model("gpt2").train(), "call model.eval"),
        "on no device": (lambda: transformers_model("llama").to("meta"), "onto one device"),
        "encoder and decoder": (
            lambda: transformers.T5ForConditionalGeneration(
                transformers.T5Config(vocab_size=61, d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2)
            ).eval(),
            "an encoder-decoder model",
        ),
        "sees later tokens": (lambda: tiny("BertConfig"), "not causal"),
        "recurrent": (lambda: tiny("MambaConfig"), "more than keys and values"),
        "recurrent in part": (lambda: tiny("FalconH1Config", num_key_value_heads=2), "more than keys and values"),
        "chunked attention": (
            lambda: transformers_model("qwen3", layer_types=["chunked_attention"] * 3, attention_chunk_size=4),
            "chunked_attention",
        ),
        "attention sinks": (lambda: tiny("GptOssConfig", **SMALL_EXPERTS), "s_aux"),
        "attention of its own": (lambda: tiny("GPTJConfig", rotary_dim=4), "attention interface"),
        "positions of its own": (lambda: tiny("BloomConfig"), "position_ids"),
        "no way to its attention": (lambda: tiny("StableLmConfig"), "keyword arguments"),
        "no layers apart": (lambda: tiny("OPTConfig", ffn_dim=32, word_embed_proj_dim=32), "apart from its layers"),
    }


@pytest.mark.parametrize("name", refused_models())
def test_models_that_it_cannot_run_are_refused(name):
    build, message = refused_models()[name]
    model = build()
    with pytest.raises(ConfigError, match=message) as error:
        HFModel(model)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "options, message",
    [
        ({"n_pages": 0}, "num_pages is 0; it must be a whole number"),
        ({"page_size": 0}, "page_size is 0; it must be a whole number"),
        ({"max_batch_size": -1}, "max_batch_size is -1; it must be a whole number"),
        ({"max_seq_length": 129}, "this model takes 2 to 128 tokens"),
        ({"max_seq_length": 1}, "this model takes 2 to 128 tokens"),
        ({"max_seq_length": 100, "n_pages": 3, "page_size": 32}, "3 pages of 32 hold 96 tokens"),
        ({"max_num_batched_tokens": 4, "max_batch_size": 16}, "less than max_batch_size"),
        ({"attn_backend": "nothing"}, "choose one of"),
    ],
)
def test_impossible_options_are_refused(llama, options, message):
    with pytest.raises(ConfigError, match=message):
        Inference(llama, WORDS, **options)


def test_the_engine_gets_what_inference_is_given(llama):
    parts = Parts()
    engine = Inference(llama, WORDS, attn_backend="chunked", parts=parts, max_seq_length=50).engine
    assert isinstance(engine.backend, ChunkedBackend) and engine.parts is parts and engine.config.max_model_len == 50


def test_logits_of_a_narrow_model_are_float32():
    model = HFModel(transformers_model("llama", dtype=torch.bfloat16))
    assert model.dtype == torch.bfloat16 and model.device == torch.device("cpu")
    assert model.compute_logits(torch.zeros(1, 32, dtype=torch.bfloat16)).dtype == torch.float32


def test_keys_and_values_of_different_sizes_are_refused():
    """DeepSeek's multi-head latent attention."""
    latent = tiny(
        "DeepseekV3Config", num_key_value_heads=4, q_lora_rank=16, kv_lora_rank=16, qk_rope_head_dim=4,
        qk_nope_head_dim=8, v_head_dim=8, first_k_dense_replace=2, n_routed_experts=4,
    )  # fmt: skip
    with pytest.raises(ConfigError, match="do not match"):
        HFModel(latent)


def test_the_longest_sequence_is_the_model_s_or_the_pool_s(llama):
    assert Inference(llama, WORDS).engine.config.max_model_len == 128
    assert Inference(llama, WORDS, n_pages=3, page_size=4).engine.config.max_model_len == 12
    rope = {"rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [2.0] * 4, "rope_theta": 10000.0}
    # Past 32 tokens, one long sequence would change the rotations of all others.
    long = tiny("Phi3Config", rope_parameters=rope, original_max_position_embeddings=32)
    assert Inference(long, WORDS).engine.config.max_model_len == 32
    assert "longrope" in HFModel(long).limit and not HFModel(llama).limit
    with pytest.raises(ConfigError, match="longrope"):
        Inference(long, WORDS, max_seq_length=64)


def test_text_in_text_out_and_bad_requests_beside_good_ones(llama):
    inference = Inference(llama, WORDS, n_pages=8, page_size=2)
    good, empty, long = inference.generate(["w5 w9 w33", "", [1] * 40], GREEDY, on_error="return")
    assert good.prompt == "w5 w9 w33" and good.prompt_token_ids == [5, 9, 33]
    assert good.prompt + good.text == WORDS.decode(good.prompt_token_ids + good.token_ids)
    assert [type(o.error) for o in (good, empty, long)] == [type(None), RequestError, RequestError]
    assert empty.finish_reason == long.finish_reason == "error"
    assert inference.generate("w5 w9 w33", GREEDY) == [good]
    assert inference.generate([], GREEDY) == []
    with pytest.raises(RequestError, match="empty"):
        inference.generate("", GREEDY)
    with pytest.raises(RequestError, match="2 prompts but 1 SamplingParams"):
        inference.generate(["w5", "w9"], [GREEDY])


def test_it_ends_where_the_model_s_generation_ends():
    theirs = transformers_model("llama", seed=3)
    free = Inference(theirs, WORDS).generate([PROMPTS[0]], GREEDY)[0].token_ids
    ending = SamplingParams(temperature=0.0, max_tokens=12)
    for end in (free[3], [free[3], 999]):
        theirs.generation_config.eos_token_id = end
        output = Inference(theirs, WORDS).generate([PROMPTS[0]], ending)[0]
        assert output.token_ids == free[: free.index(free[3]) + 1]
        assert output.finish_reason == "stop"


def test_an_interrupted_run_leaves_nothing_behind(llama):
    def interrupt(engine: LLMEngine, _) -> None:
        if interrupting and engine.has_unfinished:
            raise KeyboardInterrupt

    interrupting = True
    inference = Inference(llama, WORDS, n_pages=16, page_size=4, on_step=interrupt, enable_prefix_caching=False)
    with pytest.raises(KeyboardInterrupt):
        inference.generate(PROMPTS, GREEDY)
    assert not inference.engine.has_unfinished
    assert inference.engine.page_table.num_free_pages == 16
    interrupting = False
    assert_tokens_of_transformers(llama, inference.generate(PROMPTS, GREEDY))


def shortfalls(theirs: Any, outputs: list[RequestOutput], *, context: bool = True) -> torch.Tensor:
    """How far below the best of transformers' logits each chosen token is, as a share of the largest logit.

    Without context every token is computed by itself, as if attention saw nothing else.
    """
    shares = []
    for output in outputs:
        tokens = torch.tensor([output.prompt_token_ids + output.token_ids], device=theirs.device)
        rows = torch.arange(len(output.prompt_token_ids) - 1, tokens.shape[1] - 1, device=theirs.device)
        with torch.inference_mode():
            if context:
                logits = theirs(tokens, logits_to_keep=rows).logits[0]
            else:
                logits = theirs(tokens[0, rows, None]).logits[:, 0]
        chosen = logits.gather(1, torch.tensor(output.token_ids, device=theirs.device)[:, None])[:, 0]
        shares.append((logits.max(dim=-1).values - chosen) / logits.abs().max())
    return torch.cat(shares)


def assert_chosen_well(theirs: Any, outputs: list[RequestOutput]) -> None:
    """Every token is one of the best in transformers' logits, to within 5% of the largest: rounding of bfloat16."""
    assert shortfalls(theirs, outputs).max() <= 0.05


@pytest.mark.gpu
@pytest.mark.parametrize("family", WITHOUT_MLA)
def test_bfloat16_on_the_gpu_has_the_logits_of_transformers(family):
    theirs = transformers_model(family, seed=3, dtype=torch.bfloat16).to("cuda")
    outputs = Inference(theirs, WORDS, n_pages=64, page_size=16).generate(PROMPTS, GREEDY)
    agreed = [agree_until(o.token_ids, their_tokens(theirs, o.prompt_token_ids, 12)[0]) for o in outputs]
    print(f"{family}: tokens until the first difference, of 12: {agreed}")
    assert_chosen_well(theirs, outputs)


@pytest.mark.gpu
@pytest.mark.parametrize("config", [QWEN3_0_6B, GEMMA2_2B], ids=["Qwen3-0.6B", "Gemma-2-2b"])
@pytest.mark.parametrize("attn_backend", ["torch_padded", "flex"])
def test_published_shapes_in_bfloat16_on_the_gpu(config, attn_backend):
    """Long prompts in chunks, short ones, and a pool that is too small for all at once."""
    check_published_shape(config, attn_backend, torch.device("cuda"))


def check_published_shape(config, attn_backend: str, device: torch.device) -> None:
    # With tied embeddings, a random model repeats its last token whatever attention returns.
    config = type(config)(**config.to_dict() | {"tie_word_embeddings": False})
    theirs = random_transformers_model(config, torch.bfloat16, device)
    inference = Inference(
        theirs, NO_WORDS, max_seq_length=5632, n_pages=44, page_size=128, max_batch_size=16, attn_backend=attn_backend,
        max_num_batched_tokens=1024,
    )  # fmt: skip
    lengths = [5000, 1, 127, 128, 129, 700, 900, 500, 250, 31]
    generator = torch.Generator().manual_seed(0)
    prompts = [torch.randint(config.vocab_size, (length,), generator=generator).tolist() for length in lengths]
    outputs = inference.generate(prompts, replace(GREEDY, max_tokens=140))
    print(inference.engine.metrics)
    assert [len(output.token_ids) for output in outputs] == [140] * len(prompts)
    assert inference.engine.metrics.preemptions > 0
    assert_chosen_well(theirs, outputs)
    seen = (shortfalls(theirs, outputs, context=False) > 0.05).float().mean()
    assert seen > 0.9, "the tokens do not depend on attention: this test would pass without it"


@pytest.mark.gpu
@pytest.mark.parametrize("attn_backend", ["torch_padded", "flex"])
def test_real_text_in_bfloat16_on_the_gpu(attn_backend):
    """The first tokens of each answer equal transformers'; after that, rounding may make them differ."""
    checkpoint = open_checkpoint(EMBEDDED)
    load = transformers.AutoModelForCausalLM.from_pretrained
    theirs = load(checkpoint.path, dtype=torch.bfloat16, device_map="cuda")
    tokenizer = load_tokenizer(checkpoint)
    inference = Inference(theirs, tokenizer, attn_backend=attn_backend, max_seq_length=2048, n_pages=256, page_size=128)
    params = SamplingParams(temperature=0.0, max_tokens=32, ignore_eos=True)
    texts = ["The capital of France is", "Once upon a time, there was a little", "1, 2, 3, 4,", "def add(a, b):"] * 4
    outputs = inference.generate(texts, params)
    agreed = [agree_until(o.token_ids, their_tokens(theirs, o.prompt_token_ids, 32)[0]) for o in outputs]
    print("tokens until the first difference, of 32:", agreed)
    assert " Paris" in outputs[0].text
    assert sum(agreed) / len(agreed) >= 8
