"""The live page in a real browser, over the real application of the ingress and a real router state."""

import asyncio
import io
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
from PIL import Image
from playwright.async_api import Page

from benchmarks.lib.screenshots import VIEWS, browser, take_screenshots
from eldr_serve.dashboard import live_page
from eldr_serve.router.live_view import LiveView
from eldr_serve.router.status import live_status
from eldr_serve.router_protocol.messages import NamedPolicy, StreamLatencies
from eldr_serve.scheduling.cost import StepSums
from tests.support.busy_router import E, L, busy_actor, running_live_page
from tests.support.clock import Clock
from tests.support.fake_fleet import answer_with
from tests.support.fake_router import FakeActor
from tests.support.ingress_app import KEY, App, running_app
from tests.support.tables import unit_table


@asynccontextmanager
async def open_page(
    actor: FakeActor, requested: list[str] | None = None, errors: list[str] | None = None, **options: Any
) -> AsyncIterator[tuple[App, Page]]:
    """Open the page. Collect the addresses that it requests, and the errors of its scripts and console."""
    requested, errors = requested if requested is not None else [], errors if errors is not None else []
    async with running_live_page(actor, **options) as (app, url), browser() as chromium:
        page = await chromium.new_page(viewport={"width": 1100, "height": 900})
        page.on("request", lambda request: requested.append(request.url))
        page.on("pageerror", lambda error: errors.append(error.message))
        page.on("console", lambda line: errors.append(line.text) if line.type == "error" else None)
        await page.goto(url)
        yield app, page


async def until(page: Page, condition: str) -> None:
    """Wait until a JavaScript expression is true. The page's policy forbids Playwright's own polling."""
    async with asyncio.timeout(30):
        while not await page.evaluate(f"Boolean({condition})"):
            await asyncio.sleep(0.05)


async def wait_for_status(page: Page, *, key: bool = True) -> str:
    """Set the admin key, wait until the page shows the status, and return its text."""
    if key:
        await page.evaluate(f"adminKey = {KEY!r}")
    await page.locator("main").wait_for()
    return await page.inner_text("body")


async def submit(page: Page, form: str, **fields: str) -> None:
    for name, value in fields.items():
        await page.evaluate(f"document.querySelector('#{form} [name={name}]').value = {value!r}")
    await page.evaluate(f"document.querySelector('#{form} button.main').click()")


async def enter_key(page: Page, key: str) -> None:
    await page.evaluate(f"document.getElementById('admin-key').value = {key!r}")
    await page.evaluate("document.querySelector('#key button').click()")


async def count(page: Page, selector: str) -> Any:
    return await page.evaluate(f'document.querySelectorAll("{selector}").length')


async def message(page: Page) -> Any:
    return await page.evaluate("document.getElementById('message').textContent")


async def until_message(page: Page, part: str) -> None:
    await until(page, f"document.getElementById('message').textContent.includes({part!r})")


def test_the_page_names_no_other_host() -> None:
    assert "http:" not in live_page()
    assert "https:" not in live_page()
    assert "//" not in live_page().replace("// ", "")


async def test_the_page_shows_the_whole_status_and_fetches_only_from_its_host() -> None:
    actor, requested, errors = busy_actor(), list[str](), list[str]()
    async with open_page(actor, requested=requested, errors=errors) as (_, page):
        text = await wait_for_status(page)
        for part in (
            "marginal-cost",
            "shortest-queue",
            "decode step time per token",
            "The engines measured",
            "worker 0",
            "worker 1",
        ):
            assert part in text
        running = len(actor.running)
        assert await count(page, "#path .grow i") == running > 2
        assert await count(page, "#space circle") == 90
        assert await count(page, "#workers svg path") == 6
        assert await count(page, "#tpot path[fill=none]") > 0
        assert await count(page, "#path b b") == 0  # domains are text
        assert not errors
        paths = {address.split("/eldr/")[1] for address in requested if "data:" not in address}
        assert paths == {"", "live"}


async def test_the_page_does_not_poll_without_a_key_or_after_a_wrong_one() -> None:
    requested, errors = list[str](), list[str]()
    async with open_page(busy_actor(), requested=requested, errors=errors) as (_, page):
        await until(page, "!document.getElementById('key').hidden")
        await asyncio.sleep(2.5)  # two polls
        assert not errors
        assert not [address for address in requested if address.endswith("live")]
        assert not await message(page)
        await enter_key(page, "wrong")
        await until_message(page, "missing or wrong")
        await asyncio.sleep(2.5)
        assert len([address for address in requested if address.endswith("live")]) == 1
        assert len(errors) == 1


async def test_charts_do_not_connect_points_across_idle_minutes() -> None:
    """There are three answers, two more after three minutes, and reports of steps with a pause."""
    actor = busy_actor()
    clock = Clock()
    view = actor.state.view = LiveView(clock)
    for clock.now in (0, 5, 10, 200, 205):
        view.add_answers([StreamLatencies(0.1, 0.01)])
    for clock.now in (206, 207, 230):
        view.observe_steps("r0", StepSums.from_steps([1], [1], [4], [0.1]))
    async with open_page(actor) as (_, page):
        await wait_for_status(page)
        for chart, lines in (("#tpot", 4), ("#ttft", 4), ("[data-chart=batch][data-worker='0']", 1)):
            assert await count(page, f"{chart} path[fill=none]") == lines
        assert await count(page, "[data-chart=batch] circle") == 1


async def test_stuck_prefills_are_shown_in_red_with_number_and_age() -> None:
    go_on, ages = asyncio.Event(), {"r0": 4.9, "r1": 43.2}
    async with open_page(busy_actor(), prefill=answer_with(go_on)) as (app, page):
        with patch.object(type(app.prefill), "oldest_call_ages_s", ages):
            posts = [
                asyncio.create_task(app.post("/v1/completions", {"model": "m", "prompt": f"p{n}"}))
                for n in range(7)
            ]
            await wait_for_status(page)
            await until(page, "document.getElementById('path').innerText.includes('oldest')")
            text = await page.evaluate("document.getElementById('path').innerText")
            assert min(app.prefill.open_calls.values()) > 0
            for name, number in app.prefill.open_calls.items():
                assert f"{number} request{'s' * (number > 1)}, oldest {ages[name]} s" in text
            red = await page.evaluate("document.querySelector('#path .bad').innerText")
            assert red.endswith("oldest 43.2 s")
            go_on.set()
            for post in posts:
                post.cancel()


async def test_an_operator_enters_the_key_compares_and_switches_policies() -> None:
    actor = busy_actor()
    async with open_page(actor) as (_, page):
        await until(page, "!document.getElementById('key').hidden")
        assert await page.evaluate("document.querySelector('main').hidden")  # the page has no key yet
        await enter_key(page, "wrong")
        await until_message(page, "wrong")
        await enter_key(page, KEY)
        await wait_for_status(page, key=False)
        assert await page.evaluate("document.getElementById('key').hidden")
        assert not await page.evaluate("localStorage.length + sessionStorage.length + document.cookie.length")

        await submit(page, "shadow-form", name="balance-route", parameters='{"slots": 0}')
        await until_message(page, "slots must be")
        assert actor.state.settings.shadow == NamedPolicy("shortest-queue")
        await page.evaluate("document.getElementById('swap').click()")
        await until_message(page, "is its shadow")
        assert actor.state.settings.policy == "shortest-queue"
        assert actor.state.settings.shadow == NamedPolicy("marginal-cost")
        assert "marginal-cost" in await page.evaluate("document.getElementById('saving-past').innerText")

        await submit(page, "policy-form", name="random")
        await until(page, "document.getElementById('policy').textContent === 'random'")
        await page.evaluate("document.getElementById('shadow-off').click()")
        await until(page, "document.getElementById('saving').innerText.includes('No policy is compared')")
        assert actor.state.settings.shadow is None


async def test_a_refused_switch_changes_nothing_and_shows_the_reason() -> None:
    actor = busy_actor()
    async with open_page(actor) as (_, page):
        await wait_for_status(page)
        await page.evaluate(
            """() => {const real = fetch; window.puts = [];
            window.fetch = (path, options) => {
                if (options.method === 'PUT') puts.push(path);
                return path !== 'policy' ? real(path, options) : Promise.resolve(
                    new Response('{"error": {"message": "not this one"}}', {status: 400}));
            }}"""
        )
        await page.evaluate("document.getElementById('swap').onclick()")  # this returns a promise
        assert await message(page) == "not this one"
        assert await page.evaluate("puts") == ["policy"]
        assert actor.state.settings.policy == "marginal-cost"
        assert actor.state.settings.shadow == NamedPolicy("shortest-queue")


async def test_a_table_is_uploaded_from_the_page(tmp_path: Path) -> None:
    actor = busy_actor()
    good, bad = tmp_path / "table.safetensors", tmp_path / "notes.safetensors"
    unit_table(2, num_layers=L, num_experts=E).save(good)
    bad.write_text("no table")
    async with open_page(actor) as (_, page):
        assert "No routing table" in await wait_for_status(page)
        await submit(page, "table-form")
        await until(page, "document.getElementById('message').textContent === 'Choose a table file first.'")
        await page.set_input_files("#table-file", bad)
        await submit(page, "table-form")
        await until(page, "document.getElementById('message').className === 'bad'")
        await until(page, "!document.getElementById('message').textContent.includes('Choose')")
        assert actor.state.settings.table_version == 0
        await page.set_input_files("#table-file", good)
        await submit(page, "table-form")
        await until(page, "document.getElementById('settings').innerText.includes('Table version')")
        assert actor.state.settings.table_version == 1


async def test_a_late_refusal_of_an_old_key_shows_no_message() -> None:
    async with open_page(busy_actor()) as (_, page):
        await page.evaluate(
            """() => {const real = fetch; window.held = [];
            window.fetch = (path, options) => options.headers.authorization !== 'Bearer old'
                ? real(path, options)
                : new Promise(answer => held.push(() => answer(real(path, options))))}"""
        )
        await page.evaluate("adminKey = 'old'; window.late = refresh().then(() => window.came = true); 0")
        await wait_for_status(page)
        await page.evaluate("held.forEach(answer => answer())")
        await until(page, "window.came")
        assert await page.evaluate("document.getElementById('key').hidden")
        assert not await message(page)


@pytest.mark.slow
async def test_screenshots_are_small_and_fit_each_width() -> None:
    async with running_live_page(busy_actor()) as (_, url):
        pictures = await take_screenshots(url, KEY)
    assert pictures.keys() == VIEWS.keys()
    for name, (width, dark) in VIEWS.items():
        assert len(pictures[name]) < 100_000
        pixels = np.asarray(Image.open(io.BytesIO(pictures[name])).convert("L"), float)
        assert pixels.shape[1] == width  # the page is not wider than the screen
        assert (np.median(pixels) < 80) == dark
        assert all(part.std() > 5 for part in np.array_split(pixels, 4))


async def test_the_ingress_reports_latencies_of_streams() -> None:
    actor = FakeActor()
    async with running_app(actor=actor, decode=answer_with(*[b"data: x\n\n"] * 3)) as app:
        body = {"model": "m", "prompt": "hello", "stream": True}
        await asyncio.gather(*(app.post("/v1/completions", body) for _ in range(5)))
        async with asyncio.timeout(5):
            while not (rows := live_status(actor.state)["live"]["latency"]["rows"]):
                await asyncio.sleep(0.02)
    assert sum(row[1] for row in rows) == 5
    assert all(value >= 0 for row in rows for value in row)


@pytest.mark.parametrize(
    ("configured", "given", "status"), [(KEY, None, 401), (KEY, KEY, 200), (None, None, 403)]
)
async def test_the_live_status_needs_the_key(configured: str | None, given: str | None, status: int) -> None:
    async with running_app(admin_key=configured) as app:
        headers = {"authorization": f"Bearer {given}"} if given else {}
        assert (await app.client.get("/eldr/live", headers=headers)).status_code == status
        page = await app.client.get("/eldr/")
        assert page.status_code == 200
        assert "connect-src 'self'" in page.headers["content-security-policy"]
