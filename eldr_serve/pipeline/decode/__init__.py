"""The decode of a request: a worker is leased and called, and the answer may move to another one."""
