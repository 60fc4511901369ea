"""Any objective in place of open_clip's ClipLoss.

>>> import torch
>>> from visavis.objectives import NTXent
>>> loss = ClipLoss(NTXent())
>>> loss(torch.eye(4), torch.eye(4), torch.tensor(200.0), output_dict=True)
{'contrastive_loss': tensor(0.)}
"""

from __future__ import annotations

from torch import Tensor, nn

from visavis.engine import PairLoss
from visavis.engine.logits import is_bias
from visavis.engine.scale import is_scale
from visavis.errors import SpecError, VisavisError, in_the_words_of
from visavis.objectives import Objective
from visavis.targets import Ids


class ClipLoss(nn.Module):
    """``loss(image_features, text_features, logit_scale)``, as open_clip calls it; with NTXent or InfoNCE it equals open_clip's.

    objective: any of the catalog. One with a temperature takes logit_scale in its place; one of fixed gamma or margin
    leaves it as it is. Sigmoid takes logit_bias, too, as open_clip's SigLipLoss; without one, its own stands. Features are brought to
    length 1, as open_clip's models do anyway.
    world_size: above 1, queries meet the candidates of all processes in train mode, with the exact gradient under DDP's
    averaging: what open_clip computes with local_loss and gather_with_grad. Those two, cache_labels (labels are ids here) and
    rank (the process group knows it) are taken and change nothing. use_horovod is refused.

    image_ids, text_ids: beyond open_clip; equal ids belong together, as in PairLoss. A logit_bias is refused by other
    objectives than Sigmoid. Returns a scalar, or ``{"contrastive_loss": scalar}`` with output_dict. Raises VisavisError, ShapeError.
    Differs from: open_clip without local_loss and gather_with_grad, its default, whose gradient under several processes is
    1 / world_size of the exact one.
    """

    def __init__(
        self,
        objective: Objective,
        local_loss: bool = False,
        gather_with_grad: bool = False,
        cache_labels: bool = False,
        rank: int = 0,
        world_size: int = 1,
        use_horovod: bool = False,
    ) -> None:
        super().__init__()
        if use_horovod:
            raise VisavisError("ClipLoss got use_horovod=True, expected processes of torch.distributed: start with torchrun.")
        with in_the_words_of("ClipLoss", "PairLoss"):
            self.loss = PairLoss(objective, gather=world_size > 1)
        if objective.for_scaled_scores() is not None:
            self.loss = PairLoss(objective, scale=1.0, bias=getattr(objective, "bias", None), gather=world_size > 1)

    def forward(
        self,
        image_features: Tensor,
        text_features: Tensor,
        logit_scale: Tensor | float,
        logit_bias: Tensor | float | None = None,
        output_dict: bool = False,
        image_ids: Ids | None = None,
        text_ids: Ids | None = None,
    ) -> Tensor | dict[str, Tensor]:
        if logit_bias is not None and self.loss.bias is None:
            raise VisavisError(
                f"ClipLoss got a logit_bias, which belongs to the sigmoid loss, and has {self.loss.objective!r}: "
                "give ClipLoss(Sigmoid()), or make the model without init_logit_bias."
            )
        if not is_bias(logit_bias):
            raise SpecError(f"ClipLoss got logit_bias={logit_bias!r}, expected one finite number.")
        if not is_scale(logit_scale) or logit_scale is None:
            raise SpecError(f"ClipLoss got logit_scale={logit_scale!r}, expected one number above 0: the scale, not its logarithm.")
        if self.loss.scale is None:
            value = self.loss(image_features, text_features, image_ids, text_ids) + 0 * logit_scale  # DDP waits for every gradient
        else:
            value = self.loss(image_features, text_features, image_ids, text_ids, scale=logit_scale, bias=logit_bias)
        return {"contrastive_loss": value} if output_dict else value
