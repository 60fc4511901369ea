"""docs/objectives.md and its pictures: every objective with its formula, its gradient, and when to use it.

A picture shows one query with one positive, scored s_p (to the right), and one negative, scored s_n (upwards). An arrow says
where a step down the gradient moves the two; its color, how far, beside the largest step of that picture.
"""

from __future__ import annotations

import io
from pathlib import Path

import torch
from torch import Tensor

from visavis import storage
from visavis.diagnosis import pair_weights
from visavis.objectives import CATALOG, NCR, Objective
from visavis.targets import Targets
from visavis.verbs.listing import paragraph, sentence

DOCS = Path(__file__).resolve().parents[1] / "docs"
PICTURES = DOCS / "images" / "objectives"
LOWEST, HIGHEST, STEPS = -0.25, 1.0, 11  # a step of 1/8: exact, so that nothing falls on a corner by rounding

INTRODUCTION = """# The objectives

What each makes small, whom it moves, and when to use it. Written by `make docs` from the docstrings; the whole of each is in the
[reference](reference/objectives.md), misprints of the papers are in the [errata](research/errata.md).

In the pictures one query has one positive, scored s_p (to the right), and one negative, scored s_n (upwards): good places are at
the lower right. An arrow says where a step down the gradient moves the two; the darker, the farther, beside the largest step of
the same picture. Where there is no arrow, nothing moves. Defaults throughout; what an objective reads beside ids is neutral.
`visavis diagnose RUN --objective NAME` counts whom it moves on your own data."""


def pictures() -> dict[Path, Objective]:
    """Where the picture of each objective lies."""
    return {PICTURES / f"{kind.__name__}.svg": kind() for kind in CATALOG}


def draw() -> None:
    """Write a picture of every objective."""
    for path, objective in pictures().items():
        storage.write_bytes(path, picture(objective))


def page() -> str:
    """The page as Markdown."""
    return "\n\n".join([INTRODUCTION, *map(section, CATALOG)]) + "\n"


def section(kind: type[Objective]) -> str:
    name = kind.__name__
    formula, advice, source = (paragraph(kind, f"{label}:").replace("``", "`") for label in ("Formula", "Advice", "Source"))
    picture = f'<img src="images/objectives/{name}.svg" width="300" alt="Where {name} moves a positive and a negative">'
    facts = f"- **Formula:** {formula}\n- **When:** {advice}\n- **Source:** {source}\n- **Defaults:** `{kind()!r}`"
    return f"## {name}\n\n{sentence(kind).replace('``', '`')}\n\n{picture}\n\n{facts}"


def field(objective: Objective, axis: Tensor) -> tuple[Tensor, Tensor]:
    """Where a step down the gradient moves s_p and s_n: ``[s_n, s_p]`` each."""
    pulls, pushes = [], []
    for negative in axis:
        for positive in axis:
            weights = pair_weights(objective, torch.stack([positive, negative])[None], one_of_each(objective))
            pulls.append(-weights[0, 0])
            pushes.append(-weights[0, 1])
    return torch.stack(pulls).view(len(axis), -1), torch.stack(pushes).view(len(axis), -1)


def one_of_each(objective: Objective) -> Targets:
    """One query, its positive, one negative that is not related at all and no harder outside of the batch."""
    margins = {"query_margin": torch.full((1,), 0.2), "candidate_margin": torch.full((2,), 0.2)} if isinstance(objective, NCR) else {}
    return Targets(
        query_ids=[0],
        candidate_ids=[0, 1],
        relevance=torch.tensor([[1.0, 0.0]]),
        query_offline_scores=torch.full((1, 1), -1.0),
        candidate_offline_scores=torch.full((2, 1), -1.0),
        **margins,
    )


def picture(objective: Objective) -> bytes:
    """The arrows as SVG, the same bytes each time."""
    import matplotlib as mpl
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    axis = torch.linspace(LOWEST, HIGHEST, STEPS, dtype=torch.float64)
    right, up = field(objective, axis)
    length = torch.hypot(right, up)
    moved = length > 0.01 * length.max()
    unit_right, unit_up = (torch.where(moved, part / length.clamp(min=1e-12), 0.0) for part in (right, up))
    with mpl.rc_context({"svg.hashsalt": "visavis", "svg.fonttype": "none", "font.size": 9}):
        figure = Figure(figsize=(3.2, 3.0), layout="constrained")
        FigureCanvasSVG(figure)
        axes = figure.add_subplot()
        x, y = torch.meshgrid(axis, axis, indexing="xy")
        shade = (length / length.max().clamp(min=1e-12))[moved]
        arrows = {"pivot": "mid", "scale": 17, "width": 0.007, "cmap": "viridis_r", "clim": (0, 1)}
        axes.quiver(x[moved], y[moved], unit_right[moved], unit_up[moved], shade, **arrows)
        axes.plot([LOWEST, HIGHEST], [LOWEST, HIGHEST], color="#99a1b0", linewidth=0.8, linestyle=":")
        axes.set(xlabel="s_p, score of the positive", ylabel="s_n, score of the negative", aspect="equal")
        axes.set(xlim=(LOWEST - 0.08, HIGHEST + 0.08), ylim=(LOWEST - 0.08, HIGHEST + 0.08))
        axes.spines[["top", "right"]].set_visible(False)
        content = io.BytesIO()
        figure.savefig(content, format="svg", metadata={"Date": None})
    return content.getvalue()
