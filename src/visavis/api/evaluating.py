"""API functions that evaluate the retrieval of runs and pretrained models."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from visavis.api.arguments import (
    as_text,
    optional_path,
    optional_text,
    read_bank,
    read_lines,
    to_list,
    to_paths,
)
from visavis.core.errors import DataError, RunError
from visavis.core.memory_budget import MemoryLimit
from visavis.core.progress import NoProgress, Progress

if TYPE_CHECKING:
    from visavis.data.dataset import Dataset
    from visavis.evaluation import Evaluation
    from visavis.papers.board.board import Board
    from visavis.training.evaluation.result_sections import ResultSection


def evaluate(
    run: str | Path | Sequence[str | Path],
    *,
    protocol: str | Sequence[str] | None = None,
    split: str | None = None,
    data: str | Path | None = None,
    section: str | Sequence[str] | None = None,
    pretrained: bool = False,
    trec: str | Path | None = None,
    distractors: str | Path | Sequence[str | Path] = (),
    correction: str | None = None,
    bank: str | Path | None = None,
    memory: MemoryLimit = None,
    progress: Progress | None = None,
) -> Evaluation:
    """Evaluate a run or a pretrained model. The results are recall, RSUM, ranks and mAP.

    Several runs are evaluated as an ensemble: their scores are averaged.

    Args:
        run: Run folder, or folder or hub name of a pretrained model.
        protocol: Evaluation protocol, see visavis catalog protocols. Default: the recipe's, or
            plain on other data. With +equal-texts at its end, images with the same caption are
            positives of it.
        split: Split. Default: the test split of the recipe.
        data: Data set. Default: the run's.
        section: Further part of the result, see visavis catalog sections, such as
            "Coherence(relevance='CBoW()')" for CS@K and nDCG@K. Default: the recipe's.
        pretrained: Also evaluate the pretrained model that the training started from.
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
        Metrics in percent. ``other_protocols`` has the results of further protocols.

    Raises:
        DataError: If the data do not suit the protocol.
        RefusedOverwrite: If ``trec`` has other files of this run, or files of other queries.
        RunError: If the folder is not a run, or runs are of different data.
        VisavisError: If ``bank`` is given without ``correction``.

    Command line:
        ```sh
        visavis evaluate runs/mine
        visavis evaluate runs/mine runs/other --split val
        visavis evaluate runs/mine --distractors photos
        visavis evaluate runs/mine --correction "QueryBankNorm()" --bank train
        ```
    """
    from visavis.losses.corrections import parse_correction
    from visavis.training.runs.evaluate_runs import (
        EvaluationOptions,
        evaluate_runs,
        with_base_model,
    )
    from visavis.training.runs.open_run import read_run_recipe

    runs = _to_runs(run)
    correction = as_text(correction)
    if bank is not None and correction is None:
        raise RunError("--bank: expected it with --correction, got no --correction. Pass both.")
    parsed = None if correction is None else parse_correction(correction)
    queries = "train" if parsed is None else read_bank(bank or "train")
    data = optional_text(data)
    progress = progress or NoProgress()
    added: list[Dataset] = []
    if distractors:
        frame_rate = max(read_run_recipe(each, data).visual.frames_per_second for each in runs)
        added = [_read_distractors(path, frame_rate, progress) for path in to_paths(distractors)]
    options = EvaluationOptions(
        protocol=protocol,
        split=split,
        data=data,
        sections=_to_sections(section),
        memory=memory,
        trec=optional_path(trec),
        distractors=added,
        correction=parsed,
        bank=queries,
    )
    result = evaluate_runs(runs, options, progress)
    return with_base_model(result, runs, options, progress) if pretrained else result


def papers_evaluate(
    run: str | Path | Sequence[str | Path],
    *,
    published: str | None = None,
    average: bool | None = None,
    protocol: str | Sequence[str] | None = None,
    split: str | None = None,
    data: str | Path | None = None,
    section: str | Sequence[str] | None = None,
    memory: MemoryLimit = None,
    progress: Progress | None = None,
) -> Evaluation:
    """Evaluate a run and compare it with a row of a paper's table.

    Args:
        run: Run folder, or folder or hub name of a pretrained model. The scores of several runs are
            averaged.
        published: Row to compare with, such as unified/2/clip-coco, see visavis papers list.
            Default: the run's own.
        average: Average the scores of both networks if a run trained two, as NCR does. Default: the
            recipe's.
        protocol: Evaluation protocol, see visavis catalog protocols. Default: the recipe's, or
            plain on other data.
        split: Split. Default: the test split of the recipe.
        data: Data set. Default: the run's.
        section: Further part of the result, see visavis catalog sections. Default: the recipe's.
        memory: Maximum memory of score blocks, such as 2GiB. Default: the recipe's, else a share of
            the free memory.
        progress: Receives the progress.

    Returns:
        Metrics in percent. ``published`` has the row.

    Raises:
        DataError: If the data do not suit the protocol.
        RecipeError: If the row is unknown.
        RunError: If the folder is not a run, or runs are of different data.

    Command line:
        ```sh
        visavis papers evaluate runs/mine --published unified/2/clip-coco
        visavis papers evaluate runs/ncr --no-average
        ```
    """
    from visavis.training.recipes.published_tables import measured_result
    from visavis.training.runs.evaluate_runs import EvaluationOptions, evaluate_runs

    runs = _to_runs(run)
    row = None if published is None else measured_result(published)
    options = EvaluationOptions(
        protocol=protocol,
        split=split,
        data=optional_text(data),
        sections=_to_sections(section),
        memory=memory,
        average_networks=average,
    )
    result = evaluate_runs(runs, options, progress or NoProgress())
    return result if row is None else replace(result, published=row)


def _to_runs(run: str | Path | Sequence[str | Path]) -> list[Path]:
    """The runs and models to evaluate. An index needs feedback."""
    from visavis.retrieval.index_folder import is_index

    runs = to_paths(run)
    if index := next((folder for folder in runs if is_index(folder)), None):
        raise RunError(
            f"{index}: expected a run or a model, got an index. Evaluate it with visavis indexes "
            f"evaluate {index} FEEDBACK."
        )
    return runs


def _to_sections(section: str | Sequence[str] | None) -> list[ResultSection] | None:
    """The sections of a result by their texts. None: as in the recipe."""
    from visavis.training.evaluation.result_sections import named_section

    return None if section is None else [named_section(text) for text in to_list(section) if text]


def _read_distractors(path: Path, frames_per_second: float, progress: Progress) -> Dataset:
    """The images of a folder or data set, or the texts of a file."""
    from visavis.data.dataset import without_captions
    from visavis.data.dataset_reader import list_dataset
    from visavis.data.image_file import Image
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


def papers_board(
    runs: str | Path | Sequence[str | Path],
    *,
    out: str | Path | None = None,
    progress: Progress | None = None,
) -> Board:
    """Put the results of finished runs on one page and in a CSV file.

    The runs may come from other machines. Only runs with the same data, protocol, candidates, ties
    and noise are in one table, and ensembles are apart from single models. The page states how the
    tables differ, and names each folder that was left out with the reason.

    No model is opened, and no code that a run names is executed.

    Args:
        runs: Run folders, folders of comparisons, or folders that contain such folders.
        out: New folder. Default: ``runs/board-<n>``.
        progress: Receives the progress.

    Returns:
        Tables of runs that can be compared, with means, their spread over seeds, corrected tests and
        cost. The folder has ``report.html`` and ``board.csv``.

    Raises:
        RefusedOverwrite: If the output folder is not empty.
        RunError: If a path is not a folder, or if no run is finished.

    Command line:
        ```sh
        visavis papers board runs
        visavis papers board runs/compare-1 downloads/runs --out board
        ```
    """
    from visavis.core import storage
    from visavis.papers.board.board import make_board
    from visavis.papers.board.board_report import write_board
    from visavis.papers.board.recorded_runs import read_runs

    folders = to_paths(runs)
    with storage.create_output_folder(out, "runs/board", will_be_replaced=True) as folder:
        measured, left_out = read_runs(folders, progress or NoProgress())
        if not measured:
            reasons = "; ".join(f"{each.folder}: {each.reason}" for each in left_out[:3])
            raise RunError(f"board: expected a finished run with test results, got none. {reasons}")
        board = make_board(folder, measured, left_out)
        with storage.atomic_folder(folder) as part:
            write_board(board, part)
    return board
