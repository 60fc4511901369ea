"""From pictures and sentences to what a matcher reads."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import torch
from pydantic import AfterValidator, AliasChoices, BeforeValidator, Field
from torch import Tensor

from visavis.data.captions import END, PAD, START, UNKNOWN, Vocabulary, tokenize
from visavis.data.description import side_of
from visavis.data.standardization import Standardization
from visavis.errors import RunError, VisavisError
from visavis.models import text_backbone
from visavis.models.base import Matcher
from visavis.models.pretrained import model_folder
from visavis.models.tokenizing import PretrainedTokenizer
from visavis.models.towers import ClipTower, TextTower, TowerSpec, VisualTower, open_preprocessing
from visavis.types import Encoded

if TYPE_CHECKING:
    from PIL.Image import Image as Picture


def _of_today(fields: Any) -> Any:
    return {**fields, "side": side_of(fields["side"])} if isinstance(fields, dict) and "side" in fields else fields


def _with_own(words: list[str] | None) -> list[str] | None:
    if words and not ({PAD, START, END, UNKNOWN} <= set(words) and len(set(words)) == len(words)):
        raise ValueError(f"the vocabulary lacks one of {PAD}, {START}, {END} and {UNKNOWN}, or names a word twice")
    return words


_Tower = Annotated[TowerSpec, BeforeValidator(_of_today)]


@dataclass(frozen=True)
class SavedConfig:
    """The ``config.json`` of a model folder, also of older versions: kind, architecture and widths of the matcher, and its processor."""

    kind: str
    architecture: dict[str, Any]
    visual: Annotated[_Tower | None, Field(validation_alias=AliasChoices("visual", "vision"))]
    text: _Tower | None
    vocabulary: Annotated[list[str] | None, AfterValidator(_with_own)]
    tokenizer: str | None = None
    standardization: Standardization | None = None
    stored_texts: bool = False
    widths: tuple[int, ...] = ()


@dataclass(frozen=True)
class Processor:
    """How pictures and sentences become what a matcher reads.

    visual: the tower of images (its preprocessing alone where the matcher reads pixels); None: only stored features. For
    sentences one of: text, a frozen tower; vocabulary, words learned from captions; tokenizer, the name of a pretrained model;
    stored_texts: none of these, the model read stored features of captions.
    standardization: of a frozen tower's features of images; None: they are read as they are. tokenizer_folder: where a model folder
    keeps the tokenizer itself, that of a text encoder trained with the model; None: with the pretrained model. tower_folder: where it
    keeps how a tower of images that was trained with the model reads pictures; None: with the pretrained tower.
    """

    visual: TowerSpec | None
    text: TowerSpec | None
    vocabulary: Vocabulary | None
    tokenizer: str | None = None
    standardization: Standardization | None = None
    tokenizer_folder: Path | None = None
    stored_texts: bool = False
    tower_folder: Path | None = None

    @classmethod
    def of(cls, config: SavedConfig, folder: Path) -> Processor:
        """That of the ``config.json`` of a model folder. Raises RunError if it does not say how texts are read."""
        if config.text is None and not config.vocabulary and config.tokenizer is None and not config.stored_texts:
            raise RunError("it names neither a text tower nor a vocabulary nor a tokenizer: the model could read no texts.")
        words = Vocabulary(tuple(config.vocabulary)) if config.vocabulary else None
        towers = folder / VisualTower.kept_as
        tower = towers if (towers / "config.json").is_file() else None
        kept = folder / text_backbone.FOLDER if config.architecture.get("text_backbone") else tower
        return cls(config.visual, config.text, words, config.tokenizer, config.standardization, kept, config.stored_texts, tower)

    @property
    def visual_spec(self) -> TowerSpec:
        """The tower of images. Raises RunError if the model knows only stored features."""
        if self.visual is None:
            raise RunError("this model was trained on stored features without a visual tower: it cannot read new images or videos.")
        return self.visual

    @property
    def described(self) -> dict[str, Any]:
        """What ``config.json`` says of it: the towers, the words, the standardization; folders do not count."""
        words = None if self.vocabulary is None else list(self.vocabulary.words)
        towers = {side: None if tower is None else asdict(tower) for side, tower in (("visual", self.visual), ("text", self.text))}
        own: dict[str, Any] = {} if self.tokenizer is None else {"tokenizer": self.tokenizer}
        own |= {"stored_texts": True} if self.stored_texts else {}
        own |= {} if self.standardization is None else {"standardization": asdict(self.standardization)}
        return towers | {"vocabulary": words} | own

    @cached_property
    def visual_tower(self) -> VisualTower | ClipTower:
        return self.visual_spec.open()  # type: ignore[return-value]

    @cached_property
    def text_tower(self) -> TextTower:
        if self.text is None:
            raise RunError("this model was trained on stored features of captions without a text tower: it cannot read new sentences.")
        return self.text.open()  # type: ignore[return-value]

    @cached_property
    def tokens(self) -> PretrainedTokenizer | None:
        return None if self.tokenizer is None else PretrainedTokenizer.open(self.tokenizer_folder or model_folder(self.tokenizer))

    @cached_property
    def preprocess(self) -> Callable[[Sequence[Picture]], Tensor]:
        """Pictures to the tower's pixels; the tower itself is not loaded."""
        return open_preprocessing(self.visual_spec, self.tower_folder)

    @cached_property
    def preprocess_crops(self) -> Callable[[Sequence[Picture]], Tensor]:
        """Random crops of pictures to the tower's pixels, whole."""
        return open_preprocessing(self.visual_spec, self.tower_folder, of_crops=True)

    def images(self, pictures: Sequence[Picture], view: str, device: torch.device | str = "cpu") -> Encoded:
        """Pictures as a matcher of this view reads them; a frozen tower computes on ``device``."""
        if view == "pixels":
            return Encoded(self.preprocess(pictures))
        assert isinstance(self.visual_tower, VisualTower)
        features = self.visual_tower.to(device).encode(pictures)
        features = features.map(lambda part: part.mean(1)) if self.visual_spec.crops > 1 else features
        return features if self.standardization is None else self.standardization(features)

    @property
    def frames_per_second(self) -> float:
        """How many frames of a clip the model reads; 0 for a model that reads pictures alone."""
        return self.visual.frames_per_second if self.visual else 0.0

    def clips(self, clips: Sequence[Sequence[Picture]], device: torch.device | str = "cpu") -> Encoded:
        """Clips, each its pictures, as a matcher of grids reads them: frames in the place of regions."""
        assert isinstance(self.visual_tower, ClipTower)
        features = self.visual_tower.to(device).encode(clips)
        return features if self.standardization is None else self.standardization(features)

    def texts(self, texts: Sequence[str], device: torch.device | str = "cpu") -> Encoded:
        """Sentences as the matcher reads them; a frozen tower computes on ``device``."""
        words = self.vocabulary or self.tokens
        return self.text_tower.to(device).encode(texts) if words is None else words.encode(texts)

    def unknown_words(self, text: str) -> list[str]:
        """Words of a sentence that the captions did not teach. Raises VisavisError if there are no others."""
        if self.vocabulary is None:
            return []
        unknown = self.vocabulary.unknown(text)
        if len(unknown) == len(tokenize(text)):
            raise VisavisError(f"no word of {text!r} is among the {len(self.vocabulary):,} that this model has learned: try other words.")
        return unknown

    def words_of(self, text: str) -> list[str | None]:
        """The words, or pieces of words, of a sentence that a matcher reads one by one; None for marks of its beginning and end."""
        if self.vocabulary is not None:
            return [None, *tokenize(text), None]
        pretrained = self.tokens
        tokenizer, longest = (
            (pretrained.tokenizer, pretrained.longest) if pretrained else (self.text_tower.tokenizer, self.text_tower.pooling.longest)
        )
        numbers = tokenizer(text, truncation=True, max_length=longest)["input_ids"]
        marks = tokenizer.get_special_tokens_mask(numbers, already_has_special_tokens=True)
        return [None if mark else word for word, mark in zip(tokenizer.convert_ids_to_tokens(numbers), marks, strict=True)]

    def save(self, matcher: Matcher, folder: Path) -> None:
        """A model folder: the matcher's config and weights, and this processor in the config."""
        matcher.save_pretrained(folder, **self.described)
