"""Questions to the SuperLink of a server's folder, from the same machine."""

import json
import ssl
from collections.abc import Mapping
from http import HTTPStatus
from http.client import HTTPException, HTTPSConnection
from shlex import quote
from typing import Any

from collapipe.deployment.server_folder import CONTROL, ServerFolder
from collapipe.errors import LinkError, one_line

_TIMEOUT_S = 30.0
_LONGEST = 300


def ask(folder: ServerFolder, method: str, question: Mapping[str, Any]) -> dict[str, Any]:
    """Return what Flower's Control API answers to a ``method`` such as ``list-nodes``.

    ``question`` has fields of the request by their names, as Protobuf writes them in JSON: whole
    numbers of 64 bits are texts, bytes are in base 64.

    Raises ``LinkError`` where the SuperLink of the folder does not answer or refuses.
    """
    port = folder.settings().port
    context = ssl.create_default_context(cafile=str(folder.trusted))
    server = HTTPSConnection("127.0.0.1", port, timeout=_TIMEOUT_S, context=context)
    try:
        server.request("POST", f"{CONTROL}{method}", json.dumps(question))
        answer = server.getresponse()
        told = answer.read()
    except (OSError, HTTPException) as error:
        way_out = f"collapipe deploy serve {quote(str(folder.root))}"
        raise LinkError(
            f"no SuperLink of this folder on port {port} ({one_line(error)}); {way_out}"
        ) from error
    finally:
        server.close()
    if answer.status != HTTPStatus.OK:
        why = one_line(told[:_LONGEST].decode(errors="replace"))
        raise LinkError(f"port {port}: the SuperLink refuses {method} ({answer.status}: {why})")
    return dict(json.loads(told))
