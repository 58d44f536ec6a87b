"""CollaPipe: training Transformers together on clusters of heterogeneous edge devices.

>>> import collapipe
>>> run_dir = collapipe.train(["federation.rounds=3"])
>>> settings, model, tokenizer = collapipe.load(run_dir)
"""

import os
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collapipe.cli.run import run_job as train
    from collapipe.errors import CollaPipeError
    from collapipe.runs.model import load_model as load

__all__ = ["CollaPipeError", "__version__", "load", "train"]
_LAZY = {
    "CollaPipeError": "collapipe.errors:CollaPipeError",
    "load": "collapipe.runs.model:load_model",
    "train": "collapipe.cli.run:run_job",
}

# gRPC reads this when it is imported. Its own resolver knows neither mDNS (``jetson.local``) nor a
# host's second address in /etc/hosts.
os.environ.setdefault("GRPC_DNS_RESOLVER", "native")
__version__ = "0.1.0"  # as in pyproject.toml; a Flower bundle has no installed metadata


def __getattr__(name: str) -> Any:
    """Import names on first use: ``train`` and ``load`` import torch and flwr."""
    if name in _LAZY:
        return resolve_name(_LAZY[name])
    raise AttributeError(f"module 'collapipe' has no attribute {name!r}")
