"""Compare runs by how coherent their ranked lists are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

from visavis import spec, storage, supervision
from visavis.comparison.lists import Query, answer, choose
from visavis.comparison.measure import SHOWN, Measured, Ranker, Scale, check, measure
from visavis.data.dataset import Dataset
from visavis.degrees import CATALOG, Degrees, ImageBy
from visavis.errors import RunError, VisavisError
from visavis.memory import Memory
from visavis.progress import Progress
from visavis.runs.folder import open_run, recipe_of
from visavis.spec import check_seed
from visavis.training.recipe import Recipe
from visavis.types import Direction


@dataclass(frozen=True)
class RankedLists:
    """The lists of several runs for the same queries, and how coherently each ranks. data: the split that was ranked. degrees: their
    estimator. image: as in ``Degrees.between``. top: the length of the lists. rankers: the runs, and last the random order. taught: runs
    that were trained by the same degrees. measured: by direction, in the order of the rankers.
    """

    folder: Path
    data: Dataset
    degrees: Degrees
    image: ImageBy
    top: int
    scale: Scale
    rankers: tuple[Ranker, ...]
    taught: tuple[str, ...]
    measured: Mapping[Direction, Sequence[Measured]]
    queries: tuple[Query, ...]

    @property
    def split(self) -> str:
        return self.data.images[0].split

    def to_json(self) -> dict[str, Any]:
        """All numbers, and the lists of the chosen queries, with names and captions."""
        return {
            "folder": str(self.folder),
            "data": self.data.name,
            "split": self.split,
            "images": len(self.data.images),
            "captions": len(self.data.captions),
            "degrees": repr(self.degrees),
            "image": self.image,
            "top": self.top,
            "irrelevant": self.scale.irrelevant,
            "runs": [
                {
                    "name": ranker.name,
                    "objective": ranker.objective,
                    "same_degrees": ranker.name in self.taught,
                    **{way: self.measured[way][place].to_json() for way in SHOWN},
                }
                for place, ranker in enumerate(self.rankers)
            ],
            "queries": [query.to_json(self.data) for query in self.queries],
        }


def compare_runs(
    runs: Sequence[Path],
    degrees: str,
    *,
    image: ImageBy,
    queries: int | Sequence[str],
    top: int,
    irrelevant: float,
    split: str | None,
    data: str | None,
    seed: int,
    out: str | Path | None,
    memory: Memory,
    progress: Progress,
) -> RankedLists:
    """Rank a split with every run and measure.

    data: another data set than the runs' own. out: a new folder for what is made of it, ``runs/coherence-<n>`` where it is None.

    Raises RunError for runs of different data, SpecError for unknown degrees, DataError for constant ones, VisavisError for
    an unknown query.
    """
    if top < 1:
        raise VisavisError(f"top is {top}, expected at least 1.")
    check_seed(seed)
    if image not in get_args(ImageBy):
        raise VisavisError(f"image is {image!r}, expected own, best or mean.")
    with storage.begun_folder(out, "runs/coherence") as folder:
        scale, estimator = Scale(irrelevant), spec.parse(degrees, CATALOG)
        recipes = [recipe_of(run, data, memory) for run in runs]
        split = split or recipes[0].evaluation.test
        names = _names(runs)
        opened = [_open(run, name, recipe, split, progress) for run, name, recipe in zip(runs, names, recipes, strict=True)]
        ranked_data = opened[0][1]
        for run, (_, other) in zip(runs, opened, strict=True):
            if other.fingerprint != ranked_data.fingerprint:
                raise RunError(
                    f"split {split} of {other.name}, the data of {run}, is not that of {ranked_data.name}, the data of {runs[0]}: "
                    "lists can be compared only where all runs rank the same images and captions."
                )
        chosen = choose(queries, ranked_data, seed)
        image_degrees = estimator.between(ranked_data, image)
        check(image_degrees, ranked_data)
        ranked = tuple(ranker for ranker, _ in opened)
        rankers = (*ranked, Ranker.random(ranked_data, seed))
        memory = recipes[0].memory or None
        return RankedLists(
            folder,
            ranked_data,
            estimator,
            image,
            top,
            scale,
            rankers,
            tuple(name for name, recipe in zip(names, recipes, strict=True) if _taught(recipe, estimator)),
            measure(rankers, estimator, image, ranked_data, scale, top, progress, memory),
            tuple(answer(way, index, ranked, image_degrees, ranked_data, scale, top, memory) for way, index in chosen),
        )


def _open(run: Path, name: str, recipe: Recipe, split: str, progress: Progress) -> tuple[Ranker, Dataset]:
    data_module, matcher = open_run(run, recipe, progress)
    data = data_module.data.split(split)
    trained_with = recipe.phases[-1].objective if recipe.phases else "zero-shot"
    return Ranker.of_run(name, trained_with, matcher, *data_module.encode(matcher, data)), data


def _names(runs: Sequence[Path]) -> list[str]:
    """The names of the folders; their paths where two have one name."""
    names = [run.resolve().name for run in runs]
    return names if len(set(names)) == len(names) else [str(run) for run in runs]


def _taught(recipe: Recipe, degrees: Degrees) -> bool:
    """Whether a phase of the training used these same degrees."""
    teachers = (spec.parse(phase.supervision, supervision.CATALOG) for phase in recipe.phases)
    specs = [teacher.degrees for teacher in teachers if isinstance(teacher, supervision.GradedSupervision)]
    return degrees in (spec.parse(text, CATALOG) for text in specs)
