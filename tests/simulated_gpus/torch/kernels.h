// Kernels that are not the CPU's.
#pragma once

#include "cuda.h"

namespace sim_torch {

Tensor& copy_(Tensor& self, const Tensor& source, bool non_blocking);

}  // namespace sim_torch
