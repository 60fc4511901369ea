"""Results of robustness probes: how often the true caption scores above the edited one, and recall changes after harmless edits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from visavis.data.vocabulary import tokenize
from visavis.evaluation import Evaluation
from visavis.notebook import NotebookTable
from visavis.robustness.caption_edits import MinimalPair

CHANCE_PERCENT = 50.0
"""Expected accuracy of random scores, in percent."""
# Sums in another order differ by less than this.
TIE_TOLERANCE = 1e-6
"""Scores are equal if they differ by at most this share of their size, or of 1."""
KS = (1, 10)
"""Cutoffs of recall."""


@dataclass(frozen=True)
class ProbeResult:
    """Accuracy on the minimal pairs of one kind of edit.

    Attributes:
        kind: Kind of edit.
        num_pairs: Number of minimal pairs.
        num_correct: Number of pairs whose true caption scores higher. A tie is not correct.
        num_ties: Number of pairs with equal scores.
        same_words: Whether both captions always have the same words in another order, which a bag of words cannot distinguish.
        low: Lower bound of the 95 % interval of the accuracy (Wilson), in percent.
        high: Upper bound of the interval, in percent.
    """

    kind: str
    num_pairs: int
    num_correct: int
    num_ties: int
    same_words: bool
    low: float
    high: float

    @property
    def percent(self) -> float:
        """Accuracy in percent."""
        return 100 * self.num_correct / self.num_pairs

    @property
    def title(self) -> str:
        """The kind of edit, with a star if both captions have the same words."""
        return f"{self.kind} *" if self.same_words else self.kind

    @classmethod
    def from_scores(cls, kind: str, true: np.ndarray, edited: np.ndarray, *, same_words: bool) -> ProbeResult:
        """Count correct pairs.

        Args:
            kind: Kind of edit.
            true: Scores of the true captions, shape ``[N]``.
            edited: Scores of the edited captions, shape ``[N]``.
            same_words: Whether both captions always have the same words.

        Returns:
            The accuracy.
        """
        from scipy.stats import binomtest

        tie = np.abs(true - edited) <= TIE_TOLERANCE * np.maximum(1, np.maximum(np.abs(true), np.abs(edited)))
        num_correct = int(((true > edited) & ~tie).sum())
        interval = binomtest(num_correct, len(true)).proportion_ci(method="wilson")
        return cls(kind, len(true), num_correct, int(tie.sum()), same_words, 100 * interval.low, 100 * interval.high)

    def to_json(self) -> dict[str, Any]:
        """Return a JSON object."""
        return asdict(self) | {"percent": self.percent, "chance": CHANCE_PERCENT}


@dataclass(frozen=True)
class RecallChange:
    """Change of recall by an edit that keeps captions true, or images recognizable.

    Attributes:
        edit: Name of the edit.
        direction: "i2t" or "t2i".
        k: Cutoff of recall.
        before: Recall without the edit, in percent.
        after: Recall with the edit, in percent.
        low: Lower bound of the 95 % interval of the difference, paired over images (t-distribution).
        high: Upper bound of the interval.
    """

    edit: str
    direction: str
    k: int
    before: float
    after: float
    low: float
    high: float

    @property
    def difference(self) -> float:
        """Difference of the recalls, in percentage points."""
        return self.after - self.before

    @classmethod
    def from_ranks(cls, edit: str, direction: str, k: int, before: np.ndarray, after: np.ndarray, images: np.ndarray) -> RecallChange:
        """Compare the ranks of the same queries.

        Args:
            edit: Name of the edit.
            direction: "i2t" or "t2i".
            k: Cutoff of recall.
            before: Rank of each query without the edit, shape ``[Q]``.
            after: Rank of each query with the edit, shape ``[Q]``.
            images: Image of each query, numbered from 0 without gaps, shape ``[Q]``.

        Returns:
            The change of recall.
        """
        from scipy.stats import t

        hits_before, hits_after = before <= k, after <= k
        number = np.bincount(images)
        change = 100 * np.bincount(images, hits_after.astype(float) - hits_before) / number
        mean, error = float(change @ number / number.sum()), float(change.std(ddof=1) / np.sqrt(len(change))) if len(change) > 1 else np.inf
        half_width = float(t.ppf(0.975, max(len(change) - 1, 1))) * error
        recall_before, recall_after = float(100 * hits_before.mean()), float(100 * hits_after.mean())
        return cls(edit, direction, k, recall_before, recall_after, mean - half_width, mean + half_width)

    def to_json(self) -> dict[str, Any]:
        """Return a JSON object."""
        return asdict(self) | {"difference": self.difference}


@dataclass(frozen=True)
class ProbeReport(NotebookTable):
    """Results of all probes of a run.

    Attributes:
        run: Run folder.
        model: Kind of the model and its image encoder.
        data: Name of the data set.
        images: Number of images.
        source: By what the edited captions are false.
        results: Accuracy by kind of edit.
        recall_changes: Changes of recall by harmless edits.
        skipped: Sentences about probes that were not possible.
    """

    ROWS: ClassVar[str] = "results"

    run: Path
    model: str
    data: str
    images: int
    source: str
    results: tuple[ProbeResult, ...]
    recall_changes: tuple[RecallChange, ...]
    skipped: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """Return a JSON object."""
        results, changes = ([part.to_json() for part in parts] for parts in (self.results, self.recall_changes))
        return vars(self) | {"run": str(self.run), "results": results, "recall_changes": changes}


def results_by_kind(pairs: Sequence[MinimalPair], true: np.ndarray, edited: np.ndarray) -> tuple[ProbeResult, ...]:
    """Compute the accuracy for each kind of edit.

    Args:
        pairs: Minimal pairs.
        true: Scores of the true captions, shape ``[N]``.
        edited: Scores of the edited captions, shape ``[N]``.

    Returns:
        Accuracies, in the order of the pairs.
    """
    results = []
    for kind in dict.fromkeys(pair.kind for pair in pairs):
        index = [number for number, pair in enumerate(pairs) if pair.kind == kind]
        same_words = all(sorted(tokenize(pairs[i].true)) == sorted(tokenize(pairs[i].edited)) for i in index)
        results.append(ProbeResult.from_scores(kind, true[index], edited[index], same_words=same_words))
    return tuple(results)


def recall_changes(edit: str, before: Evaluation, after: Evaluation) -> tuple[RecallChange, ...]:
    """Compute the changes of recall by an edit of all images, or of all captions.

    Args:
        edit: Name of the edit.
        before: Evaluation without the edit.
        after: Evaluation with the edit.

    Returns:
        Changes for both directions and all cutoffs.
    """
    ranks, ranks_after = before.query_ranks, after.query_ranks
    directions = {
        "i2t": (ranks.image_ranks, ranks_after.image_ranks, ranks.image_ids),
        "t2i": (ranks.text_ranks, ranks_after.text_ranks, ranks.text_ids),
    }
    return tuple(RecallChange.from_ranks(edit, direction, k, *queries) for direction, queries in directions.items() for k in KS)
