"""Calls of the DecodeRouter actor on behalf of operators."""

from __future__ import annotations

from typing import Any

from eldr_serve.channel import CallFailedError
from eldr_serve.errors import SwapRefusedError
from eldr_serve.router_client.subscription import RouterSubscription
from eldr_serve.router_protocol import methods
from eldr_serve.router_protocol.messages import LiveSettings, NamedPolicy
from eldr_serve.router_protocol.methods import Arguments, RouterMethod


class OperatorCalls:
    """Calls methods of the DecodeRouter actor with the same names; for exceptions see RouterCalls.call."""

    def __init__(self, subscription: RouterSubscription) -> None:
        self._subscription = subscription

    async def status(self) -> dict[str, Any]:
        return await self._subscription.call(methods.STATUS, methods.NoArguments())

    async def live(self) -> dict[str, Any]:
        return await self._subscription.call(methods.LIVE, methods.NoArguments())

    async def settings(self) -> LiveSettings:
        """Return the live settings at the actor, which may be newer than the ingress's settings."""
        return await self._subscription.call(methods.SETTINGS, methods.NoArguments())

    async def set_policy(self, policy: str, parameters: dict[str, Any]) -> LiveSettings:
        return await self._change(methods.SET_POLICY, methods.PolicyArguments(policy, parameters))

    async def set_shadow(self, shadow: NamedPolicy | None) -> LiveSettings:
        return await self._change(methods.SET_SHADOW, methods.ShadowArguments(shadow))

    async def swap_table(self, table: bytes) -> LiveSettings:
        await self._subscription.send_shape()
        return await self._change(methods.SWAP_TABLE, methods.TableArguments(table))

    async def swap_predictor(self, predictor: bytes, tokenizer: str) -> LiveSettings:
        await self._subscription.send_shape()
        return await self._change(methods.SWAP_PREDICTOR, methods.PredictorArguments(predictor, tokenizer))

    async def _change(
        self, method: RouterMethod[Arguments, LiveSettings], arguments: Arguments
    ) -> LiveSettings:
        """Change the live settings; raise SwapRefusedError if the actor refuses the new ones."""
        try:
            return await self._subscription.call(method, arguments)
        except CallFailedError as error:
            if error.status < 500:
                raise SwapRefusedError(error.body.decode()) from None
            raise
