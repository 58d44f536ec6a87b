"""Account for the rows that a unit's frozen stem must compute.

The content of the real disk depends on other runs, interruptions and other users of the machine.
The modelled clock therefore assumes that each unit began with an empty disk.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass
class StemRows:
    """The account of one round.

    Attributes
    ----------
    sizes
        Bytes of each row's activation, int64 [rows].
    kept
        Whether an earlier step kept a row's activation, bool [rows]; ``take`` updates it.
    limit_bytes
        Largest total size of kept activations; 0 keeps none.
    computed
        Rows that this round's steps had to compute.
    """

    sizes: NDArray[np.int64]
    kept: NDArray[np.bool_]
    limit_bytes: int
    computed: int = 0

    def take(self, rows: NDArray[np.int64]) -> None:
        """Count the rows of a step that are not kept, and keep them up to the limit."""
        new = rows[~self.kept[rows]]
        room = self.limit_bytes - int(self.sizes[self.kept].sum())
        self.computed += len(new)
        self.kept[new[np.cumsum(self.sizes[new]) <= room]] = True
