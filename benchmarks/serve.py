"""The service under load: many clients on loopback for a while, then 20,000 requests, and the
memory in use afterwards.

    python benchmarks/serve.py [--index INDEX] [--clients 64] [--seconds 60] [--requests 20000]

Without an index, the script uses a thousand synthetic scenes and a model trained for seconds. Each
client types a query, loads a few images of the answer, and turns to the next page, without pause,
over one connection. An answer of 500 or above is an error. The exit status is then 1.
"""

from __future__ import annotations

import argparse
import http.client
import json
import random
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections import Counter
from pathlib import Path
from urllib.parse import quote, urlsplit

RECIPE = """
name = "small"
visual = { encoder = "scenes", granularity = "pooled" }
text = { encoder = "vocabulary", min_count = 1 }
model = { kind = "VSE++", embedding_dim = 64, word_dim = 32 }
training = { batch_size = 64, metric_batches = 1, threads = 1 }
phases = [{ epochs = 2, objective = "Unified(gamma=30)", optimizer = { lr = 0.01 } }]
"""
COLORS = ("red", "green", "blue", "orange", "pink")
SHAPES = ("star", "circle", "square", "heart")
PLACES = ("", " on a beach", " at night")
QUERIES = [f"a {color} {shape}{parts}" for color in COLORS for shape in SHAPES for parts in PLACES]


class Client(threading.Thread):
    """A client that sends requests until the time is over or all requests are made."""

    def __init__(self, address: str, number: int, deadline: float, remaining: list[int]):
        super().__init__(daemon=True)
        parts = urlsplit(address)
        self.connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=60)
        self.random = random.Random(number)
        self.deadline = deadline
        self.remaining = remaining
        self.seconds: dict[str, list[float]] = {"search": [], "thumbnail": []}
        self.statuses: Counter[int] = Counter()

    def run(self) -> None:
        while self.is_running():
            text = f"{self.random.choice(QUERIES)}{' -' + self.random.choice(COLORS) if self.random.random() < 0.2 else ''}"
            for offset in (0, 20):
                answer = self.send(
                    "search", f"/api/search?text={quote(text)}&offset={offset}&limit=20"
                )
                hits = json.loads(answer)["sides"][0]["hits"] if answer else []
                for hit in hits[:4]:
                    if self.is_running():
                        self.send(
                            "thumbnail",
                            f"/api/thumbnail?key={quote(hit['key'])}&content_version={hit['content_version']}",
                        )

    def is_running(self) -> bool:
        return time.monotonic() < self.deadline and self.remaining[0] > 0

    def send(self, kind: str, path: str) -> bytes:
        self.remaining[0] -= 1
        started = time.perf_counter()
        self.connection.request("GET", path)
        answer = self.connection.getresponse()
        content = answer.read()
        self.seconds[kind].append(time.perf_counter() - started)
        self.statuses[answer.status] += 1
        return content if answer.status == 200 else b""


def load(
    address: str, clients: int, seconds: float, requests: int
) -> tuple[Counter[int], dict[str, list[float]], float]:
    """Statuses, times of each kind of request, and the total time."""
    started = time.monotonic()
    remaining = [requests]
    running = [Client(address, number, started + seconds, remaining) for number in range(clients)]
    for client in running:
        client.start()
    for client in running:
        client.join()
    statuses = sum((client.statuses for client in running), Counter())
    return (
        statuses,
        {
            kind: [s for client in running for s in client.seconds[kind]]
            for kind in ("search", "thumbnail")
        },
        time.monotonic() - started,
    )


def resident_mb(address: str) -> float:
    """Resident memory of the service, in MB."""
    with urllib.request.urlopen(f"{address}/metrics") as figures:
        return (
            float(
                re.search(  # type: ignore[index]
                    r"^process_resident_memory_bytes (\S+)", figures.read().decode(), re.MULTILINE
                )[1]
            )
            / 1e6
        )


def build_index(folder: Path) -> Path:
    """Build an index of a thousand synthetic scenes."""
    import visavis

    scenes = visavis.data_scenes(
        folder / "scenes", num_train=1000, num_val=50, num_test=50, size=96
    )
    (folder / "recipe.toml").write_text(RECIPE)
    visavis.train(folder / "recipe.toml", data=scenes, out=folder / "run")
    visavis.index(folder / "run", scenes / "images", out=folder / "index")
    return folder / "index"


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--index", type=Path)
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--requests", type=int, default=20_000)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        index = arguments.index or build_index(Path(folder))
        process = subprocess.Popen(
            [sys.executable, "-m", "visavis", "serve", str(index), "--port", "0"], stderr=subprocess.PIPE, text=True
        )  # fmt: skip
        try:
            ready = next(line for line in process.stderr or [] if " at http" in line)
            address = ready.rpartition(" at ")[2].split()[0]
            print(ready.strip())
            statuses, seconds, took = load(
                address, arguments.clients, arguments.seconds, sys.maxsize
            )
            print(
                f"{arguments.clients} clients, {took:.0f} s: {statuses.total():,} requests, "
                f"{statuses.total() / took:.0f} per second, statuses {dict(statuses)}"
            )
            for kind, times in seconds.items():
                cuts = statistics.quantiles(times, n=100, method="inclusive")
                print(
                    f"  {kind}: median {1000 * cuts[49]:.0f} ms, p95 {1000 * cuts[94]:.0f} ms, p99 "
                    f"{1000 * cuts[98]:.0f} ms, worst {1000 * max(times):.0f} ms"
                )
            before = resident_mb(address)
            more, _, took = load(address, 16, 3600, arguments.requests)
            after = resident_mb(address)
            print(
                f"{more.total():,} more requests in {took:.0f} s: {before:.0f} MB before, "
                f"{after:.0f} MB after"
            )
            return int(any(status >= 500 for status in statuses + more))
        finally:
            process.send_signal(signal.SIGINT)
            process.wait(30)


if __name__ == "__main__":
    sys.exit(main())
