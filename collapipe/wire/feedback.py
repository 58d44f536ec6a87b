"""Error feedback for activations: of a row that was sent before, its change since then.

As in AQ-SGD (Wang et al., 2022, arXiv 2206.01299) unit and server remember of each row of the
unit's shard the activation as it last arrived, and a change is what is rounded. What that takes is
part of the row's next change, an epoch later. A row is sent whole where it is new, where another
number of its tokens is read, with float32, and where its change is the larger of the two.

What arrives in a round counts, at both ends, once the server has accepted the unit's reply. The
unit learns that from its next request, which names the last round that counted: its own last one,
or the one before it. Where it is neither, as after the unit's machine lost what it kept, the unit
sends every row whole; then nothing depends on what the server still remembers.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from collapipe.errors import WireError
from collapipe.tensors import Tensors, all_finite
from collapipe.wire.compression import FLOAT32, decode, encode

_PACKED = "round", "rows", "counts", "tokens"


@dataclass(frozen=True, slots=True)
class ActivationMemory:
    """What had arrived by ``round``, 0 before the first: number of a row → its tokens [n, d]."""

    round: int = 0
    rows: Mapping[int, Tensor] = field(default_factory=dict)

    def after(self, later: "ActivationMemory") -> "ActivationMemory":
        """With what arrived ``later`` in place of what it had of the same rows."""
        return ActivationMemory(later.round, {**self.rows, **later.rows})

    def agreed(self, later: "ActivationMemory", round_: int) -> "ActivationMemory":
        """With ``later`` or without, as the server has it since ``round_``; else nothing."""
        if round_ and round_ == later.round:
            return self.after(later)
        return self if round_ == self.round else ActivationMemory()

    def pack(self) -> Tensors:
        """As four tensors; none of an empty one."""
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
        """The inverse, of activations of this width, of so many rows at ``most``, and tokens of
        each. Raises ``WireError``."""
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
    """One end of a link in a round: activations ↔ what travels of them, and what has arrived.

    Both ends begin with what is ``known``, the unit perhaps with less. The ``num_rows`` of its
    shard are numbered; n travels with the change of a row, ~n with a whole one.
    """

    known: ActivationMemory
    round: int
    num_rows: int
    _arrived: dict[int, Tensor] = field(default_factory=dict)

    @property
    def arrived(self) -> ActivationMemory:
        """In this round."""
        return ActivationMemory(self.round, self._arrived)

    def encode(
        self,
        activation: Tensor,
        rows: Tensor,
        counts: Tensor,
        precision: str,
        generator: torch.Generator,
    ) -> tuple[Tensor, ...]:
        """Numbers of the ``rows`` [b], and what ``compression.encode`` makes of their tokens.

        The ``activation`` [n, d] has ``counts`` [b] tokens of each; both are int64.
        """
        told, travelling = list[int](), list[Tensor]()
        for row, tokens in zip(
            rows.tolist(), torch.split(activation, counts.tolist()), strict=True
        ):
            last = None if precision == FLOAT32 else self._last(row, tokens)
            change = None if last is None else tokens - last
            if change is not None and bool(_noise(change) < _noise(tokens)):
                told.append(row)
                travelling.append(change)
            else:
                told.append(~row)
                travelling.append(tokens)
        numbers, parts = torch.tensor(told), encode(torch.cat(travelling), precision, generator)
        self._keep(numbers, counts, decode(parts, activation.shape, precision, activation.dtype))
        return (numbers, *parts)

    def decode(
        self, sent: Sequence[Tensor], counts: Tensor, dim: int, precision: str, dtype: torch.dtype
    ) -> Tensor:
        """The activation [n, d] of which ``encode`` made ``sent``.

        Raises ``WireError`` as ``compression.decode`` does, and for numbers that are not those of
        different rows, or changes of what never came.
        """
        numbers, *parts = sent
        if numbers.dtype != torch.int64 or numbers.shape != counts.shape:
            raise WireError(f"row numbers {numbers.dtype} {list(numbers.shape)} do not fit")
        rows = numbers.maximum(~numbers)
        if bool((rows >= self.num_rows).any()) or len(set(rows.tolist())) < len(rows):
            raise WireError(f"row numbers that are not different ones of 0 … {self.num_rows - 1}")
        came = decode(parts, (int(counts.sum()), dim), precision, dtype)
        return self._keep(numbers, counts, came)

    def _last(self, row: int, like: Tensor) -> Tensor | None:
        """What arrived last of the row, if it was as many tokens."""
        last = self._arrived.get(row, self.known.rows.get(row))
        return last if last is not None and last.shape == like.shape else None

    def _keep(self, numbers: Tensor, counts: Tensor, came: Tensor) -> Tensor:
        """Add changes to what arrived before; the activation, which is remembered."""
        arrived = dict[int, Tensor]()
        for number, tokens in zip(
            numbers.tolist(), torch.split(came, counts.tolist()), strict=True
        ):
            if number < 0:
                arrived[~number] = tokens.clone()  # a view would keep all the others
                continue
            if (last := self._last(number, tokens)) is None:
                raise WireError(f"row {number} came as a change of what never came")
            arrived[number] = last + tokens
            if not all_finite(arrived[number]):
                raise WireError(f"row {number} with its change is too large for {came.dtype}")
        self._arrived |= arrived
        return torch.cat(list(arrived.values()))


def _noise(tokens: Tensor) -> Tensor:
    """In proportion to what rounding adds: its steps are those of each token's largest value."""
    return tokens.abs().amax(-1).square().sum()
