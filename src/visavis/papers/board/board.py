"""Board: results of many runs, in groups of runs that can be compared."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

from visavis.core.result import Result
from visavis.core.table import SIMILAR_MARK, Cell, Column, Row, Table
from visavis.evaluation.metrics.catalog import RSUM
from visavis.evaluation.metrics.ranking import TIES_IN_WORDS
from visavis.evaluation.statistics import (
    PairedTest,
    compare_with_best,
    format_number,
)
from visavis.papers.board.recorded_runs import LeftOut, Measurement, short_hash
from visavis.research.experiments.setting_results import (
    CSV_COLUMNS,
    MeasurementConditions,
    ResultRow,
    SettingResults,
    indistinguishable_rows,
)

SHOWN_METRICS = {RSUM.name: "RSUM", "t2i_r1": "text to image R@1", "i2t_r1": "image to text R@1"}
OVERVIEW_NOTE = (
    "Mean RSUM on the test split, with the range of the runs below four seeds, else the 95 % "
    "interval of the mean. Compare values of one column only."
)
SIMILAR_NOTE = (
    f"{SIMILAR_MARK}: not distinguishable from the best RSUM over these seeds (paired t-tests, "
    "corrected for the number of other rows). The truly best row is among these with a "
    "probability of at least 95 %."
)
MAX_NOTED_SETTINGS = 3
"""Number of settings in the small print of a row. The CSV file has all."""
GROUP_COLUMNS = (
    "group", "data", "data_hash", "split", "protocol", "images", "texts", "captions_per_image", "ties",
    "training_part", "noise", "noise_index", "model_kind",
)  # fmt: skip
SETTING_COLUMNS = (
    "objective",
    "model",
    "settings",
    "setting_hash",
    "seeds",
    "parameters",
    "training_s",
)


@dataclass(frozen=True)
class Comparability:
    """What runs must share to be in one table.

    Attributes:
        data_hash: Hash of the names, captions and pixels of the data set.
        split: Name of the test split.
        conditions: Protocol, number of candidates and ties.
        training_part: Sampled part of the training split. "": all of it.
        noise: Captions on wrong images. "": none.
        kind: "single model", or how many models or networks are averaged.
    """

    data_hash: str
    split: str
    conditions: MeasurementConditions
    training_part: str
    noise: str
    kind: str

    def described(self) -> dict[str, str]:
        """Each condition by its name."""
        tested = self.conditions
        return {
            "data hash": self.data_hash,
            "test split": self.split,
            "protocol": tested.protocol,
            "candidates": f"{tested.num_images:,} images, {tested.num_texts:,} texts",
            "captions per image": f"{tested.captions_per_image:g}",
            "ties": TIES_IN_WORDS[tested.ties],
            "training part": self.training_part or "all",
            "noise": self.noise or "none",
            "models": self.kind,
        }

    def differences(self, other: Comparability) -> list[str]:
        """Names of the conditions that differ."""
        theirs = other.described()
        return [name for name, value in self.described().items() if theirs[name] != value]


@dataclass(frozen=True)
class BoardRow:
    """Runs that differ only in their seeds.

    Attributes:
        name: Objective, model and the settings that distinguish the row from others.
        runs: Run of each seed.
        settings: Settings in which the rows of the group differ.
    """

    name: str
    runs: tuple[Measurement, ...]
    settings: Mapping[str, str]

    @property
    def objective(self) -> str:
        """Objective of each phase."""
        return self.runs[0].objective

    @property
    def model(self) -> str:
        """Model."""
        return self.runs[0].model

    @property
    def described_settings(self) -> str:
        """Settings as ``key=value``."""
        return ", ".join(f"{key}={value}" for key, value in self.settings.items())

    @property
    def seeds(self) -> tuple[int, ...]:
        """Seeds, in ascending order."""
        return tuple(run.seed for run in self.runs)

    @property
    def results(self) -> ResultRow:
        """Metrics of the runs."""
        return ResultRow(self.name, tuple(run.metrics for run in self.runs))

    @property
    def seconds(self) -> float:
        """Mean training time."""
        return statistics.fmean(run.seconds for run in self.runs)

    def by_seed(self, metric: str) -> dict[int, float]:
        """Values of a metric by seed."""
        return {run.seed: run.metrics[metric] for run in self.runs}


@dataclass(frozen=True)
class BoardGroup:
    """Rows that can be compared, best mean RSUM first.

    Attributes:
        number: Number on the board, from 1.
        shared: What all runs share.
        rows: Rows.
    """

    number: int
    shared: Comparability
    rows: tuple[BoardRow, ...]

    @property
    def data(self) -> str:
        """Names of the data set, which may differ between machines."""
        return ", ".join(dict.fromkeys(run.data for row in self.rows for run in row.runs))

    @property
    def title(self) -> str:
        """Data set, and what distinguishes it from the usual conditions."""
        shared = self.shared
        parts = [self.data, f"protocol {shared.conditions.protocol}", shared.training_part]
        parts += [shared.noise, shared.kind]
        return f"{self.number}. {', '.join(filter(None, parts))}"

    @property
    def noise_indices(self) -> str:
        """Hash of the wrong captions of each seed."""
        return ", ".join(
            dict.fromkeys(
                run.noise_index for row in self.rows for run in row.runs if run.noise_index
            )
        )

    @cached_property
    def results(self) -> SettingResults:
        """Metrics of all rows."""
        conditions = self.shared.conditions
        return SettingResults.from_runs(
            {row.name: [(run.metrics, conditions) for run in row.runs] for row in self.rows}
        )

    @cached_property
    def tests(self) -> dict[str, dict[str, PairedTest]]:
        """For each metric, the tests of each other row minus the row with the best mean RSUM."""
        best = self.rows[0].name
        return {
            metric: compare_with_best({row.name: row.by_seed(metric) for row in self.rows}, best)
            for metric in self.results.metrics
        }

    @cached_property
    def similar(self) -> Collection[str]:
        """Names of the rows that are not distinguishable from the best in RSUM."""
        return indistinguishable_rows(self.tests[RSUM.name])

    def is_at_chance(self, row: BoardRow) -> bool:
        """Whether a random ranking could reach the mean RSUM of a row."""
        return row.results.mean(RSUM.name) <= self.shared.conditions.highest_chance_rsum

    def rsum_cell(self, row: BoardRow) -> Cell:
        """Mean RSUM with its spread and its mark."""
        return self._cell(row, RSUM.name)

    def table(self) -> Table:
        """Means with their spread, the difference of each row to the best, and cost."""
        columns = (
            Column("objective", is_text=True),
            Column("seeds"),
            *(Column(title, ".1f", key=metric) for metric, title in SHOWN_METRICS.items()),
            Column("RSUM minus best", is_text=True, missing="-"),
            Column("p", is_text=True, missing="-"),
            Column("parameters"),
            Column("training s", ".1f"),
        )
        chance = ("chance", None, *map(self.results.chance, SHOWN_METRICS), None, None, None, None)
        notes = [f"{self.results.caption()} Data hash {self.shared.data_hash}."]
        if self.noise_indices:
            notes.append(f"Noise index by seed: {self.noise_indices}.")
        if self.similar:
            notes.append(SIMILAR_NOTE)
        if (varied := self._varied_settings) and len(self.rows) > 1:
            notes.append(
                f"Rows also differ in {_shortened(varied, 12)}. The small print and the CSV file "
                "have the values."
            )
        return Table(
            columns, tuple(map(self._row, self.rows)), tuple(notes), self.title, last_rows=(chance,)
        )

    @property
    def _varied_settings(self) -> list[str]:
        return list(dict.fromkeys(key for row in self.rows for key in row.settings))

    def _row(self, row: BoardRow) -> Row:
        test = self.tests[RSUM.name].get(row.name)
        settings = [f"{key}={value}" for key, value in row.settings.items()]
        note = [row.model, _shortened(settings, MAX_NOTED_SETTINGS)]
        note += ["at chance"] * self.is_at_chance(row)
        return (
            Cell(row.objective, note=", ".join(filter(None, note))),
            len(row.runs),
            *(self._cell(row, metric) for metric in SHOWN_METRICS),
            None if test is None else format_number(test.difference, signed=True),
            None if test is None else test.p_text,
            row.runs[0].parameters,
            row.seconds,
        )

    def _cell(self, row: BoardRow, metric: str) -> Cell:
        results = row.results
        spread = results.spread(metric)
        bounds = () if spread is None else (spread.low, spread.high)
        is_similar = metric == RSUM.name and row.name in self.similar
        is_best = self.results.is_best(results, metric)
        mark = "best" if is_best else "similar" if is_similar else ""
        return Cell(results.mean(metric), bounds, mark)  # type: ignore[arg-type]

    def csv_rows(self) -> list[dict[str, Any]]:
        """A line for each row and metric, by the names of the columns."""
        shared = self.shared
        tested = shared.conditions
        group = dict(
            zip(
                GROUP_COLUMNS,
                (
                    self.number, self.data, shared.data_hash, shared.split, tested.protocol, tested.num_images, tested.num_texts,
                    tested.captions_per_image, tested.ties, shared.training_part, shared.noise, self.noise_indices, shared.kind,
                ),
                strict=True,
            )
        )  # fmt: skip
        by_name = {row.name: row for row in self.rows}
        lines = []
        for values in self.results.statistics_table(self.tests).rows:
            line = dict(zip(CSV_COLUMNS, values, strict=True))
            row = by_name[str(line.pop("row"))]
            setting = {
                "objective": row.objective,
                "model": row.model,
                "settings": row.described_settings,
                "setting_hash": setting_hash(row.runs[0]),
                "seeds": " ".join(map(str, row.seeds)),
                "parameters": row.runs[0].parameters,
                "training_s": row.seconds,
            }
            lines.append(group | setting | line)
        return lines

    def to_json(self) -> dict[str, Any]:
        """Convert to plain values."""
        return {
            "number": self.number,
            "data": self.data,
            **asdict(self.shared),
            "noise_index": self.noise_indices,
            "rows": [
                {
                    "objective": row.objective,
                    "model": row.model,
                    "settings": dict(row.settings),
                    "seeds": list(row.seeds),
                    "runs": [str(run.folder) for run in row.runs],
                    "parameters": row.runs[0].parameters,
                    "training_s": row.seconds,
                    "similar_to_best": row.name in self.similar,
                }
                | {
                    key: value
                    for key, value in results.items()
                    if key in ("mean", "std", "interval", "range")
                }
                for row, results in zip(self.rows, self.results.to_json()["rows"], strict=True)
            ],
            "tests": [test.to_json() for test in self.tests[RSUM.name].values()],
        }


@dataclass(frozen=True)
class Board(Result):
    """Results of runs, in groups of runs that can be compared.

    Attributes:
        folder: Folder of the page and the CSV file.
        groups: Groups, largest first.
        left_out: Folders that are not on the board.
    """

    folder: Path
    groups: tuple[BoardGroup, ...]
    left_out: tuple[LeftOut, ...] = ()

    ROWS: ClassVar[str] = "rows"

    @property
    def num_runs(self) -> int:
        """Number of runs. One that has several protocols counts once."""
        return len({run.folder for group in self.groups for row in group.rows for run in row.runs})

    def overview(self) -> Table:
        """Mean RSUM of each objective and model, with one column for each group."""
        names = dict.fromkeys(
            (row.objective, row.model) for group in self.groups for row in group.rows
        )
        cells = defaultdict[tuple[str, str], dict[int, Cell]](dict)
        for group in self.groups:
            # The best of rows that differ in other settings only.
            for row in reversed(group.rows):
                cells[row.objective, row.model][group.number] = group.rsum_cell(row)
        columns = [Column("objective", is_text=True)]
        columns += [
            Column(f"{group.number}. {group.data}", ".1f", missing="-") for group in self.groups
        ]
        # Rows of the most columns first.
        ordered = sorted(names, key=lambda name: -len(cells[name]))
        rows = [
            (Cell(name[0], note=name[1]), *(cells[name].get(group.number) for group in self.groups))
            for name in ordered
        ]
        notes = (
            OVERVIEW_NOTE,
            SIMILAR_NOTE,
        )
        return Table(tuple(columns), tuple(rows), notes, "Overview")

    def differences_table(self) -> Table:
        """The conditions that differ between groups, and the nearest other group of each."""
        described = {group.number: group.shared.described() for group in self.groups}
        names = [
            name
            for name in next(iter(described.values()))
            if len({values[name] for values in described.values()}) > 1
        ]
        columns = [Column("table", is_text=True), Column("runs")]
        columns += [Column(name, is_text=True) for name in names]
        columns.append(Column("cannot be compared because of", is_text=True))
        rows = list[Row]()
        for group in self.groups:
            others = [other for other in self.groups if other is not group]
            nearest = min(
                others, key=lambda other: len(group.shared.differences(other.shared)), default=None
            )
            reason = ""
            if nearest is not None:
                reasons = ", ".join(group.shared.differences(nearest.shared))
                reason = f"other {reasons} than table {nearest.number}"
            rows.append(
                (
                    f"{group.number}. {group.data}",
                    sum(len(row.runs) for row in group.rows),
                    *(described[group.number][name] for name in names),
                    reason,
                )
            )
        return Table(tuple(columns), tuple(rows))

    def left_out_table(self) -> Table:
        """Folders that are not on the board, with the reason of each."""
        columns = (Column("folder", is_text=True), Column("reason", is_text=True))
        return Table(columns, tuple((str(each.folder), each.reason) for each in self.left_out))

    def csv_table(self) -> Table:
        """A line for each group, row and metric."""
        names = (*GROUP_COLUMNS, *SETTING_COLUMNS, *CSV_COLUMNS[1:])
        lines = [line for group in self.groups for line in group.csv_rows()]
        return Table(
            tuple(map(Column, names)), tuple(tuple(map(line.get, names)) for line in lines)
        )

    def tables(self) -> list[Table]:
        """Return a table for each group, and in sentences what was left out and the folder."""
        notes = [f"{each.folder} is left out: {each.reason}" for each in self.left_out]
        notes.append(f"Board: {self.folder / 'report.html'}")
        return [*(group.table() for group in self.groups), Table(notes=tuple(notes))]

    def to_json(self) -> dict[str, Any]:
        """Convert to plain values."""
        groups = [group.to_json() for group in self.groups]
        return {
            "folder": str(self.folder),
            "groups": groups,
            "rows": [
                {"group": group["number"], "data": group["data"], **row}
                for group in groups
                for row in group["rows"]
            ],
            "left_out": [
                {"folder": str(each.folder), "reason": each.reason} for each in self.left_out
            ],
        }


def make_board(folder: Path, measured: Sequence[Measurement], left_out: Sequence[LeftOut]) -> Board:
    """Sort runs into groups that can be compared, and into rows."""
    left_out = list(left_out)
    by_group = defaultdict[Comparability, list[Measurement]](list)
    for run, data_hash in zip(measured, data_hashes(measured), strict=True):
        by_group[_comparability(run, data_hash)].append(run)
    groups = []
    for shared, runs in by_group.items():
        by_setting = defaultdict[str, dict[int, Measurement]](dict)
        for run in runs:
            seeds = by_setting[setting_hash(run)]
            first = seeds.setdefault(run.seed, run)
            if first is not run:
                left_out.append(_repeated(run, first))
        groups.append((shared, _rows([[*seeds.values()] for seeds in by_setting.values()])))
    groups.sort(
        key=lambda group: (-sum(len(row.runs) for row in group[1]), str(group[0].described()))
    )
    return Board(
        folder,
        tuple(BoardGroup(number, *group) for number, group in enumerate(groups, 1)),
        tuple(left_out),
    )


def _comparability(run: Measurement, data_hash: str) -> Comparability:
    data = run.recipe_data
    parts = [f"{data.training_images:,} training images"] * bool(data.training_images)
    parts += [f"{data.training_captions} captions of each"] * bool(data.training_captions)
    parts += ["validation images drawn by the seed"] * run.draws_validation
    return Comparability(
        data_hash, run.split, run.conditions, ", ".join(parts), data.described_noise, run.kind
    )


def setting_hash(run: Measurement) -> str:
    """Hash of everything in a recipe that runs of one row share, with the complete objective."""
    return short_hash([run.model, *(f"{key}={value}" for key, value in run.settings.items())])


def _repeated(run: Measurement, first: Measurement) -> LeftOut:
    same = "the same results" if run.metrics == first.metrics else "other results"
    rsums = " and ".join(f"{each.metrics[RSUM.name]:.1f}" for each in (first, run))
    return LeftOut(
        run.folder,
        f"seed {run.seed} of this setting is on the board from {first.folder}, with {same} (RSUM "
        f"{rsums}). One run for each seed counts.",
    )


def _rows(settings: Iterable[Sequence[Measurement]]) -> tuple[BoardRow, ...]:
    """Rows of a group, best mean RSUM first, with the settings in which they differ."""
    groups = [sorted(runs, key=lambda run: run.seed) for runs in settings]
    values = [runs[0].settings for runs in groups]
    keys = dict.fromkeys(key for each in values for key in each)
    # The objectives and models are columns of their own.
    varied = [
        key
        for key in keys
        if not key.endswith((".objective", ".model"))
        and len({each.get(key) for each in values}) > 1
    ]
    rows = []
    names = defaultdict[str, int](int)
    for runs in groups:
        first = runs[0]
        settings_of_row = {key: first.settings[key] for key in varied if key in first.settings}
        name = ", ".join([first.objective, first.model, *map("=".join, settings_of_row.items())])
        # Objectives of two phases may have equal texts in another order.
        names[name] += 1
        name = name if names[name] == 1 else f"{name} ({names[name]})"
        rows.append(BoardRow(name, tuple(runs), settings_of_row))
    return tuple(sorted(rows, key=lambda row: (-row.results.mean(RSUM.name), row.name)))


def data_hashes(measured: Sequence[Measurement]) -> list[str]:
    """Hash of the data set of each run."""
    # If the training part or its noise follows from the seed, the recorded content differs by seed.
    # Then the runs of one folder have one data set, and folders share it if they share the content
    # of a seed and contradict each other in none.
    hashes = [run.content for run in measured]
    seeded = defaultdict[Comparability, list[int]](list)
    for index, run in enumerate(measured):
        if run.depends_on_seed:
            seeded[_comparability(run, "")].append(index)
    for indices in seeded.values():
        parts = defaultdict[tuple[str, str], list[int]](list)
        for index in indices:
            run = measured[index]
            parts[str(run.folder.parent), run.recipe_data.path].append(index)
        merged = list[dict[int, str]]()
        members = list[list[int]]()
        for part in parts.values():
            contents = {measured[index].seed: hashes[index] for index in part}
            if any(contents[measured[index].seed] != hashes[index] for index in part):
                # One folder with two data sets: its runs stay apart.
                continue
            position = _position_of_same_data(merged, contents)
            if position is None:
                merged.append(contents)
                members.append(part)
            else:
                merged[position] |= contents
                members[position] += part
        for contents, part in zip(merged, members, strict=True):
            # The content of the lowest seed names the data set.
            name = contents[min(contents)]
            for index in part:
                hashes[index] = name
    return hashes


def _position_of_same_data(
    known: Sequence[Mapping[int, str]], contents: Mapping[int, str]
) -> int | None:
    """Position of the first data set with the content of a seed, and no other one for a seed."""
    for position, other in enumerate(known):
        common = other.keys() & contents.keys()
        if common and all(other[seed] == contents[seed] for seed in common):
            return position
    return None


def _shortened(names: Sequence[str], limit: int) -> str:
    more = [f"{len(names) - limit} more"] * (len(names) > limit)
    return ", ".join([*names[:limit], *more])
