"""Stretto: reinforcement learning for language models in which several versions of the policy generate at once.

The same as the command line, from Python:

    import stretto

    recipe = stretto.load_recipe("recipes/quickstart.toml", ["training.steps=20"])
    print(stretto.check(recipe))
    summary = stretto.train(recipe, "runs/short")
    assert all(finding.holds for finding in stretto.verify("runs/short"))

| name | does |
|---|---|
| `load_recipe` | reads and validates a recipe, with overrides |
| `check` | does everything that `train` does before it builds a model, and returns the effective values as text |
| `train` | runs a recipe in a new run folder, or resumes one, and returns its summary |
| `verify` | proves the three laws from the journal of a run |
| `compare` | runs one recipe under several paradigms and returns a row for each |
| `StrettoError` | the base class of every error that Stretto raises on purpose |

Everything else is internal and may change. `import stretto` imports none of the heavy packages: each name is imported
when it is first used.
"""

from typing import TYPE_CHECKING

from stretto.errors import StrettoError

if TYPE_CHECKING:
    from stretto.assembly.check import check
    from stretto.assembly.compare import compare
    from stretto.assembly.train import train
    from stretto.recipe.schema import load_recipe
    from stretto.store.verify import verify
else:
    _MODULES = {
        "check": "stretto.assembly.check",
        "compare": "stretto.assembly.compare",
        "train": "stretto.assembly.train",
        "load_recipe": "stretto.recipe.schema",
        "verify": "stretto.store.verify",
    }

    def __getattr__(name):
        if name not in _MODULES:
            raise AttributeError(f"module `stretto` has no attribute `{name}`")
        import importlib

        value = getattr(importlib.import_module(_MODULES[name]), name)
        globals()[name] = value
        return value

    def __dir__():
        return sorted({*globals(), *_MODULES})


__version__ = "0.1.0"

__all__ = ["StrettoError", "__version__", "check", "compare", "load_recipe", "train", "verify"]
