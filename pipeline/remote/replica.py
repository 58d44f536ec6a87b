"""Copies of all blocks on the control unit's disk: what a cluster goes on from without a device."""

import threading
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping
from pathlib import Path

from torch import Tensor

from collapipe.errors import StorageError, WireError
from collapipe.models.part import prefixed, select
from collapipe.temporary import TemporaryFolder
from collapipe.tensors import Tensors, all_finite
from collapipe.wire.parts import joined, mapped_part, most_bytes, read_part

Start = Callable[[str], Tensors]
"""A block's weights and optimiser state before the round's first step, by their names in the whole
model."""


class Replica:
    """Of each block what trains, with the optimiser's state, as it is after a step.

    ``step`` is the last one that is complete; before the first is, blocks are as at the ``start``.
    Nothing is ``put`` before ``open``. Devices' threads ``put`` at once; older steps than the last
    complete one are forgotten. ``state_like`` tells what the optimiser remembers of weights;
    ``trained`` are names of weights that no block may lack; what else is frozen never changes.
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
        self._expected: tuple[int, Mapping[str, str]] = 0, {}  # changed at once, never inside
        self.step: int | None = None
        self.told: int | None = None  # the last step that devices were told to do
        self._temporary: TemporaryFolder | None = None

    def open(self) -> None:
        """Make the folder of the files; who calls this calls ``close``. Raises ``StorageError``."""
        try:
            self._temporary = TemporaryFolder("replica")
        except OSError as error:
            raise StorageError(
                f"no folder for copies of blocks ({error.strerror}); set TMPDIR to one that can be "
                "written"
            ) from error

    def close(self) -> None:
        """Remove the files."""
        if self._temporary is not None:
            self._temporary.close()

    def expect(self, epoch: int, holders: Mapping[str, str]) -> None:
        """From now on take blocks under the plan of ``epoch`` alone, each of the device that holds
        it. Those of a step that is not complete are forgotten: another cut computes it anew."""
        with self._lock:
            self._expected = epoch, holders
            for step in {each for _, each in self._came} - {self.step}:
                self._forget(step)

    def most_bytes(self) -> int:
        """More than anything that is ``put`` takes."""
        return max(map(self._most_bytes, self._blocks))

    def put(
        self, sender: str, epoch: int, name: str, step: int, left: int, data: bytes | memoryview
    ) -> None:
        """Keep tensors of a block as they are after ``step``, of which ``left`` such follow;
        nothing of a plan that was given up, or of a step that is complete. Raises ``WireError`` for
        what cannot be one: of a device that does not hold it, of a step that nobody was told to do,
        too large, twice, of other names, shapes or dtypes, or with values that are not finite."""
        current, holders = self._expected
        if epoch != current:
            return
        if holders.get(name) != sender or self.told is None or not 0 <= step <= self.told:
            raise WireError(f"part {name[:40]!r} of step {step}, which it was not told to do")
        if not self._newer(step):
            return
        with self._lock:  # also so that one at a time takes memory
            if epoch != self._expected[0]:  # blocks are on their way to devices, all of one step
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
        """A block's weights, or, if not ``whole``, those that train."""
        own, trained = self.tensors(name).items(), self._trained[name]
        return {k: each for k, each in own if "/" not in k and (whole or k in trained)}

    def moments(self, name: str) -> Tensors:
        """A block's optimiser state. No step is complete before all devices have theirs."""
        return {key: each for key, each in self.tensors(name).items() if "/" in key}

    def packed(self, name: str, keys: Collection[str]) -> Tensor:
        """Some of a block's tensors, as safetensors in a uint8 [n]."""
        own = self.tensors(name)
        return joined({key: own[key] for key in keys})

    def tensors(self, name: str) -> Tensors:
        """A block with its optimiser's state, by names in the whole model; of files, from which
        it is read when it is used."""
        start, step = self._start(name), self.step
        if step is None:
            return start
        found = {key: tensor for key, tensor in start.items() if "/" not in key}
        for left in self._came[name, step]:
            found |= mapped_part(self._file(name, step, left))
        return found

    def waits_for(self) -> str:
        """A device that has not sent a block of the step that is completed next."""
        with self._lock:
            later = [step for step in self._have if self._newer(step)]
            have = self._have[min(later)] if later else set()
            return next(device for name, device in self._expected[1].items() if name not in have)

    def _keep(self, name: str, step: int, left: int, data: bytes | memoryview) -> bool:
        """Whether it is kept."""
        if len(data) > self._most_bytes(name):
            raise WireError(f"{name}: {len(data):,} bytes, at most {self._most_bytes(name):,}")
        self._file("new").write_bytes(data)
        keys, came = self._check(name), self._came[name, step]
        known = set[str]().union(*came.values())
        if left in came or keys & known:
            raise WireError(f"{name}: came twice after step {step}")
        if not left and (missing := self._missing(name, keys | known)):
            raise WireError(f"{name}: came without {min(missing)[:80]!r}")
        if left and not keys:  # of which any number might come
            return False
        self._file("new").rename(self._file(name, step, left))
        came[left] = keys
        return True

    def _most_bytes(self, name: str) -> int:
        return most_bytes(max(each.nbytes for each in self._start(name).values()))

    def _check(self, name: str) -> set[str]:
        """Names of the tensors that have come last."""
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
        """What trains, and what is left of state that came: nobody could load half of it."""
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
    """A block's share of the encoder's weights and optimiser state."""

    def start(name: str) -> Tensors:
        return prefixed(name, select(weights, name)) | prefixed(name, select(state, name))

    return start
