"""API function that exports models to other libraries."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from visavis.progress import NoProgress, Progress

if TYPE_CHECKING:
    from visavis.exporting.export_model import ExportedModel


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
    """Export a model to a folder that works without visavis, with preprocessing, tokenizer and model card.

    Args:
        run: Run folder, or name of a CLIP or SigLIP model.
        format: Library that loads the folder. hub is a folder of transformers for CLIP and SigLIP, and ONNX graphs for other models.
        out: New folder. Default: ``<run>-<format>`` in the current directory.
        push: Repository of the Hugging Face hub to upload the folder to, such as owner/model. Default: no upload.
        private: Make a new repository private.
        license: License of the weights for the model card, such as apache-2.0. Default: unknown.
        progress: Receives the progress.

    Returns:
        The folder and its files, and the address of the upload.

    Raises:
        RunError: If the run does not exist, or reads stored features only.
        VisavisError: If the model has no vectors. The message names the models that can be exported.
        RefusedOverwrite: If the folder is not empty.
        StorageError: If the hub refuses the upload.
        MissingExtra: If the packages of the extra ``export`` are not installed.
    """
    from visavis import storage
    from visavis.api.catalog_entries import docstring_section
    from visavis.exporting.export_model import export_model
    from visavis.models.hub_upload import upload_folder, validate_repo
    from visavis.models.retriever import Retriever
    from visavis.runs.open_run import check_single_run

    progress = progress or NoProgress()
    if push is not None:
        validate_repo(push, "push")
    run = Path(run)
    folder = storage.prepare_empty_folder(Path(f"{run.name}-{format}") if out is None else out, will_be_replaced=True)
    check_single_run(run)
    model = Retriever.load(run, device="cpu")
    progress.message(f"Exporting {model.matcher.name} to {folder}.")
    exported = export_model(
        model, run, format, folder, formula=lambda objective: docstring_section(type(objective), "Formula:"), license=license
    )
    if push is None:
        return exported
    progress.message(f"Uploading {folder} to {push}.")
    return replace(exported, url=upload_folder(folder, push, private=private))
