"""A third-party policy in a file outside the repository, served and simulated by its import path."""

import json
from pathlib import Path

import pytest

from tests.e2e.service import STRANGER, Service, run

POLICY = f"{STRANGER.stem}:LastWorker"


def test_a_third_party_policy_is_served(service: Service) -> None:
    service.set_policy(POLICY, at_most=1)
    last = service.status()["workers"][-1]["worker"]
    answers = [
        service.client.completions.with_raw_response.create(
            model="eldr-demo", prompt=f"{n} engines", max_tokens=4
        )
        for n in range(3)
    ]
    for answer in answers:
        assert answer.headers["x-eldr-policy"] == POLICY
        assert answer.headers["x-eldr-decode-worker"] == last
    assert service.counter("reason:last") >= 3


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"name": POLICY, "parameters": {"at_most": 0}}, "at_most must be"),
        ({"name": "no_such_module:Policy"}, "no_such_module"),
        ({"name": "nearest"}, "nearest"),
        ({"name": "locality-band", "parameters": {"width": 0.1}}, "width"),
        ({"name": "locality-band", "parameters": {"band": "wide"}}, "band"),
        ({"policy": "random"}, ""),
    ],
)
def test_an_invalid_policy_is_refused_and_the_old_one_stays(
    service: Service, change: dict[str, object], words: str
) -> None:
    before = service.status()
    answer = service.admin("PUT", "/eldr/policy", json=change)
    assert answer.status_code == 400
    message = answer.json()["error"]["message"]
    assert words in message
    assert "\n" not in message
    after = service.status()
    assert (after["policy"], after["settings_version"]) == (before["policy"], before["settings_version"])


def test_a_third_party_policy_is_simulated(tmp_path: Path) -> None:
    scenario = {
        "cluster": {"decode": {"workers": 3}},
        "arrivals": {"kind": "poisson", "rate_per_s": 30, "requests": 60, "prompt_tokens": 50},
        "policies": [{"name": "shortest-queue"}, {"name": POLICY, "parameters": {"at_most": 5}}],
    }
    (tmp_path / "scenario.yaml").write_text(json.dumps(scenario))
    out = tmp_path / "out.json"
    run("-m", "offline.simulate", "--config", tmp_path / "scenario.yaml", "--out", out)
    assert [row["policy"] for row in json.loads(out.read_text())["rows"]] == ["shortest-queue", POLICY]
