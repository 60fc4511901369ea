"""Lists of several runs beside each other: is what is more relevant higher, and how much is not relevant at all?"""

from __future__ import annotations

from visavis import storage
from visavis.comparison.coherence import RankedLists
from visavis.report.coherence.figures import lists_picture, scores_picture
from visavis.report.coherence.page import page_of
from visavis.report.figures import DARK, LIGHT
from visavis.report.page import Shades
from visavis.report.thumbnails import Thumbnails


def write_report(comparison: RankedLists) -> None:
    """Leave ``report.html``, ``coherence.json``, ``scores.png`` and, where captions look for images, ``lists.png`` in its folder."""
    folder, thumbnails = comparison.folder, Thumbnails(comparison.data)
    names = [ranker.name for ranker in comparison.rankers]
    scores = Shades(*(scores_picture(names, comparison.measured, theme) for theme in (LIGHT, DARK)))
    storage.write_json(folder / "coherence.json", comparison.to_json())
    storage.write_bytes(folder / "scores.png", scores.light)
    if by_caption := [query for query in comparison.queries if query.way == "t2i"]:
        storage.write_bytes(folder / "lists.png", lists_picture(by_caption, comparison.data, thumbnails))
    storage.write_text(folder / "report.html", page_of(comparison, scores, thumbnails))
