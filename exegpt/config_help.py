"""One line for each way in which Hydra or OmegaConf refuses a configuration.

Their messages span lines, speak of classes, or advise `+KEY`, which cannot work with a typed
configuration. Here each becomes the key or override, what is allowed, and the nearest valid name. It
works on attributes and texts of the exceptions (hydra-core 1.3, omegaconf 2.3), so that this file
imports neither; a text it does not know is passed on as its first line.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
import re
import types
import typing
from collections.abc import Iterator
from enum import Enum
from typing import Any

from exegpt.errors import ExeGPTError
from exegpt.schemas import GROUPS, ExeGPTSchema

_WORDS = {int: "an integer", float: "a number", bool: "true or false", str: "text"}


def explain(error: BaseException) -> str | None:
    """Say in one line what is wrong with the configuration, where, and what is allowed.

    Parameters
    ----------
    error : exception
        Anything raised while overrides are parsed, or the configuration is composed or read.

    Returns
    -------
    str or None
        One line; for our own errors their message. None for an error that no configuration causes: a
        fault in the program, whose traceback must be seen.
    """
    if isinstance(error, ExeGPTError):
        return str(error)
    text = "\n".join(str(part) for part in _chain(error)).strip() or type(error).__name__
    if "Config group override must be" in text:  # a bare ValueError
        return (
            f"a group takes the name of one of its options, such as bound=tight; groups: {', '.join(GROUPS)}"
        )
    if type(error).__module__.split(".")[0] not in ("hydra", "omegaconf", "yaml"):
        return None
    if option := getattr(error, "missing_cfg_file", None):
        return _unknown_option(str(option), list(getattr(error, "options", None) or []), text)
    if override := getattr(error, "override", None):
        return _unreadable_override(str(getattr(override, "input_line", None) or override), text)
    if mark := getattr(error, "problem_mark", None):
        return (
            f"{mark.name}, line {mark.line + 1}: not YAML: {getattr(error, 'problem', None) or _reason(text)}"
        )
    if found := re.search(r"Ambiguous value for argument '(.*)'", text):
        key, _, values = found[1].partition("=")
        return f"{found[1]}: several values are a sweep (python launch.py -m ...); a list is {key}=[{values}]"
    if found := re.search(r"Multiple values for (\S+?)\. ", text):
        return (
            f"+{found[1]}=...: {found[1]} is a group that is chosen already; write {found[1]}=NAME without +"
        )
    if found := re.search(r"Could not append to config\. An item is already at '(.*?)'", text):
        return f"+{found[1]}=...: the key exists; write {found[1]}=VALUE without +"
    key = _full_key(text)
    source = _source(text)
    if key and re.search(r"Key '.*' (is )?not in ", text):
        return unknown_key(key) + source
    if key:
        return _wrong_value(key, text) + source
    return _reason(text)


def unknown_key(key: str) -> str:
    """Say that `key` does not exist, with the nearest keys, or those beside it if none is near."""
    head = f"{key}: no such key"
    if key.startswith("hydra."):
        return f"{head} in Hydra's own settings"
    parent, _, leaf = key.rpartition(".")
    schema = _schema_of(parent) or ExeGPTSchema
    place = f"{parent}." if _schema_of(parent) else ""
    beside = {name: place + name for name in typing.get_type_hints(schema)}
    beside |= {} if place else {group: group for group in GROUPS}
    # The key's own level first, then the same or a similar name anywhere.
    anywhere = {known.rpartition(".")[2]: known for known in reversed(list(all_keys()))}
    for names in (beside, anywhere):
        near = [leaf] if leaf in names else difflib.get_close_matches(leaf, names, n=2, cutoff=0.6)
        if near:
            return f"{head}; did you mean {' or '.join(names[name] for name in near)}?"
    return f"{head}; keys{f' of {parent}' if place else ''}: {', '.join(beside)}"


def expected(key: str) -> str | None:
    """What the value of `key` must be, in words; None for a key that does not exist."""
    key = re.sub(r"\[\d+\]", "", key)
    parent, _, name = key.rpartition(".")
    schema = _schema_of(parent) if parent else ExeGPTSchema
    hints = typing.get_type_hints(schema) if schema else {}
    if schema is None or name not in hints:
        return None
    default = next(field.default for field in dataclasses.fields(schema) if field.name == name)
    return _words(hints[name]) + (" (inf for none)" if default == math.inf else "")


def _words(hint: Any) -> str:
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        inner = [part for part in typing.get_args(hint) if part is not type(None)]
        return f"{_words(inner[0])} or null"
    if typing.get_origin(hint) is list:
        return "a list of integers such as [1,2]"
    if isinstance(hint, type) and issubclass(hint, Enum):
        return "one of " + ", ".join(hint.__members__)
    if dataclasses.is_dataclass(hint):
        return "a mapping with the keys " + ", ".join(field.name for field in dataclasses.fields(hint))
    return _WORDS.get(hint, "a value")


def _schema_of(key: str) -> type | None:
    """Schema of a node such as `workload.input`; None for a leaf or an unknown key."""
    schema: Any = ExeGPTSchema
    for name in key.split("."):
        schema = typing.get_type_hints(schema).get(name)
        if not dataclasses.is_dataclass(schema):
            return None
    return schema if isinstance(schema, type) else None


def all_keys(schema: Any = ExeGPTSchema, prefix: str = "") -> Iterator[str]:
    """Every key of the configuration, nodes before what is below them."""
    for name, hint in typing.get_type_hints(schema).items():
        yield prefix + name
        if dataclasses.is_dataclass(hint):
            yield from all_keys(hint, f"{prefix}{name}.")


def _chain(error: BaseException) -> Iterator[BaseException]:
    at: BaseException | None = error
    while at is not None:
        yield at
        at = at.__cause__


def _full_key(text: str) -> str | None:
    found = re.search(r"full_key: (\S+)", text)
    return found[1] if found else None


def _source(text: str) -> str:
    """The option file that Hydra was composing, if it says so."""
    found = re.search(r"In '(.*?)'", text)
    return f" (in {found[1]}.yaml)" if found else ""


def _wrong_value(key: str, text: str) -> str:
    override = re.search(r"Error merging override (.*)", text)
    said = override[1].strip() if override else key
    wanted = expected(key)
    if "missing mandatory value" in text.lower():
        return f"{key} has no value; give it {wanted}"
    if "does not support deletion" in text:
        return f"~{key}: a key cannot be deleted; set it instead: {wanted}"
    if "nterpolation" in text or wanted is None:
        return f"{said}: {_reason(text)}"
    value = re.search(r"[Vv]alue '(.*?)'", text)
    if not override and value:
        said = f"{key}={value[1]}"
    return f"{said}: expected {wanted}"


def _reason(text: str) -> str:
    """The line that says why: the first that is not Hydra's framing."""
    framing = (
        "Error merging override",
        "Error parsing override",
        "In '",
        "full_key:",
        "reference_type=",
        "object_type=",
    )
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return next((line for line in lines if not line.startswith(framing)), lines[0])


def _unknown_option(missing: str, options: list[str], text: str) -> str:
    group, _, name = missing.rpartition("/")
    if not options:
        return f"{missing}: no such configuration file{_source(text)}"
    near = difflib.get_close_matches(name, options, n=1, cutoff=0.5)
    hint = f" did you mean {near[0]}?" if near else ""
    place = "" if "In 'config'" in text else _source(text)
    return f"{group}={name}: no such option;{hint} options: {', '.join(options)}{place}"


def _unreadable_override(override: str, text: str) -> str:
    return (
        f"{override}: cannot be read as KEY=VALUE ({_reason(text)}); a list is KEY=[1,2], and a value with "
        "spaces or special characters is quoted twice: 'KEY=\"a b\"'"
    )
