"""Every objective in edge cases: ties, perfect and worst scores, empty batches, half precision and
invalid inputs.
"""

from __future__ import annotations

import math

import pytest
import torch

from visavis import PairLoss, Targets
from visavis.core.errors import ShapeError
from visavis.objectives import CATALOG, RINCE

from ..matching import mentions
from ..sampling import pairwise
from .cases import annotations, assert_close, cosines, every_objective, gradient, targets_of

EDGES = {
    "ties": torch.full((4, 4), 0.25),
    "zeros": torch.zeros(4, 4),
    "perfect": 2 * torch.eye(4) - 1,
    "antipodal": 1 - 2 * torch.eye(4),
    "ones": torch.ones(4, 4),
    "minus ones": -torch.ones(4, 4),
    "one pair": torch.ones(1, 1),
    "one query": torch.tensor([[0.5, -1.0, 1.0]]),
}


@pairwise(
    kind=CATALOG, edge=EDGES, dtype=[torch.float64, torch.float32, torch.bfloat16, torch.float16]
)
def test_objectives_are_finite_for_extreme_scores(kind, edge, dtype):
    scores = EDGES[edge].to(dtype)
    targets = targets_of(*(range(n) for n in scores.shape), weight=None)
    # RINCE refuses a tau whose exponentials do not fit into the type.
    sharp = {"gamma": 1e3, "tau": 2e-2 if kind is RINCE else 1e-3}
    for fields in (
        {},
        {name: value for name, value in sharp.items() if name in kind.__dataclass_fields__},
    ):
        assert kind(**fields)(scores, targets).isfinite()
        assert gradient(kind(**fields), scores, targets).isfinite().all()


@pairwise(kind=CATALOG, shape=[(0, 3), (3, 0), (0, 0)])
def test_objectives_are_zero_for_empty_batch(kind, shape):
    scores = torch.zeros(shape, dtype=torch.float64, requires_grad=True)
    value = kind()(scores, targets_of(*(range(n) for n in shape)))
    assert value == 0
    value.backward()
    assert scores.grad.shape == shape


@pairwise(kind=CATALOG, dtype=[torch.bfloat16, torch.float16])
def test_objectives_promote_half_precision_once(kind, dtype):
    scores = cosines(8).to(dtype)
    targets = Targets(
        query_ids=range(8),
        candidate_ids=range(8),
        **{name: annotation.float() for name, annotation in annotations(8, 8).items()},
    )
    value = kind()(scores, targets)
    assert value.dtype == torch.float32
    assert torch.equal(value, kind()(scores.float(), targets))
    assert gradient(kind(), scores, targets).dtype == dtype


@every_objective
def test_objectives_propagate_nan_scores(kind):
    for index in ((0, 0), (0, 1)):
        scores = cosines(3)
        scores[index] = math.nan
        assert kind()(scores, targets_of(range(3), range(3))).isnan()


@every_objective
def test_objectives_reject_mismatched_scores_and_targets(kind):
    objective = kind()
    with pytest.raises(ShapeError, match=mentions("targets", "[3, 4]", 3)):
        objective(torch.rand(3, 4), Targets.paired(3))
    with pytest.raises(ShapeError, match=mentions("targets", "Tensor", "Targets")):
        objective(torch.rand(3, 3), torch.arange(3))
    for scores in (torch.eye(3).long(), torch.eye(3).bool(), torch.eye(3).numpy()):
        with pytest.raises(ShapeError, match=mentions("scores", "floating-point")):
            objective(scores, Targets.paired(3))


@every_objective
def test_objectives_have_no_gradient_for_collapsed_embeddings(kind):
    images = torch.ones(4, 5, dtype=torch.float64).requires_grad_()
    value = PairLoss(kind())(
        images, images.detach(), targets=targets_of(range(4), range(4), weight=None)
    )
    (actual,) = torch.autograd.grad(value, images)
    assert_close(actual, torch.zeros_like(actual), atol=1e-9)
