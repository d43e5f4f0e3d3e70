"""Simulations that run as tasks of a Ray cluster."""

from offline.scenario import Scenario, ScenarioInputs
from offline.simulate import simulate_all


def test_parallel_simulations_give_the_results_of_sequential_ones(ray_cluster: str) -> None:
    scenario = Scenario.model_validate(
        {
            "cluster": {"decode": {"workers": 3}},
            "arrivals": {"kind": "poisson", "rate_per_s": 30, "requests": 60, "prompt_tokens": 50},
            "policies": [{"name": "shortest-queue"}, {"name": "random"}, {"name": "least-tokens"}],
            "seeds": [0, 1],
        }
    )
    one_by_one, parallel = (
        simulate_all(scenario, ScenarioInputs(scenario, 0), processes) for processes in (1, 2)
    )
    for row in (*one_by_one, *parallel):
        row.pop("simulated_steps_per_s")
    assert parallel == one_by_one
    assert [row["seed"] for row in parallel] == [0, 0, 0, 1, 1, 1]
