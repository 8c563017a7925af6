"""Helpers for several test modules: tiny engines, a loop that serves requests, and a request computed alone."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Callable
from collections.abc import Sequence as ListLike
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, fields, replace
from functools import cache, wraps
from pathlib import Path
from typing import Any, TypeVar

import torch
from hypothesis import strategies as st
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import PreTrainedTokenizerFast

from mini_engine.config import EngineConfig
from mini_engine.engine import LLMEngine
from mini_engine.llm import TextEngine
from mini_engine.models.base import CausalLM, LanguageModel
from mini_engine.models.hf import HFModel
from mini_engine.observe.trace import Token, TraceStep, Work
from mini_engine.outputs import StepReport
from mini_engine.parts import Parts
from mini_engine.request import Request
from mini_engine.sampling import SamplingBatch, penalize, sample
from mini_engine.sampling_params import SamplingParams
from tests.models.families import ListAttend, our_model, transformers_model

# A tokenizer for the tiny models: sixty-one words.
WORDS = PreTrainedTokenizerFast(
    tokenizer_object=Tokenizer(WordLevel({f"w{i}": i for i in range(61)}, unk_token="w0")), unk_token="w0"
)
WORDS.backend_tokenizer.pre_tokenizer = WhitespaceSplit()
EOS = 2
T = TypeVar("T")
GREEDY = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
Arrival = tuple[str, list[int], SamplingParams]  # name, prompt, parameters


@cache
def double_model(family: str) -> CausalLM:
    """A tiny model in float64, so that rounding does not change which tokens are sampled."""
    return our_model(transformers_model(family, seed=2, dtype=torch.float64))


@cache
def adapted_model(family: str) -> HFModel:
    """The model of `double_model` as transformers computes it."""
    return HFModel(transformers_model(family, seed=2, dtype=torch.float64))


def save_tiny_model(folder: Path, words: ListLike[str]) -> None:
    """Write a checkpoint of a tiny random Llama. Its tokenizer splits text at spaces and knows `words`."""
    transformers_model("llama", seed=2).save_pretrained(folder)
    tokenizer = Tokenizer(WordLevel({word: i for i, word in enumerate(words)}, unk_token=words[0]))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    template = "{% for message in messages %}{{ message.content }} {% endfor %}"
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token=words[0], chat_template=template).save_pretrained(
        folder
    )


def in_a_thread(function: Callable[..., T], *args: Any) -> T:
    """Call a function that runs an event loop. The thread of a browser test has one already, as long as it lives."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(function, *args).result()


def make_engine(
    model: LanguageModel,
    parts: Parts | None = None,
    on_step: Callable[[LLMEngine, StepReport], None] | None = None,
    draft_model: LanguageModel | None = None,
    **options: Any,
) -> LLMEngine:
    """An engine on a tiny model."""
    defaults = {"attn_backend": "torch", "page_size": 16, "enable_prefix_caching": False, "warm_up": False}
    config = EngineConfig.of({**defaults, "persistent_decode": False, **options})
    return LLMEngine(model, config, eos_token_ids=(EOS,), draft_model=draft_model, parts=parts, on_step=on_step)


def let_all_guesses_pay(engine: LLMEngine) -> None:
    """Let every step and no guess take time, so that the number of guesses does not depend on the machine."""
    speculation = engine.core.speculation
    if speculation is not None:
        for seconds in (speculation._step_seconds, speculation._pipelined_seconds):
            seconds.add = lambda num_tokens, _, add=seconds.add: add(num_tokens, 1.0)
        speculation._guess_seconds.add = lambda *measured: None


def make_text_engine(model: LanguageModel, **options: Any) -> TextEngine:
    """A text front end over an engine on a tiny model."""
    return TextEngine(make_engine(model, **options), WORDS, SamplingParams())


def serve(
    engine: LLMEngine,
    arrivals: dict[int, list[Arrival]],
    aborts: dict[int, list[str]] | None = None,
    empty_cache: bool = True,
) -> dict[str, list[int]]:
    """Step until all requests have ended, and return the tokens of each.

    `arrivals` and `aborts` say before which step a request is added or aborted. At the end the engine is checked for
    leaks, which empties the prefix tree.
    """
    outputs: dict[str, list[int]] = defaultdict(list)
    step = 0
    while engine.has_unfinished or any(at >= step for at in arrivals):
        for request in arrivals.get(step, []):
            engine.add_request(*request)
            outputs[request[0]] = []
        for name in (aborts or {}).get(step, []):
            engine.abort(name)
        report = engine.step()
        for request, token_id in zip(report.sampled_by, report.token_ids.tolist(), strict=True):
            outputs[request.request_id].append(token_id)
        for request in report.finished:
            if request.error:
                raise request.error
        step += 1
        assert step < 5000, "stuck"
    if empty_cache:
        check_nothing_leaked(engine)
    return outputs


def check_nothing_leaked(engine: LLMEngine) -> None:
    """Check that no request owns a page, and that all pages of the prefix tree can be evicted."""
    table, tree = engine.page_table, engine.scheduler.prefix_tree
    if tree is not None:
        num_cached = len(tree.pages)
        assert table.refcounts.sum() == tree.num_evictable == num_cached
        assert tree.evict(table.num_pages) == num_cached
    assert table.num_free_pages == table.num_pages and table.num_free_rows == table.max_rows
    assert not table.refcounts.any() and not table.counts.any()


@torch.inference_mode()
def alone(
    model: CausalLM,
    prompt: list[int],
    params: SamplingParams,
    window: int | None = None,
    limit: int | None = None,
    guess: ListLike[int] = (),
) -> list[int]:
    """Compute the output of one request alone, with naive attention over all its keys: no pages, batch or eviction.

    A correct `guess` is verified in one pass, instead of one pass per token: each of its tokens must be sampled after
    the tokens before it, and the guess must end where the request ends. A wrong guess has no effect.
    """
    specs = model.attention_specs
    if window is not None:
        specs = tuple(replace(spec, window=min(window, spec.window or window)) for spec in specs)
    ends = {*params.stop_token_ids, *(() if params.ignore_eos else (EOS,))}
    longest = min(len(prompt) + params.max_tokens, limit or model.config.max_position_embeddings)

    def sampled(naive: ListAttend, tokens: list[int], computed: int, num: int) -> list[int]:
        """Sample the token after each of the last `num` tokens; `naive` has the keys of the first `computed` tokens."""
        naive.step = [(0, computed, len(tokens) - computed)]
        hidden = model(torch.tensor(tokens[computed:]), torch.arange(computed, len(tokens)), naive)
        positions = list(range(len(tokens) - num + 1, len(tokens) + 1))
        logits = model.compute_logits(hidden[-num:])
        names = "repetition_penalty", "presence_penalty", "frequency_penalty"
        if any(getattr(params, name) != getattr(GREEDY, name) for name in names):
            counts = torch.stack(
                [
                    torch.bincount(
                        torch.tensor(tokens[len(prompt) : end], dtype=torch.long), minlength=model.config.vocab_size
                    )
                    for end in positions
                ]
            )
            in_prompt = torch.zeros(num, model.config.vocab_size, dtype=torch.bool)
            in_prompt[:, prompt] = True
            logits = penalize(logits, in_prompt, counts, *(torch.full((num,), getattr(params, name)) for name in names))
        return sample(logits, SamplingBatch.build([params] * num, [params.seed or 0] * num, positions)).tolist()

    if guess and (len(prompt) + len(guess) == longest or guess[-1] in ends) and not ends.intersection(guess[:-1]):
        tokens = [*prompt, *guess[:-1]]
        if len(prompt) + len(guess) <= longest and sampled(
            ListAttend(specs, model.up_projections), tokens, 0, len(guess)
        ) == list(guess):
            return list(guess)
    naive = ListAttend(specs, model.up_projections)
    tokens, computed = list(prompt), 0
    while len(tokens) < longest:
        [token] = sampled(naive, tokens, computed, 1)
        computed = len(tokens)
        tokens.append(token)
        if token in ends:
            break
    return tokens[len(prompt) :]


def make_request(prompt: list[int], max_tokens: int, arrival: int = 0, end_token_ids: tuple[int, ...] = ()) -> Request:
    """A request for a scheduler without an engine."""
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens)
    return Request(f"request {arrival}", prompt, params, 0, len(prompt) + max_tokens, end_token_ids, arrival)


@st.composite
def requests(draw: st.DrawFn, most: int, longest: int) -> list[Arrival]:
    """Requests, many of which share a prefix of any length with an earlier request and then diverge."""
    made: list[Arrival] = []
    for i in range(draw(st.integers(1, most))):
        stem = draw(st.sampled_from([prompt for _, prompt, _ in made])) if made and draw(st.booleans()) else []
        prompt = stem[: draw(st.integers(0, len(stem)))]
        prompt += draw(st.lists(st.integers(3, 60), min_size=0 if prompt else 1, max_size=longest - len(prompt)))
        params = SamplingParams(
            temperature=draw(st.sampled_from([0.0, 1.0])), seed=i, ignore_eos=draw(st.booleans()),
            stop_token_ids=draw(st.lists(st.integers(0, 60), max_size=8)),
            max_tokens=draw(st.integers(1, 8)), repetition_penalty=draw(st.sampled_from([1.0, 1.3])),
        )  # fmt: skip
        made.append((f"request {i}", prompt, params))
    return made


def counting_parts() -> tuple[Parts, Counter[str]]:
    """Return the default parts, each of which counts its calls, and the counter."""
    calls: Counter[str] = Counter()
    counted: dict[str, Any] = {}
    for field in fields(Parts):
        default = getattr(Parts(), field.name)
        if isinstance(default, type):
            counted[field.name] = _counting_class(default, calls, field.name)
        else:
            counted[field.name] = _counting(default, calls, field.name)
    return replace(Parts(), **counted), calls


def _counting(function: Callable, calls: Counter[str], name: str) -> Callable:
    @wraps(function)
    def counted(*args: Any, **kwargs: Any) -> Any:
        calls[name] += 1
        return function(*args, **kwargs)

    return counted


def _counting_class(default: type, calls: Counter[str], name: str) -> type:
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        calls[name] += 1
        default.__init__(self, *args, **kwargs)

    return type(default.__name__, (default,), {"__init__": init})


@dataclass(frozen=True)
class SavedTrace:
    """The contents of a trace file; `waiting` has the queue of each step."""

    num_pages: int
    page_size: int
    steps: list[TraceStep]
    waiting: list[list[str]]


def read_trace(path: Path) -> SavedTrace:
    """Read a file that `Trace.save` wrote, as the player does."""
    data = json.loads(path.read_text(encoding="utf-8"))
    steps: list[TraceStep] = []
    waiting: list[list[str]] = []
    pages: dict[str, list[int]] = {}
    for event in data["traceEvents"]:
        if event.get("cat") != "step":
            continue
        args = event["args"]
        pages = {name: own for name, own in (pages | args["pages"]).items() if own}
        waiting.append(args["waiting"])
        steps.append(
            TraceStep(
                start=event["ts"] / 1e6,
                seconds=event["dur"] / 1e6,
                batch=[Work(**work) for work in args["batch"]],
                pages=pages,
                arrived=args["arrived"],
                admitted=args["admitted"],
                preempted=args["preempted"],
                left=args["left"],
                outputs=[Token(**token) for token in args["outputs"]],
                ended=args["ended"],
            )
        )
    return SavedTrace(data["otherData"]["num_pages"], data["otherData"]["page_size"], steps, waiting)
