"""One process runs the checks, so that an endless loop or a crash in an answer ends that process and not the grading.

The grader starts `python -m book.grading.worker`, sends the homework, then one check after the other, and reads the
outcomes. The messages are JSON over a pipe of their own: what answers print goes to a file and is shown with a failure.
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
from book.grading.outcome import Outcome, run_check
from book.grading.submission import Homework, SubmissionError, load_submission

MEMORY_LIMIT = 6 * 2**30
"""Bytes of data that the worker may hold. An answer that asks for more gets an error, and the machine survives."""


@dataclass(frozen=True)
class Limits:
    """Seconds that the worker may take. Each check has its own limit besides."""

    start: float = 120.0  # import torch on a busy laptop
    load: float = 30.0  # execute homework.py


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
        loaded = False
        try:
            connection.send_bytes(check.name.encode())
            reply = self._receive(connection, self._limits.load)
            loaded = True
            if "status" not in reply:  # the submission is loaded, and the check begins
                reply = self._receive(connection, check.seconds)
            outcome = Outcome(**reply)
        except TimeoutError:
            where = "Your answer" if loaded else "Your file"
            seconds = check.seconds if loaded else self._limits.load
            message = f"{where} was stopped after {seconds:g} seconds{{line}}: is there a loop that does not end?"
            outcome = Outcome("timeout", message)
        except (_Died, BrokenPipeError):
            where = "Your answer" if loaded else "Your file"
            outcome = Outcome("crashed", f"{where} ended the Python process{self._end()}{{line}}.")
        if not outcome.passed:
            outcome = replace(outcome, output=_tail(self._printed, printed))
        if outcome.status in ("timeout", "crashed"):
            found = re.search(rf'File "{re.escape(self._filename)}", line (\d+)', _tail(self._stack, stack))
            outcome = replace(outcome, message=outcome.message.format(line=f" in line {found[1]}" if found else ""))
            self.close()
            self._unreadable = None if loaded else outcome  # every exercise loads the same file
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
            env={**os.environ, "PYTHONPATH": path},
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

    def _end(self) -> str:
        """What is known of the end of a dead worker, to complete a sentence."""
        assert self._process is not None
        try:
            code = self._process.wait(timeout=5)
        except subprocess.TimeoutExpired:  # it closed the pipe and lives on
            code = 0
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

    The file descriptor `stack` receives the stack of Python calls when a check hangs or crashes.
    """
    job = json.loads(connection.recv_bytes())
    chapter = load_chapter(Path(job["folder"]))
    checks = {check.name: check for check in chapter.checks}
    _limit_memory()
    faulthandler.enable(stack)
    connection.send_bytes(b"{}")
    submissions: dict[str, Homework] = {}
    while True:
        try:
            check = checks[connection.recv_bytes().decode()]
        except EOFError:
            return
        faulthandler.dump_traceback_later(job["load"] * 0.9, file=stack)
        try:
            if check.exercise not in submissions:
                submissions[check.exercise] = load_submission(chapter, check.exercise, job["source"], job["filename"])
        except SubmissionError as error:
            outcome = Outcome("unreadable", str(error))
        else:
            connection.send_bytes(b"{}")
            faulthandler.dump_traceback_later(check.seconds * 0.9, file=stack)
            outcome = run_check(chapter, check, submissions[check.exercise], job["filename"])
        faulthandler.cancel_dump_traceback_later()
        connection.send_bytes(json.dumps(asdict(outcome)).encode())


def _limit_memory() -> None:
    with contextlib.suppress(ImportError, OSError, ValueError):  # a system without such limits
        import resource

        resource.setrlimit(resource.RLIMIT_DATA, (MEMORY_LIMIT, resource.getrlimit(resource.RLIMIT_DATA)[1]))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # a crash is reported; nobody wants its core file


if __name__ == "__main__":
    descriptors = [int(argument) for argument in sys.argv[1:]]
    for descriptor in descriptors:
        os.set_inheritable(descriptor, False)  # what an answer starts does not get them
    serve(Connection(descriptors[0]), descriptors[1])
