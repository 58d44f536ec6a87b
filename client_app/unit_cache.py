"""Cache results for each unit that a process serves."""

import functools
from collections.abc import Callable
from typing import Any, TypeVar

from collapipe.config import Settings

T = TypeVar("T")


def cached_per_unit(function: Callable[..., T]) -> Callable[..., T]:
    """Cache the last N results of ``function(settings, unit, …)``, with the run's N units.

    Units take turns in every round, so a smaller cache would miss each time.
    """

    @functools.lru_cache(maxsize=1)
    def cache(num_units: int) -> Callable[..., T]:
        return functools.lru_cache(maxsize=num_units)(function)

    @functools.wraps(function)
    def cached(settings: Settings, *arguments: Any) -> T:
        return cache(settings.federation.num_units)(settings, *arguments)

    cached.cache_clear = cache.cache_clear  # type: ignore[attr-defined]
    return cached
