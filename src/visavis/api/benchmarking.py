"""API function that evaluates models on the benchmarks of mteb."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from visavis.integrations.mteb import MtebReport


def mteb(
    run: str | Path,
    *,
    tasks: str | Sequence[Any],
    out: str | Path = "runs/mteb",
    name: str | None = None,
    device: str | None = None,
    batch_size: int = 64,
) -> MtebReport:
    """Evaluate a model on tasks of mteb, such as the image-text benchmark MIEB. Finished tasks are not repeated.

    Args:
        run: Run folder, or folder or hub name of a CLIP or SigLIP model.
        tasks: Task or benchmark of mteb, such as Flickr30kT2IRetrieval or "MIEB(lite)". In Python also a task object.
        out: Folder of mteb's JSON files. Default: ``runs/mteb``.
        name: Name of the model in the results. Default: the name of the folder.
        device: Device of the model. Default: CUDA if available, else the CPU.
        batch_size: Items that are encoded at once.

    Returns:
        The main score of each task, and mteb's results.

    Raises:
        DataError: If the data of a task cannot be loaded.
        MissingExtra: If mteb is not installed.
        RefusedOverwrite: If ``out`` has other content than mteb results.
        RunError: If the folder has no model.
        ShapeError: If the model has several vectors per item.
        VisavisError: If a task is unknown.

    Example:
        >>> visavis.mteb("runs/mine", tasks=["Flickr30kT2IRetrieval"]).scores  # doctest: +SKIP
    """
    from visavis.integrations.mteb import check_output, run_tasks
    from visavis.models.retriever import Retriever

    check_output(Path(out))
    chosen = [tasks] if isinstance(tasks, str) else list(tasks)
    model = Retriever.load(run, device=device, batch_size=batch_size)
    return run_tasks(model, name or os.path.basename(os.path.realpath(run)), chosen, Path(out))
