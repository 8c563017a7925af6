"""The engine on the reader's own parts: which they are, whether the output is still right, and how fast it is."""

import statistics
from collections.abc import Sequence
from dataclasses import fields, replace
from typing import Any

from rich.console import Console
from rich.table import Table

from book.grading.chapter import ROOT
from book.grading.parts import PARTS, Part, changed_since, finished_parts
from book.grading.progress import Progress, ProgressError
from mini_engine import LLM, Parts, RequestOutput
from mini_engine.attention.torch import TorchBackend
from mini_engine.chunks import ChunkedLLM
from mini_engine.llm import TextEngine
from mini_engine.models.qwen3 import Qwen3Attention
from mini_engine.observe.answers import Batch
from mini_engine.observe.metrics import Metrics
from mini_engine.observe.watch import page_size_of

WINDOW = 96  # keys; fewer than a short conversation has
GRAPH_SIZE = 8  # requests; more than most commands serve
ROUNDS, TIMED_TOKENS = 3, 16


def homework_parts(console: Console) -> Parts:
    """Return the reader's finished parts, with the reference for the rest.

    It says so if no part is finished, and if a chapter has changed since it was graded.
    """
    mine = finished_parts()
    changed = changed_since()
    for chapter, graded in changed.items():
        console.print(
            f"chapters/{chapter} passed on {graded} and has changed since: run [bold]pytest chapters/{chapter}[/]."
        )
    if not mine and not changed:
        console.print(
            "No part is yours yet: a part counts once its grader is green. Begin with `make lab`, chapter 01."
        )
    return replace(Parts(), **mine)


def homework_options(parts: Parts) -> dict[str, Any]:
    """Return options under which the reader's parts have something to do.

    If parts need different backends, those of the latest chapter decide.
    """
    mine = {field.name for field in fields(Parts) if getattr(parts, field.name) is not field.default}
    options: dict[str, Any] = {"attn_backend": "torch", "dtype": "float32"}  # float32: outputs can be compared
    if mine & {"chunk_levels", "find_levels"}:
        options["attn_backend"] = "cascade"
    elif "plan_work" in mine:
        options["attn_backend"] = "split_kv"
    elif mine & TorchBackend.bypasses:
        options["attn_backend"] = "flex"
    elif "merge_states" in mine:
        options["attn_backend"] = "chunked"  # others merge states only in sequences of thousands of tokens
    if "pages_to_evict" in mine:
        options["sliding_window"] = WINDOW
    # A page table of the reader's own need not share pages.
    options["enable_prefix_caching"] = bool(mine & {"match_prefix", "copy_on_write", "find_levels"})
    if "pad_decodes" in mine:
        options["cuda_graph_batch_sizes"] = (GRAPH_SIZE,)  # on a CPU nothing is captured, and the padding is the same
    return options


def print_parts(console: Console, llm: LLM) -> None:
    """Print which parts of an engine are the reader's, and which of those it uses."""
    mine = [part for part in PARTS if getattr(llm.parts, part.name) is not getattr(Parts(), part.name)]
    if not mine:
        return
    table = Table(title="Your parts of the engine", title_justify="left")
    for column in ("part", "runs on", "from"):
        table.add_column(column)
    for part in mine:
        table.add_row(part.title, _runs_on(part, llm), f"chapters/{part.chapter}")
    console.print(table)
    console.print(f"The other {len(PARTS) - len(mine)} parts are the reference's.")
    if llm.config.sliding_window == WINDOW:
        console.print(f"A sliding window of {WINDOW} keys gives your eviction something to do.")


def _runs_on(part: Part, llm: LLM) -> str:
    if part.name in llm.engine.backend.bypasses:
        return f"[dim]not used by {llm.config.attn_backend}[/]"
    classes = {cls for layer in llm.model.layers for cls in type(layer).__mro__}
    modules = {cls.__module__.replace(".", "/") + ".py" for cls in classes}
    without_qk_norm = not any(isinstance(module, Qwen3Attention) for module in llm.model.modules())
    is_other_family = part.module.startswith("mini_engine/models/") and part.module not in modules
    if is_other_family or (part.name == "qk_norm" and without_qk_norm):
        return "[dim]not used by this model[/]"
    return "[bold green]yours[/], with --stop" if part.name == "scan_stop" else "[bold green]yours[/]"


def small_engine(batch: Batch) -> TextEngine:
    """Return an engine with pages for two thirds of the requests, so that some are preempted."""
    page_size, longest = page_size_of(batch.llm), batch.llm.config.max_model_len
    limit = batch.params.max_tokens or longest
    pages = [-(-min(len(prompt) + limit, longest) // page_size) for prompt in batch.prompts]
    return batch.llm.with_options(num_pages=max(*pages, sum(pages) * 2 // 3), page_size=page_size)


def compare_with_reference(
    console: Console, model: str, batch: Batch, mine: TextEngine, outputs: Sequence[RequestOutput]
) -> None:
    """Run the same requests on the reference parts, print the first difference and both speeds, and record the speeds.

    Without a part of the reader's there is nothing to compare.

    Args:
        console: where to print.
        model: what the model was loaded from.
        batch: the requests.
        mine: the engine on the reader's parts.
        outputs: its outputs.
    """
    if batch.llm.parts == Parts():
        return
    reference = LLM(model, mine.engine.config)
    expected = reference.generate(batch.prompts, batch.params)
    wrong = [
        i
        for i, (own, other) in enumerate(zip(outputs, expected, strict=True))
        if (own.token_ids, own.text) != (other.token_ids, other.text)
    ]
    failed = mine.engine.metrics.failed_steps
    if wrong:
        console.print(f"[bold red]Answer {wrong[0] + 1} differs from the reference's[/]: one of your parts is wrong.")
    elif failed:
        console.print(
            f"[bold red]Steps with your parts that raised an error: {failed}.[/] The warnings name it. The engine "
            "computed their requests again, one at a time, so the tokens are right all the same."
        )
    else:
        console.print("[bold green]Every token equals the reference's.[/]")
    # Both engines are warm now: what they compile is compiled. They take turns, so a busy machine slows both down.
    rates = [(_decode_rate(mine, batch), _decode_rate(reference, batch)) for _ in range(ROUNDS)]
    yours, theirs = zip(*rates, strict=True)
    if not all(yours + theirs):
        return  # outputs of one token have no decode step
    console.print(
        f"Decode, median of {ROUNDS} runs: yours {_spread(yours)} tokens/s, the reference {_spread(theirs)} tokens/s."
    )
    try:
        Progress(ROOT).record_speed(statistics.median(yours), statistics.median(theirs))
    except ProgressError as error:
        console.print(str(error), style="yellow", markup=False)


def compare_over_chunks(console: Console, model: str, batch: Batch) -> None:
    """Register the first two prompts as chunks, and serve the last one after them, in both orders.

    Without the reader's `chunk_levels`, or on another backend than `cascade`, there is nothing to compare.

    Args:
        console: where to print.
        model: what the model was loaded from.
        batch: the prompts.
    """
    is_theirs = batch.llm.parts.chunk_levels is Parts().chunk_levels
    if is_theirs or batch.llm.config.attn_backend != "cascade":
        return
    outputs = []
    for engine in (batch.llm, LLM(model, batch.llm.config)):
        chunked = ChunkedLLM(engine)
        names = [chunked.register_chunk(prompt) for prompt in batch.prompts[:2]]
        both = chunked.generate([names, names[::-1]], [batch.prompts[-1]] * 2, batch.params)
        outputs.append([output.token_ids for output in both])
    if outputs[0] == outputs[1]:
        console.print("[bold green]After two chunks, in both orders, every token equals the reference's.[/]")
    else:
        console.print("[bold red]After two chunks, the answer differs from the reference's[/]: look at chunk_levels.")


def _decode_rate(engine: TextEngine, batch: Batch) -> float:
    metrics = Metrics()
    for piece in engine.stream_batch(batch.prompts, replace(batch.params, max_tokens=TIMED_TOKENS)):
        metrics.add(piece)
    return metrics.decode_rate


def _spread(rates: Sequence[float]) -> str:
    return f"{statistics.median(rates):.1f} ({min(rates):.1f} to {max(rates):.1f})"
