"""Keys, their file, and tenants' token buckets."""

import json
import logging
import math
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from eldr_serve.cli import app
from eldr_serve.errors import RateLimitedError, RequestRefusedError
from eldr_serve.limits.keys import Keys, KeysError, Limits, add_key, bearer_key, digest, read_keys, write_keys
from eldr_serve.limits.tenants import Bucket, SharedLimits, Tenant, Tenants, TokenReservation
from tests.support.clock import Clock

KEY_OF_A = json.dumps({"sha256": "0" * 64, "tenant": "a"})


@given(
    st.floats(0.1, 1000), st.lists(st.tuples(st.floats(0, 30), st.integers(1, 50)), min_size=1, max_size=40)
)
def test_no_window_takes_more_than_the_burst_the_rate_and_one_debt(
    per_minute: float, arrivals: list[tuple[float, int]]
) -> None:
    clock = Clock()
    bucket = Bucket(per_minute, clock)
    charged: list[tuple[float, int]] = []
    for pause_s, units in arrivals:
        clock.now += pause_s
        wait_s = bucket.compute_wait_s()
        assert wait_s >= 0
        if not wait_s:
            bucket.charge(units)
            charged.append((clock.now, units))
        else:  # the bucket has room after the reported wait
            clock.now += wait_s * (1 + 1e-9) + 1e-9
            assert bucket.compute_wait_s() < 1e-6
    for first, (start_s, _) in enumerate(charged):
        for last in range(first, len(charged)):
            total = sum(units for _, units in charged[first:last])  # the last one may go into debt
            window_s = charged[last][0] - start_s
            assert total <= max(per_minute, 1.0) + per_minute * window_s / 60 + 1e-6


@given(st.lists(st.integers(-50, 50), max_size=20))
def test_a_bucket_without_a_limit_never_waits(units: list[int]) -> None:
    bucket = Bucket(None, Clock())
    for number in units:
        bucket.charge(number)
        assert bucket.compute_wait_s() == 0
    bucket.set_limit(1.0)
    assert bucket.compute_wait_s() == 0  # use before the limit does not count


def test_a_changed_limit_keeps_the_debt() -> None:
    clock = Clock()
    bucket = Bucket(60.0, clock)
    bucket.charge(180.0)
    bucket.set_limit(120.0)
    assert bucket.compute_wait_s() == pytest.approx((180 + 1 - 120) / 2)


@pytest.mark.parametrize("used", [42, 0])
def test_a_request_is_charged_for_the_tokens_it_used(used: int) -> None:
    clock = Clock()
    tenant = Tenant("a", Limits(tokens_per_minute=100), clock)
    reservation = TokenReservation(tenant)
    reservation.reserve(510)  # more than a minute allows: it runs, and later ones wait
    with pytest.raises(RateLimitedError, match="100 tokens per minute") as refused:
        TokenReservation(tenant).reserve(2)
    assert refused.value.retry_after_s == math.ceil((510 + 1 - 100) * 0.6)
    reservation.count_usage_with(lambda: used)
    reservation.settle()
    reservation.settle()
    tenant.tokens.charge(100 - used - 1)
    assert tenant.tokens.compute_wait_s() == 0
    tenant.tokens.charge(1)
    assert tenant.tokens.compute_wait_s() > 0


REQUESTS = st.tuples(st.floats(0, 90), st.integers(0, 300), st.floats(0, 1))


@given(st.floats(1, 300), st.lists(st.tuples(REQUESTS, st.integers(0, 3)), min_size=1, max_size=30))
def test_no_window_takes_more_than_its_limit_if_reservations_are_corrected_later(
    per_minute: float, steps: list[tuple[tuple[float, int, float], int]]
) -> None:
    """After each arrival, some of the running requests end in any order."""
    tenant = Tenant("a", Limits(tokens_per_minute=per_minute), clock := Clock())
    begun: list[tuple[float, int]] = []
    running: list[TokenReservation] = []
    for (pause_s, reserved, share), num_ends in steps:
        clock.now += pause_s
        reservation, used = TokenReservation(tenant), int(share * reserved)
        try:
            reservation.reserve(reserved)
        except RateLimitedError:
            pass
        else:
            begun.append((clock.now, used))
            reservation.count_usage_with(partial(int, used))
            running.append(reservation)
        for _ in range(min(num_ends, len(running))):
            running.pop(reserved % len(running)).settle()
    for first, (start_s, _) in enumerate(begun):
        for last in range(first, len(begun)):
            total = sum(used for _, used in begun[first:last])
            assert total <= per_minute * (1 + (begun[last][0] - start_s) / 60) + 1e-6
    for reservation in running:
        reservation.settle()
    assert not tenant.tokens._reserved
    assert tenant.tokens.charged >= sum(used for _, used in begun)


def test_refilled_tokens_of_a_reservation_are_not_given_back() -> None:
    tenant = Tenant("a", Limits(tokens_per_minute=1000), clock := Clock())
    unused = [TokenReservation(tenant) for _ in range(2)]
    for reservation in unused:
        reservation.reserve(1000)
        clock.now += 60
    TokenReservation(tenant).reserve(1000)
    for reservation in unused:
        reservation.settle()
        with pytest.raises(RateLimitedError):
            TokenReservation(tenant).reserve(1000)


def test_a_busy_tenant_gets_its_unused_tokens_back() -> None:
    """The refill counts towards the usage of ended requests before it counts towards reservations."""
    tenant = Tenant("a", Limits(tokens_per_minute=1000), clock := Clock())
    tenant.tokens.charge(900)
    reservation = TokenReservation(tenant)
    reservation.reserve(800)
    clock.now += 54
    reservation.settle()
    assert tenant.tokens._used == pytest.approx(0)
    assert tenant.tokens.charged == 900


@pytest.mark.parametrize("tokens", [-(10**9), 10**22, 10**400])
def test_an_absurd_reservation_leaves_the_usage_of_other_requests(tokens: int) -> None:
    tenant = Tenant("a", Limits(tokens_per_minute=100), Clock())
    tenant.tokens.charge(60)
    reservation = TokenReservation(tenant)
    reservation.reserve(tokens)
    reservation.settle()
    assert tenant.tokens.charged == 60
    tenant.tokens.charge(39)
    assert tenant.tokens.compute_wait_s() == 0
    tenant.tokens.charge(1)
    assert tenant.tokens.compute_wait_s() > 0


def test_the_keys_command_writes_only_hashes(tmp_path: Path) -> None:
    file = tmp_path / "keys.json"
    first = run_keys("add", "search", file=file, priority=4, requests_per_minute=60)
    second = run_keys("add", "search", file=file, tokens_per_minute=1000)
    assert first not in file.read_text()
    assert file.stat().st_mode & 0o777 == 0o644
    file.chmod(0o600)
    keys = read_keys(file)
    assert keys.owners == {digest(key): "search" for key in (first, second)}
    assert keys.tenants["search"] == Limits(priority=4, requests_per_minute=60, tokens_per_minute=1000)
    hashes = json.loads(run_keys("list", file=file))["search"]["keys"]
    assert list(hashes) == [digest(key)[:12] for key in (first, second)]
    run_keys("revoke", digest(first)[:12], file=file)
    assert file.stat().st_mode & 0o777 == 0o600
    assert read_keys(file).owners == {digest(second): "search"}
    before = file.read_bytes()
    for wrong in (("revoke", "ffff"), ("revoke", ""), ("add", "No Tenant")):
        result = CliRunner().invoke(app, ["keys", *wrong, f"--file={file}"])
        assert result.exit_code == 2, result.output
        assert result.stderr.startswith("eldr keys: ")
    assert file.read_bytes() == before


def run_keys(*words: str, **options: Any) -> str:
    arguments = [f"--{name.replace('_', '-')}={value}" for name, value in options.items()]
    result = CliRunner().invoke(app, ["keys", *words, *arguments])
    assert result.exit_code == 0, result.output
    return result.stdout.strip()


@pytest.mark.parametrize(
    ("authorization", "key"),
    [("Bearer k", "k"), ("bearer k", "k"), ("BEARER a b", "a b"), ("Bearer ", ""), ("Bearer", "")]
    + [(other, None) for other in ("", "k", "Basic k", "Bearerk")],
)
def test_a_key_needs_the_scheme_bearer_in_any_case(authorization: str, key: str | None) -> None:
    assert bearer_key(authorization) == key


def test_keys_are_reloaded_from_a_valid_file_only(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file, clock = tmp_path / "keys.json", Clock()
    write_keys(file, add_key(Keys(), "a", "one", {"requests_per_minute": 2}))
    tenants = Tenants(file, clock)
    tenant = tenants.find("Bearer one")
    for wrong in ("", "one", "Bearer", "Bearer two", "Basic one"):
        with pytest.raises(RequestRefusedError) as refused:
            tenants.find(wrong)
        assert refused.value.status == 401
    for _ in range(2):
        tenant.admit()
    for bad in (b"{", b'{"keys": [{"sha256": "x", "tenant": "a"}]}', None):
        _ = file.unlink() if bad is None else file.write_bytes(bad)
        with caplog.at_level(logging.ERROR):
            assert [tenants.read_changed_keys() for _ in range(2)] == [None, None]
        assert len(caplog.messages) == 1
        assert "\n" not in caplog.messages[0]
        caplog.clear()
        assert tenants.find("Bearer one") is tenant
    write_keys(file, add_key(add_key(Keys(), "b", "two", {}), "a", "three", {"requests_per_minute": 3}))
    new_keys = tenants.read_changed_keys()
    assert new_keys is not None
    tenants._apply_keys(new_keys)
    assert tenants.find("Bearer three") is tenant  # its use still counts
    tenant.admit()
    with pytest.raises(RateLimitedError):
        tenant.admit()
    with pytest.raises(RequestRefusedError):
        tenants.find("Bearer one")
    assert tenants.find("bearer two").name == "b"


@pytest.mark.parametrize(
    "content",
    [
        f'{{"keys": [{KEY_OF_A}]}}',
        f'{{"tenants": {{"a": {{}}}}, "keys": [{KEY_OF_A}, {KEY_OF_A}]}}',
        '{"tenants": {"a": {"priority": 0}}}',
        '{"tenants": {"a": {"requests_per_minute": NaN}}}',
        '{"tenants": {"A b": {}}}',
        '{"tenant": {}}',
        "[]",
    ],
)
def test_an_invalid_keys_file_is_refused_in_one_sentence(tmp_path: Path, content: str) -> None:
    file = tmp_path / "keys.json"
    file.write_text(content)
    with pytest.raises(KeysError) as error:
        read_keys(file)
    assert str(file) in str(error.value)
    assert "\n" not in str(error.value)


STEPS = st.sampled_from(["take", "exchange", "restart", "set limit"])


@given(st.lists(st.tuples(st.integers(0, 2), STEPS, st.integers(1, 30)), max_size=40))
def test_replicas_share_their_counts(steps: list[tuple[int, str, int]]) -> None:
    """After each replica has exchanged its use with the router, all know the total, whatever the order."""
    clock = Clock()
    limited = add_key(Keys(), "a", "key", {"requests_per_minute": 1e6, "tokens_per_minute": 1e6})
    unlimited = Keys(tenants={"a": Limits()}, keys=limited.keys)
    with TemporaryDirectory() as folder:
        file = Path(folder) / "keys.json"
        write_keys(file, limited)
        replicas = [Tenants(file, clock) for _ in range(3)]
    shared = SharedLimits(clock)

    def exchange(number: int) -> None:
        replicas[number].add_remote_usage(shared.exchange(f"{number}", replicas[number].local_usage()))

    def exchange_all() -> None:
        for number in (0, 1, 2) * 2:
            exchange(number)

    exchange_all()  # all replicas know the others before the first request
    charged = 0
    for number, what, units in steps:
        if what == "take":
            replicas[number].find("Bearer key").tokens.charge(units)
            charged += units
        elif what == "exchange":
            exchange(number)
        elif what == "set limit":  # what was used before does not count
            for replica in replicas:
                replica._apply_keys(unlimited)
            replicas[number].find("Bearer key").tokens.charge(units)
            exchange_all()
            for replica in replicas:
                replica._apply_keys(limited)
            charged = 0
        else:  # the router restarts, and no replica is known to it
            shared = SharedLimits(clock)
            for other in range(3):
                exchange(other)
    exchange_all()
    assert [replica.find("Bearer key").tokens._used for replica in replicas] == [charged] * 3


@pytest.mark.parametrize(("outage_s", "counted"), [(10.0, 50), (60.0, 50), (61.0, 0)])
def test_usage_during_an_outage_of_the_router_counts_afterwards(
    tmp_path: Path, outage_s: float, counted: int
) -> None:
    file, clock = tmp_path / "keys.json", Clock()
    write_keys(file, add_key(Keys(), "a", "key", {"tokens_per_minute": 100}))
    replicas = {"one": Tenants(file, clock), "other": Tenants(file, clock)}

    def exchange_all(shared: SharedLimits) -> None:
        for name in ("one", "other", "one"):
            replicas[name].add_remote_usage(shared.exchange(name, replicas[name].local_usage()))

    exchange_all(SharedLimits(clock))
    replicas["other"].find("Bearer key").tokens.charge(50)
    clock.now += outage_s
    exchange_all(SharedLimits(clock))  # the new router knows no replica
    assert replicas["one"].find("Bearer key").tokens._used == counted


def test_a_new_replica_is_not_charged_for_earlier_use(tmp_path: Path) -> None:
    file, shared = tmp_path / "keys.json", SharedLimits(clock := Clock())
    write_keys(file, add_key(Keys(), "a", "key", {"requests_per_minute": 10}))
    new = Tenants(file, clock)
    shared.exchange("old", {"a": (100.0, 0.0)})
    new.add_remote_usage(shared.exchange("new", new.local_usage()))
    assert new.find("Bearer key").requests.compute_wait_s() == 0
    shared.exchange("old", {"a": (110.0, 0.0)})
    new.add_remote_usage(shared.exchange("new", new.local_usage()))
    assert new.find("Bearer key").requests.compute_wait_s() == 6
    clock.now = 61.0
    assert shared.exchange("new", {}) == {}  # the old replica is forgotten
