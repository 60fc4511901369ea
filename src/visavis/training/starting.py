"""A training that goes on from the model of another run: its weights, and the words and standardization that it reads with."""

from __future__ import annotations

from pathlib import Path

from visavis.errors import RecipeError, RunError
from visavis.models import Matcher
from visavis.models.processor import Processor
from visavis.models.retriever import Retriever
from visavis.training.recipe import Recipe


def start_files(recipe: Recipe) -> list[Path]:
    """What is read of the model that a recipe's training starts from. Raises RecipeError if it is none."""
    if not recipe.start_from:
        return []
    folder = Path(recipe.start_from)
    places = [
        place for place in (folder / "model", folder) if (place / "model.safetensors").is_file() and (place / "config.json").is_file()
    ]
    if not places:
        raise RecipeError(f"start_from is {recipe.start_from}, expected a run folder, or its folder model, as visavis train writes it.")
    return [places[0] / "config.json", places[0] / "model.safetensors"]


def open_start(recipe: Recipe) -> Retriever | None:
    """The model that a recipe's training starts from; None: random or pretrained weights. Raises RecipeError."""
    if not (files := start_files(recipe)):
        return None
    try:
        return Retriever.load(files[0].parent, device="cpu")
    except RunError as error:
        raise RecipeError(f"start_from: {error}") from None


def take_over(start: Retriever, matcher: Matcher, processor: Processor, recipe: Recipe) -> None:
    """Give a matcher the weights of another. Raises RecipeError naming the first thing in which they are not alike."""
    where = f"start_from: the model of {recipe.start_from}"
    if type(start.matcher) is not type(matcher):
        raise RecipeError(f"{where} is of kind {start.matcher.name}, and the recipe's of {matcher.name}: they share no weights.")
    before, now = start.processor.described, processor.described
    if different := next((key for key in {**before, **now} if before.get(key) != now.get(key)), None):
        raise RecipeError(f"{where} reads its {different} otherwise than the recipe's: train by the recipe of that run, its run.toml.")
    theirs, ours = ({name: list(part.shape) for name, part in model.state_dict().items()} for model in (start.matcher, matcher))
    for name in sorted(theirs.keys() | ours.keys()):
        if theirs.get(name) != ours.get(name):
            shapes = [f"of shape {found[name]}" if name in found else "missing" for found in (theirs, ours)]
            raise RecipeError(
                f"{where} has {name} {shapes[0]}, and the recipe's {shapes[1]}: train by the recipe of that run, its run.toml."
            )
    matcher.load_state_dict(start.matcher.state_dict())
