"""One kind of problem that an audit found, with its number, a fix and examples."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Issue:
    """One kind of problem in a data set.

    Attributes:
        kind: Name of the kind, such as "copies across splits".
        count: Number of affected pairs or captions.
        description: Sentence with the measured values.
        fix: What to do about it.
        examples: Descriptions of affected items, the worst first.
        serious: Whether the problem is common enough to change a training or an evaluation.
    """

    kind: str
    count: int
    description: str
    fix: str
    examples: tuple[str, ...]
    serious: bool


def format_count(count: int, noun: str) -> str:
    """Format a number of items.

    Args:
        count: The number.
        noun: What is counted, in the singular.

    Returns:
        The number and the noun, in the plural where needed.

    Example:
        >>> format_count(1, "pair"), format_count(1200, "pair")
        ('1 pair', '1,200 pairs')
    """
    return f"{count:,} {noun}{'' if count == 1 else 's'}"
