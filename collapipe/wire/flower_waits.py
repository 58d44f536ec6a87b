"""How long Flower waits for what of a message is still on its way.

It hands a message out before all of it has come, and who asks for a part that has not waits a
second, then two. No option of Flower's says how long: its functions' own defaults are replaced.
"""

import httpx
from flwr.supercore.inflatable.inflatable_utils import (
    pull_and_inflate_object_from_tree,
    pull_objects,
)
from flwr.supercore.retry import RetryInvoker, exponential

_FIRST_S = 0.05  # each further wait is twice as long
_TRIES = 5  # of a request


def wait_briefly() -> None:
    """In this process."""
    for pull in (pull_objects, pull_and_inflate_object_from_tree):
        defaults = pull.__kwdefaults__
        assert defaults is not None  # or Flower has moved, which a test tells
        defaults["initial_backoff"] = _FIRST_S


def a_few_tries() -> RetryInvoker:
    """Return what repeats a request if its connection, unused for a while, was closed. Flower's own
    also sends this process SIGINT if a token has expired."""
    return RetryInvoker(
        lambda: exponential(max_delay=1), httpx.TransportError, max_tries=_TRIES, max_time=None
    )
