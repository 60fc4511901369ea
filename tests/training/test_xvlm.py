"""X-VLM of tiny parts with random weights: it learns, is resumed exactly, loads where it was moved to, and every verb ranks in two stages."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

import visavis
from visavis import objectives
from visavis.data import open_dataset
from visavis.engine import PairLoss
from visavis.errors import DataError, RecipeError, SpecError
from visavis.evaluation import rank_scores
from visavis.models import XVLM
from visavis.models.base import evaluating
from visavis.targets import Targets
from visavis.types import Encoded


@pytest.fixture(scope="module")
def recipe(towers, tmp_path_factory):
    file = tmp_path_factory.mktemp("recipe") / "xvlm.toml"
    file.write_text(f"""
name = "xvlm"
visual = {{ tower = "{towers}/vit", view = "pixels" }}
text = {{ tower = "{towers}/bert", view = "tokens" }}
model = {{ kind = "XVLM", fusion_layers = 2, width = 6, rerank = 3 }}
training = {{ batch_size = 10, probe_batches = 1, threads = 1, checkpoint_s = 0 }}
phases = [{{ epochs = 1, objective = "Unified(gamma=10)", optimizer = {{ name = "AdamW", lr = 0.01, lr_multipliers = {{ fusion = 2.0 }} }} }}]
""")
    return file


@pytest.fixture(scope="module")
def run(recipe, scenes, tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "run"
    visavis.train(recipe, data=scenes, out=folder)
    return folder


def matcher(towers, visual="vit", width=8, **fields):
    torch.manual_seed(0)
    config = {"backbone": str(towers / visual), "text_backbone": str(towers / "bert"), "fusion_layers": 2, "width": 6}
    return XVLM(XVLM.Config(visual_width=width, text_width=23, **(config | fields)))


def batch(size=6):
    words = torch.randint(5, 23, (size, 7))
    words[:, 0] = 2
    mask = torch.arange(7) < torch.randint(3, 8, (size, 1))
    return Encoded(torch.randn(size, 3, 16, 16)), Encoded(words, mask)


def test_stopped_anywhere_it_ends_as_the_uninterrupted_one(recipe, run, scenes, outcome, in_pieces, tmp_path):
    assert in_pieces(recipe, tmp_path / "pieces", data=scenes) > 2
    assert outcome(tmp_path / "pieces") == outcome(run)


@pytest.mark.parametrize("way", [torch.inference_mode, torch.enable_grad])
def test_what_a_word_takes_from_the_image_is_how_the_log_odds_hang_on_it(towers, way):
    """The derivative of the log-odds by a factor of all that words take from the image in the middle layer, by finite differences."""
    model = matcher(towers, fusion_layers=1).eval()
    visual, text = (items[:1] for items in batch())
    with way():
        attention = model.attention(visual, text)
    regions = model.encode_visual(visual).vectors["states"].shape[1] - 1
    assert attention.weights.shape == (text.vectors.shape[1], regions) and not attention.weights.requires_grad
    sums = attention.weights.sum(1)
    assert ((sums - 1).abs().lt(1e-9) | sums.eq(0)).all() and attention.weights.min() >= 0

    def odds(factor):
        with torch.no_grad():
            for part in (value := model.fusion.layer[0].crossattention.self["value"]).parameters():
                part *= factor
            found = model.second_stage(model.encode_visual(visual), model.encode_text(text)).item()
            for part in value.parameters():
                part /= factor
        return found

    assert attention.scores.sum().item() == pytest.approx((odds(1.02) - odds(0.98)) / 0.04, rel=0.01, abs=1e-5)
    assert matcher(towers, rerank=0).attention(visual, text) is None


def test_a_run_tells_which_regions_answered_which_words(run, scenes, tmp_path):
    image = open_dataset(scenes).split("test").images[0].name
    told = visavis.explain(run, image, "a red circle", out=tmp_path / "told.png")
    assert told.grid is not None and told.file.exists() and len(told.words) == len(told.weights)


def test_every_verb_ranks_in_two_stages(run, scenes):
    test = open_dataset(scenes).split("test")
    model, images = visavis.load(run), [image.open() for image in test.images]
    visual, text = model.encode_visual(images), model.encode_text(test.captions)
    with torch.no_grad():
        cosines = model.matcher.score(visual, text)
        odds = torch.stack([model.matcher.second_stage(visual, text[torch.full((len(visual),), i)]) for i in range(len(text))], 1)
    by_text = model.score(images, test.captions)
    assert by_text.argmax(0).tolist() == [
        max(column.topk(3).indices.tolist(), key=lambda i: odds[i, t]) for t, column in enumerate(cosines.T)
    ]
    by_image = model.score(images, test.captions, way="i2t")
    ids = torch.arange(len(images)), torch.from_numpy(test.image_of)
    found, expected = visavis.evaluate(run).metrics, [rank_scores(scores.float(), *ids).metrics for scores in (by_image, by_text)]
    assert found["i2t_r1"] == pytest.approx(expected[0]["i2t_r1"])
    assert found["t2i_r5"] == pytest.approx(expected[1]["t2i_r5"])
    assert found["rsum"] == json.loads((run / "result.json").read_text())["rsum"]
    assert torch.equal(model.encode_images(images), visual.vectors["embedding"])
    hits = visavis.search(run, test.captions[0], top=4)
    assert [hit.score for hit in hits] == sorted((hit.score for hit in hits), reverse=True)
    assert visavis.diagnose(run, batches=1).batches == 1
    assert visavis.evaluate(run, degrees="SceneDegrees()").coherence is not None
    assert visavis.evaluate([run, run]).metrics == found


def test_it_loads_where_it_was_moved_to_without_the_bert_it_began_with(recipe, scenes, towers, tmp_path):
    shutil.copytree(towers / "bert", tmp_path / "bert")
    visavis.train(recipe, data=scenes, out=tmp_path / "run", overrides={"text.tower": str(tmp_path / "bert")})
    before = visavis.load(tmp_path / "run").encode_texts(["a red circle"])
    shutil.rmtree(tmp_path / "bert")
    (tmp_path / "run").rename(tmp_path / "moved")
    assert torch.equal(visavis.load(tmp_path / "moved").encode_texts(["a red circle"]), before)


@pytest.mark.parametrize("objective", ["Unified(gamma=10)", "TripletHN()", "NTXent(tau=0.1)"])
def test_both_losses_fall_on_a_batch_that_is_learned_by_heart(towers, objective):
    model, (images, texts), targets = matcher(towers), batch(), Targets.paired(6)
    loss, optimizer = PairLoss(objectives.parse(objective)), torch.optim.AdamW(model.parameters(), lr=3e-3)
    course = []
    for step in range(60):
        torch.manual_seed(step)
        visual, text = model.encode_visual(images), model.encode_text(texts)
        own, extra = loss(model.first_stage(visual), model.first_stage(text), targets=targets), model.extra_loss(visual, text, targets)
        course.append((own.item(), extra.item()))
        optimizer.zero_grad()
        (own + extra).backward()
        optimizer.step()
    assert course[-1][0] < course[0][0]
    assert sum(extra for _, extra in course[-5:]) < sum(extra for _, extra in course[:5])
    assert all(part.grad is not None for name, part in model.named_parameters() if "pooler" not in name)


def test_itm_sees_right_pairs_and_wrong_ones_of_each(towers, monkeypatch):
    """Two images with two texts each, and one without a wrong text left: nothing that belongs together is called wrong."""
    model, (images, texts) = matcher(towers), batch(4)
    visual, text = model.encode_visual(images[:2]), model.encode_text(texts)
    seen = {}

    def logits(some, others):
        seen["pairs"] = [(i, t) for v, w in zip(some.vectors["embedding"], others.vectors["embedding"], strict=True)
                         for i, t in [(place(v, visual), place(w, text))]]  # fmt: skip
        return torch.zeros(len(some), 2)

    def place(row, items):
        return int((items.vectors["embedding"] == row).all(1).nonzero()[0, 0])

    monkeypatch.setattr(model, "_logits", logits)
    image_of = [0, 0, 1, 1]
    loss = model.extra_loss(visual, text, Targets(query_ids=torch.arange(2), candidate_ids=torch.tensor(image_of)))
    assert loss.item() == pytest.approx(torch.log(torch.tensor(2.0)).item())
    right, wrong = seen["pairs"][:4], seen["pairs"][4:]
    assert right == [(0, 0), (0, 1), (1, 2), (1, 3)]
    assert len(wrong) == 8
    assert all(image_of[t] != i for i, t in wrong)
    model.extra_loss(visual, text, Targets(query_ids=[0, 0], candidate_ids=[0] * 4))
    assert seen["pairs"] == [(0, 0), (0, 1), (0, 2), (0, 3)]


def test_hard_pairs_are_drawn_more_often(towers):
    from visavis.models.xvlm import _drawn

    scores = torch.tensor([[0.0, 3.0, 0.0, 9.0]]).expand(2000, 4)
    wrong = torch.tensor([[True, True, True, False]]).expand(2000, 4)
    counts = torch.bincount(_drawn(scores, wrong)[1], minlength=4) / 2000
    expected = (scores[0, :4].softmax(0) + 1e-5) * wrong[0]
    torch.testing.assert_close(counts, expected / expected.sum(), atol=0.03, rtol=0)


def test_the_first_state_is_of_the_whole_image(towers):
    images, _ = batch(2)
    for visual, width, regions in (("vit", 8, 4), ("swin", 8, 16)):
        model = matcher(towers, visual, width)
        with evaluating(model), torch.no_grad():
            states = model.encode_visual(images).vectors["states"]
            output = model.backbone.model(pixel_values=images.vectors).last_hidden_state
        assert states.shape == (2, 1 + regions, width)
        torch.testing.assert_close(states[:, 0], output[:, 0] if visual == "vit" else output.mean(1))


def test_it_begins_with_a_converted_checkpoint(towers, tmp_path):
    model = matcher(towers)
    rest = {name: torch.randn_like(part) for name, part in model.state_dict().items()
            if name.startswith(("visual.", "text.", "match.")) or ".crossattention." in name}  # fmt: skip
    save_file(rest, tmp_path / "rest.safetensors")
    begun = matcher(towers, pretrained=str(tmp_path / "rest.safetensors")).state_dict()
    for name, part in model.state_dict().items():
        assert torch.equal(begun[name], rest.get(name, part))
    rest.pop("match.0.bias")
    save_file(rest, tmp_path / "rest.safetensors")
    with pytest.raises(DataError, match=r"rest.safetensors.*match.0.bias"):
        matcher(towers, pretrained=str(tmp_path / "rest.safetensors"))


def test_a_learned_scale_takes_the_place_of_the_temperature(recipe, scenes, tmp_path):
    overrides = {"model.scale": "learned", "phases.0.objective": "NTXent()"}
    visavis.train(recipe, data=scenes, out=tmp_path / "run", overrides=overrides)
    log_scale = load_file(tmp_path / "run" / "model" / "model.safetensors")["learned_scale.log"]
    assert log_scale.exp().item() == pytest.approx(1 / 0.07, rel=0.2)
    assert log_scale.exp().item() != 1 / 0.07


def test_what_does_not_fit_is_one_sentence(recipe, scenes, towers, dual_encoders, tmp_path):
    for overrides, kind, sentence in (
        ({"model.fusion_layers": 3}, RecipeError, "has 3 layers, expected more than model.fusion_layers = 3"),
        ({"model.rerank": -1}, RecipeError, "rerank is -1, expected a whole number from 0 up"),
        ({"text.tower": "vocabulary"}, (RecipeError, SpecError), "text_backbone"),
    ):
        with pytest.raises(kind, match=sentence):
            visavis.train(recipe, data=scenes, out=tmp_path / "run", overrides=overrides)
