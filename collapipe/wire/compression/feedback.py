"""Error feedback for activations: send a row's change since it was last sent.

As in AQ-SGD (Wang et al., 2022, arXiv 2206.01299), unit and server remember each row's activation
as it last arrived. The row's change since then is rounded and sent, so the rounding error becomes
part of its next change, an epoch later. A row is sent whole if it is new, its number of tokens has
changed, the precision is float32, or its change is larger than the row.

Both ends commit the activations of a round once the server has accepted the unit's reply. The
unit's next request names the last committed round: the unit's last round or the one before. If it
is another round, for example because the unit's machine lost its state, the unit sends every row
whole. Then the server's memory does not matter.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from collapipe.errors import WireError
from collapipe.tensors import Tensors, all_finite
from collapipe.wire.compression.codec import FLOAT32, decode, encode

_PACKED = "round", "rows", "counts", "tokens"


@dataclass(frozen=True, slots=True)
class ActivationMemory:
    """The activations that had arrived by ``round`` (0 before the first): row number → [n, d]."""

    round: int = 0
    rows: Mapping[int, Tensor] = field(default_factory=dict)

    def after(self, later: "ActivationMemory") -> "ActivationMemory":
        """Return this memory with the rows that arrived ``later`` added or replaced."""
        return ActivationMemory(later.round, {**self.rows, **later.rows})

    def agreed(self, later: "ActivationMemory", round_: int) -> "ActivationMemory":
        """Return the memory as of the server's last committed round ``round_``.

        It includes ``later`` if that round was committed. It is empty if ``round_`` is another one.
        """
        if round_ and round_ == later.round:
            return self.after(later)
        return self if round_ == self.round else ActivationMemory()

    def pack(self) -> Tensors:
        """Return the memory as four tensors; an empty memory has no tensors."""
        if not self.rows:
            return {}
        counts = [len(tokens) for tokens in self.rows.values()]
        numbers = map(torch.tensor, (self.round, list(self.rows), counts))
        tensors = *numbers, torch.cat(list(self.rows.values()))
        return dict(zip(_PACKED, tensors, strict=True))

    @classmethod
    def unpack(
        cls,
        tensors: Tensors,
        dim: int,
        dtype: torch.dtype,
        most: tuple[float, float] = (math.inf, math.inf),
    ) -> "ActivationMemory":
        """Invert ``pack`` for activations of width ``dim``.

        ``most`` bounds the number of rows and each row's number of tokens. Raises ``WireError`` if
        the tensors do not fit.
        """
        if not tensors:
            return cls()
        if tensors.keys() != set(_PACKED):
            raise WireError(f"activations are kept as {', '.join(_PACKED)}; these have others")
        round_, rows, counts, tokens = (tensors[name] for name in _PACKED)
        fits = (
            all(each.dtype == torch.int64 for each in (round_, rows, counts))
            and (round_.shape, rows.dim(), counts.shape) == ((), 1, rows.shape)
            and (tokens.dtype, tokens.dim(), tokens.shape[-1:]) == (dtype, 2, (dim,))
            and bool((round_ > 0) & (rows >= 0).all() & (counts >= 0).all())
            and len(rows) <= most[0]
            and bool((counts <= most[1]).all())
            and sum(counts.tolist()) == len(tokens)
            and len(set(rows.tolist())) == len(rows)
            and all_finite(tokens)
        )
        if not fits:
            raise WireError(
                f"kept activations of {rows.dtype} {list(rows.shape)} rows as {tokens.dtype} "
                f"{list(tokens.shape)} tokens do not fit; expected {dtype}, {dim} wide, and at "
                f"most {most[0]:,} rows of {most[1]:,} tokens"
            )
        each = torch.split(tokens, counts.tolist())
        return cls(int(round_), dict(zip(rows.tolist(), each, strict=True)))


@dataclass
class ChangeCoder:
    """Encode or decode activations at one end of a link, for one round.

    Both ends begin with the ``known`` activations; the unit may know fewer than the server. Rows of
    the unit's shard have the numbers 0 … ``num_rows`` − 1. The number n is sent with the change of
    a row, ~n with a whole row.
    """

    known: ActivationMemory
    round: int
    num_rows: int
    _arrived: dict[int, Tensor] = field(default_factory=dict)

    @property
    def arrived(self) -> ActivationMemory:
        """The activations that arrived in this round."""
        return ActivationMemory(self.round, self._arrived)

    def encode(
        self,
        activation: Tensor,
        rows: Tensor,
        counts: Tensor,
        precision: str,
        generator: torch.Generator,
    ) -> tuple[Tensor, ...]:
        """Return the numbers of the ``rows`` [b], and their tokens as ``compression.encode`` does.

        The ``activation`` [n, d] has ``counts`` [b] tokens of each row. ``rows`` and ``counts`` are
        int64.
        """
        signed, travelling = list[int](), list[Tensor]()
        of_rows = torch.split(activation, counts.tolist())
        for row, tokens in zip(rows.tolist(), of_rows, strict=True):
            last = None if precision == FLOAT32 else self._last(row, tokens)
            change = None if last is None else tokens - last
            if change is not None and bool(_noise(change) < _noise(tokens)):
                signed.append(row)
                travelling.append(change)
            else:
                signed.append(~row)
                travelling.append(tokens)
        numbers, parts = torch.tensor(signed), encode(torch.cat(travelling), precision, generator)
        self._keep(numbers, counts, decode(parts, activation.shape, precision, activation.dtype))
        return (numbers, *parts)

    def decode(
        self, sent: Sequence[Tensor], counts: Tensor, dim: int, precision: str, dtype: torch.dtype
    ) -> Tensor:
        """Return the activation [n, d] that ``encode`` encoded as ``sent``.

        Raises ``WireError`` as ``compression.decode`` does. Also raises it if row numbers are
        invalid or repeated, or if a change refers to a row that never arrived.
        """
        numbers, *parts = sent
        if numbers.dtype != torch.int64 or numbers.shape != counts.shape:
            raise WireError(f"row numbers {numbers.dtype} {list(numbers.shape)} do not fit")
        rows = numbers.maximum(~numbers)
        if bool((rows >= self.num_rows).any()) or len(set(rows.tolist())) < len(rows):
            raise WireError(f"row numbers that are not different ones of 0 … {self.num_rows - 1}")
        received = decode(parts, (int(counts.sum()), dim), precision, dtype)
        return self._keep(numbers, counts, received)

    def _last(self, row: int, like: Tensor) -> Tensor | None:
        """Return the row's last activation if it has the same shape."""
        last = self._arrived.get(row, self.known.rows.get(row))
        return last if last is not None and last.shape == like.shape else None

    def _keep(self, numbers: Tensor, counts: Tensor, received: Tensor) -> Tensor:
        """Add changes to earlier activations; remember and return the result."""
        arrived, of_rows = dict[int, Tensor](), torch.split(received, counts.tolist())
        for number, tokens in zip(numbers.tolist(), of_rows, strict=True):
            if number < 0:
                arrived[~number] = tokens.clone()  # a view would keep all the others
                continue
            if (last := self._last(number, tokens)) is None:
                raise WireError(f"delta for row {number} without a base")
            arrived[number] = last + tokens
            if not all_finite(arrived[number]):
                raise WireError(f"row {number} with its change is too large for {received.dtype}")
        self._arrived |= arrived
        return torch.cat(list(arrived.values()))


def _noise(tokens: Tensor) -> Tensor:
    """Return a value in proportion to the rounding noise.

    The rounding step of a token is proportional to its largest absolute value.
    """
    return tokens.abs().amax(-1).square().sum()
