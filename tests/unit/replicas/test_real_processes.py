"""Clients, engines and ingresses in their own processes are killed, with fake engines.

Time limits are ten times the promised ones, since the machine may be busy; tests/unit/faults/test_promises.py
checks the promises in virtual time.
"""

import asyncio
from collections import Counter
from collections.abc import Iterator

import httpx
import pytest

from eldr_serve.replicas import servers
from tests.support.engine_server import serving
from tests.support.fake_router import wait_until
from tests.support.fleet_processes import Replica, process, replica, running_ingress

ENDLESS = {"model": "m", "prompt": "x", "max_tokens": 10**6, "gap_ms": 20, "stream": True}
NEVER_S = 3600.0  # time of a step or a prefill that does not end


def start_replica(role: str) -> Iterator[Replica]:
    with replica(role) as engine:
        asyncio.run(engine.start())
        yield engine


@pytest.fixture(scope="module")
def prefill() -> Iterator[Replica]:
    yield from start_replica("prefill")


@pytest.fixture(scope="module")
def decode() -> Iterator[Replica]:
    yield from start_replica("decode")


async def test_a_killed_client_frees_its_permit_lease_and_slot(prefill: Replica, decode: Replica) -> None:
    """The promise is 0.2 s."""
    async with running_ingress({"p": prefill.metadata}, {"d": decode.metadata}) as service:
        gate, client, placer = service.ingress.gate, service.ingress._router, service.actor
        with process("client", service.port, ENDLESS) as (killed, read_line):
            assert await read_line() == "begun"
            assert len(await decode.running()) == gate.in_flight == len(client.held_leases()) == 1
            await wait_until(lambda: len(placer.running) == 1)
            killed.kill()
            killed.wait()
            async with asyncio.timeout(10 * 0.2):
                while gate.in_flight or client.held_leases() or placer.running or await decode.running():
                    await asyncio.sleep(0.002)
        assert not await prefill.running()


async def test_a_client_that_reads_nothing_is_disconnected_and_disturbs_no_other(prefill: Replica) -> None:
    """Another client's stream over the same channel continues meanwhile and afterwards."""
    with replica("decode", step_s=1e-5) as quick:
        await quick.start()
        async with running_ingress({"p": prefill.metadata}, {"d": quick.metadata}) as service:
            gate, client = service.ingress.gate, service.ingress._router
            counted = Counter[str]()
            service.ingress._counters.count = lambda event: counted.update([event])
            with (
                process("client", service.port, ENDLESS | {"gap_ms": 5}) as (_, read_line),
                process("deaf", service.port, ENDLESS | {"gap_ms": 0}) as (deaf, read_deaf_line),
            ):
                assert await read_line() == "begun"
                assert await read_deaf_line() == "sent"
                await wait_until(lambda: counted["slow_clients"] == 1, 60)
                await wait_until(lambda: gate.in_flight == len(client.held_leases()) == 1, 30)
                (other,) = await quick.running()
                tokens = client.leases[other].generated_tokens
                await wait_until(lambda: client.leases[other].generated_tokens > tokens + 100, 30)
                assert deaf.poll() is None  # it is still connected
            await wait_until(lambda: not gate.in_flight, 30)
            assert counted["streams_lost"] == 0


@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_no_answer_is_lost_if_an_engine_is_killed_before_its_first_token(
    prefill: Replica, decode: Replica, role: str
) -> None:
    stuck = {"prefill": {"prefill_s": NEVER_S}, "decode": {"step_s": NEVER_S}}[role]
    with replica(role, **stuck) as victim:
        await victim.start()
        fleets = {"prefill": {"quick": prefill.metadata}, "decode": {"quick": decode.metadata}}
        fleets[role]["victim"] = victim.metadata
        async with (
            running_ingress(fleets["prefill"], fleets["decode"]) as service,
            httpx.AsyncClient(base_url=f"http://127.0.0.1:{service.port}", timeout=60) as client,
        ):
            body = {"model": "m", "max_tokens": 3}
            requests = [
                asyncio.create_task(client.post("/v1/completions", json=body | {"prompt": f"{n}" * 50}))
                for n in range(8)
            ]
            fleet = getattr(service.ingress._fleets, role)
            # All requests but those at the victim have their answers.
            waiting = lambda: sum(not task.done() for task in requests)  # noqa: E731
            await wait_until(lambda: waiting() == fleet.open_calls["victim"] > 0, 30)
            async with asyncio.timeout(30):
                while len(await victim.running()) < fleet.open_calls["victim"]:
                    await asyncio.sleep(0.01)
            victim.process.kill()
            answers = await asyncio.gather(*requests)
        assert [answer.status_code for answer in answers] == [200] * 8
        assert all(answer.json()["choices"][0]["text"] == " token" * 3 for answer in answers)
        workers = [answer.headers["x-eldr-decode-worker"] for answer in answers]
        assert workers == ["quick"] * 8
        assert not await decode.running()
        assert not await prefill.running()


async def test_a_killed_ingress_frees_its_requests_in_the_engines() -> None:
    """The promise is 2 s."""
    async with (
        serving(servers.PrefillServer) as (prefills, _),
        serving(servers.DecodeServer, router_name="router") as (decodes, _),
        httpx.AsyncClient(timeout=60) as client,
    ):
        metadata = [await server.record_replica_metadata() for server in (prefills, decodes)]
        with process("ingress", {"p": metadata[0]}, {"d": metadata[1]}) as (killed, read_line):
            url = f"http://127.0.0.1:{await read_line()}/v1/completions"
            requests = [asyncio.create_task(client.post(url, json=ENDLESS)) for _ in range(3)]
            await wait_until(lambda: len(decodes._engine.running) == 3, 30)
            killed.kill()
            killed.wait()
            await wait_until(lambda: not decodes._engine.running, 10 * 2)
        assert not decodes._channel_server.in_flight
        for task in requests:
            with pytest.raises(httpx.TransportError):
                await task
