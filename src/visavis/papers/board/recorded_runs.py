"""Finished runs as their folders record them. Nothing in a folder is trusted: files are checked
against a schema, no model is opened, and no code that a recipe names is executed.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, get_args

import torch

from visavis.core import storage
from visavis.core.encoded import DIRECTIONS
from visavis.core.errors import RunError, SpecError, VisavisError, suggest_name
from visavis.core.progress import Progress
from visavis.core.spec import build_object, parse_call
from visavis.evaluation.metrics.catalog import RSUM, RSUM_RECALLS, SIX_RECALLS
from visavis.evaluation.metrics.ranking import Ties
from visavis.evaluation.query_ranks import QueryRanks, read_query_ranks
from visavis.losses import objectives
from visavis.research.experiments.setting_results import MeasurementConditions
from visavis.training.runs.record import CHANGEABLE_KEYS, RunRecord, flatten_recipe
from visavis.training.runs.run_folder import RunFolder

SKIPPED_FOLDERS = ("model", "peer", "checkpoint", "tensorboard", "wandb")
"""Folders of a run in which no run is searched."""
MEMBER_NAME = re.compile(r"\w[\w+-]*")
ABSOLUTE_PATH = re.compile(r"(?:/|[A-Za-z]:[\\/])[^'\"]*[\\/]([^'\"\\/]+)")
MAX_TEXT = 2000
"""Characters of an objective or model from which a recipe is not taken for one."""
RECALL_TOLERANCE = 1e-3
"""Percent by which a recorded recall may differ from its sum or ranks, because of rounding."""
COMPARED_INPUTS = ("image_encoder", "text_encoder", "stored_features", "stored_caption_features", "start_model", "feedback")  # fmt: skip
"""Inputs of a training that belong to the setting and not to the data."""


@dataclass(frozen=True, kw_only=True)
class RecordedEvaluation:
    """Test results of one protocol in ``result.json``.

    Attributes:
        protocol: Name of the protocol.
        num_images: Number of images.
        num_texts: Number of texts.
        captions_per_image: Mean number of captions per image.
        ties: How ties are ranked.
        i2t_r1: R@1 of image queries, in percent.
        i2t_r5: R@5 of image queries.
        i2t_r10: R@10 of image queries.
        t2i_r1: R@1 of text queries.
        t2i_r5: R@5 of text queries.
        t2i_r10: R@10 of text queries.
        rsum: Sum of the six recalls.
    """

    protocol: str
    num_images: int
    num_texts: int
    captions_per_image: float
    ties: str
    i2t_r1: float
    i2t_r5: float
    i2t_r10: float
    t2i_r1: float
    t2i_r5: float
    t2i_r10: float
    rsum: float

    @property
    def metrics(self) -> dict[str, float]:
        """The recalls of each direction and RSUM."""
        return {key: getattr(self, key) for key in (*SIX_RECALLS, RSUM.name)}

    @property
    def conditions(self) -> MeasurementConditions:
        """Conditions of the values."""
        return MeasurementConditions(
            self.protocol, self.num_images, self.num_texts, self.captions_per_image, self.ties
        )

    def check(self, file: Path, ranks: QueryRanks | None) -> None:
        """Check that the values are possible, and follow from the ranks of all queries."""
        if self.ties not in get_args(Ties):
            raise RunError(
                f"{file}: ties: {suggest_name(self.ties, get_args(Ties))} Evaluate the run again."
            )
        counts = (self.num_images, self.num_texts, self.captions_per_image)
        if not all(math.isfinite(number) and number > 0 for number in counts):
            raise RunError(
                f"{file}: expected positive numbers of images, texts and captions, got {counts}. "
                "Evaluate the run again."
            )
        for key in SIX_RECALLS:
            if not 0 <= self.metrics[key] <= 100:
                raise RunError(
                    f"{file}: {key}: expected 0 to 100 percent, got {self.metrics[key]:g}. Evaluate "
                    "the run again."
                )
        total = sum(self.metrics[key] for key in SIX_RECALLS)
        if not abs(total - self.rsum) <= RECALL_TOLERANCE * len(SIX_RECALLS):
            raise RunError(
                f"{file}: rsum: expected the sum of its six recalls, {total:.2f}, got "
                f"{self.rsum:.2f}. Evaluate the run again."
            )
        for key, recall in {} if ranks is None else recalls_of_ranks(ranks).items():
            if abs(self.metrics[key] - recall) > RECALL_TOLERANCE:
                raise RunError(
                    f"{file}: {key}: expected {recall:.2f} as the stored ranks of all queries give, "
                    f"got {self.metrics[key]:.2f}. Evaluate the run again."
                )


@dataclass(frozen=True, kw_only=True)
class RecordedResult(RecordedEvaluation):
    """``result.json`` of a run.

    Attributes:
        seconds: Time of training steps and validations.
        protocols: Results by protocol, if there are several.
        noise_index: Hash of the assignment of training captions to images, if some are wrong.
    """

    seconds: float
    protocols: dict[str, RecordedEvaluation] = field(default_factory=dict)
    noise_index: str = ""


@dataclass(frozen=True)
class RecordedPhase:
    """Phase of a recipe.

    Attributes:
        objective: Objective.
        supervision: Supervision.
    """

    objective: str
    supervision: str = "PairSupervision(by='ids')"


@dataclass(frozen=True)
class RecordedData:
    """Data of a recipe.

    Attributes:
        path: Where the data set was.
        training_images: Number of sampled training images. 0: all.
        training_captions: Number of sampled captions of each. 0: all.
        noise_ratio: Share of captions on wrong images.
        noise: The same as a text with its kind.
    """

    path: str = ""
    training_images: int = 0
    training_captions: int = 0
    noise_ratio: float = 0.0
    noise: str = ""

    @property
    def described_noise(self) -> str:
        """Noise without its seed. "": none."""
        share = f"ShuffledCaptions(share={self.noise_ratio:g})" if self.noise_ratio else ""
        return re.sub(r", seed=\w+|seed=\w+(, )?", "", self.noise) or share

    @property
    def depends_on_seed(self) -> bool:
        """Whether another seed may train on another part, or with other wrong captions."""
        return bool(self.training_images or self.training_captions or self.described_noise)


@dataclass(frozen=True)
class RecordedTest:
    """Test of a recipe.

    Attributes:
        test: Name of the test split.
        average_networks: Whether the scores of both networks of a run are averaged.
        random_validation: Whether the seed draws the validation images.
    """

    test: str = "test"
    average_networks: bool = False
    random_validation: bool = False


@dataclass(frozen=True)
class RecordedRecipe:
    """What a board reads of ``run.toml``.

    Attributes:
        seed: Seed.
        model: Model with its kind.
        phases: Phases.
        data: Data.
        evaluation: Test.
        members: Changes of the members of an ensemble, by name.
    """

    seed: int
    model: dict[str, Any]
    phases: list[RecordedPhase]
    data: RecordedData = RecordedData()
    evaluation: RecordedTest = RecordedTest()
    members: dict[str, dict[str, Any]] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """A finished run under one protocol.

    Attributes:
        folder: Folder of the run.
        seed: Seed.
        data: Name of the data set, the last part of its path.
        content: Hash of the names, captions and pixels of the data set as it was trained on.
        recipe_data: Data of the recipe.
        split: Name of the test split.
        kind: "single model", or how many models or networks are averaged.
        objective: Objective of each phase.
        model: Model.
        settings: Everything else of the recipe that may change the result, by dotted key.
        conditions: Conditions of the values.
        metrics: Recalls and RSUM in percent.
        parameters: Number of parameters.
        seconds: Time of training steps and validations.
        noise_index: Hash of the assignment of training captions to images, if some are wrong.
        draws_validation: Whether the seed draws the validation images.
    """

    folder: Path
    seed: int
    data: str
    content: str
    recipe_data: RecordedData
    split: str
    kind: str
    objective: str
    model: str
    settings: Mapping[str, str]
    conditions: MeasurementConditions
    metrics: Mapping[str, float]
    parameters: int
    seconds: float
    noise_index: str = ""
    draws_validation: bool = False

    @property
    def depends_on_seed(self) -> bool:
        """Whether another seed may train on another part of the data, or with other wrong captions."""
        return self.draws_validation or self.recipe_data.depends_on_seed


@dataclass(frozen=True)
class LeftOut:
    """A folder that is not on the board.

    Attributes:
        folder: The folder.
        reason: The reason, in one sentence.
    """

    folder: Path
    reason: str


def read_runs(
    folders: Sequence[Path], progress: Progress
) -> tuple[list[Measurement], list[LeftOut]]:
    """Read all runs in folders: each run under each of its protocols, and what was left out."""
    found = list[Path]()
    left_out = list[LeftOut]()
    for folder in folders:
        if not os.path.isdir(folder):
            raise RunError(
                f"{folder}: expected a folder of runs, got "
                f"{'a file' if os.path.exists(folder) else 'nothing'}. Pass a folder that visavis "
                "train or visavis compare wrote, or one that contains such folders."
            )
        runs = list(find_runs(folder))
        if not runs:
            left_out.append(LeftOut(folder, "expected run.toml in it or below, got no run"))
        found += runs
    # A folder that is named twice, or is inside another one, is one folder.
    by_path = {os.path.realpath(run): run for run in found}
    measured = list[Measurement]()
    for number, run in enumerate(by_path.values(), 1):
        progress.update("reading runs", number, len(by_path), 0.0)
        try:
            measured += read_run(run)
        except VisavisError as error:
            left_out.append(LeftOut(run, str(error)))
    return measured, left_out


def find_runs(folder: Path) -> Iterator[Path]:
    """Find the runs and ensembles in a folder and below. Links below it are not followed."""
    for path, names, files in os.walk(folder):
        here = RunFolder(Path(path))
        if {here.recipe.name, here.ensemble.name, here.result.name} & {*files}:
            yield here.path
            names[:] = [name for name in names if name not in SKIPPED_FOLDERS]
        names[:] = sorted(name for name in names if not name.startswith("."))


def read_run(folder: Path) -> list[Measurement]:
    """Read a finished run or ensemble, once for each protocol. Raises VisavisError with the reason
    if it cannot be on a board.
    """
    run = RunFolder(folder)
    if not run.is_run:
        raise RunError(f"{folder}: expected {run.recipe.name}, got none. Restore this file.")
    if not os.path.exists(run.result):
        raise RunError(
            f"{folder}: expected a finished training, got no {run.result.name}. Resume it with "
            f"--resume {folder}."
        )
    content = storage.read_json(run.result, dict[str, Any], error=RunError)
    if "protocol" not in content:
        raise RunError(
            f"{run.result}: expected test results, got none. Train with a test split "
            "(evaluation.test)."
        )
    result = storage.read_json(run.result, RecordedResult, error=RunError)
    if not 0 <= result.seconds < math.inf:
        raise RunError(
            f"{run.result}: seconds: expected a time, got {result.seconds}. Evaluate the run again."
        )
    evaluations = result.protocols or {result.protocol: result}
    ranks = read_query_ranks(run.ranks) if os.path.exists(run.ranks) else {}
    for name, evaluation in evaluations.items():
        evaluation.check(run.result, ranks.get(name))
    trained = (
        _read_ensemble(run, result) if os.path.exists(run.ensemble) else _read_trained(run, result)
    )
    return [
        replace(trained, metrics=evaluation.metrics, conditions=evaluation.conditions)
        for evaluation in evaluations.values()
    ]


def _read_trained(run: RunFolder, result: RecordedResult) -> Measurement:
    """Read the recipe and the record of one model. The values belong to the first protocol."""
    recipe, values = _read_recipe(run.recipe)
    record = RunRecord.read(run.environment)
    if record.seed != recipe.seed:
        raise RunError(
            f"{run.recipe}: seed: expected {record.seed} as at the start of the run, got "
            f"{recipe.seed}. Restore it."
        )
    images = record.inputs.get("images")
    stream = record.inputs.get("stream")
    parts = [record.data_fingerprint, *(one.content_hash for one in (images, stream) if one)]
    return Measurement(
        folder=run.path,
        seed=record.seed,
        data=re.split(r"[\\/]", recipe.data.path.rstrip("\\/"))[-1] or "no name",
        content=short_hash(parts),
        recipe_data=recipe.data,
        split=recipe.evaluation.test,
        kind="mean of two networks" if recipe.evaluation.average_networks else "single model",
        objective=" then ".join(
            dict.fromkeys(_short_objective(phase.objective) for phase in recipe.phases)
        ),
        model=_model_text(recipe.model, run.recipe),
        settings=_settings(values, record),
        conditions=result.conditions,
        metrics=result.metrics,
        parameters=record.parameters,
        seconds=result.seconds,
        noise_index=result.noise_index,
        draws_validation=recipe.evaluation.random_validation,
    )


def _read_ensemble(run: RunFolder, result: RecordedResult) -> Measurement:
    """Read the members of an ensemble, whose scores are averaged."""
    recipe, _ = _read_recipe(run.ensemble)
    for name in recipe.members:
        if not MEMBER_NAME.fullmatch(name):
            raise RunError(
                f"{run.ensemble}: members: expected names of letters, digits, _, + and -, got "
                f"{name[:60]!r}. Rename the member."
            )
    if not recipe.members:
        raise RunError(f"{run.ensemble}: expected members, got none. Restore this file.")
    members = {name: _read_trained(RunFolder(run.path / name), result) for name in recipe.members}
    first, *_ = members.values()
    contents = dict.fromkeys(member.content for member in members.values())
    return replace(
        first,
        folder=run.path,
        seed=recipe.seed,
        content=first.content if len(contents) == 1 else short_hash(contents),
        split=recipe.evaluation.test,
        kind=f"ensemble of {len(members)} models",
        objective=" and ".join(dict.fromkeys(member.objective for member in members.values())),
        model=" and ".join(dict.fromkeys(member.model for member in members.values())),
        settings={
            f"{name}.{key}": value
            for name, member in members.items()
            for key, value in {
                "objective": member.objective,
                "model": member.model,
                **member.settings,
            }.items()
        },
        parameters=sum(member.parameters for member in members.values()),
        noise_index=result.noise_index,
    )


def _read_recipe(file: Path) -> tuple[RecordedRecipe, dict[str, Any]]:
    """Read a recipe, and its plain values. Its objects stay texts."""
    values = storage.read_toml(file)
    text = json.dumps(values, default=str)
    recipe: RecordedRecipe = storage.parse_json(
        text.encode(), RecordedRecipe, str(file), error=RunError
    )
    if not recipe.phases:
        raise RunError(f"{file}: expected a phase, got none. Only trained models can be compared.")
    for phase in recipe.phases:
        for spec in (phase.objective, phase.supervision):
            _check_spec(spec, file)
    return recipe, values


def _check_spec(text: str, file: Path) -> None:
    if len(text) > MAX_TEXT:
        raise RunError(
            f"{file}: expected an objective of at most {MAX_TEXT:,} characters, got {len(text):,}. "
            "Restore this file."
        )
    try:
        parse_call(text)
    except SpecError as error:
        raise RunError(f"{file}: {error}") from None


def _short_objective(text: str) -> str:
    """An objective of the catalog without the fields that have their defaults. Others unchanged."""
    name, values = parse_call(text)
    kind = next((entry for entry in objectives.CATALOG if entry.__name__ == name), None)
    if kind is None:
        return text
    kept = dict(values)
    try:
        default = vars(build_object(kind, {}))
        kept = {key: value for key, value in values.items() if default.get(key) != value}
    except SpecError:
        # An objective without defaults, or of another version.
        pass
    return f"{name}({', '.join(f'{key}={value!r}' for key, value in kept.items())})"


def _model_text(model: Mapping[str, Any], file: Path) -> str:
    fields = ", ".join(f"{key}={value!r}" for key, value in model.items() if key != "kind")
    text = without_folders(f"{model.get('kind', '')}({fields})")
    if not isinstance(model.get("kind"), str) or len(text) > MAX_TEXT:
        raise RunError(
            f"{file}: model: expected a kind and its fields, got {text[:80]!r}. Restore this file."
        )
    return text


def _settings(values: dict[str, Any], record: RunRecord) -> dict[str, str]:
    """Keys that may change the result and belong neither to the data nor to the conditions."""
    skipped = (*CHANGEABLE_KEYS, "seed", "members", "evaluation.test")
    settings = {
        key: without_folders(str(value))
        for key, value in sorted(flatten_recipe(values).items())
        if key not in skipped
        and not key.startswith(("data.", "model."))
        and value not in ("", [], {})
    }
    for name, fingerprint in sorted(record.inputs.items()):
        if name in COMPARED_INPUTS or name.endswith(".supervision"):
            settings[f"content of {name}"] = fingerprint.content_hash[:12]
    return settings | {f"code of {name}": code[:12] for name, code in sorted(record.code.items())}


def without_folders(text: str) -> str:
    """Shorten absolute paths to their last part, which is the same on each machine."""
    return ABSOLUTE_PATH.sub(r"\1", text)


def recalls_of_ranks(ranks: QueryRanks) -> dict[str, float]:
    """Compute the recalls of both directions in percent from the ranks of all queries."""
    by_direction = {"i2t": ranks.image_ranks, "t2i": ranks.text_ranks}
    return {
        metric.key(way): float(metric.function(torch.from_numpy(by_direction[way])[:, None]))
        for way in DIRECTIONS
        for metric in RSUM_RECALLS
    }


def short_hash(parts: Sequence[str] | Mapping[str, Any]) -> str:
    """Hash texts to 12 digits."""
    return hashlib.sha256("\x1f".join(parts).encode()).hexdigest()[:12]
