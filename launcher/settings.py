"""The table of settings of the local topology. Command line, help and plan are derived from it."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from launcher import kinds
from launcher.errors import Exit, LauncherError
from launcher.kinds import SWITCH
from launcher.table import DOOR, Row


def parser_of(row: Row) -> Callable[[str], object]:
    """For argparse, of a row that the cluster's table has too."""

    def parse(text: str) -> object:
        try:
            value = row.type.parse(text)
        except ValueError:
            value = None
        if value is None or (row.choices and value not in row.choices):
            raise argparse.ArgumentTypeError(f"{text[:60]!r} is not {row.needs}")
        return value

    return parse


class Goes(Enum):
    """Where a setting ends up."""

    LAUNCHER = "launcher"
    SERVER = "server flag"
    SERVER_ENVIRONMENT = "server environment"


@dataclass(frozen=True)
class Setting:
    name: str  # also the command-line flag: tensor_parallel_size is --tensor-parallel-size
    type: Callable[[str], object]
    default: object
    goes: Goes
    doc: str
    minimum: int | None = None
    maximum: int | None = None
    # Secrets have no flag, since argument lists are public; they come from the environment by this name.
    from_environment: str | None = None

    @property
    def secret(self) -> bool:
        return self.from_environment is not None

    @property
    def flag(self) -> str:
        return "--" + self.name.replace("_", "-")


REPOSITORY = Path(__file__).resolve().parent.parent
MODEL_ID = "GLM-5.3-Flash-EXL3"
HOST = "127.0.0.1"

TABLE = (
    Setting("port", int, 8888, Goes.SERVER, f"Port of the API on {HOST}.", minimum=1, maximum=65535),
    Setting("model", Path, REPOSITORY / "models/local", Goes.SERVER, "Folder of the EXL3 checkpoint to serve."),
    Setting(
        "canary", Path, None, Goes.LAUNCHER,
        "File of questions that must be answered correctly at the start; default: canary.json in the model folder.",
    ),
    Setting("max_model_len", int, 2048, Goes.SERVER, "Longest context in tokens; the CPU side ends at 2048.", 64, 2048),
    Setting("tensor_parallel_size", int, 1, Goes.SERVER, "Number of processes that share each layer.", 1, 8),
    Setting("expert_parallel", bool, False, Goes.SERVER, "Give each process whole experts instead of slices of all."),
    # The local model's matrices are small: a second thread waits more than it works, above all on a busy machine.
    Setting("threads", int, 1, Goes.SERVER_ENVIRONMENT, "Threads of each process.", 1, 1024),
    Setting("kv_cache_gib", int, 1, Goes.SERVER_ENVIRONMENT, "Memory for the KV cache of each process, GiB.", 1, 64),
    Setting("detach", bool, False, Goes.LAUNCHER, "Return once the server is ready instead of serving until Ctrl-C."),
    Setting("run_dir", Path, REPOSITORY / ".run", Goes.LAUNCHER, "Folder of the state, the logs and vLLM's caches."),
    Setting(
        "api_key", str, "", Goes.SERVER_ENVIRONMENT,
        "Key that clients must send. Taken from the environment only.", from_environment="VLLM_API_KEY",
    ),
    *(Setting(
        row.name.lower(), bool if row.type is SWITCH else parser_of(row), row.default, Goes.SERVER_ENVIRONMENT,
        row.doc, row.minimum, row.maximum,
    ) for row in DOOR),
)  # fmt: skip


DOOR_NAMES = tuple(row.name.lower() for row in DOOR)


def add_flags(parser: argparse.ArgumentParser, names: tuple[str, ...]) -> None:
    for setting in TABLE:
        if setting.name not in names or setting.secret:
            continue
        shown = "" if setting.default in (None, False, ()) else f" Default: {setting.default}."
        kind = {"action": "store_true"} if setting.type is bool else {"type": setting.type, "metavar": "VALUE"}
        parser.add_argument(setting.flag, dest=setting.name, default=None, help=setting.doc + shown, **kind)


def resolve(flags: Mapping[str, object], environment: Mapping[str, str]) -> dict[str, object]:
    """Value of every setting: built-in < command line; secrets from the environment."""
    values = {}
    for setting in TABLE:
        value = environment.get(setting.from_environment) if setting.secret else flags.get(setting.name)
        values[setting.name] = check(setting, setting.default if value is None else value)
    for setting in TABLE:
        if isinstance(values[setting.name], Path):
            values[setting.name] = whole(setting, values[setting.name])
    if values["canary"] is None:
        values["canary"] = values["model"] / "canary.json"
    return values


def whole(setting: Setting, path: Path) -> Path:
    text = str(path)
    try:
        kinds.parse_path(text)
        text.encode()
    except ValueError as error:  # also of what is no UTF-8
        said = "holds bytes that are no UTF-8 text" if isinstance(error, UnicodeError) else error
        raise LauncherError(f"{setting.flag} {said}; name a path on this machine.", Exit.USAGE) from error
    return path.expanduser().absolute()


def check(setting: Setting, value: object) -> object:
    if isinstance(value, list):  # what argparse of some releases makes of `--port=--`
        raise LauncherError(f"{setting.flag} has no value; give one, or leave it out.", Exit.USAGE)
    if setting.minimum is not None and not setting.minimum <= value <= setting.maximum:
        raise LauncherError(
            f"{setting.flag} is {value}, it must be from {setting.minimum} to {setting.maximum}.", Exit.USAGE
        )
    if setting.secret and value:
        try:
            kinds.SECRET.parse(value)
        except ValueError:
            raise LauncherError(
                f"environment: {setting.from_environment} is (not shown); it must be {kinds.SECRET.needs}.", Exit.USAGE
            ) from None
    return value
