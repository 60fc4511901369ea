"""The page of objectives' anatomy, objective by objective."""

from __future__ import annotations

import shlex
from collections.abc import Sequence

from visavis.diagnosis.anatomy import Anatomy, Portrait
from visavis.diagnosis.circle import ANGLES, NAMES, STEP
from visavis.environment import program, versions
from visavis.report import page
from visavis.report.page import Section, Shades


def page_of(anatomy: Anatomy, pictures: Sequence[Shades]) -> str:
    """The whole page. pictures: of each objective."""
    sections = [
        Section(portrait.name, page.picture(shades, _alt(portrait), _CAPTION) + _turned(portrait))
        for portrait, shades in zip(anatomy.portraits, pictures, strict=True)
    ]
    specs = " ".join(shlex.quote(portrait.name) for portrait in anatomy.portraits)
    sections += [
        Section("How to read it", page.glossary(_GLOSSARY)),
        Section("To repeat it", page.commands([("Needs no data and no model", f"{program()} anatomy {specs}")])),
    ]
    names = ", ".join(dict.fromkeys(type(portrait.objective).__name__ for portrait in anatomy.portraits))
    made_by = ", ".join(f"{name} {version}" for name, version in versions().items())
    return page.page(
        f"visavis: the anatomy of {names}", _LEAD, sections, f"Computed by differentiation, from the objectives alone. {made_by}.", STYLE
    )


def _turned(portrait: Portrait) -> str:
    """What a step turns, vector by vector."""
    circle, query = portrait.circle, portrait.circle.turned[0].item()
    vectors = zip(NAMES, *(values.tolist() for values in (circle.angle, circle.norm, circle.turned)), strict=True)
    rows = [
        [name, f"{angle:.1f}°", f"{norm:.3f}", f"{after - angle:+.1f}°", f"{after - query:.1f}°"] for name, angle, norm, after in vectors
    ]
    heads = ("vector", "from the query", "tangent norm", "turned by", "from the query, after")
    return page.table(heads, rows, f"Before and after a step of length {STEP:g} along the gradient, as drawn on the circle.")


def _alt(portrait: Portrait) -> str:
    norms = ", ".join(f"{name} {norm:.2f}" for name, norm in zip(NAMES, portrait.circle.norm.tolist(), strict=True))
    return f"Triplet diagram, weights of pairs and vectors on a circle of {portrait.name}; tangent norms: {norms}."


_LEAD = "What objectives pull, push and turn: the gradient of a query's term with respect to its scores and its vectors."
_CAPTION = (
    "Above: how long the gradient of a triplet is (color) and where it moves both similarities (arrows); the weight of the negative and of the "
    "positive against their own similarity. Below: one step on a circle, and tangent norms as the hardest negative nears the query."
)
_GLOSSARY = (
    (
        "weight",
        "dL/ds of a pair, divided by the objective's slope (1 / tau, gamma), so that 1 is the most that one positive pair can give.",
    ),
    (
        "triplets",
        (
            "One query, one positive, one negative, by their similarities; below the diagonal the positive is the nearer one. Right: the positive is "
            "pulled; down: the negative is pushed. GOAL, figure 2. An objective that looks at the rest of the batch (GOAL with lin_ms or sig_ms) "
            "finds everything there as similar as these two."
        ),
    ),
    ("weight of the negative, of the positive", "One similarity varies, the other is held at 0.2, 0.5 or 0.8. GOAL, figure 3."),
    (
        "what a step turns",
        (
            f"A positive at {-ANGLES[1]:g}° on one side of the query, four negatives at {', '.join(f'{angle:g}' for angle in ANGLES[2:])}° on the "
            "other, as early in a training: the hardest negative is nearer than the positive. Unified loss, figure 2, here computed."
        ),
    ),
    (
        "tangent norm",
        (
            "The length of the part of the gradient that turns a unit vector; what lies along the vector is taken back when it is normalized. Unified "
            "loss, section 3.3, with its eqs. 15 and 17 as they must read."
        ),
    ),
    (
        "facts beside the scores",
        "Relevance is 1 for the positive and 0 for negatives; offline negatives score as the hardest negative does.",
    ),
)
STYLE = """
section h2 { overflow-wrap: anywhere; }
"""
