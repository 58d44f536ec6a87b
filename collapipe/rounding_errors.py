"""Relative rounding errors of the gradient by precision, ρ = E‖Δg‖²/φ²: benchmarked or measured."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated

from pydantic import Field

from collapipe.state import Precision

_Error = Annotated[float, Field(ge=0, lt=1e18)]


@dataclass(frozen=True, slots=True)
class RoundingErrors:
    """ρ of rounded activations and uploads by precision; absent precisions were not measured."""

    activation: Mapping[Precision, _Error] = field(default_factory=dict)
    upload: Mapping[Precision, _Error] = field(default_factory=dict)

    def updated(self, measured: "RoundingErrors") -> "RoundingErrors":
        """Replace values by newer measurements; float32 stays exact, whatever a unit reports."""
        exact: dict[Precision, float] = {"float32": 0.0}
        return RoundingErrors(
            {**self.activation, **measured.activation, **exact},
            {**self.upload, **measured.upload, **exact},
        )


# Used before a unit has measured any: the largest values of benchmarks/gradient_error.py.
BENCHMARKED = RoundingErrors(
    {"float32": 0.0, "bfloat16": 4.4e-6, "int8": 2.1e-5, "int6": 3.0e-4, "int4": 5.3e-3},
    {"float32": 0.0, "bfloat16": 3.4e-6, "int8": 3.5e-5, "int6": 5.8e-4, "int4": 1.1e-2},
)
