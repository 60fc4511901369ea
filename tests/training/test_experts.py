"""Training on a store of experts: names and dimensions reach the model, and resuming needs the same
store.
"""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch
from PIL import Image
from tests.fixtures.recipes import write_recipe

import visavis
from visavis.core.encoded import Encoded
from visavis.core.errors import DataError, RecipeError, RunError
from visavis.data.features.expert_store import create_expert_store
from visavis.data.features.store import FeatureWriter, StoreDescription
from visavis.data.synthetic import write_synthetic_clips
from visavis.models import CATALOG
from visavis.models.base import GlobalMatcher, MatcherConfig, encode_unit_rows
from visavis.models.word_encoders import GRUWordEncoder, pool_words
from visavis.training.recipes.files import read_recipe
from visavis.training.training_run import prepare_training

WORDS = ["dog", "cat", "boat", "tree", "kite", "car"]


class MeanOfExperts(GlobalMatcher):
    """Sum of one linear map per expert over the mean of its vectors."""

    name = "MeanOfExperts"
    visual_granularities = ("experts",)
    text_granularities = ("tokens",)

    @dataclass(frozen=True, kw_only=True)
    class Config(MatcherConfig):
        width: int = 8
        experts: dict[str, int] = field(default_factory=dict)

    def __init__(self, config):
        super().__init__(config)
        self.maps = torch.nn.ModuleDict(
            {name: torch.nn.Linear(width, config.width) for name, width in config.experts.items()}
        )
        self.text = GRUWordEncoder(
            config.text_input_dim, 8, config.width, bidirectional=False, dropout=0.0
        )

    def parts(self):
        return {"visual": [self.maps], "text": [self.text]}

    def encode_visual(self, items):
        return encode_unit_rows(
            sum(
                (self.maps[name](part) * items.mask[name][..., None]).sum(1)
                / items.mask[name].sum(1, keepdim=True).clamp(min=1)
                for name, part in items.vectors.items()
            )
        )

    def encode_text(self, items):
        return encode_unit_rows(pool_words(self.text(items), items.mask, "last"))


@pytest.fixture
def store(tmp_path, monkeypatch):
    """Write captions without pixels, and two experts, one of which encodes the word of the caption."""
    monkeypatch.setitem(CATALOG, MeanOfExperts.name, MeanOfExperts)
    random, images = np.random.default_rng(0), []
    with create_expert_store(
        tmp_path / "experts", {"appearance": len(WORDS), "sound": len(WORDS)}
    ) as writer:
        for number in range(60):
            word = number % len(WORDS)
            code = np.eye(len(WORDS))[[word] * random.integers(1, 5)]
            writer.append(f"video{number}", {"appearance" if number % 2 else "sound": code})
            split = "val" if number >= 48 else "train"
            images.append(
                {
                    "filename": f"video{number}",
                    "split": split,
                    "sentences": [{"raw": f"a {WORDS[word]} {number}"}],
                }
            )
    (tmp_path / "dataset.json").write_text(json.dumps({"images": images}))
    return tmp_path


@pytest.fixture
def recipe(store):
    return write_recipe(
        store / "tiny.toml",
        {"epochs": 2, "objective": "Unified(gamma=20)", "optimizer": {"lr": 0.02}},
        data={"path": str(store / "dataset.json")},
        visual={"encoder": None, "granularity": "experts", "features": str(store / "experts")},
        model={"kind": "MeanOfExperts", "embedding_dim": None, "word_dim": None},
        training={"batch_size": 12, "metric_batches": None, "threads": None},
    )


def test_model_receives_expert_names_and_dims(recipe):
    data_module, matcher = prepare_training(read_recipe(recipe, {"visual.max_length": 2}))
    assert matcher.config.experts == {"appearance": 6, "sound": 6}
    assert matcher.config.visual_input_dim == 12
    batch = next(data_module.loader(data_module.data.split("train")).epoch(0))
    assert batch.visual.vectors["sound"].shape[1] <= 2
    _, matcher = prepare_training(read_recipe(recipe, {"visual.experts": ["sound"]}))
    assert matcher.config.experts == {"sound": 6}


def test_expert_run_needs_unchanged_store(recipe, store, monkeypatch):
    run = store / "run"
    monkeypatch.chdir(store)
    trained = visavis.train(recipe, out=run, overrides={"visual.features": "experts"})
    assert visavis.evaluate(run, split="val").to_json()["rsum"] == pytest.approx(
        trained.validation_rsum
    )
    assert visavis.evaluate(run, split="val", data=store / "dataset.json").to_json()[
        "rsum"
    ] == pytest.approx(trained.validation_rsum)
    mined = visavis.data_mine(run, num_negatives=2, max_ratio=0, out=store / "n.safetensors")
    assert [(each.queries, each.negatives) for each in mined.directions] == [(48, 2), (48, 2)]
    hits = visavis.search(run, "a dog", top=3)
    assert len({hit.name for hit in hits}) == 3
    for encode, item in (
        (visavis.load(run).encode_images, Image.new("RGB", (8, 8))),
        (visavis.load(run).encode_videos, "a.mp4"),
    ):
        with pytest.raises(
            RunError,
            match="expected one for new images or videos, got a model that was trained on stored features alone",
        ):
            encode([item])
    with create_expert_store(store / "other", {"appearance": 6, "sound": 6}) as writer:
        for number in range(60):
            writer.append(f"video{number}", {"sound": np.ones(6)})
    (store / "experts").rename(store / "before")
    (store / "other").rename(store / "experts")
    with pytest.raises(RunError, match="stored_features changed since"):
        visavis.train(resume=run)


@pytest.fixture
def texts(store):
    """Write one-hot word features of all captions."""
    captions = sorted({f"a {WORDS[number % len(WORDS)]} {number}" for number in range(60)})
    known = sorted({word for caption in captions for word in caption.split()})
    description = StoreDescription(
        "text", "words", "codes", "0", (len(known),), len(captions), fingerprint=""
    )
    lengths = np.array([len(caption.split()) for caption in captions])
    writer = FeatureWriter.open(store / "texts", description, captions, lengths)
    for caption in captions:
        codes = torch.eye(len(known))[[known.index(word) for word in caption.split()]]
        writer.append(Encoded(codes[None], torch.ones(1, len(codes), dtype=torch.bool)))
    writer.finish()
    np.save(
        store / "images.npy", np.eye(len(WORDS), dtype=np.float32)[np.arange(60) % len(WORDS), None]
    )
    stored = {"granularity": "regions", "features": str(store / "images.npy")}
    return {
        "visual": stored,
        "model": {"kind": "VSEInfinity", "embedding_dim": 8},
        "text": {"granularity": "words", "features": str(store / "texts")},
    }


def test_run_on_stored_captions_rejects_new_captions(recipe, texts, store):
    run = store / "run"
    trained = visavis.train(recipe, out=run, overrides=texts)
    assert visavis.evaluate(run, split="val").to_json()["rsum"] == pytest.approx(
        trained.validation_rsum
    )
    with pytest.raises(
        RunError,
        match="expected one for new texts, got a model that was trained on stored caption features alone",
    ):
        visavis.load(run).encode_texts(["a dog"])


@pytest.mark.parametrize(
    ("overrides", "error", "sentence"),
    [
        ({"text.granularity": "tokens"}, RecipeError, "text.features: expected text.granularity"),
        ({"text.encoder": "minilm"}, RecipeError, "text.features: expected text.granularity"),
        (
            {"text.granularity": "pooled"},
            RecipeError,
            "expected pooled features of captions, got words features of the text side in",
        ),
        (
            {"text.features": "nowhere"},
            DataError,
            (
                r"^text\.features: .*nowhere.* Set text\.features=PATH, or edit it in the run\.toml of "
                r"a run\.$"
            ),
        ),
    ],
)
def test_invalid_stored_caption_features_are_rejected(recipe, texts, overrides, error, sentence):
    with pytest.raises(error, match=sentence):
        prepare_training(read_recipe(recipe, texts | overrides))


@pytest.mark.parametrize(
    ("widths", "sentence"),
    [
        (
            {"appearance": 6, "sound": 5},
            (
                r"expected appearance \(6\), sound \(6\) of images, as in its training, got appearance "
                r"\(6\), sound \(5\)"
            ),
        ),
        ({"appearance": 6}, r"got appearance \(6\)\. Name the features of its training"),
    ],
)
def test_model_rejects_other_experts(recipe, store, widths, sentence):
    visavis.train(recipe, out=store / "run")
    shutil.rmtree(store / "experts")
    with create_expert_store(store / "experts", widths) as writer:
        for number in range(60):
            writer.append(
                f"video{number}", {name: np.ones(width) for name, width in widths.items()}
            )
    for use in (
        lambda: visavis.evaluate(store / "run", split="val"),
        lambda: visavis.search(store / "run", "a dog"),
    ):
        with pytest.raises(RunError, match=sentence):
            use()


@pytest.mark.parametrize(
    ("overrides", "error", "sentence"),
    [
        (
            {"visual.features": ""},
            RecipeError,
            'visual.granularity: "experts" needs visual.features',
        ),
        ({"visual.encoder": "scenes"}, RecipeError, "and neither visual.encoder"),
        ({"visual.standardize": "sqrt_zscore"}, RecipeError, "and neither visual.encoder"),
        (
            {"visual.granularity": "pooled", "visual.max_length": 3},
            RecipeError,
            "visual.experts, visual.max_length: expected with granularity",
        ),
        ({"visual.experts": ["face"]}, DataError, "has no expert 'face': known: appearance, sound"),
        (
            {"visual.experts": ["sound", "sound"]},
            RecipeError,
            r"visual\.experts: expected different names, got \['sound', 'sound'\]",
        ),
        (
            {"evaluation.validation": "dev"},
            DataError,
            r"has no split dev\. Set evaluation\.validation=NAME: known: train, val\.",
        ),
        (
            {"visual.features": "nowhere"},
            DataError,
            r"visual\.features: .*nowhere.* Set visual\.features=PATH",
        ),
        (
            {"model": {"kind": "VSE++"}},
            RecipeError,
            (
                r"visual_granularity: expected pooled or regions or pixels for VSEPlusPlus, got "
                r"experts"
            ),
        ),
    ],
)
def test_invalid_expert_recipe_is_rejected(recipe, overrides, error, sentence):
    with pytest.raises(error, match=sentence):
        prepare_training(read_recipe(recipe, overrides))


@pytest.mark.parametrize("split", ["train", "val", "test"])
def test_missing_row_in_store_is_reported_before_training(split, recipe, texts, store, listener):
    listed = json.loads((store / "dataset.json").read_text())
    listed["images"][5]["split"] = split
    for changed, overrides, sentence in (
        ({"filename": "video99"}, {}, "experts has no features of 'video99'"),
        (
            {"sentences": [{"raw": "a dog elsewhere"}]},
            texts,
            "texts has no features of 'a dog elsewhere'",
        ),
    ):
        images = [
            image | changed if number == 5 else image
            for number, image in enumerate(listed["images"])
        ]
        (store / "dataset.json").write_text(json.dumps({"images": images}))
        with pytest.raises(DataError, match=sentence):
            visavis.train(recipe, out=store / "run", overrides=overrides, progress=listener)
        assert listener.steps == 0
        assert not (store / "run").exists()


@pytest.fixture(scope="module")
def moving(tmp_path_factory):
    return write_synthetic_clips(
        tmp_path_factory.mktemp("moving") / "world",
        num_train=24,
        num_val=8,
        num_test=8,
        captions_per_clip=2,
    )


@pytest.mark.parametrize("row", ["mmt", "ce", "ce-appearance"])
def test_synthetic_clips_train_and_evaluate_equally(row, moving, tmp_path):
    small = {"training.batch_size": 12, "epochs": 1, "training.threads": 1}
    run = visavis.train(
        f"synthetic-clips/{row}", data=moving, out=tmp_path / "run", overrides=small
    )
    config = json.loads((run.run / "model" / "config.json").read_text())["architecture"]
    widths = (
        {"appearance": 128}
        if row == "ce-appearance"
        else {"appearance": 128, "motion": 48, "sound": 16}
    )
    assert config["experts"] == widths
    assert config["visual_input_dim"] == sum(widths.values())
    (tmp_path / "elsewhere").mkdir()
    moved = run.run.rename(tmp_path / "elsewhere" / "run")
    assert visavis.evaluate(moved).metrics == run.test.metrics
    tight = visavis.evaluate(moved, memory="1MB").metrics
    assert tight == run.test.metrics


def test_dataset_without_experts_is_rejected(store, tmp_path):
    shutil.move(store / "experts", store / "others")
    with pytest.raises(
        DataError, match=r"experts is not a store of experts: expected a file experts\.json"
    ):
        visavis.train("synthetic-clips/ce", data=store / "dataset.json", out=tmp_path / "run")
