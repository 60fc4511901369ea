"""Training of a model on a part of a data set by a recipe's phases, without a run folder."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from copy import copy
from dataclasses import replace

import torch

from visavis.core.process_group import ONE_PROCESS
from visavis.data.dataset import Dataset
from visavis.data.loader import Batch, Loader, derive_seed
from visavis.models import Matcher
from visavis.models.device import choose_device
from visavis.training.encoder_blocks import prepare_encoders
from visavis.training.optimizer import loss_warmup_factor, lr_factor
from visavis.training.recipes.data_module import DataModule, build_matcher
from visavis.training.recipes.recipe import Recipe
from visavis.training.recipes.start_model import start_scale_and_bias
from visavis.training.supervision import Supervision
from visavis.training.train_step import TrainStep, training_context

MAX_STEPS = 400
"""Steps of a model. More do not improve the list of mislabeled pairs, fewer distort the learning
curve (``studies/audit_steps.py``).
"""


def fit_model(
    data_module: DataModule,
    train: Dataset,
    held_out: Dataset,
    seed: int,
    on_step: Callable[[Matcher, int, int], None],
    epoch_factor: float = 1.0,
) -> Matcher:
    """Train a model on a part of a data set, with one thread unless the recipe sets
    ``training.threads``.

    Args:
        data_module: The recipe with its features.
        train: Data to train on.
        held_out: Data for supervisions that validate.
        seed: Seed of initial weights, batches and dropout.
        on_step: Called with the model, and the number of finished steps and of all steps.
        epoch_factor: Factor on the recipe's number of epochs.

    Returns:
        The model after the last step of all phases, in evaluation mode.
    """
    recipe = data_module.recipe.model_copy(update={"seed": seed})
    torch.set_num_threads(recipe.training.threads or 1)
    data_module = replace(data_module, recipe=recipe)
    device = choose_device(recipe.training.device, "training.device")
    matcher = build_matcher(data_module, seed).to(device)
    prepare_encoders(matcher, recipe.training, ONE_PROCESS)
    loader, validation = (
        data_module.loader(_as_training_split(part)) for part in (train, held_out)
    )
    epochs, steps = (
        [max(1, round(phase.epochs * epoch_factor)) for phase in recipe.phases],
        loader.num_batches,
    )
    done = 0
    for number, phase in enumerate(recipe.phases):
        start_scale_and_bias(matcher, phase, recipe.phases[number - 1] if number else None)
        train_step = TrainStep(matcher, phase, recipe)
        supervisor = copy(phase.supervision)
        supervisor.begin_phase(
            training_context(recipe, phase, matcher, train_step.optimizer, loader, validation), {}
        )
        for step, batch in enumerate(
            _batches(loader, supervisor, 1 + sum(epochs[:number]), epochs[number])
        ):
            # Each step has its own seed, so that dropout does not depend on how often the model was
            # evaluated.
            torch.manual_seed(derive_seed(seed, done))
            on_device = batch.to(device)
            value = train_step.backward(
                on_device,
                supervisor.targets,
                loss_warmup_factor(phase.loss_warmup_epochs, step, steps),
            )
            train_step.step(lr_factor(phase.schedule, step, steps, epochs[number]))
            supervisor.observe(on_device, value)
            done += 1
            on_step(matcher, done, steps * sum(epochs))
    return matcher.eval()


def count_steps(recipe: Recipe, train: Dataset, epoch_factor: float = 1.0) -> int:
    """Count the steps of `fit_model`.

    Args:
        recipe: The recipe.
        train: Data to train on.
        epoch_factor: Factor on the recipe's number of epochs.

    Returns:
        The number of steps. A last, smaller batch of an epoch is counted, even if it is left out.
    """
    items = train.captions if recipe.training.captions_per_image is None else train.images
    return -(-len(items) // recipe.training.batch_size) * sum(
        max(1, round(phase.epochs * epoch_factor)) for phase in recipe.phases
    )


def max_epoch_factor(recipe: Recipe, train: Dataset) -> float:
    """Compute the factor on the recipe's number of epochs with which `fit_model` takes `MAX_STEPS`
    steps.

    Each phase has at least one epoch, also if that takes more steps.

    Args:
        recipe: The recipe.
        train: Data to train on.

    Returns:
        The factor, above 1 for a recipe of fewer steps.
    """
    return MAX_STEPS / count_steps(recipe, train)


def _as_training_split(data: Dataset) -> Dataset:
    """Move all images to the training split."""
    return replace(data, images=tuple(replace(image, split="train") for image in data.images))


def _batches(
    loader: Loader, supervisor: Supervision, first_epoch: int, epochs: int
) -> Iterator[Batch]:
    for epoch in range(first_epoch, first_epoch + epochs):
        supervisor.begin_epoch(epoch)
        yield from loader.epoch(epoch)
