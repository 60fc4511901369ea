"""What a feature store holds and how it was made: its file ``features.json``."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator

Side = Literal["visual", "text"]
View = Literal["pooled", "grid", "words", "frames"]
RAGGED = {"words": "words.npy", "frames": "frames.npy"}
"""Views of so many vectors as an item has words or frames, and the file of their vectors."""


def side_of(name: str) -> Side:
    """A side by its name in a file; older files call the visual side "vision"."""
    return "visual" if name == "vision" else name  # type: ignore[return-value]


@dataclass(frozen=True)
class Description:
    """What a store holds, and how it was made.

    side: images or captions. tower and weights: the encoder's name and a checksum of its parameters. shape: of one
    item, ``(D,)``, ``(R, D)`` or, for words and frames, ``(D,)`` each; with several crops their number comes first.
    fingerprint: of the data set. precision: in which the encoder ran. versions: of the packages; not compared.
    """

    side: Annotated[Side, BeforeValidator(side_of)]
    view: View
    tower: str
    weights: str
    shape: tuple[int, ...]
    count: int
    fingerprint: str
    crops: int = 1
    precision: str = "float32"
    preprocessing: dict[str, Any] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)
    complete: bool = False

    @property
    def ragged(self) -> bool:
        """Whether items have vectors of unequal number."""
        return self.view in RAGGED

    @property
    def width(self) -> int:
        return self.shape[-1]

    def difference(self, other: Description) -> str | None:
        """The first field in which two stores differ, versions aside, as part of a sentence; None if they agree."""
        facts = [(name, *(json.dumps(getattr(store, name)) for store in (self, other))) for name in asdict(self)]
        return next(
            (f"{name} is {mine}, not {its}" for name, mine, its in facts if mine != its and name not in ("versions", "complete")), None
        )
