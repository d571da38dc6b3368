"""Kernels where Triton is not installed, seen from an interpreter that cannot import it."""

import subprocess
import sys

SCRIPT = """
import sys
sys.modules["triton"] = None
import torch
from stretto.engines.native.kernels import layers
from stretto.engines.native.kernels.kernel_set import CPU, TRITON
import stretto.models.checksums
x, slots, out = torch.ones(1, 4), torch.zeros(1, dtype=torch.int64), torch.empty(1, 2)
CPU.gate(x, 2, torch.nn.functional.silu, slots, (), 1, 1.0)
stretto.models.checksums.checksum({"x": x})
try:
    TRITON.gate(x, 2, "silu", slots, None, 1, 1.0, out)
except ModuleNotFoundError as error:
    print(error)
"""


def test_without_triton_everything_imports_and_a_kernel_says_what_it_needs():
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=True)
    assert "need the package `triton`" in done.stdout
