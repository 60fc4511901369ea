"""Supervision for noisy correspondence: two networks estimate for each other which captions belong
to another image.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np
import torch
from torch import Tensor

from visavis.core.encoded import Encoded
from visavis.core.errors import MissingExtra, RecipeError
from visavis.core.fields import PositiveInt, require_field, validate_fields
from visavis.data.loader import Batch, Loader, derive_seed
from visavis.losses.objectives import Triplet
from visavis.losses.scoring import score_matrix
from visavis.losses.targets import Factors, Targets
from visavis.models.base import Matcher
from visavis.models.batch_encoding import evaluation_mode
from visavis.models.device import seed_device
from visavis.training.supervision.base import Supervision, TrainingContext

MarginGrowth = Literal["linear", "exponential", "sine"]
"""How the margin of a pair grows with its label."""
FIRST_NETWORK, SECOND_NETWORK = 0, 1
"""Rows of the two networks in labels and clean probabilities."""


def soft_margin(labels: Tensor, margin: float, growth: MarginGrowth = "exponential") -> Tensor:
    """Compute the margin of each pair from its soft label.

    Formula:
        $margin f(y)$ with $f(0) = 0$ and $f(1) = 1$: $f(y) = y$ (linear), $(10^y - 1) / 9$
        (exponential) or $sin(pi y - pi / 2) / 2 + 1 / 2$ (sine).

    Args:
        labels: Soft labels y in [0, 1].
        margin: Margin of a pair with label 1.
        growth: Form of f.

    Returns:
        Margins, with the shape of ``labels``.

    Source:
        Huang et al., NCR (2021), eq. 8.

    Example:
        >>> soft_margin(torch.tensor([0.0, 0.5, 1.0]), margin=0.2, growth="linear")
        tensor([0.0000, 0.1000, 0.2000])
    """
    if growth == "linear":
        return margin * labels
    if growth == "exponential":
        return margin * (10**labels - 1) / 9
    return margin * (torch.sin(math.pi * labels - math.pi / 2) / 2 + 0.5)


@dataclass(kw_only=True)
class NoisySupervision(Supervision):
    """Soft margins for pairs that may be mislabeled, as NCR uses them. A second network is trained
    with the first.

    Division:
        After the warm-up epochs, the mean hinge loss $l_p$ of each training pair over its batch,
        scaled to [0, 1], is fitted by a mixture of two Gaussians. The probability w of the
        component with the lower mean is the probability that the pair is clean.

    Labels:
        Each network learns from the division of the other. A pair with w > ``threshold`` has the
        label $w + (1 - w) P$, where P is the network's own prediction. Another pair has the mean
        of both predictions. The label sets the margin of both anchors of the pair, and the margin
        of the image in both directions, which ``NCR(semantics="reference")`` uses. During the
        warm-up all labels are 1.

    Prediction:
        P of a pair is $margin - l_p$, clamped to [0, margin], divided by the mean of the largest
        tenth of its batch, at most 1.

    The second network keeps the state of its optimizer from phase to phase. The run's model is the
    first network. The second is saved in ``peer``, and ``visavis papers evaluate RUN --average`` averages
    the scores of both. Leave ``training.captions_per_image`` unset. Needs scikit-learn (extra
    ``noise``).

    Attributes:
        margin: Margin of a pair with label 1.
        growth: How the margin grows with the label. See `soft_margin`.
        threshold: Pairs with a higher clean probability are treated as clean.
        warmup_epochs: Epochs before the first division. Epochs count from the first phase with this
            supervision.
        noisy_pairs_from_epoch: First epoch, from 1, with a loss for noisy pairs. Before it they are
            left out of the batch, also as negatives.

    Source:
        Huang et al., NCR (2021), section 3. Threshold and mixture as in its code, except for the
        number of iterations. Its authors warm up for 5 epochs on Flickr30K and 10 on MS-COCO, and
        train on noisy pairs from the second half of the epochs on. Differs from the released code,
        which evaluates the mean of both networks' scores and also selects the best epoch by it,
        predicts again at each batch with networks in training mode, samples clean and noisy pairs
        in separate batches, and mixes two shapes of labels into a matrix of margins.
    """

    reads_model: ClassVar[bool] = True
    # How positives are defined, for the report of a training.
    by: ClassVar[str] = "ids"

    margin: float = 0.2
    growth: MarginGrowth = "exponential"
    threshold: float = 0.5
    warmup_epochs: PositiveInt = 1
    noisy_pairs_from_epoch: PositiveInt = 1

    def __post_init__(self) -> None:
        validate_fields(self)
        require_field(self.margin > 0, self, "margin", "a number above 0")
        require_field(0 < self.threshold < 1, self, "threshold", "a number between 0 and 1")

    def check(self, train: Loader, validation: Loader) -> None:
        """Check that batches hold pairs of one image and one caption. See `Supervision.check`."""
        if train.schedule.captions_per_image is not None:
            raise RecipeError(
                "training.captions_per_image: expected no value with NoisySupervision, which needs "
                "one caption per row, "
                f"got {train.schedule.captions_per_image}. Remove it."
            )

    def begin_phase(self, context: TrainingContext, state: dict[str, Tensor]) -> None:
        """Create or restore the second network and the labels. See `Supervision.begin_phase`."""
        self._context = context
        self._second = context.make_peer(derive_seed(context.seed, 0, SECOND_NETWORK))
        count = len(context.train.data.captions)
        self._clean = torch.ones(2, count)
        self._labels = torch.ones(2, count)
        self._epochs = 0
        if state:
            self._clean = state["clean"]
            self._labels = state["labels"]
            self._epochs = int(state["epochs"])
            self._second.load_state_dict(
                {
                    name.removeprefix("second."): tensor
                    for name, tensor in state.items()
                    if name.startswith("second.")
                }
            )

    @property
    def peer(self) -> Matcher:
        """The second network."""
        return self._second.matcher

    def begin_epoch(self, epoch: int) -> None:
        """Divide the training pairs into clean and noisy ones. See `Supervision.begin_epoch`."""
        if self._epochs >= self.warmup_epochs:
            # The clean probability of every pair by each network gives the labels for the other one.
            networks = (self._context.matcher, self._second.matcher)
            losses, predictions = zip(
                *(self._losses_and_predictions(matcher) for matcher in networks), strict=True
            )
            self._clean = torch.stack([clean_probability(loss) for loss in losses])
            mean_prediction = (predictions[FIRST_NETWORK] + predictions[SECOND_NETWORK]) / 2
            for network, other in (
                (FIRST_NETWORK, SECOND_NETWORK),
                (SECOND_NETWORK, FIRST_NETWORK),
            ):
                clean = self._clean[other]
                label_if_clean = clean + (1 - clean) * predictions[network]
                self._labels[network] = torch.where(
                    clean > self.threshold, label_if_clean, mean_prediction
                ).clamp(0, 1)
        self._epochs += 1

    def targets(self, visual: Encoded, text: Encoded, batch: Batch) -> Targets:
        """Build targets with the margins of the first network. See `Supervision.targets`."""
        return self._margin_targets(batch, FIRST_NETWORK)

    def observe(self, batch: Batch, loss: float) -> None:
        """Train the second network on the same batch, with the labels from the division of the
        first. See `Supervision.observe`.
        """
        group = self._context.group
        seed = derive_seed(
            self._context.seed, batch.epoch, batch.index, SECOND_NETWORK, *group.seed_numbers
        )
        seed_device(self._context.device, seed)
        self._second.step(
            batch, lambda _visual, _text, batch: self._margin_targets(batch, SECOND_NETWORK)
        )

    def state_dict(self) -> dict[str, Tensor]:
        """Return the labels and the state of the second network."""
        second = {f"second.{name}": tensor for name, tensor in self._second.state_dict().items()}
        return {
            "clean": self._clean,
            "labels": self._labels,
            "epochs": torch.tensor(self._epochs),
        } | second

    def _margin_targets(self, batch: Batch, network: int) -> Targets:
        """Targets with the margins for one network. All pairs outside of the training data have
        label 1.
        """
        is_training = self._context.is_training_batch(batch)
        device = batch.image_ids.device
        labels = (
            self._labels[network, batch.captions]
            if is_training
            else torch.ones(len(batch.captions))
        )
        margins = soft_margin(labels, self.margin, self.growth).to(device)
        image_margins = Factors(margins[:, None], torch.ones_like(margins)[:, None])
        ids = {"query_ids": batch.image_ids, "candidate_ids": batch.text_ids}
        ignore = None
        if is_training and self._epochs < self.noisy_pairs_from_epoch:
            noisy = (self._clean[1 - network, batch.captions] <= self.threshold).float().to(device)
            # A pair of rows is ignored if one of them is noisy: n_i + (1 - n_i) n_j.
            ignore = Factors(
                torch.stack([noisy, 1 - noisy], 1), torch.stack([torch.ones_like(noisy), noisy], 1)
            )
        return Targets(
            **ids,
            query_margin=margins,
            candidate_margin=margins,
            pair_margin=image_margins,
            ignore=ignore,
        )

    @torch.no_grad()
    def _losses_and_predictions(self, matcher: Matcher) -> tuple[Tensor, Tensor]:
        """The mean hinge loss of each training pair over its batch, and the prediction P:
        ``[captions]`` each.
        """
        loader = self._context.train
        device = self._context.device
        losses, predictions = torch.zeros(2, len(loader.data.captions))
        hinge = Triplet(margin=self.margin)
        with evaluation_mode(matcher):
            for rows in self._context.group.part(training_batches(loader)):
                visual = matcher.encode_visual(
                    loader.visual.read(loader.data.image_of[rows]).to(device)
                )
                text = matcher.encode_text(loader.text.read(rows).to(device))
                scores = score_matrix(matcher.score, visual, text, self._context.memory).float()
                pairs = Targets.paired(len(rows)).to(scores.device)
                loss = (hinge.one_way(scores, pairs) + hinge.one_way(scores.T, pairs)).cpu() / (
                    2 * len(rows)
                )
                losses[rows] = loss
                predictions[rows] = predicted_correspondence(loss, self.margin)
        # Each process has computed the rows of its batches. All other rows are 0.
        return tuple(map(self._context.group.all_reduce_sum, (losses, predictions)))  # type: ignore[return-value]


def predicted_correspondence(loss: Tensor, margin: float) -> Tensor:
    """Predict from the mean hinge loss of each pair of a batch how well it belongs together, in
    [0, 1].
    """
    slack = (margin - loss).clamp(0, margin)
    largest = slack.topk(len(slack) // 10 + 1).values.mean()
    return (slack / largest.clamp(min=1e-12)).clamp(max=1)


def clean_probability(losses: Tensor) -> Tensor:
    """Fit two Gaussians to the losses and compute the probability of the one with the lower mean, as
    the probability that a pair is clean.
    """
    try:
        from sklearn.mixture import GaussianMixture
    except ImportError:
        raise MissingExtra("scikit-learn", "noise", "NoisySupervision") from None
    if losses.min() == losses.max():
        return torch.ones_like(losses)  # nothing to divide
    scaled = ((losses - losses.min()) / (losses.max() - losses.min())).double().numpy()[:, None]
    mixture = GaussianMixture(2, max_iter=100, tol=1e-2, reg_covar=5e-4, random_state=0).fit(scaled)
    return torch.from_numpy(mixture.predict_proba(scaled)[:, mixture.means_.argmin()]).float()


def training_batches(loader: Loader) -> list[np.ndarray]:
    """Split all captions into shuffled batches of about the training size."""
    count = len(loader.data.captions)
    order = np.random.default_rng(loader.seed).permutation(count)
    return np.array_split(order, max(1, count // loader.schedule.batch_size))
