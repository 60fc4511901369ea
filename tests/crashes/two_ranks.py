"""``python -m tests.crashes.two_ranks ARGUMENTS``: the command ``visavis ARGUMENTS`` in two processes
that train together, as torchrun starts them.
"""

from __future__ import annotations

import os
import socket
import sys

from visavis.cli import main


def run_ranks(world_size: int) -> int:
    """Fork a process for each rank. Returns the largest exit code."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), WORLD_SIZE=str(world_size))
    children = list[int]()
    for rank in range(world_size):
        child = os.fork()
        if not child:
            os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank))
            code = 1
            try:
                main()
                code = 0
            except SystemExit as end:
                code = end.code if isinstance(end.code, int) else int(end.code is not None)
            finally:
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(code)
        children.append(child)
    statuses = [os.waitpid(child, 0)[1] for child in children]
    return max(map(os.waitstatus_to_exitcode, statuses))


if __name__ == "__main__":
    sys.exit(run_ranks(2))
