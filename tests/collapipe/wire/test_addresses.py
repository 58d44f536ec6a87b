"""Messages to others contain no address of an owner's device, and no path on it."""

import pytest

from collapipe.wire.device_address import DeviceAddress, without_places

DEVICES = [
    DeviceAddress("jetson", "jetson.home:7700"),
    DeviceAddress("pi-5", "192.168.1.21:7700"),
    DeviceAddress("nano", "nano:7700"),
    DeviceAddress("six", "[2001:db8::7]:7700"),
]


@pytest.mark.parametrize(
    ("message", "shown"),
    [
        ("device pi-5 at 192.168.1.21:7700: timed out", "device pi-5 at …: timed out"),
        ("the stage before (ipv4:10.0.0.9:51234): ended", "the stage before (…): ended"),
        ("the stage behind (ipv6:%5B::1%5D:51234): ended", "the stage behind (…): ended"),
        ("no route to [2001:db8::7]:7700", "no route to …"),
        ("sent torch.float64 [3]", "sent torch.float64 [3]"),
        ("valid to 2026-12-01 04:56:01 UTC", "valid to 2026-12-01 04:56:01 UTC"),
        ("no route to 20:01:12:34:56:78:9a:bc, 04:56:01:80 or a-04:56", "no route to …, … or …"),
        ("no route to 2001:db8::7 or fe80::1", "no route to … or …"),
        ("DNS resolution failed for jetson.home:7700", "DNS resolution failed for …"),
        ("DNS resolution failed for jetsön.home:7700", "DNS resolution failed for …"),
        ("C-ares status qtype=A name=jetson.home is_balancer=0", None),
        ("nano: hangs in one action for 12 s", "nano: hangs in one action for 12 s"),
        ("round, epoch, step, micro-batch (3, 0, 1, 0)", None),
        ("No space left on device: '/home/ann/.cache/model'", "No space left on device: '…'"),
        ("cannot read ~/models/small/config.json", "cannot read …"),
        ("cannot read /home/josé/模型/x: damaged", "cannot read …: damaged"),
        ("'/home/ann/My Models/x' -> \"/srv/ann's own/y\"", "'…' -> \"…\""),
        ("see file:///home/ann/model, file:///model", "see …, …"),
        ("(C:\\Users\\ann\\model), d:/model", "(…), …"),
        ("No such file: 'C:\\\\Users\\\\Ann B\\\\model'", "No such file: '…'"),
        ("'/metrics' of /home/ann/a(1):b/c.", "'/metrics' of …."),
        ("https://host.org/ann/model, '/model', and 'a/b'", None),
        ("12 samples/s, forward/backward, 3/4 of 1/2, /metrics", None),
        ("4 blocks need 1,000 bytes; install 2.13.0", None),
    ],
)
def test_addresses_and_paths_in_a_message_are_replaced(message: str, shown: str | None) -> None:
    expected = message.replace("jetson.home", "…") if shown is None else shown
    assert without_places(message, DEVICES) == expected
