"""Runs and people: the scores of best models on the pairs that people judged."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from visavis.data.reading import find_source
from visavis.degrees import CATALOG
from visavis.errors import RunError
from visavis.evaluation.agreement import Agreement, agree, degrees_of_pairs
from visavis.evaluation.human_judgements import judgements_beside
from visavis.models.scoring import score_listed_pairs
from visavis.progress import Progress
from visavis.runs.folder import open_run, recipe_of
from visavis.spec import parse


@torch.inference_mode()
def agree_runs(folders: Sequence[Path], data: str | None, degrees: str | None, progress: Progress) -> list[Agreement]:
    """How far the best models of runs agree with the judgements that lie beside their data set, or beside ``data``.

    degrees: as a last row, how far these agree, told of an image by its first caption.

    Raises RunError without a run or for runs of different data, DataError without judgements or where they are of other images.
    """
    if not folders:
        raise RunError("there is no run to compare with people: name at least one run folder.")
    told_by = parse(degrees, CATALOG) if degrees else None
    scores: dict[str, dict[str, np.ndarray]] = {}
    known = ""
    for folder in folders:
        recipe = recipe_of(folder, data)
        data_module, matcher = open_run(folder, recipe, progress)
        split = data_module.data.split(recipe.evaluation.test)
        if known and split.fingerprint != known:
            raise RunError(f"{folder} is of other data than {folders[0]}: name the data set that people judged, for all runs, with --data.")
        known = split.fingerprint
        said = judgements_beside(find_source(recipe.data.path), split)
        visual, text = data_module.encode(matcher, split)
        for judged in said:
            pairs = torch.from_numpy(judged.images), torch.from_numpy(judged.captions)
            told = score_listed_pairs(matcher, visual, text, *pairs, memory=recipe.memory or None)
            scores.setdefault(judged.kind, {})[str(folder)] = told.double().numpy()
        progress.say(f"{folder}: scored {sum(len(judged.images) for judged in said):,} judged pairs")
    if told_by is not None:
        between = told_by.between(split)
        for judged in said:
            scores[judged.kind][f"degrees by {told_by!r}"] = degrees_of_pairs(judged, between)
    return [agreement for judged in said for agreement in agree(judged, scores[judged.kind])]
