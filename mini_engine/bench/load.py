"""A load generator: requests that arrive at a server whether it keeps up or not, and what their clients see.

    python -m mini_engine.bench.load --address http://127.0.0.1:8000 --rate 4 --num-requests 100

It runs in a process of its own, so it takes no time from the server's. It speaks HTTP by itself, because a client
library would take more time for a token than the server. Explained in chapter 16.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any
from urllib.parse import urlsplit

import numpy as np
from jaxtyping import Float

from mini_engine.bench.workloads import BenchRequest, Workload
from mini_engine.errors import PeerError, check_positive

VOCABULARY = 10_000  # tokens of random prompts; every model has as many


@dataclass(frozen=True)
class Arrivals:
    """When requests arrive: a gamma process, as in vLLM's benchmark.

    Attributes:
        rate: requests per second, on average; infinite: all arrive at once.
        burstiness: shape of the gamma distribution of the time between arrivals. 1 is a Poisson process; less is
            burstier, and more is more regular.
        seed: of the random numbers.
    """

    rate: float
    burstiness: float = 1.0
    seed: int = 0

    def times(self, count: int) -> Float[np.ndarray, " n"]:
        """Return the seconds at which the requests arrive, the first one at 0."""
        if math.isinf(self.rate):
            return np.zeros(count)
        rng = np.random.default_rng(self.seed)
        gaps = rng.gamma(self.burstiness, 1 / (self.rate * self.burstiness), size=count)
        return np.append(0.0, gaps[: count - 1].cumsum())[:count]


@dataclass
class Seen:
    """What the client of one request has seen.

    Attributes:
        arrival: when it was due, in seconds since the start.
        times: when each of its tokens came.
        error: why it failed; None if it has not.
    """

    arrival: float
    times: list[float] = field(default_factory=list)
    error: str | None = None

    @property
    def first(self) -> float:
        """Seconds from arrival to the first token: TTFT."""
        return self.times[0] - self.arrival

    @property
    def between(self) -> list[float]:
        """Seconds between its tokens: ITL."""
        return [after - before for before, after in zip(self.times, self.times[1:], strict=False)]


@dataclass(frozen=True)
class Objective:
    """A service-level objective: a request counts for goodput if it meets both.

    Attributes:
        first: most seconds to the first token.
        between: most seconds per further token, on average over the request.
    """

    first: float
    between: float

    def is_met(self, seen: Seen) -> bool:
        """Return whether a request has met it."""
        if seen.error is not None or not seen.times:
            return False
        mean = (seen.times[-1] - seen.times[0]) / max(len(seen.times) - 1, 1)
        return seen.first <= self.first and mean <= self.between


@dataclass(frozen=True)
class Report:
    """What all clients have seen; times in seconds, rates per second, percentiles 50, 90, and 99.

    Attributes:
        num_requests: requests that ended well.
        num_failed: the others.
        seconds: from the first arrival to the last token.
        requests_per_second: requests that ended well.
        tokens_per_second: their tokens.
        goodput: requests that met the objective.
        first: time to the first token (TTFT).
        between: time between tokens (ITL).
        longest_gap: percentiles, over the requests, of each request's longest time between two tokens.
    """

    num_requests: int
    num_failed: int
    seconds: float
    requests_per_second: float
    tokens_per_second: float
    goodput: float
    first: tuple[float, float, float]
    between: tuple[float, float, float]
    longest_gap: tuple[float, float, float]

    @classmethod
    def of(cls, seen: Sequence[Seen], objective: Objective) -> Report:
        """Summarize what clients have seen.

        Raises:
            PeerError: if no request ended well.
        """
        good = [own for own in seen if own.error is None and own.times]
        if not good:
            errors = sorted({own.error or "no token" for own in seen})
            raise PeerError(f"no request was answered: {'; '.join(errors)[:300]}")
        seconds = max(own.times[-1] for own in good)
        gaps = [own.between for own in good if own.between]
        return cls(
            len(good),
            len(seen) - len(good),
            seconds,
            len(good) / seconds,
            sum(len(own.times) for own in good) / seconds,
            sum(map(objective.is_met, good)) / seconds,
            percentiles([own.first for own in good]),
            percentiles([gap for own in gaps for gap in own] or [0.0]),
            percentiles([max(own) for own in gaps] or [0.0]),
        )


def percentiles(values: Sequence[float]) -> tuple[float, float, float]:
    """Return the 50th, 90th and 99th percentile."""
    low, middle, high = np.percentile(values, (50, 90, 99)).tolist()
    return low, middle, high


def token_body(request: BenchRequest) -> dict[str, Any]:
    """Return what is sent to `/v1/completions` of a server that takes token ids, such as ours, vLLM's or SGLang's."""
    params = request.params
    body = {"prompt": request.prompt, "max_tokens": params.max_tokens, "temperature": params.temperature}
    return body | {"seed": params.seed or 0, "ignore_eos": True, "stream": True}


async def drive(
    address: str,
    requests: Sequence[BenchRequest],
    arrivals: Arrivals,
    body_of: Callable[[BenchRequest], dict[str, Any]] = token_body,
    start: float | None = None,
) -> list[Seen]:
    """Send each request when it is due, and read all answers as streams.

    Args:
        address: of a server with OpenAI's protocol, such as http://127.0.0.1:8000.
        requests: the requests, in order of arrival.
        arrivals: when they arrive.
        body_of: returns what is sent for a request.
        start: when the first arrival is due, by `time.perf_counter`, which several processes of a machine share; None:
            now.
    """
    start, seen = time.perf_counter() if start is None else start, list[Seen]()

    async def one(request: BenchRequest, arrival: float) -> None:
        own = Seen(arrival)
        seen.append(own)
        await asyncio.sleep(max(0.0, arrival - (time.perf_counter() - start)))
        try:
            await _read_stream(address, body_of(request), own, start)
        except (OSError, EOFError, ValueError, PeerError) as error:  # asyncio's errors of broken streams are EOFErrors
            own.error = f"{type(error).__name__}: {error}"

    due = arrivals.times(len(requests)).tolist()
    await asyncio.gather(*(one(request, arrival) for request, arrival in zip(requests, due, strict=True)))
    return seen


async def _read_stream(address: str, body: dict[str, Any], seen: Seen, start: float) -> None:
    url, text = urlsplit(address), json.dumps(body).encode()
    reader, writer = await asyncio.open_connection(url.hostname, url.port or 80, limit=1 << 20)
    try:
        head = f"POST {url.path}/v1/completions HTTP/1.1\r\nHost: {url.netloc}\r\nContent-Type: application/json\r\n"
        writer.write(f"{head}Content-Length: {len(text)}\r\nConnection: close\r\n\r\n".encode() + text)
        status = await reader.readline()
        while (await reader.readline()).strip():
            pass  # headers
        if b" 200 " not in status:
            raise PeerError(f"{status.decode().strip()}: {(await reader.read(300)).decode(errors='replace')}")
        pending = b""
        while size := int(await reader.readline(), 16):  # chunked transfer: each chunk's length, then the chunk
            pending += await reader.readexactly(size + 2)
            *events, pending = pending[:-2].split(b"\n\n")
            now = time.perf_counter() - start
            for event in events:
                if event.startswith(b"data: {"):
                    answer = json.loads(event[6:])
                    if "error" in answer:
                        raise PeerError(str(answer["error"])[:200])
                    seen.times += [now] * any(choice["text"] for choice in answer["choices"])
    finally:
        writer.close()


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the report of one load as JSON."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--address", default="http://127.0.0.1:8000")
    parser.add_argument("--rate", type=float, default=math.inf, help="requests per second; default all at once")
    parser.add_argument("--burstiness", type=float, default=1.0, help="1: Poisson; less: bursts")
    parser.add_argument("--num-requests", type=int, default=100)
    parser.add_argument("--prompt", type=int, nargs=2, default=(64, 256), help="fewest and most tokens")
    parser.add_argument("--output", type=int, nargs=2, default=(32, 128), help="fewest and most tokens")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--slo", type=float, nargs=2, default=(1.0, 0.1), help="seconds to first token, and per token")
    chosen = parser.parse_args(arguments)
    check_positive(num_requests=chosen.num_requests)
    requests = Workload(chosen.num_requests, tuple(chosen.prompt), tuple(chosen.output)).requests(VOCABULARY)
    arrivals = Arrivals(chosen.rate, chosen.burstiness, chosen.seed)
    seen = asyncio.run(drive(chosen.address, requests, arrivals))
    print(json.dumps(asdict(Report.of(seen, Objective(*chosen.slo)))))


if __name__ == "__main__":
    main()
