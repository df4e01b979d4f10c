// Which libtorch this was compiled for, and which one is loaded. Declared in ffi/library.rs.

#include <dlfcn.h>

#include <ATen/Context.h>
#include <ATen/Parallel.h>
#include <caffe2/core/common.h>
#include <torch/version.h>

extern "C" {

const char* ddp_torch_version() { return TORCH_VERSION; }

// Returns the version of the libtorch that is loaded, or null if it reports none.
const char* ddp_loaded_torch_version() {
  const auto& options = caffe2::GetBuildOptions();
  auto version = options.find("TORCH_VERSION");
  return version == options.end() ? nullptr : version->second.c_str();
}

// Returns the file of the library that has `address`, or null. A null address is one of libtorch_cpu.
const char* ddp_library_file(const void* address) {
  Dl_info info;
  if (address == nullptr) address = reinterpret_cast<void*>(&at::get_num_threads);
  return dladdr(address, &info) == 0 ? nullptr : info.dli_fname;
}

// Has cuDNN leave out kernels whose sums have another order in each run.
void ddp_leave_out_unordered_cudnn() { at::globalContext().setDeterministicCuDNN(true); }

}  // extern "C"
