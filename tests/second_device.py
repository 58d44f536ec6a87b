"""A simulated device in addition to the CPU: ``second:0``.

Its tensors are Python wrappers around CPU tensors and compute on the CPU, so that results have the
CPU's bits. But they are at least as strict as tensors of a GPU. An operation with tensors of both
devices raises, and so does a generator of the other device. There is no float64, as on Apple's
GPUs, and no conversion to numpy except on the CPU.

The device is registered with torch as an out-of-tree device for the rest of the process. A real GPU
then computes no gradients: torch supports one kind of device besides the CPU.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

from collapipe.process.torch_device import CPU

NAME = "second:0"
ran: set[str] = set()  # names of the operations that the device has computed
_aten = torch.ops.aten
_INDEXING = {_aten.index.Tensor, _aten.index_put_.default, _aten.index_put.default}
_MOVES = {_aten._to_copy.default, _aten.copy_.default}
_generators: dict[int, torch.Generator] = {}  # generators of the device, by address


class Elsewhere(Tensor):
    """A tensor of the device; the CPU tensor ``held`` has its values."""

    held: Tensor
    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, held: Tensor) -> "Elsewhere":
        if held.dtype == torch.float64:
            raise TypeError(f"{NAME} has no float64")
        with torch.inference_mode(False):  # in inference mode, wrappers allow no views
            made: Elsewhere = Tensor._make_wrapper_subclass(
                cls,
                held.shape,
                strides=held.stride(),
                storage_offset=held.storage_offset(),
                dtype=held.dtype,
                device=torch.device(NAME),
            )
        made.held = held
        return made

    def __repr__(self) -> str:  # type: ignore[override]
        return f"Elsewhere({self.held!r})"

    def tolist(self) -> Any:  # torch refuses it for subclasses but not for devices
        return self.held.tolist()

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Torch's protocol for subclasses."""
        kwargs = kwargs or {}
        parted = func.decompose(*args, **kwargs)  # inference mode does not decompose operations
        if parted is not NotImplemented:
            return parted
        arguments = (args, kwargs)
        if func not in _MOVES:
            indexed = func in _INDEXING  # indices may be on the CPU
            for each in _leaves((args[0], args[2:]) if indexed else arguments):
                _check(func, each)
        leaves = [*_leaves(arguments)]
        outside = {id(each.held): each for each in leaves if isinstance(each, Elsewhere)}
        ran.add(func.overloadpacket.__name__)
        positional, named = _mapped(_here, arguments)
        result = func(*positional, **named)
        if func is _aten.copy_.default:
            return args[0]
        if any(isinstance(each, torch.device) and each.type == "cpu" for each in leaves):
            return result

        def moved(each: Any) -> Any:
            if not isinstance(each, Tensor):
                return each
            # an in-place operation returns the same wrapper
            return outside[id(each)] if id(each) in outside else Elsewhere(each)

        return _mapped(moved, result)


def _leaves(tree: Any) -> Iterator[Any]:
    """Yield the leaves of an operation's arguments; torch's own trees take three times as long."""
    if isinstance(tree, tuple | list):
        for each in tree:
            yield from _leaves(each)
    elif isinstance(tree, dict):
        yield from _leaves([*tree.values()])
    else:
        yield tree


def _mapped(change: Callable[[Any], Any], tree: Any) -> Any:
    """Return the tree with ``change`` applied to each leaf."""
    if isinstance(tree, tuple | list):
        return type(tree)(_mapped(change, each) for each in tree)
    if isinstance(tree, dict):
        return {key: _mapped(change, each) for key, each in tree.items()}
    return change(tree)


def _here(argument: Any) -> Any:
    if isinstance(argument, torch.device):
        return CPU
    return argument.held if isinstance(argument, Elsewhere) else argument


def _check(func: Any, argument: object) -> None:
    """Raise if the argument is on the CPU, except a single number in a pointwise operation."""
    if isinstance(argument, torch._C.Generator) and argument._cdata not in _generators:
        raise RuntimeError(f"Expected a generator of {NAME}, but {func} got one of the cpu")
    if not isinstance(argument, Tensor) or isinstance(argument, Elsewhere):
        return
    if argument.dim() or torch.Tag.pointwise not in func.tags:
        raise RuntimeError(
            f"Expected all tensors to be on the same device, but {func} got {NAME} and cpu"
        )


def _created(create: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def kernel(*sizes: Any, **options: Any) -> Tensor:
        options = {name: value for name, value in options.items() if name != "pin_memory"}
        return Elsewhere(create(*sizes, **{**options, "device": "cpu"}))

    return kernel


def _copy_from(source: Tensor, target: Tensor, non_blocking: bool = False) -> Tensor:
    _here(target).copy_(_here(source))
    return target


class _Generator(torch.Generator):
    """A generator of the CPU; it can count as one of the device."""

    def __new__(cls, device: object = "cpu") -> "_Generator":
        made = super().__new__(cls)
        if torch.device(str(device)).type != "cpu":
            _generators[made._cdata] = made  # kept, so that no other generator gets its address
        return made


_setup_privateuseone_for_python_backend(NAME.partition(":")[0])
_library = torch.library.Library("aten", "IMPL")
for _name, _operator in {
    "empty.memory_format": _aten.empty.memory_format,
    "empty_strided": _aten.empty_strided.default,
}.items():
    _library.impl(_name, _created(_operator), "PrivateUse1")
_library.impl("_copy_from", _copy_from, "PrivateUse1")


@contextmanager
def second_device() -> Iterator[torch.device]:
    """Let ``auto`` mean this device, and give the device generators.

    Attention on the CPU also uses the operations of a device without its own attention kernel, so
    that bits can be compared.
    """
    ran.clear()
    with (
        patch("collapipe.process.torch_device.present", lambda: [NAME, "cpu"]),
        patch("torch.Generator", _Generator),
        sdpa_kernel(SDPBackend.MATH),
    ):
        yield torch.device(NAME)
    _generators.clear()
