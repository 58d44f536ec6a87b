"""Cost of a masked sum against a plain sum: bytes and CPU seconds of a unit and of the server.

    python -m benchmarks.secure_aggregation --values 294912 --units 3 10 30 100

This process executes a round of both sides one after the other. Messages are converted to JSON and
arrays and back, but do not cross a network, and nothing is trained. A change is clipped, encoded as
``compression.upload`` specifies, and averaged. The default number of values equals the LoRA
adapters of rank 8 in BERT base. With ``--gone``, this share of the units is lost after the secret
shares were sent. This is the server's worst case: it restores their masks one by one. ``error`` is
the norm of the mean's error as a share of privacy.clip_norm; ``bound`` is its limit.
"""

import argparse
import functools
import json
import math
import statistics
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from flwr.app import RecordDict

from benchmarks.arguments import at_least
from benchmarks.machine import machine
from collapipe.secure_aggregation.messages import (
    KeysReply,
    KeysRequest,
    MaskRequest,
    Roster,
    SharesReply,
    SurvivorsReply,
    SurvivorsRequest,
    UnmaskReply,
    UnmaskRequest,
)
from collapipe.secure_aggregation.quantising import LEVELS, Quantiser
from collapipe.secure_aggregation.server import checked, confirmed, relayed, unmask, usable
from collapipe.secure_aggregation.session import Session
from collapipe.secure_aggregation.unit import UnitWithKeys
from collapipe.tensors import Tensors
from collapipe.wire import records
from collapipe.wire.compression.codec import compress_update, restore
from server_app.rounds.global_model import average

THRESHOLD, BOUND = 2 / 3, 1.0


class Account:
    """Seconds and bytes of the units and of the server."""

    def __init__(self) -> None:
        self.seconds: defaultdict[object, float] = defaultdict(float)
        self.up: defaultdict[int, int] = defaultdict(int)
        self.down: defaultdict[int, int] = defaultdict(int)

    @contextmanager
    def busy(self, machine_or_unit: object) -> Iterator[None]:
        began = time.process_time()
        yield
        self.seconds[machine_or_unit] += time.process_time() - began

    def sent(self, unit: int, content: RecordDict) -> int:
        arrays = sum(len(a.data) for r in content.array_records.values() for a in r.values())
        return arrays + records.text_bytes(content)

    def to(self, unit: int, message: object, kind: type[Any]) -> Any:
        with self.busy("server"):
            content = records.pack(message)
        self.down[unit] += self.sent(unit, content)
        with self.busy(unit):
            return records.unpack(kind, content)

    def back(self, unit: int, message: object, kind: type[Any]) -> Any:
        with self.busy(unit):
            content = records.pack(message)
        self.up[unit] += self.sent(unit, content)
        with self.busy("server"):
            return records.unpack(kind, content)

    def arrays(self, unit: int, tensors: Tensors) -> Tensors:
        with self.busy(unit):
            content = RecordDict({"weights": records.pack_tensors(tensors)})
        self.up[unit] += self.sent(unit, content)
        with self.busy("server"):
            return records.unpack_record(content, "weights")

    def row(self, units: int) -> dict[str, object]:
        own = [self.seconds[unit] for unit in range(units)]
        return {
            "unit_s": round(statistics.median(own), 4),
            "server_s": round(self.seconds["server"], 4),
            "unit_bytes_up": round(statistics.median(self.up[unit] for unit in range(units))),
            "unit_bytes_down": round(statistics.median(self.down[unit] for unit in range(units))),
        }


def plain(changes: Sequence[np.ndarray], precision: str) -> tuple[Account, np.ndarray]:
    account, models = Account(), list[Tensors]()
    start = {"w": torch.zeros(changes[0].size)}
    for unit, change in enumerate(changes):
        with account.busy(unit):
            factor = min(1.0, BOUND / float(np.linalg.norm(change)))
            end = {"w": torch.from_numpy(change * np.float32(factor))}
            sent, _ = compress_update(start, end, {}, precision)
        received = account.arrays(unit, sent)
        with account.busy("server"):
            models.append(restore(received, start, precision, f"unit {unit}"))
    with account.busy("server"):
        mean = average(models, [1.0] * len(models))["w"]
    return account, mean.numpy()


def masked(
    changes: Sequence[np.ndarray], precision: str, num_lost: int
) -> tuple[Account, np.ndarray]:
    account, units = Account(), range(len(changes))
    keys = {}
    for unit in units:
        account.to(unit, KeysRequest(1), KeysRequest)
        with account.busy(unit):
            keys[unit] = UnitWithKeys.new(unit, 1, 1)
            reply = KeysReply(unit, keys[unit].public)
        keys[unit] = keys[unit], account.back(unit, reply, KeysReply).keys
    with account.busy("server"):
        roster = Roster(1, 1, usable({unit: public for unit, (_, public) in keys.items()}))
        session = Session(roster, THRESHOLD)
    shares, share_replies = {}, {}
    for unit in units:
        everybody = account.to(unit, roster, Roster)
        with account.busy(unit):
            shares[unit], reply = keys[unit][0].share(everybody, THRESHOLD)
        share_replies[unit] = account.back(unit, reply, SharesReply)
    with account.busy("server"):
        requests = relayed(share_replies)
    quantiser = Quantiser(changes[0].size, BOUND, LEVELS[precision], len(units))
    stages, received = {}, {}
    for unit in units[num_lost:]:
        request = account.to(unit, requests[unit], MaskRequest)
        with account.busy(unit):
            words = quantiser.quantise(changes[unit], np.random.default_rng(unit))
            stages[unit] = shares[unit].mask(1, request, words)
            sent = {records.MASKED: torch.from_numpy(quantiser.pack(words))}
        packed = account.arrays(unit, sent)[records.MASKED]
        with account.busy("server"):
            received[unit] = packed.numpy()
    confirming, replies = {}, {}
    for unit in received:
        survivors = account.to(unit, SurvivorsRequest(1, tuple(received)), SurvivorsRequest)
        with account.busy(unit):
            confirming[unit], confirmation = stages[unit].confirm(survivors)
        replies[unit] = account.back(unit, confirmation, SurvivorsReply)
    with account.busy("server"):
        confirmations = confirmed(1, replies)
    revealed = {}
    for unit in received:
        to_it = account.to(unit, confirmations[unit], UnmaskRequest)
        with account.busy(unit):
            reply = confirming[unit].reveal(to_it)
        revealed[unit] = account.back(unit, reply, UnmaskReply)
    with account.busy("server"):
        total = functools.reduce(np.add, map(quantiser.unpack, received.values()))
        unmask(session, received, checked(share_replies, received, revealed), total)
        mean = quantiser.restored(total, len(received)) / len(received)
    return account, mean


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--values", type=at_least(1), default=294_912)
    parser.add_argument("--units", type=at_least(1), nargs="+", default=[3, 10, 30, 100])
    parser.add_argument("--precisions", nargs="+", default=["float32", "int8"])
    parser.add_argument("--gone", type=float, nargs="+", default=[0.0, 0.1])
    arguments = parser.parse_args()
    print(json.dumps({"machine": machine(), "values": arguments.values}))
    rng = np.random.default_rng(0)
    for precision in arguments.precisions:
        for count in arguments.units:
            scale = 0.8 * BOUND / math.sqrt(arguments.values)
            changes = list(rng.normal(0, scale, (count, arguments.values)).astype(np.float32))
            account, _ = plain(changes, precision)
            report("plain", precision, count, account.row(count))
            for share in arguments.gone:
                num_lost = math.floor(share * count)
                if share and not num_lost:
                    continue
                account, mean = masked(changes, precision, num_lost)
                error = float(np.linalg.norm(mean - np.mean(changes[num_lost:], axis=0)))
                row = account.row(count) | {
                    "gone": num_lost,
                    "error": float(f"{error / BOUND:.2g}"),
                }
                row["bits"] = Quantiser(arguments.values, BOUND, LEVELS[precision], count).bits
                row["bound"] = float(f"{2 / (LEVELS[precision] + 1):.2g}")
                report("masked", precision, count, row)


def report(how: str, precision: str, units: int, row: dict[str, object]) -> None:
    record = {"how": how, "precision": precision, "units": units, **row}
    print(json.dumps(record), flush=True)


if __name__ == "__main__":
    main()
