"""vLLM: the extension that makes it count experts, and its side of `eldr_serve.engine.protocol`.

Inside vLLM's processes run the connector, scheduler, worker and what they use; `engine` and what it uses run
in the replica, beside vLLM's client of them.
"""
