"""A learning curve: how good a model is by how many pictures or captions it learns from, and what twice as many would bring."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from visavis.auditing.concern import Concern
from visavis.auditing.fitting import Fit
from visavis.auditing.power_law import Outlook, outlook
from visavis.auditing.remembered import place, remembered_value
from visavis.data.dataset import Dataset
from visavis.models import Matcher
from visavis.progress import Progress
from visavis.training.data_module import DataModule

SHARES = (0.125, 0.25, 0.5, 1.0)
LONGEST, LOOKS = 4.0, 4
"""A part of the data is trained on for as many steps as the whole, but at most so many times as many epochs; a curve shows the best of so
many looks, so that neither too short nor too long a training stands for too little data."""


@dataclass(frozen=True)
class Point:
    """The validation RSUM of a model that learned from so many pictures or captions a picture."""

    size: int
    seed: int
    rsum: float


@dataclass(frozen=True)
class Axis:
    """What more of something brings. thing: "pictures", or "captions a picture". outlook: None where it cannot be told from so few sizes."""

    thing: str
    points: tuple[Point, ...]
    outlook: Outlook | None

    def __str__(self) -> str:
        by_size = {size: [point.rsum for point in self.points if point.size == size] for size in sorted({p.size for p in self.points})}
        means = ", ".join(f"{size:,}: {np.mean(values):.1f}" for size, values in by_size.items())
        return f"{self.thing} {means}; {self.outlook or f'what twice as many would bring cannot be told from {len(by_size)} sizes'}"


@dataclass(frozen=True)
class LearningCurve:
    """Validation RSUM by pictures and by captions a picture. validation: the images that are ranked."""

    axes: tuple[Axis, ...]
    validation: int

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    def concerns(self) -> list[Concern]:
        points = sum(len(axis.points) for axis in self.axes)
        what = f"validation RSUM ({self.validation:,} images) of {points} models, by what they learned from."
        return [Concern("learning curve", points, what, self.remedy, tuple(map(str, self.axes)), alarm=False)]

    @property
    def remedy(self) -> str:
        """Which of the two to collect, where it can be told."""
        gains = {axis.thing: axis.outlook for axis in self.axes if axis.outlook is not None and axis.outlook.told == "more"}
        if not gains:
            return "more of the same would not surely help: try another encoder or recipe first, or more seeds."
        best = max(gains, key=lambda thing: gains[thing].gain)
        return f"more {best} would help: twice as many are worth {gains[best].gain:+.1f} RSUM."


def learning_curve(data_module: DataModule, data: Dataset, identity: Any, seeds: int, progress: Progress) -> LearningCurve:
    """Models of parts of the training split, tested on the validation split; each is kept, so that a next call goes on."""
    train, validation = data.split("train"), data_module.validation
    axes = {"pictures": [(round(share * len(train.images)), share, (round(share * len(train.images)), 0)) for share in SHARES]}
    most = min(map(len, train.captions_of))
    if most > 1:
        numbers = sorted({1, 2, -(-most // 2), most})
        axes["captions a picture"] = [(number, number / most, (0, number)) for number in numbers]
    total, done, curves = seeds * sum(map(len, axes.values())), 0, list[Axis]()
    for thing, sizes in axes.items():
        points = []
        for size, share, part in sizes:
            for seed in range(seeds):
                rsum = _rsum(data_module, train.fewer(*part, seed), validation, identity, seed, share, progress)
                points.append(Point(size, seed, rsum))
                done += 1
                progress.work("learning curve", done, total, 0.0)
        told = outlook(np.array([p.size for p in points]), np.array([p.rsum for p in points])) if len(sizes) > 2 and seeds > 1 else None
        curves.append(Axis(thing, tuple(points), told))
    return LearningCurve(tuple(curves), len(validation.images))


def _rsum(data_module: DataModule, part: Dataset, validation: Dataset, identity: Any, seed: int, share: float, progress: Progress) -> float:
    """The best validation RSUM of a model that learns from a part of the data."""

    def compute() -> list[float]:
        values = list[float]()

        def on_look(matcher: Matcher) -> None:
            values.append(data_module.evaluate(matcher, validation).metrics["rsum"])

        def on_step(done: int, total: int) -> None:
            progress.work(f"model of {len(part.images):,} pictures", done, total, 0.0)

        Fit(data_module, seed, longer=min(1 / share, LONGEST), looks=LOOKS, on_look=on_look, on_step=on_step).run(part, validation)
        return values

    where = place("curve", identity, part.image_rows.tolist(), part.caption_rows.tolist(), seed, share, LOOKS, LONGEST)
    looks: list[float] = remembered_value(where, list[float], compute)
    return max(looks)
