"""Host: the error that means wrong input."""


class InputError(ValueError):
    """What a run was given is wrong: a command ends with exit code 2 and this message (name, value, rule, cure).

    A ValueError of another class is a bug, or a failure that JAX reports so.
    """
