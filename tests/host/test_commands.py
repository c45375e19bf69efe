import csv
import json
import re
import shlex
import tempfile

import pytest
from cluster_settings import ADMIN, IMAGE_ID, SECRET, TOKEN, fabrics, settings
from hypothesis import given
from hypothesis import strategies as st

from launcher import commands, refusals, runner, vllm_flags
from launcher.commands import Found, Place
from launcher.errors import LauncherError
from launcher.table import TABLE, Goes

FOUND = Found("/home/spark", IMAGE_ID, TOKEN, gpu_way="gpus")


def value_of(argv, flag):
    return argv[list(argv).index(flag) + 1]


def environment(rank, gids=(3, 5), **changes):
    return commands.rank_environment(settings(**changes), fabrics(2, gids)[rank], rank, FOUND)


# Environment


def test_each_rank_has_its_own_address_and_links():
    head, worker = environment(0), environment(1)
    assert head["VLLM_HOST_IP"] == "10.10.0.1" and worker["VLLM_HOST_IP"] == "10.10.0.2"
    assert worker["NCCL_SOCKET_IFNAME"] == "=enp1s0" and worker["GLOO_SOCKET_IFNAME"] == "enp1s0"
    assert worker["NCCL_IB_HCA"] == "=roce1a,roce1b"
    assert (head["NCCL_IB_GID_INDEX"], worker["NCCL_IB_GID_INDEX"]) == ("3", "5")
    assert "NCCL_IB_ADDR_RANGE" not in head


def test_gid_index_that_differs_between_rails_is_absent_and_found_by_address():
    worker = environment(1, gids=(3, None))
    assert "NCCL_IB_GID_INDEX" not in worker
    assert worker["NCCL_IB_ROCE_VERSION_NUM"] == "2" and worker["NCCL_IB_ADDR_RANGE"] == "10.10.0.0/23"


def test_gid_index_zero_is_a_value():
    assert environment(1, gids=(3, 0))["NCCL_IB_GID_INDEX"] == "0"


def test_no_variable_is_ever_empty():
    for rank in (0, 1):
        for gids in ((3, 5), (None, None)):
            assert all(environment(rank, gids).values())


def test_ranks_differ_only_in_the_names_of_a_node():
    head, worker = environment(0), environment(1)
    differing = {name for name in {*head, *worker} if head.get(name) != worker.get(name)}
    assert differing and differing <= set(commands.NODE_ENVIRONMENT)


def test_names_that_a_worker_must_do_without_are_kept_from_ray():
    """The head has an index, the worker has none: rank 0's must not be copied there."""
    head, worker = environment(0, gids=(3, None), VLLM_API_KEY=SECRET), environment(1, gids=(3, None))
    kept = set(json.loads(commands.not_carried_file()))
    assert set(head) - set(worker) <= kept
    assert {"NCCL_IB_GID_INDEX", "VLLM_API_KEY"} <= set(head) - set(worker)


def test_key_of_the_plugins_routes_is_given_to_rank_0_only():
    found = Found(admin_token=ADMIN)
    given = [commands.rank_environment(settings(), None, rank, found) for rank in (0, 1)]
    assert [one.get("EXL3_ADMIN_TOKEN") for one in given] == [ADMIN, None]
    assert [one["VLLM_PLUGINS"] for one in given] == ["exl3", "exl3"]


def test_key_is_given_to_rank_0_only():
    assert environment(0, VLLM_API_KEY=SECRET)["VLLM_API_KEY"] == SECRET
    assert SECRET not in environment(1, VLLM_API_KEY=SECRET).values()
    assert "VLLM_API_KEY" not in environment(0)


def test_guards_are_in_every_rank():
    for rank in (0, 1):
        given_to = environment(rank)
        assert given_to["VLLM_DISABLE_SHARED_EXPERTS_STREAM"] == "1"
        assert given_to["NCCL_NVLS_ENABLE"] == given_to["NCCL_CUMEM_ENABLE"] == given_to["NCCL_IB_DISABLE"] == "0"
        assert given_to["VLLM_USE_NCCL_SYMM_MEM"] == "0"
        assert given_to["HF_HUB_OFFLINE"] == given_to["TRANSFORMERS_OFFLINE"] == "1"
        assert given_to["RAY_memory_monitor_refresh_ms"] == "0"
        assert (given_to["RAY_AUTH_MODE"], given_to["RAY_AUTH_TOKEN"]) == ("token", TOKEN)


def test_settings_of_the_plugin_are_variables():
    assert environment(1, EXL3_FAT_GROUPED=0, MLA_GEOMETRY="padded")["EXL3_FAT_GROUPED"] == "0"
    assert environment(1, MLA_GEOMETRY="padded")["MLA_GEOMETRY"] == "padded"
    assert (environment(1)["PDL"], environment(1, PDL=1)["PDL"]) == ("0", "1")


def test_ray_is_absent_from_mp():
    assert not [name for name in environment(0, EXECUTOR="mp") if name.startswith("RAY_")]


def test_caches_belong_to_an_image():
    place = Place(settings(), 1, FOUND)
    assert place.cache == "/srv/cache/0a1b2c3d0a1b"
    assert Place(settings(RUNTIME="native"), 1, FOUND).cache == "/srv/cache/native"


def test_home_is_the_nodes_own():
    config = settings(REMOTE_DIR="~/.glm")
    assert Place(config, 1, FOUND).folder == "/home/spark/.glm/exl3-tp2-rank1"
    assert Place(config, 1).folder == "<found at start: node 1 home>/.glm/exl3-tp2-rank1"


def test_environment_file_has_one_line_per_name():
    assert commands.environment_file({"B": 'two "words" $HOME', "A": '{"x":1}'}) == b'A={"x":1}\nB=two "words" $HOME\n'


@given(st.dictionaries(
    st.from_regex(r"[A-Za-z_][A-Za-z0-9_]*", fullmatch=True),
    st.text(st.characters(exclude_characters="\0\n\r", exclude_categories=["Cs"])),
))  # fmt: skip
def test_environment_file_is_read_back_whole(environment):
    with tempfile.NamedTemporaryFile() as file:
        file.write(commands.environment_file(environment))
        file.flush()
        assert runner.read_environment(file.name) == environment


@pytest.mark.parametrize("value", ["a\nB=c", "a\r", "a\0"])
def test_environment_file_refuses_line_breaks(value):
    with pytest.raises(LauncherError, match="NAME: the value holds a line break"):
        commands.environment_file({"NAME": value})


# Ray


def test_ray_is_pinned_to_the_fabric():
    head, worker = commands.ray_start(settings(), 0), commands.ray_start(settings(), 1)
    assert "--head" in head and value_of(head, "--port") == "6379" and value_of(head, "--include-dashboard") == "false"
    assert value_of(worker, "--address") == "10.10.0.1:6379" and "--head" not in worker
    assert value_of(worker, "--node-ip-address") == "10.10.0.2"
    for argv in (head, worker):
        assert value_of(argv, "--num-gpus") == "1"
        assert int(value_of(argv, "--object-store-memory")) < 1 << 30
        assert "--disable-usage-stats" in argv and "--block" in argv


def test_every_port_of_ray_follows_ray_port():
    argv = commands.ray_start(settings(RAY_PORT=7000), 1)
    chosen = [int(value_of(argv, flag)) for flag in commands.RAY_PORTS]
    assert len(set(chosen)) == len(chosen) and all(7000 < port < 7000 + refusals.RAY_PORT_SPAN for port in chosen)


# Server


def test_server_command_is_as_reviewed():
    argv = commands.server(settings(MAX_MODEL_LEN=850000), 0)
    assert argv[:3] == ["python3", "-m", "vllm.entrypoints.openai.api_server"]
    for flag, value in {
        "--model": "/model",
        "--served-model-name": "GLM-5.3-Flash-EXL3",
        "--quantization": "exl3",
        "--host": "127.0.0.1",
        "--port": "8888",
        "--tensor-parallel-size": "2",
        "--distributed-executor-backend": "ray",
        "--max-model-len": "850000",
        "--kv-cache-dtype": "fp8",
        "--tool-call-parser": "glm47",
        "--reasoning-parser": "glm47",
        "--additional-config": '{"kda_prefill_backend":"triton"}',
    }.items():
        assert value_of(argv, flag) == value
    assert "--enable-auto-tool-choice" in argv and "--no-enable-flashinfer-autotune" in argv


def test_draft_has_its_own_cache_type_and_attention():
    argv = commands.server(settings(SPEC_METHOD="dflash", SPEC_TOKENS=7), 0)
    assert json.loads(value_of(argv, "--speculative-config")) == {
        "method": "dflash", "model": "/draft", "num_speculative_tokens": 7, "kv_cache_dtype": "auto",
        "attention_backend": "FLASH_ATTN", "draft_tensor_parallel_size": 2,
    }  # fmt: skip


def test_another_attention_of_the_draft_is_taken_and_warned_about():
    config = settings(SPEC_METHOD="dflash", DRAFT_ATTENTION="TRITON_ATTN")
    draft = json.loads(value_of(commands.server(config, 0), "--speculative-config"))
    assert draft["attention_backend"] == "TRITON_ATTN" and refusals.refusals(config) == []
    (note,) = refusals.notes(config)
    assert note.startswith("DRAFT_ATTENTION=TRITON_ATTN: ") and "on a Spark it was not measured" in note


def test_mtp_needs_no_model_and_none_needs_no_flag():
    argv = commands.server(settings(SPEC_METHOD="mtp", SPEC_TOKENS=3), 0)
    assert json.loads(value_of(argv, "--speculative-config")) == {"method": "mtp", "num_speculative_tokens": 3}
    assert "--speculative-config" not in commands.server(settings(SPEC_METHOD="none"), 0)


def test_what_does_not_divide_by_three_is_not_sliced():
    argv = commands.server(settings("tp3", SPEC_METHOD="dflash", SPEC_TOKENS=7), 0)
    assert json.loads(value_of(argv, "--speculative-config"))["draft_tensor_parallel_size"] == 1
    assert value_of(argv, "--mm-encoder-tp-mode") == "data" and "--enable-expert-parallel" in argv


@pytest.mark.parametrize(
    ("changes", "present", "absent"),
    [
        ({"PREFIX_CACHE": 0}, "--no-enable-prefix-caching", "--enable-prefix-caching"),
        ({"PREFIX_CACHE": 1}, "--enable-prefix-caching", "--no-enable-prefix-caching"),
        ({"ASYNC_SCHEDULING": 0}, "--no-async-scheduling", "--async-scheduling"),
        ({"AUTOTUNE": 1}, "--port", "--no-enable-flashinfer-autotune"),
        ({"ENFORCE_EAGER": 1}, "--enforce-eager", "--headless"),
        ({"VISION": 0}, "--language-model-only", "--limit-mm-per-prompt"),
        ({"VISION": 1}, "--limit-mm-per-prompt", "--language-model-only"),
    ],
)
def test_switches_are_flags(changes, present, absent):
    argv = commands.server(settings(**changes), 0)
    assert present in argv and absent not in argv


def test_fixed_cache_size_is_given_in_bytes():
    argv = commands.server(settings(KV_CACHE_GIB="1.5"), 0)
    assert value_of(argv, "--kv-cache-memory-bytes") == str(3 << 29)
    assert "--kv-cache-memory-bytes" not in commands.server(settings(KV_CACHE_GIB=""), 0)


@pytest.mark.parametrize(
    ("changes", "host"),
    [({}, "127.0.0.1"), ({"VLLM_API_KEY": SECRET}, "0.0.0.0"), ({"BIND": "0.0.0.0"}, "0.0.0.0"),
     ({"BIND": "10.10.0.1", "VLLM_API_KEY": SECRET}, "10.10.0.1")],
)  # fmt: skip
def test_api_listens_on_loopback_unless_told_otherwise(changes, host):
    argv = commands.server(settings(**changes), 0)
    assert value_of(argv, "--host") == host
    assert SECRET not in " ".join(argv)


def test_mp_ranks_differ_in_number_and_head_only():
    head, worker = (commands.server(settings(EXECUTOR="mp"), rank) for rank in (0, 1))
    assert head[:3] == ["vllm", "serve", "/model"]
    assert "--model" not in head and "--headless" not in head and worker[-1] == "--headless"
    assert value_of(worker, "--master-addr") == "10.10.0.1" and value_of(worker, "--master-port") == "29501"
    worker[worker.index("--node-rank") + 1] = "0"
    assert worker[:-1] == head


def test_native_runs_modules_of_its_python():
    config = settings(RUNTIME="native", MODEL_DIR="/data/my model")
    argv = commands.server(config, 0)
    assert argv[:5] == ["/opt/env/bin/python", "-m", "vllm.entrypoints.openai.api_server", "--model", "/data/my model"]
    argv = commands.server(settings(RUNTIME="native", EXECUTOR="mp"), 1)
    assert argv[:5] == ["/opt/env/bin/python", "-m", "vllm.entrypoints.cli.main", "serve", "/data/glm"]
    assert commands.ray_start(config, 1)[:4] == ["/opt/env/bin/python", "-m", "ray.scripts.scripts", "start"]


def test_users_own_arguments_come_last_and_whole():
    argv = commands.server(settings(EXTRA_ARGS="--seed 7 --chat-template '/a b/c.jinja'"), 0)
    assert argv[-4:] == ["--seed", "7", "--chat-template", "/a b/c.jinja"]


def test_every_flag_is_unique():
    names = [flag.name for flag in vllm_flags.FLAGS]
    assert len(names) == len(set(names))


def test_every_setting_of_the_server_has_the_flag_that_the_table_names():
    for row in TABLE:
        if row.goes is Goes.SERVER and row.name != "EXTRA_ARGS":
            carried = {vllm_flags.base_name(flag.name) for flag in vllm_flags.FLAGS if row.name in flag.settings}
            assert vllm_flags.base_name(row.flag) in carried | set(vllm_flags.RESERVED), row.name


# Docker


def test_container_is_as_reviewed():
    argv = commands.docker_run(settings(SPEC_METHOD="none"), 1, "/e", ["ray", "start", "--block"], FOUND)
    assert argv[:3] == ["docker", "run", "--detach"] and value_of(argv, "--name") == "exl3-tp2-rank1"
    for flag, value in {"--network": "host", "--ipc": "host", "--device": "/dev/infiniband", "--cap-add": "IPC_LOCK",
                        "--gpus": "all", "--env-file": "/e", "--pull": "never",
                        "--entrypoint": "ray"}.items():  # fmt: skip
        assert value_of(argv, flag) == value
    assert "memlock=-1:-1" in argv and argv[-2:] == ["start", "--block"]
    assert not any(word.startswith(("--env=", "-e")) for word in argv)
    mounted = [argv[index + 1] for index, word in enumerate(argv) if word == "--mount"]
    assert mounted == [
        "type=bind,source=/srv/cache/0a1b2c3d0a1b,target=/cache",
        "type=bind,source=/srv/exl3/exl3-tp2-rank1/config,target=/exl3/config,readonly",
        "type=bind,source=/srv/exl3/exl3-tp2-rank1/log,target=/exl3/log",
        "type=bind,source=/data/glm,target=/model,readonly",
    ]


@given(st.text(st.characters(exclude_characters="\0\n\r", exclude_categories=["Cs"]), min_size=1))
def test_mounts_take_any_path(name):
    line = commands.comma_separated(["type=bind", f"source=/{name}", "target=/model"])
    assert next(csv.reader([line])) == ["type=bind", f"source=/{name}", "target=/model"]


def test_server_beside_ray_is_started_inside_the_container():
    place = Place(settings(), 0, FOUND)
    unit = commands.docker_inner_unit(place, "server", ["vllm"])
    assert unit.start[:5] == ("docker", "exec", "exl3-tp2-rank0", "python3", "/exl3/config/runner.py")
    assert unit.logs == ("cat", "/srv/run/exl3-tp2-rank0/log/server.log")


# Extra arguments


@pytest.mark.parametrize(
    ("word", "flag"),
    [("--seed", "--seed"), ("--kv_cache_dtype=auto", "--kv-cache-dtype"), ("-tp", "--tensor-parallel-size"),
     ("--speculative-config.method", "--speculative-config"), ("7", None), ("--", None), ("-x", None)],
)  # fmt: skip
def test_flag_is_read_as_vllm_reads_it(word, flag):
    assert vllm_flags.flag_of(word) == flag


# Refusals


def refused(topology="tp2", **changes):
    return "\n".join(refusals.refusals(settings(topology, **changes)))


@pytest.mark.parametrize("topology", ["tp2", "tp3", "tp4"])
def test_defaults_are_allowed(topology):
    assert refused(topology) == ""


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"MOE_BACKEND": "marlin"}, "MOE_BACKEND is marlin: .* clear it"),
        ({"EXTRA_ARGS": "--moe-backend marlin"}, "MOE_BACKEND is marlin"),
        ({"EXTRA_ARGS": "--moe_backend=MARLIN"}, "MOE_BACKEND is marlin"),
        ({"MLA_GEOMETRY": "compact", "EXTRA_ARGS": "-dcp 2"}, "compact and EXTRA_ARGS has --decode-context-para"),
        ({"MLA_GEOMETRY": "compact", "EXTRA_ARGS": "--kv-transfer-config '{}'"}, "compact .* --kv-transfer-config"),
        ({"EXTRA_ARGS": "--attention-config.backend TRITON_ATTN"}, "names TRITON_ATTN: .* DRAFT_ATTENTION=TRITON_ATTN"),
        ({"EXTRA_ARGS": "--attention-backend flashinfer"}, "--attention-backend: the model's is sparse MLA"),
        ({"MAX_NUM_BATCHED_TOKENS": 2048, "EXL3_GUARDS_OFF": "chunk-ends"},
         r"MAX_NUM_BATCHED_TOKENS is 2048: .* whole state block .* silently lose .* set it to \d+ or more"),
        ({"PORT": 6380}, "PORT is 6380: Ray takes the ports 6379 to 6430"),
        ({"EXECUTOR": "mp", "PORT": 29501}, "PORT and MASTER_PORT are both 29501"),
        ({"EXTRA_ARGS": "--kv-cache-dtype bfloat16"}, "--kv-cache-dtype bfloat16: the sparse .* packed FP8 rows only"),
        ({"EXTRA_ARGS": "--kv_cache_dtype=nvfp4"}, "--kv-cache-dtype nvfp4"),
        ({"EXTRA_ARGS": "--kv-cache-dtype fp8"}, "EXTRA_ARGS has --kv-cache-dtype: set KV_CACHE_DTYPE instead"),
        ({"EXTRA_ARGS": "--gpu_memory_utilization=0.9"}, "set GPU_MEM_UTIL instead"),
        ({"EXTRA_ARGS": "--no-enable-prefix-caching"}, "set PREFIX_CACHE instead"),
        ({"EXTRA_ARGS": "-tp 1"}, r"EXTRA_ARGS has -tp \(--tensor-parallel-size\)"),
        ({"EXTRA_ARGS": "--speculative-config.method mtp"}, "set SPEC_METHOD or SPEC_TOKENS"),
        ({"EXTRA_ARGS": "--max-num-s 9"}, "it abbreviates --max-num-seqs"),
        ({"EXTRA_ARGS": "--api-key x"}, "set VLLM_API_KEY"),
        ({"EXTRA_ARGS": "-asc 2"}, r"EXTRA_ARGS has -asc \(--api-server-count\): answers are watched in one process"),
        ({"EXTRA_ARGS": "--config /x.yaml"}, "write the flags into EXTRA_ARGS"),
        ({"EXTRA_ARGS": f"--seed {SECRET}", "VLLM_API_KEY": SECRET}, "EXTRA_ARGS holds the value of VLLM_API_KEY"),
    ],
)  # fmt: skip
def test_forbidden_combination_is_refused_with_its_reason(changes, told):
    assert re.search(told, refused(**changes))


def test_three_nodes_need_whole_experts():
    assert "EXPERT_PARALLEL is off on three nodes" in refused("tp3", EXPERT_PARALLEL=0)


def test_a_secret_is_not_repeated_in_its_refusal():
    assert SECRET not in refused(EXTRA_ARGS=f"--seed {SECRET}", VLLM_API_KEY=SECRET)


@pytest.mark.parametrize(
    ("nodes", "drafts", "tokens"), [(1, 0, 8704), (2, 0, 4352), (4, 0, 2304), (2, 7, 4608), (4, 7, 2304)]
)
def test_state_block_is_as_vllm_computes_it(nodes, drafts, tokens):
    assert refusals.state_block_tokens(nodes, drafts) == tokens


def test_a_step_holds_a_block_beside_all_decoding_requests_or_no_block():
    base = {"SPEC_METHOD": "none", "MAX_NUM_SEQS": 4}
    assert not refused(MAX_NUM_BATCHED_TOKENS=4356, **base)
    for tokens in (4355, 4352):
        assert "set it to 4356 or more, or below 4352" in refused(MAX_NUM_BATCHED_TOKENS=tokens, **base)
    assert not refused(MAX_NUM_BATCHED_TOKENS=4352, PREFIX_CACHE=0, **base)
    assert not refused(MAX_NUM_BATCHED_TOKENS=4351, **base)


def test_without_its_guard_a_step_holds_a_block_beside_all_decoding_requests():
    base = {"SPEC_METHOD": "none", "MAX_NUM_SEQS": 4, "EXL3_GUARDS_OFF": "topk-ids,chunk-ends"}
    assert not refused(MAX_NUM_BATCHED_TOKENS=4356, **base)
    assert "set it to 4356 or more" in refused(MAX_NUM_BATCHED_TOKENS=4355, **base)
    assert "set it to 4356 or more" in refused(MAX_NUM_BATCHED_TOKENS=2048, PREFIX_CACHE=0, **base)


@pytest.mark.parametrize("runtime", ["docker", "native"])
def test_a_step_holds_a_pool_beside_all_decoding_requests(runtime):
    base = {"RUNTIME": runtime, "SPEC_METHOD": "mtp", "SPEC_TOKENS": 3, "MAX_NUM_SEQS": 32}
    assert "set it to 132 or more" in refused(MAX_NUM_BATCHED_TOKENS=131, **base)
    assert not refused(MAX_NUM_BATCHED_TOKENS=132, **base)


def test_cpu_runs_may_take_small_steps():
    assert not refused(RUNTIME="native", MAX_NUM_BATCHED_TOKENS=2048)


def test_other_extra_arguments_are_allowed():
    words = shlex.join(["--seed", "7", "--chat-template", "--weird file", "--long-prefill-token-threshold=2048"])
    assert not refused(EXTRA_ARGS=words)


def test_guards_that_are_off_are_said_and_told_to_every_rank():
    config = settings(EXL3_GUARDS_OFF="topk-ids,decode-rows")
    assert "EXL3_GUARDS_OFF=topk-ids,decode-rows: answers may silently be wrong" in refusals.notes(config)[0]
    for rank in range(2):
        assert commands.rank_environment(config, None, rank)["EXL3_GUARDS_OFF"] == "topk-ids,decode-rows"
    assert "EXL3_GUARDS_OFF" not in commands.rank_environment(settings(), None, 0)


def test_open_door_without_a_key_is_allowed_and_said():
    config = settings(BIND="0.0.0.0")
    assert refusals.refusals(config) == [] and "everyone on the network" in refusals.notes(config)[0]
