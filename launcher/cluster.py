"""Command line of the Spark topologies: python -m launcher cluster SCRIPT TOPOLOGY|weights COMMAND."""

from __future__ import annotations

import argparse
import os
import secrets
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from launcher import (
    caches,
    cluster_life,
    cluster_plan,
    cluster_service,
    cluster_soak,
    console,
    envfile,
    images,
    libraries,
    memory_plan,
    paths,
    preflight,
    programs,
    reports,
    soak,
)
from launcher.arguments import parse
from launcher.cluster_state import files_of
from launcher.commands import REPOSITORY
from launcher.config import NOT_FILLED_IN, Config, has_parser, load, of_what_runs
from launcher.errors import Exit, LauncherError
from launcher.lifecycle import signals_interrupt
from launcher.topology import TOPOLOGIES, Topology
from launcher.weights import share

# What needs no settings: the state of the run says which nodes, and how to reach and to end what is there.
OF_WHAT_RUNS = ("stop", "status", "logs", "cache")


def run_image_command(config: Config, options: argparse.Namespace) -> Exit:
    if config["RUNTIME"] != "docker":
        raise LauncherError(f"image: RUNTIME={config['RUNTIME']} uses none; set RUNTIME=docker.", Exit.USAGE)
    with signals_interrupt():
        if options.what == "build":
            chosen = images.Options(options.base, options.offline, options.skip_exllamav3, options.jobs)
            return images.build(config, chosen)
        if options.what in ("pull", "use"):
            return getattr(images, options.what)(config, options.name)
        if options.what == "warm":
            return caches.warm(config)
        return getattr(images, options.what)(config)


def main(arguments: list[str], ambient: Mapping[str, str]) -> Exit:
    if arguments[1] == "weights":
        # Needs huggingface_hub, which takes half a second that the other commands do without.
        from launcher.weights import command

        return command.main([arguments[0], *arguments[2:]], ambient)
    topology = TOPOLOGIES[arguments[1]]
    console.set_program(f"./{arguments[0]}")
    options = parse(programs.cluster(topology), arguments[2:])
    env_path = REPOSITORY / topology.env_file
    if options.command == "import":
        return envfile.import_old(topology, options.file, env_path)
    if options.command == "key":
        return make_key(topology, env_path)
    config = read_config(topology, env_path, ambient, options.command)
    if options.command == "plan":
        preflight.refuse_settings(config)
        plan = cluster_plan.make(config, more_notes=memory_plan.notes(config))
        report = reports.PlanReport(cluster_plan.body(plan), cluster_plan.describe(plan).rstrip("\n"))
        return reports.tell(report, as_json=options.json, notes=plan.notes)
    libraries.log_to(files_of(config).folder)
    for note in config.notes:
        console.say(f"Note: {note}")
    if options.command == "logs":
        return cluster_life.logs(config, options.rank, options.follow)
    if options.command == "shell":
        return cluster_life.shell(config, options.rank)
    if options.command in ("cache", "canary"):
        return {"cache": cluster_service.reset_cache, "canary": cluster_service.ask}[options.command](config)
    if options.command == "soak":
        return cluster_soak.run(config, soak.options_of(options))
    if options.command == "sync":
        return cluster_life.sync(config, full=options.full)
    if options.command == "share":
        return share_weights(config, do=options.yes, take_back=options.undo)
    if options.command == "image":
        return run_image_command(config, options)
    if options.command in ("status", "check"):
        return getattr(cluster_life, options.command)(config, as_json=options.json)
    return getattr(cluster_life, options.command)(config)


def share_weights(config: Config, *, do: bool, take_back: bool) -> Exit:
    """Not taken back while something runs that reads what would go away."""
    files = files_of(config)
    with signals_interrupt(), files.lock():
        if take_back and do and files.read_state():
            raise LauncherError(f"{config.topology.name} runs from these weights; `stop` it first.", Exit.BUSY)
        return share.share(config, do=do, take_back=take_back)


def read_config(topology: Topology, env_path: Path, ambient: Mapping[str, str], command: str) -> Config:
    text = None
    try:
        text = read_text(env_path)
        if command in OF_WHAT_RUNS and not has_parser():  # the bootstrap has said so
            return of_what_runs(topology, text, ambient)
        return load(topology, text, env_path.name, ambient)
    except LauncherError as error:
        if command in OF_WHAT_RUNS:
            return config_of_what_runs(topology, text, ambient, error)
        # Lexists: a link to nowhere is somebody's.
        if text is not None or command == "plan" or os.path.lexists(env_path) or NOT_FILLED_IN not in str(error):
            raise
        copy_example(env_path)
        raise LauncherError(
            f"{env_path.name} was made from its example. Fill in the addresses of your Sparks there, then run "
            f"{console.program()} again.",
            Exit.USAGE,
        ) from error


def read_text(env_path: Path) -> str | None:
    try:
        return paths.text_of(env_path)
    except FileNotFoundError:
        return None
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise LauncherError(
            f"{env_path.name} could not be read: {reason}; make it a text file of your own (mode 0600).", Exit.USAGE
        ) from error


def config_of_what_runs(
    topology: Topology, text: str | None, ambient: Mapping[str, str], error: LauncherError
) -> Config:
    config = of_what_runs(topology, text, ambient)
    first = str(error).partition("\n")[0].rstrip(".")
    note = f"the settings cannot be used ({first}); this goes by the state in {config['RUN_DIR']}."
    return replace(config, notes=(*config.notes, note))


def copy_example(env_path: Path) -> None:
    """For the owner's eyes only: a key may come into it."""
    example = env_path.with_name(env_path.name + ".example")
    try:
        content = example.read_bytes()
        with os.fdopen(os.open(env_path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as target:
            target.write(content)
    except OSError as error:
        raise LauncherError(
            f"{env_path.name} could not be made from {example.name} in {env_path.parent} ({error.strerror}); see that "
            f"both are plain files there and that you may write there.",
            Exit.USAGE,
        ) from error


def make_key(topology: Topology, env_path: Path) -> Exit:
    if read_text(env_path) is None:
        copy_example(env_path)
    envfile.set_value(env_path, "VLLM_API_KEY", f"exl3-{secrets.token_urlsafe(32)}")
    print(
        f"A key is in {env_path.name} now (VLLM_API_KEY), readable by you alone. With it the API listens on every "
        f"address; `{console.program()} restart` makes it so. Clients send it as their API key."
    )
    return Exit.OK
