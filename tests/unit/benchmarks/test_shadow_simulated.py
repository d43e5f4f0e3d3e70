"""The shadow in the simulator, whose steps cost what the shadow prices."""

import json
from pathlib import Path

import numpy as np
import pytest

from benchmarks.papers.shadow_simulated import shadow_simulated
from eldr_serve.errors import UserInputError
from eldr_serve.scheduling import make_policy
from offline.simulation.cluster import Cluster, Decode
from offline.simulation.requests import Requests
from offline.simulation.run import simulate
from tests.support.traces import synthetic_trace


def test_a_closed_loop_keeps_its_number_in_flight() -> None:
    n, most = 40, 6
    work = Requests(np.linspace(0, 9, n), np.full(n, 5), np.arange(1, n + 1))
    outcome = simulate(work, make_policy("shortest-queue"), Cluster(decode=Decode(workers=2)), in_flight=most)
    begins, ends = outcome.arrival_s, outcome.last_s
    assert (np.diff(begins) >= 0).all()
    assert begins[most - 1] == 0 < begins[most]
    assert set(begins[most:]) <= set(ends)
    open_ = [int(((begins <= time_s) & (ends > time_s)).sum()) for time_s in begins]
    assert open_[most - 1 :] == [most] * (n - most + 1)
    assert outcome.shadow_comparison is None


def test_the_shadow_prices_simulated_steps_and_agrees_with_the_simulation(tmp_path: Path) -> None:
    trace, out = tmp_path / "trace.safetensors", tmp_path / "out.json"
    synthetic_trace(n=60, num_layers=4, num_experts=32).save(trace)
    options = {"per_expert_us": "100", "workers": "2", "per_worker": 60, "seeds": 1, "output_tokens": 20}
    shadow_simulated(trace=trace, out=out, **options)
    closed, open_ = json.loads(out.read_text())["rows"]
    assert (closed["loop"], open_["loop"]) == ("closed", "open")
    assert abs(closed["price_error_pct"]) < 10
    assert closed["batch_size"] > open_["batch_size"]
    for row in (closed, open_):
        changes = [row[key] for key in ("step_change_pct", "priced_first_live_pct", "priced_second_live_pct")]
        assert max(changes) < 0
        assert row["share"] == pytest.approx(sum(changes[1:]) / 2 / changes[0])


def test_two_policies_are_required() -> None:
    with pytest.raises(UserInputError, match="name two"):
        shadow_simulated(trace=Path("none"), policies="random")
