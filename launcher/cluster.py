"""Command line of the Spark topologies: python -m launcher cluster SCRIPT TOPOLOGY|weights COMMAND."""

from __future__ import annotations

import argparse
import os
import secrets
from collections.abc import Mapping
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
    memory_plan,
    paths,
    preflight,
    soak,
)
from launcher.cluster_state import files_of
from launcher.commands import REPOSITORY
from launcher.config import NOT_FILLED_IN, Config, load, of_what_runs
from launcher.errors import Exit, LauncherError
from launcher.lifecycle import signals_interrupt
from launcher.topology import TOPOLOGIES, Topology
from launcher.weights import share

# command -> what it does
COMMANDS = {
    "start": "check every node, then start and wait until questions are answered correctly",
    "restart": "check every node for the new settings, then replace what runs",
    "stop": "end what runs, on every node",
    "status": "tell whether it runs, answers and makes progress",
    "canary": "ask what runs a few questions with known answers, one of them cold and from the prefix cache",
    "soak": "ask for ten minutes whether answers in company and from the cache are those given alone; writes a report",
    "cache": "`cache reset` empties the prefix cache of what runs, between requests",
    "logs": "print the log of a rank",
    "check": "look at every node and report; changes nothing",
    "sync": "copy the weights to the other nodes, and have each verify what it got",
    "share": "say how the other nodes can read node 0's weights over NFS instead; --yes does it",
    "plan": "print what each node will run, secrets left out; needs no node",
    "shell": "open a shell where a rank runs",
    "image": "build, pull, choose, copy or warm up the image of the containers, or tell what each node has",
    "key": "make an API key, store it in the env file and so open the API to the network",
    "import": "read the env file of an older recipe and write ours",
}

IMAGE_COMMANDS = {
    "build": "build it here from the released vLLM image, and copy it to the other nodes",
    "pull": "fetch one from a registry, and copy it to the other nodes",
    "use": "make an image of this machine the one that containers are started from, such as the previous one",
    "copy": "send this machine's image to the nodes that lack it",
    "warm": "compile on this node what needs no model, and copy the caches to the other nodes",
    "status": "tell what each node has, and whether it is what this checkout would build",
}

# What needs no settings: the state of the run says which nodes, and how to reach and to end what is there.
OF_WHAT_RUNS = ("stop", "status", "logs", "cache")


def make_parser(script: str, topology: Topology) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=script,
        description=f"Serve GLM-5.3-Flash-EXL3 on {topology.nodes} DGX Sparks. Without a command: start.",
        epilog=f"Settings are in {topology.env_file}; docs/configuration.md describes them.",
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, doc in COMMANDS.items():
        command = commands.add_parser(name, help=doc, description=doc[0].upper() + doc[1:] + ".")
        if name in ("logs", "shell"):
            ranks = range(topology.nodes)
            command.add_argument("rank", nargs="?", type=int, default=0, choices=ranks, help="Default: 0.")
        if name == "logs":
            command.add_argument("-f", "--follow", action="store_true", help="Keep printing until Ctrl-C.")
        if name == "cache":
            command.add_argument("action", choices=["reset"])
        if name == "soak":
            soak.add_options(command)
        if name == "sync":
            command.add_argument("--full", action="store_true", help="Hash every byte there again.")
        if name == "share":
            command.add_argument("--undo", action="store_true", help="Take it back.")
            command.add_argument("--yes", action="store_true", help="Run the commands, with sudo where needed.")
        if name == "image":
            add_image_commands(command)
        if name == "import":
            command.add_argument("file", type=Path, metavar="OLD/.env")
    return parser


def add_image_commands(parser: argparse.ArgumentParser) -> None:
    commands = parser.add_subparsers(dest="what", required=True, metavar="WHAT")
    made = {name: commands.add_parser(name, help=doc, description=doc[0].upper() + doc[1:] + ".")
            for name, doc in IMAGE_COMMANDS.items()}  # fmt: skip
    build = made["build"]
    build.add_argument("--base", default="", help="vLLM's image, also with a digest. Default: the Dockerfile's.")
    build.add_argument("--offline", action="store_true", help="Download nothing: image/wheels has every wheel.")
    build.add_argument("--skip-exllamav3", action="store_true", help="Leave its extension out, to try a build.")
    build.add_argument("--jobs", type=int, help="Compilers at once. Default: by cores and memory.")
    made["pull"].add_argument("name", nargs="?", default="", help="Default: what IMAGE names.")
    made["use"].add_argument("name", help="An image of this machine.")


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
    script, topology = f"./{arguments[0]}", TOPOLOGIES[arguments[1]]
    console.set_program(script)
    words = arguments[2:] or ["start"]
    options = make_parser(script, topology).parse_args(words)
    env_path = REPOSITORY / topology.env_file
    if options.command == "import":
        return envfile.import_old(topology, options.file, env_path)
    if options.command == "key":
        return make_key(topology, env_path)
    config = read_config(topology, env_path, ambient, options.command)
    if options.command == "plan":
        preflight.refuse_settings(config)
        print(cluster_plan.describe(cluster_plan.make(config, more_notes=memory_plan.notes(config))), end="")
        return Exit.OK
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
    console.say(f"Note: the settings cannot be used ({first}); this goes by the state in {config['RUN_DIR']}.")
    return config


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
