"""Kernels run through Triton's interpreter where there is no GPU. It is asked for before any kernel is defined."""

import os

import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
