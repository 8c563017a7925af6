"""Other processes run the checks, so that an endless loop or a crash in an answer does not end the grading.

The grader starts a server, `python -m book.grading.worker`, which imports what the checks need and runs no answer. For
each exercise the server forks a process, which reads names of checks from a socket and writes outcomes to it, as lines
of JSON. Whatever an answer changes, such as a function of torch or the current folder, is gone with its process. When
the process ends or the grader closes the socket, the server kills everything that the process has started. What answers
print goes to a file and is shown with a failure.

A check is limited in CPU time, because elapsed time depends on what else the machine does. The process sets a timer of
its CPU time (`ITIMER_PROF`). When the timer expires, its signal, SIGPROF, writes the stack of Python calls to a file
and ends the process. An answer that waits uses no CPU time, so the grader also limits the elapsed time, generously, and
then sends the same signal.

All this protects from mistakes, not from attacks: an answer runs beside the check, as the user who grades.
"""

import contextlib
import ctypes
import faulthandler
import importlib
import json
import math
import os
import re
import resource
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from dataclasses import asdict, dataclass, replace
from functools import cache
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any, NoReturn

import psutil

from book.grading.chapter import ROOT, Chapter, Check, load_chapter
from book.grading.outcome import Outcome, code_line, run_check
from book.grading.submission import SubmissionError, load_submission

MEMORY_LIMIT = 6 * 2**30
"""Bytes that an answer may hold. One that asks for more gets an error, and the machine survives."""

FILE_LIMIT = 2**26
"""Bytes that an answer may write to one file, such as the file that receives what it prints."""

_TEXT_LIMIT, _LINE_LIMIT = 10_000, 2**20
_GPUS = ("/dev/nvidiactl", "/dev/kfd", "/dev/dxg")  # a machine with a GPU has one of these files
_SUBREAPER = 36  # PR_SET_CHILD_SUBREAPER of prctl(2): a process whose parent has ended becomes a child of this one


@dataclass(frozen=True)
class Limits:
    """How long the processes may take. Each check has its own limit of CPU seconds besides.

    Args:
        start: elapsed seconds to import what the checks need.
        load: CPU seconds to execute homework.py.
        elapsed_factor: elapsed seconds that homework.py and each check may take for each CPU second of their limits.
        stop: elapsed seconds to write the stack and end, after a limit is reached.
    """

    start: float = 300.0
    load: float = 30.0
    elapsed_factor: float = 10.0
    stop: float = 5.0


class _Ended(Exception):
    """The process ended before it answered; the argument is its exit code."""


class Worker:
    """Runs checks of one chapter against one homework file, in a process of its own for each exercise."""

    def __init__(self, chapter: Chapter, source: str, filename: str, limits: Limits | None = None) -> None:
        self._chapter = chapter
        self._filename = filename
        self._limits = limits or Limits()
        self._job = {"folder": str(chapter.folder), "source": source, "filename": filename, "load": self._limits.load}
        self._server: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None  # to the server
        self._channel: socket.socket | None = None  # to the process of `_exercise`
        self._exercise = ""
        self._received = b""
        self._printed = self._stack = -1  # files for what a process prints, and for its stack when it hangs or dies
        self._unreadable: Outcome | None = None

    def run(self, check: Check) -> Outcome:
        """The outcome of a check, which may be that it hung or crashed."""
        if self._unreadable:
            return self._unreadable
        if self._server is None or self._server.poll() is not None:
            self._start()
        for descriptor in (self._printed, self._stack):
            os.ftruncate(descriptor, 0)
            os.lseek(descriptor, 0, os.SEEK_SET)
        what, seconds = "Your file", self._limits.load
        try:
            reply = self._begin(check.exercise) if check.exercise != self._exercise else {}
            if not reply:  # the submission is loaded
                what, seconds = "Your answer", check.seconds
                assert self._channel is not None
                with contextlib.suppress(ConnectionError):  # it has ended; the server says how
                    self._channel.sendall(f"{check.name}\n".encode())
                reply = self._receive(seconds * self._limits.elapsed_factor)
            texts: dict[str, Any] = {name: str(value) for name, value in reply.items()}
            outcome = Outcome(**texts)
        except TimeoutError:
            self._stop()
            elapsed = seconds * self._limits.elapsed_factor
            message = f"{what} was stopped after {elapsed:g} seconds{{line}}, {seconds:g} or fewer of them CPU time: "
            message += "does it wait for something that never happens, or is the machine very busy?"
            outcome = Outcome("timeout", message)
        except _Ended as ended:
            code = ended.args[0]
            if code in (-signal.SIGPROF, -signal.SIGXCPU):
                message = f"{what} was stopped after {seconds:g} seconds of CPU time{{line}}"
                if what == "Your answer" and check.is_demand:  # the result is right, and slow
                    outcome = Outcome("timeout", f"{message}.", check.mistake)
                else:
                    outcome = Outcome("timeout", f"{message}: is there a loop that does not end?")
            else:
                mistake = check.mistake if what == "Your answer" else ""
                message = f"{what} ended the Python process{_end(code)}{{line}}."
                if code in (-signal.SIGSEGV, -signal.SIGABRT):  # the latter where the heap was damaged
                    message += " Perhaps it used memory outside of its tensors, as a store without a mask does."
                outcome = Outcome("crashed", message, mistake)
        except (ValueError, TypeError, AttributeError, RecursionError):  # no line of ours
            outcome = Outcome("crashed", f"{what} closed or wrote to a file descriptor that belongs to the grader.")
        if not outcome.passed:
            outcome = replace(outcome, output=_tail(self._printed))
        if outcome.status in ("timeout", "crashed"):
            frames = re.findall(r'File "(.+)", line (\d+)', _tail(self._stack))  # the innermost first
            line = next((f" in line {number}" for file, number in frames if file == self._filename), "")
            shown = {self._filename, str(self._chapter.folder / "test_homework.py")} if what == "Your answer" else set()
            lines = [code_line(file, int(number)) for file, number in reversed(frames) if file in shown]
            outcome = replace(outcome, message=outcome.message.replace("{line}", line), detail="\n".join(lines[:8]))
            self._hang_up()
            self._unreadable = outcome if what == "Your file" else None  # every exercise loads the same file
        return outcome

    def close(self) -> None:
        """Ends the processes and whatever they started."""
        if self._server is None or self._control is None:
            return
        self._control.close()
        self._hang_up()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._server.wait(self._limits.stop)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._server.pid, signal.SIGKILL)
        self._server.wait()
        self._server = None
        os.close(self._printed)
        os.close(self._stack)

    def _start(self) -> None:
        """Starts the server, again if an answer has killed it."""
        self.close()
        self._control, theirs = socket.socketpair()
        self._printed, self._stack = _nameless_file(), _nameless_file()
        path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
        self._server = subprocess.Popen(
            [sys.executable, "-u", "-m", "book.grading.worker", str(theirs.fileno()), str(self._stack)],
            cwd=self._chapter.root,
            # One thread: what an answer costs in CPU time must not depend on the number of cores.
            env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
            pass_fds=[theirs.fileno(), self._stack],
            stdin=subprocess.PIPE,
            stdout=self._printed,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # so that killing it kills its children too
        )
        theirs.close()
        assert self._server.stdin is not None
        with contextlib.suppress(BrokenPipeError), self._server.stdin as stdin:  # then an answer reads an empty file
            stdin.write(json.dumps(self._job).encode())

    def _begin(self, exercise: str, again: bool = True) -> dict[str, Any]:
        """Has the server fork the process of an exercise. Returns an outcome if it cannot read the submission."""
        assert self._control is not None
        self._hang_up()
        self._exercise = exercise
        self._channel, theirs = socket.socketpair()
        try:
            with theirs:
                socket.send_fds(self._control, [exercise.encode()], [theirs.fileno()])
            self._receive(self._limits.start)
        except (OSError, ValueError, _Ended) as error:
            printed = _tail(self._printed)
            self.close()
            if again:  # the answer before may just have killed the server
                self._start()
                return self._begin(exercise, again=False)
            raise RuntimeError(f"The process that runs the checks did not start:\n{printed}") from error
        return self._receive(self._limits.load * self._limits.elapsed_factor)

    def _hang_up(self) -> None:
        """Has the server kill the process of the exercise."""
        if self._channel is not None:
            self._channel.close()
        self._channel, self._exercise, self._received = None, "", b""

    def _receive(self, seconds: float) -> dict[str, Any]:
        """The next line that the process writes; ValueError if it is no line of ours."""
        assert self._channel is not None
        deadline = time.monotonic() + seconds
        while b"\n" not in self._received:
            if not wait([self._channel], max(0.0, deadline - time.monotonic())):
                raise TimeoutError
            part = b""
            with contextlib.suppress(ConnectionError):
                part = self._channel.recv(2**16)
            self._received += part
            if not part or len(self._received) > _LINE_LIMIT:
                raise ValueError
        line, _, self._received = self._received.partition(b"\n")
        reply = json.loads(line)
        if "code" in reply:
            raise _Ended(int(reply["code"]))
        return reply

    def _stop(self) -> None:
        """Ends a process that waits, and has it write its stack first."""
        assert self._server is not None
        with contextlib.suppress(OSError, ValueError, _Ended):  # a TimeoutError is an OSError
            os.killpg(self._server.pid, signal.SIGPROF)
            self._receive(self._limits.stop)


def _end(code: int) -> str:
    """What is known of the end of a process, to complete a sentence."""
    if code == -signal.SIGKILL:
        return ": the system killed it, most likely because it used too much memory"
    name = signal.Signals(-code).name if -code in set(signal.Signals) else f"signal {-code}"
    return f" with {name}" if code < 0 else f" with exit code {code}"


def _nameless_file() -> int:
    """The descriptor of an empty file that vanishes when it is closed."""
    descriptor, name = tempfile.mkstemp()
    os.unlink(name)
    return descriptor


def _tail(descriptor: int, most: int = 10_000) -> str:
    """The end of a file."""
    text = os.pread(descriptor, most, max(0, os.fstat(descriptor).st_size - most)).decode(errors="replace")
    return re.sub(r"\r\n?", "\n", text).strip()


_load = cache(load_chapter)


def serve(control: socket.socket, stack: int) -> None:
    """The server: reads the job, then the exercises with a socket for each, until the grader is gone.

    The file descriptor `stack` receives the stack of Python calls when a check is stopped or crashes.
    """
    job = json.load(sys.stdin)
    has_gpu = any(map(os.path.exists, _GPUS))
    if not has_gpu:  # a process that has used a GPU cannot be forked
        _load(Path(job["folder"]))
        if "torch" in sys.modules:  # what counts memory and launches imports it at its first use, which takes seconds
            importlib.import_module("torch._dynamo")
    _limit("DATA", MEMORY_LIMIT)
    if not has_gpu:  # CUDA reserves many more addresses than it uses memory
        _limit("AS", psutil.Process().memory_info().vms + MEMORY_LIMIT)
    _limit("FSIZE", FILE_LIMIT)
    _limit("CORE", 0)  # a crash is reported; a core file is of no use
    signal.signal(signal.SIGPROF, signal.SIG_IGN)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_SUBREAPER, 1)
    while True:
        exercise, descriptors, *_ = socket.recv_fds(control, 1000, 1)
        if not descriptors:
            return
        os.set_inheritable(descriptors[0], False)
        with socket.socket(fileno=descriptors[0]) as channel:
            child = os.fork()
            if not child:
                control.close()
                _run_exercise(exercise.decode(), job, channel, stack)
            grader = select.poll()
            grader.register(channel, 0)  # reports only that the other end is closed
            ended = status = 0
            while not ended and not grader.poll(50):
                ended, status = os.waitpid(child, os.WNOHANG)
            _kill_children()
            if ended:
                with contextlib.suppress(ConnectionError):
                    channel.sendall(json.dumps({"code": os.waitstatus_to_exitcode(status)}).encode() + b"\n")


def _run_exercise(exercise: str, job: dict[str, Any], channel: socket.socket, stack: int) -> NoReturn:
    """The process of an exercise: loads the submission, then runs the checks whose names it receives."""
    own = os.getpid()

    def reply(**values: str) -> None:
        if os.getpid() != own:  # an answer has called os.fork() and returned twice
            os._exit(0)
        cut = {name: value[:_TEXT_LIMIT] for name, value in values.items()}
        channel.sendall(json.dumps(cut).encode() + b"\n")

    try:
        chapter = _load(Path(job["folder"]))
        checks = {check.name: check for check in chapter.checks}
        signal.signal(signal.SIGPROF, signal.SIG_DFL)
        faulthandler.enable(stack)
        faulthandler.register(signal.SIGPROF, stack, chain=True)  # chain: the signal then ends the process
        reply()
        _limit_cpu(job["load"])
        try:
            submission = load_submission(chapter, [exercise], job["source"], job["filename"])
        except SubmissionError as error:
            reply(status="unreadable", message=str(error))
        else:
            reply()
        for line in channel.makefile():
            check = checks[line.strip()]
            _limit_cpu(check.seconds)
            reply(**asdict(run_check(chapter, check, submission, job["filename"])))
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    os._exit(0)


def _kill_children() -> None:
    """Kills everything that this process and its children have started."""
    with contextlib.suppress(ChildProcessError):
        while True:
            for process in psutil.Process().children(recursive=True):
                with contextlib.suppress(psutil.Error):
                    process.kill()
            os.waitpid(-1, 0)  # the next round finds what was forked in between


def _limit_cpu(seconds: float) -> None:
    signal.setitimer(signal.ITIMER_PROF, seconds)
    _limit("CPU", math.ceil(time.process_time() + seconds) + 1)  # for an answer that ignores SIGPROF


def _limit(resource_: str, amount: int) -> None:
    with contextlib.suppress(AttributeError, OSError, ValueError):  # a system without this limit
        kind = getattr(resource, f"RLIMIT_{resource_}")
        resource.setrlimit(kind, (amount, resource.getrlimit(kind)[1]))


if __name__ == "__main__":
    descriptors = [int(argument) for argument in sys.argv[1:]]
    for descriptor in descriptors:
        os.set_inheritable(descriptor, False)  # what an answer starts does not get them
    serve(socket.socket(fileno=descriptors[0]), descriptors[1])
