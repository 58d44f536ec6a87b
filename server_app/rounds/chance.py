"""Whether a choice of units by chance is one that ε may count, and among whom it falls."""

from collections.abc import Collection

from collapipe.config import Settings
from optim.baselines import RandomUnits
from optim.planner import RoundRequest
from server_app.world.environment import Environment


def chance_counts(settings: Settings) -> bool:
    """Whether ε may count that units are drawn by chance: every one that could take part in some
    round, and still can hold the model, can take part in this one. Fading decides who finds a
    channel: how many take part tells who does."""
    world = settings.build("environment")
    stay = isinstance(world, Environment) and world.devices_stay and world.fading == "none"
    return isinstance(settings.planner, RandomUnits) and stay


def drawable(planner: RandomUnits, request: RoundRequest, gone: Collection[int]) -> set[int]:
    """Units on which the choice can fall for certain. Of those that are ``gone`` nobody knows, nor
    of ones with real devices, which may be lost at any time."""
    sure = {each.unit for each in request.clusters if not each.real_devices}
    return (planner.able(request) & sure) - {*gone}
