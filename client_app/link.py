"""The decoder link's client: the server's decoder as the head of this cluster's pipeline."""

import functools
import queue
import threading
from collections.abc import Sequence
from dataclasses import replace

import grpc
import torch
from torch import Tensor

from collapipe import cancellation
from collapipe.batch import Batch
from collapipe.errors import LinkError, WireError
from collapipe.models.dropout import DropoutKey
from collapipe.models.sent_rows import RowsRead, scattered
from collapipe.wire import frames
from collapipe.wire.compression import FLOAT32, decode, encode
from collapipe.wire.feedback import ChangeCoder
from collapipe.wire.frames import Frame, FrameKind
from collapipe.wire.link import METHOD, SERVER_NAME, channel_options, credentials
from collapipe.wire.messages import LinkAddress

_POLL_S = 0.1  # between two looks at cancellation while waiting for the decoder


@functools.lru_cache(maxsize=2)
def _channel(link: LinkAddress, max_message_bytes: int) -> grpc.Channel:
    """A connection that outlives the round, for its handshake costs more than a small round.

    Certificates and keys are those of one run; a channel of an earlier run closes when the cache
    drops it. ``link`` has no token here, for that is the round's.
    """
    credentials = grpc.ssl_channel_credentials(
        link.server_certificate, link.unit_key, link.unit_certificate
    )
    options = [*channel_options(max_message_bytes), ("grpc.ssl_target_name_override", SERVER_NAME)]
    return grpc.secure_channel(link.address, credentials, options=options)


class DecoderLink:
    """A ``HeadStage`` that streams activations to the server and gets losses and gradients back; of
    both the rows that the head reads, in the precisions ``activation`` and ``gradient``. With a
    ``coder`` activations may travel as changes.

    Raises ``LinkError`` where the server refuses, closes or vanishes, with gRPC's own cause.
    """

    def __init__(
        self,
        link: LinkAddress,
        unit: int,
        round_: int,
        max_message_bytes: int,
        rows: RowsRead,
        activation: str = FLOAT32,
        gradient: str = FLOAT32,
        coder: ChangeCoder | None = None,
    ) -> None:
        self.bytes_up = 0
        self.bytes_down = 0
        self._round, self._rows = round_, rows
        self._activation, self._gradient, self._coder = activation, gradient, coder
        self._step = 0
        self._outgoing: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._incoming: queue.SimpleQueue[Frame | Exception] = queue.SimpleQueue()
        self._answers: dict[int, tuple[float, Tensor]] = {}
        self._submitted: dict[int, tuple[Tensor, Tensor]] = {}  # what was sent, and its rows
        channel = _channel(replace(link, token=""), max_message_bytes)
        self._call = channel.stream_stream(METHOD)(
            iter(self._outgoing.get, None), metadata=credentials(unit, link.token)
        )
        self._reader = threading.Thread(target=self._read, daemon=True, name="decoder-link")

    def __enter__(self) -> "DecoderLink":
        self._reader.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._outgoing.put(None)
        self._call.cancel()
        self._reader.join(timeout=5)

    def begin(self, key: DropoutKey, micro_batches: Sequence[Batch], target_tokens: int) -> None:
        self._step, self._key, self._micro_batches = key.step, key, micro_batches
        self._send(FrameKind.BEGIN, 0, torch.tensor([len(micro_batches), target_tokens]))

    def submit(self, micro_batch: int, hidden: Tensor) -> None:
        """Return as soon as gRPC has the frame."""
        batch = self._micro_batches[micro_batch]
        read = self._rows.of(batch.mask, batch.targets)
        sent = hidden.detach().cpu()[read]
        self._submitted[micro_batch] = sent, read
        generator = self._key.generator("activation", micro_batch)
        if self._coder is None:
            parts = encode(sent, self._activation, generator)
        else:
            assert batch.rows is not None
            counts = read.sum(1)
            parts = self._coder.encode(sent, batch.rows, counts, self._activation, generator)
        self._send(FrameKind.ACTIVATION, micro_batch, *parts, batch.mask, batch.targets)

    def ready(self, micro_batch: int) -> bool:
        while micro_batch not in self._answers and not self._incoming.empty():
            self._keep(self._receive(FrameKind.GRADIENT))
        return micro_batch in self._answers

    def answer(self, micro_batch: int) -> tuple[float, Tensor]:
        while micro_batch not in self._answers:
            self._keep(self._receive(FrameKind.GRADIENT))
        return self._answers.pop(micro_batch)

    def exchange_norms(self, squared_norms: Sequence[float]) -> list[float]:
        """The server steps its decoder by the same norms."""
        self._send(FrameKind.NORMS, 0, torch.tensor(squared_norms, dtype=torch.float64))
        tensors = self._receive(FrameKind.NORMS).tensors
        if len(tensors) != 1 or tensors[0].shape != (1,):
            raise WireError("the decoder's answer to the norms is not one number")
        return [float(tensors[0])]

    def step(self, rate: float, scale: float) -> None:
        """Nothing to do: the server stepped in ``exchange_norms``."""

    def forget(self) -> None:
        """The server drops the step when the stream ends."""
        self._answers.clear()
        self._submitted.clear()

    def finish(self) -> None:
        """Tell the server that all steps are done, and wait until it knows."""
        self._send(FrameKind.BYE, 0)
        self._receive(FrameKind.BYE)

    def _send(self, kind: FrameKind, micro_batch: int, *tensors: Tensor) -> None:
        data = frames.encode(Frame(kind, self._round, self._step, micro_batch, tensors))
        self.bytes_up += len(data)
        self._outgoing.put(data)

    def _receive(self, expected: FrameKind) -> Frame:
        while True:
            cancellation.check()
            try:
                received = self._incoming.get(timeout=_POLL_S)
            except queue.Empty:
                continue
            if isinstance(received, Exception):
                self._incoming.put(received)  # the next one to ask gets the same answer
                raise received
            if received.kind != expected or received.step != self._step:
                raise WireError(
                    f"the decoder answered {received.kind.name} of step {received.step}; "
                    f"expected {expected.name} of step {self._step}"
                )
            return received

    def _keep(self, frame: Frame) -> None:
        submitted = self._submitted.pop(frame.micro_batch, None)
        if submitted is None or not frame.tensors or frame.tensors[0].shape != ():
            raise WireError(f"the decoder's answer to micro-batch {frame.micro_batch} does not fit")
        (sent, read), (loss, *parts) = submitted, frame.tensors
        gradient = decode(parts, sent.shape, self._gradient, sent.dtype)
        self._answers[frame.micro_batch] = float(loss), scattered(gradient, read)

    def _read(self) -> None:
        put = self._incoming.put
        try:
            for data in self._call:
                self.bytes_down += len(data)
                put(frames.decode(data))
        except grpc.RpcError as error:
            if error.code() == grpc.StatusCode.UNIMPLEMENTED:
                put(LinkError("decoder link: refused: no open round has this unit's token"))
            put(LinkError(f"decoder link: {error.code().name}: {error.details()}"))
        except WireError as error:
            put(error)
        else:
            put(LinkError("decoder link: the server ended the stream early"))
