"""A unit whose owner allows no further round is named and excluded, and the run continues."""

from pathlib import Path

from federated import play
from flwr.app import Context, Message
from run_files import rounds_of
from scripted_units import UNTRAINED, scripted_units

from collapipe.state import unknown_cluster
from collapipe.wire import records
from collapipe.wire.messages import Failure
from server_app.roster import SPENT, Roster

REFUSES = Failure(SPENT, "berlin cannot take part: privacy.lifetime_epsilon=1 of its owner")


def test_a_unit_with_a_spent_budget_is_excluded_at_once_and_asked_again_later() -> None:
    roster = Roster((unknown_cluster(0), unknown_cluster(1)))
    own = roster.after_absences(1, {1: REFUSES}, present=(0,), miss_limit=3)
    assert own.excluded == {1: REFUSES}
    assert (own.due(1), own.due(2)) == ([], [1])


def test_a_unit_with_a_spent_budget_does_not_count_as_failed() -> None:
    roster = Roster((unknown_cluster(0), unknown_cluster(1)))
    assert not roster.after_failures(1, {1: REFUSES}, (0,)).failed


def test_a_run_continues_without_a_unit_with_a_spent_budget(tmp_path: Path) -> None:
    trained, honest = 0, scripted_units()

    def client(message: Message, context: Context) -> Message:
        nonlocal trained
        if context.node_config["partition-id"] == 1:
            trained += message.metadata.message_type == records.TRAIN
            if trained > 1:
                return Message(records.pack(REFUSES), reply_to=message)
        return honest(message, context)

    options = *UNTRAINED, "privacy=private", "federation.rounds=3"
    play(tmp_path / "run", *options, client=client)  # type: ignore[arg-type]
    first, second, third = rounds_of(tmp_path / "run")
    assert [each["units"] for each in (first, second, third)] == [[0, 1, 2], [0, 2], [0, 2]]
    for failures in second["failures"], third["excluded"]:
        assert failures == {"1": f'{SPENT}: "{REFUSES.message}"'}
