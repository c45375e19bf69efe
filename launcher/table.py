"""The table of settings of a cluster. Examples, reference page, validation, arguments and plan are derived from it."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from launcher import kinds
from launcher.kinds import Kind
from launcher.weights.packs import of_kind


class Goes(Enum):
    """Where a setting ends up."""

    LAUNCHER = "launcher"
    ENVIRONMENT = "environment of every rank"
    SERVER = "vLLM"
    DOOR = "the API server's door"
    NODE = "one node"


class Group(Enum):
    """Chapters of the examples and of the reference page, in order."""

    NODES = "Nodes"
    SSH = "Reaching the nodes"
    FABRIC = "Network between the nodes"
    RUN = "What runs, and where it keeps things"
    MODEL = "Model and drafts"
    MEMORY = "Context and memory"
    ENGINE = "Engine"
    API = "API"
    LIMITS = "Checks and time limits"


@dataclass(frozen=True)
class Row:
    """One setting. `default` is a value, not text; a topology may have another."""

    name: str
    type: Kind
    default: object
    goes: Goes
    group: Group
    doc: str
    flag: str = ""  # the flag of vLLM that carries it, alone or with others
    choices: tuple[str, ...] = ()
    minimum: float | None = None
    maximum: float | None = None
    secret: bool = False
    reason: str = ""  # why the default is the safe one, and what would lift it
    empty: str = ""  # what an empty value means; without this an empty value puts the setting back to its default
    rank: int | None = None  # of the node that it describes

    @property
    def ambient(self) -> bool:
        """Whether the caller's environment counts. Names that other programs own may be there for their sake."""
        return not is_foreign(self.name)

    @property
    def required(self) -> bool:
        return self.type is kinds.NODE_ADDRESS

    @property
    def may_be_empty(self) -> bool:
        return bool(self.empty)

    @property
    def needs(self) -> str:
        """What a value has to be, as the object of a sentence."""
        if self.choices:
            return "one of " + ", ".join(self.choices)
        bounds = (self.minimum, self.maximum)
        return self.type.needs + ("" if None in bounds else f" from {bounds[0]:g} to {bounds[1]:g}")


FOREIGN_PREFIXES = ("NCCL_", "GLOO_", "HF_", "VLLM_")
OWN_NAMES = ("VLLM_API_KEY",)  # with such a prefix and ours all the same


def is_foreign(name: str) -> bool:
    return name.startswith(FOREIGN_PREFIXES) and name not in OWN_NAMES


# Beginning of the names of the settings that describe one node, by rank.
NODE_NAMES = ("HEAD", "WORKER", "WORKER2", "WORKER3")
FOUND = "found from the node's address at every start"


def per_node(suffix: str, kind: Kind, group: Group, doc: str, **more) -> tuple[Row, ...]:
    """One row for each node; `{which}` in the text becomes the node's name in prose."""
    prose = ("the first node (this machine)", "the second node", "the third node", "the fourth node")
    return tuple(
        Row(f"{name}_{suffix}", kind, kind.nothing, Goes.NODE, group, doc.format(which=prose[rank]), rank=rank, **more)
        for rank, name in enumerate(NODE_NAMES)
    )


NODES = per_node(
    "IP", kinds.NODE_ADDRESS, Group.NODES,
    "Address of {which}, on the link between the nodes (not on the office network). `ip -4 addr` there shows it.",
)  # fmt: skip

SSH = (
    Row("SSH_USER", kinds.USER, "", Goes.LAUNCHER, Group.SSH,
        "Who logs in on the other nodes. It has to work without a password.",
        empty="as ~/.ssh/config says, else the user who starts"),
    Row("SSH_PORT", kinds.INTEGER, 22, Goes.LAUNCHER, Group.SSH, "Port of SSH on the other nodes.",
        minimum=1, maximum=65535),
    Row("SSH_KEY", kinds.NODE_PATH, "", Goes.LAUNCHER, Group.SSH,
        "File on this machine with the private key for the other nodes.",
        empty="as ~/.ssh/config and the agent say"),
)  # fmt: skip

FABRIC = (
    *per_node("CX7_IF", kinds.INTERFACE, Group.FABRIC, "Network interface of {which}.", empty=FOUND),
    *per_node("CX7_IB", kinds.DEVICES, Group.FABRIC,
              "RDMA devices of {which}, with commas between them: both halves of the port for full speed.",
              empty=FOUND),
    *per_node("GID", kinds.INTEGER, Group.FABRIC, "Index of the RoCE v2 address in the GID table of {which}.",
              minimum=0, maximum=255, empty=FOUND,
              reason="The table shifts with restarts of the network, so an index that was right once starts to fail. "
                     "Nothing lifts this: the entry is looked up by address."),
    Row("NCCL_IB_GID_INDEX", kinds.INTEGER, None, Goes.NODE, Group.FABRIC,
        "GID index for all nodes that have none of their own.", minimum=0, maximum=255, empty=FOUND,
        reason="Often no single index is right on all nodes. Nothing lifts this: the entry is looked up by address."),
    Row("NCCL_DEBUG", kinds.CHOICE, "INFO", Goes.ENVIRONMENT, Group.FABRIC,
        "How much NCCL logs. INFO says at the start which network it took, and nothing per step.",
        choices=("VERSION", "WARN", "INFO", "TRACE")),
    Row("NCCL_NVLS_ENABLE", kinds.SWITCH, False, Goes.ENVIRONMENT, Group.FABRIC,
        "Reductions inside NVLink switches, which Sparks do not have.",
        reason="Looking for the switches can hang (NVIDIA/nccl#2167). A machine with such a switch would lift it."),
    Row("VLLM_USE_NCCL_SYMM_MEM", kinds.SWITCH, False, Goes.ENVIRONMENT, Group.FABRIC,
        "NCCL's symmetric memory, which needs NVLink.",
        reason="It takes the same path as NVLS and can hang (NVIDIA/nccl#2167). A machine with NVLink would lift it."),
    Row("NCCL_CROSS_NIC", kinds.INTEGER, None, Goes.ENVIRONMENT, Group.FABRIC,
        "Whether a ring may enter a node on one device and leave it on another: 0 never, 1 always, 2 if it helps.",
        minimum=0, maximum=2, empty="NCCL decides"),
    Row("NCCL_MIN_NCHANNELS", kinds.INTEGER, None, Goes.ENVIRONMENT, Group.FABRIC,
        "Least number of NCCL channels. Two devices can need 4 for their full speed.",
        minimum=1, maximum=64, empty="NCCL decides"),
    Row("NCCL_IB_QPS_PER_CONNECTION", kinds.INTEGER, None, Goes.ENVIRONMENT, Group.FABRIC,
        "Queue pairs of each RDMA connection.", minimum=1, maximum=128, empty="NCCL decides"),
    Row("NCCL_IB_TC", kinds.INTEGER, None, Goes.ENVIRONMENT, Group.FABRIC,
        "Traffic class of RDMA packets, for switches that keep a lossless class.",
        minimum=0, maximum=255, empty="NCCL decides"),
)  # fmt: skip

RUN = (
    Row("RUNTIME", kinds.CHOICE, "docker", Goes.LAUNCHER, Group.RUN,
        "docker: one container on each node. native: processes in a virtual environment that every node has.",
        choices=("docker", "native")),
    Row("EXECUTOR", kinds.CHOICE, "ray", Goes.SERVER, Group.RUN,
        "What joins the nodes: ray, which the launcher starts, or mp, which is vLLM's own.",
        flag="--distributed-executor-backend", choices=("ray", "mp")),
    Row("IMAGE", kinds.IMAGE, "glm-5.3-flash-exl3:vllm-0.33.0", Goes.LAUNCHER, Group.RUN,
        "Image of the containers; `image build` makes it (docs/image.md). With -previous behind it, the one before."),
    Row("CONTAINER_NAME_PREFIX", kinds.PREFIX, "exl3", Goes.LAUNCHER, Group.RUN,
        "Beginning of the containers' names: exl3-tp2-rank0 and so on."),
    Row("NATIVE_PYTHON", kinds.NODE_PATH, "", Goes.LAUNCHER, Group.RUN,
        "Python of the virtual environment that RUNTIME=native uses on every node.",
        empty="none; RUNTIME=native needs it"),
    Row("CACHE_DIR", kinds.NODE_PATH, "~/.cache/glm53-exl3", Goes.LAUNCHER, Group.RUN,
        "Folder on every node for compiled kernels and the like; ~ is the home folder there. May be deleted when "
        "nothing runs, at the price of a slow start.",
        reason="Compiled kernels of another image garble text (vllm#41871), so each image gets a folder inside. "
               "Nothing lifts this."),
    Row("RUN_DIR", kinds.HERE_PATH, ".run", Goes.LAUNCHER, Group.RUN,
        "Folder on this machine for state, logs and run records; what is not a whole path begins at the checkout."),
    Row("REMOTE_DIR", kinds.NODE_PATH, "~/.glm53-exl3", Goes.LAUNCHER, Group.RUN,
        "Folder on the other nodes where the launcher keeps its files; ~ is the home folder there."),
    Row("RAY_PORT", kinds.INTEGER, 6379, Goes.LAUNCHER, Group.RUN,
        "First of Ray's ports; the next 51 are Ray's too.", minimum=1024, maximum=65484),
    Row("MASTER_PORT", kinds.INTEGER, 29501, Goes.SERVER, Group.RUN,
        "Port on the first node where the ranks meet with EXECUTOR=mp.",
        flag="--master-port", minimum=1024, maximum=65535),
)  # fmt: skip

MODEL = (
    Row("MODEL_DIR", kinds.NODE_PATH, "~/models/GLM-5.3-Flash-EXL3-TR3-4bpw", Goes.SERVER, Group.MODEL,
        "Folder of the checkpoint, the same on every node; ~ is the home folder there.", flag="--model"),
    Row("WEIGHTS_SOURCE", kinds.CHOICE, None, Goes.LAUNCHER, Group.MODEL,
        "Which checkpoint `./download.sh` puts into MODEL_DIR.",
        choices=tuple(pack.id for pack in of_kind("model")),
        empty="the first, or what MODEL_DIR or the Hub's cache has of these already"),
    Row("SPEC_METHOD", kinds.CHOICE, "dflash", Goes.SERVER, Group.MODEL,
        "Who drafts tokens: dflash (the DFlash2 model), mtp (the layer in the checkpoint) or none.",
        flag="--speculative-config", choices=("none", "mtp", "dflash")),
    Row("SPEC_TOKENS", kinds.INTEGER, None, Goes.SERVER, Group.MODEL, "Tokens drafted in each step.",
        flag="--speculative-config", minimum=1, maximum=15, empty="7 with dflash, 3 with mtp"),
    Row("DRAFT_DIR", kinds.NODE_PATH, "~/models/GLM-5.3-Flash-DFlash2", Goes.SERVER, Group.MODEL,
        "Folder of the DFlash2 model, the same on every node. Read with SPEC_METHOD=dflash only.",
        flag="--speculative-config",
        reason="The draft always has a 16-bit cache of its own: it cannot read the model's packed rows. Nothing lifts "
               "this."),
    Row("DRAFT_ATTENTION", kinds.CHOICE, "FLASH_ATTN", Goes.SERVER, Group.MODEL,
        "Attention kernels of the DFlash2 model.", flag="--speculative-config", choices=("FLASH_ATTN", "TRITON_ATTN"),
        reason="TRITON_ATTN lost most drafts on the older preview of vLLM. On an H200 with vLLM 0.33.0 both accepted "
               "as many of a small draft's tokens, so that it may be chosen; the same on a Spark would lift this."),
    Row("VISION", kinds.SWITCH, True, Goes.SERVER, Group.MODEL, "Whether images and videos are taken.",
        flag="--language-model-only"),
    Row("IMAGE_LIMIT", kinds.INTEGER, 4, Goes.SERVER, Group.MODEL,
        "Images in one request. Each costs up to 8,000 tokens, and many at once have exhausted a node's memory.",
        flag="--limit-mm-per-prompt", minimum=0, maximum=64),
    Row("VIDEO_LIMIT", kinds.INTEGER, 1, Goes.SERVER, Group.MODEL, "Videos in one request; the model takes one.",
        flag="--limit-mm-per-prompt", minimum=0, maximum=1),
)  # fmt: skip

MEMORY = (
    Row("MAX_MODEL_LEN", kinds.INTEGER, 262_144, Goes.SERVER, Group.MEMORY,
        "Longest conversation in tokens, question and answer together.",
        flag="--max-model-len", minimum=64, maximum=1_048_576,
        reason="By reported figures it fits on two nodes (about 9.3 of 11 GiB), while half a million and more fits on "
               "some kits only. A computed memory budget for your nodes would lift it."),
    Row("KV_CACHE_GIB", kinds.NUMBER, 11.0, Goes.SERVER, Group.MEMORY,
        "Memory on each node for the KV cache, GiB. One conversation was reported to need about 7.4 and 7.1 more for "
        "each million tokens.",
        flag="--kv-cache-memory-bytes", minimum=0.25, maximum=100,
        empty="vLLM measures what GPU_MEM_UTIL leaves",
        reason="Measuring at the start overshoots unified memory and can wedge the host (vllm#46307), so the size is "
               "given. A computed memory budget would lift it."),
    Row("GPU_MEM_UTIL", kinds.NUMBER, 0.85, Goes.SERVER, Group.MEMORY,
        "Part of a node's memory that must be free before anything is loaded and that vLLM stays within. "
        "0.01 is about 1.2 GiB.", flag="--gpu-memory-utilization", minimum=0.05, maximum=0.95),
    Row("KV_CACHE_DTYPE", kinds.CHOICE, "fp8", Goes.SERVER, Group.MEMORY,
        "Type of the KV cache; both mean packed FP8, the only one that the attention kernels read.",
        flag="--kv-cache-dtype", choices=("fp8", "auto")),
    Row("MLA_GEOMETRY", kinds.CHOICE, "auto", Goes.ENVIRONMENT, Group.MEMORY,
        "Layout of the attention's cache rows. native and padded take 656 bytes per token and layer; compact takes "
        "528, which leaves room for a fifth more context; auto is native where the image's FlashInfer has it, else "
        "padded. docs/architecture.md compares them.",
        choices=("auto", "native", "padded", "compact"),
        reason="compact has not been measured on a Spark; such a measurement would make it the default."),
    Row("MAX_NUM_SEQS", kinds.INTEGER, 4, Goes.SERVER, Group.MEMORY, "Requests that are computed at the same time.",
        flag="--max-num-seqs", minimum=1, maximum=256),
    Row("MAX_NUM_BATCHED_TOKENS", kinds.INTEGER, 7168, Goes.SERVER, Group.MEMORY,
        "Tokens of one step. A long prompt is read in pieces of this size.",
        flag="--max-num-batched-tokens", minimum=64, maximum=65_536,
        reason="A size between one state block and a block beside all decoding requests makes prompts wait for "
               "them, and is refused; a scheduler that reads parts of blocks then would lift this. Without the guard "
               "chunk-ends smaller ones are refused too: pieces could start inside a pool of the indexer, and long "
               "contexts would silently lose tokens."),
)  # fmt: skip

ENGINE = (
    Row("EXL3_FAT_GROUPED", kinds.SWITCH, True, Goes.ENVIRONMENT, Group.ENGINE,
        "Long prompts through the grouped expert kernel. 0 is slower and for comparison."),
    Row("EXL3_FAT_CROSSOVER", kinds.INTEGER, 32, Goes.ENVIRONMENT, Group.ENGINE,
        "Steps of up to so many tokens, and in longer ones experts with up to so many rows, stay with exllamav3's "
        "kernels. 0 leaves all to the grouped kernel.", minimum=0, maximum=128,
        reason="32 is what owners measured on Sparks with an older grouped kernel; with this one it is not measured. "
               "A measurement there would make it another number."),
    Row("EXPERT_PARALLEL", kinds.SWITCH, False, Goes.SERVER, Group.ENGINE,
        "Whole experts on each node instead of slices of all. Three nodes need it.", flag="--enable-expert-parallel"),
    Row("PREFIX_CACHE", kinds.SWITCH, True, Goes.SERVER, Group.ENGINE,
        "Keep what was computed for the beginning of a prompt, for the next one that begins the same.",
        flag="--enable-prefix-caching",
        reason="Reports of wrong answers with it have no proven cause, or a guard here (docs/engine-truth.md); off, "
               "agents wait for their whole conversation at every turn. A failed soak test would make it 0."),
    Row("ASYNC_SCHEDULING", kinds.SWITCH, False, Goes.SERVER, Group.ENGINE,
        "Plan the next step while the current one runs.", flag="--async-scheduling",
        reason="A state can be found in the cache before it is written, after an abort and a retry (vllm#56525). "
               "A passed soak test with aborts would lift it."),
    Row("KDA_PREFILL_BACKEND", kinds.CHOICE, "triton", Goes.SERVER, Group.ENGINE,
        "Kernels that read long prompts in the linear attention layers.",
        flag="--additional-config", choices=("triton", "flashkda"),
        reason="FlashKDA, which vLLM would choose, is tied to garbled text in long tool sessions (vllm#56960). "
               "Warm answers equal to cold ones in the soak test would lift it; it reads prompts 2 to 4 times faster "
               "there."),
    Row("AUTOTUNE", kinds.SWITCH, False, Goes.SERVER, Group.ENGINE, "Let FlashInfer time its kernels at the start.",
        flag="--enable-flashinfer-autotune",
        reason="Timing can spin for ever on this GPU (vllm#53963), and a busy start chooses differently on each node "
               "(flashinfer#5142). A timing made idle and copied to all nodes would lift it."),
    Row("PDL", kinds.SWITCH, False, Goes.ENVIRONMENT, Group.ENGINE,
        "Let vLLM's kernels start before their predecessors end (programmatic dependent launch).",
        reason="vLLM turns it on for every GPU from Hopper on; on this one a kernel that reads too early would garble "
               "text without an error, and nobody has tested it. Equal answers with it in the soak test on a Spark "
               "would lift it."),
    Row("EXL3_GUARDS_OFF", kinds.GUARD_NAMES, (), Goes.ENVIRONMENT, Group.ENGINE,
        f"Guards against defects of vLLM that are left out, with commas between them: {', '.join(kinds.GUARDS)}. "
        "docs/engine-truth.md says what each is for.", empty="all guard",
        reason="Each keeps a known defect from giving wrong answers. A version of vLLM without the defect lifts it."),
    Row("VLLM_USE_DEEP_GEMM", kinds.SWITCH, True, Goes.ENVIRONMENT, Group.ENGINE,
        "DeepGEMM's matrix products where layers are FP8. Set 0 if the image's self-check reports a fault in them "
        "(vllm#54125)."),
    Row("MOE_BACKEND", kinds.LOWER_WORD, "", Goes.SERVER, Group.ENGINE,
        "Another implementation of the experts, for experiments.", flag="--moe-backend",
        empty="the EXL3 plugin's own"),
    Row("ENFORCE_EAGER", kinds.SWITCH, False, Goes.SERVER, Group.ENGINE,
        "No CUDA graphs: a slower server that starts faster, for finding faults.", flag="--enforce-eager"),
    Row("EXTRA_ARGS", kinds.WORDS, (), Goes.SERVER, Group.ENGINE,
        "More flags for vLLM, split into words as a shell would and never run. What has a setting here is refused.",
        empty="none"),
)  # fmt: skip

# Also flags of ./start-local.sh; overlay/vllm_exl3/door/rules.py has their names in small letters.
DOOR = (
    Row("METRICS", kinds.CHOICE, "key", Goes.DOOR, Group.API,
        "Whether `/metrics` asks for the key, where one is set.", choices=("key", "open")),
    Row("ENGINE_ROUTES", kinds.SWITCH, False, Goes.DOOR, Group.API,
        "Serve also routes of vLLM that scale, pause or profile the engine, load adapters, or render prompts.",
        reason="A client could break the engine for all others. Nothing lifts this."),
    Row("API_DOCS", kinds.SWITCH, False, Goes.DOOR, Group.API, "Serve `/docs`, `/redoc` and `/openapi.json`."),
    Row("CORS_ORIGINS", kinds.ORIGINS, (), Goes.DOOR, Group.API,
        "Web pages whose scripts may ask and read, by origin, with commas between them.", empty="no page"),
    Row("ALLOWED_HOSTS", kinds.HOST_NAMES, (), Goes.DOOR, Group.API,
        "More names under which a server without a key may be asked.",
        empty="localhost, this machine's name, and addresses"),
    Row("MAX_BODY_MIB", kinds.INTEGER, 16, Goes.DOOR, Group.API, "Largest body of a request, MiB.",
        minimum=1, maximum=1024),
    Row("MAX_N", kinds.INTEGER, 16, Goes.DOOR, Group.API, "Most answers to one prompt (`n`).",
        minimum=1, maximum=1024),
    Row("MAX_PROMPTS", kinds.INTEGER, 64, Goes.DOOR, Group.API, "Most prompts in one request.",
        minimum=1, maximum=65_536),
    Row("MAX_LOGPROBS", kinds.INTEGER, 20, Goes.DOOR, Group.API, "Most alternatives told with each token.",
        flag="--max-logprobs", minimum=1, maximum=1000),
    Row("MAX_STOP_STRINGS", kinds.INTEGER, 64, Goes.DOOR, Group.API,
        "Most stop strings of a request, and most of its bad words.", minimum=1, maximum=4096),
    Row("MAX_GRAMMAR_KIB", kinds.INTEGER, 1024, Goes.DOOR, Group.API,
        "Largest tools and response format of a request together, KiB.", minimum=1, maximum=65_536),
    Row("GRAMMAR_TIMEOUT_S", kinds.INTEGER, 10, Goes.DOOR, Group.API,
        "Seconds of processor time in which the grammars of a request have to compile.", minimum=1, maximum=600),
    Row("RECEIVE_TIMEOUT_S", kinds.INTEGER, 60, Goes.DOOR, Group.API,
        "Seconds in which a client has to send its request.", minimum=1, maximum=3600),
    Row("MAX_CONNECTIONS", kinds.INTEGER, 1024, Goes.DOOR, Group.API,
        "Most connections at a time; the oldest that waits for nothing gives its place to a new one.",
        minimum=16, maximum=65_536),
)  # fmt: skip

API = (
    Row("PORT", kinds.INTEGER, 8888, Goes.SERVER, Group.API, "Port of the API on the first node.",
        flag="--port", minimum=1, maximum=65535),
    Row("BIND", kinds.BIND_ADDRESS, "", Goes.SERVER, Group.API,
        "Address on which the API listens. 0.0.0.0 without a key lets everyone on the network in.", flag="--host",
        empty="127.0.0.1 without VLLM_API_KEY, all addresses with it"),
    Row("VLLM_API_KEY", kinds.SECRET, "", Goes.NODE, Group.API,
        "Key that clients must send. `./start.sh key` makes one. It is never printed and in no argument list.",
        secret=True, empty="no key; the API then listens on 127.0.0.1 only"),
    *DOOR,
)  # fmt: skip


def time_limit(name: str, default: int, doc: str) -> Row:
    return Row(name, kinds.INTEGER, default, Goes.LAUNCHER, Group.LIMITS, doc, minimum=1, maximum=86_400)


LIMITS = (
    Row("MEMORY_FLOOR_GIB", kinds.NUMBER, 2.0, Goes.LAUNCHER, Group.LIMITS,
        "Memory that must stay available on each node beside what the model takes, GiB.", minimum=0, maximum=100,
        reason="A node without available memory hangs instead of ending a process "
               "(NVIDIA/open-gpu-kernel-modules#1358). Nothing lifts this."),
    Row("MEMORY_GUARD_GIB", kinds.NUMBER, 1.0, Goes.LAUNCHER, Group.LIMITS,
        "While it runs: a rank is ended when less memory than this is available on its node, GiB. 0: no guard.",
        minimum=0, maximum=100,
        reason="A node without available memory hangs instead of ending a process "
               "(NVIDIA/open-gpu-kernel-modules#1358). Nothing lifts this."),
    Row("SKIP_CHECKS", kinds.CHECK_NAMES, (), Goes.LAUNCHER, Group.LIMITS,
        "Names of checks that are left out, with commas between them. `./start.sh check` prints the names.",
        empty="all run"),
    time_limit("CONTAINERS_TIMEOUT_S", 120, "Seconds until every container has to run."),
    time_limit("RAY_TIMEOUT_S", 120, "Seconds until Ray has to report the GPU of every node."),
    time_limit("LOAD_TIMEOUT_S", 1800, "Seconds until the weights have to be loaded."),
    time_limit("WARMUP_TIMEOUT_S", 1800,
               "Seconds until the server has to accept requests after loading. The first start of an image compiles "
               "kernels."),
    time_limit("CANARY_TIMEOUT_S", 600, "Seconds until the first questions have to be answered."),
)  # fmt: skip

TABLE = (*NODES, *SSH, *FABRIC, *RUN, *MODEL, *MEMORY, *ENGINE, *API, *LIMITS)
ROWS = {row.name: row for row in TABLE}

# Names of the older recipe, of its containers and of programs in them, and what became of them. A star stands for any
# ending. Who meets one in a file is told the sentence.
RETIRED = {
    "ABLIT": "other weights are another folder: set MODEL_DIR",
    "CG_ESTIMATE": "the cache size is given (KV_CACHE_GIB), so no estimate of CUDA graphs enters it",
    "CHAT_TEMPLATE": "the checkpoint's own template is used; another one is `EXTRA_ARGS=--chat-template FILE`",
    "DENSE_FP8": "dense layers stay as the checkpoint has them",
    "DO_NOT_TRACK": "nothing is ever reported; no setting is needed",
    "EXL3_OVERLAY_HOST": "the plugin is part of the image; nothing is mounted over it",
    "FLASHINFER_DISABLE_VERSION_CHECK": "it would hide an old FlashInfer, which hangs or answers wrongly; it stays out",
    "FP8_FAT": "there is one kernel for long prompts: EXL3_FAT_GROUPED",
    "GLM53_*": "it steered patches of the older image, which a released vLLM does not have",
    "GLOO_SOCKET_IFNAME": "it is found from each node's address; HEAD_CX7_IF, WORKER_CX7_IF, ... overrule it",
    "HF_HOME": "weights are in MODEL_DIR and DRAFT_DIR, caches in CACHE_DIR",
    "HF_HUB_OFFLINE": "the server never asks the Hub; no setting is needed",
    "HF_TOKEN": "the server never asks the Hub; ./download.sh takes a token from your environment or the Hub's login",
    "INSTANTTENSOR_*": "weights are read by vLLM's own loader, which leaves 4 to 6 GiB more for the cache",
    "MOE_FAST": "there is one kernel for long prompts: EXL3_FAT_GROUPED",
    "NCCL_CUMEM_ENABLE": "it is always off; no setting is needed",
    "NCCL_IB_ADDR_RANGE": "the launcher sets it where the devices of a node need it",
    "NCCL_IB_DISABLE": "RDMA is always on; a node without it is a failed check",
    "NCCL_IB_HCA": "devices are found from each node's address; HEAD_CX7_IB, WORKER_CX7_IB, ... overrule them",
    "NCCL_IB_MERGE_NICS": "devices are named one by one; HEAD_CX7_IB, WORKER_CX7_IB, ... overrule them",
    "NCCL_IB_ROCE_VERSION_NUM": "it is always 2; the GID is found by address",
    "NCCL_IGNORE_CPU_AFFINITY": "NCCL's default is kept",
    "NCCL_NET": "it is always IB, so that a failing RDMA ends the start instead of slowing it",
    "NCCL_NET_PLUGIN": "NCCL's default is kept",
    "NCCL_SOCKET_IFNAME": "it is found from each node's address; HEAD_CX7_IF, WORKER_CX7_IF, ... overrule it",
    "NNODES": "the start script decides it: start.sh 2, start-tp3.sh 3, start-tp4.sh 4",
    "PYTORCH_CUDA_ALLOC_CONF": "PyTorch's default is kept",
    "RAY_AUTH_TOKEN": "the launcher makes one for each cluster",
    "RAY_memory_monitor_refresh_ms": "it is always 0: Ray would kill workers at 95 % of memory, where a Spark lives",
    "SERVED_MODEL_NAME": "the model is always called GLM-5.3-Flash-EXL3",
    "TENSOR_PARALLEL_SIZE": "the start script decides it: start.sh 2, start-tp3.sh 3, start-tp4.sh 4",
    "TILELANG_CACHE_DIR": "caches are in CACHE_DIR, one folder for each image",
    "TRANSFORMERS_OFFLINE": "the server never asks the Hub; no setting is needed",
    "TRITON_CACHE_DIR": "caches are in CACHE_DIR, one folder for each image",
    "VLLM_CACHE_ROOT": "caches are in CACHE_DIR, one folder for each image",
    "VLLM_DISABLE_SHARED_EXPERTS_STREAM": "it is always 1: with the second stream exllamav3's kernel waits for ever",
    "VLLM_ENGINE_READY_TIMEOUT_S": "set LOAD_TIMEOUT_S",
    "VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS": "a dead rank is noticed by the launcher within 30 seconds",
    "VLLM_HOST_IP": "it is each node's own address: HEAD_IP, WORKER_IP, ...",
    "VLLM_MEMORY_PROFILER_ESTIMATE_CUDAGRAPHS": "the cache size is given (KV_CACHE_GIB), so nothing is estimated",
    "VLLM_NO_USAGE_STATS": "nothing is ever reported; no setting is needed",
    # Last, since they hold for every name that begins so.
    "NCCL_*": "of NCCL's own variables only those in docs/configuration.md are passed on",
    "GLOO_*": "of Gloo's variables only the interface is passed on, and it is found",
    "HF_*": "the server never asks the Hub; weights are in MODEL_DIR and DRAFT_DIR",
    "VLLM_*": "of vLLM's own variables only those in docs/configuration.md are passed on",
}

# Names under which others know a setting whose value means the same.
OTHER_NAMES = {
    "API_KEY": "VLLM_API_KEY",
    "DFLASH_DIR": "DRAFT_DIR",
    "ENABLE_PREFIX_CACHING": "PREFIX_CACHE",
    "GPU_MEMORY_UTILIZATION": "GPU_MEM_UTIL",
    "HOST": "BIND",
    "NUM_SPECULATIVE_TOKENS": "SPEC_TOKENS",
    "VLLM_HOST": "BIND",
    "VLLM_PORT": "PORT",
    # Ranks count from 0, but the second node has no number in its name.
    "HEAD_ADDR": "HEAD_IP",
    "WORKER_ADDR": "WORKER_IP",
    **{f"WORKER1_{suffix}": f"WORKER_{suffix}" for suffix in ("IP", "CX7_IF", "CX7_IB", "GID")},
    **{f"{name}_{old}": f"{name}_{new}" for name in NODE_NAMES
       for old, new in (("IB", "CX7_IB"), ("IF", "CX7_IF"), ("GID_INDEX", "GID"), ("IB_GID_INDEX", "GID"))},
}  # fmt: skip


def what_became_of(name: str) -> str | None:
    """The sentence about a retired name, or None. A whole name wins over the family that it belongs to."""
    if name in RETIRED:
        return RETIRED[name]
    families = (family for family in RETIRED if family.endswith("*") and name.startswith(family[:-1]))
    return next((RETIRED[family] for family in families), None)
