"""Fault injection: the serving code on virtual time, and the whole application under SIGKILL and SIGSTOP."""
