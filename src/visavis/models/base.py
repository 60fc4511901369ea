"""What every matching model is: it encodes items of both sides and scores blocks of them."""

from __future__ import annotations

import hashlib
import json
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn
from torch.nn.functional import normalize

from visavis import storage
from visavis.engine.scale import LearnedScale
from visavis.errors import RunError, ShapeError, VisavisError
from visavis.memory import ScoreCost
from visavis.models.pretrained import KeptPart, weights_follow
from visavis.spec import Count, check_fields
from visavis.targets import Targets
from visavis.types import Attention, Encoded

VisualView = Literal["pooled", "grid", "pixels", "experts"]
TextView = Literal["pooled", "words", "tokens"]
SCALE = "scale"
"""The part that a learned scale is."""
CONFIG_HASH = "config_sha256"
"""Where the hash of all else stands in ``config.json``."""


@dataclass(frozen=True, kw_only=True)
class MatcherConfig:
    """The complete description of a matcher's architecture; every field a plain value.

    visual_view, visual_width: what an image is given as ("pooled" ``[N, D]``, "grid" ``[N, R, D]``, "pixels"
    ``[N, 3, H, W]``, "experts": named parts ``[N, L, D]`` with masks, whose widths the field ``experts`` has) and its D, the sum of
    all for experts. text_view, text_width: what a text is given as ("pooled" ``[N, D]``, "words"
    ``[N, L, D]``, "tokens" ``[N, L]`` of a vocabulary) and its D, or the number of words.
    """

    visual_view: VisualView = "pooled"
    visual_width: Count
    text_view: TextView = "pooled"
    text_width: Count

    def __post_init__(self) -> None:
        check_fields(self)

    @property
    def tower_view(self) -> Literal["pooled", "grid"]:
        """What a matcher of pixels reads of the tower that is its backbone."""
        return "grid"


class Matcher(nn.Module, ABC):
    """A model of both sides: ``encode_visual``, ``encode_text``, and ``score`` for any block of rows and columns.

    The boundary to objectives is the score matrix; a learnable temperature, attention over regions and words, mixtures
    of experts all live on this side of it.
    """

    name: ClassVar[str]
    Config: ClassVar[type[MatcherConfig]]
    visual_views: ClassVar[tuple[VisualView, ...]]
    text_views: ClassVar[tuple[TextView, ...]]
    config: MatcherConfig
    widths: tuple[int, ...] = ()
    """How many first numbers of its vectors were trained to serve alone, the last all of them; (): that was not asked for."""

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

    def score_pairs(self, visual: Encoded, text: Encoded) -> Tensor:
        """The score of image i with text i only: ``[N]``; for re-ranking, banks and positives without a matrix.

        By ``score``, one pair after the other; a matcher that has a faster way overrides it.
        """
        one_pair = [slice(i, i + 1) for i in range(len(visual))]
        return torch.cat([self.score(visual[i], text[i]).flatten() for i in one_pair]) if one_pair else self.score(visual, text).flatten()

    def attention(self, visual: Encoded, text: Encoded) -> Attention | None:
        """Which regions of one image answered which words of one text, both as the views of the config give them.

        None: the score of this matcher does not tell. In evaluation mode.
        """
        return None

    @abstractmethod
    def parts(self) -> Mapping[str, Sequence[nn.Module | nn.Parameter]]:
        """What the model is made of, by the names with which recipes choose learning rates and what is trained.

        Usual names are "visual", "text", and "backbone" for an image encoder that is trained. Every parameter belongs to one part.
        """

    def parameters_by_part(self) -> dict[str, list[tuple[str, nn.Parameter]]]:
        """Name and parameter of everything in each part that has any, in the order of ``named_parameters``.

        Raises VisavisError if ``parts`` leaves a parameter out, or names it twice.
        """
        part_of: dict[nn.Parameter, str] = {}
        for part, members in self.parts().items():
            for parameter in (p for member in members for p in ([member] if isinstance(member, nn.Parameter) else member.parameters())):
                if part_of.setdefault(parameter, part) != part:
                    raise VisavisError(
                        f"{type(self).__name__}.parts() names a parameter in {part_of[parameter]} and in {part}: expected one part."
                    )
        by_part: dict[str, list[tuple[str, nn.Parameter]]] = {}
        for name, parameter in self.named_parameters():
            if parameter not in part_of:
                raise VisavisError(f"{type(self).__name__}.parts() leaves out {name}: name the module that holds it in one of its parts.")
            by_part.setdefault(part_of[parameter], []).append((name, parameter))
        return by_part

    @property
    def scale(self) -> LearnedScale | None:
        """What multiplies the scores in training in place of the temperature of an objective; None: the objective has its own.

        It is the part "scale", and no part of ``score``, whose order it would not change.
        """
        return None

    @property
    def rerank(self) -> int:
        """How many candidates of a query, the first ones by ``score``, are ranked anew by ``second_stage``; 0: none."""
        return 0

    def first_stage(self, items: Encoded) -> Encoded:
        """The part of encoded items that ``score`` reads."""
        return items

    def second_stage(self, visual: Encoded, text: Encoded) -> Tensor:
        """A better and costlier score of image i with text i: ``[N]``."""
        raise NotImplementedError

    def extra_loss(self, visual: Encoded, text: Encoded, targets: Targets) -> Tensor | None:
        """What a matcher learns besides its score, from a batch and who belongs to whom in it; added to the loss of every step."""
        return None

    @property
    def score_is_cosine(self) -> bool:
        """Whether ``score`` is the product of the first stage's unit ``vectors``: no matrix in memory, and as fast as can be."""
        return False

    def score_cost(self, visual: Encoded, text: Encoded) -> ScoreCost | None:
        """What a pair of such items costs in memory while it is scored, and while it is trained; None: it is measured."""
        return None

    def save_pretrained(self, folder: str | Path, **extra: Any) -> None:
        """Write ``config.json`` and ``model.safetensors``; ``extra`` goes into the config beside kind and architecture.

        Of pretrained encoders that were trained with it, what is not weights goes into folders beside them.
        """
        folder = Path(folder)
        for child in self.children():
            if isinstance(child, KeptPart):
                child.save(folder)
        storage.write_tensors(folder / "model.safetensors", self.state_dict())
        own = {"widths": list(self.widths)} if self.widths else {}
        content = {"kind": self.name, "architecture": asdict(self.config), **own, **extra}
        storage.write_json(folder / "config.json", content | {CONFIG_HASH: _config_hash(content)})


class GlobalMatcher(Matcher):
    """A matcher with one unit vector an item, "embedding" where it has other parts; the score is their cosine, unless a subclass says otherwise."""

    def first_stage(self, items: Encoded) -> Encoded:
        return items.part("embedding")

    @property
    def score_is_cosine(self) -> bool:
        return type(self).score is GlobalMatcher.score

    def score(self, visual: Encoded, text: Encoded) -> Tensor:
        return vectors(self.first_stage(visual)) @ vectors(self.first_stage(text)).T

    def score_cost(self, visual: Encoded, text: Encoded) -> ScoreCost | None:
        """The product itself; in training its gradient too."""
        number = vectors(self.first_stage(visual)).dtype.itemsize
        return ScoreCost(scored=number, trained=2 * number)

    def score_pairs(self, visual: Encoded, text: Encoded) -> Tensor:
        if not self.score_is_cosine:
            return super().score_pairs(visual, text)
        return (vectors(self.first_stage(visual)) * vectors(self.first_stage(text))).sum(-1)


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


def check_config(file: Path) -> None:
    """Raise RunError for a ``config.json`` that is no longer what was written; older ones cannot tell."""
    content = storage.read_json(file, dict[str, Any], error=RunError)
    if content.pop(CONFIG_HASH, None) not in (None, _config_hash(content)):
        raise RunError(
            f"{file} is damaged: it is not what was written; bring back a whole copy, or take {CONFIG_HASH} out of it if you changed it."
        )


def _config_hash(content: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def build_with_weights(kind: type[Matcher], config: MatcherConfig, folder: Path) -> Matcher:
    """A matcher with the weights of ``model.safetensors``.

    One without a pretrained encoder is first laid out without its weights and compared, so that a config with damaged sizes takes no
    memory. Raises RunError if it cannot be built, or naming the first tensor that does not fit.
    """
    pretrained = bool(getattr(config, "backbone", ""))
    try:
        with weights_follow(folder), nullcontext() if pretrained else torch.device("meta"):
            matcher = kind(config)
    except VisavisError:
        raise
    except (ValueError, RuntimeError, ArithmeticError) as error:
        raise RunError(f"{folder / 'config.json'} describes a model that cannot be built: {str(error).splitlines()[0]}.") from None
    tensors = storage.read_tensors(folder / "model.safetensors", matcher.state_dict(), error=RunError)
    if not pretrained:
        with weights_follow(folder):
            matcher = kind(config)
    matcher.load_state_dict(tensors)
    return matcher
