"""What a task's whole numbers may be."""

from collapipe.errors import ConfigError

_MOST_TOKENS = 2**15  # attention over more fits no device, and a prediction would take hours


def require_at_least(task: object, field: str, minimum: int, why: str) -> None:
    """Raise ``ConfigError`` if an integer field of a task is smaller than ``minimum``."""
    value = getattr(task, field)
    if value < minimum:
        raise ConfigError(f"task.{field} is {value}; set it to at least {minimum} ({why})")


def require_length(max_length: int, minimum: int, why: str) -> None:
    """Raise ``ConfigError`` for a ``task.max_length`` below ``minimum`` or beyond any model's."""
    if max_length < minimum:
        raise ConfigError(f"task.max_length is {max_length}; set it to at least {minimum} ({why})")
    if max_length > _MOST_TOKENS:
        raise ConfigError(f"task.max_length is {max_length}; set it to at most {_MOST_TOKENS}")
