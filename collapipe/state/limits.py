"""The values that states accept: amounts that arithmetic can bear, and whole counts."""

from collections.abc import Sequence
from numbers import Integral, Real
from typing import Any

import numpy as np

from collapipe.errors import ConfigError, one_line

MOST, MOST_LAW = 1e18, 1e6
MOST_DECIBELS = 180  # of ``MOST``
ROUNDING = 1e-12  # of a limit for exactly n blocks or rows, which must not lose one by rounding
MOST_DEVICES = 128  # of a cluster, so that no unit can make planning endless
MOST_NAME = 64  # characters of a device's name, which is printed


def check_count(what: str, count: int) -> None:
    """Raise ``ConfigError`` for a fraction, or a negative or huge count."""
    if not (isinstance(count, Integral) and 0 <= count <= MOST):
        raise ConfigError(f"{what} must be a whole number within 0 … {MOST:g}")


def check_kind(what: str, value: object, kind: type[object]) -> None:
    """Raise ``ConfigError`` unless ``value`` is an object of the class ``kind``."""
    if not isinstance(value, kind):
        raise ConfigError(f"{what}={one_line(value)}: must be an object of {kind.__name__}")


def check_each(what: str, values: object, kind: type[object]) -> None:
    """Raise ``ConfigError`` unless ``values`` are a list, tuple or array of objects of ``kind``."""
    if not isinstance(values, Sequence | np.ndarray):
        raise ConfigError(
            f"{what}={one_line(values)}: must be a list of objects of {kind.__name__}"
        )
    for value in values:
        check_kind(what, value, kind)


def check_sizes(**sizes: int) -> None:
    """Raise ``ConfigError`` unless all are Python's whole numbers from 1 on, or numpy's signed
    ones."""
    for name, size in sizes.items():
        whole = isinstance(size, int | np.signedinteger) and not isinstance(size, bool)
        if not whole or size < 1:
            raise ConfigError(f"{name}={size}: must be a whole number from 1 on")


def admitted(value: float, most: float) -> float:
    """Limit a scaled value to what states accept: a very small value becomes 0, one above ``most``
    becomes ``most``. Extreme reports must not end the run."""
    return 0.0 if value < 1 / MOST else min(value, most)


def plain(value: Any) -> Any:
    """Return a number of NumPy as one of Python: its narrow types round and overflow."""
    narrow = isinstance(value, Real) and not isinstance(value, float | int)
    return float(value) if narrow else value


def check_within(of: object, names: Sequence[str], most: float = MOST) -> None:
    """Raise ``ConfigError`` for values too large or too small for arithmetic, and make numbers
    ``plain``."""
    for name in names:
        value = plain(getattr(of, name))
        object.__setattr__(of, name, value)  # of a frozen dataclass
        number = isinstance(value, float | int)
        if not (number and (value == 0 or 1 / MOST <= value <= most)):
            within = f"{1 / MOST:g} … {most:g}"
            raise ConfigError(
                f"{type(of).__name__}: {name}={value!r} must be 0, or within {within}"
            )
