"""A control unit's real devices: their addresses, which of them answer, and their speeds."""

import logging
import math
import re
import weakref
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

from client_app.devices.copies import Sending
from client_app.devices.law_of_rounds import law_after
from client_app.devices.measured_law import known_profile
from collapipe import __version__
from collapipe.config import Settings
from collapipe.credentials.credentials import load
from collapipe.devices.kept_law import pack_law, unpack_law
from collapipe.errors import ConfigError, LinkError, one_line
from collapipe.formatting import counted
from collapipe.inventory.cluster import DeviceCluster
from collapipe.plan import ClusterPlan
from collapipe.process.allocator import return_large_blocks
from collapipe.process.host import Host, this_host
from collapipe.state import DeviceProfile
from collapipe.step_law import StepLaw
from collapipe.tensors import Tensors
from collapipe.wire import messages
from collapipe.wire.device_address import without_places
from collapipe.wire.streams.channels import Channels, Dialer
from pipeline.devices.control_unit.connection import ask_status
from pipeline.devices.control_unit.step_times import StepTimes
from pipeline.devices.messages import BRIEF

_log = logging.getLogger(__name__)


class Devices:
    """The real devices of unit ``unit``: which of them answer, and their measured speeds.

    The ``law`` of a step belongs to the current round or question; call ``recall`` to restore it
    before. It is None if nothing was measured.
    """

    def __init__(self, settings: Settings, cluster: DeviceCluster, unit: int) -> None:
        return_large_blocks()
        self.roster = {each.name: each for each in cluster.roster(unit)}
        own = cluster.credentials
        self._dialer = Dialer(load(own) if own else None)
        self.channels = Channels(self._dialer)  # open in all rounds
        weakref.finalize(self, self.channels.close)
        self._profile = settings.pipeline.profile is not False
        self._batch_size = settings.batch_size
        self.relay = settings.pipeline.relay  # becomes True if a device cannot dial another
        self.law: StepLaw | None = None
        self._labels = {this_host().name: ""}  # of machines in this process
        self.absent: Mapping[str, str] = {}  # device → cause, when devices were last contacted
        # absent devices with each cause without its numbers: causes may alternate between rounds
        self._reported = set[tuple[str, str]]()
        # as measured in the last round without a loss
        self.sending: dict[str, Sending] = {}
        self.storing = 0.0  # a copy's processor time on the control unit, in steps
        # device → most blocks for which it has memory, and why it refused more
        self.limits: dict[str, tuple[int, str]] = {}
        self._offered: dict[str, float] = {}  # device → bytes of memory, in its last status
        self.news: list[str] = []  # lost and returned devices since the last report
        self.advised = False  # that this process alone is faster

    def recall(self, kept: Mapping[str, Tensors], first: Callable[[], StepLaw | None]) -> None:
        """Restore the law in groups that a unit ``kept``, without devices that left the cluster;
        ``first`` gives the law if none was kept. Raises ``WireError`` if they are malformed."""
        if self._profile:
            law = unpack_law(kept.get(messages.STEP_LAW, {})) or first()
            own = {n: each for n, each in law.devices.items() if n in self.roster} if law else {}
            self.law = law and replace(law, devices=own)

    def kept(self) -> dict[str, Tensors]:
        """Return the groups of tensors with the measured times, for ``recall``."""
        return {messages.STEP_LAW: pack_law(self.law)}

    def known(self, profiles: Collection[DeviceProfile]) -> tuple[DeviceProfile, ...]:
        """Return the described devices with their measured speeds."""
        return tuple(known_profile(each, self.law, self._batch_size) for each in profiles)

    def present(
        self, profiles: Collection[DeviceProfile], alive: Collection[str] = ()
    ) -> tuple[DeviceProfile, ...]:
        """Return the devices with their measured speeds and limits. Devices that do not answer, or
        have another version, can hold no block. Devices that are ``alive`` are not contacted unless
        they have a limit, because their owners may have raised their memory."""
        names = [e.name for e in profiles if e.name not in alive or e.name in self.limits]
        with ThreadPoolExecutor(max(1, len(names))) as pool:
            faults = dict(zip(names, pool.map(self._fault, names), strict=True))
        before, self.absent = self.absent, {name: why for name, why in faults.items() if why}
        kinds = {name: (name, re.sub(r"\d+", "", why)) for name, why in self.absent.items()}
        new = (n for n, kind in kinds.items() if kind not in self._reported)
        self.news += (f"planned without {name}: {self.absent[name]}" for name in new)
        self._reported = {e for e in self._reported if e[0] in kinds} | {*kinds.values()}
        for name in (each for each in before if each not in self.absent):
            self.limits.pop(name, None)  # it may have been started again with more memory
            self.news.append(f"{name} answers again")
        if len(self.absent) == len(profiles):
            _log.warning("no device answers: %s", "; ".join(self.absent.values()))
        return tuple(
            each.at_most(0) if each.name in self.absent else self.limited(each)
            for each in self.known(profiles)
        )

    def limit(self, name: str, blocks: int, cause: str) -> None:
        """Limit a device to so many blocks, because it refused more for this ``cause``."""
        if name not in self.limits or blocks < self.limits[name][0]:
            self.limits[name] = blocks, cause
            most = counted(blocks, "block")
            self.news.append(f"{name} holds at most {most} from now on: {cause}")

    def limited(self, profile: DeviceProfile) -> DeviceProfile:
        """Return the profile with the limit that the device has shown."""
        if profile.name not in self.limits:
            return profile
        return profile.at_most(self.limits[profile.name][0])

    def _fault(self, name: str) -> str | None:
        """Return why a device cannot work for this unit; None if it can."""
        if fault := self._dialer.fault(name, self.roster[name].address):
            return fault
        try:
            status = ask_status(self._dialer, self.roster[name], BRIEF)
        except LinkError as error:
            return str(error)
        if status.memory_bytes > self._offered.get(name, math.inf):
            self.limits.pop(name, None)
        self._offered[name] = status.memory_bytes
        return status.misfit(name, __version__)

    def learn(
        self,
        plan: ClusterPlan,
        times: StepTimes,
        hosts: Mapping[str, Host],
        described: Collection[DeviceProfile],
        lost: Collection[str] = (),
    ) -> None:
        """Update the law from the ``times`` of a round with this ``plan`` on ``described`` devices.
        Impossible times are ignored."""
        if not self._profile:
            return
        try:
            self.law = law_after(
                before=self.law,
                plan=plan,
                times=times,
                hosts=self._labelled(hosts),
                described={each.name: each for each in described},
                missing={*self.absent, *lost},
                batch_size=self._batch_size,
            )
        except ConfigError as error:  # a device may send any times
            _log.warning("unit %d: times of the round are not used: %s", plan.unit, error)

    def _labelled(self, hosts: Mapping[str, Host]) -> dict[str | None, Host]:
        """Replace machines' names by labels, so that the server learns only which devices share
        one. None is the control unit.

        A machine keeps the label that one of its devices has in the law, which another process may
        have measured. Else the label is the name of a device.
        """
        known = {name: each.host for name, each in self.law.devices.items()} if self.law else {}
        labels = self._labels
        for name, host in sorted(hosts.items(), key=lambda each: each[0] not in known):
            if host.name not in labels:
                own = [known[name]] if name in known else []
                new = (n for n in (name, *self.roster) if n not in known.values())
                free = [n for n in (*own, *new) if n not in labels.values()]
                if not free:
                    self.law, self._labels = None, {this_host().name: ""}
                    raise ConfigError("too many machines were started again; rounds measure anew")
                labels[host.name] = free[0]
        found: dict[str | None, Host] = {
            name: replace(host, name=labels[host.name]) for name, host in hosts.items()
        }
        return found | {None: replace(this_host(), name="")}

    def causes(self, lost: Mapping[str, str]) -> str:
        """Name the devices that are limited, absent or ``lost``, with the causes, for the
        server."""
        limits = {name: cause for name, (_, cause) in self.limits.items()}
        found = {**limits, **self.absent, **lost}.items()
        return "; ".join(f"{name} ({self.redacted(cause)})" for name, cause in found)

    def redacted(self, text: str) -> str:
        """Return a text on devices in one line, without addresses and paths, for the server."""
        return one_line(without_places(text, self.roster.values()))
