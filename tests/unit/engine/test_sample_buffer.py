"""An engine keeps a bounded number of samples, and none with counts from another model."""

from __future__ import annotations

import logging

import numpy as np
import pytest

from eldr_serve.engine.protocol import EngineRequest
from eldr_serve.engine.samples import SampleBuffer
from eldr_serve.experts.signature import pack_counts

IDS = np.arange(3, dtype=np.uint32)
COUNTS = pack_counts(np.ones((2, 4), np.uint32))


def put(samples: SampleBuffer, name: str, *, prefill: str = COUNTS, steps: int = 3) -> None:
    samples.put(EngineRequest("chat", b"", name, domain="d"), IDS, prefill, COUNTS, steps)


def test_the_newest_samples_are_kept_and_returned_once() -> None:
    samples = SampleBuffer(size=3)
    for name in "abcde":
        put(samples, name)
    newest = samples.take_all()
    assert [sample.request_id for sample in newest] == ["c", "d", "e"]
    assert samples.dropped == 2
    assert (newest[0].domain, newest[0].token_ids.tolist(), newest[0].decode_steps) == ("d", [0, 1, 2], 3)
    assert samples.take_all() == []


@pytest.mark.parametrize(
    ("prefill", "words"),
    [
        (pack_counts(np.ones((2, 5), np.uint32)), "its prefill counts have shape (2, 5), but this"),
        ("no counts", "no sample of request r: not packed counts"),
    ],
)
def test_counts_of_another_model_give_no_sample(
    prefill: str, words: str, caplog: pytest.LogCaptureFixture
) -> None:
    samples = SampleBuffer()
    with caplog.at_level(logging.WARNING):
        put(samples, "r", prefill=prefill)
    assert samples.take_all() == []
    assert words in caplog.text


def test_a_request_without_decode_steps_or_prefill_counts_gives_no_sample(
    caplog: pytest.LogCaptureFixture,
) -> None:
    samples = SampleBuffer()
    put(samples, "one token", steps=0)
    put(samples, "prefilled elsewhere, uncounted", prefill="")
    assert samples.take_all() == []
    assert not caplog.records
