"""The soak on a cluster's first node: in a container of the plan's image, or against the server that runs."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

from launcher import caches, console, facts, images, preflight, recipe, remote, soak, watch
from launcher.cluster_life import after_broken_off
from launcher.cluster_service import address_of, running
from launcher.cluster_state import ClusterState, Files, StartedUnit, files_of
from launcher.commands import (
    CACHES,
    INSIDE,
    NATIVE_ENVIRONMENT,
    REPOSITORY,
    SHARED_ENVIRONMENT,
    Found,
    Place,
    container_name,
    container_unit,
    gpu_words,
    runtime_of,
    table_environment,
)
from launcher.content_checks import drift_of
from launcher.errors import Exit, LauncherError
from launcher.facts import Image
from launcher.findings import GIB
from launcher.lifecycle import SOAK, signals_ignored, signals_interrupt
from launcher.plan import split_environment
from launcher.remote import Node
from launcher.soak import Job, Options
from launcher.state import process_of, this_process

# One process on one machine: nobody else is to be found.
ALONE = {"VLLM_HOST_IP": "127.0.0.1", "GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}
OF_THE_CHECKOUT = {"PYTHONPATH": str(REPOSITORY), "PYTHONDONTWRITEBYTECODE": "1"}
# vLLM takes 1,024 positions of a prompt at a time: logits in bf16 and in fp32, and what they become.
SCORED_ROWS, SCORED_BYTES = 1024, 2 + 4 + 4
# The real model reads and answers more slowly than the small one of the engines' soak. Not measured on a GB10.
SESSIONS_OVER_HTTP = 12


def run(config, options: Options) -> Exit:
    with signals_interrupt():
        return over_http(config, options) if options.running else with_engines(config, options)


# Engines of its own


def with_engines(config, options: Options) -> Exit:
    """Nothing is started, stopped or synced meanwhile: it takes the memory that a server would."""
    files = files_of(config)
    with files.lock():
        after_broken_off(files)
        refuse_running(config, files)
        soak.refuse_missing_folders()
        image = image_here(config)
        gpu = gpu_here(config)
        soak.refuse_little_memory(soak.SIDE_BY_SIDE, soak.ENGINE_GIB, float(config["MEMORY_FLOOR_GIB"]))
        if config["EXL3_GUARDS_OFF"]:
            console.say("Note: EXL3_GUARDS_OFF does not count here: every guard is on, but for bugs that need one off.")
        place = Place(config, 0, Found(str(Path.home()), image.id if image else "", gpu_way=way_here(config)))
        caches.must(here(config), ["mkdir", "-p", "--", place.outside("cache")], "its cache folder could not be made")
        job = engines_job(place, options, soak.new_folder(files.folder / f"{config.topology.name}-soak"))
        console.say(f"Soak of engines with the small model, {options.minutes} minutes at most; logs: {job.folder}")
        try:
            return finish(config, job, options, about(config, image, gpu), recorder(config, job, files))
        finally:
            files.forget_state()


def recorder(config, job: Job, files: Files) -> Callable[[int], None]:
    """Writes what `stop` and the next start have to end if this process is killed."""
    name = f"{container_name(config, 0)}-soak"
    is_docker = config["RUNTIME"] == "docker"
    units = (StartedUnit(here(config), container_unit(SOAK, name, job.argv)),) if is_docker else ()
    state = ClusterState(SOAK, this_process(), "", units=units)
    return lambda pid: files.write_state(replace(state, process=process_of(pid)))


def engines_job(place: Place, options: Options, folder: Path) -> Job:
    argv = [runtime_of(place.config).python(place.config), "-u", str(soak.ENGINES), *soak.engine_words(options, folder)]
    environment = engine_environment(place)
    if not place.is_docker:
        inherited, _ = split_environment(os.environ)
        return Job(tuple(argv), inherited | environment, folder, options.seconds, guard_gib(place.config))
    name = f"{container_name(place.config, 0)}-soak"
    more = [
        *caches.PLAIN_RUN, *gpu_words(place), "--ipc", "host",
        "--ulimit", "memlock=-1:-1", "--ulimit", "stack=67108864:67108864",
        *caches.mount(place.outside("cache"), INSIDE["cache"], writable=True),
        *(word for named, value in sorted(environment.items()) for word in ("--env", f"{named}={value}")),
    ]  # fmt: skip
    return docker_job(place.config, name, more, argv, options, folder)


def engine_environment(place: Place) -> dict[str, str]:
    """What a rank's processes are given, but for what joins it to others; no secret is in it."""
    named = {name: f"{place.seen('cache')}/{folder}" for name, folder in CACHES.items()}
    native = {} if place.is_docker else NATIVE_ENVIRONMENT
    return SHARED_ENVIRONMENT | table_environment(place.config) | named | native | ALONE | OF_THE_CHECKOUT


def docker_job(config, name: str, more, argv, options: Options, folder: Path, *read: str) -> Job:
    """A container in which all paths are those of this machine, so that what it names is what the user has."""
    plan = [str(options.plan.absolute())] if options.plan else []
    folders = [str(REPOSITORY / one) for one in soak.FOLDERS]
    mounts = [word for path in (*folders, *read, *plan) for word in caches.mount(path, path, writable=False)]
    mounts += caches.mount(str(folder), str(folder), writable=True)
    command = [*more, "--init", "--name", name, *mounts, "--entrypoint", argv[0], str(config["IMAGE"]), *argv[1:]]
    remove = ("docker", "rm", "--force", "--volumes", name)
    return Job(tuple(command), dict(os.environ), folder, options.seconds, guard_gib(config), (remove,))


# The server that runs


def over_http(config, options: Options) -> Exit:
    state = running(config)
    if state is None:
        return Exit.NOT_RUNNING
    soak.refuse_missing_folders()
    image = image_here(config)
    refuse_little_memory_beside(config)
    folder = soak.new_folder(files_of(config).folder / f"{config.topology.name}-soak")
    job = http_job(config, options, folder, state)
    console.say(f"Soak over {state.url}, {options.minutes} minutes at most; answers of others become slower meanwhile.")
    return finish(config, job, options, about(config, image, "of the server"))


def http_job(config, options: Options, folder: Path, state: ClusterState) -> Job:
    key, model = str(config["VLLM_API_KEY"] or ""), str(Path(str(config["MODEL_DIR"])).expanduser())
    asked = soak.words(
        options, folder, url=f"{state.url}/v1", model=model, **soak.edges_of(*address_of(state), key),
        chunk=flag_of_run(files_of(config), "--max-num-batched-tokens"),
    )  # fmt: skip
    if not options.sessions and not options.plan:
        asked += ["--sessions", str(SESSIONS_OVER_HTTP)]
    argv = [runtime_of(config).python(config), "-u", str(soak.OVER_HTTP), *asked]
    environment = OF_THE_CHECKOUT | {"VLLM_API_KEY": key}
    if config["RUNTIME"] != "docker":
        inherited, _ = split_environment(os.environ)
        return Job(tuple(argv), inherited | environment, folder, options.seconds, guard_gib(config))
    # Without a value in the argument list, Docker takes it from its own environment.
    named = [word for name in environment for word in ("--env", name)]
    more = ["docker", "run", "--rm", "--pull", "never", "--network", "host", *named]
    # Beside other soaks of the same server: the folder's name is nobody else's.
    job = docker_job(config, f"{container_name(config, 0)}-soak-{folder.name}", more, argv, options, folder, model)
    return replace(job, environment=job.environment | environment)


def flag_of_run(files: Files, flag: str) -> str:
    """As the server was started with, whatever the settings say since."""
    record = files.read_record() or {"ranks": []}
    commands = [command for rank in record["ranks"][:1] for command in rank["commands"] if flag in command]
    if not commands:
        raise LauncherError(f"soak: {files.record_path} names no {flag}; `restart` writes it anew.", Exit.SERVER)
    return commands[-1][commands[-1].index(flag) + 1]


def refuse_little_memory_beside(config) -> None:
    """The judge asks the server for log-probabilities of prompts, on every rank."""
    vocabulary = vocabulary_of(Path(str(config["MODEL_DIR"])).expanduser() / "config.json")
    needed = SCORED_ROWS * SCORED_BYTES * vocabulary + float(config["MEMORY_GUARD_GIB"]) * GIB
    for node in facts.gather(remote.nodes_of(config), preflight.request(config)):
        if node.memory is None:
            trouble = node.unreached or node.unprobed or node.errors.get("memory", "its memory is not told")
            raise LauncherError(f"soak: node {node.rank} ({node.address}): {trouble}; see that it answers.")
        if node.memory.available_bytes < needed:
            raise LauncherError(
                f"soak: node {node.rank} ({node.address}): {node.memory.available_bytes / GIB:.1f} GiB are available, "
                f"and judging answers of {vocabulary:,} kinds of tokens needs {needed / GIB:.1f}; `restart` with a "
                f"smaller KV_CACHE_GIB leaves more."
            )


def vocabulary_of(path: Path) -> int:
    try:
        found = json.loads(path.read_text())
        return int(found.get("text_config", found)["vocab_size"])
    except (OSError, ValueError, KeyError) as error:
        raise LauncherError(
            f"soak: {path} does not tell the model's vocabulary ({error}); see that MODEL_DIR is what the server runs.",
            Exit.SETUP,
        ) from error


# Both


def guard_gib(config) -> float:
    return float(config["MEMORY_GUARD_GIB"])


def here(config) -> Node:
    return remote.nodes_of(config)[0]


def refuse_running(config, files: Files) -> None:
    state = files.read_state()
    if state and any((watch.state_of(unit) or {}).get("Running") for unit in state.units):
        raise LauncherError(
            f"soak: {config.topology.name} runs and has this node's memory; `{console.program()} stop` first, or ask "
            f"what runs with `{console.program()} soak --running`.",
            Exit.BUSY,
        )


def image_here(config) -> Image | None:
    """None where no container is used."""
    if config["RUNTIME"] != "docker":
        return None
    image = images.inspect(here(config), str(config["IMAGE"]))
    if image is None:
        raise LauncherError(
            f"soak: image {config['IMAGE']} is not on this machine; `{console.program()} image build` makes it.",
            Exit.SETUP,
        )
    if drift := drift_of(image, recipe.digest()):
        console.say(f"Note: {drift}; what the image holds is what runs here.")
    return image


def gpu_here(config) -> str:
    """Name, driver and capability; containers need one, while plain processes may be vLLM's CPU build."""
    query = ["nvidia-smi", "--query-gpu=name,driver_version,compute_cap", "--format=csv,noheader"]
    result = remote.run(here(config), query)
    if not result.ok and config["RUNTIME"] == "docker":
        raise LauncherError(f"soak: nvidia-smi shows no GPU on this machine ({result.message}); see that it does.")
    return result.stdout.decode(errors="replace").strip() if result.ok else "none"


def way_here(config) -> str:
    """How a container gets this machine's GPU; empty where none is used."""
    if config["RUNTIME"] != "docker":
        return ""
    (found,) = facts.gather([here(config)], preflight.request(config))
    return preflight.way_of(found, str(config["IMAGE"]))


def about(config, image: Image | None, gpu: str) -> dict[str, object]:
    """For the report: what ran where."""
    git = ["git", "-C", str(REPOSITORY), "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    commit = remote.run(here(config), git)
    return {
        "topology": config.topology.name, "gpu": gpu, "environment": table_environment(config),
        "image": {"name": image.name, "id": image.id, "labels": dict(image.labels)} if image else None,
        "commit": commit.stdout.decode().strip() if commit.ok else "not told",
    }  # fmt: skip


def finish(config, job: Job, options: Options, facts_of_it: Mapping[str, object], record=lambda pid: None) -> Exit:
    try:
        code, said = soak.run(job, record)
    finally:
        with signals_ignored():
            give_back(config, job.folder)
    return soak.conclude(job, options, code, said, facts_of_it)


def give_back(config, folder: Path) -> None:
    """A container writes as root; what it wrote becomes the user's, who may read and remove it."""
    if all(path.lstat().st_uid == os.getuid() for path in folder.rglob("*")):
        return
    mount = caches.mount(str(folder), str(folder), writable=True)
    owner = f"{os.getuid()}:{os.getgid()}"
    command = [*caches.PLAIN_RUN, *mount, "--entrypoint", "chown", str(config["IMAGE"]), "-R", owner, str(folder)]
    soak.run_briefly(command)
