"""Clients, engines and ingresses that are killed, each a process of its own, over engines without a model.

Times here are ten times what the product promises, since the machine may be busy; the promises themselves are
kept on virtual time, in tests/unit/faults/test_promises.py.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator

import httpx
import pytest
from engine_server import serving
from fake_router import wait_until
from fleet_processes import Replica, process, replica, running_ingress

from eldr_serve.replicas import servers

ENDLESS = {"model": "m", "prompt": "x", "max_tokens": 10**6, "gap_ms": 20, "stream": True}
NEVER_S = 3600.0  # of an engine's step, or of a prefill


@pytest.fixture(scope="module")
def prefill() -> Iterator[Replica]:
    with replica("prefill") as found:
        asyncio.run(found.start())
        yield found


@pytest.fixture(scope="module")
def decode() -> Iterator[Replica]:
    with replica("decode") as found:
        asyncio.run(found.start())
        yield found


async def test_a_client_that_leaves_frees_its_slot_lease_and_the_engines_request(
    prefill: Replica, decode: Replica
) -> None:
    """Within 2 s here; 0.2 s is promised."""
    async with running_ingress({"p": prefill.told}, {"d": decode.told}) as service:
        gate, client, placer = service.ingress.gate, service.ingress._client, service.actor
        with process("client", service.port, ENDLESS) as (leaving, first):
            assert await first() == "begun"
            assert len(await decode.running()) == gate.in_flight == client.lease_count == 1
            await wait_until(lambda: len(placer.running) == 1)
            leaving.kill()
            leaving.wait()
            async with asyncio.timeout(10 * 0.2):
                while gate.in_flight or client.lease_count or placer.running or await decode.running():
                    await asyncio.sleep(0.002)
        assert not await prefill.running()


async def test_a_client_that_reads_nothing_is_cut_off_at_its_buffers_cap_and_disturbs_nobody(
    prefill: Replica,
) -> None:
    """Another client's stream over the same channel goes on beside it, and after it."""
    with replica("decode", step_s=1e-5) as quick:
        await quick.start()
        async with running_ingress({"p": prefill.told}, {"d": quick.told}) as service:
            gate, client = service.ingress.gate, service.ingress._client
            counted = Counter[str]()
            client.count = lambda event: counted.update([event])
            with (
                process("client", service.port, ENDLESS | {"gap_ms": 5}) as (_, begun),
                process("deaf", service.port, ENDLESS | {"gap_ms": 0}) as (deaf, asked),
            ):
                assert await begun() == "begun"
                assert await asked() == "asked"
                await wait_until(lambda: counted["slow_clients"] == 1, 60)
                await wait_until(lambda: gate.in_flight == client.lease_count == 1, 30)
                (other,) = await quick.running()
                tokens = client.leases[other].generated_tokens
                await wait_until(lambda: client.leases[other].generated_tokens > tokens + 100, 30)
                assert deaf.poll() is None  # it is there all the time
            await wait_until(lambda: not gate.in_flight, 30)
            assert counted["streams_lost"] == 0


@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_an_engine_that_is_killed_before_its_first_token_costs_nobody_an_answer(
    prefill: Replica, decode: Replica, role: str
) -> None:
    stuck = {"prefill": {"prefill_s": NEVER_S}, "decode": {"step_s": NEVER_S}}[role]
    with replica(role, **stuck) as victim:
        await victim.start()
        fleets = {"prefill": {"quick": prefill.told}, "decode": {"quick": decode.told}}
        fleets[role]["victim"] = victim.told
        async with (
            running_ingress(fleets["prefill"], fleets["decode"]) as service,
            httpx.AsyncClient(base_url=f"http://127.0.0.1:{service.port}", timeout=60) as client,
        ):
            body = {"model": "m", "max_tokens": 3}
            asked = [
                asyncio.create_task(client.post("/v1/completions", json=body | {"prompt": f"{n}" * 50}))
                for n in range(8)
            ]
            fleet = getattr(service.ingress, f"_{role}")
            # All but those at the victim have their answers.
            await wait_until(
                lambda: sum(not task.done() for task in asked) == fleet.in_flight["victim"] > 0, 30
            )
            async with asyncio.timeout(30):
                while len(await victim.running()) < fleet.in_flight["victim"]:
                    await asyncio.sleep(0.01)
            victim.process.kill()
            answers = await asyncio.gather(*asked)
        assert [answer.status_code for answer in answers] == [200] * 8
        assert all(answer.json()["choices"][0]["text"] == " token" * 3 for answer in answers)
        workers = [answer.headers["x-eldr-decode-worker"] for answer in answers]
        assert workers == ["quick"] * 8
        assert not await decode.running()
        assert not await prefill.running()


async def test_an_ingress_that_is_killed_frees_its_requests_in_the_engines() -> None:
    """Within 20 s here; 2 s are promised."""
    async with (
        serving(servers.PrefillServer) as (prefills, _),
        serving(servers.DecodeServer, router_name="router") as (decodes, _),
        httpx.AsyncClient(timeout=60) as client,
    ):
        told = [await server.record_replica_metadata() for server in (prefills, decodes)]
        with process("ingress", {"p": told[0]}, {"d": told[1]}) as (killed, first):
            url = f"http://127.0.0.1:{await first()}/v1/completions"
            asked = [asyncio.create_task(client.post(url, json=ENDLESS)) for _ in range(3)]
            await wait_until(lambda: len(decodes._engine.running) == 3, 30)
            killed.kill()
            killed.wait()
            await wait_until(lambda: not decodes._engine.running, 10 * 2)
        assert not decodes._channel.in_flight
        for task in asked:
            with pytest.raises(httpx.TransportError):
                await task
