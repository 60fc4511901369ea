"""PairLossSteps: any objective in a LightningModule, for ``lightning`` and ``pytorch_lightning``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from visavis.losses.pair_loss import PairLoss


class PairLossSteps:
    """Training and validation step of a LightningModule: ``class MyModule(PairLossSteps,
    LightningModule)``.

    The module sets ``self.loss`` to a PairLoss and implements ``embed``. The steps log
    ``train_loss`` and ``val_loss``.
    """

    loss: PairLoss
    log: Callable[..., None]  # of LightningModule

    def embed(self, batch: Any) -> tuple[Any, ...]:
        """Encode a batch.

        Args:
            batch: A batch of the data loader.

        Returns:
            Arguments of the loss: images, texts, and image_ids and text_ids unless the pairs are in
            order.

        Raises:
            NotImplementedError: If the module does not implement it.
        """
        raise NotImplementedError

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        """Compute and log the training loss.

        Args:
            batch: A batch of the data loader.
            batch_idx: Its number.

        Returns:
            The loss, a scalar.
        """
        return self._logged_loss("train_loss", batch)

    def validation_step(self, batch: Any, batch_idx: int) -> Tensor:
        """Compute and log the validation loss, averaged over ranks.

        Args:
            batch: A batch of the data loader.
            batch_idx: Its number.

        Returns:
            The loss, a scalar.
        """
        return self._logged_loss("val_loss", batch, sync_dist=True)

    def _logged_loss(self, name: str, batch: Any, **log_options: Any) -> Tensor:
        # The batch size weights the mean of an epoch.
        images, *others = self.embed(batch)
        value = self.loss(images, *others)
        self.log(name, value, batch_size=len(images), prog_bar=True, **log_options)
        return value
