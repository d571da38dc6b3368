"""Stretto: reinforcement learning for language models in which several versions of the policy generate at once."""

__version__ = "0.1.0"
