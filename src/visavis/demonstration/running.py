"""The demo: a world is drawn, three objectives are trained on it, compared, and searched; all ends in one report.

What it leaves in its folder: ``report.html``, ``table.md``, ``table.json``, ``retrieval.png``, ``curves.png``,
``demo.json`` (what ran, and for how long), ``scenes/`` (a data set like any other) and a run folder for each training.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from visavis import storage
from visavis.comparison.table import Table
from visavis.data import open_dataset
from visavis.data.scenes import Facts, write_scenes
from visavis.demonstration.account import Account, write_report
from visavis.demonstration.rates import how_chosen
from visavis.demonstration.retrievals import Gallery
from visavis.environment import program
from visavis.models.caching import cache_features
from visavis.models.towers import TowerSpec
from visavis.objectives import parse
from visavis.progress import Progress, TrainingStep
from visavis.report.figures import require_matplotlib
from visavis.runs.begin import Trained, begin_run
from visavis.training.recipe_files import read_recipe
from visavis.training.stopping import Stopped

SEARCHES = (
    ("a yellow square", Facts(({"shape": "square", "color": "yellow"},))),
    ("a checkered circle", Facts(({"pattern": "checkered", "shape": "circle"},))),
    ("a red shape on a wooden table", Facts(({"color": "red"},), background="table")),
)
"""The demo's own queries, with what they state; chosen, like the recipes, on other worlds than the one the demo draws."""

CAPTIONS_SHOWN = 5


@dataclass(frozen=True)
class Plan:
    """How large a demo is. recipes: a row of the comparison each. world: the seed of its scenes; another than that on which the
    recipes were chosen. overrides: of all recipes.
    """

    num_train: int = 1500
    num_val: int = 200
    num_test: int = 500
    recipes: tuple[str, ...] = ("demo-triplet-hn", "demo-vlc", "demo-unified")
    seeds: tuple[int, ...] = (1, 2)
    world: int = 2026
    overrides: dict[str, Any] = field(default_factory=dict)

    @property
    def num_scenes(self) -> int:
        return self.num_train + self.num_val + self.num_test


def run_demo(out: str | Path | None, progress: Progress, plan: Plan | None = None) -> Path:
    """The whole demo in a new folder, ``runs/demo-<n>`` without ``out``; returns the folder.

    Raises RefusedOverwrite if ``out`` holds anything, MissingExtra without matplotlib; KeyboardInterrupt after Ctrl-C.
    """
    require_matplotlib()
    folder = storage.numbered_folder("runs/demo") if out is None else storage.new_folder(out)
    progress.say(f"Everything that the demo makes is kept in {folder}")
    try:
        _Demo(folder, progress, plan or Plan()).run()
    except (Stopped, KeyboardInterrupt) as stopped:
        progress.say(
            f"Stopped before the report was written; {folder} keeps what was finished. visavis demo starts anew, in another folder."
        )
        if isinstance(stopped, Stopped):
            signal.raise_signal(stopped.by)
        raise KeyboardInterrupt from None
    return folder


class _Demo:
    """A running demo: its folder, its plan, and the seconds each stage took."""

    def __init__(self, folder: Path, progress: Progress, plan: Plan):
        self.folder, self.progress, self.plan = folder, progress, plan
        self.scenes = folder / "scenes"
        self.seconds: dict[str, float] = {}

    def run(self) -> None:
        plan = self.plan
        with self._stage("drawing", f"drawing {plan.num_scenes:,} scenes and writing five captions for each"):
            self._draw()
        with self._stage("features", "reading the pictures with the shipped encoder, once for all runs"):
            self._cache()
        with self._stage("training", f"training {len(plan.recipes)} objectives with {len(plan.seeds)} seeds each"):
            results = {_objective(name): [self._train(name, seed) for seed in plan.seeds] for name in plan.recipes}
        with self._stage("report", f"comparing on {plan.num_test:,} unseen scenes, searching them, writing the report"):
            account = self._compare(results)
            write_report(account, self.folder)
        self._tell(account)

    @contextmanager
    def _stage(self, name: str, doing: str) -> Iterator[None]:
        """Announce a stage, and record the seconds it took."""
        self.progress.say(f"{len(self.seconds) + 1} of 4  {doing}")
        started = time.perf_counter()
        yield
        self.seconds[name] = round(time.perf_counter() - started, 1)

    def _draw(self) -> None:
        plan, started = self.plan, time.perf_counter()

        def on_progress(done: int, total: int) -> None:
            self.progress.work("scenes", done, total, done / (time.perf_counter() - started))

        write_scenes(
            self.scenes, num_train=plan.num_train, num_val=plan.num_val, num_test=plan.num_test, seed=plan.world, on_progress=on_progress
        )

    def _cache(self) -> None:
        tower = TowerSpec("visual", "scenes", read_recipe(self.plan.recipes[0], dict(self.plan.overrides)).visual.view)  # type: ignore[arg-type]
        cache_features(open_dataset(self.scenes), tower, on_progress=lambda *done: self.progress.work("pictures", *done))

    def _train(self, recipe: str, seed: int) -> Trained:
        """One run, exactly as ``visavis train RECIPE --data .../scenes seed=...`` makes it."""
        name = _objective(recipe)
        overrides = {**self.plan.overrides, "data.path": str(self.scenes.resolve()), "seed": seed}
        trained = begin_run(recipe, overrides, self.folder / f"{name.lower()}-{seed}", _BarsOnly(self.progress))
        assert trained.test is not None
        rsum, recall = (trained.test.metrics[metric] for metric in ("rsum", "t2i_r1"))
        self.progress.say(f"        {name}, seed {seed}: RSUM {rsum:.1f}, text to image R@1 {recall:.1f} %  ({trained.seconds:.0f} s)")
        return trained

    def _compare(self, results: dict[str, list[Trained]]) -> Account:
        """The table of results, and the retrievals of the run with the best validation RSUM."""
        rates = {_objective(name): read_recipe(name).phases[-1].optimizer.lr for name in self.plan.recipes}
        table = Table.of({name: [run.test for run in runs if run.test is not None] for name, runs in results.items()}, how_chosen(rates))
        self.progress.say(f"\n{table.text()}\n{table.caption()}\n")
        best = max((run for runs in results.values() for run in runs), key=lambda run: run.validation_rsum)
        gallery = Gallery(best.folder, self.scenes)
        searches = [gallery.search(query, facts) for query, facts in SEARCHES]
        return Account(self.scenes, results, best, table, gallery.captions(CAPTIONS_SHOWN), searches, self.seconds)

    def _tell(self, account: Account) -> None:
        for search in account.searches:
            self.progress.say(f"        “{search.query}”: {search.num_fitting} of the first {len(search.scenes)} pictures fit")
        self.progress.say(f"\nReport: {self.folder / 'report.html'}  ({sum(self.seconds.values()):.0f} s in all)")
        self.progress.say(f"Now search yourself: {program()} search {account.best.folder} 'two stars in the snow'")


def _objective(recipe: str) -> str:
    """The name of a recipe's objective."""
    return type(parse(read_recipe(recipe).phases[-1].objective)).__name__


class _BarsOnly:
    """A Progress that forwards bars but not the sentences of single runs; the demo says one of its own for each."""

    def __init__(self, progress: Progress):
        self.progress = progress

    def say(self, sentence: str) -> None: ...

    def work(self, what: str, done: int, total: int, per_s: float) -> None:
        self.progress.work(what, done, total, per_s)

    def step(self, step: TrainingStep) -> None:
        self.progress.step(step)
