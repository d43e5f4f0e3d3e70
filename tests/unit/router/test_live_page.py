"""The live page in a real browser, over the ingress's real application and a real router's state."""

from __future__ import annotations

import asyncio
import io
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
from busy_router import E, L, busy_actor, served
from fake_fleet import answer_with
from fake_router import FakeActor
from ingress_app import KEY, App, running_app
from PIL import Image
from playwright.async_api import Page
from tables import unit_table

from benchmarks.lib.screenshots import VIEWS, browser, taken
from eldr_serve.dashboard import live_page
from eldr_serve.router.live_view import LiveView
from eldr_serve.router.messages import Answered, NamedPolicy
from eldr_serve.scheduling import StepSums


@asynccontextmanager
async def opened(
    actor: FakeActor, *, requested: list[str] | None = None, errors: list[str] | None = None, **options: Any
) -> AsyncIterator[tuple[App, Page]]:
    """Open the page; collect the addresses that it requests, and the errors of its scripts and console."""
    async with served(actor, **options) as (app, url), browser() as chromium:
        page = await chromium.new_page(viewport={"width": 1100, "height": 900})
        if requested is not None:
            page.on("request", lambda request: requested.append(request.url))
        if errors is not None:
            page.on("pageerror", lambda error: errors.append(error.message))
            page.on("console", lambda said: errors.append(said.text) if said.type == "error" else None)
        await page.goto(url)
        yield app, page


async def until(page: Page, condition: str) -> None:
    """Wait until a JavaScript expression is true; the page's policy forbids Playwright's own polling."""
    async with asyncio.timeout(30):
        while not await page.evaluate(f"Boolean({condition})"):
            await asyncio.sleep(0.05)


async def shown(page: Page) -> str:
    await page.locator("main").wait_for()
    return await page.inner_text("body")


async def pressed(page: Page, form: str, **fields: str) -> None:
    for name, value in fields.items():
        await page.evaluate(f"document.querySelector('#{form} [name={name}]').value = {value!r}")
    await page.evaluate(f"document.querySelector('#{form} button.main').click()")


def test_the_page_names_no_other_host() -> None:
    assert "http:" not in live_page()
    assert "https:" not in live_page()
    assert "//" not in live_page().replace("// ", "")


async def test_the_page_shows_all_and_fetches_from_its_host_alone() -> None:
    actor, requested, errors = busy_actor(), list[str](), list[str]()
    async with opened(actor, requested=requested, errors=errors) as (_, page):
        await page.evaluate(f"adminKey = {KEY!r}")
        text = await shown(page)
        for said in ("marginal-cost", "shortest-queue", "decode step time per token", "The engines measured",
                     "worker 0", "worker 1"):  # fmt: skip
            assert said in text
        running = len(actor.running)
        assert await page.evaluate("document.querySelectorAll('#path .grow i').length") == running > 2
        assert await page.evaluate("document.querySelectorAll('#space circle').length") == 90
        assert await page.evaluate("document.querySelectorAll('#workers svg path').length") == 6
        assert await page.evaluate("document.querySelectorAll('#tpot path[fill=none]').length") > 0
        assert await page.evaluate("document.querySelectorAll('#path b b').length") == 0  # domains are text
        assert not errors
        assert {address.split("/eldr/")[1] for address in requested if "data:" not in address} == {
            "",
            "live",
        }


async def test_nothing_is_asked_for_before_a_key_is_typed_or_after_a_wrong_one() -> None:
    requested, errors = list[str](), list[str]()
    async with opened(busy_actor(), requested=requested, errors=errors) as (_, page):
        await until(page, "!document.getElementById('key').hidden")
        await asyncio.sleep(2.5)  # two polls
        assert not errors
        assert not [address for address in requested if address.endswith("live")]
        assert not await page.evaluate("document.getElementById('said').textContent")
        await page.evaluate("document.getElementById('admin-key').value = 'wrong'")
        await page.evaluate("document.querySelector('#key button').click()")
        await until(page, "document.getElementById('said').textContent.includes('missing or wrong')")
        await asyncio.sleep(2.5)
        assert len([address for address in requested if address.endswith("live")]) == 1
        assert len(errors) == 1


async def test_a_chart_joins_no_points_across_idle_minutes() -> None:
    """Send three answers, none for three minutes, two more, and a report of steps after a pause."""
    actor = busy_actor()
    now = [0.0]
    view = actor.state.view = LiveView(lambda: now[0])
    for at in (0, 5, 10, 200, 205):
        now[0] = at
        view.answered([Answered(0.1, 0.01)])
    for at in (206, 207, 230):
        now[0] = at
        view.observe_steps("r0", StepSums.of([1], [1], [4], [0.1]))
    async with opened(actor) as (_, page):
        await page.evaluate(f"adminKey = {KEY!r}")
        await shown(page)
        for chart, lines in (("#tpot", 4), ("#ttft", 4), ("[data-chart=batch][data-worker='0']", 1)):
            assert (
                await page.evaluate(f'document.querySelectorAll("{chart} path[fill=none]").length') == lines
            )
        assert await page.evaluate('document.querySelectorAll("[data-chart=batch] circle").length') == 1


async def test_requests_that_are_stuck_in_prefill_are_counted_aged_and_red() -> None:
    held, ages = asyncio.Event(), {"r0": 4.9, "r1": 43.2}
    async with opened(busy_actor(), prefill=answer_with(held)) as (app, page):
        with patch.object(type(app.prefill), "oldest_s", ages):
            posts = [
                asyncio.create_task(app.post("/v1/completions", {"model": "m", "prompt": f"p{n}"}))
                for n in range(7)
            ]
            await page.evaluate(f"adminKey = {KEY!r}")
            await shown(page)
            await until(page, "document.getElementById('path').innerText.includes('oldest')")
            text = await page.evaluate("document.getElementById('path').innerText")
            assert min(app.prefill.in_flight.values()) > 0
            for name, count in app.prefill.in_flight.items():
                assert f"{count} request{'s' * (count > 1)}, oldest {ages[name]} s" in text
            red = await page.evaluate("document.querySelector('#path .bad').innerText")
            assert red.endswith("oldest 43.2 s")
            held.set()
            for post in posts:
                post.cancel()


async def test_an_operator_asks_compares_switches_and_sees_both_sides() -> None:
    actor = busy_actor()
    async with opened(actor) as (_, page):
        await until(page, "!document.getElementById('key').hidden")
        assert await page.evaluate("document.querySelector('main').hidden")  # nothing without the key
        await page.evaluate("document.getElementById('admin-key').value = 'wrong'")
        await page.evaluate("document.querySelector('#key button').click()")
        await until(page, "document.getElementById('said').textContent.includes('wrong')")
        await page.evaluate(f"document.getElementById('admin-key').value = {KEY!r}")
        await page.evaluate("document.querySelector('#key button').click()")
        await shown(page)
        assert await page.evaluate("document.getElementById('key').hidden")
        assert (
            await page.evaluate("localStorage.length + sessionStorage.length + document.cookie.length") == 0
        )

        await pressed(page, "shadow-form", name="balance-route", parameters='{"slots": 0}')
        await until(page, "document.getElementById('said').textContent.includes('slots is 0')")
        assert actor.state.settings.shadow == NamedPolicy("shortest-queue")
        await page.evaluate("document.getElementById('swap').click()")
        await until(page, "document.getElementById('said').textContent.includes('is its shadow')")
        assert actor.state.settings.policy == "shortest-queue"
        assert actor.state.settings.shadow == NamedPolicy("marginal-cost")
        assert "marginal-cost" in await page.evaluate("document.getElementById('saving-past').innerText")

        await pressed(page, "policy-form", name="random")
        await until(page, "document.getElementById('policy').textContent === 'random'")
        await page.evaluate("document.getElementById('shadow-off').click()")
        await until(page, "document.getElementById('saving').innerText.includes('No policy is compared')")
        assert actor.state.settings.shadow is None


async def test_a_switch_that_is_refused_changes_nothing_and_says_so() -> None:
    actor = busy_actor()
    async with opened(actor) as (_, page):
        await page.evaluate(f"adminKey = {KEY!r}")
        await shown(page)
        await page.evaluate(
            """() => {const real = fetch; window.puts = [];
            window.fetch = (path, options) => {
                if (options.method === 'PUT') puts.push(path);
                return path !== 'policy' ? real(path, options) : Promise.resolve(
                    new Response('{"error": {"message": "not this one"}}', {status: 400}));
            }}"""
        )
        await page.evaluate("document.getElementById('swap').onclick()")  # a promise: all that it does
        assert await page.evaluate("document.getElementById('said').textContent") == "not this one"
        assert await page.evaluate("puts") == ["policy"]
        assert actor.state.settings.policy == "marginal-cost"
        assert actor.state.settings.shadow == NamedPolicy("shortest-queue")


async def test_a_table_is_swapped_in_from_the_page(tmp_path: Path) -> None:
    actor = busy_actor()
    good, bad = tmp_path / "table.safetensors", tmp_path / "notes.safetensors"
    unit_table(2, num_layers=L, num_experts=E).save(good)
    bad.write_text("no table")
    async with opened(actor) as (_, page):
        await page.evaluate(f"adminKey = {KEY!r}")
        assert "No routing table" in await shown(page)
        await pressed(page, "table-form")
        await until(page, "document.getElementById('said').textContent === 'Choose a table file first.'")
        await page.set_input_files("#table-file", bad)
        await pressed(page, "table-form")
        await until(page, "document.getElementById('said').className === 'bad'")
        await until(page, "!document.getElementById('said').textContent.includes('Choose')")
        assert actor.state.settings.table_version == 0
        await page.set_input_files("#table-file", good)
        await pressed(page, "table-form")
        await until(page, "document.getElementById('settings').innerText.includes('Table version')")
        assert actor.state.settings.table_version == 1


async def test_a_late_refusal_of_a_key_that_was_changed_since_says_nothing() -> None:
    async with opened(busy_actor()) as (_, page):
        await page.evaluate(
            """() => {const real = fetch; window.held = [];
            window.fetch = (path, options) => options.headers.authorization !== 'Bearer old'
                ? real(path, options)
                : new Promise(answer => held.push(() => answer(real(path, options))))}"""
        )
        await page.evaluate("adminKey = 'old'; window.late = look().then(() => window.came = true); 0")
        await page.evaluate(f"adminKey = {KEY!r}")
        await shown(page)
        await page.evaluate("held.forEach(answer => answer())")
        await until(page, "window.came")
        assert await page.evaluate("document.getElementById('key').hidden")
        assert not await page.evaluate("document.getElementById('said').textContent")


@pytest.mark.slow
async def test_screenshots_are_small_and_fit_each_width() -> None:
    async with served(busy_actor()) as (_, url):
        pictures = await taken(url, KEY)
    assert pictures.keys() == VIEWS.keys()
    for name, (width, dark) in VIEWS.items():
        assert len(pictures[name]) < 100_000
        pixels = np.asarray(Image.open(io.BytesIO(pictures[name])).convert("L"), float)
        assert pixels.shape[1] == width  # nothing makes the page wider than the screen
        assert (np.median(pixels) < 80) == dark
        assert all(part.std() > 5 for part in np.array_split(pixels, 4))


async def test_latencies_of_streams_come_from_the_ingress() -> None:
    actor = FakeActor()
    async with running_app(actor=actor, decode=answer_with(*[b"data: x\n\n"] * 3)) as app:
        body = {"model": "m", "prompt": "hello", "stream": True}
        await asyncio.gather(*(app.post("/v1/completions", body) for _ in range(5)))
        async with asyncio.timeout(5):
            while not (rows := actor.state.live()["live"]["latency"]["rows"]):
                await asyncio.sleep(0.02)
    assert sum(row[1] for row in rows) == 5
    assert all(value >= 0 for row in rows for value in row)


@pytest.mark.parametrize(
    ("configured", "given", "status"), [(KEY, None, 401), (KEY, KEY, 200), (None, None, 403)]
)
async def test_who_may_look(configured: str | None, given: str | None, status: int) -> None:
    async with running_app(admin_key=configured) as app:
        headers = {"authorization": f"Bearer {given}"} if given else {}
        assert (await app.client.get("/eldr/live", headers=headers)).status_code == status
        page = await app.client.get("/eldr/")
        assert page.status_code == 200
        assert "connect-src 'self'" in page.headers["content-security-policy"]
