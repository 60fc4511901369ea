"""Interface of matching models: encode items of both sides, and score blocks of them."""

from __future__ import annotations

import hashlib
import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import asdict, dataclass
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from visavis.core import storage
from visavis.core.blocking import ScoreCost
from visavis.core.encoded import AttentionWeights, Encoded, unit_rows
from visavis.core.errors import RunError, ShapeError, VisavisError
from visavis.core.fields import PositiveInt, validate_fields
from visavis.core.ragged import MaxSimDirection
from visavis.losses.logits import LearnedScale
from visavis.models.encoders.pretrained_files import (
    PretrainedPart,
    copy_config_files,
    weights_loaded_from,
)
from visavis.models.layers import at_least_float32

if TYPE_CHECKING:
    from visavis.losses.targets import Targets

VisualGranularity = Literal["pooled", "regions", "pixels", "experts"]
"""Input of images: "pooled" ``[N, D]``, "regions" ``[N, R, D]``, "pixels" ``[N, 3, H, W]``,
"experts": named parts ``[N, L, D]``.
"""
TextGranularity = Literal["pooled", "words", "tokens"]
"""Input of texts: "pooled" ``[N, D]``, "words" ``[N, L, D]``, "tokens" ``[N, L]`` of a vocabulary.
"""
SCALE_PART = "scale"
"""Name of the part that holds a learned scale and bias."""
INITIAL_BIAS = -10.0
"""Start of a learned bias without a pretrained one, as in SigLIP's pretraining and ``Sigmoid()``.
"""
CONFIG_HASH = "config_sha256"
"""Key in ``config.json`` of the hash of all other entries."""


@dataclass(frozen=True, kw_only=True)
class MatcherConfig:
    """Complete description of a matcher's architecture. Every field is a plain value.

    Attributes:
        visual_granularity: Input of images.
        visual_input_dim: Dimensions of the image features. For experts, the sum over all experts.
        text_granularity: Input of texts.
        text_input_dim: Dimensions of the text features. For tokens, the size of the vocabulary.
    """

    visual_granularity: VisualGranularity = "pooled"
    visual_input_dim: PositiveInt
    text_granularity: TextGranularity = "pooled"
    text_input_dim: PositiveInt

    def __post_init__(self) -> None:
        validate_fields(self)

    @property
    def backbone_granularity(self) -> Literal["pooled", "regions"]:
        """Output of the image encoder that a matcher of pixels reads."""
        return "regions"


class Matcher(nn.Module, ABC):
    """Model of both sides: ``encode_visual``, ``encode_text``, and ``score`` for any block of rows
    and columns.

    Objectives see only the score matrix. A learned temperature, attention over regions and words,
    and mixtures of experts belong to the matcher.

    Args:
        config: The architecture.

    Raises:
        ShapeError: If the matcher does not support a granularity of the config.
    """

    name: ClassVar[str]
    Config: ClassVar[type[MatcherConfig]]
    visual_granularities: ClassVar[tuple[VisualGranularity, ...]]
    text_granularities: ClassVar[tuple[TextGranularity, ...]]
    config: MatcherConfig
    listed_after: ClassVar[str] = ""
    """Name of the model after which lists show this one, for a model of an installed package. Empty:
    at the end.
    """
    matryoshka_dims: tuple[int, ...] = ()
    """Lengths of the vector prefixes that were trained to be used alone. The last is the whole
    vector. Empty: not trained so.
    """

    def __init__(self, config: MatcherConfig):
        super().__init__()
        for name, granularity, supported in (
            ("visual_granularity", config.visual_granularity, self.visual_granularities),
            ("text_granularity", config.text_granularity, self.text_granularities),
        ):
            if granularity not in supported:
                raise ShapeError(
                    f"{name}: expected {' or '.join(supported)} for {type(self).__name__}, got "
                    f"{granularity}. "
                    "Set a supported granularity, or use another model."
                )
        self.config = config

    @abstractmethod
    def encode_visual(self, items: Encoded) -> Encoded:
        """Encode images.

        Args:
            items: Images in the visual granularity of the config.

        Returns:
            Encoded images, as ``score`` reads them.
        """

    @abstractmethod
    def encode_text(self, items: Encoded) -> Encoded:
        """Encode texts.

        Args:
            items: Texts in the text granularity of the config.

        Returns:
            Encoded texts, as ``score`` reads them.
        """

    @abstractmethod
    def score(self, visual: Encoded, text: Encoded) -> Tensor:
        """Score every image with every text.

        Args:
            visual: Encoded images.
            text: Encoded texts.

        Returns:
            Scores, shape ``[V, T]``.
        """

    def score_pairs(self, visual: Encoded, text: Encoded) -> Tensor:
        """Score image i with text i only, for re-ranking, memory banks and positives without a
        matrix.

        Args:
            visual: Encoded images.
            text: As many encoded texts.

        Returns:
            Scores, shape ``[N]``.
        """
        # score() of no items has the dtype and device of the matcher.
        if not len(visual):
            return self.score(visual, text).flatten()
        return torch.cat(
            [self.score(visual[i : i + 1], text[i : i + 1]).flatten() for i in range(len(visual))]
        )

    def attention(self, visual: Encoded, text: Encoded) -> AttentionWeights | None:
        """Compute the attention of the words of one text over the regions of one image, in
        evaluation mode.

        Args:
            visual: One image, not encoded.
            text: One text, not encoded.

        Returns:
            The attention. None if the score of this matcher has no attention.
        """
        return None

    def parts(self) -> Mapping[str, Sequence[nn.Module | nn.Parameter]]:
        """Return the modules of the model by part. Recipes use these names for learning rates and
        trainable parts.

        Usual names are "visual", "text", and "backbone" for a trained image encoder. By default,
        each child module is a part of its own.

        Returns:
            Modules and parameters of each part. Every parameter belongs to one part.
        """
        return {name: [child] for name, child in self.named_children()}

    def parameters_by_part(self) -> dict[str, list[tuple[str, nn.Parameter]]]:
        """Collect the parameters of each part.

        Returns:
            Names and parameters of each part that has any, in the order of ``named_parameters``.

        Raises:
            VisavisError: If ``parts`` omits a parameter, or names it twice.
        """
        part_of: dict[nn.Parameter, str] = {}
        for part, members in self.parts().items():
            parameters = [
                [member] if isinstance(member, nn.Parameter) else member.parameters()
                for member in members
            ]
            # Parameters hash by identity. A module may occur twice in a part.
            for parameter in chain.from_iterable(parameters):
                if part_of.setdefault(parameter, part) != part:
                    raise VisavisError(
                        f"{type(self).__name__}.parts(): expected each parameter in one part, got "
                        f"one in {part_of[parameter]} and in {part}. "
                        "Remove it from one of them."
                    )
        by_part: dict[str, list[tuple[str, nn.Parameter]]] = {}
        for name, parameter in self.named_parameters():
            if parameter not in part_of:
                raise VisavisError(
                    f"{type(self).__name__}.parts(): expected all parameters, got none of the "
                    f"parts with {name}. "
                    "Add its module to one of the parts."
                )
            by_part.setdefault(part_of[parameter], []).append((name, parameter))
        return by_part

    @property
    def scale(self) -> LearnedScale | None:
        """Factor of the scores in training that replaces an objective's temperature. None: the
        objective has its own.

        It is the part "scale". ``score`` does not include it, because it does not change the
        ranking.
        """
        return getattr(self, "learned_scale", None)

    @property
    def logit_bias(self) -> nn.Parameter | None:
        """Number that is added after the scale in training and replaces an objective's bias. None:
        the objective has its own.

        It also belongs to the part "scale".
        """
        return getattr(self, "learned_bias", None)

    @property
    def pretrained_logits(self) -> dict[str, float]:
        """The "scale" and "bias" of the scores that the pretraining ended with, as far as there are
        any.
        """
        return {}

    def scale_part(self) -> dict[str, list[nn.Module | nn.Parameter]]:
        """Return the part "scale" for ``parts``, with a learned scale and bias.

        Returns:
            The part by its name. Empty if neither is learned.
        """
        members: list[nn.Module | nn.Parameter] = [
            member for member in (self.scale, self.logit_bias) if member is not None
        ]
        return {SCALE_PART: members} if members else {}

    @property
    def late_interaction(self) -> MaxSimDirection | None:
        """Which means the score contains, if it is MaxSim of unit vectors, so that an index can
        store them. None: another score.
        """
        return None

    @property
    def rerank_top_k(self) -> int:
        """Number of first candidates of a query that ``second_stage_scores`` re-ranks. 0: none."""
        return 0

    def first_stage_items(self, items: Encoded) -> Encoded:
        """Select the part of encoded items that ``score`` reads.

        Args:
            items: Encoded items.

        Returns:
            The part of the first stage.
        """
        return items

    def second_stage_scores(self, visual: Encoded, text: Encoded) -> Tensor:
        """Compute a better, costlier score of image i with text i.

        Args:
            visual: Encoded images.
            text: As many encoded texts.

        Returns:
            Scores, shape ``[N]``.
        """
        raise NotImplementedError

    def auxiliary_loss(self, visual: Encoded, text: Encoded, targets: Targets) -> Tensor | None:
        """Compute a loss of the matcher itself, which is added to the objective in every step.

        Args:
            visual: Encoded images of a batch.
            text: Encoded texts of a batch.
            targets: Positive pairs of the batch.

        Returns:
            A scalar, or None.
        """
        return None

    @property
    def score_is_cosine(self) -> bool:
        """Whether ``score`` is the dot product of the unit vectors of the first stage. Such scores
        need no matrix in memory.
        """
        return False

    def score_cost(self, visual: Encoded, text: Encoded) -> ScoreCost | None:
        """Declare the memory of a pair while it is scored and trained.

        Args:
            visual: Encoded images.
            text: Encoded texts.

        Returns:
            The cost. None: it is measured.
        """
        return None

    @classmethod
    def adapt_processor(
        cls,
        processor: Any,
        architecture: Mapping[str, Any],  # noqa: ARG003 - a subclass reads it
        trained: Any,  # noqa: ARG003 - the same
    ) -> Any:
        """Adapt a processor to this kind of model.

        Args:
            processor: The ``Processor``.
            architecture: Fields of the config.
            trained: Processor of the trained model. None: the model is new.

        Returns:
            The processor.
        """
        return processor

    def saved_weights(self) -> dict[str, Tensor]:
        """Return the weights that ``model.safetensors`` holds. Others are in files of their own,
        which the construction of the model reads.

        Returns:
            Tensors by name.
        """
        return self.state_dict()

    def save_pretrained(self, folder: str | Path, **extra: Any) -> None:
        """Write ``config.json`` and ``model.safetensors``, and config files of pretrained encoders
        that were trained with the model.

        Args:
            folder: Folder of the model.
            **extra: Additional entries of ``config.json``.
        """
        folder = Path(folder)
        for child in self.children():
            # So that the part can be opened without the pretrained model.
            if isinstance(child, PretrainedPart) and child.folder:
                copy_config_files(child.folder, folder / child.part_name)
        storage.write_tensors(folder / "model.safetensors", self.saved_weights())
        matryoshka = {"matryoshka_dims": list(self.matryoshka_dims)} if self.matryoshka_dims else {}
        # The hash covers all entries, so that a changed config is found before weights are misread.
        content = {"kind": self.name, "architecture": asdict(self.config), **matryoshka, **extra}
        storage.write_json(folder / "config.json", content | {CONFIG_HASH: _config_hash(content)})


class GlobalMatcher(Matcher):
    """Matcher with one unit vector per item. The score is the cosine, unless a subclass overrides
    it.

    If items have several parts, the vector is the part "embedding".
    """

    def first_stage_items(self, items: Encoded) -> Encoded:
        return items.named_part("embedding")

    @property
    def score_is_cosine(self) -> bool:
        # A subclass with a score of its own is not a cosine.
        return type(self).score is GlobalMatcher.score

    def score(self, visual: Encoded, text: Encoded) -> Tensor:
        return (
            get_vectors(self.first_stage_items(visual))
            @ get_vectors(self.first_stage_items(text)).T
        )

    def score_cost(self, visual: Encoded, text: Encoded) -> ScoreCost | None:
        """Declare the cost of the dot product. Training adds its gradient."""
        # The dot product allocates the score alone.
        itemsize = get_vectors(self.first_stage_items(visual)).dtype.itemsize
        return ScoreCost(inference_bytes=itemsize, training_bytes=2 * itemsize)

    def score_pairs(self, visual: Encoded, text: Encoded) -> Tensor:
        if not self.score_is_cosine:
            return super().score_pairs(visual, text)
        return (
            get_vectors(self.first_stage_items(visual)) * get_vectors(self.first_stage_items(text))
        ).sum(-1)


def get_vectors(encoded: Encoded) -> Tensor:
    """Return the vectors of items without named parts.

    Args:
        encoded: Encoded items.

    Returns:
        The tensor of vectors.
    """
    assert isinstance(encoded.vectors, Tensor)
    return encoded.vectors


def get_mask(encoded: Encoded) -> Tensor | None:
    """Return the mask ``[N, L]`` of items without named parts. None: all positions are valid."""
    assert not isinstance(encoded.mask, dict)
    return encoded.mask


def valid_mask(encoded: Encoded) -> Tensor:
    """Return the mask ``[N, L]`` of items without named parts, also if all positions are valid."""
    mask = get_mask(encoded)
    vectors = get_vectors(encoded)
    return (
        torch.ones(vectors.shape[:2], dtype=torch.bool, device=vectors.device)
        if mask is None
        else mask
    )


def get_part(encoded: Encoded, name: str) -> Encoded:
    """Select a named part with its mask."""
    assert isinstance(encoded.vectors, dict) and isinstance(encoded.mask, dict)
    return Encoded(encoded.vectors[name], encoded.mask[name])


def encode_unit_rows(rows: Tensor) -> Encoded:
    """Normalize rows to length 1, in float32 at least.

    Args:
        rows: Vectors, shape ``[N, D]``.

    Returns:
        Items with unit vectors.
    """
    rows = at_least_float32(rows)
    if (observer := _EMBEDDING_OBSERVER.get()) is not None:
        observer(rows)
    return Encoded(unit_rows(rows))


_EMBEDDING_OBSERVER = ContextVar[Callable[[Tensor], None] | None]("observer", default=None)


@contextmanager
def observe_embeddings(observer: Callable[[Tensor], None]) -> Iterator[None]:
    """Call a function with the embeddings ``[N, D]`` that are encoded within this block, before
    they are normalized. It must not change them.
    """
    token = _EMBEDDING_OBSERVER.set(observer)
    try:
        yield
    finally:
        _EMBEDDING_OBSERVER.reset(token)


def verify_config_hash(file: Path) -> None:
    """Check that a ``config.json`` was not changed after it was written."""
    content = storage.read_json(file, dict[str, Any], error=RunError)
    # The hash covers all entries but itself.
    stored = content.pop(CONFIG_HASH, None)
    actual = _config_hash(content)
    if stored != actual:
        raise RunError(
            f"{file} is damaged: expected {CONFIG_HASH} {actual}, got {stored}. Restore a complete "
            "copy. "
            f"If you changed the file yourself, set {CONFIG_HASH} to the expected value."
        )


def _config_hash(content: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def open_image_backbone(config: MatcherConfig, name: str) -> nn.Module:
    """Open the image encoder that a matcher of pixels trains. An identity for stored features."""
    if config.visual_granularity != "pixels":
        return nn.Identity()
    from visavis.models.encoders.frozen_encoders import open_visual_encoder

    return open_visual_encoder(name, config.backbone_granularity)


def load_matcher(kind: type[Matcher], config: MatcherConfig, folder: Path) -> Matcher:
    """Build a matcher with the weights of ``model.safetensors``."""
    try:
        # Parts with pretrained weights (PretrainedPart) read their config from `folder` while they
        # are constructed in this block.
        with weights_loaded_from(folder):
            matcher = kind(config)
    except VisavisError:
        raise
    except (ValueError, RuntimeError, ArithmeticError) as error:
        raise RunError(
            f"{folder / 'config.json'}: expected the architecture of a {kind.name}, got one that "
            f"cannot be built ({str(error).splitlines()[0]}). "
            "Restore a complete copy."
        ) from None
    # Raises an error that names the first tensor of another shape.
    weights = storage.read_tensors(
        folder / "model.safetensors", matcher.saved_weights(), error=RunError
    )
    # Weights that are not saved here stay as the construction read them.
    matcher.load_state_dict(matcher.state_dict() | weights)
    return matcher
