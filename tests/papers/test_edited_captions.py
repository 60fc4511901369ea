"""Supervision by edited captions: which texts a batch holds, and their targets."""

import numpy as np
import pytest
import torch

import visavis
from visavis.core.errors import RecipeError
from visavis.data.dataset import Dataset
from visavis.data.dataset_reader import open_dataset
from visavis.data.image_file import Image
from visavis.losses.objectives import CATALOG as OBJECTIVES
from visavis.losses.targets import Targets
from visavis.papers.edited_captions import EditedBatches, EditedCaptionSupervision, EditedTexts
from visavis.training.recipes.files import read_recipe
from visavis.training.training_run import prepare_training

EDITED = "EditedCaptionSupervision(per_caption=2)"


def two_images():
    return Dataset(
        "two",
        (Image("a.jpg", "train"), Image("b.jpg", "train")),
        ("A red ball", "A dog is running", "A blue ball"),
        np.array([0, 0, 1]),
    )


def test_edited_texts_belong_to_no_image():
    """False texts have negative numbers of their own. A true text belongs to its image, and the
    caption of another image is not a negative.
    """
    data = two_images()
    edited = EditedTexts.from_split(data)
    numbers = {text: 3 + i for i, text in enumerate(edited.texts)}
    assert "A blue ball" not in numbers
    assert "A red ball" not in numbers
    false = edited.image_of[numbers["A dog is not running"]]
    assert false < 0
    negated = [text for text in edited.texts if " is not " in text and "running" not in text]
    assert edited.image_of[[numbers[text] for text in negated]].tolist() == [0]
    pairs = edited.pairs_of[1].tolist()
    assert [1, numbers["A dog is not running"]] in pairs
    assert [numbers[negated[0]], numbers[negated[0].replace("not ", "")]] in pairs
    own = edited.image_of[edited.image_of < 0]
    assert len(np.unique(own)) == len(own)


def test_edited_batches_sample_pairs_of_each_caption():
    data = two_images()
    edited = EditedTexts.from_split(data)
    images, texts = EditedBatches(edited, 1).add_negatives(
        np.array([0, 1]), np.array([1, 2]), np.random.default_rng(0)
    )
    assert images.tolist() == [0, 1]
    assert texts[:2].tolist() == [1, 2]
    added = set(texts[2:].tolist())
    assert any(set(pair) - {1} <= added for pair in edited.pairs_of[1].tolist())
    assert min(added) >= 3


def test_edited_captions_are_negatives_of_images_only():
    """In the direction from texts to images, a false text has no positive and no gradient."""
    targets = Targets(query_ids=torch.tensor([0, 1]), candidate_ids=torch.tensor([0, 1, -1]))
    without = Targets(query_ids=torch.tensor([0, 1]), candidate_ids=torch.tensor([0, 1]))
    scores = torch.tensor([[0.5, 0.1, 0.4], [0.2, 0.6, 0.3]], requires_grad=True)
    for name in ("Unified", "VLC", "Triplet", "InfoNCE"):
        (objective,) = [kind() for kind in OBJECTIVES if kind.__name__ == name]
        texts = objective.one_way(scores.T, targets.T)
        pairs = objective.one_way(scores[:, :2].T, without.T)
        torch.testing.assert_close(texts, pairs)
        images = objective.one_way(scores, targets)
        (gradient,) = torch.autograd.grad(images.sum(), scores)
        assert gradient[:, 2].abs().sum() > 0, name


def test_training_with_edited_captions(scenes, tmp_path):
    """The batches hold the edited texts, and the run is evaluated without them."""
    overrides = {
        "phases.0.supervision": EDITED,
        "epochs": 1,
        "model.embedding_dim": 16,
        "training.batch_size": 20,
    }
    run = visavis.train("demo", data=scenes, out=tmp_path / "run", overrides=overrides)
    assert run.supervision == EDITED
    assert visavis.evaluate(run.run).metrics == run.test.metrics
    module, matcher = prepare_training(read_recipe("demo", overrides | {"data.path": str(scenes)}))
    train = EditedCaptionSupervision().extend_batches(module.loaders[0])
    batch = next(train.epoch(0))
    assert len(batch.captions) > 20
    assert (batch.text_ids < 0).any()
    assert set(batch.image_ids.tolist()) >= set(batch.text_ids[batch.text_ids >= 0].tolist())
    visual, text = matcher.encode_visual(batch.visual), matcher.encode_text(batch.text)
    assert len(text.vectors) == len(batch.captions)
    ignore = EditedCaptionSupervision().targets(visual, text, batch).ignore
    edited_of = torch.from_numpy(train.extension.edited.edited_of[batch.captions])
    own = edited_of == batch.image_ids[:, None]
    assert not ignore[own].any()
    assert not ignore[:, edited_of < 0].any()
    assert ignore[:, edited_of >= 0][~own[:, edited_of >= 0]].all()
    assert own.any(0)[edited_of >= 0].all()
    assert module.extra_texts == EditedTexts.from_split(open_dataset(scenes).split("train")).texts


def test_edited_captions_need_a_caption_to_edit(tmp_path, scenes):
    overrides = {"phases.0.supervision": EDITED, "training.captions_per_image": 2}
    with pytest.raises(RecipeError, match=r"captions_per_image: expected no value with EditedCapt"):
        visavis.train("demo", data=scenes, out=tmp_path / "run", overrides=overrides)
