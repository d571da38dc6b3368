"""The child process with the real vLLM, and faults on demand: `python -m faulty_vllm_child DESCRIPTOR FOLDER`."""

from __future__ import annotations

import sys

from vllm_faults import Faulty

from stretto.engines.vllm.child_server import run_child
from stretto.engines.vllm.vllm_backend import VllmBackend


class FaultyBackend(Faulty, VllmBackend):
    """vLLM with faults on demand."""


if __name__ == "__main__":
    run_child(FaultyBackend(), sys.argv)
