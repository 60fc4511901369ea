"""VisavisLoss: a loss of sentence-transformers, on a real BERT of random weights."""

import copy
import importlib.util
import json
import pickle

import pytest
import torch
from tiny_models import sentences, tiny_sentence_transformer

from visavis import PairLoss
from visavis.engine import LearnedScale, cosine
from visavis.errors import RunError, ShapeError, SpecError, VisavisError
from visavis.integrations.metric_learning import MetricLoss
from visavis.integrations.sentence_transformers import LossCheckpoints, VisavisLoss, in_latex
from visavis.objectives import VLC, Goal, NTXent, Triplet, TripletHN, Unified
from visavis.targets import Targets

pytestmark = pytest.mark.skipif(importlib.util.find_spec("sentence_transformers") is None, reason="needs sentence-transformers")
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


def equal(ours, theirs):
    torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-11)


@every_objective
def test_labels_are_ids_and_without_them_rows_are_pairs(model, objective):
    loss, pair_loss = VisavisLoss(model, objective), PairLoss(objective)
    sides = (COLUMNS["anchor"], COLUMNS["positive"])
    by_ids, in_order = loss(features(model, *sides), IDS), loss(features(model, *sides), None)
    equal(by_ids, pair_loss(*embedded(model, *sides), IDS))
    equal(in_order, pair_loss(*embedded(model, *sides)))
    assert not torch.isclose(by_ids, in_order)
    reached = [
        gradient is not None and bool(gradient.any())
        for gradient in torch.autograd.grad(by_ids, list(model.parameters()), allow_unused=True)
    ]
    assert sum(reached) >= len(reached) - 2  # BERT's pooler, which the mean over words leaves out


@every_objective
@pytest.mark.parametrize("ids", [None, IDS[:8]], ids=["in order", "by label"])
def test_negatives_are_candidates_of_anchors_alone(model, objective, ids):
    columns = (COLUMNS["anchor"][:8], COLUMNS["positive"][:8], COLUMNS["positive"][8:], COLUMNS["anchor"][8:])
    value = VisavisLoss(model, objective)(features(model, *columns), ids)
    anchors, positives, *negatives = embedded(model, *columns)
    own = torch.arange(8) if ids is None else ids
    forth = objective.one_way(
        cosine(anchors, torch.cat([positives, *negatives])), Targets(query_ids=own, candidate_ids=torch.cat([own, torch.full((16,), -1)]))
    )
    back = objective.one_way(cosine(positives, anchors), Targets(query_ids=own, candidate_ids=own))
    equal(value, objective.reduce(forth, back))


def test_one_column_with_labels_is_compared_with_itself(model):
    value = VisavisLoss(model, Unified())(features(model, COLUMNS["anchor"]), IDS)
    equal(value, MetricLoss(Unified())(*embedded(model, COLUMNS["anchor"]), IDS))
    with pytest.raises(ShapeError, match=r"^VisavisLoss got one column without labels: add a column"):
        VisavisLoss(model, Unified())(features(model, COLUMNS["anchor"]), None)
    with pytest.raises(ShapeError, match=r"^labels has shape \[16\] and dtype torch.float32, expected one whole number"):
        VisavisLoss(model, Unified())(features(model, COLUMNS["anchor"]), torch.rand(16))


def test_the_scale_is_that_of_sentence_transformers(model):
    sides = (COLUMNS["anchor"], COLUMNS["positive"])
    value = VisavisLoss(model, NTXent(), scale=20.0)(features(model, *sides), None)
    equal(value, PairLoss(NTXent(tau=1 / 20))(*embedded(model, *sides)))


def test_it_stands_inside_a_loss_of_losses(model):
    from sentence_transformers.sentence_transformer.losses import MatryoshkaLoss

    sides = (COLUMNS["anchor"], COLUMNS["positive"])
    value = MatryoshkaLoss(model, VisavisLoss(model, Unified()), [32, 8])(features(model, *sides), IDS)
    whole = embedded(model, *sides)
    equal(value, sum(PairLoss(Unified())(*(side[:, :width] for side in whole), IDS) for width in (32, 8)))


def test_it_follows_the_model_into_evaluation(model):
    loss = VisavisLoss(model, Unified())
    for training in (False, True, False):
        model.train(training)
        loss(features(model, COLUMNS["anchor"], COLUMNS["positive"]), IDS)
        assert loss.loss.training is training


def test_a_model_card_can_name_it(model):
    loss = VisavisLoss(model, NTXent(tau=0.05), scale=torch.nn.Parameter(torch.tensor(20.0)))
    config = json.loads(json.dumps(loss.get_config_dict()))
    assert config == {"objective": repr(NTXent(tau=0.05)), "scale": 20.0, "similarity_fct": "cos_sim"}
    model.model_card_data.set_losses([loss])
    assert "loss:VisavisLoss" in model.model_card_data.tags
    assert model.model_card_data.citations["VisavisLoss"] == loss.citation
    for objective, source in {
        NTXent(): "source: COCOS, eq. 4",
        TripletHN(): "source: Faghri et al., VSE++ (2018), eq. 6; Unified loss",
    }.items():
        citation = VisavisLoss(model, objective).citation
        assert f"Objective {objective!r}; {source}".replace("_", r"\_") in citation
        assert citation.count("{") == citation.count("}")
        assert "Special" not in citation


def test_the_card_names_the_temperature_that_rules(model):
    asked = VisavisLoss(model, NTXent(tau=0.07), scale=25).get_config_dict()
    assert asked == {"objective": repr(NTXent(tau=0.04)), "scale": 25, "similarity_fct": "cos_sim"}
    learned = VisavisLoss(model, NTXent(tau=0.07), scale=LearnedScale(20.0)).get_config_dict()
    assert (learned["objective"], learned["scale"]) == (repr(NTXent(tau=0.05)), "learned, from 20")
    assert VisavisLoss(model, Unified()).get_config_dict()["objective"] == repr(Unified())


def test_a_citation_is_text_that_latex_takes():
    citation = VisavisLoss(torch.nn.Identity(), Goal(pair="sig_ms")).citation
    assert r"pair='sig\_ms'" in citation
    assert in_latex("50% of {a_b} & c#d $e ~f^g \\ <h>") == (
        r"50\% of \{a\_b\} \& c\#d \$e \textasciitilde{}f\textasciicircum{}g \textbackslash{} \textless{}h\textgreater{}"
    )


@every_objective
@pytest.mark.parametrize("size", [1, 5, 16, 99])
def test_mini_batches_change_neither_value_nor_gradient(model, objective, size):
    sides = (COLUMNS["anchor"], COLUMNS["positive"])
    whole, parts = (VisavisLoss(model, objective, mini_batch_size=each)(features(model, *sides), IDS) for each in (None, size))
    equal(parts, whole)
    given = [each for name, each in model.named_parameters() if "pooler" not in name]
    equal(torch.autograd.grad(parts, given), torch.autograd.grad(whole, given))


def test_mini_batches_meet_the_same_dropout_again(model):
    model.train()
    torch.manual_seed(3)
    loss = VisavisLoss(model, Unified(), mini_batch_size=4)
    value = loss(features(model, COLUMNS["anchor"], COLUMNS["positive"]), IDS)
    torch.manual_seed(3)
    drawn = [
        torch.cat([model({name: part[start : start + 4] for name, part in each.items() if isinstance(part, torch.Tensor)})["sentence_embedding"]
                   for start in range(0, 16, 4)])
        for each in features(model, COLUMNS["anchor"], COLUMNS["positive"])
    ]  # fmt: skip
    expected = PairLoss(Unified())(*drawn, IDS)
    equal(value, expected)
    given = [each for name, each in model.named_parameters() if "pooler" not in name]
    equal(torch.autograd.grad(value, given), torch.autograd.grad(expected, given))
    model.eval()


@pytest.mark.parametrize("size", [0, -1, True, 2.0, "4"])
def test_a_size_that_is_none_is_refused(model, size):
    with pytest.raises(SpecError, match=r"^VisavisLoss got mini_batch_size=.* expected a whole number above 0, or None for all at once\.$"):
        VisavisLoss(model, Unified(), mini_batch_size=size)


def test_features_that_have_no_row_for_each_input_are_refused(model):
    from sentence_transformers.sentence_transformer.losses import MatryoshkaLoss

    flat = {"input_ids": torch.zeros(7), "offsets": torch.zeros(3)}
    with pytest.raises(
        ShapeError, match=r"do not all have one row for each input, input_ids \[7\], offsets \[3\]: leave mini_batch_size out\.$"
    ):
        VisavisLoss(model, Unified(), mini_batch_size=2)([flat, flat])
    with pytest.raises(VisavisError, match=r"^VisavisLoss\(mini_batch_size=\) cannot stand inside MatryoshkaLoss"):
        MatryoshkaLoss(model, VisavisLoss(model, Unified(), mini_batch_size=2), [32, 8])(features(model, COLUMNS["anchor"]), IDS)


def test_a_loss_is_copied_and_pickled_as_any_module_is(model):
    loss = VisavisLoss(model, NTXent(), scale=LearnedScale(20.0))
    for other in (copy.deepcopy(loss), pickle.loads(pickle.dumps(loss))):
        value = other(features(model, COLUMNS["anchor"], COLUMNS["positive"]), IDS)
        equal(value, loss(features(model, COLUMNS["anchor"], COLUMNS["positive"]), IDS))


def test_errors_name_the_class_that_was_called(model):
    with pytest.raises(SpecError, match=r"^VisavisLoss got scale=tensor\(10\), of torch.int64, expected a number above 0"):
        VisavisLoss(model, NTXent(), scale=torch.tensor(10))
    with pytest.raises(SpecError, match=r"give VisavisLoss\(scale=\) only to NTXent, InfoNCE or Sigmoid"):
        VisavisLoss(model, Unified(), scale=20.0)
    with pytest.raises(SpecError, match=r"^VisavisLoss got 'Unified\(\)', expected an objective"):
        VisavisLoss(model, "Unified()")


def test_the_trainer_learns_the_scale_and_evaluates(tmp_path):
    pytest.importorskip("accelerate")
    data = pytest.importorskip("datasets").Dataset.from_dict(COLUMNS)
    from sentence_transformers import SentenceTransformerTrainer, SentenceTransformerTrainingArguments

    model, scale = tiny_sentence_transformer(), torch.nn.Parameter(torch.tensor(20.0))
    loss = VisavisLoss(model, NTXent(), scale=scale)
    quiet = {"report_to": [], "use_cpu": True, "disable_tqdm": True, "save_strategy": "no"}
    args = SentenceTransformerTrainingArguments(tmp_path, max_steps=3, learning_rate=0.01, per_device_train_batch_size=16, **quiet)
    trainer = SentenceTransformerTrainer(model, args, train_dataset=data, eval_dataset=data, loss=loss)
    before = trainer.evaluate()["eval_loss"]
    trainer.train()
    assert scale.item() != 20
    assert trainer.evaluate()["eval_loss"] < before


def test_a_learned_scale_is_resumed_with_the_model(tmp_path):
    pytest.importorskip("accelerate")
    data = pytest.importorskip("datasets").Dataset.from_dict(COLUMNS)
    from sentence_transformers import SentenceTransformerTrainer, SentenceTransformerTrainingArguments

    def trained(folder, steps, *, keep=True, **how):
        torch.manual_seed(0)
        model = tiny_sentence_transformer()
        loss = VisavisLoss(model, NTXent(), scale=LearnedScale(20.0))
        quiet = {"report_to": [], "use_cpu": True, "disable_tqdm": True, "save_strategy": "steps", "save_steps": 2}
        args = SentenceTransformerTrainingArguments(
            folder, max_steps=steps, learning_rate=0.01, lr_scheduler_type="constant", per_device_train_batch_size=16, **quiet
        )
        callbacks = [LossCheckpoints(loss)] if keep else []
        SentenceTransformerTrainer(model, args, train_dataset=data, loss=loss, callbacks=callbacks).train(**how)
        return loss.loss.scale().item()

    once = trained(tmp_path / "once", 4)
    trained(tmp_path / "twice", 2)
    assert trained(tmp_path / "twice", 4, resume_from_checkpoint=True) == once != 20
    trained(tmp_path / "without", 2, keep=False)
    with pytest.raises(
        RunError, match=r"visavis_loss\.safetensors is missing, so the scale cannot be resumed: the checkpoint was made without"
    ):
        trained(tmp_path / "without", 4, resume_from_checkpoint=True)
