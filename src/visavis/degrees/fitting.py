"""A sentence model fine-tuned on rated pairs, as the ladder paper fine-tunes BERT."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

import torch
from scipy.stats import pearsonr
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits, cosine_similarity, mse_loss

from visavis import storage
from visavis.degrees.ratings import BEST, RatedPairs, read_stsb
from visavis.errors import SpecError
from visavis.models.pair_tower import PairTower, open_pairs
from visavis.models.pretrained import model_folder, quiet_transformers
from visavis.models.sentence_pooling import read_modules
from visavis.models.towers import TextTower, open_text
from visavis.progress import Progress
from visavis.spec import check_seed

Kind = Literal["bi", "cross"]

LEARNING_RATES = {"bi": 2e-5, "cross": 5e-5}
"""Default learning rates of AdamW; the output layer of "cross" starts untrained and needs the higher one."""


@dataclass(frozen=True)
class Fitted:
    """A fine-tuned model: its folder, the spec that opens it, and its Pearson correlation with human ratings.

    dev: the correlation before training and after each epoch; the best weights are kept. test: that of the best weights.
    """

    folder: Path
    degrees: str
    dev: tuple[float, ...]
    test: float

    def to_json(self) -> dict[str, object]:
        return {**asdict(self), "folder": str(self.folder)}


def fit(
    out: str | Path, kind: Kind, model: str, *, epochs: int, lr: float | None, batch_size: int, seed: int, progress: Progress
) -> Fitted:
    """Train on the train split of the STS benchmark, keep the best epoch on dev, and write a folder that SentenceModel (bi) or
    CrossEncoder (cross) reads.
    """
    train, dev, test = (read_stsb(split) for split in ("train", "dev", "test"))
    if kind not in LEARNING_RATES:
        raise SpecError(f"kind is {kind!r}, expected 'bi' or 'cross'.")
    if epochs < 1 or batch_size < 1:
        raise SpecError(f"{epochs} epochs of batches of {batch_size} are no training: both must be at least 1.")
    if lr is not None and not 0 < lr < math.inf:
        raise SpecError(f"lr is {lr}, expected a finite number above 0.")
    check_seed(seed)
    batch_size = min(batch_size, len(train.first))
    torch.manual_seed(seed)
    regression: Regression = _Cosine(open_text(model)) if kind == "bi" else _Output(open_pairs(model, new_output=True))
    tower, out, lr = regression.tower, storage.new_folder(out, replaced=True), LEARNING_RATES[kind] if lr is None else lr
    steps = epochs * -(-len(train.first) // batch_size)
    optimizer = torch.optim.AdamW(tower.parameters(), lr=lr, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min((step + 1) / (0.1 * steps), (steps - step) / (0.9 * steps), 1))
    curve = [correlation(regression, dev)]
    best = copy.deepcopy(tower.state_dict())
    for epoch in range(epochs):
        tower.train()
        for number, (first, second, target) in enumerate(batches(train, batch_size), 1):
            with torch.autocast("cpu", torch.bfloat16):
                loss = regression.loss(first, second, target)
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(tower.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            progress.work(f"epoch {epoch + 1} of {epochs}", number, steps // epochs, 0.0)
        curve.append(correlation(regression, dev))
        progress.say(f"Epoch {epoch + 1}: Pearson {curve[-1]:.3f} on STS-B dev.")
        if curve[-1] >= max(curve):
            best = copy.deepcopy(tower.state_dict())
    tower.load_state_dict(best)
    name = "SentenceModel" if kind == "bi" else "CrossEncoder"
    fitted = Fitted(out, f"{name}(model={str(out)!r})", tuple(curve), correlation(regression, test))
    write(fitted, tower, model, {"kind": kind, "model": model, "epochs": epochs, "lr": lr, "batch_size": batch_size, "seed": seed})
    return fitted


@dataclass(frozen=True)
class _Cosine:
    """Degrees as cosines of two vectors."""

    tower: TextTower

    def degrees(self, first: Sequence[str], second: Sequence[str]) -> Tensor:
        vectors, other_vectors = (self.tower(self.tower.preprocess(texts)).vectors for texts in (first, second))
        return cosine_similarity(vectors, other_vectors)

    def loss(self, first: Sequence[str], second: Sequence[str], target: Tensor) -> Tensor:
        return mse_loss(self.degrees(first, second), target)


@dataclass(frozen=True)
class _Output:
    """Degrees as the sigmoid of one output; trained by the cross-entropy with ratings from 0 to 1."""

    tower: PairTower

    def degrees(self, first: Sequence[str], second: Sequence[str]) -> Tensor:
        return self.tower(self.tower.preprocess(first, second)).sigmoid()

    def loss(self, first: Sequence[str], second: Sequence[str], target: Tensor) -> Tensor:
        return binary_cross_entropy_with_logits(self.tower(self.tower.preprocess(first, second)), target)


Regression = _Cosine | _Output


def batches(pairs: RatedPairs, size: int) -> Iterator[tuple[list[str], list[str], Tensor]]:
    """All pairs once, in random order, but with pairs of similar length in one batch, to save padding."""
    ratings = torch.from_numpy(pairs.ratings / BEST).float()
    lengths = torch.tensor([len(first) + len(second) for first, second in zip(pairs.first, pairs.second, strict=True)])
    pools = torch.randperm(len(ratings)).split(20 * size)
    together = [batch for pool in pools for batch in pool[lengths[pool].argsort()].split(size)]
    for number in torch.randperm(len(together)).tolist():
        chosen = together[number].tolist()
        yield [pairs.first[i] for i in chosen], [pairs.second[i] for i in chosen], ratings[chosen]


@torch.no_grad()
def correlation(regression: Regression, pairs: RatedPairs) -> float:
    """Pearson's correlation of degrees with ratings; 0 if all degrees are equal."""
    regression.tower.eval()
    order = sorted(range(len(pairs.first)), key=lambda i: len(pairs.first[i]) + len(pairs.second[i]))
    parts = [order[i : i + 64] for i in range(0, len(order), 64)]
    degrees = torch.cat([regression.degrees([pairs.first[i] for i in part], [pairs.second[i] for i in part]) for part in parts])
    return 0.0 if degrees.min() == degrees.max() else float(pearsonr(degrees.numpy(), pairs.ratings[order]).statistic)


def write(fitted: Fitted, tower: TextTower | PairTower, model: str, settings: dict[str, object]) -> None:
    """The folder of a fine-tuned model, as ``transformers`` and, for one vector a text, ``sentence-transformers`` read it."""
    with storage.replacing_folder(fitted.folder) as part, quiet_transformers():
        tower.model.save_pretrained(part)  # type: ignore[operator]
        tower.tokenizer.save_pretrained(part)
        if isinstance(tower, TextTower):
            copy_pooling(model_folder(model), part)
        storage.write_json(part / "fit.json", {**settings, "dev": fitted.dev, "test": fitted.test})


def copy_pooling(source: Path, folder: Path) -> None:
    """Copy the pooling configuration of a sentence-transformers folder; a bare transformers folder has none."""
    if (source / "modules.json").exists():
        modules = [Path(module.path) / "config.json" for module in read_modules(source)]
        for name in (Path("modules.json"), Path("sentence_bert_config.json"), *modules):
            if name != Path("config.json") and (source / name).exists():
                storage.write_bytes(folder / name, storage.read_bytes(source / name))
