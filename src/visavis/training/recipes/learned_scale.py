"""Learned scale and bias of a model: their start in a phase, and their description."""

from __future__ import annotations

import math

import torch

from visavis.core.errors import RecipeError, SpecError
from visavis.models import Matcher
from visavis.training.recipes.settings import Phase


def learned_start_values(matcher: Matcher, phase: Phase) -> dict[str, float]:
    """Return the values at which a learned scale and bias start by ``phase.learned_start``. A value
    that is missing stays as in the model.
    """
    objective = phase.objective
    learned = {
        "scale": matcher.scale,
        "bias": None if objective.without_bias() is None else matcher.logit_bias,
    }
    values = dict[str, float]()
    for name in phase.learned_start:
        if learned[name] is None:
            raise RecipeError(
                f"learned_start: expected values that {matcher.name} learns with "
                f"{phase.objective}, got {name!r}. "
                f'Remove it, or set model.scale="learned".'
            )
        values[name] = objective.gradient_scale if name == "scale" else objective.bias  # type: ignore[attr-defined]
    if matcher.scale is not None and "scale" in values:
        try:
            matcher.scale.validate(values["scale"])
        except SpecError as error:
            raise RecipeError(
                f"{phase.objective}: {error} Change the objective, or the bounds of the learned "
                "scale."
            ) from None
    return values


@torch.no_grad()
def start_scale_and_bias(matcher: Matcher, phase: Phase, previous: Phase | None = None) -> None:
    """Set a learned scale and bias to ``learned_start_values`` at the start of a phase."""
    # After a phase with the same start, the learned values stay.
    if previous is not None and (previous.objective, previous.learned_start) == (
        phase.objective,
        phase.learned_start,
    ):
        return
    values = learned_start_values(matcher, phase)
    if matcher.scale is not None and "scale" in values:
        matcher.scale.log.fill_(math.log(values["scale"]))
    if matcher.logit_bias is not None and "bias" in values:
        matcher.logit_bias.fill_(values["bias"])


def describe_scale_and_bias(matcher: Matcher, phase: Phase) -> str:
    """Describe the learned scale and bias with which a phase starts, and of the pretrained model if
    they differ. "" for an objective with a fixed gamma or margin.
    """
    objective = phase.objective
    if objective.without_scale() is None:
        return ""
    used = {"scale": objective.gradient_scale}
    if objective.without_bias() is not None:
        used["bias"] = objective.bias if matcher.logit_bias is None else matcher.logit_bias.item()  # type: ignore[attr-defined]
    if matcher.scale is not None:
        used["scale"] = matcher.scale().item()
    used_texts, pretrained = (
        {name: f"{name} {value:.4g}" for name, value in values.items()}
        for values in (used, matcher.pretrained_logits)
    )
    text = "" if matcher.scale is None else f", learned from {' and '.join(used_texts.values())}"
    differs = any(name in used and used_texts[name] != value for name, value in pretrained.items())
    return text + (f" (pretrained: {' and '.join(pretrained.values())})" if differs else "")
