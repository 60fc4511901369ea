"""TrainerLoss for the Trainer of transformers, with a CLIP model of random weights."""

import pytest
import torch

pytest.importorskip("transformers")

from tests.matching import mentions
from tiny_models import captioned_images, rows, tiny_clip

from visavis import PairLoss
from visavis.core.errors import ShapeError, SpecError
from visavis.integrations.transformers import TrainerLoss
from visavis.objectives import VLC, NTXent, Triplet, TripletHN, Unified

FAMILY = (Triplet(), TripletHN(), NTXent(), VLC(), Unified())


@pytest.fixture
def model():
    return tiny_clip().double()


@pytest.fixture
def batch():
    columns = captioned_images()
    return columns | {"pixel_values": columns["pixel_values"].double()}


def embedded(model, batch, **options):
    return model(pixel_values=batch["pixel_values"], input_ids=batch["input_ids"], **options)


def gradients(value, model):
    return torch.autograd.grad(
        value, list(model.parameters()), retain_graph=True, allow_unused=True
    )


def assert_close(ours, theirs):
    torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-11)


def test_trainer_loss_with_model_scale_equals_model_loss(model, batch):
    outputs = embedded(model, batch, return_loss=True)
    value = TrainerLoss(NTXent(), logit_scale=model.logit_scale)(outputs, torch.arange(16))
    assert_close(value, outputs.loss)
    assert_close(gradients(value, model), gradients(outputs.loss, model))
    assert model.logit_scale in set(model.parameters())


@pytest.mark.parametrize("objective", FAMILY, ids=str)
def test_trainer_loss_uses_labels_as_ids(model, batch, objective):
    outputs = embedded(model, batch)
    value = TrainerLoss(objective)(outputs, batch["labels"])
    assert_close(
        value, PairLoss(objective)(outputs.image_embeds, outputs.text_embeds, batch["labels"])
    )
    assert not torch.isclose(value, TrainerLoss(objective)(outputs, torch.arange(16)))
    reached = [
        gradient is not None and bool(gradient.any()) for gradient in gradients(value, model)
    ]
    assert (
        sum(reached) >= len(reached) - 3
    )  # all but the scale, and biases that cancel in a softmax or a cosine


def test_trainer_loss_accepts_other_embedding_names(model, batch):
    outputs = embedded(model, batch)
    renamed = {"audio_embeds": outputs.image_embeds, "text": outputs.text_embeds}
    value = TrainerLoss(Unified(), image_embeds="audio_embeds", text_embeds="text")(
        renamed, batch["labels"]
    )
    assert_close(value, TrainerLoss(Unified())(outputs, batch["labels"]))


def test_trainer_loss_rejects_invalid_inputs(model, batch):
    with pytest.raises(ShapeError, match="labels"):
        TrainerLoss(Unified())(embedded(model, batch), None)
    with pytest.raises(ShapeError, match=mentions("image_embeds", "logits")):
        TrainerLoss(Unified())({"logits": torch.eye(2)}, torch.arange(2))
    with pytest.raises(ShapeError, match=mentions("image_embeds", "tuple")):
        TrainerLoss(Unified())((torch.eye(2), torch.eye(2)), torch.arange(2))
    with pytest.raises(SpecError, match=mentions("NTXent, InfoNCE or Sigmoid", "scale")):
        TrainerLoss(Unified(), logit_scale=model.logit_scale)
    with pytest.raises(SpecError, match=mentions("logit_scale", "2.6")):
        TrainerLoss(NTXent(), logit_scale=2.6)
    with pytest.raises(ShapeError, match=mentions("labels", "image_embeds", 3, 16)):
        TrainerLoss(Unified())(embedded(model, batch), torch.arange(3))


class InOrder(torch.utils.data.IterableDataset):
    def __init__(self, columns):
        self.rows = rows(columns)

    def __iter__(self):
        return iter(self.rows)


def trainer_of(model, data, loss, folder, **settings):
    pytest.importorskip("accelerate")
    from transformers import Trainer, TrainingArguments

    plain = {
        "label_names": ["labels"],
        "report_to": [],
        "use_cpu": True,
        "disable_tqdm": True,
        "save_strategy": "no",
    }
    args = TrainingArguments(folder, **plain | settings)
    return Trainer(model, args, train_dataset=data, eval_dataset=data, compute_loss_func=loss)


@pytest.mark.parametrize("objective", [Unified(margin=0.1, gamma=5), NTXent()], ids=str)
def test_trainer_loss_weights_accumulated_batches_by_size(model, batch, objective, tmp_path):
    unequal = {name: column[:12] for name, column in batch.items()}  # a batch of 8 and one of 4
    parts = [
        {name: column[part] for name, column in unequal.items()}
        for part in (slice(0, 8), slice(8, 12))
    ]
    values = [TrainerLoss(objective)(embedded(model, part), part["labels"]) for part in parts]
    expected = gradients((8 * values[0] + 4 * values[1]) / 12, model)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    settings = {
        "per_device_train_batch_size": 8,
        "gradient_accumulation_steps": 2,
        "max_steps": 1,
        "max_grad_norm": 0,
    }
    settings |= {"optim": "sgd", "learning_rate": 0.5, "lr_scheduler_type": "constant"}
    trainer_of(model, InOrder(unequal), TrainerLoss(objective), tmp_path, **settings).train()
    for old, new, gradient in zip(before, model.parameters(), expected, strict=True):
        assert_close(
            old - new.detach(), torch.zeros_like(old) if gradient is None else 0.5 * gradient
        )


def test_trainer_loss_is_used_for_evaluation(model, batch, tmp_path):
    trainer = trainer_of(
        model, rows(batch), TrainerLoss(Unified()), tmp_path, per_device_eval_batch_size=16
    )
    value = TrainerLoss(Unified())(embedded(model, batch), batch["labels"]).item()
    assert trainer.evaluate()["eval_loss"] == pytest.approx(value, rel=1e-6)
