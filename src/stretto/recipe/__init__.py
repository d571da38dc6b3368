"""Recipes: schema, overrides, checks, error messages, and the generated reference of the keys."""
