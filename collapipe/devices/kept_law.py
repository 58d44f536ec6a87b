"""Convert the law of a step to tensors, which a unit keeps between rounds, and back."""

import torch
from pydantic import TypeAdapter, ValidationError

from collapipe.errors import CollaPipeError, WireError, one_line
from collapipe.step_law import StepLaw
from collapipe.tensors import Tensors

_MOST_BYTES = 2**18  # enough for the most devices with the longest names
_LAW = TypeAdapter(StepLaw)
_NAME = "law"
LARGEST = {_NAME: torch.empty(_MOST_BYTES, dtype=torch.uint8, device="meta")}


def pack_law(law: StepLaw | None) -> Tensors:
    """Return the law as JSON in a uint8 tensor; empty for None."""
    if law is None:
        return {}
    return {_NAME: torch.frombuffer(bytearray(_LAW.dump_json(law)), dtype=torch.uint8)}


def unpack_law(tensors: Tensors) -> StepLaw | None:
    """Invert ``pack_law``. Raises ``WireError`` if the tensors are not a possible law."""
    if not tensors:
        return None
    packed = tensors.get(_NAME, torch.empty(0))
    if len(tensors) > 1 or packed.dtype != torch.uint8 or not 0 < packed.nbytes <= _MOST_BYTES:
        raise WireError(f"the law of a step: {[*tensors][:3]}, {packed.dtype} {list(packed.shape)}")
    try:
        return _LAW.validate_json(packed.numpy().tobytes())
    except (ValidationError, CollaPipeError) as error:
        raise WireError(f"the law of a step: {one_line(error)}") from error
