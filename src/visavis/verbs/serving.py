"""The verb that keeps a page open."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from visavis.progress import Progress, Silent


def serve(
    index: str | Path | Sequence[str | Path],
    *,
    host: str = "127.0.0.1",
    port: int = 8000,
    token: str | None = None,
    judgements: str | Path | None = None,
    open_page: bool = False,
    progress: Progress | None = None,
) -> None:
    """A page to search an index by words and pictures, or two of them side by side; until the process is told to end.

    index: the folder of an index, or two folders to compare, shown left and right by lot. host: an address of this machine; any other
    than a loopback one needs a token. port: 0 takes one that is free. token: what a browser or program must bring, at least 12
    characters. judgements: a file of JSON lines for the votes "fits" and "does not fit", new or to be continued; default: no votes.
    open_page: open it in the browser of this machine.
    """
    from visavis.serving.running import run_service

    indexes = [index] if isinstance(index, str | Path) else list(index)
    run_service(indexes, host=host, port=port, token=token, judgements=judgements, open_page=open_page, progress=progress or Silent())
