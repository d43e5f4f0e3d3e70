"""Errors of calls to an actor that is unavailable."""

from __future__ import annotations

from ray.exceptions import RayError

from eldr_serve.channel import CallFailed

AWAY = (RayError, ConnectionError, TimeoutError, CallFailed)  # raised if the actor cannot answer
