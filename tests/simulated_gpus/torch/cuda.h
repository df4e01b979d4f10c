// The device type CUDA of libtorch on the simulated machine: what the files of this stand-in share.
//
// An operator without a kernel of its own runs libtorch's CPU kernel on the same memory, later, on the thread of its
// stream (fallback.cpp). The shape of its result is found on the host at once (plan.cpp).
#pragma once

#include <mutex>
#include <optional>
#include <vector>

#include <ATen/Parallel.h>
#include <ATen/core/Generator.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>
#include <c10/core/Allocator.h>
#include <c10/core/GeneratorImpl.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include "../machine/machine.h"

namespace sim_torch {

using at::Tensor;
using c10::Device;
using c10::DeviceIndex;
using c10::IValue;
constexpr auto kCUDA = c10::DeviceType::CUDA;

inline Device cuda(int index) { return Device(kCUDA, static_cast<DeviceIndex>(index)); }
inline Device device_or_current(std::optional<Device> device) {
  return device && device->has_index() ? *device : cuda(sim::current_device());
}

// The CUDA that this libtorch is built for. A driver for an older one shows it no device.
constexpr long cuda_version = 13000;
inline int usable_devices() {
  return sim::setting("SIM_DRIVER_VERSION", cuda_version) < cuda_version ? 0 : sim::device_count();
}

sim::Stream* stream_of(const c10::Stream& stream);

extern c10::Allocator& device_memory;
extern c10::Allocator& pinned_memory;

// The CPU's generator, and so the CPU's random numbers, for a GPU.
struct Generator final : c10::GeneratorImpl {
  at::Generator on_cpu;
  Generator(DeviceIndex index, at::Generator on_cpu)
      : GeneratorImpl(cuda(index), c10::DispatchKeySet(c10::DispatchKey::CUDA)), on_cpu(std::move(on_cpu)) {}
  void set_current_seed(uint64_t seed) override { on_cpu.set_current_seed(seed); }
  void set_offset(uint64_t) override {}
  uint64_t get_offset() const override { return 0; }
  uint64_t current_seed() const override { return on_cpu.current_seed(); }
  uint64_t seed() override { return on_cpu.unsafeGetGeneratorImpl()->seed(); }
  void set_state(const c10::TensorImpl& state) override { on_cpu.unsafeGetGeneratorImpl()->set_state(state); }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override {
    return on_cpu.unsafeGetGeneratorImpl()->get_state();
  }
  Generator* clone_impl() const override { return new Generator(device().index(), on_cpu.clone()); }
};
const at::Generator& default_generator(int index);

// --- tensors ---

// Returns a CPU tensor over the memory of a GPU's tensor. It does not keep the memory: what is freed too early is read
// too late.
Tensor alias_on_cpu(const Tensor& tensor);
// Returns CPU zeros of the same sizes and strides.
Tensor zeros_on_cpu(const Tensor& tensor);
// Returns a copy of a CPU tensor that is an argument of an operator, with its value at the launch.
Tensor copy_of_argument(const Tensor& tensor);

// Calls `f` with every tensor in `value`; returns `value` with the results in their places.
template <typename F>
IValue map_tensors(const IValue& value, F f) {
  if (value.isTensor()) {
    auto& tensor = value.toTensor();
    return tensor.defined() ? IValue(f(tensor)) : value;
  }
  if (value.isTensorList()) {
    c10::List<Tensor> made;
    for (const Tensor& tensor : value.toTensorVector()) made.push_back(tensor.defined() ? f(tensor) : tensor);
    return made;
  }
  return value;
}

// The tensors of a result.
std::vector<Tensor> tensors_of(const IValue& value);

// --- work ---

// While it lives, operators of this thread run the CPU's kernels and nothing around them.
struct BareKernels {
  at::AutoDispatchBelowADInplaceOrView below_autograd;
  c10::impl::ExcludeDispatchKeyGuard without_autocast{c10::autocast_dispatch_keyset};
};

// The kernel of copies, between all devices.
Tensor& copy_(Tensor& self, const Tensor& source, bool non_blocking);

// Launches work that calls libtorch, with as many threads as the caller has. An exception ends the process.
void launch_kernel(sim::Stream* stream, const char* name, std::function<void()> work);

}  // namespace sim_torch
