"""Peak memory of a process that trains one segment under GPipe; started by benchmarks/cost.py.

    python benchmarks/cost_memory.py MODEL BLOCKS MICRO_BATCHES MICRO_BATCH_SIZE

Prints by how many bytes the peak resident memory exceeds the memory before the segment was built.
Before that, a block trains on one token, so that libraries have loaded all they load on first use.
"""

import re
import sys
from pathlib import Path

import torch
from cost_segment import TOKENS, Worked

_STEPS = 2  # from the second step on the optimiser has its moments


def main() -> None:
    name, *numbers = sys.argv[1:]
    blocks, count, size = map(int, numbers)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    train(name, 1, 1, 1, 1)
    Path("/proc/self/clear_refs").write_text("5")  # reset the peak to the current memory
    before = status("VmRSS")
    train(name, blocks, count, size, TOKENS)
    print(status("VmHWM") - before)


def train(name: str, blocks: int, count: int, size: int, tokens: int) -> None:
    """Train steps of ``count`` micro-batches of ``size`` samples."""
    worked = Worked(name, blocks)
    for _ in range(_STEPS):
        shapes = [worked.forward(micro_batch, size, tokens) for micro_batch in range(count)]
        for micro_batch, shape in enumerate(shapes):
            worked.backward(micro_batch, torch.randn(shape))
        worked.step()


def status(key: str) -> int:
    """Bytes of an entry in the process's status."""
    text = Path("/proc/self/status").read_text()
    return int(re.search(rf"^{key}:\s+(\d+) kB", text, re.MULTILINE)[1]) * 1024


if __name__ == "__main__":
    main()
