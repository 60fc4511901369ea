"""Matchers of video experts, compared with their formulas, and laws of missing experts and of
order.
"""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn.functional import normalize

from visavis.core.blocking import declared_cost, measure_score_cost
from visavis.core.encoded import Encoded, concatenate, seconds_part
from visavis.core.errors import ShapeError, SpecError
from visavis.losses.pair_loss import PairLoss
from visavis.models.inference import score_all_pairs
from visavis.models.layers import MaskedBatchNorm
from visavis.objectives import VLC, InfoNCE, MaxMargin, Triplet, Unified
from visavis.papers.models.expert_matchers import (
    CE,
    MMT,
    CollaborativeGating,
    GatedEmbedding,
    NetVLAD,
)

EXPERTS = {"face": 4, "audio": 3, "motion": 5}
SIZES = {
    "experts": EXPERTS,
    "visual_input_dim": 12,
    "embedding_dim": 8,
    "hidden_dim": 6,
    "word_dim": 5,
}
MATCHERS = {
    "CE": CE(
        CE.Config(
            **SIZES,
            text_granularity="words",
            text_input_dim=3,
            text_clusters=2,
            netvlad_clusters={"audio": 2},
        )
    ),
    "CE tokens": CE(
        CE.Config(**SIZES, text_granularity="tokens", text_input_dim=9, word_pool="max")
    ),
    "CE pooled": CE(CE.Config(**SIZES, text_granularity="pooled", text_input_dim=3)),
    "MMT": MMT(
        MMT.Config(
            **SIZES,
            text_granularity="tokens",
            text_input_dim=9,
            layers=2,
            heads=2,
            feedforward_dim=12,
        )
    ),
}
every_matcher = pytest.mark.parametrize("name", MATCHERS)


def made(name: str, *, training: bool = False):
    torch.manual_seed(0)
    matcher = type(MATCHERS[name])(MATCHERS[name].config).double()
    for parameter in matcher.parameters():
        nn.init.normal_(parameter, std=0.5)
    return matcher.train(training)


def videos(count: int = 6, length: int = 4) -> Encoded:
    """Sample features of unequal length. The first video lacks the second expert, the second video
    has only the first.
    """
    masks = {
        name: torch.arange(length) < torch.randint(1, length + 1, (count, 1)) for name in EXPERTS
    }
    masks["audio"][:2] = False
    masks["motion"][1:2] = False
    return Encoded(
        {
            name: torch.randn(count, length, width, dtype=torch.float64)
            for name, width in EXPERTS.items()
        },
        masks,
    )


def texts(matcher, count: int = 5) -> Encoded:
    if matcher.config.text_granularity == "pooled":
        return Encoded(torch.randn(count, 3, dtype=torch.float64))
    mask = torch.arange(4) < torch.randint(1, 5, (count, 1))
    words = (
        torch.randint(1, 9, (count, 4))
        if matcher.config.text_granularity == "tokens"
        else torch.randn(count, 4, 3, dtype=torch.float64)
    )
    return Encoded(words, mask)


def encoded(matcher, count: int = 6) -> tuple[Encoded, Encoded]:
    with torch.no_grad():
        return matcher.encode_visual(videos(count)), matcher.encode_text(texts(matcher, count))


def score_by_hand(visual: Encoded, text: Encoded) -> float:
    """Compute the score of one video with one text, expert by expert."""
    terms = [
        (p.item() * w.item(), (v @ t).item() / w.item())
        for p, w, v, t in zip(
            visual.weights, text.weights, visual.vectors, text.vectors, strict=True
        )
    ]
    return sum(weight * cosine for weight, cosine in terms) / sum(weight for weight, _ in terms)


@every_matcher
def test_expert_score_is_weighted_mean_of_present_experts(name):
    visual, text = encoded(matcher := made(name))
    scores = matcher.score(visual, text)
    by_hand = [[score_by_hand(visual[i], text[j]) for j in range(6)] for i in range(6)]
    torch.testing.assert_close(scores, torch.tensor(by_hand, dtype=torch.float64))
    torch.testing.assert_close(matcher.score_pairs(visual, text), scores.diagonal())
    torch.testing.assert_close(matcher.score(visual[1:3], text[2:]), scores[1:3, 2:])
    assert visual.weights.tolist()[:3] == [[1, 0, 1], [1, 0, 0], [1, 1, 1]]
    torch.testing.assert_close(text.weights.sum(1), torch.ones(6, dtype=torch.float64))
    assert torch.equal(matcher.score(concatenate([visual[:2], visual[2:]]), text), scores)


@every_matcher
def test_expert_score_is_1_for_equal_and_0_without_experts(name):
    visual, text = encoded(matcher := made(name))
    same = normalize(torch.randn(3, 8, dtype=torch.float64), dim=-1).expand(6, 3, 8)
    agreeing = Encoded(same * visual.weights[..., None], weights=visual.weights)
    torch.testing.assert_close(
        matcher.score(agreeing, Encoded(same * text.weights[..., None], weights=text.weights)),
        torch.ones(6, 6, dtype=torch.float64),
    )
    nothing = Encoded(torch.zeros_like(agreeing.vectors), weights=torch.zeros_like(visual.weights))
    assert torch.equal(matcher.score(nothing, text), torch.zeros(6, 6, dtype=torch.float64))
    nothing = Encoded(
        videos().vectors, {part: torch.zeros_like(mask) for part, mask in videos().mask.items()}
    )
    assert torch.equal(
        matcher.score(matcher.encode_visual(nothing), text), torch.zeros(6, 6, dtype=torch.float64)
    )


@every_matcher
@pytest.mark.parametrize("training", [False, True])
def test_missing_expert_features_are_ignored(name, training):
    matcher, items = made(name, training=training), videos()
    other = {
        part: torch.where(items.mask[part][..., None], features, torch.nan)
        for part, features in items.vectors.items()
    }
    results = []
    for vectors in (items.vectors, other):
        torch.manual_seed(1)
        matcher.load_state_dict(made(name).state_dict())
        visual = matcher.encode_visual(Encoded(vectors, items.mask))
        gradients = torch.autograd.grad(
            visual.vectors.square().sum() + visual.vectors.sum(), list(matcher.visual.parameters())
        )
        results.append([visual.vectors, *gradients])
        assert not visual.vectors[visual.weights == 0].any()
    for ours, theirs in zip(*results, strict=True):
        assert torch.equal(ours, theirs)
        assert ours.isfinite().all()


@every_matcher
def test_only_mmt_depends_on_frame_order(name):
    matcher, items = made(name), videos()
    whole = Encoded(
        items.vectors,
        {part: mask.any(1, keepdim=True).expand_as(mask) for part, mask in items.mask.items()},
    )
    turned = Encoded(
        {part: features.flip(1) for part, features in items.vectors.items()}, whole.mask
    )
    before, after = matcher.encode_visual(whole).vectors, matcher.encode_visual(turned).vectors
    if isinstance(matcher, CE):
        torch.testing.assert_close(before, after)
    else:
        assert ((before - after).norm(dim=-1) > 1e-6)[whole.mask["face"].any(1)].any()


@every_matcher
def test_experts_ignore_padding_and_absent_expert(name):
    matcher, items = made(name), videos()
    longer = concatenate([items, videos(1, 6)])[:6]
    torch.testing.assert_close(
        matcher.encode_visual(longer).vectors, matcher.encode_visual(items).vectors
    )
    without = Encoded(
        items.vectors | {"audio": torch.zeros(6, 1, 3).double()},
        items.mask | {"audio": torch.zeros(6, 1, dtype=torch.bool)},
    )
    torch.testing.assert_close(
        matcher.encode_visual(without[:2]).vectors, matcher.encode_visual(items[:2]).vectors
    )


def test_collaborative_gating_matches_formula():
    torch.manual_seed(0)
    gating = CollaborativeGating(3, 4).double().eval()
    for norm in (*gating.gate_norms, *gating.attention_norms):
        nn.init.normal_(norm.weight)
        norm.running_mean.normal_()
    experts, present = (
        torch.randn(5, 3, 4, dtype=torch.float64),
        torch.tensor([[1, 1, 1], [1, 0, 1], [0, 1, 0], [0, 0, 0], [1, 1, 0]]).bool(),
    )
    experts = experts * present[..., None]
    concatenated = torch.cat([gating.self_projection.weight, gating.other_projection.weight], 1)
    found = gating(experts, present)
    for n in range(5):
        for i in range(3):
            others = [experts[n, j] for j in range(3) if j != i and present[n, i] and present[n, j]]
            pairs = [
                gating.relation_output(
                    (
                        concatenated @ torch.cat([experts[n, i], other])
                        + gating.self_projection.bias
                    ).relu()
                )
                for other in others
            ]
            mean = torch.stack(pairs).mean(0) if pairs else torch.zeros(4, dtype=torch.float64)
            attention = (
                gating.attention_norms[i](gating.attention(mean)[None])[0]
                + gating.gate_norms[i](gating.gates[i](experts[n, i])[None])[0]
            )
            expected = (
                normalize(experts[n, i] * attention.sigmoid(), dim=0)
                if present[n, i]
                else torch.zeros(4, dtype=torch.float64)
            )
            torch.testing.assert_close(found[n, i], expected)
    for training in (False, True):
        gating.train(training)
        given = experts[:3].clone().requires_grad_()
        assert torch.autograd.gradcheck(
            lambda x: gating(x * present[:3, :, None], present[:3]), given, atol=1e-4
        )


def test_gated_embedding_matches_formula_and_gradient():
    torch.manual_seed(0)
    unit, items = GatedEmbedding(3, 4).double().eval(), torch.randn(5, 3, dtype=torch.float64)
    mapped = items @ unit.linear.weight.T + unit.linear.bias
    gate = 1 / (
        1 + torch.exp(-(mapped @ unit.gate.weight.T + unit.gate.bias) / (1 + unit.norm.eps) ** 0.5)
    )
    torch.testing.assert_close(unit(items), normalize(mapped * gate, dim=1))
    assert torch.autograd.gradcheck(unit.train(), items.requires_grad_(), atol=1e-4)


def test_net_vlad_matches_formula_and_gradient():
    torch.manual_seed(0)
    pool, items = NetVLAD(3, 2).double().eval(), torch.randn(4, 5, 3, dtype=torch.float64)
    mask = torch.tensor([5, 3, 1, 0])[:, None] > torch.arange(5)
    found = pool(items, mask)
    for n in range(4):
        sums = torch.zeros(2, 3, dtype=torch.float64)
        for x in items[n][mask[n]]:
            shares = (pool.assign.weight @ x / (1 + pool.norm.eps) ** 0.5).softmax(0)
            sums += shares[:, None] * (x - pool.centers)
        torch.testing.assert_close(found[n], normalize(normalize(sums, dim=1).flatten(), dim=0))
    torch.testing.assert_close(pool(items), pool(items[:, torch.randperm(5)]))
    assert torch.autograd.gradcheck(
        lambda x: pool.train()(x, mask), items.requires_grad_(), atol=1e-4
    )


def test_net_vlad_by_hand_with_ghost_cluster():
    """Equal shares first. Then the ghost takes the first vector. Normalization removes the factor
    of the shares.
    """
    items = torch.tensor([[[2.0, 0.0], [0.0, 1.0]]])
    for ghosts in (0, 1):
        pool = NetVLAD(2, 2, ghosts).eval()
        nn.init.zeros_(pool.assign.weight)
        pool.centers.data = torch.tensor([[1.0, 0.0], [0.0, 0.0]])
        # residuals of the centers: (1, 0) + (-1, 1) = (0, 1) and (2, 0) + (0, 1) = (2, 1)
        torch.testing.assert_close(
            pool(items), torch.tensor([[0.0, 1.0, 2 / 5**0.5, 1 / 5**0.5]]) / 2**0.5
        )
    pool.assign.weight.data[2] = torch.tensor([99.0, -99.0])
    torch.testing.assert_close(
        pool(items), torch.tensor([[-(0.5**0.5), 0.5**0.5, 0.0, 1.0]]) / 2**0.5
    )


def test_net_vlad_ignores_order_and_padding():
    torch.manual_seed(0)
    pool, items = NetVLAD(3, 2, 1), torch.randn(4, 5, 3)
    mask = torch.tensor([5, 3, 1, 2])[:, None] > torch.arange(5)
    order = torch.randperm(5)
    for mode in (True, False):
        pool.train(mode)
        torch.testing.assert_close(pool(items, mask), pool(items[:, order], mask[:, order]))
        torch.testing.assert_close(
            pool(items, mask), pool(items.masked_fill(~mask[..., None], 1e3), mask)
        )


def test_masked_batch_norm_matches_batch_norm_of_valid_rows():
    torch.manual_seed(0)
    ours, theirs, items = MaskedBatchNorm(3), nn.BatchNorm1d(3), torch.randn(4, 2, 3)
    present = torch.tensor([[1, 1], [0, 1], [0, 0], [1, 0]]).bool()
    torch.testing.assert_close(ours(items, present)[present], theirs(items[present]))
    torch.testing.assert_close(ours.running_mean, theirs.running_mean)
    before = ours.running_mean.clone()
    for few in (torch.zeros(4, 2).bool(), (torch.arange(8) == 3).view(4, 2)):
        torch.testing.assert_close(ours(items, few)[few], theirs.eval()(items[few]))
    assert torch.equal(ours.running_mean, before)
    torch.testing.assert_close(ours.eval()(items)[:, 0], theirs(items[:, 0]))


@pytest.mark.parametrize("objective", [Triplet(), VLC(), Unified()])
def test_video_without_experts_has_finite_gradients(objective):
    matcher = MATCHERS["CE tokens"].train()
    matcher.zero_grad()
    items = videos(5)
    items = Encoded(
        items.vectors,
        {name: mask & (torch.arange(5) > 0)[:, None] for name, mask in items.mask.items()},
    ).to(torch.float32)
    text = Encoded(torch.randint(1, 9, (5, 4)), torch.ones(5, 4, dtype=torch.bool))
    PairLoss(objective, score=matcher.score)(
        matcher.encode_visual(items), matcher.encode_text(text)
    ).backward()
    assert all(
        parameter.grad.isfinite().all()
        for parameter in matcher.parameters()
        if parameter.grad is not None
    )


@every_matcher
def test_expert_score_cost_matches_measurement(name):
    matcher = made(name).float()
    visual, text = (items.to(torch.float32) for items in encoded(made(name), 200))
    for training in (False, True):
        declared = declared_cost(matcher.score, visual, text).to_block_cost(training=training)
        assert (
            measure_score_cost(matcher.score, visual, text, training=training).pair_bytes
            <= declared.pair_bytes
        )
    torch.testing.assert_close(
        score_all_pairs(matcher, visual, text, "100KB"), matcher.score(visual, text)
    )


@pytest.mark.parametrize(
    ("name", "objective", "ratio"),
    [
        ("CE", MaxMargin(margin=0.1), 0.2),
        ("CE tokens", Unified(gamma=20), 0.5),
        ("MMT", InfoNCE(), 0.85),
    ],
)
@pytest.mark.slow
def test_expert_matchers_overfit_pairs_with_missing_experts(name, objective, ratio):
    matcher = made(name, training=True).float()
    visual, text = (items.to(torch.float32) for items in (videos(16), texts(matcher, 16)))
    optimizer = torch.optim.Adam(matcher.parameters(), lr=0.01)
    loss_of, losses = PairLoss(objective, score=matcher.score), list[float]()
    for _ in range(60):
        loss = loss_of(matcher.encode_visual(visual), matcher.encode_text(text), targets=None)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < ratio * losses[0]


WRONG = {
    "no expert": (
        CE,
        {"experts": {}},
        "experts",
        "{}",
        "the name and dimensions of at least one expert",
    ),
    "a width of text": (CE, {"experts": {"face": "4"}}, "experts.face", "'4'", ""),
    "another sum": (
        MMT,
        {"visual_input_dim": 11},
        "visual_input_dim",
        "11",
        "the sum of the experts' dimensions",
    ),
    "clusters of a stranger": (
        CE,
        {"netvlad_clusters": {"ocr": 2}},
        "netvlad_clusters",
        "{'ocr': 2}",
        "names among face, audio, motion",
    ),
    "heads": (MMT, {"heads": 3}, "heads", "3", "a divisor of embedding_dim, 8"),
    "no clusters": (
        CE,
        {"netvlad_clusters": {"audio": 0}},
        "CE",
        "netvlad_clusters",
        "audio: expected an integer >= 1, got 0",
    ),
    "none": (MMT, {"max_length": 0}, "MMT", "max_length", "0"),
}


@pytest.mark.parametrize("case", WRONG)
def test_expert_config_rejects_invalid_values(case):
    kind, changes, *parts = WRONG[case]
    with pytest.raises(SpecError) as raised:
        kind.Config(**(SIZES | {"text_input_dim": 3} | changes))
    assert all(part in str(raised.value) for part in parts)


def with_seconds(items: Encoded, seconds: torch.Tensor) -> Encoded:
    """Items whose features have the given times ``[L]``, except for the expert motion."""
    timed = [name for name in EXPERTS if name != "motion"]
    times = {
        seconds_part(name): seconds.double().expand(len(items), -1)[..., None] for name in timed
    }
    return Encoded(
        {**items.vectors, **times},
        {**items.mask, **{seconds_part(name): items.mask[name] for name in timed}},
    )


def test_mmt_embeds_the_second_of_a_feature():
    sizes = SIZES | {
        "text_input_dim": 3,
        "layers": 1,
        "heads": 2,
        "feedforward_dim": 4,
        "max_seconds": 5,
    }
    torch.manual_seed(0)
    by_second = MMT(MMT.Config(**sizes, time_unit="second")).double().eval()
    items = videos()

    def encoded_at(*seconds):
        return by_second.encode_visual(with_seconds(items, torch.tensor(seconds))).vectors

    start = encoded_at(0.0, 1.0, 2.0, 3.0)
    torch.testing.assert_close(encoded_at(0.9, 1.5, 2.2, 3.9), start, rtol=0, atol=0)
    torch.testing.assert_close(
        encoded_at(-1.0, 1.0, 2.0, 3.0), start, rtol=0, atol=0
    )  # unknown times have the first embedding
    torch.testing.assert_close(
        encoded_at(1.0, 2.0, 4.0, 99.0), encoded_at(1.0, 2.0, 4.0, 4.0), rtol=0, atol=0
    )
    assert not torch.allclose(encoded_at(1.0, 2.0, 3.0, 4.0), start)


def test_mmt_by_second_equals_positions_at_seconds_1_to_n():
    sizes = SIZES | {
        "text_input_dim": 3,
        "layers": 1,
        "heads": 2,
        "feedforward_dim": 4,
        "max_length": 4,
        "max_seconds": 5,
    }
    by_position, by_second = (
        MMT(MMT.Config(**sizes, time_unit=unit)).double().eval() for unit in ("position", "second")
    )
    by_second.load_state_dict(by_position.state_dict())
    items = videos()
    items.mask["motion"][:] = False
    timed = with_seconds(items, torch.arange(1, 5))
    torch.testing.assert_close(
        by_second.encode_visual(timed).vectors, by_position.encode_visual(items).vectors
    )


def test_mmt_by_second_needs_seconds():
    matcher = MMT(
        MMT.Config(
            **SIZES, text_input_dim=3, layers=1, heads=2, feedforward_dim=4, time_unit="second"
        )
    ).double()
    with pytest.raises(
        ShapeError,
        match=r"^MMT: expected features with seconds .* got none\. .* model\.time_unit=position\.$",
    ):
        matcher.encode_visual(videos())


def test_mmt_rejects_more_features_than_max_length():
    matcher = MMT(
        MMT.Config(**SIZES, text_input_dim=3, layers=1, heads=2, feedforward_dim=4, max_length=2)
    ).double()
    with pytest.raises(
        ShapeError,
        match=r"^MMT: expected at most 2 features per expert, got 4\. Set visual\.max_length .* model\.max_length",
    ):
        matcher.encode_visual(videos())
