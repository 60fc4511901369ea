"""What is wrong with a training by the rows of its log: a sentence for each, with its numbers and what to do."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from visavis.types import DIRECTIONS

Row = dict[str, Any]

COLLAPSED_RANK = 1.5
NO_BETTER = 0.02
"""A loss within this share of the loss of identical embeddings, or above, is no better than theirs."""
DEAD = 0.01
"""A share of queries with a gradient below this, in both directions, is dead."""
HUBS = 0.4
"""The share of queries that find one of the 1 % most retrieved items first, from which these are hubs."""
ONE_ITEM = 0.4
"""The share of queries that find one and the same item first."""
MISDIRECTED = 0.25
"""The share of what pushes pairs apart that falls on pairs which belong together."""
AT_A_BOUND = 0.01
"""A scale within this share of a bound is at it."""
WAITED = 3
"""Validations after the best one that are all worse, from which a model fits the training data alone."""
WORSE = 0.05
"""The share of the best RSUM that is lost in each of them."""


def alarms(row: Row, log: Sequence[Row] = ()) -> dict[str, str]:
    """What is wrong by a row of the log and those before it; nothing is wrong with a model that has not been trained yet."""
    if not row["step"]:
        return {}
    raised = {name: of(row) for name, of in BY_ROW.items()} | {name: of(row, log) for name, of in BY_LOG.items()}
    return {name: sentence for name, sentence in raised.items() if sentence}


def news(sentences: dict[str, str], log: Iterable[Row]) -> list[str]:
    """The sentences of alarms that no earlier row of the log has."""
    known = {name for row in log for name in row.get("health", {}).get("alarms", ())}
    return [sentence for name, sentence in sentences.items() if name not in known]


def collapse(row: Row) -> str:
    vital = row["health"]
    bound = vital["collapsed_loss"] - NO_BETTER * abs(vital["collapsed_loss"])
    if min(vital["image_rank"], vital["text_rank"]) >= COLLAPSED_RANK or vital["loss"] < bound:
        return ""
    return (
        f"collapse at step {row['step']}: the images of a batch span {vital['image_rank']:.2f} dimensions and its texts "
        f"{vital['text_rank']:.2f} (effective rank), and their loss {vital['loss']:.4g} is no better than the {vital['collapsed_loss']:.4g} "
        f"that {row['objective']} gives identical embeddings: lower the learning rate, warm it up, or begin with more than the hardest negatives."
    )


def dead_gradients(row: Row) -> str:
    shares = [row["train"][f"gradient_{way}"] for way in DIRECTIONS]
    if max(shares) >= DEAD:
        return ""
    return (
        f"dead gradients at step {row['step']}: {shares[0]:.1%} of the images and {shares[1]:.1%} of the texts of training batches get a gradient "
        f"from {row['objective']}: there is nothing left to learn from them; take larger batches or a wider margin."
    )


def one_item(row: Row) -> str:
    vital = row["health"]
    way = max(DIRECTIONS, key=lambda way: vital[f"{way}_first_share"])
    if vital[f"{way}_first_share"] < ONE_ITEM or collapse(row):
        return ""
    asked, answers = ("images", "text") if way == "i2t" else ("texts", "image")
    return (
        f"one item for all at step {row['step']}: {vital[f'{way}_first_share']:.0%} of the {asked} of the validation find the same {answers} "
        f"first, {vital[f'{way}_first']!r}: look at it, lower the learning rate, or begin with more than the hardest negatives."
    )


def hubs(row: Row, log: Sequence[Row]) -> str:
    """Those that the validation before had too, after training had begun: early ones pass by themselves."""
    before = [earlier for earlier in log if earlier["step"]][-1:]
    told = _hubs(row)
    if not told or not any(map(_hubs, before)) or one_item(row) or collapse(row):
        return ""
    return (
        f"hubs at step {row['step']}: {' and '.join(told)}, the 1 % that are retrieved most in the validation: an objective that counts all "
        "negatives in both directions spreads them, such as Unified or VLC, and so do larger batches."
    )


def _hubs(row: Row) -> list[str]:
    vital = row["health"]
    return [
        f"{vital[f'{way}_hub_share']:.0%} of the {asked} find one of the same {vital[f'{way}_hubs']} {answers} first"
        for way, asked, answers in (("i2t", "images", "texts"), ("t2i", "texts", "images"))
        if vital[f"{way}_hubs"] > 1 and vital[f"{way}_hub_share"] >= HUBS
    ]


def false_negatives(row: Row) -> str:
    vital = row["health"]
    if vital["misdirected"] < MISDIRECTED:
        return ""
    return (
        f"false negatives at step {row['step']}: {vital['misdirected']:.0%} of what {row['objective']} pushes apart in training batches belongs "
        f"together by {vital['known_by']}: take positives by ids, give such pairs degrees (GradedSupervision), or merge what visavis data audit finds."
    )


def temperature(row: Row, log: Sequence[Row]) -> str:
    """Not of a scale that began at its bound, as that of a pretrained CLIP does."""
    vital = row["health"]
    if "scale" not in vital:
        return ""
    started = next((earlier["health"]["scale"] for earlier in log if "scale" in earlier.get("health", {})), vital["scale"])
    for bound in vital["scale_bounds"]:
        if bound and abs(vital["scale"] - bound) <= AT_A_BOUND * bound < abs(started - bound):
            return (
                f"temperature at step {row['step']}: the learned scale ran from {started:.4g} to its bound, {vital['scale']:.4g} of {bound:g}, and "
                "the loss goes on sharpening or flattening instead of ordering: lower the learning rate of the part scale "
                "(optimizer.lr_multipliers), or fix the scale (model.scale)."
            )
    return ""


def over_fitting(row: Row, log: Sequence[Row]) -> str:
    phase = [earlier for earlier in log if earlier["phase"] == row["phase"]] + [row]
    best = max(phase, key=lambda each: each["rsum"])
    since = phase[-WAITED:]
    fallen = all(each["rsum"] < (1 - WORSE) * best["rsum"] and each["step"] > best["step"] for each in since)
    if len(since) < WAITED or not fallen or row["train"]["loss"] >= best["train"]["loss"] or collapse(row) or one_item(row):
        return ""
    return (
        f"over-fitting at step {row['step']}: validation RSUM fell from {best['rsum']:.1f} at step {best['step']} to {row['rsum']:.1f}, while the "
        f"training loss fell from {best['train']['loss']:.4g} to {row['train']['loss']:.4g}; the model of step {best['step']} is kept: stop "
        "there (training.patience), regularize (dropout, weight_decay), or bring more pairs."
    )


BY_ROW: dict[str, Callable[[Row], str]] = {
    "collapse": collapse,
    "dead gradients": dead_gradients,
    "one item": one_item,
    "false negatives": false_negatives,
}
BY_LOG: dict[str, Callable[[Row, Sequence[Row]], str]] = {"hubs": hubs, "temperature": temperature, "over-fitting": over_fitting}
