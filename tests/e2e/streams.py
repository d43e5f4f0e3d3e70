"""Greedy answers of the running application, with the decode workers that give them."""

import json
from typing import Any

from tests.e2e.service import HTTP, Service, events

LONG = {"model": "eldr-demo", "max_tokens": 150, "temperature": 0, "ignore_eos": True, "stream": True}


def complete(service: Service, prompt: str) -> tuple[str, str]:
    """Return (the decode worker, its greedy answer)."""
    body = {"model": "eldr-demo", "prompt": prompt, "max_tokens": 24, "temperature": 0}
    answer = HTTP.post(f"{service.url}/v1/completions", json=body, timeout=120)
    assert answer.status_code == 200, answer.text
    return answer.headers["x-eldr-decode-worker"], str(answer.json()["choices"][0]["text"])


class Stream:
    """A streamed completion and its text so far."""

    def __init__(self, body: dict[str, Any]) -> None:
        self._body = LONG | body
        self.worker, self.text, self.events, self.error = "", "", 0, ""

    async def read(self, service: Service) -> None:
        async with service.post(self._body) as response:
            assert response.status_code == 200
            self.worker = response.headers["x-eldr-decode-worker"]
            async for data in events(response):
                if data != "[DONE]":
                    event = json.loads(data)
                    self.error = event.get("error", {}).get("type", "")
                    self.text += "" if self.error else event["choices"][0]["text"]
                    self.events += 1
