"""The command line: `mini-engine generate | chat | serve | bench | trace`.

torch and transformers take seconds to import, so a command imports what needs them, and `--help` does not wait.
"""

import os
import sys
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

from cyclopts import App, CycloptsError, Parameter

from mini_engine.bench.options import BenchOptions
from mini_engine.cli_options import (
    EXAMPLES,
    SMALL_POOL,
    Bench,
    Engine,
    EngineOptions,
    Sampling,
    Server,
    given,
    load_served,
    with_file,
)
from mini_engine.errors import ConfigError, MiniEngineError, RequestError
from mini_engine.serving.options import ServerOptions
from mini_engine.terminal import make_console, print_error, read_line, show

CHAT_TOKENS = 4096  # most tokens in the pool of a watched chat

app = App("mini-engine", help="An inference engine made to be read: generate text, chat, measure.", version_flags=())


@app.command
def generate(
    *prompts: str, engine: Engine = None, sampling: Sampling = None, raw: bool = False,
    chat_template: Path | None = None, watch: bool = False,
) -> None:  # fmt: skip
    """Answer several prompts at once, and report what that cost. Greedy unless --temperature is given.

    Args:
        prompts: Prompts to answer; default four examples.
        engine: The model and the engine's options.
        sampling: The sampling parameters.
        raw: Continue the text instead of answering it.
        chat_template: Jinja file to use instead of the model's chat template.
        watch: Draw the pages of the KV cache and the requests, live.
    """
    console, texts = make_console(), prompts or EXAMPLES
    if empty := [number for number, text in enumerate(texts, 1) if not text.strip()]:
        raise RequestError(f"prompt {empty[0]} is empty; give it some text")
    options, template = EngineOptions.of(engine, console), _read_template(chat_template)
    llm, params = options.load(console, sampling, temperature=0.0, max_tokens=96)
    if raw:
        tokens = [llm.tokens_of(text) for text in texts]
    else:
        tokens = [llm.chat_prompt([{"role": "user", "content": text}], chat_template=template) for text in texts]
    from mini_engine.observe.answers import Batch, answer, watched_engine

    batch = Batch(llm, texts, tokens, params)
    if options.homework and not watch:
        return options.homework.answer_and_compare(console, options, batch)
    lengths = [len(prompt) + (params.max_tokens or llm.config.max_model_len or 0) for prompt in tokens]
    serving, view = watched_engine(llm, lengths, options.options) if watch else (llm, None)
    answer(console, serving, view, batch)
    if not prompts and not options.homework:
        console.print("\nNext: [bold]mini-engine chat[/] talks with the model. Chapter 1 begins to write its engine.")


@app.command
def chat(
    *, engine: Engine = None, sampling: Sampling = None, system: str | None = None,
    chat_template: Path | None = None, watch: bool = False,
) -> None:  # fmt: skip
    """Chat with the model. An empty line or Ctrl-D ends the chat.

    Args:
        engine: The model and the engine's options.
        sampling: The sampling parameters.
        system: System message: what the model should know or be.
        chat_template: Jinja file to use instead of the model's chat template.
        watch: Draw the pages of the KV cache and the requests, live.
    """
    console = make_console()
    options, template = EngineOptions.of(engine, console), _read_template(chat_template)
    usual = {"temperature": 0.7, "top_p": 0.9, "repetition_penalty": 1.1, "max_tokens": 512}
    llm, params = options.load(console, sampling, **usual)
    from mini_engine.observe.answers import Batch, stream, watched_engine

    serving, view = watched_engine(llm, [CHAT_TOKENS], options.options) if watch else (llm, None)
    messages: list[Any] = [{"role": "system", "content": system}] if system else []
    while line := read_line(console, "[bold cyan]you[/] "):
        if not sys.stdin.isatty():  # a typed line is on the screen already
            show(console, line)
        messages.append({"role": "user", "content": line})
        try:
            prompt = llm.chat_prompt(messages, chat_template=template)
            outputs, metrics = stream(console, serving, view, Batch(llm, ["model"], [prompt], params))
        except RequestError as error:
            print_error(error)
            messages.pop()  # the conversation goes on without the message
        else:
            messages.append({"role": "assistant", "content": outputs[0].text})
            show(console, metrics.summary(), "dim")
    console.print()


@app.command
def bench(*, engine: Engine = None, bench: Bench = None) -> None:
    """Measure tokens/s, and compare them with the upper bound and with other engines in the same run.

    Args:
        engine: The model and the engine's options.
        bench: What to measure.
    """
    console = make_console()
    options, own = EngineOptions.of(engine, console), BenchOptions(**given(bench))
    from mini_engine.bench.run import run_bench

    run_bench(console, options, own)


@app.command
def serve(model: str | None = None, /, *, engine: Engine = None, server: Server = None) -> None:
    """Serve a model over HTTP, with OpenAI's protocol, until Ctrl-C.

    Args:
        model: The model, instead of --model.
        engine: The model and the engine's options.
        server: Where to listen, and limits.
    """
    console, own = make_console(), ServerOptions(**given(server))
    named = with_file(given(engine)) | ({} if model is None else {"model": model})
    missing = [name for name in ("fastapi", "uvicorn", "prometheus_client") if find_spec(name) is None]
    if missing:
        raise ConfigError(f"a server needs the package {missing[0]}: pip install 'mini-engine[server]'")
    from mini_engine.serving.start import shared_metrics, start_process

    with shared_metrics(own):
        clients = start_process(partial(load_served, named), own)
        from mini_engine.serving.server import run_server

        run_server(clients, named["model"], own, lambda address: show(console, _example(address)))


@app.command
def trace(*, out: Annotated[Path, Parameter(alias="-o")], engine: Engine = None) -> None:
    """Serve eight requests from a small pool of pages, and record every step.

    Args:
        out: Where to write the trace.
        engine: The model and the engine's options.
    """
    from mini_engine.observe.example import serve_example
    from mini_engine.observe.trace import Trace

    console = make_console()
    llm, _ = EngineOptions.of(engine, console, **SMALL_POOL).load(console)
    recorded = Trace(llm.tokenizer)
    recorded.save(out)  # refuses a bad path before the work starts
    try:
        serve_example(llm, recorded)
    finally:  # also after a refused prompt or Ctrl-C
        recorded.save(out)
        show(console, recorded.summary())
        show(console, f"Written to {out}: open it at ui.perfetto.dev, or in the book's trace player.")


def main(app: App = app) -> None:
    """Run a command line; an error that the engine raises on purpose becomes one sentence and exit code 2."""
    try:
        app(sys.argv[1:], console=make_console(), exit_on_error=False, print_error=False)
    except (CycloptsError, MiniEngineError) as error:
        print_error(error)
        sys.exit(2)
    except OSError as error:
        if error.filename is not None or error.errno is None or sys.stdout is None:
            raise
        # The unwritten text is still in the stream, and Python would try to write it when it exits.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        print_error(f"cannot write to standard output: {error.strerror}")
        sys.exit(1)


def _example(address: str) -> str:
    body = '{"messages": [{"role": "user", "content": "What is a page table?"}], "stream": true}'
    return (
        f"listening on {address}\n\n"
        f"Open {address}/ in a browser to chat and to watch the engine, or call it:\n\n"
        f"curl -N {address}/v1/chat/completions -H 'Content-Type: application/json' \\\n  -d '{body}'"
    )


def _read_template(path: Path | None) -> str | None:
    try:
        return None if path is None else path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:  # ValueError: bad UTF-8, or a null byte in the path
        raise RequestError(f"cannot read the chat template {path}: {error}; give a Jinja file") from error
