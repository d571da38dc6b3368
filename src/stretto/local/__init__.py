"""Instances and trainer as threads of one process."""
