"""Work ends at its next check: when asked to, when its time is over, or with the scope around."""

import threading

import pytest

from collapipe.errors import CancelledRoundError
from collapipe.process import cancellation
from collapipe.process.cancellation import cancellable, check


class Clock:
    """A clock that stands still until it is told."""

    def __init__(self) -> None:
        self.now = 100.0

    def monotonic(self) -> float:
        """As in ``time``."""
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """The clock that ``cancellation`` reads."""
    clock = Clock()
    monkeypatch.setattr(cancellation, "time", clock)
    return clock


def test_without_a_scope_nothing_is_cancelled() -> None:
    """``check`` may stand in code that nobody wants to cancel."""
    check()


def test_cancel_ends_the_work_at_its_next_check() -> None:
    """And at every one after it, inside the scope only."""
    with cancellable() as scope:
        check()
        scope.cancel()
        for _ in range(2):
            with pytest.raises(CancelledRoundError, match="cancelled"):
                check()
    check()


def test_a_deadline_ends_the_work(clock: Clock) -> None:
    """Not a moment before; the message names the option."""
    with cancellable(2.5):
        clock.now += 2.5
        check()
        clock.now += 0.001
        with pytest.raises(CancelledRoundError, match=r"federation\.round_timeout_s=2\.5; raise"):
            check()
    check()


def test_no_deadline_never_ends(clock: Clock) -> None:
    """Without ``timeout_s`` only ``cancel`` counts."""
    with cancellable():
        clock.now += 1e9
        check()


def test_scopes_nest(clock: Clock) -> None:
    """The outer one ends the inner one's work, and not the other way round."""
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
    """What comes after it is not cancelled."""
    with pytest.raises(KeyError), cancellable() as scope:
        scope.cancel()
        raise KeyError
    check()


def test_another_thread_can_cancel() -> None:
    """The usual case: a signal handler or a server's callback."""
    with cancellable() as scope:
        thread = threading.Thread(target=scope.cancel)
        thread.start()
        thread.join()
        with pytest.raises(CancelledRoundError):
            check()


def test_a_scope_is_its_own_threads() -> None:
    """Another unit's work in the same process goes on."""
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
