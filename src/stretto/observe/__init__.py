"""Metrics, progress, summaries and warnings of a run."""
