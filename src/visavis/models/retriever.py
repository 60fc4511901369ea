"""A trained matcher with its processors: pictures and sentences in, vectors out; what ``visavis.load`` gives."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from visavis import storage
from visavis.data.captions import Vocabulary
from visavis.data.dataset import Dataset
from visavis.data.features import side_of
from visavis.data.pictures import open_picture
from visavis.data.transforms import random_flip, random_resized_crop
from visavis.errors import RunError, ShapeError, VisavisError, nearest
from visavis.models.base import Matcher, load_weights
from visavis.models.towers import TextTower, TowerSpec, VisualTower
from visavis.spec import build
from visavis.types import Encoded, concatenate

if TYPE_CHECKING:
    from PIL.Image import Image as Picture

BATCH = 64


@dataclass(frozen=True)
class Processor:
    """How pictures and sentences become what a matcher reads: frozen towers, or a vocabulary for the words.

    visual: the tower of images (its preprocessing alone where the matcher trains on pixels); None: only stored features.
    """

    visual: TowerSpec | None
    text: TowerSpec | None
    vocabulary: Vocabulary | None

    @property
    def visual_spec(self) -> TowerSpec:
        """The tower of images. Raises RunError if the model knows only stored features."""
        if self.visual is None:
            raise RunError("this model was trained on stored features without a visual tower: it cannot read new images.")
        return self.visual

    @cached_property
    def visual_tower(self) -> VisualTower:
        return self.visual_spec.open()  # type: ignore[return-value]

    @cached_property
    def text_tower(self) -> TextTower:
        assert self.text is not None
        return self.text.open()  # type: ignore[return-value]

    def images(self, pictures: Sequence[Picture], view: str) -> Encoded:
        """Pictures as a matcher of this view reads them."""
        if view == "pixels":
            return Encoded(self.visual_tower.preprocess(pictures))
        features = self.visual_tower.encode(pictures)
        return features.map(lambda part: part.mean(1)) if self.visual_spec.crops > 1 else features

    def texts(self, texts: Sequence[str]) -> Encoded:
        """Sentences as the matcher reads them."""
        return self.text_tower.encode(texts) if self.vocabulary is None else self.vocabulary.encode(texts)

    def save(self, matcher: Matcher, folder: Path) -> None:
        """A model folder: the matcher's config and weights, and this processor in the config."""
        words = None if self.vocabulary is None else list(self.vocabulary.words)
        text = None if self.text is None else asdict(self.text)
        matcher.save_pretrained(folder, visual=None if self.visual is None else asdict(self.visual), text=text, vocabulary=words)


class Retriever:
    """A matcher that takes pictures and sentences.

    >>> model = visavis.load("runs/mine")                                   # doctest: +SKIP
    >>> model.encode_texts(["two dogs on a beach"]).shape                   # doctest: +SKIP
    torch.Size([1, 1024])
    """

    def __init__(self, matcher: Matcher, processor: Processor):
        self.matcher, self.processor = matcher.eval(), processor

    @classmethod
    def load(cls, folder: str | Path) -> Retriever:
        """The model of a run folder, or of a model folder itself. Raises RunError if there is none."""
        from visavis.models import CATALOG

        folder = Path(folder)
        folder = folder / "model" if (folder / "model" / "config.json").exists() else folder
        if not (folder / "config.json").exists():
            raise RunError(f"{folder} is no run or model folder: expected config.json and model.safetensors in it, or in its folder model.")
        config = storage.read_json(folder / "config.json")
        if config.get("kind") not in CATALOG:
            raise RunError(f"{folder / 'config.json'} is of kind {config.get('kind')!r}: {nearest(str(config.get('kind')), CATALOG)}")
        try:
            kind, processor = (
                CATALOG[config["kind"]],
                (_spec(config["visual"] if "visual" in config else config["vision"]), _spec(config["text"])),
            )
            words, architecture = config["vocabulary"], config["architecture"]
        except (KeyError, TypeError) as missing:
            raise RunError(f"{folder / 'config.json'} is incomplete or of another version: {missing}.") from None
        try:
            matcher = kind(build(kind.Config, architecture))
        except VisavisError as error:
            raise RunError(f"{folder / 'config.json'} does not describe a model of this version: {error}") from None
        load_weights(matcher, folder)
        return cls(matcher, Processor(*processor, Vocabulary(tuple(words)) if words else None))

    def encode_images(self, images: Sequence[str | Path | Picture], on_progress: Callable[[int, int], None] | None = None) -> Tensor:
        """Unit rows ``[N, D]`` of pictures given as paths or PIL images. Raises DataError naming a file that is no image."""
        blocks = (self._visual([_picture(image) for image in batch]) for batch in _batches(images))
        return self._unit_rows(blocks, len(images), on_progress)

    def encode_texts(self, texts: Sequence[str], on_progress: Callable[[int, int], None] | None = None) -> Tensor:
        """Unit rows ``[N, D]`` of sentences."""
        if isinstance(texts, str):
            raise ShapeError(f"encode_texts takes a list of sentences, found one text: write [{texts!r}].")
        blocks = (self._text(batch) for batch in _batches(texts))
        return self._unit_rows(blocks, len(texts), on_progress)

    @torch.inference_mode()
    def _visual(self, pictures: Sequence[Picture]) -> Encoded:
        return self.matcher.encode_visual(self.processor.images(pictures, self.matcher.config.visual_view))

    @torch.inference_mode()
    def _text(self, texts: Sequence[str]) -> Encoded:
        return self.matcher.encode_text(self.processor.texts(texts))

    def _unit_rows(self, blocks: Iterator[Encoded], total: int, on_progress: Callable[[int, int], None] | None) -> Tensor:
        done: list[Encoded] = []
        for block in blocks:
            done.append(block)
            if on_progress is not None:
                on_progress(min(total, BATCH * len(done)), total)
        if not done:
            raise ShapeError("there is nothing to encode: the list is empty.")
        vectors = concatenate(done).vectors
        if not isinstance(vectors, Tensor) or vectors.dim() != 2:
            raise ShapeError(f"{type(self.matcher).__name__} has no single vector an item: score its encoded items with matcher.score.")
        return vectors


class PixelSource:
    """The pixels of a split's images, for a matcher that trains its backbone; cropped and flipped at random in training."""

    def __init__(self, data: Dataset, tower: VisualTower, *, augment: bool):
        self.data, self.tower, self.augment = data, tower, augment

    def read(self, index: np.ndarray, generator: torch.Generator | None = None) -> Encoded:
        pictures = [self.data.images[i].open() for i in index]
        if self.augment and generator is not None:
            pictures = [random_flip(random_resized_crop(picture, min(picture.size), generator), generator) for picture in pictures]
        return Encoded(self.tower.preprocess(pictures))


def _spec(fields: dict[str, Any] | None) -> TowerSpec | None:
    return None if fields is None else TowerSpec(**{**fields, "side": side_of(fields["side"])})


def _picture(image: Any) -> Picture:
    if isinstance(image, str | Path):
        return open_picture(storage.read_bytes(image), str(image))
    picture: Picture = image.convert("RGB")
    return picture


def _batches(items: Sequence[Any]) -> Iterator[Sequence[Any]]:
    return (items[start : start + BATCH] for start in range(0, len(items), BATCH))
