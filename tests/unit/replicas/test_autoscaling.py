"""The autoscaling policy, with Ray's own context and wrapper."""

from typing import Any

import pytest
from ray.serve._private.autoscaling_state import _apply_autoscaling_config
from ray.serve.config import AutoscalingConfig, AutoscalingContext, AutoscalingPolicy

from eldr_serve.app import engine_spec
from eldr_serve.replicas.autoscaling import IN_FLIGHT, KV_IN_USE, compute_desired_replicas

POLICY = "eldr_serve.replicas.autoscaling:compute_desired_replicas"


def context(
    counts: dict[str, float], running: int, kv: dict[str, float] | None = None, **config: Any
) -> AutoscalingContext:
    """Return the context of replicas r0, r1, ..., some of which have reported."""
    metrics = {name: values for name, values in ((IN_FLIGHT, counts), (KV_IN_USE, kv)) if values}
    return AutoscalingContext(
        deployment_id=None,
        deployment_name="decode",
        app_name="eldr",
        current_num_replicas=running,
        target_num_replicas=running or 2,
        running_replicas=[f"r{number}" for number in range(running)],
        total_num_requests=0,
        total_queued_requests=0,
        aggregated_metrics=metrics,
        raw_metrics={},
        capacity_adjusted_min_replicas=1,
        capacity_adjusted_max_replicas=16,
        policy_state={},
        last_scale_up_time=None,
        last_scale_down_time=None,
        current_time=0.0,
        config=AutoscalingConfig(max_replicas=16, target_ongoing_requests=10, **config),
    )


@pytest.mark.parametrize(
    ("counts", "running", "desired"),
    [
        ({"r0": 10, "r1": 10}, 2, 2),
        ({"r0": 30, "r1": 10}, 2, 4),  # the sum counts
        ({"r0": 1, "r1": 0}, 2, 0.1),
        ({"r0": 0, "r1": 0}, 2, 0),
    ],
)
def test_the_requests_in_flight_set_the_number_of_replicas(
    counts: dict[str, float], running: int, desired: float
) -> None:
    assert compute_desired_replicas(context(counts, running=running)) == (pytest.approx(desired), {})


@pytest.mark.parametrize(
    ("kv", "desired"),
    [
        ({"r0": 0.9, "r1": 0.9}, 2.25),  # full caches with few requests
        ({"r0": 0.4, "r1": 0.4}, 1.0),
        ({"r0": 0.0, "r1": 0.0}, 0.2),
    ],
)
def test_the_kv_usage_sets_the_number_of_replicas(kv: dict[str, float], desired: float) -> None:
    assert compute_desired_replicas(context({"r0": 1, "r1": 1}, 2, kv)) == (pytest.approx(desired), {})


@pytest.mark.parametrize(
    ("counts", "desired"),
    # No replica has reported, one has reported few requests, and one has reported many.
    [({}, 3), ({"r0": 1}, 3), ({"r0": 60}, 6)],
)
def test_no_replica_is_removed_before_all_have_reported(counts: dict[str, float], desired: float) -> None:
    assert compute_desired_replicas(context(counts, running=3))[0] == desired


def test_the_target_is_kept_without_replicas() -> None:
    assert compute_desired_replicas(context({}, running=0))[0] == 2


def test_serve_imports_the_policy_and_applies_its_own_bounds_and_delays() -> None:
    policy = AutoscalingPolicy(policy_function=POLICY)
    scaled = _apply_autoscaling_config(policy.get_policy())  # cloudpickle, as in the controller
    busy = {"r0": 40.0, "r1": 40.0}
    assert scaled(context(busy, running=2, upscale_delay_s=0))[0] == 8
    assert scaled(context(busy, running=2, upscale_delay_s=60))[0] == 2


def test_a_scaled_deployment_gets_the_policy_unless_it_names_one() -> None:
    config = {
        "model_loading_config": {"model_id": "m"},
        "deployment_config": {"autoscaling_config": {"min_replicas": 1, "max_replicas": 2}},
    }
    assert _policy(config) == POLICY
    config["deployment_config"]["autoscaling_config"]["policy"] = {"policy_function": "my.module:my_policy"}
    with pytest.raises(ValueError, match="my"):  # Serve imports it
        _policy(config)


def _policy(llm_config: dict[str, Any]) -> Any:
    config = engine_spec(llm_config, "decode", directory_name="d", kv_lease_s=30.0)
    return config.deployment_config["autoscaling_config"]["policy"]["policy_function"]
