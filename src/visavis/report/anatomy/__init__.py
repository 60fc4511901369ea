"""The anatomy of objectives' gradients as a page, with a picture of each."""

from __future__ import annotations

from visavis import storage
from visavis.diagnosis.anatomy import Anatomy
from visavis.report.anatomy.figures import portrait_picture
from visavis.report.anatomy.page import page_of
from visavis.report.figures import DARK, LIGHT
from visavis.report.page import Shades


def write_report(anatomy: Anatomy) -> None:
    """Leave ``report.html``, ``anatomy.json`` and a picture of each objective, ``1-Unified.png``, in its folder. Raises MissingExtra."""
    pictures = [Shades(*(portrait_picture(portrait, theme) for theme in (LIGHT, DARK))) for portrait in anatomy.portraits]
    for number, (portrait, shades) in enumerate(zip(anatomy.portraits, pictures, strict=True), 1):
        storage.write_bytes(anatomy.folder / f"{number}-{type(portrait.objective).__name__}.png", shades.light)
    storage.write_json(anatomy.folder / "anatomy.json", anatomy.to_json())
    storage.write_text(anatomy.folder / "report.html", page_of(anatomy, pictures))
