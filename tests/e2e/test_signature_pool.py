"""The shipped ELDR deployment: requests follow a table that the service fits to its own traffic."""

import itertools
import json
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest

from eldr_serve.experts.calibration_trace import CalibrationTrace
from eldr_serve.experts.fitting.table import fit_table
from tests.e2e.applications import arguments_of, running
from tests.e2e.service import ADMIN_KEY, PROMPTS, Service, run, wait_for

NAME = "pool"
FIRST, SHIFTED = ("code", "math"), ("zh", "ru")  # domains
AT_ONCE, CROWD = 8, 20  # concurrent requests; so many as CROWD start another decode engine
TOKENS = 8
# With more than 10 requests in flight it scales up to three engines, and does not scale down.
_SCALING = {
    "min_replicas": 2,
    "initial_replicas": 2,
    "max_replicas": 3,
    "target_ongoing_requests": 5,
    "upscale_delay_s": 1,
    "downscale_delay_s": 600,
    "look_back_period_s": 2,
    "metrics_interval_s": 0.5,
}


@dataclass
class Pool:
    """The running application and its load."""

    service: Service

    def __post_init__(self) -> None:
        self._client = httpx.Client(timeout=240)
        self._numbers = itertools.count()

    def send(
        self, domains: tuple[str, ...], requests: int, at_once: int = AT_ONCE, tokens: int = TOKENS
    ) -> None:
        """Send prompts of the domains in turn, and check that all are answered."""
        with ThreadPoolExecutor(at_once) as threads:
            prompts = itertools.islice(self._prompts(domains), requests)
            list(threads.map(partial(self._ask, tokens=tokens), prompts))

    def _prompts(self, domains: tuple[str, ...]) -> Iterator[tuple[str, str]]:
        lines = [(PROMPTS / f"{domain}.jsonl").read_text().splitlines() for domain in domains]
        begin = 50 * next(self._numbers)
        for number in itertools.count(begin):
            for domain, found in zip(domains, lines, strict=True):
                yield domain, json.loads(found[number % len(found)])["prompt"][:400]

    def _ask(self, asked: tuple[str, str], tokens: int) -> None:
        domain, prompt = asked
        body = {"model": "eldr-demo", "prompt": prompt, "max_tokens": tokens, "temperature": 0}
        url = f"{self.service.url}/v1/completions"
        answer = self._client.post(url, json=body, headers={"x-eldr-domain": domain})
        assert answer.status_code == 200, answer.text

    def send_until(
        self,
        domains: tuple[str, ...],
        done: Callable[[], bool],
        what: str,
        *,
        at_once: int = AT_ONCE,
        tokens: int = TOKENS,
    ) -> None:
        """Keep sending until the condition holds."""
        deadline = time.monotonic() + 240
        while not done():
            assert time.monotonic() < deadline, f"{what}: {self.signatures()}"
            self.send(domains, 2 * at_once, at_once, tokens)

    def signatures(self) -> dict[str, Any]:
        return self.service.status()["signatures"]

    def placed(self) -> tuple[int, int]:
        """Return the number of placed requests, and how many went to the most similar worker."""
        counters = self.service.status()["counters"]
        return counters["placed"], counters["most_similar_worker"]


@pytest.fixture(scope="module")
def pool(ray_cluster: str) -> Iterator[Pool]:
    """Yield the application of deployments/cpu_demo_eldr.yaml, which refits its table within seconds."""
    arguments = arguments_of("cpu_demo_eldr.yaml")
    engines = arguments["decode_config"]["deployment_config"]
    del engines["num_replicas"]
    engines["autoscaling_config"] = _SCALING
    arguments["signatures"] |= {"window": 256, "rate": 50, "every_s": 3}
    with running(NAME, arguments) as service:
        yield Pool(service)


def test_a_fitted_table_is_live_within_300_requests(pool: Pool) -> None:
    assert pool.service.status()["table"] is None
    wait_for(lambda: "no table yet: 0 of 192" in pool.signatures()["note"], "the pool says what it needs", 30)
    pool.send(FIRST, 300)
    wait_for(lambda: pool.service.status()["table"] is not None, "a table is live", 30)
    wait_for(lambda: pool.signatures()["table"] is not None, "the status of the pool names the table", 10)
    fit = pool.signatures()["table"]
    assert fit["version"] == 1
    assert fit["samples"] >= 192
    assert fit["held_out"]["experts_by_table"] < fit["held_out"]["experts_by_load"]


def test_requests_follow_its_centroids(pool: Pool) -> None:
    before = pool.placed()
    pool.send(FIRST, 100)
    placements, best = (after - earlier for after, earlier in zip(pool.placed(), before, strict=True))
    assert placements == 100
    assert best / placements > 0.6  # random placement gives 0.5, and more than 0.6 in 2 of 100 runs


def test_greedy_answers_equal_a_single_engine(
    pool: Pool, single_engine: dict[str, list[str]], prompts: list[str]
) -> None:
    assert [pool.service.greedy(prompt) for prompt in prompts] == single_engine["completions"]


def test_saved_traffic_is_a_trace_that_can_be_fitted(pool: Pool, tmp_path: Path) -> None:
    out = tmp_path / "trace.safetensors"
    service = ["--url", pool.service.url, "--admin-key", ADMIN_KEY]
    run("-m", "eldr_serve.cli", "trace", "--out", out, *service)
    trace = CalibrationTrace.load(out)
    assert trace.model == "eldr-demo"
    assert set(FIRST) <= set(trace.domains)
    assert trace.routes is None
    assert [len(prompt) for prompt in trace.prompts] == trace.prompt_tokens.tolist()
    table, _ = fit_table(trace, 2)
    assert table.num_layers == trace.prefill_counts.shape[1]
    assert pool.service.admin("GET", "/eldr/trace", key=None).status_code == 401


def test_a_shift_of_domains_causes_a_refit(pool: Pool) -> None:
    refits = pool.signatures()["refits"]
    pool.send_until(SHIFTED, lambda: pool.signatures()["refits"] > refits, "the pool has refitted the table")
    assert "drifted" in pool.signatures()["table"]["why"]
    assert pool.service.counter("refits") >= 1


def test_an_operator_can_request_a_refit(pool: Pool) -> None:
    version = pool.service.status()["table"]["version"]
    assert pool.service.admin("PUT", "/eldr/refit", key=None).status_code == 401
    answer = pool.service.admin("PUT", "/eldr/refit")
    assert answer.status_code == 200, answer.text
    assert answer.json()["table"]["why"] == "requested"
    assert pool.service.status()["table"]["version"] > version


def test_a_third_decode_replica_gets_a_centroid(pool: Pool) -> None:
    from ray import serve

    def replicas() -> int:
        """Return how many decode replicas run or start."""
        deployments = serve.status().applications[NAME].deployments
        (decode,) = (deployment for name, deployment in deployments.items() if name.startswith("Decode"))
        return sum(decode.replica_states.values())

    everything = (*FIRST, *SHIFTED)
    # The answers are long, so that most requests are in decode engines.
    what = "Serve starts a third decode replica"
    pool.send_until(everything, lambda: replicas() == 3, what, at_once=CROWD, tokens=300)
    # Without load, which would slow the start of the new engine.
    wait_for(lambda: len(pool.service.status()["workers"]) == 3, "the third decode replica runs", 200)
    pool.send_until(
        everything, lambda: pool.service.status()["table"]["workers_fitted"] == 3, "a table of three"
    )
    assert pool.service.status()["table"]["refit_advised"] is False


def test_a_dead_pool_loses_only_its_samples(pool: Pool) -> None:
    import ray

    from eldr_serve.signatures.pool import find_pool

    table, num_samples = pool.service.status()["table"], pool.signatures()["samples"]
    ray.kill(find_pool(NAME), no_restart=False)
    pool.send(FIRST, 16)
    wait_for(
        lambda: pool.signatures()["actors"] == 1 and pool.signatures()["samples"] < num_samples,
        "a new pool is there",
        90,
    )
    pool.send(FIRST, 16)
    wait_for(lambda: pool.signatures()["samples"] >= 1, "the pool takes samples again", 30)
    after = pool.service.status()["table"]
    assert after["version"] >= table["version"]
    assert after["workers_fitted"] == 3
