"""Analysis entries of golden files: counts of contributing samples and tangent norms, dispatched by ``objective``.

Definitions are replayed by the closed forms, which keep the published order of operations. Printed values of the released code are
replayed by its own rules, errors included. A new kind of count is one row of COUNTS.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from visavis.diagnostics.contributing_samples import (
    ContributingSamples,
    contributing_by_direction,
    count_contributing,
    released_smooth_ap_counts,
    smooth_ap_counts,
)
from visavis.diagnostics.pair_gradients import tangent_norms_of_slopes
from visavis.objectives import VLC, NTXent, Objective, Triplet, TripletHN, Unified
from visavis.targets import Targets

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # for the closed forms of the tests
from tests.diagnostics.closed_forms import closed_weights

Answers = dict[str, Any]
RELEASED = "_reference_code"


def by_definition(objective: Objective, scores: Tensor, epsilon: float = 0.01) -> dict[str, ContributingSamples]:
    """Both directions of paired scores, by the printed weights."""
    pairs = Targets.paired(len(scores))
    return {
        way: count_contributing(closed_weights(objective, s, pairs), pairs, epsilon=epsilon)
        for way, s in (("i2t", scores), ("t2i", scores.T))
    }


def triplet(params: dict[str, Any], scores: Tensor, _name: str) -> Answers:
    margin = params.get("margin", 0.2)
    hardest = by_definition(TripletHN(margin=margin), scores)
    answers: Answers = {}
    for way, found in by_definition(Triplet(margin=margin), scores).items():
        answers |= {f"{way}_Cq_per_query": found.count, f"{way}_Cq_mean_over_nonzero_queries": found.per_moved}
        answers |= {f"{way}_CB": found.in_batch, f"{way}_C0": found.idle}
        answers |= {f"{way}_CB_SH": hardest[way].in_batch, f"{way}_C0_SH": hardest[way].idle}
    return answers


def triplet_released(params: dict[str, Any], scores: Tensor, _name: str) -> Answers:
    answers: Answers = {}
    for prefix, kind in (("sum", Triplet), ("max", TripletHN)):
        objective = kind(margin=params.get("margin", 0.2))
        found = contributing_by_direction(objective, scores, Targets.paired(len(scores)), semantics="reference")
        for way, plural in (("i2t", "grads"), ("t2i", "grad")):  # as the code names them
            answers |= {f"{prefix}_{way}_grads_mean": found[way].per_moved, f"{prefix}_{way}_{plural}_sum": found[way].in_batch}
            answers[f"{prefix}_zeros_{way}"] = found[way].idle
    return answers


def nt_xent(params: dict[str, Any], scores: Tensor, name: str) -> Answers:
    objective = NTXent(tau=params.get("tau", 0.1))
    answers: Answers = {}
    for way, found in by_definition(objective, scores, params.get("eps", 0.01)).items():
        if name.endswith(RELEASED):
            answers |= {f"1-s_{way}.diag.mean": found.pull.mean(), f"{way}_n_high_grad": found.per_query}
            answers |= {f"{way}_high_grad": found.push.mean(), f"{way}_low_grad": found.push_below_epsilon.mean()}
        else:
            answers |= {f"{way}_C_per_query": found.count, f"{way}_C_mean": found.per_query}
            answers |= {f"{way}_Wneg_per_query": found.push, f"{way}_Wneg_mean": found.push.mean()}
            answers |= {f"{way}_Wpos_per_query": found.pull, f"{way}_Wpos_mean": found.pull.mean()}
    return answers


def smooth_ap(params: dict[str, Any], scores: Tensor, name: str) -> Answers:
    images, texts = scores.shape
    targets = Targets(query_ids=torch.arange(images), candidate_ids=torch.arange(images).repeat_interleave(texts // images))
    rule = {"tau": params.get("tau", 0.01), "epsilon": params.get("eps", 0.01)}
    released, with_slope = name.endswith(RELEASED), name.endswith("_with_1_over_tau")
    counts = {"i2t": smooth_ap_counts(scores, targets, **rule, with_slope=with_slope)}
    if released:
        counts["t2i"] = released_smooth_ap_counts(scores.T, **rule)
    else:
        counts["t2i"] = smooth_ap_counts(scores.T, targets.T, **rule, with_slope=with_slope)
    answers: Answers = {}
    for way, of_way in counts.items():
        moved, idle = of_way[of_way > 0], (of_way == 0).sum()
        if released:  # prints 0 where no query has a count
            answers |= {f"sum_{way}": moved.mean() if len(moved) else 0.0, f"zeros_{way}": idle}
        else:
            answers |= {f"{way}_C_per_query": of_way, f"{way}_C0": idle}
            answers |= {f"{way}_C_mean_all": of_way.mean(), f"{way}_C_mean_nonzero": moved.mean()}
    return answers


def tangents(params: dict[str, Any], image: Tensor, text: Tensor, name: str) -> Answers:
    margin, gamma = params.get("margin", 0.2), params.get("gamma", 50.0)
    objectives = {"triplet_hn": TripletHN(margin=margin), "unified": Unified(margin=margin, gamma=gamma), "vlc": VLC(gamma=gamma)}
    objective = next((objective for word, objective in objectives.items() if name.startswith(f"tangent_{word}")), None)
    if objective is None:
        return {}
    slopes = closed_weights(objective, image @ text.T, Targets.paired(len(image))) * objective.gradient_scale
    found = tangent_norms_of_slopes(slopes, image, text)
    return {"anchor": found.anchor, "text": found.candidate}


COUNTS: dict[str, Callable[[dict[str, Any], Tensor, str], Answers]] = {
    "cocos_triplet": triplet,
    f"cocos_triplet{RELEASED}": triplet_released,
    "cocos_ntxent": nt_xent,
    "cocos_smoothap": smooth_ap,
}


def replay(entry: dict[str, Any], inputs: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Compute the outputs of an entry, or nothing for another kind. The longest prefix of its name decides."""
    name, params = entry["objective"], entry["params"]
    image, text = (torch.tensor(inputs[side]) for side in ("img", "txt"))
    if name.startswith("tangent_"):
        answers = tangents(params, image, text, name)
    else:
        prefix = max((prefix for prefix in COUNTS if name.startswith(prefix)), key=len, default=None)
        if prefix is None:
            return {}
        scores = torch.tensor(inputs["sim"]) if "sim" in inputs else image @ text.T
        answers = COUNTS[prefix](params, scores, name)
    return {key: np.asarray(value) for key, value in answers.items()}
