"""Errors a user can cause. Each is one paragraph: what, where, the value, what to do; no traceback is shown."""


class UserError(Exception):
    """Something the user can mend; the message is the whole report."""

    exit_code = 1


class ConfigError(UserError):
    """A wrong option, command line or combination of options (exit code 2)."""

    exit_code = 2


class InputRefused(UserError):
    """Data, a checkpoint or an artifact that cannot be used for what was asked (exit code 3)."""

    exit_code = 3
