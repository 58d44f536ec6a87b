"""The file of a unit's owner: rows, devices, credentials, and privacy that a run must provide."""

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Self

from pydantic import Field, model_validator

from collapipe.config import Settings
from collapipe.inventory.values import Name, Place, Section, Text, Whole
from collapipe.inventory.yaml_file import PlacedError, load

Fingerprint = Annotated[str, Field(pattern="^[0-9a-f]{4}( [0-9a-f]{4}){7}$")]  # of a key


class DataSection(Section):
    """``data``: where the rows are, and the names of their columns."""

    root: Place | None = None
    name: Place | None = None  # on the hub; or a folder, as data.name of a run
    config: Text | None = None
    train_file: Place | None = None
    validation_file: Place | None = None  # to evaluate between rounds, if units evaluate
    test_file: Place | None = None  # to evaluate at the end
    text_column: Text | None = None
    label_column: Text | None = None
    tokens_column: Text | None = None
    tags_column: Text | None = None
    source_column: Text | None = None
    target_column: Text | None = None
    messages_column: Text | None = None
    prompt_column: Text | None = None
    completion_column: Text | None = None
    max_train_samples: Whole | None = None
    tokenizer_min_rows: Whole | None = None  # fewer are refused

    @model_validator(mode="after")
    def _check_one(self) -> Self:
        if (self.root, self.name, self.train_file).count(None) != 2:
            raise PlacedError((), "needs one of train_file, root and name: where rows are")
        if self.train_file is None and (self.validation_file or self.test_file):
            raise PlacedError((), "has validation_file or test_file, which belong to a train_file")
        return self


class ClusterSection(Section):
    """``cluster``: an inventory; its first cluster belongs to the unit."""

    file: Place


class PipelineSection(Section):
    threads: Whole = 1


class RuntimeSection(Section):
    torch_device: Text = "cpu"


class PrivacySection(Section):
    """``privacy``: requirements that a run must satisfy, or the unit refuses it."""

    updates_only: bool = False  # activations and targets stay on the unit
    secure_aggregation: bool = False  # updates are masked
    noise_multiplier: Annotated[float, Field(gt=0)] | None = None  # least noise, added by units
    # fingerprints of the units whose updates may be in a sum with this unit's
    peers: tuple[Fingerprint, ...] | None = None
    least_units: Annotated[int, Field(ge=2)] | None = None  # least number of updates in a sum
    # all runs together may spend this ε on the unit's rows, at this δ
    lifetime_epsilon: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    lifetime_delta: Annotated[float, Field(gt=0, lt=1)] = 1e-5

    def lacking(self, settings: Settings) -> Iterator[tuple[str, str]]:
        """Yield the options of a run that violate these requirements, and their required values."""
        found, noise = settings.privacy, self.noise_multiplier
        if self.updates_only and settings.server_has_heads:
            yield "decoder.mode", "must be control_unit: updates alone may leave the unit"
        summed = self.peers is not None or self.least_units is not None
        if (self.secure_aggregation or summed) and not found.secure_aggregation:
            yield "privacy.secure_aggregation", "must be true"
        if noise is not None and found.noise_by != "units":
            yield "privacy.noise_by", "must be units"
        if noise is not None and not found.noise_multiplier >= noise:  # also refuses NaN
            yield "privacy.noise_multiplier", f"must be at least {noise:g}"
        limited = self.lifetime_epsilon is not None
        if limited and not found.noise_multiplier:
            yield "privacy.noise_multiplier", "must be above 0: without noise ε has no bound"
        if (noise is not None or limited) and found.noise_seed is not None:
            yield "privacy.noise_seed", "must be null, or the server could take the noise away"


class OwnerSection(Section):
    """The contents of an owner's file."""

    name: Name | None = None
    number: Annotated[int, Field(ge=0)] | None = None  # of the unit; deployed ones have one
    server: Text | None = None  # HOST:PORT of the SuperLink of a deployed unit
    credentials: Place | None = None  # its folder
    data: DataSection
    cluster: ClusterSection | None = None
    pipeline: PipelineSection = PipelineSection()
    runtime: RuntimeSection = RuntimeSection()
    privacy: PrivacySection = PrivacySection()

    @model_validator(mode="after")
    def _check_signs(self) -> Self:
        if self.privacy.peers is not None and self.credentials is None:
            raise PlacedError(
                ("privacy", "peers"), "needs credentials, by which peers know this unit"
            )
        return self


def read_owner(file: Path) -> OwnerSection:
    """Read an owner's file. Raises ``ConfigError`` with the invalid line."""
    return load(file).parse(OwnerSection)
