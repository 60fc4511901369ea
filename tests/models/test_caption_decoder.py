"""VSRN's caption decoder: what its loss is, what it depends on, what learns by it, and that nothing but training knows of it."""

import math

import pytest
import torch
from torch import nn

from visavis.errors import SpecError
from visavis.models import VSRN
from visavis.models.caption_decoder import CaptionDecoder
from visavis.targets import Targets
from visavis.types import Encoded

WORDS = 11
SIZES = {"visual_width": 6, "text_width": WORDS, "word_width": 5, "width": 8, "steps": 2, "decoder_width": 16}


def made(**fields) -> VSRN:
    torch.manual_seed(0)
    return VSRN(VSRN.Config(**SIZES | fields))


def regions(count: int, length: int = 4, width: int = 6) -> Encoded:
    return Encoded(torch.randn(count, length, width), torch.ones(count, length, dtype=torch.bool))


def captions(count: int, length: int = 5) -> Encoded:
    return Encoded(torch.randint(1, WORDS, (count, length)), torch.ones(count, length, dtype=torch.bool))


def extra(model: VSRN, visual: Encoded, text: Encoded, targets: Targets) -> torch.Tensor:
    return model.extra_loss(model.encode_visual(visual), model.encode_text(text), targets)


def test_a_guess_among_equals_costs_the_logarithm_of_their_number_a_word():
    decoder = CaptionDecoder(6, WORDS, 5, 16)
    nn.init.zeros_(decoder.guess.weight)
    nn.init.zeros_(decoder.guess.bias)
    text = Encoded(torch.randint(1, WORDS, (2, 5)), torch.tensor([[True] * 5, [True] * 3 + [False] * 2]))
    assert decoder(regions(2), text).item() == pytest.approx((4 + 2) / 2 * math.log(WORDS))


def in_a_wider_batch(items: Encoded, garbage: torch.Tensor) -> Encoded:
    length = items.vectors.shape[1]
    garbage[:, :length] = items.vectors
    return Encoded(garbage, torch.arange(garbage.shape[1]).expand(garbage.shape[:2]) < length)


def test_a_word_is_guessed_by_the_regions_and_the_words_before_it_alone():
    """Neither what fills up a batch nor words that come later change what the beginning of a caption costs."""
    decoder, images, text = CaptionDecoder(6, WORDS, 5, 16).eval(), regions(3), captions(3)
    loss = decoder(images, text)
    wider = in_a_wider_batch(images, torch.randn(3, 9, 6)), in_a_wider_batch(text, torch.randint(1, WORDS, (3, 9)))
    torch.testing.assert_close(decoder(*wider), loss)
    assert decoder(images[torch.tensor([1, 2, 0])], text) != loss
    assert decoder(images, Encoded(text.vectors.roll(1, 0), text.mask)) != loss


def test_its_loss_is_the_mean_over_captions_each_told_by_its_own_image_times_the_weight():
    images, text, image_of = regions(3), captions(5), torch.tensor([1, 0, 2, 1, 0])
    targets, losses = Targets(query_ids=torch.arange(3), candidate_ids=image_of), {}
    for weight in (1.0, 2.0):
        model = made(generation=weight)
        model.decoder.eval()
        losses[weight] = extra(model, images, text, targets)
    alone = [extra(model, images[i : i + 1], text[t : t + 1], Targets.paired(1)) for t, i in enumerate(image_of)]
    torch.testing.assert_close(losses[2.0], torch.stack(alone).mean())
    torch.testing.assert_close(losses[2.0], 2 * losses[1.0])


def test_32_captions_are_learned_by_heart_and_by_the_regions():
    model, images, text, targets = made(generation=1.0), regions(32), captions(32), Targets.paired(32)
    optimizer, course = torch.optim.Adam(model.parameters(), lr=0.01), []
    for _ in range(80):
        optimizer.zero_grad()
        course.append(extra(model, images, text, targets))
        course[-1].backward()
        optimizer.step()
    assert course[-1] < course[0] / 2
    grads = {name: parameter.grad for name, parameter in model.named_parameters()}
    assert all(grads[name].any() for name in grads if name.startswith(("visual.", "decoder."))), "they learn"
    assert all(grads[name] is None for name in grads if name.startswith(("text.", "fusion."))), "these it does not read"


def test_weight_0_is_the_model_without_it_and_retrieval_never_sees_it():
    plain, model = made(), made(generation=1.0)
    own = {name: part for name, part in model.state_dict().items() if not name.startswith("decoder.")}
    assert own.keys() == plain.state_dict().keys()
    assert all(torch.equal(part, own[name]) for name, part in plain.state_dict().items()), "the others begin the same"
    images, text = regions(3), captions(3)
    assert extra(plain, images, text, Targets.paired(3)) is None
    scores = [each.score(each.encode_visual(images), each.encode_text(text)) for each in (plain, model)]
    assert torch.equal(*scores)
    assert isinstance(model.eval().encode_visual(images).vectors, torch.Tensor)
    with pytest.raises(SpecError, match=r"generation is -1\.0, expected a number from 0 up"):
        made(generation=-1.0)
