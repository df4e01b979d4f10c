// Operators that run libtorch's CPU kernel: what their schema says, and what they return for given arguments.
#pragma once

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include <ATen/core/dispatch/Dispatcher.h>

#include "cuda.h"

namespace sim_torch {

// What the schema of an operator says.
struct Operator {
  std::string name;
  int generator = -1;           // the index of the argument that is a generator, or -1
  std::vector<int> returned;    // by result: the index of the argument that it is, or -1
};
// Throws for views, which have kernels of their own, and where the shape of a result depends on the data.
const Operator& describe(const c10::OperatorHandle& op);

struct Shape {
  std::vector<int64_t> sizes, strides;
  c10::ScalarType dtype;
  bool is_defined;
};
Shape shape_of(const Tensor& tensor);

// What running an operator on arguments of certain shapes gives.
struct Plan {
  std::vector<std::vector<Shape>> results;     // one shape each, or those of a list
  std::vector<std::pair<int, Shape>> resized;  // arguments that take another shape
};
// Runs the CPU kernel on zeros, the first time that an operator meets such arguments. With a generator it does so every
// time, because the generator moves on at the launch.
std::shared_ptr<const Plan> plan_for(const c10::OperatorHandle& op, const Operator& known,
                                     const std::vector<IValue>& arguments, const at::Generator* generator);

// Replaces the arguments on the stack by the results of the CPU kernel.
void run_on_cpu(const c10::OperatorHandle& op, std::vector<IValue>& stack);

// The kernel of all operators without one of their own.
void fallback(const c10::OperatorHandle& op, torch::jit::Stack* stack);

}  // namespace sim_torch
