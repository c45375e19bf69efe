"""EXL3 for vLLM's routed experts."""

import torch
from vllm.config import CUDAGraphMode, get_current_vllm_config
from vllm.logger import init_logger
from vllm.model_executor.layers.fused_moe.activation import MoEActivation
from vllm.model_executor.layers.fused_moe.fused_moe_method_base import FusedMoEMethodBase
from vllm.platforms import current_platform

from vllm_exl3 import ops
from vllm_exl3.checkpoint import Exl3LoadError, Layout
from vllm_exl3.few_rows import require_one_stream
from vllm_exl3.format import (
    HADAMARD_BLOCK,
    TILE,
    Exl3FormatError,
    Exl3Tensors,
    TensorShape,
    check_marker,
    check_slice,
)  # fmt: skip
from vllm_exl3.gpu_experts import GpuExperts, Many, Plan, has_shared_suh, make_plan
from vllm_exl3.linear import refuse_incomplete
from vllm_exl3.ops import PackedExperts
from vllm_exl3.reference import decode_weight, moe_forward
from vllm_exl3.switches import switches

logger = init_logger("vllm.exl3")

PROJECTIONS = {"w1": "gate_proj", "w3": "up_proj", "w2": "down_proj"}  # vLLM's shard ids


def method_for(layout: Layout, experts: str, moe_config):
    """The method of one layer's experts (canonical name ends in `.experts`); None if all are native."""
    if not any(name.startswith(experts + ".") for name in layout.exl3):
        return None
    method = Exl3CpuMoEMethod if current_platform.is_cpu() else Exl3CudaMoEMethod
    return method(layout, experts, moe_config)


def expert_shapes(layout: Layout, experts: str, count: int, hidden: int, width: int) -> dict[str, TensorShape]:
    """Shard id -> the shape that all `count` experts share. Raises Exl3LoadError naming the odd one."""
    expected = {"w1": (hidden, width), "w3": (hidden, width), "w2": (width, hidden)}
    shapes: dict[str, TensorShape] = {}
    for expert in range(count):
        for shard, projection in PROJECTIONS.items():
            module = f"{experts}.{expert}.{projection}"
            shape = layout.exl3.get(module)
            if shape is None:
                form = "is native where the others are EXL3" if layout.is_native(module) else "is missing"
                raise Exl3LoadError(f"{module}.trellis: {form}; config.json says {count} experts")
            if (shape.in_features, shape.out_features) != expected[shard]:
                want = "x".join(map(str, expected[shard]))
                raise Exl3LoadError(f"{module}.trellis: holds {shape}, config.json asks for {want}")
            first = shapes.setdefault(shard, shape)
            if shape != first:
                raise Exl3LoadError(f"{module}: is {shape}, but {experts}.0.{projection} is {first}; expected one kind")
    if shapes["w1"] != shapes["w3"]:
        raise Exl3LoadError(
            f"{experts}.0.up_proj.trellis: is {shapes['w3']}, but gate_proj is {shapes['w1']}; gate and up of an "
            f"expert must have the same bits and codebook"
        )
    extra = layout.expert_ids(experts) - set(range(count))
    if extra:
        raise Exl3LoadError(f"{experts}.{min(extra)}: is in the checkpoint, but config.json says {count} experts")
    return shapes


class Exl3MoEMethod(FusedMoEMethodBase):
    """Loads the packed experts of a layer, sliced for TP or placed for EP.

    Parameters of the layer, for E local experts of local width I (`w2_*` without the 2):
        w13_trellis int16 [E, 2, hidden/16, I/16, 16*K]   0 is gate, 1 is up
        w13_suh fp16 [E, 2, hidden], w13_svh fp16 [E, 2, I], w13_mcg | w13_mul1 int32 [E, 2]
        w2_trellis int16 [E, I/16, hidden/16, 16*K], w2_suh fp16 [E, I], w2_svh fp16 [E, hidden], ...
    """

    def __init__(self, layout: Layout, experts: str, moe_config) -> None:
        super().__init__(moe_config)
        self.layout, self.experts = layout, experts
        self.loaded: set[tuple[int, str, str]] = set()  # (local expert, shard id, tensor name)

    def get_fused_moe_quant_config(self, layer):
        return None

    def create_weights(
        self, layer, num_experts, hidden_size, intermediate_size_per_partition, params_dtype, **extra_weight_attrs
    ):
        parallel = layer.moe_config.moe_parallel_config
        width = intermediate_size_per_partition * parallel.tp_size
        self._refuse_other_activation(layer)
        self.shapes = expert_shapes(self.layout, self.experts, layer.global_num_experts, hidden_size, width)
        first = parallel.tp_rank * intermediate_size_per_partition
        self.width_slice = (first, first + intermediate_size_per_partition)
        self._check_width(layer, width)
        for stack, shape in (("w13", self.shapes["w1"]), ("w2", self.shapes["w2"])):
            for name, (dtype, size) in self._stacked(num_experts, stack, shape).items():
                parameter = torch.nn.Parameter(torch.empty(size, dtype=dtype), requires_grad=False)
                parameter.weight_loader = self._loader(layer, stack, name)
                layer.register_parameter(f"{stack}_{name}", parameter)

    def _refuse_other_activation(self, layer) -> None:
        if layer.activation != MoEActivation.SILU or layer.apply_router_weight_on_input:
            raise Exl3LoadError(f"{self.experts}: EXL3 experts are SwiGLU with output weights, got {layer.activation}")
        if layer.swiglu_alpha is not None or layer.swiglu_beta is not None:
            raise Exl3LoadError(f"{self.experts}: swiglu_alpha and swiglu_beta are not implemented for EXL3 experts")

    def _check_width(self, layer, width: int) -> None:
        try:
            check_slice(*self.width_slice, width)
        except Exl3FormatError as error:
            parallel = layer.moe_config.moe_parallel_config
            raise Exl3LoadError(
                f"{self.experts}: rank {parallel.tp_rank} of {parallel.tp_size}: {error}; use --enable-expert-parallel"
                f" or a number of ranks that divides {width // HADAMARD_BLOCK} blocks of {HADAMARD_BLOCK}"
            ) from error

    def _stacked(self, experts: int, stack: str, shape: TensorShape) -> dict[str, tuple[torch.dtype, tuple]]:
        pair = (2,) if stack == "w13" else ()
        rows, columns = self._local_sides(stack, shape)
        tensors = {
            "trellis": (torch.int16, (experts, *pair, rows // TILE, columns // TILE, shape.trellis_shape[2])),
            "suh": (torch.float16, (experts, *pair, rows)),
            "svh": (torch.float16, (experts, *pair, columns)),
        }
        if shape.codebook.marker:
            tensors[shape.codebook.marker] = (torch.int32, (experts, *pair))
        return tensors

    def _local_sides(self, stack: str, shape: TensorShape) -> tuple[int, int]:
        width = self.width_slice[1] - self.width_slice[0]
        return (shape.in_features, width) if stack == "w13" else (width, shape.out_features)

    def _loader(self, layer, stack: str, name: str):
        def load(parameter, tensor, weight_name, shard_id, expert_id, return_success=False):
            local = layer._map_global_expert_id_to_local_expert_id(expert_id)
            if local == -1:
                return False if return_success else None
            full_name = f"{self.experts}.{expert_id}.{PROJECTIONS[shard_id]}.{name}"
            if (local, shard_id, name) in self.loaded:
                raise Exl3LoadError(f"{full_name}: is in the checkpoint twice, expected once")
            target = parameter.data[local] if stack == "w2" else parameter.data[local, {"w1": 0, "w3": 1}[shard_id]]
            self._copy(full_name, target, name, shard_id, tensor)
            self.loaded.add((local, shard_id, name))
            return True if return_success else None

        load.supports_moe_loading = True
        return load

    def _copy(self, full_name: str, target: torch.Tensor, name: str, shard_id: str, tensor: torch.Tensor) -> None:
        codebook = self.shapes[shard_id].codebook
        if name == codebook.marker:
            check_marker(full_name, tensor, codebook)
            target.copy_(tensor.reshape(()))
            return
        dim = {("trellis", True): 0, ("suh", True): 0, ("trellis", False): 1, ("svh", False): 0}.get(
            (name, shard_id == "w2")
        )
        if dim is not None:
            unit = TILE if name == "trellis" else 1
            first, last = (side // unit for side in self.width_slice)
            tensor = tensor[first:last] if dim == 0 else tensor[:, first:last]
        if tensor.shape != target.shape or tensor.dtype != target.dtype:
            raise Exl3LoadError(
                f"{full_name}: this rank's slice is {tensor.dtype} {list(tensor.shape)}, expected {target.dtype} "
                f"{list(target.shape)}"
            )
        target.copy_(tensor)

    def check_complete(self, layer) -> None:
        """Raise Exl3LoadError naming what this rank's experts never got."""
        missing = []
        for expert in range(layer.global_num_experts):
            local = layer._map_global_expert_id_to_local_expert_id(expert)
            if local == -1:
                continue
            for shard, projection in PROJECTIONS.items():
                names = ("trellis", "suh", "svh", self.shapes[shard].codebook.marker)
                absent = [name for name in names if name and (local, shard, name) not in self.loaded]
                missing.append((f"{self.experts}.{expert}.{projection}", absent))
        refuse_incomplete(missing)


class Exl3CpuMoEMethod(Exl3MoEMethod):
    """Decodes once at load to fp32 and runs the reference; the packed tensors are dropped."""

    def process_weights_after_loading(self, layer) -> None:
        self.check_complete(layer)
        w13, w2 = [], []
        for expert in range(layer.local_num_experts):
            pair = [self._weight(layer, "w13", (expert, side)) for side in (0, 1)]
            w13.append(torch.cat(pair, dim=1))
            w2.append(self._weight(layer, "w2", (expert,)))
        for name in [name for name, _ in layer.named_parameters(recurse=False) if name.startswith(("w13_", "w2_"))]:
            delattr(layer, name)
        layer.register_buffer("w13_decoded", torch.stack(w13), persistent=False)
        layer.register_buffer("w2_decoded", torch.stack(w2), persistent=False)

    def _weight(self, layer, stack: str, place: tuple[int, ...]) -> torch.Tensor:
        trellis, suh, svh = (getattr(layer, f"{stack}_{name}").data[place] for name in ("trellis", "suh", "svh"))
        codebook = self.shapes["w1" if stack == "w13" else "w2"].codebook
        return decode_weight(Exl3Tensors(trellis, suh, svh, codebook))

    def apply(self, layer, x, topk_weights, topk_ids, shared_experts, shared_experts_input):
        """This rank's partial sum [tokens, hidden] in x's dtype; vLLM adds shared experts and reduces."""
        limit, expert_map = layer.swiglu_limit, layer.expert_map
        out = moe_forward(x, layer.w13_decoded, layer.w2_decoded, topk_weights, topk_ids, limit, expert_map)
        return out.to(x.dtype)


class Exl3CudaMoEMethod(Exl3MoEMethod):
    """EXL3 experts on a GPU. The packed tensors stay as they were loaded; every kernel reads them."""

    def create_weights(
        self, layer, num_experts, hidden_size, intermediate_size_per_partition, params_dtype, **extra_weight_attrs
    ):
        vllm_config = get_current_vllm_config()
        require_one_stream(self.experts, vllm_config.parallel_config.num_ubatches)
        ops.load()
        sizes = (num_experts, hidden_size, intermediate_size_per_partition, params_dtype)
        super().create_weights(layer, *sizes, **extra_weight_attrs)
        self.max_tokens = vllm_config.scheduler_config.max_num_batched_tokens
        self.plan = self._make_plan()
        if self.plan.many is Many.DECODED and vllm_config.compilation_config.cudagraph_mode != CUDAGraphMode.NONE:
            raise Exl3LoadError(
                f"{self.experts}: EXL3_FAT_GROUPED=0 reads the routing on the host, which a CUDA graph cannot hold; "
                f"start with --enforce-eager, or without EXL3_FAT_GROUPED"
            )

    def _make_plan(self) -> Plan:
        gate, down = self.shapes["w1"], self.shapes["w2"]
        major = current_platform.get_device_capability().major
        try:
            return make_plan((gate.bits, down.bits), {gate.codebook, down.codebook}, switches(), major)
        except Exl3LoadError as error:
            raise Exl3LoadError(f"{self.experts}: {error}") from error

    def process_weights_after_loading(self, layer) -> None:
        self.check_complete(layer)
        packed = {
            f"{stack}_{name}": getattr(layer, f"{stack}_{name}").data
            for stack in ("w13", "w2")
            for name in ("trellis", "suh", "svh")
        }
        shape, shared = self.shapes["w1"], has_shared_suh(packed["w13_suh"])
        self.gpu_experts = GpuExperts(
            PackedExperts(**packed, codebook=shape.codebook, shared_suh=shared),
            limit=layer.swiglu_limit, top_k=layer.moe_config.experts_per_token, max_tokens=self.max_tokens,
            plan=self.plan,
        )  # fmt: skip
        self._log(layer, shape, shared)

    def _log(self, layer, shape: TensorShape, shared: bool) -> None:
        """One line for each kind of layer."""
        decoder = "" if ops.is_tuned(shape.bits, shape.codebook) else ", for which it has only its generic decoder"
        scales = "shared by gate and up" if shared else "of gate and up their own, so that rows are gathered twice"
        logger.info_once(
            "exl3: %d experts of %g bits %s on this rank: %s%s; input scales %s; %d bytes of scratch for %d tokens",
            layer.local_num_experts, shape.bits, shape.codebook.value, str(self.plan), decoder, scales,
            self.gpu_experts.scratch_bytes, self.max_tokens,
        )  # fmt: skip

    def apply(self, layer, x, topk_weights, topk_ids, shared_experts, shared_experts_input):
        """This rank's partial sum [tokens, hidden] in x's dtype; vLLM adds shared experts and reduces."""
        return self.gpu_experts.run(x, topk_ids, topk_weights, layer.expert_map)
