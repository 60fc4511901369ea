"""Do people agree? Rank correlation between a model's scores of image-caption pairs and what people said of the same pairs.

The judgements of Flickr8k (Hodosh et al., 2013): experts, three a pair, from 1 (not related) to 4 (describes the image);
a crowd, three or more a pair, yes or no. Intervals are percentile bootstrap over images, as pairs of one image are alike;
the same resamples for every run, so that runs are compared on equal images.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from visavis import storage
from visavis.data.dataset import Dataset
from visavis.degrees import ImageDegrees
from visavis.errors import DataError

RESAMPLES, SEED, COVERAGE = 1000, 0, 0.95
FILES = {"expert": "ExpertAnnotations.txt", "crowd": "CrowdFlowerAnnotations.txt"}
FORMS = {
    "expert": "an image, a caption as file#number, three ratings from 1 to 4",
    "crowd": "an image, a caption as file#number, the share of yes, the number of yes and of no",
}


@dataclass(frozen=True, eq=False)
class Judgements:
    """What people said of pairs.

    images, captions ``[P]``: positions in the split. own ``[P]``: the caption was written for the image. ratings ``[P]``: the
    experts' mean, the crowd's share of yes. raters, others ``[R, P]``: single raters, and beside each the mean of the rest:
    every expert; of the crowd, whose answers are only counted, one answer of each pair drawn at random.
    """

    kind: str
    images: np.ndarray
    captions: np.ndarray
    own: np.ndarray
    ratings: np.ndarray
    raters: np.ndarray
    others: np.ndarray


@dataclass(frozen=True, eq=False)
class Correlation:
    """A rank correlation, and its values on resampled images."""

    value: float
    resampled: np.ndarray

    @property
    def interval(self) -> tuple[float, float]:
        low, high = np.quantile(self.resampled, [(1 - COVERAGE) / 2, (1 + COVERAGE) / 2])
        return float(low), float(high)

    def __sub__(self, other: Correlation) -> Correlation:
        return Correlation(self.value - other.value, self.resampled - other.resampled)

    def to_json(self) -> dict[str, float]:
        low, high = self.interval
        return {"value": self.value, "low": low, "high": high}


@dataclass(frozen=True, eq=False)
class Agreement:
    """How far runs, and single people, agree with people on one set of pairs.

    judgements: "expert" or "crowd". own_pairs: whether captions written for the image itself are among the pairs. people, and each
    of runs: ``kendall`` (tau-b) and ``spearman``.
    """

    judgements: str
    own_pairs: bool
    pairs: int
    images: int
    people: dict[str, Correlation]
    runs: dict[str, dict[str, Correlation]]

    @property
    def differences(self) -> dict[str, dict[str, Correlation]]:
        """Every further run less the first, on the same resamples."""
        (_, first), *others = self.runs.items()
        return {run: {name: found[name] - first[name] for name in found} for run, found in others}

    def to_json(self) -> dict[str, Any]:
        def plain(found: dict[str, Correlation]) -> dict[str, Any]:
            return {name: correlation.to_json() for name, correlation in found.items()}

        return {
            **{name: getattr(self, name) for name in ("judgements", "own_pairs", "pairs", "images")},
            "people": plain(self.people),
            "runs": {run: plain(found) for run, found in self.runs.items()},
            "less_the_first": {run: plain(found) for run, found in self.differences.items()},
        }


def agree(said: Judgements, scores: Mapping[str, np.ndarray], *, resamples: int = RESAMPLES) -> Iterator[Agreement]:
    """Agreement on all pairs, then without an image's own captions. scores: for each run, those of the pairs ``[P]``.

    Raises DataError for a score that is not a number.
    """
    for run, values in scores.items():
        if np.isnan(values).any():
            raise DataError(f"{run}: the score of pair {int(np.isnan(values).argmax())} is NaN: the model or its features are broken.")
    for own_pairs, kept in ((True, np.ones(len(said.own), dtype=bool)), (False, ~said.own)):
        images = said.images[kept]
        single = [correlate(one[kept], rest[kept], images, resamples) for one, rest in zip(said.raters, said.others, strict=True)]
        yield Agreement(
            judgements=said.kind,
            own_pairs=own_pairs,
            pairs=int(kept.sum()),
            images=len(np.unique(images)),
            people={name: _average([found[name] for found in single]) for name in MEASURES},
            runs={run: correlate(values[kept], said.ratings[kept], images, resamples) for run, values in scores.items()},
        )


def correlate(first: np.ndarray, second: np.ndarray, images: np.ndarray, resamples: int = RESAMPLES) -> dict[str, Correlation]:
    """Rank correlations of two rows of values ``[P]``, with those of resampled images, each with all its pairs."""
    order = np.argsort(first, kind="stable")  # scipy sorts what is sorted already in half the time
    first, second = first[order], second[order]
    names, image = np.unique(images[order], return_inverse=True)
    random = np.random.default_rng(SEED)
    found: dict[str, list[float]] = {name: [] for name in MEASURES}
    for draw in range(resamples + 1):
        times = np.bincount(random.integers(len(names), size=len(names)), minlength=len(names)) if draw else np.ones(len(names), int)
        rows = np.repeat(np.arange(len(image)), times[image])
        for name, measure in MEASURES.items():
            found[name].append(float(measure(first[rows], second[rows])))
    return {name: Correlation(values[0], np.array(values[1:])) for name, values in found.items()}


def degrees_of_pairs(said: Judgements, degrees: ImageDegrees) -> np.ndarray:
    """The degrees of the judged pairs ``[P]``, as a model's scores would be: an image's own captions speak for it."""
    found = np.empty(len(said.images))
    for image in np.unique(said.images):
        pairs = said.images == image
        found[pairs] = degrees(torch.tensor([image]), torch.from_numpy(said.captions[pairs]))[0].numpy()
    return found


def read_judgements(kind: str, folder: Path, data: Dataset) -> Judgements:
    """The judgements in a folder of the images and captions of a split.

    Raises DataError where the file is missing, a line is damaged, or names an image or a caption that the split does not have.
    """
    path = folder / FILES[kind]
    if not path.is_file():
        raise DataError(f"{path} does not exist: people's judgements are of Flickr8k's test images; name its folder with --data.")
    position = {image.name: i for i, image in enumerate(data.images)}
    images, captions, numbers = [], [], []
    for number, line in enumerate(storage.read_text(path).splitlines(), 1):
        try:
            image, caption, *values = line.split("\t")
            file, _, place = caption.rpartition("#")
            numbers.append(_answers(kind, values))
            described, k = position[file], int(place)
            images.append(position[image])
        except KeyError as unknown:
            raise DataError(f"{path}:{number}: the split of {len(position):,} images has no image {unknown}.") from None
        except ValueError:
            raise DataError(f"{path}:{number}: {line[:80]!r} is damaged: expected {FORMS[kind]}, separated by tabs.") from None
        own = data.captions_of[described]
        if not 0 <= k < len(own):
            raise DataError(f"{path}:{number}: image {file} has {len(own)} captions, none of number {k} counted from 0.")
        captions.append(own[k])
    if not numbers:
        raise DataError(f"{path} is empty: expected lines of {FORMS[kind]}.")
    return _judgements(kind, np.array(images), np.array(captions), np.array(numbers).T, data)


def _answers(kind: str, values: list[str]) -> tuple[float, float, float]:
    """The three numbers of a line. Raises ValueError for what cannot be an answer, or where one rater has nobody to agree with."""
    first, second, third = map(float, values)
    if kind == "expert":
        valid = {first, second, third} <= {1, 2, 3, 4}
    else:
        valid = 0 <= first <= 1 and min(second, third) >= 0 and second + third > 1
    if not valid:
        raise ValueError
    return first, second, third


def _judgements(kind: str, images: np.ndarray, captions: np.ndarray, numbers: np.ndarray, data: Dataset) -> Judgements:
    own = data.image_of[captions] == images
    if kind == "expert":
        return Judgements(kind, images, captions, own, numbers.mean(0), numbers, (numbers.sum(0) - numbers) / 2)
    _, yes, no = numbers
    share = yes / (yes + no)
    one = (np.random.default_rng(SEED).random(len(share)) < share).astype(float)
    return Judgements(kind, images, captions, own, share, one[None], ((yes - one) / (yes + no - 1))[None])


def _average(found: list[Correlation]) -> Correlation:
    return Correlation(float(np.mean([each.value for each in found])), np.mean([each.resampled for each in found], 0))


def _kendall(first: np.ndarray, second: np.ndarray) -> float:
    from scipy.stats import kendalltau

    return kendalltau(first, second).statistic


def _spearman(first: np.ndarray, second: np.ndarray) -> float:
    from scipy.stats import spearmanr

    return spearmanr(first, second).statistic


MEASURES = {"kendall": _kendall, "spearman": _spearman}
