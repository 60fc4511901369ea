"""Small copies of all pictures of a data set: what near-duplicates are found by."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from PIL import Image as Pillow
from torch import Tensor
from torch.nn.functional import interpolate

from visavis.auditing.remembered import place, remembered_tensors
from visavis.data.dataset import Dataset, Image
from visavis.data.looks import look
from visavis.progress import Progress

if TYPE_CHECKING:
    from PIL.Image import Image as Picture

SIDE, COARSE = 48, 8
READERS, AT_ONCE = 4, 64


@dataclass(frozen=True)
class Pictures:
    """small ``[N, 3, 48, 48]``, 0 to 255: what pictures are compared by. bits ``[N, 256]``: their perceptual hashes, as -1 and 1."""

    small: Tensor
    bits: Tensor

    @classmethod
    def of(cls, pictures: Sequence[Picture]) -> Pictures:
        rows = [_row(picture) for picture in pictures]
        return cls(*(torch.stack(part) for part in zip(*rows, strict=True)))

    def __len__(self) -> int:
        return len(self.small)

    @property
    def coarse(self) -> Tensor:
        """Unit vectors ``[N, 192]`` of 8 x 8 colors, nearly the same for a copy that was cropped a little: where to look for copies."""
        points = interpolate(self.small.float(), size=(COARSE, COARSE), mode="area").flatten(1)
        centered = points - points.mean(1, keepdim=True)
        return centered / centered.norm(dim=1, keepdim=True).clamp(min=1e-6)


def small_pictures(data: Dataset, progress: Progress) -> Pictures:
    """All pictures of a data set, of clips their first frames; read once, then kept in the cache."""

    def read() -> dict[str, Tensor]:
        rows = list[tuple[Tensor, Tensor]]()
        for row in _read_ahead(data.images, lambda image: _row(image.preview())):
            rows.append(row)
            progress.work("looking at images", len(rows), len(data.images), 0.0)
        small, bits = (torch.stack(part) for part in zip(*rows, strict=True))
        return {"small": small, "bits": bits}

    sizes = [image.bytes.num_bytes for image in data.images if image.bytes is not None]
    kept = remembered_tensors(place("pictures", data.name, [image.name for image in data.images], sizes, SIDE), read)
    return Pictures(kept["small"], kept["bits"])


def own_copies(picture: Picture, random: np.random.Generator) -> list[Picture]:
    """Copies as people make them: recompressed, halved, cropped by up to 8 % of each side, and all of these."""
    cropped = _cropped(picture, random)
    return [_recompressed(picture), _halved(picture), cropped, _recompressed(_halved(_cropped(picture, random)))]


def _cropped(picture: Picture, random: np.random.Generator) -> Picture:
    left, right, top, bottom = random.uniform(0, 0.08, 4)
    width, height = picture.size
    return picture.crop((round(left * width), round(top * height), round((1 - right) * width), round((1 - bottom) * height)))


def _halved(picture: Picture) -> Picture:
    return picture.resize((max(picture.width // 2, 1), max(picture.height // 2, 1)), Pillow.Resampling.BICUBIC)


def _recompressed(picture: Picture) -> Picture:
    kept = io.BytesIO()
    picture.save(kept, "JPEG", quality=60)
    return Pillow.open(kept).convert("RGB")


def _row(picture: Picture) -> tuple[Tensor, Tensor]:
    small = np.asarray(picture.resize((SIDE, SIDE), Pillow.Resampling.BICUBIC, reducing_gap=3.0))
    bits = np.unpackbits(np.frombuffer(bytes.fromhex(look(picture)), np.uint8)).astype(np.int8) * 2 - 1
    return torch.from_numpy(small.copy()).permute(2, 0, 1).contiguous(), torch.from_numpy(bits)


def _read_ahead(images: Sequence[Image], read: Callable[[Image], tuple[Tensor, Tensor]]) -> Iterator[tuple[Tensor, Tensor]]:
    """In order, some of them read at the same time."""
    with ThreadPoolExecutor(READERS) as pool:
        for start in range(0, len(images), AT_ONCE):
            yield from pool.map(read, images[start : start + AT_ONCE])
