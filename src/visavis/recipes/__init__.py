"""Recipes: settings, files with inheritance and variants, published tables, and the data that a recipe names."""
