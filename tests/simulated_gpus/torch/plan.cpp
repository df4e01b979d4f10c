// Plans: the shapes of an operator's results, found out before it runs.

#include "plan.h"

#include <sstream>
#include <unordered_map>

namespace sim_torch {

static Operator read_schema(const c10::OperatorHandle& op) {
  auto& schema = op.schema();
  auto& arguments = schema.arguments();
  Operator found;
  found.name = schema.name() + (schema.overload_name().empty() ? "" : "." + schema.overload_name());
  for (size_t i = 0; i < arguments.size(); i++) {
    if (arguments[i].type()->str().rfind("Generator", 0) == 0) found.generator = static_cast<int>(i);
  }
  for (auto& result : schema.returns()) {
    auto kind = result.type()->str();
    bool is_simulated = kind == "Tensor" || kind == "Tensor[]";
    int which = -1;
    if (auto* alias = result.alias_info()) {
      is_simulated &= alias->isWrite();  // views have kernels of their own
      for (size_t i = 0; alias->isWrite() && i < arguments.size(); i++) {
        auto* other = arguments[i].alias_info();
        if (other != nullptr && other->beforeSets() == alias->beforeSets()) which = static_cast<int>(i);
      }
    }
    is_simulated &= !op.hasTag(at::Tag::dynamic_output_shape) && !op.hasTag(at::Tag::data_dependent_output);
    TORCH_CHECK(is_simulated, found.name, " has no simulated kernel");
    found.returned.push_back(which);
  }
  return found;
}

const Operator& describe(const c10::OperatorHandle& op) {
  static std::mutex mutex;
  static auto* known = new std::unordered_map<const c10::FunctionSchema*, std::unique_ptr<Operator>>;
  std::lock_guard<std::mutex> lock(mutex);
  auto& found = (*known)[&op.schema()];
  if (found == nullptr) found = std::make_unique<Operator>(read_schema(op));
  return *found;
}

Shape shape_of(const Tensor& tensor) {
  if (!tensor.defined()) return {{}, {}, c10::ScalarType::Undefined, false};
  return {tensor.sizes().vec(), tensor.strides().vec(), tensor.scalar_type(), true};
}

void run_on_cpu(const c10::OperatorHandle& op, std::vector<IValue>& stack) {
  BareKernels bare;
  op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), &stack);
}

// Adds all that the shapes of results can depend on.
static void add_to_key(std::ostringstream& key, const IValue& value) {
  bool has_tensors = false;
  map_tensors(value, [&](const Tensor& tensor) {
    has_tensors = true;
    const bool is_number = tensor.unsafeGetTensorImpl()->is_wrapped_number();
    key << (tensor.is_cuda() ? "T" : is_number ? "W" : "C") << tensor.dtype() << tensor.sizes() << tensor.strides();
    return tensor;
  });
  // Of a number that is no shape only the type counts.
  if (value.isScalar() && !value.isInt() && !value.isBool()) {
    key << value.toScalar().type();
  } else if (!has_tensors && !value.isGenerator()) {
    key << value;
  }
  key << "|";
}

static Plan make_plan(const c10::OperatorHandle& op, const Operator& known, const std::vector<IValue>& arguments,
                      const at::Generator* generator) {
  Plan plan;
  std::vector<IValue> stack;
  for (auto& argument : arguments) {
    stack.push_back(argument.isDevice() ? IValue(c10::Device(c10::kCPU))
                                        : map_tensors(argument, [](const Tensor& tensor) {
                                            return tensor.is_cuda() ? zeros_on_cpu(tensor) : copy_of_argument(tensor);
                                          }));
  }
  if (generator != nullptr) stack[known.generator] = *generator;
  const auto given = stack;
  std::vector<Shape> before;
  for (auto& value : given) before.push_back(shape_of(value.isTensor() ? value.toTensor() : Tensor()));
  run_on_cpu(op, stack);
  for (size_t i = 0; i < given.size(); i++) {
    if (!before[i].is_defined) continue;
    auto after = shape_of(given[i].toTensor());
    if (after.sizes != before[i].sizes || after.strides != before[i].strides) {
      plan.resized.push_back({static_cast<int>(i), after});
    }
  }
  for (auto& result : stack) {
    plan.results.emplace_back();
    for (auto& tensor : tensors_of(result)) plan.results.back().push_back(shape_of(tensor));
  }
  return plan;
}

std::shared_ptr<const Plan> plan_for(const c10::OperatorHandle& op, const Operator& known,
                                     const std::vector<IValue>& arguments, const at::Generator* generator) {
  static std::mutex mutex;
  static auto* plans = new std::unordered_map<std::string, std::shared_ptr<const Plan>>;
  std::ostringstream text;
  text << known.name << ":";
  for (auto& argument : arguments) add_to_key(text, argument);
  const auto key = text.str();
  if (generator == nullptr) {
    std::lock_guard<std::mutex> lock(mutex);
    auto found = plans->find(key);
    if (found != plans->end()) return found->second;
  }
  auto plan = std::make_shared<const Plan>(make_plan(op, known, arguments, generator));
  std::lock_guard<std::mutex> lock(mutex);
  (*plans)[key] = plan;
  return plan;
}

}  // namespace sim_torch
