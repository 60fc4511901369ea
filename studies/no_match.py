"""Match probabilities without labels, tested with the true relevance of a test split.

    visavis data scenes --out runs/scenes --num-train 4000 --num-val 1000 --num-test 1000 --seed 53
    visavis train demo data.path=runs/scenes seed=1 phases.0.epochs=12 training.threads=1 --out
    runs/scenes-1
    VISAVIS_DATA=... python studies/no_match.py runs/scenes-1 runs/scenes-2 runs/scenes-3

Relevant to a caption of scenes is each image for which all of its facts are true. For other data,
only the caption's own image is. For scenes, texts of a color and a shape that they contain are
searched, too, such as "a red star". Printed are means and extremes over the runs, for each level:

- irrelevant: share of irrelevant results, mean over the queries with results
- kept: share of the relevant images that are shown, mean over the queries
- rare: kept, for queries with one or two relevant images
- broad: kept, for queries with more than ten relevant images
- no match: share of queries without results once their relevant images are removed

"with captions" is the calibration with validation captions that an index records. "threshold" is
the best single threshold on the score, chosen with the labels of the validation
split to reach the level there. "best cut" is the longest list within the level, chosen for each
query with its own labels: no method can keep more of the same ranking. Then queries of other kinds
are searched: nonsense, other languages, and things that the images do not show. "unknown" counts
those that a word vocabulary rejects. For Flickr8k, judgments of other captions' images by people
follow: images that experts rate 3 or more of 4, or of which half of the crowd answers yes, and which
are listed at 10 %.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import defaultdict
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from visavis.core.errors import VisavisError
from visavis.core.progress import NoProgress
from visavis.data.data_paths import resolve_path
from visavis.data.dataset import Dataset
from visavis.data.synthetic import SceneGraphs
from visavis.models.retriever import Retriever
from visavis.papers.relevance.human_agreement import read_flickr8k_judgments
from visavis.retrieval.no_match import bank_texts, fit_null_scores
from visavis.retrieval.search import (
    NO_MATCH,
    Calibration,
    NullScores,
    count_within,
    fit_calibration,
)
from visavis.training.runs.open_run import open_run, read_run_recipe
from visavis.training.runs.run_splits import RunSplits

LEVELS = (0.05, 0.1, 0.2, 0.3, 0.5)
LISTED = 200
OTHER_QUERIES = {
    "nonsense": ("difovose zaso", "bomefi kulilev pano", "gruzt", "wek tolima sefu", "qo qo qo"),
    "other languages": (
        "ein Hund rennt am Strand",
        "zwei Kinder spielen im Garten",
        "un chien court sur la plage",
        "une femme fait du vélo",
        "dos perros juegan en la nieve",
        "犬が走る",
    ),
    "not shown": (
        "a spreadsheet with quarterly sales",
        "an x-ray of a broken hand",
        "a space shuttle launch",
        "a plate of sushi",
        "a map of the subway",
        "bacteria under a microscope",
        "the moon through a telescope",
        "sheet music",
        "a passport",
        "a solar panel",
    ),
}


def encode_split(run: Path, split: str) -> tuple[Dataset, np.ndarray, np.ndarray, np.ndarray]:
    """The split, vectors of the captions and of the images, and relevance, shape ``[captions,
    images]``.
    """
    data_module, matcher = open_run(run, read_run_recipe(run), NoProgress())
    data = data_module.data.split(split)
    model = Retriever(matcher, data_module.processor)
    visual, text = (model.to_unit_rows(side).numpy() for side in data_module.encode(matcher, data))
    relevant = np.asarray(data.image_of)[:, None] == np.arange(len(data.images))
    location = data.images[0].location
    folder = None if location is None else location.path.parent.parent
    if folder is not None and (folder / "scenes.jsonl").exists():
        truth = SceneGraphs.open(folder).relevance(data.image_rows, data.caption_rows)
        relevant = truth.T >= 1 - 1e-6
    return data, text, visual, relevant


def print_judgments(data: Dataset, scores: np.ndarray, lengths: np.ndarray) -> None:
    """Print how many of the listed images people rated as relevant, without a caption's own."""
    cuts = np.where(lengths > 0, -np.sort(-scores, 1)[np.arange(len(scores)), lengths - 1], np.inf)
    for kind, least in (("expert", 3), ("crowd", 0.5)):
        pairs = read_flickr8k_judgments(kind, resolve_path("flickr8k"), data)
        is_listed = scores[pairs.captions, pairs.images] >= cuts[pairs.captions]
        ratings = pairs.ratings[is_listed & ~pairs.is_own_caption]
        print(
            f"{kind}: {np.mean(ratings >= least):.0%} of {len(ratings)} listed pairs are relevant"
        )


def known_texts(model: Retriever, texts: list[str]) -> list[int]:
    """Positions of the texts of which the model knows all words."""
    known = []
    for number, text in enumerate(texts):
        try:
            if not model.unknown_words(text):
                known.append(number)
        except VisavisError:
            pass
    return known


def list_lengths(
    null: NullScores, queries: np.ndarray, scores: np.ndarray, level: float
) -> np.ndarray:
    """Number of results of each query that are shown at a level. ``scores`` is sorted."""
    standardized = null.standardize(queries, scores[:, :LISTED])
    probabilities = null.match_probabilities(standardized, scores.shape[1])
    return np.array([count_within(row, level) for row in probabilities.tolist()])


def calibrated_lengths(calibration: Calibration, scores: np.ndarray, level: float) -> np.ndarray:
    """The same with the calibration of an index by captions."""
    return np.array(
        [
            count_within([calibration.match_probability(score) for score in row], level)
            for row in scores[:, :LISTED]
        ]
    )


def short_texts(data: Dataset) -> dict[str, np.ndarray]:
    """Texts of a color and a shape that scenes contain, and the images that do."""
    location = data.images[0].location
    file = None if location is None else location.path.parent.parent / "scenes.jsonl"
    if file is None or not file.exists():
        return {}
    scenes = {line["filename"]: line["scene"]["things"] for line in read_lines(file)}
    things = [
        {f"a {thing['color']} {thing['shape']}" for thing in scenes[image.name]}
        for image in data.images
    ]
    texts = sorted(set[str]().union(*things))
    return {text: np.array([text in each for each in things]) for text in texts}


def read_lines(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]


def measure(lengths: np.ndarray, impossible: np.ndarray, relevant: np.ndarray) -> list[float]:
    """The figures of a row of the table in percent. ``relevant`` is sorted by score."""
    shown = np.arange(relevant.shape[1]) < lengths[:, None]
    found = (relevant & shown).sum(1)
    total = relevant.sum(1)
    kept = found / total
    irrelevant = (1 - found / np.maximum(lengths, 1))[lengths > 0]
    values = irrelevant, kept, kept[total <= 2], kept[total > 10], impossible == 0
    return [100 * float(each.mean()) if len(each) else float("nan") for each in values]


def threshold_for(scores: np.ndarray, relevant: np.ndarray, level: float) -> float:
    """The lowest threshold with which lists hold at most a share of irrelevant results."""
    candidates = np.quantile(scores[:, 0], np.linspace(0, 0.999, 400))
    for threshold in candidates:
        lengths = (scores >= threshold).sum(1)
        if measure(lengths, lengths, relevant)[0] <= 100 * level:
            return float(threshold)
    return float(candidates[-1])


def best_lengths(relevant: np.ndarray, level: float) -> np.ndarray:
    """Length of the longest list of each query within a level. ``relevant`` is sorted by score."""
    ranks = np.arange(1, relevant.shape[1] + 1)
    is_within = np.cumsum(~relevant, axis=1) <= level * ranks
    return np.where(is_within, ranks, 0).max(1)


def sort_rows(scores: np.ndarray, relevant: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    order = np.argsort(-scores, axis=1, kind="stable")
    return np.take_along_axis(scores, order, 1), np.take_along_axis(relevant, order, 1)


def print_other_queries(model: Retriever, null: NullScores, visual: np.ndarray) -> None:
    """Print how many queries without matches are answered with "Probably no match"."""
    for kind, queries in OTHER_QUERIES.items():
        encoded = list[str]()
        for query in queries:
            # A vocabulary rejects a query without a known word.
            with suppress(VisavisError):
                model.unknown_words(query)
                encoded.append(query)
        lengths = np.array([])
        if encoded:
            vectors = model.encode_texts(encoded).numpy()
            scores = -np.sort(-vectors @ visual.T, axis=1)
            lengths = list_lengths(null, vectors, scores, NO_MATCH)
        print(
            f"{kind}: {(lengths == 0).sum()} of {len(encoded)} probably no match, "
            f"{len(queries) - len(encoded)} unknown"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("runs", type=Path, nargs="+")
    parser.add_argument("--validation", action="store_true", help="measure on validation")
    parser.add_argument("--items", type=int, help="number of searched images (default: all)")
    options = parser.parse_args()
    rows = defaultdict[tuple[str, float, str], list[list[float]]](list)
    for run in options.runs:
        evaluation = read_run_recipe(run).evaluation
        model = Retriever.load(run)
        data, captions, visual, relevant = encode_split(run, evaluation.validation)
        known = sort_rows(captions @ visual.T, relevant)
        calibration = fit_calibration(*RunSplits(run).scores(evaluation.validation))
        if not options.validation:
            data, captions, visual, relevant = encode_split(run, evaluation.test)
        visual = visual[: options.items]
        relevant = relevant[:, : options.items]
        texts, places = bank_texts()
        numbers = known_texts(model, texts)
        bank = model.encode_texts([texts[number] for number in numbers]).numpy()
        null, contradicted = fit_null_scores(bank, places[numbers], visual)
        print(f"{run}: {len(numbers)} test texts, {100 * contradicted:.0f} % contradicted")
        print_other_queries(model, null, visual)
        queries = {"captions": (captions, relevant)}
        if short := short_texts(data):
            vectors = model.encode_texts(list(short)).numpy()
            queries["short texts"] = vectors, np.stack(list(short.values()))[:, : options.items]
        for kind, (vectors, is_relevant) in queries.items():
            has_match = is_relevant.any(1)
            vectors = vectors[has_match]
            is_relevant = is_relevant[has_match]
            unsorted = vectors @ visual.T
            without = -np.sort(-np.where(is_relevant, -1.0, unsorted), axis=1)
            scores, is_relevant = sort_rows(unsorted, is_relevant)
            lengths = list_lengths(null, vectors, scores, NO_MATCH)
            print(
                f"{kind}: {100 * np.mean(lengths == 0):.0f} % of {len(scores)} probably no match, "
                f"{100 * np.mean(scores[:, 0] < calibration.min_score):.0f} % if calibrated with "
                "captions"
            )
            if read_run_recipe(run).data.path.endswith("flickr8k") and not options.validation:
                print_judgments(data, unsorted, list_lengths(null, vectors, scores, 0.1))
            for level in LEVELS:
                threshold = threshold_for(*known, level)
                rows[kind, level, "without labels"].append(
                    measure(
                        list_lengths(null, vectors, scores, level),
                        list_lengths(null, vectors, without, level),
                        is_relevant,
                    )
                )
                rows[kind, level, "with captions"].append(
                    measure(
                        calibrated_lengths(calibration, scores, level),
                        calibrated_lengths(calibration, without, level),
                        is_relevant,
                    )
                )
                rows[kind, level, "threshold"].append(
                    measure(
                        (scores >= threshold).sum(1), (without >= threshold).sum(1), is_relevant
                    )
                )
                rows[kind, level, "best cut"].append(
                    measure(best_lengths(is_relevant, level), np.zeros(len(scores)), is_relevant)
                )
    print(
        "\n| queries | level | method | irrelevant | kept | rare | broad | no match |"
        "\n|---|---|---|---|---|---|---|---|"
    )
    for (kind, level, method), measured in rows.items():
        cells = [
            f"{np.mean(values):.1f} ({min(values):.1f} to {max(values):.1f})"
            for values in zip(*measured, strict=True)
        ]
        print(f"| {kind} | {100 * level:.0f} % | {method} | {' | '.join(cells)} |")


if __name__ == "__main__":
    try:
        main()
    except VisavisError as error:
        sys.exit(f"no_match: {error}")
