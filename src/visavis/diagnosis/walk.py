"""A walk over the training set at a point of a run: what moves its queries, by several objectives.

As in section 5 of the COCOS paper: the weights of the best validation, or of another point, frozen, without dropout, random batches of 128,
mean and standard deviation (of the population) over batches. Only full batches count: a smaller last one, which the
released code keeps, is what most of the deviations of the paper's table 4 come from.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from visavis import objectives, spec, supervision
from visavis.data.loader import Loader
from visavis.diagnosis.cocos import Cocos, Semantics, contributing_by_epsilon
from visavis.diagnosis.counting import rule_of
from visavis.diagnosis.points import Point, go_to
from visavis.errors import RunError, VisavisError
from visavis.evaluation.published import Published
from visavis.memory import Memory
from visavis.models import Matcher
from visavis.models.encoding import device_of
from visavis.objectives import Objective
from visavis.progress import Progress
from visavis.runs.folder import open_run, recipe_of
from visavis.runs.published import counted_rows, objective_of
from visavis.scoring import score_by_blocks
from visavis.supervision import Supervision
from visavis.targets import Targets
from visavis.training.context import training_context
from visavis.training.data_module import DataModule
from visavis.training.schedule import make_optimizer
from visavis.training.settings import Phase

BATCH = 128
EPSILON = 0.01
"""The weight from which the COCOS paper counts a sample."""
MEASURES = {
    "per_moved": "C^q",
    "per_query": "C^q of all",
    "in_batch": "C^B",
    "idle": "C^0",
    "push": "W-",
    "pull": "W+",
    "effective": "effective",
}
"""What is told of a batch, and its symbol in the COCOS paper, which has no effective number."""


@dataclass(frozen=True)
class Count:
    """One objective over all batches, at one epsilon: the size from which a weight counts.

    mean, deviation: by ``<way>_<measure>``, NaN where no batch has a value. Measures: ``per_moved`` and ``per_query``, C^q as a
    mean over queries that have one and over all; ``in_batch``, C^B; ``idle``, C^0; ``push`` and ``pull``, W^- and W^+ as means
    over queries; ``effective``, the effective number of negatives of the queries that any of them pushes. semantics "reference":
    as the code released with COCOS counts.
    """

    objective: str
    semantics: Semantics
    epsilon: float
    mean: dict[str, float]
    deviation: dict[str, float]

    def to_json(self) -> dict[str, Any]:
        numbers = {f"{key}_mean": _json(self.mean[key]) for key in self.mean} | {
            f"{key}_std": _json(self.deviation[key]) for key in self.mean
        }
        return {"objective": self.objective, "semantics": self.semantics, "epsilon": self.epsilon, **numbers}


@dataclass(frozen=True)
class Diagnosis:
    """What moves the queries of a run's training set at one of its points.

    at: the point, by the name that it was asked for; step: of the training, 0 for a model that was not trained here. images, texts:
    of a batch. counts: the run's own objective first, each at every epsilon in the order given. published: the row of a paper's
    table that the recipe names, if any; its counts for the run's objective are ``beside``.
    """

    run: Path
    model: str
    data: str
    at: str
    step: int
    batches: int
    images: int
    texts: int
    counts: tuple[Count, ...]
    published: str

    @property
    def epsilon(self) -> float:
        """The first epsilon: that of the figures beside a paper's."""
        return self.counts[0].epsilon

    @property
    def epsilons(self) -> tuple[float, ...]:
        return tuple(dict.fromkeys(count.epsilon for count in self.counts))

    @property
    def beside(self) -> Published | None:
        """What the paper printed for the objective of the run; None where it has nothing for it."""
        own = self.counts[0].objective
        return next((row for row in counted_rows(self.published) if objective_of(row.address) == own), None)

    def to_json(self) -> dict[str, Any]:
        facts = {name: getattr(self, name) for name in ("model", "data", "at", "step", "batches", "images", "texts", "epsilon")}
        counts = [count.to_json() for count in self.counts]
        return {"run": str(self.run), **facts, "counts": counts, "published": self.beside and self.beside.to_json()}


def diagnose_run(
    run: Path,
    specs: Sequence[str],
    batches: int | None,
    progress: Progress,
    data: str | None = None,
    memory: Memory = None,
    *,
    at: str = "best",
    epsilons: Sequence[float] = (EPSILON,),
) -> Diagnosis:
    """Count for the run's own objective, and for others by their specs, at the same point. memory: of blocks of scores.

    data: another data set than the run's own, whose supervision then begins anew. A model without training is counted for the
    others alone. at: the point, as ``points.go_to`` has it. epsilons: each gives a count.

    Raises RunError for a folder without a model or a point that is not kept, SpecError for an unknown objective, MissingSupervision for one that needs
    facts which this run's supervision does not give.
    """
    if batches is not None and batches < 1:
        raise VisavisError(f"a diagnosis of {batches} batches says nothing: give --batches a number above 0, or leave it out for all.")
    if not epsilons or not all(0 < epsilon < 1 for epsilon in epsilons):
        raise VisavisError(
            f"epsilon is {', '.join(map(str, epsilons)) or 'nothing'}, expected weights above 0 and below 1, the most that one pair gives."
        )
    others, epsilons = [objectives.parse(text) for text in specs], list(dict.fromkeys(epsilons))
    recipe = recipe_of(run, data, memory)
    untrained = None if recipe.phases else _untrained(run, at, others)
    data_module, matcher = open_run(run, recipe, progress)
    point = untrained or go_to(run, at, data_module, matcher, progress)
    counted = list(dict.fromkeys([as_trained(objectives.parse(point.phase.objective), matcher), *others]))
    loader = batches_of(data_module)
    teacher = teacher_of(point if data is None else replace(point, supervision={}), data_module, matcher, loader)
    number = min(loader.batches_in(0), batches or loader.batches_in(0))
    rows: dict[tuple[Objective, Semantics, float], list[dict[str, float]]] = {}
    for done, (scores, targets) in enumerate(walk(loader, matcher, teacher, number, recipe.memory or None), 1):
        for objective in counted:
            counted_as: dict[Semantics, Targets | None] = {"paper": targets}
            if (rule := rule_of(objective)) is not None:
                counted_as["reference"] = rule.released_targets(*scores.shape)
            for semantics, told in counted_as.items():
                if told is not None:
                    by_epsilon = contributing_by_epsilon(objective, scores, told, epsilons, semantics=semantics)
                    for epsilon, by_way in zip(epsilons, by_epsilon, strict=True):
                        rows.setdefault((objective, semantics, epsilon), []).append(measures(by_way))
        progress.work("batches", done, number, 0.0)
    counts = tuple(_count(*counted_as, numbers) for counted_as, numbers in rows.items())
    model = f"{recipe.model['kind']} on {recipe.visual.tower or recipe.visual.features}"
    return Diagnosis(run, model, data_module.data.name, at, point.step, number, len(scores), scores.shape[1], counts, recipe.published)


def as_trained(objective: Objective, matcher: Matcher) -> Objective:
    """An objective at the scale that the matcher has learned, if it has."""
    return objective if matcher.scale is None else objective.at_scale(matcher.scale().item()) or objective


def _untrained(run: Path, at: str, others: Sequence[Objective]) -> Point:
    """The only point of a model that was not trained here, in the phase that it would stand in."""
    if not others:
        raise RunError(f"{run} is a model that was not trained here and has no objective of its own: name one with --objective.")
    if at != "best":
        raise RunError(f"{run} is a model that was not trained here: it has no point {at!r}, leave --at out.")
    return Point(Phase(epochs=1, objective=repr(others[0])), 0, {})


def teacher_of(point: Point, data_module: DataModule, matcher: Matcher, train: Loader) -> Supervision:
    """The supervision that stands at a point, with what is kept of its state."""
    phase, recipe = point.phase, data_module.recipe
    teacher = spec.parse(phase.supervision, supervision.CATALOG)
    validation = data_module.loader(data_module.validation)
    context = training_context(recipe, phase, matcher, make_optimizer(matcher, phase), train, validation)
    teacher.begin_phase(context, point.supervision)
    return teacher


def batches_of(data_module: DataModule) -> Loader:
    """The training set in the batches of the diagnosis; a smaller set comes as one."""
    loader = data_module.loader(data_module.data.split("train"))
    items = loader.data.captions if loader.plan.captions_per_image is None else loader.data.images
    return replace(loader, plan=replace(loader.plan, batch_size=BATCH, length_buckets=0, drop_last=len(items) > BATCH, batches_per_epoch=0))


@torch.no_grad()
def walk(loader: Loader, matcher: Matcher, teacher: Supervision, number: int, memory: Memory = None) -> Iterator[tuple[Tensor, Targets]]:
    """Scores ``[V, T]`` and targets of the first batches of a fixed plan, in evaluation mode, on the CPU."""
    matcher.eval()
    for batch in loader.epoch(0, training=False):
        moved = batch.to(device_of(matcher))
        visual, text = matcher.encode_visual(moved.visual), matcher.encode_text(moved.text)
        scores = score_by_blocks(matcher.score, visual, text, memory).float().cpu()
        yield scores, teacher.targets(visual, text, moved).to("cpu")
        if batch.number + 1 == number:
            return


def measures(ways: dict[str, Cocos]) -> dict[str, float]:
    """The numbers of one batch by ``<way>_<measure>``."""
    numbers: dict[str, float] = {}
    for way, cocos in ways.items():
        numbers |= {f"{way}_{name}": float(getattr(cocos, name)) for name in ("per_moved", "per_query", "in_batch", "idle")}
        numbers |= {f"{way}_push": cocos.push.mean().item(), f"{way}_pull": cocos.pull.mean().item()}
        numbers[f"{way}_effective"] = cocos.effective_negatives
    return numbers


def _count(objective: Objective, semantics: Semantics, epsilon: float, rows: list[dict[str, float]]) -> Count:
    """Mean and deviation over batches; one in which no query has a count has no mean per moved query and is left out of it."""
    columns = {key: np.array([row[key] for row in rows]) for key in rows[0]}
    columns = {key: values[~np.isnan(values)] for key, values in columns.items()}
    mean = {key: float(values.mean()) if len(values) else math.nan for key, values in columns.items()}
    deviation = {key: float(values.std()) if len(values) else math.nan for key, values in columns.items()}
    return Count(repr(objective), semantics, epsilon, mean, deviation)


def _json(value: float) -> float | None:
    return None if math.isnan(value) else value
