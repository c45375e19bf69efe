"""EXL3 for vLLM's linear layers and the language model head."""

from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from vllm.config import get_current_vllm_config
from vllm.model_executor.layers.linear import LinearMethodBase, UnquantizedLinearMethod
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
from vllm.platforms import current_platform

from vllm_exl3.checkpoint import FUSED_PARTS, KDA_FUSED, Exl3LoadError, Layout, expand_fused
from vllm_exl3.few_rows import DenseExl3, extension, require_one_stream
from vllm_exl3.format import HADAMARD_BLOCK, TILE, Exl3FormatError, Exl3Tensors, TensorShape, check_marker, check_slice
from vllm_exl3.reference import decode_weight

DTYPES = {"trellis": torch.int16, "suh": torch.float16, "svh": torch.float16}  # codebook markers: int32


@dataclass(frozen=True)
class Part:
    """One matrix of the checkpoint inside a layer of vLLM."""

    module: str  # canonical name
    shards: tuple[int, ...]  # the layer's output shards that it fills
    shape: TensorShape | None  # None: native


@dataclass
class LoadedPart:
    """Where one EXL3 part goes on this rank, and its tensors as they arrive."""

    part: Part
    row_slice: tuple[int, int]  # of the input features
    column_slices: list[tuple[int, int]]  # of the output features, one a shard
    device: torch.device
    tensors: dict[str, torch.Tensor] = field(default_factory=dict)

    def store(self, name: str, tensor: torch.Tensor) -> None:
        """Keep this rank's slice. Raises Exl3LoadError for what the format does not allow here."""
        full_name = f"{self.part.module}.{name}"
        if name in self.tensors:
            raise Exl3LoadError(f"{full_name}: is in the checkpoint twice, expected once")
        shape = self.part.shape
        shapes = {"trellis": shape.trellis_shape, "suh": (shape.in_features,), "svh": (shape.out_features,)}
        expected = {part: (size, DTYPES[part]) for part, size in shapes.items()}
        if name == shape.codebook.marker:
            check_marker(full_name, tensor, shape.codebook)
            self.tensors[name] = tensor
            return
        if name not in expected or (tuple(tensor.shape), tensor.dtype) != expected[name]:
            want = expected.get(name, "nothing of this name")
            raise Exl3LoadError(f"{full_name}: is {tensor.dtype} {list(tensor.shape)}, the headers said {want}")
        self.tensors[name] = self._slice(name, tensor)

    def _slice(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        # Copied: a view would keep the whole tensor of the checkpoint alive.
        if name != "svh":
            unit = TILE if name == "trellis" else 1
            tensor = tensor[self.row_slice[0] // unit : self.row_slice[1] // unit]
        if name == "suh":
            return tensor.to(self.device, copy=True)
        unit, dim = (TILE, 1) if name == "trellis" else (1, 0)
        columns = torch.cat([tensor.narrow(dim, a // unit, (b - a) // unit) for a, b in self.column_slices], dim)
        return columns.to(self.device)

    def missing(self) -> list[str]:
        marker = self.part.shape.codebook.marker
        return [name for name in ("trellis", "suh", "svh", marker) if name and name not in self.tensors]

    def weight(self) -> Exl3Tensors:
        return Exl3Tensors(self.tensors["trellis"], self.tensors["suh"], self.tensors["svh"], self.part.shape.codebook)


def method_for(layout: Layout, name: str, layer: torch.nn.Module):
    """The method of one layer: EXL3 if any matrix in it is, else native (None for a head)."""
    parts = plan_parts(layout, name)
    if any(part.shape for part in parts):
        return Exl3CpuLinearMethod(parts) if current_platform.is_cpu() else Exl3CudaLinearMethod(parts)
    return None if isinstance(layer, ParallelLMHead) else UnquantizedLinearMethod()


def plan_parts(layout: Layout, name: str) -> list[Part]:
    """Which matrices of the checkpoint make up the layer `name` (canonical)."""
    parent, _, last = name.rpartition(".")
    fused = f"{parent}.{KDA_FUSED}"
    if last == "in_proj_qkvbfg_a" and fused in layout.exl3:
        rest = [f"{parent}.{part}" for part in FUSED_PARTS[last][3:]]
        return [Part(fused, (0, 1, 2), layout.exl3[fused])] + [
            Part(module, (3 + i,), layout.exl3.get(module)) for i, module in enumerate(rest)
        ]
    return [Part(module, (i,), layout.exl3.get(module)) for i, module in enumerate(expand_fused(name))]


class Exl3LinearMethod(LinearMethodBase):
    """Loads the EXL3 parts of a layer, sliced for tensor parallelism; how they are used is the subclass's."""

    def __init__(self, parts: list[Part]) -> None:
        self.parts = parts

    def create_weights(
        self, layer, input_size_per_partition, output_partition_sizes, input_size, output_size, params_dtype,
        **extra_weight_attrs,
    ):  # fmt: skip
        """Register empty parameters under the checkpoint's names whose loaders fill `layer.exl3_parts`."""
        layer.exl3_parts = [
            self._place(layer, part, input_size_per_partition, output_partition_sizes, input_size)
            for part in self.parts
            if part.shape
        ]
        markers = {loaded.part.shape.codebook.marker for loaded in layer.exl3_parts} - {None}
        for name in ("trellis", "suh", "svh", *sorted(markers)):
            empty = torch.empty(0, dtype=DTYPES.get(name, torch.int32))  # vLLM warns of any other type
            parameter = torch.nn.Parameter(empty, requires_grad=False)
            parameter.weight_loader = _loader(layer.exl3_parts, name)
            layer.register_parameter(name, parameter)

    def _place(self, layer, part: Part, in_size: int, out_sizes: list[int], full_in: int) -> LoadedPart:
        rank = layer.tp_rank
        rows = (rank * in_size, (rank + 1) * in_size) if in_size != full_in else (0, in_size)
        try:
            if isinstance(layer, ParallelLMHead):
                columns = [_head_blocks(layer, part.shape, rank)]
            else:
                columns = _shard_columns(part, [out_sizes[shard] for shard in part.shards], rank, layer.tp_size)
            device = torch.empty(0).device  # vLLM builds layers under the device that they are to live on
            return LoadedPart(part, _checked(rows, full_in, part.shape.in_features), columns, device)
        except Exl3FormatError as error:
            raise Exl3LoadError(
                f"{part.module}: {part.shape} cannot be cut for rank {rank} of {layer.tp_size}, which needs inputs "
                f"{rows} of {full_in} and {[out_sizes[s] for s in part.shards]} outputs: {error}"
            ) from error


def _loader(parts: list[LoadedPart], name: str):
    def load(parameter, tensor: torch.Tensor, shard_id: int | None = None) -> None:
        if shard_id is None:
            (loaded,) = [p for p in parts if p.part.shards in ((0,), (0, 1, 2))]
        else:
            matching = [p for p in parts if shard_id in p.part.shards]
            if not matching:
                raise Exl3LoadError(f"{parts[0].part.module}: .{name} arrived for shard {shard_id}, which is native")
            (loaded,) = matching
        loaded.store(name, tensor)

    return load


def _shard_columns(part: Part, sizes: list[int], rank: int, ranks: int) -> list[tuple[int, int]]:
    """This rank's output columns of each shard; a shard as large as the matrix is replicated, not cut."""
    total = part.shape.out_features
    if len(sizes) == 1 and _padded(sizes[0]) == total:
        return [(0, total)]
    if total != sum(sizes) * ranks:
        raise Exl3FormatError(f"{total} output channels where {sum(sizes) * ranks} were expected")
    columns, start = [], 0
    for size in sizes:
        columns.append((start + rank * size, start + (rank + 1) * size))
        start += size * ranks
    for begin, end in columns:
        check_slice(begin, end, total)
    return columns


def _head_blocks(layer, shape: TensorShape, rank: int) -> tuple[int, int]:
    """The whole 128-column blocks that cover this rank's part of the vocabulary."""
    if not layer.org_vocab_size <= shape.out_features <= _padded(layer.num_embeddings_padded):
        raise Exl3FormatError(f"the head has {shape.out_features} columns for {layer.org_vocab_size} tokens")
    size = layer.num_embeddings_per_partition
    begin, end = rank * size, (rank + 1) * size
    return begin // HADAMARD_BLOCK * HADAMARD_BLOCK, min(_padded(end), shape.out_features)


def _checked(rows: tuple[int, int], full: int, stored: int) -> tuple[int, int]:
    if rows == (0, full):
        if _padded(full) != stored:
            raise Exl3FormatError(f"{stored} input channels where {_padded(full)} were expected")
        return (0, stored)
    if full != stored:
        raise Exl3FormatError(f"{stored} input channels where {full} were expected")
    check_slice(*rows, stored)
    return rows


def _padded(size: int) -> int:
    return -(-size // HADAMARD_BLOCK) * HADAMARD_BLOCK


class Exl3CpuLinearMethod(Exl3LinearMethod):
    """Decodes once at load and multiplies in fp32, so that only the format's own error is left."""

    def create_weights(
        self, layer, input_size_per_partition, output_partition_sizes, input_size, output_size, params_dtype,
        **extra_weight_attrs,
    ):  # fmt: skip
        sizes = (input_size_per_partition, output_partition_sizes, input_size, output_size, params_dtype)
        super().create_weights(layer, *sizes, **extra_weight_attrs)
        self.output_sizes = output_partition_sizes
        if all(part.shape for part in self.parts):
            return
        # Native parts of a mixed layer are loaded by vLLM's own loader, into their rows of the whole weight.
        weight = torch.nn.Parameter(
            torch.zeros(sum(output_partition_sizes), input_size_per_partition, dtype=torch.float32), requires_grad=False
        )
        weight.output_dim, weight.input_dim = 0, 1
        weight.weight_loader = extra_weight_attrs["weight_loader"]
        layer.register_parameter("weight", weight)

    def process_weights_after_loading(self, layer) -> None:
        refuse_incomplete([(loaded.part.module, loaded.missing()) for loaded in layer.exl3_parts])
        out_size, in_size = sum(self.output_sizes), layer.input_size_per_partition
        weight = layer.weight.data if hasattr(layer, "weight") else torch.zeros(out_size, in_size, dtype=torch.float32)
        for loaded in layer.exl3_parts:
            self._decode_into(layer, weight, loaded)
        for name in ("trellis", "suh", "svh", "mcg", "mul1"):
            if hasattr(layer, name):
                delattr(layer, name)
        del layer.exl3_parts
        layer.register_parameter("weight", torch.nn.Parameter(weight, requires_grad=False))

    def _decode_into(self, layer, weight: torch.Tensor, loaded: LoadedPart) -> None:
        """Write the part's rows; padding of the stored matrix is cut off."""
        first = sum(self.output_sizes[: loaded.part.shards[0]])
        rows = sum(self.output_sizes[shard] for shard in loaded.part.shards)
        decoded = decode_weight(loaded.weight()).T[:, : weight.shape[1]]
        if isinstance(layer, ParallelLMHead):
            first_token = layer.tp_rank * layer.num_embeddings_per_partition
            decoded = decoded[first_token - loaded.column_slices[0][0] :]
            rows = min(rows, layer.org_vocab_size - first_token)
        weight[first : first + rows] = decoded[:rows]

    def apply(self, layer, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        return F.linear(x.float(), layer.weight, bias).to(x.dtype)


class Exl3CudaLinearMethod(Exl3LinearMethod):
    """EXL3 on a GPU: one product for each matrix of the checkpoint, native ones in their own type, side by side."""

    def create_weights(
        self, layer, input_size_per_partition, output_partition_sizes, input_size, output_size, params_dtype,
        **extra_weight_attrs,
    ):  # fmt: skip
        require_one_stream(self.parts[0].module, get_current_vllm_config().parallel_config.num_ubatches)
        extension()
        sizes = (input_size_per_partition, output_partition_sizes, input_size, output_size, params_dtype)
        super().create_weights(layer, *sizes, **extra_weight_attrs)
        self.output_sizes = output_partition_sizes
        self.native = {part.shards[0]: part.module for part in self.parts if not part.shape}
        if self.native:
            # Only the native rows: a whole weight in every mixed layer would not fit.
            rows = sum(output_partition_sizes[shard] for shard in self.native)
            weight = torch.nn.Parameter(
                torch.empty(rows, input_size_per_partition, dtype=params_dtype), requires_grad=False
            )  # fmt: skip
            weight.weight_loader = self._native_loader(layer)
            layer.register_parameter("weight", weight)
            self.native_loaded: set[int] = set()

    def _native_loader(self, layer):
        def load(parameter, tensor: torch.Tensor, shard_id: int | None = None) -> None:
            if shard_id not in self.native:
                raise Exl3LoadError(f"{self.parts[0].module}: .weight arrived for shard {shard_id}, which is EXL3")
            first, size = self._native_rows(shard_id)
            place = slice(first, first + size)
            parameter.data[place].copy_(_rank_rows(f"{self.native[shard_id]}.weight", tensor, size, layer))
            self.native_loaded.add(shard_id)

        return load

    def _native_rows(self, shard: int) -> tuple[int, int]:
        """Where a native shard lies in the weight: (first row, rows)."""
        return sum(self.output_sizes[other] for other in self.native if other < shard), self.output_sizes[shard]

    def process_weights_after_loading(self, layer) -> None:
        absent = [(self.native[shard], ["weight"]) for shard in self.native if shard not in self.native_loaded]
        refuse_incomplete([(loaded.part.module, loaded.missing()) for loaded in layer.exl3_parts] + absent)
        self.columns = self._output_columns(layer)
        self.dense = {
            loaded.part.shards[0]: DenseExl3(*(loaded.tensors[name] for name in ("trellis", "suh", "svh")),
                                             loaded.part.shape.codebook)
            for loaded in layer.exl3_parts
        }  # fmt: skip
        for name in ("trellis", "suh", "svh", "mcg", "mul1"):
            if hasattr(layer, name):
                delattr(layer, name)
        del layer.exl3_parts

    def _output_columns(self, layer) -> dict[int, tuple[int, int, int]]:
        """Of each EXL3 part, by its first shard: the product's columns [first, last) that the layer gives, and the
        zeros after them. Stored matrices are padded, and a head's part may begin inside a block."""
        columns = {}
        for loaded in layer.exl3_parts:
            size = sum(self.output_sizes[shard] for shard in loaded.part.shards)
            first, used = 0, size
            if isinstance(layer, ParallelLMHead):
                first_token = layer.tp_rank * layer.num_embeddings_per_partition
                first = first_token - loaded.column_slices[0][0]
                used = max(0, min(size, layer.org_vocab_size - first_token))
            columns[loaded.part.shards[0]] = (first, first + used, size - used)
        return columns

    def apply(self, layer, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        rows = x.reshape(-1, x.shape[-1])
        outputs = [self._part_output(layer, part, rows) for part in self.parts]
        out = outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=-1)
        out = out.view(*x.shape[:-1], out.shape[-1])
        return out if bias is None else out + bias

    def _part_output(self, layer, part: Part, rows: torch.Tensor) -> torch.Tensor:
        shard = part.shards[0]
        if not part.shape:
            first, size = self._native_rows(shard)
            return F.linear(rows, layer.weight[first : first + size])
        dense, (first, last, zeros) = self.dense[shard], self.columns[shard]
        padding = dense.suh.shape[0] - rows.shape[-1]
        product = dense.apply(F.pad(rows, (0, padding)) if padding else rows)
        if (first, last) != (0, product.shape[-1]):
            product = product[:, first:last]
        product = F.pad(product, (0, zeros)) if zeros else product
        return product.contiguous()


def _rank_rows(name: str, tensor: torch.Tensor, rows: int, layer) -> torch.Tensor:
    """This rank's rows of a native matrix: all of them where they are as many as the shard has."""
    if tensor.shape[0] == rows * layer.tp_size and layer.tp_size > 1:
        return tensor[layer.tp_rank * rows : (layer.tp_rank + 1) * rows]
    if tensor.shape[0] != rows or tensor.shape[1] != layer.input_size_per_partition:
        raise Exl3LoadError(
            f"{name}: is {list(tensor.shape)}, expected {rows} rows for each of {layer.tp_size} ranks and "
            f"{layer.input_size_per_partition} columns"
        )
    return tensor


def refuse_incomplete(missing: list[tuple[str, list[str]]]) -> None:
    """Raise Exl3LoadError if any (module, names of tensors that never arrived) is not empty."""
    names = [f"{module}.{name}" for module, absent in missing for name in absent]
    if names:
        more = f" and {len(names) - 3} more" if len(names) > 3 else ""
        raise Exl3LoadError(f"{', '.join(names[:3])}{more}: not loaded, though the headers list them")
