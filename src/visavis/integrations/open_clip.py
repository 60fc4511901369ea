"""ClipLoss: any objective in place of the loss of open_clip.

>>> import torch
>>> from visavis.losses.objectives import NTXent
>>> loss = ClipLoss(NTXent())
>>> loss(torch.eye(4), torch.eye(4), torch.tensor(200.0), output_dict=True)
{'contrastive_loss': tensor(0.)}
"""

from __future__ import annotations

from torch import Tensor, nn

from visavis.core.errors import SpecError, VisavisError, format_value
from visavis.losses.logits import is_valid_bias, is_valid_scale
from visavis.losses.objectives import Objective
from visavis.losses.pair_loss import PairLoss
from visavis.losses.targets import Ids


class ClipLoss(nn.Module):
    """Loss with the interface of open_clip's ClipLoss. With NTXent or InfoNCE it equals
    open_clip's.

    With open_clip 3 it replaces the loss of the training loop. With open_clip 4, pass it to a task:
    ``CLIPTask(model, loss=loss)``. Features are normalized, as open_clip's models do anyway.

    Args:
        objective: An objective of the catalog. One with a temperature uses logit_scale in its
            place. One with a fixed gamma or margin ignores it. Sigmoid also uses logit_bias, as
            open_clip's SigLipLoss, and its own bias without one.
        local_loss: Accepted and ignored. The loss always equals open_clip with local_loss and
            gather_with_grad.
        gather_with_grad: Accepted and ignored.
        cache_labels: Accepted and ignored. Labels are ids here.
        rank: Accepted and ignored. The process group knows it.
        world_size: Above 1, queries are compared with the candidates of all ranks in train mode.
            The gradient is exact under the averaging of DistributedDataParallel.
        use_horovod: Not supported.

    Raises:
        VisavisError: If use_horovod is True.

    Differs from:
        open_clip without local_loss and gather_with_grad, its default, whose gradient over several
        ranks is 1 / world_size of the exact one.
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
            raise VisavisError(
                "use_horovod: expected False, got True. Use torch.distributed: start with torchrun."
            )
        self.loss = PairLoss(objective, gather=world_size > 1)
        # An objective with a temperature gets logit_scale in its place, in each call.
        if objective.without_scale() is not None:
            self.loss = PairLoss(
                objective, scale=1.0, bias=getattr(objective, "bias", None), gather=world_size > 1
            )

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
        """Compute the loss of a batch.

        Args:
            image_features: Image embeddings, shape ``[V, D]``.
            text_features: Text embeddings, shape ``[T, D]``.
            logit_scale: Factor of the cosines, not its logarithm.
            logit_bias: Added after the scale. Only for Sigmoid.
            output_dict: Whether to return a dictionary.
            image_ids: One id per image, in addition to open_clip's arguments. Equal ids belong
                together.
            text_ids: One id per text. None: the image ids.

        Returns:
            A scalar, or ``{"contrastive_loss": scalar}``.

        Raises:
            VisavisError: If the objective has no bias.
            SpecError: If scale or bias is not a valid number.
        """
        if logit_bias is not None and self.loss.bias is None:
            raise VisavisError(
                f"logit_bias: expected None with {self.loss.objective!r}, got "
                f"{format_value(logit_bias)}. "
                "Use ClipLoss(Sigmoid()), or make the model without init_logit_bias."
            )
        if not is_valid_bias(logit_bias):
            raise SpecError(
                f"logit_bias: expected one finite number, got {format_value(logit_bias)}. Pass the "
                "bias of the model."
            )
        if not is_valid_scale(logit_scale) or logit_scale is None:
            raise SpecError(
                f"logit_scale: expected one number > 0, got {format_value(logit_scale)}. Pass the "
                "scale, not its logarithm."
            )
        if self.loss.scale is None:
            value = self.loss(image_features, text_features, image_ids, text_ids)
            # DistributedDataParallel waits for a gradient of every parameter. The scale of a
            # sharded model has shape [1].
            value = value + (0 * logit_scale.reshape(()) if isinstance(logit_scale, Tensor) else 0)
        else:
            value = self.loss(
                image_features,
                text_features,
                image_ids,
                text_ids,
                scale=logit_scale,
                bias=logit_bias,
            )
        return {"contrastive_loss": value} if output_dict else value
