"""Text side of a matcher: it encodes texts for item vectors that stay as they are."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING

from torch import Tensor, nn

from visavis.core.encoded import Encoded
from visavis.core.errors import RecipeError
from visavis.models.base import (
    GlobalMatcher,
    Matcher,
    MatcherConfig,
    encode_unit_rows,
    get_vectors,
)

if TYPE_CHECKING:
    from visavis.losses.targets import Targets

VISUAL_PARTS = ("visual", "backbone")
"""Parts of a matcher that only images go through."""


class _TextSide(GlobalMatcher):
    """Replaces the visual side of the matcher that follows it in the order of base classes."""

    def __init__(self, config: MatcherConfig):
        super().__init__(config)
        parts = self.parts()
        if "text" not in parts:
            raise RecipeError(
                f"model.kind: expected a model whose text encoder is a part of its own, got "
                f"{self.name}. Use Heads, VSE++ or CLIP."
            )
        visual = [member for part in VISUAL_PARTS for member in parts.get(part, ())]
        for name, child in list(self.named_children()):
            if any(child is member for member in visual):
                setattr(self, name, nn.Identity())

    def encode_visual(self, items: Encoded) -> Encoded:
        return encode_unit_rows(get_vectors(items))

    def auxiliary_loss(self, visual: Encoded, text: Encoded, targets: Targets) -> Tensor | None:
        """Return no loss, because the losses of matchers read their visual side."""
        return None


@cache
def text_side(kind: type[Matcher]) -> type[Matcher]:
    """Derive a matcher without its visual side. Its images are vectors, which it normalizes."""
    if not issubclass(kind, GlobalMatcher) or kind.score is not GlobalMatcher.score:
        raise RecipeError(
            f"model.kind: expected a model with one vector per item, got {kind.name}. Use Heads, "
            "VSE++ or CLIP."
        )
    # The same name, config and names of weights.
    return type(kind.__name__, (_TextSide, kind), {"__module__": kind.__module__})
