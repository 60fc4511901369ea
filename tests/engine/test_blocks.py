"""By row blocks, the value and every gradient are those of the one matrix: for all objectives, relations and facts."""

from __future__ import annotations

from typing import Literal, get_args, get_origin, get_type_hints

import pytest
import torch
from torch import nn

from visavis import PairLoss, Targets
from visavis.engine import cosine
from visavis.errors import MissingSupervision
from visavis.objectives import CATALOG, Objective
from visavis.targets import Factors

from ..sampling import pairwise
from .cases import IDS, NEED_FACTS_OF_PAIRS, REDUCTIONS, every_objective, every_reduction, needed, planned, same, vectors


@pairwise(kind=CATALOG, reduction=REDUCTIONS, ids=IDS, rows=[1, 2, 4, 100])
def test_blocks_of_any_size_equal_the_matrix(kind, reduction, ids, rows):
    query_ids, candidate_ids = IDS[ids]
    images, texts = vectors(len(query_ids), len(candidate_ids))
    targets = Targets(query_ids=query_ids, candidate_ids=candidate_ids, **needed(len(query_ids), len(candidate_ids)))
    objective = kind(reduction=reduction)
    expected = objective(cosine(images, texts), targets)
    inputs = [images, texts, targets.query_offline_scores, targets.candidate_offline_scores]
    same(PairLoss(objective, block_rows=rows), expected, inputs, images, texts, targets=targets)


def variants() -> list[Objective]:
    """Every objective with every other choice that one of its fields has."""
    found = []
    for kind in CATALOG:
        for name, hint in get_type_hints(kind).items():
            if get_origin(hint) is Literal and name != "reduction":
                found += [kind(**{name: choice}) for choice in get_args(hint) if choice != kind.__dataclass_fields__[name].default]
    return found


@pairwise(objective=variants(), ids=["captions", "duplicates"], path=["kept", "rows"])
def test_every_choice_of_a_field(objective, ids, path, monkeypatch):
    planned(monkeypatch, path, rows=2)
    query_ids, candidate_ids = IDS[ids]
    images, texts = vectors(len(query_ids), len(candidate_ids))
    targets = Targets(query_ids=query_ids, candidate_ids=candidate_ids, **needed(len(query_ids), len(candidate_ids)))
    expected = objective(cosine(images, texts), targets)
    same(PairLoss(objective), expected, [images, texts], images, texts, targets=targets)


RELATIONS = {
    "from pairs": lambda: Targets.from_pairs([0, 0, 1, 3, 3, 4], [1, 2, 1, 0, 4, 3], 5, 6, **needed(5, 6)),
    "ignored": lambda: Targets(query_ids=range(5), candidate_ids=[0, 0, 1, 2, 3, 4], ignore=torch.rand(5, 6) > 0.7, **needed(5, 6)),
}


@every_objective
@every_reduction
@pytest.mark.parametrize("relation", RELATIONS)
def test_any_relation(kind, reduction, relation):
    targets, (images, texts) = RELATIONS[relation](), vectors(5, 6)
    objective = kind(reduction=reduction)
    same(PairLoss(objective, block_rows=2), objective(cosine(images, texts), targets), [images, texts], images, texts, targets=targets)


def kinds_of_a_fact(height: int, width: int) -> dict[str, object]:
    left, right = (torch.rand(n, 3, dtype=torch.float64, requires_grad=True) for n in (height, width))
    table = (left @ right.T).detach()
    return {
        "tensor": table.clone().requires_grad_(),
        "factors": Factors(left, right),
        "function": lambda rows, columns: table[rows][:, columns],
    }


@pairwise(kind=CATALOG, name=["relevance", "weight", "pair_margin"], form=["tensor", "factors", "function"])
def test_facts_of_pairs_in_any_form(kind, name, form):
    images, texts = vectors(5, 6)
    fact = kinds_of_a_fact(5, 6)[form]
    targets = Targets(query_ids=range(5), candidate_ids=[0, 0, 1, 2, 3, 4], **(needed(5, 6) | {name: fact}))
    inputs = [images, texts, *([fact] if form == "tensor" else []), *(vars(fact).values() if form == "factors" else [])]
    same(PairLoss(kind(), block_rows=2), kind()(cosine(images, texts), targets), inputs, images, texts, targets=targets)


@every_objective
def test_margins_of_items(kind):
    images, texts = vectors(5, 6)
    forth, back = (torch.rand(n, dtype=torch.float64, requires_grad=True) for n in (5, 6))
    targets = Targets(query_ids=range(5), candidate_ids=[0, 0, 1, 2, 3, 4], query_margin=forth, candidate_margin=back, **needed(5, 6))
    same(
        PairLoss(kind(), block_rows=2), kind()(cosine(images, texts), targets), [images, texts, forth, back], images, texts, targets=targets
    )


@pairwise(kind=CATALOG, reduction=REDUCTIONS, sides=["texts", "images", "texts and images"])
def test_extra_candidates(kind, reduction, sides):
    images, texts, more_images, more_texts = vectors(5, 6, 3, 4)
    extra = {"extra_texts": more_texts, "extra_text_ids": [8, 1, 8, 9]} if "texts" in sides else {}
    extra |= {"extra_images": more_images, "extra_image_ids": [2, 9, 1]} if "images" in sides else {}
    ids = [1, 1, 2, 3, 4], [1, 2, 2, 3, 4, 4]
    offline = {name: fact for name, fact in needed(5, 6).items() if "offline" in name}
    targets = Targets(query_ids=ids[0], candidate_ids=ids[1], **offline)
    objective = kind(reduction=reduction)
    if kind.__name__ in NEED_FACTS_OF_PAIRS:
        with pytest.raises(MissingSupervision):
            PairLoss(objective)(images, texts, targets=targets, **extra)
        return
    dense = PairLoss(objective)(images, texts, targets=targets, **extra)
    inputs = [images, texts, more_images, more_texts]
    same(PairLoss(objective, block_rows=2), dense, inputs, images, texts, targets=targets, **extra)


@pairwise(kind=CATALOG, reduction=REDUCTIONS, ids=IDS, rows=[1, 3, 100])
def test_few_cosines_are_kept_and_equal_the_matrix(kind, reduction, ids, rows, monkeypatch):
    planned(monkeypatch, "kept", rows)
    query_ids, candidate_ids = IDS[ids]
    images, texts = vectors(len(query_ids), len(candidate_ids))
    known = {name: fact.detach() for name, fact in needed(len(query_ids), len(candidate_ids)).items()}
    targets = Targets(query_ids=query_ids, candidate_ids=candidate_ids, **known)
    objective = kind(reduction=reduction)
    same(PairLoss(objective), objective(cosine(images, texts), targets), [images, texts], images, texts, targets=targets)
    alone = objective.for_scaled_scores()
    if alone is not None:
        scale = nn.Parameter(torch.tensor(3.0).double())
        expected = alone(scale * cosine(images, texts), targets)
        same(PairLoss(objective, scale=scale), expected, [images, texts, scale], images, texts, targets=targets)


@every_objective
@pytest.mark.parametrize("shape", [(0, 3), (3, 0), (0, 0)])
def test_an_empty_batch_is_zero(kind, shape):
    images, texts = vectors(*shape)
    targets = Targets(query_ids=torch.arange(shape[0]), candidate_ids=torch.arange(shape[1]), **needed(*shape))
    value = PairLoss(kind(), block_rows=2)(images, texts, targets=targets)
    assert value == 0
    value.backward()
    assert images.grad.shape == images.shape


@every_objective
def test_what_is_no_number_is_not_hidden(kind):
    images, texts = torch.randn(4, 5), torch.randn(4, 5)
    images[1, 2] = torch.nan
    facts = {name: fact.detach().float() for name, fact in needed(4, 4).items()}
    targets = Targets(query_ids=range(4), candidate_ids=range(4), **facts)
    assert PairLoss(kind(), block_rows=2)(images, texts, targets=targets).isnan()
