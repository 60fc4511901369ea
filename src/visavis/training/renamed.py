"""Recipes written under older names of keys, read under the names of today; so that old runs and files keep working."""

from __future__ import annotations

import re
from typing import Any

SECTIONS = {"vision": "visual"}
OPTIMIZER = {"rate": "lr", "rates": "lr_multipliers"}
FIELDS = {"LearnedWeights": {"rate": "lr", "virtual_rate": "virtual_lr"}}
"""Fields of supervisions."""


def with_new_names(content: dict[str, Any]) -> dict[str, Any]:
    """The same recipe with every key under its name of today.

    >>> with_new_names({"vision": {"tower": "scenes"}, "phases": [{"optimizer": {"rate": 0.1}}]})
    {'visual': {'tower': 'scenes'}, 'phases': [{'optimizer': {'lr': 0.1}}]}
    """
    renamed = _renamed(content, SECTIONS)
    phases = renamed.get("phases")
    if isinstance(phases, list):
        renamed["phases"] = [_phase(phase) if isinstance(phase, dict) else phase for phase in phases]
    elif isinstance(phases, dict):  # differences by the number of the phase
        renamed["phases"] = {number: _phase(phase) if isinstance(phase, dict) else phase for number, phase in phases.items()}
    return renamed


def new_name(key: str) -> str:
    """A dotted key of an override under its name of today.

    >>> new_name("vision.tower"), new_name("phases.0.optimizer.rate")
    ('visual.tower', 'phases.0.optimizer.lr')
    """
    steps = key.split(".")
    steps[0] = SECTIONS.get(steps[0], steps[0])
    if "optimizer" in steps[:-1]:
        place = steps.index("optimizer") + 1
        steps[place] = OPTIMIZER.get(steps[place], steps[place])
    return ".".join(steps)


def _phase(phase: dict[str, Any]) -> dict[str, Any]:
    phase = dict(phase)
    if isinstance(phase.get("optimizer"), dict):
        phase["optimizer"] = _renamed(phase["optimizer"], OPTIMIZER)
    if isinstance(text := phase.get("supervision"), str):
        for old, new in FIELDS.get(text.partition("(")[0], {}).items():
            text = re.sub(rf"\b{old}=", f"{new}=", text)
        phase["supervision"] = text
    return phase


def _renamed(section: dict[str, Any], names: dict[str, str]) -> dict[str, Any]:
    """An old name beside its new one stays, to be refused as unknown."""
    return {names[key] if key in names and names[key] not in section else key: value for key, value in section.items()}
