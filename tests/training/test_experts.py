"""Training on a store of experts: the model is told names and widths, and a run goes on only with the very same store."""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch
from PIL import Image

import visavis
from visavis.data.description import Description
from visavis.data.experts import new_experts
from visavis.data.features import FeatureWriter
from visavis.data.scenes import write_moving_scenes
from visavis.errors import DataError, RecipeError, RunError
from visavis.models import CATALOG
from visavis.models.base import GlobalMatcher, MatcherConfig, unit
from visavis.models.text import RecurrentWords, pool_words
from visavis.training.data_module import prepare
from visavis.training.recipe_files import read_recipe
from visavis.types import Encoded

WORDS = ["dog", "cat", "boat", "tree", "kite", "car"]


class MeanOfExperts(GlobalMatcher):
    """One linear map an expert over the mean of its vectors, summed."""

    name = "MeanOfExperts"
    visual_views = ("experts",)
    text_views = ("tokens",)

    @dataclass(frozen=True, kw_only=True)
    class Config(MatcherConfig):
        width: int = 8
        experts: dict[str, int] = field(default_factory=dict)

    def __init__(self, config):
        super().__init__(config)
        self.maps = torch.nn.ModuleDict({name: torch.nn.Linear(width, config.width) for name, width in config.experts.items()})
        self.text = RecurrentWords(config.text_width, 8, config.width, bidirectional=False, dropout=0.0)

    def parts(self):
        return {"visual": [self.maps], "text": [self.text]}

    def encode_visual(self, items):
        return unit(
            sum(
                (self.maps[name](part) * items.mask[name][..., None]).sum(1) / items.mask[name].sum(1, keepdim=True).clamp(min=1)
                for name, part in items.vectors.items()
            )
        )

    def encode_text(self, items):
        return unit(pool_words(self.text(items), items.mask, "last"))


@pytest.fixture
def store(tmp_path, monkeypatch):
    """A list of captions without pixels, and the experts of its items: which word is meant is in one expert or in the other."""
    monkeypatch.setitem(CATALOG, MeanOfExperts.name, MeanOfExperts)
    random, images = np.random.default_rng(0), []
    with new_experts(tmp_path / "experts", {"appearance": len(WORDS), "sound": len(WORDS)}) as writer:
        for number in range(60):
            word = number % len(WORDS)
            code = np.eye(len(WORDS))[[word] * random.integers(1, 5)]
            writer.append(f"video{number}", {"appearance" if number % 2 else "sound": code})
            split = "val" if number >= 48 else "train"
            images.append({"filename": f"video{number}", "split": split, "sentences": [{"raw": f"a {WORDS[word]} {number}"}]})
    (tmp_path / "dataset.json").write_text(json.dumps({"images": images}))
    return tmp_path


@pytest.fixture
def recipe(store):
    path = store / "tiny.toml"
    path.write_text(
        f"""
        name = "tiny"
        data = {{ path = "{store / "dataset.json"}" }}
        visual = {{ view = "experts", features = "{store / "experts"}" }}
        text = {{ tower = "vocabulary", min_count = 1 }}
        model = {{ kind = "MeanOfExperts" }}
        training = {{ batch_size = 12 }}
        [[phases]]
        epochs = 2
        objective = "Unified(gamma=20)"
        optimizer = {{ lr = 0.02 }}
        """
    )
    return path


def test_a_model_is_told_names_and_widths(recipe):
    data_module, matcher = prepare(read_recipe(recipe, {"visual.longest": 2}))
    assert matcher.config.experts == {"appearance": 6, "sound": 6}
    assert matcher.config.visual_width == 12
    batch = next(data_module.loader(data_module.data.split("train")).epoch(0))
    assert batch.visual.vectors["sound"].shape[1] <= 2
    _, matcher = prepare(read_recipe(recipe, {"visual.experts": ["sound"]}))
    assert matcher.config.experts == {"sound": 6}


def test_a_run_on_experts_is_evaluated_and_goes_on_only_with_the_very_same(recipe, store, monkeypatch):
    run = store / "run"
    monkeypatch.chdir(store)
    trained = visavis.train(recipe, out=run, overrides={"visual.features": "experts"})
    assert visavis.evaluate(run, split="val").to_json()["rsum"] == pytest.approx(trained.validation_rsum)
    assert visavis.evaluate(run, split="val", data=store / "dataset.json").to_json()["rsum"] == pytest.approx(trained.validation_rsum)
    hits = visavis.search(run, "a dog", top=3)
    assert len({hit.name for hit in hits}) == 3
    for encode, item in ((visavis.load(run).encode_images, Image.new("RGB", (8, 8))), (visavis.load(run).encode_videos, "a.mp4")):
        with pytest.raises(RunError, match="stored features without a visual tower: it cannot read new images or videos"):
            encode([item])
    with new_experts(store / "other", {"appearance": 6, "sound": 6}) as writer:
        for number in range(60):
            writer.append(f"video{number}", {"sound": np.ones(6)})
    (store / "experts").rename(store / "before")
    (store / "other").rename(store / "experts")
    with pytest.raises(RunError, match="the stored features changed since"):
        visavis.train(resume=run)


@pytest.fixture
def texts(store):
    """Features of all captions as words, each word by its one-hot code."""
    captions = sorted({f"a {WORDS[number % len(WORDS)]} {number}" for number in range(60)})
    known = sorted({word for caption in captions for word in caption.split()})
    description = Description("text", "words", "codes", "0", (len(known),), len(captions), fingerprint="")
    lengths = np.array([len(caption.split()) for caption in captions])
    writer = FeatureWriter.open(store / "texts", description, captions, lengths)
    for caption in captions:
        codes = torch.eye(len(known))[[known.index(word) for word in caption.split()]]
        writer.append(Encoded(codes[None], torch.ones(1, len(codes), dtype=torch.bool)))
    writer.finish()
    np.save(store / "images.npy", np.eye(len(WORDS), dtype=np.float32)[np.arange(60) % len(WORDS), None])
    stored = {"view": "grid", "features": str(store / "images.npy")}
    return {"visual": stored, "model": {"kind": "VSEInfinity", "width": 8}, "text": {"view": "words", "features": str(store / "texts")}}


def test_a_run_on_stored_features_of_captions_is_evaluated_but_reads_no_new_ones(recipe, texts, store):
    run = store / "run"
    trained = visavis.train(recipe, out=run, overrides=texts)
    assert visavis.evaluate(run, split="val").to_json()["rsum"] == pytest.approx(trained.validation_rsum)
    with pytest.raises(RunError, match="trained on stored features of captions without a text tower: it cannot read new sentences"):
        visavis.load(run).encode_texts(["a dog"])


@pytest.mark.parametrize(
    ("overrides", "error", "sentence"),
    [
        ({"text.view": "tokens"}, RecipeError, "text.features are read as they are stored"),
        ({"text.tower": "minilm"}, RecipeError, "text.features are read as they are stored"),
        ({"text.view": "pooled"}, RecipeError, "texts holds words of the text side, expected pooled of captions"),
        (
            {"text.features": "nowhere"},
            DataError,
            r"^text\.features names what is not here: say where it lies with text\.features=PATH, or in the run\.toml of a run; nowhere does not",
        ),
    ],
)
def test_stored_features_of_captions_that_do_not_fit_are_one_sentence(recipe, texts, overrides, error, sentence):
    with pytest.raises(error, match=sentence):
        prepare(read_recipe(recipe, texts | overrides))


@pytest.mark.parametrize(
    ("widths", "sentence"),
    [
        (
            {"appearance": 6, "sound": 5},
            r"trained on appearance \(6\), sound \(6\) of images, and here are appearance \(6\), sound \(5\): name those",
        ),
        ({"appearance": 6}, r"and here are appearance \(6\): name those that it was trained on"),
    ],
)
def test_a_model_reads_only_experts_as_it_was_trained_on(recipe, store, widths, sentence):
    visavis.train(recipe, out=store / "run")
    shutil.rmtree(store / "experts")
    with new_experts(store / "experts", widths) as writer:
        for number in range(60):
            writer.append(f"video{number}", {name: np.ones(width) for name, width in widths.items()})
    for use in (lambda: visavis.evaluate(store / "run", split="val"), lambda: visavis.search(store / "run", "a dog")):
        with pytest.raises(RunError, match=sentence):
            use()


@pytest.mark.parametrize(
    ("overrides", "error", "sentence"),
    [
        ({"visual.features": ""}, RecipeError, 'visual.view = "experts" reads the store of experts that visual.features names'),
        ({"visual.tower": "scenes"}, RecipeError, "are for other views"),
        ({"visual.standardize": "roots"}, RecipeError, "are for other views"),
        ({"visual.view": "pooled", "visual.longest": 3}, RecipeError, "visual.experts and visual.longest are for"),
        ({"visual.experts": ["face"]}, DataError, "has no expert 'face': known: appearance, sound"),
        ({"visual.experts": ["sound", "sound"]}, RecipeError, r"visual\.experts is \['sound', 'sound'\], where one is named twice"),
        (
            {"evaluation.validation": "dev"},
            DataError,
            r"has no split dev, .*name another by evaluation\.validation=NAME; known: train, val\.",
        ),
        ({"visual.features": "nowhere"}, DataError, r"with visual\.features=PATH, .* nowhere does not exist"),
        ({"model": {"kind": "VSE++"}}, RecipeError, r"cannot read images as experts: expected pooled or grid or pixels"),
    ],
)
def test_what_does_not_fit_is_one_sentence(recipe, overrides, error, sentence):
    with pytest.raises(error, match=sentence):
        prepare(read_recipe(recipe, overrides))


@pytest.mark.parametrize("split", ["train", "val", "test"])
def test_an_item_or_a_caption_without_any_row_in_a_store_is_named_before_the_first_step(split, recipe, texts, store, listener):
    listed = json.loads((store / "dataset.json").read_text())
    listed["images"][5]["split"] = split
    for changed, overrides, sentence in (
        ({"filename": "video99"}, {}, "experts holds no features of 'video99'"),
        ({"sentences": [{"raw": "a dog elsewhere"}]}, texts, "texts holds no features of 'a dog elsewhere'"),
    ):
        images = [image | changed if number == 5 else image for number, image in enumerate(listed["images"])]
        (store / "dataset.json").write_text(json.dumps({"images": images}))
        with pytest.raises(DataError, match=sentence):
            visavis.train(recipe, out=store / "run", overrides=overrides, progress=listener)
        assert listener.steps == 0
        assert not (store / "run").exists()


@pytest.fixture(scope="module")
def moving(tmp_path_factory):
    return write_moving_scenes(tmp_path_factory.mktemp("moving") / "world", num_train=24, num_val=8, num_test=8, captions_per_clip=2)


@pytest.mark.parametrize("row", ["mmt", "ce", "ce-appearance"])
def test_moving_scenes_are_trained_on_saved_and_evaluated_the_same(row, moving, tmp_path):
    small = {"training.batch_size": 12, "epochs": 1, "training.threads": 1}
    run = visavis.train(f"moving-scenes/{row}", data=moving, out=tmp_path / "run", overrides=small)
    config = json.loads((run.folder / "model" / "config.json").read_text())["architecture"]
    widths = {"appearance": 128} if row == "ce-appearance" else {"appearance": 128, "motion": 48, "sound": 16}
    assert config["experts"] == widths
    assert config["visual_width"] == sum(widths.values())
    (tmp_path / "elsewhere").mkdir()
    moved = run.folder.rename(tmp_path / "elsewhere" / "run")
    assert visavis.evaluate(moved).metrics == run.test.metrics
    tight = visavis.evaluate(moved, memory="1MB").metrics
    assert tight == run.test.metrics


def test_a_data_set_without_experts_of_its_own_is_one_sentence(store, tmp_path):
    shutil.move(store / "experts", store / "others")
    with pytest.raises(DataError, match=r"experts is no store of experts: it has no experts\.json; make one with visavis data convert"):
        visavis.train("moving-scenes/ce", data=store / "dataset.json", out=tmp_path / "run")
