"""Tiles: one block of scores serves both directions, for objectives with a summary per query."""

from __future__ import annotations

from dataclasses import replace

import torch

from visavis import PairLoss, Targets
from visavis.losses.objective import SummaryObjective
from visavis.losses.pair_loss import cosine
from visavis.losses.pair_loss import plan as planner
from visavis.losses.pair_loss.plan import ExecutionPlan
from visavis.objectives import CATALOG, NCR, RSP, VLC, Goal, NTXent, Unified

from ..sampling import pairwise
from .cases import (
    IDS,
    REDUCTIONS,
    assert_close,
    assert_matches,
    force_plan,
    random_embeddings,
    required_annotations,
)

FORMS = (
    *(kind() for kind in CATALOG if issubclass(kind, SummaryObjective)),
    *Goal.all(),
    *Goal.all(semantics="reference"),
    NTXent(denominator="negatives"),
    RSP(coefficients=(0.1, 0.5, -1.0)),
)
SUMMARIES = [objective for objective in FORMS if objective.summary(Targets.paired(1))]


def with_offline(query_ids, candidate_ids) -> Targets:
    annotations = {
        name: annotation
        for name, annotation in required_annotations(len(query_ids), len(candidate_ids)).items()
        if "offline" in name
    }
    return Targets(query_ids=query_ids, candidate_ids=candidate_ids, **annotations)


@pairwise(objective=SUMMARIES, reduction=REDUCTIONS, ids=IDS)
def test_tiles_match_row_blocks(objective, reduction, ids, monkeypatch):
    objective, targets = replace(objective, reduction=reduction), with_offline(*IDS[ids])
    images, texts = random_embeddings(*targets.shape)
    inputs = [images, texts, targets.query_offline_scores, targets.candidate_offline_scores]
    with monkeypatch.context() as patched:
        force_plan(patched, "rows", rows=2)
        sequential = PairLoss(objective)(images, texts, targets=targets)
    assert_matches(
        PairLoss(objective, block_rows=2), sequential, inputs, images, texts, targets=targets
    )
    assert_matches(
        PairLoss(objective, block_rows=2),
        objective(cosine(images, texts), targets),
        inputs,
        images,
        texts,
        targets=targets,
    )


@pairwise(cached_tiles=[0, 1, 4, 100], reduction=REDUCTIONS, ids=IDS)
def test_cached_exponentials_change_no_gradient(cached_tiles, reduction, ids, monkeypatch):
    """Whether no tile, some or all of them are cached until their gradient is known."""
    objective = Unified(gamma=4.0, reduction=reduction)
    images, texts = random_embeddings(*(len(part) for part in IDS[ids]))
    tile_bytes = 2 * 2 * images.element_size()
    plan = ExecutionPlan(
        "blocks",
        (len(images), len(texts)),
        (2, 2),
        (len(texts), len(images)),
        tile_shape=(2, 2),
        cached_bytes=cached_tiles * tile_bytes,
    )
    monkeypatch.setattr(planner, "choose_plan", lambda _: plan)
    expected = objective(
        cosine(images, texts), Targets(query_ids=IDS[ids][0], candidate_ids=IDS[ids][1])
    )
    assert_matches(
        PairLoss(objective),
        expected,
        [images, texts],
        images,
        texts,
        *map(torch.tensor, map(list, IDS[ids])),
    )


SPREADS = {
    "antipodal": lambda x: torch.stack([x, -x], 1).flatten(0, 1),
    "one far group": lambda x: torch.cat([x + 100, -x - 100]),
    "ordinary": lambda x: torch.cat([x, torch.randn_like(x)]),
}


@pairwise(dtype=[torch.float64, torch.float32], sharpness=[1.0, 50.0, 1e3, 1e5], spread=SPREADS)
def test_tiles_do_not_underflow_for_large_gamma(dtype, sharpness, spread):
    images = SPREADS[spread](torch.randn(6, 4)).to(dtype).requires_grad_()
    texts = (-images + 0.01 * torch.randn_like(images)).detach().requires_grad_()
    for objective in (VLC(gamma=sharpness), Unified(gamma=sharpness), NTXent(tau=1 / sharpness)):
        expected = objective(cosine(images, texts), Targets.paired(12))
        tolerance = (
            {"rtol": 1e-10, "atol": 1e-10}
            if dtype == torch.float64
            else {"rtol": 1e-4, "atol": 1e-6 * sharpness}
        )
        value = PairLoss(objective, block_rows=5)(images, texts)
        assert_close(value, expected, **tolerance)
        for ours, right in zip(
            *(torch.autograd.grad(each, (images, texts)) for each in (value, expected)), strict=True
        ):
            scale = right.abs().max().item() + 1e-30
            assert_close(
                ours / scale,
                right / scale,
                rtol=1e-3,
                atol=1e-8 if dtype == torch.float64 else 3e-3 * max(1, sharpness / 1e3),
            )


@pairwise(objective=SUMMARIES, rows=[2, 100])
def test_tiles_are_finite_for_extreme_embeddings(objective, rows):
    targets = with_offline(range(5), range(5))
    for images, texts in (
        (torch.ones(5, 3), torch.ones(5, 3)),
        (torch.eye(5), -torch.eye(5)),
        (torch.zeros(5, 2), torch.eye(5)[:, :2]),
    ):
        images.requires_grad_()
        value = PairLoss(objective, block_rows=rows)(images, texts, targets=targets)
        value.backward()
        assert value.isfinite()
        assert images.grad.isfinite().all()
        assert_close(value, objective(cosine(images, texts), targets), rtol=1e-5, atol=1e-5)


@pairwise(objective=SUMMARIES, broken=[0, 3, 5], rows=[1, 2, 6])
def test_tiles_propagate_nan_negatives(objective, broken, rows):
    images, texts = torch.randn(6, 5), torch.randn(6, 5)
    texts[broken, 2] = torch.nan
    assert PairLoss(objective, block_rows=rows)(
        images, texts, targets=with_offline(range(6), range(6))
    ).isnan()
    candidate_ids = [
        number if number != broken else 99 for number in range(6)
    ]  # the broken item is a negative for all queries
    assert PairLoss(objective, block_rows=rows)(
        images, texts, targets=with_offline(range(6), candidate_ids)
    ).isnan()


def test_tiles_support_ncr_with_anchor_margins():
    images, texts = random_embeddings(6, 6)
    margins = [torch.rand(6, dtype=torch.float64, requires_grad=True) for _ in range(2)]
    targets = Targets(
        query_ids=range(6),
        candidate_ids=range(6),
        query_margin=margins[0],
        candidate_margin=margins[1],
    )
    assert PairLoss(NCR(), block_rows=2).plan(6, 6, targets=targets).tile_shape == (2, 6)
    matrix = NCR()(cosine(images, texts), targets)
    assert_matches(
        PairLoss(NCR(), block_rows=2),
        matrix,
        [images, texts, *margins],
        images,
        texts,
        targets=targets,
    )
