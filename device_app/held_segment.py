"""A segment on a device, built from a description and the parts that follow it."""

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor, nn

import collapipe
from collapipe.errors import ConfigError, WireError, one_line
from collapipe.models.description import from_description
from collapipe.models.dropout import DropoutKey
from collapipe.models.part import Part, moments, select, state_like
from collapipe.models.split import ModelSpec, block_name, build_empty, not_training, training_names
from collapipe.process.torch_device import CPU
from collapipe.tensors import Tensors
from collapipe.wire.compression import check_like
from collapipe.wire.frozen_store import FrozenStore, digest
from collapipe.wire.parts import NAME_BYTES, grouped, joined, most_bytes, separated
from collapipe.wire.segments import SegmentDescription, Wanted, as_json
from pipeline import schedule
from pipeline.schedule import Action
from pipeline.segment import Segment

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float64": torch.float64}


class HeldSegment:
    """Blocks of a model, which are added one by one.

    Blocks are reused if the ``earlier`` segment has them in the same state, and frozen weights if
    they are in the ``store``; the others must be sent in parts of at most ``part_bytes``.

    Raises ``WireError`` if the description or a part is invalid, and ``ConfigError`` if the segment
    needs more than ``memory_bytes``, before memory is allocated.
    """

    def __init__(
        self,
        description: SegmentDescription,
        memory_bytes: float,
        store: FrozenStore,
        device: torch.device = CPU,
        earlier: "HeldSegment | None" = None,
    ) -> None:
        self._device, self._store = device, store
        if description.version != collapipe.__version__:
            raise WireError(
                f"the control unit has CollaPipe {description.version[:40]}, this device "
                f"{collapipe.__version__}; install the same version on both"
            )
        self.description = description
        self.spec = from_description(description.model)
        span = description.span
        if span.stop > self.spec.num_blocks or description.stage >= description.num_segments:
            raise WireError(f"blocks {span.first} … {span.stop - 1} of {self.spec.num_blocks}")
        if description.dtype not in _DTYPES:
            raise WireError(f"dtype {description.dtype[:40]!r}; it is one of {', '.join(_DTYPES)}")
        self.dtype = _DTYPES[description.dtype]
        least, self._most, tensor, self._keys = _sizes(self.spec, description, self.dtype)
        needed, self.part_bytes = max(description.memory_bytes, least), most_bytes(tensor)
        if needed > memory_bytes:
            raise ConfigError(
                f"{span.blocks} blocks need {needed:,.0f} bytes, this device offers "
                f"{memory_bytes:,.0f}; raise --memory, or plan fewer blocks here"
            )
        self._names = [block_name(index) for index in span.indices()]
        self._parts = earlier._kept_for(description) if earlier else {}
        self.done: int | None = description.base  # the last finished step; None during a step
        blocks = tuple(name for name in self._names if name not in self._parts)
        known = {name: each for name, each in description.frozen.items() if name in blocks}
        absent = store.lacks(known.values())
        lacking = tuple(name for name, each in known.items() if each in absent)
        self.wanted = Wanted(blocks, lacking)
        self._stateless = set(blocks)  # blocks whose optimiser state is not loaded yet
        self._moments: dict[str, list[bytes]] = {}  # received moments, loaded at the next step
        self._arrived = set[str]()  # blocks whose moments have all arrived
        self._coming: dict[str, Tensors] = {}  # received weights of incomplete blocks

    @property
    def complete(self) -> bool:
        """Whether all blocks have been built."""
        return len(self._parts) == len(self._names)

    @property
    def may_step(self) -> bool:
        """Whether the optimiser's state of all blocks has arrived."""
        return self._stateless <= self._arrived

    @property
    def actions(self) -> Callable[[int], tuple[Action, ...]]:
        """A function from the number of micro-batches to the segment's actions."""
        d = self.description
        return lambda m: schedule.build(d.schedule, d.num_segments, m)[d.stage]

    def add(self, name: str, data: bytes, left: int) -> None:
        """Add weights of a wanted block, in the safetensors format; ``left`` parts of it follow.
        Raises ``WireError`` if they are invalid."""
        if name not in self._names or name in self._parts:
            raise WireError(f"received part {name[:40]!r}, which was not requested")
        index = self.description.span.first + self._names.index(name)
        tensors = self._coming.pop(name, {}) | separated(data)
        weights = select(tensors, name)
        size = sum(each.nbytes for each in tensors.values())
        if size > self._most or len(weights) < len(tensors) or not weights.keys() <= self._keys:
            raise WireError(f"{name}: received more than its weights")
        if left:
            self._coming[name] = tensors
            return
        try:
            whole = self._with_frozen(index, weights)
            module = build_empty(lambda: self._block(index), whole)
        except (RuntimeError, KeyError) as error:
            raise WireError(f"{name}: cannot be built: {one_line(error)}") from error
        self._check(module, len(whole))
        self._parts[name] = Part(name, module, self.description.optimizer, None, self._device)

    def keep_moments(self, name: str, data: bytes, left: int) -> None:
        """Add optimiser state of a block that was sent without it; ``left`` parts follow. The state
        is loaded at the next step, so it may arrive while another thread computes."""
        kept = self._moments.setdefault(name, []) if name in self._stateless else []
        size = sum(len(each) + NAME_BYTES for each in (*kept, data))
        most = self._most + 8 * NAME_BYTES * (1 + len(self._keys))  # a header for each of its state
        if name not in self._stateless - self._arrived or size > most:
            raise WireError(f"received moments of {name[:40]!r}, which were not requested")
        kept.append(data)
        if not left:
            self._arrived.add(name)

    @property
    def parts(self) -> list[Part]:
        """The blocks built so far, in their order."""
        return [self._parts[name] for name in self._names if name in self._parts]

    def segment(self) -> Segment:
        """Make a segment of the blocks."""
        d = self.description
        return Segment(self.parts, d.recompute, schedule.splits_backward(d.schedule))

    def key(self, step: int) -> DropoutKey:
        """Return the key of the step's dropout."""
        return DropoutKey(self.description.seed, self.description.unit, step)

    def squared_norms(self) -> list[float]:
        return [part.squared_norm() for part in self.parts]

    def step(self, number: int, rate: float, scale: float) -> None:
        self._require_moments()
        self.done = None
        for part in self.parts:
            part.step(rate, scale)
        self.done = number

    def forget(self) -> None:
        for part in self.parts:
            part.forget_gradients()

    def packed_parts(self) -> list[tuple[str, int, Callable[[], Tensor]]]:
        """Return functions that pack the trainable weights and optimiser state, a few tensors each,
        with the block's name and the number of parts that follow. Call them before the next
        step."""
        self._require_moments()
        found = list[tuple[str, int, Callable[[], Tensor]]]()
        for part in self.parts:
            groups = [*grouped(_trained(part)), *grouped(part.optimizer_state())]
            for left, names in zip(range(len(groups) - 1, -1, -1), groups, strict=True):
                found.append((part.name, left, partial(_packed, part, names)))
        return found

    def _kept_for(self, later: SegmentDescription) -> dict[str, Part]:
        """Return the blocks that the description ``later`` can reuse."""
        wanted = (_identity(each) for each in (self.description, later))
        if self.done != later.base or len(set(wanted)) > 1:
            return {}
        self.forget()
        self._take_moments()
        held = set(map(block_name, later.span.indices())) - self._stateless
        return {name: part for name, part in self._parts.items() if name in held}

    def _take_moments(self) -> None:
        """Load the optimiser state that has arrived. Its shapes are checked, because fused
        optimisers do not check them."""
        for name in self._arrived & self._moments.keys() & self._parts.keys():
            came = self._moments.pop(name)
            state = {k: v for each in came for k, v in separated(each).items()}
            own = select(state, name)
            trained = {
                k: v for k, v in self._parts[name].module.named_parameters() if v.requires_grad
            }
            used = {
                key: trained[key] for key in trained.keys() & {k.rpartition("/")[0] for k in own}
            }
            check_like(own, state_like(self.description.optimizer, used), "the control unit")
            if len(own) != len(state):
                raise WireError(f"moments of {name}: {len(state)} tensors, of which {len(own)} fit")
            self._parts[name].load_optimizer_state(state)
            self._stateless.discard(name)

    def _require_moments(self) -> None:
        self._take_moments()
        if self._stateless or not self.complete:
            raise WireError("blocks or their optimiser state are missing")

    def _with_frozen(self, index: int, weights: Tensors) -> Tensors:
        """Add a block's frozen weights from the store, or verify the received ones and store
        them."""
        name = block_name(index)
        known = self.description.frozen.get(name)
        if known is None:
            return weights
        if name not in self.wanted.frozen:
            return {**self._store.load(known), **weights}
        with torch.device("meta"):
            frozen = {key: weights[key] for key in not_training(self._block(index))}
        if digest(frozen) != known:
            raise WireError(f"{name}: its frozen weights differ from the announced ones")
        self._store.add(frozen)
        return weights

    def _block(self, index: int) -> nn.Module:
        return self.spec.build_block(index)

    def _check(self, module: nn.Module, came: int) -> None:
        """Raise ``WireError`` if a dtype or the number of tensors differs from the segment's."""
        weights = module.state_dict()
        for key, weight in weights.items():
            if weight.is_floating_point() and weight.dtype != self.dtype:
                raise WireError(f"{key} has dtype {weight.dtype}, expected {self.dtype}")
        if came != len(weights):
            raise WireError(f"a part of {came} tensors, of which {len(weights)} fit")


def _identity(description: SegmentDescription) -> bytes:
    """Return the properties in which two segments must agree to share blocks."""
    d = description
    return as_json([d.version, d.unit, d.round, d.seed, d.model, d.dtype, d.optimizer])


def _packed(part: Part, names: Sequence[str]) -> Tensor:
    own = _trained(part) | part.optimizer_state()
    return joined({name: own[name] for name in names})


def _trained(part: Part) -> Tensors:
    weights = part.weights()
    names = (f"{part.name}.{name}" for name in training_names(part.module))
    return {name: weights[name] for name in names}


def _sizes(
    spec: ModelSpec, description: SegmentDescription, dtype: torch.dtype
) -> tuple[float, int, int, set[str]]:
    """Return the segment's bytes without activations (weights, gradients and optimiser state), the
    largest block's bytes of weights and optimiser state, the largest tensor's bytes, and the names
    of weights within blocks."""
    least = largest = tensor = 0
    names = set[str]()
    remembered = len(moments(description.optimizer))
    for index in description.span.indices():
        with torch.device("meta"):
            block = spec.build_block(index)
        state = sum(each.numel() for each in block.state_dict().values())
        trained = sum(each.numel() for each in block.parameters() if each.requires_grad)
        names |= block.state_dict().keys()
        least += (state + (1 + remembered) * trained) * dtype.itemsize
        largest = max(largest, (state + remembered * trained) * dtype.itemsize)
        tensor = max(tensor, *(each.nbytes for each in block.state_dict().values()))
    return float(least), largest, tensor, names
