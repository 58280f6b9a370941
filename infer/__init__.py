"""The inference programs, a room each."""
