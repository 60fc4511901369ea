"""Alerts: problems of a training that the rows of its log show, each as a message with its numbers
and a fix.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from visavis.core.encoded import DIRECTIONS

LogValues = dict[str, Any]

COLLAPSED_RANK = 1.5  # effective rank of a batch
COLLAPSE_TOLERANCE = 0.02  # relative to the loss of identical embeddings
MIN_GRADIENT_SHARE = 0.01  # of queries, in both directions
MAX_HUB_SHARE = 0.4  # of queries whose top item is one of the 1 % most retrieved items
MAX_TOP_ITEM_SHARE = 0.4  # of queries with the same top item
MAX_FALSE_NEGATIVE_SHARE = 0.25  # of the gradient that separates pairs
SCALE_BOUND_TOLERANCE = 0.01  # relative to the bound
MAX_DATA_WAIT_SHARE = 0.2  # of the training time since the validation before
MIN_DATA_WAIT_S = 5.0  # a shorter wait is not worth a change of the recipe
OVERFITTING_VALIDATIONS = 3  # consecutive validations that are all worse than the best one
OVERFITTING_DROP = 0.05  # relative to the best RSUM, in each of them

_SIDES = {"i2t": ("images", "text"), "t2i": ("texts", "image")}


def find_alerts(row: LogValues, log: Sequence[LogValues] = ()) -> dict[str, str]:
    """Find the problems that a row of the log shows, by the name of the alert."""
    # At step 0 the model is not trained yet.
    alerts = {name: check(row, log) for name, check in ALERTS.items()} if row["step"] else {}
    return {
        name: f"{name.capitalize()} at step {row['step']}: {problem}"
        for name, problem in alerts.items()
        if problem
    }


def new_alerts(alerts: dict[str, str], log: Iterable[LogValues]) -> list[str]:
    """Select the alerts that no earlier row of the log has."""
    earlier_alerts = {name for row in log for name in row["health"].get("alerts", ())}
    return [message for name, message in alerts.items() if name not in earlier_alerts]


def _is_collapsed(row: LogValues) -> bool:
    health = row["health"]
    bound = health["collapsed_loss"] - COLLAPSE_TOLERANCE * abs(health["collapsed_loss"])
    return min(
        health["image_effective_rank"], health["text_effective_rank"]
    ) < COLLAPSED_RANK and bool(health["loss"] >= bound)


def _collapse(row: LogValues, log: Sequence[LogValues]) -> str:
    health = row["health"]
    # Many trainings leave the collapse of their first validation.
    if not _is_collapsed(row) or not any(earlier["step"] for earlier in log):
        return ""
    return (
        f"the effective rank of a batch is {health['image_effective_rank']:.2f} for images and "
        f"{health['text_effective_rank']:.2f} for "
        f"texts, and its loss {health['loss']:.4g} is not below {health['collapsed_loss']:.4g}, "
        f"the value of {row['objective']} for "
        "identical embeddings. "
        "Lower the learning rate, add warmup, or start with an objective that uses more than the "
        "hardest negative."
    )


def _dead_gradients(row: LogValues, _: Sequence[LogValues]) -> str:
    shares = [row["train"][f"gradient_{direction}"] for direction in DIRECTIONS]
    if max(shares) >= MIN_GRADIENT_SHARE:
        return ""
    return (
        f"{shares[0]:.1%} of the images and {shares[1]:.1%} of the texts of training batches "
        f"receive a gradient from {row['objective']}. "
        "Use larger batches or a larger margin."
    )


def _dominant_item(row: LogValues, _: Sequence[LogValues] = ()) -> str:
    health = row["health"]
    direction = max(DIRECTIONS, key=lambda direction: health[f"{direction}_top_item_share"])
    share = health[f"{direction}_top_item_share"]
    if share < MAX_TOP_ITEM_SHARE or _is_collapsed(row):
        return ""
    queries, candidate = _SIDES[direction]
    return (
        f"{share:.0%} of the validation {queries} rank the same {candidate} first, "
        f"{health[f'{direction}_top_item']!r}. "
        "Check this item, lower the learning rate, or start with an objective that uses more than "
        "the hardest negative."
    )


def _hubs(row: LogValues, log: Sequence[LogValues]) -> str:
    # Hubs of the first validations usually disappear: the trained validation before must have them,
    # too.
    previous = [earlier for earlier in log if earlier["step"]][-1:]
    hubs = _list_hubs(row)
    if not hubs or not any(map(_list_hubs, previous)) or _dominant_item(row) or _is_collapsed(row):
        return ""
    return (
        f"{' and '.join(hubs)}, the 1 % that the validation retrieves most often. "
        "Use larger batches, or an objective that uses all negatives in both directions, such as "
        "Unified or VLC."
    )


def _list_hubs(row: LogValues) -> list[str]:
    health = row["health"]
    return [
        f"{health[f'{direction}_hub_share']:.0%} of the {queries} rank one of the same "
        f"{health[f'{direction}_num_hubs']} {candidate}s first"
        for direction, (queries, candidate) in _SIDES.items()
        if health[f"{direction}_num_hubs"] > 1 and health[f"{direction}_hub_share"] >= MAX_HUB_SHARE
    ]


def _false_negatives(row: LogValues, _: Sequence[LogValues]) -> str:
    health = row["health"]
    if health["false_negative_share"] < MAX_FALSE_NEGATIVE_SHARE:
        return ""
    return (
        f"{health['false_negative_share']:.0%} of the gradient by which {row['objective']} "
        "separates training pairs falls on pairs that "
        f"match by {health['false_negative_evidence']}. "
        "Define positives by ids, use GradedSupervision, or merge the duplicates that visavis data "
        "audit lists."
    )


def _temperature(row: LogValues, log: Sequence[LogValues]) -> str:
    health = row["health"]
    if "scale" not in health:
        return ""
    # A scale that starts at its bound, as that of a pretrained CLIP does, is not a problem.
    start = next(
        (earlier["health"]["scale"] for earlier in log if "scale" in earlier["health"]),
        health["scale"],
    )
    for bound in health["scale_bounds"]:
        if bound and abs(health["scale"] - bound) <= SCALE_BOUND_TOLERANCE * bound < abs(
            start - bound
        ):
            return (
                f"the learned scale moved from {start:.4g} to {health['scale']:.4g}, its bound is "
                f"{bound:g}. "
                "The loss sharpens or flattens the scores instead of ordering them. "
                "Lower the learning rate of the part scale (optimizer.lr_multipliers), or fix the "
                "scale (model.scale)."
            )
    return ""


def _overfitting(row: LogValues, log: Sequence[LogValues]) -> str:
    phase = [earlier for earlier in log if earlier["phase"] == row["phase"]] + [row]
    best = max(phase, key=lambda each: each["rsum"])
    recent = phase[-OVERFITTING_VALIDATIONS:]
    dropped = all(
        each["rsum"] < (1 - OVERFITTING_DROP) * best["rsum"] and each["step"] > best["step"]
        for each in recent
    )
    loss = row["train"]["loss"]
    best_loss = best["train"]["loss"]
    if (
        len(recent) < OVERFITTING_VALIDATIONS
        or not dropped
        or loss >= best_loss
        or _is_collapsed(row)
        or _dominant_item(row)
    ):
        return ""
    return (
        f"validation RSUM fell from {best['rsum']:.1f} at step {best['step']} to "
        f"{row['rsum']:.1f}, while the training loss fell from "
        f"{best_loss:.4g} to {loss:.4g}. The model of step {best['step']} is kept. "
        "Set training.patience, regularize (dropout, weight_decay), or add pairs."
    )


def _waiting_for_data(row: LogValues, _: Sequence[LogValues]) -> str:
    time = row["time"]
    if time["data_wait_share"] <= MAX_DATA_WAIT_SHARE or time["data_wait_s"] < MIN_DATA_WAIT_S:
        return ""
    return (
        f"{time['data_wait_share']:.0%} of the training time since the last validation, "
        f"{time['data_wait_s']:.0f} s, was spent waiting for "
        "batches. Set more training.workers, store smaller images, or train on cached features of "
        "a frozen encoder (visual.granularity)."
    )


ALERTS: dict[str, Callable[[LogValues, Sequence[LogValues]], str]] = {
    "collapse": _collapse,
    "dead gradients": _dead_gradients,
    "dominant item": _dominant_item,
    "false negatives": _false_negatives,
    "hubs": _hubs,
    "temperature": _temperature,
    "waiting for data": _waiting_for_data,
    "overfitting": _overfitting,
}
