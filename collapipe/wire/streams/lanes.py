"""A device stream's messages on a data connection, or on gRPC if there is none.

Once the caller has taken up the device's offer, both ends send all messages of the stream on the
connection. The gRPC stream stays open: if it ends, for example because a certificate is revoked,
the connection ends too. If the caller cannot connect to the port, for example because of a
firewall, messages stay on the gRPC stream. The caller's first message there says which.
"""

import sys
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress

from collapipe.errors import WireError
from collapipe.wire.streams.data_connection import CONNECT_S, DataConnection
from collapipe.wire.streams.data_port import Offer
from collapipe.wire.streams.frame_stream import ACCEPTED, FrameStream

_SENDS_WITHOUT_WAITING = sys.platform != "darwin"  # which ignores MSG_DONTWAIT in ``send``
ON_GRPC, ON_CONNECTION = b"\5", b"\6"  # the caller's first message: where all others go


class Lane:
    """Where a stream's messages go, once that is decided: on a data connection, or on gRPC.

    ``broke`` says that the connection ended before this end closed it.
    """

    def __init__(self) -> None:
        self._decided = Future[DataConnection | None]()
        self.broke = False

    def decide(self, connection: DataConnection | None) -> None:
        """Choose the ``connection``, or gRPC if it is None. A closed lane ends the connection."""
        try:
            self._decided.set_result(connection)
        except InvalidStateError:
            if connection is not None:
                connection.close()

    def connection(self) -> DataConnection | None:
        """Wait for the decision, and return it."""
        return self._decided.result()

    def close(self) -> None:
        """End the connection, if there is one."""
        self.decide(None)
        if (connection := self.connection()) is not None:
            connection.close()

    def caller_messages(self, stream: FrameStream) -> Iterator[bytes]:
        """Yield what the caller sends on gRPC: its decision, and without a connection all messages
        of its ``stream``."""
        yield ON_GRPC if self.connection() is None else ON_CONNECTION
        yield from self._sent(stream)

    def device_messages(self, stream: FrameStream, offer: Offer) -> Iterator[bytes]:
        """Yield what the device sends on gRPC: its ``offer``, and without a connection all messages
        of its ``stream``."""
        yield ACCEPTED + offer.packed()
        yield from self._sent(stream)

    def to_caller(
        self, answers: Iterable[bytes], connect: Callable[[Offer], DataConnection | None]
    ) -> Iterator[bytes | memoryview]:
        """Yield what the caller receives, from the device's ``answers`` on gRPC and then from where
        all others go. Raises ``WireError`` for an invalid message, and ``OSError`` if the
        connection breaks."""
        answers = iter(answers)
        if (first := next(answers, None)) is None:
            return
        if not first.startswith(ACCEPTED):
            raise WireError("the first message is no offer of a data connection")
        yield ACCEPTED
        self.decide(connect(Offer.unpacked(first[len(ACCEPTED) :])))
        yield from self._received(answers)

    def to_device(
        self, messages: Iterable[bytes], made: Future[DataConnection]
    ) -> Iterator[bytes | memoryview]:
        """Yield what the device receives, if ``made`` has the caller's connection once there is
        one. Raises errors as ``to_caller`` does."""
        messages = iter(messages)
        if (first := next(messages, None)) is None:
            return
        if first not in (ON_GRPC, ON_CONNECTION):
            raise WireError("the first message does not say where the others go")
        try:
            self.decide(made.result(CONNECT_S) if first == ON_CONNECTION else None)
        except TimeoutError as error:
            raise WireError("named a data connection that it has not made") from error
        yield from self._received(messages)

    def _sent(self, stream: FrameStream) -> Iterator[bytes]:
        if (connection := self.connection()) is None:
            yield from stream.outgoing()
            return
        with suppress(OSError):  # the thread that receives reports why
            now = connection.send_now if _SENDS_WITHOUT_WAITING else None
            for message in stream.outgoing(send_now=now):
                connection.send(message)

    def _received(self, messages: Iterator[bytes]) -> Iterator[bytes | memoryview]:
        if (connection := self.connection()) is None:
            yield from messages
            return
        try:
            while (message := connection.receive()) is not None:
                if message:
                    yield message
        finally:
            self.broke = not connection.is_closed
