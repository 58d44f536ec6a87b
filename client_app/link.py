"""The decoder link's client: the server's decoder as the head of this cluster's pipeline."""

import functools
import logging
import math
import queue
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import grpc
import torch
from torch import Tensor

from client_app.payloads import ActivationMeter
from collapipe.errors import BrokenLinkError, LinkError, RefusedLinkError, WireError
from collapipe.models.dropout import DropoutKey
from collapipe.models.sent_rows import RowsRead, scattered
from collapipe.process import cancellation
from collapipe.sections import LinkSettings
from collapipe.tensors import Batch, Tensors
from collapipe.wire import frames
from collapipe.wire.compression.codec import FLOAT32, decode, encode
from collapipe.wire.compression.feedback import ChangeCoder
from collapipe.wire.frames import Frame, FrameKind
from collapipe.wire.link import METHOD, credentials
from collapipe.wire.messages import LinkAddress
from collapipe.wire.streams.channels import CHANNEL_OPTIONS, start_stream
from collapipe.wire.streams.frame_stream import FrameStream

_log = logging.getLogger(__name__)
_PEER = "decoder link"
_POLL_S = 0.1  # pause between checks of cancellation while waiting for the decoder
_AGAIN_S = 0.2  # pause between attempts to reopen a stream


@functools.lru_cache(maxsize=2)
def _channel(link: LinkAddress) -> grpc.Channel:
    """Open a connection that outlives the round, because its handshake may take longer than a small
    round.

    Certificates and keys belong to one run; a channel of an earlier run closes when the cache drops
    it. ``link`` must have no token, because a token belongs to one round.
    """
    credentials = grpc.ssl_channel_credentials(
        link.server_certificate, link.unit_key, link.unit_certificate
    )
    options = [*CHANNEL_OPTIONS, ("grpc.ssl_target_name_override", link.server_name)]
    return grpc.secure_channel(link.address, credentials, options=options)


@dataclass(frozen=True, slots=True)
class LinkPrecisions:
    """Precisions of activations and gradients. A ``coder`` sends activations as changes; a
    ``meter`` measures them before they are rounded."""

    activation: str = FLOAT32
    gradient: str = FLOAT32
    coder: ChangeCoder | None = None
    meter: ActivationMeter | None = None


@dataclass(slots=True)
class _Step:
    """A step with its frames, for repeating it. ``submitted`` has the activations without an
    answer, with their rows; ``answers`` has the server's answers that nobody has read."""

    key: DropoutKey
    micro_batches: Sequence[Batch]
    sent: list[Frame] = field(default_factory=list)
    submitted: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)
    answers: dict[int, tuple[float, Tensor]] = field(default_factory=dict)
    answered: set[int] = field(default_factory=set)
    opened_again: bool = False

    @property
    def number(self) -> int:
        return self.key.step

    @property
    def norms_sent(self) -> bool:
        return bool(self.sent) and self.sent[-1].kind == FrameKind.NORMS


class DecoderLink:
    """A ``PipelineHead`` that streams activations to the server and receives losses and gradients;
    both are limited to the rows that the head reads.

    If a stream breaks, the link tries to reopen it for ``link.reconnect_s`` and repeats the current
    step. A step whose activations are sent as changes cannot be repeated, because the server has
    already applied them. The answer to a step's norms confirms that the server has finished the
    step: after a round's last step no answer is outstanding. Raises ``LinkError`` with
    gRPC's cause if the server refuses or closes the stream, or cannot be reached.
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
        self.bytes_up = self.bytes_down = 0  # counts each frame once, even if it was repeated
        self._link, self._unit, self._settings = link, unit, settings
        self._round, self._rows, self._precisions = round_, rows, precisions
        self._step = _Step(DropoutKey(0, unit, 0), ())
        self._broke_at = -1, 0  # the step, and the number of its answers
        self._give_up_s = 0.0  # when a link that breaks there again is given up
        self._arrived = threading.Event()

    def __enter__(self) -> "DecoderLink":
        self._stream = self._opened()
        return self

    def __exit__(self, *_: object) -> None:
        self._stream.close()

    def begin(self, key: DropoutKey, micro_batches: Sequence[Batch], target_tokens: int) -> None:
        self._step = _Step(key, micro_batches)
        self._send(FrameKind.BEGIN, 0, torch.tensor([len(micro_batches), target_tokens]))

    def submit(self, micro_batch: int, hidden: Tensor) -> None:
        """Queue the activation's frame and return at once."""
        batch, how = self._step.micro_batches[micro_batch], self._precisions
        read = self._rows.of(batch.mask, batch.targets)
        sent = hidden.detach().cpu()[read]
        self._step.submitted[micro_batch] = sent, read
        if how.meter is not None:
            how.meter.take(self._step.number, micro_batch, sent)
        generator = self._step.key.generator("activation", micro_batch)
        if how.coder is None:
            parts = encode(sent, how.activation, generator)
        else:
            assert batch.rows is not None
            counts = read.sum(1)
            parts = how.coder.encode(sent, batch.rows, counts, how.activation, generator)
        self._send(FrameKind.ACTIVATION, micro_batch, *parts, batch.mask, batch.targets)

    def ready(self, micro_batch: int) -> bool:
        while micro_batch not in self._step.answers and self._stream.waiting():
            if frame := self._taken(FrameKind.GRADIENT):
                self._keep(frame)
        return micro_batch in self._step.answers

    def answer(self, micro_batch: int) -> tuple[float, Tensor]:
        while micro_batch not in self._step.answers:
            self._keep(self._receive(FrameKind.GRADIENT))
        return self._step.answers.pop(micro_batch)

    def on_answer(self, arrived: threading.Event) -> None:
        self._arrived = self._stream.arrived = arrived

    def exchange_norms(self, squared_norms: Sequence[float]) -> list[float]:
        """Send the norms, by which the server steps its head. Returns the head's squared norm."""
        self._send(FrameKind.NORMS, 0, torch.tensor(squared_norms, dtype=torch.float64))
        frame = self._receive(FrameKind.NORMS)
        if len(frame.tensors) != 1 or frame.tensors[0].shape != (1,):
            raise WireError("the decoder's answer to the norms is not one number")
        return [float(frame.tensors[0])]

    def step(self, rate: float, scale: float) -> None:
        """Do nothing: the server stepped in ``exchange_norms``."""

    def weights(self) -> Tensors:
        """Return no weights: the server has the head."""
        return {}

    def optimizer_state(self) -> Tensors:
        return {}

    def forget(self) -> None:
        """Drop the current step's tensors; the server drops its step when the stream ends."""
        self._step.answers.clear()
        self._step.submitted.clear()

    def _opened(self) -> FrameStream:
        stream = FrameStream(_PEER, self._settings.max_message_bytes, self._arrived)
        channel = _channel(replace(self._link, token=""))
        start_stream(stream, channel, METHOD, credentials(self._unit, self._link.token))
        return stream

    def _send(self, kind: FrameKind, micro_batch: int, *tensors: Tensor) -> None:
        frame = Frame(kind, self._round, self._step.number, micro_batch, tensors)
        if self._settings.reconnect_s:
            self._step.sent.append(frame)
        self.bytes_up += frames.size(frame)
        self._stream.send(frame)

    def _receive(self, expected: FrameKind) -> Frame:
        while (frame := self._taken(expected)) is None:
            continue
        return frame

    def _taken(self, expected: FrameKind) -> Frame | None:
        """Receive a frame of the ``expected`` kind. Returns None if the frame is a repetition, or
        if the stream was reopened without a pending answer."""
        frame: Frame | None
        try:
            frame = self._next()
        except BrokenLinkError as broken:
            if not self._settings.reconnect_s or (
                self._precisions.coder and not self._step.norms_sent
            ):
                raise
            frame = self._reopened(broken)
        if frame is None or self._known(frame):
            return None
        if frame.kind != expected or frame.step != self._step.number:
            raise WireError(
                f"the decoder answered {frame.kind.name} of step {frame.step}; "
                f"expected {expected.name} of step {self._step.number}"
            )
        self.bytes_down += frames.size(frame)
        return frame

    def _next(self, until: float = math.inf) -> Frame:
        """Return the next frame. Raises ``LinkError`` if none has come at the time ``until`` of
        ``time.monotonic``."""
        while True:
            cancellation.check()
            try:
                return self._stream.receive(_POLL_S)
            except queue.Empty as silent:
                if time.monotonic() > until:
                    raise LinkError(f"{_PEER}: silent") from silent
            except LinkError as error:
                raise self._explained(error) from None

    def _explained(self, error: LinkError) -> LinkError:
        """Return the error with an explanation for this link."""
        if isinstance(error, RefusedLinkError):
            return RefusedLinkError(f"{_PEER}: refused: no open round has this unit's token")
        if grpc.StatusCode.UNAVAILABLE.name in str(error) and not self._stream.bytes_in:
            where = f"{self._link.address}, which is link.advertise or else link.host there"
            return BrokenLinkError(f"{error}; the server is dialled at {where}")
        return error

    def _known(self, frame: Frame) -> bool:
        """Whether a reopened stream repeats an answer that has already arrived."""
        same = frame.kind == FrameKind.GRADIENT and frame.step == self._step.number
        return same and frame.micro_batch in self._step.answered and self._step.opened_again

    def _reopened(self, broken: BrokenLinkError) -> Frame | None:
        """Open another stream and repeat the current step's frames. If the server had finished the
        step and its answer was lost, return that answer instead."""
        _log.warning("%s; the stream is reopened at step %d", broken, self._step.number)
        again_s, reached = self._settings.reconnect_s, (self._step.number, len(self._step.answered))
        if self._broke_at == reached:  # perhaps what is repeated breaks the stream
            time.sleep(_AGAIN_S)
        else:
            self._broke_at, self._give_up_s = reached, time.monotonic() + again_s
        deadline = self._give_up_s
        while time.monotonic() < deadline:
            self._stream.close()
            self._stream, self._step.opened_again = self._opened(), True
            self._stream.send(Frame(FrameKind.RESUME, self._round, self._step.number, 0))
            try:
                return self._resumed(self._next(deadline), deadline)
            except RefusedLinkError:
                raise
            except LinkError:  # also until the server notices that the first stream broke
                time.sleep(_AGAIN_S)
        raise LinkError(f"{broken}; not reconnected within link.reconnect_s={again_s:g}")

    def _resumed(self, answer: Frame, deadline: float) -> Frame | None:
        if answer.kind != FrameKind.RESUME or [each.shape for each in answer.tensors] != [(2,)]:
            raise WireError("the decoder's answer to RESUME lacks the last step")
        last, own = answer.tensors[0].tolist()
        if last == self._step.number and self._step.norms_sent:
            own_norm = torch.tensor([own], dtype=torch.float64)
            return Frame(FrameKind.NORMS, self._round, self._step.number, 0, (own_norm,))
        if self._precisions.coder:
            raise RefusedLinkError(
                f"{_PEER}: broke before the server finished step {self._step.number}"
            )
        for frame in self._step.sent:
            if frame.kind == FrameKind.NORMS:  # must follow the activations' repeated answers
                for _ in self._step.answered:
                    self._next(deadline)
            self._stream.send(frame)
        return None

    def _keep(self, frame: Frame) -> None:
        submitted = self._step.submitted.pop(frame.micro_batch, None)
        if submitted is None or not frame.tensors or frame.tensors[0].shape != ():
            raise WireError(f"the decoder's answer to micro-batch {frame.micro_batch} does not fit")
        (sent, read), (loss, *parts) = submitted, frame.tensors
        gradient = decode(parts, sent.shape, self._precisions.gradient, sent.dtype)
        self._step.answered.add(frame.micro_batch)
        self._step.answers[frame.micro_batch] = float(loss), scattered(gradient, read)
