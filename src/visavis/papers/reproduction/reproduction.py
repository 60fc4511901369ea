"""Reproduction of a paper's table: each row is a setting of an experiment, compared with its
published values. Rows that count contributing samples are diagnosed after their training, rows of a
pretrained model are evaluated without one, and curves of a figure are plotted.

The folder is that of a comparison, with ``table.json`` (the setting of each row) and the results
``reproduction.json`` and ``reproduction.md``.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from fnmatch import fnmatch
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

from visavis.core import storage
from visavis.core.errors import RecipeError, VisavisError, suggest_name
from visavis.core.fields import validate_int
from visavis.core.progress import Progress
from visavis.core.result import Result
from visavis.core.table import Column, Row, Table
from visavis.core.table_formats import format_markdown
from visavis.evaluation.published_row import PublishedRow, comparison_cells, metric_title
from visavis.evaluation.statistics import Interval, spread_over_seeds
from visavis.papers.diagnostics.contributing_samples import Semantics
from visavis.papers.reproduction.reproduced_figure import ReproducedFigure, plot_figure
from visavis.papers.reproduction.run_contributions import Contributions, run_contributions
from visavis.research.experiments.grid import Setting
from visavis.research.experiments.jobs import (
    MAX_RUNS,
    OUTCOME_FILE,
    Job,
    RunOutcome,
    Workers,
    read_outcome,
)
from visavis.research.experiments.run_comparison import (
    ExperimentPlan,
    check_any_succeeded,
    experiment_workers,
    finished_runs_kept,
    new_experiment_folder,
    prepare_settings,
    read_experiment_file,
    read_plan,
    train_runs,
)
from visavis.research.experiments.setting_results import MeasurementConditions
from visavis.training.recipes.files import (
    paper_figures,
    paper_tables,
    read_recipe,
    read_recipe_file,
)
from visavis.training.recipes.open_data import check_data_exists
from visavis.training.recipes.published_tables import figure_curves, published_results
from visavis.training.recipes.recipe import Recipe, build_recipe
from visavis.training.runs.evaluate_runs import EvaluationOptions, evaluate_runs
from visavis.training.runs.open_run import with_absolute_paths

# Minimum number of rows whose order is compared.
MIN_ROWS = 4
# Papers that print the population standard deviation. The others print the one of the sample.
POPULATION_STD_PAPERS = ("cocos",)
# Runs that papers average, 1 if they do not report a number, or count the samples of one run.
PAPER_SEEDS = {"goal": 3, "cocos": 5, "cocos/2": 1, "cocos/3": 1, "cocos/4": 1}
# Rules of counts, in this order.
SEMANTICS: tuple[Semantics, ...] = ("paper", "reference")


@dataclass(frozen=True)
class ReproducedValue:
    """Published and reproduced value of a row.

    Attributes:
        row: The row.
        key: Key of the metric.
        published: Published mean.
        published_std: Published standard deviation.
        reached: Mean over runs. None if no run succeeded.
        reached_std: Standard deviation over runs, of the kind that the paper prints. None for one
            run. Of contributing samples: over all batches of all runs.
        interval: Spread of the difference over runs. None for one run, or runs with equal
            values.
        semantics: Of contributing samples: by the definition of the paper, or as its released code
            counts ("reference").
    """

    row: PublishedRow
    key: str
    published: float
    published_std: float | None
    reached: float | None
    reached_std: float | None
    interval: Interval | None = None
    semantics: Semantics = "paper"

    @property
    def difference(self) -> float | None:
        """Reproduced minus published mean."""
        return None if self.reached is None else self.reached - self.published

    def to_json(self) -> dict[str, Any]:
        """Convert to plain values."""
        interval = None if self.interval is None else asdict(self.interval)
        return vars(self) | {
            "row": self.row.id,
            "difference": self.difference,
            "interval": interval,
        }


@dataclass(frozen=True)
class RankAgreement:
    """Rank correlation of published and reproduced values.

    Attributes:
        key: Key of the metric.
        rows: Number of rows.
        rho: Spearman's rank correlation.
        p: p-value of a permutation test.
    """

    key: str
    rows: int
    rho: float
    p: float


@dataclass(frozen=True)
class Reproduction(Result):
    """Rows of a table with their runs.

    Attributes:
        folder: Folder of the experiment.
        table: Id of the table.
        base: Description of the recipe that replaces those of the rows. "": their own.
        outcomes: Outcomes by row id, by seed.
        contributions: Contributing samples by run folder, for a table of counts.
    """

    ROWS: ClassVar[str] = "values"

    folder: Path
    table: str
    base: str
    outcomes: Mapping[str, Sequence[RunOutcome]]
    contributions: Mapping[Path, Contributions] = field(default_factory=dict)

    @cached_property
    def published(self) -> dict[str, PublishedRow]:
        """Published rows by id."""
        rows = published_results()
        return {row_id: rows[row_id] for row_id in self.outcomes}

    @property
    def substitution(self) -> str:
        """Difference from the setting of the paper. "": none."""
        return _substitution(self.base, self.published.values())

    @property
    def values(self) -> list[ReproducedValue]:
        """All values, row by row."""
        values = []
        for row_id, row in self.published.items():
            # A row without a protocol counts contributing samples.
            if not row.protocol:
                counts = [
                    self.contributions[run.folder]
                    for run in self.outcomes[row_id]
                    if run.folder in self.contributions
                ]
                values += _counted_values(row, counts)
                continue
            std_of = statistics.pstdev if row.paper in POPULATION_STD_PAPERS else statistics.stdev
            for key, (mean, std) in row.values.items():
                metrics = [run.measured_metrics for run in self.outcomes[row_id]]
                of_runs = [measured[key] for measured in metrics if key in measured]
                reached = statistics.fmean(of_runs) if of_runs else None
                reached_std = std_of(of_runs) if len(of_runs) > 1 else None
                # Of the difference: the published mean is a constant.
                interval = spread_over_seeds([value - mean for value in of_runs])
                values.append(ReproducedValue(row, key, mean, std, reached, reached_std, interval))
        return values

    @property
    def rank_agreements(self) -> list[RankAgreement]:
        """Rank correlations of metrics that enough rows have. Rows that share their runs count
        once.
        """
        from scipy.stats import permutation_test, rankdata, spearmanr

        # The first row of those that share their runs.
        row_of_runs = {
            runs[0].folder: row_id for row_id, runs in reversed([*self.outcomes.items()]) if runs
        }
        # Published counts follow the released code where it differs from the definition.
        values = [
            value
            for value in self.values
            if value.row.id in row_of_runs.values()
            and value.semantics == ("reference" if value.row.code_difference else "paper")
        ]
        agreements = []
        for key in dict.fromkeys(value.key for value in self.values):
            pairs = [
                (value.published, value.reached)
                for value in values
                if value.key == key and value.reached is not None
            ]
            if len(pairs) < MIN_ROWS:
                continue
            # The statistic is the sum of products of ranks, which orders permutations like rho.
            published, reached = rankdata(list(zip(*pairs, strict=True)), axis=1)
            rho = float(spearmanr(published, reached).statistic)
            if not math.isnan(rho):
                test = permutation_test(
                    (published,),
                    lambda sample, axis, fixed=reached: (sample * fixed).sum(axis),
                    permutation_type="pairings",
                    rng=0,
                )
                agreements.append(RankAgreement(key, len(pairs), rho, float(test.pvalue)))
        return agreements

    @property
    def seeds(self) -> int:
        """Number of seeds."""
        return max(len(runs) for runs in self.outcomes.values())

    @property
    def remarks(self) -> list[str]:
        """Sentences that readers of the values need."""
        first = next(iter(self.published.values()))
        counted = not first.protocol
        kind = "population" if first.paper in POPULATION_STD_PAPERS else "sample"
        spread = "one run" if self.seeds == 1 else f"{self.seeds} runs"
        if counted:
            spread = (
                f"contributing samples of {spread}, frozen, mean ± population standard deviation "
                "over random training batches"
            )
        elif self.seeds > 1:
            spread = f"mean ± {kind} standard deviation of {spread}, as published"
        rows = self.published.values()
        rates = (
            f"learning rate of {self.base.split(' ')[0]}" if self.base else "paper's learning rates"
        )
        return [
            (
                f"Published: {first.source}. Reached: {spread}, best model of each row by validation, "
                f"at the {rates}, not tuned."
                + (
                    " Difference: with its range over runs, or from four runs on its 95 % interval."
                    if self.seeds > 1
                    else ""
                )
            ),
            *(
                f"Order of the {agreement.rows} rows with different runs by "
                f"{metric_title(agreement.key)}: "
                f"Spearman's rho {agreement.rho:.2f} between published and reached values (p = "
                f"{agreement.p:.2g})."
                for agreement in self.rank_agreements
            ),
            *(
                f"{row.id}: published as its released code counts: {row.code_difference}."
                for row in _first_of_each(rows, "code_difference")
            ),
            *(
                f"{row.id}: not reported in the paper: {row.unreported}."
                for row in _first_of_each(rows, "unreported")
            ),
            *(
                f"{row.row}: {runs[0].setting}, evaluated without training."
                for row, runs in zip(rows, self.outcomes.values(), strict=True)
                if row.pretrained and runs
            ),
            *(
                f"{row.id}: trained with {row.substitutes}."
                for row in _first_of_each(rows, "substitutes")
            ),
            *(
                f"{row.id}: misprint in the paper: {row.misprint}."
                for row in _first_of_each(rows, "misprint")
            ),
            *(
                f"{run.setting}, seed {run.seed} failed: {run.failure}"
                for runs in self.outcomes.values()
                for run in runs
                if run.failure
            ),
        ]

    def markdown(self) -> str:
        """Format the substitution, the values and the remarks."""
        above = f"**{self.substitution}**\n\n" if self.base else ""
        table = format_markdown(self._value_table("row"))
        return f"# {self.table}\n\n{above}{table}\n" + "".join(
            f"- {sentence}\n" for sentence in self.remarks
        )

    def tables(self) -> list[Table]:
        """Return the substitution, the values and the remarks."""
        above = [Table(notes=(self.substitution,))] if self.base else []
        notes = (*self.remarks, f"Table: {self.folder}")
        return [*above, replace(self._value_table(), notes=notes)]

    def _value_table(self, heading: str = "") -> Table:
        columns = (
            Column(heading, is_text=True),
            Column("metric", is_text=True),
            *map(Column, ("published", "reached", "difference")),
        )
        rows: list[Row] = []
        for value in self.values:
            *cells, difference = comparison_cells(
                value.key, value.published, value.published_std, value.reached, value.reached_std
            )
            if value.semantics == "reference":
                cells[0] += ", as the released code counts"
            interval = "" if value.interval is None else f" ({value.interval})"
            rows.append((value.row.row, *cells, difference + interval))
        return Table(columns, tuple(rows))

    def to_json(self) -> dict[str, Any]:
        """Convert to plain values."""
        return {
            "reproduction": str(self.folder),
            "table": self.table,
            "base": self.base,
            "substitution": self.substitution,
            "values": [value.to_json() for value in self.values],
            "rank_agreements": [asdict(agreement) for agreement in self.rank_agreements],
            "runs": {
                row_id: [run.to_json() for run in runs] for row_id, runs in self.outcomes.items()
            },
        }


def _counted_values(row: PublishedRow, runs: Sequence[Contributions]) -> list[ReproducedValue]:
    """Published and reached counts of contributing samples, by the definition, and as the released
    code counts where that differs.
    """
    values = []
    for semantics in SEMANTICS:
        counts = [run[semantics] for run in runs if semantics in run]
        # The released code counts most objectives by the definition.
        if semantics == "reference" and not counts:
            continue
        for key, (published, std) in row.values.items():
            of_runs = [of_run[key] for of_run in counts if key in of_run]
            means = [mean for mean, _ in of_runs]
            reached = statistics.fmean(means) if means else None
            # All runs have equally many batches, so this is the deviation over all of them.
            reached_std = (
                math.sqrt(
                    statistics.fmean(deviation**2 for _, deviation in of_runs)
                    + statistics.pvariance(means)
                )
                if means
                else None
            )
            interval = spread_over_seeds([mean - published for mean in means]) if means else None
            values.append(
                ReproducedValue(row, key, published, std, reached, reached_std, interval, semantics)
            )
    return values


def _substitution(base: str, rows: Iterable[PublishedRow]) -> str:
    """Difference from the setting of the paper. "": none."""
    if not base:
        return ""
    data = [_row_content(row)["data"] for row in rows]
    required = dict.fromkeys(each.get("requires") or each["path"] for each in data)
    return (
        "Not the setting of the paper: the objective and supervision of each row on "
        f"{base}, instead of {', '.join(required)}. "
        "Values are not comparable, but their order may be."
    )


def _first_of_each(rows: Iterable[PublishedRow], annotation: str) -> list[PublishedRow]:
    """The first row with each text of an annotation."""
    first: dict[str, PublishedRow] = {}
    for row in rows:
        if text := getattr(row, annotation):
            first.setdefault(text, row)
    return list(first.values())


@dataclass(frozen=True)
class ReproductionPlan:
    """Settings of the rows of a table.

    Attributes:
        table: Id of the table.
        base: Description of the recipe that replaces those of the rows. "": their own.
        rows: Name of the setting, or of the pretrained model, by row id.
        pretrained: Evaluations of pretrained models by row id.
    """

    table: str
    base: str
    rows: dict[str, str]
    pretrained: dict[str, PretrainedRow] = field(default_factory=dict)


@dataclass(frozen=True)
class PretrainedRow:
    """Evaluation of a row that is not trained.

    Attributes:
        model: Name or folder of the model.
        data: Data set.
        split: Split.
        protocol: Name of the protocol.
    """

    model: str
    data: str
    split: str
    protocol: str


def start_reproduction(
    table: str,
    patterns: Sequence[str],
    base: str,
    overrides: dict[str, Any],
    seeds: int | None,
    out: Path | None,
    workers: Workers,
    progress: Progress,
) -> Reproduction | ReproducedFigure:
    """Reproduce rows of a table, or curves of a figure, in a new folder, by the recipes of the rows
    or by another one (``base``).
    """
    rows = select_rows(table, patterns)
    for row in rows:
        if row.not_trainable and not row.pretrained:
            progress.message(f"Skipping {row.id}, which cannot be trained: {row.not_trainable}.")
    trained = [row for row in rows if not row.not_trainable]
    base_recipe = read_recipe(base, overrides) if base else None
    pretrained = {
        row.id: _pretrained_row(row, base_recipe, overrides) for row in rows if row.pretrained
    }
    if not trained and not pretrained:
        raise RecipeError(
            f"{table}: expected a row that can be trained, got none: {rows[0].not_trainable}."
        )
    if base_recipe:
        settings = _on_base(trained, base_recipe)
    else:
        settings = {
            row.id: Setting(
                row.row, recipe_values=with_absolute_paths(read_recipe(row.id, overrides)).to_dict()
            )
            for row in trained
        }
    num_seeds = validate_int(
        PAPER_SEEDS.get(table, PAPER_SEEDS.get(rows[0].paper, 1)) if seeds is None else seeds,
        "seeds",
        1,
        MAX_RUNS,
    )
    # Rows may share a setting, which is trained once.
    unique = {setting.name: setting for setting in settings.values()}
    plan = ExperimentPlan(table, tuple(unique.values()), num_seeds)
    with new_experiment_folder(plan, out, table.replace("/", "-"), progress) as (folder, _):
        description = ""
        if base_recipe:
            about = f" ({base_recipe.about.rstrip('.')})" if base_recipe.about else ""
            changed = "".join(f", {key}={value}" for key, value in overrides.items())
            protocols = " and ".join(base_recipe.evaluation.protocols)
            description = f"{base_recipe.name}{about}{changed}, protocol {protocols}"
        names = {row_id: setting.name for row_id, setting in settings.items()}
        names |= {row_id: evaluation.model for row_id, evaluation in pretrained.items()}
        # In the order of the table.
        names = {row.id: names[row.id] for row in rows if row.id in names}
        reproduction = ReproductionPlan(table, description, names, pretrained)
        storage.write_json(folder / "table.json", asdict(reproduction))
        return _run(folder, plan, reproduction, workers, progress)


def resume_reproduction(
    folder: Path, seeds: int | None, workers: Workers, progress: Progress
) -> Reproduction | ReproducedFigure:
    """Resume the reproduction of a table, with more seeds if given."""
    reproduction = read_experiment_file(folder, "table.json", ReproductionPlan, "papers reproduce")
    plan = read_plan(folder, seeds, command="papers reproduce")
    # Features that are not in the cache are computed before any run.
    prepare_settings(plan, progress)
    with finished_runs_kept(folder):
        return _run(folder, plan, reproduction, workers, progress)


def select_rows(table: str, patterns: Sequence[str] = ()) -> list[PublishedRow]:
    """Select rows of a table or curves of a figure by patterns of their names. No patterns: all."""
    all_rows = published_results() | figure_curves()
    rows = [row for row in all_rows.values() if f"{row.paper}/{row.table}" == table]
    problem = ""
    tables = [*paper_tables(), *paper_figures()]
    if table not in tables:
        problem = f"{table} is not a table or figure of a paper: {suggest_name(table, tables)}"
    else:
        names = [row.row for row in rows]
        for pattern in patterns:
            if not any(fnmatch(name, pattern) for name in names):
                source = f"visavis papers list {rows[0].paper}"
                suggestion = suggest_name(pattern, names, source)
                # The first pattern without a row is reported.
                problem = problem or f"{table}: no row matches {pattern}: {suggestion}"
    if problem:
        raise RecipeError(problem)
    return [
        row
        for row in rows
        if not patterns or any(fnmatch(row.row, pattern) for pattern in patterns)
    ]


def _on_base(rows: Iterable[PublishedRow], base: Recipe) -> dict[str, Setting]:
    """Settings of another recipe with the objective and supervision of each row in every phase.
    Equal rows share one.
    """
    settings = dict[str, Setting]()
    for row in rows:
        recipe = read_recipe(row.id)
        changes: dict[str, Any] = {
            "objective": repr(recipe.phases[-1].objective),
            "evaluation.sections": [repr(section) for section in recipe.evaluation.sections],
            "evaluation.extra_metrics": recipe.evaluation.extra_metrics,
        }
        changes |= {
            f"phases.{number}.supervision": repr(recipe.phases[-1].supervision)
            for number in range(len(base.phases))
        }
        if (captions := recipe.training.captions_per_image) is not None:
            changes["training.captions_per_image"] = captions
            # With k captions per image in a batch (SmoothAP in COCOS), k times the epochs have the
            # same number of steps as the other rows.
            for number, phase in enumerate(base.phases):
                schedule = phase.schedule
                key = f"phases.{number}"
                changes |= {
                    f"{key}.epochs": captions * phase.epochs,
                    f"{key}.loss_warmup_epochs": captions * phase.loss_warmup_epochs,
                    f"{key}.schedule.milestones": [
                        captions * epoch for epoch in schedule.milestones
                    ],
                    # An exponential schedule decays in each epoch.
                    f"{key}.schedule.factor": schedule.factor ** (1 / captions)
                    if schedule.kind == "exponential"
                    else schedule.factor,
                }
        recipe_values = build_recipe(
            with_absolute_paths(base).to_dict(), changes, f"{base.name} with {row.id}"
        ).to_dict()
        # Rows that differ only in what the base recipe replaces are trained once.
        equal_setting = next(
            (setting for setting in settings.values() if setting.recipe_values == recipe_values),
            None,
        )
        settings[row.id] = equal_setting or Setting(row.row, recipe_values=recipe_values)
    return settings


def _run(
    folder: Path,
    plan: ExperimentPlan,
    reproduction: ReproductionPlan,
    workers: Workers,
    progress: Progress,
) -> Reproduction | ReproducedFigure:
    """Train the missing runs, evaluate pretrained models, and write the results."""
    outcomes = list[RunOutcome]()
    if plan.settings:
        with experiment_workers(folder, plan, workers, progress) as run_jobs:
            outcomes = train_runs(folder, plan, run_jobs, progress)
            check_any_succeeded(folder, outcomes)
    rows = select_rows(reproduction.table)
    contributions = dict[Path, Contributions]()
    # A table of contributing samples.
    if not rows[0].protocol:
        contributions = {run.folder: run_contributions(run, progress) for run in outcomes}
    runs = {
        row_id: [run for run in outcomes if run.setting == name]
        if row_id not in reproduction.pretrained
        else [_evaluate_pretrained(folder, row_id, reproduction.pretrained[row_id], progress)]
        for row_id, name in reproduction.rows.items()
    }
    result: Reproduction | ReproducedFigure
    if reproduction.table in paper_figures():
        curves = {row.id: row for row in rows if row.id in runs}
        substitution = _substitution(reproduction.base, curves.values())
        plot = read_recipe_file(reproduction.table).table["plot"]
        result = ReproducedFigure(folder, reproduction.table, plot, substitution, curves, runs)
        storage.write_bytes(folder / "figure.png", plot_figure(result))
    else:
        result = Reproduction(folder, reproduction.table, reproduction.base, runs, contributions)
    storage.write_json(folder / "reproduction.json", result.to_json())
    storage.write_text(folder / "reproduction.md", result.markdown())
    return result


def _pretrained_row(
    row: PublishedRow, base: Recipe | None, overrides: dict[str, Any]
) -> PretrainedRow:
    """The evaluation of a pretrained model on the data of its row or of another recipe. A recipe
    that reads images and texts with one encoder replaces the model.
    """
    recipe = with_absolute_paths(base or build_recipe(_row_content(row), overrides, row.id))
    check_data_exists(recipe)
    encoder = recipe.visual.encoder
    return PretrainedRow(
        encoder if encoder == recipe.text.encoder else row.pretrained,
        recipe.data.path,
        recipe.evaluation.test,
        recipe.evaluation.protocols[0] if base else row.protocol,
    )


def _row_content(row: PublishedRow) -> dict[str, Any]:
    """The plain values of a row, also of one that cannot be trained."""
    return read_recipe_file(f"{row.paper}/{row.table}").variant_content(row.row)


def _evaluate_pretrained(
    folder: Path, row_id: str, row: PretrainedRow, progress: Progress
) -> RunOutcome:
    """The outcome of a row that is not trained, saved in the folder of the experiment."""
    job = Job(row.model, 1, {}, folder / "pretrained" / row_id.rpartition("/")[2])
    if (outcome := read_outcome(job)) is not None:
        return outcome
    # A model that cannot be evaluated does not stop the other rows.
    try:
        options = EvaluationOptions(protocol=row.protocol, split=row.split, data=row.data)
        result = evaluate_runs([Path(row.model)], options, progress)
    except VisavisError as error:
        return RunOutcome(job.setting, job.seed, job.folder, failure=str(error))
    outcome = RunOutcome(
        job.setting,
        job.seed,
        job.folder,
        metrics=result.all_metrics,
        conditions=MeasurementConditions.from_evaluation(result),
    )
    storage.write_checksummed_json(job.folder / OUTCOME_FILE, outcome.to_json())
    return outcome
