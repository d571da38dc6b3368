"""Advantages, losses, packing and the trainer."""
