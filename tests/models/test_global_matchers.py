"""Matchers with one vector per item: shapes, unit rows, and dropout."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from visavis.core.encoded import Encoded
from visavis.models.image_text.global_matchers import Heads, VSEInfinity, VSEPlusPlus
from visavis.models.layers import xavier_linear

WORDS = 20


def images(view: str, number: int = 4) -> Encoded:
    if view == "pooled":
        return Encoded(torch.randn(number, 6))
    mask = torch.arange(5) < torch.randint(1, 6, (number, 1))
    return Encoded(torch.randn(number, 5, 6), mask if view == "ragged" else None)


def texts(view: str, number: int = 4) -> Encoded:
    mask = torch.arange(7) < torch.randint(1, 8, (number, 1))
    if view == "pooled":
        return Encoded(torch.randn(number, 3))
    return Encoded(
        torch.randint(1, WORDS, (number, 7)) if view == "tokens" else torch.randn(number, 7, 3),
        mask,
    )


def without_padding(item: Encoded) -> Encoded:
    return item if item.mask is None else Encoded(item.vectors[:, : item.mask.sum()])


WIDTHS = {"visual_input_dim": 6, "text_input_dim": 3}
TOKENS = {
    "visual_input_dim": 6,
    "text_input_dim": WORDS,
    "text_granularity": "tokens",
    "embedding_dim": 8,
    "word_dim": 5,
}
MATCHERS = {
    "linear heads": (
        Heads(Heads.Config(**WIDTHS, embedding_dim=8, hidden_layers=0)),
        "pooled",
        "pooled",
    ),
    "heads": (Heads(Heads.Config(**WIDTHS, embedding_dim=8, hidden_dim=10)), "pooled", "pooled"),
    "deep heads": (
        Heads(
            Heads.Config(
                **WIDTHS, embedding_dim=8, hidden_layers=3, hidden_dim=10, input_dropout=0.1
            )
        ),
        "pooled",
        "pooled",
    ),
    "bilinear": (Heads(Heads.Config(**WIDTHS, hidden_layers=0, bilinear=True)), "pooled", "pooled"),
    "vse++": (VSEPlusPlus(VSEPlusPlus.Config(**TOKENS)), "pooled", "tokens"),
    "vse++ on regions": (
        VSEPlusPlus(
            VSEPlusPlus.Config(
                **TOKENS, visual_granularity="regions", bidirectional=True, word_pool="mean"
            )
        ),
        "regions",
        "tokens",
    ),
    "vse++ on ragged regions": (
        VSEPlusPlus(VSEPlusPlus.Config(**TOKENS, visual_granularity="regions")),
        "ragged",
        "tokens",
    ),
    "vse++ on mean regions": (
        VSEPlusPlus(
            VSEPlusPlus.Config(
                **TOKENS, visual_granularity="regions", region_pool="mean", word_pool="max"
            )
        ),
        "regions",
        "tokens",
    ),
    "vse-infinity on tokens": (VSEInfinity(VSEInfinity.Config(**TOKENS)), "regions", "tokens"),
    "vse-infinity, tokens, mapped after": (
        VSEInfinity(VSEInfinity.Config(**TOKENS, hidden_dim=10, pooled_dropout=0.1)),
        "regions",
        "tokens",
    ),
    "vse-infinity, words, mapped after": (
        VSEInfinity(
            VSEInfinity.Config(
                **WIDTHS, text_granularity="words", embedding_dim=8, hidden_dim=10, temperature=5.0
            )
        ),
        "ragged",
        "words",
    ),
    "vse-infinity on mean regions": (
        VSEInfinity(VSEInfinity.Config(**TOKENS, hidden_dim=10, region_pool="mean")),
        "ragged",
        "tokens",
    ),
    "vse-infinity on words": (
        VSEInfinity(VSEInfinity.Config(**WIDTHS, text_granularity="words", embedding_dim=8)),
        "ragged",
        "words",
    ),
}


@pytest.mark.parametrize("name", MATCHERS)
@pytest.mark.parametrize("training", [True, False], ids=["training", "at rest"])
def test_global_matchers_score_unit_rows_by_cosine(name, training):
    matcher, visual_granularity, text_granularity = MATCHERS[name]
    visual = matcher.train(training).encode_visual(images(visual_granularity))
    text = matcher.encode_text(texts(text_granularity))
    for side in (visual, text):
        assert side.vectors.shape == (4, 6 if name == "bilinear" else 8)
        torch.testing.assert_close(side.vectors.norm(dim=1), torch.ones(4))
    scores = matcher.score(visual, text)
    torch.testing.assert_close(matcher.score_pairs(visual, text), scores.diagonal())
    torch.testing.assert_close(
        matcher.score(visual[1:3], text[torch.tensor([3, 0])]), scores[1:3][:, [3, 0]]
    )
    assert scores.abs().max() <= 1 + 1e-6


@pytest.mark.parametrize("name", MATCHERS)
def test_every_parameter_has_gradient_and_part(name):
    matcher, visual_granularity, text_granularity = MATCHERS[name]
    matcher.train().zero_grad()
    images_in, texts_in = images(visual_granularity, 8), texts(text_granularity, 8)
    matcher.score(
        matcher.encode_visual(images_in), matcher.encode_text(texts_in)
    ).square().sum().backward()
    by_part = matcher.parameters_by_part()
    assert by_part.keys() == ({"text"} if name == "bilinear" else {"visual", "text"})
    for part, parameters in by_part.items():
        for parameter_name, parameter in parameters:
            assert parameter.grad is not None, parameter_name
            assert parameter_name.startswith(part)


@pytest.mark.parametrize("name", MATCHERS)
def test_encoding_in_evaluation_is_independent_of_batch(name):
    matcher, visual_granularity, text_granularity = MATCHERS[name]
    matcher.eval()
    visual, text = images(visual_granularity), texts(text_granularity)
    for encode, items in ((matcher.encode_visual, visual), (matcher.encode_text, text)):
        alone = torch.cat([encode(without_padding(items[i : i + 1])).vectors for i in range(4)])
        torch.testing.assert_close(encode(items).vectors, alone)


def test_heads_layers():
    assert [type(layer) for layer in Heads(Heads.Config(**WIDTHS, hidden_layers=0)).text] == [
        nn.Linear
    ]
    assert [type(layer) for layer in Heads(Heads.Config(**WIDTHS, hidden_layers=1)).text] == [
        nn.Linear,
        nn.ReLU,
        nn.Dropout,
        nn.Linear,
    ]
    assert isinstance(
        Heads(Heads.Config(**WIDTHS, hidden_layers=1, input_dropout=0.3)).visual[0], nn.Dropout
    )


def test_heads_bilinear_keeps_image_features():
    matcher = Heads(Heads.Config(**WIDTHS, hidden_layers=0, bilinear=True))
    given = images("pooled")
    torch.testing.assert_close(
        matcher.encode_visual(given).vectors, nn.functional.normalize(given.vectors)
    )
    assert matcher.text[0].weight.shape == (6, 3)


def test_encode_unit_rows_normalizes_in_float32():
    matcher = Heads(Heads.Config(**WIDTHS, hidden_layers=0, embedding_dim=8)).bfloat16()
    rows = matcher.encode_visual(Encoded(torch.randn(4, 6).bfloat16())).vectors
    assert rows.dtype == torch.float32
    torch.testing.assert_close(rows.norm(dim=1), torch.ones(4))


def test_vse_plus_plus_projects_regions_before_pooling():
    matcher = VSEPlusPlus(VSEPlusPlus.Config(**TOKENS, visual_granularity="regions"))
    given = images("regions")
    expected = nn.functional.normalize(matcher.visual(given.vectors).amax(1))
    torch.testing.assert_close(matcher.encode_visual(given).vectors, expected)


def test_xavier_linear_is_within_glorot_bound():
    layer = xavier_linear(30, 20)
    assert layer.weight.abs().max() <= (6 / 50) ** 0.5
    assert not layer.bias.any()


@pytest.mark.parametrize("share", [0.2, 0.999])
def test_size_augmentation_keeps_at_least_one_position(share):
    matcher = VSEInfinity(VSEInfinity.Config(**TOKENS, size_augmentation=share))
    given = images("ragged", 400)
    kept = matcher._keep_mask(given)
    assert not (kept & ~given.mask).any()
    assert kept.any(1).all()
    long = given.mask.sum(1) == 5
    expected = (
        1 - share + (share**5) / 5
    )  # of five, all fall out with chance share^5, and then one stays
    assert kept[long].float().mean().item() == pytest.approx(expected, abs=0.06)
    assert matcher._keep_mask(images("regions")).shape == (4, 5)


def test_size_augmentation_is_off_in_evaluation_and_at_zero():
    given = images("ragged")
    assert VSEInfinity(VSEInfinity.Config(**TOKENS)).eval()._keep_mask(given) is given.mask
    assert (
        VSEInfinity(VSEInfinity.Config(**TOKENS, size_augmentation=0.0)).train()._keep_mask(given)
        is given.mask
    )


def test_vse_infinity_with_hidden_layer_pools_raw_features():
    matcher = VSEInfinity(
        VSEInfinity.Config(
            **WIDTHS, text_granularity="words", embedding_dim=8, hidden_dim=10, pooled_dropout=0.5
        )
    ).eval()
    for given, pool, layers, encode in (
        (images("ragged"), matcher.visual_pool, matcher.visual_head, matcher.encode_visual),
        (texts("words"), matcher.text_pool, matcher.text_head, matcher.encode_text),
    ):
        pooled = pool(given.vectors, given.mask)
        assert pooled.shape[1] == given.vectors.shape[2]
        torch.testing.assert_close(encode(given).vectors, nn.functional.normalize(layers(pooled)))


def test_vse_infinity_at_infinite_temperature_is_heads_on_means():
    infinity = VSEInfinity(
        VSEInfinity.Config(
            **WIDTHS,
            text_granularity="words",
            embedding_dim=8,
            hidden_dim=10,
            pooled_dropout=0.1,
            temperature=1e6,
        )
    ).eval()
    heads = Heads(Heads.Config(**WIDTHS, embedding_dim=8, hidden_dim=10, input_dropout=0.1)).eval()
    heads.visual.load_state_dict(infinity.visual_head.state_dict())
    heads.text.load_state_dict(infinity.text_head.state_dict())
    regions, words = images("regions"), Encoded(torch.randn(4, 7, 3))
    expected = heads.score(
        heads.encode_visual(Encoded(regions.vectors.mean(1))),
        heads.encode_text(Encoded(words.vectors.mean(1))),
    )
    torch.testing.assert_close(
        infinity.score(infinity.encode_visual(regions), infinity.encode_text(words)),
        expected,
        rtol=0,
        atol=1e-4,
    )


def test_vse_infinity_defaults_follow_paper():
    config = VSEInfinity.Config(**TOKENS)
    assert (config.temperature, config.hidden_dim, config.pooled_dropout, config.region_pool) == (
        0.1,
        0,
        0.0,
        "generalized",
    )
