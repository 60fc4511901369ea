"""A recipe: the complete description of a training, as TOML with ``key=value`` overrides.

A recipe is a list of phases, so that two-step training, warm-up with another objective and second rounds are data, not
branches of the trainer. Every key is checked; an unknown one is an error that names the nearest right one.
"""

from __future__ import annotations

import re
from typing import Annotated, Any, Self

from pydantic import Field, ValidationError, field_validator, model_validator

from visavis import spec
from visavis.errors import RecipeError, SpecError, nearest
from visavis.memory import parse_memory
from visavis.training.overrides import set_values
from visavis.training.renamed import with_new_names
from visavis.training.settings import (
    DataSettings,
    EvaluationSettings,
    InterpolationSettings,
    Phase,
    Section,
    TextSettings,
    TrainingSettings,
    VisualSettings,
)

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


class Recipe(Section):
    """The complete description of a training; a run keeps it, resolved, as ``run.toml``.

    model: a table with a ``kind`` of the catalog, or the same as one text, "VSE++(width=512)".
    published: a row of a paper's table, beside which the run is set, such as "cocos/2/vse++-flickr30k-triplet". memory: what
    blocks of scores may take in training and evaluation, such as "2GiB"; "": a quarter of what is free. start_from: the folder of a run of
    the same model, with whose best weights, words and standardization the training begins; "": anew. members: of an ensemble, models
    that are trained apart and tested by the mean of their scores: what is different in each, by name.
    """

    name: str = Field(pattern=r"^[^/\\]+$")
    about: str = ""
    published: str = ""
    seed: int = Field(0, ge=0, lt=2**63)
    memory: str = ""
    widths: tuple[Annotated[int, Field(gt=0)], ...] = Field((), strict=False)
    start_from: str = ""
    members: dict[str, dict[str, Any]] = Field(default_factory=dict)
    data: DataSettings = DataSettings()
    visual: VisualSettings
    text: TextSettings = TextSettings()
    model: dict[str, Any]
    training: TrainingSettings = TrainingSettings()
    evaluation: EvaluationSettings = EvaluationSettings()
    interpolation: InterpolationSettings = InterpolationSettings()
    phases: tuple[Phase, ...] = Field(strict=False)

    @model_validator(mode="after")
    def _text_fits(self) -> Self:
        text, visual = self.text, self.visual
        if text.features:
            if text.tower != "vocabulary" or text.view == "tokens":
                raise ValueError('text.features are read as they are stored: set text.view = "words" (or "pooled"), and no text.tower.')
            return self
        both_sides = text.tower == visual.tower and visual.view == "pixels"  # a dual encoder, which has tokens of its own
        if text.tower == "vocabulary" and text.view != "tokens":
            raise ValueError(f"text.view is {text.view!r}, expected \"tokens\" for text.tower = 'vocabulary'.")
        if text.tower != "vocabulary" and "view" not in text.model_fields_set and not both_sides:
            raise ValueError(
                f'text.view is missing, expected "pooled" or "words" for text.tower = {text.tower!r} as it is, or "tokens" to train it.'
            )
        return self

    @model_validator(mode="after")
    def _average_fits(self) -> Self:
        if self.evaluation.average and not all(phase.supervision.startswith("NoisySupervision(") for phase in self.phases):
            raise ValueError('evaluation.average is for runs of two networks: give every phase supervision = "NoisySupervision()".')
        return self

    @field_validator("model", mode="before")
    @classmethod
    def _model(cls, model: Any) -> Any:
        return model_table(model)

    @field_validator("members")
    @classmethod
    def _members(cls, members: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
        if len(members) == 1 or not all(re.fullmatch(r"\w[\w+-]*", name) for name in members):
            raise ValueError(f"members are {', '.join(members)!r}: expected two or more, whose names are names of folders.")
        return members

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
