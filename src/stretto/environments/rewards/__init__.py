"""Reward functions that come with the package."""
