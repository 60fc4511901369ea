"""HTML reports from Jinja2 templates: single files without network access, with light and dark
mode.
"""

from __future__ import annotations

import base64
import io
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from PIL import ImageOps

from visavis.core import storage
from visavis.core.environment import package_versions, shell_command
from visavis.data.dataset import Dataset
from visavis.research.reports.plotting import DARK_THEME, LIGHT_THEME, PlotTheme

if TYPE_CHECKING:
    from jinja2 import Environment
    from PIL.Image import Image


@dataclass(frozen=True)
class ThemedImage:
    """An image for light and for dark pages.

    Attributes:
        light: PNG for light pages.
        dark: PNG for dark pages.
    """

    light: bytes
    dark: bytes

    @classmethod
    def draw(cls, plot: Callable[[PlotTheme], bytes], file: Path | None = None) -> ThemedImage:
        """Draw a plot with both themes.

        Args:
            plot: Returns the PNG for a theme.
            file: File for the light image. Default: none.

        Returns:
            The image in both themes.
        """
        image = cls(plot(LIGHT_THEME), plot(DARK_THEME))
        if file is not None:
            storage.write_bytes(file, image.light)
        return image


@cache
def template_environment() -> Environment:
    """Return the environment of all templates. Values are escaped, and an undefined variable is an
    error.
    """
    from jinja2 import Environment, PackageLoader, StrictUndefined

    environment = Environment(
        loader=PackageLoader("visavis.research.reports"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.globals["visavis"] = shell_command
    environment.filters["data_uri"] = data_uri
    return environment


def render_report(template: str, **values: Any) -> str:
    """Render a report.

    Args:
        template: Name of the template, such as ``"demo"``.
        values: Variables of the template.

    Returns:
        The HTML page. Images and styles are inside.
    """
    versions = ", ".join(f"{name} {version}" for name, version in package_versions().items())
    return (
        template_environment()
        .get_template(f"{template}.html.j2")
        .render(versions=versions, **values)
    )


def data_uri(content: bytes, image_format: str = "png") -> str:
    """Return an image as a data URI.

    Args:
        content: Bytes of the image file.
        image_format: png or jpeg.
    """
    return f"data:image/{image_format};base64,{base64.b64encode(content).decode()}"


def jpeg_uri(image: Image, quality: int = 80) -> str:
    """Return an image as the data URI of a JPEG.

    Args:
        image: RGB image.
        quality: Quality of the encoder.
    """
    raw = io.BytesIO()
    image.save(raw, "jpeg", quality=quality, optimize=True)
    return data_uri(raw.getvalue(), "jpeg")


THUMBNAIL_SIDE = 128
"""Side length of thumbnails in pixels."""


class Thumbnails:
    """Square thumbnails of a data set, cropped at the center. Each image is read once.

    Args:
        data: Data set.
    """

    def __init__(self, data: Dataset):
        self.data = data
        self._thumbnails: dict[int, Image] = {}

    def image(self, index: int) -> Image | None:
        """Return the thumbnail of an image, or None if the data set has features instead of pixels.

        Args:
            index: Index of the image.
        """
        if self.data.images[index].location is None:
            return None
        if index not in self._thumbnails:
            self._thumbnails[index] = ImageOps.fit(
                self.data.images[index].preview(), (THUMBNAIL_SIDE, THUMBNAIL_SIDE)
            )
        return self._thumbnails[index]

    def uri(self, index: int) -> str | None:
        """Return the thumbnail as a data URI of a JPEG, or None if the data set has features
        instead of pixels.

        Args:
            index: Index of the image.
        """
        image = self.image(index)
        return None if image is None else jpeg_uri(image)
