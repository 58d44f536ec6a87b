"""Find the package's extra that installs a missing library."""

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
_REQUIREMENT = re.compile(r"(?P<name>[\w.-]+)(?:.*; extra == ['\"](?P<extra>\w+)['\"])?")


def missing(module: str) -> str:
    """Return that a library is not installed, and how to install it."""
    library = module.partition(".")[0]
    extra = _extra(library)
    if extra is None:  # a user's plug-in may need it
        return f"{library} is not installed; install the package that provides it"
    return f"{library} is not installed; pip install 'collapipe{extra and f'[{extra}]'}'"


def _extra(library: str) -> str | None:
    """Return the smallest extra with the library; empty if always required, None if never."""
    wanted, extras = _normal(_NAMES.get(library, library)), dict[str, set[str]]()
    try:
        lines = requires("collapipe") or []
    except PackageNotFoundError:  # in a bundle
        return None
    for found in filter(None, map(_REQUIREMENT.match, lines)):
        extras.setdefault(found["extra"] or "", set()).add(_normal(found["name"]))
    fitting = [extra for extra, names in extras.items() if wanted in names]
    return min(fitting, key=lambda extra: len(extras[extra]) if extra else 0, default=None)


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()
