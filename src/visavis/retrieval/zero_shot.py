"""Zero-shot accuracy of a model on a folder of classes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from visavis.core import storage
from visavis.core.errors import DataError, format_value
from visavis.core.progress import Progress
from visavis.evaluation.classification import ZeroShotResult, class_vectors, zero_shot_accuracy
from visavis.models.inference import score_all_pairs
from visavis.models.retriever import Retriever
from visavis.retrieval.source_files import list_source_files

DEFAULT_TEMPLATE = "a photo of a {}."


def evaluate_zero_shot(
    model: Retriever, folder: Path, templates: Sequence[str], progress: Progress
) -> ZeroShotResult:
    """Classify all images of a folder of classes, and compare with their classes.

    Args:
        model: The model.
        folder: Folder with one subfolder of images for each class, whose name is the class, with
            ``_`` for spaces.
        templates: Prompts with ``{}`` in place of the class.
        progress: Receives the progress, and one message for each file that is left out.

    Returns:
        The accuracies.

    Raises:
        DataError: If there are fewer than two classes, an image is outside of them, or an image
            cannot be read.
    """
    files = list_source_files(folder)
    for sentence in files.skipped:
        progress.message(sentence)
    parts = [Path(file.path).parts for file in files.files]
    if outside := next((part[0] for part in parts if len(part) == 1), None):
        raise DataError(
            f"{folder}: expected one folder of images for each class, got the image {outside} "
            "beside them. Move it into the folder of its class."
        )
    folders = sorted({part[0] for part in parts})
    if len(folders) < 2:
        raise DataError(
            f"{folder}: expected at least two folders, one for each class, got {len(folders)}. "
            "Name the folder that contains them."
        )
    classes = [name.replace("_", " ") for name in folders]
    labels = torch.tensor([folders.index(part[0]) for part in parts])
    images = model.encode_visual(
        [files.root / file.path for file in files.files],
        lambda done, total: progress.update("encoding images", done, total, 0.0),
    )
    prompts = [template.replace("{}", name) for name in classes for template in templates]
    texts = model.encode_text(prompts)
    if model.matcher.score_is_cosine:
        vectors = model.to_unit_rows(texts).view(len(classes), len(templates), -1)
        scores = model.to_unit_rows(images) @ class_vectors(vectors).T
        rule = "mean of their unit vectors"
    else:
        scores = score_all_pairs(model.matcher, images, texts, model.memory, "i2t")
        scores = scores.view(len(scores), len(classes), len(templates)).mean(2)
        rule = "mean of their scores"
    prompt = (
        f"prompt {templates[0]!r}" if len(templates) == 1 else f"{len(templates)} prompts, {rule}"
    )
    protocol = f"zero-shot: {len(classes):,} classes, {len(labels):,} images, {prompt}"
    return zero_shot_accuracy(scores, labels, classes, protocol)


def read_templates(file: str | Path) -> list[str]:
    """Read prompts, one in each line.

    Args:
        file: Text file. Empty lines are skipped.

    Returns:
        The prompts.

    Raises:
        DataError: If a line does not contain ``{}`` once, or there is none.
    """
    templates = []
    for number, line in enumerate(storage.read_text(file).splitlines(), 1):
        if not (template := line.strip()):
            continue
        if template.count("{}") != 1:
            raise DataError(
                f"{file}, line {number}: expected a prompt with {{}} once in place of the class, "
                f"got {format_value(template)}. Write it as {DEFAULT_TEMPLATE!r}."
            )
        templates.append(template)
    if not templates:
        raise DataError(
            f"{file}: expected at least one prompt, got none. Add {DEFAULT_TEMPLATE!r}."
        )
    return templates
