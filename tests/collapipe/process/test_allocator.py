"""Freed memory between used blocks is returned to the system if memory is scarce."""

import subprocess
import sys

import pytest

_SIZE = 2**20  # bytes of each of 64 blocks; every second block is freed
_PROGRAM = """
import psutil
from collapipe.process.allocator import return_large_blocks

return_large_blocks(scarce={scarce})
blocks = [bytearray({size}) for _ in range(64)]
before = psutil.Process().memory_info().rss
del blocks[::2]
print(before - psutil.Process().memory_info().rss)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="only glibc has these settings")
@pytest.mark.parametrize("scarce", [True, False])
def test_freed_gaps_are_returned_only_if_memory_is_scarce(scarce: bool) -> None:
    program = _PROGRAM.format(scarce=scarce, size=_SIZE)
    ran = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    returned = int(ran.stdout) / (32 * _SIZE)
    assert returned > 0.9 if scarce else returned < 0.1
