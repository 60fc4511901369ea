"""A trained matcher with its processor: images and texts in, vectors and scores out.
``visavis.load`` returns it.
"""

from __future__ import annotations

import copy
import hashlib
import math
import os
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import cached_property
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeAlias

import numpy as np
import torch
from PIL.Image import Image, fromarray
from torch import Tensor

from visavis.core import storage
from visavis.core.encoded import Direction, Encoded, unit_rows
from visavis.core.errors import DataError, RunError, ShapeError, SpecError, format_value
from visavis.core.memory_budget import MemoryLimit, parse_memory
from visavis.data.file_names import is_video
from visavis.data.images import convert_image, decode_image
from visavis.data.parallel import map_in_order
from visavis.data.sequences import pad_items
from visavis.data.video import iter_frames
from visavis.models.base import Matcher, get_vectors, valid_mask
from visavis.models.batch_encoding import device_of
from visavis.models.device import choose_device
from visavis.models.encoders.pretrained_files import (
    COLPALI_TYPES,
    find_dual_encoder,
    find_embedding_model,
    weights_checksum,
)
from visavis.models.inference import OnBatch, consecutive_batches, encode_items, score_all_pairs
from visavis.models.processor import Processor, load_saved_model
from visavis.models.text_inputs import check_texts, count_items, warn_of_unknown_texts

ImageInput: TypeAlias = "str | Path | Image | np.ndarray | Tensor | bytes"
"""A path, a Pillow image, a uint8 array ``[H, W, 3]``, a tensor ``[3, H, W]`` of uint8 or of floats
in 0..1, or an encoded file.
"""


def read_image(image: Any, name: str, min_side: int = 0) -> Image:
    """Convert an image of any accepted kind, of an animation the first frame, to an upright RGB
    image. A JPEG is decoded with a shorter side of at least ``min_side`` pixels. 0: in full.
    """
    if isinstance(image, str | Path):
        if is_video(str(image)):
            raise DataError(
                f'{image}: expected an image, got a video. Use a model that was trained with visual.granularity = "frames".'
            )
        return decode_image(
            storage.read_bytes(image), str(image), min_side=min_side, allow_animated=True
        )
    if isinstance(image, bytes | bytearray):
        return decode_image(bytes(image), name, min_side=min_side, allow_animated=True)
    if isinstance(image, Image):
        return convert_image(image, name, min_side=min_side)
    pixels = image
    problem = ""
    if isinstance(image, Tensor) and image.dim() == 3:
        pixels = image.detach().cpu()
        if pixels.is_floating_point():
            pixels = pixels.float()
            # Values from 0 to 255 would become a white image without an error.
            if not bool(((pixels >= 0) & (pixels <= 1)).all()):
                low, high = (float(bound) for bound in pixels.aminmax())
                found = (
                    f"{low:g} to {high:g}. Divide the pixels by 255"
                    if math.isfinite(low + high)
                    else "NaN or infinity. Replace these pixels"
                )
                problem = f"floats from 0 to 1 in a tensor [3, H, W], got {found}."
            pixels = (pixels * 255).round().to(torch.uint8)
        pixels = pixels.permute(1, 2, 0).numpy()
    if pixels.dtype != np.uint8 or pixels.ndim != 3 or pixels.shape[2] != 3 or not pixels.size:
        problem = (
            "a path, a Pillow image, bytes, a uint8 array [H, W, 3] or a tensor [3, H, W], got "
            f"{str(image.dtype).removeprefix('torch.')} of shape {list(image.shape)}. Convert the "
            "image."
        )
    if problem:
        raise DataError(f"{name}: expected {problem}")
    return fromarray(np.ascontiguousarray(pixels))


DEFAULT_BATCH_SIZE = 64
"""Number of items per batch."""
VIDEO_BATCH_SIZE = 4
"""Number of videos per batch. Each of them is many images."""
PAGE_BATCH_SIZE = 4
"""Number of images per batch of ColPali and of vision-language models, which read about a thousand
tokens of each.
"""


class Retriever:
    """A matcher that reads images and texts.

    Args:
        matcher: The matcher.
        processor: Its processor.
        batch_size: Number of items per batch.
        memory: Memory of blocks of scores, such as "2GiB". None: a share of the free memory.

    Raises:
        ShapeError: If ``batch_size`` is below 1.

    Example:
        >>> model = visavis.load("runs/mine")                                   # doctest: +SKIP
        >>> model.encode_texts(["two dogs on a beach"]).shape                   # doctest: +SKIP
        torch.Size([1, 1024])
    """

    embedding_dim: int | None = None
    """Number of dimensions of returned vectors, a prefix of the whole. None: all."""

    def __init__(
        self,
        matcher: Matcher,
        processor: Processor,
        *,
        batch_size: int = DEFAULT_BATCH_SIZE,
        memory: MemoryLimit = None,
    ):
        if batch_size < 1:
            raise ShapeError(
                f"batch_size: expected an integer >= 1, got {batch_size}. Set a positive batch "
                "size."
            )
        parse_memory(memory)
        self.matcher = matcher.eval()
        self.processor = processor
        self.batch_size = batch_size
        self.memory = memory

    @property
    def device(self) -> torch.device:
        """Device of the matcher."""
        return device_of(self.matcher)

    @cached_property
    def fingerprint(self) -> str:
        """Short hash of the matcher's weights, its architecture, and the encoders and words of its
        processor.
        """
        matcher = self.matcher
        description = repr((type(matcher).__name__, matcher.config, self.processor.to_config))
        content = f"{weights_checksum(matcher)} {description}"
        return hashlib.sha256(content.encode()).hexdigest()[:16]

    @property
    def items_fingerprint(self) -> str:
        """Fingerprint of the model whose image vectors the texts of this model belong to."""
        return self.processor.items or self.fingerprint

    def with_embedding_dim(self, embedding_dim: int) -> Retriever:
        """Return this model with shorter vectors: their first dimensions, as unit vectors.
        ``score`` continues to read all.

        Args:
            embedding_dim: Number of dimensions.

        Returns:
            The model.

        Raises:
            RunError: If the model was not trained for this number.
        """
        if embedding_dim not in self.matcher.matryoshka_dims:
            trained = (
                ", ".join(map(str, self.matcher.matryoshka_dims))
                or "none, as the model was trained without matryoshka_dims"
            )
            raise RunError(
                f"embedding_dim: expected one of the trained dimensions ({trained}), got "
                f"{embedding_dim}. "
                f"Use one of them, or train a model with matryoshka_dims=[{embedding_dim}]."
            )
        other = copy.copy(self)
        is_shorter = embedding_dim < self.matcher.matryoshka_dims[-1]
        other.embedding_dim = embedding_dim if is_shorter else None
        return other

    def truncated_to(self, embedding_dim: int) -> Retriever:
        """Return this model with the vectors of an index, which may be shorter.

        Args:
            embedding_dim: Dimension of the vectors of the index.

        Returns:
            The model with shorter vectors, or this model if its vectors have this dimension.
        """
        is_shorter = embedding_dim in self.matcher.matryoshka_dims[:-1]
        return self.with_embedding_dim(embedding_dim) if is_shorter else self

    def with_full_decoding(self) -> Retriever:
        """Return this model with JPEG files decoded in full, instead of at a reduced size.

        Returns:
            The model.
        """
        visual = replace(self.processor.visual_spec, full_decoding=True)
        other = copy.copy(self)
        other.processor = replace(self.processor, visual=visual)
        # The copy shares cached values. The fingerprint covers the processor.
        other.__dict__.pop("fingerprint", None)
        return other

    @classmethod
    def load(
        cls,
        folder: str | Path,
        *,
        device: str | torch.device | None = None,
        batch_size: int = DEFAULT_BATCH_SIZE,
        memory: MemoryLimit = None,
    ) -> Retriever:
        """Load a model.

        Args:
            folder: A run folder, a model folder, or the folder or hub name of an untrained CLIP,
                SigLIP or ColPali model, or of a model of sentence-transformers that reads images.
            device: Device of the model. None: CUDA or an Apple GPU if available, else the CPU.
            batch_size: Number of items per batch.
            memory: Memory of blocks of scores.

        Returns:
            The model.

        Raises:
            RunError: If the model does not exist, or if its files are damaged.
        """
        device = choose_device(device)
        folder = Path(folder)
        # A run has its model in a folder of its own.
        folder = folder / "model" if os.path.exists(folder / "model" / "config.json") else folder
        matcher: Matcher
        if (name := find_dual_encoder(folder)) is not None:
            from visavis.models.clip.model import open_dual_encoder

            matcher, processor = open_dual_encoder(name)
        elif (name := find_dual_encoder(folder, COLPALI_TYPES)) is not None:
            from visavis.models.colpali import open_colpali

            matcher, processor = open_colpali(name)
            batch_size = min(batch_size, PAGE_BATCH_SIZE)
        elif (name := find_embedding_model(folder)) is not None:
            from visavis.models.embedding_model import open_embedding_model

            matcher, processor = open_embedding_model(name)
        else:
            matcher, processor = load_saved_model(folder)
        return cls(matcher.to(device), processor, batch_size=batch_size, memory=memory)

    def encode(self, items: Sequence[Any], on_progress: OnBatch | None = None) -> Tensor:
        """Encode texts or images, chosen by their type. A ``str`` is a text: pass a ``Path`` for an
        image file.

        Args:
            items: Texts, or images of any kind that ``encode_images`` accepts.
            on_progress: Called after each batch.

        Returns:
            Unit vectors, shape ``[N, D]``, on the CPU.

        Raises:
            DataError: Naming a file that is not an image.
            ShapeError: If ``items`` is empty, or if the model has several vectors per item.
        """
        count_items(items, "items")
        are_texts = all(isinstance(item, str) for item in items)
        return (self.encode_texts if are_texts else self.encode_images)(items, on_progress)

    def similarity(self, first: Tensor, second: Tensor) -> Tensor:
        """Compute the cosines of two sets of vectors.

        Args:
            first: Vectors, shape ``[N, D]``.
            second: Vectors, shape ``[M, D]``.

        Returns:
            Cosines, shape ``[N, M]``.

        Raises:
            ShapeError: If the vectors do not have the same number of dimensions.
        """
        # A matrix product of other shapes may broadcast.
        if first.dim() != 2 or second.dim() != 2 or first.shape[1] != second.shape[1]:
            raise ShapeError(
                "first, second: expected vectors [N, D] and [M, D] of equal length, got shapes "
                f"{list(first.shape)} and {list(second.shape)}. Encode both with one model."
            )
        return unit_rows(first) @ unit_rows(second.to(first)).T

    def save(self, folder: str | Path) -> Path:
        """Write a model folder that ``visavis.load`` reads.

        Args:
            folder: New folder, written completely or not at all.

        Returns:
            The folder.

        Raises:
            RefusedOverwrite: If the folder is not empty.
        """
        folder = storage.prepare_empty_folder(folder, will_be_replaced=True)
        with storage.atomic_folder(folder) as part:
            self.processor.save(self.matcher, part)
        return folder

    def push_to_hub(self, repo: str, *, private: bool = False) -> str:
        """Upload the model folder to the Hugging Face hub. ``visavis.export(..., push=...)`` also
        uploads a model card.

        Args:
            repo: Name of the repository, such as ``owner/model``. It is created if it does not
                exist.
            private: Whether a new repository is private.

        Returns:
            Address of the uploaded commit.

        Raises:
            StorageError: If the hub refuses the upload or is not reachable.
            MissingExtra: If huggingface_hub is not installed.
        """
        from visavis.data.hub_files import upload_folder, validate_repo

        validate_repo(repo)
        with TemporaryDirectory() as temporary:
            return upload_folder(self.save(Path(temporary) / "model"), repo, private=private)

    def encode_images(
        self, images: Sequence[ImageInput], on_progress: OnBatch | None = None
    ) -> Tensor:
        """Encode images.

        Args:
            images: Paths, Pillow images, encoded files as bytes, uint8 arrays ``[H, W, 3]``, or
                tensors ``[3, H, W]`` of uint8 or of floats from 0 to 1.
            on_progress: Called after each batch.

        Returns:
            Unit vectors, shape ``[N, D]``, on the CPU.

        Raises:
            DataError: Naming an image that cannot be read.
            ShapeError: If the model has several vectors per item. Use ``score`` with such models.
        """
        return self.to_unit_rows(self.encode_visual(images, on_progress))

    def encode_videos(
        self, videos: Sequence[str | Path], on_progress: OnBatch | None = None
    ) -> Tensor:
        """Encode video files.

        Args:
            videos: Paths of videos.
            on_progress: Called after each batch.

        Returns:
            Unit vectors, shape ``[N, D]``, on the CPU.

        Raises:
            DataError: Naming a file that is not a video, or if the model reads only images.
            ShapeError: If the model has several vectors per item. Use ``score`` with such models.
        """
        return self.to_unit_rows(self.encode_visual(videos, on_progress))

    def encode_texts(self, texts: Sequence[str], on_progress: OnBatch | None = None) -> Tensor:
        """Encode texts. Warns of texts whose words the vocabulary of the model lacks.

        Args:
            texts: The texts.
            on_progress: Called after each batch.

        Returns:
            Unit vectors, shape ``[N, D]``, on the CPU.

        Raises:
            DataError: Naming a text that is empty or not Unicode.
            ShapeError: If the model has several vectors per item.
        """
        return self.to_unit_rows(self.encode_text(texts, on_progress))

    def unknown_words(self, text: str) -> list[str]:
        """Find the words of a text that the model does not know, see ``Processor.unknown_words``."""
        return self.processor.unknown_words(text)

    def count_tokens(self, texts: Sequence[str]) -> list[int]:
        """Count the tokens that the model reads of each text, see ``Processor.count_tokens``."""
        check_texts(texts)
        return self.processor.count_tokens(texts)

    def score(
        self, images: Sequence[ImageInput], texts: Sequence[str], *, direction: Direction = "t2i"
    ) -> Tensor:
        """Score every image with every text, on the CPU, in blocks that fit into memory.

        Args:
            images: Images of any kind that ``encode_images`` accepts, or paths of videos.
            texts: The texts.
            direction: For a model with two stages, which side holds the queries whose first
                candidates are re-ranked.

        Returns:
            Scores, shape ``[V, T]``.

        Raises:
            SpecError: If the direction is unknown.
        """
        # Any other text would order the candidates of the texts.
        if direction not in ("i2t", "t2i"):
            raise SpecError(f"direction: expected 'i2t' or 't2i', got {format_value(direction)}.")
        return score_all_pairs(
            self.matcher,
            self.encode_visual(images),
            self.encode_text(texts),
            self.memory,
            direction,
        )

    def encode_visual(
        self, images: Sequence[ImageInput | Sequence[Image]], on_progress: OnBatch | None = None
    ) -> Encoded:
        """Encode images or videos for ``matcher.score``: one vector each, regions, or named parts.

        Args:
            images: Images of any kind that ``encode_images`` accepts. A model of clips also reads a
                list of frames per clip, ``processor.frames_per_second`` of them.
            on_progress: Called after each batch.

        Returns:
            Encoded items.

        Raises:
            ShapeError: If ``images`` is empty.
        """
        frames_per_second = self.processor.visual_spec.frames_per_second
        count = count_items(images, "images or videos")

        def read_item(i: int) -> Iterable[Image]:
            item = images[i]
            name = f"images[{i}]"
            if not frames_per_second:
                return [read_image(item, name, self.processor.min_side)]
            # An image is a clip of one frame, and a list of images is a clip.
            if isinstance(item, list | tuple):
                return [read_image(frame, f"{name}[{j}]") for j, frame in enumerate(item)]
            if isinstance(item, str | Path) and is_video(str(item)):
                return iter_frames(Path(item), str(item), frames_per_second)
            return [read_image(item, name)]

        if self.processor.converts_single_images:
            convert = self.processor.preprocess.to_bytes
            # FFmpeg decodes a clip with threads of its own.
            threads, ahead = (1, 1) if frames_per_second else (0, self.batch_size)
            pixels = map_in_order(
                lambda i: convert(read_item(i)), range(count), threads=threads, ahead=ahead
            )
            return self.encode_pixels(pixels, count, on_progress)

        def read_batch(index: np.ndarray) -> Encoded:
            opened = [image for item in map_in_order(read_item, index) for image in item]
            return self.processor.process_images(
                opened, self.matcher.config.visual_granularity, self.device
            )

        batches = consecutive_batches(count, min(self.batch_size, PAGE_BATCH_SIZE))
        return encode_items(
            self.matcher, "visual", map(read_batch, batches), batches, on_batch=on_progress
        )

    def encode_pixels(
        self, pixels: Iterable[Tensor], count: int, on_progress: OnBatch | None = None
    ) -> Encoded:
        """Encode converted images or clips for ``matcher.score``.

        Args:
            pixels: Result of ``processor.preprocess.to_bytes`` for each image, or for the frames of
                each clip of a model of clips.
            count: Number of images or clips.
            on_progress: Called after each batch.

        Returns:
            Encoded items.
        """
        # Pixels are read ahead one by one, and batches take as many as they need.
        remaining = iter(pixels)
        reads_clips = self.processor.frames_per_second > 0

        def read_batch(index: np.ndarray) -> Encoded:
            batch = list(islice(remaining, len(index)))
            frames = self.processor.preprocess.normalize(torch.cat(batch).to(self.device))
            items = (
                pad_items(frames.split([len(clip) for clip in batch]))
                if reads_clips
                else Encoded(frames)
            )
            return self.processor.encode_pixels(
                items, self.matcher.config.visual_granularity, self.device
            )

        batch_size = min(VIDEO_BATCH_SIZE, self.batch_size) if reads_clips else self.batch_size
        batches = consecutive_batches(count, batch_size)
        return encode_items(
            self.matcher, "visual", map(read_batch, batches), batches, on_batch=on_progress
        )

    def encode_text(self, texts: Sequence[str], on_progress: OnBatch | None = None) -> Encoded:
        """Encode texts for ``matcher.score``.

        Args:
            texts: The texts.
            on_progress: Called after each batch.

        Returns:
            Encoded texts.

        Raises:
            DataError: Naming a text that is empty or not Unicode.
            ShapeError: If ``texts`` is empty.
            SpecError: If ``texts`` is a single text.
        """
        count = check_texts(texts)
        warn_of_unknown_texts(texts, self.processor.vocabulary)
        # Batches of texts of similar length have little padding.
        by_length = np.argsort([len(text) for text in texts], kind="stable")
        batches = [by_length[batch] for batch in consecutive_batches(count, self.batch_size)]

        def read_batch(index: np.ndarray) -> Encoded:
            return self.processor.process_texts([texts[i] for i in index], self.device)

        return encode_items(
            self.matcher, "text", map(read_batch, batches), batches, on_batch=on_progress
        )

    def item_vectors(self, encoded: Encoded) -> list[Tensor]:
        """Return the vectors of each item that an index stores.

        Args:
            encoded: Encoded items.

        Returns:
            Unit vectors of each item, float32: shape ``[D]``, or ``[n, D]`` for a late-interaction
            model.

        Raises:
            ShapeError: If the model has several vectors per item, but its score is not MaxSim.
        """
        if self.matcher.late_interaction is None:
            return list(self.to_unit_rows(encoded).float())
        vectors = dict[int, Tensor]()
        for positions, block in encoded.iter_blocks():
            for position, rows, mask in zip(
                positions.tolist(), get_vectors(block).float(), valid_mask(block), strict=True
            ):
                vectors[position] = rows[mask]
        return [vectors[position] for position in range(len(encoded))]

    def to_unit_rows(self, encoded: Encoded) -> Tensor:
        """Return the unit vectors of encoded items, shortened to ``embedding_dim``.

        Args:
            encoded: Encoded items.

        Returns:
            Unit vectors, shape ``[N, D]``.

        Raises:
            ShapeError: If the model has several vectors per item.
        """
        rows = self.matcher.first_stage_items(encoded).vectors
        if not isinstance(rows, Tensor) or rows.dim() != 2:
            raise ShapeError(
                f"{type(self.matcher).__name__} scores pairs: expected one vector per item, got "
                "several. Use score(images, texts), or index "
                "another model and re-rank its results with this one (--rerank)."
            )
        return rows if self.embedding_dim is None else unit_rows(rows[:, : self.embedding_dim])
