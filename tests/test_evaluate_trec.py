"""TREC files of ``visavis evaluate``: ir_measures computes the metrics of the evaluation from them."""

import ir_measures
import pytest
from ir_measures import AP, RR, Rprec, Success

import visavis
from visavis.core.errors import RefusedOverwrite
from visavis.evaluation import Protocol, protocols

MEASURES = {"r1": Success @ 1, "r5": Success @ 5, "r10": Success @ 10}


def measured(folder, run, direction, measures=MEASURES):
    """Measures of ir_measures in percent."""
    qrels = list(ir_measures.read_trec_qrels(str(folder / f"{direction}.qrels")))
    ranked = list(ir_measures.read_trec_run(str(folder / f"{run}.{direction}.run")))
    values = ir_measures.calc_aggregate(measures.values(), qrels, ranked)
    return {f"{direction}_{name}": 100 * values[measure] for name, measure in measures.items()}


def test_trec_files_of_evaluate_give_its_metrics(dual_encoders, scenes, tmp_path):
    folder = tmp_path / "trec"
    result = visavis.evaluate(dual_encoders / "clip", data=scenes, trec=folder)
    assert sorted(path.name for path in folder.iterdir()) == [
        "clip.i2t.run",
        "clip.t2i.run",
        "i2t.qrels",
        "t2i.qrels",
    ]
    for direction, ranks in (("i2t", result.image_ranks), ("t2i", result.text_ranks)):
        theirs = measured(folder, "clip", direction)
        assert theirs == pytest.approx({key: result.metrics[key] for key in theirs})
        # 12 images and 36 captions are within the 100 candidates of a run file, so measures of all
        # ranks agree, too.
        whole = measured(folder, "clip", direction, {"mrr": RR, "r_precision": Rprec})
        assert whole[f"{direction}_mrr"] == pytest.approx(100 * (1 / ranks).mean())
        assert whole[f"{direction}_r_precision"] / 100 == pytest.approx(
            result.metrics[f"{direction}_r_precision"]
        )
        assert 0 < measured(folder, "clip", direction, {"map": AP})[f"{direction}_map"] < 100


def test_trec_files_of_several_protocols_and_models(dual_encoders, scenes, tmp_path, monkeypatch):
    first = Protocol(name="first-captions", description="", captions_per_image=1)
    monkeypatch.setattr(protocols, "CATALOG", (*protocols.CATALOG, first))
    models, trec = [dual_encoders / "clip", dual_encoders / "siglip"], tmp_path / "trec"
    result = visavis.evaluate(models, data=scenes, trec=trec, protocol=["plain", "first-captions"])
    for name, evaluation in result.by_protocol.items():
        theirs = measured(trec / name, "clip+siglip", "t2i")
        assert theirs == pytest.approx({key: evaluation.metrics[key] for key in theirs})
    # Files of a stopped call are completed, others stay.
    (run, *others) = sorted((trec / "plain").glob("*.run"))
    content = run.read_text()
    run.unlink()
    visavis.evaluate(models, data=scenes, trec=trec / "plain")
    assert run.read_text() == content
    others[0].write_text("of another model")
    with pytest.raises(RefusedOverwrite, match="already exists"):
        visavis.evaluate(models, data=scenes, trec=trec / "plain")
