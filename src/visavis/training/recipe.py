"""A recipe: the complete description of a training, as TOML with ``key=value`` overrides.

A recipe is a list of phases, so that two-step training, warm-up with another objective and second rounds are data, not
branches of the trainer. Every key is checked; an unknown one is an error that names the nearest right one.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from visavis import degrees, objectives, spec, supervision
from visavis.errors import RecipeError, SpecError, nearest
from visavis.memory import parse_memory
from visavis.models import small_cnn
from visavis.training.overrides import set_values
from visavis.training.renamed import with_new_names

FORMS = {
    "tuple_type": "expected a list",
    "dict_type": "expected a table of keys",
    "model_type": "expected a table of keys",
    "int_type": "expected a whole number",
    "float_type": "expected a number",
    "bool_type": "expected true or false",
    "string_type": "expected a text in quotes",
}
"""What a key of the wrong kind should have been, by pydantic's name for the error, in the words of TOML."""

Multiple = Annotated[float, Field(gt=0)]
"""What a learning rate is multiplied by."""


class Section(BaseModel):
    """Values are what they are written as: no True for a number, no 1000.0 for a whole one; only a list may be a tuple."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, strict=True)


class DataSettings(Section):
    """The data set.

    path: a folder, a list in it, or a name under ``VISAVIS_DATA``. skip_bad: leave out what is broken instead of stopping.
    misplaced: the share of training captions that are moved to wrong images, drawn by the run's seed, to study noise.
    """

    path: str = ""
    skip_bad: bool = False
    misplaced: float = Field(0.0, ge=0, le=1)


class VisualSettings(Section):
    """The input of the visual side: features of a frozen image encoder, or pixels.

    tower: the image encoder, by name or folder; a model without one cannot read new images. view: of a frozen encoder one
    vector an image ("pooled") or one a region ("grid"); "pixels": the encoder is part of the model and may be trained.
    features: a stored array of features, row i of image i, instead of computing them; "precomp": those that the data set
    brings. crops: 1, or 10 for features of ten crops, always the same (center, corners, mirror images). standardize: features, or
    their square roots, at mean 0 and deviation 1 over the training images; "": as they are. augment: random resized crops and
    flips in training ("pixels" only).
    """

    tower: str = ""
    view: Literal["pooled", "grid", "pixels"] = "pooled"
    features: str = ""
    crops: Literal[1, 10] = 1
    standardize: Literal["", "values", "roots"] = ""
    augment: bool = False

    @model_validator(mode="after")
    def _fits(self) -> Self:
        pixels = self.view == "pixels"
        if pixels and (self.features or self.crops > 1 or self.standardize):
            raise ValueError(
                "visual.features, visual.crops and visual.standardize are for frozen features: "
                'visual.view is "pixels", where the model reads pictures.'
            )
        if self.tower == small_cnn.NAME and not pixels:
            raise ValueError(f'visual.tower {self.tower} begins with random weights: train it with visual.view = "pixels".')
        if self.augment and not pixels:
            raise ValueError(f'visual.augment is for visual.view = "pixels"; features of the view {self.view} are computed once.')
        return self


class TextSettings(Section):
    """The input of the text side: token ids of words, or features of a frozen text encoder.

    tower: "vocabulary" for words with learned embeddings, or a frozen encoder by name or folder. view: "tokens" of a vocabulary,
    or of an encoder that is the model itself on both sides (CLIP); else one vector a text ("pooled") or one a word piece ("words").
    min_count: how often a word must occur in the training captions to be in the vocabulary, which has no punctuation.
    """

    tower: str = "vocabulary"
    view: Literal["pooled", "words", "tokens"] = "tokens"
    min_count: int = Field(4, gt=0)


class OptimizerSettings(Section):
    """The optimizer and its learning rates.

    name: a class of torch.optim. lr: the learning rate. lr_multipliers: its factors by part of the model ("visual", "text",
    "backbone"); 1 for parts that are not named.
    """

    name: Literal["Adam", "AdamW", "SGD"] = "Adam"
    lr: float = Field(5e-4, gt=0)
    weight_decay: float = Field(0.0, ge=0)
    lr_multipliers: dict[str, Multiple] = {}


class ScheduleSettings(Section):
    """How the learning rate changes over a phase.

    kind: "constant"; "step": times ``factor`` after each epoch of ``milestones``; "cosine": falling to 0. warmup: the share of
    the phase's steps over which the learning rate first rises linearly from 0.
    """

    kind: Literal["constant", "step", "cosine"] = "constant"
    milestones: tuple[Annotated[int, Field(gt=0)], ...] = Field((), strict=False)
    factor: Multiple = 0.1
    warmup: float = Field(0.0, ge=0, lt=1)


class Phase(Section):
    """Epochs with one objective, supervision and optimizer.

    objective, supervision: texts of the catalogs, such as "VLC(gamma=40)". trainable: the parts of the model that learn, all if
    empty. start_from: begin with the last weights or the best ones by validation RSUM. keep_optimizer: take over the state of
    the optimizer from the phase before.
    """

    epochs: int = Field(gt=0)
    objective: str
    supervision: str = "PairSupervision(by='ids')"
    trainable: tuple[str, ...] = Field((), strict=False)
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
    """Batches, steps and what is watched.

    batch_size: pairs; images where ``captions_per_image`` is given, each with so many of its captions. length_buckets: batches
    within which captions are sorted by length; 0: not. clip_norm: the largest norm of the gradient over all parameters; 0: any.
    accumulate: batches whose gradients are averaged in one step. autocast: matrix products in bfloat16. patience: a phase ends
    after so many validations without a better RSUM; 0: never. evaluate_every: steps between validations; 0: an epoch.
    checkpoint_s: seconds that pass at least between checkpoints. threads: of the CPU; 0: as torch finds. device: "auto" takes CUDA
    where there is one. probe_batches: batches of each split on which losses and similarities are logged.
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
    """The validation after each epoch and the test at the end.

    protocol: a named protocol, for the test split. validation, test: names of splits. degrees: a way to tell degrees of relevance,
    such as "CBoW()"; the test then also has CS@K and nDCG@K.
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
    """The complete description of a training; a run keeps it, resolved, as ``run.toml``.

    model: a table with a ``kind`` of the catalog, or the same as one text, "VSE++(width=512)".
    published: a paper's figures, beside which a diagnosis sets those of the run, such as "COCOS/VSE++/Flickr30k". memory: what
    blocks of scores may take in training and evaluation, such as "2GiB"; "": a quarter of what is free.
    """

    name: str = Field(pattern=r"^[^/\\]+$")
    about: str = ""
    published: str = ""
    seed: int = Field(0, ge=0, lt=2**63)
    memory: str = ""
    data: DataSettings = DataSettings()
    visual: VisualSettings
    text: TextSettings = TextSettings()
    model: dict[str, Any]
    training: TrainingSettings = TrainingSettings()
    evaluation: EvaluationSettings = EvaluationSettings()
    phases: tuple[Phase, ...] = Field(strict=False)

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
    message = FORMS.get(first["type"], first["msg"].removeprefix("Value error, "))
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
