"""Starting the stepping loop of a server, in a process or on a thread."""

from __future__ import annotations

import gc
import signal
import threading
from collections.abc import Callable
from multiprocessing import get_context
from multiprocessing.connection import Connection, Pipe
from typing import TYPE_CHECKING

from mini_engine.errors import MiniEngineError
from mini_engine.serving.options import ServerOptions

if TYPE_CHECKING:  # these take seconds to import, in both processes at the same time
    from mini_engine.llm import TextEngine
    from mini_engine.serving.engine_client import EngineClient


def start_process(load: Callable[[], TextEngine], options: ServerOptions) -> EngineClient:
    """Load an engine and step it in a process of its own, which ends when this one does.

    Args:
        load: loads the engine; a function of a module, with arguments that can be sent.
        options: the server's options.

    Raises:
        MiniEngineError: that loading has raised, or if the process has ended.
    """
    context = get_context("spawn")  # a fork would inherit what this process has loaded
    (for_loop, commands), (answers, from_loop) = Pipe(duplex=False), Pipe(duplex=False)
    process = context.Process(
        target=_run, args=(load, for_loop, from_loop, options.max_ttft_seconds), name="engine", daemon=True
    )
    process.start()
    for_loop.close()
    from_loop.close()
    from mini_engine.serving.engine_client import EngineClient

    try:
        front = answers.recv()
    except EOFError:
        raise MiniEngineError("the engine's process has ended; it has printed why") from None
    if isinstance(front, Exception):
        raise front
    return EngineClient(front, commands, answers, options.max_queued_requests)


def _run(
    load: Callable[[], TextEngine], commands: Connection, answers: Connection, max_ttft_seconds: float | None
) -> None:
    """What the process does. Ctrl-C reaches all processes of a terminal, but the server decides when this one ends."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    try:
        engine = load()
    except MiniEngineError as error:
        answers.send(error)
        return
    answers.send(engine.front())
    from mini_engine.serving.engine_loop import EngineLoop

    # The garbage collector need not look again at what stays. A full collection would stop all streams for 0.1 s.
    gc.collect()
    gc.freeze()
    EngineLoop(engine, commands, answers, max_ttft_seconds).run()


def start_thread(engine: TextEngine, options: ServerOptions) -> EngineClient:
    """Step an engine on a thread of this process, to see into it while it serves."""
    from mini_engine.serving.engine_client import EngineClient
    from mini_engine.serving.engine_loop import EngineLoop

    (for_loop, commands), (answers, from_loop) = Pipe(duplex=False), Pipe(duplex=False)
    loop = EngineLoop(engine, for_loop, from_loop, options.max_ttft_seconds)
    threading.Thread(target=loop.run, name="engine", daemon=True).start()
    return EngineClient(engine.front(), commands, answers, options.max_queued_requests)
