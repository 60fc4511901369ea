"""Retrieved images of a few validation captions, as one image for each caption."""

from __future__ import annotations

import textwrap

import torch
from PIL import Image, ImageDraw, ImageFont, ImageOps

from visavis.data.dataset import Dataset
from visavis.memory_budget import MemoryLimit
from visavis.models import Matcher
from visavis.models.base import evaluation_mode
from visavis.models.inference import device_score
from visavis.scoring import score_matrix, select_items
from visavis.types import Encoded

NUM_CAPTIONS, NUM_IMAGES = 3, 4
IMAGE_SIDE, TEXT_HEIGHT, BORDER = 160, 40, 4  # pixels
RELEVANT, OTHER = "#2a9d4a", "white"  # border


def retrieved_images(
    matcher: Matcher, visual: Encoded, text: Encoded, data: Dataset, memory: MemoryLimit = None
) -> dict[str, tuple[str, Image.Image]]:
    """Draw the best-scored images of three captions, the best one first. The border of a relevant image is green.

    Args:
        matcher: Model. Of a model that ranks in two stages, the first stage is shown.
        visual: Encoded images of the data.
        text: Encoded captions of the data.
        data: Validation split.
        memory: Memory of a block of scores.

    Returns:
        Caption and drawn image by name. Empty if the data have no image files.
    """
    if any(image.location is None or image.is_video for image in data.images):
        return {}
    captions = torch.linspace(0, len(data.captions) - 1, NUM_CAPTIONS).long().unique()
    with evaluation_mode(matcher):
        scores = score_matrix(device_score(matcher), visual, select_items(text, captions), memory)
    top = scores.float().topk(min(NUM_IMAGES, len(data.images)), dim=0).indices.T
    return {
        f"retrieved/caption_{number}": (data.captions[caption], _draw(data, caption, images))
        for number, (caption, images) in enumerate(zip(captions.tolist(), top.tolist(), strict=True), 1)
    }


def _draw(data: Dataset, caption: int, images: list[int]) -> Image.Image:
    canvas = Image.new("RGB", (NUM_IMAGES * IMAGE_SIDE, TEXT_HEIGHT + IMAGE_SIDE), "white")
    lines = textwrap.wrap(data.captions[caption], 80, max_lines=2, placeholder=" ...")
    ImageDraw.Draw(canvas).multiline_text((BORDER, BORDER), "\n".join(lines), fill="black", font=ImageFont.load_default(14))
    side = IMAGE_SIDE - 2 * BORDER
    for position, number in enumerate(images):
        image = ImageOps.pad(data.images[number].open(), (side, side), color="white")
        border = RELEVANT if number == data.image_of[caption] else OTHER
        canvas.paste(ImageOps.expand(image, BORDER, border), (position * IMAGE_SIDE, TEXT_HEIGHT))
    return canvas
