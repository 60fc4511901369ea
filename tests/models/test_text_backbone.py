"""A text encoder that is trained with the matcher: its words, what happens to them in training, and the folder it is kept in."""

from __future__ import annotations

import json
import shutil

import pytest
import torch

import visavis
from visavis.data.pictures import open_picture
from visavis.data.scenes import write_scenes
from visavis.errors import DataError, RecipeError, RunError
from visavis.models import CATALOG
from visavis.models.base import build_with_weights
from visavis.models.text_backbone import FOLDER, TextBackbone, WordNoise
from visavis.models.tokenizing import PretrainedTokenizer
from visavis.types import Encoded

transformers = pytest.importorskip("transformers")

WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "a", "red", "blue", "circle", "square", "is", "left", "of", "the", "##s", "star"]
CLS, SEP, MASK = 2, 3, 4
SENTENCES = ["a red circle", "the blue squares is left of a star", "stars"]


@pytest.fixture
def bert(tmp_path):
    """A folder with a tiny BERT, whose dropout is off."""
    folder = tmp_path / "bert"
    shape = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24, "max_position_embeddings": 32}
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


def test_states_are_those_of_the_model_itself(bert):
    given = tokens(bert)
    backbone = TextBackbone(str(bert), WordNoise(masked=0.5)).eval()
    states = backbone(given)
    model = transformers.AutoModel.from_pretrained(bert).eval()
    for row, sentence in enumerate(SENTENCES):
        alone = model(**transformers.AutoTokenizer.from_pretrained(bert)(sentence, return_tensors="pt")).last_hidden_state[0]
        torch.testing.assert_close(states.vectors[row, states.mask[row]], alone, rtol=0, atol=1e-5)
    assert backbone.width == 16
    assert not any("pooler" in name for name, _ in backbone.named_parameters())


def test_words_are_masked_replaced_and_left_out_as_often_as_said_and_whole(bert):
    backbone = TextBackbone(str(bert), WordNoise(masked=0.3, replaced=0.2, left_out=0.1)).train()
    given = tokens(bert, ["the blue squares is left of a star"] * 4000)
    ids, mask = backbone._disturbed(given.vectors, given.mask)
    pieces, lengths = given.vectors.shape[1], mask.sum(1)
    assert (ids[:, 0] == CLS).all() and (ids.gather(1, lengths[:, None] - 1) == SEP).all(), "what opens and closes a text stays"
    assert (mask == (torch.arange(mask.shape[1]) < lengths[:, None])).all(), "what is left moves together"
    words = 8
    assert abs((ids == MASK)[mask].sum() / 4000 / (words + 1) - 0.3) < 0.03  # squares has two pieces
    assert abs((pieces - lengths).float().mean() / (words + 1) - 0.1) < 0.02
    whole = ids[lengths == pieces]
    square, s = whole[:, 3], whole[:, 4]
    assert ((square == MASK) == (s == MASK)).float().mean() > 0.9, "both pieces of a word are masked (but for chance draws of the mask)"
    kept = (whole == given.vectors[0]).float().mean(0)[1:-1]
    assert ((kept > 0.4) & (kept < 0.65)).all()


def test_the_same_seed_is_the_same_noise_and_evaluation_has_none(bert):
    backbone, given = TextBackbone(str(bert), WordNoise(0.3, 0.2, 0.3)), tokens(bert)

    def states(training):
        torch.manual_seed(3)
        return backbone.train(training)(given)

    torch.testing.assert_close(states(True).vectors, states(True).vectors, rtol=0, atol=0)
    assert (states(False).mask == given.mask).all()
    assert states(True).vectors.shape != states(False).vectors.shape or not torch.equal(states(True).vectors, states(False).vectors)


WITH_BACKBONE = ["VSE++", "VSEInfinity", "VSRN", "SCAN", "SGRAF", "MaxSim", "CE", "MMT"]
SMALL = {
    "SGRAF": {"regions": 3, "similarity_width": 6},
    "CE": {"experts": {"face": 5}, "text_clusters": 2},
    "MMT": {"experts": {"face": 5}, "layers": 1, "feedforward": 8, "word_pool": "first"},
}


@pytest.mark.parametrize("kind", WITH_BACKBONE)
def test_matchers_train_it_and_their_folder_needs_the_original_no_more(kind, bert, tmp_path):
    view = {"VSE++": "pooled", "CE": "experts", "MMT": "experts"}.get(kind, "grid")
    read = {"visual_view": view, "text_view": "tokens", "text_width": len(WORDS), "text_backbone": str(bert)}
    matcher = CATALOG[kind](CATALOG[kind].Config(visual_width=5, width=8, **read, **SMALL.get(kind, {})))
    by_part = matcher.parameters_by_part()
    assert {name.split(".")[0] for name, _ in by_part["text_backbone"]} == {"text_backbone"}
    given, images = tokens(bert), Encoded(torch.randn(4, 5) if view == "pooled" else torch.randn(4, 3, 5))
    images = Encoded({"face": images.vectors}, {"face": torch.ones(4, 3, dtype=torch.bool)}) if view == "experts" else images
    matcher.train().score(matcher.encode_visual(images), matcher.encode_text(given)).sum().backward()
    assert all(parameter.grad is not None for _, parameter in by_part["text_backbone"])
    expected = matcher.eval().score(matcher.encode_visual(images), matcher.encode_text(given))
    matcher.save_pretrained(tmp_path / "model")
    shutil.rmtree(bert)
    again = build_with_weights(type(matcher), matcher.config, tmp_path / "model").eval()
    assert torch.equal(again.score(again.encode_visual(images), again.encode_text(given)), expected)
    again.save_pretrained(tmp_path / "copy")
    assert sorted(path.name for path in (tmp_path / "copy" / FOLDER).iterdir()) == sorted(
        path.name for path in (tmp_path / "model" / FOLDER).iterdir()
    )
    shutil.rmtree(tmp_path / "model" / FOLDER)
    with pytest.raises(RunError, match=r"text_backbone has no config\.json, by which this model reads: copy the whole model folder"):
        build_with_weights(type(matcher), matcher.config, tmp_path / "model")


RECIPE = """
name = "tiny"
visual = { tower = "scenes", view = "grid" }
model = { kind = "VSEInfinity", width = 16 }
training = { batch_size = 16, checkpoint_s = 0, probe_batches = 1, threads = 1, evaluate_every = 2 }

[[phases]]
epochs = 2
objective = "Unified(gamma=20)"
optimizer = { name = "AdamW", lr = 0.01, lr_multipliers = { text_backbone = 0.1 } }
"""


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    folder = tmp_path_factory.mktemp("world") / "scenes"
    write_scenes(folder, num_train=40, num_val=8, num_test=8, captions_per_image=2, size=48, seed=1)
    return folder


def test_a_run_resumes_exactly_moves_and_needs_the_original_no_more(bert, world, tmp_path, monkeypatch):
    recipe = tmp_path / "tiny.toml"
    recipe.write_text(RECIPE)
    overrides = {"text.tower": str(bert), "text.view": "tokens"}
    whole = visavis.train(recipe, data=world, out=tmp_path / "whole", overrides=overrides)

    class Stopping(visavis.progress.Silent):
        def step(self, step):
            if step.epoch == 0 and step.step == 3:
                raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        visavis.train(recipe, data=world, out=tmp_path / "halves", overrides=overrides, progress=Stopping())
    again = visavis.train(resume=tmp_path / "halves")
    assert again.test.metrics == whole.test.metrics
    assert (tmp_path / "halves/model/model.safetensors").read_bytes() == (tmp_path / "whole/model/model.safetensors").read_bytes()

    sentences = ["a red circle", "stars"]
    before = visavis.load(tmp_path / "whole").encode_texts(sentences)
    shutil.rmtree(bert)
    (tmp_path / "elsewhere").mkdir()
    moved = (tmp_path / "whole").rename(tmp_path / "elsewhere" / "run")
    assert torch.equal(visavis.load(moved).encode_texts(sentences), before)
    assert visavis.evaluate(moved).metrics == whole.test.metrics
    picture = open_picture(next(world.rglob("*.png")).read_bytes(), "a picture")
    (moved / "run.toml").unlink()
    assert visavis.load(moved).score([picture], sentences).shape == (1, 2)


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        ({}, 'text.view is missing, expected "pooled" or "words" for text.tower = .* as it is, or "tokens" to train it'),
        ({"text.view": "tokens", "model": "Heads()", "visual.view": "pooled"}, 'Heads trains no text encoder: with text.view = "pooled"'),
        ({"text.view": "tokens", "model.text_backbone": "x"}, r"model.text_backbone follows from text.tower"),
        (
            {"text.view": "tokens", "model.masked_words": 0.7, "model.omitted_words": 0.4},
            "masked_words is 0.7, expected at most 1 together",
        ),
    ],
    ids=["view", "model", "field", "rates"],
)
def test_what_does_not_fit_is_one_sentence(overrides, sentence, bert, world, tmp_path):
    (tmp_path / "tiny.toml").write_text(RECIPE)
    with pytest.raises(RecipeError, match=sentence):
        visavis.train(tmp_path / "tiny.toml", data=world, out=tmp_path / "run", overrides={"text.tower": str(bert), **overrides})


def test_other_models_and_tokenizers_are_refused(bert, dual_encoders):
    with pytest.raises(DataError, match="is a model of kind clip, expected an encoder of texts alone, such as BERT"):
        TextBackbone(str(dual_encoders / "clip"))
    config = json.loads((bert / "tokenizer_config.json").read_text())
    (bert / "tokenizer_config.json").write_text(json.dumps(config | {"mask_token": None}))
    with pytest.raises(DataError, match=r"has no token that stands for a masked word: set model\.masked_words to 0"):
        TextBackbone(str(bert), WordNoise(masked=0.1))
