"""Shared by the parts of an audit: issues, a disk cache of results, so that an interrupted audit
resumes, unit vectors of images and captions, and training on a part of a data set.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from copy import copy
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any, Generic, TypeVar

import numpy as np
import torch
from PIL.Image import Image as PILImage
from torch import Tensor

from visavis.core import storage
from visavis.core.encoded import Encoded, unit_rows
from visavis.core.errors import DataError, VisavisError
from visavis.core.process_group import ONE_PROCESS
from visavis.core.progress import Progress
from visavis.data.dataset import Dataset
from visavis.data.item_sources import ItemSource, StoredFeatures
from visavis.data.loader import derive_seed
from visavis.data.words import tokenize
from visavis.models import Matcher
from visavis.models.device import choose_device, seed_device
from visavis.models.encoders.preprocessing import blank_image
from visavis.models.inference import consecutive_batches
from visavis.training.encoder_blocks import prepare_encoders
from visavis.training.optimizer import loss_warmup_factor, lr_factor
from visavis.training.recipes.data_module import DataModule
from visavis.training.recipes.initial_model import build_matcher
from visavis.training.recipes.learned_scale import start_scale_and_bias
from visavis.training.recipes.recipe import Recipe
from visavis.training.runs.teacher import open_teacher
from visavis.training.train_step import TrainStep, training_context

Result = TypeVar("Result")


ITEMS_PER_BATCH = 256
IMAGES_PER_BATCH = 16
PROJECTION_DIM = 512
MAX_STEPS = 400
"""Steps of a model. More do not improve the list of mislabeled pairs, fewer distort the learning
curve (``studies/audit_steps.py``).
"""


@dataclass(frozen=True)
class Issue:
    """One kind of problem in a data set.

    Attributes:
        kind: Name of the kind, such as "copies across splits".
        count: Number of affected pairs or captions.
        description: Sentence with the measured values.
        fix: How to fix it.
        examples: Descriptions of affected items, the worst first.
        serious: Whether the problem is common enough to change a training or an evaluation.
    """

    kind: str
    count: int
    description: str
    fix: str
    examples: tuple[str, ...]
    serious: bool


@dataclass(frozen=True)
class CachedModel(Generic[Result]):
    """Model that an audit trains, and whose result is cached.

    Attributes:
        file: Cache file of the result.
        num_steps: Number of training steps.
        result: Function that returns the result, and trains the model if the file does not exist.
            It receives the progress.
    """

    file: Path
    num_steps: int
    result: Callable[[Progress], Result]


def format_count(count: int, noun: str) -> str:
    """Format a number of items.

    Args:
        count: The number.
        noun: Counted items, in the singular.

    Returns:
        The number and the noun, in the plural where needed.

    Example:
        >>> format_count(1, "pair"), format_count(1200, "pair")
        ('1 pair', '1,200 pairs')
    """
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def cache_path(*key_parts: Any) -> Path:
    """Return the path, without a suffix, of the cached result of everything in the key."""
    # Other versions may compute other results.
    text = json.dumps(
        [version("visavis"), torch.__version__, *key_parts], sort_keys=True, default=str
    )
    return storage.cache_folder() / "audits" / hashlib.sha256(text.encode()).hexdigest()[:24]


def cached_tensors(path: Path, compute: Callable[[], dict[str, Tensor]]) -> dict[str, Tensor]:
    """Read cached tensors, or compute and cache them. A damaged file is computed again."""
    file = path.with_suffix(".safetensors")
    if os.path.exists(file):
        try:
            return storage.read_tensors(file)
        except DataError as damage:
            storage.remove_damaged(file, [file], str(damage))
    tensors = compute()
    storage.write_tensors(file, tensors)
    return tensors


def cached_value(path: Path, shape: Any, compute: Callable[[], Any]) -> Any:
    """Read a cached value of a type, or compute its JSON data and cache them. A damaged file is
    computed again.
    """
    file = path.with_suffix(".json")
    if (value := storage.read_checksummed_json(file, shape)) is not None:
        return value
    storage.write_checksummed_json(file, compute())
    # As if it had been cached, so that both ways return equal values.
    return storage.read_checksummed_json(file, shape)


@dataclass(frozen=True)
class ImageVectors:
    """Vectors of the images of a data set.

    Attributes:
        features: Unit vectors, shape ``[N, D]``.
        encode: Encodes other images in the same way. None if the encoder itself is not available.
    """

    features: Tensor
    encode: Callable[[Sequence[PILImage]], Tensor] | None


def image_vectors(data_module: DataModule, data: Dataset) -> ImageVectors | None:
    """Return the centered, normalized image features of a recipe. None if it reads pixels or
    experts.
    """
    source = data_module.sources(data)[0]
    if not isinstance(source, StoredFeatures) or not isinstance(
        source.read(np.arange(1)).vectors, Tensor
    ):
        return None
    rows = _read_pooled(source, len(data.images))
    settings = data_module.recipe.visual
    mean = rows.mean(0)

    def pool(images: Sequence[PILImage]) -> Tensor:
        return _pool(data_module.processor.process_images(images, settings.granularity))

    def encode(images: Sequence[PILImage]) -> Tensor:
        starts = range(0, len(images), IMAGES_PER_BATCH)
        batches = [pool(images[start : start + IMAGES_PER_BATCH]) for start in starts]
        return unit_rows(torch.cat(batches) - mean)

    # The encoder may not be installed, or not be the one of the stored features.
    has_encoder = False
    if settings.encoder and settings.granularity != "frames":
        with suppress(VisavisError):
            has_encoder = pool([blank_image()]).shape[1] == len(mean)
    return ImageVectors(unit_rows(rows - mean), encode if has_encoder else None)


def caption_vectors(data_module: DataModule, data: Dataset) -> tuple[Tensor, str]:
    """Return unit vectors of all captions ``[C, D]``, from the recipe's sentence encoder or else
    from tf-idf, and the name of the encoder or "words".
    """
    if data_module.text is not None and data_module.recipe.text.granularity == "pooled":
        rows = _read_pooled(data_module.sources(data)[1], len(data.captions))
        return unit_rows(
            rows - rows.mean(0)
        ), data_module.recipe.text.encoder or data_module.recipe.text.features
    return tfidf_vectors(data.captions), "words"


def tfidf_vectors(captions: Sequence[str]) -> Tensor:
    """Return tf-idf vectors of captions, randomly projected to unit vectors ``[C, 512]``. This
    keeps cosines to about 0.04.
    """
    words_of = [tokenize(caption) for caption in captions]
    # Number of captions that contain each word.
    document_counts = Counter(word for words in words_of for word in set(words))
    random = np.random.default_rng(0)
    zeros = np.zeros(PROJECTION_DIM, np.float32)
    projection = {
        word: np.log(len(captions) / count)
        * random.standard_normal(PROJECTION_DIM).astype(np.float32)
        / PROJECTION_DIM**0.5
        for word, count in sorted(document_counts.items())
    }
    # A caption without words gets a zero vector.
    rows = [np.sum([projection[word] for word in words] or [zeros], axis=0) for words in words_of]
    return unit_rows(torch.from_numpy(np.stack(rows)))


def _read_pooled(source: ItemSource, count: int) -> Tensor:
    return torch.cat(
        [_pool(source.read(batch)) for batch in consecutive_batches(count, ITEMS_PER_BATCH)]
    )


def _pool(items: Encoded) -> Tensor:
    """Return one vector per item: itself, or the mean of its regions, frames or words."""
    vectors = items.vectors
    mask = items.mask
    assert isinstance(vectors, Tensor)
    if vectors.dim() == 2:
        return vectors
    if mask is None:
        return vectors.mean(1)
    assert isinstance(mask, Tensor)
    # Padding does not count.
    return (vectors * mask[..., None]).sum(1) / mask.sum(1, keepdim=True).clamp(min=1)


def fit_model(
    data_module: DataModule,
    train: Dataset,
    held_out: Dataset,
    seed: int,
    on_step: Callable[[Matcher, int, int], None],
    epoch_factor: float = 1.0,
) -> Matcher:
    """Train a model on a part of a data set, with one thread unless the recipe sets
    ``training.threads``. ``on_step`` receives it with the finished and the total number of steps.
    """
    # The seed of the audit replaces that of the recipe.
    recipe = data_module.recipe.model_copy(update={"seed": seed})
    torch.set_num_threads(recipe.training.threads or 1)
    data_module = replace(data_module, recipe=recipe)
    device = choose_device(recipe.training.device, "training.device")
    matcher = build_matcher(data_module, seed).to(device)
    prepare_encoders(matcher, recipe.training, ONE_PROCESS)
    # A loader shuffles and crops only the training split. Supervisions that validate use the
    # held-out data.
    loader, validation = (
        data_module.loader(
            replace(part, images=tuple(replace(image, split="train") for image in part.images))
        )
        for part in (train, held_out)
    )
    epochs = [max(1, round(phase.epochs * epoch_factor)) for phase in recipe.phases]
    steps = loader.num_batches
    done = 0
    for number, phase in enumerate(recipe.phases):
        start_scale_and_bias(matcher, phase, recipe.phases[number - 1] if number else None)
        train_step = TrainStep(matcher, phase, recipe)
        supervisor = copy(phase.supervision)  # the recipe's own object must not keep state
        supervisor.begin_phase(
            training_context(
                recipe,
                phase,
                matcher,
                train_step.optimizer,
                loader,
                validation,
                open_teacher=open_teacher,
            ),
            {},
        )
        step = 0
        first_epoch = 1 + sum(epochs[:number])
        for epoch in range(first_epoch, first_epoch + epochs[number]):
            supervisor.begin_epoch(epoch)
            for batch in loader.epoch(epoch):
                # Each step has its own seed, so that dropout does not depend on how often the model
                # was evaluated.
                seed_device(device, derive_seed(seed, done))
                on_device = batch.to(device)
                warmup = loss_warmup_factor(phase.loss_warmup_epochs, step, steps)
                value = train_step.backward(on_device, supervisor.targets, warmup)
                train_step.step(lr_factor(phase.schedule, step, steps, epochs[number]))
                supervisor.observe(on_device, value)
                step += 1
                done += 1
                on_step(matcher, done, steps * sum(epochs))
    return matcher.eval()


def count_steps(recipe: Recipe, train: Dataset, epoch_factor: float = 1.0) -> int:
    """Count the steps of `fit_model`."""
    # A last, smaller batch of an epoch is counted, even if it is left out.
    items = train.captions if recipe.training.captions_per_image is None else train.images
    return -(-len(items) // recipe.training.batch_size) * sum(
        max(1, round(phase.epochs * epoch_factor)) for phase in recipe.phases
    )


def max_epoch_factor(recipe: Recipe, train: Dataset) -> float:
    """Compute the factor on the recipe's number of epochs with which `fit_model` takes `MAX_STEPS`
    steps. It takes more if a phase of one epoch has more.
    """
    return MAX_STEPS / count_steps(recipe, train)
