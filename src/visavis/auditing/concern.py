"""What an audit says: a kind of thing that was found, how much of it, what to do, and which."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Concern:
    """One kind of thing that was found. what: a sentence with the numbers. remedy: what to do. examples: by name, the worst first.

    alarm: whether there is enough of it to change what a training gives or what an evaluation says.
    """

    kind: str
    count: int
    what: str
    remedy: str
    examples: tuple[str, ...]
    alarm: bool


def counted(count: int, thing: str) -> str:
    """A number of things.

    >>> counted(1, "pair"), counted(1200, "pair")
    ('1 pair', '1,200 pairs')
    """
    return f"{count:,} {thing}{'' if count == 1 else 's'}"
