"""The scorer of requests in an ingress: its warnings."""

import pytest

from eldr_serve.router_client.scorer import Scorer
from eldr_serve.router_protocol.messages import LiveSettings
from tests.support.tables import counts_for, request, unit_table


def settings_of(version: int, table: bytes | None, predictor: bytes | None = None) -> LiveSettings:
    return LiveSettings(version, "locality-band", {}, table, version, predictor, version)


def test_counts_that_do_not_fit_a_table_are_logged_once_per_table(caplog: pytest.LogCaptureFixture) -> None:
    scorer = Scorer(lambda: None)
    for version in (1, 2):
        scorer.apply_settings(settings_of(version, unit_table(version).to_bytes()))
        for number in range(3):
            counts = counts_for(0, num_layers=5)
            assert scorer.score(request(f"{number}", expert_counts=counts)).counts_missing
        assert caplog.text.count("the counts do not fit the live table") == version
