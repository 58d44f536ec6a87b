"""The result of an audit, written as ``audit.json`` and read again."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, TypeAdapter

from collapipe.errors import ConfigError
from collapipe.models.sent_rows import Reads
from collapipe.state import Precision
from collapipe.validation import fault_of

JSON_FILE, PICTURE = "audit.json", "audit.png"  # in the run's folder
Attack = Literal["most frequent", "nearest", "softmax", "linear", "learned"]
State = Literal["frozen", "trained"]
"""Weights that made the activations: the run's initial ones, without dropout, as a frozen encoder
sends; or its final ones, with dropout, as units send in training."""
_Signed = Annotated[float, Field(ge=-1, le=1)]
_Count = Annotated[int, Field(ge=0, le=10**9)]
_Name = Annotated[str, Field(max_length=40)]
_Text = Annotated[str, Field(max_length=1000)]
_MOST_BYTES = 2**22


@dataclass(frozen=True, slots=True)
class Share:
    """A share or a difference of shares, and its 95 % interval."""

    value: _Signed
    low: _Signed
    high: _Signed


@dataclass(frozen=True, slots=True)
class Condition:
    """The data that the server had: activations of ``reads`` rows after ``blocks`` encoder blocks.

    They have Gaussian noise of ``noise`` times each row's norm, and are rounded to ``precision``.
    """

    state: State
    blocks: _Count
    reads: Reads
    precision: Precision
    noise: Annotated[float, Field(ge=0, le=1e3)] = 0.0


@dataclass(frozen=True, slots=True)
class Recovery:
    """The share of private tokens that an attack recovered.

    ``rare_tokens`` leaves out the most frequent tokens, which make up half of the public text; None
    if no other token occurs.
    """

    condition: Condition
    attack: Attack
    all_tokens: Share
    rare_tokens: Share | None


@dataclass(frozen=True, slots=True)
class UpdateCondition:
    """The update that the server received from a unit.

    The unit changes the weights ``state`` in ``steps`` local steps of ``rows`` rows. The update is
    clipped as in the run, gets Gaussian noise with standard deviation ``noise_multiplier`` times
    the clip norm (without clipping: times its own norm), and is rounded to ``precision``.
    """

    state: State
    rows: _Count
    steps: _Count
    precision: Precision
    noise_multiplier: Annotated[float, Field(ge=0, le=1e9)] = 0.0


@dataclass(frozen=True, slots=True)
class UpdateRecovery:
    """Share of the words and labels of a round's rows recovered from an update, over ``rounds``.

    Words count once, in any order; ``rare_tokens`` as in ``Recovery``. The ``usual`` shares are the
    baseline without the update: the most frequent words of the public text, and labels by the
    counts of training rows that units report at the start. None marks values that are not sent or
    do not train.
    """

    condition: UpdateCondition
    rounds: _Count
    tokens: Share | None
    rare_tokens: Share | None
    usual_tokens: Share | None
    labels: Share | None
    usual_labels: Share | None


@dataclass(frozen=True, slots=True)
class Membership:
    """How well a row's loss reveals that it was trained on, measured on ``rows`` of both kinds.

    ``advantage`` is TPR − FPR of the threshold that the server knows, the mean training loss (Yeom
    et al. 2018); ``auc`` the area under the curve of all thresholds.
    """

    rows: _Count
    advantage: Share
    auc: Share


@dataclass(frozen=True, slots=True)
class Audit:
    """The complete result of an audit.

    ``version`` is the version of CollaPipe that audited; ``configuration`` is the run's.
    ``trained_rounds`` counts its rounds before the audit; None if an older version audited.
    ``sent`` is the condition of activations that units ``send``, or would send with heads on the
    server. ``targets`` and ``hidden`` are sentences about the targets, and about what masks and
    noise hide from the server. ``updates`` is empty if updates cannot be attacked. ``membership``
    is None if training rows are only on their owners' machines.
    """

    version: _Name
    seed: _Count
    configuration: Mapping[str, Any]
    rows: _Count
    tokens: _Count
    public_rows: _Count
    public_sha256: Annotated[str, Field(max_length=64)]
    sends: bool
    sent: Condition
    targets: _Text
    recoveries: Annotated[tuple[Recovery, ...], Field(max_length=10_000)]
    updates: Annotated[tuple[UpdateRecovery, ...], Field(max_length=1000)]
    membership: Membership | None
    hidden: _Text
    trained_rounds: _Count | None = None

    def of(self, condition: Condition) -> list[Recovery]:
        """Return each attack's recovery under ``condition``."""
        return [each for each in self.recoveries if each.condition == condition]

    def json_text(self) -> str:
        """Return the content of ``audit.json``."""
        return json.dumps({_MARK: True, **asdict(self)}, indent=1, allow_nan=False) + "\n"


_MARK = "collapipe audit"
_AUDIT = TypeAdapter(Audit)


def read_audit(run_dir: Path) -> Audit | None:
    """Return the audit of a run, None without one. Raises ``ConfigError`` for an invalid file."""
    file = run_dir / JSON_FILE
    if not file.exists() and not file.is_symlink():
        return None
    try:
        if file.is_symlink() or not file.is_file() or file.stat().st_size > _MOST_BYTES:
            raise ValueError("a link, no file, or too large")
        tree = json.loads(file.read_text(encoding="utf-8"))
        if not isinstance(tree, dict) or tree.pop(_MARK, None) is not True:
            raise ValueError("no audit wrote it")
        return _AUDIT.validate_python(tree)
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(
            f"{file}: not the result of an audit ({fault_of(error)}); move the file away, and "
            "audit again"
        ) from error
