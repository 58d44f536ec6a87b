"""Relay hops through the control unit, for devices that cannot reach each other."""

import threading

from collapipe.errors import LinkError, WireError
from collapipe.wire.streams import FrameStream


def relay(front: FrameStream, behind: FrameStream) -> None:
    """Forward frames between two streams in both directions until one ends; then close both.

    Returns at once; threads do the work. Frames that the receiver has not taken yet are kept in
    memory: at most the m activations or gradients of a step.
    """
    for source, sink in ((front, behind), (behind, front)):
        threading.Thread(target=_pass_on, args=(source, sink), daemon=True).start()


def _pass_on(source: FrameStream, sink: FrameStream) -> None:
    try:
        while True:
            sink.send(source.receive())
    except (LinkError, WireError):  # the control streams detect which device is lost
        sink.close()
        source.close()
