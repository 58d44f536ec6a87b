"""Send requests to the SuperLink of a server's folder, from the same machine."""

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
    """Return the reply of Flower's Control API to a ``method`` such as ``list-nodes``.

    ``question`` has the request's fields by name, in Protobuf's JSON form: 64-bit whole numbers are
    texts, bytes are in base 64.

    Raises ``LinkError`` if the SuperLink of the folder does not reply or refuses.
    """
    port = folder.settings().port
    context = ssl.create_default_context(cafile=str(folder.trusted))
    server = HTTPSConnection("127.0.0.1", port, timeout=_TIMEOUT_S, context=context)
    try:
        server.request("POST", f"{CONTROL}{method}", json.dumps(question))
        answer = server.getresponse()
        content = answer.read()
    except (OSError, HTTPException) as error:
        root = quote(str(folder.root))
        way_out = f"collapipe deploy serve {root}"
        if isinstance(error, ssl.SSLCertVerificationError):
            way_out = f"collapipe deploy renew {root} and serve again, or set the clock"
        raise LinkError(
            f"no SuperLink of this folder on port {port} ({one_line(error)}); {way_out}"
        ) from error
    finally:
        server.close()
    if answer.status != HTTPStatus.OK:
        why = one_line(content[:_LONGEST].decode(errors="replace"))
        raise LinkError(f"port {port}: the SuperLink refuses {method} ({answer.status}: {why})")
    return dict(json.loads(content))
