"""Strict YAML: duplicate keys, unknown tags and keys that are not text are rejected.

Scalars follow YAML 1.2's core schema, so that ``off`` and ``no`` are text, ``1e-3`` is a number and
``12:30`` is not. The reader keeps the line of every value, for error messages."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from hps.config.checks import Path as KeyPath
from hps.config.config_errors import ConfigProblem, InvalidConfiguration
from hps.errors import ConfigError

_Loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
# A document with more values is an anchor bomb, not a configuration.
MAX_VALUES = 2_000_000
_MERGE = "tag:yaml.org,2002:merge"

_RESOLVERS: list[tuple[str, str, str]] = [
    ("bool", r"^(?:true|True|TRUE|false|False|FALSE)$", "tTfF"),
    ("int", r"^(?:[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+)$", "-+0123456789"),
    ("float", r"^[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?$", "-+0123456789."),
    ("float", r"^(?:[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN))$", "-+."),
    ("null", r"^(?:~|null|Null|NULL|)$", "~nN\0"),
    ("merge", r"^<<$", "<"),
]


class _StrictLoader(_Loader):  # type: ignore[misc, valid-type] # C or Python, by what is there
    yaml_implicit_resolvers: dict[str, Any] = {}  # noqa: RUF012 - PyYAML's own protocol
    _merged = 0

    def flatten_mapping(self, node: Any) -> None:
        """PyYAML's merge with a bound: nested merges grow with the number of paths through them."""
        for key, value in node.value:
            if key.tag != _MERGE:
                continue
            for each in value.value if isinstance(value, yaml.SequenceNode) else [value]:
                if isinstance(each, yaml.MappingNode):
                    self.flatten_mapping(each)
                    self._merged += len(each.value)
                    if self._merged > MAX_VALUES:
                        problem = f"more than {MAX_VALUES} values"
                        raise yaml.constructor.ConstructorError(
                            problem=problem, problem_mark=key.start_mark
                        )
        super().flatten_mapping(node)


class _YamlDumper(yaml.SafeDumper):
    """Dumper that quotes text which a YAML reader, 1.1 or 1.2, would not read as text."""

    def increase_indent(self, flow: bool = False, indentless: bool = False) -> None:
        super().increase_indent(flow, False)


for _tag, _pattern, _first in _RESOLVERS:
    _compiled = re.compile(_pattern)
    for _character in _first:
        _key = "" if _character == "\0" else _character
        _StrictLoader.yaml_implicit_resolvers.setdefault(_key, []).append(
            (f"tag:yaml.org,2002:{_tag}", _compiled)
        )
    _YamlDumper.add_implicit_resolver(
        f"tag:yaml.org,2002:{_tag}", _compiled, ["" if c == "\0" else c for c in _first]
    )


@dataclass
class YamlDocument:
    """A file's values and their lines (counted from 1).

    ``faults``: keys that are duplicate or not text. ``data`` holds the other values, so that the caller can
    report all errors together."""

    data: Any
    lines: dict[KeyPath, int] = field(default_factory=dict)
    faults: list[ConfigProblem] = field(default_factory=list)


def dump_yaml(data: Any) -> str:
    """Dump in block style; keys keep their order."""
    return yaml.dump(
        data,
        Dumper=_YamlDumper,
        sort_keys=False,
        default_flow_style=None,
        width=100,
    )


def read_text(path: Path, what: str = "configuration file") -> str:
    """Read the file's text. Raises ConfigError with the reason."""
    try:
        return path.read_bytes().decode("utf-8-sig")
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such {what}") from None
    except IsADirectoryError:
        raise ConfigError(f"{path}: is a folder; expected a {what}") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: is not UTF-8 text (byte {error.start})") from None
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from None


def parse_yaml(text: str, name: str) -> YamlDocument:
    """Parse one YAML document; its ConfigErrors have ``name``, line and column."""
    document = parse_leniently(text, name)
    if document.faults:
        raise InvalidConfiguration(document.faults)
    return document


def read_yaml(path: Path, what: str = "configuration file") -> YamlDocument:
    """Read the file's document; the caller must reject its ``faults``."""
    return parse_leniently(read_text(path, what), str(path))


def parse_leniently(text: str, name: str) -> YamlDocument:
    """Like ``parse_yaml``, but invalid keys become ``YamlDocument.faults``."""
    loader = _StrictLoader(text)
    try:
        node = loader.get_single_node()
        document = YamlDocument(None)
        if node is not None:
            builder = _YamlBuilder(loader, name, document)
            builder.check_keys(node)
            document.data = builder.build(node, ())
        return document
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f"{name}:{mark.line + 1}:{mark.column + 1}" if mark else name
        detail = " ".join(part for part in (error.problem, error.context) if part)
        raise ConfigError(f"{where}: not valid YAML: {detail}") from None
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        raise ConfigError(f"{name}:{line}: not valid YAML: {error.reason}") from None
    except (yaml.YAMLError, ValueError) as error:
        raise ConfigError(f"{name}: not valid YAML: {error}") from None
    except RecursionError:
        raise ConfigError(f"{name}: not valid YAML: nested too deeply") from None
    finally:
        loader.dispose()


class _YamlBuilder:
    """Convert a node tree to values and their lines."""

    def __init__(self, loader: Any, name: str, document: YamlDocument) -> None:
        self._loader = loader
        self._name = name
        self._lines = document.lines
        self._faults = document.faults
        self._open: set[int] = set()

    def check_keys(self, root: yaml.Node) -> None:
        """Record duplicate keys and keys that are not text. Run it before merging, which repeats keys."""
        todo, done = [root], set()
        while todo:
            node = todo.pop()
            if isinstance(node, yaml.ScalarNode) or id(node) in done:
                continue
            done.add(id(node))
            if isinstance(node, yaml.SequenceNode):
                todo += reversed(node.value)
                continue
            seen: dict[str, int] = {}
            for key, _ in node.value:
                self._check_key(key, seen)
            todo += [value for _, value in reversed(node.value)]

    def _check_key(self, key: yaml.Node, seen: dict[str, int]) -> None:
        if key.tag == _MERGE:
            return
        if not _is_text(key):
            message = f"the key {_shown(key)} must be text; put it in quotes"
            self._faults.append(ConfigProblem(self._place(key), (), message))
        elif key.value in seen:
            message = f"duplicate key {key.value!r}, also on line {seen[key.value]}"
            self._faults.append(ConfigProblem(self._place(key), (), message))
        else:
            seen[key.value] = key.start_mark.line + 1

    def build(self, node: yaml.Node, path: KeyPath) -> Any:
        if isinstance(node, yaml.ScalarNode):
            return self._scalar(node)
        if id(node) in self._open:
            raise self._error(node, "an anchor contains itself")
        self._open.add(id(node))
        if isinstance(node, yaml.SequenceNode):
            value: Any = [self._child(n, (*path, i), n) for i, n in enumerate(node.value)]
        else:
            value = self._mapping(node, path)
        self._open.discard(id(node))
        return value

    def _child(self, node: yaml.Node, path: KeyPath, mark_of: yaml.Node) -> Any:
        self._lines[path] = mark_of.start_mark.line + 1
        if len(self._lines) > MAX_VALUES:
            raise self._error(node, f"more than {MAX_VALUES} values")
        return self.build(node, path)

    def _mapping(self, node: yaml.Node, path: KeyPath) -> dict[str, Any]:
        if node.tag != "tag:yaml.org,2002:map":
            raise self._error(node, f"tag {node.tag} is not supported")
        self._loader.flatten_mapping(node)
        # Merged keys come first, so that the mapping's keys win.
        return {
            key.value: self._child(n, (*path, key.value), key)
            for key, n in node.value
            if _is_text(key)
        }

    def _scalar(self, node: yaml.ScalarNode) -> Any:
        kind = node.tag.removeprefix("tag:yaml.org,2002:")
        text = node.value
        if kind == "str":
            return text
        if kind == "bool":
            return text.lower() == "true"
        if kind == "null":
            return None
        if kind == "int":
            return int(text, 0) if text[:2] in ("0o", "0x") else int(text)
        if kind == "float":
            return float(text.lower().replace(".inf", "inf").replace(".nan", "nan"))
        raise self._error(node, f"tag {node.tag} is not supported")

    def _error(self, node: yaml.Node, message: str) -> ConfigError:
        return ConfigError(f"{self._place(node)}: {message}")

    def _place(self, node: yaml.Node) -> str:
        mark = node.start_mark
        return f"{self._name}:{mark.line + 1}:{mark.column + 1}"


def _is_text(key: yaml.Node) -> bool:
    return isinstance(key, yaml.ScalarNode) and key.tag == "tag:yaml.org,2002:str"


def _shown(node: yaml.Node) -> str:
    return node.value if isinstance(node, yaml.ScalarNode) else "here"
