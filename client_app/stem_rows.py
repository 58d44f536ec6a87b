"""Which of a unit's rows the frozen stem must compute, by the run's own account.

What a disk holds depends on other runs, on when this one was interrupted, and on who else uses the
machine. The modelled clock counts as if each unit had a machine and an empty disk of its own.
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
        Whether an earlier step kept a row's, bool [rows]; ``take`` goes on with it.
    limit_bytes
        Most that is kept; 0: nothing is.
    computed
        Rows that this round's steps had to compute.
    """

    sizes: NDArray[np.int64]
    kept: NDArray[np.bool_]
    limit_bytes: int
    computed: int = 0

    def take(self, rows: NDArray[np.int64]) -> None:
        """A step takes these rows: count those not kept, and keep them while there is room."""
        new = rows[~self.kept[rows]]
        room = self.limit_bytes - int(self.sizes[self.kept].sum())
        self.computed += len(new)
        self.kept[new[np.cumsum(self.sizes[new]) <= room]] = True
