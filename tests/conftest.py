"""What has to be in the environment before anything is imported."""

import os

import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # kernels run through Triton's interpreter
# Ray's workers have niceness 15, which beside another busy process of the tests is a thirtieth of a core.
os.environ.setdefault("RAY_worker_niceness", "0")
