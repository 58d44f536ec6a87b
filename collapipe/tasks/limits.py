"""What a task's whole numbers must be at least."""

from collapipe.errors import ConfigError


def require_at_least(task: object, field: str, minimum: int, why: str) -> None:
    """Raise ``ConfigError`` if an integer field of a task is smaller than ``minimum``."""
    value = getattr(task, field)
    if value < minimum:
        raise ConfigError(f"task.{field} is {value}; set it to at least {minimum} ({why})")
