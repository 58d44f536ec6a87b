"""Frozen weights of a model's parts, found by their digests.

A machine may have them in the files of the pretrained model, in a folder or the hub's cache, or in
a ``FrozenStore``. They are mapped, so that they take memory only when they are used. Quantised ones
are made of those in the files once, and then stored. Others that are made take memory while
something holds them.
"""

import functools
import logging
import threading
from collections import defaultdict
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any, cast
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn

from collapipe import __version__
from collapipe.errors import ConfigError, DataError, WireError
from collapipe.models.description import MOST_BLOCKS
from collapipe.models.part import prefixed
from collapipe.models.split import DerivedSpec, ModelSpec, builders, not_training, original
from collapipe.models.weights.kept import in_dtype, unquantised
from collapipe.models.weights.quantised import FORMAT, quantise
from collapipe.models.weights.without_values import WithoutValues
from collapipe.tensors import Tensors, aligned, chosen
from collapipe.text.vocabulary import Vocabulary
from collapipe.wire.frozen_store import FrozenStore, digest_once

_log = logging.getLogger(__name__)
_held = WeakValueDictionary[Hashable, Tensor]()  # what ``published`` returned and something holds
_making = threading.Lock()


def frozen_in(part: nn.Module, dtype: torch.dtype) -> Tensors:
    """Return a part's frozen weights and constants, in ``dtype`` or the narrower one in which they
    are kept."""
    frozen = chosen(part.state_dict(), not_training(part))
    return {name: in_dtype(each, dtype) for name, each in frozen.items()}


def whole(parts: Mapping[str, Tensors]) -> Tensors:
    """Return the weights of all parts by their names in the model."""
    return {n: each for part in parts for n, each in prefixed(part, parts[part]).items()}


def published(
    spec: ModelSpec,
    part: str,
    empty: nn.Module,
    dtype: torch.dtype,
    source: str | None = None,
    store: FrozenStore | None = None,
    wanted: str | None = None,
) -> tuple[str, Tensors] | None:
    """Return a part's frozen weights from the files of the pretrained model that ``spec`` derives
    from, with their digest; None unless all are there, with the ``wanted`` digest if there is one.

    ``empty`` is the part without values, which computes in ``dtype``. ``source`` is another folder
    or hub id. Weights that are kept quantised are quantised here, a block at a time, and stored,
    unless the ``store`` has those of these files. Tensors that this process still holds, of files
    that were not written since, are returned again. Raises ``ConfigError`` for invalid files.
    """
    like, wide, base = frozen_in(empty, dtype), unquantised(empty), original(spec)
    scales = {f"{name}_scale" for name in wide}
    names = _names_in_files(spec, part, (name for name in like if name not in scales))
    # a model without files has no ``stored``
    if not hasattr(base, "stored") or (there := cast(Any, base).stored(source)) is None:
        return None
    key = base, there, *((name, each.dtype, names.get(name)) for name, each in like.items())
    cache = store if wide and store and store.is_cache else None
    with _making:  # units in one process ask at the same time
        if cache and (known := cache.recall(_stable(key))):
            if wanted not in (None, known):
                return None
            with suppress(DataError):
                return known, cache.load(known)
        tensors = {name: each for name in like if (each := _held.get((key, name))) is not None}
        if tensors.keys() != like.keys():
            if (read := _read(cast(Any, base), there, names, like, wide)) is None:
                return None
            tensors = read
            _held.update({(key, name): each for name, each in tensors.items()})
        digest = digest_once(tensors, key)
        fits = wanted in (None, digest)
        if cache:
            tensors = _stored(tensors if fits else {}, digest, key, cache)
    return (digest, tensors) if fits else None


def _names_in_files(spec: ModelSpec, part: str, names: Iterable[str]) -> dict[str, str]:
    """Return, by their names in a part, the names of weights in the files of the pretrained
    model."""
    found = {name: f"{part}.{name}" for name in names}
    while isinstance(spec, DerivedSpec):
        found = {name: spec.name_in_base(each) for name, each in found.items()}
        spec = spec.base
    return found


def _read(
    base: Any, there: object, names: Mapping[str, str], like: Tensors, wide: Tensors
) -> Tensors | None:
    """Return frozen weights in the form of ``like``, read from the files ``there`` by their
    ``names`` in the model ``base``; None if one is missing. Those in ``wide`` are read in its form
    and then quantised."""
    groups = defaultdict[str, Tensors](dict)  # by original part: a stem has several
    for name, own in names.items():
        groups[own.partition(".original.")[0]][name] = wide.get(name, like[name])
    tensors: Tensors = {}
    for group in groups.values():
        forms = {names[name]: each for name, each in group.items()}
        if (found := base.published(forms, there)) is None:
            return None
        for name in group:
            tensors |= _as_kept(name, found.pop(names[name]), like, name in wide)
    return {name: aligned(each) for name, each in tensors.items()} if wide else tensors


def _stored(tensors: Tensors, digest: str, key: tuple[Any, ...], store: FrozenStore) -> Tensors:
    """Note the ``digest`` of what is made of files with this ``key``, and return the ``tensors`` as
    the ``store`` maps them; without tensors only make the note. What cannot be stored is returned
    as it is, and made again later.
    """
    try:
        if tensors:
            tensors = store.load(store.add(tensors))
        store.remember(_stable(key), digest)
    except (ConfigError, DataError) as error:
        _log.warning("quantised weights will be made again: %s", error)
    return tensors


def _stable(key: tuple[Any, ...]) -> str:
    """Return a key that means the same in other processes, but not for other versions. Unlike a
    file's time of writing, nobody can set the time of its last change."""
    _, there, *_ = key
    changed = [file.stat().st_ctime_ns for file in there.files]
    return repr((__version__, version("transformers"), FORMAT, changed, key))


def _as_kept(name: str, weight: Tensor, like: Tensors, quantised: bool) -> Tensors:
    """Return a weight in the form that ``like`` has, by the names there."""
    if not quantised:
        return {name: weight}
    codes, scales = quantise(weight, "int8" if like[name].dtype == torch.int8 else "nf4")
    return {name: codes, (scale := f"{name}_scale"): scales.to(like[scale].dtype)}


def forget(spec: ModelSpec) -> None:
    """Release the weights of the whole model that building parts of ``spec`` may have read."""
    if (release := getattr(original(spec), "forget", None)) is not None:
        release()


def find(
    digest: str,
    spec: ModelSpec,
    part: str,
    empty: nn.Module,
    dtype: torch.dtype,
    stores: Sequence[FrozenStore],
    source: str | None = None,
) -> Tensors | None:
    """Return a part's frozen weights with this ``digest``; None if they are not on this machine.

    The model's files, see ``published``, take precedence over the ``stores``, except for quantised
    weights, which are made of the files only if no store has them; the last store then keeps them.
    Invalid files are not used, with one warning.
    """
    made = bool(unquantised(empty))
    if made and (kept := _loaded(digest, stores)) is not None:
        return kept
    store = stores[-1] if stores else None
    try:
        if (there := published(spec, part, empty, dtype, source, store, digest)) is not None:
            return there[1]
    except ConfigError as error:
        _warn_of(str(error))
    return None if made else _loaded(digest, stores)


@functools.lru_cache(maxsize=8)  # all parts and units find the same fault
def _warn_of(fault: str) -> None:
    _log.warning("the model's files are not used: %s", fault)


def _loaded(digest: str, stores: Sequence[FrozenStore]) -> Tensors | None:
    for store in stores:
        with suppress(DataError):
            return store.load(digest)
    return None


@functools.lru_cache(maxsize=MOST_BLOCKS + 2)  # each unit and round asks for it
def _empty(spec: ModelSpec, vocabulary: Vocabulary, part: str) -> nn.Module:
    """Return a part without values."""
    if (build := builders(spec, vocabulary).get(part)) is None:
        raise WireError(f"frozen weights of part {part[:40]!r}, which this model does not have")
    with WithoutValues():
        return build()


def _shapes(tensors: Tensors) -> dict[str, tuple[torch.Size, torch.dtype]]:
    return {name: (each.shape, each.dtype) for name, each in tensors.items()}


@dataclass(frozen=True, eq=False)
class FrozenParts(Mapping[str, Tensors]):
    """Frozen weights by part; a part is looked for when it is read."""

    digests: Mapping[str, str]  # part → digest of its frozen weights
    spec: ModelSpec
    vocabulary: Vocabulary
    dtype: torch.dtype  # in which the weights compute; narrow ones stay as they are kept
    stores: Sequence[FrozenStore]  # of parts that the model's files do not have

    def find(self, part: str) -> Tensors | None:
        """Return a part's weights by their names in the part; None if this machine lacks them.

        Raises ``WireError`` if the model has no such part, or one of another form.
        """
        known = self.digests[part]  # first: most runs freeze nothing, and a part takes long to make
        empty = _empty(self.spec, self.vocabulary, part)
        found = find(known, self.spec, part, empty, self.dtype, self.stores)
        if found is not None and _shapes(found) != _shapes(frozen_in(empty, self.dtype)):
            raise WireError(f"frozen weights of {part[:40]!r} have other names, shapes or types")
        return found

    def check(self) -> None:
        """Raise ``DataError`` if this machine lacks a part."""
        for part in self:
            self[part]

    def __getitem__(self, part: str) -> Tensors:
        """Return ``find``. Raises ``DataError`` if this machine lacks the part."""
        if (found := self.find(part)) is None:
            name, stores = self.spec.own_tokenizer, [str(each.folder) for each in self.stores]
            places = ", ".join(stores if name is None else [f"model.name={name}", *stores])
            raise DataError(
                f"{part}: its frozen weights (SHA-256 {self.digests[part][:12]}…) are not in "
                f"{places}: removed or changed since the run began; put them back"
            )
        return found

    def __iter__(self) -> Iterator[str]:
        return iter(self.digests)

    def __len__(self) -> int:
        return len(self.digests)
