"""What the schema says about its options, for ``--help``: the comments beside them, with type and default."""

import inspect
import re
from dataclasses import fields, is_dataclass
from typing import Any, Iterator, NamedTuple, get_args, get_origin, get_type_hints

from deepspec.config.schema import Config

_FIELD = re.compile(r"^    (\w+): [^#]*?(?:  # (.*))?$")


class Option(NamedTuple):
    """An option, what it is about, and the class of its elements where it is a list of groups."""

    key: str
    comment: str
    element: Any = None


def comments(cls: Any) -> dict[str, str]:
    """Comment of each field of a dataclass: what stands behind it, with the lines before it."""
    found: dict[str, str] = {}
    above: list[str] = []
    name = ""
    for line in inspect.getsource(cls).splitlines():
        field = _FIELD.match(line)
        if line.startswith("    # "):
            above.append(line[6:])
        elif field is not None and field[1] in cls.__dataclass_fields__:
            name = field[1]
            found[name] = " ".join([*above, *([field[2]] if field[2] else [])])
            above = []
        else:
            above = []
    return found


def about(section: str) -> str:
    """First sentence of what a config group is about."""
    doc = inspect.getdoc(get_type_hints(Config)[section]) or ""
    return " ".join(doc.split("\n\n")[0].split()).replace("``", "")


def described(cls: Any, prefix: str) -> Iterator[Option]:
    """All options below ``prefix`` in the schema's order."""
    hints, said = get_type_hints(cls), comments(cls)
    for field in fields(cls):
        key, kind = f"{prefix}.{field.name}", hints[field.name]
        if is_dataclass(kind):
            yield from described(kind, key)
            continue
        element = get_args(kind)[0] if get_origin(kind) is list and is_dataclass(get_args(kind)[0]) else None
        yield Option(key, said[field.name].replace("``", ""), element)
        if element is not None:
            yield from described(element, f"{key}.N")


def section_class(section: str) -> Any:
    """The dataclass of a config group."""
    return get_type_hints(Config)[section]
