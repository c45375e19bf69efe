"""The five start scripts as tables: commands, flags, examples. Standard library only, whatever the commands need."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from launcher import settings, soak
from launcher.arguments import Command, Program, sentence
from launcher.topology import TOPOLOGIES, Topology

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
CACHE_DOC = "`cache reset` empties the prefix cache of what runs, between requests"


# ./start-local.sh


def local() -> Program:
    def command(name: str, doc: str, flags: tuple[str, ...] = RUN, more=lambda parser: None, *, tells_json=False):
        def add(parser) -> None:
            settings.add_flags(parser, flags)
            more(parser)

        return Command(name, doc, add, tells_json)

    return Program(
        script="./start-local.sh",
        description="Serve a small EXL3 model through vLLM on this machine's CPU. Without a command: start.",
        default="start",
        commands=[
            command("start", "set up what is missing, start the server, wait for correct answers, serve",
                    (*SERVE, "detach", *RUN)),
            command("stop", "end the server, or a start that is under way"),
            command("status", "tell whether it runs, in which phase it is and whether it answers", tells_json=True),
            command("canary", "ask what runs the questions of its start once more"),
            command("soak", "ask for ten minutes whether answers in company are those given alone; writes a report",
                    more=soak.add_options),
            command("cache", CACHE_DOC, more=add_reset),
            command("logs", "print the server's log", more=partial(add_follow, until="the server ends")),
            command("plan", "print the exact command and environment of the server, secrets left out; starts nothing",
                    (*SERVE, *RUN), tells_json=True),
            command("setup", "only make or update the environment .venv-local", more=add_tests),
        ],
        examples=[
            ("", "set up, start, serve until Ctrl-C"),
            ("--port 9000 --detach", "on another port; return once it is ready"),
            ("status --json", "for a program"),
            ("stop", "end it"),
        ],
        docs="docs/local.md has the rest. VLLM_API_KEY in the environment makes the server ask for that key.",
    )  # fmt: skip


def add_reset(parser) -> None:
    parser.add_argument("action", choices=["reset"])


def add_follow(parser, until: str) -> None:
    parser.add_argument("-f", "--follow", action="store_true", help=f"Keep printing until {until}.")


def add_tests(parser) -> None:
    parser.add_argument("--tests", action="store_true", help="Also install what the tests need.")


# ./start.sh, ./start-tp3.sh, ./start-tp4.sh


def cluster(topology: Topology) -> Program:
    ranked = partial(add_rank, nodes=topology.nodes)
    return Program(
        script=f"./{topology.script}",
        description=f"Serve GLM-5.3-Flash-EXL3 on {topology.nodes} DGX Sparks. Without a command: start.",
        default="start",
        commands=[
            Command("start", "check every node, then start and wait until questions are answered correctly"),
            Command("restart", "check every node for the new settings, then replace what runs"),
            Command("stop", "end what runs, on every node"),
            Command("status", "tell whether it runs, answers and makes progress", tells_json=True),
            Command("canary", "ask what runs a few questions with known answers, one of them cold and from the prefix "
                    "cache"),
            Command("soak", "ask for ten minutes whether answers in company and from the cache are those given alone; "
                    "writes a report", soak.add_options),
            Command("cache", CACHE_DOC, add_reset),
            Command("logs", "print the log of a rank", lambda parser: (ranked(parser), add_follow(parser, "Ctrl-C"))),
            Command("check", "look at every node and report; changes nothing", tells_json=True),
            Command("sync", "copy the weights to the other nodes, and have each verify what it got", add_full),
            Command("share", "say how the other nodes can read node 0's weights over NFS instead; --yes does it",
                    add_share),
            Command("plan", "print what each node will run, secrets left out; needs no node", tells_json=True),
            Command("shell", "open a shell where a rank runs", ranked),
            Command("image", "build, pull, choose, copy or warm up the image of the containers, or tell what each node "
                    "has", add_image),
            Command("key", "make an API key, store it in the env file and so open the API to the network"),
            Command("import", "read the env file of an older recipe and write ours", add_old_file),
        ],
        examples=[
            ("check", "what is wrong, and what to type"),
            ("", "check, start, return once it answers"),
            ("status --json", "for a program"),
            ("logs 1 -f", "follow the log of rank 1"),
            ("image build", "make the image, on every node"),
        ],
        docs=f"Settings are in {topology.env_file}, see docs/configuration.md; docs/cluster.md has the rest.",
    )  # fmt: skip


def add_rank(parser, nodes: int) -> None:
    parser.add_argument("rank", nargs="?", type=int, default=0, choices=range(nodes), help="Default: 0.")


def add_full(parser) -> None:
    parser.add_argument("--full", action="store_true", help="Hash every byte there again.")


def add_share(parser) -> None:
    parser.add_argument("--undo", action="store_true", help="Take it back.")
    parser.add_argument("--yes", action="store_true", help="Run the commands, with sudo where needed.")


def add_old_file(parser) -> None:
    parser.add_argument("file", type=Path, metavar="OLD/.env")


IMAGE_COMMANDS = {
    "build": "build it here from the released vLLM image, and copy it to the other nodes",
    "pull": "fetch one from a registry, and copy it to the other nodes",
    "use": "make an image of this machine the one that containers are started from, such as the previous one",
    "copy": "send this machine's image to the nodes that lack it",
    "warm": "compile on this node what needs no model, and copy the caches to the other nodes",
    "status": "tell what each node has, and whether it is what this checkout would build",
}


def add_image(parser) -> None:
    commands = parser.add_subparsers(dest="what", required=True, metavar="WHAT")
    made = {name: commands.add_parser(name, help=doc, description=sentence(doc))
            for name, doc in IMAGE_COMMANDS.items()}  # fmt: skip
    build = made["build"]
    build.add_argument("--base", default="", help="vLLM's image, also with a digest. Default: the Dockerfile's.")
    build.add_argument("--offline", action="store_true", help="Download nothing: image/wheels has every wheel.")
    build.add_argument("--skip-exllamav3", action="store_true", help="Leave its extension out, to try a build.")
    build.add_argument("--jobs", type=int, help="Compilers at once. Default: by cores and memory.")
    made["pull"].add_argument("name", nargs="?", default="", help="Default: what IMAGE names.")
    made["use"].add_argument("name", help="An image of this machine.")


# ./download.sh


def weights() -> Program:
    return Program(
        script="./download.sh",
        description="Get the weights onto this machine, verified. Without a command: fetch. No Docker, no SSH.",
        default="fetch",
        commands=[
            Command("fetch", "fetch what is missing, or take it from the Hub's cache or a bundle, and verify every "
                    "byte", add_fetch),
            Command("verify", "check headers and sizes, and hash what may have changed; fetches nothing", add_verify),
            Command("bundle", "put weights, draft, records and the launcher's packages on a disk", add_bundle),
        ],
        examples=[
            ("", "fetch what is missing; goes on after any interruption"),
            ("--dry-run", "only list what would be fetched"),
            ("verify --full", "hash every byte again"),
            ("--from /media/disk", "take everything from a disk"),
        ],
        docs="MODEL_DIR, DRAFT_DIR, SPEC_METHOD and WEIGHTS_SOURCE come from the env file or the environment; tokens "
             "from HF_TOKEN or a Hub login. docs/weights.md has the rest.",
    )  # fmt: skip


def add_settings_file(parser) -> None:
    parser.add_argument("--settings", metavar="FILE", help="The env file, where several are here and differ.")


def add_ignore_cache(parser) -> None:
    parser.add_argument("--ignore-cache", action="store_true", help="Leave the Hub's cache out.")


def add_fetch(parser) -> None:
    add_settings_file(parser)
    add_ignore_cache(parser)
    parser.add_argument("--dry-run", action="store_true", help="List what would be fetched; changes nothing.")
    parser.add_argument(
        "--yes", action="store_true", help="Take the same bytes from another source if the first is gone."
    )
    parser.add_argument("--from", dest="source", type=Path, metavar="DIR", help="Take everything from a bundle.")
    parser.add_argument("--streams", type=int, default=4, choices=range(1, 17), metavar="1-16", help="Files at once.")


def add_verify(parser) -> None:
    add_settings_file(parser)
    add_ignore_cache(parser)
    parser.add_argument("--full", action="store_true", help="Hash every byte again.")
    parser.add_argument(
        "--own", action="store_true", help="Take a checkpoint of your own as it is, and note its hashes."
    )


def add_bundle(parser) -> None:
    add_settings_file(parser)
    parser.add_argument("folder", type=Path, metavar="DIR")


# All


def of(name: str) -> Program:
    """By the word that the script hands to the launcher: a topology, or `weights`."""
    return weights() if name == "weights" else cluster(TOPOLOGIES[name])


def programs() -> list[Program]:
    return [*map(cluster, TOPOLOGIES.values()), weights(), local()]
