"""Rollout instances: the protocol, the native engine, and a fake for tests and dry runs."""
