"""Captions that may stand beside the wrong image: two networks tell each other which pairs to trust, and how far."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from visavis.data.loader import Batch, Loader, seed_of
from visavis.errors import MissingExtra, RecipeError
from visavis.models.base import Matcher, evaluating
from visavis.objectives import Triplet
from visavis.scoring import score_by_blocks
from visavis.spec import check_fields, require
from visavis.supervision.base import Supervision, TrainingContext
from visavis.targets import Factors, Targets
from visavis.types import Encoded

Growth = Literal["linear", "exponential", "sine"]
OWN, SECOND = 0, 1


def soft_margin(labels: Tensor, margin: float, growth: Growth = "exponential") -> Tensor:
    """The margin of each pair from how far it is trusted: ``margin f(y)`` with y in [0, 1], f(0) = 0, f(1) = 1.

    Formula: f(y) = y, ``(10^y - 1) / 9`` or ``sin(pi y - pi / 2) / 2 + 1 / 2``. Source: Huang et al., NCR (2021), eq. 8.
    """
    if growth == "linear":
        return margin * labels
    if growth == "exponential":
        return margin * (10**labels - 1) / 9
    return margin * (torch.sin(math.pi * labels - math.pi / 2) / 2 + 0.5)


@dataclass(kw_only=True, eq=False)
class NoisySupervision(Supervision):
    """Soft margins for pairs of doubtful truth, as NCR reads them; a second network is trained beside the first.

    At each epoch but the first, each network's mean hinges ``l_p`` over its batch, scaled to [0, 1] over the training set, are
    split by a mixture of two Gaussians; a pair is clean with the probability w of the component of lower mean. Each network
    learns from the other's division: a pair with w > ``threshold`` gets the label ``w + (1 - w) P`` with P its own prediction,
    another the mean of both predictions; the label gives the margin of both its anchors, and the margin of the image in both
    directions, which ``NCR(semantics="reference")`` reads. In the first epoch all labels are 1.
    P of a pair: ``margin - l_p`` within [0, margin], over the mean of the largest tenth of its batch, at most 1.
    The second network keeps its optimizer's state from phase to phase.
    One caption a row: ``training.captions_per_image`` must be left out. Needs scikit-learn (extra ``noise``).
    The run's model is the first network alone; the second, as it was then, lies beside it in ``peer``, and
    ``visavis evaluate RUN --average`` scores by the mean of both.
    Source: Huang et al., NCR (2021), section 3; threshold and mixture as in its code, but for the number of iterations.
    Differs from: the released code, which evaluates the mean of both networks' scores, also where it chooses the best epoch;
    predicts anew at each batch, from networks in training mode; draws clean and doubtful pairs in batches of their own; and mixes
    two shapes of labels into a matrix of margins.
    """

    margin: float = 0.2
    growth: Growth = "exponential"
    threshold: float = 0.5

    def __post_init__(self) -> None:
        check_fields(self)
        require(self.margin > 0, self, "margin", "a number above 0")
        require(0 < self.threshold < 1, self, "threshold", "a number between 0 and 1")

    def check(self, train: Loader, validation: Loader) -> None:
        if train.plan.captions_per_image is not None:
            raise RecipeError("NoisySupervision needs one caption a row: leave training.captions_per_image out.")

    def begin_phase(self, context: TrainingContext, state: dict[str, Tensor]) -> None:
        self._context = context
        self._second = context.peer_network(seed_of(context.seed, 0, SECOND))
        count = len(context.train.data.captions)
        self._clean, self._labels, self._epochs = torch.ones(2, count), torch.ones(2, count), 0
        if state:
            self._clean, self._labels, self._epochs = state["clean"], state["labels"], int(state["epochs"])
            self._second.load_state_dict({name.removeprefix("second."): part for name, part in state.items() if name.startswith("second.")})

    @property
    def peer(self) -> Matcher:
        return self._second.matcher

    def begin_epoch(self, epoch: int) -> None:
        if self._epochs:
            self._divide()
        self._epochs += 1

    def targets(self, visual: Encoded, text: Encoded, batch: Batch) -> Targets:
        return self._margins(batch, OWN)

    def observe(self, batch: Batch, loss: float) -> None:
        """The second network learns from the same batch, with the labels that the first one's division gives."""
        torch.manual_seed(seed_of(self._context.seed, batch.epoch, batch.number, SECOND))
        matcher, loss_of = self._second.matcher, self._second.loss

        def value() -> Tensor:
            items = matcher.encode_visual(batch.visual), matcher.encode_text(batch.text)
            targets = self._margins(batch, SECOND)
            pairs = loss_of(*map(matcher.first_stage, items), targets=targets)
            return pairs if (extra := matcher.extra_loss(*items, targets)) is None else pairs + extra

        self._second.learn(value)

    def state_dict(self) -> dict[str, Tensor]:
        second = {f"second.{name}": part for name, part in self._second.state_dict().items()}
        return {"clean": self._clean, "labels": self._labels, "epochs": torch.tensor(self._epochs)} | second

    def _margins(self, batch: Batch, network: int) -> Targets:
        """Targets with the margins that a network learns from; outside of the training data every pair is trusted."""
        labels = self._labels[network, batch.captions] if self._context.trains_on(batch) else torch.ones(len(batch.captions))
        margins = soft_margin(labels, self.margin, self.growth).to(batch.image_ids.device)
        of_images = Factors(margins[:, None], torch.ones_like(margins)[:, None])
        return Targets(
            query_ids=batch.image_ids, candidate_ids=batch.text_ids, query_margin=margins, candidate_margin=margins, pair_margin=of_images
        )

    def _divide(self) -> None:
        """What each network thinks of every pair, and the labels that follow for the other."""
        losses, predictions = zip(*(self._judge(matcher) for matcher in (self._context.matcher, self._second.matcher)), strict=True)
        self._clean = torch.stack([clean_probability(loss) for loss in losses])
        mean = (predictions[OWN] + predictions[SECOND]) / 2
        for network, other in ((OWN, SECOND), (SECOND, OWN)):
            trust = self._clean[other]
            self._labels[network] = torch.where(trust > self.threshold, trust + (1 - trust) * predictions[network], mean).clamp(0, 1)

    @torch.no_grad()
    def _judge(self, matcher: Matcher) -> tuple[Tensor, Tensor]:
        """The mean hinge of each training pair with its batch, and how true it looks beside the others ``[captions]``."""
        loader, device = self._context.train, self._context.device
        losses, predictions = torch.zeros(2, len(loader.data.captions))
        with evaluating(matcher):
            for rows in whole_plan(loader):
                visual = matcher.encode_visual(loader.visual.read(loader.data.image_of[rows]).to(device))
                text = matcher.encode_text(loader.text.read(rows).to(device))
                scores = score_by_blocks(matcher.score, visual, text, self._context.memory).float()
                pairs = Targets.paired(len(rows)).to(scores.device)
                hinge = Triplet(margin=self.margin)
                loss = (hinge.one_way(scores, pairs) + hinge.one_way(scores.T, pairs)).cpu() / (2 * len(rows))
                losses[rows] = loss
                predictions[rows] = prediction(loss, self.margin)
        return losses, predictions


def prediction(loss: Tensor, margin: float) -> Tensor:
    """How true each pair of a batch looks, from its mean hinge: in [0, 1]."""
    trust = (margin - loss).clamp(0, margin)
    largest = trust.topk(len(trust) // 10 + 1).values.mean()
    return (trust / largest.clamp(min=1e-12)).clamp(max=1)


def clean_probability(losses: Tensor) -> Tensor:
    """The probability of each pair to belong to the lower of two Gaussians fitted to the losses ``[N]``; 1 where all are equal. Raises MissingExtra."""
    try:
        from sklearn.mixture import GaussianMixture
    except ImportError:
        raise MissingExtra("scikit-learn", "noise", "NoisySupervision") from None
    if losses.min() == losses.max():
        return torch.ones_like(losses)
    scaled = ((losses - losses.min()) / (losses.max() - losses.min())).double().numpy()[:, None]
    mixture = GaussianMixture(2, max_iter=100, tol=1e-2, reg_covar=5e-4, random_state=0).fit(scaled)
    return torch.from_numpy(mixture.predict_proba(scaled)[:, mixture.means_.argmin()]).float()


def whole_plan(loader: Loader) -> list[np.ndarray]:
    """Every caption once, in shuffled batches of about the training size."""
    count = len(loader.data.captions)
    order = np.random.default_rng(loader.seed).permutation(count)
    return np.array_split(order, max(1, count // loader.plan.batch_size))
