"""What a noisy uplink does to what units send (Lemma 2), for those who want to see it learn."""

import math

import torch

from collapipe.plan import ClusterPlan
from collapipe.tensors import Tensors
from optim.convergence import interference_error
from optim.planner import RoundRequest


def noise_variance(
    plan: ClusterPlan, request: RoundRequest, constant_w: float, factor: float
) -> float:
    """Of each weight: ``factor``·ε(p), with ε(p) = C/(p·h + I) of eq. (25).

    C is ``constant_w``. 0 where the strategy planned no channel: nothing is known of p and h.
    """
    cluster = next(each for each in request.clusters if each.unit == plan.unit)
    if plan.uplink is None or cluster.uplink is None:
        return 0.0
    gain = cluster.uplink.gains[plan.uplink.channel]
    interference_w = request.channels[plan.uplink.channel].interference_w
    error = interference_error(plan.uplink.power_w, gain, interference_w, constant_w)
    return factor * float(error)


def with_noise(weights: Tensors, variance: float, seed: int) -> Tensors:
    """The weights with independent Gaussian noise of mean 0; whole numbers stay."""
    generator = torch.Generator().manual_seed(seed)

    def noisy(tensor: torch.Tensor) -> torch.Tensor:
        if not tensor.is_floating_point():
            return tensor
        noise = torch.randn(tensor.shape, generator=generator, dtype=tensor.dtype)
        return tensor + math.sqrt(variance) * noise

    return {name: noisy(tensor) for name, tensor in weights.items()}
