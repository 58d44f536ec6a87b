"""What both ends of the decoder link agree on: a gRPC method that carries frames."""

METHOD = "/collapipe.DecoderLink/Train"
SERVER_NAME = "decoder.collapipe"  # in the server's certificate, whatever its address is
_AUTHORIZATION = "authorization"


def channel_options(max_message_bytes: int) -> list[tuple[str, int]]:
    """Options of both ends: a dead peer is noticed in seconds, a message has a limit."""
    return [
        ("grpc.max_receive_message_length", max_message_bytes),
        ("grpc.max_send_message_length", max_message_bytes),
        ("grpc.keepalive_time_ms", 2000),
        ("grpc.keepalive_timeout_ms", 2000),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
        ("grpc.http2.min_recv_ping_interval_without_data_ms", 1000),
        ("grpc.initial_reconnect_backoff_ms", 200),
        ("grpc.min_reconnect_backoff_ms", 200),
        ("grpc.max_reconnect_backoff_ms", 1000),
        ("grpc.use_local_subchannel_pool", 1),
    ]


def credentials_metadata(token: str) -> tuple[tuple[str, str], ...]:
    """Metadata that carries the bearer token of a unit and round."""
    return ((_AUTHORIZATION, f"Bearer {token}"),)


def bearer_token(metadata: dict[str, str]) -> str:
    """The token in a call's metadata, empty where there is none."""
    return metadata.get(_AUTHORIZATION, "").removeprefix("Bearer ")
