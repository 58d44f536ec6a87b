"""Whether a choice of units by chance is one that ε may count."""

from collapipe.config import Settings
from optim.baselines import RandomUnits
from server_app.world.environment import Environment


def chance_counts(settings: Settings) -> bool:
    """Whether ε may count that units are drawn by chance: every one that could take part in some
    round, and still can hold the model, can take part in this one. Devices that are real may be
    lost at any time, and fading decides who finds a channel: how many take part tells who does."""
    world, real = settings.build("environment"), hasattr(settings.build("cluster"), "roster")
    stay = isinstance(world, Environment) and world.devices_stay and world.fading == "none"
    return isinstance(settings.planner, RandomUnits) and stay and not real
