"""Reports: plots are PNGs of a bounded size, pages escape all values, and templates need no
network.
"""

from __future__ import annotations

import io
import re
from functools import partial
from html.parser import HTMLParser
from importlib.resources import files

import matplotlib as mpl
import numpy as np
import pytest
from jinja2 import UndefinedError
from PIL import Image
from tests.conftest import PROJECT

from visavis.core.table import Cell, Column, Table
from visavis.data.synthetic import sample_scene
from visavis.research.demo_run import (
    RetrievedScene,
    SceneSearchResult,
    plot_retrievals,
)
from visavis.research.experiments.screening import MAX_FINALISTS
from visavis.research.reports.html_report import (
    DARK_THEME,
    LIGHT_THEME,
    REPORTS_PACKAGE,
    ThemedImage,
    TrainingCurve,
    plot_training_curves,
    render_report,
    template_environment,
)

HOSTILE_TEXT = "<script>alert('x')</script> & \"quotes\""
VOID_TAGS = {"meta", "img", "source", "br"}


def retrievals(rows: int) -> list[SceneSearchResult]:
    rng = np.random.default_rng(0)
    scenes = [
        [
            RetrievedScene(sample_scene(rng, training=True), 0.5, rank < 2, rank == 0)
            for rank in range(5)
        ]
        for _ in range(rows)
    ]
    return [SceneSearchResult(f"{HOSTILE_TEXT} $x_1$ " * 4, tuple(row)) for row in scenes]


def curve(name: str, steps: tuple[int, ...]) -> TrainingCurve:
    value = {"loss": 1.0, "positive_mean": 0.5, "hardest_i2t_mean": 0.2, "hardest_t2i_mean": 0.1}
    return TrainingCurve(
        name,
        [{"step": step, "rsum": 10.0 * step, "val": value, "similarity": value} for step in steps],
    )


def opened(content: bytes) -> Image.Image:
    image = Image.open(io.BytesIO(content))
    assert image.format == "PNG"
    return image


@pytest.mark.parametrize("theme", [LIGHT_THEME, DARK_THEME])
@pytest.mark.slow
def test_plot_retrievals_is_a_small_png(theme):
    content = plot_retrievals(retrievals(2), theme)
    width, height = opened(content).size
    assert width == 1290
    assert 600 < height < 900
    assert len(content) < 400_000


def test_plot_training_curves_takes_runs_of_different_lengths():
    content = plot_training_curves(
        [curve("Unified", (0, 5, 10)), curve("Unified", (0, 5)), curve("VLC", (0, 5, 10))]
    )
    assert opened(content).size == (1290, 465)
    assert len(content) < 200_000


@pytest.mark.parametrize("theme", [LIGHT_THEME, DARK_THEME])
def test_each_finalist_has_a_readable_color_of_its_own(theme):
    assert len(set(theme.lines)) >= MAX_FINALISTS
    assert all(contrast(color, theme.background) >= 3 for color in theme.lines)


def contrast(color, background):
    """Contrast ratio of WCAG 2."""
    lighter, darker = sorted(map(luminance, (color, background)), reverse=True)
    return (lighter + 0.05) / (darker + 0.05)


def luminance(color):
    channels = [int(color[start : start + 2], 16) / 255 for start in (1, 3, 5)]
    linear = [
        value / 12.92 if value <= 0.04045 else ((value + 0.055) / 1.055) ** 2.4
        for value in channels
    ]
    return sum(
        weight * value for weight, value in zip((0.2126, 0.7152, 0.0722), linear, strict=True)
    )


class TagChecker(HTMLParser):
    """Collects all tags, and those that are open."""

    def __init__(self):
        super().__init__()
        self.open_tags, self.tags = [], []

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        if tag not in VOID_TAGS:
            self.open_tags.append(tag)

    def handle_endtag(self, tag):
        assert self.open_tags.pop() == tag


TABLE = Table(
    (
        Column(HOSTILE_TEXT, is_text=True),
        Column(HOSTILE_TEXT, group=HOSTILE_TEXT),
        Column(HOSTILE_TEXT, unit=HOSTILE_TEXT, missing=HOSTILE_TEXT),
    ),
    (
        (HOSTILE_TEXT,),
        (Cell(HOSTILE_TEXT, note=HOSTILE_TEXT), Cell(1.2, mark="best"), Cell(1.2, (1.0, 1.4))),
    ),
    (HOSTILE_TEXT,),
    HOSTILE_TEXT,
    last_rows=((HOSTILE_TEXT, 0.5, None),),
)


def test_macros_escape_all_text_and_close_all_tags():
    page = """{% import "macros.html.j2" as ui %}<main>{{ ui.facts([(text, text)]) }}{{ ui.commands([(text, text)]) }}
    {% call ui.figure(image, text) %}{{ text }}{% endcall %}{{ ui.table(table) }}</main>"""
    values = {"text": HOSTILE_TEXT, "image": ThemedImage(b"light", b"dark"), "table": TABLE}
    text = template_environment(REPORTS_PACKAGE).from_string(page).render(**values)
    checker = TagChecker()
    checker.feed(text)
    assert checker.open_tags == []
    assert "script" not in checker.tags
    assert HOSTILE_TEXT not in text
    assert text.count("&lt;script&gt;") == 18
    assert "<strong>1.2</strong></td>" in text
    assert "1.2&lt;script&gt;" in text
    assert "<small>1.0–1.4</small>" in text


def test_render_report_rejects_undefined_variables():
    with pytest.raises(UndefinedError):
        render_report("profiles", package="visavis.papers", names=["VLC"])


def test_templates_need_no_network():
    templates = [
        path
        for package in (REPORTS_PACKAGE, "visavis.papers")
        for path in files(package).joinpath("templates").iterdir()
    ]
    assert {path.name for path in templates} == {
        "base.html.j2",
        "board.html.j2",
        "coherence.html.j2",
        "comparison.html.j2",
        "demo.html.j2",
        "diagnosis.html.j2",
        "macros.html.j2",
        "profiles.html.j2",
        "report.css",
    }
    for path in templates:
        assert not re.search(r"https?:|<script|<link|@import|url\(", path.read_text()), path.name


def test_plots_do_not_use_settings_of_the_user():
    """Without LaTeX, text.usetex of a matplotlibrc would be an error."""
    plot = partial(plot_training_curves, [curve("Unified", (1, 2))])
    own = plot()
    with mpl.rc_context({"text.usetex": True, "lines.linewidth": 9, "font.size": 30}):
        assert plot() == own
        assert mpl.rcParams["text.usetex"]


def test_every_plot_has_the_own_style():
    for file in (PROJECT / "src").rglob("*.py"):
        for function in re.split(r"(?m)^(?=@|def |class )", file.read_text())[1:]:
            if "= new_figure(" in function:
                name = re.match(r"def (\w+)", function)[1]
                assert f"@with_own_style\ndef {name}(" in file.read_text(), name
