"""Answers in the terminal, as they are generated, and what they cost."""

from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from typing import NamedTuple

from rich.console import Console
from rich.live import Live
from rich.rule import Rule
from rich.text import Text

from mini_engine.errors import RequestError
from mini_engine.llm import LLM, TextEngine
from mini_engine.observe.metrics import Metrics
from mini_engine.observe.watch import Watch, watched_engine
from mini_engine.outputs import RequestOutput
from mini_engine.roofline import measure_machine
from mini_engine.sampling_params import SamplingParams
from mini_engine.terminal import printable, show

__all__ = ["Batch", "answer", "stream", "watched_engine"]


class Batch(NamedTuple):
    """Requests for one model.

    Attributes:
        llm: the model.
        texts: the prompts as given.
        prompts: their tokens.
        params: the sampling parameters of all requests.
    """

    llm: LLM
    texts: Sequence[str]
    prompts: list[list[int]]
    params: SamplingParams


def stream(
    console: Console, engine: TextEngine, watch: Watch | None, batch: Batch
) -> tuple[list[RequestOutput], Metrics]:
    """Serve requests and print the answers in order: as they are generated, or at the end if `watch` draws the engine.

    Returns:
        The outputs, in order, and the cost of the run.

    Raises:
        RequestError: the error of the first request that could not be served, after all others have been served.
    """
    metrics = Metrics()
    outputs: dict[int, RequestOutput] = {}
    texts = [""] * len(batch.texts)  # not printed yet

    def print_answers() -> Iterator[None]:
        """Print the answers in order; yield wherever the text of the current one is not complete yet."""
        for index, title in enumerate(batch.texts):
            console.print(Rule(Text(printable(title), style="bold cyan"), align="left", style="dim"))
            while index not in outputs:
                show(console, texts[index], end="")
                texts[index] = ""
                yield
            show(console, texts[index], end="\n\n")

    printing = print_answers()
    next(printing)
    live = Live(console=console, auto_refresh=False, transient=True, vertical_overflow="crop")
    with live if watch else nullcontext():
        for piece in engine.stream_batch(batch.prompts, batch.params):
            metrics.add(piece)
            texts[piece.index] += piece.text
            if piece.output:
                outputs[piece.index] = piece.output
            if watch is None:
                next(printing, None)
            elif console.is_terminal:
                live.update(watch.view(console.width, console.height - 1), refresh=True)
    next(printing, None)
    for index, output in sorted(outputs.items()):
        if output.error:
            raise RequestError(f"prompt {index + 1}: {output.error}") from output.error
    return [outputs[index] for index in range(len(outputs))], metrics


def answer(console: Console, engine: TextEngine, watch: Watch | None, batch: Batch) -> list[RequestOutput]:
    """Serve requests, and print the answers and their cost.

    Returns:
        The outputs, in order.

    Raises:
        RequestError: the error of the first request that could not be served, after all others have been served.
    """
    outputs, metrics = stream(console, engine, watch, batch)
    model = batch.llm.model
    console.print(metrics.table(model, measure_machine(model.device, model.dtype), engine.engine))
    if watch:
        show(console, watch.trace.summary())
    return outputs
