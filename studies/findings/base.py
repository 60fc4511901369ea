"""Errata, and the batches and numbers that their computations use."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import normalize

KINDS = {
    "misprint": "the printed form contradicts calculus, the paper's own text, or its code",
    "claim": "a statement that needs a condition that is not given, or that does not follow",
    "code differs from paper": "the released code computes another value than the paper prints",
    "bug behind published numbers": "the released code does not follow the definition, and published tables hold its numbers",
    "behavior of the code": "the released code has an unexpected behavior that contradicts nothing printed",
    "ambiguity": "the text allows several readings, or leaves a required value open",
    "tables disagree": "printed numbers contradict one another",
}
FIELDS = ("Where", "Found", "Correct", "Effect", "visavis")


class Shown(NamedTuple):
    """Whether the claim holds, and the lines of numbers that show it."""

    holds: bool
    lines: str


@dataclass(frozen=True)
class Erratum:
    """One finding. ``show`` is None if no computation can show it."""

    name: str
    title: str
    kind: str
    fields: dict[str, str]
    show: Callable[[], Shown] | None


def errata_of(module: ModuleType) -> list[Erratum]:
    """The public functions that a module defines, in its order."""
    functions = [
        value
        for value in vars(module).values()
        if inspect.isfunction(value) and value.__module__ == module.__name__
    ]
    return [
        _read(module, function) for function in functions if not function.__name__.startswith("_")
    ]


def _read(module: ModuleType, function: Callable[[], Shown]) -> Erratum:
    title, body = inspect.getdoc(function).split("\n", 1)  # type: ignore[union-attr]
    entries = re.findall(r"^(\w+): (.*(?:\n(?!\w+: ).+)*)", body, re.MULTILINE)
    kind, *fields = [(key, " ".join(text.split())) for key, text in entries]
    name = f"{module.__name__.rsplit('.', 1)[-1]}.{function.__name__}"
    if kind[0] != "Kind" or kind[1] not in KINDS or tuple(key for key, _ in fields) != FIELDS:
        raise ValueError(
            f"The docstring of {name} must contain Kind, one of {', '.join(KINDS)}, and then {', '.join(FIELDS)}."
        )
    shown = "Shown" in str(inspect.signature(function).return_annotation)
    return Erratum(name, title.rstrip("."), kind[1], dict(fields), function if shown else None)


def numbers(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def unit_rows(number: int, seed: int, dimension: int = 16) -> Tensor:
    """Unit rows ``[number, dimension]``, float64, the same for the same seed."""
    return normalize(
        torch.randn(
            number, dimension, generator=torch.Generator().manual_seed(seed), dtype=torch.float64
        )
    )


def embeddings(
    number: int, seed: int, noise: float = 1.0, dimension: int = 16
) -> tuple[Tensor, Tensor]:
    """Images and texts as unit rows. A text is its image plus noise."""
    images = unit_rows(number, seed, dimension)
    return images, normalize(images + noise * unit_rows(number, seed + 10_000, dimension))


def scores_of(number: int, seed: int, noise: float = 1.0, dimension: int = 16) -> Tensor:
    """Cosines ``[images, texts]`` of such a batch."""
    images, texts = embeddings(number, seed, noise, dimension)
    return images @ texts.T


def negatives(scores: Tensor, fill: float = -torch.inf) -> Tensor:
    """The scores with the diagonal, the positive pairs, replaced."""
    return scores.masked_fill(torch.eye(len(scores), dtype=torch.bool), fill)


def first_ranks(scores: Tensor) -> float:
    """Share of queries whose own candidate has the highest score."""
    return (scores.argmax(1) == torch.arange(len(scores))).double().mean().item()


def gradient(value: Tensor, *leaves: Tensor) -> tuple[Tensor, ...]:
    return torch.autograd.grad(value, leaves, retain_graph=True)


def leaf(tensor: Tensor) -> Tensor:
    return tensor.detach().clone().requires_grad_()


def tangent(vectors: Tensor, units: Tensor) -> Tensor:
    """Rows without their component along unit rows."""
    return vectors - (vectors * units).sum(-1, keepdim=True) * units


def relative_error(actual: Tensor, expected: Tensor) -> float:
    """The relative distance of two tensors."""
    return ((actual - expected).norm() / expected.norm()).item()


def digits(value: float | Tensor) -> str:
    """A value with three digits. Values below 1e-10 are rounding errors and give 0."""
    value = value.item() if isinstance(value, Tensor) else value
    if abs(value) < 1e-10:
        return "0"
    return f"{value:.0f}" if abs(value) >= 1000 else f"{value:.3g}"
