"""Contribution analysis: which pairs move the queries of a run's training set, for several
objectives at one checkpoint.

As in section 5 of the COCOS paper: the weights of the best validation, or of another checkpoint,
are frozen, without dropout. Random batches of 128 are counted, and mean and population standard
deviation over batches are reported. Only full batches count. A smaller last batch, which the
released code includes, causes most of the standard deviations of table 4 of the paper.
"""

from __future__ import annotations

import math
import os
from collections import defaultdict
from collections.abc import Iterator, Sequence
from copy import copy
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from visavis.core.encoded import DIRECTIONS
from visavis.core.environment import quote_argument, shell_command
from visavis.core.errors import RunError, VisavisError
from visavis.core.fields import validate_int
from visavis.core.memory_budget import MemoryLimit
from visavis.core.progress import Progress
from visavis.core.result import Result
from visavis.core.table import Cell, Column, Row, Table
from visavis.data.loader import Loader
from visavis.evaluation.published_row import MEASURES, PublishedRow
from visavis.losses import objectives
from visavis.losses.objectives import Objective
from visavis.losses.scoring import score_matrix
from visavis.losses.targets import Targets
from visavis.models import Matcher
from visavis.models.batch_encoding import device_of
from visavis.papers.diagnostics.contributing_samples import (
    ContributingSamples,
    Semantics,
    contributing_by_epsilon,
    released_targets,
)
from visavis.research.reports.gradient_flow import GradientFlow, flow_section, flow_table
from visavis.research.reports.html_report import (
    LIGHT_THEME,
    PlotTheme,
    ThemedImage,
    TrainingCurve,
    figure_to_png,
    legend_style,
    new_figure,
    plot_training_curves,
    render_report,
    style_axes,
    with_own_style,
)
from visavis.training.checkpoint import Checkpoint, complete_checkpoints
from visavis.training.optimizer import make_optimizer
from visavis.training.recipes.data_module import DataModule
from visavis.training.recipes.initial_model import initial_matcher, load_start_model
from visavis.training.recipes.published_tables import contributing_sample_rows, row_objective
from visavis.training.recipes.recipe import Recipe
from visavis.training.recipes.settings import Phase
from visavis.training.runs.open_run import at_learned_scale, open_run, read_run_recipe
from visavis.training.runs.record import RunRecord
from visavis.training.runs.run_folder import RunFolder
from visavis.training.runs.teacher import open_teacher
from visavis.training.supervision import Supervision
from visavis.training.train_step import training_context

BATCH_SIZE = 128
"""Number of images per analyzed batch."""
DEFAULT_EPSILON = 0.01
"""The weight from which the COCOS paper counts a sample."""


@dataclass(frozen=True)
class RunCheckpoint:
    """A loaded checkpoint of a run.

    Attributes:
        phase: The phase whose objective and supervision apply.
        step: Number of training steps.
        supervision: State of the supervision, as far as it is saved.
    """

    phase: Phase
    step: int
    supervision: dict[str, Tensor]


def load_checkpoint(
    run: Path, checkpoint: str, data_module: DataModule, matcher: Matcher, progress: Progress
) -> RunCheckpoint:
    """Load the weights of a checkpoint (best, last, start or a step) into the best model of a run."""
    files = RunFolder(run)
    recipe = data_module.recipe
    if checkpoint == "best":
        phase, step = phase_of_best_model(run, recipe)
        last = Checkpoint.latest(files.checkpoints)
        # The state belongs to the phase of the checkpoint, which may be another one.
        state = (
            last.supervision
            if last is not None and recipe.phases[last.state.phase :][:1] == (phase,)
            else {}
        )
        return RunCheckpoint(phase, step, state)
    # The weights before the first step are not saved. They are created again and compared with the
    # recorded checksum.
    if checkpoint == "start":
        matcher.load_state_dict(initial_matcher(data_module, load_start_model(recipe)).state_dict())
        RunRecord.read(files.environment).check_initial_weights(matcher, run)
        return RunCheckpoint(recipe.phases[0], 0, {})
    # Names are step-<number>, with a suffix if the name was in use.
    saved = {
        int(path.name[len("step-") :].partition("-")[0]): path
        for path in complete_checkpoints(files.checkpoints)
    }
    stored = None
    if checkpoint == "last":
        stored = Checkpoint.latest(files.checkpoints, progress, matcher.state_dict())
    elif checkpoint.isdecimal() and int(checkpoint) in saved:
        stored = Checkpoint.read(saved[int(checkpoint)], matcher.state_dict())
    if stored is None:
        steps = ", ".join(map(str, saved)) or "none"
        raise RunError(
            f"{run}: checkpoint: expected best, last, start or a saved step ({steps}), got "
            f"{checkpoint!r}."
        )
    matcher.load_state_dict(stored.weights)
    phase = recipe.phases[stored.state.phase]
    return RunCheckpoint(phase, stored.state.step, stored.supervision)


def phase_of_best_model(run: Path, recipe: Recipe) -> tuple[Phase, int]:
    """Find the phase that trained the best model of a run, and the step of its validation."""
    files = RunFolder(run)
    # Of equal validations max returns the first, as the trainer keeps it.
    best = max(files.read_log(), key=lambda row: row["rsum"])
    if not 0 <= best["phase"] < len(recipe.phases):
        raise RunError(
            f"{files.log}: expected a phase from 0 to {len(recipe.phases) - 1}, got "
            f"{best['phase']} for the best validation. "
            "The log belongs to another recipe."
        )
    return recipe.phases[best["phase"]], best["step"]


@dataclass(frozen=True)
class ContributionCount:
    """Contributing samples of one objective over all batches, at one epsilon.

    Measures: ``per_moved`` and ``per_query`` (C^q, mean over queries that have one and over all),
    ``in_batch`` (C^B), ``idle`` (C^0), ``push`` and ``pull`` (W^- and W^+, means over queries), and
    ``effective``, the effective number of negatives of the queries that any of them pushes.

    Attributes:
        objective: Spec of the objective.
        semantics: "paper", or "reference" for the counts of the code released with COCOS.
        epsilon: Weight from which a sample counts.
        mean: Mean over batches by ``<direction>_<measure>``, NaN if no batch has a value.
        std: Population standard deviation over batches, by the same keys.
    """

    objective: str
    semantics: Semantics
    epsilon: float
    mean: dict[str, float]
    std: dict[str, float]

    @classmethod
    def from_batches(
        cls,
        objective: Objective,
        semantics: Semantics,
        epsilon: float,
        rows: list[dict[str, float]],
    ) -> ContributionCount:
        """Average the measures of batches, by `batch_measures`."""
        mean = dict[str, float]()
        std = dict[str, float]()
        # A batch without a query of the measure has NaN, and does not count.
        for key in rows[0]:
            values = np.array([row[key] for row in rows if not math.isnan(row[key])])
            mean[key] = float(values.mean()) if len(values) else math.nan
            std[key] = float(values.std()) if len(values) else math.nan
        return cls(repr(objective), semantics, epsilon, mean, std)

    def mean_of_directions(self, measure: str) -> float:
        """Average the means of both directions."""
        return (self.mean[f"i2t_{measure}"] + self.mean[f"t2i_{measure}"]) / 2

    def to_json(self) -> dict[str, Any]:
        """Return a flat JSON object. NaN becomes null."""
        values = {f"{key}_mean": value for key, value in self.mean.items()} | {
            f"{key}_std": value for key, value in self.std.items()
        }
        measures = {key: None if math.isnan(value) else value for key, value in values.items()}
        return {
            "objective": self.objective,
            "semantics": self.semantics,
            "epsilon": self.epsilon,
            **measures,
        }

    def cell(self, key: str) -> Cell:
        """Return a measure as a cell of a table."""
        return Cell(self.mean[key], (self.std[key],))


def _count_column(title: str) -> Column:
    return Column(title, ".2f", missing="-", spread="±{}")


@dataclass(frozen=True)
class ContributionAnalysis(Result):
    """Contributions to the gradients of the queries of a training set at one checkpoint.

    Attributes:
        run: Run folder.
        model: Kind of the model and its image encoder.
        data: Name of the data set.
        checkpoint: Name of the checkpoint.
        step: Number of training steps. 0 for a model that was not trained with visavis.
        batches: Number of batches.
        images: Number of images per batch.
        texts: Number of texts per batch.
        counts: Counts by objective and epsilon, the run's own objective first.
        published: Id of the row of a paper's table that the recipe names. Empty for none.
        with_slope: Whether triplets of SmoothAP count with the factor 1 / tau of their derivative.
        gradients: Norms of gradients that the training of this run, and of further runs, recorded.
    """

    ROWS: ClassVar[str] = "counts"

    run: Path
    model: str
    data: str
    checkpoint: str
    step: int
    batches: int
    images: int
    texts: int
    counts: tuple[ContributionCount, ...]
    published: str
    with_slope: bool = False
    gradients: tuple[GradientFlow, ...] = ()

    @property
    def epsilon(self) -> float:
        """The first epsilon, which is used for comparisons with a paper."""
        return self.counts[0].epsilon

    @property
    def epsilons(self) -> tuple[float, ...]:
        """All epsilons."""
        return tuple(dict.fromkeys(count.epsilon for count in self.counts))

    @property
    def published_counts(self) -> PublishedRow | None:
        """The published counts for the objective of the run. None if there are none."""
        objective = self.counts[0].objective
        return next(
            (
                row
                for row in contributing_sample_rows(self.published)
                if row_objective(row.id) == objective
            ),
            None,
        )

    def tables(self) -> list[Table]:
        """Return counts and weights, the published counts next to them, and recorded gradients."""
        tables = [self.counts_table()]
        if self.published:
            tables.append(self._published_table())
        if self.gradients:
            table = flow_table(self.gradients)
            plot = "--out plots the norms over the steps."
            tables.append(replace(table, notes=(f"{' '.join(table.notes)} {plot}",)))
        return tables

    def counts_table(self) -> Table:
        """Make the table of counts and weights for each objective and direction."""
        rows: list[Row] = []
        for count in self.counts:
            released = "" if count.semantics == "paper" else ", as in the released code"
            epsilon = f", epsilon {count.epsilon:g}" if len(self.epsilons) > 1 else ""
            rows.append((f"{count.objective.partition('(')[0]}{epsilon}{released}",))
            for direction, title in DIRECTIONS.items():
                keys = [f"{direction}_{name}" for name in MEASURES]
                rows.append((f"  {title}", *map(count.cell, keys)))
        epsilons = ", ".join(f"{epsilon:g}" for epsilon in self.epsilons)
        note = (
            f"C^q: negatives with weight above {epsilons}, mean over queries that have one, then "
            "over all. C^B: sum over a batch. C^0: queries without any. W-, W+: summed weights of "
            "these negatives and of positives. effective: effective number of negatives, for any "
            "epsilon."
        )
        notes = [note]
        if self.with_slope:
            notes.append("SmoothAP: triplets by eqs. 12 and 13 of COCOS, with the factor 1/tau.")
        names = {"best": "Best model", "last": "Last model", "start": "Untrained model"}
        checkpoint = names.get(self.checkpoint, "Checkpoint")
        objectives = ", ".join(dict.fromkeys(count.objective for count in self.counts))
        notes.append(
            f"{checkpoint}, step {self.step:,}, frozen. Mean ± standard deviation over "
            f"{self.batches:,} training batches of {self.images:,} images "
            f"and {self.texts:,} texts. {objectives}."
        )
        measures = (_count_column(title) for title in MEASURES.values())
        return Table((Column(is_text=True), *measures), tuple(rows), tuple(notes))

    def _published_table(self) -> Table:
        """Published and measured counts, by the definitions of the paper and of its released code."""
        count = self.counts[0]
        published = self.published_counts
        if published is None:
            return Table(notes=(f"{self.published} has no counts for {count.objective}.",))
        of_code = (count.objective, "reference")
        released = next((o for o in self.counts if (o.objective, o.semantics) == of_code), None)
        # Without a known difference, the released code counts by the definition.
        not_counted = None if published.code_difference else "the same"
        rows = []
        for key, (mean, std) in published.values.items():
            direction, _, measure = key.partition("_")
            rows.append(
                (
                    DIRECTIONS[direction],
                    MEASURES[measure],
                    Cell(mean, (std or 0.0,)),
                    count.cell(key),
                    released.cell(key) if released else not_counted,
                )
            )
        note = (
            f"Published: {published.id}, number {published.experiment_id}: {published.source}. "
            f"Reached: {self.model}, {self.data}."
        )
        notes = [note]
        if self.epsilon != DEFAULT_EPSILON:
            notes.append(
                f"Published with epsilon {DEFAULT_EPSILON}, reached with epsilon {self.epsilon:g}."
            )
        if published.code_difference:
            notes.append(f"Published as counted by the released code: {published.code_difference}.")
        titles = ("published", "reached", "reached, as in the released code")
        columns = (Column(is_text=True), Column(is_text=True), *map(_count_column, titles))
        return Table(columns, tuple(rows), tuple(notes))

    def to_json(self) -> dict[str, Any]:
        """Return a JSON object."""
        names = ("model", "data", "checkpoint", "step", "batches", "images", "texts", "epsilon")
        return {
            "run": str(self.run),
            **{name: getattr(self, name) for name in names},
            "with_slope": self.with_slope,
            "counts": [count.to_json() for count in self.counts],
            "published": self.published_counts and self.published_counts.to_json(),
            "gradients": [flow.to_json() for flow in self.gradients],
        }


def diagnose_run(
    run: Path,
    specs: Sequence[str],
    batches: int | None,
    progress: Progress,
    data: str | None = None,
    memory: MemoryLimit = None,
    *,
    checkpoint: str = "best",
    epsilons: Sequence[float] = (DEFAULT_EPSILON,),
    with_slope: bool = False,
) -> ContributionAnalysis:
    """Count contributing samples for the run's own objective and for others at the same checkpoint."""
    if batches is not None:
        validate_int(batches, "batches", 1)
    if not epsilons or not all(0 < epsilon < 1 for epsilon in epsilons):
        raise VisavisError(
            "epsilon: expected weights between 0 and 1, got "
            f"{', '.join(map(str, epsilons)) or 'none'}."
        )
    others = [objectives.parse(text) for text in specs]
    # Each epsilon once, in the given order.
    epsilons = list(dict.fromkeys(epsilons))
    recipe = read_run_recipe(run, data, memory)
    # A pretrained model has one checkpoint, and no phase of its own.
    if not recipe.phases and (not others or checkpoint != "best"):
        raise RunError(
            f"{run}: a pretrained model has no checkpoint {checkpoint!r}. Omit --checkpoint."
            if others
            else f"{run}: expected an objective, because a pretrained model has none. Name one "
            "with --objective."
        )
    data_module, matcher = open_run(run, recipe, progress)
    if recipe.phases:
        loaded = load_checkpoint(run, checkpoint, data_module, matcher, progress)
    else:
        loaded = RunCheckpoint(Phase(epochs=1, objective=others[0]), 0, {})
    own_objective = at_learned_scale(loaded.phase.objective, matcher)
    loader = diagnostic_loader(data_module)
    # The supervision of the checkpoint, as a copy, because the object of the recipe must not keep a
    # state. The state is about the images of the run.
    teacher = copy(loaded.phase.supervision)
    optimizer = make_optimizer(matcher, loaded.phase)
    validation = data_module.loader(data_module.validation)
    teacher.begin_phase(
        training_context(
            data_module.recipe,
            loaded.phase,
            matcher,
            optimizer,
            loader,
            validation,
            open_teacher=open_teacher,
        ),
        loaded.supervision if data is None else {},
    )
    # A smaller last batch is not counted.
    number = min(loader.num_batches, batches or loader.num_batches)
    # The measures of each batch, by objective, rules and epsilon.
    measures = defaultdict[tuple[Objective, Semantics, float], list[dict[str, float]]](list)
    for done, (scores, targets) in enumerate(
        scored_batches(loader, matcher, teacher, number, recipe.memory or None), 1
    ):
        for objective in dict.fromkeys([own_objective, *others]):
            targets_by_semantics: dict[Semantics, Targets | None] = {
                "paper": targets,
                # None if the released code of COCOS counts in the same way.
                "reference": released_targets(objective, *scores.shape),
            }
            for semantics, batch_targets in targets_by_semantics.items():
                if batch_targets is not None:
                    samples = contributing_by_epsilon(
                        objective,
                        scores,
                        batch_targets,
                        epsilons,
                        semantics=semantics,
                        with_slope=with_slope,
                    )
                    for epsilon, by_direction in zip(epsilons, samples, strict=True):
                        measures[objective, semantics, epsilon].append(batch_measures(by_direction))
        progress.update("batches", done, number, 0.0)
    return ContributionAnalysis(
        run,
        f"{recipe.model['kind']} on {recipe.visual.encoder or recipe.visual.features}",
        data_module.data.name,
        checkpoint,
        loaded.step,
        number,
        len(scores),
        scores.shape[1],
        tuple(ContributionCount.from_batches(*key, rows) for key, rows in measures.items()),
        recipe.published,
        with_slope,
    )


def diagnostic_loader(data_module: DataModule) -> Loader:
    """Split the training set into batches of `BATCH_SIZE`. A smaller set is one batch."""
    loader = data_module.loader(data_module.data.split("train"))
    items = (
        loader.data.captions if loader.schedule.captions_per_image is None else loader.data.images
    )
    return replace(
        loader,
        schedule=replace(
            loader.schedule,
            batch_size=BATCH_SIZE,
            # Random batches, as in the paper.
            length_buckets=0,
            drop_last=len(items) > BATCH_SIZE,
            batches_per_epoch=0,
        ),
    )


@torch.no_grad()
def scored_batches(
    loader: Loader,
    matcher: Matcher,
    supervision: Supervision,
    number: int,
    memory: MemoryLimit = None,
) -> Iterator[tuple[Tensor, Targets]]:
    """Score the first batches of a fixed schedule in evaluation mode. The scores ``[V, T]`` and the
    targets are on the CPU.
    """
    matcher.eval()
    for batch in loader.epoch(0, stop=number, training=False):
        moved = batch.to(device_of(matcher))
        visual = matcher.encode_visual(moved.visual)
        text = matcher.encode_text(moved.text)
        scores = score_matrix(matcher.score, visual, text, memory).float().cpu()
        yield scores, supervision.targets(visual, text, moved).to("cpu")


def batch_measures(samples: dict[str, ContributingSamples]) -> dict[str, float]:
    """Compute the measures of one batch, by ``<direction>_<measure>`` as in `ContributionCount`."""
    measures: dict[str, float] = {}
    for direction, each in samples.items():
        measures |= {
            f"{direction}_per_moved": each.per_moved,
            f"{direction}_per_query": each.per_query,
            f"{direction}_in_batch": each.in_batch,
            f"{direction}_idle": float(each.idle),
            f"{direction}_push": each.push.mean().item(),
            f"{direction}_pull": each.pull.mean().item(),
            f"{direction}_effective": each.effective_negatives,
        }
    return measures


def render_diagnosis(diagnosis: ContributionAnalysis) -> str:
    """Render the report. Training curves are shown if the run has a log."""
    files = RunFolder(diagnosis.run)
    curves = None
    # A pretrained model has no log.
    if os.path.exists(files.log):
        name = diagnosis.counts[0].objective.partition("(")[0]
        curves = ThemedImage.draw(
            partial(plot_training_curves, [TrainingCurve(name, files.read_log())])
        )
    options = [f"--epsilon {epsilon:g}" for epsilon in diagnosis.epsilons]
    options += ["--with-slope"] if diagnosis.with_slope else []
    others = [flow.run for flow in diagnosis.gradients if flow.run != diagnosis.run]
    runs = " ".join(map(quote_argument, [diagnosis.run, *others]))
    return render_report(
        "diagnosis",
        package="visavis.papers",
        diagnosis=diagnosis,
        counts=diagnosis.counts_table(),
        sweep=ThemedImage.draw(partial(plot_epsilon, diagnosis))
        if len(diagnosis.epsilons) > 1
        else None,
        curves=curves,
        gradients=flow_section(diagnosis.gradients),
        command=f"{shell_command()} papers diagnose {runs} --checkpoint {diagnosis.checkpoint} {' '.join(options)}",
    )


@with_own_style
def plot_epsilon(diagnosis: ContributionAnalysis, theme: PlotTheme = LIGHT_THEME) -> bytes:
    """Plot C^q over all queries, C^B and C^0 against epsilon, as means of both directions."""
    figure = new_figure(8.6, 3.1, theme)
    counts = [count for count in diagnosis.counts if count.semantics == "paper"]
    for panel, (measure, title) in enumerate(
        (("per_query", "C^q, all queries"), ("in_batch", "C^B"), ("idle", "C^0"))
    ):
        axes = figure.add_axes((0.07 + 0.325 * panel, 0.17, 0.262, 0.64))
        for number, objective in enumerate(dict.fromkeys(count.objective for count in counts)):
            curve = sorted(
                (count for count in counts if count.objective == objective),
                key=lambda count: count.epsilon,
            )
            color = theme.lines[number % len(theme.lines)]
            name = objective.partition("(")[0]
            means = [count.mean_of_directions(measure) for count in curve]
            axes.plot(
                [count.epsilon for count in curve],
                means,
                "o-",
                color=color,
                markersize=4,
                label=name,
            )
            # The effective number of negatives does not depend on epsilon.
            if measure == "per_query":
                axes.axhline(
                    curve[0].mean_of_directions("effective"),
                    color=color,
                    linestyle=":",
                    linewidth=1.4,
                )
        style_axes(axes, title, theme, "epsilon")
        axes.set_xscale("log")
        axes.minorticks_off()
        axes.set_ylim(bottom=0)
        if panel == 0:
            axes.legend(**legend_style(theme, 2.0))
    return figure_to_png(figure)
