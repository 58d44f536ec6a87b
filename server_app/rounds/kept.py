"""Gather the states that units keep between rounds, and validate each before it is stored."""

import torch
from torch import Tensor

from collapipe.config import Settings
from collapipe.devices.kept_law import LARGEST, unpack_law
from collapipe.errors import WireError
from collapipe.models.cut import extra_rows
from collapipe.models.part import state_like
from collapipe.sections import LoraSettings, OptimizerSettings
from collapipe.state import ClusterState
from collapipe.tensors import Tensors, all_finite, chosen, not_finite
from collapipe.wire import messages, records
from collapipe.wire.compression.codec import check_like
from collapipe.wire.compression.feedback import ActivationMemory
from collapipe.wire.messages import Failure
from server_app import questions
from server_app.kept_states import gather
from server_app.questions import Question
from server_app.roster import Roster
from server_app.rounds.global_model import GlobalModel
from server_app.rounds.results import Store
from server_app.units import Kept, Units

SENDER = "the unit"
"""The sender in messages about one unit's reply; a log line begins with the unit's name."""


def store_kept(
    store: Store, units: Units, roster: Roster, round_: int, model: GlobalModel
) -> tuple[Roster, dict[int, int]]:
    """Pass the units' states after a round to ``store``; no further ones if the disk is full.

    Returns the roster with the units that did not send theirs, and the bytes of the others.
    """
    num_bytes, failures = dict[int, int](), dict[int, Failure]()
    clusters, unstored = roster.clusters, list[int]()

    def question(unit: int) -> Question[Kept]:
        then = clusters[unit], round_, model, units.settings
        return questions.keep(most_kept(*then), lambda kept: check_kept(kept, *then))

    for unit, kept in gather(units, roster, question, more=lambda: not unstored):
        if isinstance(kept, Failure):
            failures[unit] = kept
            continue
        num_bytes[unit] = sum(map(records.num_bytes, kept.values()))
        if not store(unit, kept):
            unstored.append(unit)
    limit = units.settings.federation.miss_limit
    return roster.after_absences(round_, failures, present=(), miss_limit=limit), num_bytes


def check_kept(
    kept: Kept, cluster: ClusterState, round_: int, model: GlobalModel, settings: Settings
) -> None:
    """Raise ``WireError`` unless ``kept`` is a possible state of this cluster's unit after a
    round."""
    found = {key: kept.get(key, {}) for key in messages.KEPT}
    most_rows = _most_rows(cluster, round_, settings)
    masked, with_head = settings.privacy.secure_aggregation, settings.units_have_heads
    if masked and any(found[key] for key in messages.KEPT if key not in messages.NOT_TRAINED):
        allowed = ", ".join(messages.NOT_TRAINED)
        raise WireError(f"{SENDER} sent more than {allowed}, though updates are masked")
    unpack_law(found[messages.STEP_LAW])
    own = model.names(with_head and not settings.chooses_heads)
    check_state(found[messages.OPTIMIZER], chosen(model.weights, own), settings.optimizer)
    sent = model.names(with_head) & found[messages.RESIDUAL].keys()
    check_like(found[messages.RESIDUAL], chosen(model.weights, sent), SENDER)
    if (name := not_finite(found[messages.RESIDUAL])) is not None:
        raise WireError(f"{SENDER} sent {name} with values that are NaN or infinite")
    if found[messages.STEM]:
        cached = isinstance(settings.adapter, LoraSettings) and settings.adapter.cache
        numbers = found[messages.STEM].get(messages.STEM_ROWS, torch.empty(0))
        like = torch.empty(min(numbers.numel(), most_rows), dtype=torch.int64, device="meta")
        check_like(found[messages.STEM], {messages.STEM_ROWS: like} if cached else {}, SENDER)
        _check_rows(numbers, cluster.num_samples)
    rows = most_rows if settings.compression.feedback else 0
    most = rows, settings.task.max_length + extra_rows(settings.model)
    dim, dtype = settings.model.dim, getattr(torch, settings.pipeline.dtype)
    for key in messages.ACTIVATIONS:
        ActivationMemory.unpack(found[key], dim, dtype, most)


def most_kept(
    cluster: ClusterState, round_: int, model: GlobalModel, settings: Settings
) -> dict[str, int]:
    """Return the largest possible size in bytes of each group of a unit's state after a round.

    The number of steps bounds these sizes, so a unit cannot raise them by reporting more rows.
    """
    own = model.names(settings.units_have_heads)
    weights = chosen(model.weights, own)
    rows = _most_rows(cluster, round_, settings)
    tokens = settings.task.max_length + extra_rows(settings.model)
    row = tokens * settings.model.dim * getattr(torch, settings.pipeline.dtype).itemsize
    activations = rows * (row + 16) if settings.compression.feedback else 0
    most = dict.fromkeys(messages.ACTIVATIONS, activations) | {messages.STEM: 8 * rows}
    state = state_like(settings.optimizer, weights)
    groups = {messages.OPTIMIZER: state, messages.RESIDUAL: weights, messages.STEP_LAW: LARGEST}
    most = {name: questions.tensors_bytes({}) + size for name, size in most.items()}
    return most | {name: questions.tensors_bytes(each) for name, each in groups.items()}


def _check_rows(numbers: Tensor, num_rows: int) -> None:
    """Raise ``WireError`` unless ``numbers`` [n] are row numbers in strictly ascending order."""
    ascending = bool((numbers.diff() > 0).all())
    if len(numbers) and not (ascending and 0 <= int(numbers[0]) <= int(numbers[-1]) < num_rows):
        raise WireError(f"{SENDER} keeps row numbers that do not ascend within 0 … {num_rows - 1}")


def _most_rows(cluster: ClusterState, round_: int, settings: Settings) -> int:
    """Return how many rows of the unit the run's steps can have read by the end of a round."""
    return min(cluster.num_samples, round_ * settings.federation.local_steps * settings.batch_size)


def check_state(state: Tensors, weights: Tensors, settings: OptimizerSettings) -> None:
    """Raise ``WireError`` unless ``state`` is a possible optimiser state of these ``weights``.

    Weights that were never used in a step need not have a state.
    """
    stepped = {name.rpartition("/")[0] for name in state} if settings.state == "keep" else ()
    check_like(state, state_like(settings, chosen(weights, stepped)), SENDER)
    for name, tensor in state.items():
        positive = name.endswith(("/exp_avg_sq", "/step"))
        if not all_finite(tensor) or (positive and bool((tensor < 0).any())):
            raise WireError(f"{SENDER} sent {name} with impossible values for an optimiser")
