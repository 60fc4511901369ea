"""The best model of a run on a split, of its own data or of others, or those of several runs together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from visavis.errors import RunError
from visavis.evaluation import Evaluation
from visavis.evaluation.of_data import evaluate_data, read_by
from visavis.evaluation.protocols import all_named
from visavis.memory import Memory
from visavis.models.average import Average, joined
from visavis.models.base import Matcher, evaluating
from visavis.models.encoding import device_of
from visavis.models.scoring import score_from_cpu
from visavis.progress import Progress
from visavis.runs.ensemble import agreed, check_same_captions, ensemble_of, recipes_of
from visavis.runs.folder import open_peer, open_run
from visavis.runs.published import beside_published
from visavis.runs.zero_shot import pretrained_of
from visavis.training.data_module import first_images
from visavis.types import Encoded


def evaluate_runs(
    folders: Sequence[Path],
    protocol: str | Sequence[str] | None,
    split: str | None,
    data: str | None,
    progress: Progress,
    degrees: str | None = None,
    semantics: str = "reference",
    memory: Memory = None,
    *,
    average: bool | None = None,
    images: int = 0,
) -> Evaluation:
    """The best model of a run on a split, of its own data or of others; of several runs, by the mean of their scores.

    Each model encodes what it reads itself. average: both networks of a run; None: as its recipe says. images: the first so many of
    the split; 0: all. Raises RunError for an average of a run that trained one network, for runs that are evaluated by different rules
    where none are given, and on different captions.
    """
    recipes = recipes_of(folders, data, memory)
    split = agreed(recipes, "evaluation.test", split)
    own = data is None and all(recipe.evaluation.test == split for recipe in recipes.values())
    rules = all_named(agreed(recipes, "evaluation.protocol", protocol or (None if own else "plain")))
    degrees = agreed(recipes, "evaluation.degrees", degrees)

    opened = {folder: open_run(folder, recipe, progress) for folder, recipe in recipes.items()}
    splits = {folder: read_by(first_images(data_module.data.split(split), images), rules) for folder, (data_module, _) in opened.items()}
    check_same_captions(splits)
    matchers: list[Matcher] = []
    items: list[tuple[Encoded, Encoded]] = []
    for folder, (data_module, matcher) in opened.items():
        both = recipes[folder].evaluation.average if average is None else average
        networks = [matcher, open_peer(folder, matcher)] if both else [matcher]
        items += [data_module.encode(network, splits[folder]) for network in networks]
        matchers += networks

    first = matchers[0]
    together = first if len(matchers) == 1 else Average(matchers).to(device_of(first))
    visual, text = items[0] if len(items) == 1 else map(joined, zip(*items, strict=True))
    memory = next(iter(recipes.values())).memory or None
    with evaluating(together):
        score = score_from_cpu(together)
        result = evaluate_data(visual, text, score, next(iter(splits.values())), rules, degrees=degrees, semantics=semantics, memory=memory)
    asked = ensemble_of(folders[0]) or recipes.get(folders[0]) if own and len(folders) == 1 else None
    return beside_published(result, asked) if asked else result


def beside_base(
    result: Evaluation, folders: Sequence[Path], split: str | None, data: str | None, progress: Progress, memory: Memory = None
) -> Evaluation:
    """A result of runs with that of the pretrained model which they began with, on the same items under the same protocols.

    Raises RunError for runs that began with no CLIP or SigLIP model, or with several.
    """
    recipes = recipes_of(folders, data, memory)
    began = {pretrained_of(recipe) for recipe in recipes.values()}
    base = began.pop() if len(began) == 1 else None
    if base is None:
        raise RunError(
            f"{', '.join(map(str, folders))}: expected runs that began with one and the same CLIP or SigLIP model, to set it beside."
        )
    recipe = next(iter(recipes.values()))
    split, data = agreed(recipes, "evaluation.test", split), data or recipe.data.path
    return replace(result, base=evaluate_runs([Path(base)], list(result.by_protocol), split, data, progress, "", memory=memory))
