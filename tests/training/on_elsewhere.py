"""Every matcher, objective and supervision on a simulated device that rejects tensors of the CPU."""

import sys

import pytest
import torch
from tests.elsewhere import DEVICE, elsewhere
from tests.models.test_every_objective import LEARNED_BY, facts, images, loss_of, made, texts

import visavis
from visavis.core.encoded import Encoded
from visavis.data.dataset_reader import open_dataset
from visavis.losses.pair_loss import PairLoss
from visavis.losses.targets import Targets
from visavis.models import find_model
from visavis.models.clip.model import CLIP
from visavis.models.inference import score_all_pairs, score_indexed_pairs
from visavis.objectives import InfoNCE
from visavis.papers.models.xvlm import XVLM

BASE = """
name = "elsewhere"
visual = { encoder = "scenes", granularity = "regions" }
text = { encoder = "vocabulary", min_count = 1 }
training = { batch_size = 10, batches_per_epoch = 2, threads = 1 }
"""
SCAN, PLAIN = (
    'kind = "SCAN", embedding_dim = 8, word_dim = 4',
    'kind = "VSE++", embedding_dim = 8, word_dim = 4, region_pool = "mean"',
)
TRAININGS = {
    "position": (
        'kind = "VSRN", embedding_dim = 8, word_dim = 4, caption_loss_weight = 1.0',
        "Unified()",
        "PairSupervision(by='position')",
        1,
    ),
    "bank": (SCAN, "AOQ()", "OfflineNegativeSupervision(size=3, preselect=5)", 1),
    "weights": (PLAIN, "Unified()", "LearnedWeights(every=1)", 1),
    "degrees": (PLAIN, "Ladder()", "GradedSupervision(relevance='SceneRelevance()')", 1),
    "two networks": (PLAIN, "NCR()", "NoisySupervision()", 3),
}


def test_device_rejects_tensors_of_cpu():
    with elsewhere() as device:
        there = torch.ones(3, device=device)
        assert there.device == DEVICE and (there + torch.arange(3.0).to(device)).tolist() == [
            1,
            2,
            3,
        ]
        for wrong in (
            lambda: there + torch.ones(3),
            lambda: torch.ones(3)[there.long()],
            there.numpy,
        ):
            with pytest.raises((RuntimeError, TypeError)):
                wrong()


@pytest.mark.parametrize("kind", ["XVLM", "CLIP"])
def test_pretrained_encoders_train_on_device(kind, towers, dual_encoders):
    """This test must train first: transformers would keep the replaced functions if imported later."""
    torch.manual_seed(0)
    if kind == "XVLM":
        config = XVLM.Config(
            backbone=f"{towers}/vit",
            text_backbone=f"{towers}/bert",
            fusion_layers=2,
            embedding_dim=6,
            visual_input_dim=8,
            text_input_dim=23,
        )
    else:
        config = CLIP.Config(
            backbone=str(dual_encoders / "clip"),
            visual_input_dim=10,
            text_input_dim=10,
            scale="learned",
        )
    matcher = find_model(kind)(config)
    side = 16 if kind == "XVLM" else 32
    images, words, ids = (
        torch.randn(6, 3, side, side),
        torch.randint(5, 10, (6, 7)),
        torch.arange(6),
    )
    with elsewhere() as device:
        matcher = matcher.to(device)
        visual, text = (
            Encoded(images.to(device)),
            Encoded(words.to(device), torch.ones_like(words, dtype=torch.bool).to(device)),
        )
        encoded, targets = (
            (matcher.encode_visual(visual), matcher.encode_text(text)),
            Targets(query_ids=ids, candidate_ids=ids).to(device),
        )
        loss = PairLoss(InfoNCE(), scale=matcher.scale)(
            *map(matcher.first_stage_items, encoded), targets=targets
        )
        extra = matcher.auxiliary_loss(*encoded, targets)
        (loss if extra is None else loss + extra).backward()
        assert all(
            parameter.grad.device == DEVICE
            for parameter in matcher.parameters()
            if parameter.grad is not None
        )
        kept = [items.map(lambda part: part.detach().cpu()) for items in encoded]
        assert score_all_pairs(matcher.eval(), *kept).shape == (6, 6)
        if matcher.rerank_top_k:
            assert matcher.attention(visual[:1], text[:1]).weights.device == DEVICE


@pytest.mark.parametrize(
    ("name", "objective"), LEARNED_BY, ids=[f"{name}-{kind.__name__}" for name, kind in LEARNED_BY]
)
def test_step_and_scores_match_cpu(name, objective):
    results, ids = [], torch.arange(18)
    for device in (torch.device("cpu"), DEVICE):
        torch.manual_seed(1)
        visual, text, targets = (
            images(name, 18, has_variable_length=True).to(torch.float64),
            texts(name, 18).to(torch.float64),
            facts(ids, ids),
        )
        matcher = made(name).eval().double()
        with elsewhere():
            matcher = matcher.to(device)
            encoded = matcher.encode_visual(visual.to(device)), matcher.encode_text(text.to(device))
            loss = loss_of(matcher, objective())(*encoded, targets=targets.to(device))
            loss.backward()
            slopes = [
                parameter.grad.cpu()
                for parameter in matcher.parameters()
                if parameter.grad is not None
            ]
            with torch.no_grad():
                kept = [
                    matcher.encode_visual(visual.to(device)).to("cpu"),
                    matcher.encode_text(text.to(device)).to("cpu"),
                ]
                scores = (
                    score_all_pairs(matcher, *kept, "4MB"),
                    score_indexed_pairs(matcher, *kept, ids, ids),
                )
                attention = matcher.attention(visual[:1].to(device), text[:1].to(device))
            results.append(
                [
                    loss.detach().cpu(),
                    *slopes,
                    *scores,
                    *([] if attention is None else [attention.weights.cpu()]),
                ]
            )
    assert len(results[0]) > 3
    torch.testing.assert_close(*results)


@pytest.mark.parametrize(
    "kind",
    [
        pytest.param(name, marks=pytest.mark.long if name in ("position", "two networks") else ())
        for name in TRAININGS
    ],
)
def test_training_and_later_commands_run_on_device(kind, few_scenes, tmp_path, monkeypatch):
    model, objective, supervision, epochs = TRAININGS[kind]
    phase = f'epochs = {epochs}, objective = "{objective}", supervision = "{supervision}", optimizer = {{ name = "AdamW", lr = 0.01 }}'
    (tmp_path / "recipe.toml").write_text(
        f"{BASE}model = {{ {model} }}\nphases = [{{ {phase} }}]\n"
    )
    for module in [module for name, module in sys.modules.items() if name.startswith("visavis.")]:
        if hasattr(module, "choose_device"):
            monkeypatch.setattr(module, "choose_device", lambda *_: DEVICE)
    with elsewhere():
        visavis.train(tmp_path / "recipe.toml", data=few_scenes, out=tmp_path / "run")
        visavis.evaluate(tmp_path / "run")
        visavis.papers_diagnose(tmp_path / "run")
        model = visavis.load(tmp_path / "run")
        assert model.device == DEVICE
        assert model.score(
            [image.open() for image in open_dataset(few_scenes).split("test").images[:2]],
            ["a red circle"],
        ).shape == (2, 1)
