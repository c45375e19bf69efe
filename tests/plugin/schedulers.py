"""vLLM's own schedulers over made-up cache groups and requests, with a model's answers made up too."""

import copy
import random
from collections import deque
from dataclasses import dataclass, field

import torch
from vllm import SamplingParams
from vllm.config import SpeculativeConfig
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
from vllm.v1.core.encoder_cache_manager import EncoderCacheManager
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash, resolve_kv_cache_block_sizes
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec, MambaSpec
from vllm.v1.outputs import DraftTokenIds, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

MODEL = "models/local"
VOCAB = 256
STEPS = 2_000  # more than any test needs; a request that never ends is a failure


@dataclass(frozen=True)
class Case:
    budget: int = 300
    block: int = 512
    drafts: int = 0
    align: bool = True  # with the prefix cache; without, states are never reused
    ahead: bool = False  # async scheduling
    seats: int = 4
    blocks: int = 200
    attention_block: int | None = None
    image_cache: int = 0
    priorities: bool = False  # --scheduling-policy priority; else first come, first served


def engine_config():
    from vllm.engine.arg_utils import EngineArgs

    return EngineArgs(model=MODEL, skip_tokenizer_init=True, max_model_len=2048).create_engine_config()


def with_values(part, **values):
    part = copy.copy(part)
    for name, value in values.items():
        setattr(part, name, value)
    return part


def with_case(config, case: Case):
    """A copy of vLLM's configuration with what `case` says, as an engine would have it before the scheduler."""
    drafts = None
    if case.drafts:
        drafts = SpeculativeConfig(
            method="ngram", num_speculative_tokens=case.drafts, prompt_lookup_max=3,
            target_model_config=config.model_config, target_parallel_config=config.parallel_config,
        )  # fmt: skip
    config = with_values(config, speculative_config=drafts)
    config.scheduler_config = with_values(
        config.scheduler_config, max_num_seqs=case.seats, max_num_batched_tokens=case.budget,
        max_num_scheduled_tokens=case.budget, enable_chunked_prefill=True, async_scheduling=case.ahead,
        policy="priority" if case.priorities else "fcfs",
    )  # fmt: skip
    config.cache_config = with_values(
        config.cache_config, block_size=min(case.block, case.attention_block or case.block),
        enable_prefix_caching=case.align, mamba_cache_mode="align" if case.align else "none",
        mamba_block_size=case.block, num_gpu_blocks=case.blocks,
    )  # fmt: skip
    return config


def cache_groups(case: Case) -> KVCacheConfig:
    """Attention and recurrent state, as vLLM plans them for a hybrid model."""
    attention = FullAttentionSpec(
        block_size=case.attention_block or case.block, num_kv_heads=1, head_size=8, dtype=torch.float32
    )
    state = MambaSpec(
        block_size=case.block if case.align else 2048, shapes=((8,),), dtypes=(torch.float32,),
        mamba_cache_mode="align" if case.align else "none", num_speculative_blocks=case.drafts,
    )  # fmt: skip
    groups = [KVCacheGroupSpec(["attention"], attention), KVCacheGroupSpec(["state"], state)]
    return KVCacheConfig(num_blocks=case.blocks, kv_cache_tensors=[], kv_cache_groups=groups)


@dataclass(frozen=True)
class Chunk:
    request: str
    start: int
    count: int
    prefill: bool  # tokens that were known before the step, other than the newest


@dataclass
class Run:
    """Drives one scheduler. `schedule` and answers follow each other at once, or one step apart with `ahead`."""

    scheduler: object
    case: Case
    random: random.Random
    hasher: object
    chunks: list[Chunk] = field(default_factory=list)
    hits: int = 0  # requests that began with what the prefix cache had
    preempted: int = 0  # requests that were resumed after having lost their blocks

    def add(
        self, name: str, tokens: list[int], answer: int, images: list[tuple[int, int]] = (), priority: int = 0
    ) -> None:
        features = [
            MultiModalFeatureSpec(None, "image", f"{name}-{offset}", PlaceholderRange(offset=offset, length=length))
            for offset, length in images
        ]
        self.scheduler.add_request(Request(
            request_id=name, prompt_token_ids=tokens, pooling_params=None, mm_features=features,
            priority=priority,
            sampling_params=SamplingParams(max_tokens=answer, ignore_eos=True), block_hasher=self.hasher,
        ))  # fmt: skip

    def abort(self, name: str) -> None:
        self.scheduler.finish_requests(name, RequestStatus.FINISHED_ABORTED)

    def step(self):
        output = self.scheduler.schedule()
        self.hits += sum(request.num_computed_tokens > 0 for request in output.scheduled_new_reqs)
        self.preempted += len(output.scheduled_cached_reqs.resumed_req_ids)
        for name, count in output.num_scheduled_tokens.items():
            request = self.scheduler.requests[name]
            start = request.num_computed_tokens - count
            self.chunks.append(Chunk(name, start, count, start < request.num_tokens - 1))
        return output

    def answer(self, output, reading: set[str]) -> None:
        names = list(output.num_scheduled_tokens)
        sampled = self.tokens(output, reading)
        indices = {name: index for index, name in enumerate(names)}
        self.scheduler.update_from_output(output, ModelRunnerOutput(names, indices, sampled))
        if self.case.drafts and not self.case.ahead:
            drafted = [[1] * self.case.drafts for _ in names]
            self.scheduler.update_draft_token_ids(DraftTokenIds(names, drafted))

    def tokens(self, output, reading: set[str]) -> list[list[int]]:
        """Each request but those that are still `reading` gets a token, and as many drafts as chance accepts."""
        names = list(output.num_scheduled_tokens)
        drafts = [len(output.scheduled_spec_decode_tokens.get(name, ())) for name in names]
        counts = [0 if name in reading else 1 + self.random.randint(0, most)
                  for name, most in zip(names, drafts, strict=True)]  # fmt: skip
        return [[self.random.randrange(VOCAB) for _ in range(count)] for count in counts]

    def finish(self, between=lambda step: None) -> list[Chunk]:
        """Run until nothing is left; `between(step)` may add requests or end them. Returns what was scheduled."""
        flying = deque()
        for number in range(STEPS):
            between(number)
            output = self.step()
            if output.num_scheduled_tokens:
                flying.append((output, {r.request_id for r in self.scheduler.running if r.is_prefill_chunk}))
            if flying and (len(flying) > int(self.case.ahead) or not output.num_scheduled_tokens):
                self.answer(*flying.popleft())
            if not flying and not self.scheduler.has_unfinished_requests():
                return self.chunks
        raise AssertionError(f"not over after {STEPS} steps: {[r.request_id for r in self.scheduler.running]} run")


def start(make, config, case: Case, seed: int = 0, run: type[Run] = Run) -> Run:
    """`make` is a scheduler class or what stands for one."""
    config, groups = with_case(config, case), cache_groups(case)
    block, hash_block = resolve_kv_cache_block_sizes(groups, config)
    scheduler = make(
        vllm_config=config, kv_cache_config=groups, structured_output_manager=StructuredOutputManager(config),
        block_size=block, hash_block_size=hash_block,
    )  # fmt: skip
    if case.image_cache:
        scheduler.max_num_encoder_input_tokens = case.image_cache
        scheduler.encoder_cache_manager = EncoderCacheManager(cache_size=case.image_cache)
    init_none_hash(hash)
    hasher = get_request_block_hasher(hash_block, lambda value: repr(hash(value)).encode()) if case.align else None
    return run(scheduler, case, random.Random(seed), hasher)
