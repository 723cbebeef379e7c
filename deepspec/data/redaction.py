"""Redaction: a function text -> text that runs on every text of a prompt before it is hashed, compared or written.

``data.redaction=builtin`` replaces e-mail addresses, telephone numbers and keys; ``data.redaction=module:function``
names a function of your own, found in the working directory or among the installed packages. What is text: every
string value of the messages and tools except ``role`` and ``type``; and ids and domains that the rows bring.
"""

import importlib
import os
import re
import sys
from typing import Any, Callable, Optional

from deepspec.data.prompt_rows import RowRefused
from deepspec.errors import ConfigError, InputRefused

Redact = Callable[[str], str]
BUILTIN = "builtin"
_STRUCTURE = ("role", "type")
_PATTERNS = (
    (re.compile(r"-----BEGIN [A-Z ]*PRIVATE KEY-----.*?(?:-----END [A-Z ]*PRIVATE KEY-----|\Z)", re.DOTALL), "[KEY]"),
    (re.compile(r"\beyJ[\w-]{8,}\.[\w-]{8,}\.[\w-]*"), "[KEY]"),  # JSON web token
    (re.compile(r"(?i)\b(bearer\s+)[\w.~+/-]{16,}=*"), r"\1[KEY]"),
    (re.compile(r"\b(?:sk|pk|rk|hf|ghp|gho|ghs|ghu|github_pat|glpat|xox[abprs]|npm|pypi)[-_][\w-]{16,}"), "[KEY]"),
    (re.compile(r"\b(?:AKIA|ASIA)[0-9A-Z]{16}\b"), "[KEY]"),
    (re.compile(r"\bAIza[\w-]{35}"), "[KEY]"),
    (re.compile(r"(?i)\b((?:api[_-]?key|secret|token|passw(?:or)?d)[\"']?\s*[:=]\s*[\"']?)[^\s\"',;]{8,}"), r"\1[KEY]"),
    (re.compile(r"[\w.+%-]+@[\w-]+(?:\.[\w-]+)*\.[^\W\d_]{2,}"), "[EMAIL]"),
    # With a country code, or in the grouping of North America with dashes or dots: sums of numbers stay as they are.
    (re.compile(r"(?<![\w+])\+\d{1,3}[ .-]?(?:\(\d{1,4}\)[ .-]?)?\d(?:[ .-]?\d){6,11}(?!\w)"), "[PHONE]"),
    (re.compile(r"(?<![\w(])(?:\(\d{3}\) ?\d{3}[ .-]|\d{3}-\d{3}-|\d{3}\.\d{3}\.)\d{4}(?!\w)"), "[PHONE]"),
)


def builtin(text: str) -> str:
    """E-mail addresses, telephone numbers and keys replaced by [EMAIL], [PHONE] and [KEY]."""
    for pattern, replacement in _PATTERNS:
        text = pattern.sub(replacement, text)
    return text


def load_redaction(spec: Optional[str]) -> Optional[Redact]:
    """The function that ``data.redaction`` names, None for none. Raises ConfigError if there is no such function."""
    if spec is None:
        return None
    if spec == BUILTIN:
        return builtin
    module_name, _, name = spec.partition(":")
    inserted = os.getcwd()
    sys.path.insert(0, inserted)
    try:
        found = importlib.import_module(module_name)
        for part in name.split("."):
            found = getattr(found, part)
    except Exception as error:  # whatever a module of the user's raises while it is imported
        raise ConfigError(f"data.redaction={spec!r} cannot be imported ({type(error).__name__}: {error}). Give "
                          "module:function with a module in the working directory or an installed package.") from None
    finally:
        sys.path.remove(inserted)
    if not callable(found):
        raise ConfigError(f"data.redaction={spec!r} is a {type(found).__name__}, not a function text -> text.")
    return found


def redaction_file(spec: Optional[str]) -> Optional[str]:
    """The file that the redaction's code is in, where it is the user's own."""
    function = load_redaction(spec)
    if function is None or spec == BUILTIN:
        return None
    return getattr(sys.modules.get(getattr(function, "__module__", None) or ""), "__file__", None)


def _apply(redact: Redact, text: str, where: str) -> str:
    try:
        result = redact(text)
    except Exception as error:  # the user's function; its message is not shown, it may quote the text
        raise InputRefused(f"{where}: data.redaction raised {type(error).__name__}. Nothing of this row was written; "
                           "correct the function or remove the row.") from None
    if not isinstance(result, str):
        raise InputRefused(f"{where}: data.redaction returned {type(result).__name__}, expected text.")
    if any("\ud800" <= char <= "\udfff" for char in result):
        raise InputRefused(f"{where}: data.redaction returned a lone surrogate, which no file can hold.")
    return result


def redacted(value: Any, redact: Optional[Redact], where: str) -> Any:
    """``value`` (messages, tools, an id) with every text redacted. Raises InputRefused naming ``where``."""
    if redact is None:
        return value
    if isinstance(value, str):
        return _apply(redact, value, where)
    if isinstance(value, (list, tuple)):
        return [redacted(item, redact, where) for item in value]
    if isinstance(value, dict):
        return {key: item if key in _STRUCTURE and isinstance(item, str) else redacted(item, redact, where)
                for key, item in value.items()}
    return value


def require_text(messages: list[dict[str, Any]]) -> None:
    """Raises RowRefused for a user turn of which nothing is left."""
    if any(message["role"] == "user" and not message["content"].strip() for message in messages):
        raise RowRefused("nothing left after redaction")
