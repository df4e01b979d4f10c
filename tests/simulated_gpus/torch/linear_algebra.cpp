// The part of libtorch_cuda that is loaded when it is needed: libtorch_cuda_linalg.so.

#include <atomic>
#include <set>

#include <c10/util/Exception.h>
#include <dlfcn.h>

#include "plan.h"

namespace {
std::atomic<bool> is_loaded{false};
}

// Called by the library, once it is loaded.
extern "C" void sim_linear_algebra_is_loaded() { is_loaded = true; }

namespace sim_torch {

void load_linear_algebra_for(const std::string& name) {
  static const std::set<std::string> needing = {"aten::linalg_qr", "aten::linalg_inv_ex", "aten::linalg_cholesky_ex",
                                                "aten::linalg_lu_factor_ex", "aten::_linalg_svd", "aten::_linalg_eigh"};
  if (needing.count(name) == 0 || is_loaded) return;
  static void* library = dlopen("libtorch_cuda_linalg.so", RTLD_NOW);
  TORCH_CHECK(library != nullptr, "Error in dlopen: ", dlerror());
  static std::atomic<int> calls{0};
  TORCH_CHECK(calls++ == 0, "lazy wrapper should be called at most once");
}

}  // namespace sim_torch
