"""Run vLLM engines that count experts: the implementation of `eldr_serve.engine.protocol`.

An engine has processes of three kinds; an engine of one rank on a CPU has the last two in one process.

- The replica, a Ray actor with vLLM's client of its engine core: `engine` with `first_token`, `continuation`,
  `plain_stream` and `request_parsing`; the metrics in `stats`, and `measurements`.
- The engine core with vLLM's scheduler: `scheduler`, and `connector` with its `connector_scheduler`.
- A worker for each rank: `worker`, `gpu_worker`, `ep`, and `connector` with its `connector_worker`.

In each step the core sends the workers a plan, and the first worker returns counts (`connector_metadata`).
The core adds the counts of a request to its answer. Step records, KV usage and the counts of whole engines
go to the replica with vLLM's statistics (`stats`): to Prometheus, and through `measurements` to `engine`.

The other modules configure, check and describe engines, without a running one.
"""
