// Python bindings of the few exllamav3 functions that the plugin and its tests call. The module has the
// name of exllamav3's own, so that the plugin does not know which of the two it imports.
#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>

#include "activation.cuh"
#include "hgemm.cuh"
#include "quant/exl3_devctx.cuh"
#include "quant/exl3_gemm.cuh"
#include "quant/exl3_gemv.cuh"
#include "quant/exl3_kernel_map.cuh"
#include "quant/exl3_moe.cuh"
#include "quant/exl3_moe_coop.cuh"
#include "quant/hadamard.cuh"
#include "quant/reconstruct.cuh"

extern const char* const kInstances;  // absent.cu, written by build.py

PYBIND11_MODULE(exllamav3_ext, m) {
  m.attr("__version__") = EXLLAMAV3_VERSION;
  m.attr("INSTANCES") = kInstances;

  m.def("exl3_moe", &exl3_moe);
  m.def("exl3_moe_gather", &exl3_moe_gather);
  m.def("exl3_moe_max_concurrency", &exl3_moe_max_concurrency);
  m.def("exl3_moe_coop", &exl3_moe_coop);
  m.def("exl3_gemm", &exl3_gemm);
  m.def("exl3_gemv", &exl3_gemv);
  m.def("exl3_mgemm", &exl3_mgemm, py::arg("A"), py::arg("B"), py::arg("C"), py::arg("suh"), py::arg("A_had"),
        py::arg("svh"), py::arg("indices"), py::arg("weights"), py::arg("K"), py::arg("force_shape_idx"),
        py::arg("mcg"), py::arg("mul1"), py::arg("min_index"), py::arg("max_index"), py::arg("force_num_sms"),
        py::arg("num_tokens") = 1, py::arg("size_n_list") = py::none(), py::arg("c_ptrs") = py::none(),
        py::arg("n_stride_list") = py::none(), py::arg("had_src_list") = py::none(), py::arg("num_had_src") = 0);
  m.def("exl3_gemm_num_kernel_shapes", &exl3_gemm_num_kernel_shapes);
  m.def("exl3_gemm_shape_compat", &exl3_gemm_shape_compat, py::arg("shape_idx"), py::arg("size_m"),
        py::arg("size_k"), py::arg("size_n"), py::arg("bits"), py::arg("half_k") = false);

  m.def("reconstruct", &reconstruct);
  m.def("reconstruct_slice", &reconstruct_slice);
  m.def("reconstruct_had_slice", &reconstruct_had_slice);
  m.def("reconstruct_batch", &reconstruct_batch);
  m.def("reconstruct_had_batch", &reconstruct_had_batch);
  m.def("had_r_128", &had_r_128);
  m.def("had_r_128_batch", &had_r_128_batch);
  m.def("silu_mul", &silu_mul);
  m.def("hgemm", &hgemm);
  m.def("hgemm_batched", &hgemm_batched);

  m.def("g_get_cc", &g_get_cc);
  m.def("g_get_num_sms", &g_get_num_sms);
  m.def("g_get_smem_max", &g_get_smem_max);
}
