"""Copies of all blocks on the control unit's disk, from which a cluster recovers lost devices."""

import functools
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from torch import Tensor

from collapipe.errors import StorageError, WireError
from collapipe.models.part import prefixed
from collapipe.process.folders import TemporaryFolder
from collapipe.tensors import Tensors, not_finite
from collapipe.wire.frames import Frame
from collapipe.wire.parts import grouped, joined, mapped_part, most_bytes, read_part
from pipeline.devices.block_form import BlockForm
from pipeline.devices.encoding import as_view, unpacked
from pipeline.devices.messages import PartHeader

Start = Callable[[str], Tensors]
"""Returns a block's weights and optimiser state before the round's first step, by their names in
the whole model."""


class Replica:
    """The trainable weights and optimiser state of each block after a step.

    ``step`` is the last step of which all blocks have arrived; until the first is complete, blocks
    come from ``start``. Call ``open`` before ``put``. Several threads may call ``put`` at the
    same time. Steps older than the last complete one are deleted.

    ``forms`` are the blocks' forms by name; every copy must contain the trainable weights.
    ``fixed`` are frozen weights by part, which are read only if they are sent.
    """

    def __init__(
        self, forms: Mapping[str, BlockForm], start: Start, fixed: Mapping[str, Tensors]
    ) -> None:
        self.forms, self._start = forms, start
        # asked for each group of a block's tensors
        self._frozen = functools.lru_cache(maxsize=1)(
            lambda name: prefixed(name, fixed.get(name, {}))
        )
        self._lock = threading.Lock()
        self._have: defaultdict[int, set[str]] = defaultdict(set)
        self._received: defaultdict[tuple[str, int], dict[int, set[str]]] = defaultdict(dict)
        self._expected: tuple[int, Mapping[str, str]] = 0, {}  # replaced as a whole, never mutated
        self.step: int | None = None
        self.commanded_step: int | None = None  # the last step that devices were commanded to do
        self.num_copies, self.busy_s = 0, 0.0  # copies of all blocks, and their processor time
        self.unreadable: StorageError | None = None  # threads that send copies cannot raise it
        self._temporary: TemporaryFolder | None = None

    def open(self) -> None:
        """Make the folder of the files; the caller must call ``close``. Raises ``StorageError`` if
        it cannot be made."""
        try:
            self._temporary = TemporaryFolder("replica")
        except OSError as error:
            raise StorageError(
                f"cannot make a folder for copies of blocks ({error.strerror}); set TMPDIR to a "
                "writable folder"
            ) from error

    def close(self) -> None:
        """Remove the files."""
        if self._temporary is not None:
            self._temporary.close()

    def expect(self, epoch: int, holders: Mapping[str, str]) -> None:
        """Accept blocks only under the plan of ``epoch`` from now on, and only from their
        ``holders``. Blocks of incomplete steps are deleted, because the new plan repeats them."""
        with self._lock:
            self._expected = epoch, holders
            for step in {each for _, each in self._received} - {self.step}:
                self._forget(step)

    def most_bytes(self) -> int:
        """An upper bound of the size in bytes of the data in one ``put``."""
        return most_bytes(max(each.largest_bytes for each in self.forms.values()))

    def put(self, sender: str, frame: Frame) -> None:
        """Store a part of a block after the frame's step. Parts of an earlier plan or of a complete
        step are ignored.

        Raises ``WireError`` if the part is invalid: the sender does not hold the block, the step
        was not commanded, the part is too large or repeated, or its names, shapes, dtypes or
        values are wrong. Raises ``StorageError`` if the part cannot be stored.
        """
        described, data = frame.only(2)
        header = unpacked(PartHeader, described)
        name, epoch, step = header.block, frame.epoch, frame.step
        current, holders = self._expected
        if epoch != current:
            return
        if holders.get(name) != sender or self.commanded_step is None or step > self.commanded_step:
            raise WireError(f"part {name[:40]!r} of step {step}, which was not requested")
        if not self._newer(step):
            return
        with self._lock, self._busy():  # also so that only one part at a time uses memory
            if epoch != self._expected[0]:  # devices receive blocks of one step; it must not change
                return
            try:
                self._keep(header, step, as_view(data))
            except WireError as error:
                raise WireError(f"{name}: {error}") from error
            except OSError as error:
                raise StorageError(
                    f"{self._file('new').parent}: copies of blocks cannot be written "
                    f"({error.strerror}); make room there, or set TMPDIR to a folder with room"
                ) from error
            finally:
                self._file("new").unlink(missing_ok=True)
            if header.left:
                return
            self._have[step].add(name)
            if len(self._have[step]) < len(self.forms) or not self._newer(step):
                return
            self.step = step
            self.num_copies += 1
            for older in {each for _, each in self._received if each < step}:
                self._forget(older)

    def parts(self, name: str, whole: bool) -> list[Sequence[str]]:
        """Group the names of a block's tensors to send together: all weights if ``whole``, else the
        trainable ones, and after these the optimiser's state."""
        form, own = self.forms[name], self.tensors(name)
        if whole:
            own = self._frozen(name) | own
        sent = form.weights if whole else form.trained
        state = {key: each for key, each in own.items() if "/" in key}
        groups = grouped({key: each for key, each in own.items() if key in sent})
        return [*groups, *(grouped(state) if state else ())]

    def packed(self, name: str, keys: Collection[str]) -> Tensor:
        """The block's tensors ``keys`` in the safetensors format, as uint8 [n]."""
        own = self.tensors(name)
        if not own.keys() >= {*keys}:
            own = self._frozen(name) | own
        return joined({key: own[key] for key in keys})

    def tensors(self, name: str) -> Tensors:
        """A block's weights, without those in ``fixed``, and optimiser state, by their names in the
        whole model. Tensors of files are memory-mapped, so they are read on access. Raises
        ``StorageError``, and keeps it as ``unreadable``, if a file cannot be mapped."""
        start, step = self._start(name), self.step
        if step is None:
            return start
        found = {key: tensor for key, tensor in start.items() if "/" not in key}
        try:
            for left in self._received[name, step]:
                found |= mapped_part(self._file(name, step, left))
        except OSError as error:
            self.unreadable = StorageError(
                f"cannot read the copy of {name} ({error}); keep TMPDIR, or raise ulimit -n"
            )
            raise self.unreadable from error
        return found

    def waits_for(self) -> str:
        """A device whose block is missing in the next step to be completed."""
        with self._lock:
            later = [step for step in self._have if self._newer(step)]
            have = self._have[min(later)] if later else set()
            return next(device for name, device in self._expected[1].items() if name not in have)

    @contextmanager
    def _busy(self) -> Iterator[None]:
        """Add the processor time of this thread in the context."""
        began_s = time.thread_time()
        try:
            yield
        finally:
            self.busy_s += time.thread_time() - began_s

    def _keep(self, header: PartHeader, step: int, data: memoryview) -> None:
        """Check and store a part. Empty parts, which could arrive without end, are not stored."""
        name, form = header.block, self.forms[header.block]
        if len(data) > (most := most_bytes(form.largest_bytes)):
            raise WireError(f"{len(data):,} bytes, at most {most:,}")
        self._file("new").write_bytes(data)
        tensors, received = read_part(self._file("new")), self._received[name, step]
        form.check(tensors)
        if (bad := not_finite(tensors)) is not None:
            raise WireError(f"{bad!r} has values that are not finite")
        known = set[str]().union(*received.values())
        if header.left in received or tensors.keys() & known:
            raise WireError(f"received twice after step {step}")
        if not header.left:
            form.check_complete(tensors.keys() | known, whole=False)
        elif not tensors:
            return
        self._file("new").rename(self._file(name, step, header.left))
        received[header.left] = set(tensors)

    def _forget(self, step: int) -> None:
        self._have.pop(step, None)
        for key in [each for each in self._received if each[1] == step]:
            for left in self._received.pop(key):
                self._file(*key, left).unlink(missing_ok=True)

    def _newer(self, step: int) -> bool:
        return self.step is None or self.step < step

    def _file(self, *name: object) -> Path:
        assert self._temporary is not None
        return self._temporary.path / f"{'-'.join(map(str, name))}.safetensors"


def starting_with(weights: Tensors, state: Tensors) -> Start:
    """Return a function from a block's name to its share of the encoder's weights and optimiser
    state."""
    shares = defaultdict[str, Tensors](dict)
    for key, each in (weights | state).items():
        shares[".".join(key.split(".", 2)[:2])][key] = each.detach()
    return lambda name: dict(shares[name])
