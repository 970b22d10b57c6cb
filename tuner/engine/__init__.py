"""The server under test: starting it, knowing it, ending it."""
