"""VisavisLoss for sentence-transformers, with a BERT model of random weights."""

import copy
import importlib.util
import json
import pickle

import pytest
import torch
from tests.matching import mentions
from tiny_models import sentences, tiny_sentence_transformer

from visavis import PairLoss
from visavis.core.errors import RunError, ShapeError, SpecError, VisavisError
from visavis.integrations.pytorch_metric_learning import MetricLoss
from visavis.integrations.sentence_transformers import VisavisLoss, escape_latex
from visavis.losses.pair_loss import LearnedScale, cosine
from visavis.losses.targets import Targets
from visavis.objectives import VLC, Goal, NTXent, Triplet, TripletHN, Unified

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("sentence_transformers") is None, reason="needs sentence-transformers"
)
FAMILY = (Triplet(), TripletHN(), NTXent(), VLC(), Unified())
every_objective = pytest.mark.parametrize("objective", FAMILY, ids=str)
COLUMNS = sentences()
IDS = torch.tensor(COLUMNS["label"])


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    return tiny_sentence_transformer().double().eval()


def features(model, *columns):
    return [model.preprocess(texts) for texts in columns]


def embedded(model, *columns):
    return [model(each)["sentence_embedding"] for each in features(model, *columns)]


def assert_close(ours, theirs):
    torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-11)


@every_objective
def test_visavis_loss_uses_labels_as_ids(model, objective):
    loss, pair_loss = VisavisLoss(model, objective), PairLoss(objective)
    sides = (COLUMNS["anchor"], COLUMNS["positive"])
    by_ids, in_order = loss(features(model, *sides), IDS), loss(features(model, *sides), None)
    assert_close(by_ids, pair_loss(*embedded(model, *sides), IDS))
    assert_close(in_order, pair_loss(*embedded(model, *sides)))
    assert not torch.isclose(by_ids, in_order)
    reached = [
        gradient is not None and bool(gradient.any())
        for gradient in torch.autograd.grad(by_ids, list(model.parameters()), allow_unused=True)
    ]
    assert sum(reached) >= len(reached) - 2  # the mean over words does not use BERT's pooler


@every_objective
@pytest.mark.parametrize("ids", [None, IDS[:8]], ids=["in order", "by label"])
def test_visavis_loss_uses_negatives_for_anchors_only(model, objective, ids):
    columns = (
        COLUMNS["anchor"][:8],
        COLUMNS["positive"][:8],
        COLUMNS["positive"][8:],
        COLUMNS["anchor"][8:],
    )
    value = VisavisLoss(model, objective)(features(model, *columns), ids)
    anchors, positives, *negatives = embedded(model, *columns)
    anchor_ids = torch.arange(8) if ids is None else ids
    i2t = objective.one_way(
        cosine(anchors, torch.cat([positives, *negatives])),
        Targets(query_ids=anchor_ids, candidate_ids=torch.cat([anchor_ids, torch.full((16,), -1)])),
    )
    t2i = objective.one_way(
        cosine(positives, anchors), Targets(query_ids=anchor_ids, candidate_ids=anchor_ids)
    )
    assert_close(value, objective.reduce(i2t, t2i))


def test_visavis_loss_compares_one_labeled_column_with_itself(model):
    value = VisavisLoss(model, Unified())(features(model, COLUMNS["anchor"]), IDS)
    assert_close(value, MetricLoss(Unified())(*embedded(model, COLUMNS["anchor"]), IDS))
    with pytest.raises(ShapeError, match=mentions("column", "labels")):
        VisavisLoss(model, Unified())(features(model, COLUMNS["anchor"]), None)
    with pytest.raises(ShapeError, match=mentions("labels", "[16]", "torch.float32")):
        VisavisLoss(model, Unified())(features(model, COLUMNS["anchor"]), torch.rand(16))


def test_visavis_loss_applies_scale(model):
    sides = (COLUMNS["anchor"], COLUMNS["positive"])
    value = VisavisLoss(model, NTXent(), scale=20.0)(features(model, *sides), None)
    assert_close(value, PairLoss(NTXent(tau=1 / 20))(*embedded(model, *sides)))


def test_visavis_loss_works_inside_matryoshka_loss(model):
    from sentence_transformers.sentence_transformer.losses import MatryoshkaLoss

    sides = (COLUMNS["anchor"], COLUMNS["positive"])
    value = MatryoshkaLoss(model, VisavisLoss(model, Unified()), [32, 8])(
        features(model, *sides), IDS
    )
    whole = embedded(model, *sides)
    assert_close(
        value,
        sum(PairLoss(Unified())(*(side[:, :width] for side in whole), IDS) for width in (32, 8)),
    )


def test_visavis_loss_follows_model_mode(model):
    loss = VisavisLoss(model, Unified())
    for training in (False, True, False):
        model.train(training)
        loss(features(model, COLUMNS["anchor"], COLUMNS["positive"]), IDS)
        assert loss.loss.training is training


def test_visavis_loss_appears_in_model_card(model):
    loss = VisavisLoss(model, NTXent(tau=0.05), scale=torch.nn.Parameter(torch.tensor(20.0)))
    config = json.loads(json.dumps(loss.get_config_dict()))
    assert config == {
        "objective": repr(NTXent(tau=0.05)),
        "scale": 20.0,
        "similarity_fct": "cos_sim",
    }
    model.model_card_data.set_losses([loss])
    assert "loss:VisavisLoss" in model.model_card_data.tags
    assert model.model_card_data.citations["VisavisLoss"] == loss.citation
    for objective, source in {
        NTXent(): "source: COCOS, eq. 4",
        TripletHN(): "source: Faghri et al., VSE++ (2018), eq. 6",
    }.items():
        citation = VisavisLoss(model, objective).citation
        described = f"Objective {objective!r}; {source}"  # language: quoted
        assert described.replace("_", r"\_") in citation
        assert citation.count("{") == citation.count("}")
        assert "Special" not in citation


def test_visavis_loss_config_reports_effective_temperature(model):
    config = VisavisLoss(model, NTXent(tau=0.07), scale=25).get_config_dict()
    assert config == {"objective": repr(NTXent(tau=0.04)), "scale": 25, "similarity_fct": "cos_sim"}
    learned_config = VisavisLoss(
        model, NTXent(tau=0.07), scale=LearnedScale(20.0)
    ).get_config_dict()
    assert (learned_config["objective"], learned_config["scale"]) == (
        repr(NTXent(tau=0.05)),
        "learned, from 20",
    )
    assert VisavisLoss(model, Unified()).get_config_dict()["objective"] == repr(Unified())


def test_visavis_loss_citation_is_escaped_for_latex():
    citation = VisavisLoss(torch.nn.Identity(), Goal(pair="sig_ms")).citation
    assert r"pair='sig\_ms'" in citation
    assert escape_latex("50% of {a_b} & c#d $e ~f^g \\ <h>") == (
        r"50\% of \{a\_b\} \& c\#d \$e \textasciitilde{}f\textasciicircum{}g \textbackslash{} "
        r"\textless{}h\textgreater{}"
    )


@every_objective
@pytest.mark.parametrize("size", [1, 5, 16, 99])
def test_visavis_loss_mini_batches_match_full_batch(model, objective, size):
    sides = (COLUMNS["anchor"], COLUMNS["positive"])
    whole, parts = (
        VisavisLoss(model, objective, mini_batch_size=each)(features(model, *sides), IDS)
        for each in (None, size)
    )
    assert_close(parts, whole)
    parameters = [each for name, each in model.named_parameters() if "pooler" not in name]
    assert_close(torch.autograd.grad(parts, parameters), torch.autograd.grad(whole, parameters))


def test_visavis_loss_mini_batches_repeat_dropout(model):
    model.train()
    torch.manual_seed(3)
    loss = VisavisLoss(model, Unified(), mini_batch_size=4)
    value = loss(features(model, COLUMNS["anchor"], COLUMNS["positive"]), IDS)
    torch.manual_seed(3)
    expected_embeddings = [
        torch.cat([model({name: part[start : start + 4] for name, part in each.items() if isinstance(part, torch.Tensor)})["sentence_embedding"]
                   for start in range(0, 16, 4)])
        for each in features(model, COLUMNS["anchor"], COLUMNS["positive"])
    ]  # fmt: skip
    expected = PairLoss(Unified())(*expected_embeddings, IDS)
    assert_close(value, expected)
    parameters = [each for name, each in model.named_parameters() if "pooler" not in name]
    assert_close(torch.autograd.grad(value, parameters), torch.autograd.grad(expected, parameters))
    model.eval()


@pytest.mark.parametrize("size", [0, -1])
def test_visavis_loss_rejects_invalid_mini_batch_size(model, size):
    with pytest.raises(SpecError, match=mentions("mini_batch_size", repr(size))):
        VisavisLoss(model, Unified(), mini_batch_size=size)


def test_visavis_loss_mini_batches_reject_unsupported_features(model):
    from sentence_transformers.sentence_transformer.losses import MatryoshkaLoss

    flat = {"input_ids": torch.zeros(7), "offsets": torch.zeros(3)}
    with pytest.raises(
        ShapeError, match=mentions("input_ids [7]", "offsets [3]", "mini_batch_size")
    ):
        VisavisLoss(model, Unified(), mini_batch_size=2)([flat, flat])
    with pytest.raises(VisavisError, match=mentions("mini_batch_size", "MatryoshkaLoss")):
        MatryoshkaLoss(model, VisavisLoss(model, Unified(), mini_batch_size=2), [32, 8])(
            features(model, COLUMNS["anchor"]), IDS
        )


def test_visavis_loss_can_be_copied_and_pickled(model):
    loss = VisavisLoss(model, NTXent(), scale=LearnedScale(20.0))
    for other in (copy.deepcopy(loss), pickle.loads(pickle.dumps(loss))):
        value = other(features(model, COLUMNS["anchor"], COLUMNS["positive"]), IDS)
        assert_close(value, loss(features(model, COLUMNS["anchor"], COLUMNS["positive"]), IDS))


def test_visavis_loss_rejects_invalid_arguments(model):
    with pytest.raises(SpecError, match=mentions("scale", "tensor(10)", "torch.int64")):
        VisavisLoss(model, NTXent(), scale=torch.tensor(10))
    with pytest.raises(SpecError, match=mentions("scale", "NTXent, InfoNCE or Sigmoid")):
        VisavisLoss(model, Unified(), scale=20.0)
    with pytest.raises(SpecError, match=mentions("Unified()", "objective")):
        VisavisLoss(model, "Unified()")


def test_visavis_loss_trains_scale_with_trainer(tmp_path):
    pytest.importorskip("accelerate")
    data = pytest.importorskip("datasets").Dataset.from_dict(COLUMNS)
    from sentence_transformers import (
        SentenceTransformerTrainer,
        SentenceTransformerTrainingArguments,
    )

    model, scale = tiny_sentence_transformer(), torch.nn.Parameter(torch.tensor(20.0))
    loss = VisavisLoss(model, NTXent(), scale=scale)
    quiet = {"report_to": [], "use_cpu": True, "disable_tqdm": True, "save_strategy": "no"}
    args = SentenceTransformerTrainingArguments(
        tmp_path, max_steps=3, learning_rate=0.01, per_device_train_batch_size=16, **quiet
    )
    trainer = SentenceTransformerTrainer(
        model, args, train_dataset=data, eval_dataset=data, loss=loss
    )
    before = trainer.evaluate()["eval_loss"]
    trainer.train()
    assert scale.item() != 20
    assert trainer.evaluate()["eval_loss"] < before


@pytest.mark.slow
def test_trainer_saves_and_resumes_learned_scale(tmp_path):
    pytest.importorskip("accelerate")
    data = pytest.importorskip("datasets").Dataset.from_dict(COLUMNS)
    from sentence_transformers import (
        SentenceTransformerTrainer,
        SentenceTransformerTrainingArguments,
    )

    def trained(folder, steps, *, learned=True, **options):
        torch.manual_seed(0)
        model = tiny_sentence_transformer()
        loss = VisavisLoss(model, NTXent(), scale=LearnedScale(20.0) if learned else 20.0)
        quiet = {
            "report_to": [],
            "use_cpu": True,
            "disable_tqdm": True,
            "save_strategy": "steps",
            "save_steps": 2,
        }
        args = SentenceTransformerTrainingArguments(
            folder,
            max_steps=steps,
            learning_rate=0.01,
            lr_scheduler_type="constant",
            per_device_train_batch_size=16,
            **quiet,
        )
        SentenceTransformerTrainer(model, args, train_dataset=data, loss=loss).train(**options)
        return loss.loss.scale().item() if learned else 20.0

    once = trained(tmp_path / "once", 4)
    trained(tmp_path / "twice", 2)
    assert trained(tmp_path / "twice", 4, resume_from_checkpoint=True) == once != 20
    (tmp_path / "twice" / "checkpoint-4" / "visavis_loss.safetensors").unlink()
    with pytest.raises(RunError, match=mentions("visavis_loss.safetensors", "learned scale")):
        trained(tmp_path / "twice", 6, resume_from_checkpoint=True)
    trained(tmp_path / "fixed", 2, learned=False)
    assert not list((tmp_path / "fixed").glob("*/visavis_loss.safetensors"))
