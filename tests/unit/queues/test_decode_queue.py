"""Requests that wait in the router: who gets a worker when, and that none is lost or served twice."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from fake_router import SLOTS, SlotPolicy, client_lease, loads, place, router_state
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from tables import counts_for, request, unit_table

from eldr_serve.router.messages import Restore
from eldr_serve.router.state import RouterState
from eldr_serve.scheduling import Lease, State


def router(workers: int = 2, **options: Any) -> RouterState:
    """It keeps its leases for `fetch`."""
    state = router_state(workers=workers, table=2, policy=SLOTS, **options)
    state.granted = []
    state.on_leases = state.granted.extend
    return state


def fetch(state: RouterState) -> dict[str, Lease]:
    """New leases, by request."""
    granted, state.granted = state.granted, []
    state.on_leases = state.granted.extend
    return {lease.request_id: lease for lease in granted}


def queued(answers: list[Lease]) -> set[str]:
    return {answer.request_id for answer in answers if answer.state is State.QUEUED}


def policy(state: RouterState) -> SlotPolicy:
    return state.placer.policy


def test_a_new_incarnation_knows_of_a_request_what_predictors_ask_for() -> None:
    old = router()
    (lease,) = place(old, request("a", prompt_key="k", may_wait=True))
    new = router(clients="")
    new.restore(Restore("c", ("r0", "r1"), ("a",), old.settings))
    new.hold(replace(lease))
    for state in (old, new):
        asked = policy(state).placed_as["a"]
        assert (asked.prompt_tokens, asked.max_new_tokens, asked.prompt_key) == (10, 20, "k")


def test_with_free_slots_nobody_waits() -> None:
    state = router()
    assert [lease.replica for lease in place(state, "a", "b")] == ["r0", "r1"]
    # A release just before frees a slot for the request_context client.
    assert place(state, "c", released=("a",))[0].replica == "r0"
    assert fetch(state).keys() == {"a", "b", "c"}
    assert state.counters["queued"] == 0


def test_others_wait_in_order_of_arrival_whoever_asked() -> None:
    now = [0.0]
    state = router(clients="cd", clock=lambda: now[0])
    assert queued(place(state, "a", "b", "x")) == {"x"}
    now[0] = 2.0
    assert queued(place(state, "y", client="d")) == {"y"}
    assert queued(place(state, "z")) == {"z"}
    assert state.status()["decode_queue"] == {"size": 3, "oldest_wait_s": 2.0}
    now[0] = 3.0
    fetch(state)
    place(state, released=("a", "b"))
    granted = fetch(state)
    assert granted.keys() == {"x", "y"}
    assert (granted["x"].replica, granted["x"].waited_s, granted["x"].reason) == ("r0", 3.0, "slot")
    assert (granted["y"].replica, granted["y"].client) == ("r1", "d")
    assert state.counters["queued"] == 3
    assert state.counters["placed"] == 4


def test_what_cannot_wait_is_placed_at_once() -> None:
    state = router(workers=1)
    place(state, "a", "b")
    at_once = [request("c"), request("d", may_wait=True, exclude=("r9",))]
    assert [answer.reason for answer in place(state, *at_once)] == ["at-once"] * 2
    assert not queued(place(router(workers=1, parameters={"queue": False}), "a", "b", "c"))


def test_asking_again_keeps_the_turn() -> None:
    state = router(workers=1)
    place(state, "a", "b", "c")
    assert queued(place(state, "b")) == {"b"}
    fetch(state)
    place(state, released=("a",))
    assert fetch(state).keys() == {"b"}
    assert state.counters["queued"] == 2


def test_a_swap_makes_scores_of_queued_requests_void() -> None:
    state = router(workers=1)
    place(state, "a")
    score = unit_table(2).similarity(counts_for(1))
    assert queued(place(state, request("b", similarity=score, table_version=1, may_wait=True))) == {"b"}
    assert policy(state).waiting[0].similarity is not None
    state.swap_table(unit_table(3).to_bytes())
    assert policy(state).waiting[0].similarity is None
    place(state, released=("a",))
    assert not fetch(state)["b"].best


def test_what_a_lost_client_had_is_dropped_and_counted() -> None:
    state = router(workers=1, clients="cd")
    place(state, "a", "b")
    place(state, "x", client="d")
    assert state.drop("c") == state.counters["queued_of_lost_clients"] == 1
    assert state.clients == {"d"}
    assert state.placer.running.keys() == {"x"}
    assert not state.queue_size


def test_the_policy_hears_of_progress_and_of_the_last_of_it_before_the_end() -> None:
    state = router()
    place(state, "a")
    place(state, progress={"a": 3, "unknown": 9})
    assert policy(state).generated == {"a": 3}
    place(state, progress={"a": 7}, released=("a",))
    assert policy(state).lengths == [7]


def test_a_change_of_workers_ends_no_request_and_a_new_policy_hears_all() -> None:
    state = router()
    place(state, "a", "b", progress={})
    place(state, progress={"b": 4})
    state.update_workers(["r1", "r2"])
    assert policy(state).running == {"b": 1}  # r2 sits where r0 was
    assert policy(state).lengths == [0]  # of a, whose worker is gone
    state.set_policy(SLOTS, {"slots": 3})
    assert policy(state).running == {"b": 1}
    assert policy(state).generated == {"b": 4}
    assert policy(state).lengths == []


_CLIENTS = st.sampled_from("cd")
_NUMBERS = st.integers(0, 20)


class Conservation(RuleBasedStateMachine):
    """Whatever happens in whatever order, each request is in one place, and loads end at zero."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.live = {"r0", "r1", "r2"}
        self.state = router(workers=3, clients="cd", clock=lambda: self.now, parameters={"slots": 2})
        self.waits: dict[str, str] = {}  # request -> client, as the clients know
        self.holds: dict[str, tuple[str, str]] = {}  # request -> client, replica
        self.told: dict[str, int] = {}  # tokens of those that have a worker
        self.state.on_leases = self.granted

    def granted(self, leases: list[Lease]) -> None:
        for lease in leases:
            waited = self.waits.pop(lease.request_id, lease.client)
            assert waited == lease.client  # granted once
            assert lease.request_id not in self.holds
            self.holds[lease.request_id] = (lease.client, lease.replica)

    def say(self, client: str, *ask: str, **fields: Any) -> None:
        answers = place(self.state, *ask, client=client, **fields)
        for name, answer in zip(ask, answers, strict=True):
            waited = self.waits.pop(name, None)
            if answer.state is State.LEASED:
                self.holds[name] = (client, answer.replica)
            elif answer.state is State.QUEUED or waited is not None:  # it keeps its turn
                self.waits[name] = client
            if answer.state is State.SENT:
                assert not self.live

    @rule(numbers=st.lists(_NUMBERS, max_size=5, unique=True), client=_CLIENTS)
    def ask(self, numbers: list[int], client: str) -> None:
        names = [f"{client}{number}" for number in numbers]
        self.say(client, *[name for name in names if name not in self.holds])

    @rule(number=_NUMBERS, client=_CLIENTS)
    def end(self, number: int, client: str) -> None:
        """Finished, cancelled or expired: it is the same to the router."""
        name = f"{client}{number}"
        for known in (self.waits, self.holds, self.told):
            known.pop(name, None)
        self.say(client, released=(name,))

    @rule(number=_NUMBERS, client=_CLIENTS, replica=st.sampled_from(["r0", "r1"]))
    def hold(self, number: int, client: str, replica: str) -> None:
        """The client has placed it by itself."""
        name = f"{client}{number}"
        lease, known = client_lease(name, replica), self.state.placer.running.get(name)
        self.waits.pop(name, None)
        if known is None or (known.replica, known.policy) != (lease.replica, lease.policy):
            self.told.pop(name, None)  # else the same lease is restored, with the tokens that are known
        self.holds[name] = (client, replica)
        self.say(client, held=(lease,))

    @rule(number=_NUMBERS, client=_CLIENTS, tokens=st.integers(0, 50))
    def progress(self, number: int, client: str, tokens: int) -> None:
        name = f"{client}{number}"
        if name in self.state.placer.running:
            self.told[name] = max(self.told.get(name, 0), tokens)
        self.say(client, progress={name: tokens})

    @rule(live=st.sets(st.sampled_from(["r0", "r1", "r2", "r3"])))
    def workers(self, live: set[str]) -> None:
        self.live = live
        self.state.update_workers(live)

    @rule(
        change=st.sampled_from(
            [(SLOTS, {"slots": 2}), (SLOTS, {"slots": 5}), (SLOTS, {"queue": False}), ("locality-band", {})]
        )
    )
    def change_policy(self, change: tuple[str, dict[str, Any]]) -> None:
        self.state.set_policy(*change)

    @rule(k=st.integers(1, 3))
    def swap(self, k: int) -> None:
        self.state.swap_table(unit_table(k).to_bytes())

    @rule(client=_CLIENTS)
    def lose(self, client: str) -> None:
        """The client is lost for too long, and then it comes back with nothing."""
        self.state.drop(client)
        self.waits = {name: c for name, c in self.waits.items() if c != client}
        self.told = {name: tokens for name, tokens in self.told.items() if name[0] != client}
        self.holds = {name: held for name, held in self.holds.items() if held[0] != client}
        self.state.restore(Restore(client))

    @invariant()
    def each_request_is_in_one_place(self) -> None:
        running, queue = set(self.state.placer.running), set(self.state.placer.queue)
        assert not running & queue
        assert running | queue == self.holds.keys() | self.waits.keys()
        assert self.holds.keys() <= running
        assert queue <= self.waits.keys()

    @invariant()
    def loads_equal_a_recount(self) -> None:
        running = self.state.placer.running.values()
        for replica, load in loads(self.state).items():
            mine = [10 + p.generated_tokens for p in running if p.replica == replica]
            assert load == (len(mine), sum(mine))
        for name, (_, replica) in self.holds.items():
            placement = self.state.placer.running[name]
            assert (placement.replica, placement.generated_tokens) == (replica, self.told.get(name, 0))

    @invariant()
    def no_slot_is_free_while_somebody_waits(self) -> None:
        status = self.state.status()
        if self.state.queue_size and self.live:
            assert status["policy"] == SLOTS
            assert all(w["in_flight"] >= status["parameters"]["slots"] for w in status["workers"])

    def teardown(self) -> None:
        for client in "cd":
            self.say(client, released=tuple(n for n in (*self.waits, *self.holds) if n[0] == client))
        status = self.state.status()
        assert status["decode_queue"] == {"size": 0, "oldest_wait_s": 0.0}
        assert set(loads(self.state).values()) <= {(0, 0)}
        assert not self.state.placer.running


TestConservation = Conservation.TestCase
TestConservation.settings = hypothesis_settings(max_examples=60, stateful_step_count=40)
