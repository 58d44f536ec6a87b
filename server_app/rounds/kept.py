"""What a unit keeps between rounds, checked before a checkpoint has it: no more than its rounds of
the run's model can have left there."""

import torch

from collapipe.config import Settings
from collapipe.devices.slowness import Slowness
from collapipe.errors import WireError
from collapipe.models.cut import extra_rows
from collapipe.models.optimizer import state_like
from collapipe.sections import LoraSettings, OptimizerSettings
from collapipe.state import ClusterState
from collapipe.tensors import Tensors, all_finite, chosen, not_finite
from collapipe.wire.compression import check_like
from collapipe.wire.feedback import ActivationMemory
from collapipe.wire.messages import (
    ACTIVATIONS,
    KEPT,
    NOT_TRAINED,
    OPTIMIZER,
    RESIDUAL,
    SLOWNESS,
    STEM,
    STEM_ROWS,
)
from server_app.rounds.global_model import GlobalModel
from server_app.units import Kept


def check_kept(
    kept: Kept, cluster: ClusterState, round_: int, model: GlobalModel, settings: Settings
) -> None:
    """Raise ``WireError`` unless the unit of this cluster can keep that after a round."""
    sender, found = f"unit {cluster.unit}", {key: kept.get(key, {}) for key in KEPT}
    masked, with_head = settings.privacy.secure_aggregation, settings.units_have_heads
    if masked and any(found[key] for key in KEPT if key not in NOT_TRAINED):
        told = ", ".join(NOT_TRAINED)
        raise WireError(f"{sender} sent more than {told}, though updates are masked")
    Slowness.unpack(found[SLOWNESS], {each.name for each in cluster.devices})
    own = model.names(with_head and not settings.chooses_heads)
    check_state(found[OPTIMIZER], chosen(model.weights, own), settings.optimizer, sender)
    sent = model.names(with_head) & found[RESIDUAL].keys()
    check_like(found[RESIDUAL], chosen(model.weights, sent), sender)
    if (odd := not_finite(found[RESIDUAL])) is not None:
        raise WireError(f"{sender} sent {odd} with values that are NaN or infinite")
    if found[STEM]:
        cached = isinstance(settings.adapter, LoraSettings) and settings.adapter.cache
        account = torch.empty(cluster.num_samples, dtype=torch.bool, device="meta")
        check_like(found[STEM], {STEM_ROWS: account} if cached else {}, sender)
    steps = round_ * settings.federation.local_steps if settings.compression.feedback else 0
    rows = min(cluster.num_samples, steps * settings.batch_size)
    most = rows, settings.task.max_length + extra_rows(settings.model)
    dim, dtype = settings.model.dim, getattr(torch, settings.pipeline.dtype)
    for key in ACTIVATIONS:
        ActivationMemory.unpack(found[key], dim, dtype, most)


def check_state(state: Tensors, weights: Tensors, settings: OptimizerSettings, sender: str) -> None:
    """Raise ``WireError`` unless it is what an optimiser remembers from round to round of these
    ``weights``; one that is not used never steps."""
    stepped = {name.rpartition("/")[0] for name in state} if settings.state == "keep" else ()
    check_like(state, state_like(settings, chosen(weights, stepped)), sender)
    for name, tensor in state.items():
        positive = name.endswith(("/exp_avg_sq", "/step"))
        if not all_finite(tensor) or (positive and bool((tensor < 0).any())):
            raise WireError(f"{sender} sent {name} with values that no optimiser has")
