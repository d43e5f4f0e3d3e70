"""The status of a service as text for people."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.table import Table


def show_status(status: dict[str, Any]) -> None:
    """Print the answer of GET /eldr/status as tables."""
    grid = Table.grid(padding=(0, 2))
    names = ("model", "router", "policy", "table", "predictor", "leases", "decode_queue", "step_cost")
    for name in (*names, "decode_totals"):
        if status.get(name) is not None:
            grid.add_row(name.replace("_", " "), _line(status[name] if name != "policy" else _policy(status)))
    if status.get("signatures"):
        grid.add_row("signatures", status["signatures"]["note"])
    if now := (status.get("comparison") or {}).get("now"):
        grid.add_row("shadow", _saving(now))
    grid.add_row("ingress", _line(status.get("ingress", {})))
    grid.add_row("counters", _line(status.get("counters", {})))
    workers = Table("position", "worker", "requests in flight", "KV tokens", "cluster's domain")
    for row in status.get("workers", []):
        keys = ("position", "worker", "in_flight", "kv_tokens", "cluster_domain")
        workers.add_row(*(str(row.get(key) if row.get(key) is not None else "-") for key in keys))
    console = Console(markup=False)
    console.print(grid)
    console.print(workers)


def _policy(status: dict[str, Any]) -> str:
    return f"{status['policy']} ({_line(status.get('parameters', {}))})".removesuffix(" ()")


def _saving(now: dict[str, Any]) -> str:
    """Describe the saving of the live policy over its shadow."""
    shadow = f"{now['shadow']['name']} ({_line(now['shadow']['parameters'])})".removesuffix(" ()")
    if now.get("tokens") is None:
        return f"{shadow}: no token has been priced yet"
    interval = "" if now["low_pct"] is None else f" [{now['low_pct']:+.1f}, {now['high_pct']:+.1f}]"
    return (
        f"{shadow}: compared with it, the live policy changes the decode step time per token by "
        f"{now['change_pct']:+.1f} %{interval}, over {now['tokens']} tokens"
    )


def _line(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.0f}" if abs(value) >= 1000 else f"{value:.4g}"
    if not isinstance(value, dict):
        return str(value)
    return ", ".join(f"{key} {_item(item)}" for key, item in value.items())


def _item(value: Any) -> str:
    if not isinstance(value, dict):
        return _line(value)
    return f"({_line(value)})" if value else "none"
