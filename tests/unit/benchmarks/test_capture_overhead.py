"""The cost of counting experts is timed on the messages of the service."""

import numpy as np

from benchmarks.engine.capture_overhead import messages_with
from eldr_serve.engine.calls import expert_counts_of
from eldr_serve.experts.signature import unpack_counts


def test_each_timed_message_carries_the_counts_to_its_reader() -> None:
    counts = np.random.default_rng(0).integers(0, 300, (3, 8)).astype(np.uint32)
    core_output, reply, place, decode_request = messages_with(counts)()
    assert place.request.expert_counts is not None
    read = [
        expert_counts_of(core_output),
        expert_counts_of(reply.kv_transfer_params),
        place.request.expert_counts,
        unpack_counts(decode_request.expert_counts),
    ]
    for counts_read in read:
        np.testing.assert_array_equal(counts_read, counts)
