"""Fine-tune a sentence-transformers model with an objective of visavis. Rows with the same label
are all positives.

Needs visavis, and pip install sentence-transformers accelerate datasets
"""

import tempfile

from datasets import Dataset
from sentence_transformers import SentenceTransformerTrainer, SentenceTransformerTrainingArguments
from tiny_models import sentences, tiny_sentence_transformer

from visavis.integrations.sentence_transformers import VisavisLoss
from visavis.objectives import Unified

model = tiny_sentence_transformer()
# The learning rate below is chosen for a mean.
loss = VisavisLoss(model, Unified(margin=0.2, gamma=10, reduction="half_mean"))
with tempfile.TemporaryDirectory() as folder:
    args = SentenceTransformerTrainingArguments(
        folder,
        num_train_epochs=10,
        per_device_train_batch_size=16,
        learning_rate=5e-3,
        logging_steps=1,
        report_to=[],
        use_cpu=True,
    )
    trainer = SentenceTransformerTrainer(
        model, args, train_dataset=Dataset.from_dict(sentences()), loss=loss
    )
    trainer.train()
losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f}")
