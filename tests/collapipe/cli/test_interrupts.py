"""An interrupt ends the command even where Python ignores exceptions."""

import signal
import time
import weakref
from collections.abc import Iterator

import pytest

from collapipe.cli.interrupts import sure_interrupts


class _Buffer:
    """An object that weak references can refer to."""


@pytest.fixture(autouse=True)
def _own_handler() -> Iterator[None]:
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)


def test_an_interrupt_in_the_callback_of_a_weak_reference_is_not_lost() -> None:
    buffer, met = _Buffer(), list[int]()

    def interrupted(_: object) -> None:
        met.append(1)
        signal.raise_signal(signal.SIGTERM)

    with sure_interrupts(), pytest.raises(KeyboardInterrupt):
        watched = weakref.ref(buffer, interrupted)
        del buffer
        assert (met, watched()) == ([1], None)  # no exception was raised here
        time.sleep(60)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_other_errors_in_weak_reference_callbacks_are_reported_as_usual(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    reported = list[type[BaseException]]()
    monkeypatch.setattr("sys.unraisablehook", lambda what: reported.append(what.exc_type))
    buffer = _Buffer()
    with sure_interrupts():
        watched = weakref.ref(buffer, lambda _: 1 / 0)
        del buffer
    assert (reported, watched()) == ([ZeroDivisionError], None)
