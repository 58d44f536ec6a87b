"""Write measured laws into an inventory, and change no other character of the file.

ruamel.yaml keeps comments when it rewrites a file, but not line ends, indentation and alignment.
This module therefore replaces only spans of the text, located by the YAML parser's marks, and
parses the result again before writing it.
"""

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from stat import S_IMODE
from typing import Any

from collapipe.errors import ConfigError
from collapipe.inventory.schema import DeviceSection, InventorySection
from collapipe.inventory.yaml_file import Loc, from_text, read
from collapipe.process.files import replace
from collapipe.state import AffineLaw, BlockCost

_DESCRIBED = ("flops_per_s", "d2d_rate_bps", "launch_s", "hop_latency_s")
_BY_HAND = "write the laws there by hand"
Key = tuple[str, ...]  # the names of a cluster and a device, or of a cluster and a link's devices
Laws = Mapping[Key, AffineLaw]  # a link's law has no u: it computes nothing
Edit = tuple[int, int, str]  # start and end of the replaced text, and the new text


def write_laws(file: Path, laws: Laws, cost: BlockCost) -> None:
    """Write laws, measured on blocks of ``cost``, to ``file``, atomically: devices' as ``chunk``,
    links' as rate and latency.

    Raises ``ConfigError`` if the file lacks a device or link, has a form that cannot be edited, or
    cannot be written.
    """
    _write(file, with_laws(file, read(file), laws, cost))


def check_editable(file: Path, cost: BlockCost) -> None:
    """Raise ``ConfigError`` if ``write_laws`` would for the laws of all devices and links."""
    text = read(file)
    keys = _places(from_text(file, text).parse(InventorySection))
    laws = {key: AffineLaw(u=float(len(key) == 2), v=0.0, w=1.0, ell=0.0) for key in keys}
    with_laws(file, text, laws, cost)
    _write(file, text)  # as it is


def _write(file: Path, text: str) -> None:
    target = file.resolve()  # of a link
    replace(target, text.encode(), S_IMODE(target.stat().st_mode))


def with_laws(file: Path, text: str, laws: Laws, cost: BlockCost) -> str:
    """Return ``text``, the content of ``file``, with ``laws`` inserted. Raises ``ConfigError``."""
    document = from_text(file, text)
    section = document.parse(InventorySection)
    places, figures = _places(section), {key: _figures(law, cost) for key, law in laws.items()}
    edits = list[Edit]()
    for key, each in figures.items():
        if key not in places:
            raise ConfigError(f"{file}: has no {' - '.join(key[1:])} in {key[0]} now; {_BY_HAND}")
        edits += _edits(text, document.node(places[key]), each)
    edited = text
    for start, stop, new in sorted(edits, reverse=True):
        edited = edited[:start] + new + edited[stop:]
    if not _holds(file, edited, _values(section, figures)) or _comments(edited) != _comments(text):
        raise ConfigError(f"{file}: has a form in which laws cannot be put; {_BY_HAND}")
    return edited


def _places(section: InventorySection) -> dict[Key, Loc]:
    places = dict[Key, Loc]()
    for n, cluster in enumerate(section.clusters):
        for k, device in enumerate(cluster.devices):
            places[cluster.name, device.name] = "clusters", n, "devices", k
        for k, link in enumerate(cluster.links):
            places[cluster.name, *link.between] = "clusters", n, "links", k
    return places


def _figures(law: AffineLaw, cost: BlockCost) -> dict[str, str]:
    sizes = {"block_flops": cost.flops, "hop_bits": cost.hop_bits}
    numbers = {"u": law.u, "v": law.v, "w": law.w, "l": law.ell} | sizes
    if not law.u:
        numbers = {"d2d_rate_bps": cost.hop_bits / law.w, "hop_latency_s": law.ell}
    return {name: f"{number:.4g}" for name, number in numbers.items()}


def _edits(text: str, device: Any, figures: Mapping[str, str]) -> Iterator[Edit]:
    """Yield edits that put the figures into the YAML node of a link or a device.

    They replace a device's ``chunk`` or, without one, the first key that describes its hardware;
    the other keys of that kind are removed.
    """
    pairs = device.value
    own = {key.value: value for key, value in pairs}
    chunk = device if "between" in own else own.get("chunk")
    if chunk is not None:
        yield from _refigured(text, chunk, figures)
        return
    first, *others = (n for n, (key, _) in enumerate(pairs) if key.value in _DESCRIBED)
    law = ", ".join(f"{name}: {figure}" for name, figure in figures.items())
    start, stop = _span(pairs[first])
    yield start, stop, f"chunk: {{{law}}}"
    for n in others:
        start, stop = _span(pairs[n])
        if device.flow_style:
            yield _span(pairs[n - 1])[1], stop, ""  # with the comma before it
        else:
            yield _line(text, start, stop)


def _refigured(text: str, chunk: Any, figures: Mapping[str, str]) -> Iterator[Edit]:
    """Yield edits that replace the numbers of a ``chunk`` or link and insert missing keys at its
    start."""
    present = {key.value: value for key, value in chunk.value if key.value in figures}
    for name in present:
        yield present[name].start_mark.index, present[name].end_mark.index, figures[name]
    begin = chunk.value[0][0].start_mark
    newline = "\r\n" if "\r\n" in text else "\n"
    separator = ", " if chunk.flow_style else newline + " " * begin.column
    lacking = (f"{name}: {figures[name]}{separator}" for name in figures if name not in present)
    yield begin.index, begin.index, "".join(lacking)


def _span(pair: tuple[Any, Any]) -> tuple[int, int]:
    """Return the positions of a key's start and of its scalar value's end."""
    key, value = pair
    return key.start_mark.index, value.end_mark.index


def _line(text: str, start: int, stop: int) -> Edit:
    """Return an edit that removes a key and its value with their line; a comment stays."""
    spaces, comment, rest = re.match(r"([ \t]*)(#?)([^\n]*\n?)", text[stop:]).groups()  # type: ignore[union-attr]
    if comment:
        return start, stop + len(spaces), ""
    return text.rfind("\n", 0, start) + 1, stop + len(spaces + rest), ""


def _holds(file: Path, text: str, values: object) -> bool:
    """Whether a text is an inventory with these values."""
    try:
        return _values(from_text(file, text).parse(InventorySection), {}) == values
    except ConfigError:
        return False


def _values(section: InventorySection, figures: Mapping[Key, Mapping[str, str]]) -> dict[str, Any]:
    """Return all values of the file, with these laws inserted."""
    values, places, fields = section.model_dump(), _places(section), DeviceSection.model_fields
    for key, each in figures.items():
        _, n, kind, k = places[key]
        law: dict[str, Any] = {name: float(figure) for name, figure in each.items()}
        if kind == "devices":
            law = {"chunk": law, **{name: fields[name].default for name in _DESCRIBED}}
        values["clusters"][n][kind][k] |= law
    return values


def _comments(text: str) -> list[str]:
    return re.findall(r"#.*", text)
