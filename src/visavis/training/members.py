"""An ensemble in a recipe: models that are trained apart, each by the recipe with differences of its own, and scored by their mean."""

from __future__ import annotations

from visavis.training.recipe import Recipe, build_recipe
from visavis.training.recipe_files import as_merged, merged


def member_recipes(recipe: Recipe) -> dict[str, Recipe]:
    """The recipe of each member, by name; it stands for no row of a table itself. Raises RecipeError."""
    shared = {key: value for key, value in recipe.to_dict().items() if key not in ("members", "published")}
    recipes = {}
    for name, differences in recipe.members.items():
        where = f"{recipe.published or recipe.name}, member {name}"
        content = merged(shared, as_merged(differences), where) | {"name": f"{recipe.name}-{name}"}
        recipes[name] = build_recipe(content, {}, where)
    return recipes
