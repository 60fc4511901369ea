"""Many clients that type: requests per second, processor time and tail of response times.

    OMP_NUM_THREADS=1 python benchmarks/typing_clients.py [--before SOURCE] [--clients 64] [--seconds 8] [--rounds 3]

Each client asks for a new text as soon as it has an answer, over one connection: a search of
``/api/search``, or a vector of ``/v1/embeddings``. No text is asked for twice, so nothing comes from
a cache. The model has a frozen MiniLM, and the index 1,200 synthetic scenes. Clients run in one
process next to the server. ``--before`` is the ``src`` folder of an earlier version, whose search runs
in turns with this one. Processor time is taken from the server, which other programs on the machine
disturb less than the requests per second. An answer of 500 or above ends with exit status 1.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from urllib.parse import quote

import torch
from everyday import prepare

SOURCE = Path(__file__).resolve().parents[1] / "src"
COLORS = ("red", "green", "blue", "orange", "purple", "teal")
SHAPES = ("circle", "square", "star", "heart", "dog", "beach", "car", "tree", "house")
OTHERS = ("above", "below", "left", "right", "small", "large", "night", "two", "three", "white")
WORDS = COLORS + SHAPES + OTHERS
WARM_UP_SECONDS = 2.0
SEARCH, EMBEDDINGS = "/api/search", "/v1/embeddings"


@dataclass
class Load:
    """Responses of a server.

    Attributes:
        seconds: Time of each response.
        statuses: Number of responses by status.
        took: Duration in seconds.
        processor_seconds: Processor time of the server.
    """

    seconds: list[float] = field(default_factory=list)
    statuses: Counter[int] = field(default_factory=Counter)
    took: float = 0.0
    processor_seconds: float = 0.0

    @property
    def processor_ms(self) -> float:
        """Processor time per response in ms."""
        return 1000 * self.processor_seconds / len(self.seconds)

    def describe(self) -> str:
        """One line for a reader."""
        cuts = statistics.quantiles(self.seconds, n=100, method="inclusive")
        errors = sum(number for status, number in self.statuses.items() if status != 200)
        return (
            f"{len(self.seconds) / self.took:5.0f} requests/s, {self.processor_ms:5.2f} ms of "
            f"processor time each, median {1000 * cuts[49]:5.0f} ms, p99 {1000 * cuts[98]:5.0f} ms "
            f"({cuts[98] / cuts[49]:.1f} x), {errors} errors"
        )


@contextmanager
def running_server(source: Path, folder: Path) -> Iterator[tuple[int, int]]:
    """The port and the process of ``visavis serve`` of a version."""
    environment = {**os.environ, "PYTHONPATH": str(source)}
    command = [sys.executable, "-m", "visavis", "serve", "index", "--port", "0"]
    process = subprocess.Popen(
        command, cwd=folder, env=environment, stderr=subprocess.PIPE, text=True
    )
    try:
        line = next((line for line in process.stderr or () if " at http" in line), "")
        if (address := re.search(r":(\d+)\s", line)) is None:
            raise RuntimeError(f"{source}: visavis serve did not start.")
        yield int(address[1]), process.pid
    finally:
        process.send_signal(signal.SIGINT)
        process.wait(30)


def processor_seconds(process: int) -> float:
    """Processor time of a process so far."""
    fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def request(route: str, text: str) -> bytes:
    """The bytes of a request for a text."""
    if route == SEARCH:
        return (
            f"GET {route}?text={quote(text)}&limit=20 HTTP/1.1\r\nHost: localhost\r\n\r\n".encode()
        )
    body = json.dumps({"input": text, "encoding_format": "base64"}).encode()
    return (
        f"POST {route} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(body)}\r\n\r\n"
    ).encode() + body


async def client(port: int, route: str, number: int, deadline: float, load: Load) -> None:
    """Send requests over one connection until a deadline."""
    words = random.Random(f"{number} {deadline}")
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    for position in count():
        if time.monotonic() > deadline:
            break
        # With a number, so that no text was asked for before.
        text = f"a {' '.join(words.choices(WORDS, k=words.randint(2, 7)))} {number}x{position}"
        started = time.perf_counter()
        writer.write(request(route, text))
        head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").lower()
        await reader.readexactly(int(head.partition("content-length: ")[2].split("\r\n")[0]))
        load.seconds.append(time.perf_counter() - started)
        load.statuses[int(head.split()[1])] += 1
    writer.close()


async def run_clients(port: int, route: str, clients: range, seconds: float) -> Load:
    """Run several clients at once."""
    load = Load()
    started = time.monotonic()
    await asyncio.gather(
        *(client(port, route, number, started + seconds, load) for number in clients)
    )
    load.took = time.monotonic() - started
    return load


def measure(source: Path, folder: Path, route: str, clients: int, seconds: float) -> Load:
    """Run clients against a new server, after a warm-up with other texts."""
    with running_server(source, folder) as (port, process):
        asyncio.run(run_clients(port, route, range(clients, 2 * clients), WARM_UP_SECONDS))
        before = processor_seconds(process)
        load = asyncio.run(run_clients(port, route, range(clients), seconds))
        load.processor_seconds = processor_seconds(process) - before
    return load


def main() -> int:
    """Print one line for each route, version and round."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--before", type=Path)
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=8)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    torch.set_num_threads(1)
    runs = [("search", SOURCE, SEARCH), ("embeddings", SOURCE, EMBEDDINGS)]
    if options.before:
        runs.insert(0, ("search before", options.before.absolute(), SEARCH))
    loads: dict[str, list[Load]] = {name: [] for name, _, _ in runs}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        prepare(folder)
        for _ in range(options.rounds):
            for label, source, route in runs:
                load = measure(source, folder, route, options.clients, options.seconds)
                loads[label].append(load)
                print(f"{label:<14} {load.describe()}", flush=True)
    if options.before:
        pairs = list(zip(loads["search"], loads["search before"], strict=True))
        for unit, ratios in (
            ("requests/s", [len(a.seconds) / a.took * b.took / len(b.seconds) for a, b in pairs]),
            ("processor time", [b.processor_ms / a.processor_ms for a, b in pairs]),
        ):
            print(
                f"{unit}: {statistics.median(ratios):.2f} x as good as before "
                f"({min(ratios):.2f} to {max(ratios):.2f})"
            )
    statuses = sum((load.statuses for part in loads.values() for load in part), Counter[int]())
    return int(any(status >= 500 for status in statuses))


if __name__ == "__main__":
    sys.exit(main())
