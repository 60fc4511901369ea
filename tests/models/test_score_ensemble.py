"""Ensemble of matchers: the mean of scores for all kinds of encoded items."""

import pytest
import torch
from torch import Tensor

from visavis.core.encoded import Encoded, RaggedItems, collect_batches, concatenate
from visavis.core.spec import build_object
from visavis.models import CATALOG
from visavis.models.inference import ScoreEnsemble, join_member_encodings

GRID = {
    "visual_granularity": "regions",
    "visual_input_dim": 5,
    "text_granularity": "tokens",
    "text_input_dim": 9,
    "embedding_dim": 6,
    "word_dim": 4,
}


class Words(CATALOG["VSE++"]):
    """One vector per word, as a named part with a mask. The score is the mean of cosines over valid
    words.
    """

    def encode_text(self, items):
        states = torch.nn.functional.normalize(self.text(items), dim=-1)
        return Encoded({"words": states}, {"words": items.mask})

    def score(self, visual, text):
        cosines = (
            torch.einsum("vd,twd->vtw", visual.vectors, text.vectors["words"]) * text.mask["words"]
        )
        return cosines.sum(-1) / text.mask["words"].sum(-1)


def members(kind, seeds):
    for seed in seeds:
        torch.manual_seed(seed)
        yield kind(build_object(kind.Config, GRID)).eval()


@pytest.mark.parametrize("kind", [CATALOG["VSE++"], Words])
def test_score_ensemble_averages_members_also_in_blocks(kind):
    images = Encoded(torch.rand(3, 4, 5))
    blocks = [
        Encoded(
            torch.randint(1, 9, (2, longest)),
            torch.arange(longest) < torch.tensor([[longest], [2]]),
        )
        for longest in (3, 6)
    ]
    first, second = members(kind, (1, 2))
    average = ScoreEnsemble([first, second])

    def scores(matcher) -> Tensor:
        return matcher.score(
            matcher.encode_visual(images),
            concatenate([matcher.encode_text(block) for block in blocks])[1:4],
        )

    torch.testing.assert_close(scores(average), (scores(first) + scores(second)) / 2)
    assert not torch.allclose(scores(first), scores(second))
    assert torch.equal(scores(ScoreEnsemble([first, first])), scores(first))


def test_join_member_encodings_keeps_batches():
    images = Encoded(torch.rand(3, 4, 5))
    blocks = [
        Encoded(
            torch.randint(1, 9, (2, longest)),
            torch.arange(longest) < torch.tensor([[longest], [2]]),
        )
        for longest in (3, 60)
    ]
    matchers = list(members(Words, (1, 2)))
    order = torch.tensor([3, 0, 2, 1])
    kept = [
        collect_batches([member.encode_text(block) for block in blocks])[order]
        for member in matchers
    ]
    text = join_member_encodings(kept)
    assert isinstance(text, RaggedItems)
    assert max(part.shape[1] for part in text[1:2].score_input().tensors) == 3
    average, visual = (
        ScoreEnsemble(matchers),
        join_member_encodings([member.encode_visual(images) for member in matchers]),
    )
    torch.testing.assert_close(
        average.score(visual, text.score_input()),
        average.score(visual, join_member_encodings([items.score_input() for items in kept])),
    )
    assert not isinstance(join_member_encodings([kept[0], kept[1][order]]), RaggedItems)
