"""Convert gRPC's errors to those of links."""

import grpc

from collapipe.errors import (
    BrokenLinkError,
    BusyLinkError,
    LinkError,
    RefusedLinkError,
    cause_of,
    one_line,
)

_ENDS = {
    grpc.StatusCode.UNIMPLEMENTED: RefusedLinkError,
    grpc.StatusCode.RESOURCE_EXHAUSTED: BusyLinkError,
    **dict.fromkeys((grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED), BrokenLinkError),
    **dict.fromkeys((grpc.StatusCode.UNKNOWN, grpc.StatusCode.INTERNAL), BrokenLinkError),
}


def broken(peer: str, error: Exception) -> LinkError:
    """Convert the error that ended a stream to ``peer``; gRPC's status code decides its class."""
    kind = _ENDS.get(error.code(), LinkError) if isinstance(error, grpc.Call) else LinkError
    return kind(f"{peer}: {reason(error)}")


def reason(error: Exception) -> str:
    """Return gRPC's status code and details as one line."""
    if isinstance(error, grpc.Call):
        return f"{error.code().name}: {one_line(error.details())}"
    if isinstance(error, grpc.RpcError):  # raised on the server's side, without details
        return "closed the connection"
    return cause_of(error)
