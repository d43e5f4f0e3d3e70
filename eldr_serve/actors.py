"""Named Ray actors: the router and the signature pool of each application."""

from __future__ import annotations

from typing import Any

import ray
from ray.actor import ActorHandle
from ray.exceptions import RayError

from eldr_serve.channel import CallFailedError

# A call raises one of these if the actor cannot answer.
ACTOR_UNAVAILABLE = (RayError, ConnectionError, TimeoutError, CallFailedError)
_NAMESPACE = "eldr"


def find_actor(name: str) -> ActorHandle:
    """Return an actor by its name; raise ValueError if there is none.

    The look-up blocks while Ray's GCS is unavailable.
    """
    return ray.get_actor(name, namespace=_NAMESPACE)


def start_actor(kind: type, name: str, *args: Any) -> ActorHandle:
    """Return the named actor; start it with these arguments if there is none.

    This blocks like `find_actor`. The actor outlives its creator, and Ray restarts it after a crash.
    """
    options = {"name": name, "namespace": _NAMESPACE, "lifetime": "detached", "get_if_exists": True}
    actor = ray.remote(kind).options(**options, max_restarts=-1, max_concurrency=1000, num_cpus=0)
    handle: ActorHandle = actor.remote(*args)
    return handle
