"""Stop anywhere, go on exactly: everything a run needs to continue, in one folder that appears whole or not at all.

A checkpoint holds the state in the run, the weights, the best weights so far, the optimizer's and the supervision's
state, and the log up to here, each with a hash of its content. The last two are kept: a process killed while one is
written leaves those before it, and one that is damaged later is passed over for the one before it, in words. Random numbers
need no state: every step draws from a seed of (run, step).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field
from torch import Tensor

from visavis import storage
from visavis.errors import RunError
from visavis.progress import Progress, Silent
from visavis.training.run_files import LogRow

KEPT = 2
"""Checkpoints of a run that are kept."""
STATE_FILES = ("state.json", "place.json")
"""The file that makes a checkpoint complete, and its name in older runs."""
LOG, HASHES = "metrics.jsonl", "hashes.json"
TENSORS = ("weights", "best", "optimizer", "supervision")
"""The files of tensors, each with its hash in it; ``HASHES`` has those of the others."""

Count = Annotated[int, Field(ge=0)]


@dataclass
class TrainerState:
    """Where a run is. phase, epoch (of the phase), batch (the next one of the epoch), step (of the run), phase_step.

    best_rsum, best_step: the best validation so far. stale: validations since then. seconds, pairs: of training so far.
    loss_sum, loss_steps: of the steps since the last validation. done: nothing is left to train.
    """

    phase: Count = 0
    epoch: Count = 0
    batch: Count = 0
    step: Count = 0
    phase_step: Count = 0
    best_rsum: float = -1.0
    best_step: int = -1
    stale: Count = 0
    seconds: float = 0.0
    pairs: Count = 0
    loss_sum: float = 0.0
    loss_steps: Count = 0
    done: bool = False


@dataclass(frozen=True)
class Checkpoint:
    """All of a run at one time; tensors by name. folder: where it was read."""

    state: TrainerState
    weights: dict[str, Tensor]
    best: dict[str, Tensor]
    optimizer: dict[str, Tensor]
    supervision: dict[str, Tensor]
    log: list[dict[str, Any]]
    folder: Path | None = None

    def write(self, folder: Path) -> None:
        """Write as ``step-<n>`` into the folder of a run's checkpoints, then remove all but the last two."""
        newest = _free(folder / f"step-{self.state.step:08d}")
        with storage.replacing_folder(newest) as part:
            for name in TENSORS:
                storage.write_tensors(part / f"{name}.safetensors", getattr(self, name))
            storage.write_json_lines(part / LOG, self.log)
            storage.write_json(part / STATE_FILES[0], asdict(self.state))
            storage.write_json(part / HASHES, {name: storage.content_hash(part / name) for name in (LOG, STATE_FILES[0])})
        for older in set(folder.glob("step-*")) - set(complete(folder)[-KEPT:]):
            storage.remove_folder(older)

    @classmethod
    def read(cls, folder: Path, like: Mapping[str, Tensor] | None = None) -> Checkpoint:
        """The checkpoint in a folder. like: what its weights must fit. Raises RunError if anything in it is not as it was written."""
        if (folder / HASHES).exists():
            for name, written in storage.read_json(folder / HASHES, dict[str, str], error=RunError).items():
                if storage.content_hash(folder / name, limit=storage.MAX_BYTES, error=RunError) != written:
                    raise RunError(f"{folder / name} is damaged: it is not what was written.")
        state_file = next(file for name in STATE_FILES if (file := folder / name).exists())
        fits = {"weights": like, "best": like}
        tensors = {name: storage.read_tensors(folder / f"{name}.safetensors", fits.get(name), error=RunError) for name in TENSORS}
        return cls(
            storage.read_json(state_file, TrainerState, error=RunError),
            log=storage.read_json_lines(folder / LOG, LogRow, error=RunError),
            folder=folder,
            **tensors,
        )

    @classmethod
    def latest(
        cls,
        folder: Path,
        progress: Progress | None = None,
        like: Mapping[str, Tensor] | None = None,
        check: Callable[[Checkpoint], None] | None = None,
    ) -> Checkpoint | None:
        """The newest checkpoint of a run's that can be used; None if there is none yet.

        Says what is wrong with each that is passed over. like: as in ``read``. check: raises RunError for one that does not fit the
        run. Raises RunError if there are some and none can be used.
        """
        wrong: list[RunError] = []
        for path in reversed(complete(folder)):
            try:
                checkpoint = cls.read(path, like)
                if check is not None:
                    check(checkpoint)
            except RunError as error:
                wrong.append(error)
                continue
            for reason in wrong:
                (progress or Silent()).say(f"{reason} The checkpoint before it is taken, {path.name}.")
            return checkpoint
        if wrong:
            raise wrong[0]
        return None

    @property
    def matches_its_name(self) -> bool:
        """Whether the folder is named by the step of the state in it."""
        return self.folder is not None and self.folder.name.startswith(f"step-{self.state.step:08d}")

    def remove_newer(self) -> None:
        """Remove the checkpoints that were passed over for this one, once a run goes on from here."""
        assert self.folder is not None
        for path in complete(self.folder.parent):
            if path > self.folder:
                storage.remove_folder(path)


def complete(folder: Path) -> list[Path]:
    """The complete checkpoints, oldest first."""
    return sorted(path for path in folder.glob("step-*") if any((path / name).exists() for name in STATE_FILES))


def _free(target: Path) -> Path:
    """``target``, or after others of the same step ``target-b``, ``target-c``: the newest is the last by name."""
    last = max((path.name for path in target.parent.glob(f"{target.name}*")), default="")
    if not last:
        return target
    return target.with_name(f"{target.name}-{'b' if last == target.name else chr(ord(last[-1]) + 1)}")
