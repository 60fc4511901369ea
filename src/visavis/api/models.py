"""API functions that export models to other libraries, and evaluate them on the benchmarks of mteb."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

from visavis.api.arguments import check_choice, to_list
from visavis.core.errors import VisavisError
from visavis.core.progress import NoProgress, Progress

if TYPE_CHECKING:
    from visavis.integrations.mteb import MtebReport
    from visavis.training.export.export_model import ExportedModel


def export(
    run: str | Path,
    *,
    format: Literal["hub", "sentence-transformers", "onnx", "torch-export"] = "hub",  # noqa: A002 - the option is --format
    out: str | Path | None = None,
    push: str | None = None,
    private: bool = False,
    license: str = "",  # noqa: A002 - the option is --license
    progress: Progress | None = None,
) -> ExportedModel:
    """Export a model to a folder that works without visavis. The folder has preprocessing,
    tokenizer and model card.

    Args:
        run: Run folder, or name of a pretrained model.
        format: Library that loads the folder. hub is a folder of transformers for CLIP and SigLIP,
            and ONNX graphs for other models.
        out: New folder. Default: ``<run>-<format>`` in the current directory.
        push: Repository of the Hugging Face hub to upload the folder to, such as owner/model.
            Default: no upload.
        private: Make a new repository private.
        license: License of the weights for the model card, such as apache-2.0. Default: unknown.
        progress: Receives the progress.

    Returns:
        The folder and its files, and the address of the upload.

    Raises:
        RunError: If the run does not exist, or reads stored features only.
        VisavisError: If the model has no vectors. The message names the models that can be
            exported.
        SpecError: If ``format`` is unknown.
        RefusedOverwrite: If the folder is not empty.
        StorageError: If the hub refuses the upload.
        MissingExtra: If the packages of the extra ``export`` are not installed.

    Command line:
        ```sh
        visavis export runs/mine --format onnx --out exported/onnx
        visavis export runs/mine --format sentence-transformers --out exported/st --license mit
        ```
    """
    from visavis.api.catalog_entries import docstring_section
    from visavis.core import storage
    from visavis.data.hub_files import upload_folder, validate_repo
    from visavis.models.retriever import Retriever
    from visavis.training.export.export_model import Format, export_model
    from visavis.training.runs.open_run import check_single_run

    progress = progress or NoProgress()
    check_choice("format", format, get_args(Format))
    if push is not None:
        validate_repo(push, "push")
    if not license.isprintable():
        raise VisavisError(
            f"license: expected one line of text, got {license!r}. Pass a name such as apache-2.0."
        )
    run = Path(run)
    folder = Path(f"{run.name}-{format}") if out is None else Path(out)
    if os.path.exists(folder):
        storage.prepare_empty_folder(folder, will_be_replaced=True)
    check_single_run(run)
    model = Retriever.load(run, device="cpu")
    progress.message(f"Exporting {model.matcher.name} to {folder}.")
    exported = export_model(
        model,
        run,
        format,
        folder,
        formula=lambda objective: docstring_section(type(objective), "Formula:"),
        license=license,
    )
    if push is None:
        return exported
    progress.message(f"Uploading {folder} to {push}.")
    return replace(exported, url=upload_folder(folder, push, private=private))


def mteb(
    run: str | Path,
    *,
    tasks: str | Sequence[Any],
    out: str | Path = "runs/mteb",
    name: str | None = None,
    device: str | None = None,
    batch_size: int = 64,
) -> MtebReport:
    """Evaluate a model on tasks of mteb, such as MIEB. Finished tasks are not repeated.

    Args:
        run: Run folder, or folder or hub name of a pretrained model.
        tasks: Task or benchmark of mteb, such as Flickr30kT2IRetrieval or "MIEB(lite)". In Python
            also a task object.
        out: Folder of mteb's JSON files. Default: ``runs/mteb``.
        name: Name of the model in the results. Default: the name of the folder.
        device: Device of the model. Default: CUDA or an Apple GPU if available, else the CPU.
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

    Command line:
        ```sh
        visavis mteb runs/mine --tasks Flickr30kT2IRetrieval --out results
        ```
    """
    from visavis.integrations.mteb import check_output, run_tasks
    from visavis.models.retriever import Retriever

    check_output(Path(out))
    model = Retriever.load(run, device=device, batch_size=batch_size)
    return run_tasks(
        model, name or os.path.basename(os.path.realpath(run)), to_list(tasks), Path(out)
    )
