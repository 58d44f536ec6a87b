"""Report nodes that cannot take part in a run, and refuse a run if too few others are left."""

import logging
from collections.abc import Mapping

from collapipe.errors import CollaPipeError, ConfigError, DataError, RoundFailedError, few_of
from collapipe.wire.messages import Failure
from server_app.places import Places

_log = logging.getLogger(__name__)
_OF_ALL = ConfigError.__name__, DataError.__name__  # causes that all units may have in common


def warn_excluded(places: Places, failures: Mapping[int, Failure]) -> None:
    """Log each node that failed, and why."""
    certified = places.certified() if failures else {}
    for node, failure in failures.items():
        who = places.of_node(node, certified)
        _log.warning("%s is excluded: %s: %s", who, failure.kind, failure.message)


def concern_all(failures: Mapping[int, Failure]) -> bool:
    """Whether some unit cannot use the run's options or data."""
    return any(failure.kind in _OF_ALL for failure in failures.values())


def too_few(
    places: Places, able: int, there: int, least: int, failures: Mapping[int, Failure]
) -> CollaPipeError:
    """Return the error of a run in which only ``able`` units can begin, of ``least`` required."""
    return (ConfigError if concern_all(failures) else RoundFailedError)(
        f"{able} of {there} units can begin, at least {least} must (federation.min_units): "
        f"{causes(places, failures)}"
    )


def causes(places: Places, failures: Mapping[int, Failure]) -> str:
    """Describe the causes of failures, each with the nodes that it affects."""
    whose, certified = dict[str, list[str]](), places.certified()
    for node, each in failures.items():
        who = places.of_node(node, certified)
        whose.setdefault(f"{each.kind}: {each.message}", []).append(who)
    return few_of(f"{few_of(who, ', ')}: {cause}" for cause, who in whose.items())
