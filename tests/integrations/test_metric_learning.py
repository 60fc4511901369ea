"""MetricLoss: items with labels, compared with each other or with references."""

import pytest
import torch
from torch.nn.functional import normalize

from visavis import PairLoss, Targets
from visavis.engine import cosine
from visavis.errors import ShapeError, SpecError, VisavisError
from visavis.integrations.metric_learning import MetricLoss
from visavis.objectives import VLC, NTXent, Triplet, TripletHN, Unified

FAMILY = (Triplet(margin=1.5), TripletHN(margin=1.5), NTXent(), VLC(gamma=5), Unified(gamma=5))  # so wide that an item counts for itself
LABELS = torch.tensor([4, 4, 4, 7, 7, 9])
every_objective = pytest.mark.parametrize("objective", FAMILY, ids=str)


def items(number=6):
    return torch.randn(number, 5, dtype=torch.float64, requires_grad=True)


def equal(ours, theirs):
    torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-13)


@every_objective
def test_what_an_item_is_to_itself_is_ignored(objective):
    embeddings = items()
    value = MetricLoss(objective)(embeddings, LABELS)
    targets = Targets(query_ids=LABELS, candidate_ids=LABELS, ignore=torch.eye(6))
    equal(value, objective(cosine(embeddings, embeddings), targets))
    counted = PairLoss(objective)(embeddings, embeddings, LABELS)
    assert not torch.isclose(value, counted)
    (gradient,) = torch.autograd.grad(value, embeddings)
    assert gradient[:5].norm(dim=-1).min() > 0


def test_the_hardest_triplets_by_loops():
    embeddings = items()
    scores, total = normalize(embeddings, dim=-1) @ normalize(embeddings, dim=-1).T, 0.0
    for anchor in range(6):
        hardest = max(scores[anchor, other] for other in range(6) if LABELS[other] != LABELS[anchor])
        for other in range(6):
            if other != anchor and LABELS[other] == LABELS[anchor]:
                total = total + 2 * (1.5 + hardest - scores[anchor, other]).relu()  # once as a row, once as a column
    equal(MetricLoss(TripletHN(margin=1.5))(embeddings, LABELS), total)


def test_the_gradient_counts_both_roles_of_an_item():
    assert torch.autograd.gradcheck(lambda embeddings: MetricLoss(Unified(gamma=5))(embeddings, LABELS), items())


@every_objective
def test_references_are_another_side(objective):
    embeddings, references, theirs = items(), items(4), torch.tensor([9, 7, 4, 5])
    value = MetricLoss(objective)(embeddings, LABELS, ref_emb=references, ref_labels=theirs)
    equal(value, PairLoss(objective)(embeddings, references, LABELS, theirs))
    assert all(gradient.abs().max() > 0 for gradient in torch.autograd.grad(value, (embeddings, references)))


def test_the_same_labels_of_two_sides_drop_no_pair():
    images, texts, labels = items(), items(), torch.arange(6)
    value = MetricLoss(TripletHN())(images, labels, ref_emb=texts, ref_labels=labels)
    equal(value, PairLoss(TripletHN())(images, texts))
    assert value > 0.1


def test_it_equals_the_peer_where_both_have_the_objective():
    losses = pytest.importorskip("pytorch_metric_learning.losses")
    peer, ours = losses.NTXentLoss(temperature=0.1), MetricLoss(NTXent(tau=0.1))
    embeddings, references, theirs = items(), items(4), torch.tensor([9, 7, 4, 4])
    equal(ours(embeddings, LABELS), peer(embeddings, LABELS))
    forth = peer(embeddings, LABELS, ref_emb=references, ref_labels=theirs)
    back = peer(references, theirs, ref_emb=embeddings, ref_labels=LABELS)
    equal(ours(embeddings, LABELS, ref_emb=references, ref_labels=theirs), (forth + back) / 2)


def test_a_learnable_scale_is_a_parameter():
    scale = torch.nn.Parameter(torch.tensor(10.0, dtype=torch.float64))
    loss, embeddings = MetricLoss(NTXent(), scale=scale), items()
    assert list(loss.parameters()) == [scale]
    equal(loss(embeddings, LABELS), MetricLoss(NTXent(tau=0.1))(embeddings, LABELS))
    loss(embeddings, LABELS).backward()
    assert scale.grad.abs() > 0


def test_misuse_is_named():
    loss, embeddings = MetricLoss(Unified()), items()
    with pytest.raises(VisavisError, match=r"^MetricLoss got a miner's indices_tuple: leave it out"):
        loss(embeddings, LABELS, (LABELS, LABELS, LABELS))
    with pytest.raises(ShapeError, match=r"^MetricLoss got one of ref_emb and ref_labels: give both"):
        loss(embeddings, LABELS, ref_emb=embeddings)
    with pytest.raises(ShapeError, match=r"^6 labels for 4 embeddings: give one label for each\.$"):
        loss(embeddings[:4], LABELS)
    with pytest.raises(ShapeError, match=r"^3 ref_labels for 6 ref_emb: give one label for each\.$"):
        loss(embeddings, LABELS, ref_emb=embeddings, ref_labels=LABELS[:3])
    with pytest.raises(ShapeError, match=r"^labels is None, expected one whole number for each item"):
        loss(embeddings, None)
    with pytest.raises(ShapeError, match=r"^labels must be whole numbers in one row; texts and nested lists cannot be ids: number them"):
        loss(embeddings, ["a", "b", "c", "d", "e", "f"])
    with pytest.raises(SpecError, match=r"^MetricLoss got a Tensor of shape \[6, 5\], expected an objective: such as Unified\(\)"):
        MetricLoss(embeddings, LABELS)
    with pytest.raises(SpecError, match=r"^MetricLoss got scale=tensor\(10\), of torch.int64, expected a number above 0"):
        MetricLoss(NTXent(), scale=torch.tensor(10))
    with pytest.raises(ShapeError, match=r"^embeddings are a list, expected a tensor \[N, D\]\.$"):
        loss(embeddings.tolist(), LABELS)
    with pytest.raises(ShapeError, match=r"^ref_labels has shape .* expected one whole number"):
        loss(embeddings, LABELS, ref_emb=embeddings, ref_labels=torch.rand(6))
