"""A third-party policy in a file outside the repository, served and simulated by its import path."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from conftest import STRANGER
from service import ROOT, Service

POLICY = f"{STRANGER.stem}:LastWorker"


def test_a_third_party_policy_is_served(service: Service) -> None:
    service.set_policy(POLICY, at_most=1)
    last = service.status()["workers"][-1]["replica"]
    answers = [
        service.client.completions.with_raw_response.create(
            model="eldr-demo", prompt=f"{n} engines", max_tokens=4
        )
        for n in range(3)
    ]
    for answer in answers:
        assert answer.headers["x-eldr-policy"] == POLICY
        assert answer.headers["x-eldr-decode-worker"] == last
    assert service.status()["counters"]["reason:last"] >= 3


def test_invalid_parameters_are_refused_and_the_old_policy_stays(service: Service) -> None:
    before = service.status()["policy"]
    answer = service.admin("PUT", "/eldr/policy", json={"name": POLICY, "parameters": {"at_most": 0}})
    assert answer.status_code == 400
    assert "at_most is 0, it must be" in answer.json()["error"]["message"]
    answer = service.admin("PUT", "/eldr/policy", json={"name": "no_such_module:Policy"})
    assert answer.status_code == 400
    assert "no_such_module" in answer.json()["error"]["message"]
    assert service.status()["policy"] == before


def test_a_third_party_policy_is_simulated(tmp_path: Path) -> None:
    scenario = {
        "cluster": {"decode": {"workers": 3}},
        "arrivals": {"kind": "poisson", "rate_per_s": 30, "requests": 60, "prompt_tokens": 50},
        "policies": [{"name": "shortest-queue"}, {"name": POLICY, "parameters": {"at_most": 5}}],
    }
    (tmp_path / "scenario.yaml").write_text(json.dumps(scenario))
    out = tmp_path / "out.json"
    subprocess.run(
        [sys.executable, "-m", "offline.simulate", "--config", tmp_path / "scenario.yaml", "--out", out],
        check=True, timeout=120, cwd=ROOT,
    )  # fmt: skip
    assert [row["policy"] for row in json.loads(out.read_text())["rows"]] == ["shortest-queue", POLICY]
