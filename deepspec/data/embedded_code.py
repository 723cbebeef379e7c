"""Code prompts from the signatures and docstrings of Python's standard library, read as text: nothing is imported.

Which functions there are depends on the Python version; within one version the order is fixed.
"""

import ast
import hashlib
import sysconfig
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Iterator, Union

# Modules whose functions can be understood from their own documentation.
MODULES: tuple[str, ...] = (
    "abc", "argparse", "ast", "base64", "bisect", "bdb", "calendar", "cgi", "cmd", "codecs", "collections/__init__",
    "colorsys", "concurrent/futures/_base", "configparser", "contextlib", "copy", "copyreg", "csv", "dataclasses",
    "datetime", "_pydatetime", "_pydecimal", "decimal", "difflib", "dis", "doctest", "email/header", "email/message",
    "email/utils", "enum", "filecmp", "fileinput", "fnmatch", "fractions", "ftplib", "functools", "genericpath",
    "getopt", "getpass", "gettext", "glob", "graphlib", "gzip", "hashlib", "heapq", "hmac", "html/__init__",
    "html/parser", "http/client", "http/cookiejar", "http/server", "imaplib", "inspect", "ipaddress", "json/__init__",
    "json/decoder", "json/encoder", "keyword", "linecache", "locale", "logging/__init__", "logging/handlers", "mailbox",
    "mimetypes", "netrc", "ntpath", "numbers", "operator", "optparse", "os", "pathlib", "pdb", "pickle", "pickletools",
    "pkgutil", "plistlib", "posixpath", "pprint", "profile", "pstats", "queue", "quopri", "random", "re/__init__",
    "reprlib", "sched", "secrets", "selectors", "shelve", "shlex", "shutil", "smtplib", "socket", "socketserver",
    "statistics", "string", "stringprep", "subprocess", "symtable", "tabnanny", "tarfile", "tempfile", "textwrap",
    "threading", "timeit", "tokenize", "trace", "traceback", "types", "typing", "turtle", "unittest/case",
    "unittest/mock", "urllib/parse", "urllib/request", "urllib/robotparser", "uuid", "wave", "warnings", "weakref",
    "webbrowser", "xml/dom/minidom", "xml/etree/ElementTree", "xml/sax/saxutils", "zipfile", "zipfile/__init__",
    "zipimport", "asyncio/base_events", "asyncio/events", "asyncio/locks", "asyncio/queues", "asyncio/streams",
    "asyncio/tasks", "multiprocessing/managers", "multiprocessing/pool", "importlib/util", "importlib/abc", "pydoc",
    "pyclbr", "py_compile", "compileall", "zipapp", "venv/__init__", "wsgiref/util", "wsgiref/headers", "sqlite3/dump",
    "stat", "struct", "smtpd", "poplib", "nntplib", "telnetlib", "crypt", "imghdr", "sndhdr", "chunk", "aifc", "sunau",
)
_SHORTEST_DOC, _LONGEST_DOC = 50, 700

_TASKS: tuple[str, ...] = (
    "Write a Python function `{signature}` that does the following:\n\n{doc}",
    "Implement this in Python.\n\n```python\ndef {signature}:\n    \"\"\"{doc}\"\"\"\n```",
    "I need a Python function called `{name}`. Its documentation should read:\n\n{doc}\n\nPlease write it, with the "
    "signature `{signature}`, and explain the important lines.",
)
_METHOD_TASKS: tuple[str, ...] = (
    "Write a Python class `{owner}` with a method `{signature}`. The method should do this:\n\n{doc}",
    "Implement the method `{name}` of a Python class `{owner}`:\n\n```python\ndef {signature}:\n"
    "    \"\"\"{doc}\"\"\"\n```",
)
_FOLLOWING_TASKS: tuple[str, ...] = (
    "Write unit tests with pytest for a function `{signature}` that is documented like this:\n\n{doc}",
    "Explain with two short examples what a Python function `{signature}` does, given its documentation:\n\n{doc}",
)


@dataclass(frozen=True)
class _Function:
    module: str
    owner: str  # class, or "" for a function
    name: str
    signature: str
    doc: str

    @property
    def key(self) -> str:
        return f"{self.module}.{self.owner}.{self.name}"


def code_prompts(seed: int) -> Iterator[dict[str, Any]]:
    """Every function once as a task to implement it, in an order chosen by ``seed``; then tests and explanations."""
    functions = sorted(_functions(), key=lambda item: _hash(seed, item.key))
    for function in functions:
        yield {"prompt": _phrase(function, _METHOD_TASKS if function.owner else _TASKS)}
    for function in functions:
        if not function.owner:
            yield {"prompt": _phrase(function, _FOLLOWING_TASKS)}


def _hash(seed: int, key: str) -> bytes:
    return hashlib.sha256(f"{seed}\x1f{key}".encode()).digest()


def _phrase(function: _Function, tasks: tuple[str, ...]) -> str:
    task = tasks[_hash(0, function.key)[0] % len(tasks)]
    return task.format(signature=function.signature, name=function.name, owner=function.owner, doc=function.doc)


@cache
def _functions() -> tuple[_Function, ...]:
    root = Path(sysconfig.get_paths()["stdlib"])
    found: dict[str, _Function] = {}  # by docstring: many are repeated word for word in subclasses
    for module in MODULES:
        path = root / f"{module}.py"
        if path.exists():
            for function in _from_source(module, path.read_text(encoding="utf-8", errors="replace")):
                found.setdefault(function.doc, function)
    return tuple(found.values())


def _from_source(module: str, source: str) -> Iterator[_Function]:
    for node in ast.parse(source).body:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            yield from _usable(module, "", node)
        elif isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
            for member in node.body:
                if isinstance(member, (ast.FunctionDef, ast.AsyncFunctionDef)):
                    yield from _usable(module, node.name, member)


def _usable(module: str, owner: str, node: Union[ast.FunctionDef, ast.AsyncFunctionDef]) -> Iterator[_Function]:
    doc = (ast.get_docstring(node) or "").strip()
    if node.name.startswith("_") or not _SHORTEST_DOC <= len(doc) <= _LONGEST_DOC:
        return
    yield _Function(module, owner, node.name, f"{node.name}({ast.unparse(node.args)})", doc)
