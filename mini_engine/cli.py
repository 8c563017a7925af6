"""The command line: `mini-engine generate | chat | bench | trace`."""

import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console, Group
from rich.live import Live
from rich.panel import Panel
from rich.rule import Rule
from rich.text import Text

from mini_engine.errors import ConfigError, MiniEngineError, RequestError

if TYPE_CHECKING:  # torch and transformers take seconds to import: `--help` should not wait for them
    from mini_engine.engine import LLMEngine
    from mini_engine.llm import LLM
    from mini_engine.metrics import Metrics
    from mini_engine.outputs import RequestOutput
    from mini_engine.parts import Parts
    from mini_engine.sampling_params import SamplingParams

app = typer.Typer(
    help="An inference engine to read: generate text, chat, measure.",
    no_args_is_help=True,
    rich_markup_mode="rich",
    add_completion=False,
    pretty_exceptions_enable=False,
)
console = Console()
HOMEWORK_WINDOW = 96  # shorter than a short conversation

EXAMPLES = (
    "What is the capital of France, and what is it known for?",
    "Explain in two sentences why the sky is blue.",
    "Write a haiku about a library at night.",
    "Name three uses of a paperclip.",
)

Model = Annotated[str, typer.Option("--model", "-m", help="Embedded name, folder, GGUF file or hub id.")]
Backend = Annotated[str | None, typer.Option("--attn-backend", "-b", help="Attention backend; default torch.")]
Dtype = Annotated[str, typer.Option(help="auto, float32, bfloat16, float16 or float64.")]
Device = Annotated[str, typer.Option(help="auto, cpu or cuda.")]
MaxTokens = Annotated[int, typer.Option("--max-tokens", "-n", help="End each answer after this many tokens.")]
Temperature = Annotated[float, typer.Option("--temperature", "-t", help="0 always takes the likeliest token.")]
TopK = Annotated[int, typer.Option(help="Sample from the k likeliest tokens; 0 from all.")]
TopP = Annotated[float, typer.Option(help="Sample from the likeliest tokens that reach this probability.")]
MinP = Annotated[float, typer.Option(help="Leave out tokens below this share of the largest probability.")]
Penalty = Annotated[float, typer.Option("--repetition-penalty", help="Above 1 makes repeated tokens less likely.")]
Seed = Annotated[int | None, typer.Option(help="Makes sampled output reproducible.")]
Stop = Annotated[list[str] | None, typer.Option(help="End at this text. May be given several times.")]
Template = Annotated[Path | None, typer.Option(help="Jinja file to use instead of the model's chat template.")]
Homework = Annotated[bool, typer.Option("--homework", help="Run on your own finished parts of the engine.")]
Watch = Annotated[bool, typer.Option("--watch", help="Show the pages of the KV cache and the requests, live.")]
PrefixSharing = Annotated[bool, typer.Option("--prefix-sharing", help="Share pages of equal beginnings.")]
Window = Annotated[int | None, typer.Option("--sliding-window", help="Let no layer see further back; needs few pages.")]
NumPages = Annotated[int | None, typer.Option(help="With --watch: pages of the KV cache, 16 tokens each.")]


@app.command()
def generate(
    prompts: Annotated[list[str] | None, typer.Argument(help="What to answer. Without any, four examples.")] = None,
    raw: Annotated[bool, typer.Option("--raw", help="Continue the text instead of answering it.")] = False,
    model: Model = "smollm2-135m-instruct",
    attn_backend: Backend = None,
    dtype: Dtype = "auto",
    device: Device = "auto",
    max_tokens: MaxTokens = 96,
    temperature: Temperature = 0.0,
    top_k: TopK = 0,
    top_p: TopP = 1.0,
    min_p: MinP = 0.0,
    repetition_penalty: Penalty = 1.0,
    seed: Seed = None,
    stop: Stop = None,
    chat_template: Template = None,
    prefix_sharing: PrefixSharing = False,
    sliding_window: Window = None,
    homework: Homework = False,
    watch: Watch = False,
    num_pages: NumPages = None,
) -> None:
    """Answer several prompts at once, and say what that cost."""
    from mini_engine.sampling_params import SamplingParams
    from mini_engine.sequence import prompt_tokens

    params = SamplingParams(
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        repetition_penalty=repetition_penalty,
        max_tokens=max_tokens,
        seed=0 if homework and seed is None else seed,  # so that both runs draw the same numbers
        stop=stop or (),
    )
    texts = prompts or list(EXAMPLES)
    empty = [i for i, text in enumerate(texts, 1) if not text.strip()]
    if empty:
        raise RequestError(f"prompt {empty[0]} is empty; give it some text")
    _check_watch(watch, num_pages)
    template = _read_template(chat_template)
    llm = _load(model, attn_backend, dtype, device, homework, prefix_sharing, sliding_window)
    if raw:
        tokens = [prompt_tokens(llm.tokenizer, text) for text in texts]
    else:
        tokens = [llm.chat_prompt([{"role": "user", "content": text}], chat_template=template) for text in texts]
    if watch:
        outputs, rate = _run_watched(llm, texts, tokens, params, num_pages)
    else:
        outputs, rate = _run(llm, _small_engine(llm, tokens, params) if homework else llm.engine, texts, tokens, params)
    if homework:
        from book.grading.engine import compare_with_reference

        compare_with_reference(console, llm, model, tokens, params, outputs, rate)
    elif not prompts:
        console.print(
            "\nNext: [bold]mini-engine chat[/] talks with the model, [bold]make lab[/] opens chapter 1, "
            "where you begin to write this engine."
        )


@app.command()
def chat(
    system: Annotated[str | None, typer.Option(help="What the model should know or be before you speak.")] = None,
    model: Model = "smollm2-135m-instruct",
    attn_backend: Backend = None,
    dtype: Dtype = "auto",
    device: Device = "auto",
    max_tokens: MaxTokens = 512,
    temperature: Temperature = 0.7,
    top_k: TopK = 0,
    top_p: TopP = 0.9,
    min_p: MinP = 0.0,
    repetition_penalty: Penalty = 1.1,
    seed: Seed = None,
    stop: Stop = None,
    chat_template: Template = None,
    prefix_sharing: PrefixSharing = False,
    sliding_window: Window = None,
    homework: Homework = False,
    watch: Watch = False,
    num_pages: NumPages = None,
) -> None:
    """Talk with the model. An empty line or Ctrl-D ends."""
    from mini_engine.sampling_params import SamplingParams

    params = SamplingParams(
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        repetition_penalty=repetition_penalty,
        max_tokens=max_tokens,
        seed=seed,
        stop=stop or (),
    )
    _check_watch(watch, num_pages)
    template = _read_template(chat_template)
    llm = _load(model, attn_backend, dtype, device, homework, prefix_sharing, sliding_window)
    messages = [{"role": "system", "content": system}] if system else []
    if watch:
        from mini_engine.watch import watch_chat

        return watch_chat(console, llm, messages, params, template, num_pages)
    while True:
        try:
            line = console.input("[bold cyan]you[/] ")
        except EOFError:
            line = ""
        if not line.strip():
            return
        messages.append({"role": "user", "content": line})
        answer = ""
        start, first, count = time.perf_counter(), 0.0, 0
        console.print("[bold green]model[/] ", end="")
        for piece in llm.stream_batch([llm.chat_prompt(messages, chat_template=template)], params):
            if piece.output and piece.output.error:
                raise piece.output.error
            first = first or time.perf_counter() - start
            count += 1
            answer += piece.text
            console.print(piece.text, end="", markup=False, highlight=False, soft_wrap=True)
        seconds = time.perf_counter() - start
        console.print(f"\n[dim]{count} tokens, {count / seconds:.0f} tokens/s, first after {first * 1e3:.0f} ms[/]")
        messages.append({"role": "assistant", "content": answer})


@app.command()
def bench(
    peers: Annotated[
        list[str] | None,
        typer.Option(
            "--peer", help="Also measure beside ours: transformers; for throughput transformers-continuous as well."
        ),
    ] = None,
    workload: Annotated[
        str, typer.Option(help="batches: requests side by side; throughput: many requests of mixed lengths.")
    ] = "batches",
    batch_sizes: Annotated[list[int] | None, typer.Option("--batch-size", help="May be given several times.")] = None,
    dtypes: Annotated[list[str] | None, typer.Option("--dtype", help="May be given several times.")] = None,
    model: Model = "smollm2-135m-instruct",
    attn_backend: Backend = None,
    device: Device = "auto",
    prompt_tokens: Annotated[int, typer.Option(help="Average tokens of a prompt; lengths vary around it.")] = 64,
    max_tokens: MaxTokens = 64,
    rounds: Annotated[int, typer.Option(help="Runs of each; the median counts.")] = 3,
) -> None:
    """Measure tokens/s beside the bound, and beside a peer in the same run."""
    from mini_engine.bench import run_bench
    from mini_engine.throughput import run_throughput

    peers = peers or []
    if workload not in ("batches", "throughput"):
        raise ConfigError(f"unknown workload {workload!r}; choose batches or throughput")
    if workload == "throughput":
        run_throughput(
            console,
            model=model,
            attn_backend=attn_backend or "torch",
            device=device,
            peers=peers,
            dtypes=dtypes or ["float32", "bfloat16"],
            rounds=rounds,
        )
        return
    if len(peers) > 1:
        raise ConfigError("batches are measured beside one peer: give --peer once, or --workload throughput")
    run_bench(
        console,
        model=model,
        attn_backend=attn_backend or "torch",
        device=device,
        peer=peers[0] if peers else None,
        batch_sizes=batch_sizes or [1, 8],
        dtypes=dtypes or ["float32", "bfloat16"],
        prompt_tokens=prompt_tokens,
        max_tokens=max_tokens,
        rounds=rounds,
    )


@app.command()
def trace(
    out: Annotated[Path, typer.Option("--out", "-o", help="Where to write the trace.")],
    num_pages: Annotated[int, typer.Option(help="Pages of the KV cache: few, so that requests must give way.")] = 36,
    page_size: Annotated[int, typer.Option(help="Tokens of a page.")] = 8,
    max_num_batched_tokens: Annotated[int, typer.Option(help="Most tokens of a step; few cut prompts up.")] = 64,
    model: Model = "smollm2-135m-instruct",
    attn_backend: Backend = None,
    dtype: Dtype = "auto",
    device: Device = "auto",
    prefix_sharing: PrefixSharing = False,
    homework: Homework = False,
) -> None:
    """Serve eight requests from a small pool of pages and write down every step."""
    if not out.parent.is_dir():
        raise ConfigError(f"there is no folder {out.parent} to write the trace to; create it, or choose another path")
    llm = _load(model, attn_backend, dtype, device, homework, prefix_sharing)
    from mini_engine.trace import record_example

    with console.status("serving eight requests"):
        recorded = record_example(
            llm, num_pages=num_pages, page_size=page_size, max_num_batched_tokens=max_num_batched_tokens
        )
    recorded.save(out)
    console.print(recorded.summary(), highlight=False, soft_wrap=True)
    console.print(
        f"Written to {out}: open it at ui.perfetto.dev, or in the book's trace player.", highlight=False, soft_wrap=True
    )


def main() -> None:
    """Run the command line; an error that we raise on purpose is one sentence and exit code 2."""
    try:
        app()
    except MiniEngineError as error:
        Console(stderr=True).print(Text.assemble(("error: ", "bold red"), str(error)), soft_wrap=True)
        sys.exit(2)


def _read_template(path: Path | None) -> str | None:
    if path is None:
        return None
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise RequestError(f"cannot read the chat template {path}: {error}; give a Jinja file") from error


def _load(
    model: str,
    attn_backend: str | None,
    dtype: str,
    device: str,
    homework: bool,
    prefix_sharing: bool = False,
    sliding_window: int | None = None,
) -> "LLM":
    with console.status("loading the model"):
        from mini_engine.llm import LLM
        from mini_engine.metrics import num_parameters

        parts = None
        if homework:
            parts, attn_backend, prefix_sharing, sliding_window = _homework(
                attn_backend, prefix_sharing, sliding_window
            )
            dtype = "float32" if dtype == "auto" else dtype  # in which yours and ours can be compared
        attn_backend = attn_backend or "torch"
        start = time.perf_counter()
        llm = LLM(
            model,
            attn_backend=attn_backend,
            dtype=dtype,
            device=device,
            prefix_sharing=prefix_sharing,
            sliding_window=sliding_window,
            parts=parts,
        )
    console.print(
        f"[dim]{model}: {num_parameters(llm.model) / 1e6:.0f} M parameters in {str(llm.model.dtype).split('.')[-1]} "
        f"on {llm.model.device}, attention backend {attn_backend}, loaded in {time.perf_counter() - start:.1f} s[/]"
    )
    if attn_backend == "flex":
        console.print("[dim]The first steps compile kernels, which takes up to a minute; torch keeps them on disk.[/]")
    return llm


def _homework(
    attn_backend: str | None, prefix_sharing: bool, sliding_window: int | None
) -> "tuple[Parts, str, bool, int | None]":
    """The reader's parts, and the options under which as many of them as possible have something to do."""
    try:
        from book.grading.engine import homework_parts, print_parts
    except ModuleNotFoundError as error:
        raise ConfigError("--homework needs the book: run it in the repository, where chapters/ is") from error
    from dataclasses import fields

    from mini_engine.attention.backend import bypassed_parts
    from mini_engine.parts import Parts

    parts = homework_parts(console)
    mine = {f.name for f in fields(Parts) if getattr(parts, f.name) is not f.default}
    if attn_backend is None and mine & bypassed_parts("torch"):
        attn_backend = "flex"
    elif attn_backend is None and "merge_states" in mine:
        attn_backend = "chunked"  # otherwise only sequences of thousands of tokens would merge
    attn_backend = attn_backend or "torch"
    if "evict_pages" in mine and sliding_window is None:
        sliding_window = HOMEWORK_WINDOW
        console.print(f"A sliding window of {sliding_window} keys gives your evict_pages something to do.")
    print_parts(console, parts, attn_backend, bypassed_parts(attn_backend))
    return parts, attn_backend, prefix_sharing or bool(mine & {"share_prefix", "copy_on_write"}), sliding_window


def _small_engine(llm: "LLM", tokens: list[list[int]], params: "SamplingParams") -> "LLMEngine":
    """An engine for these requests with pages for two thirds of them, so that some are preempted."""
    page_size = llm.small_page_size
    pages = [-(-min(len(t) + params.max_tokens, llm.max_model_len) // page_size) for t in tokens]
    return llm.make_engine(num_pages=max(*pages, sum(pages) * 2 // 3), page_size=page_size)


def _run(
    llm: "LLM", engine: "LLMEngine", texts: list[str], tokens: list[list[int]], params: "SamplingParams"
) -> "tuple[list[RequestOutput], float]":
    from mini_engine.metrics import Metrics
    from mini_engine.roofline import measure_machine

    answers = [""] * len(texts)
    metrics = Metrics(llm.model)
    outputs: dict[int, RequestOutput] = {}
    failed: list[MiniEngineError] = []
    with Live(console=console, refresh_per_second=12, transient=True, vertical_overflow="visible") as live:
        for piece in engine.stream_batch(tokens, params):
            answers[piece.index] += piece.text
            metrics.add(piece)
            if piece.output:
                outputs[piece.index] = piece.output
                failed += [piece.output.error] if piece.output.error else []
            if piece.output and not console.is_terminal:
                _print_answer(texts[piece.index], answers[piece.index])
            live.update(_view(texts, answers, metrics))
    if console.is_terminal:
        for text, answer in zip(texts, answers, strict=True):
            _print_answer(text, answer)
    console.print(metrics.table(measure_machine(llm.model.device, llm.model.dtype)))
    if failed:
        raise failed[0]
    return [outputs[i] for i in range(len(texts))], metrics.decode_rate


def _check_watch(watch: bool, num_pages: int | None) -> None:
    if num_pages is not None and not watch:
        raise ConfigError("--num-pages sizes the pool that --watch shows; add --watch, or leave it out")


def _run_watched(
    llm: "LLM", texts: list[str], tokens: list[list[int]], params: "SamplingParams", num_pages: int | None
) -> "tuple[list[RequestOutput], float]":
    from mini_engine.watch import watch_requests

    outputs, recorded = watch_requests(console, llm, tokens, params, num_pages)
    for text, output in zip(texts, outputs, strict=True):
        _print_answer(text, output.text)
    console.print(recorded.summary(), highlight=False, soft_wrap=True)
    return outputs, recorded.tokens_per_second


def _view(texts: list[str], answers: list[str], metrics: "Metrics") -> Group:
    height = max(3, (console.height - 4) // len(texts) - 2)
    width = console.width - 4
    panels = []
    for text, answer in zip(texts, answers, strict=True):
        lines = Text(answer.strip() or "…").wrap(console, width)[-height:]
        panels.append(Panel(Text("\n").join(lines), title=Text(text, style="bold cyan"), title_align="left"))
    return Group(*panels, Text(metrics.progress(len(texts)), style="dim"))


def _print_answer(text: str, answer: str) -> None:
    console.print(Rule(Text(text, style="bold cyan"), align="left", style="dim"))
    console.print(Text(answer.strip()))
    console.print()
