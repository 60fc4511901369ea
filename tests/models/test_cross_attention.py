"""Matchers of regions and words, compared with their formulas, and laws of a score of sets."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn.functional import cosine_similarity

from visavis.core.encoded import Encoded
from visavis.core.errors import ShapeError
from visavis.models.image_text.cross_attention import BFAN, SCAN, MaxSim
from visavis.models.inference import score_all_pairs
from visavis.papers.models.sgraf import SGRAF
from visavis.papers.models.vsrn import VSRN, GraphConvolution

REGIONS, WORDS, WIDTH = 4, 6, 5
SIZES = {
    "visual_input_dim": 3,
    "text_granularity": "words",
    "text_input_dim": 3,
    "embedding_dim": WIDTH,
}
MATCHERS = {
    "SCAN t2i": SCAN.Config(**SIZES),
    "SCAN i2t lse": SCAN.Config(
        **SIZES, direction="i2t", pool="lse", inverse_temperature=4.0, pool_inverse_temperature=5.0
    ),
    "SCAN softmax": SCAN.Config(**SIZES, normalization="softmax", pool="lse"),
    "SCAN none": SCAN.Config(**SIZES, normalization="none", direction="i2t"),
    "BFAN equal": BFAN.Config(**SIZES, focus="equal"),
    "BFAN prob": BFAN.Config(**SIZES, focus="prob"),
    "MaxSim": MaxSim.Config(**SIZES),
    "MaxSim i2t": MaxSim.Config(**SIZES, direction="i2t"),
    "SGR": SGRAF.Config(**SIZES, similarity_module="SGR", num_regions=REGIONS, similarity_dim=7),
    "SAF": SGRAF.Config(**SIZES, similarity_module="SAF", num_regions=REGIONS, similarity_dim=7),
    "SAF of any": SGRAF.Config(**SIZES, similarity_module="SAF", num_regions=0, similarity_dim=7),
}
every_matcher = pytest.mark.parametrize("name", MATCHERS)
KINDS = {kind.Config: kind for kind in (SCAN, BFAN, MaxSim, SGRAF)}


def made(name: str):
    return KINDS[type(MATCHERS[name])](MATCHERS[name]).double().eval()


def items(count: int, length: int, *, has_variable_length: bool) -> Encoded:
    vectors = torch.randn(count, length, 3, dtype=torch.float64)
    mask = (
        torch.arange(length) < torch.randint(1, length + 1, (count, 1))
        if has_variable_length
        else None
    )
    return Encoded(vectors, mask)


def encoded(
    matcher, images: int = 3, texts: int = 5, *, ragged_images: bool = False
) -> tuple[Encoded, Encoded]:
    with torch.no_grad():
        visual = matcher.encode_visual(
            items(
                images,
                REGIONS,
                has_variable_length=ragged_images and not getattr(matcher.config, "num_regions", 0),
            )
        )
        return visual, matcher.encode_text(items(texts, WORDS, has_variable_length=True))


def by_hand(config, regions: Tensor, words: Tensor) -> Tensor:
    """Compute the score of one image with one text from attended vectors."""
    if isinstance(config, MaxSim.Config):
        products = regions @ words.T
        ways = {"t2i": products.amax(0).mean(), "i2t": products.amax(1).mean()}
        return (
            (ways["t2i"] + ways["i2t"]) / 2
            if config.direction == "both"
            else ways[config.direction]
        )
    if isinstance(config, BFAN.Config):
        return one_way(config, regions, words).mean() + one_way(config, words, regions).mean()
    cosines = (
        one_way(config, regions, words)
        if config.direction == "t2i"
        else one_way(config, words, regions)
    )
    return (
        cosines.mean()
        if config.pool == "mean"
        else (config.pool_inverse_temperature * cosines).exp().sum().log()
        / config.pool_inverse_temperature
    )


def one_way(config, context: Tensor, query: Tensor) -> Tensor:
    values = context @ query.T
    how = getattr(config, "normalization", "clipped_l2norm")
    if how == "clipped_l2norm":
        values = torch.where(values > 0, values, 0.1 * values)
        values = values / (values.norm(dim=1, keepdim=True) + 1e-8)
    elif how == "softmax":
        values = values.softmax(1)
    weights = (config.inverse_temperature * values).softmax(0)
    if isinstance(config, BFAN.Config):
        kept = []
        for column in weights.T:
            if config.focus == "equal":
                focus = column * len(column) - column.sum()
            else:
                focus = torch.stack([((a - column) * column.sqrt()).sum() for a in column])
            kept.append(torch.where(focus > 0, column, 0.0))
        weights = torch.stack(kept, 1)
        weights = weights / weights.sum(0)
    return cosine_similarity(query, weights.T @ context, dim=1)


@pytest.mark.parametrize(
    "name", [name for name in MATCHERS if not isinstance(MATCHERS[name], SGRAF.Config)]
)
def test_score_matches_formula_with_attended_vectors(name):
    matcher = made(name)
    visual, text = encoded(matcher, ragged_images=True)
    scores = matcher.score(visual, text)
    for i in range(len(visual)):
        for j in range(len(text)):
            regions, words = visual.vectors[i][visual.mask[i]], text.vectors[j][text.mask[j]]
            torch.testing.assert_close(
                scores[i, j], by_hand(matcher.config, regions, words), rtol=1e-6, atol=1e-8
            )


@every_matcher
def test_score_pairs_match_diagonal_and_blocks_match_matrix(name):
    matcher = made(name)
    visual, text = encoded(matcher, 5, 5, ragged_images=True)
    scores = matcher.score(visual, text)
    assert scores.shape == (5, 5)
    torch.testing.assert_close(matcher.score_pairs(visual, text), scores.diagonal())
    torch.testing.assert_close(matcher.score(visual[1:3], text[2:]), scores[1:3, 2:])
    with torch.no_grad():
        torch.testing.assert_close(score_all_pairs(matcher, visual, text, "4kB"), scores.detach())


@every_matcher
def test_score_ignores_padding_and_fragment_order(name):
    matcher = made(name)
    visual, text = encoded(matcher)
    longer = torch.nn.functional.pad(
        text.vectors["fragments"] if isinstance(text.vectors, dict) else text.vectors,
        (0, 0, 0, 3),
        value=7.0,
    )
    mask = text.mask["fragments"] if isinstance(text.mask, dict) else text.mask
    order = torch.randperm(WORDS + 3)
    changed = Encoded(longer[:, order], torch.nn.functional.pad(mask, (0, 3))[:, order])
    if isinstance(text.vectors, dict):
        changed = Encoded(
            {"fragments": changed.vectors, "global": text.vectors["global"]},
            {"fragments": changed.mask},
        )
    torch.testing.assert_close(matcher.score(visual, changed), matcher.score(visual, text))


@every_matcher
def test_attention_gradients_match_score(name):
    matcher = made(name)
    visual, text = encoded(matcher, 2, 2)

    def score(regions: Tensor, words: Tensor) -> Tensor:
        parts = [
            Encoded(given | {"fragments": new} if isinstance(given, dict) else new, old.mask)
            for old, given, new in ((visual, visual.vectors, regions), (text, text.vectors, words))
        ]
        return matcher.score(*parts)

    inputs = [
        (side.vectors["fragments"] if isinstance(side.vectors, dict) else side.vectors)
        .clone()
        .requires_grad_()
        for side in (visual, text)
    ]
    assert torch.autograd.gradcheck(score, inputs, nondet_tol=0)


@every_matcher
def test_zero_fragment_has_finite_score_and_gradient(name):
    matcher = made(name)
    visual, text = encoded(matcher, 2, 3)
    for side in (visual, text):
        (side.vectors["fragments"] if isinstance(side.vectors, dict) else side.vectors)[0] = 0.0
    inputs = [
        side.map(lambda part: part.clone().requires_grad_() if part.is_floating_point() else part)
        for side in (visual, text)
    ]
    scores = matcher.score(*inputs)
    scores.sum().backward()
    grads = [
        (side.vectors["fragments"] if isinstance(side.vectors, dict) else side.vectors).grad
        for side in inputs
    ]
    assert scores.isfinite().all()
    assert all(grad.isfinite().all() for grad in grads)


def test_graph_convolution_is_identity_at_start():
    convolution = GraphConvolution(WIDTH).double()
    regions = torch.randn(3, REGIONS, WIDTH, dtype=torch.float64)
    torch.testing.assert_close(convolution(regions), regions)
    torch.nn.init.ones_(convolution.norm.weight)
    convolution.eval()
    mask = torch.tensor([True, True, True, False]).expand(3, -1)
    changed = torch.where(mask[..., None], regions, 9.0)
    torch.testing.assert_close(
        convolution(changed, mask)[mask], convolution(regions[:, :3]).flatten(0, 1)
    )
    order = torch.randperm(REGIONS)
    torch.testing.assert_close(convolution(regions[:, order]), convolution(regions)[:, order])


def test_sgraf_rejects_other_number_of_regions():
    with pytest.raises(
        ShapeError, match=r"^SGRAF: expected 4 regions per image, got 3\. Set model\.num_regions\."
    ):
        made("SGR").encode_visual(Encoded(torch.randn(2, 3, 3, dtype=torch.float64)))


def test_sgraf_with_any_number_of_regions_ignores_padding():
    """An image has the same score alone and padded. In training, its norm is that of all valid
    regions.
    """
    matcher, images = made("SAF of any"), items(4, REGIONS, has_variable_length=True)
    norm = matcher.visual_global.local_norm
    torch.nn.init.uniform_(norm.running_mean)
    torch.nn.init.uniform_(norm.running_var, 0.5, 2.0)
    _, text = encoded(matcher)
    with torch.no_grad():
        scores = matcher.score(matcher.encode_visual(images), text)
        for number, (rows, mask) in enumerate(zip(images.vectors, images.mask, strict=True)):
            alone = matcher.encode_visual(Encoded(rows[mask][None]))
            torch.testing.assert_close(matcher.score(alone, text)[0], scores[number])
        local = torch.randn(4, REGIONS, WIDTH, dtype=torch.float64)
        there = local[images.mask]
        expected = (there - there.mean()) / (there.var(correction=0) + norm.eps).sqrt()
        torch.testing.assert_close(norm.train()(local, images.mask)[images.mask], expected)


def test_vsrn_normalizes_projected_regions_over_valid_ones():
    model = VSRN(
        VSRN.Config(
            visual_input_dim=3,
            text_input_dim=9,
            embedding_dim=WIDTH,
            reasoning_steps=1,
            normalize_projected=True,
        )
    ).double()
    seen = []
    model.reasoning[0].register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    images = items(3, REGIONS, has_variable_length=True)
    model.encode_visual(images)
    mapped = model.visual(images.vectors) * images.mask[..., None]
    torch.testing.assert_close(seen[0], mapped / mapped.square().sum(1, keepdim=True).sqrt())
