"""PairLossSteps: a LightningModule with a CLIP model of random weights."""

import pytest
import torch
from tiny_models import captioned_images, rows, tiny_clip
from torch.utils.data import DataLoader

from visavis import PairLoss
from visavis.integrations.lightning import PairLossSteps
from visavis.objectives import NTXent, Unified

QUIET = {
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "accelerator": "cpu",
}
pytestmark = [
    pytest.mark.slow,
    # Raised by lightning: its use of torch, and more than two cores.
    pytest.mark.filterwarnings("ignore:.isinstance.treespec"),
    pytest.mark.filterwarnings("ignore:.*does not have many workers"),
]


@pytest.fixture(scope="module")
def lightning():
    """Imported when a test needs it, because the import takes seconds."""
    pytest.importorskip("transformers")
    return pytest.importorskip("lightning.pytorch", reason="lightning is installed by make slow")


@pytest.fixture(scope="module")
def retriever(lightning):
    class Retriever(PairLossSteps, lightning.LightningModule):
        def __init__(self, loss, *, by_ids):
            super().__init__()
            self.model, self.loss, self.by_ids = tiny_clip(), loss, by_ids

        def embed(self, batch):
            actual = self.model(pixel_values=batch["pixel_values"], input_ids=batch["input_ids"])
            return (
                actual.image_embeds,
                actual.text_embeds,
                *([batch["labels"]] if self.by_ids else []),
            )

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.05)

    return Retriever


@pytest.mark.parametrize("by_ids", [True, False])
@pytest.mark.parametrize("objective", [Unified(gamma=5), NTXent()], ids=str)
def test_lightning_step_minimizes_loss(objective, by_ids, lightning, retriever):
    batch = captioned_images()
    module = retriever(PairLoss(objective), by_ids=by_ids)
    loader = DataLoader(rows(batch), batch_size=16)
    value = module.loss(*module.embed(batch))
    expected = [
        parameter.detach() - (0 if gradient is None else 0.05 * gradient)
        for parameter, gradient in zip(
            module.parameters(),
            torch.autograd.grad(value, list(module.parameters()), allow_unused=True),
            strict=True,
        )
    ]
    trainer = lightning.Trainer(max_epochs=1, log_every_n_steps=1, **QUIET)
    assert trainer.validate(module, loader, verbose=False)[0]["val_loss"] == pytest.approx(
        value.item(), rel=1e-5
    )
    trainer.fit(module, loader, loader)
    assert trainer.callback_metrics["train_loss"].item() == pytest.approx(value.item(), rel=1e-5)
    torch.testing.assert_close(
        [parameter.detach() for parameter in module.parameters()], expected, rtol=1e-4, atol=1e-6
    )
    assert trainer.validate(module, loader, verbose=False)[0]["val_loss"] < value.item()


def test_lightning_trains_scale_of_loss(lightning, retriever):
    scale = torch.nn.Parameter(torch.tensor(14.0))
    module, loader = (
        retriever(PairLoss(NTXent(), scale=scale), by_ids=True),
        DataLoader(rows(captioned_images()), batch_size=16),
    )
    lightning.Trainer(max_epochs=1, log_every_n_steps=1, **QUIET).fit(module, loader, loader)
    assert scale.item() != 14
