// Batch norm in evaluation mode: the CPU's kernel returns empty saved statistics, CUDA's the running mean and the
// inverse of the running standard deviation.

#include <ATen/ops/rsqrt.h>

#include "plan.h"

namespace sim_torch {

void bridge_results(const std::string& name, const std::vector<IValue>& arguments, std::vector<IValue>& results) {
  // native_batch_norm(input, weight, bias, running_mean, running_var, training, momentum, eps)
  const bool is_known = name == "aten::native_batch_norm" || name == "aten::_native_batch_norm_legit";
  if (!is_known || arguments.size() != 8 || !arguments[5].isBool() || arguments[5].toBool()) return;
  if (results[1].toTensor().numel() != 0) return;
  auto mean = arguments[3].toTensor(), variance = arguments[4].toTensor();
  BareKernels bare;
  results[1] = mean.clone();
  results[2] = at::rsqrt(variance.add(arguments[7].toDouble()));
}

}  // namespace sim_torch
