"""What probes say: per kind of edit how often the true caption scores above the false one, and what harmless edits cost."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from visavis.data.captions import tokenize
from visavis.data.minimal_pairs import MinimalPair
from visavis.evaluation import Evaluation

CHANCE = 50.0
TIE = 1e-6
"""Scores that differ by no more, of their size or of 1, are equal: sums in another order differ by less."""
KS = (1, 10)


@dataclass(frozen=True)
class Slice:
    """The minimal pairs of one kind of edit.

    understood: cases whose true caption scores above the edited one; a tie is none, as everywhere. ties: cases of which both score the
    same. same_words: whether both captions always have the same words in another order, which a bag of words cannot tell. percent, low,
    high: the share understood with its 95 % interval, by Wilson.
    """

    kind: str
    cases: int
    understood: int
    ties: int
    same_words: bool
    low: float
    high: float

    @property
    def percent(self) -> float:
        return 100 * self.understood / self.cases

    @property
    def title(self) -> str:
        """The kind, with a star where both captions have the same words."""
        return f"{self.kind} *" if self.same_words else self.kind

    @classmethod
    def of(cls, kind: str, true: np.ndarray, edited: np.ndarray, *, same_words: bool) -> Slice:
        """true, edited ``[N]``: the scores of both captions of each case."""
        from scipy.stats import binomtest

        tie = np.abs(true - edited) <= TIE * np.maximum(1, np.maximum(np.abs(true), np.abs(edited)))
        understood = int(((true > edited) & ~tie).sum())
        interval = binomtest(understood, len(true)).proportion_ci(method="wilson")
        return cls(kind, len(true), understood, int(tie.sum()), same_words, 100 * interval.low, 100 * interval.high)

    def to_json(self) -> dict[str, Any]:
        return asdict(self) | {"percent": self.percent, "chance": CHANCE}


@dataclass(frozen=True)
class Cost:
    """What an edit that keeps a caption true, or a picture recognizable, does to a recall: before, after, in percent.

    low, high: the 95 % interval of the difference, paired: by the t-distribution over images.
    """

    edit: str
    way: str
    k: int
    before: float
    after: float
    low: float
    high: float

    @property
    def difference(self) -> float:
        return self.after - self.before

    @classmethod
    def of(cls, edit: str, way: str, k: int, before: np.ndarray, after: np.ndarray, images: np.ndarray) -> Cost:
        """before, after ``[Q]``: the ranks of the same queries. images ``[Q]``: the image of each, from 0 without gaps."""
        from scipy.stats import t

        hits, kept = before <= k, after <= k
        number = np.bincount(images)
        change = 100 * np.bincount(images, kept.astype(float) - hits) / number
        mean, error = float(change @ number / number.sum()), float(change.std(ddof=1) / np.sqrt(len(change))) if len(change) > 1 else np.inf
        half = float(t.ppf(0.975, max(len(change) - 1, 1))) * error
        return cls(edit, way, k, float(100 * hits.mean()), float(100 * kept.mean()), mean - half, mean + half)

    def to_json(self) -> dict[str, Any]:
        return asdict(self) | {"difference": self.difference}


@dataclass(frozen=True)
class Probes:
    """What the probes of a run found. source: who says that an edited caption is false. left_out: sentences that say what could not be probed."""

    run: Path
    model: str
    data: str
    images: int
    source: str
    slices: tuple[Slice, ...]
    costs: tuple[Cost, ...]
    left_out: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        facts = {name: getattr(self, name) for name in ("model", "data", "images", "source")}
        parts = {"slices": [one.to_json() for one in self.slices], "costs": [one.to_json() for one in self.costs]}
        return {"run": str(self.run), **facts, **parts, "left_out": list(self.left_out)}


def slices_of(pairs: Sequence[MinimalPair], true: np.ndarray, edited: np.ndarray) -> tuple[Slice, ...]:
    """The scores of minimal pairs, ``[N]`` each, by kind of edit, in the order of the pairs."""
    slices = []
    for kind in dict.fromkeys(pair.kind for pair in pairs):
        index = [number for number, pair in enumerate(pairs) if pair.kind == kind]
        same = all(sorted(tokenize(pairs[i].true)) == sorted(tokenize(pairs[i].edited)) for i in index)
        slices.append(Slice.of(kind, true[index], edited[index], same_words=same))
    return tuple(slices)


def costs_of(edit: str, before: Evaluation, after: Evaluation) -> tuple[Cost, ...]:
    """What an edit of all images, or of all captions, costs in both directions."""
    told = []
    for way, old, new, images in (
        ("i2t", before.image_ranks, after.image_ranks, before.image_ids),
        ("t2i", before.text_ranks, after.text_ranks, before.text_ids),
    ):
        assert images is not None
        told += [Cost.of(edit, way, k, old, new, images) for k in KS]
    return tuple(told)
