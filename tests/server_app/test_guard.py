"""The SuperLink's guard: other machines can only use the node API and ask if a unit is admitted."""

import json
import logging
from base64 import b64encode
from datetime import UTC, datetime
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric import ec
from flwr.common.constant import TIMESTAMP_HEADER
from flwr.proto.control_pb2 import UnregisterNodeRequest, UnregisterNodeResponse
from flwr.proto.fleet_pb2 import PushMessagesRequest
from flwr.proto.message_pb2 import Message, Metadata, PushObjectRequest
from flwr.supercore.constant import FLEET_HTTP_PUBLIC_KEY_HEADER, FLEET_HTTP_SIGNATURE_HEADER
from flwr.supercore.primitives.asymmetric import public_key_to_bytes, sign_message
from round_report import round_report
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route
from starlette.testclient import TestClient

from collapipe import __version__
from collapipe.credentials.keys import fingerprint, make_key
from collapipe.deployment.server_folder import CONTROL as ON_MACHINE
from collapipe.deployment.server_folder import NODES, RUNS, ServerFolder
from collapipe.flower import requests
from server_app import guard, questions, refusals
from server_app.guard import NodesAlone
from server_app.records.run_log import write_metrics

PUSH, PART = "/v1/fleet/push-messages", "/v1/fleet/push-object"
NODE, SERVER = 17, 1  # Flower's numbers of nodes
CONTROL, RUNTIME, FLEET = "/v1/control/start-run", "/v1/runtime/acquire-task", "/v1/fleet/get-run"
PATHS = "/", CONTROL, RUNTIME, FLEET, PUSH, PART
KEY, STRANGER = make_key(), make_key()


def dialled_from(host: str, folder: Path, known: bool = True) -> TestClient:
    """A client of the SuperLink at this address; the SuperLink admits ``KEY`` if ``known``."""
    server = ServerFolder(folder)
    server.flower_home.mkdir(parents=True, exist_ok=True)
    if known:
        (server.flower_home / NODES).write_text(
            json.dumps({fingerprint(KEY.public_key()): f"{NODE}"})
        )

    async def answer(request: Request) -> PlainTextResponse:
        return PlainTextResponse(f"Flower got {len(await request.body())}")

    routes = [Route(path, answer, methods=["POST"]) for path in PATHS]
    return TestClient(NodesAlone(Starlette(routes=routes), server), client=(host, 4000))


def signed(
    claimed: ec.EllipticCurvePrivateKey = KEY, own: ec.EllipticCurvePrivateKey = KEY
) -> dict[str, str]:
    """The headers of a request that names the key ``claimed`` and is signed with ``own``."""
    now = datetime.now(UTC).isoformat()
    return {
        FLEET_HTTP_PUBLIC_KEY_HEADER: b64encode(public_key_to_bytes(claimed.public_key())).decode(),
        FLEET_HTTP_SIGNATURE_HEADER: b64encode(sign_message(own, now.encode())).decode(),
        TIMESTAMP_HEADER: now,
    }


@pytest.mark.parametrize("host", ["192.0.2.7", "2001:db8::7", "10.0.0.1"])
def test_other_machines_reach_only_the_api_of_nodes(host: str, tmp_path: Path) -> None:
    client = dialled_from(host, tmp_path)
    assert client.post(FLEET, content=b"abc", headers=signed()).text == "Flower got 3"
    for path in (
        CONTROL,
        RUNTIME,
        "/",
        "/metrics",
        f"{RUNS}17",
        f"{ON_MACHINE}list-nodes",
        f"/v1/fleet/..{CONTROL}",
        f"/v1/fleet/%2e%2e{CONTROL}",
    ):
        own = {"X-Forwarded-For": "127.0.0.1", "Host": "localhost", **signed()}
        answer = client.post(path, headers=own)
        assert answer.status_code in (403, 404), path
        assert "Flower" not in answer.text


@pytest.mark.parametrize(
    "head",
    [
        {},
        signed(STRANGER, STRANGER),
        signed(KEY, STRANGER),
        signed() | {TIMESTAMP_HEADER: "2026-01-01T00:00:00+00:00"},
        signed() | {FLEET_HTTP_SIGNATURE_HEADER: "no base 64"},
        signed() | {FLEET_HTTP_PUBLIC_KEY_HEADER: b64encode(b"no key").decode()},
    ],
)
@pytest.mark.parametrize("host", ["192.0.2.7", "127.0.0.1"])
def test_requests_without_a_valid_signature_do_not_reach_flower(
    host: str, head: dict[str, str], tmp_path: Path
) -> None:
    client = dialled_from(host, tmp_path)
    answer = client.post(FLEET, content=b"abc", headers=head)
    assert answer.status_code == 401 and "Flower" not in answer.text


def test_each_refusal_is_logged_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    client, key = dialled_from("192.0.2.7", tmp_path), fingerprint(STRANGER.public_key())
    for _ in range(2):
        client.post(FLEET, headers=signed())
        assert caplog.messages == []
    for _ in range(2):
        client.post(FLEET, headers=signed(STRANGER, STRANGER))
        client.post(FLEET)
        client.post(CONTROL)
        client.get(f"/collapipe/admitted/{key}")
        client.get("/collapipe/admitted/%1b[31m%0a")
    assert len(caplog.messages) == 5
    assert sum(key in line for line in caplog.messages) == 2
    assert all("192.0.2.7" in line and line.isprintable() for line in caplog.messages)


def test_the_number_of_logged_strangers_is_limited(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(refusals, "_MOST", 3)
    some = refusals.Refusals(logging.getLogger("any"))
    for number in range(9):
        some.note(f"host {number}", "no key")
    assert len(caplog.messages) == 3 and caplog.messages[2].endswith("not named any more")


def test_a_request_without_a_plausible_content_length_is_refused(tmp_path: Path) -> None:
    client = dialled_from("192.0.2.7", tmp_path)
    for length in (str(2**40), "-1", "1e3", ""):
        head = signed() | {"Content-Length": length}
        assert client.post(FLEET, content=b"abc", headers=head).status_code == 413
    chunked = client.post(FLEET, content=iter([b"abc"]), headers=signed())
    assert chunked.status_code == 413
    both = signed() | {"Content-Length": "3", "Transfer-Encoding": "chunked"}  # any body follows
    for path in (FLEET, PUSH, PART):
        assert client.post(path, content=b"abc", headers=both).status_code == 413


def test_requests_get_status_503_while_the_server_starts(tmp_path: Path) -> None:
    client = dialled_from("192.0.2.7", tmp_path, known=False)
    assert client.post(FLEET, headers=signed()).status_code == 503
    assert client.get("/collapipe/admitted/a1").json()["admitted"] is None


@pytest.mark.parametrize("host", ["127.0.0.1", "127.9.9.9", "::1"])
def test_runs_can_be_submitted_on_the_servers_machine(host: str, tmp_path: Path) -> None:
    assert dialled_from(host, tmp_path).post(CONTROL).text == "Flower got 0"


@pytest.mark.parametrize(
    ("key", "admitted"),
    [
        pytest.param(fingerprint(KEY.public_key()), True, id="admitted"),
        pytest.param(fingerprint(STRANGER.public_key()), False, id="stranger"),
        pytest.param("", False, id="none"),
    ],
)
def test_a_unit_can_ask_whether_it_is_admitted(key: str, admitted: bool, tmp_path: Path) -> None:
    answer = dialled_from("192.0.2.7", tmp_path).get(f"/collapipe/admitted/{key}").json()
    assert (answer["admitted"], answer["collapipe"]) == (admitted, __version__)


def test_metrics_of_the_last_round_are_served_on_the_servers_machine(tmp_path: Path) -> None:
    client = dialled_from("127.0.0.1", tmp_path)
    assert client.get("/metrics").text == ""
    report = round_report(3, units=(0, 2), failures={1: "gone"}, bytes_up=5, seconds={"plan": 0.5})
    write_metrics(ServerFolder(tmp_path).metrics, report)
    metrics = client.get("/metrics").text.splitlines()
    for line in ("collapipe_round 3.0", "collapipe_units 2.0", "collapipe_failures 1.0"):
        assert line in metrics
    assert 'collapipe_bytes{way="up"} 5.0' in metrics
    assert 'collapipe_seconds{phase="plan"} 0.5' in metrics


@pytest.fixture
def client(tmp_path: Path) -> TestClient:
    """A client with the key of an admitted node."""
    client = dialled_from("192.0.2.7", tmp_path)
    (tmp_path / "server" / "flower" / "runs").mkdir()
    return client


def pushed(*messages: tuple[int, str]) -> bytes:
    """A request with these messages: (sender, message that it replies to)."""
    found = [
        Message(metadata=Metadata(src_node_id=sender, reply_to_message_id=message_id))
        for sender, message_id in messages
    ]
    return PushMessagesRequest(messages_list=found).SerializeToString()


def test_a_nodes_own_replies_are_accepted(client: TestClient) -> None:
    body = pushed((NODE, "asked"))
    assert client.post(PUSH, content=body, headers=signed()).text == f"Flower got {len(body)}"


@pytest.mark.parametrize(
    "body",
    [
        pushed((NODE + 1, "asked")),
        pushed((NODE, "asked"), (NODE + 1, "asked")),
        pushed((SERVER, "")),
        pushed((NODE, "")),
        b"no message",
    ],
    ids=["another's reply", "own and another's", "server's question", "question", "no message"],
)
def test_a_node_cannot_send_messages_of_another(client: TestClient, body: bytes) -> None:
    """Flower does not check the sender: a unit could make others train, restore and report."""
    answer = client.post(PUSH, content=body, headers=signed())
    assert answer.status_code == 403 and "Flower" not in answer.text


def test_a_node_cannot_send_more_bytes_than_replies_to_the_last_questions_have(
    client: TestClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(guard, "_SMALL_BYTES", 1000)
    folder = ServerFolder(tmp_path)

    def took(times: int) -> list[int]:
        body = PushObjectRequest(object_content=b"\0".ljust(397)).SerializeToString()
        assert len(body) == 400
        part = {"content": body, "headers": signed()}
        return [client.post(PART, **part).status_code for _ in range(times)]  # type: ignore[arg-type]

    assert took(3) == [200, 200, 413]  # no run has asked
    folder.expect_replies("5", 1, 300)  # a reply may be pushed twice
    assert took(5) == [200] * 4 + [413]
    folder.expect_replies("5", 2, 300)
    folder.expect_replies("6", 1, 400)
    assert took(7) == [200] * 6 + [413]
    folder.forget_questions("6")
    assert took(5) == [200] * 4 + [413]
    folder.forget_questions()
    assert folder.expected_replies() == {}


@pytest.mark.parametrize(
    ("part", "status"),
    [
        (b"ArrayChunk  4\0" + b"a,b,", 200),
        (b"ab," * 10 + b"\0" + b"ab,", 200),
        (b"ab," * 400 + b"\0", 403),
        (b"ab," * 400, 403),
        (b"no end", 403),
    ],
    ids=["short", "some children", "long", "long without an end", "without an end"],
)
def test_a_part_with_a_long_or_unterminated_head_is_refused(
    part: bytes, status: int, client: TestClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Flower splits the head at commas; the pieces need up to 27 times the bytes of the head."""
    monkeypatch.setattr(requests, "_HEAD_BYTES", 1000)
    body = PushObjectRequest(object_content=part).SerializeToString()
    answer = client.post(PART, content=body, headers=signed())
    assert answer.status_code == status
    assert ("Flower" in answer.text) == (status == 200)
    if status == 200:
        assert client.post(PART, content=b"\x0a" + part, headers=signed()).status_code == 403


def test_a_run_that_ends_meanwhile_does_not_affect_the_limits_of_other_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run's note is deleted after the notes were listed and before they are read."""
    folder = ServerFolder(tmp_path)
    (folder.flower_home / "runs").mkdir(parents=True)
    folder.expect_replies("5", 1, 300)
    folder.expect_replies("6", 1, 400)
    read = Path.read_bytes

    def read_late(file: Path) -> bytes:
        folder.forget_questions("5")
        return read(file)

    monkeypatch.setattr(Path, "read_bytes", read_late)
    assert folder.expected_replies() == {"6": (1, 400)}


def test_a_large_request_that_is_not_a_part_is_refused(client: TestClient) -> None:
    head = signed() | {"Content-Length": str(2**20 + 1)}
    assert client.post(PUSH, content=b"abc", headers=head).status_code == 413


def test_the_words_of_a_units_rows_fit_into_one_part(client: TestClient) -> None:
    """The SuperLink does not import ``questions``, because that would import torch for seconds."""
    most = questions.rows(words=True).size.total_bytes
    for size, message in ((most, "any run"), (2 * most, "no Content-Length")):  # no run has asked
        head = signed() | {"Content-Length": str(size)}
        answer = client.post(PART, content=b"abc", headers=head)
        assert answer.status_code == 413 and message in answer.text


def test_the_control_api_answers_in_json_on_the_machine(tmp_path: Path) -> None:
    """Questions that Flower refuses or does not know are answered with an error status."""

    async def unregister(request: Request) -> Response:
        parsed = UnregisterNodeRequest.FromString(await request.body())
        if parsed.node_id != 2**63 + 7:
            return PlainTextResponse("no such node", 404)
        return Response(UnregisterNodeResponse().SerializeToString())

    flower = Starlette(routes=[Route("/v1/control/unregister-node", unregister, methods=["POST"])])
    client = TestClient(NodesAlone(flower, ServerFolder(tmp_path)), client=("127.0.0.1", 4000))
    for method, question, expected in (
        ("unregister-node", {"node_id": str(2**63 + 7)}, (200, "{}")),
        ("unregister-node", {"node_id": "7"}, (404, "no such node")),
        ("unregister-node", {"node": "7"}, (400, None)),
        ("make-coffee", {}, (400, None)),
    ):
        answer = client.post(f"{ON_MACHINE}{method}", json=question)
        assert (answer.status_code, expected[1] or answer.text) == (expected[0], answer.text)
