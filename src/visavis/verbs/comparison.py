"""Verbs that set many runs beside one another."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from visavis.errors import MissingExtra, RunError
from visavis.progress import Progress, Silent

if TYPE_CHECKING:
    from visavis.comparison.reproduction import Reproduction
    from visavis.comparison.result import Comparison
    from visavis.comparison.workers import Engine

SEEDS = 5


def compare(
    recipe: str | Path | None = None,
    *,
    objective: str | Sequence[str] = (),
    model: str | Sequence[str] = (),
    grid: str | Sequence[str] = (),
    seeds: int | None = None,
    budget: str | None = None,
    data: str | Path | None = None,
    judgements: str | Path | None = None,
    out: str | Path | None = None,
    overrides: dict[str, Any] | Sequence[str] = (),
    resume: str | Path | None = None,
    trec: bool = False,
    engine: Engine = "local",
    workers: int | None = None,
    progress: Progress | None = None,
) -> Comparison:
    """Which objective, which model, which settings are best on some data, and how sure that is.

    recipe, data, overrides: as of ``train``, for all runs. objective: specs, such as ``["Unified()", "TripletHN()"]``; ``"Goal.all()"`` is
    fifteen. model: specs, such as ``"VSE++(width=512)"``. grid: ``key=[value, value]``; each objective and model is tried with every one and
    stands in the table with the one that is best on validation. seeds: 1 to so many, the same for all: batches come in the same order. budget:
    such as ``"30m"``; the better half by validation goes on after 1, 2, 4, ... seeds. judgements: the file in which ``visavis serve`` keeps what
    people said, as another test beside the captions: of the images of the test split alone, and nothing is chosen by it. out: a new folder,
    default ``runs/compare-<n>``, with ``report.html``, ``table.md``, ``comparison.json`` and all runs. resume: such a folder to go on with, also
    with more seeds or other judgements, for which nothing is trained again. trec: also ranked lists and right answers as TREC files, for
    ir_measures, ranx and others. engine, workers: so many runs at once, default one for each core; ``"ray"``: on a cluster (``RAY_ADDRESS``)
    whose machines all see the folder. A run computes with one thread, unless ``training.threads`` says otherwise.
    Raises RecipeError, DataError, RunError; Stopped after Ctrl-C, once everything is saved.
    """
    from visavis.comparison.comparing import begin_comparison, continue_comparison, plan_of
    from visavis.comparison.race import parse_budget
    from visavis.comparison.workers import Workers
    from visavis.training.recipe_files import read_recipe
    from visavis.verbs.runs import chosen_recipe

    told, by = progress or Silent(), Workers(engine, workers)
    budget_s, votes = None if budget is None else parse_budget(budget), None if judgements is None else Path(judgements)
    if resume is not None:
        if any((recipe, objective, model, grid, data, out, overrides)):
            raise RunError(
                "a comparison that goes on keeps its recipe, settings and folder: give --resume with --seeds, --budget, --judgements or workers alone."
            )
        return _reported(continue_comparison(Path(resume), seeds, by, told, judgements=votes, budget_s=budget_s), told, trec=trec)
    name, settings = chosen_recipe(recipe, overrides, told, data=data)
    objectives, models, points = ([given] if isinstance(given, str) else given for given in (objective, model, grid))
    plan = plan_of(read_recipe(name, settings), (objectives, models, points), SEEDS if seeds is None else seeds, race=budget is not None)
    comparison = begin_comparison(plan, None if out is None else Path(out), by, told, judgements=votes, budget_s=budget_s)
    return _reported(comparison, told, trec=trec)


def _reported(comparison: Comparison, progress: Progress, *, trec: bool) -> Comparison:
    """The comparison, once its report and lists are written; a sentence where pictures cannot be drawn."""
    from visavis.comparison.queries import write_lists
    from visavis.report.choice import write_report

    if trec:
        write_lists(comparison, progress)

    try:
        write_report(comparison, progress)
    except MissingExtra as missing:
        progress.say(str(missing))
    return comparison


def reproduce(
    table: str | None = None,
    *,
    rows: str | Sequence[str] = (),
    base: str | None = None,
    seeds: int | None = None,
    out: str | Path | None = None,
    overrides: dict[str, Any] | Sequence[str] = (),
    resume: str | Path | None = None,
    engine: Engine = "local",
    workers: int | None = None,
    progress: Progress | None = None,
) -> Reproduction:
    """Train the rows of a paper's table, and set what they reach beside what was published.

    table: such as ``"goal/3"``; ``visavis catalog recipes`` lists them. rows: names or patterns such as ``"r152-con-*"``; default all. base: a
    recipe that stands for those of the rows, of which the objective and the supervision are taken: for other data than the paper's, such as
    ``"heads-flickr8k"``; it is said above the table, with the rank correlation of both orders. seeds: default as many runs as the paper averages.
    overrides: as of ``train``, for all rows, or for the base. out, resume, engine, workers: as of ``compare``. Raises RecipeError, DataError,
    RunError; Stopped after Ctrl-C, once everything is saved.
    """
    from visavis.comparison.reproducing import begin_reproduction, continue_reproduction
    from visavis.comparison.workers import Workers
    from visavis.training.overrides import parse_override

    told, by = progress or Silent(), Workers(engine, workers)
    if resume is not None:
        if any((table, rows, base, out, overrides)):
            raise RunError("a table that goes on keeps its rows, base and folder: give --resume with --seeds or workers alone.")
        return continue_reproduction(Path(resume), seeds, by, told)
    if table is None:
        raise RunError("no table is named: give one, such as goal/3, or --resume FOLDER; visavis catalog recipes lists them.")
    settings = dict(overrides) if isinstance(overrides, dict) else dict(parse_override(text) for text in overrides)
    patterns = [rows] if isinstance(rows, str) else rows
    return begin_reproduction(table, patterns, base or "", settings, seeds, None if out is None else Path(out), by, told)
