"""Addresses of devices, and texts for others, which must not contain them."""

import re
from collections.abc import Collection
from dataclasses import dataclass
from typing import Annotated

from pydantic import Field

Text = Annotated[str, Field(max_length=256)]  # a name, an address, a secret
_PLACES = re.compile(
    r"""
    (?<![\w:.-])(?P<time>\d\d:\d\d:\d\d)(?![\w:])  # is kept
    |(?:ipv[46]:)?  # as gRPC has it
    (?:
        (?:\[[0-9a-f.]*:[0-9a-f:.]+\]|%5B[0-9a-f:.]+%5D)(?::\d{1,5})?  # [2001:db8::7]:7700
        |(?<![\w:])(?:[0-9a-f]{0,4}:){2,7}[0-9a-f]{0,4}  # 2001:db8::7
        |\d{1,3}(?:\.\d{1,3}){3}(?::\d{1,5})?  # 10.0.0.5:7700
        |(?u:[\w.-]+):\d{1,5}\b  # jetson.home:7700
    )
    # '/home/ann/My Models/x', as an OSError quotes it
    |(?<=(?P<mark>['"]))(?:file:/+|[a-z]:[\\/]+|~?/[^/'"]+/+).*?(?=(?P=mark))
    # ~/models/x, file:///models or C:\models, without the mark that ends it
    |(?<![\w.…/])(?:file:/+|[a-z]:[\\/]+|~?/[^\s/'"]+/+)[^\s'"]*[^\s'",:;.)\]]
    """,
    re.ASCII | re.IGNORECASE | re.VERBOSE,
)


@dataclass(frozen=True, slots=True)
class DeviceAddress:
    """A device's name, and the HOST:PORT on which it listens."""

    name: Text
    address: Text


def without_places(text: str, devices: Collection[DeviceAddress]) -> str:
    """Replace every address and absolute path in the text, and the hosts of these devices, by "…".

    Names directly under the root are kept, such as /metrics. A path with blanks must be quoted.
    Device names are kept: they are all that readers without access to devices may see.
    """
    text = _PLACES.sub(lambda found: found["time"] or "…", text)
    names = {each.name for each in devices}
    for host in {each.address.rpartition(":")[0].strip("[]") for each in devices} - names:
        text = re.sub(rf"(?<![\w.-]){re.escape(host)}(?![\w-])", "…", text)
    return text
