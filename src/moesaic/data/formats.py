"""Files, folders and dataset names to rows; rows of four formats to conversations.

| format              | columns needed            | also read                    |
|---------------------|---------------------------|------------------------------|
| `messages`          | messages                  |                              |
| `prompt_completion` | prompt, completion        |                              |
| `alpaca`            | instruction, output       | input, system, history       |
| `sharegpt`          | conversations             | system                       |

Under ``stage: pt`` a row is a document instead: the column ``text``, or a whole ``.txt`` file.

JSON is read here rather than by ``datasets``, whose reader turns text that looks like a date into a timestamp and gives
up on a file in which one line is malformed. Parquet, folders and names are its job.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

ROLES = ("system", "user", "assistant")

SHAREGPT_ROLES = {
    "system": "system",
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
}

# Fields that change what the model should see or learn, and that nothing here honours yet. A row that uses one is bad:
# training on it while ignoring the field would teach something else than the author meant.
UNSUPPORTED_ROW_FIELDS = ("tools", "images", "videos", "audios")
UNSUPPORTED_TURN_FIELDS = ("tool_calls", "function_call", "reasoning_content", "thinking", "weight", "loss_weight")
_NEUTRAL_VALUES: tuple[Any, ...] = (None, "", [], {}, 1)


class SampleError(ValueError):
    """Why one sample can't be trained on. Caught where the report is made; never leaves this package."""


@dataclass(frozen=True, slots=True)
class Message:
    """One turn: ``role`` is one of ``ROLES``; ``content`` isn't blank."""

    role: str
    content: str


@dataclass(frozen=True, slots=True)
class UnreadableRow:
    """Stands for a line that isn't JSON, so that it is named among the bad samples."""

    reason: str


class Rows(Protocol):
    """Rows of a dataset: mappings, or whatever else a file held."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Any: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Format:
    """A known layout of rows: the columns that identify it, those it may also read, and its conversion."""

    required: tuple[str, ...]
    optional: tuple[str, ...] = ()
    convert: Callable[[Mapping[str, Any]], list[Message]]


# --- rows to conversations -------------------------------------------------------------------------------------------


def to_messages(row: object, format_name: str) -> list[Message]:
    """Convert one row and check it: an optional system turn, then user and assistant in turns, at least one of each.

    Raises:
        SampleError: with the reason.
    """
    if isinstance(row, UnreadableRow):
        raise SampleError(row.reason)
    if not isinstance(row, Mapping):
        raise SampleError(f"expected an object with columns, got {type(row).__name__}")
    refuse_fields(row, UNSUPPORTED_ROW_FIELDS, "row")
    messages = FORMATS[format_name].convert(row)
    _check_roles(messages)
    return messages


def _check_roles(messages: Sequence[Message]) -> None:
    turns = messages[1:] if messages and messages[0].role == "system" else messages
    if not turns:
        raise SampleError("empty: no user or assistant turn")
    for turn, message in enumerate(turns):
        expected = ("user", "assistant")[turn % 2]
        if message.role != expected:
            raise SampleError(
                f"wrong roles: turn {turn} is {message.role!r}, expected {expected!r} "
                "(an optional system turn first, then user and assistant in turns)"
            )
    if len(turns) < 2:
        raise SampleError("no assistant turn")


def refuse_fields(fields: Mapping[str, Any], names: Sequence[str], where: str) -> None:
    """Refuse a row, or a turn of it (``where``), that uses one of ``names``.

    Raises:
        SampleError: with the first that it uses.
    """
    for name in names:
        if fields.get(name) not in _NEUTRAL_VALUES:
            raise SampleError(f"{where} uses {name!r}, which is not supported")


def _text(value: object, where: str) -> str:
    if isinstance(value, Sequence) and not isinstance(value, str):
        # The form of multimodal messages; parts other than text would be lost.
        if not all(isinstance(part, Mapping) and part.get("type") == "text" for part in value):
            raise SampleError(f"{where}: only text content is supported")
        value = "".join(_text(part.get("text"), where) for part in value)
    if value is None:
        raise SampleError(f"{where}: missing")
    if not isinstance(value, str):
        raise SampleError(f"{where}: expected text, got {type(value).__name__}")
    if not value.strip():
        raise SampleError(f"{where}: empty")
    return value


def _turns(row: Mapping[str, Any], column: str) -> list[Mapping[str, Any]]:
    turns = row.get(column)
    if turns is None:
        raise SampleError(f"{column}: missing")
    if isinstance(turns, str) or not isinstance(turns, Sequence):
        raise SampleError(f"{column}: expected a list of turns, got {type(turns).__name__}")
    for number, turn in enumerate(turns):
        if not isinstance(turn, Mapping):
            raise SampleError(f"{column}[{number}]: expected an object, got {type(turn).__name__}")
        refuse_fields(turn, UNSUPPORTED_TURN_FIELDS, f"{column}[{number}]")
    return list(turns)


def _system(row: Mapping[str, Any]) -> list[Message]:
    return [Message("system", _text(row["system"], "system"))] if row.get("system") else []


def _from_messages(row: Mapping[str, Any]) -> list[Message]:
    messages = []
    for number, turn in enumerate(_turns(row, "messages")):
        role = turn.get("role")
        if role not in ROLES:
            raise SampleError(f"messages[{number}].role: {role!r} is not one of {', '.join(ROLES)}")
        messages.append(Message(role, _text(turn.get("content"), f"messages[{number}].content")))
    return messages


def _from_sharegpt(row: Mapping[str, Any]) -> list[Message]:
    messages = _system(row)
    for number, turn in enumerate(_turns(row, "conversations")):
        speaker = turn.get("from")
        if not isinstance(speaker, str) or speaker not in SHAREGPT_ROLES:
            known = ", ".join(SHAREGPT_ROLES)
            raise SampleError(f"conversations[{number}].from: {speaker!r} is not one of {known}")
        content = _text(turn.get("value"), f"conversations[{number}].value")
        messages.append(Message(SHAREGPT_ROLES[speaker], content))
    return messages


def _from_prompt_completion(row: Mapping[str, Any]) -> list[Message]:
    return [
        Message("user", _text(row.get("prompt"), "prompt")),
        Message("assistant", _text(row.get("completion"), "completion")),
    ]


def _from_alpaca(row: Mapping[str, Any]) -> list[Message]:
    messages = _system(row)
    for number, pair in enumerate(row.get("history") or []):
        if isinstance(pair, str) or not isinstance(pair, Sequence) or len(pair) != 2:
            raise SampleError(f"history[{number}]: expected [instruction, answer]")
        messages.append(Message("user", _text(pair[0], f"history[{number}][0]")))
        messages.append(Message("assistant", _text(pair[1], f"history[{number}][1]")))
    prompt = _text(row.get("instruction"), "instruction")
    if row.get("input"):
        prompt = f"{prompt}\n{_text(row['input'], 'input')}"
    return [*messages, Message("user", prompt), Message("assistant", _text(row.get("output"), "output"))]


FORMATS: Mapping[str, Format] = {
    "messages": Format(required=("messages",), convert=_from_messages),
    "prompt_completion": Format(required=("prompt", "completion"), convert=_from_prompt_completion),
    "alpaca": Format(required=("instruction", "output"), optional=("input", "system", "history"), convert=_from_alpaca),
    "sharegpt": Format(required=("conversations",), optional=("system",), convert=_from_sharegpt),
}


def detect_format(columns: Iterable[str], format_name: str = "auto") -> str:
    """The one known format whose required columns are all there; or ``format_name``, checked.

    Raises:
        ValueError: no format fits, or several do, or the named one doesn't; with the columns and the known formats.
    """
    columns = sorted(columns)
    known = "; ".join(f"{name}: {', '.join(known.required)}" for name, known in FORMATS.items())
    if format_name != "auto" and format_name not in FORMATS:
        raise ValueError(f"dataset format {format_name!r} is unknown; known formats and their columns: {known}")
    fitting = [name for name, known in FORMATS.items() if set(known.required) <= set(columns)]
    if format_name != "auto":
        if format_name not in fitting:
            raise ValueError(f"columns {columns} don't fit the dataset format {format_name!r}; needed: {known}")
        return format_name
    if len(fitting) != 1:
        problem = f"fit several formats ({', '.join(fitting)}): name one" if fitting else "fit no known dataset format"
        raise ValueError(f"columns {columns} {problem}; known formats and their columns: {known}")
    return fitting[0]


# --- rows to documents -----------------------------------------------------------------------------------------------

TEXT = "text"
"""Name of the format of plain text, and of its column."""


def to_text(row: object) -> str:
    """The document of one row: its column ``text``.

    Raises:
        SampleError: it has none, or not text, or nothing but blanks.
    """
    if isinstance(row, UnreadableRow):
        raise SampleError(row.reason)
    if not isinstance(row, Mapping):
        raise SampleError(f"expected an object with columns, got {type(row).__name__}")
    value = row.get(TEXT)
    if value is not None and not isinstance(value, str):
        raise SampleError(f"{TEXT}: expected text, got {type(value).__name__}")
    return _text(value, TEXT)


def check_text_format(columns: Iterable[str], format_name: str = "auto") -> None:
    """Refuse what ``stage: pt`` can't read.

    Raises:
        ValueError: a format of conversations is named, or there is no column ``text``.
    """
    if format_name not in ("auto", TEXT):
        raise ValueError(f"dataset format {format_name!r} is one of conversations; stage pt reads {TEXT!r}")
    if TEXT not in (columns := sorted(columns)):
        raise ValueError(f"columns {columns} have no {TEXT!r}, which stage pt reads; rename the one with the documents")


# --- sources to rows -------------------------------------------------------------------------------------------------


FILE_SUFFIXES = (".jsonl", ".json", ".parquet", ".txt")


def load_rows(source: str, *, split: str = "train") -> Rows:
    """Read one of the ``FILE_SUFFIXES``, a folder, or a dataset that ``datasets`` knows by name.

    A ``.txt`` file is one row: its whole text. A ``.json`` file holds a list of objects, or one object per line. A
    folder is one written by ``save_to_disk`` or one of data files. A line that isn't JSON comes back as
    :class:`UnreadableRow`. ``split`` is not used for single files.

    Raises:
        ValueError: no such source, or one that can't be read as a whole.
    """
    path = Path(source)
    if path.suffix in FILE_SUFFIXES and not path.is_file():
        raise ValueError(f"dataset {source!r}: no such file")
    if path.suffix == ".txt":
        return [{TEXT: path.read_text(encoding="utf-8")}]
    if path.suffix == ".jsonl":
        return _load_json_lines(path)
    if path.suffix == ".json":
        return _load_json_list(path) if path.read_text(encoding="utf-8").lstrip()[:1] == "[" else _load_json_lines(path)
    return _load_with_datasets(path, source, split)


def _load_json_lines(path: Path) -> list[Any]:
    return [parse_line(line) for line in path.read_text(encoding="utf-8").split("\n") if line.strip()]


def parse_line(line: str) -> Any:
    """One line of JSON; :class:`UnreadableRow` where it isn't."""
    try:
        return json.loads(line)
    except json.JSONDecodeError as error:
        return UnreadableRow(f"not JSON: {error}")


def _load_json_list(path: Path) -> list[Any]:
    try:
        rows: list[Any] = json.loads(path.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise ValueError(f"dataset {str(path)!r}: starts as a JSON list but isn't one: {error}") from error
    return rows


def is_stored(path: Path) -> bool:
    """Whether it is a folder that ``datasets.save_to_disk`` wrote."""
    return (path / "state.json").is_file() or (path / "dataset_dict.json").is_file()


def load_stored(path: Path, split: str) -> Any:
    """The ``datasets.Dataset`` in such a folder, mapped into memory; ``split`` of it where it has several."""
    import datasets

    stored = datasets.load_from_disk(str(path))
    return stored[split] if isinstance(stored, datasets.DatasetDict) else stored


def _load_with_datasets(path: Path, source: str, split: str) -> Rows:
    import datasets  # slow to import, and not needed for JSON

    try:
        if path.suffix == ".parquet":
            return datasets.load_dataset("parquet", data_files=source, split="train")
        return load_stored(path, split) if is_stored(path) else datasets.load_dataset(source, split=split)
    except (OSError, ValueError, KeyError, datasets.exceptions.DatasetsError) as error:
        raise ValueError(
            f"dataset {source!r} (split {split!r}) can't be loaded as a {', '.join(FILE_SUFFIXES)} file, as a folder, "
            f"or by the datasets library: {type(error).__name__}: {error}"
        ) from error
