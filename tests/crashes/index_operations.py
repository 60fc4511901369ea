"""Operations on an index and on its votes."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from tests.crashes.crash_states import read_tree, write_tree
from tests.crashes.operations import OPERATIONS, Operation
from tests.crashes.recording import temporary_folder
from tests.fixtures.recipes import write_recipe

import visavis
from visavis.core.errors import VisavisError
from visavis.data.synthetic import write_synthetic_scenes
from visavis.models.text_tower import (
    GRAPH_FILE,
    REASON_FILE,
    TOWERS_FOLDER,
    missing_reason,
    tower_folder,
)
from visavis.retrieval.calibrate.index_correction import read_correction_file
from visavis.retrieval.index_folder import CORRECTION_FILE
from visavis.retrieval.items import NO_FILTER
from visavis.retrieval.open_index import open_index
from visavis.retrieval.search import SearchQuery, search_collection

TEXT = "a red circle"
CORRECTION = "QueryBankNorm()"
LATE_BYTES = "200B"
PHOTOS = 8
View = dict[str, Any]


@cache
def inputs() -> Path:
    """Make a data set, a run and a run with other words, once for each process."""
    root = temporary_folder() / "index-inputs"
    root.mkdir()
    write_synthetic_scenes(
        root / "scenes",
        num_train=24,
        num_val=12,
        num_test=4,
        captions_per_image=2,
        size=32,
        seed=3,
    )
    write_recipe(root / "tiny.toml", model={"embedding_dim": 8})
    visavis.train(root / "tiny.toml", data=root / "scenes", out=root / "run")
    write_recipe(
        root / "late.toml",
        visual={"granularity": "regions"},
        model={"kind": "MaxSim", "embedding_dim": 16, "word_dim": 4},
    )
    visavis.train(root / "late.toml", data=root / "scenes", out=root / "late")
    visavis.index(root / "run", root / "scenes", out=root / "index")
    changes = {"epochs": 1}
    visavis.train(data=root / "scenes", index=root / "index", out=root / "words", overrides=changes)
    return root


def images() -> list[Path]:
    """Images of the data set."""
    return sorted((inputs() / "scenes" / "images").rglob("*.png"))


def copy_photos(folder: Path, chosen: Sequence[Path]) -> Path:
    """Copy images to the photos of an index."""
    photos = folder / "photos"
    photos.mkdir(exist_ok=True)
    for image in chosen:
        shutil.copy(image, photos)
    return photos


def make_index(folder: Path, count: int = PHOTOS) -> Path:
    """Index some photos."""
    photos = copy_photos(folder, images()[:count])
    visavis.index(inputs() / "run", photos, out=folder / "index")
    return folder / "index"


def view(folder: Path) -> View:
    """Everything that a reader sees of an index."""
    with closing(open_index(folder)) as index:
        index.store.verify()
        items, vectors = index.store.all_items()
        results = search_collection(index, SearchQuery.from_text(TEXT), top=50)
        scale = index.scale
        assert index.store.count(NO_FILTER) == len(items)
        return {
            "items": {
                item.key: (item.content, np.asarray(vector, np.float32))
                for item, vector in zip(items, vectors, strict=True)
            },
            "queries": index.manifest.query_model.fingerprint,
            "source": index.manifest.source,
            "probabilities": index.manifest.probabilities,
            "finished": not index.is_unfinished,
            "tower": _tower(folder, index.manifest.query_model.fingerprint),
            "correction": _correction(folder),
            "scale": None if scale is None else scale.fingerprint,
            "hits": {hit.key: (hit.score, hit.match_probability) for hit in results.hits},
        }


def _tower(folder: Path, fingerprint: str) -> int:
    """Size of the graph of a text tower, by which both precisions differ. 0: it is missing. -1: the
    command reported why.
    """
    tower = tower_folder(folder, fingerprint)
    if missing_reason(folder, fingerprint):
        return -1 if (tower / REASON_FILE).exists() else 0
    return (tower / GRAPH_FILE).stat().st_size


def _correction(folder: Path) -> tuple[object, ...]:
    """Settings and biases of the correction of an index."""
    if not (folder / CORRECTION_FILE).exists():
        return ()
    arrays, settings = read_correction_file(folder / CORRECTION_FILE)
    return settings.correction, settings.is_on, arrays["bias"]


def same(left: Any, right: Any) -> bool:
    """Whether two views are equal, except for rounding."""
    if isinstance(left, dict) and isinstance(right, dict):
        return left.keys() == right.keys() and all(same(left[key], right[key]) for key in left)
    if isinstance(left, tuple) and isinstance(right, tuple):
        return len(left) == len(right) and all(map(same, left, right))
    if isinstance(left, float | np.ndarray) and isinstance(right, float | np.ndarray):
        return np.shape(left) == np.shape(right) and np.allclose(left, right, atol=1e-4)
    return bool(left == right)


def difference(left: View, right: View) -> str:
    """Describe where two views differ."""
    return ", ".join(
        f"{name}: {str(left.get(name))[:300]} instead of {str(right.get(name))[:300]}"
        for name in left.keys() | right.keys()
        if not same(left.get(name), right.get(name))
    )


@dataclass
class IndexCase:
    """An operation on an index, and what may be seen after a stop.

    Attributes:
        make: Makes the state before the command.
        arguments: Words of the command for a folder.
        finish: Does the operation again, as the next writer.
        view: Makes the view of a reader.
        is_new: Whether the index does not exist before.
        is_gradual: Whether items change one after the other.
        between: More that may be seen after a stop.
    """

    make: Callable[[Path], object]
    arguments: Callable[[Path], Sequence[object]]
    finish: Callable[[Path], object]
    view: Callable[[Path], View] = view
    is_new: bool = False
    is_gradual: bool = False
    between: Callable[[IndexCase], list[View]] = lambda case: []
    old: View = field(default_factory=dict, init=False)
    new: View = field(default_factory=dict, init=False)

    def prepare(self, folder: Path) -> None:
        """Make the state before the command, and see what readers see before and after it."""
        self.make(folder)
        if not self.is_new:
            self.old = self.view(folder / "index")
        before = read_tree(folder)
        self.finish(folder)
        self.new = self.view(folder / "index")
        assert not same(self.old, self.new), "the operation changes nothing"
        write_tree(before, folder)

    def command(self, folder: Path) -> Sequence[str]:
        """The command on a folder."""
        return list(map(str, self.arguments(folder)))

    def check(self, folder: Path, acknowledged: str) -> None:
        """Read the index, then do the operation again."""
        self._check_read(folder, is_done=bool(acknowledged.strip()))
        self.finish(folder)
        seen = self.view(folder / "index")
        assert same(seen, self.new), f"after the next writer: {difference(seen, self.new)}"
        left = [
            path.name for name in ("*.part*", ".tmp*") for path in (folder / "index").rglob(name)
        ]
        assert not left, f"files of the stopped command stay: {left}"

    def _check_read(self, folder: Path, *, is_done: bool) -> None:
        try:
            seen = self.view(folder / "index")
        except VisavisError as error:
            if self.is_new and not is_done and "visavis index" in str(error):
                return
            raise
        if is_done and seen["tower"] == -1:
            # A text tower is optional, and its absence was reported.
            seen["tower"] = self.new["tower"]
        if is_done:
            assert same(seen, self.new), f"acknowledged, but {difference(seen, self.new)}"
        elif self.is_gradual:
            self._check_items(seen["items"])
        else:
            known = [self.old, self.new, *self.between(self)]
            assert any(same(seen, each) for each in known), (
                f"neither old ({difference(seen, self.old)}) nor new ({difference(seen, self.new)})"
            )

    def _check_items(self, items: View) -> None:
        """Each item is the old or the new one, and none that both have is missing."""
        old, new = self.old.get("items", {}), self.new["items"]
        for key in old.keys() & new.keys():
            assert key in items, f"{key} is lost"
        for key, item in items.items():
            assert any(same(item, known.get(key)) for known in (old, new)), f"{key} is another item"


def add(name: str, case: IndexCase) -> None:
    """Register an operation."""
    OPERATIONS.append(Operation(name, case.prepare, case.command, case.check))


def update(folder: Path) -> object:
    """Update the index of a folder."""
    return visavis.index(inputs() / "run", folder / "photos", out=folder / "index")


def _update_arguments(folder: Path) -> Sequence[object]:
    return ["visavis", "index", inputs() / "run", folder / "photos", "--out", folder / "index"]


def unsynced_update() -> Operation:
    """An update with a planted fault, which is not one of the operations."""

    def arguments(folder: Path) -> Sequence[object]:
        words = _update_arguments(folder)
        return ["python", "-m", "tests.crashes.index_commands", "unsynced", *words]

    case = IndexCase(_change_photos, arguments, update, is_gradual=True)
    return Operation("index: unsynced update", case.prepare, case.command, case.check)


def _compact_arguments(folder: Path) -> Sequence[object]:
    return ["python", "-m", "tests.crashes.index_commands", "compact", *_update_arguments(folder)]


def _on_index(*words: object) -> Callable[[Path], Sequence[object]]:
    """Arguments of a command of ``visavis indexes``."""
    return lambda folder: ["visavis", "indexes", words[0], folder / "index", *words[1:]]


def _copy_photos(folder: Path) -> None:
    copy_photos(folder, images()[:PHOTOS])


def _change_photos(folder: Path) -> None:
    make_index(folder)
    photos = folder / "photos"
    files = sorted(photos.iterdir())
    copy_photos(folder, images()[20:23])
    files[0].unlink()
    files[1].rename(photos / "moved.png")
    files[2].write_bytes(images()[25].read_bytes())


def _remove_photos(folder: Path, count: int) -> None:
    make_index(folder)
    for file in sorted((folder / "photos").iterdir())[:count]:
        file.unlink()


def _move_photos(folder: Path) -> None:
    make_index(folder)
    (folder / "photos").rename(folder / "moved")


def _without_tower(folder: Path) -> None:
    make_index(folder)
    shutil.rmtree(folder / "index" / TOWERS_FOLDER)


def _with_queries(folder: Path) -> None:
    index = make_index(folder)
    visavis.indexes_use_queries(index, inputs() / "words")


def _with_correction(folder: Path) -> None:
    index = make_index(folder)
    visavis.indexes_correct(index, CORRECTION)


def _update_with_correction(folder: Path) -> None:
    _with_correction(folder)
    copy_photos(folder, images()[20:23])


def _without_probabilities(folder: Path) -> None:
    visavis.indexes_calibrate(make_index(folder), "off")


def _late_index(folder: Path) -> None:
    photos = copy_photos(folder, images()[:PHOTOS])
    visavis.index(inputs() / "late", photos, out=folder / "index")


add("index: new", IndexCase(_copy_photos, _update_arguments, update, is_new=True, is_gradual=True))
add("index: update", IndexCase(_change_photos, _update_arguments, update, is_gradual=True))
add(
    "index: delete",
    IndexCase(lambda folder: _remove_photos(folder, 2), _update_arguments, update, is_gradual=True),
)
add(
    "index: compaction",
    IndexCase(
        lambda folder: _remove_photos(folder, 3), _compact_arguments, update, is_gradual=True
    ),
)
add(
    "index: prune",
    IndexCase(
        lambda folder: _remove_photos(folder, 6),
        _on_index("prune"),
        lambda folder: visavis.indexes_prune(folder / "index"),
        is_gradual=True,
    ),
)
add(
    "index: move",
    IndexCase(
        _move_photos,
        lambda folder: [*_on_index("move")(folder), folder / "moved"],
        lambda folder: visavis.indexes_move(folder / "index", folder / "moved"),
        is_gradual=True,
    ),
)
add("text tower: new", IndexCase(_without_tower, _update_arguments, update))
add(
    "text tower: 8 bits",
    IndexCase(
        make_index,
        _on_index("use-queries", "items", "--int8"),
        lambda folder: visavis.indexes_use_queries(folder / "index", "items", int8=True),
        # The model itself encodes texts while its text tower is replaced.
        between=lambda case: [case.old | {"tower": 0}],
    ),
)
add(
    "query model: new",
    IndexCase(
        make_index,
        lambda folder: _on_index("use-queries", inputs() / "words")(folder),
        lambda folder: visavis.indexes_use_queries(folder / "index", inputs() / "words"),
    ),
)
add(
    "query model: items",
    IndexCase(
        _with_queries,
        _on_index("use-queries", "items"),
        lambda folder: visavis.indexes_use_queries(folder / "index", "items"),
    ),
)
add(
    "correction: new",
    IndexCase(
        make_index,
        _on_index("correct", CORRECTION),
        lambda folder: visavis.indexes_correct(folder / "index", CORRECTION),
    ),
)
add(
    "correction: update",
    IndexCase(_update_with_correction, _update_arguments, update, is_gradual=True),
)
add(
    "correction: remove",
    IndexCase(
        _with_correction,
        _on_index("correct", "none"),
        lambda folder: visavis.indexes_correct(folder / "index", "none"),
    ),
)
add(
    "calibration: off",
    IndexCase(
        make_index,
        _on_index("calibrate", "off"),
        lambda folder: visavis.indexes_calibrate(folder / "index", "off"),
    ),
)
add(
    "calibration: captions",
    IndexCase(
        _without_probabilities,
        _on_index("calibrate", "captions"),
        lambda folder: visavis.indexes_calibrate(folder / "index", "captions"),
    ),
)
add(
    "index: compress",
    IndexCase(
        _late_index,
        _on_index("compress", LATE_BYTES),
        lambda folder: visavis.indexes_compress(folder / "index", LATE_BYTES),
    ),
)
