// What libtorch asks of CUDA as a whole: allocators, generators, and the hooks interface.

#include "cuda.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/detail/CUDAHooksInterface.h>

namespace sim_torch {
namespace {

struct DeviceMemory final : c10::Allocator {
  c10::DataPtr allocate(size_t size) override {
    const int device = sim::current_device();
    if (size == 0) return {nullptr, nullptr, &sim::release, cuda(device)};
    void* memory = sim::allocate(device, sim::current_stream(device), size);
    return {memory, memory, &sim::release, cuda(device)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &sim::release; }
  void copy_data(void*, const void*, size_t) const override { TORCH_CHECK(false, "copy_data is not simulated"); }
};

struct PinnedMemory final : c10::Allocator {
  c10::DataPtr allocate(size_t size) override {
    void* memory = sim::allocate_pinned(size);
    return {memory, memory, &sim::release_pinned, c10::kCPU};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &sim::release_pinned; }
  void copy_data(void* to, const void* from, size_t size) const override { memcpy(to, from, size); }
};

DeviceMemory device_memory_;
PinnedMemory pinned_memory_;

at::Generator new_generator(int index) {
  return at::make_generator<Generator>(static_cast<DeviceIndex>(index), at::detail::createCPUGenerator());
}

}  // namespace

c10::Allocator& device_memory = device_memory_;
c10::Allocator& pinned_memory = pinned_memory_;
REGISTER_ALLOCATOR(kCUDA, &device_memory_);

const at::Generator& default_generator(int index) {
  static auto* all = [] {
    auto* made = new std::vector<at::Generator>;
    for (int i = 0; i < sim::device_count(); i++) made->push_back(new_generator(i));
    return made;
  }();
  return all->at(index < 0 ? sim::current_device() : index);
}

}  // namespace sim_torch

namespace at {

struct CUDAHooks final : CUDAHooksInterface {
  explicit CUDAHooks(CUDAHooksArgs) {}
  void init() const override {}
  bool isBuilt() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  const Generator& getDefaultGenerator(DeviceIndex index) const override { return sim_torch::default_generator(index); }
  Device getDeviceFromPtr(void* data) const override {
    const int device = sim::device_of_pointer(data);
    TORCH_CHECK(device >= 0, "The specified pointer resides on host memory.");
    return sim_torch::cuda(device);
  }
  Allocator* getPinnedMemoryAllocator() const override { return &sim_torch::pinned_memory; }
  long versionCUDART() const override { return sim_torch::cuda_version; }
};
REGISTER_CUDA_HOOKS(CUDAHooks);

}  // namespace at
