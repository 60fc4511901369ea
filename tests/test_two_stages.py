"""Two-stage ranking: the first candidates of a query by a cheap score, ordered anew by a better one; both ways, whatever the memory."""

import itertools

import pytest
import torch
from torch import Tensor

from visavis.errors import VisavisError
from visavis.evaluation import evaluate
from visavis.metrics import ranks
from visavis.models.average import Average, joined
from visavis.models.base import GlobalMatcher, MatcherConfig
from visavis.models.scoring import score_all, score_from_cpu
from visavis.scoring import DeviceScore, TwoStageScore, score_in_order
from visavis.targets import Targets
from visavis.types import Encoded

CPU = torch.device("cpu")


class Stages(GlobalMatcher):
    """Embeddings, and states whose distance is the better score. calls: the pairs of each call of the second stage."""

    name = "Stages"
    visual_views, text_views = ("pooled",), ("pooled",)

    def __init__(self, rerank: int = 3):
        super().__init__(MatcherConfig(visual_width=2, text_width=2))
        self.unused, self.first, self.calls = torch.nn.Parameter(torch.zeros(())), rerank, []

    @property
    def rerank(self) -> int:
        return self.first

    def first_stage(self, items: Encoded) -> Encoded:
        return items if isinstance(items.vectors, Tensor) else Encoded(items.vectors["embedding"])

    def second_stage(self, visual: Encoded, text: Encoded) -> Tensor:
        self.calls.append(len(visual))
        return -(visual.vectors["states"] - text.vectors["states"]).square().sum(-1)

    def encode_visual(self, items: Encoded) -> Encoded:
        return items

    encode_text = encode_visual

    def parts(self):
        return {"all": [self.unused]}


def items(number: int, steps: int = 7) -> Encoded:
    """On a coarse grid, so that many scores are equal."""
    return Encoded({"embedding": torch.randint(steps, (number, 2)).float(), "states": torch.randint(4 * steps, (number, 3)).float()})


def both_stages(matcher: Stages, visual: Encoded, text: Encoded) -> tuple[Tensor, Tensor]:
    """By plain loops: the pairs ``[V, T]`` of each stage."""
    cheap = visual.vectors["embedding"] @ text.vectors["embedding"].T
    return cheap, -(visual.vectors["states"][:, None] - text.vectors["states"]).square().sum(-1)


@pytest.mark.parametrize("top", [1, 3, 8, 11, 50])
def test_the_order_is_that_of_plain_loops(top):
    visual, text = items(9), items(11)
    matcher = Stages(top)
    cheap, better = both_stages(matcher, visual, text)
    for way, first, second in (("i2t", cheap, better), ("t2i", cheap.T, better.T)):
        found = score_in_order(score_from_cpu(matcher), visual, text, way)
        assert found.dtype == torch.float64
        for row, query in enumerate(found):
            inside = [(first[row] >= first[row, c]).sum() <= top for c in range(first.shape[1])]
            keys = [(inside[c], (second if inside[c] else first)[row, c].item()) for c in range(first.shape[1])]
            for one, other in itertools.combinations(range(first.shape[1]), 2):
                assert (query[one] > query[other]) == (keys[one] > keys[other]), (way, row, one, other)
                assert (query[one] == query[other]) == (keys[one] == keys[other])
            assert all(query[c] == second[row, c] for c in range(first.shape[1]) if inside[c]), "second scores stand as they are"


def test_all_reranked_is_the_second_stage_alone_and_none_the_first():
    visual, text = items(6), items(10)
    ids = torch.arange(6), torch.arange(10) % 6
    cheap, better = both_stages(Stages(), visual, text)
    targets = Targets(query_ids=ids[0], candidate_ids=ids[1])
    for matcher, scores in ((Stages(10), better), (Stages(0), cheap)):
        found = evaluate(visual, text, score_from_cpu(matcher), *ids)
        assert torch.equal(torch.from_numpy(found.image_ranks), ranks(scores, targets))
        assert torch.equal(torch.from_numpy(found.text_ranks), ranks(scores.T, targets.T))


def test_the_ways_have_candidates_of_their_own():
    """One text is near all images: it is scored anew for each of them, but of its own images only the first are."""
    visual = Encoded({"embedding": torch.tensor([[1.0], [0.9], [0.8]]), "states": torch.tensor([[0.0], [1.0], [2.0]])})
    text = Encoded({"embedding": torch.tensor([[1.0], [-1.0]]), "states": torch.tensor([[2.0], [2.0]])})
    matcher = Stages(1)
    assert score_all(matcher, visual, text, way="i2t").argmax(1).tolist() == [0, 0, 0]
    assert score_all(matcher, visual, text).argmax(0).tolist() == [0, 2]
    assert score_all(Stages(2), visual, text).argmax(0).tolist() == [1, 2]
    assert score_all(Stages(3), visual, text).argmax(0).tolist() == [2, 2]


def test_a_collapsed_first_stage_reranks_nobody_and_scores_nothing():
    visual = Encoded({"embedding": torch.ones(8, 2), "states": torch.randn(8, 3)})
    result = evaluate(visual, visual, score_from_cpu(Stages(3)), range(8), range(8))
    assert result.image_ranks.tolist() == [8] * 8


def test_memory_sets_blocks_and_never_the_result():
    visual, text = items(40), items(30)
    outcomes = []
    for memory in ("3KiB", "20KiB", None):
        matcher = Stages(7)
        outcomes.append((score_in_order(score_from_cpu(matcher), visual, text, "t2i", memory), matcher.calls))
    assert torch.equal(outcomes[0][0], outcomes[2][0])
    assert torch.equal(outcomes[1][0], outcomes[2][0])
    largest = [max(calls[1:]) for _, calls in outcomes]
    assert largest[0] < largest[1] < largest[2]
    with pytest.raises(VisavisError, match="scoring one pair takes"):
        score_in_order(score_from_cpu(Stages(7)), visual, text, "i2t", 40)


def test_broken_second_scores_are_refused_not_ranked():
    visual, text = items(5), items(5)
    score = TwoStageScore(Stages().score, CPU, Stages().first_stage, lambda some, others: torch.full((len(some),), torch.nan), 2)
    with pytest.raises(VisavisError, match="hold NaN: the model or its features are broken"):
        evaluate(visual, text, score, range(5), range(5))


def test_an_ensemble_reranks_by_the_mean_of_what_each_member_ranks_by():
    first, second, plain = Stages(2), Stages(4), Stages(0)
    made = [(items(5), items(6)) for _ in range(3)]
    average = Average([first, second, plain])
    visual, text = map(joined, zip(*made, strict=True))
    assert average.rerank == 4
    cheap, better = zip(*(both_stages(first, *pair) for pair in made), strict=True)
    expected = TwoStageScore(
        lambda some, others: torch.stack(cheap).mean(0),
        CPU,
        lambda some: some,
        lambda some, others: torch.stack([better[0], better[1], cheap[2]]).mean(0)[some.vectors, others.vectors],
        4,
    )
    numbered = Encoded(torch.arange(5)), Encoded(torch.arange(6))
    scores = TwoStageScore.reranked(expected, torch.stack(cheap).mean(0), *numbered, "i2t", 2**20)
    torch.testing.assert_close(score_in_order(score_from_cpu(average), visual, text, "i2t"), scores)
    assert isinstance(score_from_cpu(Average([plain, plain])), DeviceScore)
    assert not isinstance(score_from_cpu(Average([plain, plain])), TwoStageScore)
