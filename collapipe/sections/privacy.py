"""How much the model may reveal about a unit."""

from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import Field

from collapipe.errors import ConfigError
from collapipe.sections.numbers import CountFrom0, Positive

_LEAST_NOISE, _MOST_NOISE = 1e-3, 1e6  # in clip norms; larger ones overflow privacy accounting


@dataclass(frozen=True)
class PrivacySettings:
    """How much the model may reveal about a single unit, see ``collapipe.privacy``.

    A unit's update is clipped to the norm ``clip_norm`` C. With ``clip_quantile``, C starts there
    and follows the units' norms. The server adds noise of standard deviation
    ``noise_multiplier``·C to the sum of updates, drawn from ``noise_seed`` if it is set.

    With ``secure_aggregation`` the server learns only the sum, see
    ``collapipe.secure_aggregation``. The fraction ``threshold`` of a round's units must finish.
    With ``noise_by=units`` the units add the noise in parts, so that the server never learns a sum
    without noise.
    """

    clip_norm: Positive | None
    clip_quantile: Annotated[float, Field(gt=0, lt=1, allow_inf_nan=False)] | None
    noise_multiplier: Annotated[float, Field(ge=0, le=_MOST_NOISE, allow_inf_nan=False)]
    delta: Annotated[float, Field(gt=0, lt=1, allow_inf_nan=False)]
    max_epsilon: Positive | None
    noise_seed: CountFrom0 | None
    noise_by: Literal["server", "units"]
    secure_aggregation: bool
    threshold: Annotated[float, Field(gt=0.5, le=1, allow_inf_nan=False)]

    def __post_init__(self) -> None:
        if 0 < self.noise_multiplier < _LEAST_NOISE:
            raise ConfigError(
                f"privacy.noise_multiplier={self.noise_multiplier:g}: too small to protect anyone; "
                f"set 0 for no noise, or {_LEAST_NOISE:g} … {_MOST_NOISE:g}"
            )
        for option in ("noise_multiplier", "clip_quantile"):
            if getattr(self, option) and self.clip_norm is None:
                raise ConfigError(
                    f"privacy.{option}={getattr(self, option):g}: needs a bound on what a unit "
                    "changes; set privacy.clip_norm"
                )
        if self.secure_aggregation and self.clip_norm is None:
            raise ConfigError(
                "privacy.secure_aggregation=true: masking needs bounded updates; set "
                "privacy.clip_norm"
            )
        if self.noise_by == "units" and not (self.secure_aggregation and self.noise_multiplier):
            raise ConfigError(
                "privacy.noise_by=units: each unit's part of the noise hides nothing alone; set "
                "privacy.secure_aggregation=true and privacy.noise_multiplier, or noise_by=server"
            )
        if self.secure_aggregation and self.clip_quantile is not None:
            raise ConfigError(
                f"privacy.clip_quantile={self.clip_quantile:g}: in a masked sum a unit's vote "
                "cannot be checked, so one unit could set any clip norm; set it to null, or "
                "privacy.secure_aggregation=false"
            )
        if self.max_epsilon is not None and not self.noise_multiplier:
            raise ConfigError(
                f"privacy.max_epsilon={self.max_epsilon:g}: without noise every round exceeds it; "
                "set privacy.noise_multiplier"
            )
