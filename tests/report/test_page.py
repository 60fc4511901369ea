"""Pictures are PNGs of a sane size; a page shows what it is given as text, never as markup."""

from __future__ import annotations

import io
from html.parser import HTMLParser

import numpy as np
import pytest
from PIL import Image

from visavis.data.scenes import draw_scene
from visavis.demonstration.figures import retrieval_picture
from visavis.demonstration.retrievals import Retrieval, RetrievedScene
from visavis.report import page
from visavis.report.figures import DARK, LIGHT, Curve, curves_picture

NASTY = "<script>alert('x')</script> & \"quotes\""
VOID = {"meta", "img", "source", "br"}


def retrievals(rows: int) -> list[Retrieval]:
    rng = np.random.default_rng(0)
    scenes = [[RetrievedScene(draw_scene(rng, training=True), 0.5, place < 2, place == 0) for place in range(5)] for _ in range(rows)]
    return [Retrieval(f"{NASTY} $x_1$ " * 4, tuple(found)) for found in scenes]


def curve(name: str, steps: tuple[int, ...]) -> Curve:
    value = {"loss": 1.0, "positive_mean": 0.5, "hardest_i2t_mean": 0.2, "hardest_t2i_mean": 0.1}
    return Curve(name, [{"step": step, "rsum": 10.0 * step, "val": value} for step in steps])


def test_similarities_are_those_of_the_whole_split_where_all_logs_have_them():
    """Older logs have those of the probed batches alone, which are then drawn for all."""
    older = curve("VLC", (0, 5))
    newer = Curve("VLC", [row | {"similarity": {key: 2 * value for key, value in row["val"].items()}} for row in older.rows])
    probed, whole = (curves_picture([one]) for one in (older, newer))
    assert probed != whole
    assert curves_picture([newer, older]) == curves_picture([older, older])


def opened(content: bytes) -> Image.Image:
    image = Image.open(io.BytesIO(content))
    assert image.format == "PNG"
    return image


@pytest.mark.parametrize("theme", [LIGHT, DARK])
def test_the_retrieval_picture_is_a_small_png(theme):
    content = retrieval_picture(retrievals(2), theme)
    width, height = opened(content).size
    assert width == 1290
    assert 600 < height < 900
    assert len(content) < 400_000


def test_curves_of_runs_with_different_steps():
    content = curves_picture([curve("Unified", (0, 5, 10)), curve("Unified", (0, 5)), curve("VLC", (0, 5, 10))])
    assert opened(content).size == (1290, 465)
    assert len(content) < 200_000


class Balance(HTMLParser):
    """Notes tags that open without closing, and all tags met."""

    def __init__(self):
        super().__init__()
        self.open, self.met = [], []

    def handle_starttag(self, tag, attributes):
        self.met.append(tag)
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def test_all_text_is_escaped_and_all_tags_are_closed():
    shades = page.Shades(b"light", b"dark")
    parts = [
        page.paragraph(NASTY),
        page.numbers([(NASTY, NASTY)]),
        page.glossary([(NASTY, NASTY)]),
        page.commands([(NASTY, NASTY)]),
        page.picture(shades, NASTY, NASTY),
        page.strip(NASTY, NASTY, [(b"jpeg", NASTY, 0.5, True), (b"jpeg", NASTY, 0.4, False)]),
    ]
    text = page.page(NASTY, NASTY, [page.Section(NASTY, "\n".join(parts))], NASTY)
    parser = Balance()
    parser.feed(text)
    assert parser.open == []
    assert "script" not in parser.met
    assert NASTY not in text
    assert text.count(page.escape(NASTY)) == 20


def test_pictures_stand_in_the_page():
    assert page.data_uri(b"abc") == "data:image/png;base64,YWJj"
