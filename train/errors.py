"""The one error that the training programs print instead of a traceback."""


class InputError(ValueError):
    """A user's mistake in a file, an option or a path; programs print it in one line, exit 2."""
