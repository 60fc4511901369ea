"""API functions that train, load and evaluate models: single runs, comparisons and reproductions of
published tables.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, overload

from visavis.api.arguments import (
    as_text,
    optional_path,
    optional_text,
    parse_overrides,
    read_bank,
    read_lines,
    resolve_recipe,
    to_list,
    to_paths,
)
from visavis.core.errors import DataError, RecipeError, RunError
from visavis.core.memory_budget import MemoryLimit
from visavis.core.progress import NoProgress, Progress

if TYPE_CHECKING:
    from visavis.data import Dataset
    from visavis.evaluation import Evaluation
    from visavis.evaluation.classification import ZeroShotResult
    from visavis.evaluation.feedback_metrics import FeedbackEvaluation
    from visavis.models.retriever import Retriever
    from visavis.papers.reproduction.reproduced_figure import ReproducedFigure
    from visavis.papers.reproduction.reproduction import Reproduction
    from visavis.research.experiments.comparison_result import Comparison
    from visavis.training.runs.mine_negatives import MiningReport
    from visavis.training.training_plan import TrainingPlan
    from visavis.training.training_run import TrainingResult

DEFAULT_SEEDS = 5
"""Seeds per setting of a comparison."""


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
        feedback: Feedback file of visavis serve to train on. Default: none.
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
    from visavis.training.training_plan import resolve
    from visavis.training.training_run import resume_training, start_training

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


def evaluate(
    run: str | Path | Sequence[str | Path],
    *,
    protocol: str | Sequence[str] | None = None,
    split: str | None = None,
    data: str | Path | None = None,
    section: str | Sequence[str] | None = None,
    average: bool | None = None,
    pretrained: bool = False,
    published: str | None = None,
    feedback: str | Path | None = None,
    classes: str | Path | None = None,
    templates: str | Path | None = None,
    class_names: str | Path | None = None,
    model: str | Path | None = None,
    store: str | Path | None = None,
    trec: str | Path | None = None,
    distractors: str | Path | Sequence[str | Path] = (),
    correction: str | None = None,
    bank: str | Path | None = None,
    memory: MemoryLimit = None,
    progress: Progress | None = None,
) -> Evaluation | FeedbackEvaluation | ZeroShotResult:
    """Evaluate a run, a pretrained model, or an index with feedback. The results are recall, RSUM,
    ranks and mAP, or zero-shot accuracy.

    Several runs are evaluated as an ensemble: their scores are averaged.

    Args:
        run: Run folder, folder or hub name of a pretrained model, or index with --feedback.
        protocol: Evaluation protocol, see visavis catalog protocols. Default: the recipe's, or
            plain on other data. With +equal-texts at its end, images with the same caption are
            positives of it.
        split: Split. Default: the test split of the recipe.
        data: Data set. Default: the run's.
        section: Further part of the result, see visavis catalog sections, such as
            "Coherence(relevance='CBoW()')" for CS@K and nDCG@K. Default: the recipe's.
        average: Average the scores of both networks if a run trained two. Default: the recipe's.
        pretrained: Also evaluate the pretrained model that the training started from.
        published: Row of a paper's table to compare with, such as unified/2/clip-coco. Default: the
            run's own.
        feedback: Feedback file of visavis serve. Evaluates an index. Default: none.
        classes: Folder with a subfolder of images for each class. Evaluates zero-shot accuracy.
            Default: none.
        templates: File with one prompt per line for --classes, with {} in place of the class.
            Default: the prompt a photo of a {}.
        class_names: File for --classes with a folder and the name of its class in each line.
            Default: the names of the folders, with spaces for _ and -.
        model: New location of the model of an index. Default: the recorded one.
        store: Confirms the store of an index outside its folder. Default: only a store inside.
        trec: Also write ranked lists and ground truth as TREC files into this new folder. Default:
            none.
        distractors: Folder or data set whose images are candidates and not queries, or .txt file
            with one text per line. Images of the evaluated split are left out. Default: none.
        correction: Correction of the scores for hubs, such as "QueryBankNorm()", see visavis catalog
            corrections. Default: none.
        bank: Queries that --correction learns from: a split, a .txt file with one text per line, or
            queries for the test queries (transductive). Default: train.
        memory: Maximum memory of score blocks, such as 2GiB. Default: the recipe's, else a share of
            the free memory.
        progress: Receives the progress.

    Returns:
        Metrics in percent. ``other_protocols`` has the results of further protocols. With
        ``feedback``, recall of the judged queries. With ``classes``, accuracies of all images and
        of each class.

    Raises:
        DataError: If the data do not suit the protocol, or the feedback has no relevant item.
        RefusedOverwrite: If ``trec`` has files of this run, or of other queries.
        RunError: If the folder is not a run, or runs are of different data.
        VisavisError: If an option is not for this kind of evaluation.

    Command line:
        ```sh
        visavis evaluate runs/mine
        visavis evaluate runs/mine runs/other --split val
        visavis evaluate index --feedback votes.jsonl
        visavis evaluate runs/mine --distractors photos
        visavis evaluate runs/mine --correction "QueryBankNorm()" --bank train
        visavis evaluate runs/mine --classes photos_by_species
        ```
    """
    correction = as_text(correction)
    options = {
        "protocol": protocol,
        "split": split,
        "data": data,
        "section": section,
        "published": published,
        "trec": trec,
        "distractors": distractors or None,
        "correction": correction,
        "bank": bank,
    }
    unused = [name for name, value in options.items() if value is not None]
    if classes is not None:
        options = {"feedback": feedback, "average": average, "model": model, "store": store}
        unused += [name for name, value in options.items() if value is not None]
        unused += ["pretrained"] * pretrained
        if unused:
            raise RunError(
                f"--classes: expected a run or a model without {unused[0]}. Remove --{unused[0]}."
            )
        return _evaluate_classes(
            to_paths(run), Path(classes), templates, class_names, memory, progress or NoProgress()
        )
    for name, value in (("templates", templates), ("class-names", class_names)):
        if value is not None:
            raise RunError(f"--{name}: expected it with --classes, got no --classes. Pass both.")
    if feedback is not None:
        if unused:
            raise RunError(
                f"--feedback: expected an index without {unused[0]}. Remove --{unused[0]}."
            )
        return _evaluate_index(to_paths(run), Path(feedback), model, store, memory)
    from visavis.evaluation.corrections import parse_correction
    from visavis.retrieval.index_folder import is_index
    from visavis.training.evaluation.result_sections import named_section
    from visavis.training.recipes.published_tables import measured_result
    from visavis.training.runs.evaluate_runs import evaluate_runs, with_base_model
    from visavis.training.runs.open_run import read_run_recipe

    for name, value in (("model", model), ("store", store)):
        if value is not None:
            raise RunError(
                f"--{name}: expected an index with --feedback, got no --feedback. Pass it, or "
                f"remove --{name}."
            )
    if index := next((folder for folder in to_paths(run) if is_index(folder)), None):
        raise RunError(
            f"{index}: expected a run or a model, got an index. Pass --feedback FILE to evaluate "
            "an index."
        )
    if bank is not None and correction is None:
        raise RunError("--bank: expected it with --correction, got no --correction. Pass both.")
    corrected: dict[str, Any] = {}
    if correction is not None:
        corrected = {"correction": parse_correction(correction), "bank": read_bank(bank or "train")}
    row = None if published is None else measured_result(published)
    runs = to_paths(run)
    data = optional_text(data)
    progress = progress or NoProgress()
    added: list[Dataset] = []
    if distractors:
        frame_rate = max(read_run_recipe(each, data).visual.frames_per_second for each in runs)
        added = [_read_distractors(path, frame_rate, progress) for path in to_paths(distractors)]
    result = evaluate_runs(
        runs,
        protocol,
        split,
        data,
        progress,
        None if section is None else [named_section(text) for text in to_list(section) if text],
        memory,
        average_networks=average,
        trec=optional_path(trec),
        distractors=added,
        **corrected,
    )
    result = result if row is None else replace(result, published=row)
    if not pretrained:
        return result
    return with_base_model(
        result, runs, split, data, progress, memory, distractors=added, **corrected
    )


def _read_distractors(path: Path, frames_per_second: float, progress: Progress) -> Dataset:
    """The images of a folder or data set, or the texts of a file."""
    from visavis.data.dataset import Image, without_captions
    from visavis.data.dataset_reader import list_dataset
    from visavis.retrieval.run_images import open_image_collection
    from visavis.training.evaluation.ranked_split import without_images

    if path.suffix == ".txt":
        if not (texts := read_lines(path)):
            raise DataError(f"{path}: expected one text per line, got an empty file. Add texts.")
        none = without_captions(str(path), ())
        return replace(none, unpaired=(without_images(str(path), texts),))
    try:
        data = open_image_collection(path, frames_per_second)
    except DataError:
        # A list or archive without any caption is not a data set, but has images.
        with suppress(DataError):
            listed = list_dataset(path).images
            if files := [each for each in listed if each.location is not None]:
                images = [Image(each.name, each.split or "", each.location) for each in files]
                return without_captions(str(path), images)
        raise
    for skipped in data.skipped:
        progress.message(f"Skipped: {skipped}")
    return replace(data, name=str(path))


def _evaluate_classes(
    runs: Sequence[Path],
    classes: Path,
    templates: str | Path | None,
    class_names: str | Path | None,
    memory: MemoryLimit,
    progress: Progress,
) -> ZeroShotResult:
    """Evaluate the zero-shot accuracy of a model on a folder of classes."""
    from visavis.models.retriever import Retriever
    from visavis.retrieval.zero_shot import (
        DEFAULT_TEMPLATE,
        evaluate_zero_shot,
        read_class_names,
        read_templates,
    )

    if len(runs) != 1:
        raise RunError(
            f"--classes: expected one run or model, got {len(runs)}. Evaluate each alone."
        )
    prompts = [DEFAULT_TEMPLATE] if templates is None else read_templates(templates)
    names = None if class_names is None else read_class_names(class_names)
    model = Retriever.load(runs[0], memory=memory)
    return evaluate_zero_shot(model, classes, prompts, progress, names)


def _evaluate_index(
    indexes: Sequence[Path],
    feedback: Path,
    model: str | Path | None,
    store: str | Path | None,
    memory: MemoryLimit,
) -> FeedbackEvaluation:
    """Evaluate an index with the judgments of a feedback file."""
    from visavis.retrieval.feedback_evaluation import evaluate_feedback
    from visavis.retrieval.open_index import open_index
    from visavis.retrieval.search import SearchQuery

    if len(indexes) != 1:
        raise RunError(
            f"--feedback: expected one index, got {len(indexes)}. Evaluate each index alone."
        )
    opened = open_index(indexes[0], model=model, store=store, memory=memory)
    table = opened.store.table()
    contents = dict(zip(table["key"].to_pylist(), table["content"].to_pylist(), strict=True))
    result = evaluate_feedback(
        feedback,
        contents,
        lambda text: opened.neighbors(
            opened.encode_query(SearchQuery.from_text(text)), len(contents)
        ),
        f"the index {opened.folder}",
    )
    correction = opened.correction
    return replace(result, correction=str(correction.settings)) if correction else result


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
    model: str | Sequence[str] = (),
    grid: str | Sequence[str] = (),
    seeds: int | None = None,
    tune: bool = True,
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
    """Compare objectives, models and settings, with intervals. All train on one data set with several
    seeds, and their differences are tested.

    All settings have the same seeds, batches and number of tried learning rates, which validation
    selects. A run computes with one thread unless ``training.threads`` is set.

    Args:
        recipe: TOML file or name of a shipped recipe. Default: chosen from the encoders available.
        objective: Objective, such as "Unified()". "Goal.all()" is fifteen.
        model: Model, such as "VSE++(embedding_dim=512)".
        grid: Values of a recipe key, such as "phases.0.optimizer.lr=[3e-4, 1e-3]". The best on
            validation is reported.
        seeds: Number of seeds per setting. Default: 5.
        tune: Select the learning rate of each setting first. Takes less time than the runs. A grid
            of learning rates replaces it.
        budget: Training time, such as 30m: after 1, 2, 4, ... seeds the better half continues.
            Default: no limit.
        data: Data set. Default: the recipe's.
        feedback: Feedback file of visavis serve as a second test. It is not used for any choice.
            Default: none.
        out: New folder. Default: ``runs/compare-<n>``.
        overrides: Recipe overrides for all runs, such as epochs=4.
        resume: Folder of a comparison to continue, also with more --seeds or new --feedback.
            Default: a new one.
        trec: Also write ranked lists and ground truth as TREC files.
        engine: Run locally, or on a Ray cluster whose machines share the folder.
        workers: Number of runs at once. Default: one per core.
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
        visavis compare --data photos/ --objective "Unified()" --objective "VLC()" --seeds 3 --out comparison
        visavis compare --resume comparison --seeds 5
        ```
    """
    from visavis.research.experiments.comparison_report import (
        write_comparison_report,
        write_trec_files,
    )
    from visavis.research.experiments.jobs import Workers
    from visavis.research.experiments.run_comparison import (
        finished_runs_kept,
        parse_budget,
        plan_comparison,
        resume_comparison,
        start_comparison,
    )
    from visavis.training.recipes.files import read_recipe

    progress = progress or NoProgress()
    pool = Workers(engine, workers)
    budget_s = None if budget is None else parse_budget(budget)
    feedback = optional_path(feedback)
    if resume is not None:
        if any((recipe, objective, model, grid, data, out, overrides)):
            raise RunError(
                "--resume: expected only --seeds, --budget, --feedback, --engine and --workers, as "
                "a comparison keeps its settings. "
                "Remove the other options."
            )
        comparison = resume_comparison(
            Path(resume), seeds, pool, progress, feedback=feedback, budget_s=budget_s
        )
    else:
        name, settings = resolve_recipe(recipe, overrides, progress, data=data)
        _require_no_seed([*settings, *(text.partition("=")[0].strip() for text in to_list(grid))])
        plan = plan_comparison(
            read_recipe(name, settings),
            (to_list(objective), to_list(model), to_list(grid)),
            DEFAULT_SEEDS if seeds is None else seeds,
            successive_halving=budget is not None,
            tune=tune,
        )
        comparison = start_comparison(
            plan, optional_path(out), pool, progress, feedback=feedback, budget_s=budget_s
        )
    with finished_runs_kept(comparison.folder):
        if trec:
            write_trec_files(comparison, progress)
        write_comparison_report(comparison, progress)
    return comparison


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
    engine: Literal["local", "ray"] = "local",
    workers: int | None = None,
    progress: Progress | None = None,
) -> Reproduction | ReproducedFigure:
    """Train the rows of a paper's table, and compare the results. The report has the published ones.
    For a figure, plot its curves.

    Rows that count contributing samples are diagnosed after their training. Rows of a pretrained
    model are evaluated without training.

    Args:
        table: Table of a paper, such as goal/3, or figure, such as unified/figure-3, see visavis
            catalog recipes. Default: the table of --resume.
        rows: Name of a row, or a pattern such as 'r152-con-*'. Default: all.
        base_recipe: Recipe for other data than the paper's, trained with each row's objective.
            Default: the rows' recipes.
        seeds: Number of seeds per row. Default: as many runs as the paper averages.
        out: New folder. Default: ``runs/<paper>-<table>-<n>``.
        overrides: Recipe overrides for all rows, such as epochs=4.
        resume: Folder of a reproduction to continue, also with more --seeds. Default: a new one.
        engine: Run locally, or on a Ray cluster whose machines share the folder.
        workers: Number of runs at once. Default: one per core.
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
    pool = Workers(engine, workers)
    if resume is not None:
        if any((table, rows, base_recipe, out, overrides)):
            raise RunError(
                "--resume: expected only --seeds, --engine and --workers, as a reproduction keeps "
                "its rows and recipe. "
                "Remove the other options."
            )
        return resume_reproduction(Path(resume), seeds, pool, progress)
    if table is None:
        raise RunError(
            "table: expected a table such as goal/3, got none. Choose one of visavis catalog "
            "recipes, or pass --resume FOLDER."
        )
    settings = parse_overrides(overrides)
    _require_no_seed([*settings])
    return start_reproduction(
        table, to_list(rows), base_recipe or "", settings, seeds, optional_path(out), pool, progress
    )
