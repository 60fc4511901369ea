"""Two-stage ranking: a fast score selects candidates, and a better score reranks them."""

import itertools

import pytest
import torch
from torch import Tensor

from visavis.core.encoded import Encoded
from visavis.core.errors import SpecError, VisavisError
from visavis.evaluation import evaluate
from visavis.evaluation.metrics import best_ranks
from visavis.losses.corrections import CSLS, CorrectedScore
from visavis.losses.scoring import DeviceScore, TwoStageScore, score_direction
from visavis.losses.targets import Targets
from visavis.models.base import GlobalMatcher, MatcherConfig
from visavis.models.inference import (
    ScoreEnsemble,
    device_score,
    join_member_encodings,
    score_all_pairs,
)

from .matching import mentions

CPU = torch.device("cpu")


class Stages(GlobalMatcher):
    """Model with embeddings, and with states whose distance is the better score. ``calls`` counts
    pairs per second-stage call.
    """

    name = "Stages"
    visual_granularities, text_granularities = ("pooled",), ("pooled",)

    def __init__(self, rerank: int = 3):
        super().__init__(MatcherConfig(visual_input_dim=2, text_input_dim=2))
        self.unused, self.first, self.calls = torch.nn.Parameter(torch.zeros(())), rerank, []

    @property
    def rerank_top_k(self) -> int:
        return self.first

    def first_stage_items(self, items: Encoded) -> Encoded:
        return items if isinstance(items.vectors, Tensor) else Encoded(items.vectors["embedding"])

    def second_stage_scores(self, visual: Encoded, text: Encoded) -> Tensor:
        self.calls.append(len(visual))
        return -(visual.vectors["states"] - text.vectors["states"]).square().sum(-1)

    def encode_visual(self, items: Encoded) -> Encoded:
        return items

    encode_text = encode_visual

    def parts(self):
        return {"all": [self.unused]}


def items(number: int, steps: int = 7) -> Encoded:
    """Return items on a coarse grid, so that many scores are equal."""
    return Encoded(
        {
            "embedding": torch.randint(steps, (number, 2)).float(),
            "states": torch.randint(4 * steps, (number, 3)).float(),
        }
    )


def both_stages(matcher: Stages, visual: Encoded, text: Encoded) -> tuple[Tensor, Tensor]:
    """Return the scores of each stage by plain loops, shape ``[V, T]``."""
    cheap = visual.vectors["embedding"] @ text.vectors["embedding"].T
    return cheap, -(visual.vectors["states"][:, None] - text.vectors["states"]).square().sum(-1)


@pytest.mark.parametrize("top", [1, 3, 8, 11, 50])
def test_two_stage_order_matches_plain_loops(top):
    visual, text = items(9), items(11)
    matcher = Stages(top)
    cheap, better = both_stages(matcher, visual, text)
    for way, first, second in (("i2t", cheap, better), ("t2i", cheap.T, better.T)):
        found = score_direction(device_score(matcher), visual, text, way)
        assert found.dtype == torch.float64
        for row, query in enumerate(found):
            inside = [(first[row] >= first[row, c]).sum() <= top for c in range(first.shape[1])]
            keys = [
                (inside[c], (second if inside[c] else first)[row, c].item())
                for c in range(first.shape[1])
            ]
            for one, other in itertools.combinations(range(first.shape[1]), 2):
                assert (query[one] > query[other]) == (keys[one] > keys[other]), (
                    way,
                    row,
                    one,
                    other,
                )
                assert (query[one] == query[other]) == (keys[one] == keys[other])
            assert all(query[c] == second[row, c] for c in range(first.shape[1]) if inside[c]), (
                "second scores stand as they are"
            )


def test_reranking_all_or_none_is_one_stage():
    visual, text = items(6), items(10)
    ids = torch.arange(6), torch.arange(10) % 6
    cheap, better = both_stages(Stages(), visual, text)
    targets = Targets(query_ids=ids[0], candidate_ids=ids[1])
    for matcher, scores in ((Stages(10), better), (Stages(0), cheap)):
        found = evaluate(visual, text, device_score(matcher), *ids)
        assert torch.equal(torch.from_numpy(found.image_ranks), best_ranks(scores, targets))
        assert torch.equal(torch.from_numpy(found.text_ranks), best_ranks(scores.T, targets.T))


def test_directions_have_separate_candidates():
    """One text is near all images. Each image rescores it, but the text rescores only its first
    images.
    """
    visual = Encoded(
        {
            "embedding": torch.tensor([[1.0], [0.9], [0.8]]),
            "states": torch.tensor([[0.0], [1.0], [2.0]]),
        }
    )
    text = Encoded(
        {"embedding": torch.tensor([[1.0], [-1.0]]), "states": torch.tensor([[2.0], [2.0]])}
    )
    matcher = Stages(1)
    assert score_all_pairs(matcher, visual, text, direction="i2t").argmax(1).tolist() == [0, 0, 0]
    assert score_all_pairs(matcher, visual, text).argmax(0).tolist() == [0, 2]
    assert score_all_pairs(Stages(2), visual, text).argmax(0).tolist() == [1, 2]
    assert score_all_pairs(Stages(3), visual, text).argmax(0).tolist() == [2, 2]


def test_collapsed_first_stage_reranks_nothing():
    visual = Encoded({"embedding": torch.ones(8, 2), "states": torch.randn(8, 3)})
    result = evaluate(visual, visual, device_score(Stages(3)), range(8), range(8))
    assert result.image_ranks.tolist() == [8] * 8


def test_memory_budget_does_not_change_result():
    visual, text = items(40), items(30)
    outcomes = []
    for memory in ("3KiB", "20KiB", None):
        matcher = Stages(7)
        outcomes.append(
            (score_direction(device_score(matcher), visual, text, "t2i", memory), matcher.calls)
        )
    assert torch.equal(outcomes[0][0], outcomes[2][0])
    assert torch.equal(outcomes[1][0], outcomes[2][0])
    largest = [max(calls[1:]) for _, calls in outcomes]
    assert largest[0] < largest[1] < largest[2]
    with pytest.raises(VisavisError, match=r"memory: expected at least .* to score one pair"):
        score_direction(device_score(Stages(7)), visual, text, "i2t", 40)


def test_invalid_second_stage_scores_are_rejected():
    visual, text = items(5), items(5)
    score = TwoStageScore(
        Stages().score,
        CPU,
        Stages().first_stage_items,
        lambda some, others: torch.full((len(some),), torch.nan),
        2,
    )
    with pytest.raises(VisavisError, match="expected numbers, got NaN"):
        evaluate(visual, text, score, range(5), range(5))


def test_ensemble_reranks_by_mean_of_members():
    first, second, plain = Stages(2), Stages(4), Stages(0)
    made = [(items(5), items(6)) for _ in range(3)]
    average = ScoreEnsemble([first, second, plain])
    visual, text = map(join_member_encodings, zip(*made, strict=True))
    assert average.rerank_top_k == 4
    cheap, better = zip(*(both_stages(first, *pair) for pair in made), strict=True)
    expected = TwoStageScore(
        lambda some, others: torch.stack(cheap).mean(0),
        CPU,
        lambda some: some,
        lambda some, others: torch.stack([better[0], better[1], cheap[2]]).mean(0)[
            some.vectors, others.vectors
        ],
        4,
    )
    numbered = Encoded(torch.arange(5)), Encoded(torch.arange(6))
    scores = TwoStageScore.rerank_scores(
        expected, torch.stack(cheap).mean(0), *numbered, "i2t", 2**20
    )
    torch.testing.assert_close(score_direction(device_score(average), visual, text, "i2t"), scores)
    assert isinstance(device_score(ScoreEnsemble([plain, plain])), DeviceScore)
    assert not isinstance(device_score(ScoreEnsemble([plain, plain])), TwoStageScore)


@pytest.mark.parametrize("protocol", ["plain", "plain+equal-texts"])
def test_unpaired_items_are_reranked_as_candidates(protocol):
    visual, text = items(9), items(12)
    image_ids, text_ids = torch.arange(9), torch.arange(12) % 6
    image_ids[6:], text_ids[10:] = -1, -1
    keys = torch.arange(12) % 5 if protocol.endswith("texts") else torch.arange(12)
    own = (image_ids[:, None] == text_ids) & (image_ids[:, None] >= 0)
    positive = (own.float() @ (keys[:, None] == keys).float()) > 0
    targets = Targets.from_pairs(*positive.nonzero().T, *positive.shape)
    score = device_score(Stages(3))
    found = evaluate(visual, text, score, image_ids, text_ids, keys=keys, protocol=protocol)
    for ranks, direction, each in (
        (found.image_ranks, "i2t", targets),
        (found.text_ranks, "t2i", targets.T),
    ):
        queries = each.positive.any(1).nonzero()[:, 0]
        scores = score_direction(score, visual, text, direction)
        assert ranks.tolist() == best_ranks(scores[queries], each[queries]).tolist()


def test_correction_rejects_two_stages():
    """The scores of the stages have different scales, so no bias fits both."""
    with pytest.raises(SpecError, match=mentions("one stage", "first 3")):
        CorrectedScore(device_score(Stages()), CSLS(), None)
