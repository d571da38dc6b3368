"""Metrics, progress and summaries."""
