"""A run's model: begin with the initial one, or load the trained one from the run's folder.

Its frozen weights, the base, are named by digests, and kept in the folder only if drawn there::

    model/base.json                part → SHA-256 of its frozen weights
    model/base/SHA256.safetensors  parts that the pretrained model's own files do not have
"""

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from pydantic import TypeAdapter
from torch import Tensor, nn

from collapipe.config import Settings, load_saved
from collapipe.config.settings import check_members
from collapipe.config.trust import read_limited
from collapipe.errors import WAY_OUT_AFTER_AGGREGATION, ConfigError, one_line, printable
from collapipe.models.cut import CutHead
from collapipe.models.frozen import FrozenParts, find, forget, frozen_in, published, whole
from collapipe.models.part import prefixed
from collapipe.models.split import (
    HEAD,
    Head,
    SplitModel,
    build_empty,
    builders,
    frozen_names,
    training_names,
)
from collapipe.models.weights.kept import quantised_without_values, to_dtype
from collapipe.models.weights.without_values import WithoutValues
from collapipe.runs import weights_record
from collapipe.runs.folder import BASE, LOCK, check_there, weights_file
from collapipe.runs.reading import how_to_go_on, read_summary
from collapipe.sections import LoraSettings
from collapipe.tensors import Tensors, not_finite
from collapipe.text.chat_template import ChatTemplate
from collapipe.text.tokenizer import SpecialTokens, Tokenizer, check_tokenizer
from collapipe.text.vocabulary import Vocabulary
from collapipe.validation import from_json, returned
from collapipe.wire.frozen_store import FrozenStore, default_folder, digest
from collapipe.wire.parts import DAMAGED

_log = logging.getLogger(__name__)
_DIGESTS = TypeAdapter(dict[str, str])
_COMPLETE = "causal", "decoder"  # heads of which a pretrained model draws no weight


def base_of(run_dir: Path, settings: Settings, vocabulary: Vocabulary) -> FrozenParts:
    """Return the frozen weights of the run in ``run_dir``: those that its folder names, empty if
    nothing is frozen. Raises ``ConfigError`` if the file of digests is missing or invalid.
    """
    file = run_dir / f"{BASE}.json"
    check_there(run_dir, file)
    what = "the digests of frozen weights"
    digests = from_json(_DIGESTS, file, read_limited(file), what, "; restore it")
    return _base(run_dir, settings, vocabulary, digests)


def _base(
    run_dir: Path, settings: Settings, vocabulary: Vocabulary, digests: dict[str, str]
) -> FrozenParts:
    stores = FrozenStore(run_dir / BASE, is_cache=False), FrozenStore(default_folder())
    dtype = getattr(torch, settings.pipeline.dtype)
    return FrozenParts(digests, settings.model, vocabulary, dtype, stores)


def begin(run_dir: Path, settings: Settings, vocabulary: Vocabulary) -> tuple[Tensors, FrozenParts]:
    """Return the trainable weights of the untrained model, a function of the seed, and its frozen
    ones. Frozen weights that are drawn are written to the folder.

    One part at a time is in memory. Raises ``ConfigError`` if it cannot be read or written, or if
    what is built is no part of a model.
    """
    digests, trained, spec = dict[str, str](), Tensors(), settings.model
    forget(spec)  # its files may have changed since an earlier run of this process
    base, building = _base(run_dir, settings, vocabulary, {}), builders(spec, vocabulary)
    with WithoutValues():
        empty = {
            name: returned(build(), nn.Module, f"model: building {name}")
            for name, build in building.items()
        }
    head = empty[HEAD]
    check_members("model", head.head if isinstance(head, CutHead) else head, Head, "build_head")
    _check_names(empty)
    trains = {each.requires_grad for part in empty.values() for each in part.parameters()}
    if True not in trains:
        raise ConfigError("model: no weight of it trains; set requires_grad of some")
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(settings.seed)
        for name, build in building.items():
            own, frozen = _begun(base, name, build, empty[name], False in trains)
            trained |= prefixed(name, own)
            if frozen is not None:
                digests[name] = frozen
    forget(spec)
    take_adapters(settings, trained)
    return trained, replace(base, digests=digests)


def _check_names(parts: Mapping[str, nn.Module]) -> None:
    """Raise ``ConfigError`` if weights cannot be filled by name: two share a tensor, or a buffer is
    not in the state."""
    known: dict[nn.Parameter, str] = {}
    for part, module in parts.items():
        for name, weight in module.named_parameters(remove_duplicate=False):
            if (other := known.setdefault(weight, f"{part}.{name}")) != f"{part}.{name}":
                raise ConfigError(
                    f"model: {other} and {part}.{name} are one weight, and would train apart; make "
                    "one, and read it twice in forward"
                )
        lost = {name for name, each in module.named_buffers() if each.is_meta}
        for name in sorted(lost - module.state_dict().keys()):
            raise ConfigError(
                f"model: the state_dict lacks the buffer {part}.{name}; make it in forward, or "
                "remove persistent=False"
            )


def _begun(
    base: FrozenParts, name: str, build: Callable[[], nn.Module], empty: nn.Module, freezes: bool
) -> tuple[Tensors, str | None]:
    """Return the trainable weights of a new part, and the digest of its frozen ones; None if it has
    none. A part is not built if the model's files have all its weights, and all are frozen."""
    spec, there = base.spec, None
    like = frozen_in(empty, base.dtype) if freezes else {}
    if like and spec.own_tokenizer is not None and spec.head in _COMPLETE:
        there = published(spec, name, empty, base.dtype, store=base.stores[-1])
        if there is not None and not training_names(empty):
            return {}, there[0]
    with nullcontext() if there is None else quantised_without_values():
        state = to_dtype(build(), base.dtype).state_dict()
    own = {key: each.clone() for key, each in state.items() if key not in like}
    if there is not None:
        return own, there[0]
    frozen = {key: state[key] for key in like}
    return own, _kept(base, name, empty, frozen) if frozen else None


def take_adapters(settings: Settings, weights: Tensors) -> None:
    """Copy the adapters with which the run begins, if it has such, into ``weights``."""
    if isinstance(settings.adapter, LoraSettings) and settings.adapter.path:
        from collapipe.models.adapter_folder import begin_with  # imports transformers

        begin_with(Path(settings.adapter.path), settings.model, weights)


def _kept(base: FrozenParts, part: str, empty: nn.Module, frozen: Tensors) -> str:
    """Return the digest of frozen weights, and write them to the run's folder if they are not in
    the model's files."""
    name, own = digest(frozen), base.stores[:1]
    if find(name, base.spec, part, empty, base.dtype, own) is None:
        own[0].add(frozen)
    return name


def trained_form(settings: Settings, vocabulary: Vocabulary) -> Tensors:
    """Return tensors without values like the run's trainable weights."""
    with WithoutValues():
        model = SplitModel(settings.model, vocabulary)
    state = model.to(getattr(torch, settings.pipeline.dtype)).state_dict()
    frozen = frozen_names(settings.model, vocabulary)
    return {name: each for name, each in state.items() if name not in frozen}


@dataclass(frozen=True)
class Trained:
    """What a run has trained: ``weights`` by their names in the split model, read from ``file``."""

    settings: Settings
    weights: dict[str, Tensor]
    tokenizer: Tokenizer
    file: Path

    def model(self) -> SplitModel:
        """Return the model that holds ``weights``. Raises ``ConfigError`` if they do not fit it."""
        vocabulary = self.tokenizer.vocabulary
        with self.fitting():
            model = build_empty(lambda: SplitModel(self.settings.model, vocabulary), self.weights)
        return model.eval()

    @contextmanager
    def fitting(self) -> Iterator[None]:
        """Convert torch's errors about weights of another model into ``ConfigError``."""
        try:
            yield
        except RuntimeError as error:
            raise _refusal(self.file, error) from error


def load_model(
    run_dir: Path | str, trusted: Sequence[str] = (), unit: int | None = None
) -> tuple[Settings, SplitModel, Tokenizer]:
    """Return a run's settings, trained model and tokenizer.

    Plug-ins may be of ``trusted`` packages. ``unit`` selects a unit's model in a run that did not
    average. Raises ``ConfigError`` if the folder has no valid model of that unit or run.
    """
    trained = load_trained(Path(run_dir), trusted, unit)
    return trained.settings, trained.model(), trained.tokenizer


def load_trained(run_dir: Path, trusted: Sequence[str] = (), unit: int | None = None) -> Trained:
    """Load what a run has trained; see ``load_model``."""
    config, model_dir = run_dir / "config.yaml", run_dir / "model"
    check_there(run_dir, config, model_dir / "tokenizer.json", model_dir / "model.json")
    settings = load_saved(config, trusted)
    if not settings.framework.train:
        raise ConfigError(
            f"{run_dir}: has no model, since it was run with framework.train=false; name a run "
            "that trained"
        )
    _check_unit(run_dir, settings, unit)
    file = model_dir / weights_file(unit)
    check_there(run_dir, file)
    tokenizer, blocks = read_tokenizer(model_dir), settings.model.num_blocks
    base = base_of(run_dir, settings, tokenizer.vocabulary)
    try:
        trained, record = weights_record.read(file)
    except DAMAGED as error:
        raise _refusal(file, error) from error
    if (count := len(trained) + len(base)) < blocks:  # check the claimed number before building
        raise _refusal(file, f"{count} tensors for {blocks} blocks")
    now = {f"{BASE}.json": dict(base.digests)} | weights_record.of_tokenizer(tokenizer)
    now |= weights_record.of_options(settings.tree)
    now |= weights_record.of_weights(f"model/{file.name}", trained)
    weights_record.check(run_dir, file, record, now)
    if (bad := not_finite(trained)) is not None:
        raise ConfigError(
            f"{file}: {bad} has values that are not finite; {WAY_OUT_AFTER_AGGREGATION}, and train "
            "again"
        )
    _warn_of_first_weights(run_dir)
    return Trained(settings, whole(base) | trained, tokenizer, file)


def _warn_of_first_weights(run_dir: Path) -> None:
    """Warn if no round of the run has changed its model, as after a failure in round 1."""
    if summary := read_summary(run_dir):
        status = printable(summary.status)
        untrained = summary.rounds_completed == summary.rounds_skipped
    else:  # a copy of the model alone has no lock
        began, ended = ((run_dir / name).exists() for name in (LOCK, "metrics.jsonl"))
        status, untrained = "not ended", began and not ended
    if untrained:
        fault = "no round has trained this run's model, these are its first weights"
        _log.warning("%s: %s (status: %s); %s", run_dir, fault, status, how_to_go_on(run_dir))


def _refusal(file: Path, cause: object) -> ConfigError:
    first, _, rest = str(cause).partition(":\n")  # torch begins with the model's class
    why = one_line(rest or first)
    return ConfigError(
        f"{file}: not the weights of this run's model ({why}); restore it or config.yaml"
    )


def _check_unit(run_dir: Path, settings: Settings, unit: int | None) -> None:
    """Raise ``ConfigError`` for a ``unit`` of a run that averages, or if it has no model of it."""
    units = settings.federation.num_units
    if settings.framework.aggregate:
        if unit is not None:
            raise ConfigError(
                f"--unit {unit}: the models of {run_dir} were averaged into one; leave --unit out"
            )
    elif unit is None:
        raise ConfigError(
            f"{run_dir}: the units' models were not averaged (framework.aggregate=false); "
            f"--unit N picks one of 0 … {units - 1}"
        )
    elif not 0 <= unit < units:
        raise ConfigError(f"--unit {unit}: {run_dir} is a run of units 0 … {units - 1}")
    elif not (run_dir / "model" / weights_file(unit)).is_file():
        raise ConfigError(
            f"--unit {unit}: {run_dir} has no model of that unit, which finished no round; name "
            "another"
        )


@dataclass(frozen=True, slots=True)
class _Described:
    """The entries of ``model.json`` that are read again, as ``Tokenizer.described`` made them."""

    marks: SpecialTokens
    labels: list[str]
    chat: ChatTemplate | None


_DESCRIBED = TypeAdapter(_Described)


def read_tokenizer(model_dir: Path) -> Tokenizer:
    """Read the tokeniser from a run's folder ``model``. Raises ``ConfigError`` if it is invalid."""
    words, known = model_dir / "tokenizer.json", model_dir / "model.json"
    what = "the description of a tokeniser"
    rest = from_json(_DESCRIBED, known, known.read_bytes(), what, "; restore it")
    try:
        text = words.read_text(encoding="utf-8")
        check_tokenizer(text)
        return Tokenizer(text, rest.marks, rest.labels, rest.chat)
    except (UnicodeDecodeError, ConfigError) as error:
        raise ConfigError(f"{words}: not a tokeniser ({one_line(error)})") from error


def initial_model(settings: Settings, tokenizer: Tokenizer) -> SplitModel:
    """Build the model with which training begins, a function of the seed and of ``adapter.path``.

    Raises ``ConfigError`` if the adapters there are not this model's, or two weights are one.
    """
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(settings.seed)
        model = SplitModel(settings.model, tokenizer.vocabulary)
    _check_names(model.parts())
    take_adapters(settings, model.state_dict())
    return to_dtype(model, getattr(torch, settings.pipeline.dtype))
