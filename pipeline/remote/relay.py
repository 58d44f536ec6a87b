"""Hops through the control unit, for devices that do not reach each other."""

import threading

from collapipe.errors import LinkError, WireError
from collapipe.wire.streams import FrameStream


def relay(front: FrameStream, behind: FrameStream) -> None:
    """Pass on what each sends to the other, until one of the two ends; then both do.

    Returns at once. What one has sent and the other has not taken yet is kept here: at most a
    step's m activations or gradients.
    """
    for source, sink in ((front, behind), (behind, front)):
        threading.Thread(target=_pass_on, args=(source, sink), daemon=True).start()


def _pass_on(source: FrameStream, sink: FrameStream) -> None:
    try:
        while True:
            sink.send(source.receive())
    except (LinkError, WireError):  # who is gone is found by the devices' control streams
        sink.close()
        source.close()
