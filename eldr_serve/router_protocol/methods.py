"""Methods of the DecodeRouter actor that ingresses call over their channel.

Each method is defined once for both ends: an ingress encodes the arguments and decodes the result
(`eldr_serve.router_client.calls`), and the actor does the reverse (`DecodeRouter._handle_call`).
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, Generic, TypeVar

import msgspec

from eldr_serve.limits.tenants import Usage
from eldr_serve.router_protocol.messages import LiveSettings, NamedPolicy, decoder, encode
from eldr_serve.scheduling.decode_loads import DecodeLoads
from eldr_serve.scheduling.prefixes import PromptBlocks

Arguments = TypeVar("Arguments", bound=msgspec.Struct)
Result = TypeVar("Result")


class RouterMethod(Generic[Arguments, Result]):
    """A method of the router: its name, and the types of its arguments and result.

    Attributes:
        name: name of the channel's method.
        decode_result: decodes the result of a call; raises msgspec.DecodeError if it is malformed.
    """

    def __init__(self, name: str, arguments: type[Arguments], result: type[Result]) -> None:
        self.name = name
        self.decode_result: Callable[[bytes], Result] = decoder(result)
        self._decode_arguments: Callable[[bytes], Arguments] = decoder(arguments)

    def bind(
        self, function: Callable[[Arguments], Awaitable[Result]]
    ) -> tuple[str, Callable[[bytes], Awaitable[bytes]]]:
        """Return the name, and a coroutine function that calls `function` with encoded arguments.

        It returns the encoded result, and raises msgspec.DecodeError if the arguments are malformed.
        """

        async def call_encoded(body: bytes) -> bytes:
            return encode(await function(self._decode_arguments(body)))

        return self.name, call_encoded


class NoArguments(msgspec.Struct, frozen=True, array_like=True):
    """The arguments of a method without parameters."""


class CountsShape(msgspec.Struct, frozen=True, array_like=True):
    """The shape [L, E] of the expert counts that engines report."""

    num_layers: int
    num_experts: int


class PolicyArguments(msgspec.Struct, frozen=True, array_like=True):
    """A policy and its parameters."""

    policy: str
    parameters: dict[str, Any]


class ShadowArguments(msgspec.Struct, frozen=True, array_like=True):
    """The shadow; None: compare with no policy."""

    shadow: NamedPolicy | None


class TableArguments(msgspec.Struct, frozen=True, array_like=True):
    """Content of a RoutingTable file."""

    table: bytes


class PredictorArguments(msgspec.Struct, frozen=True, array_like=True):
    """Content of a SignaturePredictor file, and the fingerprint of the served tokenizer."""

    predictor: bytes
    tokenizer: str


class UsageArguments(msgspec.Struct, frozen=True, array_like=True):
    """Usage of the tenants at one ingress."""

    ingress: str
    usage: Usage


class BlocksArguments(msgspec.Struct, frozen=True, array_like=True):
    """Blocks of a prompt, if its decode worker computes it too."""

    blocks: PromptBlocks | None


SETTINGS = RouterMethod("settings", NoArguments, LiveSettings)
STATUS = RouterMethod("status", NoArguments, dict[str, Any])
LIVE = RouterMethod("live", NoArguments, dict[str, Any])
EXPECT_COUNTS = RouterMethod("expect_counts", CountsShape, type(None))
SET_POLICY = RouterMethod("set_policy", PolicyArguments, LiveSettings)
SET_SHADOW = RouterMethod("set_shadow", ShadowArguments, LiveSettings)
SWAP_TABLE = RouterMethod("swap_table", TableArguments, LiveSettings)
SWAP_PREDICTOR = RouterMethod("swap_predictor", PredictorArguments, LiveSettings)
SHARE_LIMITS = RouterMethod("share_limits", UsageArguments, dict[str, Usage])
DECODE_LOADS = RouterMethod("decode_loads", BlocksArguments, DecodeLoads)
