"""Copies of all blocks on the control unit's disk, from which a cluster recovers lost devices."""

import threading
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping
from pathlib import Path

from torch import Tensor

from collapipe.errors import StorageError, WireError
from collapipe.models.part import prefixed, select
from collapipe.process.folders import TemporaryFolder
from collapipe.tensors import Tensors, all_finite
from collapipe.wire.parts import joined, mapped_part, most_bytes, read_part

Start = Callable[[str], Tensors]
"""Returns a block's weights and optimiser state before the round's first step, by their names in
the whole model."""


class Replica:
    """The trainable weights and optimiser state of each block after a step.

    ``step`` is the last step of which all blocks have arrived; until the first is complete, blocks
    come from ``start``. Call ``open`` before ``put``. Several threads may call ``put`` at the
    same time. Steps older than the last complete one are deleted.

    ``state_like`` returns the names and shapes of the optimiser's state for given weights.
    ``trained`` are the names of the trainable weights, which every copy must contain.
    """

    def __init__(
        self,
        blocks: Collection[str],
        start: Start,
        state_like: Callable[[Tensors], Tensors],
        trained: Collection[str] = frozenset(),
    ) -> None:
        self._blocks, self._start, self._state_like = blocks, start, state_like
        self._trained = {
            name: {each for each in trained if each.startswith(f"{name}.")} for name in blocks
        }
        self._lock = threading.Lock()
        self._have: defaultdict[int, set[str]] = defaultdict(set)
        self._came: defaultdict[tuple[str, int], dict[int, set[str]]] = defaultdict(dict)
        self._expected: tuple[int, Mapping[str, str]] = 0, {}  # replaced as a whole, never mutated
        self.step: int | None = None
        self.told: int | None = None  # the last step that devices were commanded to do
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
            for step in {each for _, each in self._came} - {self.step}:
                self._forget(step)

    def most_bytes(self) -> int:
        """An upper bound of the size in bytes of the data in one ``put``."""
        return max(map(self._most_bytes, self._blocks))

    def put(
        self, sender: str, epoch: int, name: str, step: int, left: int, data: bytes | memoryview
    ) -> None:
        """Store a part of a block after ``step``; ``left`` parts of it follow. Parts of an earlier
        plan or of a complete step are ignored.

        Raises ``WireError`` if the part is invalid: the sender does not hold the block, the step
        was not commanded, the part is too large or repeated, or its names, shapes, dtypes or
        values are wrong.
        """
        current, holders = self._expected
        if epoch != current:
            return
        if holders.get(name) != sender or self.told is None or not 0 <= step <= self.told:
            raise WireError(f"part {name[:40]!r} of step {step}, which was not requested")
        if not self._newer(step):
            return
        with self._lock:  # also so that only one part at a time uses memory
            if epoch != self._expected[0]:  # devices receive blocks of one step; it must not change
                return
            try:
                kept = self._keep(name, step, left, data)
            finally:
                self._file("new").unlink(missing_ok=True)
            if not kept:
                return
            if left:
                return
            self._have[step].add(name)
            if len(self._have[step]) < len(self._blocks) or not self._newer(step):
                return
            self.step = step
            for older in {each for _, each in self._came if each < step}:
                self._forget(older)

    def weights(self, name: str, whole: bool) -> Tensors:
        """A block's weights: all if ``whole``, else the trainable ones."""
        own, trained = self.tensors(name).items(), self._trained[name]
        return {k: each for k, each in own if "/" not in k and (whole or k in trained)}

    def moments(self, name: str) -> Tensors:
        """A block's optimiser state. It may be sent late: no step completes without it."""
        return {key: each for key, each in self.tensors(name).items() if "/" in key}

    def packed(self, name: str, keys: Collection[str]) -> Tensor:
        """The block's tensors ``keys`` in the safetensors format, as uint8 [n]."""
        own = self.tensors(name)
        return joined({key: own[key] for key in keys})

    def tensors(self, name: str) -> Tensors:
        """A block's weights and optimiser state by their names in the whole model. Tensors of files
        are memory-mapped, so they are read on access."""
        start, step = self._start(name), self.step
        if step is None:
            return start
        found = {key: tensor for key, tensor in start.items() if "/" not in key}
        for left in self._came[name, step]:
            found |= mapped_part(self._file(name, step, left))
        return found

    def waits_for(self) -> str:
        """A device whose block is missing in the next step to be completed."""
        with self._lock:
            later = [step for step in self._have if self._newer(step)]
            have = self._have[min(later)] if later else set()
            return next(device for name, device in self._expected[1].items() if name not in have)

    def _keep(self, name: str, step: int, left: int, data: bytes | memoryview) -> bool:
        """Check and store a part; return whether it was stored."""
        if len(data) > self._most_bytes(name):
            raise WireError(f"{name}: {len(data):,} bytes, at most {self._most_bytes(name):,}")
        self._file("new").write_bytes(data)
        keys, came = self._check(name), self._came[name, step]
        known = set[str]().union(*came.values())
        if left in came or keys & known:
            raise WireError(f"{name}: received twice after step {step}")
        if not left and (missing := self._missing(name, keys | known)):
            raise WireError(f"{name}: lacks {min(missing)[:80]!r}")
        if left and not keys:  # empty parts could arrive without end
            return False
        self._file("new").rename(self._file(name, step, left))
        came[left] = keys
        return True

    def _most_bytes(self, name: str) -> int:
        return most_bytes(max(each.nbytes for each in self._start(name).values()))

    def _check(self, name: str) -> set[str]:
        """Check the tensors of the last part, and return their names."""
        weights = {key: each for key, each in self._start(name).items() if "/" not in key}
        known = weights | self._state_like(weights)
        try:
            tensors = read_part(self._file("new"))
        except WireError as error:
            raise WireError(f"{name}: {error}") from error
        for key, tensor in tensors.items():
            like = known.get(key)
            if like is None or (tensor.shape, tensor.dtype) != (like.shape, like.dtype):
                raise WireError(f"{name}: {key[:80]!r} {tensor.dtype} {list(tensor.shape)}")
            if not all_finite(tensor):
                raise WireError(f"{name}: {key[:80]!r} has values that are not finite")
        return set(tensors)

    def _missing(self, name: str, came: Collection[str]) -> set[str]:
        """Names that are missing: trainable weights, and the rest of any partial optimiser
        state."""
        start, stepped = self._start(name), {key.partition("/")[0] for key in came if "/" in key}
        state = self._state_like({key: start[key] for key in stepped})
        return (self._trained[name] | state.keys()).difference(came)

    def _forget(self, step: int) -> None:
        self._have.pop(step, None)
        for key in [each for each in self._came if each[1] == step]:
            for left in self._came.pop(key):
                self._file(*key, left).unlink(missing_ok=True)

    def _newer(self, step: int) -> bool:
        return self.step is None or self.step < step

    def _file(self, *name: object) -> Path:
        assert self._temporary is not None
        return self._temporary.path / f"{'-'.join(map(str, name))}.safetensors"


def starting_with(weights: Tensors, state: Tensors) -> Start:
    """Return a function that selects a block's share of the encoder's weights and optimiser
    state."""

    def start(name: str) -> Tensors:
        return prefixed(name, select(weights, name)) | prefixed(name, select(state, name))

    return start
