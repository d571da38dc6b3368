"""Puts a run together from a recipe: train, check, resume, retrain, compare. Used by `cli` and by `stretto` itself."""
