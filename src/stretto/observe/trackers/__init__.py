"""Trackers: TensorBoard, Weights & Biases, Trackio, MLflow, Prometheus, or a class of the user's.

Each is a listener of the run (`observe/listeners.py`) with a thread of its own, and a file here. Its package is an
extra, imported only if the recipe names the tracker in `observe.sinks`.
"""
