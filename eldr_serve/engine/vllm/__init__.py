"""vLLM: the extension that makes it count experts, and the implementation of `eldr_serve.engine.protocol`.

Connector, scheduler, worker and the modules that they use run in vLLM's engine processes; `engine` and the
modules that it uses run in the replica, beside vLLM's client of these processes.
"""
