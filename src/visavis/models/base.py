"""What every matching model is: it encodes items of both sides and scores blocks of them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

from torch import Tensor, nn
from torch.nn.functional import normalize

from visavis import storage
from visavis.errors import RunError, ShapeError
from visavis.spec import check_fields
from visavis.types import Encoded

VisualView = Literal["pooled", "grid", "pixels"]
TextView = Literal["pooled", "words", "tokens"]


@dataclass(frozen=True, kw_only=True)
class MatcherConfig:
    """The complete description of a matcher's architecture; every field a plain value.

    visual_view, visual_width: what an image is given as ("pooled" ``[N, D]``, "grid" ``[N, R, D]``, "pixels"
    ``[N, 3, H, W]``) and its D. text_view, text_width: what a text is given as ("pooled" ``[N, D]``, "words"
    ``[N, L, D]``, "tokens" ``[N, L]`` of a vocabulary) and its D, or the number of words.
    """

    visual_view: VisualView = "pooled"
    visual_width: int
    text_view: TextView = "pooled"
    text_width: int

    def __post_init__(self) -> None:
        check_fields(self)


class Matcher(nn.Module, ABC):
    """A model of both sides: ``encode_visual``, ``encode_text``, and ``score`` for any block of rows and columns.

    The boundary to objectives is the score matrix; a learnable temperature, attention over regions and words, mixtures
    of experts all live on this side of it.
    """

    name: ClassVar[str]
    Config: ClassVar[type[MatcherConfig]]
    visual_views: ClassVar[tuple[VisualView, ...]]
    text_views: ClassVar[tuple[TextView, ...]]

    def __init__(self, config: MatcherConfig):
        super().__init__()
        for side, view, known in (("images", config.visual_view, self.visual_views), ("texts", config.text_view, self.text_views)):
            if view not in known:
                raise ShapeError(f"{type(self).__name__} cannot read {side} as {view}: expected {' or '.join(known)}.")
        self.config = config

    @abstractmethod
    def encode_visual(self, items: Encoded) -> Encoded:
        """Images as the view of the config gives them, encoded."""

    @abstractmethod
    def encode_text(self, items: Encoded) -> Encoded:
        """Texts as the view of the config gives them, encoded."""

    @abstractmethod
    def score(self, visual: Encoded, text: Encoded) -> Tensor:
        """The scores of every image with every text: ``[V, T]``."""

    @abstractmethod
    def score_pairs(self, visual: Encoded, text: Encoded) -> Tensor:
        """The score of image i with text i only: ``[N]``; for re-ranking, banks and positives without a matrix."""

    def part_of(self, parameter_name: str) -> str:
        """The part of the model a parameter belongs to, by which recipes choose rates and what is trained.

        "backbone" for a trained image encoder, else "visual" or "text".
        """
        first = parameter_name.split(".", maxsplit=1)[0]
        return first if first in ("backbone", "text") else "visual"

    def parts(self) -> Iterator[tuple[str, str, nn.Parameter]]:
        """(part, name, parameter) of every parameter."""
        for name, parameter in self.named_parameters():
            yield self.part_of(name), name, parameter

    def save_pretrained(self, folder: str | Path, **extra: Any) -> None:
        """Write ``config.json`` and ``model.safetensors``; ``extra`` goes into the config beside kind and architecture."""
        folder = Path(folder)
        storage.write_tensors(folder / "model.safetensors", self.state_dict())
        storage.write_json(folder / "config.json", {"kind": self.name, "architecture": asdict(self.config), **extra})


class GlobalMatcher(Matcher):
    """A matcher with one unit vector an item; the score is their cosine."""

    def score(self, visual: Encoded, text: Encoded) -> Tensor:
        return vectors(visual) @ vectors(text).T

    def score_pairs(self, visual: Encoded, text: Encoded) -> Tensor:
        return (vectors(visual) * vectors(text)).sum(-1)


@contextmanager
def evaluating(matcher: nn.Module) -> Iterator[None]:
    """The matcher in evaluation mode, for a while."""
    training = matcher.training
    matcher.eval()
    try:
        yield
    finally:
        matcher.train(training)


def vectors(encoded: Encoded) -> Tensor:
    """The one tensor of vectors of items that have no named parts."""
    if not isinstance(encoded.vectors, Tensor):
        raise ShapeError(f"expected one tensor of vectors, found the named parts {', '.join(encoded.vectors)}.")
    return encoded.vectors


def unit(rows: Tensor) -> Encoded:
    """Rows at length 1, in float32 at least (half precision loses ranks)."""
    return Encoded(normalize(rows if rows.dtype.itemsize >= 4 else rows.float(), dim=-1))


def load_weights(matcher: Matcher, folder: Path) -> None:
    """Fill a matcher from ``model.safetensors``. Raises RunError naming the first tensor that does not fit."""
    tensors = storage.read_tensors(folder / "model.safetensors")
    expected = matcher.state_dict()
    for name in sorted(expected.keys() | tensors.keys()):
        ours = expected[name].shape if name in expected else None
        theirs = tensors[name].shape if name in tensors else None
        if ours != theirs:
            found = "missing" if theirs is None else f"of shape {list(theirs)}"
            wanted = "none of that name" if ours is None else list(ours)
            raise RunError(
                f"{folder / 'model.safetensors'}: {name} is {found}, expected {wanted}: the folder is incomplete or of another version."
            )
    matcher.load_state_dict(tensors)
