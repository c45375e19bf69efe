"""Command line of ./download.sh: python -m launcher weights download.sh COMMAND."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path

from launcher import config, console
from launcher.cluster import read_text
from launcher.commands import REPOSITORY
from launcher.config import Config
from launcher.errors import Exit, LauncherError
from launcher.topology import TOPOLOGIES, Topology
from launcher.weights import bundle, download, verify
from launcher.weights.download import Job, Options

# command -> what it does
COMMANDS = {
    "fetch": "fetch what is missing, or take it from the Hub's cache or a bundle, and verify every byte",
    "verify": "check headers and sizes, and hash what may have changed; fetches nothing",
    "bundle": "put weights, draft, records and the launcher's packages on a disk",
}
# Settings that decide what is fetched and where to; the files of several topologies must agree on them.
READ = ("MODEL_DIR", "DRAFT_DIR", "SPEC_METHOD", "WEIGHTS_SOURCE")


def make_parser(script: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=script,
        description="Get the weights onto this machine, verified. Without a command: fetch. No Docker, no SSH.",
        epilog="MODEL_DIR, DRAFT_DIR, SPEC_METHOD and WEIGHTS_SOURCE come from the env file or the environment; tokens "
               "from HF_TOKEN or a Hub login. docs/weights.md says more.",
    )  # fmt: skip
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, doc in COMMANDS.items():
        command = commands.add_parser(name, help=doc, description=doc[0].upper() + doc[1:] + ".")
        command.add_argument("--settings", metavar="FILE", help="The env file, where several are here and differ.")
        if name == "bundle":
            command.add_argument("folder", type=Path, metavar="DIR")
        else:
            command.add_argument("--ignore-cache", action="store_true", help="Leave the Hub's cache out.")
    fetch, check = commands.choices["fetch"], commands.choices["verify"]
    fetch.add_argument("--dry-run", action="store_true", help="List what would be fetched; changes nothing.")
    fetch.add_argument(
        "--yes", action="store_true", help="Take the same bytes from another source if the first is gone."
    )
    fetch.add_argument("--from", dest="source", type=Path, metavar="DIR", help="Take everything from a bundle.")
    fetch.add_argument("--streams", type=int, default=4, choices=range(1, 17), metavar="1-16", help="Files at once.")
    check.add_argument("--full", action="store_true", help="Hash every byte again.")
    check.add_argument(
        "--own", action="store_true", help="Take a checkpoint of your own as it is, and note its hashes."
    )
    return parser


def main(arguments: list[str], ambient: Mapping[str, str]) -> Exit:
    script, *words = arguments
    console.set_program(f"./{script}")
    if not words or (words[0].startswith("-") and words[0] not in ("-h", "--help")):
        words = ["fetch", *words]
    options = make_parser(f"./{script}").parse_args(words)
    jobs = jobs_of(read_config(options.settings, ambient))
    try:
        carry_out(options, jobs)
    except KeyboardInterrupt:
        console.say("\nInterrupted; what has arrived is kept, and the same command goes on from there.")
        return Exit.INTERRUPTED
    return Exit.OK


def carry_out(options: argparse.Namespace, jobs: list[Job]) -> None:
    if options.command == "bundle":
        bundle.make(jobs, options.folder.absolute())
        return
    if options.command == "verify":
        chosen = Options(ignore_cache=options.ignore_cache)
        verify.run(jobs, chosen, full=options.full, own=options.own)
        return
    chosen = Options(options.yes, options.dry_run, options.ignore_cache, options.streams)
    if options.source:
        bundle.take(jobs, options.source.absolute(), chosen)
    else:
        download.run(jobs, chosen)


def jobs_of(settings: Config) -> list[Job]:
    jobs = [Job("model", folder_of(settings, "MODEL_DIR"), str(settings["WEIGHTS_SOURCE"] or ""))]
    if settings["SPEC_METHOD"] == "dflash":
        jobs.append(Job("draft", folder_of(settings, "DRAFT_DIR")))
    return jobs


def folder_of(settings: Config, name: str) -> Path:
    if not settings[name]:
        raise LauncherError(f"{name} is empty; set it to the folder of the weights.", Exit.USAGE)
    return Path(str(settings[name])).expanduser()


def read_config(name: str | None, ambient: Mapping[str, str]) -> Config:
    """Addresses need not be filled in yet: no node is asked."""
    topologies = [topology for topology in TOPOLOGIES.values() if (REPOSITORY / topology.env_file).exists()]
    if name is not None:
        topologies = [one for one in TOPOLOGIES.values() if one.env_file == Path(name).name]
        if not topologies or not (REPOSITORY / Path(name).name).exists():
            names = ", ".join(one.env_file for one in TOPOLOGIES.values())
            raise LauncherError(f"--settings {name}: is none of the env files here; there can be {names}.", Exit.USAGE)
    configs = [load(topology, ambient) for topology in topologies] or [load(TOPOLOGIES["tp2"], ambient)]
    for setting in READ:
        if len({configs_value[setting] for configs_value in configs}) > 1:
            said = ", ".join(f"{one.topology.env_file}: {one.text(setting)}" for one in configs)
            raise LauncherError(f"{setting} differs ({said}); say whose is meant with --settings FILE.", Exit.USAGE)
    return configs[0]


def load(topology: Topology, ambient: Mapping[str, str]) -> Config:
    text = read_text(REPOSITORY / topology.env_file)
    return config.load(topology, text, topology.env_file, ambient, with_addresses=False)
