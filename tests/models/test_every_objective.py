"""Every matcher with every objective: encoding, scores, gradients and ranks for several kinds of
batches.
"""

from __future__ import annotations

import shutil
from dataclasses import replace

import numpy as np
import pytest
import torch
from PIL import Image
from tests.sampling import pairwise

import visavis
from visavis.core.encoded import Encoded, concatenate
from visavis.core.errors import MissingSupervision
from visavis.data.vocabulary import Vocabulary
from visavis.evaluation import evaluate
from visavis.losses import objectives
from visavis.losses.pair_loss import PairLoss
from visavis.losses.targets import Targets
from visavis.models import all_models
from visavis.models.encoders.encoder_spec import EncoderSpec
from visavis.models.image_text.cross_attention import BFAN, SCAN, MaxSim
from visavis.models.image_text.global_matchers import Heads, VSEInfinity, VSEPlusPlus
from visavis.models.processor import Processor
from visavis.objectives import AOQ, GradedVLC, Ladder
from visavis.papers.models.expert_matchers import CE, MMT
from visavis.papers.models.sgraf import SGRAF
from visavis.papers.models.vsrn import VSRN

REGIONS, WORDS, WIDTH, VOCABULARY = 4, 6, 12, 40
SIZES = {"visual_input_dim": WIDTH, "embedding_dim": 16}
LEARNED = SIZES | {"text_granularity": "tokens", "text_input_dim": VOCABULARY, "word_dim": 12}
EXPERTS = {"face": 7, "audio": 5}
MATCHERS = {
    "Heads": Heads.Config(
        visual_input_dim=WIDTH, text_input_dim=WIDTH, embedding_dim=16, dropout=0.1
    ),
    "VSE++": VSEPlusPlus.Config(**LEARNED),
    "VSE++ on a grid": VSEPlusPlus.Config(
        **LEARNED,
        visual_granularity="regions",
        bidirectional=True,
        word_pool="mean",
        region_pool="mean",
    ),
    "VSEInfinity": VSEInfinity.Config(**LEARNED),
    "VSRN": VSRN.Config(**LEARNED, reasoning_steps=2),
    "SCAN t2i": SCAN.Config(**LEARNED),
    "SCAN i2t": SCAN.Config(**LEARNED, direction="i2t", pool="lse", inverse_temperature=4.0),
    "BFAN": BFAN.Config(**LEARNED),
    "SGR": SGRAF.Config(**LEARNED, num_regions=REGIONS, similarity_dim=32),
    "SAF": SGRAF.Config(**LEARNED, num_regions=REGIONS, similarity_dim=32, similarity_module="SAF"),
    "MaxSim": MaxSim.Config(**LEARNED),
    "CE": CE.Config(
        experts=EXPERTS,
        visual_input_dim=WIDTH,
        embedding_dim=16,
        text_granularity="words",
        text_input_dim=WIDTH,
        text_clusters=2,
    ),
    "MMT": MMT.Config(
        experts=EXPERTS, **LEARNED, layers=1, heads=2, feedforward_dim=16, attention_dropout=0.0
    ),
}
KINDS = {kind.Config: kind for kind in all_models().values()}
RELATIONS = {"pairs": (8, 1), "captions": (4, 3), "ragged": (6, 2)}
"""Images and captions per image. "ragged": items of unequal length, and captions that two images
share.
"""


def made(name: str):
    torch.manual_seed(0)
    config = MATCHERS[name]
    return KINDS[type(config)](config)


def images(name: str, count: int, *, has_variable_length: bool = False) -> Encoded:
    view = MATCHERS[name].visual_granularity
    if view == "pooled":
        return Encoded(torch.randn(count, WIDTH))
    lengths = torch.arange(REGIONS) < torch.randint(1, REGIONS + 1, (count, 1))
    if view == "experts":
        masks = {
            expert: lengths if has_variable_length else torch.ones_like(lengths)
            for expert in EXPERTS
        }
        masks["audio"] = masks["audio"] & (torch.arange(count) % 3 > 0)[:, None]
        return Encoded(
            {expert: torch.randn(count, REGIONS, width) for expert, width in EXPERTS.items()}, masks
        )
    return Encoded(
        torch.randn(count, REGIONS, WIDTH),
        lengths if has_variable_length and name not in ("SGR", "SAF") else None,
    )


def texts(name: str, count: int, *, has_variable_length: bool = True) -> Encoded:
    view = MATCHERS[name].text_granularity
    if view == "pooled":
        return Encoded(torch.randn(count, WIDTH))
    mask = torch.arange(WORDS) < (
        torch.randint(1, WORDS + 1, (count, 1))
        if has_variable_length
        else torch.full((count, 1), WORDS)
    )
    words = (
        torch.randint(1, VOCABULARY, (count, WORDS))
        if view == "tokens"
        else torch.randn(count, WORDS, WIDTH)
    )
    return Encoded(words, mask)


def facts(image_ids: torch.Tensor, text_ids: torch.Tensor) -> Targets:
    """Build targets with all annotations that an objective may read. The relevance of a positive
    pair is 1.
    """
    height, width = len(image_ids), len(text_ids)
    own = image_ids[:, None] == text_ids
    return Targets(
        query_ids=image_ids,
        candidate_ids=text_ids,
        relevance=torch.where(own, 1.0, 0.8 * torch.rand(height, width)),
        weight=torch.ones(height, width),
        pair_margin=torch.full((height, width), 0.2),
        query_margin=torch.full((height,), 0.2),
        candidate_margin=torch.full((width,), 0.2),
        query_offline_scores=torch.rand(height, 2) / 2,
        candidate_offline_scores=torch.rand(width, 2) / 2,
    )


def loss_of(matcher, objective) -> PairLoss:
    return PairLoss(objective, score=None if matcher.score_is_cosine else matcher.score)


def check_step(name, objective, relation):
    """Check one step of training, and an evaluation after it."""
    matcher, (count, captions) = made(name), RELATIONS[relation]
    ids, ragged = torch.arange(count), relation == "ragged"
    text_ids = ids.repeat_interleave(captions)
    image_ids = ids.clone()
    if ragged:
        image_ids[-1] = image_ids[0]
        text_ids[text_ids == count - 1] = 0
    visual, text = images(name, count, has_variable_length=ragged), texts(name, len(text_ids))
    optimizer = torch.optim.AdamW(matcher.parameters(), lr=1e-3)
    loss = loss_of(matcher, objective())(
        matcher.encode_visual(visual), matcher.encode_text(text), targets=facts(image_ids, text_ids)
    )
    loss.backward()
    slopes = [parameter.grad for parameter in matcher.parameters() if parameter.grad is not None]
    assert slopes
    optimizer.step()
    assert loss.isfinite()
    assert all(slope.isfinite().all() for slope in slopes)
    assert all(parameter.isfinite().all() for parameter in matcher.parameters())
    with torch.inference_mode():
        matcher.eval()
        result = evaluate(
            matcher.encode_visual(visual),
            matcher.encode_text(text),
            matcher.score,
            image_ids,
            text_ids,
        )
    assert 0 <= result.metrics["rsum"] <= 600


@pytest.mark.parametrize("relation", RELATIONS)
def test_every_objective_trains_and_evaluates(relation):
    """Each objective, and each matcher, with each kind of batch."""
    names, shift = list(MATCHERS), 5 * list(RELATIONS).index(relation)
    for row, objective in enumerate(objectives.CATALOG):
        check_step(names[(row + shift) % len(names)], objective, relation)


@pytest.mark.long
@pairwise(name=MATCHERS, objective=objectives.CATALOG, relation=RELATIONS)
def test_every_matcher_trains_with_every_objective(name, objective, relation):
    check_step(name, objective, relation)


LEARNED_BY = [
    (list(MATCHERS)[row % len(MATCHERS)], kind) for row, kind in enumerate(objectives.CATALOG)
]


@pytest.mark.parametrize(
    ("name", "objective"),
    [
        pytest.param(
            name,
            kind,
            id=f"{name}-{kind.__name__}",
            marks=pytest.mark.long if name == "MMT" else (),
        )  # 60 slow steps
        for name, kind in LEARNED_BY
    ],
)
@pytest.mark.slow
def test_every_matcher_overfits_32_pairs(name, objective):
    matcher, ids = made(name), torch.arange(32)
    visual, text, targets = (
        images(name, 32),
        texts(name, 32, has_variable_length=False),
        facts(ids, ids),
    )
    # by hard negatives and a larger rate, SGR ends below its ReLU and MMT collapses. MMT and SAF
    # start slowly and need more steps
    rate, steps = {"SGR": (0.001, 25), "SAF": (0.01, 50), "MMT": (0.001, 60)}.get(name, (0.01, 25))
    loss, optimizer = loss_of(matcher, objective()), torch.optim.Adam(matcher.parameters(), lr=rate)

    def rsum() -> float:
        matcher.eval()
        with torch.inference_mode():
            found = evaluate(
                matcher.encode_visual(visual), matcher.encode_text(text), matcher.score, ids, ids
            ).metrics["rsum"]
        matcher.train()
        return found

    before, values = rsum(), []
    for _ in range(steps):
        optimizer.zero_grad()
        value = loss(matcher.encode_visual(visual), matcher.encode_text(text), targets=targets)
        value.backward()
        torch.nn.utils.clip_grad_norm_(matcher.parameters(), 2.0)
        optimizer.step()
        values.append(value.item())
    assert np.isfinite(values).all()
    assert not objective.integrable or values[-1] < values[0]
    assert rsum() > before + 50


@pytest.mark.parametrize(
    "objective", [Ladder(), GradedVLC(), AOQ()], ids=lambda objective: type(objective).__name__
)
def test_objective_reports_missing_annotations_for_every_score(objective):
    matcher = made("SCAN t2i")
    with pytest.raises(
        MissingSupervision,
        match=rf"^{type(objective).__name__}: expected .* or train with \w+Supervision\.$",
    ):
        loss_of(matcher, objective)(
            matcher.encode_visual(images("SCAN t2i", 4)), matcher.encode_text(texts("SCAN t2i", 4))
        )


@pytest.mark.parametrize(
    "name", [name for name, config in MATCHERS.items() if config.visual_granularity == "regions"]
)
@pytest.mark.slow
def test_moved_model_folder_scores_the_same(name, tmp_path):
    words = Vocabulary.from_captions(["a red circle above two blue squares"], 1)
    more = {"num_regions": 36} if name in ("SGR", "SAF") else {}
    config = replace(MATCHERS[name], visual_input_dim=192, text_input_dim=len(words), **more)
    matcher = KINDS[type(config)](config).eval()
    Processor(EncoderSpec("visual", "scenes", "regions"), None, words).save(
        matcher, tmp_path / "run" / "model"
    )
    images = [
        Image.fromarray(np.random.default_rng(seed).integers(0, 255, (64, 64, 3), dtype=np.uint8))
        for seed in range(3)
    ]
    sentences = ["a red circle", "two blue squares above a circle"]
    before = visavis.load(tmp_path / "run").score(images, sentences)
    shutil.move(tmp_path / "run", tmp_path / "elsewhere")
    torch.testing.assert_close(
        visavis.load(tmp_path / "elsewhere").score(images, sentences), before, rtol=0, atol=0
    )
    with torch.inference_mode():
        visual = concatenate(
            [
                matcher.encode_visual(
                    visavis.load(tmp_path / "elsewhere").processor.process_images([one], "regions")
                )
                for one in images
            ]
        )
        torch.testing.assert_close(
            matcher.score(visual, matcher.encode_text(words.encode(sentences))), before
        )
