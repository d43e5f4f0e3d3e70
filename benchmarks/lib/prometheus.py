"""Prometheus text of vLLM's, Ray's and eldr_serve's metrics."""

from __future__ import annotations

from prometheus_client.parser import text_string_to_metric_families


def total(text: str, name: str) -> float:
    """Return the sum of all samples with this name (including its suffix, such as `_sum`) over all labels."""
    return sum(
        sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name == name
    )
