"""Corrections for hubs: laws, values by hand, and the name of a correction in results."""

from __future__ import annotations

import json
import shutil

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

import visavis
from visavis import cli
from visavis.core.encoded import Vectors
from visavis.core.errors import DataError, RunError, SpecError, VisavisError
from visavis.core.progress import NoProgress
from visavis.evaluation import evaluate
from visavis.evaluation.protocols import get_protocol
from visavis.evaluation.query_ranks import read_query_ranks, write_query_ranks
from visavis.evaluation.tiled_ranking import rank_by_rows
from visavis.losses.corrections import (
    CATALOG,
    CSLS,
    CorrectedScore,
    DualSoftmax,
    InvertedSoftmax,
    QueryBank,
    QueryBankNorm,
    parse_correction,
)
from visavis.losses.scoring import score_direction
from visavis.losses.targets import Targets
from visavis.research.experiments.setting_results import MeasurementConditions, SettingResults
from visavis.training.runs.evaluate_runs import exclude_texts

from .matching import mentions

EVERY = pytest.mark.parametrize("kind", CATALOG)


def random_scores(queries: int, candidates: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(queries, candidates, generator=generator) / 10


def ranking(scores: torch.Tensor) -> list[list[int]]:
    return scores.argsort(dim=1, descending=True, stable=True).tolist()


def dot(visual, text):
    return visual @ text.T


@pytest.fixture
def items():
    """Unit vectors of images, captions, training images and training captions."""
    generator = torch.Generator().manual_seed(1)
    return [
        Vectors(torch.nn.functional.normalize(torch.randn(count, 8, generator=generator), dim=1))
        for count in (30, 60, 40, 80)
    ]


@EVERY
def test_equal_bank_scores_change_no_ranking(kind):
    scores = random_scores(20, 12)
    bias = kind().fit([torch.full((7, 12), 0.3)])
    assert ranking(bias.correct(scores)) == ranking(scores)


@EVERY
@pytest.mark.parametrize("size", [1, 3, 50])
def test_correction_of_blocks_equals_that_of_all(kind, size):
    bank, scores = random_scores(50, 12, seed=1), random_scores(20, 12)
    whole, parts = kind().fit([bank]), kind().fit(bank.split(size))
    torch.testing.assert_close(parts.correct(scores), whole.correct(scores))


@EVERY
def test_correction_ignores_the_order_of_the_bank(kind):
    bank, scores = random_scores(50, 12, seed=1), random_scores(20, 12)
    shuffled = kind().fit([bank[torch.randperm(50)]])
    torch.testing.assert_close(shuffled.correct(scores), kind().fit([bank]).correct(scores))


@EVERY
def test_correction_ignores_a_constant(kind):
    """A constant that is added to all scores, of bank and queries."""
    bank, scores = random_scores(50, 12, seed=1).double(), random_scores(20, 12).double()
    moved = kind().fit([bank + 3]).correct(scores + 3)
    assert ranking(moved) == ranking(kind().fit([bank]).correct(scores))


@pytest.mark.parametrize("kind", [InvertedSoftmax, DualSoftmax, QueryBankNorm])
def test_softmax_ignores_a_repeated_bank(kind):
    """CSLS does not: more of its nearest queries are the same."""
    bank, scores = random_scores(50, 12, seed=1), random_scores(20, 12)
    repeated = kind().fit([bank] * 3)
    torch.testing.assert_close(repeated.correct(scores), kind().fit([bank]).correct(scores))


def test_inverted_softmax_ranks_as_the_softmax_over_queries():
    bank, scores = random_scores(50, 12, seed=1).double(), random_scores(20, 12).double()
    probabilities = (scores / 0.05).exp() / (bank / 0.05).exp().sum(0)
    corrected = InvertedSoftmax().fit([bank]).correct(scores)
    torch.testing.assert_close(corrected / 0.05, probabilities.log() + np.log(50))


def test_dual_softmax_equals_the_product_of_both():
    """Up to a factor of each query, which changes no ranking."""
    scores = random_scores(20, 12).double()
    product = (scores / 0.01).softmax(1) * (scores / 0.01).softmax(0)
    corrected = DualSoftmax().fit([scores]).correct(scores)
    difference = product.log() - 2 * corrected / 0.01
    torch.testing.assert_close(difference, difference[:, :1].expand(-1, 12))
    assert ranking(product) == ranking(corrected)


def test_csls_equals_values_by_hand():
    scores = torch.tensor([[0.8, 0.6, 0.1], [0.7, 0.2, 0.0], [0.9, 0.5, 0.4]])
    # Means of the two largest scores of each column, halved: 0.85, 0.55 and 0.25.
    corrected = CSLS(k=2).fit([scores]).correct(scores)
    expected = [[0.375, 0.325, -0.025], [0.275, -0.075, -0.125], [0.475, 0.225, 0.275]]
    np.testing.assert_allclose(corrected, expected, atol=1e-7)
    # 2 s - r_query - r_candidate, as in the paper: 0.7 and 0.85 are means of the first row and column.
    assert pytest.approx(2 * corrected[0, 0].item() - 0.7) == 2 * 0.8 - 0.7 - 0.85


def test_query_bank_norm_corrects_queries_of_hubs_only():
    bank = torch.tensor([[0.9, 0.1, 0.2], [0.8, 0.3, 0.1]])  # the first candidate is the only hub
    scores = torch.tensor([[0.7, 0.6, 0.1], [0.5, 0.6, 0.1]])
    bias = QueryBankNorm(temperature=0.1).fit([bank])
    assert bias.is_hub.tolist() == [True, False, False]
    log_mean = 0.1 * (bank.double() / 0.1).exp().mean(0).log()
    torch.testing.assert_close(
        bias.correct(scores), torch.stack([scores[0] - log_mean, scores[1].double()])
    )


def test_query_bank_norm_finds_the_best_k():
    bank = torch.tensor([[0.9, 0.1, 0.2]])
    hubs = [QueryBankNorm(k=k).fit([bank]).is_hub.tolist() for k in (1, 2, 9)]
    assert hubs == [[True, False, False], [True, False, True], [True, True, True]]


def test_equally_good_hub_counts():
    bias = QueryBankNorm().fit([torch.tensor([[0.1, 0.9]])])
    scores = torch.tensor([[0.5, 0.5]])
    assert not torch.equal(bias.correct(scores), scores.double())


@EVERY
def test_correction_rejects_an_empty_bank(kind):
    with pytest.raises(DataError, match=mentions("bank", "at least one query")):
        kind().fit([])


@EVERY
def test_correction_is_parsed_from_its_text(kind):
    assert parse_correction(repr(kind())) == parse_correction(kind.__name__) == kind()


def test_wrong_corrections_name_the_mistake():
    with pytest.raises(SpecError, match="QueryBankNorm"):
        parse_correction("QueryBankNrm")
    with pytest.raises(SpecError, match=mentions("temperature", "> 0", "0")):
        InvertedSoftmax(temperature=0)


@EVERY
@pytest.mark.parametrize("memory", ["64KiB", None])
def test_evaluation_equals_corrected_matrices(items, kind, memory):
    """Ranks from blocks of any size equal those of whole matrices, for both kinds of banks."""
    visual, text, bank_visual, bank_text = items
    ids = np.arange(30), np.arange(60) // 2
    scores = dot(visual.vectors, text.vectors)
    for bank in (None, QueryBank("bank", bank_text, bank_visual)):
        result = evaluate(visual, text, CorrectedScore(dot, kind(), bank), *ids, memory=memory)
        bank_t2i = scores.T if bank is None else dot(bank_text.vectors, visual.vectors)
        bank_i2t = scores if bank is None else dot(bank_visual.vectors, text.vectors)
        by_texts = kind().fit([bank_t2i]).correct(scores.T)
        by_images = kind().fit([bank_i2t]).correct(scores)
        own = by_texts[torch.arange(60), ids[1]]
        # The tie of a text with its own image counts once.
        assert result.text_ranks.tolist() == (by_texts >= own[:, None] - 1e-9).sum(1).tolist()
        others = by_images.masked_fill(torch.from_numpy(ids[1] == ids[0][:, None]), -torch.inf)
        best = by_images.masked_fill(torch.from_numpy(ids[1] != ids[0][:, None]), -torch.inf)
        expected = 1 + (others >= best.amax(1, keepdim=True)).sum(1)
        assert result.image_ranks.tolist() == expected.tolist()


def test_fixed_bank_does_not_see_other_queries(items):
    """The rank of a query does not depend on the other queries. A transductive one does."""
    visual, text, _, bank_text = items
    targets = Targets(query_ids=np.arange(60) // 2, candidate_ids=np.arange(30))

    def ranks(bank, queries):
        score = CorrectedScore(dot, InvertedSoftmax(), bank)
        ranked = rank_by_rows(visual, text[queries], score, targets[queries], "t2i")
        return ranked.positive_ranks.tolist()

    bank, few = QueryBank("bank", bank_text), slice(0, 5)
    assert ranks(bank, few) == ranks(bank, slice(None))[:5]
    assert ranks(None, few) != ranks(None, slice(None))[:5]


def test_bank_of_texts_leaves_image_queries_uncorrected(items):
    visual, text, _, bank_text = items
    ids = np.arange(30), np.arange(60) // 2
    score = CorrectedScore(dot, CSLS(), QueryBank("80 texts", bank_text))
    result, plain = (evaluate(visual, text, each, *ids) for each in (score, dot))
    assert result.image_ranks.tolist() == plain.image_ranks.tolist()
    assert result.text_ranks.tolist() != plain.text_ranks.tolist()
    assert result.correction == "CSLS(k=10) over 80 texts (fixed-bank, text to image only)"


def test_equal_images_stay_ties():
    """A collapsed model has no rank below the number of images, whatever the correction."""
    visual, text = Vectors(torch.ones(50, 4)), Vectors(torch.ones(50, 4))
    for kind in CATALOG:
        result = evaluate(visual, text, CorrectedScore(dot, kind(), None), range(50), range(50))
        assert set(result.text_ranks.tolist()) == {50}


def test_correction_reaches_other_rankings(items):
    visual, text, bank_visual, bank_text = items
    score = CorrectedScore(dot, CSLS(), QueryBank("bank", bank_text, bank_visual))
    expected = CSLS().fit([dot(bank_text.vectors, visual.vectors)])
    torch.testing.assert_close(
        score_direction(score, visual, text, "t2i"),
        expected.correct(dot(text.vectors, visual.vectors)),
    )


def test_result_names_its_correction(items, tmp_path):
    visual, text, *_ = items
    score = CorrectedScore(dot, QueryBankNorm(), None)
    result = evaluate(visual, text, score, range(30), np.arange(60) // 2)
    name = "QueryBankNorm(temperature=0.05, k=1) over test queries (transductive)"
    assert result.to_json()["protocol"] == f"plain + {name}"
    assert result.to_json()["correction"] == result.records()[0]["correction"] == name
    assert get_protocol(result.protocol) is get_protocol("plain")
    assert "transductive" in str(MeasurementConditions.from_evaluation(result))
    write_query_ranks(tmp_path / "ranks.safetensors", result.query_ranks_by_protocol)
    assert read_query_ranks(tmp_path / "ranks.safetensors").keys() == {f"plain + {name}"}
    plain = evaluate(visual, text, dot, range(30), np.arange(60) // 2)
    assert "correction" not in plain.to_json()


def test_table_rejects_results_with_other_corrections(items):
    visual, text, _, bank_text = items
    scores = [
        dot,
        CorrectedScore(dot, CSLS(), None),
        CorrectedScore(dot, CSLS(), QueryBank("80 texts", bank_text)),
    ]
    results = [evaluate(visual, text, score, range(30), np.arange(60) // 2) for score in scores]
    measured = [(each.metrics, MeasurementConditions.from_evaluation(each)) for each in results]
    for other in measured[1:]:
        with pytest.raises(RunError, match=mentions("one protocol", "CSLS")):
            SettingResults.from_runs({"a": [measured[0]], "b": [other]})
    with pytest.raises(RunError, match=mentions("transductive", "fixed-bank")):
        SettingResults.from_runs({"a": [measured[1]], "b": [measured[2]]})


def test_test_queries_leave_the_bank():
    bank = ["A dog.", "a  DOG.", "a cat"]
    assert exclude_texts(bank, ["a dog."], NoProgress()) == ["a cat"]
    with pytest.raises(DataError, match=mentions("--bank", "queries")):
        exclude_texts(bank[:2], ["a dog."], NoProgress())


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run on a few synthetic scenes."""
    from visavis.data.synthetic import write_synthetic_scenes

    root = tmp_path_factory.mktemp("corrections")
    scenes = write_synthetic_scenes(
        root / "scenes", num_train=40, num_val=8, num_test=20, captions_per_image=2, size=32
    )
    overrides = {"epochs": 1, "model.embedding_dim": 8}
    return visavis.train("demo", data=scenes, overrides=overrides, out=root / "run").run


def test_evaluate_corrects_a_run(run, tmp_path):
    plain = visavis.evaluate(run)
    bank = tmp_path / "bank.txt"
    bank.write_text("\n".join(["a red star", *plain_captions(run)]))
    names = []
    for source in ("train", bank, "queries"):
        result = visavis.evaluate(
            run, correction=CSLS(), bank=source, trec=tmp_path / str(len(names))
        )
        names.append(result.correction.removeprefix("CSLS(k=10) over "))
        assert result.text_ranks.tolist() != plain.text_ranks.tolist()
    assert names == [
        "80 captions and 40 images of train (fixed-bank)",
        "1 texts (fixed-bank, text to image only)",
        "test queries (transductive)",
    ]
    assert [file.name for file in (tmp_path / "2").glob("*.t2i.run")] == [
        "run+CSLS-transductive.t2i.run"
    ]


@pytest.mark.slow
def test_evaluate_corrects_an_ensemble_and_its_coherence(run, tmp_path):
    """Two equal members give the result of one."""
    shutil.copytree(run, tmp_path / "copy")
    bank = tmp_path / "bank.txt"
    bank.write_text("a red star\na blue circle above a square")
    options = {
        "correction": "InvertedSoftmax",
        "section": "Coherence(relevance='SceneRelevance()')",
    }
    for source in ("train", bank):
        one, both = (
            visavis.evaluate(runs, bank=source, **options)
            for runs in (run, [run, tmp_path / "copy"])
        )
        assert both.text_ranks.tolist() == one.text_ranks.tolist()
        assert both.correction == one.correction
        assert both.sections[0].metrics == pytest.approx(one.sections[0].metrics)
        plain = visavis.evaluate(run, section="Coherence(relevance='SceneRelevance()')")
        assert both.sections[0].metrics != pytest.approx(plain.sections[0].metrics)


def plain_captions(run) -> tuple[str, ...]:
    from visavis.data.dataset_reader import open_dataset

    return open_dataset(run.parent / "scenes").split("test").captions


def test_evaluate_command_prints_the_correction(run):
    def evaluate_by_command(*options):
        return CliRunner().invoke(cli.app, ["evaluate", str(run), *options])

    printed = evaluate_by_command("--correction", "CSLS(k=3)", "--bank", "queries")
    assert "CSLS(k=3) over test queries (transductive)" in " ".join(printed.output.split())
    values = evaluate_by_command("--correction", "CSLS", "--json", "-q").stdout
    assert json.loads(values)["correction"].endswith("of train (fixed-bank)")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"bank": "train"}, ["--bank", "--correction"]),
        ({"correction": "CSLS", "bank": "test"}, ["--bank queries", "transductive"]),
        ({"correction": "CSLS", "bank": "nowhere"}, ["nowhere"]),
        ({"correction": "CSLS", "bank": "missing.txt"}, ["missing.txt"]),
    ],
)
def test_evaluate_rejects_wrong_banks(run, options, words):
    with pytest.raises(VisavisError, match=mentions(*words)):
        visavis.evaluate(run, **options)
