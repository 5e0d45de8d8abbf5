"""Encode the messages between the pytest process and its worker processes as lines of JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TypeAlias

import msgspec
from msgspec import UNSET, Struct

from .messages import (
    Answer,
    ChangedTask,
    CheckTask,
    CollectivesTask,
    CompareTask,
    CompileTask,
    CountTask,
    DiagnoseTask,
    DrawTask,
    FactsTask,
    HoldTask,
    Json,
    PeaksTask,
    PerformTask,
    PrepareTask,
    ProfileTask,
    ReleaseTask,
    SampleTask,
    ShowTask,
    StopTask,
    Task,
    TimeTask,
    WindowTask,
)

AnyTask: TypeAlias = (
    CheckTask
    | TimeTask
    | HoldTask
    | WindowTask
    | ReleaseTask
    | CountTask
    | ChangedTask
    | SampleTask
    | CompileTask
    | ProfileTask
    | FactsTask
    | DrawTask
    | PrepareTask
    | PerformTask
    | ShowTask
    | CompareTask
    | PeaksTask
    | CollectivesTask
    | DiagnoseTask
    | StopTask
)
"""Any request to a worker process."""


def encode(message: Task | Answer) -> bytes:
    """Return the message as one line of JSON. Raise TypeError if JSON has no type for a value."""
    return json.dumps(plain(message)).encode() + b"\n"


def decode(line: bytes) -> Answer:
    """Return the message that a worker process sent."""
    answer: Answer = msgspec.convert(json.loads(line), Answer)
    return answer


def decode_task(line: bytes) -> AnyTask:
    """Return the task that `encode` wrote."""
    task: AnyTask = msgspec.convert(json.loads(line), AnyTask)
    return task


def plain(value: Json) -> Json:
    """Return `value` in JSON types: infinities as text, tuples as lists, structs as tables.

    Raises:
        TypeError: if `value` contains any other type.
    """
    if isinstance(value, float) and type(value) is float:
        return value if value - value == 0 else str(value)
    if isinstance(value, str):
        return str(value)  # torch's version is a subclass of str
    if value is None or type(value) in (bool, int):
        return value
    if isinstance(value, Mapping):
        return {str(k): plain(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(v) for v in value]
    if isinstance(value, Struct):
        config = value.__struct_config__
        tag = {config.tag_field: config.tag} if config.tag is not None else {}
        fields = {name: getattr(value, name) for name in value.__struct_fields__}
        return tag | {name: plain(v) for name, v in fields.items() if v is not UNSET}
    raise TypeError(f"{type(value).__name__} is not a plain type: {value!r:.80}")
