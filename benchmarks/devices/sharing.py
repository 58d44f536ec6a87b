"""Shared stages on daemons with quotas and links of limited rate: measured and planned gains.

Three rules plan the same rounds in turns: the exact pipeline of single devices, ``auto`` with
stages that may be shared, and VanillaFL with the whole encoder on each device. The inventory
describes each device by a block's times on one core of this machine, measured before, and by its
quota. For ``auto``, a trial run measures the steps before each run. A rule's gain is how far the
median of its rounds is below the median of the exact pipeline. The first two rounds of each turn do
not count. The table shows the plan of the last round. If it equals the plan of ``exact``, the gain
is this machine's noise.
"""

import statistics
import time
from argparse import ArgumentParser, Namespace
from collections import defaultdict
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from benchmarks.arguments import at_least
from benchmarks.devices.predictions import FIRST, LORA, SINGLE, Setting, run_rounds
from benchmarks.devices.sides import about, save
from collapipe.config import load_overrides
from collapipe.models.cost import measure_cost
from collapipe.models.dropout import DropoutKey

_WIDE = "model.dim=256", "model.feed_forward_dim=1024", "federation.local_steps=4"
_HEAD = ("decoder.mode=control_unit",)
COLUMNS = ["run and rule", "a round", "planned", "measured gain", "planned gain", "plan"]
_TIMES = "measured_s", "planned_s"
RULES = {
    "exact": (SINGLE,),
    "auto": (),
    "vanilla_fl": ("framework=vanilla_fl",),
}
_EQUAL = 0.2, 0.2, 0.2, 0.2
_ADAPTERS = *_WIDE, *_HEAD, *LORA[:1]
SETTINGS = {
    "four equal, 30 Mbit/s, LoRA": Setting(_ADAPTERS, 4, 30, cores=_EQUAL),
    "four equal, 1 Gbit/s, LoRA": Setting(_ADAPTERS, 4, 1000, cores=_EQUAL),
    "10:7:4:2, 100 Mbit/s, LoRA": Setting(_ADAPTERS, 4, 100),
    "10:7:4:2, 1 Gbit/s, LoRA": Setting(_ADAPTERS, 4, 1000),
    "10:7:4:2, 100 Mbit/s, all weights": Setting((*_WIDE, *_HEAD), 4, 100),
    "10:7:4:2, 1 Gbit/s, all weights": Setting((*_WIDE, *_HEAD), 4, 1000),
}


def add_arguments(parser: ArgumentParser) -> None:
    """Add arguments for rounds and settings."""
    parser.add_argument("--rounds", type=at_least(1), default=6)
    parser.add_argument("--settings", nargs="+", choices=SETTINGS, default=[*SETTINGS])


def main(arguments: Namespace) -> None:
    found, rows = {}, []
    print(" | ".join(COLUMNS))
    for name in arguments.settings:
        found[name] = _row(SETTINGS[name], arguments)
        for rule, own in found[name].items():
            seconds = (f"{own[key]:.2f} s" for key in _TIMES)
            gains = (f"{own[key]:.0%}" for key in ("measured_gain", "planned_gain"))
            rows.append([f"{name}, {rule}", *seconds, *gains, own["plan"]])
            print(" | ".join(rows[-1]), flush=True)
    content = {"about": about(arguments), "columns": COLUMNS, "rows": rows, "found": found}
    save(arguments.output, "sharing", content)


def _described(setting: Setting) -> Setting:
    """The setting with the measured speed and launch time of a block on one core."""
    settings = load_overrides(setting.options)
    torch.set_num_threads(1)
    block, tokens = settings.model.build_block(0).train(), settings.task.max_length
    seconds = {rows: _block_s(block, rows, tokens, settings.model.dim) for rows in (1, 16)}
    each_s = (seconds[16] - seconds[1]) / 15
    cost = measure_cost(settings.model, tokens, settings.batch_size)
    return replace(setting, flops_per_s=cost.flops / each_s, launch_s=max(0.0, seconds[1] - each_s))


def _block_s(block: nn.Module, rows: int, tokens: int, dim: int) -> float:
    """Median seconds of forward and backward."""
    hidden, mask = torch.randn(rows, tokens, dim), torch.ones(rows, tokens, dtype=torch.bool)
    taken = []
    for _ in range(15):
        began, key = time.perf_counter(), DropoutKey(0, 0, 0)
        with key.drawing("block", 0):
            block(hidden.requires_grad_(), mask).sum().backward()
        taken.append(time.perf_counter() - began)
    return statistics.median(taken)


def _row(setting: Setting, arguments: Namespace) -> dict[str, dict[str, Any]]:
    setting, rounds = _described(setting), defaultdict[str, list[dict[str, Any]]](list)
    for _ in range(arguments.turns):
        for rule, options in RULES.items():
            own = replace(setting, options=(*setting.options, *options))
            rounds[rule] += run_rounds(arguments.rounds, rule == "auto", own)[FIRST - 1 :]
    found = {
        rule: {key: statistics.median(each[key] for each in own) for key in _TIMES}
        for rule, own in rounds.items()
    }
    best = found["exact"]
    return {
        rule: {
            **own,
            "measured_gain": 1 - own["measured_s"] / best["measured_s"],
            "planned_gain": 1 - own["planned_s"] / best["planned_s"],
            "plan": rounds[rule][-1]["plan"],
        }
        for rule, own in found.items()
    }
