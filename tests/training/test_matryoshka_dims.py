"""Training with Matryoshka dimensions: recipe keys, stored runs, and unchanged steps without them."""

import json

import pytest

import visavis
from visavis.core.errors import RecipeError, RunError
from visavis.training.recipes.files import read_recipe

SHORT = {"phases.0.epochs": 1, "phases.1.epochs": 1, "training.batches_per_epoch": 4}


def test_matryoshka_run_resumes_exactly(recipe, scenes, outcome, in_pieces, tmp_path):
    given = {"matryoshka_dims": [8, 2], **SHORT}
    visavis.train(recipe, data=scenes, out=tmp_path / "whole", overrides=given)
    assert in_pieces(recipe, tmp_path / "pieces", data=scenes, overrides=given) > 2
    assert outcome(tmp_path / "pieces") == outcome(tmp_path / "whole")
    assert json.loads((tmp_path / "whole" / "model" / "config.json").read_text())[
        "matryoshka_dims"
    ] == [2, 8, 16]
    assert read_recipe(tmp_path / "whole" / "run.toml", {}).matryoshka_dims == (8, 2)
    assert visavis.load(tmp_path / "whole").matcher.matryoshka_dims == (2, 8, 16)
    (tmp_path / "pieces" / "run.toml").write_text(
        (tmp_path / "pieces" / "run.toml").read_text().replace("    2,\n", "    4,\n", 1)
    )
    with pytest.raises(
        RunError, match=r"matryoshka_dims: expected .*2.* as at the start of the run, got .*4"
    ):
        visavis.train(resume=tmp_path / "pieces")


def test_full_dim_alone_changes_no_step(recipe, scenes, outcome, tmp_path):
    runs = [tmp_path / "none", tmp_path / "whole"]
    for run, widths in zip(runs, ([], [16]), strict=True):
        visavis.train(recipe, data=scenes, out=run, overrides={"matryoshka_dims": widths, **SHORT})
    plain, whole = (
        {key: value for key, value in outcome(run).items() if key != "config"} for run in runs
    )
    assert plain == whole
    assert "matryoshka_dims" not in json.loads((runs[0] / "model" / "config.json").read_text())
    assert visavis.load(runs[0]).matcher.matryoshka_dims == ()


def test_loss_is_sum_over_matryoshka_dims(recipe, scenes, tmp_path):
    """Both runs start with the same weights. The loss of identical embeddings is that of one
    dimension.
    """
    rows = {}
    for widths in ([], [4]):
        folder = visavis.train(
            recipe,
            data=scenes,
            out=tmp_path / str(len(widths)),
            overrides={"matryoshka_dims": widths, **SHORT},
        ).run
        rows[len(widths)] = json.loads((folder / "metrics.jsonl").read_text().splitlines()[0])
    assert rows[1]["rsum"] == rows[0]["rsum"]
    assert rows[1]["health"]["collapsed_loss"] == rows[0]["health"]["collapsed_loss"]
    assert rows[1]["health"]["loss"] == pytest.approx(rows[1]["train"]["loss"] / 2)
    assert rows[1]["train"]["loss"] > rows[0]["train"]["loss"]


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        (
            {"matryoshka_dims": [4, 17]},
            "matryoshka_dims: expected at most 16, the dimensions of this model, got 17.",
        ),
        (
            {"matryoshka_dims": [4], "model": "SCAN(embedding_dim=16, word_dim=8)"},
            "Remove matryoshka_dims, or use a model such as Heads.",
        ),
        (
            {
                "matryoshka_dims": [4],
                "phases.1.supervision": "OfflineNegativeSupervision(size=3)",
                "phases.1.objective": "AOQ()",
            },
            (
                "matryoshka_dims: OfflineNegativeSupervision supplies scores of full vectors only. "
                "Remove one of them."
            ),
        ),
        ({"matryoshka_dims": 4}, "matryoshka_dims: expected a list, got 4."),
        ({"matryoshka_dims": [0]}, "matryoshka_dims.0: expected an integer > 0, got 0."),
    ],
    ids=["too wide", "no cosines", "offline scores", "no list", "no width"],
)
def test_invalid_matryoshka_dims_are_rejected(recipe, scenes, tmp_path, given, sentence):
    with pytest.raises(RecipeError) as raised:
        visavis.train(recipe, data=scenes, out=tmp_path / "run", overrides=given)
    assert str(raised.value).endswith(sentence)
    assert not (tmp_path / "run").exists()
