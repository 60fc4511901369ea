"""Scores of a teacher, for `DistillationSupervision`: of a run, an ensemble or a pretrained model,
or of arrays.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from visavis.core import storage
from visavis.core.encoded import unit_rows
from visavis.core.errors import DataError, RunError
from visavis.core.process_group import ProcessGroup
from visavis.core.progress import Progress
from visavis.core.run_context import RunContext
from visavis.data.dataset import Dataset
from visavis.data.features.item_vectors import ItemVectors
from visavis.losses.scoring import DeviceScore, score_matrix
from visavis.models.base import Matcher, get_vectors
from visavis.models.batch_encoding import device_of, evaluation_mode
from visavis.models.retriever import Retriever
from visavis.training.recipes.data_module import DataModule
from visavis.training.recipes.features import image_rows, visual_features
from visavis.training.recipes.open_data import open_data
from visavis.training.recipes.recipe import Recipe
from visavis.training.runs.evaluate_runs import encode_by_networks, read_run_recipes
from visavis.training.runs.open_run import open_run
from visavis.training.supervision.base import PairScores

EMBEDDING_FILES = ("images.npy", "texts.npy")
"""Embeddings of all images and captions of a data set, in its order."""


def open_teacher(
    teacher: str,
    recipe: Recipe,
    splits: tuple[Dataset, Dataset],
    progress: Progress,
    group: ProcessGroup,
) -> tuple[PairScores, PairScores]:
    """Open a teacher of a training: its scores on the training and on the validation split."""
    path = Path(teacher)
    if os.path.isfile(path) or os.path.isfile(path / EMBEDDING_FILES[0]):
        whole = open_data(recipe, progress)
        train, validation = (_array_scores(path, whole, split) for split in splits)
        return train, validation
    opened = []
    runs = read_run_recipes([path], recipe.data.path, recipe.memory or None)
    if recipe.visual.item_vectors:
        items, _ = visual_features(recipe, open_data(recipe, progress), RunContext(progress, group))
        assert isinstance(items, ItemVectors)
        models = [Retriever.load(folder, device=recipe.training.device) for folder in runs]
        if all(items.fingerprint == model.items_fingerprint for model in models):
            progress.message(f"The teacher {path} encodes the captions. Its items are stored.")
            train, validation = (_item_scores(models, items, split) for split in splits)
            return train, validation
    for folder, run in runs.items():
        data = run.data.model_copy(update={"skip_bad": recipe.data.skip_bad})
        opened.append(open_run(folder, run.model_copy(update={"data": data}), progress, group))
        # The teacher must read the captions of each split, in the same rows of its data.
        captions = opened[-1][0].data.captions
        for split in splits:
            rows = split.caption_rows
            if (len(rows) and rows.max() >= len(captions)) or any(
                captions[row] != caption
                for row, caption in zip(rows.tolist(), split.captions, strict=True)
            ):
                raise RunError(
                    f"{folder}: expected a teacher that reads the captions of {split.name}, got "
                    "others. Train on a data set that both read, or pass the teacher's embeddings "
                    "as arrays."
                )
    progress.message(f"The teacher {path} encodes the data.")
    train, validation = (
        _run_scores([(data_module, matcher, split) for data_module, matcher in opened])
        for split in splits
    )
    return train, validation


def _run_scores(networks: Sequence[tuple[DataModule, Matcher, Dataset]]) -> PairScores:
    """Scores of one or several networks, which encode a split once."""
    scorer, visual, text = encode_by_networks(
        [(module, network, replace(split, unpaired=())) for module, network, split in networks]
    )
    score = DeviceScore(scorer.score, device_of(scorer))

    @torch.no_grad()
    def block(images: Tensor, captions: Tensor) -> Tensor:
        with evaluation_mode(scorer):
            return score_matrix(score, visual[images], text[captions])

    return block


def _item_scores(models: Sequence[Retriever], items: ItemVectors, split: Dataset) -> PairScores:
    """Mean scores of models whose item vectors are stored, so that they encode only captions."""
    visual = unit_rows(get_vectors(items.read(image_rows(items, split))))
    dim = items.embedding_dim
    texts = [
        (model.with_embedding_dim(dim) if dim in model.matcher.matryoshka_dims else model)
        .encode_texts(split.captions)
        .cpu()
        for model in models
    ]
    return lambda images, captions: torch.stack(
        [visual[images] @ text[captions].T for text in texts]
    ).mean(0)


def _array_scores(path: Path, data: Dataset, split: Dataset) -> PairScores:
    """Scores of a split from arrays of its whole data set."""
    sizes = len(data.images), len(data.captions)
    if os.path.isfile(path):
        scores = storage.read_array(path, dimensions=2, memory_map=True)
        _check_shape(path, scores, sizes, "images x captions")
        rows = split.image_rows
        columns = split.caption_rows
        return lambda images, captions: torch.from_numpy(
            scores[rows[images.numpy()][:, None], columns[captions.numpy()]].astype(np.float32)
        )
    arrays = [
        storage.read_array(path / name, dimensions=2, memory_map=True) for name in EMBEDDING_FILES
    ]
    for name, array, size in zip(EMBEDDING_FILES, arrays, sizes, strict=True):
        _check_shape(path / name, array, (size, arrays[0].shape[1]), "items x dimensions")
    visual, text = (
        unit_rows(torch.from_numpy(array[rows].astype(np.float32)))
        for array, rows in zip(arrays, (split.image_rows, split.caption_rows), strict=True)
    )
    return lambda images, captions: visual[images] @ text[captions].T


def _check_shape(file: Path, array: np.ndarray, shape: tuple[int, int], axes: str) -> None:
    if array.shape != shape:
        raise DataError(
            f"{file}: expected shape {list(shape)}, {axes} of the whole data set, got "
            f"{list(array.shape)}. Write one row for each, in the order of the data set."
        )
