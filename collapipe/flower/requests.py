"""Requests to a SuperLink: checks of nodes' requests, and the Control API in JSON."""

from base64 import b64decode
from collections.abc import Mapping

import httpx
from cryptography.hazmat.primitives.asymmetric.ec import ECDSA, EllipticCurvePublicKey
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import load_pem_public_key
from flwr.common.constant import TIMESTAMP_HEADER
from flwr.proto import control_pb2
from flwr.proto.fleet_pb2 import PushMessagesRequest
from flwr.proto.message_pb2 import PushObjectRequest
from flwr.supercore.constant import FLEET_HTTP_PUBLIC_KEY_HEADER, FLEET_HTTP_SIGNATURE_HEADER
from flwr.supercore.protobuf.constants import PROTOBUF_MEDIA_TYPE
from google.protobuf import json_format
from google.protobuf.message import DecodeError
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.types import ASGIApp

from collapipe.credentials.keys import UNREADABLE
from collapipe.errors import one_line

FLEET = "/v1/fleet/"
"""Path of the interface for nodes."""
PUSH_REPLY, PUSH_PART = f"{FLEET}push-messages", f"{FLEET}push-object"
_HEAD_BYTES = 2**20  # a part's head, up to its first zero; Flower expands it up to 27 times


def shown_key(headers: Mapping[str, str]) -> EllipticCurvePublicKey | None:
    """The public key in a request's header, which need not belong to the sender."""
    try:
        key = load_pem_public_key(b64decode(headers[FLEET_HTTP_PUBLIC_KEY_HEADER]))
    except (KeyError, *UNREADABLE):
        return None
    return key if isinstance(key, EllipticCurvePublicKey) else None


def has_signed(key: EllipticCurvePublicKey, headers: Mapping[str, str]) -> bool:
    """Whether the key has signed the request's timestamp; Flower checks that the time is recent."""
    try:
        signature = b64decode(headers[FLEET_HTTP_SIGNATURE_HEADER])
        key.verify(signature, headers[TIMESTAMP_HEADER].encode(), ECDSA(SHA256()))
    except (KeyError, *UNREADABLE):
        return False
    return True


def are_own_replies(node: str, body: bytes) -> bool:
    """Whether all messages in a request are replies of the node that sends it.

    Flower checks the sender of the request, but not of its messages: a node could send questions
    in the server's name, or replies in other nodes' names.
    """
    try:
        messages = PushMessagesRequest.FromString(body).messages_list
    except DecodeError:
        return False
    found = [each.metadata for each in messages]
    return all(str(each.src_node_id) == node and each.reply_to_message_id for each in found)


def has_short_head(body: bytes) -> bool:
    """Whether a part's head ends within ``_HEAD_BYTES``. The head lists the part's children; this
    size suffices for the largest allowed reply."""
    try:
        part = PushObjectRequest.FromString(body).object_content
    except DecodeError:
        return False
    return bool(part.find(b"\0", 0, _HEAD_BYTES) >= 0)


async def ask_control(flower: ASGIApp, method: str, question: bytes) -> Response:
    """Forward a request in JSON to a ``method`` of Flower's Control API, such as
    ``list-nodes``, and return Flower's answer as JSON. Commands on this machine use this to
    avoid importing Flower, which takes seconds."""
    kind = "".join(word.capitalize() for word in method.split("-"))
    try:
        request = json_format.Parse(question, getattr(control_pb2, f"{kind}Request")())
    except (AttributeError, json_format.ParseError) as error:
        return PlainTextResponse(one_line(error), 400)
    head = dict.fromkeys(("content-type", "accept"), PROTOBUF_MEDIA_TYPE)
    inside = httpx.ASGITransport(flower)
    async with httpx.AsyncClient(transport=inside, base_url="http://127.0.0.1") as client:
        content = request.SerializeToString()
        answer = await client.post(f"/v1/control/{method}", content=content, headers=head)
    if answer.is_error:
        return PlainTextResponse(one_line(answer.text), answer.status_code)
    response = getattr(control_pb2, f"{kind}Response").FromString(answer.content)
    return JSONResponse(json_format.MessageToDict(response, preserving_proto_field_name=True))
