"""Match probabilities, with captions and without, tested with the true relevance of a test split.

    visavis data scenes --out runs/scenes --num-train 2000 --num-val 400 --num-test 3000 --seed 61
    visavis train demo data.path=runs/scenes seed=1 phases.0.epochs=6 training.threads=1 --out
    runs/scenes-1
    VISAVIS_DATA=... python studies/no_match.py runs/scenes-1 runs/scenes-2 --items 400

Relevant to a caption of scenes is each image for which all of its facts are true. For other data,
only the caption's own image is. For scenes, the short texts are a color and a shape, such as "a red
star", and each image that contains one is relevant. For other data they are noun phrases of the
captions, and each image is relevant of which a caption contains the words of the phrase: a lower
limit, because captions leave out most of what an image shows.

Printed are means and extremes over the runs, in percent:

- wrong message: share of the queries with relevant images that are answered with "Probably no
  match"
- found out: share of the queries that are answered so once their relevant images are removed
- irrelevant: share of irrelevant results at a level, mean over the queries with results
- kept: share of the relevant images that are listed at a level, mean over the queries
- of the best: kept, compared with the best single threshold on standardized scores, chosen with the
  labels of the same queries to reach the level
- empty: share of the queries without a result once their relevant images are removed

"Limits" print how well a statistic of a query separates queries from the same queries whose
relevant images are removed: the area under the curve, and the share of the latter below a threshold
that 10 % of the former are below. The labels of the same queries choose it, separately for each
table. Then one threshold serves all tables of the runs: the highest at which no table has more than
10 % below it. The statistics:

- best score: cosine of the best result
- standardized: the same in standard deviations of the text's scores
- gap: the standardized best score, minus the mean of the 2nd to the 10th
- expected: irrelevant results expected per result, which the message uses
- half pooled: "expected", where texts share half of the location and scale of their scores. Scores
  lose the mean of the text's mean and of the median of the bank, and are divided by the geometric
  mean of both standard deviations.

Give runs with --items 400 3000 for one threshold for both sizes.

"-" means no probability: the reason is printed. "with captions" takes the collection for texts that
are shorter than the captions, as an index does.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections import defaultdict
from pathlib import Path

import numpy as np

from visavis.core.errors import VisavisError
from visavis.core.progress import NoProgress
from visavis.data.dataset import Dataset
from visavis.data.synthetic import SceneGraphs
from visavis.models.retriever import Retriever
from visavis.retrieval.build.no_match import (
    bank_texts,
    calibrate_without_labels,
    fit_standardized,
)
from visavis.retrieval.calibrate.calibration import (
    RATED_RESULTS,
    Calibration,
    MatchScale,
    Moments,
    NullScores,
    count_within,
    fit_calibration,
)
from visavis.retrieval.query_encoder import QueryEncoder
from visavis.training.runs.open_run import open_run, read_run_recipe
from visavis.training.runs.run_splits import RunSplits

LEVELS = (0.1, 0.3)
WRONG_MESSAGES = 0.1
"""Share of queries with relevant images that a threshold of "Limits" takes for others."""
NUM_BEST = 10
"""Number of results of which "gap" is a statistic."""
MAX_QUERIES = 1500
_ARTICLES = ("a", "an", "the", "two", "three", "four", "some")
# Words that end a noun phrase.
_ENDS = (
    *("in", "on", "at", "under", "with", "to", "of", "and", "or", "by", "near", "from", "over"),
    *("through", "behind", "above", "below", "inside", "within", "into", "onto", "around", "along"),
    *("across", "while", "as", "who", "which", "that", "is", "are", "was", "were", "being"),
)
Queries = tuple[list[str], np.ndarray, np.ndarray]
"""Texts, their vectors, and the relevance of the images, ``[texts, images]``."""
Limits = dict[str, tuple[np.ndarray, np.ndarray]]
"""For each statistic: its values for queries, and without their relevant images."""


def encode_split(run: Path, split: str) -> tuple[Dataset, np.ndarray, np.ndarray, np.ndarray]:
    """The split, vectors of the captions and of the images, and relevance, shape ``[captions,
    images]``.
    """
    data_module, matcher = open_run(run, read_run_recipe(run), NoProgress())
    data = data_module.data.split(split)
    model = Retriever(matcher, data_module.processor)
    visual, text = (model.to_unit_rows(side).numpy() for side in data_module.encode(matcher, data))
    relevant = np.asarray(data.image_of)[:, None] == np.arange(len(data.images))
    if (folder := scene_folder(data)) is not None:
        truth = SceneGraphs.open(folder).relevance(data.image_rows, data.caption_rows)
        relevant = truth.T >= 1 - 1e-6
    return data, text, visual, relevant


def scene_folder(data: Dataset) -> Path | None:
    """Folder of the scenes of a data set. None: its images are others."""
    location = data.images[0].location
    folder = None if location is None else location.path.parent.parent
    return folder if folder is not None and (folder / "scenes.jsonl").exists() else None


def short_texts(data: Dataset) -> dict[str, np.ndarray]:
    """Short texts, and which images show them."""
    if (folder := scene_folder(data)) is None:
        return noun_phrases(data)
    lines = (folder / "scenes.jsonl").read_text(encoding="utf-8").splitlines()
    scenes = {line["filename"]: line["scene"]["things"] for line in map(json.loads, lines)}
    things = [
        {f"a {thing['color']} {thing['shape']}" for thing in scenes[image.name]}
        for image in data.images
    ]
    texts = sorted(set[str]().union(*things))
    return {text: np.array([text in each for each in things]) for text in texts}


def noun_phrases(data: Dataset) -> dict[str, np.ndarray]:
    """Phrases of an article and one to three words, and the images whose captions contain them."""
    found = defaultdict[str, np.ndarray](lambda: np.zeros(len(data.images), bool))
    captions = [" ".join(re.findall(r"[a-z'-]+|[,.;]", text.lower())) for text in data.captions]
    for caption in captions:
        phrase = list[str]()
        for word in [*caption.split(), "."]:
            if word in _ARTICLES or word in _ENDS or not word[0].isalpha():
                if 2 <= len(phrase) <= 4:
                    _ = found[" ".join(phrase)]
                phrase = [word] if word in _ARTICLES else []
            elif phrase:
                phrase.append(word)
    for text, images in found.items():
        words = f" {text.split(maxsplit=1)[1]} "
        for caption, image in zip(captions, data.image_of, strict=True):
            images[image] |= words in f" {caption} "
    return dict(found)


def known_texts(model: Retriever, texts: list[str]) -> list[str]:
    """The texts of which the model knows all words."""
    known = []
    for text in texts:
        try:
            if not model.unknown_words(text):
                known.append(text)
        except VisavisError:
            pass
    return known


def rate(
    scale: MatchScale, standardized: np.ndarray, num_items: int
) -> tuple[list[list[float]], np.ndarray]:
    """Match probabilities of the sorted scores of queries, and whether nothing matches."""
    rated = [scale.cautious_probabilities(row, num_items) for row in standardized]
    no_match = [scale.is_no_match(row, num_items) for row in standardized]
    return [row.tolist() for row in rated], np.array(no_match)


def best_threshold(scores: np.ndarray, relevant: np.ndarray, level: float) -> float:
    """The largest share of relevant images, mean over the queries, that a threshold lists with at
    most a share of irrelevant results. ``scores`` and ``relevant`` are sorted by score.
    """
    total = relevant.sum(1)
    ranks = np.arange(scores.shape[1])
    kept = 0.0
    quantiles = np.linspace(0, 1, 500)
    for threshold in np.r_[np.quantile(scores[:, 0], quantiles), np.quantile(scores, quantiles)]:
        lengths = (scores >= threshold).sum(1)
        found = (relevant & (ranks < lengths[:, None])).sum(1)
        has_results = lengths > 0
        if (1 - found[has_results] / lengths[has_results]).mean() <= level:
            kept = max(kept, float((found / total).mean()))
    return kept


def measure(
    scale: MatchScale, standardized: np.ndarray, relevant: np.ndarray, total: np.ndarray
) -> dict[str, float]:
    """The figures of a method in percent. ``standardized`` is ``[queries, images]``."""
    count = standardized.shape[1]
    order = np.argsort(-standardized, axis=1, kind="stable")[:, :RATED_RESULTS]
    scores, is_relevant = (
        np.take_along_axis(array, order, 1) for array in (standardized, relevant)
    )
    removed = -np.sort(-np.where(relevant, -100.0, standardized), axis=1)[:, :RATED_RESULTS]
    rated, wrong = rate(scale, scores, count)
    rated_removed, found_out = rate(scale, removed, count)
    figures = {"wrong message": np.mean(wrong), "found out": np.mean(found_out)}
    for level in LEVELS:
        lengths = np.array([count_within(row, level) for row in rated])
        shown = np.arange(scores.shape[1]) < lengths[:, None]
        found = (is_relevant & shown).sum(1)
        irrelevant = (1 - found / np.maximum(lengths, 1))[lengths > 0]
        kept = np.mean(found / total)
        empty = [count_within(row, level) == 0 for row in rated_removed]
        figures |= {
            f"irrelevant, {level:.0%}": irrelevant.mean() if len(irrelevant) else np.nan,
            f"kept, {level:.0%}": kept,
            f"of the best, {level:.0%}": kept
            / max(best_threshold(scores, is_relevant, level), 1e-9),
            f"empty, {level:.0%}": np.mean(empty),
        }
    return {name: 100 * float(value) for name, value in figures.items()}


class HalfPooled:
    """Standardization by which texts share half of the location and scale of their scores.

    Args:
        moments: Moments of the images.
        bank: Vectors of the texts of the bank, which give the shared half, ``[texts, D]``.
    """

    def __init__(self, moments: Moments, bank: np.ndarray):
        self.moments = moments
        means, deviations = self._own(bank)
        self.mean, self.deviation = np.median(means), np.median(deviations)

    def _own(self, texts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        variances = np.einsum("qd,qd->q", texts @ self.moments.covariance, texts)
        return texts @ self.moments.mean, np.sqrt(variances)

    def standardize(self, texts: np.ndarray, scores: np.ndarray) -> np.ndarray:
        """Standardize the scores ``[Q, images]`` of texts ``[Q, D]``."""
        means, deviations = self._own(texts)
        centered = scores - ((means + self.mean) / 2)[:, None]
        return np.asarray(centered / np.sqrt(deviations * self.deviation)[:, None])


def pooled_null(model: Retriever, visual: np.ndarray) -> tuple[HalfPooled, NullScores]:
    """The scores of irrelevant images by the half-pooled standardization."""
    texts, places = bank_texts()
    known = known_texts(model, texts)
    bank = model.encode_texts(known).numpy()
    pooled = HalfPooled(Moments.of(visual), bank)
    standardized = pooled.standardize(bank, bank @ visual.T)
    is_known = np.isin(texts, known)
    return pooled, fit_standardized(standardized, places[is_known])[0]


def best_results(scores: np.ndarray, relevant: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The sorted scores of queries, and without their relevant images."""
    removed = np.where(relevant, -100.0, scores)
    both = (-np.sort(-each, axis=1)[:, :RATED_RESULTS] for each in (scores, removed))
    with_relevant, without = both
    return with_relevant, without


def expected(null: NullScores, scores: np.ndarray, num_items: int) -> np.ndarray:
    """Minus the logarithm of the irrelevant results expected per result, the smallest of a list."""
    ranks = np.arange(1, scores.shape[1] + 1)
    shares = np.maximum(null.share_above(scores), np.finfo(np.float64).tiny)
    return np.asarray(-np.log((num_items * shares / ranks).min(1)))


def limits(
    raw: np.ndarray,
    standardized: np.ndarray,
    relevant: np.ndarray,
    nulls: list[tuple[str, NullScores, np.ndarray]],
) -> Limits:
    """The statistics of queries. ``nulls`` are named distributions with scores that suit them."""
    best = best_results(standardized, relevant)
    cosines = best_results(raw, relevant)
    measured = {
        "best score": (cosines[0][:, 0], cosines[1][:, 0]),
        "standardized": (best[0][:, 0], best[1][:, 0]),
        "gap": tuple(each[:, 0] - each[:, 1:NUM_BEST].mean(1) for each in best),
    }
    for name, null, scores in nulls:
        both = best_results(scores, relevant)
        measured[name] = tuple(expected(null, each, raw.shape[1]) for each in both)
    return measured


def area(higher: np.ndarray, lower: np.ndarray) -> float:
    """Area under the curve: the share of pairs in the right order. Equal values count half."""
    ordered = np.sort(lower)
    below, up_to = (np.searchsorted(ordered, higher, side) for side in ("left", "right"))
    return float((below + up_to).mean() / 2 / len(lower))


def print_limits(cases: dict[str, list[Limits]]) -> None:
    """Print how well the statistics separate queries, means over the runs in percent."""
    for name in next(iter(cases.values()))[0]:
        print(f"\nLimits: {name}")
        print("| queries | area | below own threshold | one threshold: wrong | below it |")
        values = {case: [each[name] for each in found] for case, found in cases.items()}
        own = {
            case: [np.quantile(with_, WRONG_MESSAGES) for with_, _ in found]
            for case, found in values.items()
        }
        common = min(np.mean(thresholds) for thresholds in own.values())
        for case, found in values.items():
            figures = (
                [area(*each) for each in found],
                [
                    (without < threshold).mean()
                    for (_, without), threshold in zip(found, own[case], strict=True)
                ],
                [(with_ < common).mean() for with_, _ in found],
                [(without < common).mean() for _, without in found],
            )
            print(f"| {case} |" + "".join(f" {100 * np.mean(each):.1f} |" for each in figures))


def captions_of(run: Path, split: str) -> Calibration:
    """The calibration with captions that an index of the run records."""
    splits = RunSplits(run)
    return fit_calibration(splits.captions(split), *splits.scores(split))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("runs", type=Path, nargs="+")
    parser.add_argument(
        "--items", type=int, nargs="+", help="numbers of searched images (default: all)"
    )
    parser.add_argument("--limits", action="store_true", help="print only the limits")
    options = parser.parse_args()
    rows = defaultdict[tuple[str, str], list[dict[str, float]]](list)
    cases = defaultdict[str, list[Limits]](list)
    for run in options.runs:
        evaluation = read_run_recipe(run).evaluation
        model = Retriever.load(run)
        by_captions = None if options.limits else captions_of(run, evaluation.validation)
        data, vectors, all_visual, relevant = encode_split(run, evaluation.test)
        short = short_texts(data)
        known = known_texts(model, list(short))
        queries: dict[str, Queries] = {
            "captions": (list(data.captions), vectors, relevant),
            "short texts": (
                known,
                model.encode_texts(known).numpy(),
                np.stack([short[text] for text in known]),
            ),
        }
        for num_items in options.items or [len(all_visual)]:
            visual = all_visual[:num_items]
            found = calibrate_without_labels(QueryEncoder.of(model), visual)
            print(f"{run}: collection: {found if isinstance(found, str) else 'calibrated'}")
            pooled, null = pooled_null(model, visual)
            moments = Moments.of(visual)
            for kind, (texts, encoded, is_relevant) in queries.items():
                is_relevant = is_relevant[:, :num_items]
                chosen = np.flatnonzero(is_relevant.any(1))
                chosen = np.random.default_rng(0).permutation(chosen)[:MAX_QUERIES]
                raw = encoded[chosen] @ visual.T
                standardized = moments.standardize(encoded[chosen], raw)
                nulls = [("half pooled", null, pooled.standardize(encoded[chosen], raw))]
                if not isinstance(found, str):
                    nulls.insert(0, ("expected", found, standardized))
                case = f"{len(visual):,}, {kind}"
                cases[case].append(limits(raw, standardized, is_relevant[chosen], nulls))
                if by_captions is None:
                    continue
                held = np.array([by_captions.holds_for(texts[row], len(visual)) for row in chosen])
                print(f"{run}: {len(chosen)} {kind}, {held.mean():.0%} like the captions")
                for basis in ("captions", "collection"):
                    # Most texts of a kind have the same method.
                    uses_captions = basis == "captions" and held.mean() > 0.5
                    scale = by_captions if uses_captions else found
                    if isinstance(scale, str):
                        continue
                    part = held if uses_captions else np.ones(len(chosen), bool)
                    part_relevant = is_relevant[chosen][part]
                    rows[case, basis].append(
                        measure(scale, standardized[part], part_relevant, part_relevant.sum(1))
                    )
    print_table(rows)
    print(f"\nMeans of {len(options.runs)} runs, in percent")
    print_limits(cases)


def print_table(rows: dict[tuple[str, str], list[dict[str, float]]]) -> None:
    """Print means and extremes over the runs."""
    for (kind, basis), measured in rows.items():
        print(f"\n{kind}, calibrated by {basis}, {len(measured)} runs")
        for name in measured[0]:
            values = [each[name] for each in measured]
            print(f"| {name} | {np.mean(values):.1f} ({min(values):.1f} to {max(values):.1f}) |")


if __name__ == "__main__":
    try:
        main()
    except VisavisError as error:
        sys.exit(f"no_match: {error}")
