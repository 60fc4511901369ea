"""ClipLoss: the loss interface of open_clip with any objective."""

import inspect

import pytest
import torch
from tests.matching import mentions
from torch.nn.functional import cross_entropy, logsigmoid, normalize

from visavis import PairLoss
from visavis.core.errors import SpecError, VisavisError
from visavis.integrations.open_clip import ClipLoss
from visavis.objectives import VLC, NTXent, Sigmoid, Triplet, TripletHN, Unified

FIXED = (Triplet(), TripletHN(), VLC(), Unified())


def features(num_pairs=6, embedding_dim=5):
    images, texts = torch.randn(
        2, num_pairs, embedding_dim, dtype=torch.float64, requires_grad=True
    ).unbind()
    log_scale = torch.tensor(2.6, dtype=torch.float64, requires_grad=True)
    return (images, texts), log_scale


def clip_formula(image_features, text_features, logit_scale):
    scores = logit_scale * image_features @ text_features.T
    right = torch.arange(len(scores))
    return (cross_entropy(scores, right) + cross_entropy(scores.T, right)) / 2


def assert_close(ours, theirs):
    torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-13)


def test_clip_loss_equals_clip_formula_and_gradients():
    embeddings, log_scale = features()
    units = [normalize(side, dim=-1) for side in embeddings]
    ours, theirs = (
        ClipLoss(NTXent())(*units, log_scale.exp()),
        clip_formula(*units, log_scale.exp()),
    )
    assert_close(ours, theirs)
    for mine, right in zip(
        *(
            torch.autograd.grad(value, (*embeddings, log_scale), retain_graph=True)
            for value in (ours, theirs)
        ),
        strict=True,
    ):
        assert right.abs().max() > 1e-3
        assert_close(mine, right)
    assert_close(ClipLoss(NTXent(tau=0.3))(*units, 20.0), clip_formula(*units, 20.0))


def siglip_formula(image_features, text_features, logit_scale, logit_bias):
    logits = logit_scale * image_features @ text_features.T + logit_bias
    return -logsigmoid((2 * torch.eye(len(logits)) - 1) * logits).sum() / len(logits)


def test_clip_loss_with_sigmoid_equals_siglip_formula():
    embeddings, log_scale = features()
    units, bias = (
        [normalize(side, dim=-1) for side in embeddings],
        torch.tensor(-7.0, dtype=torch.float64, requires_grad=True),
    )
    inputs = *units, log_scale.exp(), bias
    ours, theirs = ClipLoss(Sigmoid())(*inputs), siglip_formula(*inputs)
    assert_close(ours, theirs)
    leaves = *embeddings, log_scale, bias
    for mine, right in zip(
        *(torch.autograd.grad(value, leaves, retain_graph=True) for value in (ours, theirs)),
        strict=True,
    ):
        assert right.abs().max() > 1e-3
        assert_close(mine, right)
    assert_close(ClipLoss(Sigmoid(bias=-4.0))(*units, 20.0), siglip_formula(*units, 20.0, -4.0))


@pytest.mark.parametrize("objective", FIXED, ids=str)
def test_clip_loss_does_not_scale_objective_of_fixed_scale(objective):
    embeddings, log_scale = features()
    value = ClipLoss(objective)(*embeddings, log_scale.exp())
    assert_close(value, PairLoss(objective)(*embeddings))
    *gradients, of_scale = torch.autograd.grad(value, (*embeddings, log_scale))
    assert all(gradient.abs().max() > 1e-3 for gradient in gradients)
    assert (
        of_scale.item() == 0
    )  # a zero gradient rather than None, because DDP waits for every parameter


@pytest.mark.parametrize("objective", [*FIXED, NTXent()], ids=str)
def test_clip_loss_treats_equal_ids_as_positives(objective):
    embeddings, _ = features()
    scale = 1 / objective.tau if objective.without_scale() else 14.0
    value = ClipLoss(objective)(*embeddings, scale, image_ids=[1, 1, 2, 2, 3, 3])
    assert_close(value, PairLoss(objective)(*embeddings, [1, 1, 2, 2, 3, 3]))
    assert not torch.isclose(value, ClipLoss(objective)(*embeddings, scale))
    assert_close(ClipLoss(objective)(embeddings[0][::2], embeddings[1], scale, image_ids=[1, 2, 3], text_ids=[1, 1, 2, 2, 3, 3]),
          PairLoss(objective)(embeddings[0][::2], embeddings[1], [1, 2, 3], [1, 1, 2, 2, 3, 3]))  # fmt: skip


def test_clip_loss_has_signature_of_open_clip():
    made = {
        "local_loss": True,
        "gather_with_grad": True,
        "cache_labels": True,
        "rank": 0,
        "world_size": 1,
        "use_horovod": False,
    }
    assert list(inspect.signature(ClipLoss).parameters) == ["objective", *made]
    embeddings, log_scale = features()
    outputs = {
        "image_features": embeddings[0],
        "text_features": embeddings[1],
        "logit_scale": log_scale.exp(),
    }
    losses = ClipLoss(NTXent(), **made)(**outputs, output_dict=True)
    assert list(losses) == ["contrastive_loss"]
    assert_close(losses["contrastive_loss"], ClipLoss(NTXent())(*outputs.values()))


@pytest.mark.parametrize("objective", [Unified(), NTXent()], ids=str)
def test_clip_loss_serves_tasks_of_open_clip_4(objective):
    """A task passes all outputs of the model and adds the values whose names end in ``_loss``. A
    sharded scale has shape [1].
    """
    embeddings, log_scale = features()
    outputs = {
        "image_features": embeddings[0],
        "text_features": embeddings[1],
        "logit_scale": log_scale.exp()[None],
    }
    losses = ClipLoss(objective)(**outputs, output_dict=True)
    total = sum(value for name, value in losses.items() if name.endswith("_loss"))
    assert_close(total, ClipLoss(objective)(*embeddings, log_scale.exp()))


def test_clip_loss_rejects_unsupported_options():
    with pytest.raises(VisavisError, match=mentions("use_horovod", "torch.distributed")):
        ClipLoss(NTXent(), use_horovod=True)
    for objective in (NTXent(), Unified()):
        with pytest.raises(VisavisError, match=mentions("logit_bias", "ClipLoss(Sigmoid")):
            ClipLoss(objective)(*features()[0], 10.0, torch.tensor(-10.0))
    with pytest.raises(SpecError, match=mentions("logit_bias", "a Tensor of shape [2]")):
        ClipLoss(Sigmoid())(*features()[0], 10.0, torch.ones(2))
    with pytest.raises(SpecError, match="expected an objective"):
        ClipLoss("Unified()")


@pytest.mark.slow
@pytest.mark.filterwarnings(
    "ignore:The .grad attribute of a Tensor"
)  # raised by torch.compile for scales on a graph
@pytest.mark.parametrize(
    "objective", [NTXent(), pytest.param(Unified(gamma=5), marks=pytest.mark.long)], ids=str
)
def test_clip_loss_compiles(objective):
    embeddings, log_scale = features()
    torch._dynamo.reset()
    compiled, plain = (
        torch.compile(ClipLoss(objective), fullgraph=True, backend="eager"),
        ClipLoss(objective),
    )
    for ids in (None, torch.tensor([1, 1, 2, 2, 3, 3])):
        values = [loss(*embeddings, log_scale.exp(), image_ids=ids) for loss in (compiled, plain)]
        assert_close(*values)
        for mine, right in zip(
            *(torch.autograd.grad(value, (*embeddings, log_scale)) for value in values), strict=True
        ):
            assert_close(mine, right)


def test_clip_loss_checks_scale_at_call():
    with pytest.raises(SpecError, match=mentions("logit_scale", "a Tensor of shape [2]")):
        ClipLoss(NTXent())(*features()[0], torch.ones(2))
