"""Fine-tune a CLIP of transformers with its Trainer and an objective of visavis. Rows with the same
label are all positives.

Needs visavis with the extra hf, and pip install accelerate
"""

import tempfile

from tiny_models import captioned_images, rows, tiny_clip
from transformers import Trainer, TrainingArguments

from visavis.integrations.transformers import TrainerLoss
from visavis.objectives import Unified

with tempfile.TemporaryDirectory() as folder:
    args = TrainingArguments(
        folder,
        num_train_epochs=20,
        per_device_train_batch_size=16,
        learning_rate=2e-3,
        logging_steps=1,
        label_names=["labels"],
        use_cpu=True,
    )
    # The learning rate above is chosen for a mean.
    loss = TrainerLoss(Unified(margin=0.2, gamma=10, reduction="half_mean"))
    trainer = Trainer(
        tiny_clip(), args, train_dataset=rows(captioned_images()), compute_loss_func=loss
    )
    trainer.train()
losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f}")
