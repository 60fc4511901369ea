"""A recipe: the complete description of a training, as TOML with ``key=value`` overrides.

A recipe is a list of phases, so that two-step training, warm-up with another objective and second rounds are data, not
branches of the trainer. Every key is checked; an unknown one is an error that names the nearest right one.
"""

from __future__ import annotations

from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from visavis import degrees, objectives, spec, supervision
from visavis.errors import RecipeError, SpecError, nearest
from visavis.memory import parse_memory
from visavis.models import small_cnn
from visavis.training.overrides import set_values
from visavis.training.renamed import with_new_names


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class DataSettings(Section):
    """path: a data set (a folder, a file, or a name under VISAVIS_DATA). skip_bad: go on without what is broken.

    misplaced: the share of training captions that are moved to wrong images, drawn by the run's seed; to study noise.
    """

    path: str = ""
    skip_bad: bool = False
    misplaced: float = Field(0.0, ge=0, le=1)


class VisualSettings(Section):
    """How images are read. tower: a frozen encoder, by name or folder. view: what of it; "pixels": the model trains it.

    features: a stored array of its features, row i of image i, instead of computing them; "precomp": those of the data set
    itself; a model without a tower cannot read new images. crops: 1 or 10. augment: random
    resized crop and flip in training ("pixels" only).
    """

    tower: str = ""
    view: Literal["pooled", "grid", "pixels"] = "pooled"
    features: str = ""
    crops: Literal[1, 10] = 1
    augment: bool = False

    @model_validator(mode="after")
    def _fits(self) -> Self:
        pixels = self.view == "pixels"
        if pixels and (self.features or self.crops > 1):
            raise ValueError(
                'visual.features and visual.crops are for frozen features: visual.view is "pixels", where the model reads pictures.'
            )
        if self.tower == small_cnn.NAME and not pixels:
            raise ValueError(f'visual.tower {self.tower} begins with random weights: train it with visual.view = "pixels".')
        if self.augment and not pixels:
            raise ValueError(f'visual.augment is for visual.view = "pixels"; features of the view {self.view} are computed once.')
        return self


class TextSettings(Section):
    """How captions are read. tower: a frozen encoder, or "vocabulary": words learned from the training captions.

    view: what of a tower; "tokens" also of one that is the model itself on both sides (CLIP). min_count: how often a word must occur to be known.
    """

    tower: str = "vocabulary"
    view: Literal["pooled", "words", "tokens"] = "tokens"
    min_count: int = Field(4, gt=0)


class OptimizerSettings(Section):
    """name: a class of torch.optim. lr: the learning rate. lr_multipliers: factors for parts ("backbone", "visual", "text")."""

    name: Literal["Adam", "AdamW", "SGD"] = "Adam"
    lr: float = Field(5e-4, gt=0)
    weight_decay: float = Field(0.0, ge=0)
    lr_multipliers: dict[str, float] = {}


class ScheduleSettings(Section):
    """The rate over a phase. kind "constant"; "step": times ``factor`` after each epoch of ``milestones``; "cosine": to 0.

    warmup: the share of the phase over which the rate first rises from 0.
    """

    kind: Literal["constant", "step", "cosine"] = "constant"
    milestones: tuple[int, ...] = ()
    factor: float = 0.1
    warmup: float = Field(0.0, ge=0, lt=1)


class Phase(Section):
    """Some epochs with one objective. trainable: parts that learn (all if empty). start_from: the weights to begin with,
    the last ones or the best so far; the optimizer starts anew unless ``keep_optimizer``.
    """

    epochs: int = Field(gt=0)
    objective: str
    supervision: str = "PairSupervision(by='ids')"
    trainable: tuple[str, ...] = ()
    optimizer: OptimizerSettings = OptimizerSettings()
    schedule: ScheduleSettings = ScheduleSettings()
    start_from: Literal["last", "best"] = "last"
    keep_optimizer: bool = False

    @field_validator("objective")
    @classmethod
    def _objective(cls, text: str) -> str:
        return repr(objectives.parse(text))

    @field_validator("supervision")
    @classmethod
    def _supervision(cls, text: str) -> str:
        return repr(spec.parse(text, supervision.CATALOG))


class TrainingSettings(Section):
    """batch_size, captions_per_image, length_buckets: see data.loader.Plan. clip_norm: of the whole gradient; 0: not.

    accumulate: batches averaged in one step. autocast: products in bfloat16. patience: validations without a better RSUM
    after which a phase ends; 0: never. evaluate_every: steps between validations; 0: an epoch. checkpoint_s: at least
    this many seconds between checkpoints. threads: of the CPU; 0: as the machine says. device: "auto", "cpu", "cuda".
    probe_batches: batches of each split on which losses and similarities are watched.
    """

    batch_size: int = Field(128, gt=1)
    captions_per_image: int | None = Field(None, gt=0)
    length_buckets: int = Field(0, ge=0)
    clip_norm: float = Field(2.0, ge=0)
    accumulate: int = Field(1, gt=0)
    autocast: bool = False
    patience: int = Field(0, ge=0)
    evaluate_every: int = Field(0, ge=0)
    checkpoint_s: float = Field(30.0, ge=0)
    threads: int = Field(0, ge=0)
    device: Literal["auto", "cpu", "cuda"] = "auto"
    probe_batches: int = Field(8, gt=0)


class EvaluationSettings(Section):
    """protocol: a named protocol, applied to the test split. validation, test: names of splits.

    degrees: who tells degrees of relevance, such as "CBoW()"; the test then says how well the whole order follows them.
    """

    protocol: str = "plain"
    validation: str = "val"
    test: str = "test"
    degrees: str = ""

    @field_validator("degrees")
    @classmethod
    def _degrees(cls, text: str) -> str:
        return text and repr(spec.parse(text, degrees.CATALOG))


class Recipe(Section):
    """Everything that a training is; saved resolved as ``run.toml``.

    model: a table with a ``kind`` of the catalog, or the same as one text, "VSE++(width=512)".
    published: a paper's figures, beside which a diagnosis sets those of the run, such as "COCOS/VSE++/Flickr30k".

    published: a paper's figures, beside which a diagnosis sets those of the run, such as "COCOS/VSE++/Flickr30k". memory: what
    blocks of scores may take in training and evaluation, such as "2GiB"; "": a quarter of what is free.
    """

    name: str = Field(pattern=r"^[^/\\]+$")
    about: str = ""
    published: str = ""
    seed: int = Field(0, ge=0)
    memory: str = ""
    data: DataSettings = DataSettings()
    visual: VisualSettings
    text: TextSettings = TextSettings()
    model: dict[str, Any]
    training: TrainingSettings = TrainingSettings()
    evaluation: EvaluationSettings = EvaluationSettings()
    phases: tuple[Phase, ...]

    @model_validator(mode="after")
    def _text_fits(self) -> Self:
        text, visual = self.text, self.visual
        both_sides = text.tower == visual.tower and visual.view == "pixels"  # a dual encoder, which has tokens of its own
        if (text.tower == "vocabulary") != (text.view == "tokens") and not (both_sides and text.view == "tokens"):
            expected = '"tokens"' if text.tower == "vocabulary" else '"pooled" or "words"'
            raise ValueError(f"text.view is {text.view!r}, expected {expected} for text.tower = {text.tower!r}.")
        return self

    @field_validator("model", mode="before")
    @classmethod
    def _model(cls, model: Any) -> Any:
        return model_table(model)

    @field_validator("memory", mode="before")
    @classmethod
    def _memory(cls, setting: int | str) -> str:
        return setting if setting == "" else str(parse_memory(setting) and setting)

    def to_dict(self) -> dict[str, Any]:
        """As plain values, without those that are None (TOML has no null)."""
        return _without_none(self.model_dump(mode="json"))


def build_recipe(content: dict[str, Any], overrides: dict[str, Any], where: str) -> Recipe:
    """A recipe from its values. Raises RecipeError naming the key, what was found and what is expected."""
    content = with_new_names(content)
    if "model" in content:
        content["model"] = model_table(content["model"])
    set_values(content, overrides, where)
    try:
        return Recipe.model_validate(content)
    except ValidationError as errors:
        raise RecipeError(f"{where}: {_sentence(errors)}") from None
    except SpecError as error:
        raise RecipeError(f"{where}: {error}") from None


def model_table(model: Any) -> Any:
    """A model written as a text, ``"VSE++(width=512)"``, as the table that it stands for."""
    if not isinstance(model, str):
        return model
    kind, fields = spec.parse_call(model)
    return {"kind": kind, **fields}


def _sentence(errors: ValidationError) -> str:
    """The first thing wrong, in one sentence."""
    first = errors.errors(include_url=False)[0]
    steps = [str(step) for step in first["loc"]]
    where = ".".join(steps) or "the recipe"
    if first["type"] == "extra_forbidden":
        return f"{where} is not a key of recipes: {nearest(steps[-1], _keys_at(steps[:-1]))}"
    if first["type"] == "missing":
        return f"{where} is missing."
    message = first["msg"].removeprefix("Value error, ")
    return message if first["type"] == "value_error" else f"{where} is {first['input']!r}: {message[0].lower()}{message[1:]}."


def _keys_at(steps: list[str]) -> list[str]:
    """The keys that a section of a recipe knows."""
    section: Any = Recipe
    for step in steps:
        if step.isdigit():
            continue
        annotation = section.model_fields[step].annotation
        section = Phase if step == "phases" else annotation
    return list(section.model_fields)


def _without_none(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_none(item) for key, item in value.items() if item is not None}
    return [_without_none(item) for item in value] if isinstance(value, list) else value
