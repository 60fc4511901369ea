"""Training of VSRN with its caption decoder."""

import subprocess
import sys

import pytest

import visavis

GIVEN = {
    "model": "VSRN(embedding_dim=8, word_dim=6, reasoning_steps=1, caption_loss_weight=1.0, decoder_dim=8)",
    "phases.0.epochs": 1,
    "phases.1.epochs": 1,
    "training.batches_per_epoch": 4,
}


@pytest.mark.slow
def test_generative_run_resumes_exactly_and_loads(recipe, scenes, outcome, in_pieces, tmp_path):
    trained = visavis.train(recipe, data=scenes, out=tmp_path / "whole", overrides=GIVEN)
    assert in_pieces(recipe, tmp_path / "pieces", data=scenes, overrides=GIVEN) > 2
    assert outcome(tmp_path / "pieces") == outcome(tmp_path / "whole")
    assert visavis.evaluate(tmp_path / "pieces").metrics == trained.test.metrics


def test_weights_are_learned_without_scores_of_all_parts(recipe, scenes, tmp_path):
    overrides = GIVEN | {
        "phases.0.supervision": "LearnedWeights()",
        "phases.0.objective": "Unified()",
        "training.batches_per_epoch": 1,
    }
    assert (
        visavis.train(recipe, data=scenes, out=tmp_path / "run", overrides=overrides).best_step >= 0
    )


def test_run_loads_in_a_process_that_imports_visavis_alone(recipe, scenes, tmp_path):
    overrides = GIVEN | {"training.workers": 1, "training.batches_per_epoch": 1}
    run = visavis.train(recipe, data=scenes, out=tmp_path / "run", overrides=overrides).run
    program = f"import visavis; print(visavis.load({str(run)!r}).matcher)"
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert done.stdout.startswith("VSRN(")
