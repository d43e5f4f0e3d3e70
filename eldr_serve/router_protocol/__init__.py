"""What the DecodeRouter actor and its clients send each other: messages, and methods with their arguments."""
