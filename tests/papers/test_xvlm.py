"""A tiny X-VLM with random weights trains, resumes exactly, loads after a move, and ranks in two
stages.
"""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.fixtures.recipes import write_recipe

import visavis
from visavis.core.encoded import Encoded
from visavis.core.errors import DataError, RecipeError, SpecError
from visavis.data.dataset_reader import open_dataset
from visavis.evaluation import rank_scores
from visavis.losses import objectives
from visavis.losses.pair_loss import PairLoss
from visavis.losses.targets import Targets
from visavis.models.batch_encoding import evaluation_mode
from visavis.papers.models.xvlm import XVLM


@pytest.fixture(scope="module")
def recipe(towers, tmp_path_factory):
    rates = {"name": "AdamW", "lr": 0.01, "lr_multipliers": {"fusion": 2.0}}
    return write_recipe(
        tmp_path_factory.mktemp("recipe") / "xvlm.toml",
        {"objective": "Unified(gamma=10)", "optimizer": rates},
        name="xvlm",
        visual={"encoder": f"{towers}/vit", "granularity": "pixels"},
        text={"encoder": f"{towers}/bert", "granularity": "tokens", "min_count": None},
        model={
            "kind": "XVLM",
            "fusion_layers": 2,
            "embedding_dim": 6,
            "rerank_top_k": 3,
            "word_dim": None,
        },
        training={"batch_size": 10, "checkpoint_s": 0},
    )


@pytest.fixture(scope="module")
def run(recipe, scenes, tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "run"
    visavis.train(recipe, data=scenes, out=folder)
    return folder


def matcher(towers, visual="vit", width=8, **fields):
    torch.manual_seed(0)
    config = {
        "backbone": str(towers / visual),
        "text_backbone": str(towers / "bert"),
        "fusion_layers": 2,
        "embedding_dim": 6,
    }
    return XVLM(XVLM.Config(visual_input_dim=width, text_input_dim=23, **(config | fields)))


def batch(size=6):
    words = torch.randint(5, 23, (size, 7))
    words[:, 0] = 2
    mask = torch.arange(7) < torch.randint(3, 8, (size, 1))
    return Encoded(torch.randn(size, 3, 16, 16)), Encoded(words, mask)


@pytest.mark.slow
def test_xvlm_run_resumes_exactly(recipe, run, scenes, outcome, in_pieces, tmp_path):
    assert in_pieces(recipe, tmp_path / "pieces", data=scenes) > 2
    assert outcome(tmp_path / "pieces") == outcome(run)


@pytest.mark.parametrize("way", [torch.inference_mode, torch.enable_grad])
def test_word_attention_is_gradient_of_log_odds(towers, way):
    """Word weights match finite differences of the log-odds by a factor of the cross-attention in
    the middle layer.
    """
    model = matcher(towers, fusion_layers=1).eval()
    visual, text = (items[:1] for items in batch())
    with way():
        attention = model.attention(visual, text)
    regions = model.encode_visual(visual).vectors["states"].shape[1] - 1
    assert (
        attention.weights.shape == (text.vectors.shape[1], regions)
        and not attention.weights.requires_grad
    )
    sums = attention.weights.sum(1)
    assert ((sums - 1).abs().lt(1e-6) | sums.eq(0)).all() and attention.weights.min() >= 0

    def odds(factor):
        with torch.no_grad():
            for part in (value := model.fusion.layer[0].crossattention.self["value"]).parameters():
                part *= factor
            found = model.second_stage_scores(
                model.encode_visual(visual), model.encode_text(text)
            ).item()
            for part in value.parameters():
                part /= factor
        return found

    assert attention.scores.sum().item() == pytest.approx(
        (odds(1.02) - odds(0.98)) / 0.04, rel=0.01, abs=1e-5
    )
    assert matcher(towers, rerank_top_k=0).attention(visual, text) is None


def test_explain_maps_words_to_regions(run, scenes, tmp_path):
    image = open_dataset(scenes).split("test").images[0].name
    explanation = visavis.explain(run, image, "a red circle", out=tmp_path / "explanation.png")
    assert (
        explanation.grid is not None
        and explanation.file.exists()
        and len(explanation.words) == len(explanation.weights)
    )


def test_every_command_ranks_in_two_stages(run, scenes):
    test = open_dataset(scenes).split("test")
    model, images = visavis.load(run), [image.open() for image in test.images]
    visual, text = model.encode_visual(images), model.encode_text(test.captions)
    with torch.no_grad():
        cosines = model.matcher.score(visual, text)
        odds = torch.stack(
            [
                model.matcher.second_stage_scores(visual, text[torch.full((len(visual),), i)])
                for i in range(len(text))
            ],
            1,
        )
    by_text = model.score(images, test.captions)
    assert by_text.argmax(0).tolist() == [
        max(column.topk(3).indices.tolist(), key=lambda i: odds[i, t])
        for t, column in enumerate(cosines.T)
    ]
    by_image = model.score(images, test.captions, direction="i2t")
    ids = torch.arange(len(images)), torch.from_numpy(test.image_of)
    found, expected = (
        visavis.evaluate(run).metrics,
        [rank_scores(scores.float(), *ids).metrics for scores in (by_image, by_text)],
    )
    assert found["i2t_r1"] == pytest.approx(expected[0]["i2t_r1"])
    assert found["t2i_r5"] == pytest.approx(expected[1]["t2i_r5"])
    assert found["rsum"] == json.loads((run / "result.json").read_text())["rsum"]
    assert torch.equal(model.encode_images(images), visual.vectors["embedding"])
    hits = visavis.search(run, test.captions[0], top=4)
    assert [hit.score for hit in hits] == sorted((hit.score for hit in hits), reverse=True)
    assert visavis.papers_diagnose(run, max_batches=1).batches == 1
    assert visavis.evaluate(run, section="Coherence(relevance='SceneRelevance()')").sections
    assert visavis.evaluate([run, run]).metrics == found


@pytest.mark.slow
def test_moved_run_loads_without_initial_bert(recipe, scenes, towers, tmp_path):
    shutil.copytree(towers / "bert", tmp_path / "bert")
    visavis.train(
        recipe,
        data=scenes,
        out=tmp_path / "run",
        overrides={"text.encoder": str(tmp_path / "bert")},
    )
    before = visavis.load(tmp_path / "run").encode_texts(["a red circle"])
    shutil.rmtree(tmp_path / "bert")
    (tmp_path / "run").rename(tmp_path / "moved")
    assert torch.equal(visavis.load(tmp_path / "moved").encode_texts(["a red circle"]), before)


@pytest.mark.parametrize(
    "objective",
    ["Unified(gamma=10)", "TripletHN()", pytest.param("NTXent(tau=0.1)", marks=pytest.mark.long)],
)
@pytest.mark.slow
def test_both_losses_fall_on_memorized_batch(towers, objective):
    model, (images, texts), targets = matcher(towers), batch(), Targets.paired(6)
    loss, optimizer = (
        PairLoss(objectives.parse(objective)),
        torch.optim.AdamW(model.parameters(), lr=3e-3),
    )
    course = []
    for step in range(60):
        torch.manual_seed(step)
        visual, text = model.encode_visual(images), model.encode_text(texts)
        own, extra = (
            loss(model.first_stage_items(visual), model.first_stage_items(text), targets=targets),
            model.auxiliary_loss(visual, text, targets),
        )
        course.append((own.item(), extra.item()))
        optimizer.zero_grad()
        (own + extra).backward()
        optimizer.step()
    assert course[-1][0] < course[0][0]
    assert sum(extra for _, extra in course[-5:]) < sum(extra for _, extra in course[:5])
    assert all(
        part.grad is not None for name, part in model.named_parameters() if "pooler" not in name
    )


def test_itm_scores_positive_and_negative_pairs(towers, monkeypatch):
    """Two images with two texts each, and an image without negatives: positives are never sampled
    as negatives.
    """
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
    loss = model.auxiliary_loss(
        visual, text, Targets(query_ids=torch.arange(2), candidate_ids=torch.tensor(image_of))
    )
    assert loss.item() == pytest.approx(torch.log(torch.tensor(2.0)).item())
    right, wrong = seen["pairs"][:4], seen["pairs"][4:]
    assert right == [(0, 0), (0, 1), (1, 2), (1, 3)]
    assert len(wrong) == 8
    assert all(image_of[t] != i for i, t in wrong)
    model.auxiliary_loss(visual, text, Targets(query_ids=[0, 0], candidate_ids=[0] * 4))
    assert seen["pairs"] == [(0, 0), (0, 1), (0, 2), (0, 3)]


def test_hard_pairs_are_sampled_more_often(towers):
    from visavis.papers.models.xvlm import _sample_negatives

    scores = torch.tensor([[0.0, 3.0, 0.0, 9.0]]).expand(2000, 4)
    wrong = torch.tensor([[True, True, True, False]]).expand(2000, 4)
    counts = torch.bincount(_sample_negatives(scores, wrong)[1], minlength=4) / 2000
    expected = (scores[0, :4].softmax(0) + 1e-5) * wrong[0]
    torch.testing.assert_close(counts, expected / expected.sum(), atol=0.03, rtol=0)


def test_first_state_covers_whole_image(towers):
    images, _ = batch(2)
    for visual, width, regions in (("vit", 8, 4), ("swin", 8, 16)):
        model = matcher(towers, visual, width)
        with evaluation_mode(model), torch.no_grad():
            states = model.encode_visual(images).vectors["states"]
            output = model.backbone.model(pixel_values=images.vectors).last_hidden_state
        assert states.shape == (2, 1 + regions, width)
        torch.testing.assert_close(
            states[:, 0], output[:, 0] if visual == "vit" else output.mean(1)
        )


def test_xvlm_starts_from_converted_checkpoint(towers, tmp_path):
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


@pytest.mark.slow
def test_learned_scale_replaces_temperature(recipe, scenes, tmp_path):
    overrides = {"model.scale": "learned", "phases.0.objective": "NTXent()"}
    visavis.train(recipe, data=scenes, out=tmp_path / "run", overrides=overrides)
    log_scale = load_file(tmp_path / "run" / "model" / "model.safetensors")["learned_scale.log"]
    assert log_scale.exp().item() == pytest.approx(1 / 0.07, rel=0.2)
    assert log_scale.exp().item() != 1 / 0.07


def test_invalid_xvlm_recipe_is_rejected(recipe, scenes, towers, dual_encoders, tmp_path):
    for overrides, kind, sentence in (
        (
            {"model.fusion_layers": 3},
            RecipeError,
            r"expected more layers than model\.fusion_layers = 3, got 3",
        ),
        ({"model.rerank_top_k": -1}, RecipeError, "rerank_top_k: expected an integer >= 0, got -1"),
        ({"text.encoder": "vocabulary"}, (RecipeError, SpecError), "text_backbone"),
    ):
        with pytest.raises(kind, match=sentence):
            visavis.train(recipe, data=scenes, out=tmp_path / "run", overrides=overrides)
