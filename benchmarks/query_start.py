"""Start of the commands that answer queries: processor time, time to the first answer and memory.

    OMP_NUM_THREADS=1 python benchmarks/query_start.py [--index INDEX] [--items 10000]
    [--text "a red star"] [--repeats 5] [--commands search serve mcp]

Without an index, the script makes one with a small model and random vectors of 256 dimensions, as
``benchmarks/large_index.py`` does. The model knows the words of the default text.

- search: ``visavis search INDEX TEXT`` as a whole.
- serve: ``visavis serve INDEX``, until it has answered a text query over HTTP.
- mcp: ``visavis mcp INDEX``, until it has answered a text query over stdin and stdout.

Each command is a new process, with warm files and compiled code. Processor time is user and system
time of the process and its children. Memory is the resident set, and the proportional set size
(PSS), in which pages shared with other processes count in part. Of ``search``, it is the peak. All
values are medians, with the smallest and largest. The last column shows whether the process had
loaded torch. Linux only.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote
from urllib.request import urlopen

TICKS = os.sysconf("SC_CLK_TCK")
REQUESTS: tuple[dict[str, Any], ...] = (
    {
        "id": 1,
        "method": "initialize",
        "params": {
            "protocolVersion": "2025-03-26",
            "capabilities": {},
            "clientInfo": {"name": "benchmark", "version": "1"},
        },
    },
    {"method": "notifications/initialized"},
)


@dataclass(frozen=True)
class Measured:
    """One start of a command.

    Attributes:
        seconds: Seconds until the answer.
        processor_seconds: User and system time until then.
        resident_mb: Resident memory in MB.
        proportional_mb: PSS in MB. NaN: the process has ended.
        has_torch: Whether the process had loaded torch. None: the process has ended.
    """

    seconds: float
    processor_seconds: float
    resident_mb: float
    proportional_mb: float = float("nan")
    has_torch: bool | None = None


def process_tree(process: int) -> Iterator[int]:
    """A process and its descendants."""
    yield process
    for task in Path(f"/proc/{process}/task").iterdir():
        for child in (task / "children").read_text().split():
            yield from process_tree(int(child))


def measure_running(process: int, started: float) -> Measured:
    """Values of a running process and its descendants."""
    seconds = time.perf_counter() - started
    ticks = 0
    kilobytes = dict.fromkeys(("Rss", "Pss"), 0)
    has_torch = False
    for each in process_tree(process):
        folder = Path(f"/proc/{each}")
        # User and system time of the process and of its ended children, after its name.
        ticks += sum(map(int, (folder / "stat").read_text().rpartition(")")[2].split()[11:15]))
        for line in (folder / "smaps_rollup").read_text().splitlines():
            name, _, value = line.partition(":")
            if name in kilobytes:
                kilobytes[name] += int(value.split()[0])
        has_torch |= "libtorch" in (folder / "maps").read_text()
    return Measured(
        seconds, ticks / TICKS, kilobytes["Rss"] / 1e3, kilobytes["Pss"] / 1e3, has_torch
    )


def command(*arguments: str | Path) -> list[str]:
    return [sys.executable, "-m", "visavis", *map(str, arguments)]


@contextmanager
def running(*arguments: str | Path, **options: Any) -> Iterator[subprocess.Popen[str]]:
    """A process that is ended after the block."""
    process = subprocess.Popen(command(*arguments), text=True, **options)
    try:
        yield process
    finally:
        process.terminate()
        process.communicate()


def measure_search(index: Path, text: str) -> Measured:
    """The command ``search`` as a whole."""
    started = time.perf_counter()
    # No pipe, which would have to be read.
    with tempfile.TemporaryFile() as output:
        process = subprocess.Popen(
            command("search", index, text, "--json"), stdout=output, stderr=subprocess.PIPE
        )
        _, status, usage = os.wait4(process.pid, 0)
        seconds = time.perf_counter() - started
        process.returncode = os.waitstatus_to_exitcode(status)
        output.seek(0)
        answer = output.read()
    assert process.stderr is not None
    with process.stderr as errors:
        if process.returncode != 0:
            raise RuntimeError(errors.read().decode())
    assert json.loads(answer)["hits"], "the search found nothing"
    return Measured(seconds, usage.ru_utime + usage.ru_stime, usage.ru_maxrss / 1e3)


def measure_serve(index: Path, text: str) -> Measured:
    """The command ``serve`` until its first answer."""
    started = time.perf_counter()
    with running("serve", index, "--port", "0", stderr=subprocess.PIPE) as process:
        ready = next((line for line in process.stderr or () if " at http" in line), None)
        if ready is None:
            raise RuntimeError("visavis serve ended before it was ready.")
        address = ready.rpartition(" at ")[2].split()[0]
        with urlopen(f"{address}/api/search?text={quote(text)}&limit=5") as answer:
            hits = json.load(answer)["sides"][0]["hits"]
        measured = measure_running(process.pid, started)
    assert hits, "the server found nothing"
    return measured


def measure_mcp(index: Path, text: str) -> Measured:
    """The command ``mcp`` until its first answer."""
    call = {"name": "search", "arguments": {"query": text, "limit": 5}}
    requests = (*REQUESTS, {"id": 2, "method": "tools/call", "params": call})
    started = time.perf_counter()
    pipes = dict.fromkeys(("stdin", "stdout"), subprocess.PIPE)
    with running("mcp", index, **pipes, stderr=subprocess.DEVNULL) as process:
        assert process.stdin is not None and process.stdout is not None
        for request in requests:
            process.stdin.write(json.dumps({"jsonrpc": "2.0", **request}) + "\n")
        process.stdin.flush()
        answers = (json.loads(line) for line in process.stdout)
        found = next((answer for answer in answers if answer.get("id") == 2), None)
        measured = measure_running(process.pid, started)
    assert found is not None and not found["result"]["isError"], f"no results: {found}"
    return measured


COMMANDS: dict[str, Callable[[Path, str], Measured]] = {
    "search": measure_search,
    "serve": measure_serve,
    "mcp": measure_mcp,
}


def make_index(folder: Path, items: int) -> None:
    """Make an index of random vectors in the subfolder ``index``."""
    from large_index import RECIPE, fill, write_image, write_source

    import visavis
    from visavis.core.progress import NoProgress
    from visavis.data.synthetic import write_synthetic_scenes
    from visavis.retrieval.build.index_builder import build_index

    scenes = write_synthetic_scenes(
        folder / "scenes", num_train=200, num_val=8, num_test=8, size=32, seed=0
    )
    (folder / "recipe.toml").write_text(RECIPE.format(width=256))
    run = visavis.train(folder / "recipe.toml", data=scenes, out=folder / "run").run
    source = folder / "source"
    (source / "0000").mkdir(parents=True)
    write_image(source)
    build_index(run, source, folder / "index", progress=NoProgress())
    write_source(source, items)
    fill(folder / "index", source, items, 256)


def describe(values: list[float], unit: str, digits: int) -> str:
    """Median, smallest and largest value."""
    middle, low, high = statistics.median(values), min(values), max(values)
    return f"{middle:.{digits}f} {unit} ({low:.{digits}f} to {high:.{digits}f})"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--index", type=Path)
    parser.add_argument("--items", type=int, default=10_000, help="items of an index that is made")
    parser.add_argument("--make", type=Path, help="only make an index in this folder")
    parser.add_argument("--text", default="a red star")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--commands", nargs="+", choices=COMMANDS, default=list(COMMANDS))
    options = parser.parse_args()
    if options.make:
        make_index(options.make, options.items)
        return
    # A process that cannot keep compiled code compiles all of it each time.
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    with tempfile.TemporaryDirectory() as temporary:
        index = options.index or Path(temporary) / "index"
        if not options.index:
            # Another process, because a child begins with the peak memory of its parent.
            make = [sys.executable, __file__, "--make", temporary, "--items", str(options.items)]
            subprocess.run(make, check=True)
        for name in options.commands:
            measure = COMMANDS[name]
            measure(index, options.text)  # warm-up: files and compiled code
            starts = [measure(index, options.text) for _ in range(options.repeats)]
            memory = describe([each.resident_mb for each in starts], "MB resident", 0)
            if (torch := starts[0].has_torch) is not None:
                memory += f", {describe([each.proportional_mb for each in starts], 'MB PSS', 0)}"
                memory += f", {'with' if torch else 'without'} torch"
            seconds = describe([each.seconds for each in starts], "s", 2)
            processor = describe(
                [each.processor_seconds for each in starts], "s of the processor", 2
            )
            print(f"{name:6} {seconds}, {processor}, {memory}", flush=True)


if __name__ == "__main__":
    main()
