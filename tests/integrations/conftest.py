"""Adds the tiny models of the examples to the import path, also for the processes that a test
starts. A small index.
"""

import sys
from pathlib import Path

import pytest

import visavis
from visavis.data.synthetic import write_synthetic_scenes

PROJECT = Path(__file__).parents[2]
sys.path += [
    str(folder) for folder in (PROJECT / "examples", PROJECT) if str(folder) not in sys.path
]


@pytest.fixture(scope="session")
def scenes(tmp_path_factory):
    """A data set of twenty images with two captions each."""
    sizes = {"num_train": 12, "num_val": 4, "num_test": 4, "captions_per_image": 2, "size": 32}
    return write_synthetic_scenes(tmp_path_factory.mktemp("world") / "scenes", **sizes)


@pytest.fixture(scope="session")
def scene_index(dual_encoders, scenes, tmp_path_factory):
    """An index of the data set by a tiny CLIP."""
    folder = tmp_path_factory.mktemp("indexes") / "scenes"
    visavis.index(dual_encoders / "clip", scenes, out=folder)
    return folder
