"""Scales and margins of "auto": two short trial trainings measure the spread of the negatives, from
which each value follows.

A scale is right if its product with the spread of the negatives is `SCALE_TIMES_SPREAD`. The spread
of an untrained model reflects its initialization, and the spread of a trained one falls as the scale
grows. So copies of the model are trained for some steps at two scales, between which the scale with
the right product is interpolated. The training itself then starts from the initial weights with
constant values. It is the same as with these numbers in the recipe.
"""

from __future__ import annotations

import math
from copy import deepcopy

import torch

from visavis.core.errors import RecipeError
from visavis.core.process_group import ONE_PROCESS
from visavis.data.loader import Loader, derive_seed
from visavis.losses.auto_scale import SCALE_TIMES_SPREAD, negative_spread
from visavis.losses.objectives import Unified
from visavis.losses.scoring import score_matrix
from visavis.models import Matcher
from visavis.models.batch_encoding import device_of
from visavis.models.device import choose_device, seed_device
from visavis.training.encoder_blocks import prepare_encoders
from visavis.training.recipes.data_module import DataModule
from visavis.training.recipes.recipe import Recipe
from visavis.training.recipes.settings import Phase
from visavis.training.supervision import PairSupervision
from visavis.training.train_step import TrainStep

TRIAL_STEPS = 80
"""Steps of a trial. After them the spread is that of a trained model (``studies/auto_scale.py``)."""
TRIAL_WARMUP = 20
"""First steps of a trial, in which the rate rises. The schedule of the phase may rise for longer."""
TRIAL_SCALES = (20.0, 50.0)
SCALE_RANGE = (5.0, 200.0)
"""Scales of the trials, and the range to which the interpolated scale is limited."""
MEASURED_BATCHES = 4


def check_auto(recipe: Recipe) -> None:
    """Refuse an "auto" of a scale that the model learns."""
    for number, phase in enumerate(recipe.phases):
        names = [name for name in phase.objective.auto_fields if name != "margin"]
        if names and recipe.model.get("scale") == "learned":
            raise RecipeError(
                f"phases.{number}.objective: expected a number for {names[0]}, got 'auto' with "
                'model.scale="learned". Set the number at which the scale starts, or '
                'model.scale="fixed".'
            )


def with_auto_values(data_module: DataModule, matcher: Matcher) -> Recipe:
    """Return the recipe of a data module with a number for each "auto". The model is unchanged."""
    recipe = data_module.recipe
    phases = list(recipe.phases)
    for number, phase in enumerate(recipe.phases):
        names = phase.objective.auto_fields
        if not names:
            continue
        # The first process measures whole batches, so that all processes train with one number.
        is_first = data_module.group.is_first
        text = repr(settled_spread(data_module, matcher, phase)) if is_first else ""
        spread = float(data_module.group.broadcast_text(text))
        objective = phase.objective.at_spread(spread)
        phases[number] = phase.model_copy(update={"objective": objective})
        values = ", ".join(f"{name} {getattr(objective, name):g}" for name in names)
        data_module.progress.message(
            f"phases.{number}: {values} (auto), for a spread of the negatives of {spread:.3f}."
        )
    return recipe.model_copy(update={"phases": tuple(phases)})


def settled_spread(data_module: DataModule, matcher: Matcher, phase: Phase) -> float:
    """Return the spread of the negatives at the scale whose product with it is
    `SCALE_TIMES_SPREAD`, by interpolation between the trials.
    """
    spreads = [trial_spread(data_module, matcher, phase, scale) for scale in TRIAL_SCALES]
    for spread in spreads:
        if not 0 < spread < math.inf:
            return spread  # which is refused
    low, high = (
        math.log(scale * spread) for scale, spread in zip(TRIAL_SCALES, spreads, strict=True)
    )
    # Logarithms of the scale and of the product are about linear in each other. Where the product
    # does not grow with the scale, the larger scale costs less.
    first, last = map(math.log, TRIAL_SCALES)
    slope = (high - low) / (last - first)
    log_scale = (
        first + (math.log(SCALE_TIMES_SPREAD) - low) / slope
        if slope > 0
        else math.log(SCALE_RANGE[1])
    )
    minimum, maximum = SCALE_RANGE
    return SCALE_TIMES_SPREAD / min(max(math.exp(min(log_scale, 10.0)), minimum), maximum)


def trial_spread(data_module: DataModule, matcher: Matcher, phase: Phase, scale: float) -> float:
    """Train a copy of a model for `TRIAL_STEPS` at a scale, with the optimizer of a phase, and
    measure the spread of the negatives on training batches.
    """
    recipe = data_module.recipe
    device = choose_device(recipe.training.device, "training.device")
    trial_matcher = deepcopy(matcher).to(device)
    prepare_encoders(trial_matcher, recipe.training, ONE_PROCESS)
    objective = Unified(gamma=scale, reduction=phase.objective.reduction)
    trial = phase.model_copy(update={"objective": objective, "supervision": PairSupervision()})
    loader = data_module.loaders[0].for_all_ranks()
    step = TrainStep(trial_matcher, trial, recipe)
    try:
        done = 0
        epoch = 1
        while done < TRIAL_STEPS:
            stop = min(loader.num_batches, TRIAL_STEPS - done)
            for batch in loader.epoch(epoch, stop=stop, device=device):
                seed_device(device, derive_seed(recipe.seed, done))
                step.backward(batch, trial.supervision.targets)
                step.step(min(1.0, (done + 1) / TRIAL_WARMUP))
                done += 1
            epoch += 1
        return mean_spread(trial_matcher, trial, loader, recipe)
    finally:
        loader.close()


@torch.no_grad()
def mean_spread(matcher: Matcher, phase: Phase, loader: Loader, recipe: Recipe) -> float:
    """Mean spread of the negatives in the batches of a fixed schedule, without those that have no
    negative.
    """
    matcher.eval()
    device = device_of(matcher)
    spreads = list[float]()
    for batch in loader.epoch(0, stop=MEASURED_BATCHES, training=False, device=device):
        visual = matcher.encode_visual(batch.visual)
        text = matcher.encode_text(batch.text)
        targets = phase.supervision.targets(visual, text, batch).to(device)
        items = matcher.first_stage_items(visual), matcher.first_stage_items(text)
        scores = score_matrix(matcher.score, *items, recipe.memory or None)
        spreads.append(negative_spread(scores, targets))
    measured = [spread for spread in spreads if math.isfinite(spread)]
    return sum(measured) / len(measured) if measured else math.nan
