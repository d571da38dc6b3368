"""Prepares a run from its recipe: device, memory plan, inputs, and the factories of engine and trainer."""
