"""Analysis entries of golden files: counts of contributing samples and tangent norms, dispatched by
``objective``.

Definitions are replayed by the closed forms, which keep the published order of operations. Printed
values of the released code are replayed by its own rules, errors included. A new kind of count is
one row of COUNTS.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from visavis.losses.pair_gradients import tangent_norms_of_slopes
from visavis.losses.targets import Targets
from visavis.objectives import VLC, NTXent, Objective, Triplet, TripletHN, Unified
from visavis.papers.diagnostics.contributing_samples import (
    ContributingSamples,
    contributing_by_epsilon,
    count_contributing,
    released_smooth_ap_counts,
    smooth_ap_counts,
)

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # for the closed forms of the tests
from tests.diagnostics.closed_forms import closed_weights

Outputs = dict[str, Any]
RELEASED = "_reference_code"


def by_definition(
    objective: Objective, scores: Tensor, epsilon: float = 0.01
) -> dict[str, ContributingSamples]:
    """Both directions of paired scores, by the printed weights."""
    pairs = Targets.paired(len(scores))
    return {
        direction: count_contributing(
            closed_weights(objective, direction_scores, pairs), pairs, epsilon=epsilon
        )
        for direction, direction_scores in (("i2t", scores), ("t2i", scores.T))
    }


def triplet(params: dict[str, Any], scores: Tensor, _name: str) -> Outputs:
    margin = params.get("margin", 0.2)
    hardest = by_definition(TripletHN(margin=margin), scores)
    outputs: Outputs = {}
    for direction, counts in by_definition(Triplet(margin=margin), scores).items():
        outputs |= {
            f"{direction}_Cq_per_query": counts.count,
            f"{direction}_Cq_mean_over_nonzero_queries": counts.per_moved,
        }
        outputs |= {f"{direction}_CB": counts.in_batch, f"{direction}_C0": counts.idle}
        outputs |= {
            f"{direction}_CB_SH": hardest[direction].in_batch,
            f"{direction}_C0_SH": hardest[direction].idle,
        }
    return outputs


def triplet_released(params: dict[str, Any], scores: Tensor, _name: str) -> Outputs:
    outputs: Outputs = {}
    for prefix, kind in (("sum", Triplet), ("max", TripletHN)):
        objective = kind(margin=params.get("margin", 0.2))
        (counts,) = contributing_by_epsilon(
            objective, scores, Targets.paired(len(scores)), [0.01], semantics="reference"
        )
        for direction, plural in (("i2t", "grads"), ("t2i", "grad")):  # as the code names them
            outputs |= {
                f"{prefix}_{direction}_grads_mean": counts[direction].per_moved,
                f"{prefix}_{direction}_{plural}_sum": counts[direction].in_batch,
            }
            outputs[f"{prefix}_zeros_{direction}"] = counts[direction].idle
    return outputs


def nt_xent(params: dict[str, Any], scores: Tensor, name: str) -> Outputs:
    objective = NTXent(tau=params.get("tau", 0.1))
    outputs: Outputs = {}
    for direction, counts in by_definition(objective, scores, params.get("eps", 0.01)).items():
        if name.endswith(RELEASED):
            outputs |= {
                f"1-s_{direction}.diag.mean": counts.pull.mean(),
                f"{direction}_n_high_grad": counts.per_query,
            }
            outputs |= {
                f"{direction}_high_grad": counts.push.mean(),
                f"{direction}_low_grad": counts.push_below_epsilon.mean(),
            }
        else:
            outputs |= {
                f"{direction}_C_per_query": counts.count,
                f"{direction}_C_mean": counts.per_query,
            }
            outputs |= {
                f"{direction}_Wneg_per_query": counts.push,
                f"{direction}_Wneg_mean": counts.push.mean(),
            }
            outputs |= {
                f"{direction}_Wpos_per_query": counts.pull,
                f"{direction}_Wpos_mean": counts.pull.mean(),
            }
    return outputs


def smooth_ap(params: dict[str, Any], scores: Tensor, name: str) -> Outputs:
    images, texts = scores.shape
    targets = Targets(
        query_ids=torch.arange(images),
        candidate_ids=torch.arange(images).repeat_interleave(texts // images),
    )
    rule = {"tau": params.get("tau", 0.01), "epsilon": params.get("eps", 0.01)}
    released = name.endswith(RELEASED)
    with_slope = name.endswith("_with_1_over_tau")
    counts = {"i2t": smooth_ap_counts(scores, targets, **rule, with_slope=with_slope)}
    if released:
        counts["t2i"] = released_smooth_ap_counts(scores.T, **rule)
    else:
        counts["t2i"] = smooth_ap_counts(scores.T, targets.T, **rule, with_slope=with_slope)
    outputs: Outputs = {}
    for direction, direction_counts in counts.items():
        moved = direction_counts[direction_counts > 0]
        idle = (direction_counts == 0).sum()
        if released:  # prints 0 where no query has a count
            outputs |= {
                f"sum_{direction}": moved.mean() if len(moved) else 0.0,
                f"zeros_{direction}": idle,
            }
        else:
            outputs |= {f"{direction}_C_per_query": direction_counts, f"{direction}_C0": idle}
            outputs |= {
                f"{direction}_C_mean_all": direction_counts.mean(),
                f"{direction}_C_mean_nonzero": moved.mean(),
            }
    return outputs


def tangents(params: dict[str, Any], image: Tensor, text: Tensor, name: str) -> Outputs:
    margin = params.get("margin", 0.2)
    gamma = params.get("gamma", 50.0)
    objectives = {
        "triplet_hn": TripletHN(margin=margin),
        "unified": Unified(margin=margin, gamma=gamma),
        "vlc": VLC(gamma=gamma),
    }
    objective = next(
        (objective for word, objective in objectives.items() if name.startswith(f"tangent_{word}")),
        None,
    )
    if objective is None:
        return {}
    slopes = (
        closed_weights(objective, image @ text.T, Targets.paired(len(image)))
        * objective.gradient_scale
    )
    norms = tangent_norms_of_slopes(slopes, image, text)
    return {"anchor": norms.anchor, "text": norms.candidate}


COUNTS: dict[str, Callable[[dict[str, Any], Tensor, str], Outputs]] = {
    "cocos_triplet": triplet,
    f"cocos_triplet{RELEASED}": triplet_released,
    "cocos_ntxent": nt_xent,
    "cocos_smoothap": smooth_ap,
}


def replay(entry: dict[str, Any], inputs: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Compute the outputs of an entry, or nothing for another kind. The longest prefix of its name
    decides.
    """
    name = entry["objective"]
    params = entry["params"]
    image, text = (torch.tensor(inputs[side]) for side in ("img", "txt"))
    if name.startswith("tangent_"):
        outputs = tangents(params, image, text, name)
    else:
        prefix = max(
            (prefix for prefix in COUNTS if name.startswith(prefix)), key=len, default=None
        )
        if prefix is None:
            return {}
        scores = torch.tensor(inputs["sim"]) if "sim" in inputs else image @ text.T
        outputs = COUNTS[prefix](params, scores, name)
    return {key: np.asarray(value) for key, value in outputs.items()}
