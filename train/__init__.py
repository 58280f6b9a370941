"""The training programs, a room each."""
