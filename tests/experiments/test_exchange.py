"""Exported files: TREC files give the same values in ir_measures. LaTeX and CSV hold the table."""

from __future__ import annotations

import csv
import io
from pathlib import Path

import ir_measures
import numpy as np
import pytest
import torch
from ir_measures import Success, nDCG

from visavis.core.encoded import DIRECTIONS, Encoded
from visavis.core.errors import RefusedOverwrite
from visavis.core.table_formats import escape_latex, format_csv, format_latex
from visavis.data.dataset import Dataset
from visavis.data.image_file import Image
from visavis.evaluation import Evaluation, Protocol, rank_scores
from visavis.evaluation.bootstrap import BOOTSTRAP_METRICS, bootstrap_images
from visavis.evaluation.metrics import ndcg_at
from visavis.evaluation.statistics import differences_from, paired_tests
from visavis.evaluation.trec import TrecRankings, top_candidates, write_trec
from visavis.research.experiments.setting_results import (
    CSV_COLUMNS,
    MeasurementConditions,
    SettingResults,
    indistinguishable_rows,
)
from visavis.training.evaluation.evaluate_dataset import evaluate_dataset, rank_dataset


def measure_with_ir_measures(folder: Path, tag: str, direction: str, measures) -> dict:
    """Measures that ir_measures computes from the files."""
    qrels = list(ir_measures.read_trec_qrels(str(folder / f"{direction}.qrels")))
    return ir_measures.calc_aggregate(
        measures, qrels, list(ir_measures.read_trec_run(str(folder / f"{tag}.{direction}.run")))
    )


def synthetic_retrieval(images=60, noise=1.6, decimals=None, seed=0):
    """Images with one to four captions in mixed order, and their vectors. Rounding makes ties."""
    random = torch.Generator().manual_seed(seed)
    numbers = torch.randint(1, 5, (images,), generator=random)
    image_of = torch.arange(images).repeat_interleave(numbers)
    image_of = image_of[torch.randperm(len(image_of), generator=random)]
    data = Dataset(
        "synthetic",
        tuple(Image(f"photo {i} 100%.jpg", "test") for i in range(images)),
        tuple(f"caption {i}" for i in range(len(image_of))),
        image_of.numpy(),
    )
    visual = torch.randn(images, 8, generator=random)
    text = visual[image_of] + noise * torch.randn(len(image_of), 8, generator=random)
    visual, text = (
        part if decimals is None else part.round(decimals=decimals) for part in (visual, text)
    )
    return data, Encoded(visual), Encoded(text)


def dot(visual, text):
    return visual.vectors @ text.vectors.T


@pytest.mark.parametrize("decimals", [None, 0], ids=["distinct scores", "many ties"])
@pytest.mark.parametrize("folds", [1, 3])
def test_trec_files_reproduce_recalls_and_ndcg_in_ir_measures(tmp_path, decimals, folds):
    data, visual, text = synthetic_retrieval(decimals=decimals)
    protocol = Protocol(name="test", description="", folds=folds)
    found = evaluate_dataset(visual, text, dot, data, [protocol])
    write_trec(tmp_path, "ours", rank_dataset(visual, text, dot, data, protocol))
    for direction, ranks in (("i2t", found.image_ranks), ("t2i", found.text_ranks)):
        theirs = measure_with_ir_measures(
            tmp_path, "ours", direction, [Success @ 1, Success @ 5, Success @ 10, nDCG @ 10]
        )
        for k in (1, 5, 10):
            assert theirs[Success @ k] == pytest.approx((ranks <= k).mean())
        if folds == 1:
            assert [100 * theirs[Success @ k] for k in (1, 5, 10)] == pytest.approx(
                [found.metrics[f"{direction}_r{k}"] for k in (1, 5, 10)]
            )
            scores = visual.vectors @ text.vectors.T
            relevance = (
                torch.arange(len(visual))[:, None] == torch.from_numpy(data.image_of)
            ).float()
            scores, relevance = (
                (scores, relevance) if direction == "i2t" else (scores.T, relevance.T)
            )
            assert theirs[nDCG @ 10] == pytest.approx(
                float(ndcg_at(scores, relevance, k=10).mean())
            )


def test_trec_files_reproduce_graded_ndcg_in_ir_measures(tmp_path):
    """Relevance 0 to 3 and few distinct scores: ties are broken against the model in both programs."""
    random = torch.Generator().manual_seed(0)
    scores, relevance = (torch.randint(0, high, (30, 150), generator=random) for high in (6, 4))
    queries, candidates = (
        [f"{what}{i}" for i in range(number)] for what, number in (("q", 30), ("c", 150))
    )
    found = relevance.nonzero()
    relevant = torch.cat([found, relevance[found[:, 0], found[:, 1], None]], 1)
    order, values = top_candidates(scores, relevance)
    rankings = TrecRankings(
        order.numpy(), values.numpy(), relevant.numpy(), tuple(queries), tuple(candidates)
    )
    lists = dict.fromkeys(DIRECTIONS, rankings)
    write_trec(tmp_path, "graded", lists)
    theirs = measure_with_ir_measures(tmp_path, "graded", "t2i", [nDCG @ 5, nDCG @ 20, nDCG @ 100])
    for k in (5, 20, 100):
        assert theirs[nDCG @ k] == pytest.approx(
            float(ndcg_at(scores.float(), relevance.float(), k=k).mean())
        )


def test_trec_files_by_hand(tmp_path):
    data = Dataset(
        "two",
        (Image("a b.jpg", "test"), Image("c.jpg", "test")),
        ("one", "two", "three"),
        np.array([1, 0, 1]),
    )
    matrix = torch.tensor([[0.5, 0.5, -0.25], [0.1, 0.3, 0.2]])
    items = Encoded(torch.arange(2)), Encoded(torch.arange(3))
    lists = rank_dataset(
        *items,
        lambda v, t: matrix[v.vectors][:, t.vectors],
        data,
        Protocol(name="plain", description=""),
    )
    paths = write_trec(tmp_path, "VLC(tau=0.1), seed 0", lists)
    assert [path.name for path in paths] == [
        "VLC_tau=0.1_seed_0.i2t.run",
        "VLC_tau=0.1_seed_0.t2i.run",
        "i2t.qrels",
        "t2i.qrels",
    ]
    run, _, qrels, _ = (path.read_text().splitlines() for path in paths)
    tag = "VLC(tau=0.1),%20seed%200"
    assert run == [
        f"a%20b.jpg Q0 c.jpg#0 1 0.5 {tag}",
        f"a%20b.jpg Q0 a%20b.jpg#0 2 0.49999997 {tag}",
        f"a%20b.jpg Q0 c.jpg#1 3 -0.25 {tag}",
        f"c.jpg Q0 a%20b.jpg#0 1 0.300000012 {tag}",
        f"c.jpg Q0 c.jpg#1 2 0.200000003 {tag}",
        f"c.jpg Q0 c.jpg#0 3 0.100000001 {tag}",
    ]
    assert qrels == ["a%20b.jpg 0 a%20b.jpg#0 1", "c.jpg 0 c.jpg#0 1", "c.jpg 0 c.jpg#1 1"]


def test_top_candidates_decrease_strictly_despite_ties():
    random = torch.Generator().manual_seed(0)
    scores = torch.randint(0, 9, (20, 300), generator=random) / 8 - 0.5
    scores[0] = 0
    scores[1, :3] = torch.tensor([torch.inf, torch.inf, 1e38])
    relevance = torch.randint(0, 2, scores.shape, generator=random)
    order, values = top_candidates(scores, relevance)
    assert order.shape == (20, 100)
    assert (values.diff(dim=1) < 0).all()
    assert values.isfinite().all()
    taken = torch.zeros_like(scores, dtype=torch.bool).scatter(1, order, True)
    assert (
        scores.masked_fill(~taken, torch.inf).amin(1)
        >= scores.masked_fill(taken, -torch.inf).amax(1)
    ).all()
    for row, candidates in zip((scores - relevance * 0.01)[2:], order[2:], strict=True):
        assert (row[candidates].diff() <= 0).all()  # less relevant candidates come first among ties
    assert torch.allclose(values[2:], scores.gather(1, order)[2:], atol=1e-4)


def test_write_trec_never_overwrites_files(tmp_path):
    data, visual, text = synthetic_retrieval()
    protocol = Protocol(name="plain", description="")
    lists = rank_dataset(visual, text, dot, data, protocol)
    write_trec(tmp_path, "ours", lists)
    before = {path: path.read_bytes() for path in tmp_path.iterdir()}
    # A stopped call is completed: equal files stay, and the missing one is written.
    (tmp_path / "ours.t2i.run").unlink()
    write_trec(tmp_path, "ours", lists)
    assert {path: path.read_bytes() for path in tmp_path.iterdir()} == before
    (tmp_path / "ours.i2t.run").write_text("other results\n")
    with pytest.raises(RefusedOverwrite, match=r"ours\.i2t\.run already exists"):
        write_trec(tmp_path, "ours", lists)
    (tmp_path / "ours.i2t.run").write_bytes(before[tmp_path / "ours.i2t.run"])
    write_trec(tmp_path, "again", lists)
    other, *items = synthetic_retrieval(seed=1)
    with pytest.raises(
        RefusedOverwrite, match=r"i2t\.qrels holds judgments of other queries\. Nothing was changed"
    ):
        write_trec(tmp_path, "other", rank_dataset(*items, dot, other, protocol))
    assert {path: path.read_bytes() for path in before} == before
    assert len(list(tmp_path.iterdir())) == 6


def evaluations(mean, spread=1.0, seeds=4):
    """Evaluations of several seeds of one setting."""

    def of_seed(seed) -> Evaluation:
        random = torch.Generator().manual_seed(seed)
        ids = torch.arange(40)
        signal = mean + spread * 0.1 * torch.randn(1, generator=random)
        return rank_scores(signal * torch.eye(40) + torch.randn(40, 40, generator=random), ids, ids)

    return [of_seed(seed) for seed in range(seeds)]


@pytest.fixture(scope="module")
def results():
    return {
        'Goal(pair="sig_ms")': evaluations(4.0),
        "Unified": evaluations(3.9),
        "Triplet": evaluations(1.0),
    }


def table_of(results):
    """Table of the evaluations of each row."""
    return SettingResults.from_runs(
        {
            name: [(run.metrics, MeasurementConditions.from_evaluation(run)) for run in runs]
            for name, runs in results.items()
        }
    )


def compare_rows_with(results, best):
    """Paired tests of every row against one, for each metric."""
    rows = {
        metric: {
            name: {seed: run.metrics[metric] for seed, run in enumerate(runs)}
            for name, runs in results.items()
        }
        for metric in BOOTSTRAP_METRICS
    }
    return {metric: differences_from(paired_tests(values), best) for metric, values in rows.items()}


def test_latex_marks_best_and_indistinguishable_rows(results):
    table, alike = (
        table_of(results),
        {
            metric: indistinguishable_rows(pairs)
            for metric, pairs in compare_rows_with(results, 'Goal(pair="sig_ms")').items()
        },
    )
    text = format_latex(table.table(similar=alike), "comparison")
    lines = {
        line.split(" &")[0].strip(): line for line in text.splitlines() if line.endswith(r"\\")
    }
    goal, unified, triplet = (
        lines[name] for name in (r'Goal(pair="sig\_ms")', "Unified", "Triplet")
    )
    spread = table.rows[0].spread("rsum")
    assert (
        rf"$\mathbf{{{table.rows[0].mean('rsum'):.1f}}}$ {{\scriptsize {spread.low:.1f}--{spread.high:.1f}}} \\"
        in goal
    )
    assert rf"${table.rows[1].mean('rsum'):.1f}^{{\dagger}}$ {{\scriptsize " in unified
    assert "dagger" not in triplet
    assert "mathbf" not in triplet
    assert text.count("{") == text.count("}")
    assert text.count(r"\begin{") == text.count(r"\end{") == 2
    assert {line.count("&") for line in (goal, unified, triplet, lines["chance"])} == {7}
    assert r"4 seeds" in text
    assert r"$\dagger$: not distinguishable" in text
    assert "dagger" not in format_latex(table.table(), "comparison")


def test_escape_latex_escapes_every_special_character():
    assert escape_latex(r"a_b & 5% {x} #1 $2 ~ ^ \ <tag>") == (
        r"a\_b \& 5\% \{x\} \#1 \$2 \textasciitilde{} \textasciicircum{} \textbackslash{} "
        r"\textless{}tag\textgreater{}"
    )
    assert escape_latex("1.0 ± 0.2, −3, γ") == r"1.0 $\pm$ 0.2, $-$3, $\gamma$"


def test_csv_holds_every_statistic_of_the_table(results):
    table, best = table_of(results), 'Goal(pair="sig_ms")'
    pairs = compare_rows_with(results, best)
    bootstrap = bootstrap_images(
        {
            name: {seed: run.query_ranks for seed, run in enumerate(runs)}
            for name, runs in results.items()
        },
        num_samples=200,
    )
    lines = list(
        csv.DictReader(io.StringIO(format_csv(table.statistics_table(pairs, [bootstrap]))))
    )
    assert list(lines[0]) == list(CSV_COLUMNS)
    assert [(line["row"], line["metric"]) for line in lines] == [
        (name, metric) for name in results for metric in BOOTSTRAP_METRICS
    ]
    by_key = {(line["row"], line["metric"]): line for line in lines}
    line, pair = by_key["Triplet", "rsum"], pairs["rsum"]["Triplet"]
    assert float(line["mean"]) == table.rows[2].mean("rsum")
    assert float(line["low"]) < float(line["mean"]) < float(line["high"])
    assert (line["reference"], line["verdict"], int(line["tests"])) == (best, "lower", 3)
    assert [float(line[key]) for key in ("difference", "difference_low", "adjusted_p")] == [
        pair.difference,
        pair.interval.low,
        pair.adjusted_p,
    ]
    assert float(line["images_low"]) == bootstrap.difference("Triplet", best, "rsum").interval.low
    assert by_key[best, "rsum"]["reference"] == ""
    assert next(csv.DictReader(io.StringIO(format_csv(table.statistics_table()))))["verdict"] == ""
