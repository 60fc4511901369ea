"""Any row of a paper's table at toy size: its phases, objectives, supervision and model on a few drawn pictures."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import torch

from visavis import spec, supervision
from visavis.data.scenes import write_moving_scenes, write_scenes
from visavis.models import CATALOG
from visavis.training.context import training_context
from visavis.training.data_module import prepare
from visavis.training.loss import phase_loss
from visavis.training.recipe import Recipe
from visavis.training.recipe_files import read_recipe
from visavis.training.schedule import make_optimizer, take_step

REGIONS = 3
DEGREES = "SceneDegrees()"
SMALL = {"width": 8, "word_width": 4, "similarity_width": 4, "regions": REGIONS, "feedforward": 8, "decoder_width": 8}


def write_toys(folder: Path) -> Path:
    """Pictures with five captions each, regions of as many images, and moving scenes with three experts, in a folder each."""
    write_moving_scenes(folder / "moving", num_train=8, num_val=2, num_test=4, captions_per_clip=2)
    write_scenes(folder / "pictures", num_train=4, num_val=3, num_test=4, captions_per_image=5, size=32)
    (folder / "regions").mkdir()
    chance = np.random.default_rng(0)
    for split, images in (("train", 4), ("dev", 3), ("test", 4), ("testall", 4)):
        np.save(folder / "regions" / f"{split}_ims.npy", chance.normal(size=(images, REGIONS, 6)).astype(np.float32))
        captions = [f"{split} image {image} caption {number} of it" for image in range(images) for number in range(5)]
        (folder / "regions" / f"{split}_caps.txt").write_text("\n".join(captions) + "\n")
    return folder


def overrides(address: str, toys: Path) -> dict[str, Any]:
    """What makes a row small: toys for data, small widths, one epoch a phase."""
    recipe = read_recipe(address)
    stored = recipe.visual.features == "precomp"
    moving = recipe.visual.view == "experts"
    changed: dict[str, Any] = {
        "data.path": str(toys / ("moving" if moving else "regions" if stored else "pictures")),
        "visual.tower": "" if stored or moving else "scenes",
        "visual.crops": 1,
        "visual.random_crops": False,
        "visual.size": 0,
        "text.min_count": 1,
        "training.batch_size": 16,
        "training.probe_batches": 1,
        "training.threads": 1,
        "evaluation.protocol": "plain",
    }
    if recipe.model["kind"] == "XVLM":
        changed |= {"visual.tower": str(toys / "swin"), "model.pretrained": "", "model.fusion_layers": 2}
    if recipe.text.features:
        changed |= {"text.features": "", "text.tower": "minilm"}
    elif recipe.text.tower != "vocabulary":
        changed["text.tower"] = str(toys / "bert") if recipe.text.view == "tokens" else "minilm"
    if recipe.evaluation.degrees:
        changed["evaluation.degrees"] = DEGREES
    graded = [number for number, phase in enumerate(recipe.phases) if phase.supervision.startswith("GradedSupervision(")]
    changed |= {f"phases.{number}.supervision": f"GradedSupervision(degrees='{DEGREES}', by='position')" for number in graded}
    fields = {field.name for field in dataclasses.fields(CATALOG[recipe.model["kind"]].Config)}
    changed |= {f"model.{key}": value for key, value in SMALL.items() if key in fields}
    for name in recipe.members:
        changed |= {f"members.{name}.phases.{number}.epochs": 1 for number in range(len(recipe.phases))}
    changed |= {f"phases.{number}.epochs": 1 for number in range(len(recipe.phases))}
    return changed


def toy(address: str, toys: Path) -> Recipe:
    return read_recipe(address, overrides(address, toys))


def one_step(recipe: Recipe) -> list[float]:
    """Build a recipe's model and take one step of each of its phases; their losses, and refuse one that moves nothing."""
    data_module, matcher = prepare(recipe)
    train, val = (data_module.loader(data_module.data.split(name)) for name in ("train", "val"))
    losses = []
    for phase in recipe.phases:
        optimizer = make_optimizer(matcher, phase)
        told = spec.parse(phase.supervision, supervision.CATALOG)
        told.check(train, val)
        told.begin_phase(training_context(recipe, phase, matcher, optimizer, train, val), {})
        told.begin_epoch(1)
        batch = next(iter(train.epoch(1)))
        torch.manual_seed(0)
        matcher.train()
        visual, text = matcher.encode_visual(batch.visual), matcher.encode_text(batch.text)
        targets = told.targets(visual, text, batch)
        loss = phase_loss(matcher, phase)(matcher.first_stage(visual), matcher.first_stage(text), targets=targets)
        if (extra := matcher.extra_loss(visual, text, targets)) is not None:
            loss = loss + extra
        before = [parameter.detach().clone() for parameter in matcher.parameters()]
        loss.backward()
        take_step(optimizer, recipe.training.clip_norm)
        assert any(not torch.equal(*pair) for pair in zip(before, matcher.parameters(), strict=True)), phase.objective
        losses.append(loss.item())
    return losses
