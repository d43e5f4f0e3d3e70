"""The answer: a decode worker is leased and called; an answer may move to another one."""
