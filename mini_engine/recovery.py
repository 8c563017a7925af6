"""What happens when a step fails or is interrupted: the core starts over, and no token is lost.

A request whose computation fails ends with `finish_reason="error"`, and the others go on. To find it, all requests of
the failed step compute their next tokens one at a time. After an interrupt (Ctrl-C) the core starts over with the
tokens that the host knows, and the interrupt reaches the caller.
"""

import logging
import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

from mini_engine.core import NOTHING, Core, CoreStep
from mini_engine.errors import ChunkFileError, RequestError, ScheduleError
from mini_engine.request import FinishReason, Request

logger = logging.getLogger(__name__)


class Recovery:
    """Steps a core, one thread at a time, and starts it over after errors and interrupts.

    Args:
        core: the core.
        depth: its pipeline depth.

    Attributes:
        core: see above.
        lock: held while the core changes.
        failed_steps: steps that raised an error.
    """

    def __init__(self, core: Core, depth: int) -> None:
        self.core, self.lock, self.failed_steps = core, threading.RLock(), 0
        self._depth = depth
        # Requests that must each compute one token in a step of their own, because a step with all of them failed.
        self._suspects: list[Request] = []
        self._to_finish: deque[tuple[Request, FinishReason]] = deque()
        self._is_busy = False  # a step or a transaction is under way
        self._is_restarting = False  # still set if `restart` was interrupted

    def step(self) -> CoreStep:
        """Step the core. If the step fails, its requests are preempted and computed again, one at a time.

        Raises:
            ScheduleError: see `Core.step`.
        """
        with self.transaction():
            self._finish_all()
            if self._suspects:
                self._check_suspect()
            try:
                return self.core.step(0 if self._suspects else self._depth)
            except ScheduleError:
                raise
            except Exception as error:
                return CoreStep(replace(NOTHING, preempted=self._isolate(error)), [], None)

    def add(self, request: Request) -> None:
        """Queue a request. While there are suspects, it waits until they are done."""
        self.core.add(request)
        if self._suspects:
            self.core.scheduler.remove(request)

    def finish(self, request: Request, reason: FinishReason) -> None:
        """End a request, unless it has ended already.

        The garbage collector may close a stream anywhere, even in the middle of a step of the same thread. Then the
        request ends before the next step.
        """
        self._to_finish.append((request, reason))
        with self.lock:
            if not self._is_busy:
                self._finish_all()

    @contextmanager
    def transaction(self) -> Iterator[None]:
        """Exclude other threads, and start over after any interruption other than a refusal."""
        with self.lock:
            was_busy = self._is_busy  # transactions may be nested
            try:
                self._is_busy = True
                if self._is_restarting:
                    self.restart()
                yield
            except (RequestError, ChunkFileError):
                raise
            except BaseException:
                self.restart()
                raise
            finally:
                self._is_busy = was_busy

    def restart(self) -> None:
        """Start the core over; see `Core.restart`."""
        self._is_restarting = True  # until the last line; a second interrupt or error leaves the rest to the next call
        self.core.restart(self._suspects)
        self._suspects = [request for request in self._suspects if request.finish_reason is None]
        self._is_restarting = False

    def _isolate(self, error: Exception) -> list[Request]:
        """Start over after an error in a step, and let its requests compute their next tokens one at a time.

        Returns:
            The requests that lost their pages.
        """
        logger.warning("a step failed; its requests are computed again, one at a time", exc_info=error)
        self.failed_steps += 1
        running = self.core.scheduler.running.requests_of(self.core.scheduler.running.order)
        if self._suspects:
            suspect = self._suspects[0]
            suspect.error = RequestError(f"computing the request failed: {type(error).__name__}: {error}")
            suspect.error.__cause__ = error
            suspect.finish_reason = "error"
        self._suspects = self._suspects or running
        self.restart()
        return running

    def _check_suspect(self) -> None:
        """Let the next suspect run once the first one has computed a token alone, or has ended."""
        suspect = self._suspects[0]
        known = self.core.scheduler.running.known_tokens(suspect)
        if suspect.finish_reason or len(known) > len(suspect.token_ids):
            del self._suspects[0]
            self.restart()

    def _finish_all(self) -> None:
        while self._to_finish:
            request, reason = self._to_finish[0]
            with self.transaction():
                if request.finish_reason is None:
                    self.core.end(request, reason)
            self._to_finish.popleft()
