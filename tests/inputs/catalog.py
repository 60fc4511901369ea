"""All kinds of inputs, by name."""

from __future__ import annotations

from itertools import chain

from tests.inputs import (
    image_inputs,
    list_inputs,
    planted_inputs,
    real_inputs,
    server_inputs,
    state_inputs,
    stored_inputs,
    time_inputs,
    video_inputs,
    weight_inputs,
)
from tests.inputs.cases import Kind

MODULES = (
    image_inputs,
    time_inputs,
    video_inputs,
    list_inputs,
    stored_inputs,
    weight_inputs,
    state_inputs,
    server_inputs,
    *([real_inputs] if real_inputs.real_data().is_dir() else []),
)
KINDS = {kind.name: kind for kind in chain.from_iterable(module.KINDS for module in MODULES)}


def find_kind(name: str) -> Kind:
    """The kind of a name, also one with planted faults."""
    known = {kind.name: kind for kind in planted_inputs.KINDS} | KINDS
    if name not in known:
        raise SystemExit(f"expected one of {', '.join(KINDS)}, got {name!r}.")
    return known[name]
