"""ClipLoss: open_clip's loss, with any objective."""

import inspect
import re

import pytest
import torch
from torch.nn.functional import cross_entropy, logsigmoid, normalize

from visavis import PairLoss
from visavis.errors import SpecError, VisavisError
from visavis.integrations.open_clip import ClipLoss
from visavis.objectives import VLC, NTXent, Sigmoid, Triplet, TripletHN, Unified

FIXED = (Triplet(), TripletHN(), VLC(), Unified())


def features(number=6, width=5):
    images, texts = torch.randn(2, number, width, dtype=torch.float64, requires_grad=True).unbind()
    log_scale = torch.tensor(2.6, dtype=torch.float64, requires_grad=True)
    return (images, texts), log_scale


def open_clips_formula(image_features, text_features, logit_scale):
    scores = logit_scale * image_features @ text_features.T
    right = torch.arange(len(scores))
    return (cross_entropy(scores, right) + cross_entropy(scores.T, right)) / 2


def equal(ours, theirs):
    torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-13)


def test_it_equals_the_formula_of_clip_with_its_gradients():
    given, log_scale = features()
    units = [normalize(side, dim=-1) for side in given]
    ours, theirs = ClipLoss(NTXent())(*units, log_scale.exp()), open_clips_formula(*units, log_scale.exp())
    equal(ours, theirs)
    for mine, right in zip(*(torch.autograd.grad(value, (*given, log_scale), retain_graph=True) for value in (ours, theirs)), strict=True):
        assert right.abs().max() > 1e-3
        equal(mine, right)
    equal(ClipLoss(NTXent(tau=0.3))(*units, 20.0), open_clips_formula(*units, 20.0))


def open_clips_sigmoid(image_features, text_features, logit_scale, logit_bias):
    logits = logit_scale * image_features @ text_features.T + logit_bias
    return -logsigmoid((2 * torch.eye(len(logits)) - 1) * logits).sum() / len(logits)


def test_with_sigmoid_it_equals_the_formula_of_siglip_with_its_gradients():
    given, log_scale = features()
    units, bias = [normalize(side, dim=-1) for side in given], torch.tensor(-7.0, dtype=torch.float64, requires_grad=True)
    inputs = *units, log_scale.exp(), bias
    ours, theirs = ClipLoss(Sigmoid())(*inputs), open_clips_sigmoid(*inputs)
    equal(ours, theirs)
    leaves = *given, log_scale, bias
    for mine, right in zip(*(torch.autograd.grad(value, leaves, retain_graph=True) for value in (ours, theirs)), strict=True):
        assert right.abs().max() > 1e-3
        equal(mine, right)
    equal(ClipLoss(Sigmoid(bias=-4.0))(*units, 20.0), open_clips_sigmoid(*units, 20.0, -4.0))


@pytest.mark.parametrize("objective", FIXED, ids=str)
def test_an_objective_of_fixed_scale_is_left_as_it_is(objective):
    given, log_scale = features()
    value = ClipLoss(objective)(*given, log_scale.exp())
    equal(value, PairLoss(objective)(*given))
    *gradients, of_scale = torch.autograd.grad(value, (*given, log_scale))
    assert all(gradient.abs().max() > 1e-3 for gradient in gradients)
    assert of_scale.item() == 0  # not None: DDP waits for every parameter


@pytest.mark.parametrize("objective", [*FIXED, NTXent()], ids=str)
def test_equal_ids_are_positives(objective):
    given, _ = features()
    scale = 1 / objective.tau if objective.for_scaled_scores() else 14.0
    value = ClipLoss(objective)(*given, scale, image_ids=[1, 1, 2, 2, 3, 3])
    equal(value, PairLoss(objective)(*given, [1, 1, 2, 2, 3, 3]))
    assert not torch.isclose(value, ClipLoss(objective)(*given, scale))
    equal(ClipLoss(objective)(given[0][::2], given[1], scale, image_ids=[1, 2, 3], text_ids=[1, 1, 2, 2, 3, 3]),
          PairLoss(objective)(given[0][::2], given[1], [1, 2, 3], [1, 1, 2, 2, 3, 3]))  # fmt: skip


def test_it_is_made_and_called_as_open_clip_does():
    made = {"local_loss": True, "gather_with_grad": True, "cache_labels": True, "rank": 0, "world_size": 1, "use_horovod": False}
    assert list(inspect.signature(ClipLoss).parameters) == ["objective", *made]
    given, log_scale = features()
    outputs = {"image_features": given[0], "text_features": given[1], "logit_scale": log_scale.exp()}
    losses = ClipLoss(NTXent(), **made)(**outputs, output_dict=True)
    assert list(losses) == ["contrastive_loss"]
    equal(losses["contrastive_loss"], ClipLoss(NTXent())(*outputs.values()))


def test_what_it_cannot_do_is_refused_in_one_sentence():
    with pytest.raises(VisavisError, match=re.escape("ClipLoss got use_horovod=True, expected processes of torch.distributed")):
        ClipLoss(NTXent(), use_horovod=True)
    for objective in (NTXent(), Unified()):
        with pytest.raises(
            VisavisError, match=r"^ClipLoss got a logit_bias, which belongs to the sigmoid loss, and has .*: give ClipLoss\(Si"
        ):
            ClipLoss(objective)(*features()[0], 10.0, torch.tensor(-10.0))
    with pytest.raises(SpecError, match=r"^ClipLoss got logit_bias=tensor\(\[1\., 1\.\]\), expected one finite number\.$"):
        ClipLoss(Sigmoid())(*features()[0], 10.0, torch.ones(2))
    with pytest.raises(SpecError, match="expected an objective"):
        ClipLoss("Unified()")


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # the compiler's own, of scales on a graph
@pytest.mark.parametrize("objective", [NTXent(), Unified(gamma=5)], ids=str)
def test_a_compiler_sees_through_it(objective):
    given, log_scale = features()
    torch._dynamo.reset()
    compiled, plain = torch.compile(ClipLoss(objective), fullgraph=True, backend="eager"), ClipLoss(objective)
    for ids in (None, torch.tensor([1, 1, 2, 2, 3, 3])):
        values = [loss(*given, log_scale.exp(), image_ids=ids) for loss in (compiled, plain)]
        equal(*values)
        for mine, right in zip(*(torch.autograd.grad(value, (*given, log_scale)) for value in values), strict=True):
            equal(mine, right)


def test_a_scale_is_checked_at_the_call():
    with pytest.raises(SpecError, match=r"^ClipLoss got logit_scale=tensor\(\[1\., 1\.\]\), expected one number above 0"):
        ClipLoss(NTXent())(*features()[0], torch.ones(2))
