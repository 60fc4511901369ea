"""A ``.npy`` or ``.npz`` with a single number instead of an array is one error in each reader of
features.
"""

from __future__ import annotations

import numpy as np
import pytest
from PIL import Image

from visavis.core import storage
from visavis.core.errors import DataError
from visavis.data.dataset_reader import check_dataset, open_dataset
from visavis.data.features.arrays import ArrayFeatures
from visavis.data.features.expert_store import RegionFeatures


@pytest.fixture
def dataset(tmp_path):
    Image.new("RGB", (8, 8)).save(tmp_path / "a.png")
    (tmp_path / "captions.csv").write_text("filename,caption\na.png,a dog\n")
    return open_dataset(tmp_path)


@pytest.mark.parametrize("value", [np.float32(3), np.int64(3), np.float64("nan")])
def test_number_instead_of_an_array_is_one_error(tmp_path, dataset, value):
    np.save(tmp_path / "features.npy", np.array(value))
    for items in ("image", "caption"):
        with pytest.raises(
            DataError,
            match=r"features\.npy: expected .* of one dimension or more, got .* of shape \(\)",
        ):
            ArrayFeatures.open(tmp_path / "features.npy", dataset, items)
    with pytest.raises(DataError, match=r"expected .*, got .* of shape \(\)"):
        storage.read_array(tmp_path / "features.npy", kinds="fiu", dimensions=1)


@pytest.mark.parametrize("suffix", ["npy", "npz"])
def test_number_instead_of_regions_is_one_error(tmp_path, suffix):
    (tmp_path / "regions").mkdir()
    file = tmp_path / "regions" / f"a.{suffix}"
    np.save(file, np.array(3.0)) if suffix == "npy" else np.savez(file, features=np.array(3.0))
    with pytest.raises(DataError, match=rf"a\.{suffix}"):
        RegionFeatures.open(tmp_path / "regions", lambda done, total: None)


def test_number_instead_of_precomputed_features_is_one_finding(tmp_path):
    np.save(tmp_path / "train_ims.npy", np.array(3.0))
    (tmp_path / "train_caps.txt").write_text("a dog\n")
    (finding,) = check_dataset(tmp_path).findings
    assert "train_ims.npy" in finding.message and "shape ()" in finding.message
