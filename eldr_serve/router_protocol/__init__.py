"""The messages between the DecodeRouter actor and its clients, and the methods with their arguments."""
