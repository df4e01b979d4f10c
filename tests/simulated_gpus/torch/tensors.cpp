// CPU tensors beside a GPU's, and work that calls libtorch on the thread of a stream.

#include "cuda.h"

#include <ATen/EmptyTensor.h>
#include <c10/core/CPUAllocator.h>
#include <c10/util/Exception.h>

namespace sim_torch {

static Tensor cpu_tensor(c10::intrusive_ptr<c10::StorageImpl> storage, const Tensor& like) {
  return at::detail::make_tensor<c10::TensorImpl>(c10::Storage(std::move(storage)),
                                                  c10::DispatchKeySet(c10::DispatchKey::CPU), like.dtype());
}

Tensor alias_on_cpu(const Tensor& tensor) {
  auto& storage = tensor.storage();
  auto made = cpu_tensor(c10::make_intrusive<c10::StorageImpl>(
                             c10::StorageImpl::use_byte_size_t{}, storage.nbytes(),
                             c10::DataPtr(const_cast<void*>(storage.data()), c10::kCPU), nullptr, false),
                         tensor);
  made.unsafeGetTensorImpl()->set_storage_offset(tensor.storage_offset());
  made.unsafeGetTensorImpl()->set_sizes_and_strides(tensor.sizes(), tensor.strides());
  return made;
}

Tensor zeros_on_cpu(const Tensor& tensor) {
  const auto size = at::detail::computeStorageNbytes(tensor.sizes(), tensor.strides(), tensor.itemsize());
  auto* allocator = c10::GetCPUAllocator();
  auto storage = c10::make_intrusive<c10::StorageImpl>(c10::StorageImpl::use_byte_size_t{}, size,
                                                       allocator->allocate(size), allocator, true);
  if (size > 0) memset(storage->mutable_data(), 0, size);
  auto made = cpu_tensor(std::move(storage), tensor);
  made.unsafeGetTensorImpl()->set_sizes_and_strides(tensor.sizes(), tensor.strides());
  return made;
}

Tensor copy_of_argument(const Tensor& tensor) {
  auto made = tensor.clone();
  if (tensor.unsafeGetTensorImpl()->is_wrapped_number()) made.unsafeGetTensorImpl()->set_wrapped_number(true);
  return made;
}

std::vector<Tensor> tensors_of(const IValue& value) {
  if (value.isTensor()) return {value.toTensor()};
  if (value.isTensorList()) return value.toTensorVector();
  return {};
}

// Warnings were given on the host, when the operator was planned.
struct NoWarnings final : c10::WarningHandler {
  NoWarnings() { c10::WarningUtils::set_warning_handler(this); }
  void process(const c10::Warning&) override {}
};

void launch_kernel(sim::Stream* stream, const char* name, std::function<void()> work) {
  const int threads = at::get_num_threads();
  sim::launch(stream, name, [threads, work = std::move(work)] {
    static thread_local NoWarnings no_warnings;
    if (at::get_num_threads() != threads) at::set_num_threads(threads);
    work();
  });
}

}  // namespace sim_torch
