"""The child process of a vLLM engine, which `process.py` starts with a descriptor and a folder as arguments."""

from __future__ import annotations

import sys

from stretto.engines.vllm.child_server import run_child
from stretto.engines.vllm.vllm_backend import VllmBackend

if __name__ == "__main__":
    run_child(VllmBackend(), sys.argv)
