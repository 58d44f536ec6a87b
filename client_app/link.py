"""The decoder link's client: the server's decoder as the head of this cluster's pipeline."""

import functools
import logging
import queue
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

import grpc
import torch
from torch import Tensor

from client_app.rounding import ActivationMeter
from collapipe import cancellation
from collapipe.batch import Batch
from collapipe.errors import BrokenLinkError, LinkError, RefusedLinkError, WireError
from collapipe.models.dropout import DropoutKey
from collapipe.models.sent_rows import RowsRead, scattered
from collapipe.sections import LinkSettings
from collapipe.tensors import Tensors
from collapipe.wire import frames
from collapipe.wire.compression import FLOAT32, decode, encode
from collapipe.wire.dialing import CHANNEL_OPTIONS, start_stream
from collapipe.wire.feedback import ChangeCoder
from collapipe.wire.frames import Frame, FrameKind
from collapipe.wire.link import METHOD, credentials
from collapipe.wire.messages import LinkAddress
from collapipe.wire.streams import FrameStream

_log = logging.getLogger(__name__)
_PEER = "decoder link"
_POLL_S = 0.1  # between two looks at cancellation while waiting for the decoder
_AGAIN_S = 0.2  # between two attempts to open a stream again


@functools.lru_cache(maxsize=2)
def _channel(link: LinkAddress) -> grpc.Channel:
    """A connection that outlives the round, for its handshake costs more than a small round.

    Certificates and keys are those of one run; a channel of an earlier run closes when the cache
    drops it. ``link`` has no token here, for that is the round's.
    """
    credentials = grpc.ssl_channel_credentials(
        link.server_certificate, link.unit_key, link.unit_certificate
    )
    options = [*CHANNEL_OPTIONS, ("grpc.ssl_target_name_override", link.server_name)]
    return grpc.secure_channel(link.address, credentials, options=options)


@dataclass(frozen=True, slots=True)
class LinkPrecisions:
    """How activations and gradients travel; with a ``coder`` activations may go as changes, and a
    ``meter`` sees them before they are rounded."""

    activation: str = FLOAT32
    gradient: str = FLOAT32
    coder: ChangeCoder | None = None
    meter: ActivationMeter | None = None


class DecoderLink:
    """A ``PipelineHead`` that streams activations to the server and gets losses and gradients
    back; of both the rows that the head reads.

    A stream that breaks is opened again for ``link.reconnect_s``, and the step under way is sent
    again; not where activations travel as changes, which the server has taken in. The answer to a
    step's norms says that the server has done the step: after the last one of a round nothing is
    left that could be lost. Raises ``LinkError`` where the server refuses, closes or vanishes, with
    gRPC's own cause.
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
        self.bytes_up = self.bytes_down = 0  # each frame once, also where it had to be said again
        self._link, self._unit, self._settings = link, unit, settings
        self._round, self._rows, self._precisions = round_, rows, precisions
        self._step = 0
        self._answers: dict[int, tuple[float, Tensor]] = {}
        self._submitted: dict[int, tuple[Tensor, Tensor]] = {}  # what was sent, and its rows
        self._said: list[Frame] = []  # of the step under way
        self._answered = set[int]()
        self._opened_again = False
        self._arrived = threading.Event()

    def __enter__(self) -> "DecoderLink":
        self._stream = self._opened()
        return self

    def __exit__(self, *_: object) -> None:
        self._stream.close()

    def begin(self, key: DropoutKey, micro_batches: Sequence[Batch], target_tokens: int) -> None:
        self._step, self._key, self._micro_batches = key.step, key, micro_batches
        self._said.clear()
        self._answered.clear()
        self._opened_again = False
        self._send(FrameKind.BEGIN, 0, torch.tensor([len(micro_batches), target_tokens]))

    def submit(self, micro_batch: int, hidden: Tensor) -> None:
        """Return at once; the frame waits for its turn."""
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
        while micro_batch not in self._answers and self._stream.waiting():
            if frame := self._taken(FrameKind.GRADIENT):
                self._keep(frame)
        return micro_batch in self._answers

    def answer(self, micro_batch: int) -> tuple[float, Tensor]:
        while micro_batch not in self._answers:
            self._keep(self._receive(FrameKind.GRADIENT))
        return self._answers.pop(micro_batch)

    def on_answer(self, arrived: threading.Event) -> None:
        self._arrived = self._stream.arrived = arrived

    def exchange_norms(self, squared_norms: Sequence[float]) -> list[float]:
        """The server steps its decoder by the same norms."""
        self._send(FrameKind.NORMS, 0, torch.tensor(squared_norms, dtype=torch.float64))
        frame = self._receive(FrameKind.NORMS)
        if len(frame.tensors) != 1 or frame.tensors[0].shape != (1,):
            raise WireError("the decoder's answer to the norms is not one number")
        return [float(frame.tensors[0])]

    def step(self, rate: float, scale: float) -> None:
        """Nothing to do: the server stepped in ``exchange_norms``."""

    def weights(self) -> Tensors:
        """Empty: the server has the head."""
        return {}

    def optimizer_state(self) -> Tensors:
        return {}

    def forget(self) -> None:
        """The server drops the step when the stream ends."""
        self._answers.clear()
        self._submitted.clear()

    def _opened(self) -> FrameStream:
        stream = FrameStream(_PEER, self._settings.max_message_bytes, self._arrived)
        channel = _channel(replace(self._link, token=""))
        start_stream(stream, channel, METHOD, credentials(self._unit, self._link.token))
        return stream

    def _send(self, kind: FrameKind, micro_batch: int, *tensors: Tensor) -> None:
        frame = Frame(kind, self._round, self._step, micro_batch, tensors)
        if self._settings.reconnect_s:
            self._said.append(frame)
        self.bytes_up += frames.size(frame)
        self._stream.send(frame)

    def _receive(self, expected: FrameKind) -> Frame:
        while (frame := self._taken(expected)) is None:
            continue
        return frame

    def _taken(self, expected: FrameKind) -> Frame | None:
        """What comes next, if it is ``expected``; None: what is known already, or another stream
        was opened instead, where nothing may be due."""
        frame: Frame | None
        try:
            frame = self._next()
        except BrokenLinkError as broken:
            if not self._settings.reconnect_s or (self._precisions.coder and not self._norms_sent):
                raise
            frame = self._reopened(broken)
        if frame is None or self._known(frame):
            return None
        if frame.kind != expected or frame.step != self._step:
            raise WireError(
                f"the decoder answered {frame.kind.name} of step {frame.step}; "
                f"expected {expected.name} of step {self._step}"
            )
        self.bytes_down += frames.size(frame)
        return frame

    def _next(self) -> Frame:
        while True:
            cancellation.check()
            try:
                return self._stream.receive(_POLL_S)
            except queue.Empty:
                continue
            except LinkError as error:
                raise self._explained(error) from None

    def _explained(self, error: LinkError) -> LinkError:
        """The same, with what it means here."""
        if isinstance(error, RefusedLinkError):
            return RefusedLinkError(f"{_PEER}: refused: no open round has this unit's token")
        if grpc.StatusCode.UNAVAILABLE.name in str(error) and not self._stream.bytes_in:
            where = f"{self._link.address}, which is link.advertise or else link.host there"
            return BrokenLinkError(f"{error}; the server is dialled at {where}")
        return error

    def _known(self, frame: Frame) -> bool:
        """Whether a second stream answers what the first one has answered."""
        same = frame.kind == FrameKind.GRADIENT and frame.step == self._step
        return same and frame.micro_batch in self._answered and self._opened_again

    def _reopened(self, broken: BrokenLinkError) -> Frame | None:
        """Open another stream, and say again what the step under way has said. The norms that the
        server answered with, where it had done the step and its answer was lost."""
        _log.warning("%s; it is opened again, and goes on with step %d", broken, self._step)
        again_s = self._settings.reconnect_s
        deadline = time.monotonic() + again_s
        while time.monotonic() < deadline:
            self._stream.close()
            self._stream, self._opened_again = self._opened(), True
            self._stream.send(Frame(FrameKind.RESUME, self._round, self._step, 0))
            try:
                return self._resumed(self._next())
            except RefusedLinkError:
                raise
            except LinkError:  # also while the server has not seen that the first one broke
                time.sleep(_AGAIN_S)
        raise LinkError(f"{broken}; not back within link.reconnect_s={again_s:g}")

    @property
    def _norms_sent(self) -> bool:
        return bool(self._said) and self._said[-1].kind == FrameKind.NORMS

    def _resumed(self, came: Frame) -> Frame | None:
        if came.kind != FrameKind.RESUME or [each.shape for each in came.tensors] != [(2,)]:
            raise WireError("the decoder does not say which step was the last")
        last, own = came.tensors[0].tolist()
        if last == self._step and self._norms_sent:
            own_norm = torch.tensor([own], dtype=torch.float64)
            return Frame(FrameKind.NORMS, self._round, self._step, 0, (own_norm,))
        if self._precisions.coder:
            raise RefusedLinkError(f"{_PEER}: broke before the server had done step {self._step}")
        for frame in self._said:
            if frame.kind == FrameKind.NORMS:  # would overtake activations: all were answered
                for _ in self._answered:
                    self._next()
            self._stream.send(frame)
        return None

    def _keep(self, frame: Frame) -> None:
        submitted = self._submitted.pop(frame.micro_batch, None)
        if submitted is None or not frame.tensors or frame.tensors[0].shape != ():
            raise WireError(f"the decoder's answer to micro-batch {frame.micro_batch} does not fit")
        (sent, read), (loss, *parts) = submitted, frame.tensors
        gradient = decode(parts, sent.shape, self._precisions.gradient, sent.dtype)
        self._answered.add(frame.micro_batch)
        self._answers[frame.micro_batch] = float(loss), scattered(gradient, read)
