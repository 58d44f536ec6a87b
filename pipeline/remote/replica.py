"""Copies of all blocks on the control unit's disk: what a cluster goes on from without a device."""

import shutil
import tempfile
import threading
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import load
from torch import Tensor

from collapipe.errors import WireError, one_line
from collapipe.models.part import prefixed, select
from collapipe.tensors import Tensors, all_finite
from collapipe.wire.parts import joined

_HEADER_BYTES = 2**20  # names and shapes, and more
_MOMENTS = "exp_avg", "exp_avg_sq", "momentum_buffer"
_COPIES = 3  # a weight and its moments
Start = Callable[[str], Tensors]
"""A block's weights and optimiser state before the round's first step, by their names in the whole
model."""


class Replica:
    """Of each block what trains, with the optimiser's state, as it is after a step.

    ``step`` is the last one that is complete; before the first is, blocks are as at the ``start``.
    Devices' threads ``put`` at once; older steps than the last complete one are forgotten.
    ``trained`` are names of weights that no block may lack; what else is frozen never changes.
    """

    def __init__(
        self,
        blocks: Collection[str],
        start: Start,
        trained: Collection[str] = frozenset(),
    ) -> None:
        self._blocks, self._start = blocks, start
        self._trained = {
            name: {each for each in trained if each.startswith(f"{name}.")} for name in blocks
        }
        self._lock = threading.Lock()
        self._have: defaultdict[int, set[str]] = defaultdict(set)
        self._expected: tuple[int, Mapping[str, str]] = 0, {}  # changed at once, never inside
        self.step: int | None = None
        self.told: int | None = None  # the last step that devices were told to do
        self._folder = Path(tempfile.mkdtemp(prefix="collapipe-replica-"))

    def close(self) -> None:
        """Remove the files."""
        shutil.rmtree(self._folder, ignore_errors=True)

    def expect(self, epoch: int, holders: Mapping[str, str]) -> None:
        """From now on take blocks under the plan of ``epoch`` alone, each of the device that holds
        it. Those of a step that is not complete are forgotten: another cut computes it anew."""
        with self._lock:
            self._expected = epoch, holders
            for step in [each for each in self._have if each != self.step]:
                self._forget(step)

    def most_bytes(self) -> int:
        """More than any block takes with its optimiser's state."""
        return max(map(self._most_bytes, self._blocks))

    def put(self, sender: str, epoch: int, name: str, step: int, data: bytes) -> None:
        """Keep a block as it is after ``step``; nothing of a plan that was given up, or of a step
        that is complete. Raises ``WireError`` for what cannot be one: of a device that does not
        hold it, of a step that nobody was told to do, too large, of other names, shapes or dtypes,
        or with values that are not finite."""
        current, holders = self._expected
        if epoch != current:
            return
        if holders.get(name) != sender or self.told is None or not 0 <= step <= self.told:
            raise WireError(f"part {name[:40]!r} of step {step}, which it was not told to do")
        if not self._newer(step):
            return
        self._check(name, data)
        self._file(name, step).write_bytes(data)
        with self._lock:
            if epoch != self._expected[0]:  # blocks are on their way to devices, all of one step
                return
            self._have[step].add(name)
            if len(self._have[step]) < len(self._blocks) or not self._newer(step):
                return
            self.step = step
            for older in [each for each in self._have if each < step]:
                self._forget(older)

    def packed(self, name: str, whole: bool = True) -> Tensor:
        """A block, ``whole`` or without its frozen weights, as safetensors in a uint8 [n]."""
        tensors = self.tensors(name).items()
        trained = self._trained[name]
        return joined({k: each for k, each in tensors if whole or k in trained or "/" in k})

    def tensors(self, name: str) -> Tensors:
        """The same, as tensors by their names in the whole model."""
        start = self._start(name)
        if self.step is None:
            return start
        weights = {key: tensor for key, tensor in start.items() if "/" not in key}
        return weights | load(self._file(name, self.step).read_bytes())

    def waits_for(self) -> str:
        """A device that has not sent a block of the step that is completed next."""
        with self._lock:
            later = [step for step in self._have if self._newer(step)]
            have = self._have[min(later)] if later else set()
            return next(device for name, device in self._expected[1].items() if name not in have)

    def _most_bytes(self, name: str) -> int:
        weights = (each for key, each in self._start(name).items() if "/" not in key)
        return _COPIES * sum(each.nbytes for each in weights) + _HEADER_BYTES

    def _check(self, name: str, data: bytes) -> None:
        if len(data) > self._most_bytes(name):
            raise WireError(f"{name}: {len(data):,} bytes, at most {self._most_bytes(name):,}")
        known = self._start(name)
        try:
            tensors = load(data)
        except (SafetensorError, KeyError) as error:
            raise WireError(f"{name}: {one_line(error)}") from error
        if missing := self._trained[name] - tensors.keys():
            raise WireError(f"{name}: came without {min(missing)[:80]!r}")
        for key, tensor in tensors.items():
            weight = known.get(key.partition("/")[0])
            alike = weight is not None and tensor.shape == weight.shape
            alike = alike and weight is not None and tensor.dtype == weight.dtype
            state = key.partition("/")[2]
            count = state == "step" and tensor.dim() == 0
            known_state = state in ("", "step", *_MOMENTS)
            fits = weight is not None and known_state and (alike or count)
            if not fits or not tensor.is_floating_point():
                raise WireError(f"{name}: {key[:80]!r} {tensor.dtype} {list(tensor.shape)}")
            if not all_finite(tensor):
                raise WireError(f"{name}: {key[:80]!r} has values that are not finite")

    def _forget(self, step: int) -> None:
        for block in self._have.pop(step):
            self._file(block, step).unlink(missing_ok=True)

    def _newer(self, step: int) -> bool:
        return self.step is None or self.step < step

    def _file(self, name: str, step: int) -> Path:
        return self._folder / f"{name}-{step}.safetensors"


def starting_with(weights: Tensors, state: Tensors) -> Start:
    """A block's share of the encoder's weights and optimiser state."""

    def start(name: str) -> Tensors:
        return prefixed(name, select(weights, name)) | prefixed(name, select(state, name))

    return start
