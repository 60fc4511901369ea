"""The door of metrics and evaluation: what an argument must be follows from its name, and each is checked once, as it enters.

>>> recall_at = checked(lambda ranks, k: float((ranks <= k).double().mean()))
>>> recall_at(torch.tensor([1, 3]), k=0)
Traceback (most recent call last):
visavis.errors.SpecError: k is 0, expected a whole number from 1 up.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import partial, wraps
from typing import Any, Literal, ParamSpec, TypeVar, get_args

import torch
from torch import Tensor

from visavis.errors import DataError, ShapeError, SpecError, shown
from visavis.spec import whole_number
from visavis.targets import Targets, as_ids

Ties = Literal["pessimistic", "mean", "optimistic"]
Normalize = Literal["min_r_k", "hits"]
Tau = Literal["a", "b"]
Semantics = Literal["reference", "paper"]

NO_GAINS = "the degrees of {} hold a number below 0 or infinity: nDCG adds up finite degrees from 0 up."

P = ParamSpec("P")
R = TypeVar("R")
Form = Callable[[Any, str], Any]
"""``form(value, name)`` is the argument as a function works with it; it raises a VisavisError that names the argument."""


def door(forms: Mapping[str, Form]) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """A decorator: each argument whose name is among the forms passes through its form; others, and None where it is the default, as they are."""

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        signature = inspect.signature(function)
        optional = {name for name, parameter in signature.parameters.items() if parameter.default is None}

        @wraps(function)
        def enter(*args: P.args, **kwargs: P.kwargs) -> R:
            given = signature.bind(*args, **kwargs)
            passing = {name for name, value in given.arguments.items() if name in forms and not (value is None and name in optional)}
            given.arguments.update({name: forms[name](given.arguments[name], name) for name in passing})
            return function(*given.args, **given.kwargs)

        return enter

    return decorate


def table(value: Any, name: str, axes: str) -> Tensor:
    """A dense tensor of real numbers with these axes, off the graph: axes "queries x candidates" are two."""
    expected = f"expected a tensor of numbers, {axes}"
    if not isinstance(value, Tensor):
        raise ShapeError(f"{name} is {shown(value)}, {expected}: torch.as_tensor makes one of an array or a list.")
    if value.dim() != len(axes.split(" x ")):
        raise ShapeError(f"{name} has shape {list(value.shape)}, {expected}.")
    if value.layout != torch.strided or value.is_complex():
        raise ShapeError(f"{name} has layout {value.layout} and dtype {value.dtype}, expected real numbers in a dense tensor, {axes}.")
    value = value.float() if value.dtype == torch.bool else value.detach()
    return value if value.is_floating_point() else value.long()


def scores(value: Any, name: str) -> Tensor:
    """Numbers ``[Q, C]`` of at least one candidate, none of them NaN."""
    found = table(value, name, "queries x candidates")
    if not found.shape[1]:
        raise ShapeError(f"{name} has shape {list(found.shape)}: there is no candidate to rank.")
    refuse_rows(found.isnan(), "the scores of query {} hold NaN: the model or its features are broken.")
    return found


def relevance(value: Any, name: str) -> Tensor:
    """Degrees ``[Q, C]``, none of them NaN."""
    found = table(value, name, "queries x candidates")
    refuse_rows(found.isnan(), "the degrees of query {} hold NaN: correct the estimator of degrees.")
    return found


def gains(value: Any, name: str) -> Tensor:
    """Degrees ``[Q, C]`` that can be added up: finite, from 0."""
    found = relevance(value, name)
    refuse_rows((found < 0) | found.isinf(), NO_GAINS.format("query {}"))
    return found


def refuse_rows(wrong: Tensor, sentence: str, numbers: Sequence[int] | Tensor | None = None) -> None:
    """Raise DataError for the first row ``[Q, C]`` with anything wrong; its number stands for {} in the sentence, by default its place."""
    for row in wrong.any(1).nonzero()[:1, 0].tolist():
        raise DataError(sentence.format(row if numbers is None else int(numbers[row])))


def places(value: Any, name: str) -> Tensor:
    """Places ``[Q, M]`` of each query's positives, best first, from 1, filled with inf; of at least one query."""
    found = table(value, name, "queries x positives")
    if not found.numel():
        raise ShapeError(f"{name} has shape {list(found.shape)}: there is no query, or none with a positive.")
    slots = torch.arange(1, found.shape[1] + 1, device=found.device)
    wrong = ~(found >= slots) | (found < found.roll(1, 1)) & (slots > 1) | found.isinf() & (slots == 1)
    for query in wrong.any(1).nonzero()[:1, 0].tolist():
        begin = ", ".join(f"{place:g}" for place in found[query, :3].tolist())
        raise DataError(f"{name} of query {query} begin with {begin}, expected what metrics.places gives: ascending from 1 up, then inf.")
    return found


def ranks(value: Any, name: str) -> Tensor:
    """Ranks ``[Q]``, finite, from 1; at least one."""
    found = table(value, name, "queries")
    if not len(found):
        raise ShapeError(f"{name} has shape [0]: there is no query.")
    for query in (~((found >= 1) & found.isfinite())).nonzero()[:1, 0].tolist():
        raise DataError(f"{name} holds {found[query].item()} for query {query}, expected ranks from 1 up, as metrics.ranks gives them.")
    return found


def choice(literal: Any) -> Form:
    """One of the values of a Literal."""
    known = get_args(literal)
    expected = " or ".join(known) if len(known) == 2 else ", ".join(known)

    def one(value: Any, name: str) -> Any:
        if not isinstance(value, str) or value not in known:
            raise SpecError(f"{name} is {shown(value)}, expected {expected}.")
        return value

    return one


def instance(of: type, remedy: str, value: Any, name: str) -> Any:
    """A value of a class."""
    if not isinstance(value, of):
        raise SpecError(f"{name} is {shown(value)}, expected {remedy}.")
    return value


count: Form = partial(whole_number, least=1)
"""A whole number from 1 up."""

FORMS: dict[str, Form] = {
    "scores": scores,
    "relevance": relevance,
    "targets": partial(instance, Targets, "a Targets: see Targets.paired and Targets(query_ids=...)"),
    "places": places,
    "image_places": places,
    "text_places": places,
    "ranks": ranks,
    "image_ids": as_ids,
    "text_ids": as_ids,
    "k": count,
    "tau": choice(Tau),
    "semantics": choice(Semantics),
    "ties": choice(Ties),
    "normalize": choice(Normalize),
}
"""What the arguments of metrics are, by their names."""

checked = door(FORMS)
"""The decorator of a metric."""
