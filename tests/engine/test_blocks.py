"""By row blocks, the value and every gradient are those of the one matrix: for all objectives, relations, facts and scores."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal, get_args, get_origin, get_type_hints

import pytest
import torch
from torch import nn

from visavis import PairLoss, Targets
from visavis.engine import cosine, row_blocks
from visavis.engine.kept import KeptCosines
from visavis.errors import VisavisError
from visavis.objectives import CATALOG, VLC, NTXent, Objective, Triplet, TripletHN, Unified
from visavis.objectives.summary import SummaryObjective
from visavis.targets import Factors
from visavis.types import Encoded

every_objective = pytest.mark.parametrize("kind", CATALOG, ids=lambda kind: kind.__name__)
every_reduction = pytest.mark.parametrize("reduction", ["sum", "mean", "half_mean"])
SUMMARIES = [kind for kind in CATALOG if issubclass(kind, SummaryObjective)]
every_summary = pytest.mark.parametrize("kind", SUMMARIES, ids=lambda kind: kind.__name__)

# rows of ids: one to one; captions; ids that occur on both sides several times, or on one side only
IDS = {
    "pairs": (range(9), range(9)),
    "captions": ([3, 1, 2, 7], [1, 1, 2, 2, 3, 3, 3, 7, 7]),
    "duplicates": ([1, 1, 2, 3, 5, 3, 2], [1, 2, 2, 3, 1, 8]),
    "strangers": ([1, 2, 3], [4, 5]),
    "one": ([1], [1, 1, 1]),
}


def close(ours, theirs, **tolerance) -> None:
    torch.testing.assert_close(ours, theirs, **({"rtol": 1e-12, "atol": 1e-13} | tolerance))


def vectors(*numbers: int, width: int = 6) -> list[torch.Tensor]:
    return [torch.randn(number, width, dtype=torch.float64, requires_grad=True) for number in numbers]


def needed(height: int, width: int) -> dict[str, torch.Tensor]:
    """Facts that some objective cannot do without; none of those that change another."""
    made = {name: torch.rand(height, width, dtype=torch.float64) for name in ("relevance", "pair_margin")}
    return made | {
        f"{name}_offline_scores": torch.rand(n, 2, dtype=torch.float64, requires_grad=True)
        for name, n in (("query", height), ("candidate", width))
    }


def same(loss: nn.Module, expected, inputs, *items, **arguments) -> None:
    """The loss and its gradients by ``inputs`` are those of ``expected``; what comes from above multiplies them."""
    inputs = [each for each in inputs if each.requires_grad]
    value = loss(*items, **arguments)
    close(value, expected)
    ours = torch.autograd.grad(3 * value, inputs, allow_unused=True, materialize_grads=True)
    theirs = torch.autograd.grad(expected, inputs, allow_unused=True, materialize_grads=True, retain_graph=True)
    for own, right in zip(ours, theirs, strict=True):
        close(own, 3 * right, atol=1e-12)


# every objective


@every_objective
@every_reduction
@pytest.mark.parametrize("ids", IDS)
@pytest.mark.parametrize("rows", [1, 2, 4, 100])
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


@pytest.mark.parametrize("objective", variants(), ids=str)
@pytest.mark.parametrize("ids", ["captions", "duplicates"])
@pytest.mark.parametrize("rows", [None, 2])
def test_every_choice_of_a_field(objective, ids, rows):
    query_ids, candidate_ids = IDS[ids]
    images, texts = vectors(len(query_ids), len(candidate_ids))
    targets = Targets(query_ids=query_ids, candidate_ids=candidate_ids, **needed(len(query_ids), len(candidate_ids)))
    expected = objective(cosine(images, texts), targets)
    same(PairLoss(objective, block_rows=rows), expected, [images, texts], images, texts, targets=targets)


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


@every_objective
@pytest.mark.parametrize("name", ["relevance", "weight", "pair_margin"])
@pytest.mark.parametrize("form", ["tensor", "factors", "function"])
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


@every_objective
@every_reduction
@pytest.mark.parametrize("sides", ["texts", "images", "texts and images"])
def test_extra_candidates(kind, reduction, sides):
    images, texts, more_images, more_texts = vectors(5, 6, 3, 4)
    extra = {"extra_texts": more_texts, "extra_text_ids": [8, 1, 8, 9]} if "texts" in sides else {}
    extra |= {"extra_images": more_images, "extra_image_ids": [2, 9, 1]} if "images" in sides else {}
    ids = [1, 1, 2, 3, 4], [1, 2, 2, 3, 4, 4]
    offline = {name: fact for name, fact in needed(5, 6).items() if "offline" in name}
    targets = Targets(query_ids=ids[0], candidate_ids=ids[1], **offline)
    objective = kind(reduction=reduction)
    try:
        expected = PairLoss(objective)(images, texts, targets=targets, **extra) if kind in SUMMARIES else None
        dense = PairLoss(objective)(images, texts, targets=targets, **extra)
    except VisavisError:
        pytest.skip(f"{kind.__name__} needs facts of pairs, which say nothing about extra candidates")
    same(
        PairLoss(objective, block_rows=2),
        dense if expected is None else expected,
        [images, texts, more_images, more_texts],
        images,
        texts,
        targets=targets,
        **extra,
    )


@every_objective
@every_reduction
@pytest.mark.parametrize("ids", IDS)
@pytest.mark.parametrize("most", [1, 20, 2**20])
def test_few_cosines_are_kept_and_equal_the_matrix(kind, reduction, ids, most, monkeypatch):
    monkeypatch.setattr(KeptCosines, "at_once", most)
    monkeypatch.setattr(row_blocks, "FEWEST_ROWS", 1)
    query_ids, candidate_ids = IDS[ids]
    images, texts = vectors(len(query_ids), len(candidate_ids))
    known = {name: fact.detach() for name, fact in needed(len(query_ids), len(candidate_ids)).items()}
    targets = Targets(query_ids=query_ids, candidate_ids=candidate_ids, **known)
    objective = kind(reduction=reduction)
    same(PairLoss(objective), objective(cosine(images, texts), targets), [images, texts], images, texts, targets=targets)
    if objective.scalable:
        scale, alone = nn.Parameter(torch.tensor(3.0).double()), replace(objective, tau=1.0)
        expected = alone(scale * cosine(images, texts), targets)
        same(PairLoss(objective, scale=scale), expected, [images, texts, scale], images, texts, targets=targets)


# any score


class WordScore(nn.Module):
    """The best region for each word, averaged, through one learned map, with dropout: a score that is no product of vectors."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.map = nn.Linear(6, 6, bias=False).double()
        self.dropout = nn.Dropout(dropout)

    def forward(self, images: Encoded, texts: Encoded) -> torch.Tensor:
        affinity = torch.einsum("vrd,twd->vtrw", self.map(images.vectors), texts.vectors)
        best = affinity.masked_fill(~images.mask[:, None, :, None], float("-inf")).amax(2)
        return self.dropout((best * texts.mask).sum(-1) / texts.mask.sum(-1))


def items(number: int, longest: int) -> Encoded:
    mask = torch.arange(longest) < torch.randint(1, longest + 1, (number, 1))
    mask[0] = True
    return Encoded(torch.randn(number, longest, 6, dtype=torch.float64, requires_grad=True), mask)


@every_objective
@every_reduction
@pytest.mark.parametrize("extra", [False, True])
def test_any_score_with_parameters_of_its_own(kind, reduction, extra):
    score, images, texts, more = WordScore(), items(5, 3), items(6, 4), items(2, 7)
    facts = {name: fact for name, fact in needed(5, 6).items() if not extra or "offline" in name}
    targets = Targets(query_ids=[1, 1, 2, 3, 4], candidate_ids=[1, 2, 2, 3, 4, 4], **facts)
    arguments = {"targets": targets} | ({"extra_texts": more, "extra_text_ids": [2, 9]} if extra else {})
    objective = kind(reduction=reduction)
    try:
        expected = PairLoss(objective, score=score)(images, texts, **arguments)
    except VisavisError:
        pytest.skip(f"{kind.__name__} needs facts of pairs, which say nothing about extra candidates")
    inputs = [images.vectors, texts.vectors, more.vectors, score.map.weight]
    same(PairLoss(objective, score=score, block_rows=2), expected, inputs, images, texts, **arguments)


def test_parameters_are_found_wherever_a_score_keeps_them():
    module, outer = WordScore(), torch.randn(6, dtype=torch.float64, requires_grad=True)
    weights = outer.exp()
    images, texts = vectors(4, 4)
    for objective in (Triplet(), Unified()):
        expected = objective((images * weights) @ texts.T, Targets.paired(4))
        loss = PairLoss(objective, block_rows=3, score=lambda images, texts: (images * weights) @ texts.T)
        same(loss, expected, [images, texts, outer], images, texts)
    regions, words = items(4, 3), items(4, 5)
    value = PairLoss(Unified(), block_rows=3, score=module.forward)(regions, words)
    value.backward()
    right = torch.autograd.grad(Unified()(module(regions, words), Targets.paired(4)), module.map.weight)
    close(module.map.weight.grad, *right)


@pytest.mark.parametrize("objective", [Unified(gamma=3.0), TripletHN()], ids=str)
def test_a_block_scored_twice_drops_the_same(objective):
    score, images, texts = WordScore(dropout=0.5), items(8, 3), items(8, 4)
    loss = PairLoss(objective, score=score, block_rows=3)
    torch.manual_seed(1)
    value = loss(images, texts)
    (found,) = torch.autograd.grad(value, images.vectors)
    step = 1e-6 * torch.randn_like(found)
    torch.manual_seed(1)
    moved = loss(Encoded(images.vectors.detach() + step, images.mask), texts)
    torch.testing.assert_close((moved - value).detach(), (found * step).sum(), rtol=1e-3, atol=1e-12)


@pytest.mark.parametrize("scale", [7.0, nn.Parameter(torch.tensor(7.0).double()), nn.Parameter(torch.tensor([7.0]).double())], ids=str)
@pytest.mark.parametrize("score", [None, lambda images, texts: cosine(images, texts)], ids=["cosine", "function"])
def test_a_scale(scale, score):
    images, texts = vectors(7, 7)
    for objective in (NTXent(), NTXent(denominator="negatives", reduction="sum")):
        expected = replace(objective, tau=1.0)(scale * cosine(images, texts), Targets.paired(7))
        inputs = [images, texts, *([scale] if isinstance(scale, nn.Parameter) else [])]
        same(PairLoss(objective, scale=scale, score=score, block_rows=3), expected, inputs, images, texts)


# the fast way of objectives with one number for each query


@every_summary
@every_reduction
@pytest.mark.parametrize("ids", IDS)
def test_both_directions_at_once_equal_one_after_the_other(kind, reduction, ids):
    query_ids, candidate_ids = IDS[ids]
    images, texts = vectors(len(query_ids), len(candidate_ids))
    objective = kind(reduction=reduction)
    nothing = {"extra_texts": torch.zeros(0, 6).double(), "extra_text_ids": []}  # with extras, one block cannot serve both
    apart = PairLoss(objective, block_rows=2)(images, texts, query_ids, candidate_ids, **nothing)
    same(PairLoss(objective, block_rows=2), apart, [images, texts], images, texts, query_ids, candidate_ids)


SPREADS = {
    "antipodal": lambda x: torch.stack([x, -x], 1).flatten(0, 1),
    "one far group": lambda x: torch.cat([x + 100, -x - 100]),
    "ordinary": lambda x: torch.cat([x, torch.randn_like(x)]),
}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("sharpness", [1.0, 50.0, 1e3, 1e5])
@pytest.mark.parametrize("spread", SPREADS)
def test_no_sharpness_underflows(dtype, sharpness, spread):
    images = SPREADS[spread](torch.randn(6, 4)).to(dtype).requires_grad_()
    texts = (-images + 0.01 * torch.randn_like(images)).detach().requires_grad_()
    for objective in (VLC(gamma=sharpness), Unified(gamma=sharpness), NTXent(tau=1 / sharpness)):
        expected = objective(cosine(images, texts), Targets.paired(12))
        tolerance = {"rtol": 1e-10, "atol": 1e-10} if dtype == torch.float64 else {"rtol": 1e-4, "atol": 1e-6 * sharpness}
        value = PairLoss(objective, block_rows=5)(images, texts)
        close(value, expected, **tolerance)
        for ours, right in zip(*(torch.autograd.grad(each, (images, texts)) for each in (value, expected)), strict=True):
            scale = right.abs().max().item() + 1e-30
            close(ours / scale, right / scale, rtol=1e-3, atol=1e-8 if dtype == torch.float64 else 3e-3 * max(1, sharpness / 1e3))


@every_summary
@pytest.mark.parametrize("rows", [2, 100])
def test_edges_are_finite(kind, rows):
    for images, texts in ((torch.ones(5, 3), torch.ones(5, 3)), (torch.eye(5), -torch.eye(5)), (torch.zeros(5, 2), torch.eye(5)[:, :2])):
        images.requires_grad_()
        value = PairLoss(kind(), block_rows=rows)(images, texts)
        value.backward()
        assert value.isfinite()
        assert images.grad.isfinite().all()
        close(value, kind()(cosine(images, texts), Targets.paired(5)), rtol=1e-5, atol=1e-5)


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


@every_summary
@pytest.mark.parametrize("broken", range(6))
def test_a_negative_that_is_no_number_is_not_hidden(kind, broken):
    images, texts = torch.randn(6, 5), torch.randn(6, 5)
    texts[broken, 2] = torch.nan
    for rows in (1, 2, 6):
        assert PairLoss(kind(), block_rows=rows)(images, texts, range(6), [0, 1, 2, 3, 4, 5]).isnan()
        strangers = [number if number != broken else 99 for number in range(6)]  # nobody's positive, everybody's negative
        assert PairLoss(kind(), block_rows=rows)(images, texts, range(6), strangers).isnan()


# precision and the graph


@every_objective
@pytest.mark.parametrize("rows", [None, 64])
def test_under_autocast_blocks_differ_by_the_rounding_of_products_alone(kind, rows):
    images, texts = (torch.randn(256, 32, requires_grad=True) for _ in range(2))
    facts = {name: fact.detach().float() for name, fact in needed(256, 256).items()}
    targets = Targets(query_ids=range(256), candidate_ids=range(256), **facts)
    exact = kind()(cosine(images, texts), targets)
    with torch.autocast("cpu", torch.bfloat16):
        ours = PairLoss(kind(), block_rows=rows)(images, texts, targets=targets)
        plain = kind()(cosine(images, texts), targets)
    assert ours.dtype == torch.float32
    gradients = [torch.autograd.grad(each, images)[0].flatten() for each in (exact, ours, plain)]
    assert all(gradient.isfinite().all() for gradient in gradients)
    assert abs(ours - exact) <= 1.5 * abs(plain - exact) + 0.002 * abs(exact)
    error, plain_error = ((gradient - gradients[0]).norm() / gradients[0].norm() for gradient in gradients[1:])
    assert error <= 1.5 * plain_error + 0.01


@pytest.mark.parametrize("objective", [Triplet(), TripletHN(), Unified()], ids=str)
def test_precision_of_the_inputs(objective):
    images, texts = torch.randn(9, 5, dtype=torch.bfloat16, requires_grad=True), torch.randn(9, 5, requires_grad=True)
    value = PairLoss(objective, block_rows=4)(images, texts)
    expected = objective(cosine(images, texts), Targets.paired(9))
    assert value.dtype == torch.float32
    close(value, expected, rtol=1e-5, atol=1e-5)
    for ours, right in zip(*(torch.autograd.grad(each, (images, texts)) for each in (value, expected)), strict=True):
        assert ours.dtype == right.dtype
        close(ours, right, rtol=0.01, atol=1e-4)


@every_objective
def test_only_what_wants_a_gradient_gets_one(kind):
    images, texts = vectors(5, 5)
    targets = Targets(query_ids=range(5), candidate_ids=range(5), **{name: fact.detach() for name, fact in needed(5, 5).items()})
    loss = PairLoss(kind(), block_rows=2)
    expected = kind()(cosine(images, texts), targets)
    same(loss, expected, [images], images, texts.detach(), targets=targets)
    same(loss, expected, [texts], images.detach(), texts, targets=targets)
    assert not loss(images.detach(), texts.detach(), targets=targets).requires_grad
    with torch.no_grad():
        value = loss(images, texts, targets=targets)
    assert not value.requires_grad
    close(value, expected.detach())


@pytest.mark.parametrize("objective", [Triplet(), TripletHN(), Unified()], ids=str)
def test_a_gradient_formed_already_has_none_itself(objective):
    images, texts = vectors(5, 5)
    value = PairLoss(objective, block_rows=2)(images, texts)
    with pytest.raises(VisavisError, match=r"^PairLoss has formed its gradient already and cannot be differentiated twice"):
        torch.autograd.grad(value, images, create_graph=True)


def test_a_function_with_a_gradient_is_not_dropped_in_silence():
    images, texts = vectors(4, 4)
    table = torch.rand(4, 4, dtype=torch.float64, requires_grad=True)
    targets = Targets.paired(4, weight=lambda rows, columns: table[rows][:, columns])
    with pytest.raises(VisavisError, match=r"^the function given for weight returns numbers with a gradient"):
        PairLoss(Unified(), block_rows=2)(images, texts, targets=targets)


@every_objective
def test_a_compiler_sees_through_the_matrix(kind):
    images, texts = vectors(6, 6)
    facts = {name: fact.detach() for name, fact in needed(6, 6).items()}
    targets = Targets(query_ids=range(6), candidate_ids=[0, 0, 1, 2, 3, 4], **facts)
    torch._dynamo.reset()
    compiled = torch.compile(PairLoss(kind()), fullgraph=True, backend="eager")
    same(compiled, kind()(cosine(images, texts), targets), [images, texts], images, texts, targets=targets)


@pytest.mark.gpu
@every_objective
@pytest.mark.parametrize("rows", [None, 2])
def test_on_a_gpu_as_on_a_cpu(kind, rows):
    images, texts = vectors(7, 6)
    facts = {name: fact.detach() for name, fact in needed(7, 6).items()}
    targets = Targets(query_ids=IDS["duplicates"][0], candidate_ids=IDS["duplicates"][1], **facts)
    expected = kind()(cosine(images, texts), targets)
    value = PairLoss(kind(), block_rows=rows)(images.cuda(), texts.cuda(), targets=targets)
    close(value.cpu(), expected)
    for ours, right in zip(*(torch.autograd.grad(each, (images, texts)) for each in (value, expected)), strict=True):
        close(ours, right, rtol=1e-10, atol=1e-11)
