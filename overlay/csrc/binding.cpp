// The kernels as torch operators: checks every tensor by name, then calls the plain interface. The only file
// that includes torch, and only its stable ABI, so that one build serves several versions of torch.
#include <cuda_runtime_api.h>
#include <dlfcn.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/tensor.h>

#include <array>
#include <initializer_list>
#include <limits>
#include <mutex>
#include <optional>
#include <sstream>
#include <stdexcept>
#include <string>

#include "fat_moe.h"

namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

constexpr int64_t kTile = 16;
constexpr int64_t kWorkspaceAlignment = 256;

// Errors: one sentence that names the tensor.

template <class... Parts>
[[noreturn]] void fail(const Parts&... parts) {
  std::ostringstream text;
  (text << ... << parts);
  throw std::runtime_error(text.str());
}

const char* word(ScalarType type) {
  switch (type) {
    case ScalarType::Half: return "float16";
    case ScalarType::BFloat16: return "bfloat16";
    case ScalarType::Float: return "float32";
    case ScalarType::Double: return "float64";
    case ScalarType::Byte: return "uint8";
    case ScalarType::Short: return "int16";
    case ScalarType::Int: return "int32";
    case ScalarType::Long: return "int64";
    default: return "another dtype";
  }
}

template <class Sizes>
std::string list(const Sizes& sizes) {
  std::string text = "[";
  for (int64_t size : sizes) text += (text.size() > 1 ? ", " : "") + std::to_string(size);
  return text + "]";
}

void check_type(const char* name, const Tensor& tensor, std::initializer_list<ScalarType> allowed) {
  std::string words;
  for (ScalarType type : allowed) {
    if (tensor.scalar_type() == type) return;
    words += (words.empty() ? "" : " or ") + std::string(word(type));
  }
  fail(name, ": is ", word(tensor.scalar_type()), ", expected ", words);
}

void check_shape(const char* name, const Tensor& tensor, std::initializer_list<int64_t> expected) {
  bool same = tensor.dim() == static_cast<int64_t>(expected.size());
  int64_t dim = 0;
  for (int64_t size : expected) same = same && tensor.size(dim++) == size;
  if (!same) fail(name, ": has the shape ", list(tensor.sizes()), ", expected ", list(expected));
  if (!tensor.is_contiguous()) fail(name, ": is not contiguous");
}

void check_dims(const char* name, const Tensor& tensor, int64_t expected) {
  if (tensor.dim() != expected) fail(name, ": has ", tensor.dim(), " dimensions, expected ", expected);
}

void check_device(const char* name, const Tensor& tensor, const Tensor& reference) {
  if (!tensor.is_cuda()) fail(name, ": is not on a CUDA device");
  if (tensor.get_device_index() != reference.get_device_index())
    fail(name, ": is on cuda:", tensor.get_device_index(), ", expected cuda:", reference.get_device_index());
}

void check_cuda(const char* what, cudaError_t error) {
  if (error != cudaSuccess) fail(what, ": ", cudaGetErrorString(error));
}

// The device and its stream

// torch's CUDA build has this function and its CPU build has not, so it cannot be linked.
cudaStream_t current_stream(int32_t device) {
  using Getter = AOTITorchError (*)(int32_t, void**);
  static const Getter getter = [] {
    void* library = dlopen("libtorch_cuda.so", RTLD_LAZY | RTLD_NOLOAD);
    return library ? reinterpret_cast<Getter>(dlsym(library, "aoti_torch_get_current_cuda_stream")) : nullptr;
  }();
  void* stream = nullptr;
  if (getter == nullptr || getter(device, &stream) != AOTI_TORCH_SUCCESS)
    fail("torch: has no current CUDA stream for cuda:", device, "; is this torch's CUDA build?");
  return static_cast<cudaStream_t>(stream);
}

// This library has a CUDA runtime of its own, whose current device need not be torch's.
class DeviceScope {
 public:
  explicit DeviceScope(int device) : device_(device) {
    check_cuda("cudaGetDevice", cudaGetDevice(&before_));
    if (before_ != device_) check_cuda("cudaSetDevice", cudaSetDevice(device_));
  }
  ~DeviceScope() {
    if (before_ != device_) cudaSetDevice(before_);
  }
  DeviceScope(const DeviceScope&) = delete;
  DeviceScope& operator=(const DeviceScope&) = delete;

 private:
  int device_, before_ = 0;
};

int multiprocessors(int device) {
  constexpr int kMaxDevices = 64;
  static std::array<std::once_flag, kMaxDevices> once;
  static std::array<int, kMaxDevices> count{};
  if (device < 0 || device >= kMaxDevices) fail("cuda:", device, ": is beyond the ", kMaxDevices, " devices known here");
  std::call_once(once[device], [&] {
    check_cuda("cudaDeviceGetAttribute",
               cudaDeviceGetAttribute(&count[device], cudaDevAttrMultiProcessorCount, device));
  });
  return count[device];
}

// Conversions

int to_int(const char* name, int64_t value, int64_t lowest = 0) {
  if (value < lowest || value > std::numeric_limits<int>::max())
    fail(name, ": is ", value, ", expected ", lowest, " to ", std::numeric_limits<int>::max());
  return static_cast<int>(value);
}

exl3::Codebook to_codebook(int64_t value) {
  if (value < 0 || value > 2) fail("codebook: is ", value, ", expected 0 (3inst), 1 (mcg) or 2 (mul1)");
  return static_cast<exl3::Codebook>(value);
}

exl3::Element to_element(ScalarType type) {
  if (type == ScalarType::Half) return exl3::Element::kHalf;
  return type == ScalarType::BFloat16 ? exl3::Element::kBfloat16 : exl3::Element::kFloat;
}

int to_bits_x2(const char* name, int64_t words) {
  if (words % 8 || words < kTile || words > 8 * kTile)
    fail(name, ": last dimension ", words, " is no rate; expected 16 times 1 to 8 bits, or times 1.5, 2.5 or 3.5");
  return static_cast<int>(words / 8);
}

const int16_t* packed(const Tensor& tensor) { return static_cast<const int16_t*>(tensor.const_data_ptr()); }

const void* halves(const Tensor& tensor, int64_t offset) {
  return static_cast<const uint16_t*>(tensor.const_data_ptr()) + offset;
}

// Operators

struct PackedExperts {
  const Tensor &w13_trellis, &w13_suh, &w13_svh, &w2_trellis, &w2_suh, &w2_svh;
};

// Local experts, their sizes and rate from the packed tensors; gate and up are interleaved in w13.
void describe_experts(const PackedExperts& t, exl3::Problem& p) {
  for (auto [name, tensor] : {std::pair{"w13_trellis", &t.w13_trellis}, {"w2_trellis", &t.w2_trellis}})
    check_type(name, *tensor, {ScalarType::Short});
  for (auto [name, tensor] : {std::pair{"w13_suh", &t.w13_suh}, {"w13_svh", &t.w13_svh}, {"w2_suh", &t.w2_suh},
                              {"w2_svh", &t.w2_svh}})
    check_type(name, *tensor, {ScalarType::Half});
  check_dims("w13_trellis", t.w13_trellis, 5);
  const int64_t experts = t.w13_trellis.size(0), rows = t.w13_trellis.size(2), columns = t.w13_trellis.size(3);
  const int64_t words = t.w13_trellis.size(4), hidden = rows * kTile, width = columns * kTile;
  check_shape("w13_trellis", t.w13_trellis, {experts, 2, rows, columns, words});
  check_shape("w13_suh", t.w13_suh, {experts, 2, hidden});
  check_shape("w13_svh", t.w13_svh, {experts, 2, width});
  check_shape("w2_trellis", t.w2_trellis, {experts, columns, rows, words});
  check_shape("w2_suh", t.w2_suh, {experts, width});
  check_shape("w2_svh", t.w2_svh, {experts, hidden});
  const int64_t matrix = rows * columns * words;
  p.experts = to_int("w13_trellis", experts, 1);
  p.hidden = to_int("w13_trellis", hidden, 1);
  p.width = to_int("w13_trellis", width, 1);
  p.bits_x2 = to_bits_x2("w13_trellis", words);
  p.gate = {packed(t.w13_trellis), halves(t.w13_suh, 0), halves(t.w13_svh, 0), 2 * matrix, 2 * hidden, 2 * width};
  p.up = {packed(t.w13_trellis) + matrix, halves(t.w13_suh, hidden), halves(t.w13_svh, width), 2 * matrix, 2 * hidden,
          2 * width};
  p.down = {packed(t.w2_trellis), halves(t.w2_suh, 0), halves(t.w2_svh, 0), matrix, width, hidden};
}

void describe_routing(const Tensor& ids, const Tensor& weights, const std::optional<Tensor>& map, exl3::Problem& p) {
  check_dims("topk_ids", ids, 2);
  check_type("topk_ids", ids, {ScalarType::Int});
  check_type("topk_weights", weights, {ScalarType::Float});
  check_shape("topk_ids", ids, {p.tokens, ids.size(1)});
  check_shape("topk_weights", weights, {p.tokens, ids.size(1)});
  p.top_k = to_int("topk_ids", ids.size(1), 1);
  p.topk_ids = static_cast<const int32_t*>(ids.const_data_ptr());
  p.topk_weights = static_cast<const float*>(weights.const_data_ptr());
  p.expert_map = nullptr;
  p.global_experts = p.experts;
  if (map) {
    check_type("expert_map", *map, {ScalarType::Int});
    check_shape("expert_map", *map, {map->numel()});
    p.expert_map = static_cast<const int32_t*>(map->const_data_ptr());
    p.global_experts = to_int("expert_map", map->numel(), 1);
  }
}

void describe_sides(const Tensor& x, const std::optional<Tensor>& addend, const Tensor& out, exl3::Problem& p) {
  check_dims("x", x, 2);
  check_type("x", x, {ScalarType::Half, ScalarType::BFloat16});
  check_type("out", out, {ScalarType::Half, ScalarType::BFloat16, ScalarType::Float});
  check_shape("x", x, {x.size(0), p.hidden});
  check_shape("out", out, {x.size(0), p.hidden});
  p.tokens = to_int("x", x.size(0));
  p.x = x.const_data_ptr();
  p.x_type = to_element(x.scalar_type());
  p.out = out.mutable_data_ptr();
  p.out_type = to_element(out.scalar_type());
  p.addend = nullptr;
  if (addend) {
    check_type("addend", *addend, {ScalarType::Float});
    check_shape("addend", *addend, {x.size(0), p.hidden});
    p.addend = static_cast<const float*>(addend->const_data_ptr());
  }
}

void describe_workspace(const Tensor& workspace, exl3::Problem& p) {
  check_type("workspace", workspace, {ScalarType::Byte});
  check_shape("workspace", workspace, {workspace.numel()});
  const int64_t needed = exl3::workspace_bytes(p.tokens, p.top_k, p.experts, p.hidden, p.width);
  if (workspace.numel() < needed)
    fail("workspace: has ", workspace.numel(), " bytes, ", p.tokens, " tokens need ", needed);
  p.workspace = workspace.mutable_data_ptr();
  if (reinterpret_cast<uintptr_t>(p.workspace) % kWorkspaceAlignment)
    fail("workspace: does not start at a multiple of ", kWorkspaceAlignment, " bytes");
}

void fat_moe(const Tensor& x, const Tensor& topk_ids, const Tensor& topk_weights, std::optional<Tensor> expert_map,
             const Tensor& w13_trellis, const Tensor& w13_suh, const Tensor& w13_svh, const Tensor& w2_trellis,
             const Tensor& w2_suh, const Tensor& w2_svh, int64_t codebook, bool shared_suh, double limit,
             int64_t min_rows, std::optional<Tensor> addend, const Tensor& workspace, const Tensor& out) {
  exl3::Problem p{};
  describe_experts({w13_trellis, w13_suh, w13_svh, w2_trellis, w2_suh, w2_svh}, p);
  describe_sides(x, addend, out, p);
  describe_routing(topk_ids, topk_weights, expert_map, p);
  describe_workspace(workspace, p);
  p.codebook = to_codebook(codebook);
  p.shared_suh = shared_suh;
  p.limit = static_cast<float>(limit);
  p.min_rows = to_int("min_rows", min_rows, 1);
  for (auto [name, tensor] : {std::pair{"x", &x}, {"topk_ids", &topk_ids}, {"topk_weights", &topk_weights},
                              {"w13_trellis", &w13_trellis}, {"w13_suh", &w13_suh}, {"w13_svh", &w13_svh},
                              {"w2_trellis", &w2_trellis}, {"w2_suh", &w2_suh}, {"w2_svh", &w2_svh},
                              {"workspace", &workspace}, {"out", &out}})
    check_device(name, *tensor, x);
  if (expert_map) check_device("expert_map", *expert_map, x);
  if (addend) check_device("addend", *addend, x);
  if (p.tokens == 0) return;
  const int32_t device = x.get_device_index();
  p.multiprocessors = multiprocessors(device);
  if (const char* reason = exl3::refuse(p)) fail("fat_moe: ", reason);
  DeviceScope scope(device);
  check_cuda("fat_moe", exl3::fat_moe(p, current_stream(device)));
}

int64_t fat_moe_workspace_bytes(int64_t tokens, int64_t top_k, int64_t experts, int64_t hidden, int64_t width) {
  return exl3::workspace_bytes(to_int("tokens", tokens), to_int("top_k", top_k, 1), to_int("experts", experts, 1),
                               to_int("hidden", hidden, 1), to_int("width", width, 1));
}

void decode_inner(const Tensor& trellis, int64_t codebook, const Tensor& inner) {
  check_type("trellis", trellis, {ScalarType::Short});
  check_type("inner", inner, {ScalarType::Half});
  check_dims("trellis", trellis, 3);
  const int64_t in = trellis.size(0) * kTile, out = trellis.size(1) * kTile;
  check_shape("trellis", trellis, {trellis.size(0), trellis.size(1), trellis.size(2)});
  check_shape("inner", inner, {in, out});
  const int bits_x2 = to_bits_x2("trellis", trellis.size(2));
  const exl3::Codebook book = to_codebook(codebook);
  check_device("trellis", trellis, trellis);
  check_device("inner", inner, trellis);
  const int32_t device = trellis.get_device_index();
  DeviceScope scope(device);
  check_cuda("decode_inner", exl3::decode_inner(packed(trellis), to_int("trellis", in, 1), to_int("trellis", out, 1),
                                                bits_x2, book, inner.mutable_data_ptr(), current_stream(device)));
}

}  // namespace

STABLE_TORCH_LIBRARY(vllm_exl3, library) {
  library.def(
      "fat_moe(Tensor x, *, Tensor topk_ids, Tensor topk_weights, Tensor? expert_map, Tensor w13_trellis, "
      "Tensor w13_suh, Tensor w13_svh, Tensor w2_trellis, Tensor w2_suh, Tensor w2_svh, int codebook, "
      "bool shared_suh, float limit, int min_rows, Tensor? addend, Tensor(a!) workspace, Tensor(b!) out) -> ()");
  library.def("fat_moe_workspace_bytes(int tokens, int top_k, int experts, int hidden, int width) -> int");
  library.def("decode_inner(Tensor trellis, int codebook, *, Tensor(a!) inner) -> ()");
}

// The CPU is registered too, so that its tensors get an answer by name from the checks above.
STABLE_TORCH_LIBRARY_IMPL(vllm_exl3, CUDA, library) {
  library.impl("fat_moe", TORCH_BOX(&fat_moe));
  library.impl("decode_inner", TORCH_BOX(&decode_inner));
}

STABLE_TORCH_LIBRARY_IMPL(vllm_exl3, CPU, library) {
  library.impl("fat_moe", TORCH_BOX(&fat_moe));
  library.impl("decode_inner", TORCH_BOX(&decode_inner));
}

STABLE_TORCH_LIBRARY_IMPL(vllm_exl3, CompositeExplicitAutograd, library) {
  library.impl("fat_moe_workspace_bytes", TORCH_BOX(&fat_moe_workspace_bytes));
}
