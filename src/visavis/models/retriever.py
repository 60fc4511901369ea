"""A trained matcher with its processor: pictures and sentences in, vectors and scores out; what ``visavis.load`` gives."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import normalize

from visavis import storage
from visavis.data.clips import clip_frames, is_video
from visavis.data.pictures import open_picture
from visavis.errors import DataError, RunError, ShapeError, VisavisError, nearest
from visavis.memory import Memory, parse_memory
from visavis.models.base import Matcher, build_with_weights, check_config
from visavis.models.clip import find_dual_encoder, open_dual_encoder
from visavis.models.device import choose_device
from visavis.models.encoding import OnBatch, batches_of_at_most, device_of, encode
from visavis.models.pretrained import weights_checksum
from visavis.models.processor import Processor, SavedConfig
from visavis.models.scoring import score_all
from visavis.spec import build
from visavis.types import Direction, Encoded

if TYPE_CHECKING:
    from PIL.Image import Image as Picture

BATCH = 64
CLIPS = 4
"""Videos at once, of which each is many pictures."""
HALF_A_CHARACTER = re.compile("[\ud800-\udfff]")


class Retriever:
    """A matcher that takes pictures and sentences.

    batch_size: how many go through the model at once. memory: what blocks of scores may take, such as "2GiB"; None: a share of
    what is free. width: how many first numbers of its vectors are given, as unit vectors; None: all of them.

    >>> model = visavis.load("runs/mine")                                   # doctest: +SKIP
    >>> model.encode_texts(["two dogs on a beach"]).shape                   # doctest: +SKIP
    torch.Size([1, 1024])
    """

    width: int | None = None

    def __init__(self, matcher: Matcher, processor: Processor, *, batch_size: int = BATCH, memory: Memory = None):
        if batch_size < 1:
            raise ShapeError(f"batch_size is {batch_size}, expected at least 1.")
        parse_memory(memory)
        self.matcher, self.processor = matcher.eval(), processor
        self.batch_size, self.memory = batch_size, memory

    @property
    def device(self) -> torch.device:
        """Where it computes."""
        return device_of(self.matcher)

    @cached_property
    def fingerprint(self) -> str:
        """Tells models apart: a short hash of the matcher's weights, its architecture, and what its processor says of encoders and words."""
        described = repr((type(self.matcher).__name__, self.matcher.config, self.processor.described))
        return hashlib.sha256(f"{weights_checksum(self.matcher)} {described}".encode()).hexdigest()[:16]

    def narrowed(self, width: int) -> Retriever:
        """This model with vectors of their first so many numbers; ``score`` goes on reading all. Raises RunError unless it was trained for it."""
        if width not in self.matcher.widths:
            known = f"by their first {', '.join(map(str, self.matcher.widths))} numbers" if self.matcher.widths else "as a whole alone"
            raise RunError(
                f"width is {width}, but the vectors of this model were trained to serve {known}: take one of these, or train "
                f"a model with widths=[{width}]."
            )
        other = Retriever(self.matcher, self.processor, batch_size=self.batch_size, memory=self.memory)
        other.width = width if width < self.matcher.widths[-1] else None
        return other

    @classmethod
    def load(
        cls, folder: str | Path, *, device: str | torch.device | None = None, batch_size: int = BATCH, memory: Memory = None
    ) -> Retriever:
        """The model of a run folder, of a model folder itself, or an untrained CLIP or SigLIP model, by its folder or hub name.

        Raises RunError if there is none.

        device: where it computes; default CUDA where there is one, else the CPU.
        """
        from visavis.models import CATALOG

        chosen, folder = choose_device(device), Path(folder)
        folder = folder / "model" if (folder / "model" / "config.json").exists() else folder
        if (name := find_dual_encoder(folder)) is not None:
            matcher, processor = open_dual_encoder(name)
            return cls(matcher.to(chosen), processor, batch_size=batch_size, memory=memory)
        if not (folder / "config.json").exists():
            raise RunError(
                f"{folder} is no run or model folder: expected config.json and model.safetensors in it, or in its folder model, "
                "or a CLIP or SigLIP model of transformers."
            )
        config = storage.read_json(folder / "config.json", SavedConfig, error=RunError)
        if config.kind not in CATALOG:
            raise RunError(f"{folder / 'config.json'} is of kind {config.kind!r}: {nearest(config.kind, CATALOG)}")
        kind = CATALOG[config.kind]
        try:
            processor, architecture = Processor.of(config, folder), build(kind.Config, config.architecture)
        except VisavisError as error:
            raise RunError(f"{folder / 'config.json'} does not describe a model of this version: {error}") from None
        if processor.vocabulary is not None and len(processor.vocabulary) != architecture.text_width:
            raise RunError(
                f"{folder / 'config.json'} has a vocabulary of {len(processor.vocabulary):,} words, expected the {architecture.text_width:,} "
                "of its text_width: it is damaged."
            )
        if processor.standardization is not None and len(processor.standardization.mean) != architecture.visual_width:
            raise RunError(
                f"{folder / 'config.json'} has a standardization of {len(processor.standardization.mean):,} dimensions, expected the "
                f"{architecture.visual_width:,} of its visual_width: it is damaged."
            )
        check_config(folder / "config.json")
        model = build_with_weights(kind, architecture, folder)
        model.widths = config.widths
        return cls(model.to(chosen), processor, batch_size=batch_size, memory=memory)

    def encode_images(self, images: Sequence[str | Path | Picture], on_progress: OnBatch | None = None) -> Tensor:
        """Unit rows ``[N, D]`` of pictures given as paths or PIL images, on the CPU.

        Raises DataError naming a file that is no image, ShapeError for a model without one vector an item: it has ``score``.
        """
        return self.unit_rows(self.encode_visual(images, on_progress))

    def encode_videos(self, videos: Sequence[str | Path], on_progress: OnBatch | None = None) -> Tensor:
        """Unit rows ``[N, D]`` of video files, on the CPU.

        Raises DataError naming a file that is no video, or for a model that reads pictures alone, ShapeError for a model without one
        vector an item: ``score`` takes videos too.
        """
        return self.unit_rows(self.encode_visual(videos, on_progress))

    def encode_texts(self, texts: Sequence[str], on_progress: OnBatch | None = None) -> Tensor:
        """Unit rows ``[N, D]`` of sentences, on the CPU. Raises ShapeError for a model without one vector an item."""
        return self.unit_rows(self.encode_text(texts, on_progress))

    def score(self, images: Sequence[str | Path | Picture], texts: Sequence[str], *, way: Direction = "t2i") -> Tensor:
        """How well every picture fits every sentence, for any model: ``[V, T]``, on the CPU, in blocks within the memory.

        way: of a model that ranks in two stages, whose first candidates are scored anew: those of each text ("t2i") or image ("i2t").
        """
        return score_all(self.matcher, self.encode_visual(images), self.encode_text(texts), self.memory, way)

    def encode_visual(self, images: Sequence[str | Path | Picture | Sequence[Picture]], on_progress: OnBatch | None = None) -> Encoded:
        """Pictures, or paths of videos, as ``matcher.score`` reads them: one vector each, or regions, or named parts.

        A model that reads clips takes the pictures of one as a list, too, ``processor.frames_per_second`` of them a second.
        """
        if isinstance(images, str | Path):
            raise ShapeError(f"expected a list of pictures or videos, found one path: write [{str(images)!r}].")
        view, device, rate = self.matcher.config.visual_view, device_of(self.matcher), self.processor.visual_spec.frames_per_second

        def read(index: np.ndarray) -> Encoded:
            if rate:
                return self.processor.clips([_clip(images[i], rate) for i in index], device)
            return self.processor.images([_picture(images[i]) for i in index], view, device)

        batches = batches_of_at_most(_some(images), min(CLIPS, self.batch_size) if rate else self.batch_size)
        return encode(self.matcher, "visual", read, batches, on_batch=on_progress)

    def encode_text(self, texts: Sequence[str], on_progress: OnBatch | None = None) -> Encoded:
        """Sentences as ``matcher.score`` reads them."""
        if isinstance(texts, str):
            raise ShapeError(f"expected a list of sentences, found one text: write [{texts!r}].")
        for number, text in enumerate(texts):
            if not isinstance(text, str) or HALF_A_CHARACTER.search(text):
                raise DataError(f"text {number} is {text!r}, expected text: it is of another type, or holds half a character.")
        device, short_first = device_of(self.matcher), np.argsort([len(text) for text in texts], kind="stable")
        return encode(
            self.matcher,
            "text",
            lambda index: self.processor.texts([texts[i] for i in index], device),
            [short_first[batch] for batch in batches_of_at_most(_some(texts), self.batch_size)],
            on_batch=on_progress,
        )

    def unit_rows(self, encoded: Encoded) -> Tensor:
        rows = self.matcher.first_stage(encoded).vectors
        if not isinstance(rows, Tensor) or rows.dim() != 2:
            raise ShapeError(
                f"{type(self.matcher).__name__} scores pairs and has no single vector an item: take score(images, texts), or index another "
                "model and have this one rank what it finds, with --rerank."
            )
        return rows if self.width is None else normalize(rows[:, : self.width], dim=1)


def _some(items: Sequence[Any]) -> int:
    if not len(items):
        raise ShapeError("there is nothing to encode: the list is empty.")
    return len(items)


def _clip(item: Any, rate: float) -> list[Picture]:
    """The pictures of a video, so many a second; a picture is a clip of one, and a list of them is one."""
    if isinstance(item, list | tuple):
        return list(item)
    if isinstance(item, str | Path) and is_video(str(item)):
        return clip_frames(Path(item), str(item), rate)
    return [_picture(item)]


def _picture(image: Any) -> Picture:
    if isinstance(image, str | Path):
        if is_video(str(image)):
            raise DataError(f'{image} is a video, and this model reads pictures: one trained with visual.view = "frames" reads videos.')
        return open_picture(storage.read_bytes(image), str(image))
    picture: Picture = image.convert("RGB")
    return picture
