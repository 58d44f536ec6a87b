"""How a stream of frames is opened to another machine."""

import socket
import threading
from collections.abc import Sequence
from dataclasses import dataclass

import grpc

from collapipe.credentials.credentials import Credentials
from collapipe.credentials.dialing import cause, dial, host_and_port, require_loopback
from collapipe.errors import LinkError, one_line
from collapipe.wire.link import channel_options
from collapipe.wire.streams import PIECE_BYTES, FrameStream

CONNECT_S = 5.0  # for a handshake, on a busy machine too
MESSAGE_BYTES = PIECE_BYTES + 1024


@dataclass(frozen=True, slots=True)
class Dialer:
    """Opens channels with ``credentials``; None: without encryption, on loopback alone.

    A handshake may take ``timeout_s``.
    """

    credentials: Credentials | None
    timeout_s: float = CONNECT_S

    def channel(self, device: str, address: str) -> grpc.Channel:
        """A connection to ``device``. Raises ``LinkError`` where another one is at ``address``,
        ``ConfigError`` where it would be neither encrypted nor on this machine."""
        options = channel_options(MESSAGE_BYTES)
        if self.credentials is not None:
            return dial(self.credentials, address, device, options, self.timeout_s)
        require_loopback(address)
        return grpc.insecure_channel(address, options=options)

    def fault(self, device: str, address: str) -> str | None:
        """Why the device does not answer within seconds; None: it does."""
        try:
            socket.create_connection(host_and_port(address), self.timeout_s).close()
            with self.channel(device, address) as channel:
                grpc.channel_ready_future(channel).result(timeout=self.timeout_s)
        except LinkError as error:
            return str(error)
        except grpc.FutureTimeoutError:
            return f"device {device} at {address}: timed out{self.hint}"
        except OSError as error:
            return f"device {device} at {address}: {cause(error)}"
        return None

    @property
    def hint(self) -> str:
        """What may be wrong where nobody answers who is there."""
        return "" if self.credentials else "; without credentials only --insecure devices answer"


def open_stream(
    channel: grpc.Channel,
    method: str,
    peer: str,
    max_bytes: int,
    arrived: threading.Event,
    metadata: Sequence[tuple[str, str]] = (),
) -> FrameStream:
    """A stream that the other end has accepted. Raises ``LinkError`` where it does not."""
    stream = FrameStream(peer, max_bytes, arrived)
    call = channel.stream_stream(method)(
        stream.outgoing(), metadata=tuple(metadata), wait_for_ready=False
    )
    stream.on_close(call.cancel)
    accepted = threading.Event()

    def wait() -> None:  # for good where the call ends at a bad moment: gRPC does not say so here
        call.initial_metadata()  # which the other end sends when it has accepted
        accepted.set()

    threading.Thread(target=wait, daemon=True, name=f"to {peer}").start()
    if not accepted.wait(CONNECT_S):
        call.cancel()
    if not call.is_active():
        stream.close()
        raise LinkError(f"{peer}: {call.code().name}: {one_line(call.details())}")

    def take_in() -> None:
        stream.feed(call)
        stream.close()  # which ends gRPC's thread that waits for what is sent

    threading.Thread(target=take_in, daemon=True, name=f"from {peer}").start()
    return stream
