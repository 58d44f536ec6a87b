"""A message's wait for its first micro-batch counts from the time when the message is taken."""

import time

import pytest

from client_app.arrival import message_taken, taken_s


def test_the_outermost_of_nested_messages_counts() -> None:
    before_s = time.perf_counter()
    with message_taken():
        first_s = taken_s()
        with message_taken():
            assert taken_s() == first_s
    with message_taken():
        assert taken_s() > first_s >= before_s
    with pytest.raises(LookupError):
        taken_s()
