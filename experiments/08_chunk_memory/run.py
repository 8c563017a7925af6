"""Chunk memory: time to first token with registered documents, and what composed chunks lose on real text.

    python experiments/08_chunk_memory/run.py [--device cpu|cuda] [--out DIR] [--only SECTION ...]
    python experiments/08_chunk_memory/run.py --predict

Times: on a CPU the embedded SmolLM2-135M in float32, on a GPU Qwen3-0.6B's shape in bfloat16 with random weights.
Quality: the embedded model in float32 on the prose of the book's own chapters. On a CPU, the engine composes chunks (20
minutes); on a GPU, some of their tokens are computed again. The result goes to
experiments/08_chunk_memory/results/<device>.json, below DIR where one is given.
"""

from __future__ import annotations

import gc
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from book import results
from book.experiment import command_line, predicted, record
from book.paths import repository_root
from book.random_models import QWEN3_0_6B, random_model
from book.units import quantity
from book.values import without_sources
from mini_engine.attention.naive import masked_attention
from mini_engine.bench.workloads import LARGEST_TOKEN, model_shape
from mini_engine.chunks import ChunkMemory
from mini_engine.config import EngineConfig
from mini_engine.engine import LLMEngine
from mini_engine.kv_cache.paged import page_bytes
from mini_engine.loading.checkpoint import load_model, load_tokenizer, open_checkpoint
from mini_engine.models.base import CausalLM
from mini_engine.models.config import ModelConfig
from mini_engine.parts import Parts
from mini_engine.request import Context
from mini_engine.roofline import Machine, ModelShape, measure_machine, model_step_cost
from mini_engine.sampling_params import SamplingParams

EXPERIMENT = "08_chunk_memory"
MODEL = "smollm2-135m-instruct"
SECTIONS = TIMES, QUALITY, AGAIN = "times", "quality", "again"
ABOVE, LOST = "above full recompute", "part of the loss of no chunks"
AGAIN_ABOVE, AGAIN_RECOVERED = f"{ABOVE}, tokens computed again", "part of the loss recovered, tokens computed again"
PAGE_SIZE, STEP_TOKENS = 16, 8192
PLAIN, EXACT, COMPOSED, IN_PLACE, DROPPED = (
    "full recompute", "exact chunks", "composed chunks", "composed, not rotated", "no chunks",
)  # fmt: skip
# The same after a fixed beginning of every prompt, which chunks are registered after in the last of these modes.
BEGINNING = "<|im_start|>system\nAnswer from the documents.<|im_end|>\n"
PLAIN_BEGUN, DROPPED_BEGUN, COMPOSED_BEGUN = (f"beginning, {mode}" for mode in (PLAIN, DROPPED, COMPOSED))
AFTER_BEGINNING = "beginning, chunks registered after it"
ALONE = "question alone"
# What the prediction was made for.
CPU = Machine("a CPU core", "float32", bandwidth=10e9, flops=100e9)
H200 = Machine("an H200", "bfloat16", bandwidth=4.3e12, flops=700e12)


@dataclass(frozen=True)
class Setting:
    """What is measured on a kind of device.

    Attributes:
        dtype: of the model whose times are measured.
        sections: measured unless others are asked for.
        documents: tokens of the documents that are registered.
        question: tokens of the prompt behind them.
        pieces: chunks that a document is cut into, beside one.
        repetitions: of each time; the ways take turns.
        passages: most passages from each chapter.
        context: tokens of each passage in front of its continuation.
        chunks: numbers of chunks that the context is cut into.
        continuation: tokens whose likelihood is computed.
        again: tokens of each chunk that are computed again, behind everything before them.
    """

    dtype: torch.dtype
    sections: tuple[str, ...]
    documents: tuple[int, ...]
    question: int
    pieces: int
    repetitions: int
    passages: int
    context: int
    chunks: tuple[int, ...]
    continuation: int
    again: tuple[int, ...]


SETTINGS = {
    "cpu": Setting(torch.float32, (TIMES, QUALITY), (128, 512), 32, 4, 9, 8, 256, (2, 8), 48, (1, 4, 8)),
    "cuda": Setting(
        torch.bfloat16, (TIMES, AGAIN), (1024, 4096, 16_384, 32_768), 64, 8, 9, 16, 256, (2, 8), 48, (1, 4, 8)
    ),
}


# --- time to first token ---------------------------------------------------------------------------------------------


def make_memory(model: CausalLM, num_tokens: int, num_copies: int) -> ChunkMemory:
    """Chunk memory in an engine whose pool holds `num_copies` texts of `num_tokens` tokens, cut into any chunks."""
    config = EngineConfig(
        attn_backend="cascade",
        num_pages=num_copies * (-(-num_tokens // PAGE_SIZE) + max(max(s.chunks) for s in SETTINGS.values())),
        page_size=PAGE_SIZE,
        max_batch_size=1,
        max_num_batched_tokens=STEP_TOKENS,
        enable_prefix_caching=False,
        persistent_decode=False,
    )
    return ChunkMemory(LLMEngine(model, config, parts=model.parts), max_pages=config.num_pages)


def register_pieces(
    memory: ChunkMemory, tokens: Sequence[int], count: int, chained: bool = False, after: str | None = None
) -> list[str]:
    """Register a text as `count` chunks of about equal length, each after the one before if `chained`.

    Args:
        memory: chunk memory.
        tokens: the text.
        count: number of chunks.
        chained: whether a chunk is computed after the one before it.
        after: the chunk that the first one is computed after, and all of them unless `chained`.
    """
    ends = [len(tokens) * i // count for i in range(count + 1)]
    names: list[str] = []
    for i in range(count):
        before = names[-1] if chained and names else after
        names.append(memory.register(list(tokens[ends[i] : ends[i + 1]]), after=before))
    return names


@contextmanager
def registered(memory: ChunkMemory, names: Sequence[str]) -> Iterator[Context]:
    """The context of some chunks, which are unregistered afterwards."""
    try:
        yield memory.context(names)
    finally:
        for name in dict.fromkeys(names):
            memory.unregister(name)


def generate(engine: LLMEngine, prompt: Sequence[int], num_tokens: int, context: Context = ()) -> list[int]:
    """The most likely tokens behind a prompt, one after the other."""
    params = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)
    request = engine.add_request("request", list(prompt), params, context)
    while engine.has_unfinished:
        engine.step()
    return request.output_token_ids


def seconds_of(run: Callable[[], object], device: torch.device) -> float:
    """How long one call takes, on the device too."""
    start = time.perf_counter()
    run()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - start


PRODUCTS = "linear", "mm", "matmul"  # in the names of operators that compute a matrix product


def busy_seconds(run: Callable[[], object], device: torch.device) -> tuple[float, int]:
    """Seconds of the kernels of one call, and their number; on a CPU of its matrix products and all operators."""
    on_gpu = device.type == "cuda"
    activity = torch.profiler.ProfilerActivity.CUDA if on_gpu else torch.profiler.ProfilerActivity.CPU
    with torch.profiler.profile(activities=[activity]) as profile:
        seconds_of(run, device)
    if on_gpu:
        events = [event for event in profile.events() if event.device_type == torch.autograd.DeviceType.CUDA]
        own = [event.time_range.elapsed_us() for event in events if not event.name.startswith(("Mem", "Activity"))]
        return sum(own) / 1e6, len(own)
    operators = profile.key_averages()
    own = [found.self_cpu_time_total for found in operators if any(part in found.key for part in PRODUCTS)]
    return sum(own) / 1e6, sum(found.count for found in operators)


class Measured(NamedTuple):
    """Seconds of all repetitions of each way, and for the first token `busy_seconds` of several."""

    times: dict[str, list[float]]
    busy: dict[str, list[tuple[float, int]]]


def time_ways(model: CausalLM, setting: Setting, length: int) -> Measured:
    """Seconds to the first token after one document, with and without chunks, and to register and to load it."""
    vocab_size, generator = min(LARGEST_TOKEN, model.config.vocab_size), torch.Generator().manual_seed(0)
    tokens = torch.randint(vocab_size, (length + setting.question,), generator=generator)
    document, question = tokens[:length].tolist(), tokens[length:].tolist()
    memory = make_memory(model, length + setting.question, num_copies=4)
    engine = memory.engine
    one, several = (register_pieces(memory, document, count) for count in (1, setting.pieces))
    contexts = {"one chunk": memory.context(one), f"{setting.pieces} chunks": memory.context(several)}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "document.safetensors"
        memory.save(one[0], path)

        def add(register: Callable[[], str]) -> None:
            with registered(memory, [register()]):
                pass

        first_token: dict[str, Callable[[], object]] = {
            PLAIN: lambda: generate(engine, document + question, 1),
            **{
                name: lambda context=context: generate(engine, question, 1, context)
                for name, context in contexts.items()
            },
            ALONE: lambda: generate(engine, question, 1),
        }
        ways = first_token | {
            "register": lambda: add(lambda: memory.register(document[::-1])),  # another text: the first one is there
            "load": lambda: add(lambda: memory.load(path, "loaded")),
        }
        times: dict[str, list[float]] = {way: [] for way in ways}
        for round_number in range(setting.repetitions + 1):
            for way, run in ways.items():
                seconds = seconds_of(run, model.device)
                if round_number:  # the first round is a warm-up
                    times[way].append(seconds)
        busy = {way: [busy_seconds(run, model.device) for _ in range(5)] for way, run in first_token.items()}
    return Measured(times, busy)


def time_rows(
    measured: Measured, model: CausalLM, setting: Setting, machine: Machine, length: int
) -> list[results.Row]:
    """The times of one document beside their bounds, and the parts of them that kernels or matrix products take."""
    shape, size = model_shape(model.config), setting.dtype.itemsize
    total, rows = length + setting.question, []
    prefill = model_step_cost(shape, total, total, size).seconds(machine)
    behind, alone = (
        model_step_cost(shape, setting.question, n, size).seconds(machine) for n in (total, setting.question)
    )
    computed = model_step_cost(shape, length, length, size).seconds(machine)
    written = length * page_bytes(model.attention_specs, 1, setting.dtype) / machine.bandwidth
    bounds = {
        PLAIN: (prefill, "the document and the question computed at the machine's rates"),
        ALONE: (alone, "the question computed over its own keys at the machine's rates"),
        "register": (computed, "the document computed at the machine's rates"),
        "load": (written, "its keys and values read once at the measured bandwidth of the device's memory"),
    }
    for way, own in measured.times.items():
        figure = way if way in ("register", "load") else "time to first token"
        bound, source = bounds.get(way, (behind, "the question computed over all keys at the machine's rates"))
        case: dict[str, results.Setting] = {"document": length}
        if figure != way:
            case["way"] = way
        rows.append(results.Row(figure, statistics.median(own), "s", bound, source, case, (min(own), max(own))))
        print(rows[-1].cells()[:5], flush=True)
    inside, count = ("kernels", "kernels") if model.device.type == "cuda" else ("matrix products", "operators")
    for way, of_calls in measured.busy.items():
        seconds = [spent for spent, _ in of_calls]
        number = statistics.median(found for _, found in of_calls)
        case = {"document": length, "way": way}
        reference = "none: a part of the time to first token, from a profile"
        rows.append(
            results.Row(
                f"time in {inside}",
                statistics.median(seconds),
                "s",
                None,
                reference,
                case,
                (min(seconds), max(seconds)),
            )
        )
        rows.append(results.Row(f"number of {count}", number, count, None, reference, case))
        print(*(row.cells()[:3] for row in rows[-2:]), flush=True)
    return rows


# --- quality ---------------------------------------------------------------------------------------------------------


class Passage(NamedTuple):
    """A piece of real text."""

    context: list[int]
    continuation: list[int]


def prose(chapter: Path) -> str:
    """The longer paragraphs of a chapter, without code, tables, headings and figures."""
    text = "".join(without_sources(chapter.read_text(encoding="utf-8")).split("```")[::2])
    paragraphs = [" ".join(paragraph.split()) for paragraph in text.split("\n\n")]
    return "\n\n".join(p for p in paragraphs if len(p) > 200 and p[0].isalpha())


def passages(encode: Callable[[str], list[int]], setting: Setting) -> list[Passage]:
    """Passages of equal length from each chapter, as far apart as the chapter allows, and at least half a passage."""
    found = []
    length = setting.context + setting.continuation
    for chapter in sorted((repository_root() / "chapters").glob("*/[0-9]*.md")):
        tokens = encode(prose(chapter))
        room = len(tokens) - length
        count = min(setting.passages, 1 + room // (length // 2)) if room >= 0 else 0
        for start in (room * i // max(count - 1, 1) for i in range(count)):
            own = tokens[start : start + length]
            found.append(Passage(own[: setting.context], own[setting.context :]))
    return found


class Mode(NamedTuple):
    """A way to give the model a passage's context, and the number of chunks in which it has it."""

    name: str
    chunks: int = 0

    @property
    def begun(self) -> bool:
        """Whether the prompt has the fixed beginning."""
        return self.name in (PLAIN_BEGUN, DROPPED_BEGUN, COMPOSED_BEGUN, AFTER_BEGINNING)


class Scores(NamedTuple):
    """What one mode gives on one passage.

    Attributes:
        nll: mean negative log-likelihood of the continuation's tokens behind its first one, in nats.
        most_likely: the most likely token at each of these places.
    """

    nll: float
    most_likely: Tensor


def score(memory: ChunkMemory, prompt: list[int], passage: Passage, context: Context = ()) -> Scores:
    """Score a passage's continuation, with which the prompt ends."""
    hidden = memory.hidden_states(prompt, context)[-len(passage.continuation) : -1]
    log_probs = memory.engine.model.compute_logits(hidden).log_softmax(-1)
    targets = torch.tensor(passage.continuation[1:], device=log_probs.device)
    nll = -log_probs.gather(1, targets[:, None]).mean()
    return Scores(float(nll), log_probs.argmax(-1).cpu())


def score_modes(
    memory: ChunkMemory, passage: Passage, setting: Setting, beginning: Sequence[int]
) -> dict[Mode, Scores]:
    """Every mode on one passage, its context cut into each number of chunks.

    Args:
        memory: chunk memory without chunks.
        passage: the passage.
        setting: the numbers of chunks.
        beginning: tokens of the fixed beginning.
    """
    continuation, whole, begin = passage.continuation, passage.context + passage.continuation, list(beginning)
    scores = {
        Mode(PLAIN): score(memory, whole, passage),
        Mode(DROPPED): score(memory, continuation, passage),
        Mode(PLAIN_BEGUN): score(memory, begin + whole, passage),
        Mode(DROPPED_BEGUN): score(memory, begin + continuation, passage),
    }
    most = max(setting.chunks)
    with registered(memory, register_pieces(memory, passage.context, most, chained=True)) as context:
        scores[Mode(EXACT, most)] = score(memory, continuation, passage, context)
    for count in setting.chunks:
        with registered(memory, names := register_pieces(memory, passage.context, count)) as context:
            in_place = tuple(replace(chunk, query_offset=0) for chunk in context)
            scores[Mode(COMPOSED, count)] = score(memory, continuation, passage, context)
            scores[Mode(IN_PLACE, count)] = score(memory, continuation, passage, in_place)
            with registered(memory, [first := memory.register(begin)]):
                context = memory.context([first, *names])
                scores[Mode(COMPOSED_BEGUN, count)] = score(memory, continuation, passage, context)
        first = memory.register(begin)
        names = register_pieces(memory, passage.context, count, after=first)
        with registered(memory, [first, *names]) as context:
            scores[Mode(AFTER_BEGINNING, count)] = score(memory, continuation, passage, context)
    return scores


def of_means(values: np.ndarray, reduce: Callable[[np.ndarray], np.ndarray]) -> tuple[float, tuple[float, float]]:
    """Return a function of means over passages, and its 95% bootstrap interval: passages are drawn with replacement.

    Args:
        values: [passages, figures].
        reduce: computes the function from the means, [..., figures].
    """
    drawn = np.random.default_rng(0).integers(len(values), size=(10_000, len(values)))
    low, high = np.percentile(reduce(values[drawn].mean(1)), [2.5, 97.5])
    return float(reduce(values.mean(0))), (float(low), float(high))


def mean(values: Sequence[float]) -> tuple[float, tuple[float, float]]:
    """Return a mean over passages and its interval."""
    return of_means(np.array(values)[:, None], lambda means: means[..., 0])


def ratio(values: Sequence[float], others: Sequence[float]) -> tuple[float, tuple[float, float]]:
    """Return the ratio of two means over the same passages and its interval."""
    return of_means(np.array([values, others]).T, lambda means: means[..., 0] / means[..., 1])


def quality_rows(scores: Sequence[dict[Mode, Scores]]) -> list[results.Row]:
    """Each mode on all passages, beside full recompute of the same prompt."""
    rows = []
    for mode in scores[0]:
        own = [of_passage[mode] for of_passage in scores]
        plain = [of_passage[Mode(PLAIN_BEGUN if mode.begun else PLAIN)] for of_passage in scores]
        dropped = [of_passage[Mode(DROPPED_BEGUN if mode.begun else DROPPED)] for of_passage in scores]
        figures = [("negative log-likelihood", "nats/token", mean([score.nll for score in own]))]
        if mode.name not in (PLAIN, PLAIN_BEGUN):
            above = [a.nll - b.nll for a, b in zip(own, plain, strict=True)]
            worth = [a.nll - b.nll for a, b in zip(dropped, plain, strict=True)]
            same = [float((a.most_likely == b.most_likely).float().mean()) for a, b in zip(own, plain, strict=True)]
            figures.append((ABOVE, "nats/token", mean(above)))
            figures.append((LOST, "of all", ratio(above, worth)))
            figures.append(("same most likely token", "of all", mean(same)))
        case: dict[str, results.Setting] = {"mode": mode.name} | ({"chunks": mode.chunks} if mode.chunks else {})
        reference = "none: full recompute is what it is compared with"
        rows += [
            results.Row(figure, value, unit, None, reference, case, ends) for figure, unit, (value, ends) in figures
        ]
    for row in rows:
        print(row.cells()[:3], flush=True)
    return rows


def measure_quality(
    model: CausalLM, texts: Sequence[Passage], setting: Setting, beginning: Sequence[int]
) -> list[results.Row]:
    """All modes on all passages."""
    memory = make_memory(model, len(beginning) + setting.context + setting.continuation, num_copies=3)
    return quality_rows([score_modes(memory, passage, setting, beginning) for passage in texts])


# --- computing some tokens again -------------------------------------------------------------------------------------


class Cache(NamedTuple):
    """Keys and values of a text in each layer, at true positions."""

    keys: list[Tensor]
    values: list[Tensor]

    def copy(self) -> Cache:
        return Cache([k.clone() for k in self.keys], [v.clone() for v in self.values])


@torch.inference_mode()
def run_rows(model: CausalLM, token_ids: Tensor, rows: Tensor, cache: Cache, visible: Tensor) -> Tensor:
    """Run some tokens of a text. Their keys and values take the place of those in the cache, which they attend to.

    Args:
        model: a model whose layers have no window.
        token_ids: [n] the text.
        rows: [r] positions of the tokens to run, ascending.
        cache: keys and values of all tokens; those of `rows` are overwritten.
        visible: [n, n] whether a token sees another.

    Returns:
        Final hidden states, [r, hidden].
    """

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        spec = model.attention_specs[layer]
        cache.keys[layer][rows], cache.values[layer][rows] = k, v
        mask = visible[rows]
        return masked_attention(q, cache.keys[layer], cache.values[layer], scale=spec.scale, mask=mask)

    return model(token_ids[rows], rows, attend)


def score_again(
    model: CausalLM, passage: Passage, num_chunks: int, counts: Sequence[int]
) -> dict[tuple[str, int], float]:
    """Negative log-likelihood of a passage's continuation after composed chunks, some tokens of which are run again.

    Returns:
        By the place in each chunk of the tokens that are run again, and their number: ("first", 4). The number is 0
        for chunks as they are, and for full recompute ("all", 0).
    """
    length, device = len(passage.context), model.device
    token_ids = torch.tensor(passage.context + passage.continuation, device=device)
    index = torch.arange(len(token_ids), device=device)
    chunk = torch.clamp(index * num_chunks // length, max=num_chunks)
    place = index - torch.searchsorted(chunk, chunk)
    size = torch.bincount(chunk)[chunk]
    causal = index <= index[:, None]
    composed = causal & (chunk == chunk[:, None])
    shape = [(len(token_ids), spec.num_kv_heads, spec.head_dim) for spec in model.attention_specs]
    empty = Cache(*([torch.zeros(s, dtype=model.dtype, device=device) for s in shape] for _ in range(2)))
    run_rows(model, token_ids, index[:length], empty, composed)
    later = (chunk > 0) & (index < length)
    chosen = {("none", 0): later & False, ("all", 0): later}
    for count in counts:
        chosen["first", count] = later & (place < count)
        chosen["last", count] = later & (place >= size - count)
    found = {}
    for way, again in chosen.items():
        cache = empty.copy()
        run_rows(model, token_ids, index[again], cache, causal)
        hidden = run_rows(model, token_ids, index[length:], cache, causal)[:-1]
        log_probs = model.compute_logits(hidden).log_softmax(-1)
        found[way] = -float(log_probs.gather(1, token_ids[length + 1 :, None]).mean())
    return found


def measure_again(model: CausalLM, texts: Sequence[Passage], setting: Setting) -> list[results.Row]:
    """What computing the first or the last tokens of each chunk again recovers, beside full recompute."""
    chunks = max(setting.chunks)
    scores = [score_again(model, passage, chunks, setting.again) for passage in texts]
    above = {way: [found[way] - found["all", 0] for found in scores] for way in scores[0]}
    composed = above["none", 0]
    rows = []
    for (place, count), own in above.items():
        if place == "all":
            continue
        case: dict[str, results.Setting] = {"again": place, "tokens of each chunk": count, "chunks": chunks}
        recovered = ratio([c - o for c, o in zip(composed, own, strict=True)], composed)
        reference = "none: full recompute of the same passages is what it is compared with"
        for figure, unit, (value, ends) in (
            (AGAIN_ABOVE, "nats/token", mean(own)),
            (AGAIN_RECOVERED, "of all", recovered),
        ):
            if figure == AGAIN_ABOVE or count:
                rows.append(results.Row(figure, value, unit, None, reference, case, ends))
                print(rows[-1].cells()[:3], flush=True)
    return rows


# --- prediction ------------------------------------------------------------------------------------------------------


def prediction(shape: ModelShape, setting: Setting, machine: Machine) -> dict[str, str]:
    """Derive what the README predicts for the times: each quantity with its value, from the machine's rates."""
    size = setting.dtype.itemsize

    def seconds(num_tokens: int, num_keys: int) -> float:
        return model_step_cost(shape, num_tokens, num_keys, size).seconds(machine)

    predicted = {}
    for length in setting.documents:
        total = length + setting.question
        plain, chunked = seconds(total, total), seconds(setting.question, total)
        predicted[f"{machine.name}: first token after a document of {length:,} tokens"] = (
            f"{quantity(plain, 's')} computed, {quantity(chunked, 's')} after a chunk: {plain / chunked:.0f} times"
        )
    return predicted


def predictions() -> str:
    """Derive the README's predictions for both devices."""
    embedded = model_shape(open_checkpoint(MODEL).config)
    qwen3 = model_shape(ModelConfig.from_hf(QWEN3_0_6B.to_dict()))
    return predicted(prediction(embedded, SETTINGS["cpu"], CPU) | prediction(qwen3, SETTINGS["cuda"], H200))


def main(arguments: Sequence[str] | None = None) -> None:
    options = command_line(__doc__, predictions)
    options.add_argument("--only", nargs="+", choices=SECTIONS, help="measure these sections only")
    chosen = options.parse_args(arguments)
    device, setting = torch.device(chosen.device), SETTINGS[chosen.device]
    sections = chosen.only or setting.sections
    embedded, tokenizer, of_quality = None, None, dict[str, results.Setting]()
    if device.type == "cpu" or set(sections) - {TIMES}:
        checkpoint = open_checkpoint(MODEL)
        embedded = load_model(checkpoint, Parts(), torch.float32, device)
        tokenizer = load_tokenizer(checkpoint)
    rows: list[results.Row] = []
    if TIMES in sections:
        model = embedded if device.type == "cpu" else random_model(QWEN3_0_6B, setting.dtype, device)
        assert model
        measured, machine = {}, measure_machine(device, setting.dtype)
        for length in setting.documents:
            measured[length] = time_ways(model, setting, length)
            gc.collect()
            # A machine that is busy with something else looks slower than it is, and its bounds would be beaten.
            again = measure_machine(device, setting.dtype)
            bandwidth, flops = max(machine.bandwidth, again.bandwidth), max(machine.flops, again.flops)
            machine = replace(machine, bandwidth=bandwidth, flops=flops)
        for length, times in measured.items():
            rows += time_rows(times, model, setting, machine, length)
    if embedded and tokenizer and set(sections) - {TIMES}:
        texts = passages(lambda text: tokenizer.encode(text, verbose=False), setting)
        if QUALITY in sections:
            rows += measure_quality(embedded, texts, setting, tokenizer.encode(BEGINNING))
        if AGAIN in sections:
            rows += measure_again(embedded, texts, setting)
        of_quality = {
            "model of the quality": "SmolLM2-135M",
            "dtype of the quality": "float32",
            "passages": len(texts),
            "tokens of context": setting.context,
            "tokens of continuation": setting.continuation,
        }
    parameters: dict[str, results.Setting] = {
        "model of the times": "SmolLM2-135M" if device.type == "cpu" else "Qwen3-0.6B's shape",
        "dtype": str(setting.dtype).removeprefix("torch."),
        "question": setting.question,
        "repetitions": setting.repetitions,
    }
    result = results.new_result(EXPERIMENT, rows, parameters | of_quality, chosen.device)
    if chosen.only:
        result = results.with_recorded(result, chosen.out)
    record(result, chosen.out)


if __name__ == "__main__":
    main()
