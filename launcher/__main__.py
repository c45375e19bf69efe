"""Command line: python -m launcher local|cluster ... Reads the environment and the arguments, once."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from launcher import console, environment, lifecycle, local_soak, mishap, paths, settings, soak
from launcher import plan as plans
from launcher.errors import Exit, LauncherError

RUN = ("run_dir",)
SERVE = (
    "port",
    "model",
    "canary",
    "max_model_len",
    "tensor_parallel_size",
    "expert_parallel",
    "threads",
    "kv_cache_gib",
    *settings.DOOR_NAMES,
)

# command -> (flags that it takes, what it does)
COMMANDS = {
    "start": ((*SERVE, "detach", *RUN), "set up what is missing, start the server, wait for correct answers, serve"),
    "stop": (RUN, "end the server, or a start that is under way"),
    "status": (RUN, "tell whether it runs, in which phase it is and whether it answers"),
    "canary": (RUN, "ask what runs the questions of its start once more"),
    "soak": (RUN, "ask for ten minutes whether answers in company are those given alone; writes a report"),
    "cache": (RUN, "`cache reset` empties the prefix cache of what runs, between requests"),
    "logs": (RUN, "print the server's log"),
    "plan": ((*SERVE, *RUN), "print the exact command and environment of the server, secrets left out; starts nothing"),
    "setup": (RUN, "only make or update the environment .venv-local"),
}


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="./start-local.sh",
        description="Serve a small EXL3 model through vLLM on this machine's CPU. Without a command: start.",
        epilog="COMMAND --help lists its flags. VLLM_API_KEY in the environment makes the server ask for it.",
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, (flags, doc) in COMMANDS.items():
        command = commands.add_parser(name, help=doc, description=doc[0].upper() + doc[1:] + ".")
        settings.add_flags(command, flags)
        if name == "logs":
            command.add_argument("-f", "--follow", action="store_true", help="Keep printing until the server ends.")
        if name == "cache":
            command.add_argument("action", choices=["reset"])
        if name == "soak":
            soak.add_options(command)
        if name == "setup":
            command.add_argument("--tests", action="store_true", help="Also install what the tests need.")
    return parser


def with_default_command(arguments: list[str]) -> list[str]:
    asks_for_help = arguments[:1] in (["-h"], ["--help"])
    names_command = bool(arguments) and not arguments[0].startswith("-")
    return arguments if asks_for_help or names_command else ["start", *arguments]


def run(options: argparse.Namespace, ambient: dict[str, str]) -> Exit:
    values = settings.resolve(vars(options), ambient)
    if options.command in ("start", "plan", "setup", "soak") and (why := paths.why_no_folder(values["run_dir"])):
        raise LauncherError(f"--run-dir is {values['run_dir']}: {why}; name a folder of your own.", Exit.USAGE)
    if options.command == "start":
        return lifecycle.start(values, ambient)
    if options.command == "plan":
        plan = lifecycle.plan_for(values, ambient)
        lifecycle.note_ignored(plan)
        print(plans.describe(plan))
        return Exit.OK
    if options.command == "setup":
        values["run_dir"].mkdir(parents=True, exist_ok=True)
        environment.make_environment(environment.Sources(), values["run_dir"] / "environment.log", options.tests)
        return Exit.OK
    if options.command == "soak":
        console.set_program("./start-local.sh")
        return local_soak.run(values, ambient, soak.options_of(options))
    if options.command == "logs":
        return lifecycle.logs(values, options.follow)
    simple = {
        "stop": lifecycle.stop, "status": lifecycle.status, "canary": lifecycle.ask_canary,
        "cache": lifecycle.reset_cache,
    }  # fmt: skip
    return simple[options.command](values)


def main(arguments: list[str]) -> int:
    if arguments[:1] not in (["local"], ["cluster"]):
        print("usage: ./start-local.sh, ./start.sh, ./start-tp3.sh or ./start-tp4.sh COMMAND", file=sys.stderr)
        return Exit.OK if arguments[:1] in (["-h"], ["--help"]) else Exit.USAGE
    try:
        if arguments[0] == "cluster":
            # Needs python-dotenv, which the local topology's bare interpreter does not have.
            from launcher import cluster

            return cluster.main(arguments[1:], dict(os.environ))
        return run(make_parser().parse_args(with_default_command(arguments[1:])), dict(os.environ))
    except LauncherError as error:
        console.say(f"\n{error}")
        return error.code
    except KeyboardInterrupt:
        console.say("\nInterrupted; nothing was left running.")
        return Exit.INTERRUPTED
    except BrokenPipeError:
        # Whoever read our output, `head` for one, has seen enough.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return Exit.OK
    except Exception as error:
        console.say("\n" + mishap.tell(error, arguments, os.environ, run_folder(arguments)))
        return Exit.FAULT


def run_folder(arguments: list[str]) -> Path | None:
    """Where the run keeps its files, as far as that can be told without trusting anything."""
    try:
        if arguments[0] == "local":
            at = [i for i, word in enumerate(arguments) if word == "--run-dir"]
            return Path(arguments[at[-1] + 1]) if at else settings.REPOSITORY / ".run"
        from launcher import cluster

        topology = cluster.TOPOLOGIES[arguments[2]]
        text = cluster.read_text(settings.REPOSITORY / topology.env_file)
        return cluster.files_of(cluster.of_what_runs(topology, text, os.environ)).folder
    except Exception:  # whatever it is, another one is being told
        return None


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
