"""A look at a model between steps: its loss, its similarities, who still gets a gradient, and whether it is alive."""

from __future__ import annotations

from typing import Any

import torch

from visavis.data.loader import Loader
from visavis.engine import PairLoss
from visavis.engine.widths import narrower
from visavis.models import Matcher
from visavis.models.encoding import device_of
from visavis.scoring import score_by_blocks
from visavis.supervision import Supervision
from visavis.training.curves import has_gradient, similarities, summarize
from visavis.training.health import examine, misdirected
from visavis.training.recipe import Recipe


@torch.no_grad()
def probe(
    matcher: Matcher, loss: PairLoss, supervision: Supervision, loader: Loader, recipe: Recipe
) -> tuple[dict[str, float], dict[str, Any]]:
    """Loss, similarities and shares of queries with a gradient on the first batches of a fixed plan, without dropout; and the health of
    the first of them. The matcher is left in evaluation mode.
    """
    matcher.eval()
    device, seen, health = device_of(matcher), list[dict[str, Any]](), dict[str, Any]()
    for batch in loader.epoch(0, training=False):
        moved = batch.to(device)
        visual, text = matcher.encode_visual(moved.visual), matcher.encode_text(moved.text)
        targets = supervision.targets(visual, text, moved).to(device)
        visual, text = matcher.first_stage(visual), matcher.first_stage(text)
        scores = score_by_blocks(matcher.score, visual, text, recipe.memory or None)
        value = loss(visual, text, targets=targets)
        scaled = scores if matcher.scale is None else scores * matcher.scale()
        per_width = value / (1 + len(narrower(loss.widths, visual)))  # identical embeddings have the same loss at each
        health = health or {
            **examine(loss.objective, visual, text, scaled, targets, per_width),
            **misdirected(loss.objective, scaled, targets, batch),
            **({} if matcher.scale is None else {"scale": matcher.scale().item(), "scale_bounds": matcher.scale.bounds}),
        }
        seen.append({"loss": value, **similarities(scores, targets), **has_gradient(loss.objective, scaled, targets)})
        if len(seen) == recipe.training.probe_batches:
            break
    return summarize(seen), health
