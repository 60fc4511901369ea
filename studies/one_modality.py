"""Ladder for one modality: captions of Flickr8k, ordered by their relevance to each other.

    VISAVIS_DATA=... python studies/one_modality.py [--seeds 3] [--steps 600]

A linear map of mean word vectors (GloVe, 50 dimensions) is trained by ``MetricLoss``: captions of an
image belong together, and the relevance of other captions comes from a sentence model. One level is
the triplet loss. The relevance thresholds are the top 3 and 20 % of random pairs.

Printed for the first two captions of each test image: R@1 and R@10 of the other caption of the image,
and CS@1000 by the sentence model, with mean and standard deviation over seeds.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from dataclasses import replace

import torch
from torch import Tensor, nn

from visavis.data.data_paths import resolve_path
from visavis.data.dataset import Dataset
from visavis.data.dataset_reader import open_dataset
from visavis.evaluation.metrics import coherent_scores
from visavis.integrations.pytorch_metric_learning import MetricLoss
from visavis.losses.pair_loss import cosine
from visavis.objectives import Ladder
from visavis.papers.relevance import CBoW, SentenceModel

BATCH_IMAGES = 64
CAPTIONS_PER_IMAGE = 2
QUANTILES = (0.97, 0.8)
LADDER = Ladder(
    margins=(0.2, 0.05, 0.05),
    betas=(1.0, 0.04, 0.01),
    thresholds=(0.9, 0.8),
    sampling="sum",
    reduction="mean",
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=600)
    options = parser.parse_args()
    torch.set_num_threads(1)
    data = open_dataset(resolve_path("flickr8k"))
    train = data.split("train")
    test = data.split("test")
    sys.stdout.write("| loss | R@1 | R@10 | CS@1000 |\n|---|---:|---:|---:|\n")
    for name in ("one level", "Ladder"):
        results = [
            train_and_test(train, test, seed, options.steps, is_ladder=name == "Ladder")
            for seed in range(1, options.seeds + 1)
        ]
        cells = [
            f"{statistics.mean(values):.{digits}f} ± {statistics.pstdev(values):.{digits}f}"
            for values, digits in zip(zip(*results, strict=True), (1, 1, 3), strict=True)
        ]
        sys.stdout.write(f"| {name} | {' | '.join(cells)} |\n")
        sys.stdout.flush()


def train_and_test(
    train: Dataset, test: Dataset, seed: int, steps: int, *, is_ladder: bool
) -> tuple[float, float, float]:
    """R@1, R@10 and CS@1000 of a linear map."""
    torch.manual_seed(seed)
    captions = torch.arange(len(train.captions))
    vectors = CBoW().for_captions(train.captions).vectors.float()
    relevance = SentenceModel().for_captions(train.captions)
    pairs = captions[torch.randint(len(captions), (2, 512))]
    thresholds = relevance(*pairs).flatten().quantile(torch.tensor(QUANTILES)).tolist()
    ladder = replace(LADDER, thresholds=tuple(thresholds))
    one_level = replace(LADDER, margins=(0.2,), thresholds=(), betas=(1.0,))
    loss = MetricLoss(ladder if is_ladder else one_level)
    model = nn.Linear(vectors.shape[1], 256)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    for _ in range(steps):
        images = torch.randperm(len(train.images))[:BATCH_IMAGES].tolist()
        batch = torch.tensor([i for image in images for i in train.captions_of[image][:2]])
        labels = torch.from_numpy(train.image_of)[batch]
        value = loss(model(vectors[batch]), labels, relevance=relevance(batch, batch))
        optimizer.zero_grad()
        value.backward()
        optimizer.step()
    return measure(model, test)


@torch.no_grad()
def measure(model: nn.Module, test: Dataset) -> tuple[float, float, float]:
    """R@1, R@10 and CS@1000 of the first two captions of each image, the first as queries."""
    captions = torch.tensor([own[:CAPTIONS_PER_IMAGE] for own in map(list, test.captions_of)])
    vectors = CBoW().for_captions(test.captions).vectors.float()
    queries, candidates = captions.T
    scores: Tensor = cosine(model(vectors[queries]), model(vectors[candidates]))
    ranks = (scores >= scores.diagonal()[:, None]).sum(1)
    relevance = SentenceModel().for_captions(test.captions)(queries, candidates)
    coherence = coherent_scores(scores, relevance, k=min(1000, len(queries))).nanmean()
    r1, r10 = (100 * (ranks <= k).double().mean().item() for k in (1, 10))
    return r1, r10, float(coherence)


if __name__ == "__main__":
    main()
