"""Stretto: reinforcement learning for language models in which several versions of the policy generate at once.

The same as the command line, from Python:

    import stretto

    print(stretto.check("recipes/quickstart.toml", {"training.steps": 20}))
    run = stretto.train("recipes/quickstart.toml", {"training.steps": 20}, out="runs/short")
    print(run.metrics(), run.samples(update=-1, min_reward=0.5))
    assert run.verify().hold

| name | does |
|---|---|
| `train` | runs a recipe, with a reward, an environment or rows of your own, and returns its `Run` |
| `open_run` | opens the `Run` in a folder: running, stopped, killed or finished |
| `Run` | a run: its outcome, metrics, samples and policy; its report, trace and export |
| `list_runs` | returns a table of the runs in a folder and below it |
| `compare_runs` | returns a table of runs: recipes, scores, speed |
| `Reward` | a reward function with a weight, for a task that has several |
| `Callback` | the base class of callbacks |
| `check` | does everything that `train` does before it builds a model, and reports the effective values |
| `load_recipe` | reads and validates a recipe, with overrides |
| `verify` | proves the three laws from the journal of a run |
| `compare` | runs one recipe under several paradigms and returns a row for each |
| `Table` | the type of tables: rows, columns, a view for notebooks |
| `StrettoError` | the base class of every error that Stretto raises on purpose |

`docs/python.md` explains them. Everything else is internal and may change. `import stretto` imports none of the heavy
packages: each name is imported when it is first used.
"""

from typing import TYPE_CHECKING

from stretto.errors import StrettoError

if TYPE_CHECKING:
    from stretto.api.checking import check
    from stretto.api.comparison import compare_runs
    from stretto.api.run_files import list_runs
    from stretto.api.runs import Run, open_run, verify
    from stretto.api.tables import Table
    from stretto.api.training import train
    from stretto.assembly.compare import compare
    from stretto.environments.python_rewards import Reward
    from stretto.observe.listeners import Callback
    from stretto.recipe.reading import load_recipe
else:
    _MODULES = {
        "Callback": "stretto.observe.listeners",
        "Reward": "stretto.environments.python_rewards",
        "Run": "stretto.api.runs",
        "Table": "stretto.api.tables",
        "check": "stretto.api.checking",
        "compare": "stretto.assembly.compare",
        "compare_runs": "stretto.api.comparison",
        "list_runs": "stretto.api.run_files",
        "load_recipe": "stretto.recipe.reading",
        "open_run": "stretto.api.runs",
        "train": "stretto.api.training",
        "verify": "stretto.api.runs",
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


__version__ = "0.3.0"

__all__ = [
    "Callback",
    "Reward",
    "Run",
    "StrettoError",
    "Table",
    "__version__",
    "check",
    "compare",
    "compare_runs",
    "list_runs",
    "load_recipe",
    "open_run",
    "train",
    "verify",
]
