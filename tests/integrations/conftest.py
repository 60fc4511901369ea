"""Adds the tiny models of the examples to the import path, also for the processes that a test
starts. A small index.
"""

import sys
from pathlib import Path

import pytest

import visavis

PROJECT = Path(__file__).parents[2]
sys.path += [
    str(folder) for folder in (PROJECT / "examples", PROJECT) if str(folder) not in sys.path
]


@pytest.fixture(scope="session")
def scene_index(dual_encoders, few_scenes, tmp_path_factory):
    """An index of the data set by a tiny CLIP."""
    folder = tmp_path_factory.mktemp("indexes") / "scenes"
    visavis.index(dual_encoders / "clip", few_scenes, out=folder)
    return folder
