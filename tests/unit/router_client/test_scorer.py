"""The scorer of requests in an ingress: its warnings, and settings with unreadable files."""

from typing import Any
from unittest.mock import Mock

import pytest

from eldr_serve.artifact_metadata import ArtifactError
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


@pytest.mark.parametrize(
    ("table", "predictor"), [(b"no table", None), (unit_table(3).to_bytes(), b"no predictor")]
)
def test_unreadable_files_leave_settings_table_and_predictor_as_they_were(
    table: bytes, predictor: bytes | None
) -> None:
    on_predictor, old = Mock(), settings_of(1, unit_table(2).to_bytes())
    scorer = Scorer(on_predictor)
    scorer.apply_settings(old)
    old_predictor: Any = object()
    scorer.predictor = old_predictor
    with pytest.raises(ArtifactError):
        scorer.apply_settings(settings_of(2, table, predictor))
    assert scorer.settings is old
    assert scorer.predictor is old_predictor
    scored = scorer.score(request("r", expert_counts=counts_for(0)))
    assert scored.table_version == 1
    assert scored.similarity is not None
    assert len(scored.similarity) == 2
    assert not on_predictor.called
