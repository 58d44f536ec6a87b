"""A segment as a device holds it: built from a description and the parts that follow it."""

from collections.abc import Callable
from functools import partial

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor, nn

import collapipe
from collapipe.errors import ConfigError, WireError, one_line
from collapipe.models.description import from_description
from collapipe.models.dropout import DropoutKey
from collapipe.models.part import Part, moments, select
from collapipe.models.split import ModelSpec, block_name, build_empty
from collapipe.tensors import Tensors
from collapipe.torch_device import CPU
from collapipe.wire.segments import SegmentDescription
from pipeline import schedule
from pipeline.schedule import Action
from pipeline.segment import Segment

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float64": torch.float64}


class HeldSegment:
    """Blocks of a model, added one by one, and what is done with them.

    Raises ``WireError`` for a description or a part that cannot be, and ``ConfigError`` for one
    beyond ``memory_bytes``, before anything is allocated.
    """

    def __init__(
        self, description: SegmentDescription, memory_bytes: float, device: torch.device = CPU
    ) -> None:
        self._device = device
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
        needed = max(description.memory_bytes, _least_bytes(self.spec, description, self.dtype))
        if needed > memory_bytes:
            raise ConfigError(
                f"{span.blocks} blocks need {needed:,.0f} bytes, this device gives "
                f"{memory_bytes:,.0f}; raise --memory, or plan fewer blocks here"
            )
        self._parts = list[Part]()

    @property
    def complete(self) -> bool:
        """Whether all blocks are here."""
        return len(self._parts) == self.description.span.blocks

    @property
    def actions(self) -> Callable[[int], tuple[Action, ...]]:
        """The segment's actions for a number of micro-batches."""
        d = self.description
        return lambda m: schedule.build(d.schedule, d.num_segments, m)[d.stage]

    def add(self, name: str, data: bytes) -> None:
        """The next block, from weights and optimiser state as safetensors."""
        span = self.description.span
        index = span.first + len(self._parts)
        if self.complete or name != block_name(index):
            raise WireError(f"part {name[:40]!r} came, expected {block_name(index)} of {span}")
        try:
            tensors = load(data)
            weights = {k: v for k, v in tensors.items() if "/" not in k}
            state = {k: v for k, v in tensors.items() if "/" in k}
            module = build_empty(lambda: self._block(index), select(weights, name))
        except (SafetensorError, RuntimeError, KeyError) as error:
            raise WireError(f"{name}: cannot be built: {one_line(error)}") from error
        part = Part(name, module, self.description.optimizer, state, self._device)
        self._parts.append(part)

    def segment(self) -> Segment:
        """The blocks as one."""
        d = self.description
        return Segment(self._parts, d.recompute, schedule.splits_backward(d.schedule))

    def key(self, step: int) -> DropoutKey:
        """Whose dropout it is in a step."""
        return DropoutKey(self.description.seed, self.description.unit, step)

    def squared_norms(self) -> list[float]:
        return [part.squared_norm() for part in self._parts]

    def step(self, rate: float, scale: float) -> None:
        for part in self._parts:
            part.step(rate, scale)

    def forget(self) -> None:
        for part in self._parts:
            part.forget_gradients()

    def packed_parts(self) -> list[tuple[str, Callable[[], bytes]]]:
        """Name of each block, and what packs all of it that trains, with the optimiser's state, as
        safetensors: before the next step."""
        return [(part.name, partial(_packed, part)) for part in self._parts]

    def _block(self, index: int) -> nn.Module:
        return self.spec.build_block(index)


def _packed(part: Part) -> bytes:
    return save(_contiguous(_training(part)))


def _training(part: Part) -> Tensors:
    names = [name for name, each in part.module.named_parameters() if each.requires_grad]
    weights = part.weights()
    own = {f"{part.name}.{name}": weights[f"{part.name}.{name}"] for name in names}
    return own | part.optimizer_state()


def _contiguous(tensors: Tensors) -> dict[str, Tensor]:
    return {name: tensor.contiguous() for name, tensor in tensors.items()}


def _least_bytes(spec: ModelSpec, description: SegmentDescription, dtype: torch.dtype) -> float:
    """Weights, gradients and optimiser state, without activations."""
    total = 0
    for index in description.span.indices():
        with torch.device("meta"):
            block = spec.build_block(index)
        for weight in block.parameters():
            copies = 2 + len(moments(description.optimizer)) if weight.requires_grad else 1
            total += weight.numel() * dtype.itemsize * copies
    return float(total)
