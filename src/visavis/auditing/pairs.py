"""Pairs that are likely wrong: captions beside a picture that they do not describe, the most suspicious first."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from visavis.auditing.concern import Concern
from visavis.auditing.folds import Held
from visavis.auditing.mixture import Mixture, odds
from visavis.data.dataset import Dataset

LISTED = 0.5
"""Pairs are listed as long as at least this share of the list is expected to be wrong."""
MANY = 0.01
"""From this share of wrong pairs on, an alarm: fewer cost a training little."""


@dataclass(frozen=True)
class Suspect:
    """A pair that looks wrong. weight: how much the objective would pull the two together, both directions, by a model that never saw them.
    rank: of the image among ``candidates`` for this caption. fits: the image that the caption scores highest with. precision: of the list
    down to this pair, the share that is expected to be wrong.
    """

    image: str
    split: str
    caption: str
    weight: float
    rank: int
    candidates: int
    fits: str
    precision: float

    def __str__(self) -> str:
        better = f"; {self.fits} fits better" if self.rank > 1 else ""
        return f'{self.image} ({self.split}): "{self.caption}" (rank {self.rank:,} of {self.candidates:,}{better})'


@dataclass(frozen=True)
class WrongPairs:
    """Likely wrong pairs. share, upper: of all pairs that are wrong, as estimated, and at most, with 95 % confidence. recall: the share of
    captions beside a picture drawn at random that would stand in the list. objective: whose weights were asked.
    """

    suspects: tuple[Suspect, ...]
    captions: int
    share: float
    upper: float
    recall: float
    objective: str
    folds: int

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    def concerns(self) -> list[Concern]:
        if not self.suspects:
            return []
        what = (
            f"about {self.share:.1%} of the {self.captions:,} pairs look wrong to models that never saw them, at most {self.upper:.1%}; of these, "
            f"{self.suspects[-1].precision:.0%} are expected to be, and {self.recall:.0%} of all captions beside a wrong picture to be among them."
        )
        return [Concern("likely wrong pairs", len(self.suspects), what, _REMEDY, tuple(map(str, self.suspects)), self.share >= MANY)]


_REMEDY = "look at the first ones; mend or take out what is wrong. Where it is too much to look at, train with NoisySupervision()."


def wrong_pairs(data: Dataset, held: Held, objective: str, folds: int) -> WrongPairs:
    """Likely wrong pairs by what models that never saw them say of all pairs."""
    scores, wrong = odds(held.facts, held.other)
    mixture = Mixture.of(scores, wrong)
    order = np.argsort(-scores, kind="stable")
    listed = order[: _last(mixture.precision[order] >= LISTED)]
    suspects = tuple(_suspect(data, held, int(caption), float(mixture.precision[caption])) for caption in listed)
    recall = float(mixture.recall[listed[-1]]) if len(listed) else 0.0
    return WrongPairs(suspects, len(data.captions), mixture.share, mixture.upper, recall, objective, folds)


def _last(enough: np.ndarray) -> int:
    """The length of the longest list that is good enough at its end."""
    return int(np.flatnonzero(enough)[-1]) + 1 if enough.any() else 0


def _suspect(data: Dataset, held: Held, caption: int, precision: float) -> Suspect:
    image = data.images[data.image_of[caption]]
    fits = data.images[held.better[caption]].name
    weight, rank, candidates = float(held.weight[caption]), int(held.rank[caption]), int(held.candidates[caption])
    return Suspect(image.name, image.split, data.captions[caption], weight, rank, candidates, fits, precision)
