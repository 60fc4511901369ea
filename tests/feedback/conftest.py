"""The scenes of the retrieval tests, and a run that trains on them for one epoch."""

import pytest
from tests.retrieval.conftest import RECIPE, scenes

import visavis

__all__ = ["scenes"]


@pytest.fixture(scope="session")
def run(scenes, tmp_path_factory):
    folder = tmp_path_factory.mktemp("briefly")
    (folder / "brief.toml").write_text(RECIPE.replace("epochs = 40", "epochs = 1"))
    return visavis.train(folder / "brief.toml", data=scenes, out=folder / "run").run
