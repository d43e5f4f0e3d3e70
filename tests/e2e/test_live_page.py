"""The live page over real engines: it shows their data, and the shadow prices real tokens."""

import asyncio
from typing import Any

from benchmarks.lib.screenshots import take_screenshots
from tests.e2e.service import ADMIN_KEY, HTTP, Demo, Service, wait_for


def live(service: Service) -> dict[str, Any]:
    return service.admin("GET", "/eldr/live").raise_for_status().json()


async def stream_all(service: Service, prompts: list[str]) -> None:
    async def stream(prompt: str) -> None:
        body = {"model": "eldr-demo", "prompt": prompt, "max_tokens": 48, "stream": True, "ignore_eos": True}
        async with service.post(body) as response:
            await response.aread()

    await asyncio.gather(*map(stream, prompts))


async def test_the_page_shows_real_engines_and_the_shadow_prices_their_tokens(
    service: Service, demo: Demo, prompts: list[str]
) -> None:
    assert HTTP.get(f"{service.url}/eldr/live").status_code == 401
    service.set_policy("marginal-cost")
    shadow = service.admin("PUT", "/eldr/shadow", json={"name": "shortest-queue"})
    assert shadow.status_code == 200, shadow.text
    for _ in range(3):
        await stream_all(service, prompts)
    wait_for(lambda: (live(service)["comparison"]["now"] or {}).get("tokens", 0) > 0, "tokens are priced")
    snapshot = live(service)
    assert "shadow_errors" not in snapshot["counters"]
    now = snapshot["comparison"]["now"]
    assert now["live_ms"] > 0
    assert now["shadow_ms"] > 0
    assert snapshot["live"]["steps"].keys() == {worker["worker"] for worker in snapshot["workers"]}
    assert len(snapshot["live"]["space"]["points"]) >= len(prompts)
    assert sum(row[1] for row in snapshot["live"]["latency"]["rows"]) >= 3 * len(prompts)
    busy = asyncio.create_task(stream_all(service, 4 * prompts))
    for name, content in (await take_screenshots(f"{service.url}/eldr/", ADMIN_KEY)).items():
        (demo.out / f"{name}.png").write_bytes(content)
    await busy
    assert service.admin("DELETE", "/eldr/shadow").status_code == 200
