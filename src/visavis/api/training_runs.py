"""API functions that train, load and evaluate models: single runs, comparisons and reproductions of
published tables.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, overload

from visavis.api.arguments import (
    optional_path,
    optional_text,
    parse_overrides,
    parse_workers,
    recipe_keys,
    resolve_recipe,
    to_list,
)
from visavis.core.errors import RecipeError, RunError, format_value
from visavis.core.memory_budget import MemoryLimit
from visavis.core.progress import NoProgress, Progress

if TYPE_CHECKING:
    from visavis.models.retriever import Retriever
    from visavis.papers.reproduction.reproduced_figure import ReproducedFigure
    from visavis.papers.reproduction.reproduction import Reproduction
    from visavis.research.experiments.comparison_result import Comparison
    from visavis.research.experiments.model_costs import CostLimits
    from visavis.training.runs.mine_negatives import MiningReport
    from visavis.training.training_run import TrainingPlan, TrainingResult

DEFAULT_SEEDS = 5
"""Seeds per setting of a comparison."""
MAX_MINUTES = 100_000
"""Maximum time of a comparison, about ten weeks."""


@overload
def train(
    recipe: str | Path | None = ...,
    *,
    data: str | Path | None = ...,
    index: str | Path | None = ...,
    feedback: str | Path | None = ...,
    out: str | Path | None = ...,
    overrides: dict[str, Any] | Sequence[str] = ...,
    resume: str | Path | None = ...,
    skip_bad: bool = ...,
    dry_run: Literal[False] = ...,
    progress: Progress | None = ...,
) -> TrainingResult: ...


@overload
def train(
    recipe: str | Path | None = ...,
    *,
    data: str | Path | None = ...,
    index: str | Path | None = ...,
    feedback: str | Path | None = ...,
    out: str | Path | None = ...,
    overrides: dict[str, Any] | Sequence[str] = ...,
    resume: str | Path | None = ...,
    skip_bad: bool = ...,
    dry_run: Literal[True],
    progress: Progress | None = ...,
) -> TrainingPlan: ...


def train(
    recipe: str | Path | None = None,
    *,
    data: str | Path | None = None,
    index: str | Path | None = None,
    feedback: str | Path | None = None,
    out: str | Path | None = None,
    overrides: dict[str, Any] | Sequence[str] = (),
    resume: str | Path | None = None,
    skip_bad: bool = False,
    dry_run: bool = False,
    progress: Progress | None = None,
) -> TrainingResult | TrainingPlan:
    """Train a model into a run folder and evaluate it. Ctrl-C saves a checkpoint, and --resume
    continues.

    Under ``torchrun``, all processes train one model on the same batches as one process.

    Args:
        recipe: TOML file or name of a shipped recipe. Default: fine-tune CLIP, else chosen from the
            available encoders. With ``index``: the text
            side of its model.
        data: Data set. Default: the recipe's.
        index: Index, Parquet file or .npy array with item vectors. Only the text side is trained,
            for these vectors, and no image is read. Default: train both sides.
        feedback: Index whose votes are trained on, or file of ``visavis indexes export-votes``. Default:
            none.
        out: New run folder. Default: ``runs/<recipe>-<n>``.
        overrides: Recipe overrides, such as objective='VLC()' training.batch_size=64.
        resume: Folder of a stopped run to continue. Takes no other option. Default: a new run.
        skip_bad: Leave out broken images and captions, and list them.
        dry_run: Check the recipe, read the data and print the plan, without training.
        progress: Receives the progress.

    Returns:
        The run folder, validation RSUM and test metrics. The plan with ``dry_run``.

    Raises:
        DataError: If the data cannot be read.
        RecipeError: If the recipe has an unknown key or an invalid value.
        RefusedOverwrite: If ``out`` is a file or a folder with other content.
        RunError: If ``out`` is a run already, or if other options are given with ``resume``.
        Stopped: After Ctrl-C, once everything is saved.
        ReportedByOtherProcess: If another process of the training fails or was stopped.

    Example:
        >>> run = visavis.train("heads-flickr8k", overrides={"training.batch_size": 64})  # doctest: +SKIP

    Command line:
        ```sh
        visavis train --data photos/ --dry-run
        visavis train --data photos/ --out runs/mine
        visavis train heads-flickr8k epochs=4 training.batch_size=64
        visavis train --index indexes/photos --data new-captions/ --out runs/new-words
        visavis train --resume runs/mine
        ```
    """
    from visavis.core.run_context import RunContext
    from visavis.training.processes import can_restart, join_processes, restarted
    from visavis.training.recipes.files import read_recipe
    from visavis.training.runs.run_folder import RunFolder
    from visavis.training.training_run import resolve, resume_training, start_training

    with join_processes() as group:
        progress = progress if progress is not None and group.is_first else NoProgress()
        context = RunContext(progress, group)
        if resume is not None:
            if any((overrides, skip_bad, dry_run, data, index, feedback, out, recipe)):
                raise RunError(
                    "--resume: expected the run folder alone, as a run keeps its recipe and data. "
                    "Remove the other options."
                )
            return resume_training(Path(resume), context)
        if out is None and can_restart():
            raise RunError(
                "--out: expected a run folder, which a restarted training resumes, got none. Pass "
                "--out RUN."
            )
        # torchrun counts the restarts of each machine. Rank 0 decides, because it creates the run
        # while the others still start.
        if (
            out is not None
            and group.any_rank(restarted())
            and group.broadcast_text("run" if RunFolder(Path(out)).is_run else "")
        ):
            return resume_training(Path(out), context)
        name, settings = resolve_recipe(
            recipe,
            overrides,
            progress,
            data=data,
            index=index,
            feedback=feedback,
            skip_bad=skip_bad,
            can_download=True,
        )
        plan = resolve(read_recipe(name, settings), context)
        if plan.baselines:
            raise RecipeError(
                f"{plan.baselines[0]} Set another objective, or remove the supervision."
            )
        return plan.open_data(context) if dry_run else start_training(plan, out, context)


def load(
    path: str | Path, *, device: str | None = None, batch_size: int = 64, memory: MemoryLimit = None
) -> Retriever:
    """Load the model of a run, or a pretrained model.

    Args:
        path: Run folder, or folder or hub name of a pretrained model.
        device: Device of the model. Default: CUDA or an Apple GPU if available, else the CPU.
        batch_size: Items that are encoded at once.
        memory: Maximum memory of score blocks, in bytes or such as 2GiB. Default: a share of the
            free memory.

    Returns:
        A model with ``encode_images(paths)``, ``encode_texts(texts)`` and ``score(paths, texts)``.

    Raises:
        RunError: If the folder has no model.
    """
    from visavis.models.retriever import Retriever

    return Retriever.load(path, device=device, batch_size=batch_size, memory=memory)


def data_mine(
    run: str | Path,
    *,
    data: str | Path | None = None,
    split: str = "train",
    num_negatives: int = 10,
    max_ratio: float = 0.95,
    guide: str | Path | None = None,
    preselect: int = 200,
    out: str | Path | None = None,
    memory: MemoryLimit = None,
    progress: Progress | None = None,
) -> MiningReport:
    """List the hardest negatives of each image and caption. Likely false negatives are left out. A
    training reads the file.

    Captions of the same image are never negatives. Train with ``supervision =
    "MinedNegativeSupervision(file='FILE')"`` in a phase.

    Args:
        run: Run folder, or folder or hub name of a pretrained model, whose scores define what
            is hard.
        data: Data set. Default: the run's.
        split: Split to mine.
        num_negatives: Number of negatives of each query.
        max_ratio: Share of the score of its positives that a negative may reach. Others are dropped
            as likely false negatives. 0: keep all.
        guide: Run or model whose scores find likely false negatives. Default: ``run``.
        preselect: Number of candidates of a query that an attention model scores: those with the
            nearest mean of regions and words. 0: all.
        out: New file. Default: ``negatives-<n>.safetensors`` in the run folder, or in the current
            folder for a pretrained model.
        memory: Maximum memory of score blocks, such as 2GiB. Default: the recipe's, else a share of
            the free memory.
        progress: Receives the progress.

    Returns:
        The file, numbers of negatives and of dropped ones, and examples.

    Raises:
        DataError: If the data set has no such split.
        RefusedOverwrite: If the file exists, or appears during mining. The negatives are then in a
            numbered file.
        RunError: If the run does not exist, the guide reads other data, or no negative remains.
        VisavisError: If a number is not valid.

    Command line:
        ```sh
        visavis data mine runs/mine
        visavis data mine openai/clip-vit-base-patch32 --data photos/ --max-ratio 0.9 --out negatives.safetensors
        ```
    """
    from visavis.core.fields import validate_int
    from visavis.training.runs.mine_negatives import mine_run

    validate_int(num_negatives, "num_negatives", 1)
    validate_int(preselect, "preselect", 0)
    if not 0 <= max_ratio <= 1:
        raise RunError(
            f"max_ratio: expected a number from 0 to 1, got {max_ratio:g}. Set 0.95, or 0 to keep "
            "all negatives."
        )
    if guide is not None and not max_ratio:
        raise RunError(
            f"guide: expected none with max_ratio 0, which keeps all negatives, got {guide}. Set "
            "max_ratio, or remove guide."
        )
    return mine_run(
        Path(run),
        optional_path(out),
        data=optional_text(data),
        split=split,
        num_negatives=num_negatives,
        max_ratio=max_ratio,
        guide=optional_path(guide),
        preselect=preselect,
        memory=memory,
        progress=progress or NoProgress(),
    )


def compare(
    recipe: str | Path | None = None,
    *,
    objective: str | Sequence[str] = (),
    grid: str | Sequence[str] = (),
    seeds: int | None = None,
    minutes: float | None = None,
    max_query_ms: float | None = None,
    max_item_bytes: float | None = None,
    tune: bool = True,
    data: str | Path | None = None,
    feedback: str | Path | None = None,
    out: str | Path | None = None,
    overrides: dict[str, Any] | Sequence[str] = (),
    resume: str | Path | None = None,
    workers: int | str | None = None,
    progress: Progress | None = None,
) -> Comparison:
    """Compare objectives, models and settings, with intervals. All train on one data set with several
    seeds, and their differences are tested.

    All settings have the same seeds, batches and number of tried learning rates, which validation
    selects. A run computes with one thread unless ``training.threads`` is set.

    With ``minutes``, no list is needed: all objectives that need only captions, with the default
    recipes of the encoders on this machine, are trained briefly, the better ones longer, and the best few are
    compared with fresh seeds, the better ones with more. Each seed draws its validation images from
    training and validation. The result names the expected regret of the choice.

    Args:
        recipe: TOML file or name of a shipped recipe. Default: chosen from the encoders available.
        objective: Objective, such as "Unified()". "Goal.all()" is fifteen. Default: the recipe's, or
            with ``minutes`` and without ``grid`` all that need only captions.
        grid: Values of a recipe key, such as "phases.0.optimizer.lr=[3e-4, 1e-3]", of which the best
            on validation is reported. Models such as "model=['VSE++()', 'VSEInfinity()']" are
            compared as objectives are.
        seeds: Number of seeds per setting. Default: 5, or with ``minutes`` as many as fit.
        minutes: Time for everything. Default: as long as the seeds take.
        max_query_ms: With ``minutes``, leave out models that need more milliseconds for a query.
            Default: any.
        max_item_bytes: With ``minutes``, leave out models whose images take more bytes. Default: any.
        tune: Select the learning rate of each setting first. Takes less time than the runs. A grid
            of learning rates replaces it.
        data: Data set. Default: the recipe's.
        feedback: Index whose votes are a second test, or file of ``visavis indexes export-votes``. They are
            not used for any choice.
            Default: none.
        out: New folder. Default: ``runs/compare-<n>``.
        overrides: Recipe overrides for all runs, such as epochs=4.
        resume: Folder of a comparison to continue, also with more --seeds, more --minutes or new
            --feedback. Default: a new one.
        workers: Number of runs at once, or ray:NUMBER on a Ray cluster whose machines share the
            folder. Default: one per core.
        progress: Receives the progress.

    Returns:
        Results, tests and findings. The folder has ``report.html``, ``table.md``,
        ``comparison.json`` and all runs.

    Raises:
        DataError: If the data cannot be read.
        RecipeError: If the recipe has an unknown key or an invalid value.
        RunError: If options are given that a resumed comparison keeps.
        Stopped: After Ctrl-C, once everything is saved.

    Command line:
        ```sh
        visavis compare --data photos/ --minutes 30
        visavis compare --data photos/ --objective "Unified()" --objective "VLC()" --seeds 3 --out comparison
        visavis compare --resume comparison --seeds 5
        ```
    """
    from visavis.research.experiments.candidates import candidate_objectives
    from visavis.research.experiments.comparison_report import write_comparison_report
    from visavis.research.experiments.jobs import Workers
    from visavis.research.experiments.model_costs import CostLimits
    from visavis.research.experiments.run_comparison import (
        finished_runs_kept,
        join_plans,
        plan_comparison,
        resume_comparison,
        start_comparison,
    )
    from visavis.training.recipes.default_recipe import installed_recipes
    from visavis.training.recipes.files import read_recipe

    progress = progress or NoProgress()
    pool = Workers(*parse_workers(workers))
    limits = CostLimits(max_query_ms, max_item_bytes)
    minutes = _check_minutes(minutes, seeds, limits)
    feedback = optional_path(feedback)
    if resume is not None:
        if any((recipe, objective, grid, data, out, overrides)) or limits != CostLimits():
            raise RunError(
                "--resume: expected only --seeds, --minutes, --feedback and --workers, as a comparison "
                "keeps its settings. Remove the other options."
            )
        comparison = resume_comparison(
            Path(resume), seeds, pool, progress, feedback=feedback, minutes=minutes
        )
    else:
        models, others = _split_models(to_list(grid))
        objectives = to_list(objective)
        if minutes and not (objectives or models or others):
            objectives = list(candidate_objectives())
        if minutes and recipe is None and not models:
            keys = recipe_keys(overrides, data=data)
            recipes: list[tuple[str | Path, dict[str, Any]]] = [
                (one.name, one.overrides | keys) for one in installed_recipes(keys, progress)
            ]
        else:
            recipes = [resolve_recipe(recipe, overrides, progress, data=data)]
        _require_no_seed([*recipes[0][1], *(text.partition("=")[0].strip() for text in others)])
        plans = [
            plan_comparison(
                read_recipe(name, settings),
                (objectives, models, others),
                DEFAULT_SEEDS if seeds is None else seeds,
                minutes=minutes,
                limits=limits,
                tune=tune,
            )
            for name, settings in recipes
        ]
        comparison = start_comparison(
            join_plans(plans),
            optional_path(out),
            pool,
            progress,
            feedback=feedback,
        )
    with finished_runs_kept(comparison.folder):
        write_comparison_report(comparison, progress)
    return comparison


def _check_minutes(minutes: float | None, seeds: int | None, limits: CostLimits) -> float:
    """The time of a comparison, 0 without one. Its options exclude or need each other."""
    if minutes is None:
        if limits.max_query_ms or limits.max_item_bytes:
            raise RunError(
                "--max-query-ms, --max-item-bytes: expected --minutes with them, got none. A given "
                "list is compared as it is. Add --minutes, or remove them."
            )
        return 0.0
    if not 0 < minutes < MAX_MINUTES:
        raise RunError(
            f"minutes: expected a number above 0 and below {MAX_MINUTES:,}, got "
            f"{format_value(minutes)}. Pass a time in minutes."
        )
    if seeds is not None:
        raise RunError(
            "--seeds, --minutes: expected one of them, got both. The time decides the seeds. Remove "
            "one of them."
        )
    return float(minutes)


def _split_models(grid: Sequence[str]) -> tuple[list[str], list[str]]:
    """The models of a grid, which are compared, and its other keys."""
    from visavis.training.recipes.recipe import parse_override

    models = list[str]()
    others = list[str]()
    for text in grid:
        key, values = parse_override(text)
        if key != "model":
            others.append(text)
        elif isinstance(values, list) and values and all(isinstance(each, str) for each in values):
            models += values
        else:
            raise RecipeError(
                f"grid: expected a list of models, got {text!r}. Write it as "
                "model=['VSE++()', 'VSEInfinity()']."
            )
    return models, others


def _require_no_seed(keys: Sequence[str]) -> None:
    if "seed" in keys:
        raise RecipeError(
            "seed: expected none, because every setting is trained with seeds 1, 2, ... Remove it, "
            "and set --seeds."
        )


def papers_reproduce(
    table: str | None = None,
    *,
    rows: str | Sequence[str] = (),
    base_recipe: str | None = None,
    seeds: int | None = None,
    out: str | Path | None = None,
    overrides: dict[str, Any] | Sequence[str] = (),
    resume: str | Path | None = None,
    workers: int | str | None = None,
    progress: Progress | None = None,
) -> Reproduction | ReproducedFigure:
    """Train the rows of a paper's table, and compare the results. The report has the published ones.
    For a figure, plot its curves.

    Rows that count contributing samples are diagnosed after their training. Rows of a pretrained
    model are evaluated without training.

    Args:
        table: Table of a paper, such as goal/3, or figure, such as unified/figure-3, see visavis
            papers list. Default: the table of --resume.
        rows: Name of a row, or a pattern such as 'r152-con-*'. Default: all.
        base_recipe: Recipe for other data than the paper's, trained with each row's objective.
            Default: the rows' recipes.
        seeds: Number of seeds per row. Default: as many runs as the paper averages.
        out: New folder. Default: ``runs/<paper>-<table>-<n>``.
        overrides: Recipe overrides for all rows, such as epochs=4.
        resume: Folder of a reproduction to continue, also with more --seeds. Default: a new one.
        workers: Number of runs at once, or ray:NUMBER on a Ray cluster whose machines share the
            folder. Default: one per core.
        progress: Receives the progress.

    Returns:
        Published and reached results with their differences, or the points of the curves.

    Raises:
        DataError: If the data cannot be read.
        RecipeError: If a row or a key is unknown.
        RunError: If no table is named, or options are given that a resumed reproduction keeps.
        Stopped: After Ctrl-C, once everything is saved.

    Command line:
        ```sh
        visavis papers reproduce goal/3 --base-recipe heads-flickr8k --seeds 3
        visavis papers reproduce unified/figure-3 --base-recipe heads-flickr8k
        ```
    """
    from visavis.papers.reproduction.reproduction import resume_reproduction, start_reproduction
    from visavis.research.experiments.jobs import Workers

    progress = progress or NoProgress()
    pool = Workers(*parse_workers(workers))
    if resume is not None:
        if any((table, rows, base_recipe, out, overrides)):
            raise RunError(
                "--resume: expected only --seeds and --workers, as a reproduction keeps "
                "its rows and recipe. "
                "Remove the other options."
            )
        return resume_reproduction(Path(resume), seeds, pool, progress)
    if table is None:
        raise RunError(
            "table: expected a table such as goal/3, got none. Choose one of visavis papers "
            "list, or pass --resume FOLDER."
        )
    settings = parse_overrides(overrides)
    _require_no_seed([*settings])
    return start_reproduction(
        table, to_list(rows), base_recipe or "", settings, seeds, optional_path(out), pool, progress
    )
