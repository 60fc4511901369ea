"""Caption decoder of VSRN: value of its loss, its inputs, and its absence outside training."""

import math

import pytest
import torch
from torch import nn

from visavis.core.encoded import Encoded
from visavis.core.errors import SpecError
from visavis.losses.targets import Targets
from visavis.papers.models.vsrn import VSRN, CaptionDecoder

WORDS = 11
SIZES = {
    "visual_input_dim": 6,
    "text_input_dim": WORDS,
    "word_dim": 5,
    "embedding_dim": 8,
    "reasoning_steps": 2,
    "decoder_dim": 16,
}


def made(**fields) -> VSRN:
    torch.manual_seed(0)
    return VSRN(VSRN.Config(**SIZES | fields))


def regions(count: int, length: int = 4, width: int = 6) -> Encoded:
    return Encoded(torch.randn(count, length, width), torch.ones(count, length, dtype=torch.bool))


def captions(count: int, length: int = 5) -> Encoded:
    return Encoded(
        torch.randint(1, WORDS, (count, length)), torch.ones(count, length, dtype=torch.bool)
    )


def extra(model: VSRN, visual: Encoded, text: Encoded, targets: Targets) -> torch.Tensor:
    return model.auxiliary_loss(model.encode_visual(visual), model.encode_text(text), targets)


def test_caption_decoder_loss_of_uniform_prediction():
    decoder = CaptionDecoder(6, WORDS, 5, 16)
    nn.init.zeros_(decoder.output.weight)
    nn.init.zeros_(decoder.output.bias)
    text = Encoded(
        torch.randint(1, WORDS, (2, 5)), torch.tensor([[True] * 5, [True] * 3 + [False] * 2])
    )
    assert decoder(regions(2), text).item() == pytest.approx((4 + 2) / 2 * math.log(WORDS))


def in_a_wider_batch(items: Encoded, garbage: torch.Tensor) -> Encoded:
    length = items.vectors.shape[1]
    garbage[:, :length] = items.vectors
    return Encoded(garbage, torch.arange(garbage.shape[1]).expand(garbage.shape[:2]) < length)


def test_caption_decoder_predicts_from_regions_and_earlier_words():
    """Padding and later words do not change the loss of earlier words."""
    decoder, images, text = CaptionDecoder(6, WORDS, 5, 16).eval(), regions(3), captions(3)
    loss = decoder(images, text)
    wider = (
        in_a_wider_batch(images, torch.randn(3, 9, 6)),
        in_a_wider_batch(text, torch.randint(1, WORDS, (3, 9))),
    )
    torch.testing.assert_close(decoder(*wider), loss)
    assert decoder(images[torch.tensor([1, 2, 0])], text) != loss
    assert decoder(images, Encoded(text.vectors.roll(1, 0), text.mask)) != loss


def test_vsrn_auxiliary_loss_is_weighted_mean_over_captions():
    images, text, image_of = regions(3), captions(5), torch.tensor([1, 0, 2, 1, 0])
    targets, losses = Targets(query_ids=torch.arange(3), candidate_ids=image_of), {}
    for weight in (1.0, 2.0):
        model = made(caption_loss_weight=weight)
        model.decoder.eval()
        losses[weight] = extra(model, images, text, targets)
    alone = [
        extra(model, images[i : i + 1], text[t : t + 1], Targets.paired(1))
        for t, i in enumerate(image_of)
    ]
    torch.testing.assert_close(losses[2.0], torch.stack(alone).mean())
    torch.testing.assert_close(losses[2.0], 2 * losses[1.0])


def test_caption_decoder_overfits_32_captions():
    model, images, text, targets = (
        made(caption_loss_weight=1.0),
        regions(32),
        captions(32),
        Targets.paired(32),
    )
    optimizer, course = torch.optim.Adam(model.parameters(), lr=0.01), []
    for _ in range(80):
        optimizer.zero_grad()
        course.append(extra(model, images, text, targets))
        course[-1].backward()
        optimizer.step()
    assert course[-1] < course[0] / 2
    grads = {name: parameter.grad for name, parameter in model.named_parameters()}
    assert all(grads[name].any() for name in grads if name.startswith(("visual.", "decoder."))), (
        "they learn"
    )
    assert all(
        grads[name] is None for name in grads if name.startswith(("text.", "region_gru."))
    ), "these it does not read"


def test_vsrn_without_decoder_has_same_retrieval_weights():
    plain, model = made(), made(caption_loss_weight=1.0)
    own = {
        name: part for name, part in model.state_dict().items() if not name.startswith("decoder.")
    }
    assert own.keys() == plain.state_dict().keys()
    assert all(torch.equal(part, own[name]) for name, part in plain.state_dict().items()), (
        "the others begin the same"
    )
    images, text = regions(3), captions(3)
    assert extra(plain, images, text, Targets.paired(3)) is None
    scores = [
        each.score(each.encode_visual(images), each.encode_text(text)) for each in (plain, model)
    ]
    assert torch.equal(*scores)
    assert isinstance(model.eval().encode_visual(images).vectors, torch.Tensor)
    with pytest.raises(SpecError, match=r"caption_loss_weight: expected a number >= 0, got -1\.0"):
        made(caption_loss_weight=-1.0)
