"""The decoder link's client: the server's decoder as the head of this cluster's pipeline."""

import functools
import queue
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import grpc
import torch
from torch import Tensor

from client_app.rounding import ActivationMeter
from collapipe import cancellation
from collapipe.batch import Batch
from collapipe.errors import BrokenLinkError, LinkError, WireError
from collapipe.models.dropout import DropoutKey
from collapipe.models.sent_rows import RowsRead, scattered
from collapipe.sections import LinkSettings
from collapipe.wire import frames
from collapipe.wire.compression import FLOAT32, decode, encode
from collapipe.wire.feedback import ChangeCoder
from collapipe.wire.frames import Frame, FrameKind
from collapipe.wire.link import METHOD, channel_options, credentials
from collapipe.wire.messages import LinkAddress

_POLL_S = 0.1  # between two looks at cancellation while waiting for the decoder
_AGAIN_S = 0.2  # between two attempts to open a stream again
_BROKEN = {
    *(grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED),
    *(grpc.StatusCode.UNKNOWN, grpc.StatusCode.INTERNAL),
}


@functools.lru_cache(maxsize=2)
def _channel(link: LinkAddress, max_message_bytes: int) -> grpc.Channel:
    """A connection that outlives the round, for its handshake costs more than a small round.

    Certificates and keys are those of one run; a channel of an earlier run closes when the cache
    drops it. ``link`` has no token here, for that is the round's.
    """
    credentials = grpc.ssl_channel_credentials(
        link.server_certificate, link.unit_key, link.unit_certificate
    )
    options = [
        *channel_options(max_message_bytes),
        ("grpc.ssl_target_name_override", link.server_name),
    ]
    return grpc.secure_channel(link.address, credentials, options=options)


@dataclass(frozen=True, slots=True)
class LinkPrecisions:
    """How activations and gradients travel; with a ``coder`` activations may go as changes, and a
    ``meter`` sees them before they are rounded."""

    activation: str = FLOAT32
    gradient: str = FLOAT32
    coder: ChangeCoder | None = None
    meter: ActivationMeter | None = None


class _RefusedError(LinkError):
    """The round is over, or was never this unit's: dialling again does not help."""


class _Stream:
    """One gRPC stream to the decoder: frames out, frames or the error that ended it in, which
    ``take`` puts into ``incoming``."""

    def __init__(
        self,
        link: LinkAddress,
        unit: int,
        max_message_bytes: int,
        take: Callable[["_Stream", Frame | Exception], None],
    ) -> None:
        self._take, self._address = take, link.address
        self.incoming: queue.SimpleQueue[Frame | Exception] = queue.SimpleQueue()
        self.bytes_in = 0
        self._outgoing: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        channel = _channel(replace(link, token=""), max_message_bytes)
        self._call = channel.stream_stream(METHOD)(
            iter(self._outgoing.get, None), metadata=credentials(unit, link.token)
        )
        self._reader = threading.Thread(target=self._read, daemon=True, name="decoder-link")
        self._reader.start()

    def send(self, data: bytes) -> None:
        """Return at once."""
        self._outgoing.put(data)

    def close(self) -> None:
        """End it, and its thread."""
        self._outgoing.put(None)
        self._call.cancel()
        self._reader.join(timeout=5)

    def _read(self) -> None:
        put = partial(self._take, self)
        try:
            for data in self._call:
                self.bytes_in += len(data)
                put(frames.decode(data))
        except grpc.RpcError as error:
            code = error.code()
            if code == grpc.StatusCode.UNIMPLEMENTED:
                put(_RefusedError("decoder link: refused: no open round has this unit's token"))
            kind = BrokenLinkError if code in _BROKEN else LinkError
            told = f"decoder link: {code.name}: {error.details()}"
            if code == grpc.StatusCode.UNAVAILABLE and not self.bytes_in:
                told += f"; the server is dialled at {self._address}, which is link.advertise or "
                told += "else link.host there"
            put(kind(told))
        except WireError as error:
            put(error)
        else:
            put(LinkError("decoder link: the server ended the stream early"))


class DecoderLink:
    """A ``PipelineHead`` that streams activations to the server and gets losses and gradients
    back; of both the rows that the head reads.

    A stream that breaks is opened again for ``link.reconnect_s``, and the step under way is sent
    again; not where activations travel as changes, which the server has taken in. Raises
    ``LinkError`` where the server refuses, closes or vanishes, with gRPC's own cause.
    """

    def __init__(
        self,
        link: LinkAddress,
        unit: int,
        round_: int,
        settings: LinkSettings,
        rows: RowsRead,
        precisions: LinkPrecisions = LinkPrecisions(),
    ) -> None:
        self.bytes_up = 0
        self._bytes_in = 0
        self._link, self._unit, self._settings = link, unit, settings
        self._round, self._rows, self._precisions = round_, rows, precisions
        self._again_s = 0.0 if precisions.coder else settings.reconnect_s
        self._step = 0
        self._answers: dict[int, tuple[float, Tensor]] = {}
        self._submitted: dict[int, tuple[Tensor, Tensor]] = {}  # what was sent, and its rows
        self._said: list[bytes] = []  # of the step under way
        self._answered = set[int]()
        self._opened_again = False
        self._on_answer: Callable[[], None] | None = None

    def __enter__(self) -> "DecoderLink":
        self._stream = self._opened()
        return self

    def __exit__(self, *_: object) -> None:
        self._stream.close()

    @property
    def bytes_down(self) -> int:
        return self._bytes_in + self._stream.bytes_in

    def begin(self, key: DropoutKey, micro_batches: Sequence[Batch], target_tokens: int) -> None:
        self._step, self._key, self._micro_batches = key.step, key, micro_batches
        self._said.clear()
        self._answered.clear()
        self._opened_again = False
        self._send(FrameKind.BEGIN, 0, torch.tensor([len(micro_batches), target_tokens]))

    def submit(self, micro_batch: int, hidden: Tensor) -> None:
        """Return as soon as gRPC has the frame."""
        batch, how = self._micro_batches[micro_batch], self._precisions
        read = self._rows.of(batch.mask, batch.targets)
        sent = hidden.detach().cpu()[read]
        self._submitted[micro_batch] = sent, read
        if how.meter is not None:
            how.meter.take(self._step, micro_batch, sent)
        generator = self._key.generator("activation", micro_batch)
        if how.coder is None:
            parts = encode(sent, how.activation, generator)
        else:
            assert batch.rows is not None
            counts = read.sum(1)
            parts = how.coder.encode(sent, batch.rows, counts, how.activation, generator)
        self._send(FrameKind.ACTIVATION, micro_batch, *parts, batch.mask, batch.targets)

    def ready(self, micro_batch: int) -> bool:
        while micro_batch not in self._answers and not self._stream.incoming.empty():
            if frame := self._taken(FrameKind.GRADIENT):
                self._keep(frame)
        return micro_batch in self._answers

    def answer(self, micro_batch: int) -> tuple[float, Tensor]:
        while micro_batch not in self._answers:
            self._keep(self._receive(FrameKind.GRADIENT))
        return self._answers.pop(micro_batch)

    def on_answer(self, call: Callable[[], None]) -> None:
        self._on_answer = call

    def exchange_norms(self, squared_norms: Sequence[float]) -> list[float]:
        """The server steps its decoder by the same norms."""
        self._send(FrameKind.NORMS, 0, torch.tensor(squared_norms, dtype=torch.float64))
        frame = self._receive(FrameKind.NORMS)
        if len(frame.tensors) != 1 or frame.tensors[0].shape != (1,):
            raise WireError("the decoder's answer to the norms is not one number")
        return [float(frame.tensors[0])]

    def step(self, rate: float, scale: float) -> None:
        """Nothing to do: the server stepped in ``exchange_norms``."""

    def forget(self) -> None:
        """The server drops the step when the stream ends."""
        self._answers.clear()
        self._submitted.clear()

    def finish(self) -> None:
        """Tell the server that all steps are done, and wait until it knows."""
        self._said.clear()
        self._send(FrameKind.BYE, 0)
        self._receive(FrameKind.BYE)

    def _opened(self) -> _Stream:
        return _Stream(self._link, self._unit, self._settings.max_message_bytes, self._take)

    def _send(self, kind: FrameKind, micro_batch: int, *tensors: Tensor) -> None:
        data = frames.encode(Frame(kind, self._round, self._step, micro_batch, tensors))
        if self._again_s:
            self._said.append(data)
        self.bytes_up += len(data)
        self._stream.send(data)

    def _receive(self, expected: FrameKind) -> Frame:
        while (frame := self._taken(expected)) is None:
            continue
        return frame

    def _taken(self, expected: FrameKind) -> Frame | None:
        """What comes next; None: another stream was opened instead, where nothing may be due."""
        received = self._next(self._stream, expected)
        if isinstance(received, BrokenLinkError) and self._again_s:
            return self._reopened(received)
        if isinstance(received, Exception):
            self._stream.incoming.put(received)  # the next one to ask gets the same answer
            raise received
        return received

    def _next(self, stream: _Stream, expected: FrameKind) -> Frame | Exception:
        """What comes next, if it is what is ``expected``, or why nothing comes."""
        while True:
            cancellation.check()
            try:
                received = stream.incoming.get(timeout=_POLL_S)
            except queue.Empty:
                continue
            if isinstance(received, Frame) and (
                received.kind != expected or received.step != self._step
            ):
                raise WireError(
                    f"the decoder answered {received.kind.name} of step {received.step}; "
                    f"expected {expected.name} of step {self._step}"
                )
            return received

    def _known(self, frame: Frame) -> bool:
        """Whether a second stream answers what the first one has answered."""
        same = frame.kind == FrameKind.GRADIENT and frame.step == self._step
        return same and frame.micro_batch in self._answered and self._opened_again

    def _take(self, stream: "_Stream", received: Frame | Exception) -> None:
        """Of a stream's thread. What is known already is no news, or who waits for news would wait
        for ever."""
        if isinstance(received, Frame) and self._known(received):
            return
        stream.incoming.put(received)
        if self._on_answer is not None:
            self._on_answer()

    def _reopened(self, broken: BrokenLinkError) -> Frame | None:
        """Open another stream, and say again what the step under way has said. The norms that the
        server answered with, where it had done the step and its answer was lost."""
        deadline, cause = time.monotonic() + self._again_s, str(broken)
        while time.monotonic() < deadline:
            self._bytes_in += self._stream.bytes_in
            self._stream.close()
            self._stream, self._opened_again = self._opened(), True
            self._stream.send(frames.encode(Frame(FrameKind.RESUME, self._round, self._step, 0)))
            came = self._next(self._stream, FrameKind.RESUME)
            if isinstance(came, Frame):
                return self._resumed(came)
            if isinstance(came, _RefusedError):
                raise came
            time.sleep(_AGAIN_S)
        raise LinkError(f"{cause}; not back within link.reconnect_s={self._again_s:g}")

    def _resumed(self, came: Frame) -> Frame | None:
        if len(came.tensors) != 1 or came.tensors[0].shape != (2,):
            raise WireError("the decoder does not say which step was the last")
        last, own = came.tensors[0].tolist()
        norms_sent = bool(self._said) and frames.decode(self._said[-1]).kind == FrameKind.NORMS
        if last == self._step and norms_sent:
            own_norm = torch.tensor([own], dtype=torch.float64)
            return Frame(FrameKind.NORMS, self._round, self._step, 0, (own_norm,))
        for data in self._said:
            self.bytes_up += len(data)
            self._stream.send(data)
        return None

    def _keep(self, frame: Frame) -> None:
        submitted = self._submitted.pop(frame.micro_batch, None)
        if submitted is None or not frame.tensors or frame.tensors[0].shape != ():
            raise WireError(f"the decoder's answer to micro-batch {frame.micro_batch} does not fit")
        (sent, read), (loss, *parts) = submitted, frame.tensors
        gradient = decode(parts, sent.shape, self._precisions.gradient, sent.dtype)
        self._answered.add(frame.micro_batch)
        self._answers[frame.micro_batch] = float(loss), scattered(gradient, read)
