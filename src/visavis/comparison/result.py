"""What a comparison found: which setting is best on validation, what the test says of it, and how sure that is."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from visavis.comparison.bootstrap import Draws, over_images, over_sentences
from visavis.comparison.exchange import csv_text, indistinct, latex
from visavis.comparison.jobs import Outcome
from visavis.comparison.settings import Setting
from visavis.comparison.statistics import Paired, against, compared
from visavis.comparison.sweep import Sweep, sweep_of
from visavis.comparison.table import Row, Table
from visavis.comparison.wording import over_images as images_in_words
from visavis.comparison.wording import over_seeds
from visavis.errors import RunError
from visavis.evaluation.judged import JudgedTest
from visavis.evaluation.ranks import read_ranks
from visavis.metrics.recall import RSUM
from visavis.training.run_files import RunFiles

JUDGED, JUDGED_LABEL = "judged_r10", "judged R@10"
"""The one of the judged metrics that is told in words."""


@dataclass(frozen=True)
class Comparison:
    """The runs of a comparison and what follows from them. name: of the recipe.

    settings: those with at least one run that succeeded, in the order given. outcomes: of all runs, in the order of settings and seeds.
    judged: what people judged, of which every run that succeeded was asked, too.
    """

    folder: Path
    name: str
    settings: tuple[Setting, ...]
    outcomes: tuple[Outcome, ...]
    judged: JudgedTest | None = None

    @classmethod
    def of(
        cls, folder: Path, name: str, settings: Sequence[Setting], outcomes: Sequence[Outcome], judged: JudgedTest | None = None
    ) -> Comparison:
        """Raises RunError where no run succeeded."""
        succeeded = {one.setting for one in outcomes if not one.failure}
        if not succeeded:
            raise RunError(f"no run of {folder} succeeded; the first one: {outcomes[0].failure}" if outcomes else f"{folder} has no runs.")
        order = [setting.name for setting in settings]
        return cls(
            folder,
            name,
            tuple(setting for setting in settings if setting.name in succeeded),
            tuple(sorted(outcomes, key=lambda one: (order.index(one.setting), one.seed))),
            judged,
        )

    def runs(self, setting: Setting) -> list[Outcome]:
        """The runs of a setting that succeeded, by seed."""
        return [one for one in self.outcomes if one.setting == setting.name and not one.failure]

    @property
    def failures(self) -> list[Outcome]:
        return [one for one in self.outcomes if one.failure]

    def validation(self, setting: Setting) -> float:
        """The mean validation RSUM of a setting."""
        return statistics.fmean(one.validation_rsum for one in self.runs(setting))

    @cached_property
    def chosen(self) -> tuple[Setting, ...]:
        """Of each choice the point of the grid with the best mean validation RSUM among those with the most seeds."""
        choices: dict[str, list[Setting]] = {}
        for setting in self.settings:
            choices.setdefault(setting.choice, []).append(setting)
        return tuple(max(points, key=self._standing) for points in choices.values())

    @property
    def best(self) -> Setting:
        """What validation prefers, of all choices."""
        return max(self.chosen, key=self._standing)

    def _standing(self, setting: Setting) -> tuple[int, float]:
        """Who was dropped on the way has fewer seeds and is behind all that were not."""
        return len(self.runs(setting)), self.validation(setting)

    @property
    def table(self) -> Table:
        """What the test split says of every choice. Raises RunError if the runs were not measured under the same rules."""
        tested = {setting.name: self.runs(setting) for setting in self.chosen}
        rules = {one.rules for runs in tested.values() for one in runs if one.rules is not None}
        if len(rules) != 1:
            raise RunError(
                f"one table needs runs that were measured alike, found {' / '.join(map(str, rules))}: compare on one protocol and data set."
            )
        note = "Chosen on validation, measured on test"
        return Table(tuple(Row(name, tuple(one.numbers for one in runs)) for name, runs in tested.items()), rules.pop(), note, self.judged)

    def pairs_by(self, metric: str) -> list[Paired]:
        """All pairs of choices on test, seed by seed, corrected for all of them, so that any choice may be looked at afterwards."""
        return compared({s.name: {one.seed: one.numbers[metric] for one in self.runs(s)} for s in self.chosen})

    @cached_property
    def pairs(self) -> list[Paired]:
        """``pairs_by`` RSUM."""
        return self.pairs_by(RSUM.name)

    @property
    def behind(self) -> dict[str, Paired]:
        """The best minus every other choice, the smallest difference first."""
        pairs = [pair.turned() for pair in against(self.pairs, self.best.name).values()]
        return {pair.b: pair for pair in sorted(pairs, key=lambda pair: pair.difference)}

    @cached_property
    def over_images(self) -> Draws:
        """The test images drawn anew for all runs of the choices."""
        protocol = self.table.rules.protocol
        return over_images(
            {s.name: {one.seed: read_ranks(RunFiles(one.folder).ranks)[protocol] for one in self.runs(s)} for s in self.chosen}
        )

    @cached_property
    def over_sentences(self) -> Draws:
        """The judged sentences drawn anew for all runs of the choices. Only where there are any."""
        answers = {s.name: {one.seed: one.judged.answers for one in self.runs(s) if one.judged} for s in self.chosen}
        return over_sentences(answers)

    def judged_behind(self, metric: str) -> dict[str, Paired]:
        """The best minus every other choice, by what people judged, in the order of ``behind``."""
        pairs = against(self.pairs_by(metric), self.best.name)
        return {name: pairs[name].turned() for name in self.behind}

    @cached_property
    def sweep(self) -> Sweep | None:
        """What one number does, where it is all in which settings differ."""
        return sweep_of([(setting, self.runs(setting)) for setting in self.settings])

    @property
    def sentences(self) -> list[str]:
        """What was found, in words."""
        best = self.best.name
        told = [f"Best on validation: {best}, mean RSUM {self.validation(self.best):.1f} over {_seeds(len(self.runs(self.best)))}."]
        told += [over_seeds(pair, "test RSUM") for pair in self.behind.values()]
        if self.behind:
            nearest = next(iter(self.behind))
            told += [f"{best} minus {nearest}. {images_in_words(self.over_images.difference(best, nearest), 'test RSUM')}"]
            if self.judged is not None:
                told += [over_seeds(self.judged_behind(JUDGED)[nearest], JUDGED_LABEL)]
                told += [f"{best} minus {nearest}. {images_in_words(self.over_sentences.difference(best, nearest, JUDGED), JUDGED_LABEL)}"]
        told += [f"{one.setting}, seed {one.seed} failed: {one.failure}" for one in self.failures]
        return told

    def markdown(self) -> str:
        """The table of the test split, and the sentences."""
        return self.table.markdown() + "".join(f"\n- {sentence}" for sentence in self.sentences) + "\n"

    def csv(self) -> str:
        """A line for each choice and metric, set beside the best."""
        table = self.table
        pairs = {metric: against(self.pairs_by(metric), self.best.name) for metric in table.metrics}
        return csv_text(table, pairs, [self.over_images, *([self.over_sentences] if self.judged else [])])

    def latex(self) -> str:
        """The table, with a dagger where a choice cannot be told from the best of a column."""
        table = self.table
        return latex(table, {metric: indistinct(against(self.pairs_by(metric), table.best(metric).name)) for metric in table.metrics})

    def to_json(self) -> dict[str, Any]:
        """The table of the test, the choices and what they were made by, and every run."""
        return {
            "comparison": str(self.folder),
            "recipe": self.name,
            "best": self.best.name,
            "table": self.table.to_json(),
            "behind": [
                pair.to_json() | {"over_images": self.over_images.difference(pair.a, pair.b).to_json()} for pair in self.behind.values()
            ],
            "pairs": [pair.to_json() for pair in self.pairs],
            "judged": self._judged_to_json(),
            "sweep": self.sweep and self.sweep.to_json(),
            "settings": [
                {
                    "name": setting.name,
                    "choice": setting.choice,
                    "point": setting.point,
                    "chosen": setting in self.chosen,
                    "validation_rsum": self.validation(setting),
                    "seeds": [one.seed for one in self.runs(setting)],
                    "seconds": statistics.fmean(one.seconds for one in self.runs(setting)),
                }
                for setting in self.settings
            ],
            "runs": [one.to_json() for one in self.outcomes],
        }

    def _judged_to_json(self) -> dict[str, Any] | None:
        """What was judged, and for each of its metrics the best minus every other choice."""
        if self.judged is None:
            return None
        return {
            "sentences": len(self.judged.asked),
            "images": len(self.judged.images),
            "left_out": dict(self.judged.pairs.left_out),
            "behind": {
                metric: [
                    pair.to_json() | {"over_sentences": self.over_sentences.difference(pair.a, pair.b, metric).to_json()}
                    for pair in self.judged_behind(metric).values()
                ]
                for metric in self.judged.labels
            },
        }


def _seeds(number: int) -> str:
    return "one seed" if number == 1 else f"{number} seeds"
