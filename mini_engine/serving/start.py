"""Starting the stepping loop of a server, in a process or on a thread, and its clients."""

from __future__ import annotations

import ctypes
import gc
import os
import signal
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing import get_context
from multiprocessing.connection import Connection, Pipe
from multiprocessing.sharedctypes import RawArray
from typing import TYPE_CHECKING, NamedTuple

from mini_engine.errors import MiniEngineError
from mini_engine.serving.options import METRICS_FOLDER, ServerOptions

if TYPE_CHECKING:  # these take seconds to import, in both processes at the same time
    from mini_engine.llm import TextEngine
    from mini_engine.serving.engine_client import EngineClient
    from mini_engine.text_front import TextFront


@contextmanager
def shared_metrics(options: ServerOptions) -> Iterator[None]:
    """Let several processes add up their metrics, in a folder that prometheus_client must know when it is imported."""
    if options.num_servers == 1:
        yield
        return
    with tempfile.TemporaryDirectory() as folder:
        os.environ[METRICS_FOLDER] = folder
        try:
            yield
        finally:
            del os.environ[METRICS_FOLDER]


class ClientEnds(NamedTuple):
    """What a process needs to become a client of the engine's loop.

    Attributes:
        front: the engine's tokenizer and limits.
        commands: sends commands.
        answers: receives answers.
        unfinished: outputs of each client that are unfinished.
        most: how many these may be.
        number: which of the loop's clients it is.
    """

    front: TextFront
    commands: Connection
    answers: Connection
    unfinished: ctypes.Array[ctypes.c_long]
    most: int
    number: int

    def client(self) -> EngineClient:
        """Return the client."""
        from mini_engine.serving.engine_client import EngineClient

        return EngineClient(*self)


def start_process(load: Callable[[], TextEngine], options: ServerOptions) -> list[ClientEnds]:
    """Load an engine and step it in a process of its own, which ends when all of its clients have.

    Args:
        load: loads the engine; a function of a module, with arguments that can be sent.
        options: the server's options.

    Returns:
        The ends of `options.num_servers` clients, one for each process that serves requests.

    Raises:
        MiniEngineError: that loading has raised, or if the process has ended.
    """
    context = get_context("spawn")  # a fork would inherit what this process has loaded
    pipes = [(Pipe(duplex=False), Pipe(duplex=False)) for _ in range(options.num_servers)]
    of_loop = [(for_loop, from_loop) for (for_loop, _), (_, from_loop) in pipes]
    unfinished = context.RawArray(ctypes.c_long, len(pipes))
    arguments = load, of_loop, unfinished, options.max_ttft_seconds
    process = context.Process(target=_run, args=arguments, name="engine", daemon=True)
    process.start()
    for connections in of_loop:
        for connection in connections:
            connection.close()
    first = pipes[0][1][0]
    import mini_engine.serving.engine_client  # noqa: F401  while the engine is loaded

    try:
        front = first.recv()
    except EOFError:
        raise MiniEngineError("the engine's process has ended; it has printed why") from None
    if isinstance(front, Exception):
        raise front
    most = front.max_batch_size + options.max_queued_requests
    return [
        ClientEnds(front, commands, answers, unfinished, most, number)
        for number, ((_, commands), (answers, _)) in enumerate(pipes)
    ]


def _run(
    load: Callable[[], TextEngine],
    pipes: Sequence[tuple[Connection, Connection]],
    unfinished: ctypes.Array[ctypes.c_long],
    max_ttft_seconds: float | None,
) -> None:
    """What the process does. Ctrl-C reaches all processes of a terminal, but the server decides when this one ends."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    first = pipes[0][1]
    try:
        engine = load()
    except MiniEngineError as error:
        first.send(error)
        return
    first.send(engine.front())
    from mini_engine.serving.engine_loop import EngineLoop

    # The garbage collector need not look again at what stays. A full collection would stop all streams for 0.1 s.
    gc.collect()
    gc.freeze()
    EngineLoop(engine, pipes, unfinished, max_ttft_seconds).run()


def start_thread(engine: TextEngine, options: ServerOptions) -> EngineClient:
    """Step an engine on a thread of this process, to see into it while it serves."""
    from mini_engine.serving.engine_loop import EngineLoop

    (for_loop, commands), (answers, from_loop) = Pipe(duplex=False), Pipe(duplex=False)
    unfinished = RawArray(ctypes.c_long, 1)
    loop = EngineLoop(engine, [(for_loop, from_loop)], unfinished, options.max_ttft_seconds)
    threading.Thread(target=loop.run, name="engine", daemon=True).start()
    most = engine.max_batch_size + options.max_queued_requests
    return ClientEnds(engine.front(), commands, answers, unfinished, most, 0).client()
