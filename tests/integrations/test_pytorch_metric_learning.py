"""MetricLoss: items with labels, compared with each other or with references."""

import pytest
import torch
from tests.matching import mentions
from torch.nn.functional import normalize

from visavis import PairLoss, Targets
from visavis.core.errors import MissingSupervision, ShapeError, SpecError, VisavisError
from visavis.integrations.pytorch_metric_learning import (
    CrossBatchMemory,
    MetricLoss,
    SelfSupervisedLoss,
)
from visavis.losses.pair_loss import cosine
from visavis.objectives import (
    VLC,
    InfoNCE,
    Ladder,
    MultiSimilarity,
    NTXent,
    Sigmoid,
    Triplet,
    TripletHN,
    Unified,
)

FAMILY = (
    Triplet(margin=1.5),
    TripletHN(margin=1.5),
    NTXent(),
    VLC(gamma=5),
    Unified(gamma=5),
)  # margins wide enough for self pairs to contribute
LABELS = torch.tensor([4, 4, 4, 7, 7, 9])
every_objective = pytest.mark.parametrize("objective", FAMILY, ids=str)


def random_items(number=6):
    return torch.randn(number, 5, dtype=torch.float64, requires_grad=True)


def assert_close(ours, theirs):
    torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-13)


@every_objective
def test_metric_loss_ignores_self_pairs(objective):
    embeddings = random_items()
    value = MetricLoss(objective)(embeddings, LABELS)
    targets = Targets(query_ids=LABELS, candidate_ids=LABELS, ignore=torch.eye(6))
    assert_close(value, objective(cosine(embeddings, embeddings), targets))
    counted = PairLoss(objective)(embeddings, embeddings, LABELS)
    assert not torch.isclose(value, counted)
    (gradient,) = torch.autograd.grad(value, embeddings)
    assert gradient[:5].norm(dim=-1).min() > 0


def test_metric_loss_matches_hardest_triplet_loops():
    embeddings = random_items()
    scores, total = normalize(embeddings, dim=-1) @ normalize(embeddings, dim=-1).T, 0.0
    for anchor in range(6):
        hardest = max(
            scores[anchor, other] for other in range(6) if LABELS[other] != LABELS[anchor]
        )
        for other in range(6):
            if other != anchor and LABELS[other] == LABELS[anchor]:
                total = (
                    total + 2 * (1.5 + hardest - scores[anchor, other]).relu()
                )  # one term as a row and one as a column
    assert_close(MetricLoss(TripletHN(margin=1.5))(embeddings, LABELS), total)


def test_metric_loss_gradient_includes_both_roles():
    assert torch.autograd.gradcheck(
        lambda embeddings: MetricLoss(Unified(gamma=5))(embeddings, LABELS), random_items()
    )


@every_objective
def test_metric_loss_compares_with_references(objective):
    embeddings, references, theirs = random_items(), random_items(4), torch.tensor([9, 7, 4, 5])
    value = MetricLoss(objective)(embeddings, LABELS, ref_emb=references, ref_labels=theirs)
    assert_close(value, PairLoss(objective)(embeddings, references, LABELS, theirs))
    assert all(
        gradient.abs().max() > 0
        for gradient in torch.autograd.grad(value, (embeddings, references))
    )


def test_metric_loss_orders_items_by_relevance():
    """Ladder for one modality: the relevance of items to items, without the pair of an item and
    itself.
    """
    ladder = Ladder(margins=(1.5, 0.5), thresholds=(0.4,), betas=(1.0, 0.5))
    embeddings, relevance = random_items(), torch.rand(6, 6, dtype=torch.float64)
    value = MetricLoss(ladder)(embeddings, LABELS, relevance=relevance)
    targets = Targets(
        query_ids=LABELS, candidate_ids=LABELS, ignore=torch.eye(6), relevance=relevance
    )
    assert_close(value, ladder(cosine(embeddings, embeddings), targets))
    by_function = MetricLoss(ladder)(
        embeddings, LABELS, relevance=lambda rows, columns: relevance[rows][:, columns]
    )
    assert_close(by_function, value)
    one_level = MetricLoss(Ladder(margins=(1.5,), thresholds=(), betas=(1.0,)))
    assert not torch.isclose(value, one_level(embeddings, LABELS))


def test_metric_loss_takes_relevance_of_references():
    ladder, labels = Ladder(thresholds=(0.4,), margins=(0.9, 0.5), betas=(1, 1)), torch.arange(6)
    embeddings, references = random_items(), random_items()
    relevance = torch.rand(6, 6, dtype=torch.float64)
    value = MetricLoss(ladder)(
        embeddings, labels, ref_emb=references, ref_labels=labels, relevance=relevance
    )
    assert_close(
        value, ladder(cosine(embeddings, references), Targets.paired(6, relevance=relevance))
    )


def test_metric_loss_rejects_relevance_of_other_shape():
    loss, embeddings = MetricLoss(Ladder()), random_items()
    with pytest.raises(ShapeError, match=mentions("relevance", "[6, 6]", "[6, 4]")):
        loss(embeddings, LABELS, relevance=torch.rand(6, 4))
    with pytest.raises(MissingSupervision, match="Ladder: expected relevance"):
        loss(embeddings, LABELS)


def test_metric_loss_keeps_pairs_of_equal_labels_with_references():
    images, texts, labels = random_items(), random_items(), torch.arange(6)
    value = MetricLoss(TripletHN())(images, labels, ref_emb=texts, ref_labels=labels)
    assert_close(value, PairLoss(TripletHN())(images, texts))
    assert value > 0.1


def test_metric_loss_equals_peer_nt_xent():
    losses = pytest.importorskip("pytorch_metric_learning.losses")
    peer, ours = losses.NTXentLoss(temperature=0.1), MetricLoss(NTXent(tau=0.1))
    embeddings, references, theirs = random_items(), random_items(4), torch.tensor([9, 7, 4, 4])
    assert_close(ours(embeddings, LABELS), peer(embeddings, LABELS))
    i2t = peer(embeddings, LABELS, ref_emb=references, ref_labels=theirs)
    t2i = peer(references, theirs, ref_emb=embeddings, ref_labels=LABELS)
    assert_close(ours(embeddings, LABELS, ref_emb=references, ref_labels=theirs), (i2t + t2i) / 2)


def test_metric_loss_registers_learnable_scale():
    scale = torch.nn.Parameter(torch.tensor(10.0, dtype=torch.float64))
    loss, embeddings = MetricLoss(NTXent(), scale=scale), random_items()
    assert list(loss.parameters()) == [scale]
    assert_close(loss(embeddings, LABELS), MetricLoss(NTXent(tau=0.1))(embeddings, LABELS))
    loss(embeddings, LABELS).backward()
    assert scale.grad.abs() > 0


def test_metric_loss_rejects_invalid_inputs():
    loss, embeddings = MetricLoss(Unified()), random_items()
    with pytest.raises(VisavisError, match="indices_tuple"):
        loss(embeddings, LABELS, (LABELS, LABELS, LABELS))
    with pytest.raises(ShapeError, match=mentions("ref_emb", "ref_labels")):
        loss(embeddings, LABELS, ref_emb=embeddings)
    with pytest.raises(ShapeError, match=mentions("labels", 6, 4)):
        loss(embeddings[:4], LABELS)
    with pytest.raises(ShapeError, match=mentions("ref_labels", 3, 6)):
        loss(embeddings, LABELS, ref_emb=embeddings, ref_labels=LABELS[:3])
    with pytest.raises(SpecError, match=mentions("objective", "[6, 5]")):
        MetricLoss(embeddings, LABELS)
    with pytest.raises(SpecError, match=mentions("scale", "tensor(10)", "torch.int64")):
        MetricLoss(NTXent(), scale=torch.tensor(10))
    with pytest.raises(ShapeError, match=mentions("embeddings", "list", "[N, D]")):
        loss(embeddings.tolist(), LABELS)
    with pytest.raises(ShapeError, match=mentions("ref_labels", "torch.float32")):
        loss(embeddings, LABELS, ref_emb=embeddings, ref_labels=torch.rand(6))


@pytest.mark.parametrize("symmetric", [True, False])
def test_self_supervised_loss_equals_peer(symmetric):
    losses = pytest.importorskip("pytorch_metric_learning.losses")
    items, views = random_items(), random_items()
    theirs = losses.SelfSupervisedLoss(losses.NTXentLoss(temperature=0.1), symmetric=symmetric)
    right = theirs(items, views) if symmetric else (theirs(items, views) + theirs(views, items)) / 2
    assert_close(
        SelfSupervisedLoss(MetricLoss(NTXent(tau=0.1)), symmetric=symmetric)(items, views), right
    )
    with pytest.raises(ShapeError, match=mentions("ref_emb", 6, 4)):
        SelfSupervisedLoss(MetricLoss(NTXent()))(items, views[:4])


@pytest.mark.parametrize("name", ["NTXent", "SupCon", "MultiSimilarity"])
def test_cross_batch_memory_equals_peer(name):
    losses, miners = (
        pytest.importorskip(f"pytorch_metric_learning.{part}") for part in ("losses", "miners")
    )
    theirs, ours, miner = {
        "NTXent": (losses.NTXentLoss(temperature=0.1), NTXent(tau=0.1), None),
        "SupCon": (losses.SupConLoss(temperature=0.1), InfoNCE(tau=0.1), None),
        "MultiSimilarity": (
            losses.MultiSimilarityLoss(),
            MultiSimilarity(reduction="half_mean"),
            miners.MultiSimilarityMiner(),
        ),
    }[name]
    peer = losses.CrossBatchMemory(theirs, embedding_size=5, memory_size=15, miner=miner)
    memory = CrossBatchMemory(MetricLoss(ours), embedding_size=5, memory_size=15)
    for step in range(6):  # the memory is overwritten from the third batch on
        embeddings, labels = (
            random_items(),
            torch.tensor([4, 4, 4, 7, 7, 7])[torch.randperm(6)] + step % 2,
        )
        values = peer(embeddings, labels), memory(embeddings, labels)
        assert values[1] > 0
        assert_close(values[1], values[0])
        assert_close(*(torch.autograd.grad(value, embeddings)[0] for value in values))


def test_cross_batch_memory_is_saved_and_uses_scale_and_bias():
    batches = [(random_items(), LABELS) for _ in range(3)]
    for options in (
        {"objective": NTXent(), "scale": 10.0},
        {"objective": Sigmoid(bias=-4.0), "scale": 10.0},
    ):
        memory, copy = (CrossBatchMemory(MetricLoss(**options), 5, 16).double() for _ in range(2))
        for batch in batches[:2]:
            memory(*batch)
        copy.load_state_dict(memory.state_dict())
        assert_close(copy(*batches[2]), memory(*batches[2]))
    once = CrossBatchMemory(MetricLoss(NTXent(), scale=10.0), 5, 16)
    assert_close(once(*batches[0]), MetricLoss(NTXent(tau=0.1))(*batches[0]))
    with pytest.raises(ShapeError, match=mentions("memory_size", 6, 4)):
        CrossBatchMemory(MetricLoss(NTXent()), 5, 4)(*batches[0])
