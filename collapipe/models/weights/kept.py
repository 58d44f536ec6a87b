"""Frozen weights that are kept in a narrower dtype than they compute in, or quantised.

A module reads such a weight as ``Widened``, a tensor that holds the kept one. Each operation widens
it for itself. autograd saves the ``Widened`` tensor, not the wide copy, so at most one weight is
wide at a time. The results have the bits of plain arithmetic on the widened weights.
"""

import functools
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, ClassVar, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from collapipe.models.weights.quantised import BLOCK, quantise, restore
from collapipe.tensors import Tensors

M = TypeVar("M", bound=nn.Module)
NARROW = {"bfloat16": torch.bfloat16, "float16": torch.float16}
WIDE = {"float32": torch.float32, "float64": torch.float64}
_SCALE = "weight_scale"
_LARGE = 2**20  # numbers of a weight: allocators keep smaller memory
_lent = threading.local()
_without_values: ContextVar[bool] = ContextVar("without_values", default=False)
_ATEN = torch.ops.aten
_WEIGHTS = {_ATEN.mm.default: 1, _ATEN.addmm.default: 2, _ATEN.linear.default: 1}  # their place
_EMBEDDING, _AS_BITS = _ATEN.embedding.default, _ATEN.view.dtype


class Widened(Tensor):
    """A kept weight as a tensor of ``dtype``. Views of it stay narrow, and a lookup in a table
    widens only the rows that it finds. Of a quantised weight ``kept`` has the layout alone, and
    ``blocks`` are codes and scales."""

    kept: Tensor
    blocks: tuple[Tensor, Tensor] | None
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(
        cls, kept: Tensor, dtype: torch.dtype, blocks: tuple[Tensor, Tensor] | None = None
    ) -> "Widened":
        own: Widened = Tensor._make_wrapper_subclass(
            cls,
            kept.shape,
            strides=kept.stride(),
            storage_offset=kept.storage_offset(),
            dtype=dtype,
            device=blocks[0].device if blocks else kept.device,
        )
        own.kept, own.blocks = kept, blocks
        return own

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Run ``func`` on widened copies; torch calls this method for each operation."""
        first, *rest = args
        if func is _EMBEDDING:
            return func(first.kept, *rest, **(kwargs or {})).to(first.dtype)
        if func.is_view and func is not _AS_BITS and isinstance(first, cls):
            seen = func(first.kept, *rest, **(kwargs or {}))
            if isinstance(seen, Tensor):  # nearly always, and ``tree_map_only`` is slow
                return cls(seen, first.dtype, first.blocks)
            return tree_map_only(Tensor, lambda each: cls(each, first.dtype, first.blocks), seen)
        place = _WEIGHTS.get(func)
        if place is not None:  # most calls; ``tree_map_only`` takes longer than a small product
            wide = [
                (each.lent() if n == place else each.plain()) if isinstance(each, cls) else each
                for n, each in enumerate(args)
            ]
            return func(*wide, **(kwargs or {}))
        args, kwargs = tree_map_only(cls, cls.plain, (args, kwargs or {}))
        return func(*args, **kwargs)

    def plain(self) -> Tensor:
        """Return a wide copy."""
        if self.blocks is None:
            return self.kept.to(self.dtype)
        flat, layout = restore(*self.blocks).to(self.dtype), self.kept
        return flat.as_strided(layout.shape, layout.stride(), layout.storage_offset())

    def lent(self) -> Tensor:
        """Return a wide copy that is valid until the thread's next call.

        To allocate a large one takes as long as to multiply it by 64 rows.
        """
        kept, data = self.kept, self.blocks[0] if self.blocks else self.kept
        real = type(data) in (Tensor, nn.Parameter)  # not one without values, which counts costs
        large = self.dtype == torch.float32 and kept.numel() >= _LARGE and data.device.type == "cpu"
        if not (real and large and (kept.is_contiguous() or kept.T.is_contiguous())):
            return self.plain()
        if self.blocks is None:
            return _memory(kept.numel()).as_strided(kept.shape, kept.stride()).copy_(kept)
        flat = restore(*self.blocks, _memory(BLOCK * self.blocks[1].numel()))
        return flat.as_strided(kept.shape, kept.stride(), kept.storage_offset())


def _memory(count: int) -> Tensor:
    """Return the thread's memory for a wide copy, flat, for at least ``count`` numbers."""
    memory: Tensor | None = vars(_lent).get("memory")
    if memory is None or len(memory) < count:
        _lent.memory = memory = torch.empty(count)
    return memory


class Keeping(nn.Module):
    """A module that ``keep`` has changed: its weights ``kept_names`` read as ``Widened``.

    A quantised weight has its scales in ``weight_scale``, and this ``layout``.
    """

    kept_names: ClassVar[tuple[str, ...]]
    computes: torch.dtype
    layout: Tensor | None

    def widened(self, name: str) -> Widened:
        """Return a kept weight as the module reads it."""
        kept, layout = cast(Tensor, self._parameters[name]), self.layout
        if layout is None or name != "weight":
            return Widened(kept, self.computes)
        return Widened(layout, self.computes, (kept, cast(Tensor, self._parameters[_SCALE])))


@contextmanager
def quantised_without_values() -> Iterator[None]:
    """Let ``keep`` quantise nothing in this context: quantised weights have their shapes alone."""
    token = _without_values.set(True)
    try:
        yield
    finally:
        _without_values.reset(token)


def keep(
    part: M, dtype: str, computes: str, quantization: str | None = None, wide: str | None = None
) -> M:
    """Keep the frozen weights of ``part`` in ``dtype``; they compute in the dtype ``computes``.

    With ``quantization`` the weights of linear layers are quantised, but for the output layer.
    Names in the state do not change; a quantised weight also has a ``weight_scale``. With
    ``float32`` other weights do not change. Weights whose names match ``wide`` are not narrowed.
    """
    for path, module in [*part.named_modules()]:
        own = {n: w for n, w in module._parameters.items() if w is not None and not w.requires_grad}
        # GPT-2's kind of a linear layer by its name: importing it would take seconds
        linear = isinstance(module, nn.Linear) or type(module).__name__ == "Conv1D"
        layout = None
        if quantization and linear and "weight" in own and "lm_head" not in path:
            layout = torch.empty(own["weight"].shape, device="meta")
            weight = own["weight"].to("meta") if _without_values.get() else own["weight"]
            codes, scales = map(_fixed, quantise(weight, quantization))
            module._parameters |= {"weight": codes, _SCALE: scales}
        names = [] if layout is None else ["weight"]
        for name in own.keys() - names if dtype in NARROW else ():
            if not (wide and re.search(wide, f"{path}.{name}")):
                module._parameters[name] = _fixed(own[name].detach().to(NARROW[dtype]))
                names.append(name)
        if names:
            kind: Any = type(module)
            module.__class__ = _keeping(kind, tuple(sorted(names)))
            vars(module).update(computes=WIDE[computes], layout=layout)
    return part


def _fixed(weight: Tensor) -> nn.Parameter:
    return nn.Parameter(weight, requires_grad=False)


@functools.cache
def _keeping(kind: type[nn.Module], names: tuple[str, ...]) -> type[nn.Module]:
    """Return a subclass of ``kind`` with properties ``names``, as torch's parametrizations do."""

    def reading(name: str) -> property:
        return property(lambda own: own.widened(name))

    members = {"kept_names": names, **{name: reading(name) for name in names}}
    return type(kind.__name__, (kind, Keeping), members)


def unquantised(part: nn.Module) -> Tensors:
    """Return, for each quantised weight by its name, a float32 tensor of its shape without values.

    Its codes have the same name, and its scales the name with ``_scale``.
    """
    layers = part.named_modules(remove_duplicate=False)
    layouts = {path: each.layout for path, each in layers if isinstance(each, Keeping)}
    return {f"{path}.weight": each for path, each in layouts.items() if each is not None}


def widen(part: M) -> M:
    """Undo ``keep``: the frozen weights are wide again."""
    for module in part.modules():
        if isinstance(module, Keeping):
            for name in module.kept_names:
                module._parameters[name] = _fixed(module.widened(name).plain())
            module._parameters.pop(_SCALE, None)
            cast(Any, module).__class__ = type(module).__mro__[1]
    return part


def compute_dtype(module: nn.Module) -> torch.dtype:
    """Return the dtype in which a module computes; it must have a weight."""
    layers = (each.computes for each in module.modules() if isinstance(each, Keeping))
    return next(layers, next(module.parameters()).dtype)


def in_dtype(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a weight or constant in ``dtype``; a narrow one that is frozen does not change."""
    return tensor.to(dtype) if tensor.requires_grad or tensor.dtype in WIDE.values() else tensor


def to_dtype(part: M, dtype: torch.dtype) -> M:
    """Convert the weights and constants of ``part`` by ``in_dtype``."""
    part._apply(functools.partial(in_dtype, dtype=dtype))  # type: ignore[no-untyped-call]
    return part


def widest_bytes(part: nn.Module) -> int:
    """Return the most bytes that widening one weight takes: no table of embeddings, one of stacked
    experts, and unpacked codes."""
    layers = [each for each in part.modules() if not isinstance(each, nn.Embedding)]
    weights = (m.widened(n) for m in layers if isinstance(m, Keeping) for n in m.kept_names)
    return max(map(_widening_bytes, weights), default=0)


def _widening_bytes(weight: Widened) -> int:
    one = weight[0] if weight.dim() > 2 else weight
    packed = weight.blocks is not None and weight.blocks[0].dtype == torch.uint8
    return one.nbytes * 3 // 2 if packed else one.nbytes
