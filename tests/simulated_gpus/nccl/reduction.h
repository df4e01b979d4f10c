// Sums and other reductions over ranks.
#pragma once

#include <vector>

#include "types.h"

namespace sim_nccl {

// Reduces `count` elements of each rank, rank by rank. Results of half precision are rounded after each rank.
void reduce(DataType type, Reduction reduction, const std::vector<const char*>& ranks, size_t count, char* result);

}  // namespace sim_nccl
