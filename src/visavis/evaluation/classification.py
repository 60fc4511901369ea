"""Zero-shot accuracy: images of a folder of classes, each class described by prompts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from visavis.core.encoded import unit_rows
from visavis.core.result import Result
from visavis.core.table import Column, Table
from visavis.evaluation.bootstrap import NUM_SAMPLES, BootstrapEstimate
from visavis.evaluation.metrics.ranking import best_ranks, raise_on_invalid_row
from visavis.losses.targets import Targets

TOP_K = 5
NUM_CONFUSIONS = 10
"""Number of confused pairs of classes that a result names."""


@dataclass(frozen=True)
class ClassAccuracy:
    """Accuracy of the images of one class, in percent.

    Attributes:
        name: Name of the class.
        images: Number of its images.
        top1: Share of images whose own class has the highest score.
        top5: Share of images whose own class is among the five highest.
        confused_with: Class that is predicted most often instead. None: all are right.
        confused_images: Number of images of which it is predicted.
    """

    name: str
    images: int
    top1: float
    top5: float
    confused_with: str | None
    confused_images: int


@dataclass(frozen=True, eq=False)
class ZeroShotResult(Result):
    """Zero-shot accuracy of a model.

    Attributes:
        protocol: Classes, images and prompts, and how several prompts are combined.
        top1: Share of images whose own class has the highest score, in percent, with its interval
            over images.
        top5: The same for the five highest scores.
        mean_per_class: Mean of the top-1 accuracy of all classes, which counts small classes like
            large ones.
        classes: Accuracy of each class, in the order of the names.
    """

    ROWS: ClassVar[str] = "classes"

    protocol: str
    top1: BootstrapEstimate
    top5: BootstrapEstimate
    mean_per_class: BootstrapEstimate
    classes: tuple[ClassAccuracy, ...]

    @property
    def confusions(self) -> list[ClassAccuracy]:
        """The classes with the most images of one wrong class, most first."""
        confused = [each for each in self.classes if each.confused_with is not None]
        return sorted(confused, key=lambda each: -each.confused_images)[:NUM_CONFUSIONS]

    def tables(self) -> list[Table]:
        """Return the accuracies with their intervals, and the most confused classes."""
        estimates = {"top-1 accuracy": self.top1}
        # Of five classes, all are among the five highest.
        if len(self.classes) > TOP_K:
            estimates["top-5 accuracy"] = self.top5
        estimates["mean per class, top-1"] = self.mean_per_class
        rows = [
            (name, each.value, None if each.interval is None else str(each.interval))
            for name, each in estimates.items()
        ]
        columns = (Column(is_text=True), Column("%", ".1f"), Column("95 % interval over images"))
        tables = [Table(columns, tuple(rows))]
        if confusions := self.confusions:
            confused = [
                (each.name, each.images, each.top1, each.confused_with, each.confused_images)
                for each in confusions
            ]
            class_columns = (
                Column("class", is_text=True),
                Column("images"),
                Column("top-1", ".1f"),
                Column("most often taken for"),
                Column("images"),
            )
            tables.append(Table(class_columns, tuple(confused)))
        note = (f"Protocol: {self.protocol}",)
        return [*tables[:-1], replace(tables[-1], notes=note)]

    def to_json(self) -> dict[str, Any]:
        """Convert to plain values."""
        estimates = {
            name: {
                "value": estimate.value,
                "interval": None
                if estimate.interval is None
                else [estimate.interval.low, estimate.interval.high],
            }
            for name in ("top1", "top5", "mean_per_class")
            for estimate in (getattr(self, name),)
        }
        return {
            "protocol": self.protocol,
            **estimates,
            "confusions": [each.name for each in self.confusions],
            "classes": [dict(vars(each)) for each in self.classes],
        }


def class_vectors(prompts: Tensor) -> Tensor:
    """Combine prompts ``[classes, templates, D]`` into a unit vector per class, ``[classes, D]``."""
    # The mean of unit vectors: Radford et al., CLIP (2021), section 3.1.4. CLIP_benchmark has the
    # same rule.
    return unit_rows(unit_rows(prompts).mean(1))


def zero_shot_accuracy(
    scores: Tensor, labels: Tensor, classes: Sequence[str], protocol: str, seed: int = 0
) -> ZeroShotResult:
    """Compute accuracies from scores ``[images, classes]`` and the class of each image. A tie counts
    against the model, and each class has an image.
    """
    raise_on_invalid_row(
        scores.isnan(), "scores of image {}: expected numbers, got NaN. Check the model."
    )
    targets = Targets(query_ids=labels, candidate_ids=torch.arange(len(classes)))
    # Rank of the own class, from 1.
    ranks = best_ranks(scores, targets).numpy()
    # The best-scored other class.
    others = scores.scatter(1, labels[:, None], float("-inf")).argmax(1).numpy()
    of_class = labels.numpy()
    sizes = np.bincount(labels.numpy(), minlength=len(classes))
    hits = {
        name: np.bincount(of_class[ranks <= k], minlength=len(classes))
        for name, k in (("top1", 1), ("top5", TOP_K))
    }
    accuracy = {key: 100 * counts / sizes for key, counts in hits.items()}
    rows = []
    for number, name in enumerate(classes):
        wrong = np.bincount(others[(of_class == number) & (ranks > 1)], minlength=1)
        rows.append(
            ClassAccuracy(
                name=name,
                images=int(sizes[number]),
                top1=float(accuracy["top1"][number]),
                top5=float(accuracy["top5"][number]),
                confused_with=classes[int(wrong.argmax())] if wrong.any() else None,
                confused_images=int(wrong.max()),
            )
        )
    random = np.random.default_rng(seed)

    def estimate(key: str, weights: np.ndarray) -> BootstrapEstimate:
        # Hits among n images of a class that are drawn with replacement are binomial.
        sampled = random.binomial(sizes, hits[key] / sizes, (NUM_SAMPLES, len(classes)))
        return BootstrapEstimate.from_samples(
            float(hits[key] @ weights), sampled @ weights, "images", len(labels)
        )

    over_images = np.full(len(classes), 100 / len(labels))
    over_classes = 100 / sizes / len(classes)
    return ZeroShotResult(
        protocol=protocol,
        top1=estimate("top1", over_images),
        top5=estimate("top5", over_images),
        mean_per_class=estimate("top1", over_classes),
        classes=tuple(rows),
    )
