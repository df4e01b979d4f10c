// Kernels that are not the CPU's (allocation, views, numbers for the host), and the registration of all kernels.

#include <ATen/EmptyTensor.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/resize_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/DeviceGuard.h>
#include <torch/library.h>

#include "plan.h"

namespace sim_torch {
namespace {

Tensor empty(c10::SymIntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
             std::optional<Device> device, std::optional<bool> pinned, std::optional<at::MemoryFormat> format) {
  TORCH_CHECK(!pinned.value_or(false), "Only dense CPU tensors can be pinned");
  c10::DeviceGuard guard(device_or_current(device));
  return Tensor(at::detail::empty_generic(C10_AS_INTARRAYREF_SLOW(size), &device_memory,
                                          c10::DispatchKeySet(c10::DispatchKey::CUDA), c10::dtype_or_default(dtype),
                                          format));
}

Tensor empty_strided(c10::SymIntArrayRef size, c10::SymIntArrayRef stride, std::optional<at::ScalarType> dtype,
                     std::optional<at::Layout>, std::optional<Device> device, std::optional<bool>) {
  c10::DeviceGuard guard(device_or_current(device));
  return Tensor(at::detail::empty_strided_generic(C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride),
                                                  &device_memory, c10::DispatchKeySet(c10::DispatchKey::CUDA),
                                                  c10::dtype_or_default(dtype)));
}

const Tensor& resize_(const Tensor& self, c10::SymIntArrayRef size, std::optional<at::MemoryFormat> format) {
  c10::DeviceGuard guard(self.device());
  auto sizes = C10_AS_INTARRAYREF_SLOW(size);
  sim::Access access;
  return at::native::resize_(self, sizes, format);
}

Tensor view(const Tensor& self, c10::SymIntArrayRef size) {
  return at::native::view(self, C10_AS_INTARRAYREF_SLOW(size));
}

Tensor as_strided(const Tensor& self, c10::SymIntArrayRef size, c10::SymIntArrayRef stride,
                  std::optional<c10::SymInt> offset) {
  return at::native::as_strided_tensorimpl(
      self, C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride),
      offset ? std::optional<int64_t>(offset->guard_int(__FILE__, __LINE__)) : std::nullopt);
}

Tensor reshape_alias(const Tensor& self, c10::SymIntArrayRef size, c10::SymIntArrayRef stride) {
  return at::native::_reshape_alias(self, C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride));
}

at::Scalar local_scalar(const Tensor& self) {
  c10::DeviceGuard guard(self.device());
  sim::synchronize(sim::current_stream(self.device().index()), "a number");
  BareKernels bare;
  sim::Access access;
  return alias_on_cpu(self).item();
}

TORCH_LIBRARY_IMPL(aten, CUDA, library) {
  library.impl("empty.memory_format", &empty);
  library.impl("empty_strided", &empty_strided);
  library.impl("as_strided", &as_strided);
  library.impl("view", &view);
  library.impl("_reshape_alias", &reshape_alias);
  library.impl("resize_", &resize_);
  library.impl("_local_scalar_dense", &local_scalar);
  library.impl("copy_", &copy_);
  // The first three would choose among CUDA's own kernels. The last has a kernel for devices that lack one, which rounds
  // differently.
  for (auto* name : {"convolution", "convolution_backward", "_foreach_norm.Scalar", "native_layer_norm"}) {
    library.impl(name, torch::CppFunction::makeFromBoxedFunction<&fallback>());
  }
}

// Structured operators would otherwise go through their `out` forms, one empty tensor at a time. The library is never
// destroyed, because libtorch must not call back into it at exit.
[[maybe_unused]] const auto* const structured = [] {
  auto* library = new torch::Library(torch::Library::IMPL, "aten", c10::DispatchKey::CUDA, __FILE__, __LINE__);
  auto& dispatcher = c10::Dispatcher::singleton();
  for (auto& name : dispatcher.getAllOpNames()) {
    if (name.getNamespace() != "aten") continue;
    auto op = dispatcher.findOp(name);
    if (!op || !op->hasKernelForDispatchKey(c10::DispatchKey::CompositeExplicitAutogradNonFunctional) ||
        !op->hasKernelForDispatchKey(c10::DispatchKey::CPU) || op->hasKernelForDispatchKey(c10::DispatchKey::CUDA)) {
      continue;
    }
    auto full = name.name + (name.overload_name.empty() ? "" : "." + name.overload_name);
    library->impl(full.c_str(), torch::CppFunction::makeFromBoxedFunction<&fallback>());
  }
  return library;
}();

TORCH_LIBRARY_IMPL(_, CUDA, library) { library.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>()); }

}  // namespace
}  // namespace sim_torch
