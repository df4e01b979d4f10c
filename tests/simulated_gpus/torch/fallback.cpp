// The kernel of all operators without one of their own: libtorch's CPU kernel, on the thread of the stream.

#include <set>

#include <ATen/EmptyTensor.h>
#include <c10/core/DeviceGuard.h>
#include <dlfcn.h>

#include "plan.h"

namespace sim_torch {
namespace {

Tensor empty_on(const Shape& shape, Device device) {
  if (!shape.is_defined) return {};
  c10::DeviceGuard guard(device);
  return Tensor(at::detail::empty_strided_generic(shape.sizes, shape.strides, &device_memory,
                                                  c10::DispatchKeySet(c10::DispatchKey::CUDA), shape.dtype));
}

// Returns the device of all arguments, or throws libtorch's error if they are on several.
Device common_device(const Operator& known, const std::vector<IValue>& arguments) {
  const char* several = "Expected all tensors to be on the same device, but found at least two devices, ";
  std::optional<Device> device;
  for (auto& argument : arguments) {
    map_tensors(argument, [&](const Tensor& tensor) {
      if (!tensor.is_cuda()) return tensor;
      TORCH_CHECK(!device || *device == tensor.device(), several, *device, " and ", tensor.device(), "! (", known.name,
                  ")");
      device = tensor.device();
      return tensor;
    });
  }
  for (auto& argument : arguments) {
    map_tensors(argument, [&](const Tensor& tensor) {
      TORCH_CHECK(tensor.is_cuda() || tensor.dim() == 0 || !device, several, *device, " and cpu! (", known.name, ")");
      return tensor;
    });
    if (!device && argument.isDevice()) device = argument.toDevice();
  }
  return device_or_current(device);
}

// Pushes the results, and launches the work that fills them.
void run_later(const c10::OperatorHandle& op, const Operator& known, const Plan& plan, Device device,
               sim::Stream* stream, const std::vector<IValue>& arguments, std::vector<IValue> values,
               torch::jit::Stack* stack) {
  std::vector<std::vector<Tensor>> places;  // of the results that are new
  for (size_t i = 0; i < plan.results.size(); i++) {
    places.emplace_back();
    if (known.returned[i] >= 0) {
      stack->push_back(arguments[known.returned[i]]);
      continue;
    }
    std::vector<Tensor> made;
    for (auto& shape : plan.results[i]) {
      made.push_back(empty_on(shape, device));
      places.back().push_back(shape.is_defined ? alias_on_cpu(made.back()) : Tensor());
    }
    if (op.schema().returns()[i].type()->str() == "Tensor") {
      stack->push_back(made[0]);
    } else {
      stack->push_back(c10::List<Tensor>(at::ArrayRef<Tensor>(made)));
    }
  }
  const char* name = known.name.c_str();
  launch_kernel(stream, name, [=, device = device.index(), values = std::move(values),
                               places = std::move(places)]() mutable {
    run_on_cpu(op, values);
    BareKernels bare;
    for (size_t i = 0; i < places.size(); i++) {
      if (places[i].empty()) continue;
      auto results = tensors_of(values[i]);
      for (size_t k = 0; k < places[i].size(); k++) {
        if (!places[i][k].defined()) continue;
        places[i][k].copy_(results[k]);
        sim::spoil(name, device, places[i][k].data_ptr(), places[i][k].nbytes());
      }
    }
  });
}

// libtorch_cuda loads the library of these operators in the first call of one, without a lock, and then throws in the
// threads whose call comes meanwhile. Here every call comes too early, unless the program has loaded it.
void check_linear_algebra(const std::string& name) {
  static const std::set<std::string> needing = {"aten::linalg_qr", "aten::linalg_inv_ex", "aten::linalg_cholesky_ex",
                                                "aten::linalg_lu_factor_ex", "aten::_linalg_svd", "aten::_linalg_eigh"};
  if (needing.count(name) == 0) return;
  TORCH_CHECK(dlopen("libtorch_cuda_linalg.so", RTLD_NOW | RTLD_NOLOAD) != nullptr,
              "lazy wrapper should be called at most once");
}

}  // namespace

void fallback(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  auto& known = describe(op);
  check_linear_algebra(known.name);
  const auto count = static_cast<long>(op.schema().arguments().size());
  std::vector<IValue> arguments(stack->end() - count, stack->end());
  const Device device = common_device(known, arguments);
  c10::DeviceGuard guard(device);
  auto* stream = sim::current_stream(device.index());
  // The work draws from a copy of the generator as it is now; the host's own moves on at once, by the plan's run.
  std::optional<at::Generator> generator, copy;
  if (known.generator >= 0) {
    auto& given = arguments[known.generator];
    auto outer = given.isGenerator() ? given.toGenerator() : default_generator(device.index());
    TORCH_CHECK(outer.device().is_cuda(), "Expected a 'cuda' device type for generator but found 'cpu'");
    generator = static_cast<Generator*>(outer.unsafeGetGeneratorImpl())->on_cpu;
    copy = generator->clone();
  }
  const auto plan = plan_for(op, known, arguments, generator ? &*generator : nullptr);
  for (auto& [which, shape] : plan->resized) {
    auto& tensor = arguments[which].toTensor();
    tensor.resize_(shape.sizes);
    tensor.unsafeGetTensorImpl()->set_sizes_and_strides(shape.sizes, shape.strides);
  }
  std::vector<IValue> values;
  for (auto& argument : arguments) {
    values.push_back(argument.isDevice() ? IValue(c10::Device(c10::kCPU))
                                         : map_tensors(argument, [](const Tensor& tensor) {
                                             return tensor.is_cuda() ? alias_on_cpu(tensor) : copy_of_argument(tensor);
                                           }));
  }
  if (generator) values[known.generator] = *copy;
  torch::jit::drop(*stack, static_cast<size_t>(count));
  run_later(op, known, *plan, device, stream, arguments, std::move(values), stack);
}

}  // namespace sim_torch
