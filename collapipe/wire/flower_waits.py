"""Shorten Flower's waits for message objects that have not arrived yet.

Flower delivers a message before all of its objects have arrived. Its receiver then retries after
1 s, after 2 s and so on. Flower has no option for the first wait, so the default arguments of its
functions are replaced.
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
    """Set Flower's first wait to 0.05 s in this process."""
    for pull in (pull_objects, pull_and_inflate_object_from_tree):
        defaults = pull.__kwdefaults__
        assert defaults is not None  # a test fails if Flower changes this
        defaults["initial_backoff"] = _FIRST_S


def a_few_tries() -> RetryInvoker:
    """Return what repeats a request if its connection, unused for a while, was closed. Flower's own
    also sends this process SIGINT if a token has expired."""
    return RetryInvoker(
        lambda: exponential(max_delay=1), httpx.TransportError, max_tries=_TRIES, max_time=None
    )
