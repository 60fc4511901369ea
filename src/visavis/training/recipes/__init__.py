"""Recipes: settings, files with inheritance and variants, published tables, and the data module and
the model of a recipe.
"""
