"""All processes together train a model that no process could train within its memory limit.

Cgroups enforce the limit. The control unit's peak is compared with a sum: interpreter and
libraries, the encoder's weights, the training state of two blocks, embedding and decoder.
"""

import ctypes
import gc
import multiprocessing
import os
from argparse import ArgumentParser, Namespace
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack

import torch
from torch import Tensor

from benchmarks.arguments import at_least
from benchmarks.devices.cluster import CLIP, RATE, SEED, add_sizes, daemons, work
from benchmarks.devices.memory import peak_bytes, reset_peak, train
from benchmarks.devices.sides import about, save
from collapipe.models.dropout import DropoutKey
from collapipe.process.allocator import return_large_blocks
from pipeline.engine import Pipeline
from pipeline.head import LocalHead
from pipeline.phase_timer import PhaseTimer
from tests.device_cluster import device_name, even_plan, plan_of
from tests.network import Place, memory_limit

MB = 1e6
_COPIES = 4  # of trained values: weights, gradients, two moments


def add_arguments(parser: ArgumentParser) -> None:
    """Add arguments for devices, their limit, and sizes."""
    parser.add_argument("--devices", type=at_least(1), default=4)
    parser.add_argument("--limit", type=float, default=1.2e9, help="Of each process, in bytes.")
    parser.add_argument("--steps", type=at_least(1), default=3)
    parser.add_argument("--every", type=at_least(1), default=1, help="Steps between two replicas.")
    parser.add_argument("--micro-batches", type=at_least(1), default=4)
    add_sizes(parser, dim=768, blocks=12, samples=8)


def main(arguments: Namespace) -> None:
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        devices, parts = pool.submit(_control_unit, arguments).result()
    peak, encoder, limit = parts.pop("peak"), parts["encoder"], arguments.limit
    parts["two blocks' training state"] = 2 * _COPIES * encoder // arguments.blocks
    print(f"limit {limit / MB:,.0f} MB; training state of all {_COPIES * encoder / MB:,.0f} MB")
    print("devices:", ", ".join(f"{each / MB:,.0f} MB" for each in devices))
    print(f"control unit: {peak / MB:,.0f} MB, {peak / sum(parts.values()):.3f} of the sum of")
    print("\n".join(f"    {each / MB:7,.0f} MB {name}" for name, each in parts.items()))
    found = {"devices": devices, "peak": peak, "parts": parts}
    save(arguments.output, "capacity", {"about": about(arguments), **found})


def _control_unit(arguments: Namespace) -> tuple[list[int], dict[str, int]]:
    """Peaks after a few steps, in a process with the same limit as the devices."""
    torch.set_num_threads(1)
    return_large_blocks()  # as a control unit does
    count, m, limit = arguments.devices, arguments.micro_batches, int(arguments.limit)
    with ExitStack() as stack:
        own, *limits = [stack.enter_context(memory_limit(limit)) for _ in range(count + 1)]
        started = stack.enter_context(daemons([Place()] * count, f"{limit / MB}MB"))
        for box, group in zip(started.daemons, limits, strict=True):
            group.write_text(str(box.process.pid))
        train((64, 1, 1, 8), 1, "gpipe")  # so that libraries load all they load on first use
        found = {"interpreter and libraries": _reset_own_peak()}
        made = work(arguments.dim, arguments.blocks, arguments.samples, arguments.tokens)
        names = [device_name(k) for k in range(count)]
        plan = even_plan(names, arguments.blocks, plan_of(names[:1], (1,), m))
        embedding, blocks, part = made.parts()
        blocks.clear()
        _reset_own_peak()
        own.write_text(str(os.getpid()))
        stack.callback((own.parents[1] / own.name).write_text, str(os.getpid()))
        how = plan, started.daemons, arguments.every, started.dialer
        segments = stack.enter_context(made.segments(*how))
        parts = embedding, segments, LocalHead(part), PhaseTimer()
        pipeline = stack.enter_context(Pipeline(m, *parts))
        for step in range(arguments.steps):
            pipeline.run(made.batch, DropoutKey(SEED, 0, step))
            pipeline.step(RATE, CLIP)
        segments.collect()
        found["peak"] = peak_bytes()
        assert pipeline.weights().keys() <= made.start.keys()
        encoder = {key: each for key, each in made.start.items() if key.startswith("blocks.")}
        found["encoder"] = _bytes(encoder.values())
        rest = _bytes(made.start.values()) - found["encoder"]
        found["embedding and decoder, as received and in training"] = rest * (1 + _COPIES)
        peaks = [peak_bytes(box.process.pid) for box in started.daemons]
    return peaks, found


def _bytes(tensors: Iterable[Tensor]) -> int:
    return sum(each.nbytes for each in tensors)


def _reset_own_peak() -> int:
    """``reset_peak`` after freeing the memory that building the model has left."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    return reset_peak()
