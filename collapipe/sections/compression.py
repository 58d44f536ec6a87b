"""Precisions of what units and the server send, and the error of rounding."""

from dataclasses import dataclass, replace
from typing import Literal

from collapipe.plan import UplinkPlan
from collapipe.report import RoundingErrors
from collapipe.state import Precision

_LEAST_ERROR = 1e-15  # a smaller ρ counts as 0

PrecisionOrAuto = Literal[Precision, "auto"]


@dataclass(frozen=True)
class CompressionSettings:
    """Precisions of the units' uploads and activations, and of the server's gradients.

    With ``auto`` the scheduler chooses a precision for each unit and round. With ``feedback``, the
    change of a row's activation since it was last sent is sent, if it is smaller.
    """

    upload: PrecisionOrAuto
    activation: PrecisionOrAuto
    gradient: Precision
    feedback: bool

    def of(self, uplink: UplinkPlan | None) -> "CompressionSettings":
        """Return these settings with a unit's precisions in a round, if its plan has some."""
        if uplink is None or uplink.activation is None or uplink.upload is None:
            return self
        return replace(self, upload=uplink.upload, activation=uplink.activation)

    def rounding_error(
        self, activation: Precision, upload: Precision, errors: RoundingErrors
    ) -> float:
        """Return ρ, the relative rounding error of messages in these precisions, at most 1.

        It is the sum of the errors of activations and uploads. An upload's error counts although
        error feedback corrects it later. Precisions that the scheduler does not choose count as
        exact, and so do errors too small for float32. Sending nothing has ρ = 1.
        """
        of_activation = errors.activation[activation] if self.activation == "auto" else 0.0
        of_upload = errors.upload[upload] if self.upload == "auto" else 0.0
        error = min(of_activation + of_upload, 1.0)
        return error if error > _LEAST_ERROR else 0.0
