"""Recipe: the complete description of a training, from plain values with ``key=value`` overrides.

A recipe is a list of phases, so that two-step training, warm-up with another objective and second
rounds are data and not branches of the trainer. Every key is checked. An unknown key is an error
with the nearest valid key.
"""

from __future__ import annotations

import ast
import difflib
import re
import tomllib
from contextlib import suppress
from copy import deepcopy
from dataclasses import fields, replace
from typing import Annotated, Any, Self

from pydantic import BeforeValidator, Field, ValidationError, field_validator, model_validator

from visavis.core import own_code, spec
from visavis.core.errors import RecipeError, SpecError, format_value, suggest_name
from visavis.core.fields import expected_value
from visavis.core.memory_budget import parse_memory
from visavis.losses import objectives
from visavis.models import find_model
from visavis.training.recipes.settings import (
    DataSettings,
    EvaluationSettings,
    InterpolationSettings,
    Phase,
    RecipeSection,
    TextSettings,
    TrainingSettings,
    VisualSettings,
)
from visavis.training.supervision import FeedbackSupervision, NoisySupervision, PairSupervision

# Short keys: ``objective`` sets that of every phase, ``epochs`` that of a single phase.
PHASE_SHORTCUTS = ("objective", "epochs")


def parse_model_table(model: Any) -> Any:
    """Parse a model that is written as text, such as ``"VSE++(embedding_dim=512)"``."""
    if isinstance(model, dict) and isinstance(kind := model.get("kind"), type):
        return model | {"kind": own_code.name_part(kind).__qualname__}
    if not isinstance(model, str):
        return model
    kind, fields = spec.parse_call(model)
    return {"kind": kind, **fields}


class Recipe(RecipeSection):
    """Complete description of a training. A run stores it, resolved, as ``run.toml``.

    Attributes:
        name: Name of the recipe and of its run folders.
        about: Description in one sentence.
        published: Id of the row of a paper's table that the run is compared with, such as
            "cocos/2/vse++-flickr30k-triplet".
        seed: Seed of weights, batches and dropout.
        memory: Memory limit of score blocks in training and evaluation, such as "2GiB". "": a
            quarter of the free memory.
        matryoshka_dims: Matryoshka dimensions that the loss also trains.
        start_from: Run folder whose best weights, vocabulary and standardization the training
            starts from. "": new weights.
        members: Changes of each member of an ensemble, by name.
        data: Data set.
        visual: Input of the visual side.
        text: Input of the text side.
        model: Table with a ``kind`` of the catalog, or a text such as "VSE++(embedding_dim=512)".
        training: Batches, steps, validations and checkpoints.
        evaluation: Validation and test.
        interpolation: Interpolation of the weights after the training.
        phases: Phases.
    """

    name: str = Field(pattern=r"^[^/\\]+$")
    about: str = ""
    published: str = ""
    seed: int = Field(0, ge=0, lt=2**63)
    memory: str = ""
    matryoshka_dims: tuple[Annotated[int, Field(gt=0)], ...] = Field((), strict=False)
    start_from: str = ""
    members: dict[str, dict[str, Any]] = Field(default_factory=dict)
    data: DataSettings = DataSettings()
    visual: VisualSettings
    text: TextSettings = TextSettings()
    model: Annotated[dict[str, Any], BeforeValidator(parse_model_table)]
    training: TrainingSettings = TrainingSettings()
    evaluation: EvaluationSettings = EvaluationSettings()
    interpolation: InterpolationSettings = InterpolationSettings()
    phases: tuple[Phase, ...] = Field(strict=False)

    @model_validator(mode="after")
    def _check_text(self) -> Self:
        text = self.text
        visual = self.visual
        if text.features:
            if text.encoder != "vocabulary" or text.granularity == "tokens":
                raise ValueError(
                    'text.features: expected text.granularity = "words" or "pooled" and no text.encoder. Set the granularity of the stored '
                    "features, and remove text.encoder."
                )
            return self
        if text.encoder == "vocabulary" and text.granularity != "tokens":
            raise ValueError(
                "text.granularity: expected \"tokens\" for text.encoder = 'vocabulary', got "
                f"{text.granularity!r}. Remove it."
            )
        is_dual_encoder = (
            text.encoder == visual.encoder and visual.granularity == "pixels"
        )  # it has its own tokens
        if (
            text.encoder != "vocabulary"
            and "granularity" not in text.model_fields_set
            and not is_dual_encoder
        ):
            raise ValueError(
                f'text.granularity: expected "pooled" or "words" to freeze text.encoder = {text.encoder!r}, or "tokens" to train it, got '
                "nothing. Set one of them."
            )
        return self

    @model_validator(mode="after")
    def _check_average_networks(self) -> Self:
        if self.evaluation.average_networks and not all(
            isinstance(phase.supervision, NoisySupervision) for phase in self.phases
        ):
            raise ValueError(
                "evaluation.average_networks: expected two networks in every phase. "
                'Set supervision = "NoisySupervision()" in every phase, or remove average_networks.'
            )
        return self

    @model_validator(mode="after")
    def _check_average_weights(self) -> Self:
        if self.training.ema_decay and any(
            isinstance(phase.supervision, NoisySupervision) for phase in self.phases
        ):
            raise ValueError(
                "training.ema_decay: expected 0 with NoisySupervision, which trains two networks, "
                f"got {self.training.ema_decay:g}. Remove it."
            )
        return self

    @model_validator(mode="after")
    def _check_random_validation(self) -> Self:
        evaluation = self.evaluation
        if evaluation.random_validation and (
            self.data.stream or self.members or evaluation.validation == evaluation.test
        ):
            raise ValueError(
                "evaluation.random_validation: expected no data.stream, no members, and another "
                "split for validation than for the test. Change them, or remove it."
            )
        return self

    @field_validator("model")
    @classmethod
    def _allow_own_model(cls, model: dict[str, Any]) -> dict[str, Any]:
        """An own model that the user names now is built later, when nobody names it."""
        if ":" in (kind := str(model.get("kind"))):
            with suppress(own_code.CodeNotNamed):
                find_model(kind)
        return model

    @field_validator("members")
    @classmethod
    def _check_members(cls, members: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
        if len(members) == 1 or not all(re.fullmatch(r"\w[\w+-]*", name) for name in members):
            raise ValueError(
                "members: expected two or more, with names of letters, digits, _, + and -, got "
                f"{', '.join(members)!r}."
            )
        return members

    @field_validator("memory", mode="before")
    @classmethod
    def _check_memory(cls, setting: int | str) -> str:
        if setting is None:
            raise ValueError(
                'memory: expected a size such as "2GiB", got None. Remove the key to use its default.'
            )
        return setting if setting == "" else str(parse_memory(setting) and setting)

    @property
    def positives_by(self) -> str:
        """Definition of positives in each phase, joined by "then": "ids", "position", "ids and
        feedback", or "its own rule" of a supervision that does not name it.
        """
        return " then ".join(
            dict.fromkeys(getattr(each.supervision, "by", "its own rule") for each in self.phases)
        )

    @property
    def supervision(self) -> str:
        """Supervision of each phase with its settings, joined by "then", and the source of feedback."""
        judgments = f" of {self.data.feedback}" if self.data.feedback else ""
        return " then ".join(
            dict.fromkeys(f"{phase.supervision!r}{judgments}" for phase in self.phases)
        )

    @property
    def noise(self) -> str:
        """Noise of the training captions with its seed. "": none."""
        noise = self.data.noise
        if noise is None:
            return ""
        # A noise without a field for the seed, such as a published index, has none.
        names = [field.name for field in fields(noise)]  # type: ignore[arg-type]
        if "seed" in names and noise.seed is None:
            noise = replace(noise, seed=self.seed)  # type: ignore[type-var]
        return repr(noise)

    def to_dict(self) -> dict[str, Any]:
        """Convert to plain values for TOML and JSON, without None, which TOML does not have."""
        return _without_none(self.model_dump(mode="json"))


def build_recipe(content: dict[str, Any], overrides: dict[str, Any], source: str) -> Recipe:
    """Build a recipe from plain values, which stay unchanged. ``source`` is for messages."""
    content = normalize_values(deepcopy(content))
    apply_overrides(content, overrides, source)
    # Keep which scale and bias the objectives name, before validation replaces each objective by its
    # text with every field.
    model = content.get("model")
    phases = content.get("phases")
    learns_scale = isinstance(model, dict) and model.get("scale") == "learned"
    for phase in phases if learns_scale and isinstance(phases, list) else ():
        with suppress(SpecError):  # validation reports an invalid objective
            if isinstance(phase, dict) and "learned_start" not in phase:
                phase["learned_start"] = (
                    objectives.named_scale_and_bias(phase["objective"])
                    if "objective" in phase
                    else []
                )
    try:
        return Recipe.model_validate(content)
    except ValidationError as errors:
        raise RecipeError(f"{source}: {_first_error(errors, content)}") from None
    except SpecError as error:
        raise RecipeError(f"{source}: {error}") from None


def normalize_values(content: dict[str, Any]) -> dict[str, Any]:
    """Replace a model that is written as text by its table, so that it can be merged."""
    return (
        content | {"model": parse_model_table(content["model"])} if "model" in content else content
    )


def with_feedback(recipe: Recipe) -> Recipe:
    """Replace pair supervision by feedback supervision, if the recipe names a source of feedback."""
    if not recipe.data.feedback:
        return recipe
    phases = []
    for number, phase in enumerate(recipe.phases):
        if isinstance(phase.supervision, FeedbackSupervision):
            phases.append(phase)
        elif phase.supervision == PairSupervision():
            phases.append(phase.model_copy(update={"supervision": FeedbackSupervision()}))
        else:
            raise RecipeError(
                f"phases.{number}.supervision: {phase.supervision} does not support relevance "
                "judgments. "
                f'Set phases.{number}.supervision="FeedbackSupervision()", or remove data.feedback.'
            )
    return recipe.model_copy(update={"phases": tuple(phases)})


def parse_override(text: str) -> tuple[str, Any]:
    """Parse ``key=value``. A value that is neither a Python literal nor a table or list of TOML is
    text.

    Args:
        text: Override, such as ``"phases.0.epochs=3"``.

    Returns:
        Dotted key and value.

    Raises:
        RecipeError: If the key or ``=`` is missing.

    Example:
        >>> parse_override("model.netvlad_clusters={ audio = 16, speech = 32 }")
        ('model.netvlad_clusters', {'audio': 16, 'speech': 32})
    """
    key, equals, value = text.partition("=")
    if not equals or not key.strip():
        raise RecipeError(
            f"override: expected key=value, got {text!r}. Write it as training.batch_size=64."
        )
    with suppress(ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        return key.strip(), ast.literal_eval(value)
    if value.lstrip().startswith(("{", "[")):
        with suppress(ValueError, RecursionError):
            (parsed,) = tomllib.loads(f"value = {value}").values()
            return key.strip(), parsed
    return key.strip(), {"true": True, "false": False}.get(value.lower(), value)


def apply_overrides(content: dict[str, Any], overrides: dict[str, Any], source: str) -> None:
    """Set dotted keys in the plain values of a recipe, in place.

    Args:
        content: Plain values.
        overrides: Values by dotted key, or by a short key of the phases.
        source: File or name, for messages.

    Raises:
        RecipeError: If a key leads through a plain value or names an unknown phase.

    Example:
        >>> content = {"phases": [{"epochs": 1, "objective": "VLC()"}, {"epochs": 2, "objective": "VLC()"}]}
        >>> apply_overrides(content, {"phases.1.epochs": 5, "objective": "Unified()"}, "my.toml")
        >>> content["phases"]
        [{'epochs': 1, 'objective': 'Unified()'}, {'epochs': 5, 'objective': 'Unified()'}]
    """
    for key, value in overrides.items():
        phases = content.get("phases")
        paths = [key]
        # A short key sets a key of each phase.
        if key in PHASE_SHORTCUTS and isinstance(phases, list):
            if key == "epochs" and len(phases) != 1:
                raise RecipeError(
                    f"epochs: expected a recipe of one phase, got {len(phases)} phases. Set "
                    "phases.0.epochs."
                )
            paths = [f"phases.{number}.{key}" for number in range(len(phases))]
        for path in paths:
            _set(content, path, value, source)


def phase_at(phases: list[Any], number: str, key: str, source: str) -> Any:
    """Return a phase by its number."""
    if not number.isdecimal() or int(number) >= len(phases):
        raise RecipeError(
            f"{source}: {key}: expected a phase from 0 to {len(phases) - 1}, got {number}. Name an "
            "existing phase."
        )
    return phases[int(number)]


def _set(content: dict[str, Any], path: str, value: Any, source: str) -> None:
    """Set one dotted key in place. Missing tables are added."""
    *parents, last = path.split(".")
    target: Any = content
    for step in parents:
        target = (
            phase_at(target, step, path, source)
            if isinstance(target, list)
            else target.setdefault(step, {})
        )
        if not isinstance(target, dict | list):
            raise RecipeError(
                f"{source}: {path}: expected {step} to be a table, got a plain value. Set {step} "
                "itself."
            )
    if isinstance(target, list):
        raise RecipeError(
            f"{source}: {path}: expected one entry of a list, got the whole list. Set an entry, "
            "such as phases.0.epochs."
        )
    target[last] = value
    if last == "objective":
        target.pop("learned_start", None)  # belongs to the former objective


def _first_error(errors: ValidationError, content: dict[str, Any]) -> str:
    first = errors.errors(include_url=False)[0]
    steps = [str(step) for step in first["loc"]]
    key = ".".join(steps) or "recipe"
    if first["type"] == "extra_forbidden":
        return f"{key} is not a key of recipes: {_suggest_key(steps, first['input'], content)}"
    if first["type"] == "missing":
        return f"{key}: expected a value, got none. Add it to the recipe."
    if first["type"] == "value_error":
        return first["msg"].removeprefix("Value error, ")
    # The words of TOML.
    expected = expected_value(first).replace("True or False", "true or false")
    return f"{key}: expected {expected}, got {format_value(first['input'])}."


def _suggest_key(steps: list[str], value: Any, content: dict[str, Any]) -> str:
    """The end of an error message about an unknown key: a similar key of its section, or a valid
    key of another section with the value.
    """
    *parents, word = steps
    section: Any = Recipe
    for step in parents:
        if not step.isdigit():
            section = Phase if step == "phases" else section.model_fields[step].annotation
    keys = list(section.model_fields)
    phases = content.get("phases")
    num_phases = len(phases) if isinstance(phases, list) else 1
    shortcuts = [key for key in PHASE_SHORTCUTS if key != "epochs" or num_phases == 1]
    redundant = {f"phases.0.{key}" for key in shortcuts} | {*PHASE_SHORTCUTS} - {*shortcuts}
    all_keys = _all_keys()
    others = [key for key in all_keys if key not in redundant]
    nearest = difflib.get_close_matches(
        word, {key.rpartition(".")[2] for key in others}, n=1, cutoff=0.8
    )
    elsewhere = [key for key in others if key.rpartition(".")[2] in (nearest or [word])]
    suggestion = suggest_name(word, keys)
    if not elsewhere or (suggestion.startswith("did you mean") and word not in nearest):
        return suggestion
    is_table = any(key.startswith(f"{elsewhere[0]}.") for key in all_keys)
    text = (
        f"={format_value(value)}"
        if isinstance(value, bool | int | float | str) and not is_table
        else ""
    )
    return f"did you mean {' or '.join(f'{key}{text}' for key in elsewhere)}?"


def _all_keys(section: type[RecipeSection] = Recipe, prefix: str = "") -> list[str]:
    """The dotted keys of a section and of the sections in it, with short keys and keys of the first
    phase.
    """
    keys = list[str]()
    for name, field in section.model_fields.items():
        keys.append(prefix + name)
        if name == "phases":
            keys += [*PHASE_SHORTCUTS, *_all_keys(Phase, "phases.0.")]
        elif isinstance(field.annotation, type) and issubclass(field.annotation, RecipeSection):
            keys += _all_keys(field.annotation, f"{prefix}{name}.")
    return keys


def _without_none(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_none(item) for key, item in value.items() if item is not None}
    return [_without_none(item) for item in value] if isinstance(value, list) else value
