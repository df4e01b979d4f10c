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
  void copy_data(void* to, const void* from, size_t size) const override {
    sim::synchronize_device(sim::current_device(), "copy_data");
    sim::Access access;
    memcpy(to, from, size);
  }
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
  bool isAvailable() const override { return sim_torch::usable_devices() > 0; }
  bool hasCUDA() const override { return sim_torch::usable_devices() > 0; }
  bool hasCUDART() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  int getNumGPUs() const override { return sim_torch::usable_devices(); }
  DeviceIndex deviceCount() const override { return static_cast<DeviceIndex>(sim_torch::usable_devices()); }
  DeviceIndex current_device() const override { return getCurrentDevice(); }
  DeviceIndex getCurrentDevice() const override { return static_cast<DeviceIndex>(sim::current_device()); }
  void setCurrentDevice(DeviceIndex index) const override { sim::set_device(index); }
  DeviceIndex exchangeDevice(DeviceIndex index) const override {
    const auto before = getCurrentDevice();
    sim::set_device(index);
    return before;
  }
  DeviceIndex maybeExchangeDevice(DeviceIndex index) const override { return exchangeDevice(index); }
  const Generator& getDefaultGenerator(DeviceIndex index) const override { return sim_torch::default_generator(index); }
  Generator getNewGenerator(DeviceIndex index) const override {
    return sim_torch::new_generator(index < 0 ? sim::current_device() : index);
  }
  Device getDeviceFromPtr(void* data) const override {
    const int device = sim::device_of_pointer(data);
    TORCH_CHECK(device >= 0,
                "The specified pointer resides on host memory and is not registered with any CUDA device.");
    return sim_torch::cuda(device);
  }
  bool isPinnedPtr(const void* data) const override { return sim::is_pinned(data); }
  Allocator* getPinnedMemoryAllocator() const override { return &sim_torch::pinned_memory; }
  Allocator* getCUDADeviceAllocator() const override { return &sim_torch::device_memory; }
  std::string showConfig() const override { return "a simulated CUDA"; }
  long versionCUDART() const override { return sim_torch::cuda_version; }
  void deviceSynchronize(DeviceIndex index) const override { sim::synchronize_device(index, "a device"); }
};
REGISTER_CUDA_HOOKS(CUDAHooks);

}  // namespace at
