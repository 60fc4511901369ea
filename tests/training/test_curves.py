"""Training curves of one batch of three images and three captions, compared with hand values."""

import pytest
import torch

from visavis.losses.targets import Targets
from visavis.objectives import CATALOG, TripletHN, Unified
from visavis.training.monitoring.validation_metrics import (
    queries_with_gradient,
    similarities,
    summarize,
)

SCORES = torch.tensor([[0.9, 0.2, 0.6], [0.1, 0.5, 0.7], [0.3, 0.4, 0.8]])


def test_positives_and_hardest_negatives_of_pairs():
    found = similarities(SCORES, Targets.paired(3))
    assert found["positive"].tolist() == pytest.approx([0.9, 0.5, 0.8])
    assert found["hardest_i2t"].tolist() == pytest.approx([0.6, 0.7, 0.4])
    assert found["hardest_t2i"].tolist() == pytest.approx([0.3, 0.4, 0.7])


def test_captions_of_same_image_are_not_negatives():
    """Captions 0 and 2 belong to image 0, caption 1 to image 1. Image 2 has none."""
    targets = Targets(query_ids=torch.tensor([0, 1, 2]), candidate_ids=torch.tensor([0, 1, 0]))
    found = similarities(SCORES, targets)
    assert sorted(found["positive"].tolist()) == pytest.approx([0.5, 0.6, 0.9])
    assert found["hardest_i2t"].tolist() == pytest.approx([0.2, 0.7, 0.8])
    assert found["hardest_t2i"].tolist() == pytest.approx([0.3, 0.4, 0.8])


def test_queries_without_negative_are_skipped():
    same = Targets(
        query_ids=torch.zeros(3, dtype=torch.long), candidate_ids=torch.zeros(3, dtype=torch.long)
    )
    assert len(similarities(SCORES, same)["hardest_i2t"]) == 0
    assert len(queries_with_gradient(TripletHN(), SCORES, same)["gradient_i2t"]) == 0
    assert (
        summarize(
            [{**similarities(SCORES, same), **queries_with_gradient(TripletHN(), SCORES, same)}]
        )["gradient_i2t"]
        == 0.0
    )


def test_hardest_triplet_has_gradient_where_hinge_is_open():
    """Images: 0.2 + 0.6 - 0.9 < 0, 0.2 + 0.7 - 0.5 > 0, 0.2 + 0.4 - 0.8 < 0. Captions: all are open
    except the first, 0.2 + 0.3 - 0.9.
    """
    found = queries_with_gradient(TripletHN(margin=0.2), SCORES, Targets.paired(3))
    assert found["gradient_i2t"].tolist() == [0, 1, 0]
    assert found["gradient_t2i"].tolist() == [0, 1, 1]


@pytest.mark.parametrize("kind", CATALOG, ids=lambda kind: kind.__name__)
def test_gradient_share_matches_autograd(kind):
    """Queries 0 to 3 score far above their negatives, others do not. Image 6 and caption 7 have no
    positive.
    """
    scores = torch.rand(8, 9, dtype=torch.float64)
    scores[range(4), range(4)] = 9.0
    scores.requires_grad_()
    ids = {"query_ids": [0, 1, 2, 3, 4, 5, 6, 5], "candidate_ids": [0, 1, 2, 3, 4, 5, 5, 7, 4]}
    facts = {name: torch.rand(8, 9, dtype=torch.float64) for name in ("relevance", "pair_margin")}
    facts |= {
        f"{side}_offline_scores": torch.rand(n, 2, dtype=torch.float64)
        for side, n in (("query", 8), ("candidate", 9))
    }
    targets = Targets(**ids, **facts)
    found = queries_with_gradient(kind(), scores, targets)
    for direction, block, direction_targets in (
        ("i2t", scores, targets),
        ("t2i", scores.T, targets.T),
    ):
        (slope,) = torch.autograd.grad(
            kind().one_way(*kind().prepare(block, direction_targets)).sum(), scores
        )
        slope = slope if direction == "i2t" else slope.T
        assert found[f"gradient_{direction}"].tolist() == (slope.abs() > 1e-6).any(1).tolist(), (
            direction
        )
    assert scores.grad is None


def test_gradient_share_counts_queries_with_negative():
    targets = Targets(query_ids=[0, 1], candidate_ids=[0, 0, 0])
    found = queries_with_gradient(TripletHN(), torch.rand(2, 3), targets)
    assert {name: len(share) for name, share in found.items()} == {
        "gradient_i2t": 1,
        "gradient_t2i": 3,
    }


def test_soft_objective_gives_every_query_gradient():
    assert queries_with_gradient(Unified(margin=0.2, gamma=5.0), SCORES, Targets.paired(3))[
        "gradient_i2t"
    ].tolist() == [1, 1, 1]
    hard = queries_with_gradient(Unified(margin=0.2, gamma=1000.0), SCORES, Targets.paired(3))
    assert hard["gradient_i2t"].tolist() == [0, 1, 0]


def test_summary_pools_queries_of_all_batches():
    batches = [
        {
            "loss": torch.tensor(1.0),
            "positive": torch.tensor([0.0, 1.0]),
            "gradient_i2t": torch.tensor([1.0]),
        }
    ] * 2
    batches.append(
        {
            "loss": torch.tensor(4.0),
            "positive": torch.tensor([0.5]),
            "gradient_i2t": torch.tensor([0.0, 0.0]),
        }
    )
    found = summarize(batches)
    assert found == {
        "loss": 2.0,
        "positive_mean": 0.5,
        "positive_std": pytest.approx((0.25 * 4 / 5) ** 0.5),
        "gradient_i2t": 0.5,
    }
