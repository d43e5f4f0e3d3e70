"""The benchmark of our channel and gRPC, with few streams and tokens."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from unittest.mock import AsyncMock, Mock

import pytest

from benchmarks.lib import channel_transports
from benchmarks.lib.channel_transports import (
    TRANSPORTS,
    TokenSource,
    connect_by_transport,
    run_transport_server,
)
from benchmarks.lib.frames_in_grpc import carry
from benchmarks.serving.channel_or_grpc import ChannelLoad, compare_with_channel, trial
from eldr_serve.channel.calls import MAX_UNREAD_BYTES
from eldr_serve.channel.server import _MAX_UNSENT_BYTES
from tests.support.in_process import command, sentence
from tests.support.processes import python

LOAD = ChannelLoad(streams=(2, 3), pace=60.0, seconds=0.3, peak_seconds=0.1, cancels=1)
_SOCKET_BYTES = 2**26  # what the kernel may buffer at both ends, at its usual limits


@pytest.mark.parametrize("transport", TRANSPORTS)
async def test_every_transport_carries_all_tokens_and_cancels(transport: str) -> None:
    async with run_transport_server(transport) as port:
        rows = await trial(transport, port, LOAD, seed=0)
    assert [row["streams"] for row in rows] == [2, 3]
    for row in rows:
        assert row["tokens_per_s"] <= LOAD.pace * 1.001
        assert row["peak_tokens_per_s"] > 0
        assert 0 <= row["cancel_p50_ms"] <= row["cancel_p99_ms"]
        assert row["slow_sent_mib"] > 0
        assert row["client_us"] > 0


@pytest.mark.parametrize("transport", TRANSPORTS)
async def test_a_stream_that_nobody_reads_is_bounded(transport: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The channel ends it; gRPC stops its handler."""
    monkeypatch.setattr(channel_transports, "_SLOW_S", 0.001)
    async with run_transport_server(transport) as port, connect_by_transport(transport, port) as link:
        slow = link.stream({"stream": 0, "slow": True})
        sent_bytes, unchanged_polls = -1, 0
        async with asyncio.timeout(20):
            while unchanged_polls < 3:
                await asyncio.sleep(0.1)
                now = await link.command("stats", {})
                unchanged_polls = unchanged_polls + 1 if now["slow_bytes"] == sent_bytes > 0 else 0
                sent_bytes = now["slow_bytes"]
        # How much is sent before the end of the stream reaches its handler depends on the machine; the server
        # aborts a connection with more unsent bytes than this.
        assert sent_bytes < MAX_UNREAD_BYTES + _MAX_UNSENT_BYTES + _SOCKET_BYTES
        assert now["open"] == (transport == "grpc")
        slow.cancel()


@pytest.mark.parametrize("write_ends", [True, False])
async def test_an_aborted_connection_ends_both_directions_of_its_stream(write_ends: bool) -> None:
    never = asyncio.Event().wait
    peer = Mock()
    stream = Mock(read=never, write=AsyncMock() if write_ends else lambda data: never())
    carrying = asyncio.create_task(carry(peer, stream))
    await asyncio.sleep(0)
    (transport,) = peer.connection_made.call_args.args
    transport.writelines([b"a"])
    await asyncio.sleep(0)
    transport.abort()
    async with asyncio.timeout(20):
        await carrying
    peer.connection_lost.assert_called_once_with(None)


async def test_a_failed_write_ends_both_directions_of_a_stream() -> None:
    peer = Mock()
    stream = Mock(read=asyncio.Event().wait, write=AsyncMock(side_effect=RuntimeError("it is closed")))
    peer.connection_made.side_effect = lambda transport: transport.writelines([b"a"])
    async with asyncio.timeout(20):
        with pytest.raises(RuntimeError, match="it is closed"):
            await carry(peer, stream)
    peer.connection_lost.assert_called_once_with(None)


async def test_a_stream_that_does_not_send_ends_a_run_without_a_pace(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(channel_transports, "STEP_TIMEOUT_S", 0.01)
    engine, blocked = TokenSource(), asyncio.Event()

    async def never() -> None:
        await blocked.wait()

    stream = asyncio.create_task(engine.stream({"stream": 0}, lambda payload, ids: never()))
    await asyncio.sleep(0)
    async with asyncio.timeout(20):
        with pytest.raises(RuntimeError, match="1 of 1 streams have not sent the chunk"):
            await engine.run({"seconds": 30.0, "gap_s": 0})
    stream.cancel()


def test_rows_are_compared_within_their_round() -> None:
    fast = {"way": "channel", "streams": 2, "client_us": 4.0, "server_us": 6.0, "peak_tokens_per_s": 9.0}
    slow = {"way": "grpc", "streams": 2, "client_us": 10.0, "server_us": 15.0, "peak_tokens_per_s": 3.0}
    assert [(row["times_cpu"], row["times_peak"]) for row in compare_with_channel([slow, fast])] == [
        (2.5, pytest.approx(1 / 3)),
        (1.0, 1.0),
    ]


@pytest.mark.parametrize(("ways", "words"), [("nobody", "nobody"), ("grpc", "must include channel")])
def test_bad_transports_are_refused_in_one_sentence(ways: str, words: str) -> None:
    assert words in sentence(command("benchmarks.serving.channel_or_grpc", ways=ways))


@pytest.mark.slow
def test_the_command_writes_a_row_for_each_way(tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    words = "--streams 2 --rounds 2 --pace 20 --seconds 0.3 --peak-seconds 0.1 --cancels 1 --out"
    done = python("-m", "benchmarks.serving.channel_or_grpc", *words.split(), out)
    assert done.returncode == 0, done.stderr
    result = json.loads(out.read_text())
    assert [(row["way"], row["rounds"]) for row in result["rows"]] == [(way, 2) for way in TRANSPORTS]
    assert result["rows"][0]["times_cpu"] == 1
    assert len(result["inputs"]["each"]) == 6
