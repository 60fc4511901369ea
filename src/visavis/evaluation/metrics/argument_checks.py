"""Checks of the arguments of metrics. Each public metric calls these functions once, on entry.

>>> validate_literal("c", Tau, "tau")
Traceback (most recent call last):
visavis.core.errors.SpecError: tau: expected a or b, got 'c'.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from visavis.core.encoded import require_values
from visavis.core.errors import DataError, ShapeError, SpecError, format_value

Ties = Literal["pessimistic", "mean", "optimistic"]
Normalize = Literal["min_r_k", "hits"]
Tau = Literal["a", "b"]
Semantics = Literal["reference", "paper"]

INVALID_GAINS = (
    "relevance of {}: expected finite values >= 0 for nDCG, got a negative or infinite one."
)


def validate_tensor(value: Any, name: str, axes: str) -> Tensor:
    """Check that a value is a dense tensor of real numbers, and detach it.

    Args:
        value: The argument.
        name: Its name.
        axes: Its axes, such as "queries x candidates".

    Returns:
        The tensor, as floating-point numbers or int64.

    Raises:
        ShapeError: If it has another type, shape or layout.
    """
    expected = f"{name}: expected a tensor of numbers, {axes}"
    require_values(name, value)
    if not isinstance(value, Tensor):
        raise ShapeError(
            f"{expected}, got {format_value(value)}. torch.as_tensor converts an array or a list."
        )
    if value.dim() != len(axes.split(" x ")):
        raise ShapeError(f"{expected}, got shape {list(value.shape)}.")
    if value.is_complex():
        raise ShapeError(f"{expected}, got dtype {value.dtype}. Pass real numbers.")
    value = value.float() if value.dtype == torch.bool else value.detach()
    return value if value.is_floating_point() else value.long()


def validate_scores(value: Any) -> Tensor:
    """Check scores ``[Q, C]`` of at least one candidate, without NaN.

    Args:
        value: The argument.

    Returns:
        The scores.

    Raises:
        ShapeError: If the shape is wrong or candidates are missing.
    """
    scores = validate_tensor(value, "scores", "queries x candidates")
    if not scores.shape[1]:
        raise ShapeError(
            f"scores: expected at least one candidate, got shape {list(scores.shape)}."
        )
    raise_on_invalid_row(
        scores.isnan(),
        "scores of query {}: expected numbers, got NaN. Check the model and its features.",
    )
    return scores


def validate_relevance(value: Any, shape: torch.Size, *, as_gains: bool = False) -> Tensor:
    """Check relevance values ``[Q, C]``, without NaN.

    Args:
        value: The argument.
        shape: Shape of the scores.
        as_gains: Whether the values are summed, so that they must be finite and >= 0.

    Returns:
        The relevance values.

    Raises:
        ShapeError: If the shape differs from the shape of the scores.
    """
    relevance = validate_tensor(value, "relevance", "queries x candidates")
    raise_on_invalid_row(
        relevance.isnan(),
        "relevance of query {}: expected numbers, got NaN. Check the relevance estimator.",
    )
    if as_gains:
        raise_on_invalid_row((relevance < 0) | relevance.isinf(), INVALID_GAINS.format("query {}"))
    if relevance.shape != shape:
        raise ShapeError(
            f"relevance: expected the shape of the scores, {list(shape)}, got "
            f"{list(relevance.shape)}."
        )
    return relevance


def raise_on_invalid_row(
    is_invalid: Tensor, message: str, row_numbers: Sequence[int] | Tensor | None = None
) -> None:
    """Raise an error for the first row with an invalid element.

    Args:
        is_invalid: Invalid elements, bool ``[Q, C]``.
        message: Error message with a placeholder ``{}`` for the number of the row.
        row_numbers: Numbers of the rows. None: their positions.

    Raises:
        DataError: If there is such a row.
    """
    for row in is_invalid.any(1).nonzero()[:1, 0].tolist():
        raise DataError(message.format(row if row_numbers is None else int(row_numbers[row])))


def validate_positive_ranks(value: Any, name: str = "positive_ranks") -> Tensor:
    """Check ranks ``[Q, M]`` of the positives of at least one query: ascending from 1, padded with
    inf.

    Args:
        value: The argument.
        name: Its name.

    Returns:
        The ranks.

    Raises:
        ShapeError: If queries or positives are missing.
        DataError: If a row is not a valid list of ranks.
    """
    ranks = validate_tensor(value, name, "queries x positives")
    if not ranks.numel():
        raise ShapeError(
            f"{name}: expected at least one query with a positive, got shape {list(ranks.shape)}."
        )
    slots = torch.arange(1, ranks.shape[1] + 1, device=ranks.device)
    invalid = (
        ~(ranks >= slots) | (ranks < ranks.roll(1, 1)) & (slots > 1) | ranks.isinf() & (slots == 1)
    )
    for query in invalid.any(1).nonzero()[:1, 0].tolist():
        start = ", ".join(f"{rank:g}" for rank in ranks[query, :3].tolist())
        raise DataError(
            f"{name} of query {query}: expected ascending ranks >= 1, then inf, got {start}. "
            "Compute them with positive_ranks."
        )
    return ranks


def validate_best_ranks(value: Any) -> Tensor:
    """Check ranks ``[Q]`` of at least one query: finite and >= 1.

    Args:
        value: The argument.

    Returns:
        The ranks.

    Raises:
        ShapeError: If queries are missing.
        DataError: If a rank is invalid.
    """
    ranks = validate_tensor(value, "ranks", "queries")
    if not len(ranks):
        raise ShapeError("ranks: expected at least one query, got shape [0].")
    for query in (~((ranks >= 1) & ranks.isfinite())).nonzero()[:1, 0].tolist():
        raise DataError(
            f"ranks of query {query}: expected a rank >= 1, got {ranks[query].item()}. Compute "
            "them with best_ranks."
        )
    return ranks


def validate_literal(value: Any, literal: Any, name: str) -> Any:
    """Check that a value is one of a Literal.

    Args:
        value: The argument.
        literal: The Literal type.
        name: Its name.

    Returns:
        The value.

    Raises:
        SpecError: If it is another value.
    """
    allowed = get_args(literal)
    if not isinstance(value, str) or value not in allowed:
        expected = " or ".join(allowed) if len(allowed) == 2 else ", ".join(allowed)
        raise SpecError(f"{name}: expected {expected}, got {format_value(value)}.")
    return value


def validate_instance(value: Any, kind: type, expected: str, name: str) -> Any:
    """Check that a value is an instance of a class.

    Args:
        value: The argument.
        kind: The class.
        expected: Description of valid values.
        name: Name of the argument.

    Returns:
        The value.

    Raises:
        SpecError: If it is of another class.
    """
    if not isinstance(value, kind):
        raise SpecError(f"{name}: expected {expected}, got {format_value(value)}.")
    return value
