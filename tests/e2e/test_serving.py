"""Results for clients and operators of the running application."""

import asyncio
import contextlib
import os
from pathlib import Path

import httpx
import openai
import psutil
import pytest
from prometheus_client.parser import text_string_to_metric_families

from eldr_serve.experts.calibration_trace import CalibrationTrace
from eldr_serve.experts.routing_table import RoutingTable
from eldr_serve.metrics import ENGINE, HISTOGRAM, METRICS, PREFIX
from eldr_serve.scheduling import policy_names
from tests.e2e.service import ADMIN_KEY, Service, wait_for


def test_trace_from_a_ray_job_is_complete(trace_file: Path) -> None:
    trace = CalibrationTrace.load(trace_file)
    assert len(trace.ids) == 40
    assert len(set(trace.domains)) > 2
    assert trace.decode_steps.min() >= 1
    assert trace.routes is not None


def test_refit_swaps_a_table_for_the_live_replicas(table_file: Path, service: Service) -> None:
    table = RoutingTable.load(table_file)
    status = service.status()
    assert len(table.centroids) == len(status["workers"]) == 2
    assert status["table"]["version"] >= 1
    assert not status["table"]["refit_advised"]
    assert service.admin("GET", "/eldr/table").content == table_file.read_bytes()
    assert service.admin("GET", "/eldr/table", key=None).status_code == 401


def test_engines_run_in_one_process_each_on_all_cores(
    service: Service, trace_file: Path, single_engine: dict[str, list[str]]
) -> None:
    """The engines of the two fixtures, which use cores too, must have ended."""
    started = psutil.Process().children(recursive=True)  # other parts of the suite also run engines
    engines = [p for p in started if p.name().startswith("VLLM::")]
    assert len(engines) == 3
    assert {p.name() for p in engines} == {"VLLM::EngineCore"}
    assert all(set(p.cpu_affinity()) == os.sched_getaffinity(0) for p in engines)


def test_greedy_answers_equal_the_single_engine_under_every_policy(
    service: Service, table_file: Path, prompts: list[str], single_engine: dict[str, list[str]]
) -> None:
    cases = list(zip(prompts, single_engine["completions"], single_engine["chats"], strict=True))
    assert len(cases) <= len(policy_names())  # each policy has one of the prompts, no prompt is left out
    for number, policy in enumerate(policy_names()):
        prompt, completion, chat = cases[number % len(cases)]
        service.set_policy(policy)
        assert service.greedy(prompt) == completion
        assert service.greedy_chat(prompt) == chat


def test_every_answer_names_its_worker_and_candidates(
    service: Service, table_file: Path, prompts: list[str]
) -> None:
    service.set_policy("locality-band", band=0.0)
    replicas = service.decodes()
    before = service.status()["counters"]
    for prompt in prompts:
        raw = service.client.completions.with_raw_response.create(
            model="eldr-demo", prompt=prompt, max_tokens=2, temperature=0
        )
        assert raw.headers["x-eldr-decode-worker"] in replicas
        assert raw.headers["x-eldr-candidates"] == "1"
    after = service.status()["counters"]
    # With a band of width 0 every request with a signature lands on its most similar worker.
    assert after["most_similar_worker"] - before.get("most_similar_worker", 0) == len(prompts)
    assert after["reason:locality-band"] - before.get("reason:locality-band", 0) == len(prompts)
    assert after.get("counts_missing", 0) == before.get("counts_missing", 0)


@pytest.mark.parametrize(
    "extra",
    [
        {"n": 2, "temperature": 0.7, "seed": 1},
        {"logprobs": 3},
        {"echo": True},
        {"echo": True, "logprobs": 1},
        {"stop": ["e"]},
        {"best_of": 2, "n": 1, "temperature": 0.7},
    ],
)
def test_completion_options_reach_the_engine(service: Service, extra: dict[str, object]) -> None:
    answer = service.complete("The quick brown fox", max_tokens=6, **{"temperature": 0.0} | extra)
    assert len(answer.choices) == extra.get("n", 1)
    for choice in answer.choices:
        if extra.get("echo"):
            assert choice.text.startswith("The quick brown fox")
        if extra.get("logprobs"):
            assert choice.logprobs is not None
            assert len(choice.logprobs.tokens) >= 6
        if extra.get("stop"):
            assert "e" not in choice.text


def test_each_of_several_prompts_gets_its_answer(service: Service) -> None:
    def texts(prompt: str | list[str]) -> list[str]:
        return [choice.text for choice in service.complete(prompt, max_tokens=5, temperature=0).choices]

    assert texts(["one two", "three four"]) == texts("one two") + texts("three four")


def test_a_chat_with_tools_returns_logprobs(service: Service) -> None:
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}
    answer = service.client.chat.completions.create(
        model="eldr-demo",
        messages=[{"role": "user", "content": "hello"}],
        max_tokens=4,
        temperature=0,
        tools=[tool],  # type: ignore[list-item]
        tool_choice="none",
        logprobs=True,
        top_logprobs=2,
    )
    assert answer.choices[0].logprobs is not None
    assert len(answer.choices[0].logprobs.content or []) == 4


def test_an_answer_may_have_one_token(
    service: Service, prompts: list[str], single_engine: dict[str, list[str]]
) -> None:
    answer = service.complete(prompts[0], max_tokens=1, temperature=0)
    assert answer.usage.completion_tokens == 1
    assert single_engine["completions"][0].startswith(answer.choices[0].text)


def test_other_openai_endpoints_remain(service: Service) -> None:
    assert [m.id for m in service.client.models.list().data] == ["eldr-demo"]
    assert service.client.models.retrieve("eldr-demo").id == "eldr-demo"
    # An endpoint that this model does not support returns an OpenAI error.
    with pytest.raises(openai.BadRequestError):
        service.client.embeddings.create(model="eldr-demo", input="hello")


def test_kv_transfer_params_of_a_client_are_dropped(service: Service) -> None:
    foreign = {"do_remote_prefill": True, "remote_host": "203.0.113.1", "remote_port": 1}
    foreign |= {"eldr_replica": "nobody"}
    answer = service.complete("hello", max_tokens=3, extra_body={"kv_transfer_params": foreign})
    assert answer.usage.completion_tokens == 3


def test_a_table_that_does_not_fit_keeps_the_old_one(service: Service, table_file: Path) -> None:
    good = RoutingTable.load(table_file)
    other_model = RoutingTable(**{**good.__dict__, "model": "another"})
    before = service.status()["table"]
    for body in (b"", b"garbage", good.to_bytes()[:-100], other_model.to_bytes()):
        answer = service.admin("PUT", "/eldr/table", content=body)
        assert answer.status_code == 400, answer.text
        assert "\n" not in answer.json()["error"]["message"]
    assert service.status()["table"] == before


async def test_200_requests_survive_swaps_and_policy_changes(
    service: Service, table_file: Path, prompts: list[str]
) -> None:
    client, table = service.async_client, table_file.read_bytes()
    version = service.status()["table"]["version"]

    async def ask(number: int) -> int:
        stream = await client.completions.create(
            model="eldr-demo",
            prompt=f"{number} {prompts[number % len(prompts)]}",
            max_tokens=12,
            extra_body={"ignore_eos": True},
            stream=True,
        )
        return len([chunk async for chunk in stream if chunk.choices and chunk.choices[0].text is not None])

    async def operate() -> None:
        policies = ["shortest-queue", "locality-band", "random", "least-tokens", "locality-band"]
        async with httpx.AsyncClient(
            base_url=service.url, headers={"Authorization": f"Bearer {ADMIN_KEY}"}
        ) as admin:
            for number in range(20):
                answer = await admin.put("/eldr/table", content=table, timeout=60)
                assert answer.status_code == 200, answer.text
                if number % 4 == 0:
                    answer = await admin.put("/eldr/policy", json={"name": policies[number // 4]}, timeout=60)
                    assert answer.status_code == 200, answer.text
                await asyncio.sleep(0.1)

    *lengths, _ = await asyncio.gather(*(ask(number) for number in range(200)), operate())
    assert min(lengths) >= 1
    assert service.status()["table"]["version"] == version + 20


async def test_marginal_cost_uses_counts_and_the_engines_steps(service: Service, prompts: list[str]) -> None:
    service.set_policy("marginal-cost")
    before = service.counter("reason:marginal-cost")
    await asyncio.gather(
        *(service.greedy_async(prompts[n % len(prompts)], ignore_eos=True) for n in range(16))
    )
    assert service.counter("reason:marginal-cost") >= before + 15
    # Experts of 32 neurons may cost nothing, so a fit may be impossible; the steps are counted.
    wait_for(lambda: service.status()["step_cost"]["steps"] >= 23, "the router receives decode steps", 30)


def test_metrics_reach_prometheus(service: Service, table_file: Path) -> None:
    service.complete("count experts", max_tokens=8, temperature=0)
    for name in (
        "eldr_active_experts_count",
        "eldr_decode_steps_total",
        "eldr_decode_step_experts_total",
        "eldr_decode_seconds_total",
        "eldr_decode_step_seconds_count",
        "eldr_capture_seconds_count",
        "eldr_route_seconds_count",
        "eldr_candidates_count",
        "eldr_table_version",
        "vllm_generation_tokens_total",
        "vllm_inter_token_latency_seconds_count",
    ):
        wait_for(lambda name=name: service.metric(name) > 0, f"{name} is exported", 40)  # type: ignore[misc]

    def gauge_is_there() -> bool:  # Ray exports only gauges set since the last export
        service.complete("count experts", max_tokens=8)
        return "ray_vllm_num_requests_waiting{" in service.metrics()

    wait_for(gauge_is_there, "a gauge of vLLM is exported", 40)


def test_every_metric_is_exported_with_its_kind(service: Service) -> None:
    """Check metrics with samples under any policy, and those that streams and steps add."""
    assert list(service.complete("count experts", max_tokens=8, temperature=0, stream=True))
    used = {"eldr_ttft_seconds", "eldr_tpot_seconds", "eldr_stage_seconds", "eldr_placed_by_reason_total"}
    required = {
        f"{PREFIX}{metric.name}{'_count' if metric.kind == HISTOGRAM else ''}": metric.kind
        for metric in METRICS.values()
        if not metric.only or metric.name in used | set(ENGINE)
    }
    exported: dict[str, str] = {}

    def all_there() -> bool:
        families = text_string_to_metric_families(service.metrics())
        exported.update((sample.name, family.type) for family in families for sample in family.samples)
        return required.keys() <= exported.keys()

    with contextlib.suppress(pytest.fail.Exception):  # the list of missing metrics says more
        wait_for(all_there, "every metric is exported", 40)
    assert {name: exported.get(name) for name in required} == required
