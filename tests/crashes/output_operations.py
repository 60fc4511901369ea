"""Operations that write results, caches and settings."""

from __future__ import annotations

import hashlib
import pickle
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tests.crashes.crash_states import read_tree, write_tree
from tests.crashes.operations import OPERATIONS, Operation
from tests.crashes.recording import temporary_folder
from tests.crashes.run_operations import inputs as run_inputs
from tests.fixtures.recipes import write_recipe

import visavis
from visavis.api.catalog_entries import catalog_entries
from visavis.core import storage
from visavis.data.features.store import FeatureStore

MODEL_SETTINGS = '# my model\nmodel = "another"\n\n[later]\nkey = 1  # kept\n'


@cache
def inputs() -> Path:
    """Make a run, once for each process."""
    root = temporary_folder() / "output-inputs"
    root.mkdir()
    scenes = run_inputs() / "scenes"
    write_recipe(root / "tiny.toml", data={"path": str(scenes)})
    torch.set_num_threads(1)
    visavis.train(root / "tiny.toml", out=root / "run")
    return root


@cache
def dual_encoder() -> Path:
    """Make a tiny dual encoder, once for each process."""
    from tests.dual_encoder_kinds import write_dual_encoder

    return write_dual_encoder("siglip2-fixed", temporary_folder() / "siglip")


@dataclass
class OutputCase:
    """A command that writes a result.

    Attributes:
        arguments: Arguments of ``visavis`` for a folder.
        finish: Does the same again in this process.
        view: Returns the content of the result.
        output: Name of the result in the folder, which is there completely or not at all. Empty: it
            is written in parts, or hidden in a cache.
        make: Makes the state before the command.
        is_slow: Whether a check only tries that the command would start, because it takes seconds.
    """

    arguments: Callable[[Path], Sequence[object]]
    finish: Callable[[Path], object]
    view: Callable[[Path], Any]
    output: str = ""
    make: Callable[[Path], object] = lambda _: None
    is_slow: bool = False
    new: Any = field(default=None, init=False)

    def prepare(self, folder: Path) -> None:
        """Make the state before the command, and see the result."""
        torch.set_num_threads(1)
        self.make(folder)
        before = read_tree(folder)
        self.finish(folder)
        self.new = self.view(folder)
        write_tree(before, folder)

    def command(self, folder: Path) -> Sequence[str]:
        """The command on a folder."""
        return ["visavis", *map(str, self.arguments(folder))]

    def check(self, folder: Path, acknowledged: str) -> None:
        """See the result, or make it."""
        torch.set_num_threads(1)
        is_done = bool(acknowledged.strip())
        is_there = bool(self.output) and (folder / self.output).exists()
        if is_done or is_there:
            assert self.view(folder) == self.new, "another result"
        if not is_there and self.is_slow:
            storage.prepare_empty_folder(folder / self.output, will_be_replaced=True)
        elif not is_there:
            self.finish(folder)
            assert self.view(folder) == self.new, "another result of the next command"


def contents(folder: Path) -> dict[str, str]:
    """Hash of each file of a folder."""
    return {
        path.relative_to(folder).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and ".part" not in str(path)
    }


def add(name: str, case: OutputCase, **options: Any) -> None:
    """Register an operation."""
    OPERATIONS.append(Operation(name, case.prepare, case.command, case.check, **options))


def _scenes() -> Path:
    return run_inputs() / "scenes"


def _view_store(folder: Path) -> dict[str, Any]:
    (store,) = (path.parent for path in folder.rglob("features.json"))
    opened = FeatureStore.open(store)
    vectors = opened.read(opened.rows(opened.keys)).vectors
    assert isinstance(vectors, torch.Tensor)
    return {"keys": opened.keys, "vectors": vectors.tolist()}


REGIONS: dict[str, Any] = {"visual": "scenes", "granularity": "regions"}
add(
    "features: --out",
    OutputCase(
        lambda folder: [
            *("features", _scenes(), "--visual", "scenes", "--granularity", "regions"),
            *("--out", folder / "features"),
        ],
        lambda folder: visavis.features(_scenes(), **REGIONS, out=folder / "features"),
        lambda folder: _view_store(folder / "features"),
    ),
)
add(
    "features: cache",
    OutputCase(
        lambda _: ["features", _scenes(), "--visual", "scenes", "--granularity", "regions"],
        lambda _: visavis.features(_scenes(), **REGIONS),
        lambda folder: _view_store(folder / "cache"),
    ),
    is_long=True,
)


def _mine(folder: Path) -> object:
    return visavis.data_mine(inputs() / "run", out=folder / "mined" / "negatives.safetensors")


add(
    "mine",
    OutputCase(
        lambda folder: [
            *("data", "mine", inputs() / "run"),
            *("--out", folder / "mined" / "negatives.safetensors"),
        ],
        _mine,
        lambda folder: storage.tensors_hash(
            storage.read_tensors(folder / "mined" / "negatives.safetensors")
        ),
        output="mined/negatives.safetensors",
    ),
)


def _evaluate(folder: Path, **options: Any) -> Any:
    return visavis.evaluate(inputs() / "run", **options).to_json()


CORRECTION = {"correction": "QueryBankNorm()", "bank": "train"}
add(
    "evaluate: --correction",
    OutputCase(
        lambda _: [
            *("evaluate", inputs() / "run"),
            *("--correction", CORRECTION["correction"], "--bank", "train"),
        ],
        lambda folder: _evaluate(folder, **CORRECTION),
        lambda folder: _evaluate(folder, **CORRECTION),
    ),
    is_long=True,
)
add(
    "evaluate: --trec",
    OutputCase(
        lambda folder: ["evaluate", inputs() / "run", "--trec", folder / "trec"],
        lambda folder: _evaluate(folder, trec=folder / "trec"),
        lambda folder: contents(folder / "trec"),
    ),
)


def _view_settings(folder: Path) -> str:
    return (folder / "config" / "settings.toml").read_text()


def _write_settings(folder: Path) -> None:
    (folder / "config").mkdir()
    (folder / "config" / "settings.toml").write_text(MODEL_SETTINGS)


def _check_settings(case: OutputCase, folder: Path, acknowledged: str) -> None:
    text = _view_settings(folder)
    assert text in ((case.new,) if acknowledged.strip() else (MODEL_SETTINGS, case.new)), text
    case.finish(folder)
    assert _view_settings(folder) == case.new


def _add_settings() -> None:
    case = OutputCase(
        lambda _: ["indexes", "default-model", dual_encoder()],
        lambda _: visavis.indexes_default_model(dual_encoder()),
        _view_settings,
        make=_write_settings,
    )
    OPERATIONS.append(
        Operation(
            "settings: default model",
            case.prepare,
            case.command,
            lambda folder, acknowledged: _check_settings(case, folder, acknowledged),
            is_long=True,
        )
    )


_add_settings()
add(
    "catalog: cache",
    OutputCase(
        lambda _: ["catalog", "objectives"],
        lambda _: catalog_entries("objectives"),
        lambda _: catalog_entries("objectives"),
    ),
)


def _add_export(kind: Any) -> None:
    add(
        f"export: {kind}",
        OutputCase(
            lambda folder: [
                *("export", inputs() / "run", "--format", kind, "--out", folder / "exported"),
            ],
            lambda folder: visavis.export(inputs() / "run", format=kind, out=folder / "exported"),
            lambda folder: _view_export(folder / "exported"),
            output="exported",
            is_slow=True,
        ),
        is_long=True,
        limit=30,
    )


def _view_export(folder: Path) -> Any:
    # Graphs hold names that differ from call to call.
    sizes = {path.name: path.stat().st_size for path in folder.rglob("*") if path.is_file()}
    assert all(sizes.values())
    return sorted(sizes), (folder / "README.md").read_text()


for _kind in ("onnx", "torch-export"):
    _add_export(_kind)


@cache
def _video_features() -> list[Path]:
    """Make published features and captions of videos, as pickles."""
    folder = temporary_folder() / "video-features"
    folder.mkdir()
    videos = [f"video{number}" for number in range(4)]
    features = {video: np.full((2, 3), number, np.float32) for number, video in enumerate(videos)}
    captions = {video: [["a", "dog", video]] for video in videos}
    for name, content in {"i3d": features, "raw-captions": captions}.items():
        (folder / f"{name}.pkl").write_bytes(pickle.dumps(content, 4))
    for name, split in {"train": videos[:2], "val": videos[2:3], "test": videos[3:]}.items():
        (folder / f"{name}_list_full.txt").write_text("\n".join(split))
    return sorted(folder.iterdir())


add(
    "data: convert",
    OutputCase(
        lambda folder: ["data", "convert", *_video_features(), "--out", folder / "converted"],
        lambda folder: visavis.data_convert(_video_features(), folder / "converted"),
        lambda folder: contents(folder / "converted"),
        output="converted",
    ),
)
SIZES = {"num_train": 4, "num_val": 2, "num_test": 2, "size": 32}
add(
    "data: scenes",
    OutputCase(
        lambda folder: [
            *("data", "scenes", "--out", folder / "made"),
            *(f"--{name.replace('_', '-')}={size}" for name, size in SIZES.items()),
        ],
        lambda folder: visavis.data_scenes(folder / "made", **SIZES),
        lambda folder: contents(folder / "made"),
        output="made",
    ),
)
