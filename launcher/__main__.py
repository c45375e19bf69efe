"""Command line: python -m launcher local|cluster ... Reads the environment and the arguments, once."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from launcher import (
    console,
    environment,
    libraries,
    lifecycle,
    local_soak,
    mishap,
    paths,
    programs,
    reports,
    settings,
    soak,
)
from launcher import plan as plans
from launcher.arguments import parse
from launcher.errors import Exit, LauncherError

INTERRUPTED = "Interrupted; nothing was left running."


def run(options: argparse.Namespace, ambient: dict[str, str]) -> Exit:
    values = settings.resolve(vars(options), ambient)
    if options.command in ("start", "plan", "setup", "soak") and (why := paths.why_no_folder(values["run_dir"])):
        raise LauncherError(f"--run-dir is {values['run_dir']}: {why}; name a folder of your own.", Exit.USAGE)
    if options.command == "start":
        return lifecycle.start(values, ambient)
    if options.command == "plan":
        plan = lifecycle.plan_for(values, ambient)
        lifecycle.note_ignored(plan)
        report = reports.PlanReport(plans.body(plan), plans.describe(plan))
        return reports.tell(report, as_json=options.json, notes=lifecycle.ignored_notes(plan))
    if options.command == "setup":
        values["run_dir"].mkdir(parents=True, exist_ok=True)
        environment.make_environment(environment.Sources(), values["run_dir"] / "environment.log", options.tests)
        return Exit.OK
    if options.command == "soak":
        console.set_program("./start-local.sh")
        return local_soak.run(values, ambient, soak.options_of(options))
    if options.command == "logs":
        return lifecycle.logs(values, options.follow)
    if options.command == "status":
        return lifecycle.status(values, as_json=options.json)
    simple = {"stop": lifecycle.stop, "canary": lifecycle.ask_canary, "cache": lifecycle.reset_cache}
    return simple[options.command](values)


def main(arguments: list[str]) -> int:
    if arguments[:1] not in (["local"], ["cluster"]):
        print("usage: ./start-local.sh, ./start.sh, ./start-tp3.sh or ./start-tp4.sh COMMAND", file=sys.stderr)
        return Exit.OK if arguments[:1] in (["-h"], ["--help"]) else Exit.USAGE
    try:
        return carry_out(arguments, dict(os.environ))
    except LauncherError as error:
        console.say(f"\n{error}")
        reports.tell_error(str(error), error.code, arguments)
        return error.code
    except KeyboardInterrupt:
        console.say(f"\n{INTERRUPTED}")
        reports.tell_error(INTERRUPTED, Exit.INTERRUPTED, arguments)
        return Exit.INTERRUPTED
    except BrokenPipeError:
        # Whoever read our output, `head` for one, has seen enough.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return Exit.OK
    except Exception as error:
        sentence = mishap.tell(error, arguments, os.environ, run_folder(arguments))
        console.say(f"\n{sentence}")
        reports.tell_error(sentence, Exit.FAULT, arguments)
        return Exit.FAULT


def run_folder(arguments: list[str]) -> Path | None:
    """Where the run keeps its files, as far as that can be told without trusting anything."""
    try:
        if arguments[0] == "local":
            words = [word for argument in arguments for word in argument.split("=", 1)]
            at = [i for i, word in enumerate(words) if word == "--run-dir"]
            return Path(words[at[-1] + 1]) if at else settings.REPOSITORY / ".run"
        from launcher import cluster

        topology = cluster.TOPOLOGIES[arguments[2]]
        text = cluster.read_text(settings.REPOSITORY / topology.env_file)
        return cluster.files_of(cluster.of_what_runs(topology, text, os.environ)).folder
    except Exception:  # whatever it is, another one is being told
        return None


def carry_out(arguments: list[str], ambient: dict[str, str]) -> Exit:
    if arguments[0] == "cluster":
        parse(programs.of(arguments[2]), arguments[3:])  # help, version and wrong usage need none of what follows
        if arguments[2] == "weights":
            libraries.hold_back()
        # Needs python-dotenv, which the local topology's bare interpreter does not have.
        from launcher import cluster

        return cluster.main(arguments[1:], ambient)
    return run(parse(programs.local(), arguments[1:]), ambient)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
