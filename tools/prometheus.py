"""Prometheus text, as vLLM, Ray and our own metrics give it."""

from __future__ import annotations

from prometheus_client.parser import text_string_to_metric_families


def total(text: str, name: str) -> float:
    """Sum of all samples of that name (with its suffix, as `_sum`), whatever their labels."""
    return sum(
        sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name == name
    )
