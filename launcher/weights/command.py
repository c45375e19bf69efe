"""Command line of ./download.sh: python -m launcher weights download.sh COMMAND."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path

from launcher import config, console, libraries, programs
from launcher.arguments import parse
from launcher.cluster import read_text
from launcher.cluster_state import files_of
from launcher.commands import REPOSITORY
from launcher.config import Config
from launcher.errors import Exit, LauncherError
from launcher.topology import TOPOLOGIES, Topology
from launcher.weights import bundle, download, verify
from launcher.weights.download import Job, Options

# Settings that decide what is fetched and where to; the files of several topologies must agree on them.
READ = ("MODEL_DIR", "DRAFT_DIR", "SPEC_METHOD", "WEIGHTS_SOURCE")


def main(arguments: list[str], ambient: Mapping[str, str]) -> Exit:
    script, *words = arguments
    console.set_program(f"./{script}")
    options = parse(programs.weights(), words)
    settings = read_config(options.settings, ambient)
    libraries.log_to(files_of(settings).folder)
    jobs = jobs_of(settings)
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
