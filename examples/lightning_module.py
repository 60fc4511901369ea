"""A LightningModule with an objective of visavis. Rows with the same label are all positives.

Needs visavis, and pip install lightning
"""

import torch
from lightning.pytorch import LightningModule, Trainer
from tiny_models import captioned_images, rows, tiny_clip
from torch.utils.data import DataLoader

from visavis import PairLoss
from visavis.integrations.lightning import PairLossSteps
from visavis.objectives import Unified


class Retriever(PairLossSteps, LightningModule):
    def __init__(self):
        super().__init__()
        self.model, self.loss = (
            tiny_clip(),
            PairLoss(Unified(margin=0.2, gamma=10, reduction="half_mean")),
        )

    def embed(self, batch):
        outputs = self.model(pixel_values=batch["pixel_values"], input_ids=batch["input_ids"])
        return outputs.image_embeds, outputs.text_embeds, batch["labels"]

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=2e-3)


loader, module = DataLoader(rows(captioned_images()), batch_size=16), Retriever()
quiet = dict.fromkeys(
    ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False
)
trainer = Trainer(accelerator="cpu", max_epochs=10, log_every_n_steps=1, **quiet)
first = trainer.validate(module, loader, verbose=False)[0]["val_loss"]
trainer.fit(module, loader, loader)
print(f"loss {first:.3f} -> {trainer.validate(module, loader, verbose=False)[0]['val_loss']:.3f}")
