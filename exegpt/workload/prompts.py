"""Prompts to answer: the shipped set, or a JSONL or text file of the user's."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

from exegpt.errors import TraceError
from exegpt.workload.files import KEY, file_kind, json_lines, parse_json, read_text


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """One prompt of a file.

    Attributes
    ----------
    id : str
        The file's own id, else the place in the file, from 0.
    prompt : str
        What the user asks, without chat template.
    kind : str or None
        A label of the file, such as `summary`.
    max_output_tokens : int or None
        The prompt's own limit.
    output_tokens : int or None
        Output length to force, end-of-sequence suppressed.
    error : str or None
        Why the prompt cannot be served; it becomes a request that fails, the others are served.
    """

    id: str
    prompt: str
    kind: str | None = None
    max_output_tokens: int | None = None
    output_tokens: int | None = None
    error: str | None = None


def read_prompts(path: Path) -> list[Prompt]:
    """Read prompts: JSONL (or a JSON list) or text by the file's name, each also with .gz appended.

    A JSON value is a string, or an object with `prompt` and optionally `id`, `kind`,
    `max_output_tokens` and `output_tokens`; other keys are not used. Text files (`.txt`) hold one
    prompt a line. Empty prompts are kept with their `error`; blank lines at the end are no prompts.

    Raises
    ------
    TraceError
        If the file cannot be read, a line is no prompt, or two ids are the same.
    """
    match file_kind(path):
        case ".jsonl" | ".ndjson":
            return _from_values(path, list(json_lines(path, read_text(path))))
        case ".json":
            data = parse_json(path, read_text(path))
            if not isinstance(data, list) or not data:
                raise TraceError(
                    f"{KEY}={path}: expected a list of prompts; one a line goes into a .jsonl file"
                )
            return _from_values(path, [(f"item {n}", value) for n, value in enumerate(data, start=1)])
        case ".txt":
            lines = read_text(path).rstrip().splitlines()
            return [_prompt(id=str(index), prompt=line.strip()) for index, line in enumerate(lines)]
        case kind:
            raise TraceError(
                f"{KEY}={path}: unknown kind of file {kind!r}; known: .jsonl, .json, .txt, each also with .gz"
            )


def default_prompts() -> list[Prompt]:
    """The prompts that are shipped with the package, written for it."""
    with resources.as_file(resources.files("exegpt.workload") / "data" / "prompts.jsonl") as path:
        return read_prompts(path)


def _from_values(path: Path, values: list[tuple[str, Any]]) -> list[Prompt]:
    prompts: list[Prompt] = []
    places: dict[str, str] = {}
    for index, (place, value) in enumerate(values):
        where = f"{KEY}={path}, {place}"
        prompt = _from_value(value, str(index), where)
        if prompt.id in places:
            raise TraceError(f"{where}: id {prompt.id!r} is that of {places[prompt.id]}; make it unique")
        places[prompt.id] = place
        prompts.append(prompt)
    return prompts


def _from_value(value: Any, place: str, where: str) -> Prompt:
    if isinstance(value, str):
        return _prompt(id=place, prompt=value)
    if not isinstance(value, dict):
        raise TraceError(f"{where}: expected a string or an object, found {type(value).__name__}")
    if not isinstance(value.get("prompt"), str):
        found = f"is {value['prompt']!r}"[:60] if "prompt" in value else "is missing"
        hint = "; `messages` are not read, give the user's text" if "messages" in value else ""
        raise TraceError(
            f"{where}: prompt {found}, expected text{hint}. Present: {', '.join(map(repr, value))}"[:300]
        )
    kind, own_id = value.get("kind"), value.get("id")
    if kind is not None and not isinstance(kind, str):
        raise TraceError(f"{where}: kind is {kind!r}, expected text")
    if own_id is not None and (not isinstance(own_id, str | int) or isinstance(own_id, bool)):
        raise TraceError(f"{where}: id is {own_id!r}, expected text or a whole number")
    return _prompt(
        id=place if own_id is None else str(own_id),
        prompt=value["prompt"],
        kind=kind,
        max_output_tokens=_count(value, "max_output_tokens", where),
        output_tokens=_count(value, "output_tokens", where),
    )


def _count(value: dict[str, Any], key: str, where: str) -> int | None:
    count = value.get(key)
    if count is None:
        return None
    if not isinstance(count, int) or isinstance(count, bool) or count < 1:
        raise TraceError(f"{where}: {key} is {count!r}, expected a whole number of at least 1 token")
    return count


def _prompt(**fields: Any) -> Prompt:
    error = None if fields["prompt"].strip() else "the prompt is empty"
    return Prompt(**fields, error=error)
