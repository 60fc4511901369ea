"""What an index learns from the data that its model was validated on: how likely a score is a match."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import numpy as np
import torch

from visavis import storage
from visavis.errors import MissingExtra, VisavisError
from visavis.models.retriever import Retriever
from visavis.progress import Progress, Silent
from visavis.retrieval.calibration import Calibration, fit_calibration
from visavis.retrieval.index import of_width, read_manifest
from visavis.runs.folder import open_run, recipe_of


def learn_calibration(run: str | Path, index: Path, progress: Progress) -> Calibration | None:
    """Fit how likely a score is a match on the validation split of a run, and keep it with an index, unless that was done.

    None, and a sentence, where that cannot be: for a model without a run, or one whose data are not here.
    """
    file = index / Calibration.file
    if (known := storage.kept(file, Calibration)) is not None:
        return known
    if not (Path(run) / "run.toml").is_file():
        progress.say("How likely a result is a match is not shown: that is learned from the validation data of a trained run.")
        return None
    try:
        recipe = recipe_of(Path(run))
        scores, relevant = scores_of(Path(run), recipe.evaluation.validation, read_manifest(index).width)
        calibration = fit_calibration(scores, relevant)
    except (VisavisError, MissingExtra) as error:
        progress.say(f"How likely a result is a match is not shown: {error}")
        return None
    storage.keep(file, asdict(calibration))
    return calibration


def scores_of(run: Path, split: str, width: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """The cosines of all captions of a split with all of its images ``[texts, images]``, and which belong together.

    width: how many first numbers of vectors are compared, where the model was trained for it.
    """
    data_module, matcher = open_run(run, recipe_of(run), Silent())
    part = data_module.data.split(split)
    visual, text = data_module.encode(matcher, part)
    model = of_width(Retriever(matcher, data_module.processor), width)
    scores = model.unit_rows(text) @ model.unit_rows(visual).T
    return scores, torch.from_numpy(part.image_of)[:, None] == torch.from_numpy(np.arange(len(part.images)))
