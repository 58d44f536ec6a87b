"""A segment as a device holds it: built from a description and the parts that follow it."""

from collections.abc import Callable
from functools import partial

import torch
from safetensors import SafetensorError
from safetensors.torch import load
from torch import Tensor, nn

import collapipe
from collapipe.errors import ConfigError, WireError, one_line
from collapipe.models.description import from_description
from collapipe.models.dropout import DropoutKey
from collapipe.models.part import Part, moments, select, state_like
from collapipe.models.split import ModelSpec, block_name, build_empty, not_training, training_names
from collapipe.tensors import Tensors
from collapipe.torch_device import CPU
from collapipe.wire.compression import check_like
from collapipe.wire.frozen_store import FrozenStore, digest
from collapipe.wire.parts import joined
from collapipe.wire.segments import SegmentDescription, Wanted, as_json
from pipeline import schedule
from pipeline.schedule import Action
from pipeline.segment import Segment

_PART_HEADER_BYTES = 2**20  # names and shapes, and more
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float64": torch.float64}


class HeldSegment:
    """Blocks of a model, added one by one, and what is done with them.

    Raises ``WireError`` for a description or a part that cannot be, and ``ConfigError`` for one
    beyond ``memory_bytes``, before anything is allocated. Blocks need not come that the ``earlier``
    segment has as they are wanted, nor frozen weights that are in the ``store``. No part is larger
    than ``part_bytes``.
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
        least, part = _sizes(self.spec, description, self.dtype)
        needed, self.part_bytes = max(description.memory_bytes, least), part + _PART_HEADER_BYTES
        if needed > memory_bytes:
            raise ConfigError(
                f"{span.blocks} blocks need {needed:,.0f} bytes, this device gives "
                f"{memory_bytes:,.0f}; raise --memory, or plan fewer blocks here"
            )
        self._names = [block_name(index) for index in span.indices()]
        self._parts = earlier._kept_for(description) if earlier else {}
        self.done: int | None = description.base  # the last step; None: in the middle of one
        blocks = tuple(name for name in self._names if name not in self._parts)
        known = {name: each for name, each in description.frozen.items() if name in blocks}
        absent = store.lacks(known.values())
        lacking = tuple(name for name, each in known.items() if each in absent)
        self.wanted = Wanted(blocks, lacking)

    @property
    def complete(self) -> bool:
        """Whether all blocks are here."""
        return len(self._parts) == len(self._names)

    @property
    def actions(self) -> Callable[[int], tuple[Action, ...]]:
        """The segment's actions for a number of micro-batches."""
        d = self.description
        return lambda m: schedule.build(d.schedule, d.num_segments, m)[d.stage]

    def add(self, name: str, data: bytes) -> None:
        """A wanted block, from weights and optimiser state as safetensors."""
        if name not in self._names or name in self._parts:
            raise WireError(f"part {name[:40]!r} came, which is not wanted")
        index = self.description.span.first + self._names.index(name)
        try:
            tensors = load(data)
            weights = select({k: v for k, v in tensors.items() if "/" not in k}, name)
            state = {k: v for k, v in tensors.items() if "/" in k}
            whole = {k: v.clone() for k, v in self._with_frozen(index, weights).items()}  # aligned
            module = build_empty(lambda: self._block(index), whole)
        except (SafetensorError, RuntimeError, KeyError) as error:
            raise WireError(f"{name}: cannot be built: {one_line(error)}") from error
        came = len(whole) + len(tensors) - len(weights)
        self._check(module, select(state, name), came)
        self._parts[name] = Part(name, module, self.description.optimizer, state, self._device)

    @property
    def parts(self) -> list[Part]:
        """The blocks that are here, in their order."""
        return [self._parts[name] for name in self._names if name in self._parts]

    def segment(self) -> Segment:
        """The blocks as one."""
        d = self.description
        return Segment(self.parts, d.recompute, schedule.splits_backward(d.schedule))

    def key(self, step: int) -> DropoutKey:
        """Whose dropout it is in a step."""
        return DropoutKey(self.description.seed, self.description.unit, step)

    def squared_norms(self) -> list[float]:
        return [part.squared_norm() for part in self.parts]

    def step(self, number: int, rate: float, scale: float) -> None:
        self.done = None
        for part in self.parts:
            part.step(rate, scale)
        self.done = number

    def forget(self) -> None:
        for part in self.parts:
            part.forget_gradients()

    def packed_parts(self) -> list[tuple[str, Callable[[], Tensor]]]:
        """Name of each block, and what packs all of it that trains, with the optimiser's state, as
        safetensors: before the next step."""
        return [(part.name, partial(_packed, part)) for part in self.parts]

    def _kept_for(self, later: SegmentDescription) -> dict[str, Part]:
        """The blocks, if they are as ``later`` wants them."""
        wanted = (_identity(each) for each in (self.description, later))
        if self.done != later.base or len(set(wanted)) > 1:
            return {}
        self.forget()
        held = set(map(block_name, later.span.indices()))
        return {name: part for name, part in self._parts.items() if name in held}

    def _with_frozen(self, index: int, weights: Tensors) -> Tensors:
        """A block's weights with those that do not train, which are kept from now on."""
        name = block_name(index)
        known = self.description.frozen.get(name)
        if known is None:
            return weights
        if name not in self.wanted.frozen:
            return {**self._store.load(known), **weights}
        with torch.device("meta"):
            frozen = {key: weights[key] for key in not_training(self._block(index))}
        if digest(frozen) != known:
            raise WireError(f"{name}: its frozen weights are not those that were announced")
        self._store.add(frozen)
        return weights

    def _block(self, index: int) -> nn.Module:
        return self.spec.build_block(index)

    def _check(self, module: nn.Module, state: Tensors, came: int) -> None:
        """Raise ``WireError`` for other dtypes than the segment's, and for optimiser state that is
        not its weight's: fused optimisers trust its shape."""
        weights = module.state_dict()
        for key, weight in weights.items():
            if weight.is_floating_point() and weight.dtype != self.dtype:
                raise WireError(f"{key} came as {weight.dtype}, expected {self.dtype}")
        trained = {key: each for key, each in module.named_parameters() if each.requires_grad}
        stepped = {key.rpartition("/")[0] for key in state} & trained.keys()
        used = {key: trained[key] for key in stepped}
        check_like(state, state_like(self.description.optimizer, used), "the control unit")
        if came != len(weights) + len(state):
            raise WireError(f"a part of {came} tensors, of which {len(weights) + len(state)} fit")


def _identity(description: SegmentDescription) -> bytes:
    """What two segments must have in common for a block of one to be a block of the other."""
    d = description
    return as_json([d.version, d.unit, d.round, d.seed, d.model, d.dtype, d.optimizer])


def _packed(part: Part) -> Tensor:
    return joined(_training(part))


def _training(part: Part) -> Tensors:
    names = training_names(part.module)
    weights = part.weights()
    own = {f"{part.name}.{name}": weights[f"{part.name}.{name}"] for name in names}
    return own | part.optimizer_state()


def _sizes(
    spec: ModelSpec, description: SegmentDescription, dtype: torch.dtype
) -> tuple[float, int]:
    """Weights, gradients and optimiser state without activations; and the largest block's weights
    and optimiser state, as they come."""
    least = largest = 0
    remembered = len(moments(description.optimizer))
    for index in description.span.indices():
        with torch.device("meta"):
            block = spec.build_block(index)
        state = sum(each.numel() for each in block.state_dict().values())
        trained = sum(each.numel() for each in block.parameters() if each.requires_grad)
        least += (state + (1 + remembered) * trained) * dtype.itemsize
        largest = max(largest, (state + remembered * trained) * dtype.itemsize)
    return float(least), largest
