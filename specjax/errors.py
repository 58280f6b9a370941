"""The errors a user can cause. Programs print them as one line and exit with 2."""


class SpecjaxError(ValueError):
    """A mistake in what was asked for: the message names the value and the way out."""


class ModelError(SpecjaxError):
    """A model directory, configuration or tensor that cannot be used."""


class PairError(SpecjaxError):
    """A drafter, target distribution, rule or model that does not fit the others."""


class OptionError(SpecjaxError):
    """An unknown method or option, or a value out of its range."""


class InputError(SpecjaxError):
    """A file, a config or a path that a program cannot use."""
