"""Names of devices: computable here, or one message."""

from __future__ import annotations

import pytest
import torch
from PIL import Image

import visavis
from visavis.cli import main
from visavis.core.errors import RunError
from visavis.models.device import choose_device

UNUSABLE = [
    "meta",
    "cuda:99",
    "xla",
    "vulkan",
    "hpu",
    "privateuseone",
    "opengl",
    "mkldnn",
    "lazy",
    "ipu",
]
"""Names that torch knows, for which it has no memory, no kernels or no module."""


@pytest.mark.parametrize("name", UNUSABLE)
def test_device_that_cannot_compute_is_rejected(name):
    with pytest.raises(
        RunError,
        match=rf"^training\.device: expected an available device, got {name}, .*\. Set it to auto or cpu\.$",
    ):
        choose_device(name, "training.device")


@pytest.mark.parametrize("name", ["cpu", "cpu:0", torch.device("cpu"), "auto", None])
def test_device_that_computes_is_accepted(name):
    assert choose_device(name).type in ("cpu", "cuda")


def test_load_and_index_report_meta_device(dual_encoders, tmp_path, monkeypatch, capsys):
    with pytest.raises(
        RunError,
        match=r"^device: expected an available device, got meta, on which torch cannot compute here",
    ):
        visavis.load(dual_encoders / "clip", device="meta")
    (tmp_path / "photos").mkdir()
    Image.new("RGB", (40, 40)).save(tmp_path / "photos" / "a.png")
    photos, model = str(tmp_path / "photos"), str(dual_encoders / "clip")
    monkeypatch.setattr(
        "sys.argv",
        [
            "visavis",
            "index",
            photos,
            "--model",
            model,
            "--out",
            str(tmp_path / "index"),
            "--device",
            "meta",
        ],
    )
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 1
    assert "got meta, on which torch cannot compute here" in " ".join(
        capsys.readouterr().err.split()
    )
