"""Scores of texts in groups of similar length: same values and gradients, less padding."""

import pytest
import torch
from torch.testing import assert_close

from visavis.core.encoded import Encoded
from visavis.models.image_text.cross_attention import (
    BFAN,
    MAX_LENGTH_RATIO,
    MIN_GROUP_LENGTH,
    MIN_TEXTS,
    SCAN,
    MaxSim,
)
from visavis.papers.models.sgraf import SGRAF

SIZES = {
    "visual_input_dim": 3,
    "text_granularity": "words",
    "text_input_dim": 3,
    "embedding_dim": 8,
}
MATCHERS = {
    "SCAN t2i": SCAN.Config(**SIZES),
    "SCAN i2t": SCAN.Config(**SIZES, direction="i2t", pool="lse"),
    "BFAN": BFAN.Config(**SIZES),
    "MaxSim": MaxSim.Config(**SIZES),
    "SGR": SGRAF.Config(**SIZES, num_regions=0, similarity_dim=4),
    "SAF": SGRAF.Config(**SIZES, num_regions=0, similarity_dim=4, similarity_module="SAF"),
}
KINDS = {kind.Config: kind for kind in (SCAN, BFAN, MaxSim, SGRAF)}
LONGEST = 40


@pytest.fixture(params=MATCHERS)
def matcher(request):
    torch.manual_seed(0)
    config = MATCHERS[request.param]
    return KINDS[type(config)](config).double().eval()


def encoded(matcher, texts: int, *, holes: bool = False) -> tuple[Encoded, Encoded]:
    """Sample three images, and texts of 1 to 12 words, the last of length ``LONGEST``."""
    lengths = torch.randint(1, 13, (texts,))
    lengths[-1] = LONGEST
    mask = torch.arange(LONGEST) < lengths[:, None]
    if holes:  # words that are left out in training
        mask &= (torch.arange(LONGEST) == lengths[:, None] - 1) | (torch.rand(texts, LONGEST) < 0.7)
    images = Encoded(torch.randn(3, 5, 3, dtype=torch.float64))
    return matcher.encode_visual(images), matcher.encode_text(
        Encoded(torch.randn(texts, LONGEST, 3, dtype=torch.float64), mask)
    )


@pytest.mark.parametrize("holes", [False, True])
def test_score_by_length_matches_padded_scores_and_gradients(matcher, holes):
    visual, text = encoded(matcher, 30, holes=holes)
    ways = [score(visual, text) for score in (matcher.score, matcher.score_block)]
    assert_close(*ways)
    weights = torch.randn_like(ways[0])
    assert_close(
        *(
            torch.autograd.grad((way * weights).sum(), matcher.visual.weight, retain_graph=True)[0]
            for way in ways
        )
    )


def test_score_by_length_limits_padding(matcher, monkeypatch):
    visual, text = encoded(matcher, 200)
    seen, score = [], matcher.score_block

    def noting(visual, text):
        mask = text.mask["fragments"] if isinstance(text.mask, dict) else text.mask
        seen.append((mask.shape[1], mask.sum(1)))
        return score(visual, text)

    monkeypatch.setattr(matcher, "score_block", noting)
    matcher.score(visual, text)
    assert sum(len(lengths) for _, lengths in seen) == 200
    assert all(
        longest <= MAX_LENGTH_RATIO * max(length, MIN_GROUP_LENGTH)
        for longest, lengths in seen
        for length in lengths.tolist()
    )


def test_score_by_length_does_not_group_few_texts(matcher, monkeypatch):
    visual, text = encoded(matcher, MIN_TEXTS - 1)
    seen = []
    monkeypatch.setattr(matcher, "score_block", lambda visual, text: seen.append(text))
    matcher.score(visual, text)
    assert seen == [text]
