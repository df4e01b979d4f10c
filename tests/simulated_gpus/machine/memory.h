// Address space for the caching allocator.
#pragma once

#include "machine.h"

namespace sim {

// Returns memory of the arena, as cudaMalloc does. `size` in bytes.
char* take_segment(size_t size);

}  // namespace sim
