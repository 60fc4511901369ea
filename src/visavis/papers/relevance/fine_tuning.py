"""Fine-tuning of sentence models on rated caption pairs, as the Ladder paper fine-tunes BERT."""

from __future__ import annotations

import copy
import math
import os
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from scipy.stats import pearsonr
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits, cosine_similarity, mse_loss

from visavis.core import storage
from visavis.core.errors import SpecError
from visavis.core.fields import MAX_SEED, validate_int
from visavis.core.progress import Progress
from visavis.core.result import Result
from visavis.core.table import Table
from visavis.models.encoders.frozen_encoders import open_text_encoder
from visavis.models.encoders.pretrained_files import model_folder, quiet_transformers
from visavis.models.encoders.sentence_encoders import (
    open_text_pair_encoder,
    read_sentence_transformers_modules,
)
from visavis.papers.relevance.human_agreement import MAX_RATING, RatedCaptionPairs, read_stsb

EncoderKind = Literal["bi", "cross", "regression"]
"""Kind of model: one embedding per caption, or two captions read together, with a sigmoid ("cross")
or a linear output ("regression").
"""

LEARNING_RATES = {"bi": 2e-5, "cross": 5e-5, "regression": 2e-5}
"""Default learning rates of AdamW. The output layer of "cross" starts untrained and needs the
higher one.
"""
WEIGHT_DECAY = 0.01


@dataclass(frozen=True)
class FineTunedModel(Result):
    """A fine-tuned model and its Pearson correlation with human ratings.

    Attributes:
        folder: Folder of the model.
        estimator: Spec of the relevance estimator that opens the folder.
        dev: Correlation on STS-B dev before training and after each epoch. The best weights are
            saved.
        test: Correlation of the best weights on STS-B test.
    """

    folder: Path
    estimator: str
    dev: tuple[float, ...]
    test: float

    def tables(self) -> list[Table]:
        """Return the correlations in sentences."""
        curve = ", ".join(f"{value:.3f}" for value in self.dev)
        note = (
            f"Pearson on STS-B dev: {curve} (the first before training). Best epoch on test: "
            f"{self.test:.3f}."
        )
        return [Table(notes=(note, self.estimator))]

    def to_json(self) -> dict[str, object]:
        """Return a JSON object."""
        return {**asdict(self), "folder": str(self.folder)}


def fine_tune(
    out: str | Path,
    kind: EncoderKind,
    model: str,
    *,
    epochs: int,
    lr: float | None,
    batch_size: int,
    seed: int,
    progress: Progress,
) -> FineTunedModel:
    """Fine-tune a model on STS-B train and save the best epoch on STS-B dev. The seed is for the
    order of pairs, dropout and a new output layer.
    """
    if os.path.exists(out):
        storage.prepare_empty_folder(out, will_be_replaced=True)
    train, dev, test = (read_stsb(split) for split in ("train", "dev", "test"))
    if epochs < 1 or batch_size < 1:
        raise SpecError(
            f"epochs, batch_size: expected integers >= 1, got {epochs} and {batch_size}."
        )
    if lr is not None and not 0 < lr < math.inf:
        raise SpecError(f"lr: expected a finite number above 0, got {lr}.")
    validate_int(seed, "seed", 0, MAX_SEED)
    batch_size = min(batch_size, len(train.first))
    torch.manual_seed(seed)
    # A single embedding per caption, or captions that are read together.
    if kind == "bi":
        regression: _LinearOutput = _Cosine(open_text_encoder(model))
        regression.encoder.require_tokenizer()
    else:
        regression = (_Output if kind == "cross" else _LinearOutput)(
            open_text_pair_encoder(model, new_head=True)
        )
    encoder = regression.encoder
    lr = LEARNING_RATES[kind] if lr is None else lr
    out = storage.prepare_empty_folder(out, will_be_replaced=True)
    # Linear warmup over a tenth of the steps, then linear decay, as BERT.
    steps = epochs * -(-len(train.first) // batch_size)
    optimizer = torch.optim.AdamW(_parameter_groups(encoder, kind), lr=lr)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min((step + 1) / (0.1 * steps), (steps - step) / (0.9 * steps), 1)
    )
    # The first value is from before the training.
    curve = [rating_pearson(regression, dev)]
    best = copy.deepcopy(encoder.state_dict())
    for epoch in range(epochs):
        encoder.train()
        for number, (first, second, target) in enumerate(_rating_batches(train, batch_size), 1):
            with torch.autocast("cpu", torch.bfloat16):
                loss = regression.loss(first, second, target)
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(encoder.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            progress.update(f"epoch {epoch + 1} of {epochs}", number, steps // epochs, 0.0)
        curve.append(rating_pearson(regression, dev))
        progress.message(f"Epoch {epoch + 1}: Pearson correlation {curve[-1]:.3f} on STS-B dev.")
        # Of equal epochs the last.
        if curve[-1] >= max(curve):
            best = copy.deepcopy(encoder.state_dict())
    encoder.load_state_dict(best)
    name = "SentenceModel" if kind == "bi" else "CrossEncoder"
    # The estimator must compute the output that was trained.
    output = ", output='identity'" if kind == "regression" else ""
    result = FineTunedModel(
        out, f"{name}(model={str(out)!r}{output})", tuple(curve), rating_pearson(regression, test)
    )
    with storage.atomic_folder(out) as part, quiet_transformers():
        encoder.model.save_pretrained(part)
        encoder.tokenizer.save_pretrained(part)
        if kind == "bi":
            _copy_pooling(model_folder(model), part)
        settings = {"kind": kind, "model": model, "epochs": epochs, "lr": lr}
        settings |= {"batch_size": batch_size, "seed": seed}
        storage.write_json(part / "fit.json", {**settings, "dev": result.dev, "test": result.test})
    return result


@dataclass(frozen=True)
class _LinearOutput:
    """Relevance as one output, trained by the squared difference from ratings of 0 to 1, as BERT's
    authors train STS-B.
    """

    encoder: Any

    def relevance(self, first: Sequence[str], second: Sequence[str]) -> Tensor:
        output: Tensor = self.encoder(self.encoder.preprocess(first, second))
        return output

    def loss(self, first: Sequence[str], second: Sequence[str], target: Tensor) -> Tensor:
        return mse_loss(self.relevance(first, second), target)


class _Output(_LinearOutput):
    """Relevance as the sigmoid of one output, trained with cross-entropy against ratings from 0 to
    1.
    """

    def relevance(self, first: Sequence[str], second: Sequence[str]) -> Tensor:
        return super().relevance(first, second).sigmoid()

    def loss(self, first: Sequence[str], second: Sequence[str], target: Tensor) -> Tensor:
        return binary_cross_entropy_with_logits(super().relevance(first, second), target)


class _Cosine(_LinearOutput):
    """Relevance as the cosine similarity of two embeddings."""

    def relevance(self, first: Sequence[str], second: Sequence[str]) -> Tensor:
        return cosine_similarity(
            *(self.encoder(self.encoder.preprocess(texts)).vectors for texts in (first, second))
        )


def _parameter_groups(encoder: nn.Module, kind: EncoderKind) -> list[dict[str, object]]:
    """Parameters with their weight decay. BERT's authors leave out biases and layer normalization,
    which are vectors.
    """
    parameters = list(encoder.parameters())
    matrices = [parameter for parameter in parameters if parameter.dim() >= 2]
    vectors = [parameter for parameter in parameters if parameter.dim() < 2]
    return [
        {"params": matrices, "weight_decay": WEIGHT_DECAY},
        {"params": vectors, "weight_decay": 0.0 if kind == "regression" else WEIGHT_DECAY},
    ]


def _rating_batches(
    pairs: RatedCaptionPairs, size: int
) -> Iterator[tuple[list[str], list[str], Tensor]]:
    """All pairs once, in random order, with pairs of similar length in one batch to save padding."""
    ratings = torch.from_numpy(pairs.ratings / MAX_RATING).float()
    lengths = torch.tensor(
        [len(first) + len(second) for first, second in zip(pairs.first, pairs.second, strict=True)]
    )
    # Lengths are sorted within pools of 20 batches only, so that batches stay random.
    pools = torch.randperm(len(ratings)).split(20 * size)
    batches = [batch for pool in pools for batch in pool[lengths[pool].argsort()].split(size)]
    for number in torch.randperm(len(batches)).tolist():
        indices = batches[number].tolist()
        yield (
            [pairs.first[i] for i in indices],
            [pairs.second[i] for i in indices],
            ratings[indices],
        )


@torch.no_grad()
def rating_pearson(regression: _LinearOutput, pairs: RatedCaptionPairs) -> float:
    """Compute the Pearson correlation of a model with human ratings. 0 for equal predictions."""
    regression.encoder.eval()
    # Pairs of similar length are in one batch, which saves padding.
    order = sorted(
        range(len(pairs.first)), key=lambda i: len(pairs.first[i]) + len(pairs.second[i])
    )
    batches = [order[i : i + 64] for i in range(0, len(order), 64)]
    predictions = torch.cat(
        [
            regression.relevance([pairs.first[i] for i in batch], [pairs.second[i] for i in batch])
            for batch in batches
        ]
    )
    return (
        0.0
        if predictions.min() == predictions.max()
        else float(pearsonr(predictions.numpy(), pairs.ratings[order]).statistic)
    )


def _copy_pooling(source: Path, folder: Path) -> None:
    """Copy the pooling configuration of a sentence-transformers folder. A plain transformers folder
    has none.
    """
    if os.path.exists(source / "modules.json"):
        modules = [
            Path(module.path) / "config.json"
            for module in read_sentence_transformers_modules(source)
        ]
        for name in (Path("modules.json"), Path("sentence_bert_config.json"), *modules):
            # The transformers module itself is in the folder, and its configuration was saved.
            if name != Path("config.json") and os.path.exists(source / name):
                storage.write_bytes(folder / name, storage.read_bytes(source / name))
