"""Images of the gradients of objectives, drawn when the documentation is built. Run by mkdocs, see
mkdocs.yml.

An image shows one query with one positive, scored s_p (x axis), and one negative, scored s_n (y
axis). An arrow shows how a step down the gradient moves the two scores. Its color is its length,
relative to the longest arrow of the image.
"""

from __future__ import annotations

import io

import mkdocs_gen_files
import torch
from torch import Tensor

from visavis.losses.targets import Targets
from visavis.objectives import CATALOG, NCR, Objective
from visavis.papers.diagnostics import pair_weights

# Steps of 1/8 are exact, so that no point falls on a kink of an objective by rounding.
LOWEST = -0.25
HIGHEST = 1.0
STEPS = 11


def image(objective: Objective) -> bytes:
    """Draw the arrows as SVG, with the same bytes each time."""
    import matplotlib as mpl
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    axis = torch.linspace(LOWEST, HIGHEST, STEPS, dtype=torch.float64)
    right, up = field(objective, axis)
    length = torch.hypot(right, up)
    moved = length > 0.01 * length.max()
    unit_right, unit_up = (
        torch.where(moved, part / length.clamp(min=1e-12), 0.0) for part in (right, up)
    )
    with mpl.rc_context({"svg.hashsalt": "visavis", "svg.fonttype": "none", "font.size": 9}):
        figure = Figure(figsize=(3.2, 3.0), layout="constrained")
        FigureCanvasSVG(figure)
        axes = figure.add_subplot()
        x, y = torch.meshgrid(axis, axis, indexing="xy")
        shade = (length / length.max().clamp(min=1e-12))[moved]
        arrows = {"pivot": "mid", "scale": 17, "width": 0.007, "cmap": "viridis_r", "clim": (0, 1)}
        axes.quiver(x[moved], y[moved], unit_right[moved], unit_up[moved], shade, **arrows)
        axes.plot(
            [LOWEST, HIGHEST], [LOWEST, HIGHEST], color="#99a1b0", linewidth=0.8, linestyle=":"
        )
        axes.set(
            xlabel="s_p, score of the positive", ylabel="s_n, score of the negative", aspect="equal"
        )
        axes.set(xlim=(LOWEST - 0.08, HIGHEST + 0.08), ylim=(LOWEST - 0.08, HIGHEST + 0.08))
        axes.spines[["top", "right"]].set_visible(False)
        content = io.BytesIO()
        figure.savefig(content, format="svg", metadata={"Date": None})
    return content.getvalue()


def field(objective: Objective, axis: Tensor) -> tuple[Tensor, Tensor]:
    """Changes of s_p and of s_n by a step down the gradient, shape ``[s_n, s_p]`` each."""
    pulls = []
    pushes = []
    for negative in axis:
        for positive in axis:
            weights = pair_weights(
                objective, torch.stack([positive, negative])[None], one_of_each(objective)
            )
            pulls.append(-weights[0, 0])
            pushes.append(-weights[0, 1])
    return torch.stack(pulls).view(len(axis), -1), torch.stack(pushes).view(len(axis), -1)


def one_of_each(objective: Objective) -> Targets:
    """Targets of one query, its positive, and one unrelated negative without a harder one outside
    the batch.
    """
    margins = (
        {"query_margin": torch.full((1,), 0.2), "candidate_margin": torch.full((2,), 0.2)}
        if isinstance(objective, NCR)
        else {}
    )
    return Targets(
        query_ids=[0],
        candidate_ids=[0, 1],
        relevance=torch.tensor([[1.0, 0.0]]),
        query_offline_scores=torch.full((1, 1), -1.0),
        candidate_offline_scores=torch.full((2, 1), -1.0),
        **margins,
    )


for kind in CATALOG:
    with mkdocs_gen_files.open(f"images/objectives/{kind.__name__}.svg", "wb") as file:
        file.write(image(kind()))
