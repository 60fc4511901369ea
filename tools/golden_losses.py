"""Loss entries of golden files: values of objectives and their gradients, dispatched by objective,
variant and parameters.

A new objective is one row of OBJECTIVES.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from visavis.core import spec
from visavis.losses.targets import Targets
from visavis.objectives import (
    AOQ,
    NCR,
    RSP,
    SSP,
    VLC,
    Goal,
    InfoNCE,
    Ladder,
    MaxMargin,
    NTXent,
    Objective,
    SmoothAP,
    Triplet,
    TripletHN,
    Unified,
)
from visavis.training.supervision.noisy_correspondence import MarginGrowth, soft_margin

Entry = dict[str, Any]
# The inputs of an entry.
Inputs = dict[str, Tensor]
# Field and converting function of a parameter.
Renames = dict[str, tuple[str, Callable[[Any], Any]]]
# The input that holds an annotation, or a function that computes it from the inputs.
AnnotationSource = str | Callable[[Entry, Inputs], Tensor | None]


@dataclass(frozen=True)
class ObjectiveEntry:
    """How visavis computes the entries of one objective.

    Attributes:
        kind: The class of the objective.
        renamed: Parameters with another name in visavis, or with a converted value.
        facts: Annotations of the targets.
        fields: Fields that depend on the variant, or on several parameters.
        dropped: Parameters without a field.
        ids: The input that holds the ids. Without it, images and texts belong together in order.
    """

    kind: type[Objective]
    renamed: Renames = field(default_factory=dict)
    annotations: dict[str, AnnotationSource] = field(default_factory=dict)
    fields: Callable[[Entry], dict[str, Any]] = lambda _entry: {}
    dropped: tuple[str, ...] = ()
    ids: str = ""

    def objective(self, entry: Entry) -> Objective:
        arguments = self.fields(entry)
        for name, value in entry["params"].items():
            field_name, convert = self.renamed.get(name, (name, lambda unchanged: unchanged))
            if name not in self.dropped:
                arguments[field_name] = convert(value)
        return spec.build_object(self.kind, arguments)

    def targets(self, entry: Entry, inputs: Inputs) -> Targets:
        images, texts = (
            (inputs[self.ids].flatten(),) * 2
            if self.ids in inputs
            else ids(len(inputs["img"]), len(inputs["txt"]))
        )
        annotations = {
            name: inputs[source] if isinstance(source, str) else source(entry, inputs)
            for name, source in self.annotations.items()
        }
        return Targets(query_ids=images, candidate_ids=texts, **annotations)  # type: ignore[arg-type]


def inverse(value: float) -> float:
    return 1 / value


def denominator(words: str) -> str:
    return "negatives" if "negatives" in words else "all"


def words(entry: Entry) -> list[str]:
    return str(entry.get("variant", "")).split("_")


GROWTH: dict[str, MarginGrowth] = {
    "linear": "linear",
    "exponential": "exponential",
    "sin": "sine",
    "sine": "sine",
}


def info_nce_fields(entry: Entry) -> dict[str, Any]:
    return {"reduction": "mean"} if "mmt" in words(entry) else {}


def ncr_fields(entry: Entry) -> dict[str, Any]:
    params = entry["params"]
    warmup = str(params.get("mode", "")).startswith("warm") or not params.get("hard_negative", True)
    return {
        "warmup": warmup,
        "semantics": "paper" if {"paper", "anchor"} & {*words(entry)} else "reference",
    }


def cell_margin(entry: Entry, inputs: Inputs) -> Tensor | None:
    """The margin of each cell. A column of labels belongs to the row, in both directions."""
    if "labels" not in inputs:
        return None
    params = entry["params"]
    number = len(inputs["img"])
    margins = soft_margin(
        inputs["labels"],
        params.get("margin", 0.2),
        GROWTH[params.get("soft_margin", "exponential")],
    )
    return margins.expand(number, number)


def anchor_margin(entry: Entry, inputs: Inputs) -> Tensor | None:
    cells = cell_margin(entry, inputs)
    return None if cells is None else cells.diagonal()


def with_offline(*pairs: tuple[str, str]) -> Callable[[Entry, Inputs], Tensor]:
    """Scores of items with their offline partners, one column per pair of inputs."""
    return lambda _entry, inputs: torch.stack(
        [(inputs[image] * inputs[text]).sum(1) for image, text in pairs], 1
    )


def goal_fields(entry: Entry) -> dict[str, Any]:
    return (
        {"semantics": "reference"} if "code" in words(entry) or "reference" in words(entry) else {}
    )


def ladder_fields(entry: Entry) -> dict[str, Any]:
    names = words(entry)
    semantics = "reference" if "code" in names or "reference" in names else "paper"
    return {
        "semantics": semantics,
        "sampling": "sum" if "sum" in names else "hard",
        "cumulative": "cumulative" in names,
    }


TEMPERATURE: Renames = {"temp": ("tau", float), "logit_scale": ("tau", inverse)}
SCALE: Renames = {
    "logit_scale": ("gamma", float),
    "tau": ("gamma", inverse),
    "temp": ("gamma", inverse),
}
WEIGHTS: Renames = {
    "triplet_weight": ("triplet", str),
    "pair_weight": ("pair", str),
    "eps": ("epsilon", float),
}
MARGINS = {"query_margin": "margins", "candidate_margin": "margins"}

OBJECTIVES = {
    "triplet": ObjectiveEntry(Triplet),
    "triplet_hn": ObjectiveEntry(TripletHN),
    "triplet_hn_adaptive_margin": ObjectiveEntry(TripletHN, annotations=MARGINS),
    "nt_xent": ObjectiveEntry(NTXent, TEMPERATURE | {"denominator": ("denominator", denominator)}),
    "info_nce": ObjectiveEntry(InfoNCE, TEMPERATURE, fields=info_nce_fields, ids="idx"),
    "info_nce_multi_positive": ObjectiveEntry(InfoNCE, TEMPERATURE, ids="idx"),
    "vlc": ObjectiveEntry(VLC, SCALE),
    "unified": ObjectiveEntry(Unified, SCALE),
    "unified_adaptive_margin": ObjectiveEntry(Unified, SCALE, MARGINS),
    "max_margin": ObjectiveEntry(MaxMargin),
    "ssp": ObjectiveEntry(SSP, {"pos": ("positive", tuple), "neg": ("negative", tuple)}),
    "rsp": ObjectiveEntry(RSP, SCALE),
    "ncr": ObjectiveEntry(
        NCR,
        fields=ncr_fields,
        annotations={
            "query_margin": anchor_margin,
            "candidate_margin": anchor_margin,
            "pair_margin": cell_margin,
        },
        dropped=("mode", "hard_negative", "soft_margin"),
    ),
    "aoq": ObjectiveEntry(
        AOQ,
        {"margin_online": ("margin", float), "margin_offline": ("offline_margin", float)},
        {
            "query_offline_scores": with_offline(("img", "txt_off"), ("img_off", "txt_off")),
            "candidate_offline_scores": with_offline(("img_off", "txt"), ("img_off2", "txt_off2")),
        },
    ),
    "ladder": ObjectiveEntry(
        Ladder,
        {"alphas": ("margins", tuple), "thetas": ("thresholds", tuple)},
        {"relevance": lambda _entry, inputs: inputs.get("relevance")},
        ladder_fields,
    ),
    "unified_weighted": ObjectiveEntry(Unified, SCALE, {"weight": "weights"}),
    "goal": ObjectiveEntry(Goal, TEMPERATURE | WEIGHTS, fields=goal_fields),
    "smooth_ap": ObjectiveEntry(SmoothAP, TEMPERATURE, dropped=("captions_per_image",)),
}


def ids(num_images: int, num_texts: int) -> tuple[Tensor, Tensor]:
    """Images and their texts, the same number for each, in order."""
    return torch.arange(num_images), torch.arange(num_images).repeat_interleave(
        num_texts // num_images
    )


def replay(entry: Entry, arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The value of an objective and its gradients with respect to both embeddings. Empty for an
    unknown objective.
    """
    row = OBJECTIVES.get(entry["objective"])
    if row is None:
        return {}
    inputs = {name: torch.tensor(value) for name, value in arrays.items()}
    image, text = (inputs[side].requires_grad_() for side in ("img", "txt"))
    loss = row.objective(entry)(image @ text.T, row.targets(entry, inputs))
    gradients = torch.autograd.grad(loss, (image, text))
    return {"loss": loss.detach().numpy()} | {
        f"grad_{side}": gradient.numpy()
        for side, gradient in zip(("img", "txt"), gradients, strict=True)
    }
