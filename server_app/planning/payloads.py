"""Payloads that the options leave to the strategy: precisions, and the places of heads."""

from collections.abc import Mapping
from dataclasses import replace

from collapipe.config import Settings
from collapipe.errors import Called, ConfigError
from collapipe.plan import RoundPlan
from collapipe.report import BENCHMARKED, RoundingErrors
from collapipe.sections import CompressionSettings
from collapipe.state import Payload, Uplink
from collapipe.wire.compression.codec import FLOAT32


def payload_options(settings: Settings) -> tuple[str, ...]:
    """Return the options that determine the units' payloads, as text."""
    return (
        f"compression.activation={settings.compression.activation}",
        f"compression.upload={settings.compression.upload}",
        f"decoder.mode={settings.decoder.mode}",
    )


def allows(settings: Settings, payload: Payload) -> bool:
    """Whether the options allow the payload's precisions and the place of its head."""
    compression = settings.compression
    places = ("server", "control_unit") if settings.chooses_heads else (None,)
    sends = settings.server_has_heads and payload.head != "control_unit"
    activation = compression.activation if sends else FLOAT32
    return (
        payload.head in places
        and compression.upload in (payload.upload, "auto")
        and activation in (payload.activation, "auto")
    )


def check_chosen(plan: RoundPlan, settings: Settings, called: Called) -> None:
    """Raise ``ConfigError`` if the strategy left precisions or heads' places open."""
    for cluster in plan.clusters if settings.chooses_payloads else ():
        if not (cluster.uplink and cluster.uplink.activation):
            left = ", ".join(each for each in payload_options(settings) if each.endswith("=auto"))
            raise ConfigError(
                f"{left}: the strategy chose nothing for {called(cluster.unit)}; set these "
                "options, or use a strategy that chooses them: dssra with solver=exact, or all "
                "with as many channels as units"
            )


def next_rounding(
    before: tuple[RoundingErrors, ...], found: Mapping[int, RoundingErrors], num_units: int
) -> tuple[RoundingErrors, ...]:
    """Return each unit's measured ρ with the values ``found`` in a round; ``before`` is empty until
    a unit has measured any."""
    if not found:
        return before
    known = before or (BENCHMARKED,) * num_units
    return tuple(
        old.updated(found[unit]) if unit in found else old for unit, old in enumerate(known)
    )


def as_measured(
    uplink: Uplink | None, errors: RoundingErrors, compression: CompressionSettings
) -> Uplink | None:
    """Set the payloads' gradient errors from ``errors``, and sort the payloads by it."""
    if uplink is None:
        return None
    payloads = [
        replace(p, gradient_error=compression.rounding_error(p.activation, p.upload, errors))
        for p in uplink.payloads
    ]
    payloads.sort(key=lambda each: each.gradient_error)
    return replace(uplink, payloads=tuple(payloads))
