"""A model trained on some of the pictures by a recipe's phases, without a run folder: what an audit asks what it thinks of others."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch

from visavis import spec, supervision
from visavis.data.dataset import Dataset
from visavis.data.loader import Batch, Loader, seed_of
from visavis.models import Matcher
from visavis.models.device import autocast, choose_device
from visavis.supervision import Supervision
from visavis.training.context import training_context
from visavis.training.data_module import DataModule, new_matcher
from visavis.training.loss import phase_loss
from visavis.training.schedule import factor, make_optimizer, ramp, set_lr, take_step, train_mode


@dataclass(frozen=True)
class Fit:
    """How a model is trained: by the recipe of a data module, each batch a step, from a seed.

    longer: how many times as many epochs as the recipe says. looks: how often ``on_look`` is called with the model, at evenly spaced
    steps, the last of them among these. on_step: called with steps done and steps in all.
    """

    data_module: DataModule
    seed: int
    longer: float = 1.0
    looks: int = 1
    on_look: Callable[[Matcher], None] | None = None
    on_step: Callable[[int, int], None] | None = None

    def run(self, train: Dataset, held_out: Dataset) -> Matcher:
        """The model after all phases, with nothing selected. held_out: what a supervision that validates may look at."""
        recipe = self.data_module.recipe.model_copy(update={"seed": self.seed})
        data_module = replace(self.data_module, recipe=recipe)
        device = choose_device(recipe.training.device, "training.device")
        matcher = new_matcher(data_module, self.seed).to(device)
        loader, validation = (data_module.loader(as_one_split(part)) for part in (train, held_out))
        epochs, steps = [max(1, round(phase.epochs * self.longer)) for phase in recipe.phases], loader.batches_in(1)
        done, total = 0, steps * sum(epochs)
        for number, phase in enumerate(recipe.phases):
            loss, optimizer = phase_loss(matcher, phase, recipe.memory or None), make_optimizer(matcher, phase)
            teacher = spec.parse(phase.supervision, supervision.CATALOG)
            teacher.begin_phase(training_context(recipe, phase, matcher, optimizer, loader, validation), {})
            for step, batch in enumerate(_batches(loader, teacher, 1 + sum(epochs[:number]), epochs[number])):
                torch.manual_seed(seed_of(self.seed, done))
                train_mode(matcher)
                moved = batch.to(device)
                with autocast(device, recipe.training.autocast):
                    visual, text = matcher.encode_visual(moved.visual), matcher.encode_text(moved.text)
                    targets = teacher.targets(visual, text, moved)
                    value = loss(matcher.first_stage(visual), matcher.first_stage(text), targets=targets)
                    if (extra := matcher.extra_loss(visual, text, targets)) is not None:
                        value = value + extra
                (value * ramp(phase.ramp, step, steps)).backward()
                set_lr(optimizer, factor(phase.schedule, step, steps, epochs[number]))
                take_step(optimizer, recipe.training.clip_norm)
                teacher.observe(moved, value.item())
                done += 1
                self._tell(matcher, done, total)
        return matcher.eval()

    def _tell(self, matcher: Matcher, done: int, total: int) -> None:
        if self.on_step is not None:
            self.on_step(done, total)
        if self.on_look is not None and done * self.looks // total > (done - 1) * self.looks // total:
            self.on_look(matcher)


def as_one_split(data: Dataset) -> Dataset:
    """The same images and captions, all of the training split."""
    return replace(data, images=tuple(replace(image, split="train") for image in data.images))


def _batches(loader: Loader, teacher: Supervision, first: int, epochs: int) -> Iterator[Batch]:
    for epoch in range(first, first + epochs):
        teacher.begin_epoch(epoch)
        yield from loader.epoch(epoch)
