"""One engine of a soak in a process of its own: an arm that answers a plan, or the judge that reads the answers.

python engine.py arm '{...}', or judge '{...}': run.py starts both, and its `order` says what they are told.
"""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
from dataclasses import asdict
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path += [str(HERE), str(ROOT / "tests" / "gpu" / "engine"), str(ROOT)]

import arms
import bugs
import exchange
import groups
import judge
import probes
import sessions
import state_judge
from drive import Soak
from words import Words

ROOM = 8  # tokens that the judge's context is longer: it asks for one more
METRICS = {
    "preemptions": "vllm:num_preemptions",
    "drafted": "vllm:spec_decode_num_draft_tokens",
    "accepted": "vllm:spec_decode_num_accepted_tokens",
}


def start(model: Path, platform: arms.Platform, **options):
    """vLLM with the plugin, in this process."""
    os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    if platform.name == "cpu":
        os.environ |= {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
        import vllm_exl3

        vllm_exl3.register()  # before vLLM looks for torchvision's operators
        from vllm import LLM

        fixed = {"dtype": "bfloat16", "skip_tokenizer_init": True, "seed": 0}
        return LLM(str(model), **fixed | options)
    import arm  # of the engine proof: what works on a GPU machine

    arm.settle_environment()
    return arm.start(str(model), options)


def start_judge(model: Path, platform: arms.Platform, kv: str, longest: int):
    options = arms.options(arms.plain(kv), platform)
    length = longest + ROOM
    sizes = {"max_model_len": length, "max_num_batched_tokens": length, "max_num_seqs": 1}
    if platform.name != "cpu":
        sizes["kv_cache_memory_bytes"] = 1 << 30
    return start(model, platform, **options | sizes)


def start_arm(model: Path, platform: arms.Platform, one: arms.Arm, order: dict):
    """The plain arm reads every prompt in one chunk, so that chunking cannot lift the floor."""
    options = arms.options(one, platform)
    draft = options.get("speculative_config", {})
    if "model" in draft:
        options["speculative_config"] = draft | {"model": str(Path(order["models"]) / draft["model"])}
    is_whole = order["plain"] or platform.name == "cpu"
    chunk = order["longest"] + order["seats"] if is_whole else order["chunk"]
    sizes = {"max_model_len": order["longest"], "max_num_batched_tokens": chunk, "max_num_seqs": order["seats"],
             "disable_log_stats": False}  # fmt: skip
    if platform.name != "cpu":
        sizes |= {"kv_cache_memory_bytes": order["pool_mib"] << 20, "tensor_parallel_size": order["tp"]}
    return start(model, platform, **options | sizes | order.get("options", {}))


def edges_of(llm, longest: int) -> sessions.Edges:
    """What is special in this engine, as it says itself."""
    config = llm.llm_engine.vllm_config
    cache, sizes = config.cache_config, config.compilation_config.cudagraph_capture_sizes or []
    graphs = tuple(size for size in sizes if size <= 64) or sessions.Edges.graphs
    chunk, seats = config.scheduler_config.max_num_batched_tokens, config.scheduler_config.max_num_seqs
    return sessions.Edges(cache.block_size, chunk, longest, seats, graphs=graphs)


def metrics(llm) -> dict[str, int]:
    values = {metric.name: metric.value for metric in llm.get_metrics() if hasattr(metric, "value")}
    return {ours: values[name] for ours, name in METRICS.items() if name in values}


def answer(order: dict) -> None:
    one, work, name = arms.named(order["arm"]), Path(order["work"]), order["name"]
    begin, platform = time.monotonic(), arms.Platform(**order["platform"])

    def say(line: str) -> None:
        print(f"{name}: {time.monotonic() - begin:6.1f} s  {line}", flush=True)

    model, plan = Path(order["models"]) / arms.model_of(one), None
    if order["plan"]:  # in the engine that it failed in
        plan = sessions.from_json(Path(order["plan"]).read_text())
        order |= {"chunk": plan.edges.chunk, "longest": plan.edges.longest, "seats": plan.edges.seats}
    llm, words = start_arm(model, platform, one, order), Words(model)
    say("engine is up")
    if plan is None:
        edges, first = edges_of(llm, order["longest"]), bugs.BUGS[order["bug"]].edges if order["bug"] else ()
        plan = sessions.make_plan(order["seed"], order["sessions"], edges, first=first)
    (work / f"{name}.plan.json").write_text(sessions.to_json(plan))
    if order["bug"]:
        bugs.BUGS[order["bug"]].plant(llm)

    def verdict(candidate: sessions.Plan, with_states: bool = False) -> tuple[dict, Soak]:
        soak = Soak(llm, words, candidate, say)
        answers = soak.run()
        states, wrong = save_states(llm, one, order, candidate, answers, say) if with_states else (None, {})
        said = exchange.ask(work, name, one.kv, order["plain"], answers, states, order["judge"])
        return said | wrong, soak

    said, soak = verdict(plan, with_states=order["probes"] > 0)
    report = said | {"counts": asdict(soak.counts), "plan": f"{name}.plan.json", **metrics(llm)}
    if order["bug"] and (effects := bugs.BUGS[order["bug"]].effects):
        report["effects"] = effects()
    say(f"{said['turns']} turns, largest margin {said['largest']}, {said['excused']} tokens excused by rounding, "
        f"{len(said['findings'])} findings")  # fmt: skip
    if said["findings"] and order["reruns"]:
        exchange.write(work / f"{name}.report.json", report)  # time may be over before a smaller plan is found
        llm.reset_prefix_cache()
        smaller, used = sessions.shrink(plan, lambda candidate: bool(_again(llm, verdict, candidate)), order["reruns"])
        (work / f"{name}.small.json").write_text(sessions.to_json(smaller))
        report["shrunk"] = {"plan": str(work / f"{name}.small.json"), "sessions": len(smaller.sessions),
                            "turns": smaller.turns, "reruns": used}  # fmt: skip
        say(f"shrunk to {len(smaller.sessions)} sessions, {smaller.turns} turns in {used} reruns")
    exchange.write(work / f"{name}.report.json", report | {"seconds": round(time.monotonic() - begin, 1)})


def save_states(llm, one: arms.Arm, order: dict, plan: sessions.Plan, answers: list, say) -> tuple[str | None, dict]:
    """(name of a file in the work folder, {}), or (None, what the report says instead): the tokens' verdict goes on."""
    begin = time.monotonic()
    try:
        found = probes.of_soak(llm, answers, plan.edges, plan.seed, order["probes"], one)
        file = f"{order['name']}.states.pt"
        state_judge.save(Path(order["work"]) / file, found)
    except Exception as error:  # whatever it is, it is told and counts
        traceback.print_exc()
        return None, {"states": {"error": f"the states could not be read: {error!r}"}}
    hits = sum(probe.cached > 0 for probe in found)
    say(f"{len(found)} states of {order['probes']} probes, {hits} after a hit, {time.monotonic() - begin:.1f} s")
    return file, {}


def _again(llm, verdict, candidate: sessions.Plan) -> list:
    """The findings of a plan in an engine whose prefix cache is empty."""
    llm.reset_prefix_cache()
    return verdict(candidate)[0]["findings"]


def read(order: dict) -> None:
    platform = arms.Platform(**order["platform"])
    reader = judge.Reader(start_judge(Path(order["models"]) / "local", platform, order["kv"], order["longest"]))
    bench = state_judge.Bench(order["kv"], reader.state)
    score = lambda answers: judge.score(reader, answers, reader.again)
    exchange.serve(Path(order["work"]), order["kv"], score, order.get("floor"), bench, order["number"])


if __name__ == "__main__":
    groups.end_with_runner()
    {"arm": answer, "judge": read}[sys.argv[1]](json.loads(sys.argv[2]))
    sys.stdout.flush()
    os._exit(0)  # nothing that vLLM does at exit is part of a soak
