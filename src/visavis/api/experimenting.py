"""API functions that train many runs: comparisons and reproductions of published tables."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from visavis.api.arguments import optional_path, parse_overrides, resolve_recipe, to_list
from visavis.errors import MissingExtra, RunError
from visavis.progress import NoProgress, Progress

if TYPE_CHECKING:
    from visavis.experiments.comparison_result import Comparison
    from visavis.experiments.reproduction import Reproduction

DEFAULT_SEEDS = 5
"""Seeds per setting of a comparison."""


def compare(
    recipe: str | Path | None = None,
    *,
    objective: str | Sequence[str] = (),
    model: str | Sequence[str] = (),
    grid: str | Sequence[str] = (),
    seeds: int | None = None,
    budget: str | None = None,
    data: str | Path | None = None,
    feedback: str | Path | None = None,
    out: str | Path | None = None,
    overrides: dict[str, Any] | Sequence[str] = (),
    resume: str | Path | None = None,
    trec: bool = False,
    engine: Literal["local", "ray"] = "local",
    workers: int | None = None,
    progress: Progress | None = None,
) -> Comparison:
    """Compare objectives, models and settings on one data set, with confidence intervals and tests.

    All settings have the same seeds and batches. A run computes with one thread unless ``training.threads`` is set.

    Args:
        recipe: TOML file or name of a shipped recipe. Default: chosen by the installed encoders.
        objective: Objective, such as "Unified()". "Goal.all()" is fifteen.
        model: Model, such as "VSE++(embedding_dim=512)".
        grid: Values of a recipe key, such as "phases.0.optimizer.lr=[3e-4, 1e-3]". The best on validation is reported.
        seeds: Number of seeds per setting. Default: 5.
        budget: Training time, such as 30m: after 1, 2, 4, ... seeds the better half continues. Default: no limit.
        data: Data set. Default: that of the recipe.
        feedback: Feedback file of visavis serve as a second test. It is not used for any choice. Default: none.
        out: New folder. Default: ``runs/compare-<n>``.
        overrides: Recipe overrides for all runs, such as epochs=4.
        resume: Folder of a comparison to continue, also with more --seeds or new --feedback. Default: a new one.
        trec: Also write ranked lists and ground truth as TREC files.
        engine: Run locally, or on a Ray cluster whose machines share the folder.
        workers: Number of runs at once. Default: one per core.
        progress: Receives the progress.

    Returns:
        Results, tests and findings. The folder has ``report.html``, ``table.md``, ``comparison.json`` and all runs.

    Raises:
        DataError: If the data cannot be read.
        RecipeError: If the recipe has an unknown key or an invalid value.
        RunError: If options are given that a resumed comparison keeps.
        Stopped: After Ctrl-C, once everything is saved.
    """
    from visavis.experiments.jobs import Workers
    from visavis.experiments.run_comparison import parse_budget, plan_comparison, resume_comparison, start_comparison
    from visavis.recipes.files import read_recipe

    progress, pool = progress or NoProgress(), Workers(engine, workers)
    budget_s, feedback = None if budget is None else parse_budget(budget), optional_path(feedback)
    if resume is not None:
        if any((recipe, objective, model, grid, data, out, overrides)):
            raise RunError(
                "--resume: expected only --seeds, --budget, --feedback, --engine and --workers, as a comparison keeps its settings. "
                "Remove the other options."
            )
        comparison = resume_comparison(Path(resume), seeds, pool, progress, feedback=feedback, budget_s=budget_s)
    else:
        name, settings = resolve_recipe(recipe, overrides, progress, data=data)
        plan = plan_comparison(
            read_recipe(name, settings),
            (to_list(objective), to_list(model), to_list(grid)),
            DEFAULT_SEEDS if seeds is None else seeds,
            successive_halving=budget is not None,
        )
        comparison = start_comparison(plan, optional_path(out), pool, progress, feedback=feedback, budget_s=budget_s)
    _write_reports(comparison, progress, trec=trec)
    return comparison


def _write_reports(comparison: Comparison, progress: Progress, *, trec: bool) -> None:
    """Write the TREC files and the HTML report, or a message without the packages of a report."""
    from visavis.experiments.example_queries import write_trec_files
    from visavis.reports.comparison_report import write_comparison_report

    if trec:
        write_trec_files(comparison, progress)
    try:
        write_comparison_report(comparison, progress)
    except MissingExtra as missing:
        progress.message(str(missing))


def reproduce(
    table: str | None = None,
    *,
    rows: str | Sequence[str] = (),
    base_recipe: str | None = None,
    seeds: int | None = None,
    out: str | Path | None = None,
    overrides: dict[str, Any] | Sequence[str] = (),
    resume: str | Path | None = None,
    engine: Literal["local", "ray"] = "local",
    workers: int | None = None,
    progress: Progress | None = None,
) -> Reproduction:
    """Train the rows of a paper's table and compare the results with the published ones.

    Args:
        table: Table of a paper, such as goal/3, see visavis catalog recipes. Default: that of --resume.
        rows: Name of a row, or a pattern such as 'r152-con-*'. Default: all.
        base_recipe: Recipe for other data than the paper's, trained with each row's objective. Default: the rows' recipes.
        seeds: Number of seeds per row. Default: as many runs as the paper averages.
        out: New folder. Default: ``runs/<paper>-<table>-<n>``.
        overrides: Recipe overrides for all rows, such as epochs=4.
        resume: Folder of a reproduction to continue, also with more --seeds. Default: a new one.
        engine: Run locally, or on a Ray cluster whose machines share the folder.
        workers: Number of runs at once. Default: one per core.
        progress: Receives the progress.

    Returns:
        Published and reached results with their differences.

    Raises:
        DataError: If the data cannot be read.
        RecipeError: If a row or a key is unknown.
        RunError: If no table is named, or options are given that a resumed reproduction keeps.
        Stopped: After Ctrl-C, once everything is saved.
    """
    from visavis.experiments.jobs import Workers
    from visavis.experiments.reproduction import resume_reproduction, start_reproduction

    progress, pool = progress or NoProgress(), Workers(engine, workers)
    if resume is not None:
        if any((table, rows, base_recipe, out, overrides)):
            raise RunError(
                "--resume: expected only --seeds, --engine and --workers, as a reproduction keeps its rows and recipe. "
                "Remove the other options."
            )
        return resume_reproduction(Path(resume), seeds, pool, progress)
    if table is None:
        raise RunError("table: expected a table such as goal/3, got none. Choose one of visavis catalog recipes, or pass --resume FOLDER.")
    settings = parse_overrides(overrides)
    return start_reproduction(table, to_list(rows), base_recipe or "", settings, seeds, optional_path(out), pool, progress)
