"""Server that has imported visavis and forks a process for each command, with recorded writes.

It reads one request per line and answers with the exit code of the command. A command is ``visavis
ARGUMENTS`` or ``python -m MODULE ARGUMENTS``.
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import runpy
import sys
import traceback
from importlib import import_module
from typing import Any

from PIL import Image

PRELOADED = (
    "torch",
    "torch._dynamo",
    "torch.onnx",
    "filelock",
    "onnx",
    "onnxruntime.quantization",
    "pyarrow.parquet",
    "safetensors.torch",
    "scipy.optimize",
    "scipy.stats",
    "tokenizers",
    "visavis.api.indexing",
    "visavis.api.existing_indexes",
    "visavis.api.run_collections",
    "visavis.cli.commands",
    "visavis.cli.printers",
    "visavis.models.colpali",
    "visavis.models.image_text.cross_attention",
    "visavis.models.text_tower_export",
    "visavis.research.experiments",
    "visavis.retrieval.build.default_index",
    "visavis.retrieval.build.index_queries",
    "visavis.retrieval.build.make_correction",
    "visavis.retrieval.open_index",
    "visavis.retrieval.server.vote_store",
    "visavis.training.training_run",
)


def serve() -> None:
    """Answer requests until the input ends."""
    for name in PRELOADED:
        import_module(name)
    Image.init()
    gc.freeze()
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    for line in sys.stdin:
        child = os.fork()
        if not child:
            _run(json.loads(line))
        _, status = os.waitpid(child, 0)
        sys.stdout.write(f"{os.waitstatus_to_exitcode(status)}\n")
        sys.stdout.flush()


def _run(request: dict[str, Any]) -> None:
    """Run a command in this process, and end the process."""
    code = 1
    try:
        # A failure of kind "kill" ends the whole process group.
        os.setsid()
        for stream, file in ((1, request["stdout"]), (2, request["stderr"])):
            os.dup2(os.open(file, os.O_WRONLY | os.O_APPEND), stream)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        # A line is written at once, as in a terminal.
        sys.stdout, sys.stderr = (
            os.fdopen(stream, "w", buffering=1, closefd=False) for stream in (1, 2)
        )
        os.chdir(request["cwd"])
        os.environ.clear()
        os.environ.update(request["environment"])
        ctypes.CDLL(None).record_writes_start()
        code = _call(request["command"])
    except BaseException:  # noqa: BLE001 - printed as Python does
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _call(command: list[str]) -> int:
    """Run a command and return its exit code."""
    try:
        if command[0] == "visavis":
            sys.argv = command
            import_module("visavis.cli").main()
        else:
            assert command[:2] == ["python", "-m"], command
            sys.argv = command[2:]
            runpy.run_module(command[2], run_name="__main__", alter_sys=True)
    except SystemExit as end:
        if isinstance(end.code, str):
            sys.stderr.write(f"{end.code}\n")
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    return 0


if __name__ == "__main__":
    serve()
