"""Operations that download from the hub."""

from __future__ import annotations

import atexit
import json
import random
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from tests.crashes.hub_commands import describe, main
from tests.crashes.operations import OPERATIONS, Operation
from tests.crashes.recording import temporary_folder
from tests.hub import Hub, serving
from tests.processes import Command


@cache
def repositories() -> dict[str, Path]:
    """Make a model and a data set. A large file is downloaded in parts."""
    root = temporary_folder() / "repositories"
    content = random.Random(0).randbytes(1_200_000)
    files = {
        "model/config.json": b'{"model_type": "clip"}',
        "model/model.safetensors": content,
        "model/preprocessor_config.json": b"{}",
        "model/tokenizer_config.json": b"{}",
        "data/test-0.tar": content[:1000],
        "data/test-1.tar": content,
    }
    for name, part in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(part)
    return {f"tiny/{name}": root / name for name in ("model", "data")}


@cache
def hub() -> Hub:
    """Start the server, which runs until this process ends."""
    stack = ExitStack()
    atexit.register(stack.close)
    return stack.enter_context(serving(repositories()))


@dataclass
class DownloadCase:
    """A download.

    Attributes:
        name: Data set or model.
    """

    name: str

    def prepare(self, folder: Path) -> None:
        """The folder is empty before the download."""

    def command(self, folder: Path) -> Sequence[str]:
        """The command on a folder."""
        return ["python", "-m", "tests.crashes.hub_commands", *self._arguments(folder)]

    def _arguments(self, folder: Path, **changes: str) -> list[str]:
        environment = {
            **hub().environment,
            "HF_HOME": str(folder / "hub"),
            "HF_HUB_DISABLE_PROGRESS_BARS": "1",
            "HF_HUB_DISABLE_XET": "1",
            "HF_HUB_DISABLE_TELEMETRY": "1",
            **changes,
        }
        return [self.name, *(f"{name}={value}" for name, value in environment.items())]

    def check(self, folder: Path, acknowledged: str) -> None:
        """Open it, without a network if the download had ended."""
        offline = {"HF_HUB_OFFLINE": "1", "HF_ENDPOINT": "http://127.0.0.1:9"}
        arguments = self._arguments(folder, **(offline if acknowledged.strip() else {}))
        output = temporary_folder() / "download"
        messages = output.with_suffix(".messages")
        command = Command(output, *arguments, program=main, messages=messages)
        assert command.wait(60) == 0, messages.read_text()[-1500:]
        source = repositories()[self.name.removeprefix("hf:")]
        assert json.loads(command.output_text) == json.loads(describe(source))


for _title, _name in {"model": "tiny/model", "data set": "hf:tiny/data"}.items():
    _case = DownloadCase(_name)
    OPERATIONS.append(
        Operation(f"download: {_title}", _case.prepare, _case.command, _case.check, is_long=True)
    )
