"""Several matchers as one: the mean of scores, whatever parts and masks their items have."""

import pytest
import torch
from torch import Tensor

from visavis.batches import EncodedBatches, collected
from visavis.models import CATALOG
from visavis.models.average import Average, joined
from visavis.spec import build
from visavis.types import Encoded, concatenate

GRID = {"visual_view": "grid", "visual_width": 5, "text_view": "tokens", "text_width": 9, "width": 6, "word_width": 4}


class Words(CATALOG["VSE++"]):
    """Keeps one vector a word, under a name and with a mask: the mean of cosines over the words that are there."""

    def encode_text(self, items):
        states = torch.nn.functional.normalize(self.text(items), dim=-1)
        return Encoded({"words": states}, {"words": items.mask})

    def score(self, visual, text):
        cosines = torch.einsum("vd,twd->vtw", visual.vectors, text.vectors["words"]) * text.mask["words"]
        return cosines.sum(-1) / text.mask["words"].sum(-1)


def members(kind, seeds):
    for seed in seeds:
        torch.manual_seed(seed)
        yield kind(build(kind.Config, GRID)).eval()


@pytest.mark.parametrize("kind", [CATALOG["VSE++"], Words])
def test_the_score_is_the_mean_of_the_members_also_of_blocks(kind):
    images = Encoded(torch.rand(3, 4, 5))
    blocks = [Encoded(torch.randint(1, 9, (2, longest)), torch.arange(longest) < torch.tensor([[longest], [2]])) for longest in (3, 6)]
    first, second = members(kind, (1, 2))
    average = Average([first, second])

    def scores(matcher) -> Tensor:
        return matcher.score(matcher.encode_visual(images), concatenate([matcher.encode_text(block) for block in blocks])[1:4])

    torch.testing.assert_close(scores(average), (scores(first) + scores(second)) / 2)
    assert not torch.allclose(scores(first), scores(second))
    assert torch.equal(scores(Average([first, first])), scores(first))


def test_what_members_made_in_batches_is_put_together_batch_by_batch():
    images = Encoded(torch.rand(3, 4, 5))
    blocks = [Encoded(torch.randint(1, 9, (2, longest)), torch.arange(longest) < torch.tensor([[longest], [2]])) for longest in (3, 60)]
    matchers = list(members(Words, (1, 2)))
    order = torch.tensor([3, 0, 2, 1])
    kept = [collected([member.encode_text(block) for block in blocks])[order] for member in matchers]
    text = joined(kept)
    assert isinstance(text, EncodedBatches)
    assert max(part.shape[1] for part in text[1:2].together().vectors.values()) == 3
    average, visual = Average(matchers), joined([member.encode_visual(images) for member in matchers])
    torch.testing.assert_close(average.score(visual, text.together()), average.score(visual, joined([items.together() for items in kept])))
    assert not isinstance(joined([kept[0], kept[1][order]]), EncodedBatches)
