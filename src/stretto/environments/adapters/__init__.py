"""Environments of other packages as Stretto's. `docs/adapters.md` shows each.

An adapter imports its package when it is created, and says how to install it if it is missing.
"""
