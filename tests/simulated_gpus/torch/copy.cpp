// Copies between GPUs, and between a GPU and the host.

#include "cuda.h"

namespace sim_torch {
namespace {

// What a copy does on its stream. It keeps host tensors; memory of GPUs it only refers to.
std::function<void()> copy_work(Tensor to, Tensor from) {
  return [to = std::move(to), from = std::move(from)]() mutable {
    BareKernels bare;
    to.copy_(from);
  };
}

// Runs after what both devices have launched, and before what they will launch.
void copy_between(const Tensor& to, const Tensor& from, sim::Stream* stream) {
  auto* there = sim::current_stream(to.device().index());
  auto* ready = sim::new_event(false);
  sim::record(ready, there);
  sim::wait(stream, ready);
  const char* name = "copy to another GPU";
  launch_kernel(stream, name, [=, device = from.device().index(), result = alias_on_cpu(to),
                               copy = copy_work(alias_on_cpu(to), alias_on_cpu(from))] {
    copy();
    sim::spoil(name, device, result.data_ptr(), result.nbytes());
  });
  sim::record(ready, stream);
  sim::wait(there, ready);
  sim::free_event(ready);
}

}  // namespace

Tensor& copy_(Tensor& self, const Tensor& source, bool non_blocking) {
  Tensor from = source.expand_as(self);  // throws the caller's error
  if (self.numel() == 0 || self.is_same(source)) return self;
  const auto device = source.is_cuda() ? source.device() : self.device();
  auto* stream = sim::current_stream(device.index());
  if (self.is_cuda() && source.is_cuda()) {
    if (self.device() == source.device()) {
      launch_kernel(stream, "copy", copy_work(alias_on_cpu(self), alias_on_cpu(from)));
    } else {
      copy_between(self, from, stream);
    }
  } else if (self.is_cuda()) {
    // Pageable memory is read before this returns, pinned memory when the copy runs.
    const bool is_pinned = sim::is_pinned(source.storage().data());
    launch_kernel(stream, "copy from the host", copy_work(alias_on_cpu(self), is_pinned ? from : from.clone()));
    if (!non_blocking) sim::synchronize(stream, "a copy from the host");
  } else {
    launch_kernel(stream, "copy to the host", copy_work(self.detach(), alias_on_cpu(from)));
    if (!non_blocking || !sim::is_pinned(self.storage().data())) sim::synchronize(stream, "a copy to the host");
  }
  return self;
}

}  // namespace sim_torch
