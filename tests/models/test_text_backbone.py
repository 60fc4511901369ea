"""Trained text encoder: states, word noise, and its files in a model folder."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from tests.fixtures.recipes import write_recipe

import visavis
from visavis.core.encoded import Encoded
from visavis.core.errors import DataError, RecipeError, RunError
from visavis.data.images import decode_image
from visavis.models import find_model
from visavis.models.base import load_matcher
from visavis.models.encoders.text_backbone import (
    TEXT_BACKBONE_FOLDER,
    PretrainedTokenizer,
    TextBackbone,
    WordNoise,
)

transformers = pytest.importorskip("transformers")

WORDS = [
    "[PAD]",
    "[UNK]",
    "[CLS]",
    "[SEP]",
    "[MASK]",
    "a",
    "red",
    "blue",
    "circle",
    "square",
    "is",
    "left",
    "of",
    "the",
    "##s",
    "star",
]
CLS, SEP, MASK = 2, 3, 4
SENTENCES = ["a red circle", "the blue squares is left of a star", "stars"]


@pytest.fixture
def bert(tmp_path):
    """Write a folder with a tiny BERT without dropout."""
    folder = tmp_path / "bert"
    shape = {
        "hidden_size": 16,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "intermediate_size": 24,
        "max_position_embeddings": 32,
    }
    still = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    transformers.utils.logging.disable_progress_bar()
    model = transformers.BertModel(transformers.BertConfig(**shape, **still, vocab_size=len(WORDS)))
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    model.save_pretrained(folder)
    transformers.utils.logging.enable_progress_bar()
    (tmp_path / "vocab.txt").write_text("\n".join(WORDS))
    transformers.BertTokenizer(str(tmp_path / "vocab.txt")).save_pretrained(folder)
    return folder


def tokens(folder, sentences=SENTENCES):
    return PretrainedTokenizer.open(folder).encode(sentences)


def test_text_backbone_matches_transformers(bert):
    given = tokens(bert)
    backbone = TextBackbone(str(bert), WordNoise(masked=0.5)).eval()
    states = backbone(given)
    model = transformers.AutoModel.from_pretrained(bert).eval()
    for row, sentence in enumerate(SENTENCES):
        alone = model(
            **transformers.AutoTokenizer.from_pretrained(bert)(sentence, return_tensors="pt")
        ).last_hidden_state[0]
        torch.testing.assert_close(states.vectors[row, states.mask[row]], alone, rtol=0, atol=1e-5)
    assert backbone.hidden_dim == 16
    assert not any("pooler" in name for name, _ in backbone.named_parameters())


def test_word_noise_changes_whole_words_at_given_rates(bert):
    backbone = TextBackbone(str(bert), WordNoise(masked=0.3, replaced=0.2, dropped=0.1)).train()
    given = tokens(bert, ["the blue squares is left of a star"] * 4000)
    ids, mask = backbone._add_noise(given.vectors, given.mask)
    pieces, lengths = given.vectors.shape[1], mask.sum(1)
    assert (ids[:, 0] == CLS).all() and (ids.gather(1, lengths[:, None] - 1) == SEP).all(), (
        "the first and last token stay"
    )
    assert (mask == (torch.arange(mask.shape[1]) < lengths[:, None])).all(), (
        "kept tokens are adjacent"
    )
    words = 8
    assert (
        abs((ids == MASK)[mask].sum() / 4000 / (words + 1) - 0.3) < 0.03
    )  # squares has two pieces
    assert abs((pieces - lengths).float().mean() / (words + 1) - 0.1) < 0.02
    whole = ids[lengths == pieces]
    square, s = whole[:, 3], whole[:, 4]
    assert ((square == MASK) == (s == MASK)).float().mean() > 0.9, (
        "both pieces of a word are masked, except for random replacements by the mask"
    )
    kept = (whole == given.vectors[0]).float().mean(0)[1:-1]
    assert ((kept > 0.4) & (kept < 0.65)).all()


def test_word_noise_is_seeded_and_off_in_evaluation(bert):
    backbone, given = TextBackbone(str(bert), WordNoise(0.3, 0.2, 0.3)), tokens(bert)

    def states(training):
        torch.manual_seed(3)
        return backbone.train(training)(given)

    torch.testing.assert_close(states(True).vectors, states(True).vectors, rtol=0, atol=0)
    assert (states(False).mask == given.mask).all()
    assert states(True).vectors.shape != states(False).vectors.shape or not torch.equal(
        states(True).vectors, states(False).vectors
    )


WITH_BACKBONE = ["VSE++", "VSEInfinity", "VSRN", "SCAN", "SGRAF", "MaxSim", "CE", "MMT"]
SMALL = {
    "SGRAF": {"num_regions": 3, "similarity_dim": 6},
    "CE": {"experts": {"face": 5}, "text_clusters": 2},
    "MMT": {"experts": {"face": 5}, "layers": 1, "feedforward_dim": 8, "word_pool": "first"},
}


@pytest.mark.parametrize("kind", WITH_BACKBONE)
def test_trained_text_backbone_loads_without_original(kind, bert, tmp_path):
    view = {"VSE++": "pooled", "CE": "experts", "MMT": "experts"}.get(kind, "regions")
    read = {
        "visual_granularity": view,
        "text_granularity": "tokens",
        "text_input_dim": len(WORDS),
        "text_backbone": str(bert),
    }
    matcher = find_model(kind)(
        find_model(kind).Config(visual_input_dim=5, embedding_dim=8, **read, **SMALL.get(kind, {}))
    )
    by_part = matcher.parameters_by_part()
    assert {name.split(".")[0] for name, _ in by_part["text_backbone"]} == {"text_backbone"}
    given, images = (
        tokens(bert),
        Encoded(torch.randn(4, 5) if view == "pooled" else torch.randn(4, 3, 5)),
    )
    images = (
        Encoded({"face": images.vectors}, {"face": torch.ones(4, 3, dtype=torch.bool)})
        if view == "experts"
        else images
    )
    matcher.train().score(
        matcher.encode_visual(images), matcher.encode_text(given)
    ).sum().backward()
    assert all(parameter.grad is not None for _, parameter in by_part["text_backbone"])
    expected = matcher.eval().score(matcher.encode_visual(images), matcher.encode_text(given))
    matcher.save_pretrained(tmp_path / "model")
    shutil.rmtree(bert)
    again = load_matcher(type(matcher), matcher.config, tmp_path / "model").eval()
    assert torch.equal(again.score(again.encode_visual(images), again.encode_text(given)), expected)
    again.save_pretrained(tmp_path / "copy")
    assert sorted(
        path.name for path in (tmp_path / "copy" / TEXT_BACKBONE_FOLDER).iterdir()
    ) == sorted(path.name for path in (tmp_path / "model" / TEXT_BACKBONE_FOLDER).iterdir())
    shutil.rmtree(tmp_path / "model" / TEXT_BACKBONE_FOLDER)
    with pytest.raises(RunError, match=r"text_backbone: expected the config\.json of this part"):
        load_matcher(type(matcher), matcher.config, tmp_path / "model")


def write_backbone_recipe(folder):
    """Write a recipe whose text encoder is named by an override."""
    rates = {"lr": 0.01, "lr_multipliers": {"text_backbone": 0.1}}
    return write_recipe(
        folder / "tiny.toml",
        {"epochs": 2, "objective": "Unified(gamma=20)", "optimizer": {"name": "AdamW", **rates}},
        visual={"granularity": "regions"},
        text={"encoder": None, "min_count": None},
        model={"kind": "VSEInfinity", "embedding_dim": 16, "word_dim": None},
        training={"checkpoint_s": 0, "evaluate_every": 2},
    )


@pytest.mark.slow
def test_run_with_text_backbone_resumes_and_moves(bert, few_scenes, tmp_path, monkeypatch):
    recipe = write_backbone_recipe(tmp_path)
    overrides = {"text.encoder": str(bert), "text.granularity": "tokens"}
    whole = visavis.train(recipe, data=few_scenes, out=tmp_path / "whole", overrides=overrides)

    class Stopping(visavis.core.progress.NoProgress):
        def training_step(self, step):
            if step.epoch == 0 and step.step == 3:
                raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        visavis.train(
            recipe,
            data=few_scenes,
            out=tmp_path / "halves",
            overrides=overrides,
            progress=Stopping(),
        )
    again = visavis.train(resume=tmp_path / "halves")
    assert again.test.metrics == whole.test.metrics
    assert (tmp_path / "halves/model/model.safetensors").read_bytes() == (
        tmp_path / "whole/model/model.safetensors"
    ).read_bytes()

    sentences = ["a red circle", "stars"]
    before = visavis.load(tmp_path / "whole").encode_texts(sentences)
    shutil.rmtree(bert)
    (tmp_path / "elsewhere").mkdir()
    moved = (tmp_path / "whole").rename(tmp_path / "elsewhere" / "run")
    assert torch.equal(visavis.load(moved).encode_texts(sentences), before)
    assert visavis.evaluate(moved).metrics == whole.test.metrics
    image = decode_image(next(few_scenes.rglob("*.png")).read_bytes(), "an image")
    (moved / "run.toml").unlink()
    assert visavis.load(moved).score([image], sentences).shape == (1, 2)


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        ({}, r'text\..*"pooled".*"tokens"'),
        (
            {"text.granularity": "tokens", "model": "Heads()", "visual.granularity": "pooled"},
            r'Heads.* = "pooled"',
        ),
        (
            {"text.granularity": "tokens", "model.text_backbone": "x"},
            r"model\.text_backbone.*text\.",
        ),
        (
            {
                "text.granularity": "tokens",
                "model.word_mask_rate": 0.7,
                "model.word_drop_rate": 0.4,
            },
            "word_mask_rate.*at most 1 together",
        ),
    ],
    ids=["granularity", "model", "field", "rates"],
)
def test_text_backbone_reports_invalid_settings(overrides, sentence, bert, few_scenes, tmp_path):
    recipe = write_backbone_recipe(tmp_path)
    with pytest.raises(RecipeError, match=sentence):
        visavis.train(
            recipe,
            data=few_scenes,
            out=tmp_path / "run",
            overrides={"text.encoder": str(bert), **overrides},
        )


def test_text_backbone_refuses_other_models(bert, dual_encoders):
    with pytest.raises(
        DataError, match="expected a text encoder such as BERT, got a model of kind clip"
    ):
        TextBackbone(str(dual_encoders / "clip"))
    config = json.loads((bert / "tokenizer_config.json").read_text())
    (bert / "tokenizer_config.json").write_text(json.dumps(config | {"mask_token": None}))
    with pytest.raises(DataError, match=r"expected a mask token for model\.word_mask_rate"):
        TextBackbone(str(bert), WordNoise(masked=0.1))
