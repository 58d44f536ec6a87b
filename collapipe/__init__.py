"""CollaPipe: training Transformers together on clusters of heterogeneous edge devices.

>>> import collapipe
>>> run_dir = collapipe.train(["federation.rounds=3"])
>>> settings, model, tokenizer = collapipe.load(run_dir)
"""

from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collapipe.cli.run import run_job as train
    from collapipe.runs.model import load_model as load

__all__ = ["__version__", "load", "train"]

try:
    __version__ = version("collapipe")
except PackageNotFoundError:  # inside a Flower bundle, which is unpacked and not installed
    __version__ = "0+bundle"


def __getattr__(name: str) -> Any:
    """``train`` and ``load`` import torch and flwr, which the planner does without."""
    if name == "train":
        from collapipe.cli.run import run_job

        return run_job
    if name == "load":
        from collapipe.runs.model import load_model

        return load_model
    raise AttributeError(f"module 'collapipe' has no attribute {name!r}")
