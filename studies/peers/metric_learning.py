"""Losses of pytorch-metric-learning compared with ours: values, magnitudes, and clipped gradients
of a sum.

python studies/peers/metric_learning.py, or under torchrun --nproc-per-node 2 for its
DistributedLossWrapper. Needs pytorch-metric-learning and scikit-learn. The checks are those of its
own tests: loops over labeled angles, with and without references, and batches without a pair.
"""

import copy
import math
import os
from collections.abc import Callable

import torch
from pytorch_metric_learning import distances, losses, miners, reducers
from pytorch_metric_learning.utils.distributed import DistributedLossWrapper
from sklearn.datasets import load_digits
from torch import Tensor, distributed, nn
from torch.nn.functional import normalize
from torch.nn.parallel import DistributedDataParallel

from visavis.evaluation.metrics import average_precision_at_r
from visavis.integrations.pytorch_metric_learning import MetricLoss
from visavis.objectives import Circle, InfoNCE, MultiSimilarity, NTXent, Triplet, Unified

SUM = {"distance": distances.CosineSimilarity(), "reducer": reducers.SumReducer()}
PAIRS = {
    "NTXent": (losses.NTXentLoss(temperature=0.1), MetricLoss(NTXent(tau=0.1))),
    "SupCon": (losses.SupConLoss(temperature=0.1), MetricLoss(InfoNCE(tau=0.1))),
    "Triplet, twice": (
        lambda *given: 2 * losses.TripletMarginLoss(margin=0.2, **SUM)(*given),
        MetricLoss(Triplet()),
    ),
    "Circle": (
        losses.CircleLoss(m=0.25, gamma=64),
        MetricLoss(Circle(margin=0.25, gamma=64, reduction="half_mean")),
    ),
}


def angles(angles_deg: list[float], dtype: torch.dtype) -> Tensor:
    radians = torch.tensor(angles_deg, dtype=dtype).deg2rad()
    return torch.stack([radians.cos(), radians.sin()], dim=-1).requires_grad_()


def by_loops(
    embeddings: Tensor,
    labels: list[int],
    references: Tensor,
    reference_labels: list[int],
    *,
    same_items: bool,
) -> Tensor:
    """NT-Xent of one direction, term by term."""
    terms = []
    for i, label_of_anchor in enumerate(labels):
        scores = [(embeddings[i] @ reference / 0.1).exp() for reference in references]
        negative = sum(
            (
                score
                for score, label in zip(scores, reference_labels, strict=True)
                if label != label_of_anchor
            ),
            torch.zeros(()),
        )
        terms += [
            -(score / (score + negative)).log()
            for j, (score, label) in enumerate(zip(scores, reference_labels, strict=True))
            if label == label_of_anchor and not (same_items and i == j)
        ]
    return torch.stack(terms).mean()


def check_by_loops() -> None:
    loss, (angles_deg, labels), (reference_angles, reference_labels) = (
        MetricLoss(NTXent(tau=0.1)),
        *LABELED_ANGLES,
    )
    largest_difference = 0.0
    for dtype in (torch.float32, torch.float64):
        embeddings = angles(angles_deg, dtype)
        references = angles(reference_angles, dtype)
        value = loss(embeddings, labels)
        largest_difference = max(
            largest_difference,
            abs(
                value.item()
                - by_loops(embeddings, labels, embeddings, labels, same_items=True).item()
            ),
        )
        both = by_loops(
            embeddings, labels, references, reference_labels, same_items=False
        ) + by_loops(references, reference_labels, embeddings, labels, same_items=False)
        value = loss(embeddings, labels, ref_emb=references, ref_labels=reference_labels)
        largest_difference = max(largest_difference, abs(value.item() - both.item() / 2))
        value.backward()
    empty = [
        loss(angles(angles_deg, torch.float32), ids).item()
        for angles_deg, ids in (([0], [0]), ([0, 10, 20], [0] * 3), ([0, 40, 60], [1, 2, 3]))
    ]
    print(
        f"by loops over angles: at most {largest_difference:.0e} apart. Batches without a pair: "
        f"{empty}"
    )


LABELED_ANGLES = (([0, 10, 20, 50, 60, 80], [0, 0, 0, 1, 1, 2]), ([5, 25, 55, 70], [0, 1, 1, 2]))


def check_values(draws: int = 200) -> None:
    for name, (library_loss, own_loss) in PAIRS.items():
        largest_difference = 0.0
        for draw in range(draws):
            torch.manual_seed(draw)
            labels = torch.randint(0, 4, (16,))
            embeddings = torch.randn(16, 8, dtype=torch.float64, requires_grad=True)
            values = library_loss(embeddings, labels), own_loss(embeddings, labels)
            gradients = [torch.autograd.grad(value, embeddings)[0] for value in values]
            largest_difference = max(
                largest_difference,
                abs((values[0] - values[1]).item()),
                (gradients[0] - gradients[1]).abs().max().item(),
            )
        print(
            f"{name}: value and gradient at most {largest_difference:.0e} apart over {draws} "
            "batches"
        )
    mined_difference = 0.0
    for draw in range(draws):
        torch.manual_seed(draw)
        labels = torch.arange(16) // 4
        embeddings = torch.randn(16, 8, dtype=torch.float64)
        pairs = miners.MultiSimilarityMiner(epsilon=0.1)(embeddings, labels)
        value = MetricLoss(MultiSimilarity(reduction="half_mean"))(embeddings, labels)
        mined_difference = max(
            mined_difference,
            abs((losses.MultiSimilarityLoss()(embeddings, labels, pairs) - value).item()),
        )
    print(f"MultiSimilarity with its miner: at most {mined_difference:.0e} apart")


def digits() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    images, labels = (torch.tensor(each) for each in load_digits(return_X_y=True))
    images = images.float() / 16
    return images[:1200], labels[:1200], images[1200:], labels[1200:]


DIGIT_LOSSES = {
    "pytorch-metric-learning's TripletMarginLoss": lambda: losses.TripletMarginLoss(
        margin=0.2, distance=distances.CosineSimilarity()
    ),
    "Triplet(), a sum": lambda: MetricLoss(Triplet()),
    'Triplet(reduction="half_mean")': lambda: MetricLoss(Triplet(reduction="half_mean")),
    "Unified(), a sum": lambda: MetricLoss(Unified()),
    'Unified(reduction="half_mean")': lambda: MetricLoss(Unified(reduction="half_mean")),
}


def train_on_digits(
    make: Callable[[], nn.Module], seed: int, max_norm: float, *, steps: int = 200
) -> tuple[float, float]:
    """The norm of the first gradient, and MAP@R of unseen digits. Gradients are clipped at the norm
    ``max_norm``.
    """
    images, labels, unseen, unseen_labels = digits()
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 16))
    loss = make()
    first = math.nan
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(steps):
        rows = torch.randperm(len(images))[:128]
        optimizer.zero_grad()
        loss(model(images[rows]), labels[rows]).backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        first = norm.item() if step == 0 else first
        optimizer.step()
    with torch.no_grad():
        embeddings = normalize(model(unseen), dim=-1)
    order = (embeddings @ embeddings.T).fill_diagonal_(-math.inf).argsort(descending=True)[:, :-1]
    positive_ranks = (
        torch.arange(1.0, order.shape[1] + 1)
        .where(unseen_labels[order] == unseen_labels[:, None], math.inf)
        .sort()
        .values
    )
    return first, average_precision_at_r(positive_ranks).mean().item()


def magnitudes(seeds: int = 3) -> None:
    for name, make in DIGIT_LOSSES.items():
        results = torch.tensor(
            [
                [train_on_digits(make, seed, max_norm) for seed in range(seeds)]
                for max_norm in (math.inf, 1.0)
            ]
        )
        scores = [
            f"{seeds_scores.mean():.3f} ± {seeds_scores.std():.3f}"
            for seeds_scores in results[:, :, 1]
        ]
        print(
            f"{name}: first gradient of norm {results[0, :, 0].mean():.3g}, MAP@R {scores[0]}, "
            f"clipped at norm 1 {scores[1]}"
        )


def over_processes() -> None:
    """The gradient under DDP of ours and of their wrapper, as a multiple of one process' with all
    items.
    """
    distributed.init_process_group("gloo")
    rank = distributed.get_rank()
    number = distributed.get_world_size()
    torch.manual_seed(0)
    items = torch.randn(16, 8)
    labels = torch.arange(16) % 4
    model = nn.Linear(8, 4)
    own_rows = slice(rank * 16 // number, (rank + 1) * 16 // number)
    local_loss = MetricLoss(NTXent(tau=0.1), gather=False)
    exact = torch.autograd.grad(local_loss(model(items), labels), model.weight)[0]
    for name, loss in {
        "MetricLoss": MetricLoss(NTXent(tau=0.1)),
        "DistributedLossWrapper": DistributedLossWrapper(losses.NTXentLoss(temperature=0.1)),
        "DistributedLossWrapper(efficient=True)": DistributedLossWrapper(
            losses.NTXentLoss(temperature=0.1), efficient=True
        ),
    }.items():
        wrapped = DistributedDataParallel(copy.deepcopy(model))
        loss(wrapped(items[own_rows]), labels[own_rows]).backward()
        gradient = wrapped.module.weight.grad
        norm_ratio = gradient.norm() / exact.norm()
        cosine = torch.cosine_similarity(gradient.flatten(), exact.flatten(), dim=0)
        if rank == 0:
            print(f"{name}: {norm_ratio:.4f} times the exact gradient, cosine {cosine:.6f}")
    distributed.destroy_process_group()


def main() -> None:
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        over_processes()
    else:
        check_by_loops()
        check_values()
        magnitudes()


if __name__ == "__main__":
    main()
