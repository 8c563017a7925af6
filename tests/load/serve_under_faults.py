"""Load and faults: clients that behave, vanish, read slowly, and send garbage, against `mini-engine serve` on loopback.

    python tests/load/serve_under_faults.py --minutes 60 [--seed 0] [--queued 10000] [--report FILE]

Every answer to a client that behaves must equal the offline answer, whatever the others do. (Logits are batch-invariant
here, so no answer depends on the batch.) At the end no request runs or waits, no page is held, and the memory of the
server must not have grown since its first minute. It is no part of the tests that CI runs, because it takes as long as
it is told to.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import re
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path

import openai
import psutil

MODEL = "smollm2-135m-instruct"
OPTIONS = {"dtype": "float32", "max_batch_size": 8, "max_model_len": 256, "num_pages": 24, "page_size": 16}
STARTS = "Once upon a time", "The sky is", "def add(a, b):", "1, 2, 3,", "Dear Sir,", "In the year 1969", "Water"
BODY_LIMIT = 1 << 20


def prompts() -> list[str]:
    """Texts of several lengths, some of which begin alike, so that pages are shared."""
    long = "A page table lists the pages of each request in order of position. " * 6
    return [*STARTS, *(long + start for start in STARTS)]


def offline(max_tokens: int) -> list[str]:
    """The answer to each prompt, computed alone."""
    from mini_engine import LLM, SamplingParams

    llm = LLM(MODEL, device="cpu", batch_invariant=True, **OPTIONS)
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens)
    return [llm.generate([prompt], params)[0].text for prompt in prompts()]


class Clients:
    """Clients of every kind.

    Args:
        port: where the server listens.
        answers: the right answer to each prompt.
        max_tokens: of each answer.
        rng: chooses what each client does.
    """

    def __init__(self, port: int, answers: list[str], max_tokens: int, rng: random.Random) -> None:
        self._port, self._answers, self._max_tokens, self._rng = port, answers, max_tokens, rng
        self._openai = openai.AsyncOpenAI(
            base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=0, timeout=600
        )
        self.counts: Counter[str] = Counter()
        self.wrong: list[str] = []

    async def behaves(self) -> None:
        """Ask for one answer, and compare it."""
        number, stream = self._rng.randrange(len(self._answers)), self._rng.random() < 0.5
        options = {"model": MODEL, "prompt": prompts()[number], "temperature": 0, "max_tokens": self._max_tokens}
        try:
            if stream:
                text = ""
                async for chunk in await self._openai.completions.create(**options, stream=True):
                    text += chunk.choices[0].text
            else:
                text = (await self._openai.completions.create(**options)).choices[0].text
        except openai.RateLimitError:
            self.counts["told to come back"] += 1
            await asyncio.sleep(1)
            return
        self.counts["answered"] += 1
        if text != self._answers[number]:
            self.wrong.append(f"prompt {number}: {text!r} instead of {self._answers[number]!r}")

    async def vanishes(self) -> None:
        """Leave in the middle of an answer, or before it begins."""
        body = {"prompt": self._rng.choice(prompts()), "max_tokens": 200, "n": self._rng.choice([1, 3])}
        body |= {"ignore_eos": True, "stream": self._rng.random() < 0.7}
        reader, writer = await self._send(json.dumps(body).encode())
        with suppress(TimeoutError):
            await asyncio.wait_for(reader.read(200), self._rng.random() * 2)
        writer.transport.abort()
        self.counts["vanished"] += 1

    async def reads_slowly(self) -> None:
        """Read a stream a few bytes at a time."""
        body = {"prompt": "Once", "max_tokens": 60, "ignore_eos": True, "stream": True, "temperature": 0}
        reader, writer = await self._send(json.dumps(body).encode())
        received = b""
        while not received.endswith(b"0\r\n\r\n") and (more := await reader.read(64)):
            received += more
            await asyncio.sleep(0.01)
        writer.close()
        self.counts["read slowly"] += 1
        if b"[DONE]" not in received and b" 429 " not in received[:40]:
            self.wrong.append("a slow stream has no end")

    async def sends_garbage(self) -> None:
        """Send what is no request, and expect a refusal or the end of the connection."""
        kind = self._rng.randrange(5)
        if kind == 0:
            reader, writer = await asyncio.open_connection("127.0.0.1", self._port)
            writer.write(self._rng.randbytes(self._rng.randrange(1, 2000)) + b"\r\n\r\n")
        elif kind == 1:
            reader, writer = await self._send(self._rng.randbytes(500))
        elif kind == 2:
            reader, writer = await self._send(b'{"prompt": "' + b"x" * BODY_LIMIT + b'"}')
        elif kind == 3:
            wrong = {"temperature": "hot", "n": -1, "stop": 5, "logit_bias": {"x": 1}, "max_tokens": 10**9, "seed": []}
            name = self._rng.choice(sorted(wrong))
            reader, writer = await self._send(json.dumps({"prompt": "x", name: wrong[name]}).encode())
        else:
            reader, writer = await self._send(b'{"prompt": "half', length=1000)
        try:
            writer.write_eof()
            answer = await asyncio.wait_for(reader.read(100), 60)
            if answer and not re.match(rb"HTTP/1.1 4\d\d", answer):
                self.wrong.append(f"garbage of kind {kind} was answered with {answer[:60]!r}")
        except (ConnectionError, TimeoutError):
            pass
        writer.close()
        self.counts["garbage"] += 1
        await asyncio.sleep(0.05)  # it costs the server little, so it would be all that happens

    async def floods(self, count: int) -> None:
        """Queue many requests at once, and leave."""
        body = json.dumps({"prompt": "Once", "max_tokens": 2}).encode()
        for start in range(0, count, 200):
            sent = await asyncio.gather(*(self._send(body) for _ in range(min(200, count - start))))
            answers = await asyncio.gather(*(reader.read(20) for reader, _ in sent))
            for _, writer in sent:
                writer.transport.abort()
            self.counts["queued"] += len(answers)
            wrong = [own for own in answers if not re.match(rb"HTTP/1.1 (200|429)", own)]
            self.wrong += [f"a queued request got {own!r}" for own in wrong]

    async def metrics(self) -> dict[str, float]:
        """The server's gauges."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self._port)
        writer.write(b"GET /metrics HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        text = (await reader.read()).decode()
        writer.close()
        names = "num_requests_running|num_requests_waiting|kv_cache_usage_perc"
        found = re.findall(rf"^vllm:({names})\{{.*\}} (\S+)", text, re.M)
        return {name: float(value) for name, value in found}

    async def _send(self, body: bytes, length: int | None = None) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        reader, writer = await asyncio.open_connection("127.0.0.1", self._port)
        head = "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        try:
            writer.write(f"{head}Content-Length: {len(body) if length is None else length}\r\n\r\n".encode() + body)
            await writer.drain()
        except ConnectionError:
            pass  # the server may refuse a long body before it has all of it
        return reader, writer


async def load(clients: Clients, server: psutil.Process, minutes: float, queued: int) -> dict[str, object]:
    """Run clients for a while; return what happened."""
    end, memory = time.monotonic() + 60 * minutes, list[int]()
    kinds: list[Callable[[], Awaitable[None]]] = [clients.behaves] * 4 + [
        clients.vanishes, clients.reads_slowly, clients.sends_garbage,
    ]  # fmt: skip

    async def again(kind: Callable[[], Awaitable[None]]) -> None:
        while time.monotonic() < end:
            await kind()

    async def watch() -> None:
        while time.monotonic() < end:
            await asyncio.sleep(min(60, 10 * minutes))
            memory.append(sum(own.memory_info().rss for own in (server, *server.children(recursive=True))))
            print(f"{dict(clients.counts)}, {memory[-1] / 1e6:.0f} MB, {len(clients.wrong)} wrong", flush=True)

    await asyncio.gather(watch(), *(again(kind) for kind in kinds))
    await clients.floods(queued)
    for _ in range(600):
        if not any((left := await clients.metrics()).values()):
            break
        await asyncio.sleep(0.1)
    return {
        "minutes": minutes, "counts": dict(clients.counts), "wrong": clients.wrong[:20], "left": left,
        "memory after the first interval": memory[0], "memory at the end": memory[-1],
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--minutes", type=float, default=60)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--queued", type=int, default=10_000)
    parser.add_argument("--report", type=Path)
    chosen, max_tokens = parser.parse_args(), 16
    answers = offline(max_tokens)
    options = [f"--{name.replace('_', '-')}={value}" for name, value in OPTIONS.items()]
    command = [sys.executable, "-m", "mini_engine", "serve", MODEL, "--port=0", "--batch-invariant", *options]
    command += [f"--max-body-bytes={BODY_LIMIT}", "--max-queued-requests=64"]
    environment = os.environ | {"PYTHONUNBUFFERED": "1", "CUDA_VISIBLE_DEVICES": ""}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
    assert process.stdout is not None
    port = next(int(found[1]) for line in process.stdout if (found := re.search(r"http://127.0.0.1:(\d+)", line)))
    try:
        clients = Clients(port, answers, max_tokens, random.Random(chosen.seed))
        report = asyncio.run(load(clients, psutil.Process(process.pid), chosen.minutes, chosen.queued))
    finally:
        process.terminate()
        status = process.wait(60)
    text = json.dumps(report | {"exit status": status}, indent=1)
    print(text)
    if chosen.report is not None:
        chosen.report.write_text(text + "\n")
    grown = report["memory at the end"] - report["memory after the first interval"]  # type: ignore[operator]
    if report["wrong"] or any(report["left"].values()) or status or grown > 64 << 20:  # type: ignore[attr-defined]
        sys.exit("something was wrong, left, or kept")


if __name__ == "__main__":
    main()
