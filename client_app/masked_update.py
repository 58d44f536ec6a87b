"""A unit's change of the weights as the masked vector that it sends. Independent of Flower."""

import numpy as np
import torch

from collapipe.config import Settings
from collapipe.errors import WireError
from collapipe.secure_aggregation.messages import MaskRequest
from collapipe.secure_aggregation.quantising import Quantiser
from collapipe.secure_aggregation.unit import MaskedUnit, UnitWithShares
from collapipe.seeds import derive
from collapipe.tensors import Tensors
from collapipe.wire.messages import TrainRequest
from collapipe.wire.records import MASKED


def masked_update(
    stage: UnitWithShares,
    request: TrainRequest,
    shares: MaskRequest,
    start: Tensors,
    end: Tensors,
    settings: Settings,
) -> tuple[MaskedUnit, Tensors]:
    """Mask the change from ``start`` to ``end``. Returns the state that the unit keeps until the
    sum is unmasked, and the tensors to send.

    The change is clipped and gets the unit's share of the noise if units add it. Integer tensors
    are not sent. Random rounding derives from the run's seed, so that a round can be repeated.
    Raises ``WireError`` or ``NonFiniteLossError``.
    """
    if request.clip_norm is None:
        raise WireError("a masked update needs privacy.clip_norm, which the server did not send")
    changes = [end[name] - start[name] for name in sorted(end) if end[name].is_floating_point()]
    change = torch.cat([each.reshape(-1) for each in changes]).numpy()
    how = settings.compression.upload, settings.privacy
    quantiser = Quantiser.of(*how, change.size, request.clip_norm, stage.num_units)
    seed = derive(settings.seed, "rounding", stage.unit, request.round)
    told = settings.privacy.noise_seed
    noise = None if told is None else derive(told, "privacy", stage.unit, request.round)
    words = quantiser.quantise(change, np.random.default_rng(seed), noise)
    masked = stage.mask(request.round, shares, words)
    return masked, {MASKED: torch.from_numpy(quantiser.pack(words))}
