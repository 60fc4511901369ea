"""Preprocessing of an exported model: images to pixels and texts to token ids. Needs Pillow, NumPy
and, for a model with a pretrained tokenizer, tokenizers.
"""

from __future__ import annotations

import json
import unicodedata
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from open_image import open_image
from PIL import Image

from visavis.data.words import tokenize


class Preprocessor:
    """Reads ``preprocessing.json``, and ``tokenizer.json`` of a pretrained tokenizer.

    Args:
        folder: Folder of the exported model.
    """

    def __init__(self, folder: str | Path):
        folder = Path(folder)
        settings = json.loads((folder / "preprocessing.json").read_text(encoding="utf-8"))
        self.image = settings["image"]
        self.text = settings["text"]
        self.word_ids = {
            unicodedata.normalize("NFC", word): number
            for number, word in enumerate(self.text["vocabulary"] or ())
        }
        if not self.word_ids:
            from tokenizers import Tokenizer

            self.tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))

    def images(self, images: Sequence[Any]) -> np.ndarray:
        """Convert images to pixels."""
        return np.stack(
            [self._views(open_image(image, self.image["min_side"])) for image in images]
        )

    def texts(self, texts: Sequence[str]) -> tuple[np.ndarray, ...]:
        """Convert texts to token ids."""
        if not self.word_ids:
            encoded = self.tokenizer.encode_batch(list(texts))
            ids = np.array([encoding.ids for encoding in encoded], dtype=np.int64)
            if not self.text["mask"]:
                return (ids,)
            return ids, np.array([encoding.attention_mask for encoding in encoded], dtype=bool)
        start = 1
        end = 2
        unknown = 3
        rows = [
            [start, *(self.word_ids.get(word, unknown) for word in tokenize(text)), end][
                : self.text["max_tokens"]
            ]
            for text in texts
        ]
        ids = np.zeros((len(rows), max(map(len, rows))), dtype=np.int64)
        for target, row in zip(ids, rows, strict=True):
            target[: len(row)] = row
        return ids, np.arange(ids.shape[1]) < np.array([len(row) for row in rows])[:, None]

    def _views(self, image: Image.Image) -> np.ndarray:
        """Resize an image, and return its pixels, its center or its ten crops."""
        resize = self.image["resize"]
        crop = self.image["crop"]
        if self.image["crops"] > 1:
            crop = crop or ([resize[0], resize[-1]] if resize else [min(image.size)] * 2)
            resize = [max(round(self.image["ten_crop_margin"] * max(crop)), min(resize or [0]))]
        if resize is not None:
            size, box = self._limit_size(image.size, resize)
            image = (
                image if size == image.size else image.resize(size, self.image["resample"], box=box)
            )
        if self.image["crops"] == 1:
            return self._pixels(image) if crop is None else self._window(image, crop, 0.5, 0.5)
        positions = ((0.5, 0.5), (0, 0), (0, 1), (1, 0), (1, 1))
        views = np.stack([self._window(image, crop, *position) for position in positions])
        return np.concatenate([views, views[..., ::-1]])

    def _limit_size(self, size: tuple[int, int], resize: list[int]) -> tuple[tuple[int, int], Any]:
        """Return the size after resizing, and the box of a very long image that is read."""
        width, height, edge = *size, resize[0]
        shorter = (
            (edge, int(edge * height / width))
            if width <= height
            else (int(edge * width / height), edge)
        )
        target = shorter if len(resize) == 1 else (resize[1], resize[0])
        limit = self.image["max_pixels"]
        if target[0] * target[1] <= limit:
            return target, None
        bounded = [min(side, max(min(target), limit // min(target))) for side in target]
        box = (bounded[0] / target[0] * width, bounded[1] / target[1] * height)
        left = (width - box[0]) / 2
        top = (height - box[1]) / 2
        return (bounded[0], bounded[1]), (left, top, left + box[0], top + box[1])

    def _window(
        self, image: Image.Image, crop: list[int], vertical: float, horizontal: float
    ) -> np.ndarray:
        """Return the pixels of a window at a position from 0 (top, left) to 1. A smaller image is
        padded with zeros around it.
        """
        height = min(crop[0], image.height)
        width = min(crop[1], image.width)
        top = int(vertical * (image.height - height))
        left = int(horizontal * (image.width - width))
        pixels = self._pixels(image.crop((left, top, left + width, top + height)))
        padding = [
            (missing // 2, missing - missing // 2)
            for missing in (crop[0] - height, crop[1] - width)
        ]
        return np.pad(pixels, ((0, 0), *padding))

    def _pixels(self, image: Image.Image) -> np.ndarray:
        values = np.asarray(image.convert("RGB"), dtype=np.float32)
        mean, std = (np.array(self.image[name], dtype=np.float32) for name in ("mean", "std"))
        return np.ascontiguousarray(
            ((values * np.float32(self.image["scale"]) - mean) / std).transpose(2, 0, 1)
        )
