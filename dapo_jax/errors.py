"""Host: the error for wrong input."""


class InputError(ValueError):
    """The user's input is wrong. A command ends with exit code 2 and this message: name, value, rule, fix.

    Any other ValueError is a bug, or a failure that JAX reports that way.
    """
