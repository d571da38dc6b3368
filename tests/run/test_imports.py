"""The run loop imports nothing heavy. `lint-imports` reads the imports; this runs them."""

from __future__ import annotations

import subprocess
import sys


def test_no_module_of_the_run_loop_brings_torch_with_it() -> None:
    code = (
        "import importlib, pkgutil, sys, stretto.run\n"
        "for module in pkgutil.iter_modules(stretto.run.__path__):\n"
        "    importlib.import_module(f'stretto.run.{module.name}')\n"
        "print(sorted({'torch', 'transformers', 'safetensors', 'ray'} & set(sys.modules)))\n"
    )
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert said == "[]\n"
