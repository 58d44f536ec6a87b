"""Rows for training, validation and test."""

from dataclasses import dataclass

from datasets import Dataset


@dataclass(frozen=True, slots=True)
class Splits:
    """A task's rows. ``train`` is cut into the units' shards, the others stay on the server."""

    train: Dataset
    validation: Dataset
    test: Dataset
