"""Two nodes that are only pretended: `docker` and `ssh` on PATH that keep books, and an API that knows the canary."""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from launcher import canary, cluster_life, cluster_state, config, gpu_ways, preflight, service, topology
from launcher.canary import read_questions
from launcher.cluster_state import ClusterState
from launcher.content_checks import MACHINES
from launcher.state import this_process

ARCHITECTURE = MACHINES.get(os.uname().machine, os.uname().machine)
ROOT = Path(__file__).resolve().parents[2]
LOCAL_MODEL = ROOT / "models" / "local"
READY_LOG = Path(__file__).parent / "data" / "server_ready.log"

DOCKER = r"""#!{python} -IS
import json, os, sys, time
from pathlib import Path
books, words = Path({books!r}), sys.argv[1:]
# What only tries a way to the GPU is booked as such.
verb = "try" if words[0] == "run" and words[-1] == "-L" else words[0]
with open(books / "calls", "a") as calls:
    calls.write(json.dumps([os.environ.get("STUB_NODE", "head"), verb, *words[1:]]) + "\n")
running = books / "running"
while (books / "hang").exists() and (books / "hang").read_text() in " ".join(words):
    time.sleep(0.02)
failing = json.loads((books / "fail").read_text()) if (books / "fail").exists() else []
text = " ".join(words)
if any(part in text for part in failing):
    sys.exit("stub: told to fail")
node = os.environ.get("STUB_NODE", "head")
shelf = books / f"images-{{node}}"
images = json.loads(shelf.read_text()) if shelf.exists() else None
registry = json.loads((books / "registry").read_text()) if (books / "registry").exists() else {{}}
def image(name):
    for known, found in images.items():
        if name in (known, found["Id"]):
            return found
    sys.exit(f"Error response from daemon: No such image: {{name}}")
def keep(**more):
    # What loses its last name stays, by its id.
    shelf.write_text(json.dumps({{found["Id"]: found for found in images.values()}} | images | more))
def state(name):
    file = running / name
    if not file.exists():
        sys.exit(f"Error: No such container: {{name}}")
    print(file.read_text())
if words[0] == "run":
    daemon = books / f"daemon-{{node}}"
    for way, (flags, said) in (json.loads(daemon.read_text()) if daemon.exists() else {{}}).items():
        if " ".join(flags) in text:
            print(said, file=sys.stderr)
            sys.exit(125)
if words[0] == "run" and "--rm" in words:
    # The command of the image, on this machine: what is mounted has its outside path.
    command = words[words.index("--entrypoint") + 1 :]
    command.pop(1)
    for mount in [words[at + 1] for at, word in enumerate(words) if word == "--mount"]:
        fields = dict(field.partition("=")[::2] for field in mount.split(","))
        command = [word.replace(fields["target"], fields["source"]) for word in command]
    if "vllm_exl3.warm_up" in command:
        made = Path(fields["source"]) / "flashinfer" / "module.so"
        made.parent.mkdir(exist_ok=True)
        made.write_text("compiled")
    else:
        os.execvp(command[0], command)
elif words[0] == "run":
    name = words[words.index("--name") + 1]
    (running / name).write_text(json.dumps({{"Running": True, "ExitCode": 0, "Pid": 1}}))
elif words[0] == "inspect" and "container" in words:
    state(words[-1])
elif words[:2] == ["image", "inspect"] and images is not None:
    print(json.dumps(image(words[-1])))
elif words[0] == "tag":
    keep(**{{words[2]: image(words[1])}})
elif words[0] == "save":
    sent = json.dumps({{words[-1]: image(words[-1])}}).ljust(3_000_000)
    sys.stdout.write(sent[:1_500_000] if (books / "cut").exists() else sent)
    sys.exit("unexpected EOF" if (books / "cut").exists() else 0)
elif words[0] == "load":
    ((name, found),) = json.load(sys.stdin).items()
    damage = {{"RootFS": {{"Layers": ["other"]}}, "Id": "sha256:" + "e" * 64}} if (books / "damage").exists() else {{}}
    keep(**{{name: found | damage}})
elif words[0] == "pull":
    keep(**{{words[-1]: registry[words[-1]]}}) if words[-1] in registry else sys.exit("pull access denied")
elif words[0] == "build":
    given = dict(words[at + 1].partition("=")[::2] for at, word in enumerate(words) if word == "--build-arg")
    made = image(given["BASE"]) | {{"Id": "sha256:" + "b" * 64, "RepoDigests": []}}
    made["RootFS"] = {{"Layers": ["l1", "ours"]}}
    made["Config"] = {{"Labels": {{"exl3.recipe": given["RECIPE"], "exl3.vllm": "0.33.0"}}}}
    Path(words[words.index("--iidfile") + 1]).write_text(made["Id"])
    keep(**{{"<none>": made}})
elif words[0] == "version":
    print("28.0.1")
elif words[:2] == ["image", "inspect"]:
    print(json.dumps({{"Id": "sha256:" + "a" * 64, "RepoDigests": [], "Architecture": "arm64"}}))
elif words[0] == "info":
    print(json.dumps({{"ServerVersion": "28.0.0", "Runtimes": {{"nvidia": {{}}}}, "DockerRootDir": "/"}}))
elif words[0] == "ps":
    pass
elif words[0] in ("stop", "rm"):
    (running / words[-1]).unlink(missing_ok=True)
elif words[0] == "logs":
    print("what the container said")
elif words[0] == "exec" and "ray.nodes()" in text:
    nodes = json.loads((books / "nodes").read_text())
    print(json.dumps([{{"address": a, "alive": True, "gpus": 1.0}} for a in nodes]))
elif words[0] == "exec" and "nvidia-smi" in words:
    print("GPU 0: NVIDIA GB10")
elif words[0] == "exec" and "inside.py" in text:
    inside = books / ("inside-" + words[1])
    print((inside if inside.exists() else books / "inside").read_text())
elif words[0] == "exec":
    unit = running / (words[1] + "-server")
    if "start" in words:
        log = Path((books / "log").read_text())
        log.mkdir(parents=True, exist_ok=True)
        (log / "server.log").write_text((books / "server.log").read_text())
        unit.write_text(json.dumps({{"Running": True, "ExitCode": 0}}))
    if "stop" in words:
        unit.unlink(missing_ok=True)
        sys.exit(0)
    state(unit.name)
else:
    sys.exit(1)
"""

# As sshd does it: the whole command is one word for the login shell.
SSH = """#!/bin/sh
for last; do :; done
[ ! -e {books}/ssh-down ] || {{ echo "connect to host: Connection refused" >&2; exit 255; }}
# Stays there meanwhile, as ssh does.
STUB_NODE=worker HOME={books}/worker-home sh -c "$last"
"""


# Answers with what the book of this node says, if it has one.
SMI = """#!/bin/sh
cat {books}/clocks-${{STUB_NODE:-head}}
"""

IMAGE, BASE = "glm-5.3-flash-exl3:vllm-0.33.0", "vllm/vllm-openai:v0.33.0"


def an_image(letter: str, *layers: str, recipe: str = "", digest: str = "") -> dict:
    """As Docker inspects it."""
    return {
        "Id": "sha256:" + letter * 64, "RepoDigests": [digest] if digest else [], "Architecture": ARCHITECTURE,
        "RootFS": {"Layers": list(layers)}, "Config": {"Labels": {"exl3.recipe": recipe} if recipe else None},
        "Size": 3_000_000,
    }  # fmt: skip


INSIDE = {
    "packages": {"vllm": "0.33.0", "flashinfer_python": "0.7.2.post1", "torch": "2.14.0"},
    "nccl": {"/usr/lib/python3/nvidia/nccl/lib/libnccl.so.2": "ab" * 32},
}


class Api(BaseHTTPRequestHandler):
    answers: dict[str, str] = {}  # noqa: RUF012 - set once by the fixture
    damaged = False
    is_open = False  # to everyone
    delay_s = 0.0
    counters = ""
    longest = 2048
    # Of the prefix cache: how often it refuses to be emptied, what the token must be read from, and what is wrong with
    # answers whose prompt it knows.
    busy = 0
    has_route = True
    env_file: Path
    warm_text = ""
    warm_shift = 0.0
    cached: set[tuple[str, str]] = set()  # noqa: RUF012 - (salt, prompt)
    resets: list[str] = []  # noqa: RUF012 - the tokens with which it was asked
    asked: list[str] = []  # noqa: RUF012 - what was to be counted, of all tests

    def do_GET(self) -> None:
        if self.path == canary.DOOR_PATH:
            refused = 403 if self.headers["Host"] == canary.STRANGE_HOST else 401
            self.reply("{}", 200 if self.is_open else refused)
            return
        self.reply(self.counters if self.path == "/metrics" else "{}")

    def do_POST(self) -> None:
        if self.path == service.RESET_PATH:
            self.reset_cache()
            return
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        content = body["messages"][-1]["content"]
        if self.path == "/tokenize":
            self.asked.append(content)
            self.reply(json.dumps({"count": len(content.split()) + 8, "max_model_len": self.longest}))
            return
        time.sleep(self.delay_s)
        # Of a long prompt the last paragraph is the question.
        text = "!!!!" if self.damaged else self.answers[content.rpartition("\n\n")[2]]
        self.answer(body, content, text)

    def answer(self, body: dict, content: str, text: str) -> None:
        key = (body.get("cache_salt", ""), content)
        is_warm = body.get("logprobs", False) and key in self.cached
        self.cached.add(key)
        text = (self.warm_text or text) if is_warm else text
        logprob = -0.01 - (self.warm_shift if is_warm else 0)
        token = {"token": text, "logprob": logprob}
        choice = {
            "message": {"content": text}, "finish_reason": "stop",
            "logprobs": {"content": [{**token, "top_logprobs": [token, {"token": "?", "logprob": -6.0}]}]},
        }  # fmt: skip
        usage = {"prompt_tokens": 576, "prompt_tokens_details": {"cached_tokens": 512 if is_warm else 0}}
        self.reply(json.dumps({"choices": [choice], "usage": usage}))

    def reset_cache(self) -> None:
        token = self.headers["Authorization"].removeprefix("Bearer ")
        self.resets.append(token)
        lines = self.env_file.read_text().splitlines()
        code = 404 if not self.has_route else 200 if f"{service.TOKEN_NAME}={token}" in lines else 401
        emptied = self.busy == 0
        self.api.busy -= not emptied
        if code == 200 and emptied:
            self.cached.clear()
        self.reply(json.dumps({"emptied": emptied}), code)

    @property
    def api(self) -> type[Api]:
        return type(self)

    def reply(self, text: str, code: int = 200) -> None:
        self.send_response(code)
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, *_) -> None:
        pass


class Cluster:
    """The pretended pair, and the files in which the stubs keep their books."""

    def __init__(self, folder: Path, port: int) -> None:
        self.books, self.port, self.run_dir = folder / "books", port, folder / "run"
        (self.books / "running").mkdir(parents=True)
        self.home = self.books / "head-home"
        self.home.mkdir()
        (self.books / "worker-home").mkdir()
        (self.books / "server.log").write_text(READY_LOG.read_text().replace("quantization=None", "quantization=exl3"))
        (self.books / "log").write_text(str(self.run_dir / "exl3-tp2-rank0" / "log"))
        self.joined("10.0.0.1", "10.0.0.2")
        (self.books / "inside").write_text(json.dumps(INSIDE))
        for node in ("head", "worker"):
            self.clock(node, 2400)
        programs = folder / "bin"
        programs.mkdir()
        for name, text in (
            ("docker", DOCKER.format(python=sys.executable, books=str(self.books))),
            ("ssh", SSH.format(books=self.books)),
            ("nvidia-smi", SMI.format(books=self.books)),
        ):
            (programs / name).write_text(text)
            (programs / name).chmod(0o755)
        self.path = f"{programs}{os.pathsep}{os.environ['PATH']}"
        env_file = self.run_dir / "exl3-tp2-rank0" / "environment"
        own = {"answers": expected_answers(), "env_file": env_file, "cached": set(), "resets": []}
        self.api = type("StubApi", (Api,), own)
        self.server = ThreadingHTTPServer(("127.0.0.1", port), self.api)
        threading.Thread(target=self.server.serve_forever, args=(0.01,), daemon=True).start()

    def config(self, **changes: str) -> config.Config:
        settings = {
            "HEAD_IP": "10.0.0.1", "WORKER_IP": "10.0.0.2", "MODEL_DIR": str(LOCAL_MODEL), "SPEC_METHOD": "none",
            "RUN_DIR": str(self.run_dir), "PORT": str(self.port), "HEAD_CX7_IF": "eth0", "WORKER_CX7_IF": "eth0",
            "SKIP_CHECKS": ",".join(preflight.CHECKS), "RAY_TIMEOUT_S": "10", "CONTAINERS_TIMEOUT_S": "10",
            "LOAD_TIMEOUT_S": "10", "WARMUP_TIMEOUT_S": "10",
            "MEMORY_GUARD_GIB": "0",  # a real process on each node, of which a few tests are enough
        }  # fmt: skip
        return config.load(topology.TOPOLOGIES["tp2"], None, ".env", settings | changes)

    def pretend_ready(self, config: config.Config) -> cluster_state.Files:
        """As a start leaves it, but for the containers: what asks no node can be asked."""
        self.api.env_file.parent.mkdir(parents=True)
        self.api.env_file.write_text(f"{service.TOKEN_NAME}={'f00d' * 16}\n")
        files = cluster_life.files_of(config)
        url, env_file = f"http://127.0.0.1:{self.port}", str(self.api.env_file)
        files.write_state(ClusterState("ready", this_process(), url, ready=True, env_file=env_file))
        return files

    def joined(self, *addresses: str) -> None:
        (self.books / "nodes").write_text(json.dumps(addresses))

    def clock(self, node: str, sm_mhz: float) -> None:
        (self.books / f"clocks-{node}").write_text(f"{sm_mhz}, 3003, 97\n")

    def inside(self, rank: int, **packages: str) -> None:
        """What the rank finds inside; an empty version takes the package out."""
        found = {name: version for name, version in (INSIDE["packages"] | packages).items() if version}
        (self.books / f"inside-exl3-tp2-rank{rank}").write_text(json.dumps(INSIDE | {"packages": found}))

    def images(self, node: str, **names: dict) -> None:
        """What the node has, instead of one image under every name: `ours` as IMAGE names it, `base`, `previous`."""
        known = {"ours": IMAGE, "base": BASE, "previous": f"{IMAGE}-previous"}
        found = {known[name]: made for name, made in names.items()}
        (self.books / f"images-{node}").write_text(json.dumps(found))

    def images_of(self, node: str) -> dict[str, dict]:
        return json.loads((self.books / f"images-{node}").read_text())

    def daemon(self, node: str, **refused: str) -> None:
        """Ways to the GPU that the node's daemon refuses, with what it says."""
        found = {way: (gpu_ways.WAYS[way], said) for way, said in refused.items()}
        (self.books / f"daemon-{node}").write_text(json.dumps(found))

    def fail(self, *parts: str) -> None:
        (self.books / "fail").write_text(json.dumps(parts))

    def hang(self, part: str) -> None:
        """Docker does not come to its end with what has this in it, until `repair`."""
        (self.books / "hang.partial").write_text(part)
        (self.books / "hang.partial").replace(self.books / "hang")

    def repair(self) -> None:
        for name in ("fail", "ssh-down", "hang"):
            (self.books / name).unlink(missing_ok=True)

    def processes(self) -> list[str]:
        """Whatever still runs of ours on either node."""
        found = []
        for entry in Path("/proc").iterdir():
            try:
                words = (entry / "cmdline").read_bytes() if entry.name.isdigit() else b""
            except OSError:
                continue
            if any(os.fsencode(folder) in words for folder in (self.books, self.run_dir)):
                found.append(words.replace(b"\0", b" ").decode())
        return found

    def lose(self, name: str) -> None:
        (self.books / "running" / name).write_text(json.dumps({"Running": False, "ExitCode": 137}))

    @property
    def running(self) -> set[str]:
        return {file.name for file in (self.books / "running").iterdir()}

    def calls(self, *verbs: str) -> list[list[str]]:
        file = self.books / "calls"
        lines = file.read_text().splitlines() if file.exists() else []
        return [call for call in map(json.loads, lines) if call[1] in verbs]

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()


def expected_answers() -> dict[str, str]:
    return {
        question.question: " ".join(question.must_contain) for question in read_questions(LOCAL_MODEL / "canary.json")
    }
