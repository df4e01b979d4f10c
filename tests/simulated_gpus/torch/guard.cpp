// Devices, streams and events, as libtorch asks for them.

#include "cuda.h"

#include <c10/core/impl/DeviceGuardImplInterface.h>

namespace sim_torch {

sim::Stream* stream_of(const c10::Stream& stream) {
  if (stream.id() == 0) return sim::default_stream(stream.device_index());
  return reinterpret_cast<sim::Stream*>(stream.id());
}

namespace {

c10::Stream stream_of(sim::Stream* stream) {
  const int device = sim::device_of(stream);
  const auto id = stream == sim::default_stream(device) ? 0 : reinterpret_cast<c10::StreamId>(stream);
  return c10::Stream(c10::Stream::UNSAFE, cuda(device), id);
}

int index_of(Device device) {
  const int index = device.index() < 0 ? sim::current_device() : device.index();
  TORCH_CHECK(index < sim::device_count(), "CUDA error: invalid device ordinal");
  return index;
}

sim::Event* as_event(void* event) { return static_cast<sim::Event*>(event); }

// As libtorch around a call for an event: it sets the thread's device back, which starts a context on that device.
struct DeviceOfEvent {
  const int before = sim::current_device();
  explicit DeviceOfEvent(int device) { sim::set_device(device); }
  ~DeviceOfEvent() { sim::set_device(before); }
};

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return kCUDA; }
  DeviceIndex deviceCount() const noexcept override { return static_cast<DeviceIndex>(usable_devices()); }
  Device getDevice() const override { return cuda(sim::current_device()); }
  Device exchangeDevice(Device device) const override {
    Device before = getDevice();
    setDevice(device);
    return before;
  }
  void setDevice(Device device) const override {
    TORCH_CHECK(device.is_cuda() && device.index() < sim::device_count(), "CUDA error: invalid device ordinal");
    uncheckedSetDevice(device);
  }
  void uncheckedSetDevice(Device device) const noexcept override {
    if (device.index() >= 0) sim::set_device(device.index());
  }

  c10::Stream getStream(Device device) const override { return stream_of(sim::current_stream(index_of(device))); }
  c10::Stream getDefaultStream(Device device) const override {
    return stream_of(sim::default_stream(index_of(device)));
  }
  c10::Stream getNewStream(Device device, int) const override { return stream_of(sim::new_stream(index_of(device))); }
  c10::Stream getStreamFromGlobalPool(Device device, bool) const override { return getNewStream(device, 0); }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    return stream_of(sim::exchange_stream(sim_torch::stream_of(stream)));
  }
  // Also of the default stream, whose handle is null in CUDA: NCCL's stand-in need not know the thread's device.
  void* getStreamNativeHandle(const c10::Stream stream) const override { return sim_torch::stream_of(stream); }
  void record(void** event, const c10::Stream& stream, const DeviceIndex index,
              const c10::EventFlag flag) const override {
    TORCH_CHECK(index == -1 || index == stream.device_index(), "Event device index ", index,
                " does not match recording stream's device index ", stream.device_index(), ".");
    const DeviceOfEvent device(stream.device_index());
    if (*event == nullptr) *event = sim::new_event(flag == c10::EventFlag::BACKEND_DEFAULT);
    sim::record(as_event(*event), sim_torch::stream_of(stream));
  }
  void block(void* event, const c10::Stream& stream) const override {
    if (event != nullptr) sim::wait(sim_torch::stream_of(stream), as_event(event));
  }
  // cudaEventQuery uses the thread's device, whatever the event's.
  bool queryEvent(void* event) const override {
    if (event == nullptr) return true;
    sim::start_context(sim::current_device());
    return sim::is_done(as_event(event));
  }
  void destroyEvent(void* event, const DeviceIndex index) const noexcept override {
    if (event == nullptr) return;
    const DeviceOfEvent device(index);
    sim::free_event(as_event(event));
  }
  double elapsedTime(void* start, void* end, const DeviceIndex index) const override {
    const DeviceOfEvent device(index);
    TORCH_CHECK(start != nullptr && end != nullptr, "Both events must be recorded before calculating elapsed time.");
    const auto milliseconds = sim::elapsed_ms(as_event(start), as_event(end));
    TORCH_CHECK(milliseconds, "CUDA error: events without times, or device not ready");
    return *milliseconds;
  }

  void recordDataPtrOnStream(const c10::DataPtr& data, const c10::Stream& stream) const override {
    sim::record_use(data.get(), sim_torch::stream_of(stream));
  }
};

C10_REGISTER_GUARD_IMPL(CUDA, Guard);

}  // namespace

}  // namespace sim_torch
