"""Record which units took part in a round: who finished, failed, was absent, or cannot go on."""

import logging
from collections.abc import Mapping

from collapipe.errors import Called
from collapipe.wire.messages import Failure
from server_app.roster import Reported, Roster
from server_app.rounds.aggregation import Aggregated
from server_app.rounds.exchange import Outcomes

_log = logging.getLogger(__name__)


def attended(
    roster: Roster,
    round_: int,
    outcomes: Outcomes,
    aggregated: Aggregated,
    states: Mapping[int, Reported],
    independent: bool,
    miss_limit: int,
    called: Called,
) -> Roster:
    """Return the roster after a round, with the ``states`` of the units that finished it.

    If units are not ``independent``, only dishonest ones count as failed, because one unit can
    cause the failure of others. Raises the error of ``Roster.check`` if all units have failed.
    """
    finished, failures = outcomes.finished, outcomes.failures
    if not independent:
        faults = {unit: aggregated.late[unit] for unit in aggregated.dishonest}
        roster = roster.after_failures(round_, faults, finished.keys() - faults.keys())
    elif finished or failures:
        roster = roster.after_failures(round_, failures, finished)
        if not finished:
            roster.check(round_, called)
    for unit, each in states.items():
        if isinstance(each, Failure):
            _log.warning(
                "round %d: %s is excluded until it reports devices with which it can be planned: "
                "%s: %s",
                *(round_, called(unit), each.kind, each.message),
            )
    return roster.updated(states).after_absences(
        round_,
        failures={**aggregated.late, **failures},
        present=finished.keys() - aggregated.late.keys(),
        miss_limit=miss_limit,
    )
