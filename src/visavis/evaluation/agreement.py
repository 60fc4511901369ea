"""Do people agree? Rank correlation between a model's scores of image-caption pairs and what people said of the same pairs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from visavis.degrees import ImageDegrees
from visavis.errors import DataError
from visavis.evaluation.human_judgements import Judgements
from visavis.evaluation.rank_correlation import RESAMPLES, Correlation, correlate, sampled_spearman


@dataclass(frozen=True, eq=False)
class Agreement:
    """How far runs, and single people, agree with people on one set of pairs.

    judgements: "expert", "crowd" or "cxc". own_pairs: whether captions written for the image itself are among the pairs. people, where
    single people are known, and each of runs: ``kendall`` (tau-b) and ``spearman``; of "cxc" also ``sampled_spearman``, by caption.
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
        images, captions, ratings = said.images[kept], said.captions[kept], said.ratings[kept]
        single = [correlate(one[kept], rest[kept], images, resamples) for one, rest in zip(said.raters, said.others, strict=True)]
        runs = {run: correlate(values[kept], ratings, images, resamples) for run, values in scores.items()}
        if said.kind == "cxc":
            for run, values in scores.items():
                runs[run]["sampled_spearman"] = sampled_spearman(values[kept], ratings, captions, resamples)
        yield Agreement(
            judgements=said.kind,
            own_pairs=own_pairs,
            pairs=len(ratings),
            images=len(np.unique(images)),
            people={name: _average([found[name] for found in single]) for name in single[0]} if single else {},
            runs=runs,
        )


def degrees_of_pairs(said: Judgements, degrees: ImageDegrees) -> np.ndarray:
    """The degrees of the judged pairs ``[P]``, as a model's scores would be: an image's own captions speak for it."""
    found = np.empty(len(said.images))
    for image in np.unique(said.images):
        pairs = said.images == image
        found[pairs] = degrees(torch.tensor([image]), torch.from_numpy(said.captions[pairs]))[0].numpy()
    return found


def _average(found: list[Correlation]) -> Correlation:
    return Correlation(float(np.mean([each.value for each in found])), np.mean([each.resampled for each in found], 0))
