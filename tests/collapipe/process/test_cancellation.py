"""Work ends at its next check after its scope or an outer scope is cancelled or times out."""

import threading

import pytest

from collapipe.errors import CancelledRoundError
from collapipe.process import cancellation
from collapipe.process.cancellation import cancellable, check


class Clock:
    """A clock that stands still until a test moves it."""

    def __init__(self) -> None:
        self.now = 100.0

    def monotonic(self) -> float:
        """The seconds that the test has set."""
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """The clock that ``cancellation`` reads."""
    clock = Clock()
    monkeypatch.setattr(cancellation, "time", clock)
    return clock


def test_without_a_scope_nothing_is_cancelled() -> None:
    """Code outside any scope may call ``check``."""
    check()


def test_cancel_ends_the_work_at_its_next_check() -> None:
    """Every later check in the scope fails, too; a check after the scope passes."""
    with cancellable() as scope:
        check()
        scope.cancel()
        for _ in range(2):
            with pytest.raises(CancelledRoundError, match="cancelled"):
                check()
    check()


def test_a_deadline_ends_the_work(clock: Clock) -> None:
    """A check at the deadline passes; a later check fails and names the option."""
    with cancellable(2.5):
        clock.now += 2.5
        check()
        clock.now += 0.001
        with pytest.raises(CancelledRoundError, match=r"federation\.round_timeout_s=2\.5; raise"):
            check()
    check()


def test_a_scope_without_a_deadline_does_not_time_out(clock: Clock) -> None:
    """Without ``timeout_s``, only ``cancel`` ends the work."""
    with cancellable():
        clock.now += 1e9
        check()


def test_scopes_nest(clock: Clock) -> None:
    """Cancelling the outer scope cancels the inner scope, but not the reverse."""
    with cancellable(10.0) as outer:
        with cancellable(1e6) as inner:
            check()
            clock.now += 11
            with pytest.raises(CancelledRoundError, match="round_timeout_s=10;"):
                check()
            clock.now -= 11
            inner.cancel()
            with pytest.raises(CancelledRoundError):
                check()
        check()
        with cancellable():
            outer.cancel()
            with pytest.raises(CancelledRoundError):
                check()


def test_an_error_inside_ends_the_scope() -> None:
    """Work after the scope is not cancelled."""
    with pytest.raises(KeyError), cancellable() as scope:
        scope.cancel()
        raise KeyError
    check()


def test_another_thread_can_cancel() -> None:
    """Signal handlers and a server's callbacks cancel from another thread."""
    with cancellable() as scope:
        thread = threading.Thread(target=scope.cancel)
        thread.start()
        thread.join()
        with pytest.raises(CancelledRoundError):
            check()


def test_a_scope_cancels_only_work_of_its_own_thread() -> None:
    """Another unit's work in the same process continues."""
    outcome: list[BaseException | None] = []

    def work() -> None:
        try:
            check()
            outcome.append(None)
        except CancelledRoundError as error:
            outcome.append(error)

    with cancellable() as scope:
        scope.cancel()
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
    assert outcome == [None]
