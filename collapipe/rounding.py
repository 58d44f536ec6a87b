"""What rounding does to the gradient, by precision: ρ = E‖Δg‖²/φ², found before or measured."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated

from pydantic import Field

from collapipe.state import Precision

_Error = Annotated[float, Field(ge=0, lt=1e18)]


@dataclass(frozen=True, slots=True)
class RoundingErrors:
    """ρ of rounded activations and of a rounded upload; a precision that is absent was not
    measured."""

    activation: Mapping[Precision, _Error] = field(default_factory=dict)
    upload: Mapping[Precision, _Error] = field(default_factory=dict)

    def updated(self, measured: "RoundingErrors") -> "RoundingErrors":
        """Replace values by newer measurements; float32 stays exact, whatever a unit reports."""
        exact: dict[Precision, float] = {"float32": 0.0}
        return RoundingErrors(
            {**self.activation, **measured.activation, **exact},
            {**self.upload, **measured.upload, **exact},
        )


# Of a unit that has measured nothing yet: the largest that benchmarks/gradient_error.py found.
BENCHMARKED = RoundingErrors(
    {"float32": 0.0, "bfloat16": 4.4e-6, "int8": 2.1e-5, "int6": 3.0e-4, "int4": 5.3e-3},
    {"float32": 0.0, "bfloat16": 3.4e-6, "int8": 3.5e-5, "int6": 5.8e-4, "int4": 1.1e-2},
)
