"""One process runs the checks, so that an endless loop or a crash in an answer ends that process and not the grading.

The grader starts `python -m book.grading.worker`, sends the homework, then one check after the other, and reads the
outcomes. The messages are JSON over a pipe of their own: what answers print goes to a file and is shown with a failure.

A check is limited in CPU time, because elapsed time depends on what else the machine does. The worker sets a timer of
its CPU time (`ITIMER_PROF`). When the timer expires, its signal, SIGPROF, writes the stack of Python calls to a file
and ends the worker. An answer that waits uses no CPU time, so the grader also limits the elapsed time, generously, and
then sends the same signal.
"""

import contextlib
import faulthandler
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, replace
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from book.grading.chapter import ROOT, Chapter, Check, load_chapter
from book.grading.outcome import Outcome, code_line, run_check
from book.grading.submission import Homework, SubmissionError, load_submission

MEMORY_LIMIT = 6 * 2**30
"""Bytes of data that the worker may hold. An answer that asks for more gets an error, and the machine survives."""


@dataclass(frozen=True)
class Limits:
    """How long the worker may take. Each check has its own limit of CPU seconds besides.

    Args:
        start: elapsed seconds to import what the checks need.
        load: CPU seconds to execute homework.py.
        elapsed_factor: elapsed seconds that homework.py and each check may take for each CPU second of their limits.
    """

    start: float = 300.0
    load: float = 30.0
    elapsed_factor: float = 10.0


class _Died(Exception):
    """The worker ended before it answered."""


class Worker:
    """Runs checks of one chapter against one homework file, in a process that is replaced when it hangs or dies."""

    def __init__(self, chapter: Chapter, source: str, filename: str, limits: Limits | None = None) -> None:
        self._chapter = chapter
        self._source = source
        self._filename = filename
        self._limits = limits or Limits()
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: Connection | None = None
        self._printed = self._stack = -1  # files for what the process prints, and for its stack when it hangs or dies
        self._unreadable: Outcome | None = None

    def run(self, check: Check) -> Outcome:
        """The outcome of a check, which may be that it hung or crashed."""
        if self._unreadable:
            return self._unreadable
        if self._process is not None and self._process.poll() is not None:
            self.close()  # it died after its last answer, which counts
        connection = self._connection or self._start()
        printed, stack = os.fstat(self._printed).st_size, os.fstat(self._stack).st_size
        what, seconds = "Your file", self._limits.load
        try:
            connection.send_bytes(check.name.encode())
            reply = self._receive(connection, seconds * self._limits.elapsed_factor)
            what, seconds = "Your answer", check.seconds
            if "status" not in reply:  # the submission is loaded, and the check begins
                reply = self._receive(connection, seconds * self._limits.elapsed_factor)
            outcome = Outcome(**reply)
        except TimeoutError:
            self._stop()
            elapsed = seconds * self._limits.elapsed_factor
            message = f"{what} was stopped after {elapsed:g} seconds{{line}}, {seconds:g} or fewer of them CPU time: "
            message += "does it wait for something that never happens, or is the machine very busy?"
            outcome = Outcome("timeout", message)
        except (_Died, BrokenPipeError):
            if self._exit_code() == -signal.SIGPROF:
                message = f"{what} was stopped after {seconds:g} seconds of CPU time{{line}}"
                if what == "Your answer" and check.is_demand:  # the result is right, and slow
                    outcome = Outcome("timeout", f"{message}.", check.mistake)
                else:
                    outcome = Outcome("timeout", f"{message}: is there a loop that does not end?")
            else:
                mistake = check.mistake if what == "Your answer" else ""
                message = f"{what} ended the Python process{self._end()}{{line}}."
                if self._exit_code() in (-signal.SIGSEGV, -signal.SIGABRT):  # the latter where the heap was damaged
                    message += " Perhaps it used memory outside of its tensors, as a store without a mask does."
                outcome = Outcome("crashed", message, mistake)
        if not outcome.passed:
            outcome = replace(outcome, output=_tail(self._printed, printed))
        if outcome.status in ("timeout", "crashed"):
            frames = re.findall(r'File "(.+)", line (\d+)', _tail(self._stack, stack))  # the innermost first
            line = next((f" in line {number}" for file, number in frames if file == self._filename), "")
            shown = {self._filename, str(self._chapter.folder / "test_homework.py")} if what == "Your answer" else set()
            lines = [code_line(file, int(number)) for file, number in reversed(frames) if file in shown]
            outcome = replace(outcome, message=outcome.message.format(line=line), detail="\n".join(lines[:8]))
            self.close()
            self._unreadable = outcome if what == "Your file" else None  # every exercise loads the same file
        return outcome

    def close(self) -> None:
        """Ends the process and whatever it started."""
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        if self._connection is not None:
            self._connection.close()
            os.close(self._printed)
            os.close(self._stack)
        self._process = self._connection = None

    def _start(self) -> Connection:
        ours, theirs = Pipe()
        self._connection = ours
        self._printed, self._stack = _nameless_file(), _nameless_file()
        path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
        self._process = subprocess.Popen(
            [sys.executable, "-u", "-m", "book.grading.worker", str(theirs.fileno()), str(self._stack)],
            cwd=self._chapter.root,
            # One thread: what an answer costs in CPU time must not depend on the number of cores.
            env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
            pass_fds=[theirs.fileno(), self._stack],
            stdin=subprocess.DEVNULL,
            stdout=self._printed,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # so that killing it kills its children too
        )
        theirs.close()
        job = {
            "folder": str(self._chapter.folder),
            "source": self._source,
            "filename": self._filename,
            "load": self._limits.load,
        }
        ours.send_bytes(json.dumps(job).encode())
        try:
            self._receive(ours, self._limits.start)
        except (TimeoutError, _Died) as error:
            printed = _tail(self._printed, 0)
            self.close()
            raise RuntimeError(f"The process that runs the checks did not start:\n{printed}") from error
        return ours

    def _receive(self, connection: Connection, seconds: float) -> dict[str, Any]:
        deadline = time.monotonic() + seconds
        # A child of a dead worker can keep the pipe open: look at the process now and then, not only at the pipe.
        while not connection.poll(min(0.5, max(0.0, deadline - time.monotonic()))):
            dead = self._process is None or self._process.poll() is not None
            if dead and not connection.poll():  # nothing was left unread
                raise _Died
            if time.monotonic() >= deadline:
                raise TimeoutError
        try:
            return json.loads(connection.recv_bytes())
        except (EOFError, OSError) as error:
            raise _Died from error

    def _stop(self) -> None:
        """Ends a worker that waits, and has it write its stack first."""
        assert self._process is not None
        self._process.send_signal(signal.SIGPROF)
        self._exit_code()

    def _exit_code(self) -> int:
        """The exit code of a worker that has died, or is about to."""
        assert self._process is not None
        try:
            return self._process.wait(timeout=5)
        except subprocess.TimeoutExpired:  # it closed the pipe, or ignores the signal, and lives on
            return 0

    def _end(self) -> str:
        """What is known of the end of a dead worker, to complete a sentence."""
        code = self._exit_code()
        if code == -signal.SIGKILL:
            return ": the system killed it, most likely because it used too much memory"
        return f" with {signal.Signals(-code).name}" if code < 0 else f" with exit code {code}"


def _nameless_file() -> int:
    """The descriptor of an empty file that vanishes when it is closed."""
    descriptor, name = tempfile.mkstemp()
    os.unlink(name)
    return descriptor


def _tail(descriptor: int, start: int, most: int = 10_000) -> str:
    """What was written to a file since it was `start` bytes long, but no more than its end."""
    end = os.fstat(descriptor).st_size
    return os.pread(descriptor, most, max(start, end - most)).decode(errors="replace").strip()


def serve(connection: Connection, stack: int) -> None:
    """The worker's side: reads the job, then names of checks, until the grader closes the pipe.

    The file descriptor `stack` receives the stack of Python calls when a check is stopped or crashes.
    """
    job = json.loads(connection.recv_bytes())
    chapter = load_chapter(Path(job["folder"]))
    checks = {check.name: check for check in chapter.checks}
    _limit_memory()
    faulthandler.enable(stack)
    faulthandler.register(signal.SIGPROF, stack, chain=True)  # chain: the signal then ends the process
    connection.send_bytes(b"{}")
    submissions: dict[str, Homework] = {}
    while True:
        try:
            check = checks[connection.recv_bytes().decode()]
        except EOFError:
            return
        signal.setitimer(signal.ITIMER_PROF, job["load"])
        try:
            if check.exercise not in submissions:
                submissions[check.exercise] = load_submission(chapter, [check.exercise], job["source"], job["filename"])
        except SubmissionError as error:
            outcome = Outcome("unreadable", str(error))
        else:
            connection.send_bytes(b"{}")
            signal.setitimer(signal.ITIMER_PROF, check.seconds)
            outcome = run_check(chapter, check, submissions[check.exercise], job["filename"])
        signal.setitimer(signal.ITIMER_PROF, 0)
        connection.send_bytes(json.dumps(asdict(outcome)).encode())


def _limit_memory() -> None:
    with contextlib.suppress(ImportError, OSError, ValueError):  # a system without such limits
        import resource

        resource.setrlimit(resource.RLIMIT_DATA, (MEMORY_LIMIT, resource.getrlimit(resource.RLIMIT_DATA)[1]))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # a crash is reported; a core file is of no use


if __name__ == "__main__":
    descriptors = [int(argument) for argument in sys.argv[1:]]
    for descriptor in descriptors:
        os.set_inheritable(descriptor, False)  # what an answer starts does not get them
    serve(Connection(descriptors[0]), descriptors[1])
