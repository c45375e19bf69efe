import shlex
import subprocess
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from launcher import plan as plans
from launcher import settings

PYTHON = Path("/env/bin/python")
SECRET = "sk-do-not-show"


def plan_of(values, ambient=None, **changes):
    return plans.make_plan({**values, **changes}, PYTHON, ambient or {})


def test_server_command_is_as_reviewed(values):
    argv = plan_of(values).argv
    assert argv == (
        "/env/bin/python", "-m", "vllm.entrypoints.openai.api_server",
        "--model", str(values["model"]),
        "--served-model-name", "GLM-5.3-Flash-EXL3",
        "--host", "127.0.0.1",
        "--port", "8888",
        "--allowed-origins", "[]",
        "--max-logprobs", "20",
        "--max-model-len", "2048",
        "--tensor-parallel-size", "1",
        "--enable-auto-tool-choice", "--tool-call-parser", "glm47", "--reasoning-parser", "glm47",
        "--dtype", "bfloat16",
        "--enforce-eager",
        "--no-enable-prefix-caching",
        "--max-num-seqs", "8",
        "--scheduler-cls", "vllm_exl3.guards.chunk_ends.scheduler",
        "--enable-prompt-tokens-details",
    )  # fmt: skip


def test_expert_parallel_adds_one_flag(values):
    plain, parallel = plan_of(values).argv, plan_of(values, expert_parallel=True).argv
    assert parallel == (*plain, "--enable-expert-parallel")


def test_memory_and_threads_go_by_environment(values):
    environment = plan_of(values, threads=3, kv_cache_gib=2).environment
    assert (environment["OMP_NUM_THREADS"], environment["VLLM_CPU_KVCACHE_SPACE"]) == ("3", "2")
    assert plan_of(values).environment["OMP_NUM_THREADS"] == "1"


def test_ambient_values_of_names_of_others_do_not_reach_the_server(values):
    ambient = {"HF_HOME": "/elsewhere", "VLLM_USE_V1": "", "OMP_NUM_THREADS": "64", "PYTHONPATH": "/x",
               "NCCL_DEBUG": "INFO", "PATH": "/bin", "https_proxy": "http://proxy"}  # fmt: skip
    plan = plan_of(values, ambient)
    assert plan.ignored == ("HF_HOME", "NCCL_DEBUG", "OMP_NUM_THREADS", "PYTHONPATH", "VLLM_USE_V1")
    assert plan.environment["HF_HOME"] == str(values["run_dir"] / "cache/huggingface")
    assert plan.environment["OMP_NUM_THREADS"] == "1"
    assert not {"VLLM_USE_V1", "PYTHONPATH", "NCCL_DEBUG"} & set(plan.environment)
    assert plan.environment["PATH"] == "/bin" and plan.environment["https_proxy"] == "http://proxy"


def test_key_goes_by_environment_only(values):
    ambient = {"VLLM_API_KEY": SECRET}
    plan = plan_of(settings.resolve({"model": values["model"]}, ambient), ambient)
    assert plan.environment["VLLM_API_KEY"] == SECRET
    assert "VLLM_API_KEY" not in plan.ignored
    hints = plans.curl(plan.url, "q", True) + plans.openai_client(plan.url, True)
    printed = plans.describe(plan) + hints + " ".join(plan.argv)
    assert SECRET not in printed and plans.REDACTED in printed


def test_empty_key_is_no_key(values):
    plan = plan_of(settings.resolve({"model": values["model"]}, {"VLLM_API_KEY": ""}), {"VLLM_API_KEY": ""})
    assert "VLLM_API_KEY" not in plan.environment
    assert "Authorization" not in plans.curl(plan.url, "q", "VLLM_API_KEY" in plan.settings)


@given(st.lists(st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), min_size=1), min_size=1))
def test_pairs_keep_every_word(words):
    assert shlex.split(" ".join(plans.pairs(tuple(words)))) == words


def test_described_plan_is_shell_that_runs_the_same(values, tmp_path):
    folder = tmp_path / "with space and 'quote'"
    folder.mkdir()
    plan = plan_of(values, run_dir=folder, model=folder)
    script = plans.describe(plan).replace("/env/bin/python", "printf '%s\\n'", 1)
    printed = subprocess.run(["bash", "-euc", script], capture_output=True, text=True, check=True).stdout
    assert printed.splitlines() == list(plan.argv[1:])


@given(st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"])))
def test_curl_line_survives_any_question(question):
    plan = plans.Plan((), {}, {}, (), Path("/"), 8888)
    body = shlex.split(plans.curl(plan.url, question, False))[-1]
    assert plans.json.loads(body)["messages"][0]["content"] == question
