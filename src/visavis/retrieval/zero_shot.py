"""Zero-shot classification of images by texts, and its accuracy on a folder of classes."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from visavis.core import storage
from visavis.core.encoded import Encoded
from visavis.core.errors import DataError, ShapeError, format_value, warn
from visavis.core.progress import Progress
from visavis.data.file_names import escape_name, unescape_name
from visavis.data.formats.image_files import NO_EXCLUSION
from visavis.evaluation.classification import ZeroShotResult, class_vectors, zero_shot_accuracy
from visavis.models.inference import score_all_pairs
from visavis.models.retriever import Retriever
from visavis.retrieval.source_files import list_source_files

if TYPE_CHECKING:
    from PIL.Image import Image as PILImage

DEFAULT_TEMPLATE = "a photo of a {}."
# Equal texts in batches of different length differ by less.
_MAX_ROUNDING = 1e-6


def class_scores(
    model: Retriever, images: Encoded, classes: Sequence[str], templates: Sequence[str]
) -> Tensor:
    """Score images with classes that are described by several prompts, ``[images, classes]``."""
    texts = model.encode_text(
        [template.replace("{}", name) for name in classes for template in templates]
    )
    if model.matcher.score_is_cosine:
        vectors = class_vectors(model.to_unit_rows(texts).view(len(classes), len(templates), -1))
        _warn_about_equal_classes(vectors, classes)
        return model.to_unit_rows(images) @ vectors.T
    # Without single vectors, of which the mean describes a class, scores of prompts are averaged.
    scores = score_all_pairs(model.matcher, images, texts, model.memory, "i2t")
    scores = scores.view(len(scores), len(classes), len(templates)).mean(2)
    # One image can have equal scores with different classes.
    if len(scores) > 1:
        _warn_about_equal_classes(scores.T, classes)
    return scores


def _warn_about_equal_classes(rows: Tensor, classes: Sequence[str]) -> None:
    """Warn of classes whose rows of vectors or scores are equal except for rounding."""
    # Equal rows are neighbors in the order of a projection.
    order = (rows @ torch.linspace(1, 2, rows.shape[1])).argsort()
    differences = (rows[order[1:]] - rows[order[:-1]]).abs().amax(1)
    is_first = torch.cat([torch.tensor([True]), differences > _MAX_ROUNDING])
    groups = [
        sorted(classes[i] for i in group.tolist())
        for group in order.tensor_split(is_first.nonzero()[1:, 0].tolist())
        if len(group) > 1
    ]
    if groups:
        named = ", ".join(" = ".join(map(repr, group)) for group in sorted(groups))
        warn(
            f"classes: the model cannot distinguish {sum(map(len, groups))} of {len(classes)}, "
            f"because their prompts have equal scores: {named}. Give them other names, for example "
            "with a file of labels."
        )


def rank_texts(
    model: Retriever,
    image: str | Path | PILImage,
    texts: Sequence[str],
    templates: Sequence[str] | None = None,
    *,
    image_model: Retriever | None = None,
) -> list[tuple[str, float]]:
    """Rank captions or labels for an image, best first. Without templates, a text is its prompt.
    Another model may encode the image, whose vectors the model was trained on.
    """
    if not texts:
        raise ShapeError(
            "labels: expected at least one text, got none. Pass the texts to choose from."
        )
    if templates is None and image_model is None:
        scores = model.score([image], texts, direction="i2t")[0]
    else:
        encoded = (image_model or model).encode_visual([image])
        scores = class_scores(model, encoded, texts, templates or ["{}"])[0]
    # Stable: texts with equal scores are in the given order.
    return [
        (texts[i], scores[i].item()) for i in scores.argsort(descending=True, stable=True).tolist()
    ]


def evaluate_zero_shot(
    model: Retriever,
    folder: Path,
    templates: Sequence[str],
    progress: Progress,
    names: Mapping[str, str] | None = None,
    *,
    image_model: Retriever | None = None,
) -> ZeroShotResult:
    """Classify all images of a folder of classes, and compare with their classes. Another model may
    encode the images, see ``rank_texts``.
    """
    files = list_source_files(folder)
    for sentence in files.skipped:
        progress.message(sentence)
    parts = [Path(file.path).parts for file in files.files]
    if outside := next((part[0] for part in parts if len(part) == 1), None):
        raise DataError(
            f"{folder}: expected one folder of images for each class, got the image {outside} "
            "next to them. Move it into the folder of its class."
        )
    folders = sorted({part[0] for part in parts})
    if len(folders) < 2:
        raise DataError(
            f"{folder}: expected at least two folders, one for each class, got {len(folders)}. "
            "Name the folder that contains them."
        )
    is_hidden = NO_EXCLUSION.covers
    for name in sorted(map(escape_name, os.listdir(files.root))):
        if (
            name not in folders
            and os.path.isdir(files.root / unescape_name(name))
            and not is_hidden(name)
        ):
            raise DataError(
                f"{folder}: expected images in the folder of each class, got none in {name}. Add "
                "some, or remove the folder."
            )
    classes = _class_names(folder, folders, names)
    labels = torch.tensor([folders.index(part[0]) for part in parts])
    images = (image_model or model).encode_visual(
        [file.location.path for file in files.files],
        lambda done, total: progress.update("encoding images", done, total, 0.0),
    )
    scores = class_scores(model, images, classes, templates)
    rule = f"mean of their {'unit vectors' if model.matcher.score_is_cosine else 'scores'}"
    prompt = (
        f"prompt {templates[0]!r}" if len(templates) == 1 else f"{len(templates)} prompts, {rule}"
    )
    protocol = f"zero-shot: {len(classes):,} classes, {len(labels):,} images, {prompt}"
    return zero_shot_accuracy(scores, labels, classes, protocol)


def _class_names(
    folder: Path, folders: Sequence[str], names: Mapping[str, str] | None
) -> list[str]:
    """The names of the classes of folders, all different."""
    if missing := [name for name in folders if names is not None and name not in names]:
        raise DataError(
            f"{folder}: expected a name for each folder in the file of class names, got none for "
            f"{missing[0]}. Add a line: {missing[0]} NAME"
        )
    classes = [
        re.sub(r"[_\-\s]+", " ", name).strip() if names is None else names[name] for name in folders
    ]
    first_folders = dict(zip(reversed(classes), reversed(folders), strict=True))
    for name, class_name in zip(folders, classes, strict=True):
        if (first := first_folders[class_name]) != name:
            raise DataError(
                f"{folder}: expected different names of classes, got {class_name!r} for {first} "
                f"and {name}. Rename one, or pass a file of labels."
            )
    return classes


def read_class_names(file: str | Path) -> dict[str, str]:
    """Read the names of classes. Each line has a folder, a tab or a space, and its name."""
    names: dict[str, str] = {}
    for number, line in enumerate(storage.read_text_lines(file), 1):
        if not line.strip():
            continue
        folder, _, name = line.strip().partition("\t" if "\t" in line else " ")
        if not name.strip() or folder in names:
            raise DataError(
                f"{file}, line {number}: expected a new folder and the name of its class, got "
                f"{format_value(line)}. Write it as: FOLDER NAME"
            )
        names[folder] = name.strip()
    return names


def read_templates(file: str | Path) -> list[str]:
    """Read prompts, one in each line."""
    templates = []
    for number, line in enumerate(storage.read_text_lines(file), 1):
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
