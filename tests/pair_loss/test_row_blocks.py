"""Row blocks: value and gradients equal those of the full matrix, for all objectives, relations and
annotations.
"""

from __future__ import annotations

from typing import Literal, get_args, get_origin, get_type_hints

import pytest
import torch
from torch import nn

from visavis import PairLoss, Targets
from visavis.core.errors import MissingSupervision
from visavis.losses.pair_loss import cosine
from visavis.losses.targets import Factors
from visavis.objectives import CATALOG, Objective

from ..sampling import pairwise
from .cases import (
    IDS,
    NEED_PAIRWISE_ANNOTATIONS,
    REDUCTIONS,
    assert_matches,
    every_objective,
    force_plan,
    random_embeddings,
    required_annotations,
)


@pairwise(kind=CATALOG, reduction=REDUCTIONS, ids=IDS, rows=[1, 2, 4, 100])
def test_row_blocks_of_any_size_match_full_matrix(kind, reduction, ids, rows):
    query_ids, candidate_ids = IDS[ids]
    images, texts = random_embeddings(len(query_ids), len(candidate_ids))
    targets = Targets(
        query_ids=query_ids,
        candidate_ids=candidate_ids,
        **required_annotations(len(query_ids), len(candidate_ids)),
    )
    objective = kind(reduction=reduction)
    expected = objective(cosine(images, texts), targets)
    inputs = [images, texts, targets.query_offline_scores, targets.candidate_offline_scores]
    assert_matches(
        PairLoss(objective, block_rows=rows), expected, inputs, images, texts, targets=targets
    )


def variants() -> list[Objective]:
    """Every objective with every non-default choice of one literal field."""
    actual = []
    for kind in CATALOG:
        for name, hint in get_type_hints(kind).items():
            if get_origin(hint) is Literal and name != "reduction":
                actual += [
                    kind(**{name: choice})
                    for choice in get_args(hint)
                    if choice != kind.__dataclass_fields__[name].default
                ]
    return actual


@pairwise(objective=variants(), ids=["captions", "duplicates"])
def test_row_blocks_match_for_every_literal_field(objective, ids, monkeypatch):
    force_plan(monkeypatch, "rows", rows=2)
    query_ids, candidate_ids = IDS[ids]
    images, texts = random_embeddings(len(query_ids), len(candidate_ids))
    targets = Targets(
        query_ids=query_ids,
        candidate_ids=candidate_ids,
        **required_annotations(len(query_ids), len(candidate_ids)),
    )
    expected = objective(cosine(images, texts), targets)
    assert_matches(PairLoss(objective), expected, [images, texts], images, texts, targets=targets)


RELATIONS = {
    "from pairs": lambda: Targets.from_pairs(
        [0, 0, 1, 3, 3, 4], [1, 2, 1, 0, 4, 3], 5, 6, **required_annotations(5, 6)
    ),
    "ignored": lambda: Targets(
        query_ids=range(5),
        candidate_ids=[0, 0, 1, 2, 3, 4],
        ignore=torch.rand(5, 6) > 0.7,
        **required_annotations(5, 6),
    ),
}


@pairwise(kind=CATALOG, relation=RELATIONS)
def test_row_blocks_match_for_any_relation(kind, relation):
    for reduction in REDUCTIONS:
        targets, (images, texts) = RELATIONS[relation](), random_embeddings(5, 6)
        objective = kind(reduction=reduction)
        assert_matches(
            PairLoss(objective, block_rows=2),
            objective(cosine(images, texts), targets),
            [images, texts],
            images,
            texts,
            targets=targets,
        )


def annotation_forms(num_queries: int, num_candidates: int) -> dict[str, object]:
    left, right = (
        torch.rand(n, 3, dtype=torch.float64, requires_grad=True)
        for n in (num_queries, num_candidates)
    )
    table = (left @ right.T).detach()
    return {
        "tensor": table.clone().requires_grad_(),
        "factors": Factors(left, right),
        "function": lambda rows, columns: table[rows][:, columns],
    }


@pairwise(
    kind=CATALOG,
    name=["relevance", "weight", "pair_margin"],
    form=["tensor", "factors", "function"],
)
def test_row_blocks_match_for_pairwise_annotations(kind, name, form):
    images, texts = random_embeddings(5, 6)
    annotation = annotation_forms(5, 6)[form]
    targets = Targets(
        query_ids=range(5),
        candidate_ids=[0, 0, 1, 2, 3, 4],
        **(required_annotations(5, 6) | {name: annotation}),
    )
    inputs = [
        images,
        texts,
        *([annotation] if form == "tensor" else []),
        *(vars(annotation).values() if form == "factors" else []),
    ]
    assert_matches(
        PairLoss(kind(), block_rows=2),
        kind()(cosine(images, texts), targets),
        inputs,
        images,
        texts,
        targets=targets,
    )


@every_objective
def test_row_blocks_match_for_item_margins(kind):
    images, texts = random_embeddings(5, 6)
    i2t, t2i = (torch.rand(n, dtype=torch.float64, requires_grad=True) for n in (5, 6))
    targets = Targets(
        query_ids=range(5),
        candidate_ids=[0, 0, 1, 2, 3, 4],
        query_margin=i2t,
        candidate_margin=t2i,
        **required_annotations(5, 6),
    )
    assert_matches(
        PairLoss(kind(), block_rows=2),
        kind()(cosine(images, texts), targets),
        [images, texts, i2t, t2i],
        images,
        texts,
        targets=targets,
    )


@pairwise(kind=CATALOG, reduction=REDUCTIONS, sides=["texts", "images", "texts and images"])
def test_row_blocks_match_for_extra_candidates(kind, reduction, sides):
    images, texts, more_images, more_texts = random_embeddings(5, 6, 3, 4)
    extra = {"extra_texts": more_texts, "extra_text_ids": [8, 1, 8, 9]} if "texts" in sides else {}
    extra |= (
        {"extra_images": more_images, "extra_image_ids": [2, 9, 1]} if "images" in sides else {}
    )
    ids = [1, 1, 2, 3, 4], [1, 2, 2, 3, 4, 4]
    offline = {
        name: annotation
        for name, annotation in required_annotations(5, 6).items()
        if "offline" in name
    }
    targets = Targets(query_ids=ids[0], candidate_ids=ids[1], **offline)
    objective = kind(reduction=reduction)
    if kind.__name__ in NEED_PAIRWISE_ANNOTATIONS:
        with pytest.raises(MissingSupervision):
            PairLoss(objective)(images, texts, targets=targets, **extra)
        return
    dense = PairLoss(objective)(images, texts, targets=targets, **extra)
    inputs = [images, texts, more_images, more_texts]
    assert_matches(
        PairLoss(objective, block_rows=2), dense, inputs, images, texts, targets=targets, **extra
    )


@pairwise(kind=CATALOG, reduction=REDUCTIONS, ids=IDS, rows=[1, 3, 100])
def test_rows_match_full_matrix_with_a_learned_scale(kind, reduction, ids, rows, monkeypatch):
    force_plan(monkeypatch, "rows", rows)
    query_ids, candidate_ids = IDS[ids]
    images, texts = random_embeddings(len(query_ids), len(candidate_ids))
    known = {
        name: annotation.detach()
        for name, annotation in required_annotations(len(query_ids), len(candidate_ids)).items()
    }
    targets = Targets(query_ids=query_ids, candidate_ids=candidate_ids, **known)
    objective = kind(reduction=reduction)
    assert_matches(
        PairLoss(objective),
        objective(cosine(images, texts), targets),
        [images, texts],
        images,
        texts,
        targets=targets,
    )
    alone = objective.without_scale()
    if alone is not None:
        scale = nn.Parameter(torch.tensor(3.0).double())
        expected = alone(scale * cosine(images, texts), targets)
        assert_matches(
            PairLoss(objective, scale=scale),
            expected,
            [images, texts, scale],
            images,
            texts,
            targets=targets,
        )


@pairwise(kind=CATALOG, shape=[(0, 3), (3, 0), (0, 0)])
def test_row_blocks_are_zero_for_empty_batch(kind, shape):
    images, texts = random_embeddings(*shape)
    targets = Targets(
        query_ids=torch.arange(shape[0]),
        candidate_ids=torch.arange(shape[1]),
        **required_annotations(*shape),
    )
    value = PairLoss(kind(), block_rows=2)(images, texts, targets=targets)
    assert value == 0
    value.backward()
    assert images.grad.shape == images.shape


@every_objective
def test_row_blocks_propagate_nan(kind):
    images, texts = torch.randn(4, 5), torch.randn(4, 5)
    images[1, 2] = torch.nan
    annotations = {
        name: annotation.detach().float() for name, annotation in required_annotations(4, 4).items()
    }
    targets = Targets(query_ids=range(4), candidate_ids=range(4), **annotations)
    assert PairLoss(kind(), block_rows=2)(images, texts, targets=targets).isnan()
