"""Whole replicas: two real engines that prefill and decode. Predicted signatures place requests."""

import asyncio
import json
import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import httpx
import numpy as np
import pytest

from eldr_serve.experts.signature_predictor import SignaturePredictor
from eldr_serve.pipeline.prefill.prompt_tokenizer import PromptTokenizer
from examples.demo_model import WEIGHTS
from tests.e2e.applications import arguments_of, running
from tests.e2e.service import PROMPTS, Service, wait_for

LEARNT = 150  # prompts after which an untrained predictor is better than the mean


@pytest.fixture(scope="module")
def whole(ray_cluster: str) -> Iterator[Service]:
    """Run two whole replicas behind one ingress."""
    arguments = arguments_of("cpu_demo_whole.yaml")
    arguments["decode_config"]["deployment_config"]["num_replicas"] = 2
    with running("whole", arguments) as service:
        yield service


@pytest.fixture(scope="module")
def untrained(whole: Service) -> SignaturePredictor:
    """Return an untrained predictor that fits the service: it predicts the same for all prompts."""
    config = json.loads((WEIGHTS / "config.json").read_text())
    layers, experts, top_k, rank = (
        *(config[key] for key in ("num_hidden_layers", "num_local_experts", "num_experts_per_tok")),
        32,
    )
    rng = np.random.default_rng(0)
    directions, _ = np.linalg.qr(rng.normal(size=(layers * experts, rank)))
    return SignaturePredictor(
        model="eldr-demo",
        tokenizer=asyncio.run(PromptTokenizer(str(WEIGHTS)).fingerprint()),
        top_k=top_k,
        mean=np.full((layers, experts), top_k / experts, np.float32),
        token_factors=np.zeros((config["vocab_size"], rank), np.float32),
        expert_factors=directions.T.reshape(rank, layers, experts).astype(np.float32),
        variance=np.full(config["vocab_size"], 10, np.float32),
    )


def swap(service: Service, predictor: bytes) -> httpx.Response:
    return service.admin("PUT", "/eldr/predictor", content=predictor)


def test_greedy_answers_equal_a_single_engine(
    whole: Service, single_engine: dict[str, list[str]], prompts: list[str]
) -> None:
    assert [whole.greedy(prompt) for prompt in prompts] == single_engine["completions"]
    assert [whole.greedy_chat(prompt) for prompt in prompts] == single_engine["chats"]


def test_several_answers_to_one_prompt_come_from_one_engine(whole: Service) -> None:
    assert len(whole.complete("twice", n=2, max_tokens=4).choices) == 2


def test_a_predictor_that_does_not_fit_is_refused_and_the_old_one_stays(
    whole: Service, untrained: SignaturePredictor
) -> None:
    assert swap(whole, untrained.to_bytes()).json()["predictor_version"] == 1
    layers, experts = untrained.mean.shape
    narrow = replace(
        untrained,
        mean=np.full((layers, experts // 2), 2 * untrained.top_k / experts, np.float32),
        expert_factors=np.zeros((0, layers, experts // 2), np.float32),
        token_factors=untrained.token_factors[:, :0],
    )
    for bad, word in (
        (replace(untrained, model="other").to_bytes(), "model other, not eldr-demo"),
        (replace(untrained, tokenizer="t").to_bytes(), "tokenizer t, not"),
        (narrow.to_bytes(), "layers and experts"),
        (b"nonsense", "not an eldr-serve file"),
    ):
        answer = swap(whole, bad)
        assert answer.status_code == 400, answer.text
        assert word in answer.json()["error"]["message"]
    assert whole.status()["predictor"]["version"] == 1


def test_requests_are_placed_by_predictions_that_learn_from_measured_counts(
    whole: Service, untrained: SignaturePredictor
) -> None:
    """Measured counts arrive both with streams and with complete answers."""
    assert swap(whole, untrained.to_bytes()).status_code == 200
    before = whole.status()["counters"]
    texts = [
        json.loads(line)["prompt"][:400]
        for file in sorted(PROMPTS.glob("*.jsonl"))
        for line in file.read_text().splitlines()[2 : 2 + LEARNT // 10 + 1]
    ]
    random.Random(0).shuffle(texts)  # mix the domains, as in traffic
    for number, text in enumerate(texts):
        answer = whole.complete(text, max_tokens=2, temperature=0, stream=bool(number % 2))
        if number % 2:
            list(answer)
    wait_for(lambda: whole.status()["predictor"]["prompts"] >= len(texts), "the measured counts arrive", 20)
    status = whole.status()
    increases = {name: status["counters"][name] - before.get(name, 0) for name in status["counters"]}
    assert increases["placed"] == len(texts)
    predictor = status["predictor"]
    assert predictor["prompts"] == len(texts)
    # While untrained it was no better than the mean, and may have been disabled.
    assert increases["counts_predicted"] + increases.get("counts_missing", 0) == len(texts)
    assert increases["counts_predicted"] >= 16
    assert predictor["on"] == 1
    assert predictor["gain"] > 0
    assert predictor["cosine"] > 0.2
    assert status["leases"] == 0
    assert {worker["in_flight"] for worker in status["workers"]} == {0}


def test_greedy_answers_of_many_at_once_equal_a_single_engine_with_a_predictor(
    whole: Service, single_engine: dict[str, list[str]], prompts: list[str]
) -> None:
    """Use the trained predictor of the previous test."""
    before = whole.counter("counts_predicted")
    assert whole.status()["predictor"]["on"] == 1
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(whole.greedy, prompts)) == single_engine["completions"]
    assert whole.counter("counts_predicted") - before == len(prompts)
