"""Human ratings of caption pairs and of image-caption pairs, and the agreement of models with the
latter as rank correlations.

Ratings are read as published. STS benchmark (Cer et al., 2017) and Crisscrossed Captions (Parekh et
al., 2021): ratings from 0 to 5 of caption pairs, the latter also of images and captions of the
MS-COCO 5K test split. Flickr8k (Hodosh et al., 2013): three experts per pair, from 1 (not related)
to 4 (describes the image), and a crowd, three or more answers (yes or no) per pair.

Correlations have bootstrap intervals over images. Pairs of one image are not independent, so images
are resampled with all their pairs. All values of the same images use the same resamples, so
differences between them are paired.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from visavis.core import storage
from visavis.core.errors import DataError
from visavis.core.result import Result, flat_record
from visavis.core.table import Cell, Column, Row, Table
from visavis.data.data_paths import resolve_path
from visavis.data.dataset import Dataset
from visavis.data.formats.published_lists import match_coco_ids
from visavis.data.formats.text_tables import parse_table
from visavis.papers.relevance.base import ImageRelevance

MAX_RATING = 5.0
"""Highest rating of both collections. The lowest is 0."""


FLICKR8K_FILES = {"expert": "ExpertAnnotations.txt", "crowd": "CrowdFlowerAnnotations.txt"}
"""File of each kind of judgments of Flickr8k."""
CRISSCROSSED_FILE = "cxc_sits_test.csv"
"""File of the image-caption ratings of Crisscrossed Captions."""
RESAMPLES = 1000
"""Default number of bootstrap resamples."""
SEED = 0
"""Seed of the resamples."""
COVERAGE = 0.95
"""Coverage of the intervals."""
_LINE_FORMATS = {
    "expert": "an image, a caption as file#number and three ratings from 1 to 4",
    "crowd": "an image, a caption as file#number, the share of yes, the number of yes and the number of no",
}


@dataclass(frozen=True)
class _Caption:
    sentid: int
    raw: str


@dataclass(frozen=True)
class _CaptionsOfImage:
    sentences: list[_Caption]


@dataclass(frozen=True)
class _CaptionList:
    images: list[_CaptionsOfImage]


@dataclass(frozen=True)
class RatedCaptionPairs:
    """Caption pairs with human ratings of their similarity.

    Attributes:
        name: Name of the collection.
        first: First caption of each pair.
        second: Second caption of each pair.
        ratings: Ratings from 0 to 5, shape ``[P]``.
    """

    name: str
    first: Sequence[str]
    second: Sequence[str]
    ratings: np.ndarray


def read_stsb(
    split: Literal["train", "dev", "test"], folder: str | Path = "stsb"
) -> RatedCaptionPairs:
    """Read a split of the STS benchmark (Cer et al., 2017) from ``sts-<split>.tsv``."""
    path = resolve_path(Path(folder) / f"sts-{split}.tsv")
    rows, ratings = read_ratings(path, "score", ("sentence1", "sentence2"), has_quotes=False)
    return RatedCaptionPairs(
        f"STS-B {split}",
        [row["sentence1"] for row in rows],
        [row["sentence2"] for row in rows],
        ratings,
    )


def read_crisscrossed_captions(folder: str | Path = "coco_5k_test_text") -> RatedCaptionPairs:
    """Read the caption pairs of Crisscrossed Captions (Parekh et al., 2021) from
    ``cxc_sts_test.csv`` and ``dataset_coco_5k_test.json``.
    """
    path = resolve_path(Path(folder) / "cxc_sts_test.csv")
    listed = resolve_path(Path(folder) / "dataset_coco_5k_test.json")
    rows, ratings = read_ratings(path, "agg_score", ("caption1", "caption2"))
    images = storage.read_json(listed, _CaptionList).images
    captions = {
        str(sentence.sentid): sentence.raw for image in images for sentence in image.sentences
    }
    # Identifiers end with a colon and the id of the caption.
    first, second = (
        [row[name].rpartition(":")[2] for row in rows] for name in ("caption1", "caption2")
    )
    if unknown := next((number for number in (*first, *second) if number not in captions), None):
        raise DataError(
            f"{path}: expected captions of {listed}, got the unknown caption {unknown}. Download "
            "both files again."
        )
    return RatedCaptionPairs(
        "Crisscrossed Captions",
        [captions[number] for number in first],
        [captions[number] for number in second],
        ratings,
    )


def read_ratings(
    path: Path, column: str, item_columns: tuple[str, str], *, has_quotes: bool = True
) -> tuple[list[dict[str, str]], np.ndarray]:
    """Read a table of pairs with a column of ratings from 0 to 5, as rows and ratings ``[P]``."""
    expected = f"{item_columns[0]}, {item_columns[1]} and {column}"
    table = parse_table(storage.read_text(path), path, (column,), expected, has_quotes=has_quotes)
    rows = table.require_rows(path)
    ratings = np.empty(len(rows))
    for i, (line, row) in enumerate(rows):
        try:
            ratings[i] = float(row[column])
        except (KeyError, ValueError):
            # NaN is not in the range below.
            ratings[i] = math.nan
        if not 0 <= ratings[i] <= MAX_RATING or any(name not in row for name in item_columns):
            raise DataError(
                f"{path}, line {line}: expected {item_columns[0]}, {item_columns[1]} and a "
                f"{column} from 0 to 5. Fix this line."
            )
    if not rows:
        raise DataError(f"{path}: expected rated pairs, got an empty table.")
    return [row for _, row in rows], ratings


@dataclass(frozen=True, eq=False)
class HumanJudgments:
    """Human judgments of image-caption pairs.

    Attributes:
        kind: "expert", "crowd", or "cxc" for Crisscrossed Captions.
        images: Index of the image of each pair in the split, shape ``[P]``.
        captions: Index of the caption of each pair, shape ``[P]``.
        is_own_caption: Whether the caption was written for the image, shape ``[P]``.
        ratings: Mean of the experts, share of yes of the crowd, or the published rating, shape
            ``[P]``.
        single_ratings: Ratings of single annotators, shape ``[R, P]``: every expert, or one answer
            of the crowd per pair, sampled at random. ``R`` is 0 for Crisscrossed Captions, which
            publishes only means.
        mean_other_ratings: Mean of the other annotators for each of ``single_ratings``, shape ``[R,
            P]``.
    """

    kind: str
    images: np.ndarray
    captions: np.ndarray
    is_own_caption: np.ndarray
    ratings: np.ndarray
    single_ratings: np.ndarray
    mean_other_ratings: np.ndarray


def find_human_judgments(source: Path, data: Dataset) -> list[HumanJudgments]:
    """Read the judgments of a split from the files next to the list that describes its data set."""
    if os.path.isfile(source.parent / CRISSCROSSED_FILE):
        return [read_crisscrossed_image_captions(source.parent / CRISSCROSSED_FILE, source, data)]
    return [read_flickr8k_judgments(kind, source.parent, data) for kind in FLICKR8K_FILES]


def read_crisscrossed_image_captions(path: Path, source: Path, data: Dataset) -> HumanJudgments:
    """Read the image-caption ratings of Crisscrossed Captions. ``source`` has the caption ids."""
    rows, ratings = read_ratings(path, "agg_score", ("caption", "image"))
    index_of = {image.name: i for i, image in enumerate(data.images)}
    _, captions_by_id = match_coco_ids(data, source)
    caption_of = {str(number): i for number, i in captions_by_id.items()}
    try:
        images = np.array([index_of[row["image"]] for row in rows])
        captions = np.array([caption_of[row["caption"].rpartition(":")[2]] for row in rows])
    except KeyError as unknown:
        raise DataError(
            f"{path}: expected ratings of the {len(index_of):,} images of the split and their "
            f"captions, got {unknown}. Pass the rated data set."
        ) from None
    no_annotators = np.empty((0, len(rows)))
    return HumanJudgments(
        "cxc",
        images,
        captions,
        data.image_of[captions] == images,
        ratings,
        no_annotators,
        no_annotators,
    )


def read_flickr8k_judgments(kind: str, folder: Path, data: Dataset) -> HumanJudgments:
    """Read the judgments of the experts or of the crowd of Flickr8k."""
    path = folder / FLICKR8K_FILES[kind]
    if not os.path.isfile(path):
        raise DataError(
            f"{path}: expected human judgments, which are available for the test images of "
            "Flickr8k, and for MS-COCO images with "
            f"{CRISSCROSSED_FILE} next to their list, got no such file. Pass the folder of one of "
            "these data sets with --data."
        )
    index_of = {image.name: i for i, image in enumerate(data.images)}
    images = []
    captions = []
    answers = []
    for number, line in enumerate(storage.read_text_lines(path), 1):
        if not line.strip():
            continue
        problem = ""
        try:
            image, caption, *values = line.split("\t")
            file, _, caption_number = caption.rpartition("#")
            answers.append(_parse_answers(kind, values))
            captions_of_image = data.captions_of[index_of[file]]
            k = int(caption_number)
            images.append(index_of[image])
            if 0 <= k < len(captions_of_image):
                captions.append(captions_of_image[k])
            else:
                last = len(captions_of_image) - 1
                problem = f"a caption number from 0 to {last} of image {file}, got {k}"
        except KeyError as unknown:
            problem = f"one of the {len(index_of):,} images of the split, got {unknown}"
        except ValueError:
            problem = f"{_LINE_FORMATS[kind]}, separated by tabs, got {line[:80]!r}"
        if problem:
            raise DataError(f"{path}:{number}: expected {problem}.")
    if not answers:
        raise DataError(f"{path}: expected lines of {_LINE_FORMATS[kind]}, got an empty file.")
    pairs = np.array(images), np.array(captions)
    is_own_caption = data.image_of[pairs[1]] == pairs[0]  # [P]
    numbers = np.array(answers).T  # [3, P]
    if kind == "expert":
        # Each of the three experts is compared with the mean of the other two.
        return HumanJudgments(
            kind, *pairs, is_own_caption, numbers.mean(0), numbers, (numbers.sum(0) - numbers) / 2
        )
    _, yes, no = numbers
    share = yes / (yes + no)
    # The crowd is published as counts: one answer per pair is sampled.
    one = (np.random.default_rng(SEED).random(len(share)) < share).astype(float)
    return HumanJudgments(
        kind, *pairs, is_own_caption, share, one[None], ((yes - one) / (yes + no - 1))[None]
    )


def _parse_answers(kind: str, values: list[str]) -> tuple[float, float, float]:
    """The three numbers of a line. Raises ValueError for invalid answers, or for a pair with only
    one annotator.
    """
    # Three ratings of experts, or of the crowd the share of yes and the numbers of yes and of no.
    first, second, third = map(float, values)
    if kind == "expert":
        valid = {first, second, third} <= {1, 2, 3, 4}
    else:
        valid = 0 <= first <= 1 and min(second, third) >= 0 and second + third > 1
    if not valid:
        raise ValueError
    return first, second, third


RATING_NAMES = {
    "expert": "expert judgments",
    "crowd": "crowd judgments",
    "cxc": "ratings of Crisscrossed Captions",
}
"""Titles of the kinds of human judgments."""
RATER_DESCRIPTIONS = {
    "expert": "each expert with the mean of the other two",
    "crowd": "one answer with the others",
}
"""How the agreement between people is measured."""


@dataclass(frozen=True, eq=False)
class RankCorrelation:
    """A rank correlation and its bootstrap distribution.

    Attributes:
        value: The correlation of all pairs.
        resampled: The correlation of each resample, shape ``[R]``.
    """

    value: float
    resampled: np.ndarray

    @property
    def interval(self) -> tuple[float, float]:
        """Lower and upper bound of the 95 % interval."""
        low, high = np.quantile(self.resampled, [(1 - COVERAGE) / 2, (1 + COVERAGE) / 2])
        return float(low), float(high)

    @property
    def std(self) -> float:
        """Standard deviation over the resamples."""
        return float(self.resampled.std())

    def __sub__(self, other: RankCorrelation) -> RankCorrelation:
        return RankCorrelation(self.value - other.value, self.resampled - other.resampled)

    def cell(self, measure: str) -> Cell:
        """Return the value as a cell: with its deviation if it is sampled, else with its interval."""
        return Cell(self.value, (self.std,) if measure == "sampled_spearman" else self.interval)

    def to_json(self) -> dict[str, float]:
        """Return a JSON object."""
        low, high = self.interval
        return {"value": self.value, "low": low, "high": high, "std": self.std}


@dataclass(frozen=True, eq=False)
class HumanAgreement(Result):
    """Agreement of runs, and of single annotators, with human judgments of one set of pairs.

    Attributes:
        judgments: Kind of judgments: "expert", "crowd" or "cxc".
        includes_own_captions: Whether captions that were written for the image are among the pairs.
        pairs: Number of pairs.
        images: Number of images.
        annotators: Mean agreement of single annotators with the others: ``kendall`` (tau-b) and
            ``spearman``. Empty if they are unknown.
        runs: Agreement of each run: ``kendall`` and ``spearman``, for "cxc" also
            ``sampled_spearman`` by caption.
    """

    judgments: str
    includes_own_captions: bool
    pairs: int
    images: int
    annotators: dict[str, RankCorrelation]
    runs: dict[str, dict[str, RankCorrelation]]

    @property
    def differences(self) -> dict[str, dict[str, RankCorrelation]]:
        """Difference of every other run to the first, on the same resamples."""
        (_, first), *others = self.runs.items()
        return {
            run: {name: correlations[name] - first[name] for name in correlations}
            for run, correlations in others
        }

    def tables(self) -> list[Table]:
        """Return the correlations of people and of runs, and the differences to the first run."""
        measures = {"sampled_spearman": "Spearman, sampled"} if self.judgments == "cxc" else {}
        measures |= {"kendall": "Kendall tau-b", "spearman": "Spearman"}
        raters = f"people ({RATER_DESCRIPTIONS[self.judgments]})" if self.annotators else ""
        correlations = {
            **({raters: self.annotators} if raters else {}),
            **self.runs,
            **{f"{run} minus the first": values for run, values in self.differences.items()},
        }
        columns = [Column(is_text=True)]
        columns += [
            Column(
                title,
                ".3f",
                missing="undefined (equal values)",
                spread=" ± {}" if measure == "sampled_spearman" else " [{}, {}]",
            )
            for measure, title in measures.items()
        ]
        rows: list[Row] = [
            (name, *(values[measure].cell(measure) for measure in measures))
            for name, values in correlations.items()
        ]
        notes = ["Intervals: 95 % of 1,000 bootstrap samples of the images, the same for all."]
        if self.judgments == "cxc":
            notes.append(
                "Sampled: mean ± standard deviation over 1,000 samples of half of the captions, "
                "each with one of its images."
            )
        including = "with" if self.includes_own_captions else "without"
        counts = f"{self.pairs:,} pairs, {self.images:,} images"
        title = f"{RATING_NAMES[self.judgments]}, {including} own captions: {counts}"
        return [Table(tuple(columns), tuple(rows), tuple(notes), title)]

    def records(self) -> list[dict[str, Any]]:
        """Return a row for each run."""
        content = self.to_json()
        shared = {
            key: content[key] for key in ("judgments", "includes_own_captions", "pairs", "images")
        }
        return [
            flat_record(shared | {"run": run} | values) for run, values in content["runs"].items()
        ]

    def to_json(self) -> dict[str, Any]:
        """Return a JSON object."""

        def plain(correlations: dict[str, RankCorrelation]) -> dict[str, Any]:
            return {name: correlation.to_json() for name, correlation in correlations.items()}

        return {
            "judgments": self.judgments,
            "includes_own_captions": self.includes_own_captions,
            "pairs": self.pairs,
            "images": self.images,
            "annotators": plain(self.annotators),
            "runs": {run: plain(correlations) for run, correlations in self.runs.items()},
            "difference_to_first": {
                run: plain(correlations) for run, correlations in self.differences.items()
            },
        }


def measure_agreement(
    judgments: HumanJudgments, scores: Mapping[str, np.ndarray], *, resamples: int = RESAMPLES
) -> Iterator[HumanAgreement]:
    """Measure the agreement of scores with human judgments.

    Args:
        judgments: The judged pairs.
        scores: Scores of the pairs by run, shape ``[P]`` each.
        resamples: Number of bootstrap resamples.

    Yields:
        Agreement on all pairs, then without captions that were written for the image.

    Raises:
        DataError: If a score is NaN.
    """
    for run, values in scores.items():
        if np.isnan(values).any():
            raise DataError(
                f"{run}: expected a finite score, got NaN for pair "
                f"{int(np.isnan(values).argmax())}. Check the model and its features."
            )
    all_pairs = np.ones(len(judgments.is_own_caption), dtype=bool)
    for includes_own_captions, selected in ((True, all_pairs), (False, ~judgments.is_own_caption)):
        images = judgments.images[selected]
        captions = judgments.captions[selected]
        ratings = judgments.ratings[selected]
        annotators = [
            rank_correlations(single_ratings[selected], other_ratings[selected], images, resamples)
            for single_ratings, other_ratings in zip(
                judgments.single_ratings, judgments.mean_other_ratings, strict=True
            )
        ]
        runs = {
            run: rank_correlations(values[selected], ratings, images, resamples)
            for run, values in scores.items()
        }
        if judgments.kind == "cxc":
            for run, values in scores.items():
                runs[run]["sampled_spearman"] = sampled_spearman(
                    values[selected], ratings, captions, resamples
                )
        yield HumanAgreement(
            judgments=judgments.kind,
            includes_own_captions=includes_own_captions,
            pairs=len(ratings),
            images=len(np.unique(images)),
            # Means over the annotators. Empty without annotators.
            annotators={
                name: RankCorrelation(
                    float(np.mean([each[name].value for each in annotators])),
                    np.mean([each[name].resampled for each in annotators], 0),
                )
                for name in (annotators[0] if annotators else ())
            },
            runs=runs,
        )


def relevance_of_pairs(judgments: HumanJudgments, relevance: ImageRelevance) -> np.ndarray:
    """Compute the estimated relevance ``[P]`` of the judged pairs, to compare it like the scores of
    a model.
    """
    values = np.empty(len(judgments.images))
    for image in np.unique(judgments.images):
        pairs = judgments.images == image
        values[pairs] = relevance(
            torch.tensor([image]), torch.from_numpy(judgments.captions[pairs])
        )[0].numpy()
    return values


def rank_correlations(
    first: np.ndarray, second: np.ndarray, images: np.ndarray, resamples: int = RESAMPLES
) -> dict[str, RankCorrelation]:
    """Compute Kendall's tau-b and Spearman's rho of two rows of values of pairs ``[P]``. Memory
    grows with the square of the number of images, and with images times different values of
    ``second``.
    """
    from scipy.stats import kendalltau, spearmanr

    # The pairs are sorted once, by their first value. Each resample of images only counts them.
    order = np.argsort(first, kind="stable")
    first = first[order]
    second = second[order]
    names, image = np.unique(images[order], return_inverse=True)
    random = np.random.default_rng(SEED)
    counts = np.zeros((resamples, len(names)))  # [R, I], how often each image occurs
    for row in counts:
        row += np.bincount(random.integers(len(names), size=len(names)), minlength=len(names))
    # Concordant minus discordant pairs of pairs of each resample, [R]: $sum_ij t_i t_j c_ij$, where
    # `c_ij` is the number for images i and j.
    x, y = (np.unique(values, return_inverse=True)[1] for values in (first, second))
    concordant = np.einsum("ri,ri->r", counts @ _concordance(x, y, image), counts)
    kendall, spearman = np.empty((2, resamples))  # [R] each
    for resample, image_counts in enumerate(counts):
        weight = image_counts[image]  # [P]
        number_x, rank_x = _ranks(x, weight)
        number_y, rank_y = _ranks(y, weight)
        untied_x, untied_y = (
            weight.sum() ** 2 - number @ number for number in (number_x, number_y)
        )
        # NaN for a resample with equal values.
        with np.errstate(invalid="ignore"):
            kendall[resample] = 2 * concordant[resample] / np.sqrt(untied_x * untied_y)
            spearman[resample] = (
                (weight * rank_x[x])
                @ rank_y[y]
                / np.sqrt((number_x @ rank_x**2) * (number_y @ rank_y**2))
            )
    return {
        "kendall": RankCorrelation(float(kendalltau(first, second).statistic), kendall),
        "spearman": RankCorrelation(float(spearmanr(first, second).statistic), spearman),
    }


def sampled_spearman(
    first: np.ndarray, second: np.ndarray, queries: np.ndarray, samples: int = RESAMPLES
) -> RankCorrelation:
    """Compute Spearman's correlation over samples of half of the queries, each with one of its
    pairs (Parekh et al., 2021).
    """
    from scipy.stats import spearmanr

    order = np.argsort(queries, kind="stable")
    # The first pair of each query in this order, and its number of pairs.
    _, start, number = np.unique(queries[order], return_index=True, return_counts=True)
    random = np.random.default_rng(SEED)
    values = np.empty(samples)
    for sample in range(samples):
        half = random.permutation(len(start))[: len(start) // 2]
        rows = order[start[half] + random.integers(number[half])]
        values[sample] = spearmanr(first[rows], second[rows]).statistic
    return RankCorrelation(float(values.mean()), values)


def _concordance(x: np.ndarray, y: np.ndarray, image: np.ndarray) -> np.ndarray:
    """Concordant minus discordant pairs of rows of images i and j, where the row of i has the
    larger ``x``: ``[I, I]``. ``x`` is ascending, ``y`` has level numbers from 0.
    """
    levels = np.arange(y.max() + 1)  # [L]
    concordance = np.zeros((image.max() + 1,) * 2)
    # By level and image: the number of earlier rows with a lower y, minus the number with a higher
    # y.
    earlier = np.zeros((len(levels), len(concordance)))  # [L, I]
    for tied in np.split(np.arange(len(x)), np.flatnonzero(np.diff(x)) + 1):
        # Rows with equal x are neither concordant nor discordant: read all of them before any is
        # added.
        for row in tied:
            concordance[image[row]] += earlier[y[row]]
        for row in tied:
            earlier[:, image[row]] += np.sign(levels - y[row])
    return concordance


def _ranks(levels: np.ndarray, weight: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """How often each level occurs, and its mean rank minus the mean of all ranks."""
    number = np.bincount(levels, weight)  # [L]
    return number, np.cumsum(number) - (number + weight.sum()) / 2
