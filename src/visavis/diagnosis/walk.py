"""A walk over the training set at the best point of a run: what moves its queries, by several objectives.

As in section 5 of the COCOS paper: the weights of the best validation, frozen, without dropout, random batches of 128,
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
from visavis.diagnosis.cocos import Cocos, Semantics, contributing_by_direction
from visavis.diagnosis.counting import rule_of
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
from visavis.training.checkpoint import Checkpoint
from visavis.training.context import training_context
from visavis.training.data_module import DataModule
from visavis.training.recipe import Recipe
from visavis.training.run_files import RunFiles
from visavis.training.schedule import make_optimizer
from visavis.training.settings import Phase

BATCH = 128
EPSILON = 0.01


@dataclass(frozen=True)
class Count:
    """One objective over all batches.

    mean, deviation: by ``<way>_<measure>``, NaN where no batch has a value. Measures: ``per_moved`` and ``per_query``, C^q as a
    mean over queries that have one and over all; ``in_batch``, C^B; ``idle``, C^0; ``push`` and ``pull``, W^- and W^+ as means
    over queries. semantics "reference": as the code released with COCOS counts.
    """

    objective: str
    semantics: Semantics
    mean: dict[str, float]
    deviation: dict[str, float]

    def to_json(self) -> dict[str, Any]:
        numbers = {f"{key}_mean": _json(self.mean[key]) for key in self.mean} | {
            f"{key}_std": _json(self.deviation[key]) for key in self.mean
        }
        return {"objective": self.objective, "semantics": self.semantics, **numbers}


@dataclass(frozen=True)
class Diagnosis:
    """What moves the queries of a run's training set at its best point.

    step: that of the best model; 0 for one that was not trained here. images, texts: of a batch. counts: the run's own objective
    first. published: the row of a paper's table that the recipe names, if any; its counts for the run's objective are ``beside``.
    """

    run: Path
    model: str
    data: str
    step: int
    batches: int
    images: int
    texts: int
    epsilon: float
    counts: tuple[Count, ...]
    published: str

    @property
    def beside(self) -> Published | None:
        """What the paper printed for the objective of the run; None where it has nothing for it."""
        own = self.counts[0].objective
        return next((row for row in counted_rows(self.published) if objective_of(row.address) == own), None)

    def to_json(self) -> dict[str, Any]:
        facts = {name: getattr(self, name) for name in ("model", "data", "step", "batches", "images", "texts", "epsilon")}
        counts = [count.to_json() for count in self.counts]
        return {"run": str(self.run), **facts, "counts": counts, "published": self.beside and self.beside.to_json()}


def diagnose_run(
    run: Path, specs: Sequence[str], batches: int | None, progress: Progress, data: str | None = None, memory: Memory = None
) -> Diagnosis:
    """Count for the run's own objective, and for others by their specs, at the same point. memory: of blocks of scores.

    data: another data set than the run's own, whose supervision then begins anew. A model without training is counted for the
    others alone.

    Raises RunError for a folder without a model, SpecError for an unknown objective, MissingSupervision for one that needs
    facts which this run's supervision does not give.
    """
    if batches is not None and batches < 1:
        raise VisavisError(f"a diagnosis of {batches} batches says nothing: give --batches a number above 0, or leave it out for all.")
    others = [objectives.parse(text) for text in specs]
    recipe = recipe_of(run, data, memory)
    untrained = None if recipe.phases else _phase_of(run, others)
    data_module, matcher = open_run(run, recipe, progress)
    phase, step = best_phase(run, recipe) if untrained is None else (untrained, 0)
    counted = list(dict.fromkeys([as_trained(objectives.parse(phase.objective), matcher), *others]))
    loader = batches_of(data_module)
    teacher = teacher_of(run if data is None else None, data_module, matcher, phase, loader)
    number = min(loader.batches_in(0), batches or loader.batches_in(0))
    rows: dict[tuple[Objective, Semantics], list[dict[str, float]]] = {}
    for done, (scores, targets) in enumerate(walk(loader, matcher, teacher, number, recipe.memory or None), 1):
        for objective in counted:
            counted_as: dict[Semantics, Targets | None] = {"paper": targets}
            if (rule := rule_of(objective)) is not None:
                counted_as["reference"] = rule.released_targets(*scores.shape)
            for semantics, told in counted_as.items():
                if told is not None:
                    by_way = contributing_by_direction(objective, scores, told, epsilon=EPSILON, semantics=semantics)
                    rows.setdefault((objective, semantics), []).append(measures(by_way))
        progress.work("batches", done, number, 0.0)
    counts = tuple(_count(objective, semantics, numbers) for (objective, semantics), numbers in rows.items())
    model = f"{recipe.model['kind']} on {recipe.visual.tower or recipe.visual.features}"
    return Diagnosis(run, model, data_module.data.name, step, number, len(scores), scores.shape[1], EPSILON, counts, recipe.published)


def best_phase(run: Path, recipe: Recipe) -> tuple[Phase, int]:
    """The phase whose training made the run's best model, and the step. Raises RunError without a log, or for one of another recipe."""
    files = RunFiles(run)
    best = max(files.read_log(), key=lambda row: row["rsum"])  # the first of equals, as the trainer keeps
    if not 0 <= best["phase"] < len(recipe.phases):
        raise RunError(f"{files.log}: the best validation is in phase {best['phase']} of {len(recipe.phases)}, the first of which is 0.")
    return recipe.phases[best["phase"]], best["step"]


def as_trained(objective: Objective, matcher: Matcher) -> Objective:
    """An objective at the scale that the matcher has learned, if it has."""
    return objective if matcher.scale is None else objective.at_scale(matcher.scale().item()) or objective


def _phase_of(run: Path, others: Sequence[Objective]) -> Phase:
    """The phase in which a model that was not trained here would stand."""
    if not others:
        raise RunError(f"{run} is a model that was not trained here and has no objective of its own: name one with --objective.")
    return Phase(epochs=1, objective=repr(others[0]))


def teacher_of(run: Path | None, data_module: DataModule, matcher: Matcher, phase: Phase, train: Loader) -> Supervision:
    """The supervision of a phase, with the state that the checkpoint of a run holds of it (None: without)."""
    recipe, teacher = data_module.recipe, spec.parse(phase.supervision, supervision.CATALOG)
    checkpoint = None if run is None else Checkpoint.latest(RunFiles(run).checkpoints)
    held = checkpoint is not None and recipe.phases[checkpoint.state.phase :][:1] == (phase,)
    validation = data_module.loader(data_module.validation)
    context = training_context(recipe, phase, matcher, make_optimizer(matcher, phase), train, validation)
    teacher.begin_phase(context, checkpoint.supervision if checkpoint is not None and held else {})
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
    return numbers


def _count(objective: Objective, semantics: Semantics, rows: list[dict[str, float]]) -> Count:
    """Mean and deviation over batches; one in which no query has a count has no mean per moved query and is left out of it."""
    columns = {key: np.array([row[key] for row in rows]) for key in rows[0]}
    columns = {key: values[~np.isnan(values)] for key, values in columns.items()}
    mean = {key: float(values.mean()) if len(values) else math.nan for key, values in columns.items()}
    deviation = {key: float(values.std()) if len(values) else math.nan for key, values in columns.items()}
    return Count(repr(objective), semantics, mean, deviation)


def _json(value: float) -> float | None:
    return None if math.isnan(value) else value
