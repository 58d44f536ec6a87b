"""Make Python find CollaPipe's other top-level packages before modules of the same names.

A user's folder may have modules named ``optim`` or ``pipeline``. Python looks first in the folder
of a script, in the current folder with ``python -m``, and in PYTHONPATH.
"""

import sys
from importlib import import_module
from pathlib import Path

from collapipe.errors import ConfigError

NAMES = ("optim", "pipeline", "client_app", "server_app")
_ROOT = Path(__file__).resolve().parents[1]


def import_own_packages() -> None:
    """Import these packages from the folder that contains ``collapipe``; their modules follow.

    Raises ``ConfigError`` if another module of one of these names is already imported.
    """
    sys.path.insert(0, str(_ROOT))
    try:
        for name in NAMES:
            file = import_module(name).__file__ or name
            if not Path(file).resolve().is_relative_to(_ROOT / name):
                raise ConfigError(
                    f"{file}: the module {name} has the name of a package of CollaPipe; rename it"
                )
    finally:
        sys.path.remove(str(_ROOT))
