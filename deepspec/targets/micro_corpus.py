"""Conversations about the Python standard library, read from its own sources: text that every machine has."""

import ast
import random
import sysconfig
import textwrap
from dataclasses import dataclass
from pathlib import Path
from typing import Iterator

from deepspec.errors import InputRefused

_SKIPPED = {"test", "tests", "idlelib", "lib2to3", "site-packages", "dist-packages", "turtledemo", "ensurepip",
            "__pycache__", "pydoc_data", "encodings"}
_BODY_LIMIT = 900  # characters; longer bodies would rarely end within a sample
_DOC_LIMIT = 700
_MIN_CONVERSATIONS = 500  # a Python without its sources has fewer

Message = dict[str, str]


@dataclass(frozen=True)
class _Function:
    module: str
    name: str
    signature: str
    doc: str
    body: str


def conversations(seed: int) -> list[list[Message]]:
    """Chats about documented functions and classes: writing one from its docstring, explaining one, and both in turn.

    The order is a function of ``seed`` alone. Raises InputRefused when Python's sources are not on this machine.
    """
    root = Path(sysconfig.get_paths()["stdlib"])
    chats: list[list[Message]] = []
    random_numbers = random.Random(seed)
    for path in sorted(root.rglob("*.py"), key=lambda item: item.relative_to(root).as_posix()):
        parts = path.relative_to(root).parts
        if _SKIPPED.intersection(parts):
            continue
        for function in _functions(path, ".".join(parts).removesuffix(".py").removesuffix(".__init__")):
            chats.extend(_chats(function, random_numbers))
    if len(chats) < _MIN_CONVERSATIONS:
        raise InputRefused(
            f"The micro target learns from the sources of Python's standard library, but {root} gives only "
            f"{len(chats)} conversations. Install a Python that comes with its sources."
        )
    random_numbers.shuffle(chats)
    return chats


def _functions(path: Path, module: str) -> Iterator[_Function]:
    try:
        source = path.read_text(encoding="utf-8")
        tree = ast.parse(source)
    except (SyntaxError, ValueError):
        return  # a few files are templates, or in other encodings
    lines = source.splitlines()
    for node in ast.walk(tree):
        if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) or len(node.body) < 2:
            continue
        doc = ast.get_docstring(node)
        if not doc or not doc.isascii():
            continue
        signature = textwrap.dedent("\n".join(lines[node.lineno - 1:node.body[0].lineno - 1])).strip()
        # Not textwrap.dedent: the lines of a multi-line string may start anywhere.
        indent = " " * node.body[1].col_offset
        body = "\n".join(line.removeprefix(indent) for line in lines[node.body[1].lineno - 1:node.end_lineno]).rstrip()
        if signature.endswith(":") and 0 < len(body) <= _BODY_LIMIT and body.isascii():
            yield _Function(module, node.name, signature, doc[:_DOC_LIMIT].strip(), body)


def _chats(function: _Function, random_numbers: random.Random) -> Iterator[list[Message]]:
    """One or two conversations about ``function``."""
    first = function.doc.splitlines()[0].strip()
    rest = "\n".join(function.doc.splitlines()[1:]).strip()
    quoted = textwrap.indent(f'"""{function.doc}"""', "    ")
    write = [
        _message("user", f"Complete this function.\n{function.signature}\n{quoted}"),
        _message("assistant", function.body),
    ]
    answer = f"{first}\n{rest}".strip() + f"\n{function.signature}"
    explain = [
        _message("user", f"What does {function.name} of {function.module} do?"),
        _message("assistant", answer),
    ]
    if random_numbers.random() < 0.1:
        yield explain + write
        return
    yield write
    yield explain


def _message(role: str, content: str) -> Message:
    return {"role": role, "content": content}
