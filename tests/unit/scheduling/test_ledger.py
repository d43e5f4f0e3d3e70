"""Loads of workers against sums over their requests. Rows of workers that have gone are used again."""

from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from eldr_serve.scheduling.ledger import LoadLedger

NAMES = st.sampled_from("abcdefgh")
WORKERS = st.integers(0, 20)
EVENT = st.one_of(
    st.tuples(st.just("add"), NAMES, WORKERS, st.integers(0, 50)),
    st.tuples(st.just("progress"), NAMES, st.integers(0, 50)),
    st.tuples(st.just("release"), NAMES),
    st.tuples(st.just("workers"), st.lists(WORKERS, max_size=5, unique=True)),
)


@given(st.lists(EVENT, max_size=60))
def test_the_loads_are_sums_over_the_requests_of_each_worker(events: list[Any]) -> None:
    ledger = LoadLedger()
    requests: dict[str, list[int]] = {}  # worker, prompt, generated
    workers: list[int] = []
    ledger.name_workers(workers)
    rows = ledger.rows_of(workers)
    for what, *given_ in events:
        if what == "add":
            name, worker, prompt = given_
            requests[name] = [worker, prompt, 0]
            ledger.add(name, worker, prompt)
            ledger.add_prefill(name, prompt)
        elif what == "progress":
            name, tokens = given_
            if name in requests:
                requests[name][2] = max(requests[name][2], tokens)
            ledger.set_generated_tokens(name, tokens)
        elif what == "release":
            requests.pop(given_[0], None)
            ledger.release(given_[0])
        else:
            workers = given_[0]
            ledger.name_workers(workers)
            rows = ledger.rows_of(workers)
        loads = ledger.loads(rows)
        by_worker = [[request for request in requests.values() if request[0] == worker] for worker in workers]
        np.testing.assert_array_equal(loads.in_flight, list(map(len, by_worker)))
        assert loads.kv_tokens.tolist() == [sum(prompt + done for _, prompt, done in m) for m in by_worker]
        pending = [sum(prompt for _, prompt, done in m if not done) for m in by_worker]
        assert loads.prefill_tokens is not None
        assert loads.prefill_tokens.tolist() == pending


def test_workers_that_come_and_go_do_not_fill_the_memory() -> None:
    ledger = LoadLedger()
    for generation in range(300):
        workers = [f"{generation}.{number}" for number in range(20)]
        ledger.name_workers([*workers, None])
        rows = ledger.rows_of([*workers, None])
        for worker in workers:
            ledger.add(worker, worker, 10)
        assert ledger.loads(rows).in_flight.tolist() == [1] * 20 + [0]
        if generation:  # a request may end after its worker has left
            for number in range(20):
                ledger.release(f"{generation - 1}.{number}")
    assert ledger.num_rows <= 3 * 20
