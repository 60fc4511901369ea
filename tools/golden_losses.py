"""Loss entries of golden files: values of objectives and their gradients, dispatched by objective, variant and parameters.

A new objective is one row of OBJECTIVES.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from visavis import spec
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
from visavis.supervision.noisy_correspondence import MarginGrowth, soft_margin
from visavis.targets import Targets

Entry = dict[str, Any]
# The inputs of an entry.
Given = dict[str, Tensor]
# From a parameter to its field, and the function that converts the value.
Renamed = dict[str, tuple[str, Callable[[Any], Any]]]
# The input that holds an annotation, or a function that computes it from the inputs.
Fact = str | Callable[[Entry, Given], Tensor | None]


@dataclass(frozen=True)
class Row:
    """How entries of one objective become a call.

    Attributes:
        kind: The class of the objective.
        renamed: Parameters with another name in visavis, or with a converted value.
        facts: Annotations of the targets.
        fields: Fields that depend on the variant, or on several parameters.
        dropped: Parameters without a field.
        ids: The input that holds the ids. Without it, images and texts belong together in order.
    """

    kind: type[Objective]
    renamed: Renamed = field(default_factory=dict)
    facts: dict[str, Fact] = field(default_factory=dict)
    fields: Callable[[Entry], dict[str, Any]] = lambda _entry: {}
    dropped: tuple[str, ...] = ()
    ids: str = ""

    def objective(self, entry: Entry) -> Objective:
        found = self.fields(entry)
        for name, value in entry["params"].items():
            known, change = self.renamed.get(name, (name, lambda same: same))
            if name not in self.dropped:
                found[known] = change(value)
        return spec.build_object(self.kind, found)

    def targets(self, entry: Entry, given: Given) -> Targets:
        images, texts = (given[self.ids].flatten(),) * 2 if self.ids in given else ids(len(given["img"]), len(given["txt"]))
        facts = {name: given[fact] if isinstance(fact, str) else fact(entry, given) for name, fact in self.facts.items()}
        return Targets(query_ids=images, candidate_ids=texts, **facts)  # type: ignore[arg-type]


def inverse(value: float) -> float:
    return 1 / value


def denominator(words: str) -> str:
    return "negatives" if "negatives" in words else "all"


def words(entry: Entry) -> list[str]:
    return str(entry.get("variant", "")).split("_")


GROWTH: dict[str, MarginGrowth] = {"linear": "linear", "exponential": "exponential", "sin": "sine", "sine": "sine"}


def of_info_nce(entry: Entry) -> dict[str, Any]:
    return {"reduction": "mean"} if "mmt" in words(entry) else {}


def of_ncr(entry: Entry) -> dict[str, Any]:
    params = entry["params"]
    warmup = str(params.get("mode", "")).startswith("warm") or not params.get("hard_negative", True)
    return {"warmup": warmup, "semantics": "paper" if {"paper", "anchor"} & {*words(entry)} else "reference"}


def cell_margin(entry: Entry, given: Given) -> Tensor | None:
    """The margin of each cell. A column of labels belongs to the row, in both directions."""
    if "labels" not in given:
        return None
    params, number = entry["params"], len(given["img"])
    margins = soft_margin(given["labels"], params.get("margin", 0.2), GROWTH[params.get("soft_margin", "exponential")])
    return margins.expand(number, number)


def anchor_margin(entry: Entry, given: Given) -> Tensor | None:
    cells = cell_margin(entry, given)
    return None if cells is None else cells.diagonal()


def with_offline(*pairs: tuple[str, str]) -> Callable[[Entry, Given], Tensor]:
    """Scores of items with their offline partners, one column per pair of inputs."""
    return lambda _entry, given: torch.stack([(given[image] * given[text]).sum(1) for image, text in pairs], 1)


def of_goal(entry: Entry) -> dict[str, Any]:
    return {"semantics": "reference"} if "code" in words(entry) or "reference" in words(entry) else {}


def of_ladder(entry: Entry) -> dict[str, Any]:
    names = words(entry)
    semantics = "reference" if "code" in names or "reference" in names else "paper"
    return {"semantics": semantics, "sampling": "sum" if "sum" in names else "hard", "cumulative": "cumulative" in names}


TEMPERATURE: Renamed = {"temp": ("tau", float), "logit_scale": ("tau", inverse)}
SCALE: Renamed = {"logit_scale": ("gamma", float), "tau": ("gamma", inverse), "temp": ("gamma", inverse)}
WEIGHTS: Renamed = {"triplet_weight": ("triplet", str), "pair_weight": ("pair", str), "eps": ("epsilon", float)}
MARGINS = {"query_margin": "margins", "candidate_margin": "margins"}

OBJECTIVES = {
    "triplet": Row(Triplet),
    "triplet_hn": Row(TripletHN),
    "triplet_hn_adaptive_margin": Row(TripletHN, facts=MARGINS),
    "nt_xent": Row(NTXent, TEMPERATURE | {"denominator": ("denominator", denominator)}),
    "info_nce": Row(InfoNCE, TEMPERATURE, fields=of_info_nce, ids="idx"),
    "info_nce_multi_positive": Row(InfoNCE, TEMPERATURE, ids="idx"),
    "vlc": Row(VLC, SCALE),
    "unified": Row(Unified, SCALE),
    "unified_adaptive_margin": Row(Unified, SCALE, MARGINS),
    "max_margin": Row(MaxMargin),
    "ssp": Row(SSP, {"pos": ("positive", tuple), "neg": ("negative", tuple)}),
    "rsp": Row(RSP, SCALE),
    "ncr": Row(
        NCR,
        fields=of_ncr,
        facts={"query_margin": anchor_margin, "candidate_margin": anchor_margin, "pair_margin": cell_margin},
        dropped=("mode", "hard_negative", "soft_margin"),
    ),
    "aoq": Row(
        AOQ,
        {"margin_online": ("margin", float), "margin_offline": ("offline_margin", float)},
        {
            "query_offline_scores": with_offline(("img", "txt_off"), ("img_off", "txt_off")),
            "candidate_offline_scores": with_offline(("img_off", "txt"), ("img_off2", "txt_off2")),
        },
    ),
    "ladder": Row(
        Ladder,
        {"alphas": ("margins", tuple), "thetas": ("thresholds", tuple)},
        {"relevance": lambda _entry, given: given.get("relevance")},
        of_ladder,
    ),
    "unified_weighted": Row(Unified, SCALE, {"weight": "weights"}),
    "goal": Row(Goal, TEMPERATURE | WEIGHTS, fields=of_goal),
    "smooth_ap": Row(SmoothAP, TEMPERATURE, dropped=("captions_per_image",)),
}


def ids(num_images: int, num_texts: int) -> tuple[Tensor, Tensor]:
    """Images and their texts, the same number for each, in order."""
    return torch.arange(num_images), torch.arange(num_images).repeat_interleave(num_texts // num_images)


def replay(entry: Entry, inputs: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The value of an objective and its gradients with respect to both embeddings. Empty for an unknown objective."""
    row = OBJECTIVES.get(entry["objective"])
    if row is None:
        return {}
    given = {name: torch.tensor(value) for name, value in inputs.items()}
    image, text = (given[side].requires_grad_() for side in ("img", "txt"))
    loss = row.objective(entry)(image @ text.T, row.targets(entry, given))
    gradients = torch.autograd.grad(loss, (image, text))
    return {"loss": loss.detach().numpy()} | {
        f"grad_{side}": gradient.numpy() for side, gradient in zip(("img", "txt"), gradients, strict=True)
    }
