"""Network namespaces: an address for every process, and wires between them that can be cut.

All wires meet at a bridge in a namespace of its own. The test itself stands at `CLIENT`, in the
namespace it was started in. A partition is an entry in both ends' neighbour tables that leads
nowhere, which needs no tool but `ip`; loss is a rule of nftables on the bridge.
"""

import contextlib
import functools
import ipaddress
import itertools
import json
import os
import random
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

PREFIX = "pdsv-"
CLIENT = "client"
# For benchmarks of network devices (RFC 2544): nobody routes to it.
NETWORKS = list(ipaddress.IPv4Network("198.18.0.0/15").subnets(new_prefix=24))
NOBODY = "02:00:00:00:00:01"
COMMAND_TIMEOUT_S = 60.0
RULES = "bridge pdserve"

_numbers = itertools.count()


class NetworkError(Exception):
    """A command that changes the network failed; the message holds what it printed."""


class Network:
    """Namespaces for `names`, connected; use as a context manager. Needs root on Linux."""

    def __init__(self, names: Sequence[str]) -> None:
        self._id = f"{os.getpid()}-{next(_numbers)}"
        self._hub = f"{PREFIX}{self._id}-hub"
        self._names = list(names)
        # The client's end of its wire.
        self.link = f"pdsv{self._id}"
        self._losses: dict[frozenset[str], int] = {}

    def __enter__(self) -> "Network":
        remove_leftovers()
        hosts = _free_network().hosts()
        self._addresses = {name: str(next(hosts)) for name in [CLIENT, *self._names]}
        try:
            self._build()
        except BaseException:  # it goes on, and leaves no namespace behind
            self._remove()
            raise
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._remove()

    def address(self, name: str) -> str:
        """Return the IPv4 address of a process, or of CLIENT."""
        return self._addresses[name]

    def namespace(self, name: str) -> str:
        """Return where a process runs, as `ip netns` names it."""
        return f"{PREFIX}{self._id}-{name}"

    def command(self, name: str) -> list[str]:
        """Return what to put in front of a command, so that it runs at `name`. It keeps its pid."""
        everywhere = ["env", "UCX_NET_DEVICES=all"]  # other tests are kept from these devices
        return ["ip", "netns", "exec", self.namespace(name), *everywhere]

    def partition(self, one: str, other: str) -> None:
        """Drop silently whatever the two send to each other, until `heal`."""
        for name, peer in ((one, other), (other, one)):
            wrong = ["lladdr", NOBODY, "dev", self._device(name), "nud", "permanent"]
            self._at(name, "neigh", "replace", self.address(peer), *wrong)

    def heal(self, one: str, other: str) -> None:
        """End a partition of these two."""
        for name, peer in ((one, other), (other, one)):
            self._at(name, "neigh", "del", self.address(peer), "dev", self._device(name))

    def loss(self, one: str, other: str, percent: int) -> None:
        """Lose so much at random of what the two send to each other; 0: nothing any more.

        `num_lost` counts anew from here. Needs nft.
        """
        if not 0 <= percent <= 99:
            raise ValueError(f"percent is {percent}, must be 0 to 99; partition loses all")
        self._losses[frozenset((one, other))] = percent
        lines = [f"add table {RULES}", f"delete table {RULES}", f"add table {RULES}"]
        lines.append(f"add chain {RULES} wires {{ type filter hook forward priority 0; }}")
        for pair, share in self._losses.items():
            for source, target in itertools.permutations(sorted(pair)):
                lines.append(
                    f"add rule {RULES} wires ip saddr {self.address(source)} ip daddr "
                    f"{self.address(target)} numgen random mod 100 < {share} counter drop"
                )
        _run(["ip", "netns", "exec", self._hub, "nft", "-f", "-"], text="\n".join(lines))

    def num_lost(self) -> int:
        """Return how many packets `loss` has dropped on all wires since that was last called."""
        listing = _run(["ip", "netns", "exec", self._hub, "nft", "-j", "list", "table", *_RULES])
        rules = (item["rule"]["expr"] for item in json.loads(listing)["nftables"] if "rule" in item)
        counters = (e["counter"] for expr in rules for e in expr if "counter" in e)
        return sum(counter["packets"] for counter in counters)

    def _build(self) -> None:
        _ip("netns", "add", self._hub)
        _ip("-n", self._hub, "link", "add", "bridge", "type", "bridge")
        _ip("-n", self._hub, "link", "set", "bridge", "up")
        for name in self._names:
            _ip("netns", "add", self.namespace(name))
            self._at(name, "link", "set", "lo", "up")
        for number, name in enumerate(self._addresses):
            self._plug_in(name, f"wire{number}")

    def _plug_in(self, name: str, wire: str) -> None:
        device = self._device(name)
        self._at(name, "link", "add", device, "type", "veth", "peer", wire, "netns", self._hub)
        _ip("-n", self._hub, "link", "set", wire, "master", "bridge", "up")
        self._at(name, "addr", "add", f"{self.address(name)}/24", "dev", device)
        self._at(name, "link", "set", device, "up")

    def _remove(self) -> None:
        for namespace in [*map(self.namespace, self._names), self._hub]:
            _remove_namespace(namespace)
        # The kernel removes it with its other end, but only some time after this.
        with contextlib.suppress(NetworkError):
            _ip("link", "del", self.link)

    def _at(self, name: str, *arguments: str) -> None:
        _ip(*([] if name == CLIENT else ["-n", self.namespace(name)]), *arguments)

    def _device(self, name: str) -> str:
        return self.link if name == CLIENT else "eth0"


_RULES = RULES.split()


def namespaces(pid: int | None = None) -> list[str]:
    """Return the namespaces of Networks: of the process `pid`, or of any."""
    folder = Path("/run/netns")
    return [path.name for path in folder.glob(f"{PREFIX}{'*' if pid is None else pid}-*")]


def remove_leftovers() -> None:
    """Remove the namespaces of processes that were killed before they could."""
    for namespace in namespaces():
        pid = namespace.removeprefix(PREFIX).split("-")[0]
        if pid.isdigit() and not Path("/proc", pid).exists():
            _remove_namespace(namespace)


@functools.cache
def missing_for_partitions() -> str:
    """Say what this machine lacks for a Network, or return "". Tries it out."""
    if shutil.which("ip") is None:
        return "needs ip (iproute2)"
    try:
        with Network(["probe"]) as network:
            network.partition(CLIENT, "probe")
    except (NetworkError, OSError) as error:
        return f"needs network namespaces, veth and a bridge: {error}"
    return ""


@functools.cache
def missing_for_loss() -> str:
    """Say what this machine lacks for Network.loss, or return "". Tries it out."""
    if reason := missing_for_partitions():
        return reason
    if shutil.which("nft") is None:
        return "needs nft (nftables)"
    try:
        with Network(["probe"]) as network:
            network.loss(CLIENT, "probe", 1)
    except NetworkError as error:
        return f"needs nftables with bridge tables and numgen: {error}"
    return ""


def _free_network() -> ipaddress.IPv4Network:
    interfaces = json.loads(_ip("-j", "-4", "addr"))
    infos = [info for interface in interfaces for info in interface["addr_info"]]
    taken = [ipaddress.IPv4Address(info["local"]) for info in infos]
    free = [network for network in NETWORKS if not any(a in network for a in taken)]
    return random.choice(free)


def _remove_namespace(namespace: str) -> None:
    with contextlib.suppress(NetworkError):  # it was never made
        _ip("netns", "del", namespace)


def _ip(*arguments: str) -> str:
    return _run(["ip", *arguments])


def _run(command: Sequence[str], *, text: str = "") -> str:
    """Raises NetworkError."""
    done = subprocess.run(
        command, input=text, capture_output=True, text=True, timeout=COMMAND_TIMEOUT_S
    )
    if done.returncode:
        raise NetworkError(f"{' '.join(command)}: {done.stderr.strip()}")
    return done.stdout
