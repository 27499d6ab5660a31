"""Lists of workers that are given, resolved and read, and what happens to them in trouble."""

import asyncio
import socket
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry, Counter

from pdserve_common.observability.defects import DEFECTS
from pdserve_common.types.engine import WorkerRole
from pdserve_router.workers.discovery import Discovery, DnsSource, FileSource, parse_sources
from support.call_sites import CallSite, call_sites, each_site, fault_at
from support.metrics import value
from support.router_stack import replace_file
from support.waiting import until


class Lists:
    """A Discovery that asks often, and what it told."""

    def __init__(self, *entries: str) -> None:
        self.registry = CollectorRegistry()
        errors = Counter("errors", "", ["role"], registry=self.registry)
        self.told: list[tuple[str, ...]] = []
        self.discovery = Discovery(
            WorkerRole.DECODE,
            entries,
            on_addresses=lambda role, addresses: self.told.append(addresses),
            errors=errors,
        )

    @property
    def num_errors(self) -> float:
        return self.registry.get_sample_value("errors_total", {"role": "decode"}) or 0.0

    async def __aenter__(self) -> "Lists":
        self.discovery.start()
        return self

    async def __aexit__(self, *exc_info) -> None:
        await self.discovery.close()


@pytest.fixture(autouse=True)
def fast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(DnsSource, "interval_s", 0.02)
    monkeypatch.setattr(FileSource, "interval_s", 0.02)


def test_addresses_and_sources_are_told_apart_and_repeated_ones_merge() -> None:
    static, sources = parse_sources(
        ("a:1", "dns://b:2", "a:1", "file:///c", "dns://b:2", "[::1]:3")
    )
    assert static == ("a:1", "[::1]:3")
    assert [str(source) for source in sources] == ["dns://b:2", "file:///c"]


@pytest.mark.parametrize(
    "entry", ["host", "host:0", "dns://name", "dns://:1", "file://x/y", "file://", "http://a:1"]
)
def test_what_is_no_source_is_refused(entry) -> None:
    with pytest.raises(ValueError, match="must be host:port"):
        parse_sources((entry,))


async def test_a_name_gives_all_its_addresses() -> None:
    addresses = await DnsSource("localhost", 7001).addresses()
    assert "127.0.0.1:7001" in addresses
    assert all(address.endswith(":7001") for address in addresses)
    assert len(set(addresses)) == len(addresses)


async def test_addresses_of_ipv6_are_in_brackets() -> None:
    if not socket.has_ipv6:
        pytest.skip("no IPv6 here")
    assert await DnsSource("::1", 7).addresses() == ("[::1]:7",)


async def test_a_file_has_one_address_a_line(tmp_path) -> None:
    path = tmp_path / "workers"
    path.write_text("# ours\na:1\n\n  b:2  \n")
    assert await FileSource(path).addresses() == ("a:1", "b:2")


async def test_changes_of_a_file_are_told_and_repetitions_are_not(tmp_path) -> None:
    path = tmp_path / "workers"
    path.write_text("a:1\n")
    async with Lists("s:9", f"file://{path}") as lists:
        await until(lambda: lists.told == [("s:9", "a:1")])
        replace_file(path, "b:2\na:1\ns:9\n")
        await until(lambda: len(lists.told) == 2)
        replace_file(path, "")
        await until(lambda: len(lists.told) == 3)
        await asyncio.sleep(0.1)
    assert lists.told[1:] == [("s:9", "b:2", "a:1"), ("s:9",)]


@pytest.mark.parametrize("trouble", ["missing", "bad line", "too long", "not text"])
async def test_in_trouble_the_last_list_stays(tmp_path, caplog, trouble) -> None:
    path = tmp_path / "workers"
    path.write_text("a:1\n")
    async with Lists(f"file://{path}") as lists:
        await until(lambda: lists.told == [("a:1",)])
        if trouble == "missing":
            path.unlink()
        elif trouble == "bad line":
            replace_file(path, "b:2\nnonsense\n")
        elif trouble == "too long":
            replace_file(path, "b:2\n" * (1 << 19))
        else:
            replace_file(path, b"\xff\xfe")
        await until(lambda: lists.num_errors >= 3)
        assert lists.told == [("a:1",)]
        assert caplog.text.count("its last list stays") == 1
        replace_file(path, "b:2\n")
        await until(lambda: lists.told[-1] == ("b:2",))


@each_site(call_sites(Discovery, "_follow", "_ask"))
async def test_a_defect_costs_a_look_and_later_workers_are_found(
    tmp_path: Path, site: CallSite
) -> None:
    path = tmp_path / "workers"
    path.write_text("a:1\n")
    num_before = value(DEFECTS, "discovery")
    async with Lists(f"file://{path}") as lists:
        await until(lambda: lists.told)
        with fault_at(site) as fault:
            path.unlink()
            await until(lambda: lists.num_errors >= 3)
            replace_file(path, "b:2\n")
            await until(lambda: lists.told[-1] == ("b:2",))
    assert value(DEFECTS, "discovery") == num_before + fault.has_raised


async def test_a_name_that_does_not_resolve_is_counted(monkeypatch) -> None:
    async def fail(*args, **kwargs):
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", fail)
    async with Lists("dns://nowhere:1") as lists:
        await until(lambda: lists.num_errors >= 2)
    assert lists.told == []
