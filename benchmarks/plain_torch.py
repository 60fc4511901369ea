"""Every objective by PairLoss, compared with the same loss in a few lines of plain torch.

Both run forward and backward on the same embeddings and ids, in turns in one process, on one
thread. The table shows the ratio of the processor times, PairLoss / plain torch: below 1, PairLoss
is faster. ``SigLIP`` compares Sigmoid with the formula of open_clip's ``SigLipLoss``, which knows
one caption per image only. Values and gradients of both sides are compared first.

    python benchmarks/plain_torch.py [--sizes 64 256 512 1024 2048] [--captions 1 5]
                                     [--objectives NAME ...] [--seconds 0.5]
"""

# Every direction has the same arguments, also where it reads fewer.
# ruff: noqa: ARG001

from __future__ import annotations

import argparse
import math
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid, normalize, softplus

from visavis import PairLoss, Targets
from visavis.objectives import CATALOG, Objective, Sigmoid

DIM = 512
INF = math.inf
Direction = Callable[[Any, Tensor, Tensor, dict[str, Tensor]], Tensor]


def plain_loss(
    objective: Any, images: Tensor, texts: Tensor, ids: tuple[Tensor, Tensor], extra: Any
) -> Tensor:
    """The loss of both directions. ``extra`` holds the annotations of each direction."""
    scores = normalize(images, dim=-1) @ normalize(texts, dim=-1).T
    positive = ids[0][:, None] == ids[1]
    direction = DIRECTIONS[type(objective).__name__]
    terms = [
        direction(objective, scores, positive, extra[0]),
        direction(objective, scores.T, positive.T, extra[1]),
    ]
    if objective.reduction == "sum":
        return terms[0].sum() + terms[1].sum()
    return (terms[0].mean() + terms[1].mean()) * (0.5 if objective.reduction == "half_mean" else 1)


def siglip_loss(images: Tensor, texts: Tensor, scale: float = 10.0, bias: float = -10.0) -> Tensor:
    """The formula of ``SigLipLoss`` in open_clip."""
    logits = scale * normalize(images, dim=-1) @ normalize(texts, dim=-1).T + bias
    labels = -torch.ones_like(logits) + 2 * torch.eye(len(images))
    return -logsigmoid(labels * logits).sum() / len(images)


def hardest(scores: Tensor, positive: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Query and score of each positive pair, and the hardest negative of its query."""
    query, candidate = positive.nonzero(as_tuple=True)
    negatives = scores.masked_fill(positive, -INF)
    return query, scores[query, candidate], negatives.max(1).values[query]


def log_sum_exp(scores: Tensor, positive: Tensor, gamma: float) -> tuple[Tensor, Tensor]:
    """Score of each positive pair, and the log-sum-exp over the negatives of its query."""
    query, candidate = positive.nonzero(as_tuple=True)
    sums = (gamma * scores).masked_fill(positive, -INF).logsumexp(1)
    return scores[query, candidate], sums[query]


def gaps(scores: Tensor, positive: Tensor) -> tuple[Tensor, Tensor]:
    """Negative minus positive score, ``[pairs, candidates]``."""
    query, candidate = positive.nonzero(as_tuple=True)
    gap = scores[query] - scores[query, candidate][:, None]
    return query, gap.masked_fill(positive[query], -INF)


def triplet(o: Any, scores: Tensor, positive: Tensor, extra: Any) -> Tensor:
    return (o.margin + gaps(scores, positive)[1]).relu().sum(1)


def triplet_hn(o: Any, scores: Tensor, positive: Tensor, extra: Any) -> Tensor:
    _, match, negative = hardest(scores, positive)
    return (o.margin + negative - match).relu()


def triplet_top_k(o: Any, scores: Tensor, positive: Tensor, extra: Any) -> Tensor:
    query, candidate = positive.nonzero(as_tuple=True)
    top = scores.masked_fill(positive, -INF).topk(o.k).values
    return (o.margin + top[query] - scores[query, candidate][:, None]).relu().sum(1)


def max_margin(o: Any, scores: Tensor, positive: Tensor, extra: Any) -> Tensor:
    query, gap = gaps(scores, positive)
    return (o.margin + gap).relu().sum(1) / (~positive).sum(1)[query]


def nt_xent(o: Any, scores: Tensor, positive: Tensor, extra: Any) -> Tensor:
    match, negatives = log_sum_exp(scores, positive, 1 / o.tau)
    return softplus(negatives - match / o.tau)


def vlc(o: Any, scores: Tensor, positive: Tensor, extra: Any) -> Tensor:
    match, negatives = log_sum_exp(scores, positive, o.gamma)
    return softplus(negatives - o.gamma * match)


def unified(o: Any, scores: Tensor, positive: Tensor, extra: Any) -> Tensor:
    match, negatives = log_sum_exp(scores, positive, o.gamma)
    return softplus(negatives + o.gamma * (o.margin - match)) / o.gamma


def info_nce(o: Any, scores: Tensor, positive: Tensor, extra: Any) -> Tensor:
    log_softmax = (scores / o.tau).log_softmax(1)
    return -log_softmax.masked_fill(~positive, 0).sum(1) / positive.sum(1)


def ssp(o: Any, scores: Tensor, positive: Tensor, extra: Any) -> Tensor:
    _, match, negative = hardest(scores, positive)
    pull = sum(c * match**power for power, c in enumerate(o.positive))
    push = sum(c * negative**power for power, c in enumerate(o.negative))
    is_active = negative + o.margin > match
    return torch.where(is_active, pull.relu() + push.relu(), 0)


def rsp(o: Any, scores: Tensor, positive: Tensor, extra: Any) -> Tensor:
    _, match, negative = hardest(scores, positive)
    gap = negative - match
    return (o.margin + sum(c * gap**power for power, c in enumerate(o.coefficients))).relu()


def ncr(o: Any, scores: Tensor, positive: Tensor, extra: Any) -> Tensor:
    query, candidate = positive.nonzero(as_tuple=True)
    negatives = (extra["pair_margin"] + scores).masked_fill(positive, -INF)
    return (negatives.max(1).values[query] - scores[query, candidate]).relu()


def aoq(o: Any, scores: Tensor, positive: Tensor, extra: Any) -> Tensor:
    query, match, negative = hardest(scores, positive)
    offline = extra["offline"][query]
    weight = o.beta - (offline[:, 0] - negative) / o.alpha
    offline_hinges = (o.offline_margin + offline - match[:, None]).relu().sum(1)
    return weight * (o.margin + negative - match).relu() + offline_hinges


def ladder(o: Any, scores: Tensor, positive: Tensor, extra: Any) -> Tensor:
    _, match, negative = hardest(scores, positive)
    upper = (extra["relevance"] >= o.thresholds[0]) & ~positive
    lower = (extra["relevance"] < o.thresholds[0]) & ~positive
    below = scores.masked_fill(~lower, -INF).max(1).values
    above = scores.masked_fill(~upper, INF).min(1).values
    terms = o.betas[0] * (o.margins[0] + negative - match).relu()
    return torch.cat([terms, o.betas[1] * (o.margins[1] + below - above).relu()])


def graded_vlc(o: Any, scores: Tensor, positive: Tensor, extra: Any) -> Tensor:
    query, _ = positive.nonzero(as_tuple=True)
    p, q = (
        logits.masked_fill(positive, -INF).log_softmax(1).masked_fill(positive, 0)
        for logits in (extra["relevance"] / o.tau, o.graded_gamma * scores)
    )
    divergence = (p.exp() * (p - q)).masked_fill(positive, 0).sum(1)
    return vlc(o, scores, positive, extra) + (o.beta * divergence / positive.sum(1))[query]


def distillation(o: Any, scores: Tensor, positive: Tensor, extra: Any) -> Tensor:
    p = (extra["relevance"] / o.teacher_tau).log_softmax(1)
    q = (scores / o.tau).log_softmax(1)
    return (p.exp() * (p - q)).sum(1)


def smooth_ap(o: Any, scores: Tensor, positive: Tensor, extra: Any) -> Tensor:
    query, candidate = positive.nonzero(as_tuple=True)
    above = ((scores[query] - scores[query, candidate][:, None]) / o.tau).sigmoid()
    above = above.scatter(1, candidate[:, None], 0)
    rank_among_positives = 1 + (above * positive[query]).sum(1)
    precision = rank_among_positives / (1 + above.sum(1))
    count = positive.sum(1)
    return 1 - torch.zeros(len(scores)).index_add(0, query, precision) / count


def goal(o: Any, scores: Tensor, positive: Tensor, extra: Any) -> Tensor:
    query, match, negative = hardest(scores, positive)
    s = scores.detach()
    p = match.detach()[:, None]
    n = negative.detach()[:, None]
    triplet_weight = (o.tau * (n**2 - p * (2 - p))).sigmoid()[:, 0]
    others = p[:, 0].expand(len(p), -1)
    in_mean = (others <= n + o.epsilon) & ~torch.eye(len(p), dtype=torch.bool)
    m_p = torch.where(in_mean, (o.alpha * (p - others)).exp(), 0).sum(1) / in_mean.sum(1).clamp(1)
    in_mean = ~positive & (s >= p.min() - o.epsilon)
    top = s.masked_fill(positive, -INF).max(1, keepdim=True)
    in_mean = in_mean.scatter(1, top.indices, False)
    m_n = torch.where(in_mean, (o.beta * (s - top.values)).exp(), 0).sum(1)
    m_n = (m_n / in_mean.sum(1).clamp(1))[query]
    pull = 1 / (m_p + (o.alpha * (p[:, 0] - o.lam)).exp())
    push = 1 / (m_n + (o.beta * (o.lam - n[:, 0])).exp())
    return triplet_weight * (push * negative - pull * match)


def binomial_deviance(o: Any, scores: Tensor, positive: Tensor, extra: Any) -> Tensor:
    _, match, negative = hardest(scores, positive)
    pull = softplus(o.alpha * (o.lam - match)) / o.alpha
    return pull + softplus(o.beta * (negative - o.lam)) / o.beta


def multi_similarity(o: Any, scores: Tensor, positive: Tensor, extra: Any) -> Tensor:
    highest = scores.masked_fill(positive, -INF).max(1, keepdim=True).values
    lowest = scores.masked_fill(~positive, INF).min(1, keepdim=True).values
    is_pulled = positive & (scores < highest + o.epsilon)
    is_pushed = ~positive & (scores > lowest - o.epsilon)
    pull = (o.alpha * (o.lam - scores)).masked_fill(~is_pulled, -INF).logsumexp(1)
    push = (o.beta * (scores - o.lam)).masked_fill(~is_pushed, -INF).logsumexp(1)
    return softplus(pull) / o.alpha + softplus(push) / o.beta


def circle(o: Any, scores: Tensor, positive: Tensor, extra: Any) -> Tensor:
    s = scores.detach()
    push = o.gamma * (s + o.margin).relu() * (scores - o.margin)
    pull = o.gamma * (1 + o.margin - s).relu() * (1 - o.margin - scores)
    push, pull = (
        logits.masked_fill(mask, -INF).logsumexp(1)
        for logits, mask in ((push, positive), (pull, ~positive))
    )
    return softplus(push + pull)


def sigmoid(o: Any, scores: Tensor, positive: Tensor, extra: Any) -> Tensor:
    logits = o.scale * scores + o.bias
    return -logsigmoid(torch.where(positive, logits, -logits)).sum(1)


DIRECTIONS: dict[str, Direction] = {
    "Triplet": triplet,
    "TripletHN": triplet_hn,
    "TripletTopK": triplet_top_k,
    "NTXent": nt_xent,
    "VLC": vlc,
    "InfoNCE": info_nce,
    "Unified": unified,
    "MaxMargin": max_margin,
    "SSP": ssp,
    "RSP": rsp,
    "NCR": ncr,
    "AOQ": aoq,
    "Ladder": ladder,
    "GradedVLC": graded_vlc,
    "Distillation": distillation,
    "SmoothAP": smooth_ap,
    "Goal": goal,
    "BinomialDeviance": binomial_deviance,
    "MultiSimilarity": multi_similarity,
    "Circle": circle,
    "Sigmoid": sigmoid,
}


def make_annotations(num_images: int, num_texts: int) -> dict[str, dict[str, Tensor]]:
    """Annotations as keywords of `Targets`, by the name of the objective that needs them."""
    relevance, margin = torch.rand(2, num_images, num_texts)
    offline = {
        f"{side}_offline_scores": torch.rand(count, 2)
        for side, count in (("query", num_images), ("candidate", num_texts))
    }
    return {
        "Ladder": {"relevance": relevance},
        "GradedVLC": {"relevance": relevance},
        "Distillation": {"relevance": relevance},
        "NCR": {"pair_margin": margin / 2},
        "AOQ": offline,
    }


def plain_annotations(annotations: dict[str, Tensor]) -> tuple[dict[str, Tensor], ...]:
    """The annotations of both directions, as the plain losses read them."""
    pairwise = [name for name in annotations if "offline" not in name]
    sides = ("query", "candidate")
    return tuple(
        {name: annotations[name].T if side == "candidate" else annotations[name]}
        if (name := next(iter(pairwise), ""))
        else {"offline": annotations[f"{side}_offline_scores"]}
        if annotations
        else {}
        for side in sides
    )


def make_works(
    objective: Objective, size: int, captions: int
) -> tuple[list[Tensor], Callable[[], Tensor], Callable[[], Tensor]]:
    """The embeddings, and both computations of the loss. ``size`` is the number of texts."""
    torch.manual_seed(size)
    num_images = size // captions
    image_ids = torch.randperm(num_images)
    text_ids = image_ids.repeat_interleave(captions)
    images = torch.randn(num_images, DIM)
    texts = torch.randn(len(text_ids), DIM).mul_(4) + images.repeat_interleave(captions, 0)
    inputs = [images.requires_grad_(), texts.requires_grad_()]
    loss = PairLoss(objective)
    annotations = make_annotations(*map(len, inputs)).get(type(objective).__name__, {})
    extra = plain_annotations(annotations)

    def ours() -> Tensor:
        if not annotations:
            return loss(images, texts, image_ids, text_ids)
        targets = Targets(query_ids=image_ids, candidate_ids=text_ids, **annotations)
        return loss(images, texts, targets=targets)

    return inputs, ours, lambda: plain_loss(objective, images, texts, (image_ids, text_ids), extra)


def compare(
    inputs: list[Tensor], ours: Callable[[], Tensor], plain: Callable[[], Tensor], seconds: float
) -> float:
    """Median ratio of the processor times of both, in turns."""

    def measure(work: Callable[[], Tensor], times: int) -> float:
        started = time.process_time()
        for _ in range(times):
            for each in inputs:
                each.grad = None
            work().backward()
        return (time.process_time() - started) / times

    for _ in range(3):
        measure(ours, 1), measure(plain, 1)
    # One round takes about 20 ms per side, so that the clock and other processes matter little.
    times = max(1, round(0.02 / max(measure(plain, 1), 1e-5)))
    ratios = list[float]()
    started = time.perf_counter()
    while time.perf_counter() - started < seconds or len(ratios) < 5:
        ratios.append(measure(ours, times) / measure(plain, times))
    return statistics.median(ratios)


def check(
    name: str, inputs: list[Tensor], ours: Callable[[], Tensor], plain: Callable[[], Tensor]
) -> None:
    """Stop unless the gradients of both are equal. The value of Goal is not that of a loss."""
    for a, b in zip(
        torch.autograd.grad(ours(), inputs), torch.autograd.grad(plain(), inputs), strict=True
    ):
        difference = ((a - b).norm() / b.norm()).item()
        if not difference < 1e-4:
            raise SystemExit(f"{name}: the gradients differ by {difference:.1e}.")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--sizes", type=int, nargs="+", default=[64, 256, 512, 1024, 2048])
    parser.add_argument("--captions", type=int, nargs="+", default=[1, 5])
    names = [*(kind.__name__ for kind in CATALOG), "SigLIP"]
    parser.add_argument("--objectives", nargs="+", choices=names, default=names)
    parser.add_argument("--seconds", type=float, default=0.5, help="Time per ratio.")
    options = parser.parse_args()
    torch.set_num_threads(1)
    kinds = {kind.__name__: kind for kind in CATALOG}
    print(f"PairLoss / plain torch, processor time, {DIM} dimensions, torch {torch.__version__}")
    for captions in options.captions:
        print(f"\n{captions} captions per image, by the number of captions:")
        print(" " * 18 + "".join(f"{size:8,}" for size in options.sizes))
        for name in options.objectives:
            is_siglip = name == "SigLIP"
            if is_siglip and captions > 1:
                continue
            cells = ""
            for size in options.sizes:
                objective = Sigmoid() if is_siglip else kinds[name]()
                inputs, ours, plain = make_works(objective, size, captions)
                if is_siglip:
                    plain = partial(siglip_loss, inputs[0], inputs[1])
                check(name, inputs, ours, plain)
                cells += f"{compare(inputs, ours, plain, options.seconds):8.2f}"
            print(f"{name:18}{cells}", flush=True)


if __name__ == "__main__":
    main()
