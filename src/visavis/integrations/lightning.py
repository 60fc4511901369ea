"""Any objective in a LightningModule, for ``lightning`` and ``pytorch_lightning`` alike."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from visavis.engine import PairLoss


class PairLossSteps:
    """The training and validation step of a LightningModule: ``class Mine(PairLossSteps, LightningModule)``.

    The module sets ``self.loss``, a PairLoss, and says in ``embed`` what that takes. Logs ``train_loss`` and ``val_loss``.
    """

    loss: PairLoss
    log: Callable[..., None]  # LightningModule's

    def embed(self, batch: Any) -> tuple[Any, ...]:
        """The arguments of the loss for a batch: images, texts, and, where pairs are not in order, image_ids and text_ids."""
        raise NotImplementedError

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self._logged_loss("train_loss", batch)

    def validation_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self._logged_loss("val_loss", batch, sync_dist=True)

    def _logged_loss(self, name: str, batch: Any, **how: Any) -> Tensor:
        images, *others = self.embed(batch)
        value = self.loss(images, *others)
        self.log(name, value, batch_size=len(images), prog_bar=True, **how)
        return value
