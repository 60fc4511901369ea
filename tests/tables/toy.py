"""Table rows at toy size: their phases, objectives, supervision and model on a few synthetic
images.
"""

from __future__ import annotations

import dataclasses
from copy import copy
from pathlib import Path
from typing import Any

import numpy as np
import torch

from visavis.data.synthetic import write_synthetic_clips, write_synthetic_scenes
from visavis.models import find_model
from visavis.papers.relevance.supervision import GradedSupervision
from visavis.training.recipes.files import read_recipe
from visavis.training.recipes.recipe import Recipe
from visavis.training.train_step import TrainStep, training_context
from visavis.training.training_run import prepare_training

REGIONS = 3
RELEVANCE = "SceneRelevance()"
SMALL = {
    "embedding_dim": 8,
    "word_dim": 4,
    "similarity_dim": 4,
    "num_regions": REGIONS,
    "feedforward_dim": 8,
    "decoder_dim": 8,
}


def write_toys(folder: Path) -> Path:
    """Write images with five captions each, regions of as many images, and synthetic clips with
    three experts.
    """
    write_synthetic_clips(folder / "clips", num_train=8, num_val=2, num_test=4, captions_per_clip=2)
    write_synthetic_scenes(
        folder / "images", num_train=4, num_val=3, num_test=4, captions_per_image=5, size=32
    )
    (folder / "regions").mkdir()
    chance = np.random.default_rng(0)
    for split, images in (("train", 4), ("dev", 3), ("test", 4), ("testall", 4)):
        np.save(
            folder / "regions" / f"{split}_ims.npy",
            chance.normal(size=(images, REGIONS, 6)).astype(np.float32),
        )
        captions = [
            f"{split} image {image} caption {number} of it"
            for image in range(images)
            for number in range(5)
        ]
        (folder / "regions" / f"{split}_caps.txt").write_text("\n".join(captions) + "\n")
    return folder


def overrides(address: str, toys: Path) -> dict[str, Any]:
    """Return overrides for a small run: toy data, small dimensions, one epoch per phase."""
    recipe = read_recipe(address)
    stored = recipe.visual.features == "precomp"
    clips = recipe.visual.granularity == "experts"
    changed: dict[str, Any] = {
        "data.path": str(toys / ("clips" if clips else "regions" if stored else "images")),
        "visual.encoder": "" if stored or clips else "scenes",
        "visual.crops": 1,
        "visual.random_crops": False,
        "visual.image_size": 0,
        "text.min_count": 1,
        "training.batch_size": 16,
        "training.metric_batches": 1,
        "training.threads": 1,
        "evaluation.protocol": "plain",
    }
    if recipe.model["kind"] == "XVLM":
        changed |= {
            "visual.encoder": str(toys / "swin"),
            "model.pretrained": "",
            "model.fusion_layers": 2,
        }
    if recipe.text.features:
        changed |= {"text.features": "", "text.encoder": "minilm"}
    elif recipe.text.encoder != "vocabulary":
        changed["text.encoder"] = (
            str(toys / "bert") if recipe.text.granularity == "tokens" else "minilm"
        )
    if recipe.evaluation.sections:
        changed["evaluation.sections"] = [f"Coherence(relevance='{RELEVANCE}')"]
    graded = [
        number
        for number, phase in enumerate(recipe.phases)
        if isinstance(phase.supervision, GradedSupervision)
    ]
    changed |= {
        f"phases.{number}.supervision": f"GradedSupervision(relevance='{RELEVANCE}', by='position')"
        for number in graded
    }
    fields = {field.name for field in dataclasses.fields(find_model(recipe.model["kind"]).Config)}
    changed |= {f"model.{key}": value for key, value in SMALL.items() if key in fields}
    if "time_unit" in recipe.model:
        changed["model.time_unit"] = "position"
    if "netvlad_clusters" in recipe.model:
        changed["model.netvlad_clusters"] = {"sound": 2}
    for name in recipe.members:
        changed |= {
            f"members.{name}.phases.{number}.epochs": 1 for number in range(len(recipe.phases))
        }
    changed |= {f"phases.{number}.epochs": 1 for number in range(len(recipe.phases))}
    return changed


def toy(address: str, toys: Path) -> Recipe:
    return read_recipe(address, overrides(address, toys))


def one_step(recipe: Recipe) -> list[float]:
    """Build the model of a recipe, take one step in each phase and return the losses. A step must
    change parameters.
    """
    data_module, matcher = prepare_training(recipe)
    train, val = (data_module.loader(data_module.data.split(name)) for name in ("train", "val"))
    losses = []
    for phase in recipe.phases:
        step = TrainStep(matcher, phase, recipe)
        supervised = copy(phase.supervision)
        supervised.check(train, val)
        supervised.begin_phase(
            training_context(recipe, phase, matcher, step.optimizer, train, val), {}
        )
        supervised.begin_epoch(1)
        batch = next(iter(train.epoch(1)))
        torch.manual_seed(0)
        before = [parameter.detach().clone() for parameter in matcher.parameters()]
        losses.append(step.backward(batch, supervised.targets))
        step.step(1.0)
        assert any(
            not torch.equal(*pair) for pair in zip(before, matcher.parameters(), strict=True)
        ), phase.objective
    return losses
