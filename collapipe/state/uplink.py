"""A unit's uplink, the payloads that it may send, and the channels to the edge server."""

import math
from collections.abc import Sequence
from dataclasses import astuple, dataclass, replace
from typing import Literal

import numpy as np

from collapipe.errors import ConfigError
from collapipe.state.limits import MOST, check_each, check_within, plain
from collapipe.state.precision import Precision

_MOST_ERROR = 1.0  # relative, of a gradient: the error of sending nothing

HeadPlace = Literal["server", "control_unit"]
"""Where a unit's head trains."""


@dataclass(frozen=True, slots=True)
class Payload:
    """The bits that a unit sends in a round with these precisions and this place of the head."""

    activation: Precision
    upload: Precision
    model_bits: float
    activation_bits: float
    gradient_error: float  # ρ = E‖Δg‖²/φ², the gradient's relative rounding error
    head: HeadPlace | None = None  # None: the configuration sets the place

    def __post_init__(self) -> None:
        check_within(self, ("model_bits", "activation_bits"))
        check_within(self, ("gradient_error",), _MOST_ERROR)
        if self.head == "control_unit" and self.activation_bits:
            raise ConfigError(
                f"Payload: {self.activation_bits} bits of activations, though the head is on the "
                "control unit; expected 0"
            )

    @property
    def choice(self) -> tuple[Precision, Precision, HeadPlace | None]:
        """The decisions that identify the payload among a unit's payloads."""
        return self.activation, self.upload, self.head

    @property
    def bits(self) -> tuple[float, float]:
        """Bits of the model and of activations."""
        return self.model_bits, self.activation_bits


@dataclass(frozen=True, slots=True)
class Uplink:
    """A control unit's uplink to the edge server.

    With ``payloads`` the scheduler chooses one; ``model_bits`` and ``activation_bits`` equal the
    first payload's, which is exact. Without ``payloads`` there is no choice.
    """

    max_power_w: float  # P_n^max
    energy_j: float  # E_n^max, for sending everything, or only ``model_bits`` (C8)
    model_bits: float  # θ_n^enc: the tunable parameters, sent once a round
    activation_bits: float  # z_n^enc: activations and targets of all local steps of a round
    gains: tuple[float, ...]  # h_{n,j}, linear, for each channel j
    head_s: float = 0.0  # seconds in the head for all local steps of a round
    gradient_s: float = 0.0  # seconds to send their gradients down; 0: not counted
    payloads: tuple[Payload, ...] = ()
    # ``head_s`` for payloads with the head on the control unit
    control_unit_head_s: float = 0.0

    def payload(
        self, activation: str | None, upload: str | None, head: str | None
    ) -> Payload | None:
        """Return the payload with these choices; None without a choice or a match."""
        chosen = activation, upload, head
        return next((each for each in self.payloads if each.choice == chosen), None)

    def sending(self, payload: Payload | None) -> "Uplink":
        """Return the uplink with the sizes of ``payload``; None keeps the default payload."""
        if payload is None:
            return self
        model_bits, activation_bits = payload.bits
        sent = replace(self, model_bits=model_bits, activation_bits=activation_bits, payloads=())
        return sent.placed(payload.head)

    def placed(self, place: HeadPlace | None) -> "Uplink":
        """Return the uplink with the times of a head in this place."""
        if place != "control_unit":
            return self
        return replace(self, head_s=self.control_unit_head_s, gradient_s=0.0)

    @property
    def activation_share(self) -> float:
        """Fraction of an upload's bits, and so of its time, for activations; 0 without bits."""
        bits = self.activation_bits + self.model_bits
        return self.activation_bits / bits if bits else 0.0

    def __post_init__(self) -> None:
        times = "head_s", "gradient_s", "control_unit_head_s"
        amounts = "model_bits", "activation_bits"
        check_within(self, ("max_power_w", "energy_j", *amounts, *times))
        check_each("Uplink: payloads", self.payloads, Payload)
        sent = (self.model_bits, self.activation_bits), *(each.bits for each in self.payloads)
        if not (self.max_power_w or all(map(any, sent))):
            raise ConfigError("Uplink: needs max_power_w above 0, or bits to send in each payload")
        if not isinstance(self.gains, Sequence | np.ndarray):
            raise ConfigError(f"Uplink: gains={self.gains}: must be a list of numbers")
        object.__setattr__(self, "gains", tuple(map(plain, self.gains)))
        for gain in self.gains:
            if not (isinstance(gain, float | int) and (gain == 0 or 1 / MOST <= gain <= MOST)):
                raise ConfigError(
                    f"Uplink: gain={gain} must be 0, or within {1 / MOST:g} … {MOST:g}"
                )
        if len({each.choice for each in self.payloads}) < len(self.payloads):
            raise ConfigError("Uplink: two payloads have the same precisions and head; remove one")


@dataclass(frozen=True, slots=True)
class Channel:
    """An uplink channel j: B_j, I_j and N_0."""

    bandwidth_hz: float
    interference_w: float
    noise_w_per_hz: float

    def __post_init__(self) -> None:
        for name in ("bandwidth_hz", "interference_w", "noise_w_per_hz"):
            object.__setattr__(self, name, plain(getattr(self, name)))
        numbers = all(isinstance(each, float | int) for each in astuple(self))
        above_0 = numbers and self.bandwidth_hz and (self.interference_w or self.noise_w_per_hz)
        if not (above_0 and all(0 <= each < math.inf for each in astuple(self))):
            raise ConfigError(
                f"{self}: must be finite and not negative, with bandwidth_hz above 0, and with "
                "interference_w or noise_w_per_hz above 0"
            )
