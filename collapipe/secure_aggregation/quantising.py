"""Quantise updates to whole numbers, so that they can be masked and summed modulo a power of two.

A unit's change x has d values and a norm ‖x‖₂ ≤ C. It becomes whole multiples of the step
s = C / ((L + 1)·√d), rounded up or down at random so that the mean is x. L is ``levels``.

Before rounding, x is scaled down to ‖x‖ ≤ C·L/(L + 1). Rounding adds less than s·√d = C/(L + 1), so
the sent vector again has a norm ≤ C, and noise for the norm C hides it.

The error of the mean of n units' vectors has a norm of at most 2C/(L + 1), or C/(L + 1) if no
vector was scaled down. Rounding errors are independent: without scaling the root mean square error
is at most C/(2(L + 1)·√n).

A value is at most (L + 1)·√d steps, so the sum of n values needs ⌈log₂(2n(L + 1)√d + 1)⌉ bits. This
is log₂√d more than the precision itself, because one value may have all of the norm.

With ``privacy.noise_by=units`` each unit adds discrete Gaussian noise, such that the noise of
``noise_parts`` units has the standard deviation z·C (Kairouz, Liu and Steinke 2021).
"""

import math
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from collapipe.errors import NonFiniteLossError, WireError
from collapipe.privacy.noise import LEAST_DEVIATION, DiscreteGaussian
from collapipe.sections import PrecisionOrAuto, PrivacySettings
from collapipe.secure_aggregation.masks import Words
from collapipe.secure_aggregation.session import noise_parts

Values = NDArray[np.floating[Any]]
LEVELS = {"float32": 2**16, "bfloat16": 2**9, "int8": 127, "int6": 31, "int4": 7}
"""Levels by precision, for a value of average size: all values equal, with the norm C."""
_CHUNK = 2**20  # values processed at a time
_ROUNDING = 1e-9  # relative tolerance of norms in float64
_LEAST_STEP = 1e-300  # far above the subnormal numbers
_TAIL = 16.0  # standard deviations; noise exceeds them with a probability of 2⁻¹⁸⁰


@dataclass(frozen=True, slots=True)
class Quantiser:
    """Quantises vectors of ``size`` d values and a norm of at most ``bound`` C.

    Sums have at most ``units`` n vectors. ``noise`` is the standard deviation of each unit's noise,
    in steps; 0 disables noise.
    """

    size: int
    bound: float
    levels: int
    units: int
    noise: float = 0.0

    @classmethod
    def of(
        cls, upload: PrecisionOrAuto, privacy: PrivacySettings, size: int, bound: float, units: int
    ) -> Self:
        """Return a quantiser with the levels of ``compression.upload``.

        Raises ``WireError`` if steps are too coarse for the units' noise, or too small for float64:
        a rounded step would let a norm exceed C.
        """
        levels, noise = LEVELS[upload], 0.0
        if privacy.noise_by == "units":
            parts = noise_parts(units, privacy.threshold)
            noise = privacy.noise_multiplier * (levels + 1) * math.sqrt(size / parts)
            if noise < LEAST_DEVIATION:
                raise WireError(
                    f"privacy.noise_by=units: each unit's noise is {noise:.2g} steps of rounding, "
                    f"expected {LEAST_DEVIATION:g} or more; choose a finer compression.upload"
                )
        made = cls(size, bound, levels, units, noise)
        if not made.step > _LEAST_STEP:
            raise WireError(f"a clip norm of {bound:g} has steps of {made.step:g}, expected more")
        return made

    @property
    def step(self) -> float:
        return self.bound / ((self.levels + 1) * math.sqrt(self.size))

    @property
    def bits(self) -> int:
        """Number of bits of a masked value, which also fit the sum."""
        clipped = self.units * (self.levels + 1) * math.sqrt(self.size)
        return (2 * math.ceil(clipped + _TAIL * self.noise * math.sqrt(self.units))).bit_length()

    @property
    def num_bytes(self) -> int:
        """Size of a packed masked vector in bytes."""
        return -(-self.size * self.bits // 8)

    def quantise(
        self, change: Values, rng: np.random.Generator, noise_seed: int | None = None
    ) -> Words:
        """Return ``change`` in steps, plus the unit's noise, as unsigned words modulo 2^bits.

        Words may have more than ``bits`` bits. Without a ``noise_seed`` the noise cannot be
        repeated. Raises ``NonFiniteLossError`` if a value is NaN or infinite.
        """
        squares = (np.square(part, dtype=np.float64).sum() for part in _parts(change))
        norm = math.sqrt(math.fsum(map(float, squares)))
        if not math.isfinite(norm):
            raise NonFiniteLossError(f"a change of the weights has the norm {norm}")
        most = self.bound * self.levels / (self.levels + 1)
        scale = min(1.0, most / norm if norm else 1.0) / self.step
        words = np.empty(self.size, self._words)
        source = DiscreteGaussian(self.noise, noise_seed) if self.noise else None
        for part, into in zip(_parts(change), _parts(words), strict=True):
            whole = np.floor(part * np.float64(scale) + rng.random(part.size)).astype(np.int64)
            if source is not None:
                whole += source.draw(part.size)
            into[:] = whole.astype(into.dtype)
        return words

    def restored(self, total: Words, finished: int) -> NDArray[np.float64]:
        """Return the sum of ``finished`` units' vectors, given the sum of their words.

        Raises ``WireError`` if vectors of norm C cannot have this sum, because some unit violated
        the protocol.
        """
        modulus, half = 2**self.bits, 2 ** (self.bits - 1)
        whole = (total & total.dtype.type(modulus - 1)).astype(np.int64)
        whole -= (whole >= half) * np.int64(modulus)
        values = whole * np.float64(self.step)
        noise = self.noise * self.step * math.sqrt(finished) * (math.sqrt(self.size) + _TAIL)
        norm, most = float(np.sqrt(np.square(values).sum())), finished * self.bound + noise
        if norm > most * (1 + _ROUNDING):
            raise WireError(
                f"the sum of {finished} updates has the norm {norm:.3g}, at most {most:.3g} is "
                "possible: a unit sent an update that was not clipped"
            )
        return values

    def pack(self, words: Words) -> NDArray[np.uint8]:
        """Pack the lowest ``bits`` of each word without gaps into uint8 [num_bytes]."""
        return np.concatenate([self._packed(part) for part in _parts(words)])

    def unpack(self, packed: NDArray[np.uint8]) -> Words:
        """Return the words that ``pack`` packed, modulo 2^bits; ``packed`` has ``num_bytes``."""
        width, words = 8 * self._words.itemsize, np.empty(self.size, self._words)
        for first, into in enumerate(_parts(words)):
            begin = first * _CHUNK * self.bits // 8
            part = packed[begin : begin + -(-into.size * self.bits // 8)]
            bits = np.unpackbits(part, count=into.size * self.bits).reshape(-1, self.bits)
            wide = np.zeros((into.size, width), np.uint8)
            wide[:, width - self.bits :] = bits
            into[:] = np.packbits(wide, axis=1).view(self._words.newbyteorder(">")).reshape(-1)
        return words

    def _packed(self, words: Words) -> NDArray[np.uint8]:
        width = 8 * words.dtype.itemsize
        bytes_ = words.astype(words.dtype.newbyteorder(">")).view(np.uint8)
        bits = np.unpackbits(bytes_.reshape(-1, words.dtype.itemsize), axis=1)
        return np.packbits(bits[:, width - self.bits :])

    @property
    def _words(self) -> np.dtype[np.unsignedinteger[Any]]:
        return np.dtype(np.uint32 if self.bits <= 32 else np.uint64)


def _parts(values: NDArray[Any]) -> list[NDArray[Any]]:
    """Return views of at most ``_CHUNK`` values each, to bound the memory of temporary arrays."""
    return [values[first : first + _CHUNK] for first in range(0, values.size, _CHUNK)]
