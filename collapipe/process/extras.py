"""Which extra of the package brings a library that is not installed."""

import re
from importlib.metadata import PackageNotFoundError, requires

_NAMES = {  # of distributions, if they differ from their modules'
    "google": "protobuf",
    "hydra": "hydra-core",
    "mlflow": "mlflow-skinny",
    "ray": "flwr",
    "sklearn": "scikit-learn",
    "yaml": "pyyaml",
}
_EXTRA = re.compile(r"(?P<name>[\w.-]+).*; extra == ['\"](?P<extra>\w+)['\"]")


def missing(module: str) -> str:
    """Say that a library is not installed, and how to install it."""
    library = module.partition(".")[0]
    return f"{library} is not installed; pip install 'collapipe{_extra(library)}'"


def _extra(library: str) -> str:
    """The smallest extra that has the library, in brackets; empty if none has it."""
    wanted, extras = _normal(_NAMES.get(library, library)), dict[str, set[str]]()
    try:
        lines = requires("collapipe") or []
    except PackageNotFoundError:  # in a bundle
        return ""
    for found in filter(None, map(_EXTRA.match, lines)):
        extras.setdefault(found["extra"], set()).add(_normal(found["name"]))
    fitting = [extra for extra, names in extras.items() if wanted in names]
    return f"[{min(fitting, key=lambda extra: len(extras[extra]))}]" if fitting else ""


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()
